"""Writing a slide: a tiled JPEG pyramid in a BigTIFF.

tifffile cannot write JPEG tiles, not even encoded ones, without the imagecodecs package; the container is simple enough
to be written here. Layout: Aldus TIFF 6.0 with the 64-bit fields of BigTIFF, little-endian, one directory per level.
"""

from __future__ import annotations

import io
import math
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


def jpeg_tiles(level: NDArray[np.uint8], quality: int, tile_px: int = TILE_PX) -> Iterator[bytes]:
    """The tiles of a level [h, w, 3] row by row, each a complete YCbCr JPEG with colour subsampled 2×2.

    A tile that hangs over the edge is filled up with the edge's own pixels, which rings less than a fixed colour.
    """
    for y in range(0, level.shape[0], tile_px):
        for x in range(0, level.shape[1], tile_px):
            tile = level[y : y + tile_px, x : x + tile_px]
            lacking = [(0, tile_px - tile.shape[0]), (0, tile_px - tile.shape[1]), (0, 0)]
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
            tags = _tags(level.shape[0], level.shape[1], level_mpp, TILE_PX, reduced=level_mpp != mpp)
            link = _write_directory(file, link, [*tags, (324, _LONG8, starts), (325, _LONG8, lengths)])
            if max(level.shape) <= TILE_PX:
                break
            level, level_mpp = np.asarray(Image.fromarray(level).reduce(2)), level_mpp * 2
    partial.replace(path)


def write_big_slide(
    path: Path,
    block: NDArray[np.uint8],
    mpp: float,
    *,
    size_px: int,
    tile_px: int = TILE_PX,
    quality: int = 87,
    shared: bool = False,
) -> None:
    """Write a square slide of `size_px` that repeats a picture [h, w, 3], in seconds whatever its size, atomically.

    Args:
        path: where to.
        block: of which the largest square of whole tiles is repeated.
        mpp: µm per pixel of level 0.
        size_px: of the slide; levels halve down to one tile.
        tile_px: the side of its tiles.
        quality: of their JPEG.
        shared: let equal tiles share their bytes, for slides too big for the disk; timings want bytes of their own.
    """
    side = min(block.shape[:2]) // tile_px * tile_px
    level, extent, level_mpp = block[:side, :side], size_px, mpp
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        link = file.tell() - 8
        while True:
            repeats = tile_px // math.gcd(level.shape[0], tile_px)
            level = np.tile(level, (repeats, repeats, 1))
            tiles = list(jpeg_tiles(level, quality, tile_px))
            starts, lengths = _write_repeated(
                file, tiles, level.shape[0] // tile_px, -(-extent // tile_px), shared
            )
            tags = _tags(extent, extent, level_mpp, tile_px, reduced=level_mpp != mpp)
            link = _write_directory(file, link, [*tags, (324, _LONG8, starts), (325, _LONG8, lengths)])
            if extent <= tile_px:
                break
            level, extent, level_mpp = (
                np.asarray(Image.fromarray(level).reduce(2)),
                extent // 2,
                level_mpp * 2,
            )
    partial.replace(path)


def _write_repeated(
    file: BinaryIO, tiles: list[bytes], period: int, n: int, shared: bool
) -> tuple[list[int], list[int]]:
    """Where the n × n tiles of a level begin and how long they are; they repeat every `period` columns and rows."""
    numbers = [row % period * period + column % period for row in range(n) for column in range(n)]
    starts, first = [], {}
    for number in numbers:
        if not shared or number not in first:
            first[number] = file.tell()
            file.write(tiles[number])
        starts.append(first[number])
    return starts, [len(tiles[number]) for number in numbers]


def _tags(height: int, width: int, mpp: float, tile_px: int, *, reduced: bool) -> list[_Tag]:
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
        (322, _LONG, [tile_px]),
        (323, _LONG, [tile_px]),
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
