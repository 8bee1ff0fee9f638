"""Masked sums that can be read though sites go away: a message has two masks, and of each site one key is ever opened.

Beside the masks of `wsi_fl.privacy.masks`, which cancel among those who stay, a message has one of its site alone. The
seeds of both are shared among all (Shamir), so that t sites together can open either. For a site whose message is in
the sum that is its own mask; for one that went away before, the key of its masks with the others. Whoever had both
could read its message, so all first agree on who survives: each site votes once, t votes for one set let a site open
its shares, and it does so once. No two sets get t votes while 2 t > n + colluding. Nobody in the middle is trusted.

This is the protocol of Bonawitz et al. (CCS 2017) against active adversaries, with three differences. Votes go to
everybody instead of to a server. A message is bound to those whom its site masked it with, and the caller counts it
only where they are the same. A site opens its own seed too, which spares the others to put it together from shares.
The caller sees to it that what one site tells another comes from that site, and that no third one reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from secrets import token_bytes

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from numpy.typing import NDArray

from wsi_fl.privacy.masks import KeyPair, masked, opened, own_mask
from wsi_fl.types import UsageError, WsiFlError

_SEED_BYTES = 16
"""Shamir's field has 2¹²⁸ elements; a share is as long as a seed."""
_PARCEL = [32, 32, _SEED_BYTES, _SEED_BYTES]
_PAIRS, _OWN = 0, 1
"""Which of a site's seeds: that of its masks with the others, or that of its own mask."""
_STEPS = ("joins", "masks its values", "votes", "opens its shares", "reads the sum")
Pieces = tuple[bytes, ...]


