"""Frames of a DICOM file: their places, and the colour encoding of packed ones, which may contradict its header.

Decoders go by the header. Where the first frame contradicts it, they silently show wrong colours.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.system.files import require_regular_file

_ENCAPSULATED = struct.pack("<HH2sHI", 0x7FE0, 0x0010, b"OB", 0, 0xFFFFFFFF)
_ITEM_BYTES, _HEAD_BYTES = 8, 1 << 16
_APP0, _APP14, _START_OF_FRAME, _START_OF_SCAN = 0xE0, 0xEE, {0xC0, 0xC1, 0xC2}, 0xDA
_CODESTREAM, _CODING_STYLE, _START_OF_TILE = b"\xff\x4f\xff\x51", 0x52, 0x90
_ITEM, _MAX_CHECKED = 0xE000FFFE, 64
_OFFSET_TABLES = tuple(struct.pack("<HH2sH", 0x7FE0, number, b"OV", 0) for number in (1, 2))
"""Heads of the extended tables of offsets and of lengths, which stand before the frames."""
_Places = NDArray[np.int64]
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


def locate_frames(path: Path, n_frames: int, frame_bytes: int, *, is_packed: bool) -> tuple[_Places, _Places] | None:
    """Return (first byte, number of bytes) [n] of each frame in a DICOM file; None where that cannot be told.

    Packed frames of several fragments each are not located.

    Args:
        frame_bytes: of a frame that is not packed.
    """
    with require_regular_file(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if not 0 < n_frames * _ITEM_BYTES < len(data):
            return None
        try:
            if not is_packed:
                return _locate_plain_frames(data, n_frames, frame_bytes)
            return _locate_packed_frames(data, n_frames)
        except (struct.error, ValueError):  # a damaged file is reported when it is read
            return None


def _locate_plain_frames(data: mmap.mmap, n_frames: int, frame_bytes: int) -> tuple[_Places, _Places] | None:
    n_bytes = n_frames * frame_bytes
    heads = (struct.pack("<HH2sHI", 0x7FE0, 0x0010, kind, 0, n_bytes + n_bytes % 2) for kind in (b"OB", b"OW"))
    start = max(map(data.find, heads))
    if start < 0:
        return None
    return start + len(_ENCAPSULATED) + np.arange(n_frames) * frame_bytes, np.full(n_frames, frame_bytes)


def _locate_packed_frames(data: mmap.mmap, n_frames: int) -> tuple[_Places, _Places] | None:
    if (head := data.find(_ENCAPSULATED)) < 0:
        return None
    table = head + len(_ENCAPSULATED) + _ITEM_BYTES
    table_bytes = struct.unpack_from("<I", data, table - 4)[0]
    first = table + table_bytes
    extended = head - 2 * (len(_ENCAPSULATED) + 8 * n_frames)
    starts = np.empty(0, np.int64)
    if extended >= 0 and data[extended : extended + 8] == _OFFSET_TABLES[0]:
        starts = np.frombuffer(data[extended + len(_ENCAPSULATED) :][: 8 * n_frames], "<u8").astype(np.int64)
    elif table_bytes == 4 * n_frames:
        starts = np.frombuffer(data[table:first], "<u4").astype(np.int64)
    if len(starts):
        starts += first
        lengths = np.diff(starts, append=starts[-1]) - _ITEM_BYTES
        lengths[-1] = struct.unpack_from("<I", data, int(starts[-1]) + 4)[0]
        checked = np.unique(np.linspace(0, n_frames - 1, _MAX_CHECKED).astype(int)).tolist()
    else:
        starts, lengths, checked = *_scan_items(data, first, n_frames), [n_frames - 1]
    items = [struct.unpack_from("<II", data, int(starts[k])) for k in checked]
    if items != [(_ITEM, lengths[k]) for k in checked] or starts[-1] + _ITEM_BYTES + lengths[-1] > len(data):
        return None
    end = int(starts[-1] + _ITEM_BYTES + lengths[-1])
    return None if data[end : end + 4] == struct.pack("<I", _ITEM) else (starts + _ITEM_BYTES, lengths)


def _scan_items(data: mmap.mmap, position: int, n_items: int) -> tuple[_Places, _Places]:
    """Return (start, length) of as many items one after the other."""
    places = np.empty((2, n_items), np.int64)
    for k in range(n_items):
        tag, length = struct.unpack_from("<II", data, position)
        if tag != _ITEM:
            raise ValueError("no item")
        places[:, k] = position, length
        position += _ITEM_BYTES + length
    return places[0], places[1]


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
