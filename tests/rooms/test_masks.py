"""Masked messages tell nothing alone, and their sum exactly."""

import hashlib
import hmac
import struct

import numpy as np
import pytest
from conftest import refused
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from wsi_fl.privacy.discrete import discrete_gaussian, quantised, share_sigma
from wsi_fl.privacy.masks import KeyPair, masked, opened
from wsi_fl.types import UsageError, WsiFlError

CONTEXT = b"run 7, round 3, gradients"
SURE = 1e-7
"""p-values below it fail; keys are random, so one run in a million may."""
N = 8000


def messages_of(values, context=CONTEXT):
    """What each site sends."""
    keys = [KeyPair.fresh() for _ in values]
    publics = [pair.public for pair in keys]
    return [masked(v, k, keys[k], publics, context) for k, v in enumerate(values)]


def counts(message):
    """How often each byte occurs at each of the eight places of a number: int64[8, 256]."""
    places = message.astype("<u8").view(np.uint8).reshape(-1, 8)
    return np.stack([np.bincount(place, minlength=256) for place in places.T])


def looks_random(message):
    return all(p > SURE for p in chisquare(counts(message), axis=1).pvalue)


def secret(seed=0, n=N, most=2**30):
    return np.random.default_rng(seed).integers(-most, most, n)


# the sum


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 70), st.integers(0, 2**32))
def test_the_sum_is_exact(n_sites, n, seed):
    most = 2**63 // n_sites
    values = list(np.random.default_rng(seed).integers(-most + 1, most, (n_sites, n)))
    values[0][0] = values[-1][0] = most - 1
    messages = messages_of(values)
    assert all(m.dtype == np.uint64 and m.shape == (n,) for m in messages)
    found = opened(messages[::-1])
    assert found.dtype == np.int64
    assert found.tolist() == [sum(map(int, column)) for column in zip(*values, strict=True)]


