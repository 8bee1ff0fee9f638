"""Stain: a few numbers per site, their release, and patches shown in another laboratory's stain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_fl.demo.phantom import paint_slide, plan_slides
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.means import noisy_mean
from wsi_fl.slides.stains import macenko
from wsi_fl.slides.stains.macenko import Dyes, dyes_of, patch_dyes, redyed
from wsi_fl.slides.stains.methods import restained
from wsi_fl.slides.stains.reinhard import N_MOMENTS, Stain, stain_of, tissue_moments
from wsi_fl.types import WsiFlError


@pytest.fixture(scope="module")
def patches():
    picture = paint_slide(plan_slides(1, 1, 1024, 0)[0])
    tiles = picture[:1024, :1024].reshape(16, 64, 16, 64, 3).swapaxes(1, 2).reshape(-1, 64, 64, 3)
    return tiles[tiles.mean((1, 2, 3)) < 200][:40]


def noise(seed=0):
    return CipherStream.seeded(seed)


def test_moments_give_the_mean_and_spread_of_the_tissue(patches):
    from skimage.color import rgb2lab

    lab = rgb2lab(patches[0]).reshape(-1, 3)
    tissue = lab[lab[:, 0] < 88]
    stain = stain_of(tissue_moments(patches[:1])[0])
    np.testing.assert_allclose(stain.mean, tissue.mean(0), atol=1e-4)
    np.testing.assert_allclose(stain.sd, np.maximum(tissue.std(0), 1), atol=1e-3)


def test_each_row_depends_on_its_own_patch_alone(patches):
    together = tissue_moments(patches[:8])
    other = patches[:8].copy()
    other[3] = 0
    changed = tissue_moments(other)
    assert together.shape == (8, N_MOMENTS)
    assert (np.delete(together, 3, 0) == np.delete(changed, 3, 0)).all()
    assert (together[3] != changed[3]).any()


def test_a_patch_without_tissue_counts_as_neutral():
    white = np.full((2, 32, 32, 3), 245, np.uint8)
    assert (tissue_moments(white) == 0).all()


def test_restaining_to_another_stain_gives_that_stain(patches):
    own = stain_of(tissue_moments(patches).mean(0))
    other = Stain(tuple(np.add(own.mean, (-4, 5, 4))), tuple(np.array(own.sd) * (1.0, 1.2, 1.1)))
    shown = stain_of(tissue_moments(restained(patches, own, other)).mean(0))
    before = np.abs(np.array(own.mean) - other.mean).sum()
    assert np.abs(np.array(shown.mean) - other.mean).sum() < 0.3 * before


def test_restaining_to_the_own_stain_changes_next_to_nothing(patches):
    own = stain_of(tissue_moments(patches).mean(0))
    assert np.abs(restained(patches, own, own).astype(int) - patches).max() <= 1


def test_noise_in_a_spread_changes_contrast_at_most_twofold():
    pixels = np.random.default_rng(0).integers(60, 180, (1, 32, 32, 3)).astype(np.uint8)
    own, wild = Stain((50, 10, -10), (10, 5, 5)), Stain((50, 10, -10), (1, 400, 5))
    most = Stain((50, 10, -10), (5, 10, 5))
    assert np.array_equal(restained(pixels, own, wild), restained(pixels, own, most))


def test_background_stays_white():
    white = np.full((32, 32, 3), 250, np.uint8)
    other = Stain((40, 40, -40), (20, 10, 10))
    assert np.abs(restained(white, Stain((65, 15, -12), (16, 6, 5)), other).astype(int) - 250).max() <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3), st.integers(2, 12))
def test_removing_a_record_moves_the_sum_by_at_most_the_clip(seed, clip, n):
    """The sensitivity that the accountant counts on; without noise the mean times n is the sum of clipped rows."""
    values = np.random.default_rng(seed).normal(0, 2, (n, 6))
    whole, _, _ = noisy_mean(values, clip=clip, sigma=0.0, noise=noise())
    less, _, _ = noisy_mean(values[1:], clip=clip, sigma=0.0, noise=noise())
    assert np.linalg.norm(whole * n - less * (n - 1)) <= clip * (1 + 1e-9)


def test_removing_a_patient_moves_the_sum_by_at_most_the_clip():
    values = np.random.default_rng(1).normal(0, 5, (9, 6))
    units = np.array(list("aaabbcccc"))
    whole, _, n = noisy_mean(values, clip=0.5, sigma=0.0, noise=noise(), units=units)
    kept = units != "a"
    less, _, m = noisy_mean(values[kept], clip=0.5, sigma=0.0, noise=noise(), units=units[kept])
    assert (n, m) == (3, 2)
    assert np.linalg.norm(whole * n - less * m) <= 0.5 * (1 + 1e-9)


def test_the_noise_is_what_the_mechanism_says():
    values = np.zeros((50, 6))
    drawn = np.array([noisy_mean(values, clip=2.0, sigma=3.0, noise=noise(seed))[0] for seed in range(400)])
    assert drawn.std() * 50 == pytest.approx(6.0, rel=0.05)
    _, mechanism, n = noisy_mean(values, clip=2.0, sigma=3.0, noise=noise())
    assert mechanism == Mechanism(3.0, 2.0, 1.0, 1) and n == 50
    # Mironov (2017): Rényi divergence α / (2σ²), and α → ε at δ by log(1 / δ) / (α − 1)
    best = min(order / 18 + np.log(1e5) / (order - 1) for order in range(2, 64))
    assert epsilon([mechanism], 1e-5) <= best + 1e-6


def test_no_record_no_mean():
    with pytest.raises(WsiFlError, match="at least one record"):
        noisy_mean(np.zeros((0, 6)), clip=1.0, sigma=1.0, noise=noise())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_no_number_counts_as_nothing(value):
    values = np.array([[0.3, 0.4], [value, 0.0]])
    mean, _, n = noisy_mean(values, clip=1.0, sigma=0.0, noise=noise())
    assert (mean.tolist(), n) == (pytest.approx([0.15, 0.2]), 2)


OTHER = Dyes((0.75, 0.62, 0.23), (0.10, 0.92, 0.38), (2.4, 1.3))


def test_macenko_finds_the_dyes_that_tissue_was_painted_with():
    rng = np.random.default_rng(0)
    amounts = rng.gamma(1.2, 0.5, (4, 96, 96, 2)) * (1.0, 0.6)
    amounts[rng.random(amounts.shape) < 0.2] = 0
    basis = np.array([OTHER.haematoxylin, OTHER.eosin])
    basis /= np.linalg.norm(basis, axis=1, keepdims=True)
    pixels = (256 * np.exp(-(amounts @ basis)) - 1).round().clip(0, 255).astype(np.uint8)
    found = dyes_of(patch_dyes(pixels).mean(0))
    np.testing.assert_allclose([found.haematoxylin, found.eosin], basis, atol=0.06)
    expected = np.percentile(amounts.reshape(-1, 2), 99, axis=0)
    np.testing.assert_allclose(found.strength, expected, rtol=0.25)


def test_macenko_rows_depend_on_their_own_patch_and_blank_ones_are_the_reference(patches):
    together, other = patch_dyes(patches[:6]), patches[:6].copy()
    other[2] = 245
    changed = patch_dyes(other)
    assert together.shape == (6, macenko.N_NUMBERS)
    assert (np.delete(together, 2, 0) == np.delete(changed, 2, 0)).all()
    assert (changed[2] == 0).all() and together[2].any()
    assert np.isfinite(patch_dyes(np.random.default_rng(0).integers(0, 256, (3, 9, 9, 3), np.uint8))).all()


def test_redyeing_gives_the_other_dyes_and_their_own_change_nothing(patches):
    own = dyes_of(patch_dyes(patches).mean(0))
    assert np.abs(redyed(patches, own, own).astype(int) - patches).max() <= 1
    shown = dyes_of(patch_dyes(redyed(patches, own, OTHER)).mean(0))
    before = np.abs(np.subtract(own.haematoxylin, OTHER.haematoxylin)).sum()
    assert np.abs(np.subtract(shown.haematoxylin, OTHER.haematoxylin)).sum() < 0.5 * before
    white = np.full((1, 8, 8, 3), 250, np.uint8)
    assert (redyed(white, own, OTHER) == white).all()


@given(st.lists(st.floats(-30, 30), min_size=8, max_size=8))
@settings(max_examples=50, deadline=None)
def test_noise_never_makes_dyes_that_cannot_be_used(numbers):
    wild, own = dyes_of(np.array(numbers)), dyes_of(np.zeros(8))
    pixels = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 3)).astype(np.uint8)
    for a, b in ((own, wild), (wild, own)):
        assert restained(pixels, a, b).shape == pixels.shape
    assert np.abs(redyed(pixels, wild, wild).astype(int) - pixels).max() <= 1
