"""Slides are read as arrays with exact pixels, the right level and clear errors."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import write_tiff
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pyramid_levels import zeroed

from wsi_fl.slides.reading import reader
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.types import UsageError, WsiFlError

MPP = 0.5
IMAGE = np.random.default_rng(0).integers(0, 256, (300, 420, 3), np.uint8)
_Y, _X = np.mgrid[:300, :420]
SMOOTH = np.stack([_X / 2, _Y / 2, 100 + 80 * np.sin(_X / 40 + _Y / 50)], axis=-1).round().astype(np.uint8)


def write_slide(path, levels=(IMAGE,), **how):
    """A tiled, losslessly packed TIFF that OpenSlide opens as generic-tiff."""
    return write_tiff(path, levels, **how)


def area_average(image, left, top, scale, size):
    """Each output pixel [size, size, 3] as the mean over its exact footprint; white outside."""

    def weights(start, extent):
        edges = start + scale * np.arange(size + 1)
        pixel = np.arange(extent)
        overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
        return np.clip(overlap, 0, None)

    rows, columns = weights(top, image.shape[0]), weights(left, image.shape[1])
    covered = rows.sum(1)[:, None] * columns.sum(1)[None]
    across = np.tensordot(columns, image.astype(float), (1, 1))
    total = np.tensordot(rows, across, (1, 1)) + 255 * (scale**2 - covered)[..., None]
    return total / scale**2


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    with Slide(write_slide(tmp_path_factory.mktemp("slides") / "größe 🔬.tif")) as opened:
        yield opened


@pytest.fixture(scope="module")
def smooth_slide(tmp_path_factory):
    with Slide(write_slide(tmp_path_factory.mktemp("slides") / "smooth.tif", (SMOOTH,))) as opened:
        yield opened


@settings(max_examples=40, deadline=None)
@given(x=st.integers(-40, 450), y=st.integers(-40, 330), size=st.integers(1, 90))
def test_pixels_are_the_slides_own_and_white_beyond_its_edge(slide, x, y, size):
    white = np.full((600, 700, 3), 255, np.uint8)
    white[100:400, 100:520] = IMAGE
    np.testing.assert_array_equal(slide.read((x, y), size, MPP), white[100 + y :, 100 + x :][:size, :size])


@settings(max_examples=25, deadline=None)
@given(x=st.integers(-20, 380), y=st.integers(-20, 280), size=st.integers(4, 40), scale=st.integers(2, 6))
def test_whole_multiples_are_area_averages_of_any_picture(slide, x, y, size, scale):
    got = slide.read((x, y), size, slide.mpp * scale)
    assert np.abs(got - area_average(IMAGE, x, y, scale, size)).max() <= 2


@settings(max_examples=25, deadline=None)
@given(x=st.integers(0, 200), y=st.integers(0, 100), size=st.integers(4, 30), scale=st.floats(1.2, 6))
def test_other_scales_neither_shift_nor_stretch_the_picture(smooth_slide, x, y, size, scale):
    """Pillow's box filter weighs whole pixels, so the oracle is met where neighbours are alike."""
    got = smooth_slide.read((x, y), size, smooth_slide.mpp * scale)
    assert np.abs(got - area_average(SMOOTH, x, y, scale, size)).max() <= 3


