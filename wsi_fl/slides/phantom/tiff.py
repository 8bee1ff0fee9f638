"""Writing a slide: a tiled JPEG pyramid in a BigTIFF.

tifffile cannot write JPEG tiles, not even encoded ones, without the imagecodecs package; the container is simple enough
to be written here. Layout: Aldus TIFF 6.0 with the 64-bit fields of BigTIFF, little-endian, one directory per level.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TILE_PX = 512
_SHORT, _LONG, _RATIONAL, _LONG8 = (3, "H"), (4, "I"), (5, "I"), (16, "Q")

_Tag = tuple[int, tuple[int, str], list[int]]


def jpeg_tiles(level: NDArray[np.uint8], quality: int) -> Iterator[bytes]:
    """The tiles of a level [h, w, 3] row by row, each a complete YCbCr JPEG with colour subsampled 2×2.

    A tile that hangs over the edge is filled up with the edge's own pixels, which rings less than a fixed colour.
    """
    for y in range(0, level.shape[0], TILE_PX):
        for x in range(0, level.shape[1], TILE_PX):
            tile = level[y : y + TILE_PX, x : x + TILE_PX]
            lacking = [(0, TILE_PX - tile.shape[0]), (0, TILE_PX - tile.shape[1]), (0, 0)]
            encoded = io.BytesIO()
            whole = Image.fromarray(np.pad(tile, lacking, mode="edge"))
            whole.save(encoded, "JPEG", quality=quality, subsampling="4:2:0")
            yield encoded.getvalue()


def write_pyramid(path: Path, image: NDArray[np.uint8], mpp: float, *, quality: int = 87) -> None:
    """Write [h, w, 3] RGB as a tiled JPEG BigTIFF whose levels halve down to one tile, atomically.

    OpenSlide opens it as `generic-tiff` and takes `mpp` from the resolution tags.
    """
    level, level_mpp = image, mpp
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        link = file.tell() - 8  # where the address of the next directory belongs
        while True:
            starts, lengths = [], []
            for tile in jpeg_tiles(level, quality):
                starts.append(file.tell())
                lengths.append(file.write(tile))
            tags = _tags(level.shape[0], level.shape[1], level_mpp, reduced=level_mpp != mpp)
            link = _write_directory(file, link, [*tags, (324, _LONG8, starts), (325, _LONG8, lengths)])
            if max(level.shape) <= TILE_PX:
                break
            level, level_mpp = np.asarray(Image.fromarray(level).reduce(2)), level_mpp * 2
    partial.replace(path)


def _tags(height: int, width: int, mpp: float, reduced: bool) -> list[_Tag]:
    """What a reader has to know of a level, besides where its tiles are."""
    per_cm = [round(1e7 / mpp), 1000]
    return [
        (254, _LONG, [int(reduced)]),
        (256, _LONG, [width]),
        (257, _LONG, [height]),
        (258, _SHORT, [8, 8, 8]),
        (259, _SHORT, [7]),  # compression: JPEG
        (262, _SHORT, [6]),  # photometric interpretation: YCbCr
        (277, _SHORT, [3]),
        (282, _RATIONAL, per_cm),
        (283, _RATIONAL, per_cm),
        (284, _SHORT, [1]),
        (296, _SHORT, [3]),  # resolution unit: centimetre
        (322, _LONG, [TILE_PX]),
        (323, _LONG, [TILE_PX]),
        (530, _SHORT, [2, 2]),  # chroma subsampling
        (532, _RATIONAL, [0, 1, 255, 1, 128, 1, 255, 1, 128, 1, 255, 1]),  # reference black and white
    ]


def _write_directory(file: BinaryIO, link: int, tags: list[_Tag]) -> int:
    """Append a directory of tags, point `link` at it, and return where its own link to the next one stands."""
    entries = []
    for number, (kind, code), values in sorted(tags):
        data = struct.pack(f"<{len(values)}{code}", *values)
        if len(data) > 8:
            place = file.tell()
            file.write(data)
            data = struct.pack("<Q", place)
        n_values = len(values) // 2 if kind == _RATIONAL[0] else len(values)
        entries.append(struct.pack("<HHQ8s", number, kind, n_values, data))
    start = file.tell()
    file.write(struct.pack("<Q", len(entries)) + b"".join(entries) + struct.pack("<Q", 0))
    end = file.tell()
    file.seek(link)
    file.write(struct.pack("<Q", start))
    file.seek(end)
    return end - 8
