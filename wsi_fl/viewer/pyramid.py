"""Deep Zoom: a slide as square tiles of levels that halve, and their pixels.

Levels are counted as in Microsoft's Deep Zoom: level 0 is one pixel, the last one the slide itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.reader import Slide

TILE_PX = 512
_STRIP_PX = 1 << 24
"""Most pixels of a slide that are held while a tile is averaged from them."""
_LEVEL_TOLERANCE = 1.01

_COARSE_PX = 4096

TileBox = tuple[int, int, int, int]
"""Left, top, width, height in pixels of a level."""


@dataclass(frozen=True)
class Pyramid:
    """The levels of a slide of (width, height) level-0 pixels.

    Example:
        >>> pyramid = Pyramid((100_000, 40_000))
        >>> pyramid.last, pyramid.size(pyramid.last), pyramid.size(pyramid.first)
        (17, (100000, 40000), (391, 157))
        >>> pyramid.box(pyramid.last, 195, 0), pyramid.box(pyramid.last, 196, 0)
        ((99840, 0, 160, 512), None)
    """

    size_l0: tuple[int, int]

    @property
    def last(self) -> int:
        """The level that is the slide itself."""
        return (max(self.size_l0) - 1).bit_length()

    @property
    def first(self) -> int:
        """The finest level that is a single tile; a viewer needs none below it."""
        return min(self.last, TILE_PX.bit_length() - 1)

    @property
    def coarse(self) -> int:
        """The finest level of at most 4096 pixels a side; all of it fits in 50 MB."""
        return min(self.last, _COARSE_PX.bit_length() - 1)

    def scale(self, level: int) -> int:
        """Return the level-0 pixels per pixel of a level."""
        return 1 << (self.last - level)

    def size(self, level: int) -> tuple[int, int]:
        """Return (width, height) of a level."""
        width, height = (ceil(extent / self.scale(level)) for extent in self.size_l0)
        return width, height

    def box(self, level: int, column: int, row: int) -> TileBox | None:
        """Return where a tile lies in its level; None where there is no such tile."""
        if not 0 <= level <= self.last:
            return None
        width, height = self.size(level)
        left, top = column * TILE_PX, row * TILE_PX
        if left >= width or top >= height:
            return None
        return left, top, min(TILE_PX, width - left), min(TILE_PX, height - top)


class NotAwaited(Exception):
    """A tile that nobody waits for any more."""


def downsample_for(slide: Slide, scale: float) -> float:
    """Return the level-0 pixels per pixel of the slide's own level from which a level of this scale is averaged."""
    return max((d for d in slide.level_downsamples if d <= scale * _LEVEL_TOLERANCE), default=1.0)


def read_tile(
    slide: Slide, level: int, column: int, row: int, awaited: Callable[[], bool] = lambda: True
) -> NDArray[np.uint8] | None:
    """Return the pixels uint8[h, w, 3] of a tile, averaged by area; None where there is no such tile.

    Averages of neighbouring tiles share no pixel of the slide, so tiles need no overlap.

    Args:
        awaited: whether somebody still wants the tile; asked before each of its strips is read.

    Raises:
        NotAwaited: when nobody does.
        WsiFlError: when the slide cannot be decoded there.
    """
    pyramid = Pyramid(slide.size_l0)
    box = pyramid.box(level, column, row)
    if box is None:
        return None
    left, top, width, height = box
    scale = float(pyramid.scale(level))
    out = np.empty((height, width, 3), np.uint8)
    step = max(1, int(_STRIP_PX / (width * (scale / downsample_for(slide, scale)) ** 2)))
    for first in range(0, height, step):
        if not awaited():
            raise NotAwaited
        corner = left * scale, (top + first) * scale
        slide.area(corner, scale, out[first : first + step], overlapping=False)
    return out