@pytest.mark.parametrize(("mpp", "level"), [(0.5, 0), (0.9, 0), (1.0, 1), (0.9999, 1), (1.9, 1), (2.0, 2), (7.0, 2)])
def test_the_coarsest_level_that_is_fine_enough_is_read(tmp_path, mpp, level):
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    levels = [np.full((256 // 2**k, 256 // 2**k, 3), c, np.uint8) for k, c in enumerate(colours)]
    with Slide(write_slide(tmp_path / "levels.tif", levels)) as slide:
        assert (slide.read((0, 0), 16, mpp) == colours[level]).all()


def test_a_lower_level_gives_its_own_pixels_at_positions_between_its_pixels(tmp_path):
    half = IMAGE[:150, :210]
    with Slide(write_slide(tmp_path / "levels.tif", (IMAGE, half))) as slide:
        np.testing.assert_array_equal(slide.read((20, 40), 32, 2 * MPP), half[20:52, 10:42])
        between = slide.read((21, 40), 32, 2 * MPP)
    assert any(np.array_equal(between, half[20:52, x : x + 32]) for x in (10, 11))


def test_levels_of_odd_size_do_not_shift_the_picture(tmp_path):
    """A ramp stays where it is although 1001 / 250 is no whole number."""

    def ramp(height, width):
        return np.tile(np.linspace(0, 250, width).astype(np.uint8)[None, :, None], (height, 1, 3))

    with Slide(write_slide(tmp_path / "ramp.tif", (ramp(120, 1001), ramp(30, 250)))) as slide:
        for x in (0, 333, 700):
            got = slide.read((x, 0), 20, MPP * 6)[5, :, 0].astype(float)
            assert np.abs(got - area_average(ramp(120, 1001), x, 0, 6, 20)[5, :, 0]).max() < 2


@pytest.mark.parametrize(
    ("mpp", "unit", "said"),
    [
        ((0.25, 0.25), "CENTIMETER", 0.25),
        ((0.25, 0.25), "INCH", 0.25),
        ((0.5, 0.51), "CENTIMETER", 0.505),
        ((0.5, 0.6), "CENTIMETER", "pixels are not square"),
        (None, "CENTIMETER", r"mpp_override = 0\.5 in sites/<site>\.toml$"),
        ((352.8, 352.8), "CENTIMETER", r"plausibly .*mpp_override"),
        ((0.01, 0.01), "CENTIMETER", r"plausibly .*mpp_override"),
    ],
)
def test_mpp_is_the_plausible_value_of_the_slide_or_the_configured_one(tmp_path, mpp, unit, said):
    path = write_slide(tmp_path / "s.tif", mpp=mpp, unit=unit)
    with Slide(path) as slide:
        assert slide.thumbnail(100)[0].shape[1] == 100
        if isinstance(said, float):
            assert slide.mpp == pytest.approx(said, rel=1e-4)
        else:
            with pytest.raises(WsiFlError, match=rf"^s\.tif: .*{said}"):
                _ = slide.mpp
    with Slide(path, mpp_override=0.4) as slide:
        assert slide.mpp == 0.4
    for override in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="positive"):
            Slide(path, mpp_override=override)


@pytest.mark.parametrize(("max_px", "strip_px"), [(1000, 1 << 24), (420, 5000), (100, 1 << 24), (33, 5000)])
def test_the_thumbnail_is_an_area_average_for_any_strip_size(smooth_slide, monkeypatch, max_px, strip_px):
    monkeypatch.setattr(reader, "_STRIP_PX", strip_px)
    thumbnail, downsample = smooth_slide.thumbnail(max_px)
    assert downsample == pytest.approx(max(1, 420 / max_px)) and thumbnail.shape[1] == min(max_px, 420)
    inside = int(300 / downsample)  # what reaches over the edge is mixed with white
    expected = area_average(SMOOTH, 0, 0, downsample, thumbnail.shape[1])[:inside]
    assert np.abs(thumbnail[:inside] - expected).max() <= 5


def test_threads_share_one_handle(slide):
    corners = [(x, y) for x in range(0, 400, 37) for y in range(0, 280, 41)]
    with ThreadPoolExecutor(4) as pool:
        patches = list(pool.map(lambda xy: slide.read(xy, 16, MPP), corners))
    for (x, y), patch in zip(corners, patches, strict=True):
        cut = IMAGE[y : y + 16, x : x + 16]
        np.testing.assert_array_equal(patch[: len(cut), : cut.shape[1]], cut)


def test_a_damaged_tile_is_named_and_the_others_still_read(tmp_path):
    path = write_slide(tmp_path / "damaged.tif")
    zeroed(path, 0, [8])  # second row of tiles, x from 64
    words = "damaged.tif: cannot be read at level-0 pixel (80, 80): "
    with Slide(path) as slide:
        for _ in range(3):
            refused(lambda: slide.read((80, 80), 16, MPP), words, error=WsiFlError)
            np.testing.assert_array_equal(slide.read((200, 200), 16, MPP), IMAGE[200:216, 200:216])


@pytest.mark.parametrize("kind", ["missing", "text", "empty", "truncated", "folder"])
def test_a_file_that_is_no_slide_is_refused_by_name_in_one_line(tmp_path, kind):
    path = tmp_path / f"{kind}.tif"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        whole = write_slide(tmp_path / "whole.tif").read_bytes()
        path.write_bytes({"text": b"not a slide", "empty": b"", "truncated": whole[:900]}[kind])
    refused(lambda: Slide(path), f"{kind}.tif: ", error=WsiFlError)
