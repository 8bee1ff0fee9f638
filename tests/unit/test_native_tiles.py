"""Native tiles give OpenSlide's pixels or fall back to OpenSlide, and damage stays local."""

import io
import os
import struct

import numpy as np
import pytest
import tifffile
from builders import change_tag, halves, tables_apart
from conftest import SHARED
from PIL import Image

from wsi_fl.demo.simulated_slides import tiff_writer as writer
from wsi_fl.slides.reading import native_tiles, patch_reader
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.system import jpeg
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError

MPP = 0.5
REAL = SHARED / "data" / "slides" / "CMU-1-Small-Region.svs"
ODD = SHARED / "data" / "slides_odd"
_Y, _X = np.mgrid[:610, :730]
_SPOTS = np.random.default_rng(0).integers(0, 90, (77, 92, 3)).repeat(8, 0).repeat(8, 1)[:610, :730]
IMAGE = (np.stack([_X / 5, _Y / 4, (_X + _Y) / 9], -1) + _SPOTS).astype(np.uint8)


def stream_of(tile, *, apart, rgb, subsampling):
    """Return (separate tables, a tile as JPEG); Aperio's tiles have no color markers."""
    buffer = io.BytesIO()
    options = {"keep_rgb": True} if rgb else {"subsampling": subsampling}
    Image.fromarray(tile).save(buffer, "JPEG", quality=80, **options)
    return tables_apart(buffer.getvalue(), {0xE0, 0xEE}) if apart else (b"", buffer.getvalue())


def write_slide(path, levels=(IMAGE,), *, tile_px=64, apart=False, rgb=False, subsampling="4:2:0", vendor=""):
    """A pyramid of JPEG tiles; `apart` keeps the tables in a tag, `rgb` writes components as they are."""
    with path.open("wb") as file:
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        link = 8
        for number, level in enumerate(levels):
            starts, lengths, tables = [], [], b""
            whole = np.pad(level, [(0, -extent % tile_px) for extent in level.shape[:2]] + [(0, 0)])
            for y in range(0, level.shape[0], tile_px):
                for x in range(0, level.shape[1], tile_px):
                    tile = whole[y : y + tile_px, x : x + tile_px]
                    tables, stream = stream_of(tile, apart=apart, rgb=rgb, subsampling=subsampling)
                    starts.append(file.tell())
                    lengths.append(file.write(stream))
            mpp = MPP * levels[0].shape[1] / level.shape[1]
            tags = writer._build_tags(level.shape[0], level.shape[1], mpp, tile_px, reduced=number > 0)
            tags = [tag for tag in tags if tag[0] not in {262, 530, 532}]
            tags.append((262, (3, "H"), [2 if rgb else 6]))
            if not rgb:
                sampling = {"4:2:0": [2, 2], "4:2:2": [2, 1], "4:4:4": [1, 1]}[subsampling]
                tags.append((530, (3, "H"), sampling))
            if apart:
                tags.append((347, (7, "B"), list(tables)))
            if vendor:
                tags.append((270, (2, "B"), [*vendor.encode(), 0]))
            tags += [(324, (16, "Q"), starts), (325, (16, "Q"), lengths)]
            link = writer._write_directory(file, link, tags)
    return path


def place_of(path, number):
    """Return (offset, bytes) of a tile of level 0."""
    with tifffile.TiffFile(path) as tif:
        return tif.pages[0].dataoffsets[number], tif.pages[0].databytecounts[number]


