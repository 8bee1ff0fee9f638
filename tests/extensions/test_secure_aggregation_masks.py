"""A single masked message reveals no value, and the sum of all is exact."""

import struct

import numpy as np
import pytest
from conftest import refused
from Crypto.Cipher import ChaCha20
from Crypto.Hash import SHA256
from Crypto.Protocol.KDF import HKDF
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from wsi_fl.oneshot.discrete_noise import STEPS_PER_UNIT, discrete_gaussian, quantize, share_sigma
from wsi_fl.oneshot.secagg import KeyPair, mask_values, sum_messages
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import UsageError, WsiFlError

CONTEXT = b"run 7, round 3, gradients"
SURE = 1e-7
"""p-values below it fail; keys are random, so one run in a million may."""
N = 8000


def pairs(n):
    """Return (private keys, public keys) of a number of sites."""
    private = [X25519PrivateKey.generate() for _ in range(n)]
    return private, [KeyPair(one).public for one in private]


def messages_of(values):
    """Return each site's message."""
    private, publics = pairs(len(values))
    return [mask_values(v, k, KeyPair(private[k]), publics, CONTEXT) for k, v in enumerate(values)]


def looks_random(message):
    """Return whether all bytes are equally frequent at each of the eight places of a number."""
    places = message.astype("<u8").view(np.uint8).reshape(-1, 8)
    counts = np.stack([np.bincount(place, minlength=256) for place in places.T])
    return all(p > SURE for p in chisquare(counts, axis=1).pvalue)


def secret(seed=0, n=N, most=2**30):
    return np.random.default_rng(seed).integers(-most, most, n)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 70), st.integers(0, 2**32), st.sampled_from([-1, 1]))
def test_the_sum_is_exact(n_sites, n, seed, end):
    """The largest values are included, and values and messages stay unchanged."""
    most = 2**63 // n_sites
    values = np.random.default_rng(seed).integers(-most + 1, most, (n_sites, n))
    values[:, 0] = end * (most - 1)
    given_ = values.copy()
    messages = messages_of(list(values))
    assert all(m.dtype == np.uint64 and m.shape == (n,) for m in messages)
    sent = [m.copy() for m in messages]
    found = sum_messages(messages[::-1])
    assert found.dtype == np.int64 and found.tolist() == [sum(map(int, column)) for column in values.T]
    assert np.array_equal(values, given_) and np.array_equal(messages, sent)


def test_a_masked_message_is_uniform_for_any_value_and_independent_of_another_sum():
    values = [np.zeros(N, np.int64), np.full(N, 2**60), secret()]
    messages = messages_of(values)
    assert all(map(looks_random, messages))
    assert not any(map(looks_random, (v.view(np.uint64) for v in values)))  # the test can tell
    assert looks_random(messages[2] - messages_of(values)[2])


@pytest.mark.parametrize("n_sites", [2, 3, 5])
def test_all_messages_but_one_reveal_no_value(n_sites):
    """An incomplete sum of messages is therefore unreadable."""
    values = [secret(k) for k in range(n_sites)]
    messages = messages_of(values)
    assert not looks_random(sum_messages(messages).view(np.uint64))
    for missing in range(n_sites):
        rest = [m for k, m in enumerate(messages) if k != missing]
        assert looks_random(sum(rest[1:], rest[0]))
        for told in (sum(rest[1:], rest[0]), *rest):
            for value in values:
                assert abs(np.corrcoef(told.view(np.int64), value)[0, 1]) < 6 / np.sqrt(N)


def test_sites_that_collude_learn_the_sum_of_the_others_and_nothing_of_each():
    private, publics = pairs(4)
    values, nothing = [secret(k) for k in range(4)], np.zeros(N, np.int64)
    messages = [mask_values(v, k, KeyPair(private[k]), publics, CONTEXT) for k, v in enumerate(values)]
    own = [mask_values(nothing, k, KeyPair(private[k]), publics, CONTEXT) for k in (2, 3)]
    assert np.array_equal(sum_messages([*messages[:2], *own]), values[0] + values[1])
    assert all(looks_random(one + own[0] + own[1]) for one in messages[:2])


