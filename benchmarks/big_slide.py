"""Slides as large as real ones, made of a small picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.demo.simulated_slides.tiff_writer import TILE_PX, Level, encode_tiles, write_levels


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

    def levels() -> Iterator[Level]:
        side, extent = min(block.shape[:2]) // tile_px * tile_px, size_px
        level = block[:side, :side]
        while True:
            repeats = tile_px // math.gcd(level.shape[0], tile_px)
            level = np.tile(level, (repeats, repeats, 1))
            tiles = list(encode_tiles(level, quality, tile_px))
            period, n = level.shape[0] // tile_px, range(-(-extent // tile_px))
            yield (extent, extent, (tiles[row % period * period + column % period] for row in n for column in n))
            if extent <= tile_px:
                break
            level, extent = np.asarray(Image.fromarray(level).reduce(2)), extent // 2

    write_levels(path, levels(), mpp, tile_px, shared)
