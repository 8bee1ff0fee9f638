"""Colour encoding of the packed frames of a DICOM file, which may contradict its header.

Decoders go by the header. Where the first frame contradicts it, they silently show wrong colours.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from wsi_fl.system.files import require_regular_file

_ENCAPSULATED = struct.pack("<HH2sHI", 0x7FE0, 0x0010, b"OB", 0, 0xFFFFFFFF)
_ITEM_BYTES, _HEAD_BYTES = 8, 1 << 16
_APP0, _APP14, _START_OF_FRAME, _START_OF_SCAN = 0xE0, 0xEE, {0xC0, 0xC1, 0xC2}, 0xDA
_CODESTREAM, _CODING_STYLE, _START_OF_TILE = b"\xff\x4f\xff\x51", 0x52, 0x90
_RGB, _YBR, _UNTRANSFORMED = "RGB", "YCbCr", "colours that it did not transform"


def find_contradiction(path: Path, colors: str) -> str:
    """Return the colour encoding of the first packed frame of a DICOM file; "" where it agrees with the header.

    Args:
        colors: the photometric interpretation.
    """
    with require_regular_file(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        frame = _first_frame(data)
    try:
        encoding = _jpeg2000_encoding(frame) if frame.startswith(_CODESTREAM) else _jpeg_encoding(frame)
    except (struct.error, IndexError):  # a damaged frame is reported when it is read
        return ""
    fits = {_RGB: colors == "RGB", _YBR: colors.startswith("YBR"), _UNTRANSFORMED: colors not in {"YBR_ICT", "YBR_RCT"}}
    return "" if fits.get(encoding, True) else encoding


def _first_frame(data: mmap.mmap) -> bytes:
    """Return the head of the first frame, after the table of offsets; b"" if there is none."""
    position = data.find(_ENCAPSULATED)
    if position < 0:
        return b""
    position += len(_ENCAPSULATED)
    table = data[position + 4 : position + _ITEM_BYTES]
    if len(table) < 4:
        return b""
    position += 2 * _ITEM_BYTES + int.from_bytes(table, "little")
    return data[position : position + _HEAD_BYTES]


def _jpeg2000_encoding(frame: bytes) -> str:
    """Return the encoding by JPEG 2000's coding style: whether its components were transformed."""
    for marker, segment in _iterate_segments(frame, 2):
        if marker == _START_OF_TILE:
            break
        if marker == _CODING_STYLE:
            return "" if segment[4] else _UNTRANSFORMED
    return ""


def _jpeg_encoding(frame: bytes) -> str:
    """Return the encoding by the segments of JFIF and Adobe, else by the names of the components."""
    if not frame.startswith(b"\xff\xd8"):
        return ""
    for marker, segment in _iterate_segments(frame, 2):
        if marker == _APP0 and segment.startswith(b"JFIF\0"):
            return _YBR
        if marker == _APP14 and segment.startswith(b"Adobe"):
            return _YBR if segment[11] == 1 else _RGB
        if marker in _START_OF_FRAME:
            return _RGB if segment[5] == 3 and segment[6::3][:3] == b"RGB" else ""
        if marker == _START_OF_SCAN:
            break
    return ""


def _iterate_segments(stream: bytes, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield (second byte of the marker, content) of the segments of a JPEG or JPEG 2000 head."""
    while position + 4 <= len(stream) and stream[position] == 0xFF:
        marker, length = stream[position + 1], struct.unpack_from(">H", stream, position + 2)[0]
        yield marker, stream[position + 4 : position + 2 + length]
        position += 2 + length
