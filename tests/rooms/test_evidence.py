"""Evidence: distances of sets against closed forms, and a verdict that knows copying from likeness."""

import numpy as np
import pytest
from scipy.linalg import sqrtm

from wsi_fl.synthesis.evidence import (
    COPY,
    compared,
    doubts,
    frechet_distance,
    kernel_distance,
    moved,
    over_usual,
    spread,
)


def normal(n, d, seed=0, shift=0.0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=(n, d)) * scale + shift).astype(np.float32)


def test_fid_is_the_formula_with_matrix_roots():
    a, b = normal(80, 6), normal(60, 6, 1, 0.5, 2.0)
    x, y = a.astype(float), b.astype(float)
    root = sqrtm(np.cov(x.T) @ np.cov(y.T)).real
    difference = x.mean(0) - y.mean(0)
    expected = difference @ difference + np.trace(np.cov(x.T) + np.cov(y.T) - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)


def test_kid_is_unbiased():
    """Zero on average between two samples of one distribution, however small; loops of the definition agree."""
    values = [kernel_distance(normal(12, 4, 2 * k), normal(15, 4, 2 * k + 1)) for k in range(300)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(300)
    assert kernel_distance(normal(50, 4), normal(50, 4, 1, 2.0)) > 1
    a, b = normal(5, 3), normal(4, 3, 1)

    def k(u, v):
        return (float(u @ v) / 3 + 1) ** 3

    within = [
        np.mean([k(x[i], x[j]) for i in range(len(x)) for j in range(len(x)) if i != j]) for x in (a, b)
    ]
    between = np.mean([k(u, v) for u in a for v in b])
    assert kernel_distance(a, b) == pytest.approx(sum(within) - 2 * between, rel=1e-5)


def distances(n, seed, low=0.1):
    return np.random.default_rng(seed).gamma(20, low / 20, n)


def test_a_generator_of_the_distribution_passes():
    found = [compared(distances(300, k), distances(200, k + 100), copy_below=0.01) for k in range(40)]
    failed = [one for one in found if one.reasons("nearest sample")]
    assert len(failed) <= 1
    assert doubts({"nearest sample": found[0]}, 200) == []
    assert 0.4 < found[0].nearer < 0.6


@pytest.mark.parametrize(
    ("memorised", "word"),
    [(1.0, "of pairs"), (0.15, "% of the training images"), (0.02, "met almost exactly")],
)
def test_memorising_all_some_or_a_few_is_caught(memorised, word):
    training = distances(300, 0)
    copied = round(memorised * 300)
    training[:copied] *= 0.05
    found = compared(training, distances(200, 1), copy_below=COPY * float(np.median(distances(200, 2))))
    reasons = doubts({"projection": found}, 200)
    assert any(word in reason for reason in reasons), reasons


def test_being_somewhat_nearer_to_all_training_images_is_caught():
    found = compared(distances(300, 0, low=0.08), distances(200, 1), copy_below=0.001)
    assert found.copies_training == 0
    assert found.nearer > 0.6
    assert doubts({"nearest sample": found}, 200)


def test_without_held_out_images_or_a_comparison_nothing_passes():
    assert "only 3 held-out" in doubts({}, 3)[0]
    assert doubts({}, 200)


def test_odd_images_that_are_held_out_by_chance_are_no_sign_of_copying():
    """What bare distances would have taken for memory: far from everything, as real images as from generated ones."""
    rng = np.random.default_rng(0)
    usual, odd = rng.uniform(0.1, 0.2, 300), rng.uniform(0.15, 0.3, 100)
    to_generator = [values * rng.uniform(0.9, 1.1, len(values)) for values in (usual, odd)]
    assert compared(*to_generator).reasons("bare")
    assert not compared(over_usual(to_generator[0], usual), over_usual(to_generator[1], odd)).reasons("over")


def test_spread_and_paired_shift():
    before = distances(60, 0)
    assert spread(before).q05 == pytest.approx(np.quantile(before, 0.05))
    up, down, same = moved(before + 0.01, before), moved(before - 0.01, before), moved(before, before)
    assert (up.raised, down.raised) == (1.0, 0.0)
    assert up.p < 1e-6
    assert down.p > 0.99
    assert same.p is None
    assert up.median_difference == pytest.approx(0.01)
