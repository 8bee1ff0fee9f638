"""Secure aggregation: pairwise masks hide each site's message and cancel in the sum of all messages.

Each pair of sites agrees on a secret (X25519), derives a key from it (HKDF with SHA-256) and from the key a stream of
numbers (ChaCha20). One site of the pair adds the stream modulo 2⁶⁴, the other subtracts it. Without all of a site's
streams its message is indistinguishable from random numbers; the sum of all messages is the sum of the values. This is
the first protocol of Bonawitz et al. (CCS 2017): when a site drops out, the sum cannot be read, and the others begin
again with fresh keys.

The caller has two duties. A new attempt with fewer sites needs fresh noise in shares for their number, and is charged
again: with the same noise, the difference of both sums would reveal the missing site's values under its own share
alone, should its message have arrived after all. And public keys must come from the sites themselves: an attacker who
replaces the keys of all other sites can read a site's message, protected by the noise of its own share alone.

One class makes sums with dropout recovery. Beside the pairwise masks, a message has a self mask of its site. The seeds
of both are shared among all (Shamir), so that t sites together can reconstruct either: the self mask of a site in the
sum, and the key of the pairwise masks of a site that dropped out before. Both together would reveal its message, so all
sites first agree on the survivors: each site votes once, t votes for one set let a site open its shares, and it does so
once. No two sets get t votes while 2 t > n + colluding. No server is trusted.

This is the protocol of Bonawitz et al. against active adversaries, with three differences. Votes go to every site
instead of to a server. A message is bound to its set of masking sites, and the caller counts it only where the sets are
the same. A site opens its own seed too, so that the others need not reconstruct it from shares. The caller provides
authenticated and confidential channels between sites.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from secrets import token_bytes

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from wsi_fl.types import UsageError, WsiFlError

_PAIR_PURPOSE = b"wsi-fl pairwise mask, version 1"
_SELF_PURPOSE = b"wsi-fl own mask, version 1"
_SEED_PURPOSE = b"wsi-fl mask key, version 1"
_KEY_BYTES = 32
_PRIME = 2**255 - 19
"""The field's prime: a public key is a number below it; a larger number would be another key written differently."""
_NONCE = bytes(16)  # ChaCha20's counter and nonce start at zero, since no key makes two streams


