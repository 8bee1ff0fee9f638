"""Tiles of every codec that is decoded natively have OpenSlide's pixels, and damage stays local."""

import io
import struct

import numpy as np
import pytest
import tifffile
from builders import halves
from PIL import Image
from test_native_tiles import IMAGE, MPP, assert_openslides, differences, grid, read_all

from wsi_fl.slides.reading.native_tiles import read_tiled_images
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.slides.reading.tile_codecs import TileCodec
from wsi_fl.types import GridSpec, WsiFlError

APERIO = "Aperio Image Library\r\n730x610 (64x64)|AppMag = 20|MPP = 0.5"
CODECS = {
    "none": (1, {}),
    "lzw": (5, {"compression": "lzw"}),
    "lzw of differences": (5, {"compression": "lzw", "predictor": True}),
    "deflate": (8, {"compression": "zlib"}),
    "deflate of differences": (8, {"compression": "zlib", "predictor": True}),
    "packbits": (32773, {"compression": "packbits"}),
    "zstd": (50000, {"compression": "zstd"}),
    "zstd of differences": (50000, {"compression": "zstd", "predictor": True}),
    "JPEG 2000 in RGB": (33005, {"compression": "APERIO_JP2000_RGB", "compressionargs": {"level": 70}}),
    "JPEG 2000 in YCbCr": (33003, {"compression": "APERIO_JP2000_YCBC", "compressionargs": {"level": 70}}),
}


