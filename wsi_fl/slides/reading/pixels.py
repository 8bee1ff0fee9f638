"""Pictures as arrays: over a background, at another scale, and with pieces missing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.types import WsiFlError

_MOST_FAILURES, _MOST_MISSING = 400, 0.5

Area = tuple[slice, slice]
"""Rows and columns of a picture."""


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


class Failures:
    """Which pixels of a picture [rows, columns] could not be painted."""

    def __init__(self, rows: int, columns: int) -> None:
        self._missing = np.zeros((rows, columns), bool)
        self._smallest_px = max(8, max(rows, columns) // 64)
        self._n = 0

    def paint(self, painter: Callable[[Area], None], area: Area) -> None:
        """Calls `painter` for the area, or for halves of halves of it where it raises WsiFlError.

        Raises:
            WsiFlError: the painter's, when too much fails.
        """
        try:
            painter(area)
        except WsiFlError:
            self._n += 1
            axis = int(np.argmax([part.stop - part.start for part in area]))
            start, stop = area[axis].start, area[axis].stop
            if stop - start <= self._smallest_px:
                self._missing[area] = True
            if self._n > _MOST_FAILURES or self._missing.mean() > _MOST_MISSING:
                raise
            if stop - start > self._smallest_px:
                for half in (slice(start, (start + stop) // 2), slice((start + stop) // 2, stop)):
                    self.paint(painter, (half, area[1]) if axis == 0 else (area[0], half))

    def mended(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The picture [rows, columns, 3] with the nearest painted pixel wherever one is missing."""
        if not self._missing.any():
            return picture
        from scipy.ndimage import distance_transform_edt

        nearest = distance_transform_edt(self._missing, return_distances=False, return_indices=True)
        mended: NDArray[np.uint8] = picture[tuple(nearest)]
        return mended