class SumVoid(WsiFlError):
    """This attempt cannot be finished here; what was sent stays charged."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the sum is void: {why}; go on with train --resume")


def require_enough(n_sites: int, colluding: int, dropouts: int) -> None:
    """Raise where a sum of so few sites hides nothing, or those who stay are fewer than `needed_votes`.

    Raises:
        UsageError: with how many sites would do.
    """
    least = colluding + max(2 * dropouts, 1) + 1
    if n_sites < least:
        lost = f" and privacy.dropouts = {dropouts}" if dropouts else ""
        raise UsageError(
            f"privacy.noise = 'shared' with privacy.colluding = {colluding}{lost} needs {least} sites or more, not "
            f"{n_sites}: a sum of fewer hides nothing{', or those who stay cannot agree' if lost else ''}"
        )


def needed_votes(n_sites: int, colluding: int) -> int:
    """Return t, how many sites agree before one opens its shares, and how many shares open a seed.

    Example:
        >>> needed_votes(50, 1), needed_votes(4, 1)
        (26, 3)
    """
    return (n_sites + colluding) // 2 + 1


class Part:
    """One site's part in one sum. It takes each step once, in the order of the methods.

    Args:
        own: this site.
        present: all that begin, in the same order everywhere.
        colluding: how many may put together what they know.
        dropouts: how many may go away before the survivors are agreed on.
        context: what is summed, the same everywhere and of no other sum.

    Attributes:
        parcels: what each site is to be handed, and nobody else: public keys of both seeds, and a share of each.
        joined, survivors: who masks, and whose messages are in the sum, once that is agreed on.
    """

    def __init__(
        self, own: int, present: Sequence[int], colluding: int, dropouts: int, context: bytes
    ) -> None:
        require_enough(len(present), colluding, dropouts)
        self._own, self._present, self._context = own, list(present), context
        self._fewest, self._votes = len(present) - dropouts, needed_votes(len(present), colluding)
        self._seeds = (token_bytes(_SEED_BYTES), token_bytes(_SEED_BYTES))
        keys = [KeyPair.of(seed).public for seed in self._seeds]
        split = [Shamir.split(self._votes, len(present), seed) for seed in self._seeds]
        self.parcels: dict[int, Pieces] = {
            site: (*keys, *(shares[place][1] for shares in split)) for place, site in enumerate(present)
        }
        self._held = {own: self.parcels[own]}
        self.joined: list[int] = []
        self.survivors: list[int] = []
        self._step = 0

    def take(self, parcels: Mapping[int, Pieces]) -> list[int]:
        """Keep what other sites handed to this one, where it is what it should be; return whose parcels it holds."""
        self._held |= {site: one for site, one in parcels.items() if [len(k) for k in one] == _PARCEL}
        return sorted(self._held)

    def join(self, told: Iterable[Collection[int]]) -> None:
        """Agree on who masks.

        Args:
            told: whose parcels each other site holds, of those that say so.

        Raises:
            SumVoid: when too few are left.
            WsiFlError: when this site is not among them; it has sent nothing yet.
        """
        self._take_step(0)
        self.joined = self._common(self._held, told)
        if self._own not in self.joined:
            raise WsiFlError(
                "the others did not hear this site in time and add up without it; nothing was sent"
            )

    @property
    def bound(self) -> bytes:
        """What masks, messages and votes are bound to: the sum, and who has joined."""
        return self._context + f" joined by {self.joined}".encode()

    def masked(self, values: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return uint64[n], the values int64[n] under both masks."""
        self._take_step(1)
        paired, own = self._paired(values, self._own, self._seeds[_PAIRS]), self._seeds[_OWN]
        return paired + own_mask(own, self.bound, len(values))

    def vote(self, held: Collection[int], told: Iterable[Collection[int]]) -> Pieces:
        """Choose the survivors, and return what to tell everybody.

        Args:
            held: whose messages this site holds that are bound to what its own is.
            told: whose messages each other site holds, of those that say so.

        Raises:
            SumVoid: when too few are left.
        """
        self._take_step(2)
        self.survivors = self._common(set(held) & set(self.joined), told)
        self._vote = (hashlib.sha256(self.bound + f" survived by {self.survivors}".encode()).digest(),)
        return self._vote

    def opening(self, votes: Mapping[int, Pieces]) -> Pieces:
        """Return one seed of this site and its share of one of each site that joined; forget all others.

        Args:
            votes: of other sites.

        Raises:
            SumVoid: when fewer than `needed_votes` are for the same survivors.
        """
        self._take_step(3)
        agree = {self._own} | {site for site in self._present if votes.get(site) == self._vote}
        if len(agree) < self._votes:
            raise SumVoid(f"{len(agree)} sites agree on whose messages came, and {self._votes} must")
        seed = self._seeds[self._kind(self._own)]
        shares = [self._held[site][2 + self._kind(site)] for site in self.joined]
        self._held = {site: one[:2] for site, one in self._held.items()}
        del self._seeds, self.parcels
        return (seed, *shares)

    def total(
        self, messages: Mapping[int, NDArray[np.uint64]], openings: Mapping[int, Pieces]
    ) -> NDArray[np.int64]:
        """Return int64[n], the sum of the survivors' values.

        Args:
            messages: uint64[n] of each survivor.
            openings: what each site opened, this one too.

        Raises:
            SumVoid: when too few shares were opened, or they do not fit a site's key.
        """
        self._take_step(4)
        whole = [_SEED_BYTES] * (1 + len(self.joined))
        openings = {site: one for site, one in openings.items() if [len(k) for k in one] == whole}
        seeds = {site: self._opened(site, openings) for site in self.joined}
        parts = [messages[site] for site in self.survivors]
        n = len(parts[0])
        for site, seed in seeds.items():
            # whoever is in the sum has added its own mask, and whoever is gone none of those with the others
            if self._kind(site) == _OWN:
                parts.append(np.uint64(0) - own_mask(seed, self.bound, n))
            else:
                parts.append(self._paired(np.zeros(n, np.int64), site, seed))
        return opened(parts)

    def _common(self, held: Collection[int], told: Iterable[Collection[int]]) -> list[int]:
        """Return what this site and all who say so hold.

        Raises:
            SumVoid: when that is too few.
        """
        common = set(held).intersection(*told)
        if len(common) < self._fewest:
            raise SumVoid(
                f"{len(common)} of {len(self._present)} sites are left, and privacy.dropouts needs {self._fewest}"
            )
        return [site for site in self._present if site in common]

    def _kind(self, site: int) -> int:
        """Return which seed of a site is opened, and no other ever."""
        return _OWN if site in self.survivors else _PAIRS

    def _paired(self, values: NDArray[np.int64], site: int, seed: bytes) -> NDArray[np.uint64]:
        """Return uint64[n], values under the masks that a site has with all others that joined."""
        publics = [self._held[one][_PAIRS] for one in self.joined]
        return masked(values, self.joined.index(site), KeyPair.of(seed), publics, self.bound)

    def _opened(self, site: int, openings: Mapping[int, Pieces]) -> bytes:
        """Return the opened seed of a site: the one that it shows itself, or what t shares make.

        Raises:
            SumVoid: when there are fewer shares, or the seed is not that of the site's key.
        """
        key, place = self._held[site][self._kind(site)], 1 + self.joined.index(site)
        if site in openings and KeyPair.of(openings[site][0]).public == key:
            return openings[site][0]
        shares = [(self._present.index(one) + 1, openings[one][place]) for one in sorted(openings)]
        if len(shares) < self._votes:
            raise SumVoid(f"{len(shares)} sites opened their shares, and {self._votes} must")
        seed: bytes = Shamir.combine(shares[: self._votes])
        if KeyPair.of(seed).public != key:
            raise SumVoid(f"the shares that were opened of site {site} do not fit its key")
        return seed

    def _take_step(self, step: int) -> None:
        if step != self._step:
            raise WsiFlError(f"a site {_STEPS[step]} once in a sum, and in order; every sum needs fresh keys")
        self._step += 1