def write_slide(path, kind, levels=(IMAGE,), tile_px=64, **changes):
    """A pyramid of tiles with a codec."""
    number, options = CODECS[kind]
    is_jpeg2000 = number > 33000 and number < 34000
    with tifffile.TiffWriter(path) as file:
        for k, level in enumerate(levels):
            mpp = MPP * IMAGE.shape[1] / level.shape[1]
            resolution = {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
            layout = {"tile": (tile_px, tile_px), "photometric": "rgb", "subfiletype": int(k > 0), "metadata": None}
            description = {"description": APERIO} if is_jpeg2000 else {}
            file.write(level, **(layout | options | resolution | description | changes))
    return path


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("tile_px", [64, 128])
def test_pixels_are_those_of_openslide(tmp_path, kind, tile_px):
    path = write_slide(tmp_path / "s.tif", kind, halves(IMAGE, 2), tile_px)
    assert {image.codec.compression for image in read_tiled_images(path)} == {CODECS[kind][0]}
    assert differences(path)[0] <= 1  # where patches are resampled


@pytest.mark.parametrize("kind", CODECS)
def test_patches_across_tiles_are_openslides_and_no_stream_is_taken_for_jpeg(tmp_path, kind):
    path, spec, corners = write_slide(tmp_path / "s.tif", kind), GridSpec(100, MPP, 70), grid(70)
    patches = read_all(path, corners, spec, reader="native")
    assert_openslides(path, corners, patches)
    with Slide(path) as slide:
        assert slide.reader == "native" and slide.read_native_stream((0, 0), 64, MPP) is None
        assert not slide.has_whole_tiles(GridSpec(64, MPP, 64))


@pytest.mark.parametrize("kind", [kind for kind in CODECS if kind != "none"])
def test_damaged_and_false_tiles_are_refused(kind):
    number, options = CODECS[kind]
    tile = np.ascontiguousarray(IMAGE[:64, :64])
    stream = encode_tile(tile, options)
    codec = TileCodec(number, True, has_differences=bool(options.get("predictor")))
    decoded = codec.decode_tile(stream, np.empty_like(tile))
    if number == 33003:  # of components that are called Y, Cb and Cr
        tile = np.asarray(Image.fromarray(tile, "YCbCr").convert("RGB"))
    assert np.abs(decoded.astype(int) - tile).max() <= (6 if number in (33003, 33005) else 0)
    for damaged in (b"", stream[: len(stream) // 2], b"\xff" * 50):
        with pytest.raises(WsiFlError, match=r"^[^\n]+$"):
            codec.decode_tile(damaged, np.empty_like(tile))
    if number in (33003, 33005):  # its size is read before memory is taken for it
        with pytest.raises(WsiFlError, match=r"no JPEG 2000 picture of 32 × 64 pixels in one tile"):
            codec.decode_tile(stream, np.empty((64, 32, 3), np.uint8))


def encode_tile(tile, options):
    """Return the stream of a tile in a file with nothing else."""
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, tile, tile=tile.shape[:2], photometric="rgb", metadata=None, **options)
    with tifffile.TiffFile(io.BytesIO(buffer.getvalue())) as file:
        (start,), (n,) = file.pages[0].dataoffsets, file.pages[0].databytecounts
    return buffer.getvalue()[start : start + n]


@pytest.mark.parametrize("tile_px", [112, 240])
def test_uncompressed_tiles_that_openslide_opens_and_does_not_read_are_read(tmp_path, tile_px):
    path = write_slide(tmp_path / "s.tif", "none", (IMAGE,), tile_px)
    with Slide(path) as slide:
        assert np.array_equal(slide.read((37, 200), 300, MPP), IMAGE[200:500, 37:337])
        assert slide.thumbnail(300)[0].std() > 10


def test_an_uncompressed_tile_that_is_short_is_refused():
    with pytest.raises(WsiFlError, match="unusable tile"):
        TileCodec(1, True).decode_tile(bytes(100), np.empty((64, 64, 3), np.uint8))


@pytest.mark.parametrize("kind", ["lzw", "deflate", "packbits", "zstd"])
def test_bytes_beyond_those_of_a_tile_count_for_nothing(kind):
    number, options = CODECS[kind]
    longer = np.ascontiguousarray(IMAGE[:80, :64])
    decoded = TileCodec(number, True).decode_tile(encode_tile(longer, options), np.empty((64, 64, 3), np.uint8))
    assert np.array_equal(decoded, longer[:64])


@pytest.mark.parametrize(("tag", "value"), [("FillOrder", 2), ("Orientation", 2)])
def test_tiles_in_another_order_are_left_to_openslide(tmp_path, tag, value):
    """A slide whose compared tiles are white, where the order makes no difference."""
    picture = IMAGE.copy()
    picture[:64, :64] = picture[-128:, -128:] = picture[256:384, 320:448] = 255
    path = write_slide(tmp_path / "s.tif", "none", (picture,), extratags=[(274, 3, 1, value, True)])
    if tag == "FillOrder":  # which tifffile does not write
        old, new = (struct.pack("<HHI", code, 3, 1) for code in (274, 266))
        path.write_bytes(path.read_bytes().replace(old, new, 1))
    with tifffile.TiffFile(path) as file:
        assert file.pages[0].tags[tag].value == value
    with Slide(path) as slide, Slide(path, reader="openslide") as judge:
        assert slide.reader == "openslide"
        assert np.array_equal(slide.read((64, 64), 200, MPP), judge.read((64, 64), 200, MPP))


@pytest.mark.parametrize("kind", ["deflate", "zstd", "JPEG 2000 in RGB"])
def test_a_damaged_tile_spoils_its_own_patches_alone(tmp_path, kind):
    path = write_slide(tmp_path / "s.tif", kind)
    with tifffile.TiffFile(path) as file:
        start, n = file.pages[0].dataoffsets[40], file.pages[0].databytecounts[40]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(n))
    excluded = {}
    corners = grid(64)
    pixels = read_all(path, corners, GridSpec(64, MPP, 64), reader="native", excluded=excluded)
    assert set(excluded) == {40} and len(pixels) == len(corners) - 1
    assert_openslides(path, np.delete(corners, 40, 0), pixels)


@pytest.mark.parametrize(
    "changes",
    [{"compression": "lzma"}, {"planarconfig": "separate", "photometric": "rgb"}, {"photometric": "minisblack"}],
)
def test_other_tiles_are_not_decoded_here(tmp_path, changes):
    image = IMAGE[..., 0] if changes.get("photometric") == "minisblack" else IMAGE
    image = np.moveaxis(IMAGE, -1, 0) if "planarconfig" in changes else image
    assert read_tiled_images(write_slide(tmp_path / "s.tif", "none", (image,), **changes)) == []
