"""JPEG streams as arrays, strictly: damaged streams raise, where other decoders silently return wrong pixels.

The only module that imports simplejpeg (libjpeg-turbo). Its settings are libjpeg's own: exact integer DCT and smooth
("fancy") upsampling of subsampled colour, as OpenSlide uses them. All of it releases the interpreter's lock.
"""

from __future__ import annotations

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from wsi_fl.types import WsiFlError, single_line

_SOI = b"\xff\xd8"
_APP0, _APP14, _SOS = 0xE0, 0xEE, 0xDA
_ADOBE_RGB = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
"""Adobe's marker with colour transform 0: the components are red, green and blue (Adobe Technical Note 5116)."""

Stream = bytes | memoryview


def decode(stream: Stream, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Return the picture uint8[h, w, 3] in RGB, in `out` where given; WsiFlError for a truncated or damaged stream."""
    try:
        picture: NDArray[np.uint8] = simplejpeg.decode_jpeg(stream, "RGB", buffer=out, strict=True)
    except ValueError as error:
        raise _stream_error(error) from None
    if out is not None and picture.shape != out.shape:
        raise WsiFlError(f"JPEG of {_format_size(picture)} where {_format_size(out)} were expected")
    return picture


def check_stream(stream: Stream) -> None:
    """Read the stream to its end without computing its pixels, for half the cost; fails where `decode` would."""
    try:
        simplejpeg.decode_jpeg(stream, "GRAY", min_height=1, min_width=1, strict=True)
    except ValueError as error:
        raise _stream_error(error) from None


def read_size(stream: Stream) -> tuple[int, int]:
    """Return (height, width) in pixels from the header; WsiFlError without one."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(stream, strict=True)
    except ValueError as error:
        raise _stream_error(error) from None
    return int(height), int(width)


def complete_stream(stream: Stream, tables: bytes = b"", *, rgb: bool = False) -> Stream:
    """Return a self-contained stream from an abbreviated one and its tables, as in TIFF (TIFF Technical Note 2).

    Args:
        stream: from the start marker to the end marker.
        tables: TIFF's JPEGTables, a stream without a picture; empty where `stream` holds its own.
        rgb: whether the components are red, green and blue, given by a tag in TIFF and by a marker in a stream.
    """
    if stream[:2] != _SOI:
        raise WsiFlError("not a JPEG stream: it does not begin with the start marker")
    head = tables[2:-2]
    if not rgb:
        return b"".join((_SOI, head, stream[2:])) if head else stream
    return b"".join((_SOI, _ADOBE_RGB, _drop_color_markers(head), _drop_color_markers(stream[2:])))


def _drop_color_markers(segments: Stream) -> bytes:
    """Return segments without the markers (JFIF, Adobe) that define the components."""
    parts, place = [], 0
    while place + 4 <= len(segments) and segments[place] == 0xFF and segments[place + 1] != _SOS:
        end = place + 2 + int.from_bytes(segments[place + 2 : place + 4])
        if segments[place + 1] not in {_APP0, _APP14}:
            parts.append(segments[place:end])
        place = end
    return b"".join((*parts, segments[place:]))


def _stream_error(error: ValueError) -> WsiFlError:
    return WsiFlError(f"unusable JPEG stream: {single_line(error)}")


def _format_size(picture: NDArray[np.uint8]) -> str:
    return f"{picture.shape[1]} × {picture.shape[0]} pixels"


def encode(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """Return the picture uint8[h, w, 3] as a lossy stream with colour at half resolution (4:2:0), as of scanners."""
    stream: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality, colorspace="RGB", colorsubsampling="420"
    )
    return stream
