"""Pictures as arrays: over a background, and at another scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def rgb(region: Image.Image, background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """An RGBA region as writable uint8[h, w, 3] over the background; only transparent ones pay for blending."""
    if not _opaque(region):
        region = Image.alpha_composite(Image.new("RGBA", region.size, (*background, 255)), region)
    packed = bytearray(region.tobytes("raw", "RGB"))
    return np.frombuffer(packed, np.uint8).reshape(region.height, region.width, 3)


def resampled(
    region: Image.Image, size: tuple[int, int], reduction: float, box: tuple[float, ...]
) -> Image.Image:
    """The box of a region as a picture of that size, averaged by area where it shrinks."""
    whole = tuple(round(v) for v in box)
    if reduction == round(reduction) and box == whole and (whole[2] - whole[0]) == size[0] * reduction:
        small = region.reduce(round(reduction), (whole[0], whole[1], whole[2], whole[3]))
        if small.size == size:
            return small
    how = Image.Resampling.BOX if reduction > 1 else Image.Resampling.BILINEAR
    return region.resize(size, how, box=(box[0], box[1], box[2], box[3]))


def _opaque(region: Image.Image) -> bool:
    """Whether all alpha is 255, seen in one pass over whole little-endian pixels."""
    pixels = np.frombuffer(region.tobytes(), "<u4")
    return pixels.size == 0 or int(pixels.min()) >= 0xFF000000
