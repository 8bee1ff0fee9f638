"""JPEG streams decode to the right pixels or raise an error."""

import io

import numpy as np
import pytest
from builders import tables_apart
from PIL import Image

from wsi_fl.system import jpeg
from wsi_fl.types import WsiFlError

_Y, _X = np.mgrid[:96, :128]
PICTURE = np.stack([_X * 2 % 256, _Y * 2 % 256, (_X + _Y) * 3 % 256], -1).astype(np.uint8)


def encode_picture(picture=PICTURE, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=90, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_decoded_pixels_are_those_of_libjpeg(subsampling):
    stream = encode_picture(subsampling=subsampling)
    assert np.array_equal(jpeg.decode(stream), np.asarray(Image.open(io.BytesIO(stream))))
    assert jpeg.read_size(stream) == (96, 128)
    jpeg.check_stream(stream)


def test_a_given_array_is_filled_and_must_fit():
    stream = encode_picture()
    out = np.zeros((2, 96, 128, 3), np.uint8)
    assert jpeg.decode(stream, out[1]) is not None
    assert np.array_equal(out[1], jpeg.decode(stream)) and not out[0].any()
    for shape in ((96, 64, 3), (128, 96, 3), (200, 128, 3)):
        with pytest.raises(WsiFlError, match=r"^[^\n]+$"):
            jpeg.decode(stream, np.empty(shape, np.uint8))


@pytest.mark.parametrize("read", [jpeg.decode, jpeg.check_stream])
def test_a_stream_cut_short_or_overwritten_raises_in_one_line(read):
    stream = encode_picture()
    for share in (0, 0.01, 0.5, 0.9, 0.999):
        with pytest.raises(WsiFlError, match=r"^unusable JPEG stream: [^\n]+$"):
            read(stream[: int(len(stream) * share)])
    for seed in range(5):
        garbage = np.random.default_rng(seed).integers(0, 256, len(stream) - 900).astype(np.uint8).tobytes()
        with pytest.raises(WsiFlError):
            read(stream[:800] + garbage + stream[-100:])


@pytest.mark.parametrize("rgb", [False, True])
def test_tables_kept_apart_are_put_back(rgb):
    whole = encode_picture(keep_rgb=rgb, subsampling="4:4:4")
    tables, stream = tables_apart(whole)
    with pytest.raises(WsiFlError):
        jpeg.decode(stream)
    joined = jpeg.complete_stream(stream, tables, rgb=rgb)
    assert np.array_equal(jpeg.decode(joined), np.asarray(Image.open(io.BytesIO(whole))))


def test_the_tag_wins_over_the_markers_in_the_stream():
    """In TIFF, a stream of red, green and blue whose markers mean YCbCr is read by the tag."""
    rgb = encode_picture(keep_rgb=True, subsampling="4:4:4")
    place = rgb.index(b"Adobe") - 4
    length = 2 + int.from_bytes(rgb[place + 2 : place + 4])
    jfif = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    lying = rgb[:2] + jfif + rgb[2:place] + rgb[place + length :]
    expected = jpeg.decode(rgb).astype(int)
    assert np.abs(jpeg.decode(lying) - expected).max() > 100
    assert np.array_equal(jpeg.decode(jpeg.complete_stream(lying, rgb=True)), expected)
