"""The pyramid levels of a slide are recognized, and finer levels replace damaged or missing ones."""

from functools import partial

import numpy as np
import pytest
import tifffile
import zarr_files
from builders import change_tag, needs_formats, refused, write_ome, write_tiff
from dicom_files import write_dicom
from PIL import Image

from wsi_fl.slides.reading.formats.level_selection import is_padded, select_levels
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.types import GridSpec, SlideRecord

MPP, TILE = 0.5, 64
NOTE = "its level {} is damaged or lacks tiles; the affected areas are made from finer levels"


def tissue(size=512):
    """Tissue of squares of 32 px on white glass."""
    steps = np.random.default_rng(0).integers(90, 200, (size // 64, size // 64, 3), np.uint8)
    out = np.full((size, size, 3), 255, np.uint8)
    out[size // 4 : 3 * size // 4, size // 4 : 3 * size // 4] = steps.repeat(32, 0).repeat(32, 1)
    return out


WHOLE = tissue()
LEVELS = [WHOLE, *(np.asarray(Image.fromarray(WHOLE).reduce(n)) for n in (4, 16))]


def write(path, compression="jpeg", levels=LEVELS):
    exact = {"compressionargs": {"level": 100}} if compression == "jpeg" else {}
    return write_tiff(path, levels, MPP, compression=compression, **exact)


def zeroed(path, level, numbers=None):
    """Write zeros over some tiles, or all, of a level."""
    with tifffile.TiffFile(path) as tif:
        page = tif.pages[level]
        places = list(zip(page.dataoffsets, page.databytecounts, strict=True))
    with path.open("r+b") as file:
        for number in range(len(places)) if numbers is None else numbers:
            file.seek(places[number][0])
            file.write(bytes(places[number][1]))


def left_out(path, level, numbers, tags=(324, 325)):
    """Mark tiles of a level as missing by an offset (324) or length (325) of 0."""
    for tag in tags:
        change_tag(path, tag, lambda values: [0 if k in numbers else v for k, v in enumerate(values)], [level])


def patches(path, mpp=MPP, reader="auto", size=TILE):
    """Return (readable patches [n, size, size, 3] at places [n, 2], row → reason of the others, notes)."""
    step = round(size * mpp / MPP)
    corners = np.array([(x, y) for y in range(0, 512, step) for x in range(0, 512, step)])
    aside: dict[int, str] = {}
    notes: set[str] = set()
    record, how = SlideRecord(path, path.stem, "p", "s", "negative", False), {"threads": 2, "reader": reader}
    found = read_patches(record, corners, GridSpec(size, mpp, size), excluded=aside, notes=notes, **how)
    pixels = np.concatenate([batch for _, batch in found])
    return np.delete(corners, list(aside), 0), pixels, aside, notes


def assert_reduced(corners, pixels, factor):
    """Check that patches are those of the reduced whole picture."""
    small = np.asarray(Image.fromarray(WHOLE).reduce(factor)).astype(int)
    for (x, y), patch in zip((corners // factor).tolist(), pixels, strict=True):
        height, width = small[y : y + len(patch), x : x + len(patch)].shape[:2]
        assert np.abs(patch[:height, :width] - small[y : y + height, x : x + width]).mean() < 6


@pytest.mark.parametrize("reader", ["auto", "openslide"])
@pytest.mark.parametrize("compression", ["jpeg", "deflate"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_damaged_level_is_replaced_by_a_finer_one(tmp_path, compression, reader, level):
    good, bad = (write(tmp_path / f"{name}.tif", compression) for name in ("good", "bad"))
    zeroed(bad, level)
    mpp = MPP * 4**level
    for path, notes in ((good, set()), (bad, {NOTE.format(level)})):
        corners, pixels, aside, told = patches(path, mpp, reader, 32)
        assert not aside and told == notes
        assert_reduced(corners, pixels, 4**level)
        assert not patches(path, MPP, reader)[2]
        with Slide(path, reader=reader) as slide:
            small, downsample = slide.thumbnail(512 // 4**level)
            assert downsample == 4**level and set(slide.notes) == notes
            assert np.abs(small.astype(int) - LEVELS[level]).mean() < 6


def test_one_damaged_tile_of_a_coarse_level_is_made_from_the_next(tmp_path):
    path = write(tmp_path / "a.tif")
    zeroed(path, 1, [0, 3])
    corners, pixels, aside, notes = patches(path, 4 * MPP)
    assert not aside and notes == {NOTE.format(1)}
    assert_reduced(corners, pixels, 4)
    with Slide(path) as slide:
        assert slide.read_native_stream((256, 256), TILE, 4 * MPP) is None
        assert slide.read_native_stream((256, 0), TILE, 4 * MPP) is not None


def test_the_finest_level_locates_the_damage_where_all_levels_are_damaged(tmp_path):
    path = write(tmp_path / "a.tif")
    for level in range(3):
        zeroed(path, level)
    with Slide(path) as slide:
        refused(lambda: slide.read((192, 128), TILE, 4 * MPP), "a.tif", "level-0 pixel (192, 128)")
        refused(lambda: slide.thumbnail(32), "a.tif: cannot be read at level-0 pixel")


def test_a_patch_far_coarser_than_its_only_whole_level_is_made_in_parts(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tif", "deflate")
    for level in (1, 2):
        zeroed(path, level)
    with Slide(path) as slide:
        at_once = slide.read((0, 0), 32, 16 * MPP)
        monkeypatch.setattr("wsi_fl.slides.reading.reader._MAX_AREA_PX", 5000)
        np.testing.assert_array_equal(slide.read((0, 0), 32, 16 * MPP), at_once)
    assert np.abs(at_once.astype(int) - LEVELS[2]).max() <= 1


LACKING = [3 * 8 + 3, 3 * 8 + 4]
"""Numbers of two tiles of level 0, on tissue."""


@pytest.mark.parametrize("reader", ["auto", "openslide"])
@pytest.mark.parametrize("tags", [(324, 325), (325,), (324,)], ids=["both", "length", "offset"])
@pytest.mark.parametrize("compression", ["jpeg", "deflate", "jpegxl"])
def test_tissue_whose_tiles_level_0_lacks_is_left_out_by_place(tmp_path, compression, tags, reader):
    if compression == "jpegxl":  # read by tifffile
        pytest.importorskip("zarr")
    path = write(tmp_path / "a.tif", compression)
    left_out(path, 0, LACKING, tags)
    corners, pixels, aside, _ = patches(path, reader=reader)
    assert sorted(aside) == LACKING
    assert all(f"level-0 pixel ({x}, 192)" in aside[k] for k, x in zip(LACKING, (192, 256), strict=True))
    assert_reduced(corners, pixels, 1)


@pytest.mark.parametrize("compression", ["jpeg", "deflate"])
def test_glass_whose_tiles_all_levels_lack_or_show_as_white_is_background(tmp_path, compression):
    path = write(tmp_path / "a.tif", compression)
    left_out(path, 0, [0, 1, 8, 9, 60])
    corners, pixels, aside, notes = patches(path)
    assert not aside and not notes and len(corners) == 64 and (pixels[0] == 255).all()
    for level, numbers in enumerate((range(32), (0, 1), (0,))):  # the upper half was not scanned
        left_out(path, level, numbers)
    _, pixels, aside, _ = patches(path)
    assert not aside and (pixels[:32] == 255).all() and (pixels[32:].min(axis=(1, 2, 3)) < 200).sum() == 8


@pytest.mark.parametrize("level", [1, 2])
def test_tiles_that_a_coarse_level_lacks_come_from_a_finer_one(tmp_path, level):
    path = write(tmp_path / "a.tif")
    left_out(path, level, [0] if level == 2 else [0, 3])
    corners, pixels, aside, notes = patches(path, MPP * 4**level, size=32)
    assert not aside and notes == {NOTE.format(level)}
    assert_reduced(corners, pixels, 4**level)
    with Slide(path) as slide:
        small, _ = slide.thumbnail(512 // 4**level)
        assert np.abs(small.astype(int) - LEVELS[level]).mean() < 6 and slide.notes == (NOTE.format(level),)


@pytest.mark.parametrize("glass", [(205, 205, 205), (235, 232, 225), (215, 210, 205)])
def test_glass_that_level_0_alone_leaves_out_is_background_of_any_gray(tmp_path, glass):
    grey = np.where((WHOLE == 255).all(-1, keepdims=True), np.uint8(glass), WHOLE).astype(np.uint8)
    levels = [grey, *(np.asarray(Image.fromarray(grey).reduce(n)) for n in (4, 16))]
    path = write(tmp_path / "a.tif", "deflate", levels)
    left_out(path, 0, [0, 1, 8, 9])
    _, pixels, aside, _ = patches(path)
    assert not aside and (pixels[0] == 255).all() and (pixels[2] == glass).all()


@pytest.mark.parametrize("planes", [False, True])
@needs_formats
def test_tiles_that_an_ome_tiff_lacks_are_left_out_by_place(tmp_path, planes):
    path = write_ome(tmp_path / "a.ome.tif", LEVELS, planes=planes, tile=(TILE, TILE), compression="deflate")
    left_out(path, 2 if planes else 0, LACKING)  # of the blue channel
    corners, pixels, aside, _ = patches(path)
    assert sorted(aside) == LACKING
    assert_reduced(corners, pixels, 1)


write_zarr = partial(zarr_files.write_zarr, chunk=TILE)


@pytest.mark.parametrize("fill", [0, 255])
def test_chunks_that_a_level_of_a_zarr_lacks_are_no_tissue_and_no_black(tmp_path, fill):
    path = write_zarr(tmp_path / "a.zarr", LEVELS, "0.4", fill=fill)
    assert not patches(path)[2]
    (path / "0" / "3.3.0").unlink()
    corners, pixels, aside, _ = patches(path)
    assert list(aside) == [27] and "(192, 192)" in aside[27]
    assert_reduced(corners, pixels, 1)
    whole = write_zarr(tmp_path / "b.zarr", LEVELS, "0.4", fill=fill)
    for chunk in (whole / "1").glob("[0-9]*"):
        chunk.unlink()
    corners, pixels, aside, notes = patches(whole, 4 * MPP, size=32)
    assert not aside and notes == {NOTE.format(1)}
    assert_reduced(corners, pixels, 4)


def test_black_that_a_zarr_leaves_out_because_it_is_its_fill_value_is_black(tmp_path):
    """zarr 3 writes no chunks that hold nothing else."""
    black = WHOLE.copy()
    black[:, :160] = 0
    levels = [black, *(np.asarray(Image.fromarray(black).reduce(n)) for n in (4, 16))]
    path = write_zarr(tmp_path / "a.zarr", levels, "0.4")
    assert not (path / "0" / "3.1.0").exists()
    _, pixels, aside, notes = patches(path)
    assert not aside and not notes and (pixels[25] == 0).all()


@pytest.mark.parametrize("compression", ["jpeg", "deflate"])
def test_a_file_whose_last_tiles_are_cut_off_leaves_them_out(tmp_path, compression):
    """Level 0 may be the last in the file: its tiles would lie beyond the end."""
    path = write(tmp_path / "a.tif", compression)
    end = path.stat().st_size
    change_tag(path, 324, lambda values: [end + k if k >= 37 else v for k, v in enumerate(values)])
    corners, pixels, aside, _ = patches(path)
    assert sorted(aside) == list(range(37, 64))
    assert_reduced(corners, pixels, 1)


@pytest.mark.parametrize("reader", ["auto", "openslide"])
def test_a_coarse_level_of_a_narrow_slide_shows_each_place_where_it_is(tmp_path, reader):
    """Halving drops what is left over: a side of 950 px becomes one of 29, and one of 20000 px one of 625."""
    begin = 18_432
    strip = np.full((950, 20_000, 3), 250, np.uint8)
    strip[:, begin:] = 90
    path = write(tmp_path / "strip.tif", "deflate", [strip, *(strip[: 950 // n * n : n, ::n] for n in (4, 32))])
    with Slide(path, reader=reader) as slide:
        thumbnail, downsample = slide.thumbnail(625)
        assert (downsample, thumbnail.shape) == (32.0, (30, 625, 3))
        assert np.array_equal(np.flatnonzero(thumbnail[3, :, 0] < 170)[:1], [begin // 32])
        for factor in (4, 32):
            patch = slide.read((begin - 8 * factor, 0), 16, MPP * factor)
            # OpenSlide takes whole pixels of level 0, up to an eighth of a pixel of level 1 beside the place
            assert np.abs(patch[:, :, 0].astype(int) - np.repeat([250, 90], 8)).max() <= 160 / 8


def test_levels_of_one_slide_have_one_ratio():
    for sizes, own in {
        ((100_000, 33), (50_000, 16), (25_000, 8), (12_500, 4), (1563, 1)): [0, 1, 2, 3, 4],
        ((1001, 803), (500, 401), (251, 201), (125, 100)): [0, 1, 2, 3],
        ((97792, 221184), (48896, 110592), (12288, 27648), (1024, 2048)): [0, 1, 2],
        ((500, 400), (1000, 800), (250, 300)): [1, 0],
        ((64, 64), (64, 64), (32, 32)): [0, 2],
        ((4096, 3072), (2048, 2048)): [0],
    }.items():
        assert select_levels(sizes) == own, sizes
    assert select_levels([(64, 64), (32, 32), (32, 32)], {1}) == [0, 2]


def pad_picture(picture, tile=TILE):
    """The picture with the rest of its last tiles in white."""
    height, width = (-side % tile for side in picture.shape[:2])
    return np.pad(picture, [(0, height), (0, width), (0, 0)], constant_values=255)


def write_dicoms(path, levels):
    for k, level in enumerate(levels):
        write_dicom(path / f"{k}.dcm", level, mpp=MPP * 2**k)
    return path


PADDED = {
    "a tiled TIFF": (write, "a.tif"),
    "a TIFF of another codec": (partial(write, compression="lzma"), "a.tif"),
    "an OME-Zarr": (write_zarr, "a.zarr"),
    "a DICOM folder": (write_dicoms, "a"),
}


@needs_formats
@pytest.mark.parametrize("size", [(520, 520), (520, 712)])
@pytest.mark.parametrize("how", PADDED)
def test_levels_that_are_filled_up_to_whole_tiles_do_not_move_the_tissue(tmp_path, how, size):
    picture = np.full((*size, 3), 255, np.uint8)
    picture[384:448, 384:448] = (150, 60, 120)
    writer, name = PADDED[how]
    levels = [pad_picture(np.asarray(Image.fromarray(picture).reduce(2**k))) for k in range(4)]
    with Slide(writer(tmp_path / name, levels=levels), MPP) as slide:
        assert all(float(each).is_integer() for each in slide.level_downsamples)
        small, scale = slide.thumbnail(levels[0].shape[1] // 8)
        rows, columns = np.nonzero((small < 200).any(-1))
        seen = slide.read((320, 320), 24, 8 * MPP)
    assert scale == 8 and (min(rows), max(rows), min(columns), max(columns)) == (48, 55, 48, 55)
    np.testing.assert_array_equal((seen[..., 1] < 100).nonzero()[0][[0, -1]], (8, 15))


def test_a_level_is_filled_up_where_no_picture_but_its_tiles_have_its_size():
    tile = (256, 256)
    for whole, level in (((2304, 2304), (1280, 1280)), ((2100, 2100), (512, 512)), ((2560, 1200), (768, 512))):
        assert is_padded(whole, level, tile), (whole, level)
    assert is_padded((104_448, 55_296), (13_312, 7168), (1024, 1024))
    for whole, level in (((4096, 3072), (2048, 1536)), ((2100, 2100), (1050, 1050)), ((2304, 1536), (768, 512))):
        assert not is_padded(whole, level, tile), (whole, level)