@pytest.mark.parametrize("end", [-1, 1])
def test_the_largest_values_do_not_run_over(end):
    values = [np.array([end * (2**63 // 3 - 1)])] * 3
    assert opened(messages_of(values)).tolist() == [3 * end * (2**63 // 3 - 1)]


def test_values_and_messages_are_left_as_they_were():
    values = [secret(k, 20) for k in range(3)]
    before = [v.copy() for v in values]
    messages = messages_of(values)
    sent = [m.copy() for m in messages]
    opened(messages)
    assert np.array_equal(values, before) and np.array_equal(messages, sent)


# what a message tells


def test_one_message_alone_is_uniform_whatever_it_hides():
    values = [np.zeros(N, np.int64), np.full(N, 2**60), secret()]
    messages = messages_of(values)
    assert all(map(looks_random, messages))
    assert not any(map(looks_random, (v.view(np.uint64) for v in values)))  # the test can tell


@pytest.mark.parametrize("n_sites", [2, 3, 5])
def test_all_messages_but_one_tell_nothing_of_any_value(n_sites):
    """So a sum that lost a site cannot be read either, by whoever adds up what arrived."""
    values = [secret(k) for k in range(n_sites)]
    messages = messages_of(values)
    assert not looks_random(opened(messages).view(np.uint64))
    for missing in range(n_sites):
        rest = [m for k, m in enumerate(messages) if k != missing]
        assert looks_random(sum(rest[1:], rest[0]))
        for told in (sum(rest[1:], rest[0]), *rest):
            for value in values:
                assert abs(np.corrcoef(told.view(np.int64), value)[0, 1]) < 6 / np.sqrt(N)


def test_sites_that_collude_learn_the_sum_of_the_others_and_nothing_of_each():
    private = [X25519PrivateKey.generate() for _ in range(4)]
    publics = [KeyPair(p).public for p in private]
    values, nothing = [secret(k) for k in range(4)], np.zeros(N, np.int64)
    messages = [masked(v, k, KeyPair(private[k]), publics, CONTEXT) for k, v in enumerate(values)]
    own = [masked(nothing, k, KeyPair(private[k]), publics, CONTEXT) for k in (2, 3)]
    assert np.array_equal(opened([*messages[:2], *own]), values[0] + values[1])
    for k in (0, 1):
        taken_off = messages[k] + own[0] + own[1]
        assert looks_random(taken_off)


def test_messages_of_two_sums_have_nothing_in_common():
    values = [secret(0), secret(1)]
    first, second = messages_of(values)[0], messages_of(values)[0]
    assert looks_random(first - second)


# what belongs together


def three_sites():
    private = [X25519PrivateKey.generate() for _ in range(3)]
    return private, [KeyPair(p).public for p in private]


@pytest.mark.parametrize("other", [b"run 7, round 4, gradients", b"run 7, round 3, gradients ", CONTEXT[:-1]])
def test_another_context_gives_garbage(other):
    private, publics = three_sites()
    values = [np.zeros(N, np.int64)] * 3
    messages = [
        masked(v, k, KeyPair(private[k]), publics, other if k == 1 else CONTEXT) for k, v in enumerate(values)
    ]
    assert looks_random(opened(messages).view(np.uint64))


@pytest.mark.parametrize("change", ["order", "key", "more sites"])
def test_other_public_keys_or_another_order_of_them_give_garbage(change):
    private, publics = three_sites()
    others, places = list(publics), [0, 1, 2]
    if change == "order":
        others, places = [publics[1], publics[0], publics[2]], [1, 0, 2]
    elif change == "key":
        others[2] = KeyPair.fresh().public
    else:
        others.append(KeyPair.fresh().public)
    values = np.zeros(N, np.int64)
    seen = [publics, others, publics]
    messages = [
        masked(values, places[k] if seen[k] is others else k, KeyPair(private[k]), seen[k], CONTEXT)
        for k in range(3)
    ]
    assert looks_random(opened(messages).view(np.uint64))


def test_keys_mask_one_message_only():
    keys, peer = KeyPair.fresh(), KeyPair.fresh()
    publics, values = [keys.public, peer.public], np.zeros(3, np.int64)
    masked(values, 0, keys, publics, CONTEXT)
    for context in (CONTEXT, b"the next round"):
        refused(lambda c=context: masked(values, 0, keys, publics, c), "fresh", error=WsiFlError)
    assert KeyPair.fresh().public != KeyPair.fresh().public and len(keys.public) == 32


# an independent reckoning


def chacha20_block(key, counter):
    """RFC 8439, 2.3, with a nonce of zeros."""
    start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, 0, 0, 0]
    x = list(start)

    def quarter(a, b, c, d):
        for i, j, k, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[i] = (x[i] + x[j]) & 0xFFFFFFFF
            mixed = x[k] ^ x[i]
            x[k] = ((mixed << turn) | (mixed >> (32 - turn))) & 0xFFFFFFFF

    for _ in range(10):
        for k in range(4):
            quarter(k, 4 + k, 8 + k, 12 + k)
        for k in range(4):
            quarter(k, 4 + (k + 1) % 4, 8 + (k + 2) % 4, 12 + (k + 3) % 4)
    return struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(x, start, strict=True)))


def mask_by_hand(private, public, parts, n):
    """X25519, HKDF by HMAC (RFC 5869) and ChaCha20."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    info = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    extracted = hmac.digest(bytes(32), shared, hashlib.sha256)
    key = hmac.digest(extracted, info + b"\x01", hashlib.sha256)
    stream = b"".join(chacha20_block(key, k) for k in range(-(-n // 8)))
    return np.frombuffer(stream[: 8 * n], "<u8")


def test_masks_are_those_of_the_standards():
    """So that another program can take part, and nothing is left out of what a key is derived from."""
    private, publics = three_sites()
    values, n = secret(3, 21), 21
    expected = values.view(np.uint64).copy()
    for other, low, high in ((0, 0, 1), (2, 1, 2)):
        places = [struct.pack("<Q", k) for k in (3, low, high)]
        parts = [b"wsi-fl pairwise mask, version 1", CONTEXT, *places, publics[low], publics[high]]
        mask = mask_by_hand(private[1], publics[other], parts, n)
        expected = expected - mask if other == 0 else expected + mask
    assert np.array_equal(masked(values, 1, KeyPair(private[1]), publics, CONTEXT), expected)


# refusals


def test_public_keys_that_are_no_good_are_refused():
    keys = KeyPair.fresh()
    order_8 = bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800")
    top_bit = keys.public[:-1] + bytes([keys.public[-1] | 128])
    wrong = {
        "same public key": keys.public,
        "not 32 bytes": b"short",
        "canonical": top_bit,
        "anybody": order_8,
    }
    cases = [*wrong.items(), ("anybody", bytes(32)), ("canonical", (2**255 - 19).to_bytes(32, "little"))]
    for words, public in cases:
        own = KeyPair.fresh() if words == "anybody" else keys
        publics = [own.public, public]
        refused(
            lambda o=own, p=publics: masked(np.zeros(2, np.int64), 0, o, p, CONTEXT), words, error=WsiFlError
        )


def test_what_does_not_fit_together_is_refused():
    keys, peer, zeros = KeyPair.fresh(), KeyPair.fresh(), np.zeros(2, np.int64)
    publics = [keys.public, peer.public]
    for own in (1, 2, -2):
        refused(
            lambda k=own: masked(zeros, k, keys, publics, CONTEXT), "not this site's own", error=WsiFlError
        )
    refused(lambda: masked(zeros, 0, keys, publics[:1], CONTEXT), "two sites at least", error=WsiFlError)
    refused(lambda: masked(zeros, 0, keys, publics, b""), "context", error=UsageError)
    for values in (np.zeros(2), np.zeros((2, 2), np.int64), np.zeros(0, np.int64), np.zeros(2, np.uint64)):
        refused(lambda v=values: masked(v, 0, keys, publics, CONTEXT), "must be int64[n]", error=WsiFlError)
    for value in (2**62, -(2**62), -(2**63)):
        values = np.array([0, value])
        refused(lambda v=values: masked(v, 0, keys, publics, CONTEXT), "too large", error=WsiFlError)
    masked(zeros, 0, keys, publics, CONTEXT)  # nothing above has used the keys


def test_messages_that_do_not_fit_together_are_refused():
    first = np.zeros(3, np.uint64)
    for second in (np.zeros(2, np.uint64), np.zeros(3, np.int64), np.zeros(3), np.zeros((3, 1), np.uint64)):
        refused(lambda m=second: opened([first, m]), "message 1", "uint64[3]", error=WsiFlError)
    for both in (np.zeros(3, np.int64), np.zeros((3, 1), np.uint64)):
        refused(lambda m=both: opened([m, m]), "message 0", error=WsiFlError)
    refused(lambda: opened([first]), "two sites at least", error=WsiFlError)


# both rooms together


def test_noise_once_over_sites_that_add_up():
    """Three sites, one of which may collude: the sum is there, with the noise that was asked for and half as much."""
    rng, scale, sigma = np.random.default_rng(5), 2.0**24, 0.5 * 2.0**24
    sums = rng.normal(size=(3, 4000)) * 10
    share = share_sigma(sigma, 3, 1)
    noisy = [quantised(s, scale) + discrete_gaussian(share, 4000) for s in sums]
    noise = opened(messages_of(noisy)) / scale - sums.sum(0)
    assert noise.std() == pytest.approx(0.5 * np.sqrt(3 / 2), rel=6 / np.sqrt(8000))
    assert abs(noise.mean()) < 6 * 0.62 / np.sqrt(4000)
