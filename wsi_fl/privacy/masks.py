"""Secure sums: pairwise masks hide each site's message and cancel when all messages are added.

Each pair of sites agrees on a secret (X25519), derives a key from it (HKDF with SHA-256) and from the key a stream of
numbers (ChaCha20). One site of the pair adds the stream modulo 2⁶⁴, the other subtracts it. A message cannot be told
from random numbers by anybody who lacks one of its site's streams; the sum of all messages is the sum of the values.
This is the first protocol of Bonawitz et al. (2017), without its repair, which is in `wsi_fl.privacy.survivors`: when a
site vanishes, the sum cannot be read, and the others begin again with fresh keys.

Two things are left to the caller. Whoever begins again with fewer sites needs fresh noise in shares for their number,
and accounts for it again: with the same noise, the difference of both sums would show the vanished site's values under
its own share alone, should its message have come to somebody after all. And public keys must come from the sites
themselves: whoever can hand a site keys of their own in the place of all others' can read that site's message, and the
noise of its own share is all that is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from wsi_fl.types import UsageError, WsiFlError

_PURPOSE = b"wsi-fl pairwise mask, version 1"
_OWN_PURPOSE = b"wsi-fl own mask, version 1"
_SEED_PURPOSE = b"wsi-fl mask key, version 1"
_KEY_BYTES = 32
_PRIME = 2**255 - 19
"""The field's prime: a public key is a number below it; a larger number would be another key written differently."""
_NONCE = bytes(16)
"""ChaCha20's counter and nonce start at zero, since no key makes two streams."""


class KeyPair:
    """Hold a site's keys for one sum; the private key can be used once.

    Two messages under one key would show the difference of their values.

    Args:
        private: an X25519 key; take `fresh` outside tests.

    Attributes:
        public: bytes[32], what the other sites are told.
    """

    def __init__(self, private: X25519PrivateKey) -> None:
        self._private = [private]
        self.public: bytes = private.public_key().public_bytes_raw()

    @classmethod
    def fresh(cls) -> KeyPair:
        """Draw a pair from the entropy of the operating system."""
        return cls(X25519PrivateKey.generate())

    @classmethod
    def of(cls, seed: bytes) -> KeyPair:
        """Return the pair that follows from a secret seed: whoever is shown the seed can tell whose it was."""
        return cls(X25519PrivateKey.from_private_bytes(_derived(seed, [_SEED_PURPOSE])))

    def spend(self) -> X25519PrivateKey:
        """Return the private key, and forget it.

        Raises:
            WsiFlError: when it has been used.
        """
        try:
            return self._private.pop()  # at once, so that two threads cannot both have it
        except IndexError:
            raise WsiFlError("these keys have masked a message; every sum needs fresh ones") from None


def masked(
    values: NDArray[np.int64], own: int, keys: KeyPair, publics: Sequence[bytes], context: bytes
) -> NDArray[np.uint64]:
    """Return uint64[n], the values under the masks of this site and every other; spends the keys.

    The masks of pairs in which this site comes first are added modulo 2⁶⁴, the others subtracted.

    Args:
        values: int64[n], below 2⁶³ / len(publics), so that a sum of them cannot run over.
        own: this site's place among the public keys.
        keys: this site's, fresh for this sum.
        publics: bytes[32] of each site that takes part, in the same order everywhere.
        context: what is summed: the run's name, the round, which quantity. Sites that do not mean the same sum get
            masks that do not cancel.

    Raises:
        WsiFlError: when fewer than two sites take part, a public key is not 32 bytes, occurs twice or is no good key,
            this site's is not in its place, the keys have been used, or values are not of the kind or too large.
        UsageError: when there is no context.
    """
    _check_publics(publics)
    _check_values(values, len(publics))
    if not 0 <= own < len(publics) or publics[own] != keys.public:
        raise WsiFlError(f"the public key of site {own} is not this site's own; were they mixed up?")
    if not context:
        raise UsageError("a masked sum needs a context: run, round and what is summed")
    private = keys.spend()
    # 1. values modulo 2⁶⁴: −1 is 2⁶⁴ − 1
    total = values.astype("<u8")
    for other in range(len(publics)):
        if other == own:
            continue
        # 2. the stream that this pair of sites alone can compute
        mask = _stream(_secret(private, publics[other], other), own, other, publics, context, len(values))
        # 3. added by one site of the pair and subtracted by the other, so that it cancels in the sum
        if own < other:
            total += mask
        else:
            total -= mask
    return total.astype(np.uint64, copy=False)