def damage(path, number, how, monkeypatch):
    """Spoil one tile of level 0 in a way seen in real slides, or fail its read from disk."""
    (start, n), original = place_of(path, number), os.pread

    def pread(file, length, offset):
        if offset < start + n and offset + length > start:
            raise OSError(5, "Input/output error")
        return original(file, length, offset)

    if how == "disk":
        return monkeypatch.setattr(native_tiles.os, "pread", pread)
    garbage = np.random.default_rng(1).integers(0, 256, n).astype(np.uint8).tobytes()
    tile = {"garbage": garbage, "zeros": bytes(n), "cut": b"\xff\xd9" + bytes(n - n // 2 - 2)}[how]
    with path.open("r+b") as file:
        file.seek(start + n - len(tile))
        return file.write(tile)


def grid(step, start=0):
    return np.array([(x, y) for y in range(start, 610, step) for x in range(start, 730, step)])


def read_all(path, corners, spec, **how):
    record = SlideRecord(path, path.stem, "p", "s", "negative", positive=False)
    return np.concatenate([some for _, some in read_patches(record, corners, spec, **{"threads": 2} | how)])


def assert_openslides(path, corners, pixels, mpp=MPP):
    """Check that the patches equal OpenSlide's."""
    with Slide(path, reader="openslide") as judge:
        for (x, y), patch in zip(corners.tolist(), pixels, strict=True):
            assert np.array_equal(patch, judge.read((x, y), len(patch), mpp)), (x, y)


def differences(path, n=40, seed=0, **given):
    """Return the largest and the largest mean difference of native patches and OpenSlide's over random patches."""
    rng = np.random.default_rng(seed)
    apart, mean = 0, 0.0
    with Slide(path, reader="native", **given) as mine, Slide(path, reader="openslide", **given) as theirs:
        assert (mine.reader, theirs.reader) == ("native", "openslide")
        for k in range(n):
            scale = float(rng.choice(mine.level_downsamples)) if k % 2 else rng.uniform(0.95, 7)
            size = int(rng.integers(1, 200))
            xy = tuple(int(rng.integers(-150, extent + 100)) for extent in mine.size_l0)
            if k % 5 == 0:
                xy, size = (xy[0] // 64 * 64, xy[1] // 64 * 64), 64
            patches = [s.read(xy, size, s.mpp * scale).astype(int) for s in (mine, theirs)]
            difference = np.abs(patches[0] - patches[1])
            apart, mean = max(apart, difference.max()), max(mean, difference.mean())
        thumbnails = [s.thumbnail(300)[0].astype(int) for s in (mine, theirs)]
        assert np.abs(thumbnails[0] - thumbnails[1]).max() <= 2
    return apart, mean


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"tile_px": 48},
        {"tile_px": 128, "apart": True},
        {"subsampling": "4:2:2"},
        {"subsampling": "4:4:4", "apart": True},
        {"rgb": True},
        {"rgb": True, "apart": True},
        {"apart": True, "vendor": "Aperio Image\r\n730x610|MPP = 0.5"},
    ],
    ids=lambda kind: " ".join(f"{k}={str(v)[:6]}" for k, v in kind.items()) or "plain",
)
def test_pixels_are_those_of_openslide_for_any_tiles_and_colors(tmp_path, kind):
    apart, mean = differences(write_slide(tmp_path / "s.tif", halves(IMAGE, 3), **kind))
    assert apart <= 2 and mean < 0.1


@pytest.mark.skipif(not REAL.exists(), reason="the material beside the project is not there")
def test_real_slides_give_the_same_patches_through_both():
    assert differences(REAL)[0] <= 2
    for path in sorted(ODD.iterdir()):
        outcomes = []
        for reader in ("auto", "openslide"):
            try:
                with Slide(path, 0.5, reader) as slide:
                    outcomes.append(slide.read((0, 0), 32, 0.5).tolist())
            except WsiFlError as error:
                outcomes.append(str(error).split(":")[1])
        assert outcomes[0] == outcomes[1], path.name