class KeyPair:
    """A site's keys for one sum. The private key is used once: two messages under one would show their difference."""

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = [private]
        self.public: bytes = private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> KeyPair:
        """Return a pair drawn from the entropy of the operating system."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> KeyPair:
        """Return the pair derived from a secret seed; the seed, once opened, identifies its site."""
        return cls(X25519PrivateKey.from_private_bytes(_derive_key(seed, [_SEED_PURPOSE])))

    def take_private_key(self) -> X25519PrivateKey:
        """Return the private key, and delete it here.

        Raises:
            WsiFlError: when it has been used.
        """
        try:
            return self._private.pop()  # at once, so that two threads cannot both have it
        except IndexError:
            raise WsiFlError("these keys have masked a message; every sum needs fresh ones") from None


def mask_values(
    values: NDArray[np.int64], place: int, keys: KeyPair, publics: Sequence[bytes], context: bytes
) -> NDArray[np.uint64]:
    """Return uint64[n], the values under the masks of this site and every other; uses up the keys.

    The masks of pairs in which this site comes first are added modulo 2⁶⁴, the others subtracted.

    Args:
        values: int64[n], below 2⁶³ / len(publics), so that a sum of them cannot overflow.
        place: this site's place among the public keys.
        keys: this site's, fresh for this sum.
        publics: bytes[32] of each participating site, in the same order everywhere.
        context: identifies the sum: the run's name, the round, the quantity. Masks of different contexts do not cancel.

    Raises:
        WsiFlError: when fewer than two sites take part, a public key is degenerate or not in its place, the keys have
            been used, or values are not of the type or too large.
        UsageError: when there is no context.
    """
    _check_publics(publics)
    if values.dtype != np.int64 or values.ndim != 1 or not len(values):
        raise WsiFlError(f"values to be masked must be int64[n], not {values.dtype}{list(values.shape)}")
    if max(int(values.max()), -int(values.min())) >= 2**63 // len(publics):
        raise WsiFlError(f"values to be masked are too large for a sum of {len(publics)} sites; take a smaller scale")
    if not 0 <= place < len(publics) or publics[place] != keys.public:
        raise WsiFlError(f"the public key of site {place} is not this site's own; were they mixed up?")
    if not context:
        raise UsageError("a masked sum needs a context: run, round and quantity")
    private = keys.take_private_key()
    # 1. values modulo 2⁶⁴: −1 is 2⁶⁴ − 1
    total = values.astype("<u8")
    for other in range(len(publics)):
        if other == place:
            continue
        # 2. the secret stream of this pair of sites
        mask = _pair_mask(_exchange_secret(private, publics[other], other), place, other, publics, context, len(values))
        # 3. added by one site of the pair and subtracted by the other, so that it cancels in the sum
        if place < other:
            total += mask
        else:
            total -= mask
    return total.astype(np.uint64, copy=False)


def sum_messages(messages: Sequence[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """Return int64[n], the sum of the values behind all messages; 64-bit noise when a message is missing.

    Messages, uint64[n] of every site among the public keys, come in any order.

    Raises:
        WsiFlError: when there are fewer than two messages, or they are not of one length and kind.
    """
    if len(messages) < 2:
        raise WsiFlError(f"a masked sum has messages of two sites at least, not {len(messages)}")
    total = np.zeros(np.shape(messages[0]), np.uint64)
    for k, message in enumerate(messages):
        if message.dtype != np.uint64 or message.ndim != 1 or message.shape != total.shape:
            raise WsiFlError(
                f"message {k} of a masked sum is {message.dtype}{list(message.shape)}, not uint64[{len(messages[0])}]"
            )
        total += message
    return total.view(np.int64)


def _self_mask(seed: bytes, context: bytes, n: int) -> NDArray[np.uint64]:
    """Return uint64[n], the mask derived from one site's seed; every sum needs a fresh seed."""
    return _stream_numbers(_derive_key(seed, [_SELF_PURPOSE, context]), n)


def _pair_mask(
    secret: bytes, site: int, other: int, publics: Sequence[bytes], context: bytes, n: int
) -> NDArray[np.uint64]:
    """Return uint64[n], the mask of a pair, the same from both sides."""
    low, high = min(site, other), max(site, other)
    parts = [_PAIR_PURPOSE, context, *(k.to_bytes(8, "little") for k in (len(publics), low, high))]
    return _stream_numbers(_derive_key(secret, [*parts, publics[low], publics[high]]), n)


def _derive_key(secret: bytes, parts: Sequence[bytes]) -> bytes:
    """Return the key derived from a secret for one purpose."""
    info = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(secret)


def _stream_numbers(key: bytes, n: int) -> NDArray[np.uint64]:
    return np.frombuffer(Cipher(ChaCha20(key, _NONCE), mode=None).encryptor().update(bytes(8 * n)), "<u8")


def _exchange_secret(private: X25519PrivateKey, public: bytes, site: int) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WsiFlError(f"the public key of site {site} is degenerate: its masks can be computed by others") from None


def _check_publics(publics: Sequence[bytes]) -> None:
    if len(publics) < 2:
        raise WsiFlError(f"a masked sum needs two sites at least, not {len(publics)}")
    sites_by_key: dict[bytes, int] = {}
    for site, public in enumerate(publics):
        if not isinstance(public, bytes) or len(public) != _KEY_BYTES:
            raise WsiFlError(f"the public key of site {site} is not {_KEY_BYTES} bytes")
        if int.from_bytes(public, "little") >= _PRIME:
            raise WsiFlError(f"the public key of site {site} is degenerate: it is not written in the canonical way")
        if public in sites_by_key:
            raise WsiFlError(f"sites {sites_by_key[public]} and {site} have the same public key")
        sites_by_key[public] = site


_SEED_BYTES = 16  # Shamir's field has 2¹²⁸ elements; a share is as long as a seed
_PARCEL_LENGTHS = [32, 32, _SEED_BYTES, _SEED_BYTES]
_PAIR_MASKS, _SELF_MASK = 0, 1  # a site's seeds: of its pairwise masks, and of its self mask
_STEP_NAMES = ("takes part", "masks its values", "votes", "opens its shares", "reads the sum")
_Parcel = tuple[bytes, ...]