def opened(messages: Sequence[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """Return int64[n], the sum of the values behind all messages; noise of all 64 bits when one is missing.

    Args:
        messages: uint64[n] of every site that was among the public keys, in any order.

    Raises:
        WsiFlError: when there are fewer than two messages, or they are not of one length and kind.
    """
    if len(messages) < 2:
        raise WsiFlError(f"a masked sum has messages of two sites at least, not {len(messages)}")
    total = np.zeros(np.shape(messages[0]), np.uint64)
    for k, message in enumerate(messages):
        if message.dtype != np.uint64 or message.ndim != 1 or message.shape != total.shape:
            raise WsiFlError(
                f"message {k} of a masked sum is {message.dtype}{list(message.shape)}, "
                f"not uint64[{len(messages[0])}]"
            )
        total += message
    return total.view(np.int64)


def own_mask(seed: bytes, context: bytes, n: int) -> NDArray[np.uint64]:
    """Return uint64[n], a mask that follows from one site's seed alone; every sum needs a fresh one."""
    return _numbers(_derived(seed, [_OWN_PURPOSE, context]), n)


def _stream(
    secret: bytes, one: int, other: int, publics: Sequence[bytes], context: bytes, n: int
) -> NDArray[np.uint64]:
    """Return uint64[n], the mask of a pair, the same from both sides."""
    low, high = min(one, other), max(one, other)
    parts = [_PURPOSE, context, *(k.to_bytes(8, "little") for k in (len(publics), low, high))]
    return _numbers(_derived(secret, [*parts, publics[low], publics[high]]), n)


def _derived(secret: bytes, parts: Sequence[bytes]) -> bytes:
    """Return the key that follows from a secret for one purpose."""
    info = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(secret)


def _numbers(key: bytes, n: int) -> NDArray[np.uint64]:
    """Return uint64[n], the stream of a key."""
    return np.frombuffer(Cipher(ChaCha20(key, _NONCE), mode=None).encryptor().update(bytes(8 * n)), "<u8")


def _secret(private: X25519PrivateKey, public: bytes, site: int) -> bytes:
    """Return the secret that two sites share.

    Raises:
        WsiFlError: when the public key is of the curve's small subgroup: then everybody knows the secret.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WsiFlError(
            f"the public key of site {site} is degenerate: anybody could know its masks"
        ) from None


def _check_publics(publics: Sequence[bytes]) -> None:
    if len(publics) < 2:
        raise WsiFlError(f"a masked sum needs two sites at least, not {len(publics)}")
    seen: dict[bytes, int] = {}
    for site, public in enumerate(publics):
        if not isinstance(public, bytes) or len(public) != _KEY_BYTES:
            raise WsiFlError(f"the public key of site {site} is not {_KEY_BYTES} bytes")
        if int.from_bytes(public, "little") >= _PRIME:
            raise WsiFlError(
                f"the public key of site {site} is degenerate: it is not written in the canonical way"
            )
        if public in seen:
            raise WsiFlError(f"sites {seen[public]} and {site} have the same public key")
        seen[public] = site


def _check_values(values: NDArray[np.int64], n_sites: int) -> None:
    if values.dtype != np.int64 or values.ndim != 1 or not len(values):
        raise WsiFlError(f"values to be masked must be int64[n], not {values.dtype}{list(values.shape)}")
    if max(int(values.max()), -int(values.min())) >= 2**63 // n_sites:
        raise WsiFlError(
            f"values to be masked are too large for a sum of {n_sites} sites; take a smaller scale"
        )
