"""Random numbers of privacy guarantees: known answers of the cipher, and statistics against scipy."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import sqrt

import numpy as np
import pytest
import torch
from conftest import refused
from scipy.stats import chisquare, kstest

from wsi_fl.privacy import cipher
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import WsiFlError

SURE = 1e-4
"""p-values below it fail; keys are fixed where a test could fail by chance."""


def test_the_stream_is_aes_256_in_counter_mode():
    """The counter begins at 0, so that the first block is AES of 16 zero bytes: a known answer under a key of zeros."""
    first = CipherStream(bytes(32)).random_words(2).tobytes()
    assert first.hex() == "dc95c078a2408989ad48a21492842087"
    refused(lambda: CipherStream(bytes(16)), "32 bytes, not 16")


def test_fresh_streams_have_keys_of_the_operating_system(monkeypatch):
    asked = []
    monkeypatch.setattr(cipher.os, "urandom", lambda n: asked.append(n) or bytes([len(asked)] * n))
    one, other = CipherStream.from_entropy(), CipherStream.from_entropy()
    assert asked == [32, 32] and (one.random_words(4) != other.random_words(4)).all()


def test_every_bit_of_a_key_counts():
    start = CipherStream(bytes(32)).random_words(4)
    for bit in range(256):
        key = bytearray(32)
        key[bit // 8] ^= 1 << bit % 8
        assert (CipherStream(bytes(key)).random_words(4) != start).all(), bit


def test_streams_of_one_seed_agree_and_streams_of_other_seeds_are_independent():
    seeds = [(1,), (2,), (1, "a"), (1, "b"), (11,), (1, 1), ("1",), ("1", "1"), ("11",)]
    seen = {seed: tuple(CipherStream.from_seed(*seed).random_words(3).tolist()) for seed in seeds}
    assert len(set(seen.values())) == len(seeds)
    assert all(tuple(CipherStream.from_seed(*seed).random_words(3).tolist()) == words for seed, words in seen.items())


def test_no_number_is_drawn_twice_by_any_request():
    stream, seen = CipherStream.from_seed(3), []
    for n in (1, 7, 300, 2):
        seen += [*stream.random_words(n).tolist(), *(stream.randbelow(2**64) for _ in range(n))]
        stream.normal(n)
    assert len(set(seen)) == len(seen) == 620


@pytest.mark.parametrize(
    ("draw", "times"), [(lambda s: s.normal(2**10).tolist(), 400), (lambda s: [s.randbelow(2**40)], 4000)]
)
def test_threads_share_a_stream_and_each_number_is_drawn_once(draw, times):
    together, alone = CipherStream.from_seed(5), CipherStream.from_seed(5)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda _: draw(together), range(times)))
    assert sorted(chain(*parts)) == sorted(chain(*(draw(alone) for _ in range(times))))


def _draws(stream, answer):
    for draw in (lambda: stream.random_words(1), lambda: stream.randbelow(5), lambda: stream.normal(1)):
        try:
            answer.put(f"went on with {draw()}")
        except WsiFlError as error:
            answer.put(str(error))


def test_a_stream_refuses_to_go_on_in_a_fork():
    """Both processes would draw the same numbers, and two releases with one noise show their difference."""
    context, stream = multiprocessing.get_context("fork"), CipherStream.from_entropy()
    answer = context.SimpleQueue()
    child = context.Process(target=_draws, args=(stream, answer))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and all("make a fresh one" in answer.get() for _ in range(3))
    stream.random_words(1)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_has_no_copies(copied):
    """Two streams of one state would give the same numbers twice."""
    refused(lambda: copied(CipherStream.from_entropy()), "make a fresh one", error=WsiFlError)


@pytest.mark.parametrize("n", [1, 2, 3, 129, 256, 257])
def test_whole_numbers_below_a_bound_are_equally_likely(n):
    stream = CipherStream.from_seed(5)
    counts = np.bincount([stream.randbelow(n) for _ in range(60 * n + 5000)])
    assert len(counts) == n
    assert n == 1 or chisquare(counts).pvalue > SURE


def test_every_order_is_equally_likely():
    stream = CipherStream.from_seed(8)
    orders = [tuple(stream.permutation(4).tolist()) for _ in range(4800)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    assert len(counts) == 24 and chisquare(counts).pvalue > SURE
    assert stream.permutation(0).tolist() == [] and stream.permutation(9).dtype == np.int64


def test_uniform_numbers_are_uniform_to_the_last_bit():
    drawn = CipherStream.from_seed(1).uniform(200_000)
    assert drawn.min() >= 0 and drawn.max() < 1
    assert kstest(drawn, "uniform").pvalue > SURE
    last = (drawn * 2**53).astype(np.uint64) & np.uint64(255)
    assert chisquare(np.bincount(last.astype(int), minlength=256)).pvalue > SURE


@pytest.mark.parametrize("draw", [CipherStream.normal, CipherStream.draw_normal])
def test_normal_numbers_have_the_distribution_of_scipy(draw):
    drawn = draw(CipherStream.from_seed(2), 2**21)
    assert drawn.dtype == np.float64
    assert kstest(drawn, "norm").pvalue > SURE
    spread = 1 / sqrt(len(drawn))
    for power, moment, width in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert (drawn**power).mean() == pytest.approx(moment, abs=5 * sqrt(width) * spread), power


@pytest.mark.parametrize("draw", [CipherStream.normal, CipherStream.draw_normal])
def test_normal_numbers_are_on_no_grid(draw):
    """Bits far behind the point are as likely 0 as 1, and no two numbers agree."""
    drawn = draw(CipherStream.from_seed(7), 2**19)
    assert len(np.unique(drawn)) == len(drawn)
    middle = drawn[(np.abs(drawn) > 0.5) & (np.abs(drawn) < 1)]
    low = (np.abs(middle) * 2**53).astype(np.int64) & 63
    assert chisquare(np.bincount(low, minlength=64)).pvalue > SURE


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 2**15, 2**16, 2**17, 2**18])
def test_draws_are_uncorrelated(lag):
    """2¹⁶ apart lie the two numbers of a pair: cosine and sine of one angle, with one radius."""
    drawn = CipherStream.from_seed(11).normal(2**19)
    for power in (1, 2, 3):
        one, other = drawn[lag:] ** power, drawn[:-lag] ** power
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / sqrt(len(one)), power


def test_noise_is_added_in_float64_to_every_number_of_every_tensor():
    shapes = ((3, 5), (2**17 + 3,), (0,), (7,))
    start = [torch.full(shape, float(k)) for k, shape in enumerate(shapes)]
    start[-1] = start[-1].double()
    tensors = [one.clone() for one in start]
    CipherStream.from_seed(1).add_normal(tensors, 0.5)
    wanted = CipherStream.from_seed(1).normal(sum(one.numel() for one in tensors)) * 0.5
    for one, before in zip(tensors, start, strict=True):
        mine, wanted = wanted[: one.numel()], wanted[one.numel() :]
        exact = before.double().numpy().ravel() + mine
        assert one.dtype == before.dtype
        assert np.array_equal(one.numpy().ravel(), exact.astype(one.numpy().dtype))
