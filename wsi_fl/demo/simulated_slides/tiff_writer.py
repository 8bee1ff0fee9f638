"""Writing a slide: a tiled JPEG pyramid in a BigTIFF.

tifffile cannot write JPEG tiles, not even encoded ones, without the imagecodecs package; the container is simple enough
to be written here. Layout: Aldus TIFF 6.0 with the 64-bit fields of BigTIFF, little-endian, one directory per level.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.system import jpeg
from wsi_fl.system.files import atomic_path

TILE_PX = 512
_SHORT, _LONG, _RATIONAL, _LONG8 = (3, "H"), (4, "I"), (5, "I"), (16, "Q")

_Tag = tuple[int, tuple[int, str], list[int]]
Level = tuple[int, int, Iterable[bytes]]
"""(height, width, tiles row by row)."""


def encode_tiles(level: NDArray[np.uint8], quality: int, tile_px: int = TILE_PX) -> Iterator[bytes]:
    """Yield the tiles of a level [h, w, 3] row by row, each a complete YCbCr JPEG with colour subsampled 2×2.

    A tile over the edge is padded with the edge's pixels, with less ringing than a fixed colour.
    """
    for y in range(0, level.shape[0], tile_px):
        for x in range(0, level.shape[1], tile_px):
            tile = level[y : y + tile_px, x : x + tile_px]
            padding = [(0, tile_px - tile.shape[0]), (0, tile_px - tile.shape[1]), (0, 0)]
            yield jpeg.encode(np.pad(tile, padding, mode="edge"), quality)


def write_pyramid(
    path: Path, image: NDArray[np.uint8], mpp: float, *, quality: int = 87, tile_px: int = TILE_PX
) -> None:
    """Write [h, w, 3] RGB as a tiled JPEG BigTIFF whose levels halve down to one tile, atomically.

    OpenSlide opens it as `generic-tiff` and takes `mpp` from the resolution tags.
    """

    def halve_levels() -> Iterator[Level]:
        level = image
        yield (*level.shape[:2], encode_tiles(level, quality, tile_px))
        while max(level.shape) > tile_px:
            level = np.asarray(Image.fromarray(level).reduce(2))
            yield (*level.shape[:2], encode_tiles(level, quality, tile_px))

    write_levels(path, halve_levels(), mpp, tile_px)


def write_levels(path: Path, levels: Iterable[Level], mpp: float, tile_px: int, shared: bool = False) -> None:
    """Write levels from the finest on, atomically; each has half the resolution of the one before.

    Args:
        shared: let equal tiles of a level share their bytes.
    """
    with atomic_path(path) as partial, partial.open("wb") as file:
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        link = file.tell() - 8  # where the address of the next directory belongs
        for k, (height, width, tiles) in enumerate(levels):
            starts: list[int] = []
            lengths: list[int] = []
            tile_starts: dict[bytes, int] = {}
            for tile in tiles:
                start = tile_starts.get(tile)
                if start is None:
                    start = file.tell()
                    file.write(tile)
                if shared:
                    tile_starts[tile] = start
                starts.append(start)
                lengths.append(len(tile))
            tags = _build_tags(height, width, mpp * 2**k, tile_px, reduced=k > 0)
            link = _write_directory(file, link, [*tags, (324, _LONG8, starts), (325, _LONG8, lengths)])


def _build_tags(height: int, width: int, mpp: float, tile_px: int, *, reduced: bool) -> list[_Tag]:
    """Return the tags of a level, without those of its tiles."""
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
    """Append a directory of tags, point `link` at it, and return the place of its link to the next one."""
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