class _SumVoid(WsiFlError):
    """An attempt that cannot be finished at this site; sent messages stay charged."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the sum is void: {why}; go on with train --resume")


def require_enough_sites(n_sites: int, colluding: int, dropouts: int) -> None:
    """Refuse a sum of too few sites to hide a part of it, or to agree on the survivors.

    Raises:
        UsageError: with the number of sites that is needed.
    """
    least = colluding + max(2 * dropouts, 1) + 1
    if n_sites < least:
        lost = f" and privacy.dropouts = {dropouts}" if dropouts else ""
        raise UsageError(
            f"privacy.noise = 'shared' with privacy.colluding = {colluding}{lost} needs {least} sites or more, not "
            f"{n_sites}: a sum of fewer hides nothing{', or the survivors cannot agree' if lost else ''}"
        )


def vote_threshold(n_sites: int, colluding: int) -> int:
    """Return t, the number of votes before a site opens its shares, and of shares that reconstruct a seed."""
    return (n_sites + colluding) // 2 + 1


class SecureSum:
    """One site's side of a secure sum with dropout recovery. Each step is taken once, in the order of the methods.

    Args:
        sites: all sites at the beginning, in the same order everywhere.
        colluding: number of sites that may collude.
        dropouts: number of sites that may drop out before the survivors are agreed on.
        context: identifies the sum, the same everywhere and of no other sum.

    Attributes:
        parcels: confidential message to each site: public keys of both seeds, and a share of each.
        participants, survivors: the masking sites, and the sites whose messages are in the sum, once agreed on.
    """

    def __init__(self, local_site: int, sites: Sequence[int], colluding: int, dropouts: int, context: bytes) -> None:
        require_enough_sites(len(sites), colluding, dropouts)
        self._local_site, self._sites, self._context = local_site, list(sites), context
        self._min_sites, self._threshold = len(sites) - dropouts, vote_threshold(len(sites), colluding)
        self._seeds = (token_bytes(_SEED_BYTES), token_bytes(_SEED_BYTES))
        keys = [KeyPair.from_seed(seed).public for seed in self._seeds]
        split = [Shamir.split(self._threshold, len(sites), seed) for seed in self._seeds]
        self.parcels: dict[int, _Parcel] = {
            site: (*keys, *(shares[place][1] for shares in split)) for place, site in enumerate(sites)
        }
        self._received = {local_site: self.parcels[local_site]}
        self.participants: list[int] = []
        self.survivors: list[int] = []
        self._step = 0

    def take_parcels(self, parcels: Mapping[int, _Parcel]) -> list[int]:
        """Keep well-formed parcels of other sites; return the sites whose parcels are here."""
        self._received |= {
            site: parcel for site, parcel in parcels.items() if [len(k) for k in parcel] == _PARCEL_LENGTHS
        }
        return sorted(self._received)

    def join(self, reports: Iterable[Collection[int]]) -> None:
        """Agree on the masking sites, given the senders of the parcels at each other site that reports them.

        Raises:
            WsiFlError: when too few are left, or this site is not among them; it has sent nothing yet.
        """
        self._advance_to(0)
        self.participants = self._find_common(self._received, reports)
        if self._local_site not in self.participants:
            raise WsiFlError(
                "this site's keys did not reach the others in time, and they sum without it; nothing was sent"
            )

    @property
    def sum_context(self) -> bytes:
        """The context of masks, messages and votes: the sum, and its masking sites."""
        return self._context + f" joined by {self.participants}".encode()

    def mask_values(self, values: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return uint64[n], the values int64[n] under both masks."""
        self._advance_to(1)
        paired = self._mask_pairs(values, self._local_site, self._seeds[_PAIR_MASKS])
        return paired + _self_mask(self._seeds[_SELF_MASK], self.sum_context, len(values))

    def vote_survivors(self, received: Collection[int], reports: Iterable[Collection[int]]) -> _Parcel:
        """Choose the survivors, and return this site's vote for all others.

        Args:
            received: senders of the messages at this site with its own context.
            reports: senders of the messages at each other site that reports them.
        """
        self._advance_to(2)
        self.survivors = self._find_common(set(received) & set(self.participants), reports)
        self._vote = (hashlib.sha256(self.sum_context + f" survived by {self.survivors}".encode()).digest(),)
        return self._vote

    def open_shares(self, votes: Mapping[int, _Parcel]) -> _Parcel:
        """Return one seed of this site and its share of one seed of each masking site, given the others' votes.

        All other shares are deleted.

        Raises:
            _SumVoid: when fewer than `vote_threshold` are for the same survivors.
        """
        self._advance_to(3)
        agree = {self._local_site} | {site for site in self._sites if votes.get(site) == self._vote}
        if len(agree) < self._threshold:
            raise _SumVoid(f"{len(agree)} sites agree on the messages received, and {self._threshold} must")
        seed = self._seeds[self._seed_kind(self._local_site)]
        shares = [self._received[site][2 + self._seed_kind(site)] for site in self.participants]
        self._received = {site: parcel[:2] for site, parcel in self._received.items()}
        del self._seeds, self.parcels
        return (seed, *shares)

    def compute_total(
        self, messages: Mapping[int, NDArray[np.uint64]], openings: Mapping[int, _Parcel]
    ) -> NDArray[np.int64]:
        """Return int64[n], the sum of the survivors' values.

        Args:
            messages: uint64[n] of each survivor.
            openings: seed and shares opened by each site, this one included.
        """
        self._advance_to(4)
        opening_lengths = [_SEED_BYTES] * (1 + len(self.participants))
        openings = {site: opening for site, opening in openings.items() if [len(k) for k in opening] == opening_lengths}
        seeds = {site: self._recover_seed(site, openings) for site in self.participants}
        parts = [messages[site] for site in self.survivors]
        n = len(parts[0])
        for site, seed in seeds.items():
            # a site in the sum has added its self mask; a site that dropped out left its pairwise masks uncancelled
            if self._seed_kind(site) == _SELF_MASK:
                parts.append(np.uint64(0) - _self_mask(seed, self.sum_context, n))
            else:
                parts.append(self._mask_pairs(np.zeros(n, np.int64), site, seed))
        return sum_messages(parts)

    def _find_common(self, received: Collection[int], reports: Iterable[Collection[int]]) -> list[int]:
        common = set(received).intersection(*reports)
        if len(common) < self._min_sites:
            raise _SumVoid(
                f"{len(common)} of {len(self._sites)} sites are left, and privacy.dropouts needs {self._min_sites}"
            )
        return [site for site in self._sites if site in common]

    def _seed_kind(self, site: int) -> int:
        """Return which of a site's two seeds is opened, as its index; the other never is."""
        return _SELF_MASK if site in self.survivors else _PAIR_MASKS

    def _mask_pairs(self, values: NDArray[np.int64], site: int, seed: bytes) -> NDArray[np.uint64]:
        """Return uint64[n], values under the pairwise masks of a site with all other masking sites."""
        publics = [self._received[other][_PAIR_MASKS] for other in self.participants]
        return mask_values(values, self.participants.index(site), KeyPair.from_seed(seed), publics, self.sum_context)

    def _recover_seed(self, site: int, openings: Mapping[int, _Parcel]) -> bytes:
        key, place = self._received[site][self._seed_kind(site)], 1 + self.participants.index(site)
        if site in openings and KeyPair.from_seed(openings[site][0]).public == key:
            return openings[site][0]
        shares = [(self._sites.index(opener) + 1, openings[opener][place]) for opener in sorted(openings)]
        if len(shares) < self._threshold:
            raise _SumVoid(f"{len(shares)} sites opened their shares, and {self._threshold} must")
        seed: bytes = Shamir.combine(shares[: self._threshold])
        if KeyPair.from_seed(seed).public != key:
            raise _SumVoid(f"the opened shares of site {site} do not fit its key")
        return seed

    def _advance_to(self, step: int) -> None:
        if step != self._step:
            raise WsiFlError(f"a site {_STEP_NAMES[step]} once in a sum, and in order; every sum needs fresh keys")
        self._step += 1
