"""Tissue is separated from background, padding and ink, and its share of a patch is exact."""

import numpy as np
import pytest
from conftest import SHARED, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from wsi_fl.slides.patching.tissue import NoTissueError, tissue_fraction, tissue_mask
from wsi_fl.types import WsiFlError

PCAM = SHARED / "data" / "pcam_3000_balanced.npz"

H, W = 300, 400
_Y, _X = np.mgrid[:H, :W]
DISC = ((_Y - 150) / 80) ** 2 + ((_X - 150) / 100) ** 2 < 1
PINK, PALE, DARK = (205, 150, 190), (236, 214, 228), (52, 25, 60)
INKS = {
    "green": (60, 160, 90),
    "cyan": (40, 150, 170),
    "blue": (40, 60, 170),
    "navy": (20, 15, 90),
    "red": (210, 30, 45),
    "black": (45, 42, 50),
}


def scene(background=(240, 238, 242), tissue=PINK, noise=2.0):
    """An H&E-coloured disc on a plain background, and sensor noise."""
    image = np.full((H, W, 3), background, float)
    image[DISC] = tissue
    return image, np.random.default_rng(0).normal(0, noise, image.shape)


def add_noise(image, noise):
    return np.clip(image + noise, 0, 255).round().astype(np.uint8)


def is_disc(mask):
    return (mask & DISC).sum() / (mask | DISC).sum() > 0.97


@pytest.mark.parametrize("mpp", [4.0, 100.0, None])
@pytest.mark.parametrize("tissue", [PINK, PALE, DARK])
@pytest.mark.parametrize("background", [(255, 255, 255), (232, 226, 234)])
def test_pale_and_dark_tissue_is_found_on_every_background(background, tissue, mpp):
    assert is_disc(tissue_mask(add_noise(*scene(background, tissue)), mpp))


@pytest.mark.parametrize("mpp", [4.0, None])
@pytest.mark.parametrize("ink", INKS)
def test_ink_is_background_beside_tissue_and_upon_it(ink, mpp):
    image, noise = scene()
    image[60:130, 290:380] = INKS[ink]
    image[120:180, 100:190] = INKS[ink]
    mask = tissue_mask(add_noise(image, noise), mpp)
    assert mask[55:135, 285:385].mean() < 0.02 and mask[125:175, 105:185].mean() < 0.02
    assert mask[DISC].mean() > 0.6


@pytest.mark.parametrize("mpp", [4.0, 100.0])
def test_black_padding_is_background(mpp):
    image, noise = scene()
    image[:, 320:] = image[:30] = 0
    assert is_disc(tissue_mask(add_noise(image, noise), mpp))


@pytest.mark.parametrize("tissue", [PINK, PALE, DARK])
def test_a_slide_full_of_tissue_is_all_tissue(tissue):
    image = np.broadcast_to(np.array(tissue, float), (H, W, 3))
    assert tissue_mask(add_noise(image, scene(noise=4.0)[1]), 30.0).mean() > 0.99


def test_specks_are_dropped_and_small_holes_filled():
    image, noise = scene()
    image[20:24, 360:364] = PINK  # 4 px of 10 µm: 1600 µm²
    image[148:153, 148:153] = 242
    mask = tissue_mask(add_noise(image, noise), 10.0)
    assert not mask[10:40, 340:380].any() and mask[140:160, 140:160].all()
    image[120:180, 120:180] = 242
    assert not tissue_mask(add_noise(image, noise), 10.0)[140:160, 140:160].any()


@pytest.mark.parametrize(("colour", "share"), [((243,) * 3, 0), ((0,) * 3, 100), (INKS["green"], 100)])
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_a_slide_without_tissue_is_an_error_with_numbers(colour, share, noise):
    noisy = add_noise(np.full((H, W, 3), colour, float), np.random.default_rng(0).normal(0, noise, (H, W, 3)))
    words = f"{share}% of the thumbnail is black or ink"
    refused(lambda: tissue_mask(noisy, 30.0), words, error=NoTissueError)
    assert issubclass(NoTissueError, WsiFlError)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    side=st.floats(0.3, 60),
    downsample=st.floats(1, 9),
)
def test_fractions_are_exact_areas(seed, shape, side, downsample):
    rng = np.random.default_rng(seed)
    mask, xy = rng.random(shape) < 0.5, rng.integers(-40, 120, (20, 2))

    def weights(start, extent):
        pixel, end = np.arange(extent), (start + side) / downsample
        return np.clip(np.minimum(end, pixel + 1) - np.maximum(start / downsample, pixel), 0, None)

    expected = [weights(y, shape[0]) @ mask @ weights(x, shape[1]) / (side / downsample) ** 2 for x, y in xy]
    got = tissue_fraction(mask, xy, side, downsample)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.skipif(not PCAM.exists(), reason="the material beside the project is not there")
def test_real_patches_with_tissue_are_kept_and_empty_cells_are_not():
    """Real lymph-node patches, 96 px at 0.972 µm, pasted as islands on an empty slide."""
    data = np.load(PCAM)
    rows = np.random.default_rng(0).permutation(len(data["y"]))[:300]
    patches, tumor = data["x"][rows], data["y"][rows] == 1
    cells = np.stack(np.meshgrid(np.arange(2, 22), np.arange(2, 17)), -1).reshape(-1, 2)
    image = np.full((20 * 96, 24 * 96, 3), 243, np.uint8)
    for (column, row), patch in zip(cells, patches, strict=True):
        image[row * 96 : row * 96 + 96, column * 96 : column * 96 + 96] = patch
    thumbnail = np.asarray(Image.fromarray(image).resize((1024, 853), Image.Resampling.BOX))
    downsample = 24 * 96 / 1024
    mask = tissue_mask(thumbnail, 0.972 * downsample)
    kept = tissue_fraction(mask, cells * 96, 96.0, downsample) >= 0.25
    high, low = patches.max(-1).astype(float), patches.min(-1).astype(float)
    coloured = ((high - low) / np.maximum(high, 1) > 0.07).mean((1, 2)) > 0.15
    assert kept[tumor].mean() >= 0.98 and kept[~tumor & coloured].mean() >= 0.95
    ring = np.array([(c, r) for c in range(24) for r in range(20) if not (2 <= c < 22 and 2 <= r < 17)])
    assert tissue_fraction(mask, ring * 96, 96.0, downsample).max() < 0.15