@pytest.mark.parametrize(("how", "number"), [("garbage", 0), ("cut", 14), ("zeros", 119), ("disk", 40)])
def test_a_damaged_tile_spoils_its_own_patches_alone(tmp_path, monkeypatch, how, number):
    """Tile 0 and 119 are among those that are compared on opening."""
    whole = write_slide(tmp_path / "whole.tif")
    broken = write_slide(tmp_path / "broken.tif")
    damage(broken, number, how, monkeypatch)
    corners, spec = grid(50), GridSpec(50, MPP, 50)
    aside: dict[int, str] = {}
    with Slide(broken) as slide:
        assert slide.reader == "native"
    pixels = read_all(broken, corners, spec, threads=3, excluded=aside)
    near = np.abs(corners + 25 - (np.array([number % 12, number // 12]) * 64 + 32)) < 25 + 32
    assert set(aside) == set(np.flatnonzero(near.all(1)).tolist())
    for k, reason in aside.items():
        place = f"({corners[k][0]}, {corners[k][1]})"
        assert reason.startswith(f"broken.tif: cannot be read at level-0 pixel {place}: native tile in column")
        assert "\n" not in reason and (how != "disk" or "Input/output error" in reason)
    assert_openslides(whole, np.delete(corners, list(aside), 0), pixels)
    with pytest.raises(WsiFlError, match=r"broken\.tif: cannot be read at"):
        read_all(broken, corners, spec, threads=3)


@pytest.mark.parametrize("off", [3, 1])
def test_tiles_that_decode_differently_are_left_to_openslide(tmp_path, monkeypatch, off):
    """A decoder that is off everywhere, by more than rounding or by little but too often."""
    path, original = write_slide(tmp_path / "s.tif"), jpeg.decode

    def wrong(stream, out=None):
        picture = original(stream, out)
        picture += np.uint8(off)
        return picture

    monkeypatch.setattr(jpeg, "decode", wrong)
    with Slide(path) as slide, Slide(path, reader="openslide") as judge:
        assert slide.reader == "openslide" and slide.read_native_stream((0, 0), 64, MPP) is None
        assert np.array_equal(slide.read((9, 9), 70, MPP), judge.read((9, 9), 70, MPP))
    with pytest.raises(WsiFlError, match=r"^s\.tif: reader = native cannot read level 0: [^\n]+$"):
        Slide(path, reader="native")


@pytest.mark.parametrize("kind", [{}, {"apart": True}, {"rgb": True, "apart": True}, {"rgb": True}])
def test_a_native_stream_is_the_slides_own_bytes_and_decodes_to_the_patch(tmp_path, kind):
    path = write_slide(tmp_path / "s.tif", halves(IMAGE, 2), **kind)
    with Slide(path) as slide:
        for xy, mpp in (((0, 0), MPP), ((128, 64), MPP), ((128, 128), 2 * MPP)):
            stream = slide.read_native_stream(xy, 64, mpp)
            assert np.array_equal(jpeg.decode(stream), slide.read(xy, 64, mpp))
        offset, n = place_of(path, 0)
        own = path.read_bytes()[offset : offset + n]
        stream = slide.read_native_stream((0, 0), 64, MPP)
        assert stream == own if not kind else stream.endswith(own[own.index(b"\xff\xda") :])


def test_there_is_no_native_stream_where_a_patch_is_not_one_whole_tile(tmp_path):
    path = write_slide(tmp_path / "s.tif")
    with Slide(path) as slide:
        for xy in ((1, 0), (-64, 0), (704, 0), (0, 576), (768, 0)):
            assert slide.read_native_stream(xy, 64, MPP) is None, xy
        for size, mpp in ((32, MPP), (128, MPP), (64, 2 * MPP)):
            assert slide.read_native_stream((0, 0), size, mpp) is None, (size, mpp)
    with Slide(path, reader="openslide") as slide:
        assert slide.read_native_stream((0, 0), 64, MPP) is None


@pytest.mark.parametrize(("threads", "stride"), [(1, 100), (4, 50)])
def test_tiles_are_decoded_once_however_patches_straddle(tmp_path, monkeypatch, threads, stride):
    path, decoded, original = write_slide(tmp_path / "s.tif", tile_px=48), [], jpeg.decode
    corners = np.array([(x, y) for y in range(0, 600, stride) for x in range(0, 700, stride)])
    monkeypatch.setattr(jpeg, "decode", lambda *given: (decoded.append(1), original(*given))[1])
    with Slide(path):
        checking = len(decoded)
    assert len(read_all(path, corners, GridSpec(100, MPP, stride), threads=threads)) == len(corners)
    width, height = (-(-min(extent, last + 100) // 48) for extent, last in zip((730, 610), corners[-1], strict=True))
    assert len(decoded) == 2 * checking + width * height


@pytest.mark.parametrize(("stride", "reach"), [(100, 1), (60, 40), (60, 10_000), (7, 3), (131, 2)])
def test_patches_are_correct_in_any_order_and_prefetching_is_bounded(tmp_path, monkeypatch, stride, reach):
    path = write_slide(tmp_path / "s.tif", tile_px=48)
    corners = grid(stride, -30)[:400]
    corners = np.random.default_rng(stride).permutation(np.concatenate([corners, corners[:9]]))
    monkeypatch.setattr(patch_reader, "_REACH_BYTES", reach * 100**2 * 3)
    made, original = [], patch_reader._Sweep._decode_tiles

    def decode(self, level, cuts, number):
        original(self, level, cuts, number)
        made.append(max(k for k, strip in self._strips.items() if strip.pixels is not None) - number)

    monkeypatch.setattr("wsi_fl.slides.reading.patch_reader._Sweep._decode_tiles", decode)
    pixels = read_all(path, corners, GridSpec(100, MPP, stride), threads=1)
    assert max(made) <= max(1, reach) + 2  # the thread may be two strips ahead
    assert_openslides(path, corners, pixels)


@pytest.mark.parametrize("downsample", [2, 3.01])
def test_patches_of_a_lower_level_are_that_levels_own_pixels(tmp_path, downsample):
    """Where levels are not in whole proportion, some patches lie between pixels."""
    size = (round(730 / downsample), round(610 / downsample))
    path = write_slide(tmp_path / "s.tif", levels=(IMAGE, np.asarray(Image.fromarray(IMAGE).resize(size))))
    corners = np.array([(x, y) for y in (-20, *range(0, 610, 120)) for x in (-20, *range(0, 730, 120))])
    with Slide(path) as slide:
        mpp = MPP * slide.level_downsamples[1]
        _, _, tiled = slide.find_native_positions(corners, 60, mpp)
        assert slide._native.find_level(1) is not None and tiled.any() and tiled.all() == (downsample == 2)
    assert_openslides(path, corners, read_all(path, corners, GridSpec(60, mpp, 60)), mpp)


@pytest.mark.parametrize("number", [0, 40])
def test_patches_over_a_tile_that_the_file_leaves_out_are_openslides(tmp_path, monkeypatch, number):
    path = write_slide(tmp_path / "s.tif", vendor="Aperio Image\r\n730x610|MPP = 0.5", apart=True)
    change_tag(path, 325, lambda lengths: [0 if k == number else n for k, n in enumerate(lengths)])
    monkeypatch.setattr(patch_reader, "_BATCH", 1)  # whole strips without tiles
    corners = grid(100)
    with Slide(path) as slide:
        _, _, tiled = slide.find_native_positions(corners, 100, MPP)
        assert 1 <= (~tiled).sum() <= 4
    assert_openslides(path, corners, read_all(path, corners, GridSpec(100, MPP, 100)))


@pytest.mark.skipif(not ODD.exists(), reason="the material beside the project is not there")
def test_a_slide_without_native_tiles_is_refused_where_native_is_required():
    with pytest.raises(WsiFlError, match=r"reader = native cannot read level 0: [^\n]+; use auto or"):
        Slide(ODD / "openslide-python_unreadable.svs", reader="native")
