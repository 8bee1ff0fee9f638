"""Where the tiles of a TIFF lie: the directories of a TIFF or BigTIFF, as far as their tiles are colour JPEG."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tifffile import TiffPage

_JPEG, _RGB, _YCBCR = 7, 2, 6
logging.getLogger("tifffile").addHandler(logging.NullHandler())
"""What it finds odd in a file is no user's business: OpenSlide judges the file."""


@dataclass(frozen=True)
class TiledImage:
    """One directory of a TIFF. Tiles are numbered row by row."""

    size_px: tuple[int, int]
    """(width, height) of the picture; tiles of the last column and row may hang over."""
    tile_px: tuple[int, int]
    """(width, height)"""
    offset: NDArray[np.int64]
    """[n] where each tile's bytes begin in the file."""
    n_bytes: NDArray[np.int64]
    """[n]; 0 where the file leaves a tile out."""
    tables: bytes
    """JPEG tables that all tiles share, or b""."""
    rgb: bool
    """Whether the tiles' components are red, green and blue instead of YCbCr."""

    @cached_property
    def n_columns(self) -> int:
        return -(-self.size_px[0] // self.tile_px[0])

    @cached_property
    def n_rows(self) -> int:
        return -(-self.size_px[1] // self.tile_px[1])


def tiled_images(path: Path) -> list[TiledImage]:
    """The directories whose tiles are 8-bit colour JPEG, in the file's order; none where the file is no such TIFF.

    Labels, macros and thumbnails in strips are left out, and so is whatever cannot be parsed.
    """
    from tifffile import TiffFile, TiffPage

    found: list[TiledImage] = []
    try:
        with TiffFile(path) as tif:
            found.extend(
                _image(page) for page in tif.pages if isinstance(page, TiffPage) and is_readable(page)
            )
    except Exception:  # whatever a parser stumbles over in a damaged or foreign file: OpenSlide judges it
        return []
    return [image for image in found if len(image.offset) == image.n_columns * image.n_rows]


def levels_of(
    path: Path, level_sizes_px: tuple[tuple[int, int], ...], properties: Mapping[str, str]
) -> list[TiledImage | None]:
    """For every level that OpenSlide lists, the one directory of that very size and tiling, or None."""
    images = tiled_images(path)
    levels: list[TiledImage | None] = []
    for k, size_px in enumerate(level_sizes_px):
        stated = [properties.get(f"openslide.level[{k}].tile-{side}") for side in ("width", "height")]
        same = [i for i in images if i.size_px == size_px and [str(n) for n in i.tile_px] == stated]
        levels.append(same[0] if len(same) == 1 else None)
    return levels


def is_readable(page: TiffPage) -> bool:
    """Return whether a directory's tiles are 8-bit colour JPEG."""
    return (
        page.is_tiled
        and min(page.imagewidth, page.imagelength, page.tilewidth, page.tilelength) > 0
        and page.compression == _JPEG
        and page.photometric in {_RGB, _YCBCR}
        and page.samplesperpixel == 3
        and page.bitspersample == 8
        and page.planarconfig == 1
        and page.imagedepth == 1
    )


def _image(page: TiffPage) -> TiledImage:
    return TiledImage(
        (page.imagewidth, page.imagelength),
        (page.tilewidth, page.tilelength),
        np.asarray(page.dataoffsets, np.int64),
        np.asarray(page.databytecounts, np.int64),
        page.jpegtables or b"",
        page.photometric == _RGB,
    )