OTHERS = {
    "next round": b"run 7, round 4, gradients",
    "longer": CONTEXT + b" ",
    "shorter": CONTEXT[:-1],
    "order": None,
    "key": None,
    "more sites": None,
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_context_or_other_public_keys_or_another_order_of_them_give_garbage(change):
    """One of three sites differs."""
    private, publics = pairs(3)
    place, theirs, context = 1, list(publics), OTHERS[change] or CONTEXT
    if change == "order":
        place, theirs = 0, [publics[1], publics[0], publics[2]]
    elif change == "key":
        theirs[2] = KeyPair.generate().public
    elif change == "more sites":
        theirs.append(KeyPair.generate().public)
    zeros = np.zeros(N, np.int64)
    messages = [mask_values(zeros, k, KeyPair(private[k]), publics, CONTEXT) for k in (0, 2)]
    messages.insert(1, mask_values(zeros, place, KeyPair(private[1]), theirs, context))
    assert looks_random(sum_messages(messages).view(np.uint64))


def test_keys_mask_one_message_only():
    keys, peer = KeyPair.generate(), KeyPair.generate()
    publics, values = [keys.public, peer.public], np.zeros(3, np.int64)
    mask_values(values, 0, keys, publics, CONTEXT)
    for context in (CONTEXT, b"the next round"):
        refused(lambda c=context: mask_values(values, 0, keys, publics, c), "fresh", error=WsiFlError)
    assert KeyPair.generate().public != KeyPair.generate().public and len(keys.public) == 32


def mask_of(private, public, parts, n):
    """Compute X25519, HKDF (RFC 5869) and ChaCha20 (RFC 8439, nonce 0), the latter two by another library."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    info = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    key = HKDF(shared, 32, b"", SHA256, context=info)
    return np.frombuffer(ChaCha20.new(key=key, nonce=bytes(12)).encrypt(bytes(8 * n)), "<u8")


def test_masks_are_those_of_the_standards():
    """Another program can thus take part, and every input of the key derivation is covered."""
    private, publics = pairs(3)
    values, n = secret(3, 21), 21
    expected = values.view(np.uint64).copy()
    for other, low, high in ((0, 0, 1), (2, 1, 2)):
        places = [struct.pack("<Q", k) for k in (3, low, high)]
        parts = [b"wsi-fl pairwise mask, version 1", CONTEXT, *places, publics[low], publics[high]]
        mask = mask_of(private[1], publics[other], parts, n)
        expected = expected - mask if other == 0 else expected + mask
    assert np.array_equal(mask_values(values, 1, KeyPair(private[1]), publics, CONTEXT), expected)


ORDER_8 = bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800")


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (lambda own: own, "same public key"),
        (lambda own: b"short", "not 32 bytes"),
        (lambda own: own[:-1] + bytes([own[-1] | 128]), "canonical"),
        (lambda own: (2**255 - 19).to_bytes(32, "little"), "canonical"),
        (lambda own: ORDER_8, "can be computed by others"),
        (lambda own: bytes(32), "can be computed by others"),
    ],
)
def test_invalid_public_keys_are_refused(peer, words):
    keys = KeyPair.generate()
    publics = [keys.public, peer(keys.public)]
    refused(lambda: mask_values(np.zeros(2, np.int64), 0, keys, publics, CONTEXT), words, error=WsiFlError)


def test_inconsistent_values_and_keys_are_refused():
    keys, zeros = KeyPair.generate(), np.zeros(2, np.int64)
    publics = [keys.public, KeyPair.generate().public]

    def no(words, values=zeros, own=0, publics=publics, context=CONTEXT, error=WsiFlError):
        refused(lambda: mask_values(values, own, keys, publics, context), words, error=error)

    for own in (1, 2, -2):
        no("not this site's own", own=own)
    no("two sites at least", publics=publics[:1])
    no("context", context=b"", error=UsageError)
    for values in (np.zeros(2), np.zeros((2, 2), np.int64), np.zeros(0, np.int64), np.zeros(2, np.uint64)):
        no("must be int64[n]", values)
    for value in (2**62, -(2**62), -(2**63)):
        no("too large", np.array([0, value]))
    mask_values(zeros, 0, keys, publics, CONTEXT)  # nothing above has used the keys


def test_inconsistent_messages_are_refused():
    first = np.zeros(3, np.uint64)
    for second in (np.zeros(2, np.uint64), np.zeros(3, np.int64), np.zeros(3), np.zeros((3, 1), np.uint64)):
        refused(lambda m=second: sum_messages([first, m]), "message 1", "uint64[3]", error=WsiFlError)
    for both in (np.zeros(3, np.int64), np.zeros((3, 1), np.uint64)):
        refused(lambda m=both: sum_messages([m, m]), "message 0", error=WsiFlError)
    refused(lambda: sum_messages([first]), "two sites at least", error=WsiFlError)


def test_noise_once_over_sites_that_add_up():
    """Three sites, one of which may collude: the sum is there, with the noise that was asked for and half as much."""
    rng, sigma = np.random.default_rng(5), 0.5 * STEPS_PER_UNIT
    sums = rng.normal(size=(3, 4000)) * 10
    share = share_sigma(sigma, 3, 1)
    noisy = [quantize(s) + discrete_gaussian(share, 4000, CipherStream.from_entropy()) for s in sums]
    noise = sum_messages(messages_of(noisy)) / STEPS_PER_UNIT - sums.sum(0)
    assert noise.std() == pytest.approx(0.5 * np.sqrt(3 / 2), rel=6 / np.sqrt(8000))
    assert abs(noise.mean()) < 6 * 0.62 / np.sqrt(4000)
