"""Masked sums that can be read though sites go away: two masks on each message, and of each site one key is ever opened.

Beside the masks of `wsi_fl.privacy.masks`, which cancel among those who stay, a message has one of its site alone. The
seeds of both are shared among all sites (Shamir), so that t of them together can open either. For a site whose message
is in the sum that is its own mask; for one that went away before, the key of its masks with the others. Whoever had
both could read its message, so all first agree on who survives: each site votes once, t votes for one set let a site
open its shares, and it does so once. No two sets have t votes each while 2 t > n + colluding and those who do not
collude vote once. Nobody who serves the others is needed or trusted.

This is the protocol of Bonawitz et al. (CCS 2017) against active adversaries, with three differences. Votes go to
everybody instead of to a server. A message is bound to those whom its site masked it with, and counts only for those
who masked with the same. A site opens its own seed too, which spares the others to put it together from shares.
The caller sees to it that what one site tells another comes from that site and can be read by no third one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_bytes

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from numpy.typing import NDArray

from wsi_fl.privacy.masks import KeyPair, masked, opened, own_mask
from wsi_fl.types import UsageError, WsiFlError

SEED_BYTES = 16
"""Shamir's field has 2¹²⁸ elements."""
_PAIRS, _OWN = 0, 1
"""Which of a site's seeds: that of its masks with the others, or that of its own mask."""
_STEPS = ("joins", "masks its values", "votes", "opens its shares", "reads the sum")


def require_enough(n_sites: int, colluding: int, dropouts: int) -> None:
    """Raise where a sum of so few sites would hide nothing, or could not be read once that many of them are gone.

    Those who stay must be `needed_votes`: n − dropouts > (n + colluding) / 2.

    Raises:
        UsageError: when it does not work, with how many sites would do.
    """
    least = colluding + max(2 * dropouts, 1) + 1
    if n_sites < least:
        gone = f" and privacy.dropouts = {dropouts}" if dropouts else ""
        raise UsageError(
            f"privacy.noise = 'shared' with privacy.colluding = {colluding}{gone} needs {least} sites or more, not "
            f"{n_sites}: a sum of fewer hides nothing{' or cannot be read' if dropouts else ''}"
        )


def needed_votes(n_sites: int, colluding: int) -> int:
    """Return t, how many sites must agree before one opens its shares, and how many shares open a seed.

    Example:
        >>> needed_votes(50, 1), needed_votes(4, 1)
        (26, 3)
    """
    return (n_sites + colluding) // 2 + 1


@dataclass(frozen=True)
class Parcel:
    """What one site hands to another one before it masks: public keys of both its seeds, and a share of each."""

    keys: tuple[bytes, bytes]
    shares: tuple[bytes, bytes]


@dataclass(frozen=True)
class Opening:
    """What a site shows once the survivors are agreed on.

    Attributes:
        seed: one of its own.
        shares: of one seed of each site that joined, in their order.
    """

    seed: bytes
    shares: tuple[bytes, ...]


class Part:
    """One site's part in one sum. It takes each step once and in order: no method can be called twice.

    Args:
        own: this site.
        present: all that begin, in the same order everywhere.
        colluding: how many may put together what they know.
        dropouts: how many may go away until the survivors are agreed on.
        context: what is summed, the same everywhere and of no other sum.
    """

    def __init__(
        self, own: int, present: Sequence[int], colluding: int, dropouts: int, context: bytes
    ) -> None:
        require_enough(len(present), colluding, dropouts)
        self._own, self._present, self._context = own, list(present), context
        self._fewest, self._votes = len(present) - dropouts, needed_votes(len(present), colluding)
        self._seeds = (token_bytes(SEED_BYTES), token_bytes(SEED_BYTES))
        keys = (KeyPair.of(self._seeds[_PAIRS]).public, KeyPair.of(self._seeds[_OWN]).public)
        split = [Shamir.split(self._votes, len(present), seed) for seed in self._seeds]
        self.parcels = {
            site: Parcel(keys, (one, other))
            for site, (_, one), (_, other) in zip(self._present, *split, strict=True)
        }
        """What each site is to be handed; nobody else may see it."""
        self._held = {own: self.parcels[own]}
        self.joined: list[int] = []
        """Who masks, once that is agreed on, in order."""
        self.survivors: list[int] = []
        """Whose messages are in the sum, once this site has voted for them."""
        self._step = 0

    def take(self, parcels: Mapping[int, Parcel]) -> list[int]:
        """Keep the parcels that other sites handed to this one, and return whose it holds."""
        self._held |= parcels
        return sorted(self._held)

    def join(self, told: Iterable[Collection[int]]) -> None:
        """Agree on who masks: those whose parcels everybody holds.

        Args:
            told: whose parcels the others hold, of each that says so.

        Raises:
            WsiFlError: when too few are left, or this site is not among them; nothing has been sent yet.
        """
        self._take_step(0)
        self.joined = self._common(self._held, told)
        if self._own not in self.joined:
            raise WsiFlError("this site was not heard in time, so the sum is of the others alone; nothing was sent")

    @property
    def bound(self) -> bytes:
        """What masks, messages and votes are bound to: the sum, and who has joined."""
        return self._context + b" with " + ",".join(map(str, self.joined)).encode()

    def masked(self, values: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return uint64[n], the values under both masks.

        Args:
            values: int64[n], as `masks.masked` takes them.
        """
        self._take_step(1)
        return self._paired(values, self._own, self._seeds[_PAIRS]) + own_mask(
            self._seeds[_OWN], self.bound, len(values)
        )

    def vote(self, held: Collection[int], told: Iterable[Collection[int]]) -> bytes:
        """Choose the survivors, once and for all, and return what to tell everybody: the vote for them.

        Args:
            held: whose messages this site holds.
            told: whose messages the others hold, of each that says so.

        Raises:
            WsiFlError: when too few are left.
        """
        self._take_step(2)
        self.survivors = self._common(set(held) & set(self.joined), told)
        self._vote = hashlib.sha256(self.bound + b" of " + ",".join(map(str, self.survivors)).encode()).digest()
        return self._vote

    def opening(self, votes: Mapping[int, bytes]) -> Opening:
        """Return what this site shows, when enough others voted as it did, and forget the rest.

        Args:
            votes: of the others, by site.

        Raises:
            WsiFlError: when fewer than `needed_votes` are for the same survivors.
        """
        self._take_step(3)
        agree = {self._own} | {site for site in self._present if votes.get(site) == self._vote}
        if len(agree) < self._votes:
            raise WsiFlError(
                f"the sum is void: {len(agree)} sites agree on whose messages came, {self._votes} must; go on with "
                "train --resume"
            )
        shares = tuple(self._held[site].shares[self._kind(site)] for site in self.joined)
        seed = self._seeds[self._kind(self._own)]
        del self._seeds, self.parcels
        self._held = {site: Parcel(parcel.keys, (b"", b"")) for site, parcel in self._held.items()}
        return Opening(seed, shares)

    def total(
        self, messages: Mapping[int, NDArray[np.uint64]], openings: Mapping[int, Opening]
    ) -> NDArray[np.int64]:
        """Return int64[n], the sum of the survivors' values.

        Args:
            messages: uint64[n] of each survivor, by site.
            openings: of each site that showed one, this one's too.

        Raises:
            WsiFlError: when too few shares were shown, or they do not fit a site's key.
        """
        self._take_step(4)
        seeds = {site: self._opened(site, openings) for site in self.joined}
        n = len(messages[self.survivors[0]])
        nothing = np.zeros(n, np.int64)
        parts = [messages[site] for site in self.survivors]
        # 1. whoever is gone would have added its masks with the others
        parts += [self._paired(nothing, site, seeds[site]) for site in self.joined if self._kind(site) == _PAIRS]
        # 2. whoever is there has added its own mask
        parts += [-own_mask(seeds[site], self.bound, n).astype(np.uint64) for site in self.survivors]
        return opened(parts)

    def _common(self, held: Collection[int], told: Iterable[Collection[int]]) -> list[int]:
        """Return what all hold who say so.

        Raises:
            WsiFlError: when that is too few.
        """
        common = set(held).intersection(*told)
        if len(common) < self._fewest:
            raise WsiFlError(
                f"the sum is void: {len(common)} of {len(self._present)} sites are left, it needs {self._fewest} "
                "(privacy.dropouts); go on with train --resume"
            )
        return [site for site in self._present if site in common]

    def _kind(self, site: int) -> int:
        """Return which seed of a site is to be opened."""
        return _OWN if site in self.survivors else _PAIRS

    def _paired(self, values: NDArray[np.int64], site: int, seed: bytes) -> NDArray[np.uint64]:
        """Return uint64[n], values under the masks that a site has with all others that joined."""
        publics = [self._held[one].keys[_PAIRS] for one in self.joined]
        return masked(values, self.joined.index(site), KeyPair.of(seed), publics, self.bound)

    def _opened(self, site: int, openings: Mapping[int, Opening]) -> bytes:
        """Return the seed of a site that was opened: the one that it shows itself, or that of shares.

        Raises:
            WsiFlError: when there are too few shares, or the seed is not that of its key.
        """
        key = self._held[site].keys[self._kind(site)]
        if site in openings and KeyPair.of(openings[site].seed).public == key:
            return openings[site].seed
        place = self.joined.index(site)
        shares = [
            (self._present.index(one) + 1, opening.shares[place])
            for one, opening in sorted(openings.items())
            if len(opening.shares) == len(self.joined)
        ][: self._votes]
        if len(shares) < self._votes:
            raise WsiFlError(
                f"the sum is void: {len(shares)} sites opened their shares, {self._votes} must; go on with "
                "train --resume"
            )
        seed: bytes = Shamir.combine(shares)
        if KeyPair.of(seed).public != key:
            raise WsiFlError(
                f"the sum is void: the shares of site {site}'s key do not fit it; go on with train --resume"
            )
        return seed

    def _take_step(self, step: int) -> None:
        if step != self._step:
            raise WsiFlError(f"a site {_STEPS[step]} once in a sum, and in order; every sum needs fresh keys")
        self._step += 1
