"""Deep Zoom: a slide as square tiles of levels that halve, and their pixels, for several people at once.

Levels are counted as in Microsoft's Deep Zoom: level 0 is one pixel, the last one the slide itself. As many tiles are
read at a time as there are CPU cores, and only for clients still connected.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import ceil
from threading import Lock, Semaphore
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.slides.reading.reader import Slide
from wsi_fl.system.machine import n_cores

TILE_PX = 512
_STRIP_PX = 1 << 24
"""Maximum number of a slide's pixels in memory while a tile is averaged."""
_LEVEL_TOLERANCE = 1.01
_COARSE_PX = 4096
_COARSE_BYTES = 256 << 20
_MAX_REDUCTION = 4
"""Maximum reduction in each direction from a slide's level to a tile; beyond it tiles are cut from a coarse level."""
_Box = tuple[int, int, int, int]
"""Left, top, width, height in pixels of a level."""
_Awaited = Callable[[], bool]
"""Whether the client still waits for a tile; called before each part is read."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Pyramid:
    """The levels of a slide of (width, height) level-0 pixels.

    Example:
        >>> pyramid = Pyramid((100_000, 40_000))
        >>> pyramid.last_level, pyramid.level_size(pyramid.last_level), pyramid.level_size(pyramid.first_level)
        (17, (100000, 40000), (391, 157))
        >>> pyramid.box(pyramid.last_level, 195, 0), pyramid.box(pyramid.last_level, 196, 0)
        ((99840, 0, 160, 512), None)
    """

    size_l0: tuple[int, int]

    @property
    def last_level(self) -> int:
        """The level of the slide's full resolution."""
        return (max(self.size_l0) - 1).bit_length()

    @property
    def first_level(self) -> int:
        """The finest level of a single tile, the lowest for a viewer."""
        return min(self.last_level, TILE_PX.bit_length() - 1)

    @property
    def coarse_level(self) -> int:
        """The finest level of at most 4096 pixels a side, which fits in 50 MB."""
        return min(self.last_level, _COARSE_PX.bit_length() - 1)

    def level_scale(self, level: int) -> int:
        """Return the level-0 pixels per pixel of a level."""
        return 1 << (self.last_level - level)

    def level_size(self, level: int) -> tuple[int, int]:
        """Return (width, height) of a level."""
        width, height = (ceil(extent / self.level_scale(level)) for extent in self.size_l0)
        return width, height

    def box(self, level: int, column: int, row: int) -> _Box | None:
        """Return the box of a tile in its level; None where there is no such tile."""
        if not 0 <= level <= self.last_level:
            return None
        width, height = self.level_size(level)
        x, y = column * TILE_PX, row * TILE_PX
        if x >= width or y >= height:
            return None
        return x, y, min(TILE_PX, width - x), min(TILE_PX, height - y)


class NotAwaited(Exception):
    """The client no longer waits for a tile."""


def _downsample_for(slide: Slide, scale: float) -> float:
    """Return the downsampling of the slide's level from which a level of this scale is averaged."""
    return max((d for d in slide.level_downsamples if d <= scale * _LEVEL_TOLERANCE), default=1.0)


def _average_area(slide: Slide, scale: float, box: _Box, awaited: _Awaited = lambda: True) -> NDArray[np.uint8]:
    """Return the pixels uint8[h, w, 3] of a box, averaged by area from `scale` level-0 pixels per pixel.

    Averages of neighbouring tiles share no pixel of the slide, so tiles need no overlap.
    """
    x, y, width, height = box
    out = np.empty((height, width, 3), np.uint8)
    step = max(1, int(_STRIP_PX / (width * (scale / _downsample_for(slide, scale)) ** 2)))
    for start in range(0, height, step):
        if not awaited():
            raise NotAwaited
        corner = x * scale, (y + start) * scale
        slide.read_area(corner, scale, out[start : start + step], overlapping=False)
    return out


class RecentValues(Generic[_T]):
    """A cache of recently used values whose sizes add up to a limit, except that the latest is always kept.

    Thread-safe: concurrent calls for the same key wait, others do not.
    """

    def __init__(self, max_size: int, measure: Callable[[_T], int] = lambda _: 1) -> None:
        self._max_size, self._measure = max_size, measure
        self._values: OrderedDict[Hashable, _T] = OrderedDict()
        self._key_locks: defaultdict[Hashable, Lock] = defaultdict(Lock)
        self._lock = Lock()

    def get_or_make(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the value of a key, or make it; after an error the next call tries again."""
        with self._lock:
            key_lock = self._key_locks[key]
        with key_lock:
            with self._lock:
                stored = self._values.get(key)
            value = make() if stored is None else stored
            with self._lock:
                self._values[key] = value
                self._values.move_to_end(key)
                while len(self._values) > 1 and sum(map(self._measure, self._values.values())) > self._max_size:
                    self._values.popitem(last=False)
        return value


class TileReader:
    """Reader of tiles of slides; thread-safe."""

    def __init__(self) -> None:
        self._slots = Semaphore(n_cores())
        self._coarse: RecentValues[NDArray[np.uint8]] = RecentValues(_COARSE_BYTES, lambda pixels: pixels.nbytes)

    def read(
        self, slide: Slide, level: int, column: int, row: int, awaited: _Awaited = lambda: True
    ) -> NDArray[np.uint8] | None:
        """Return the pixels uint8[h, w, 3] of a tile; None where there is none. NotAwaited: the client hung up.

        If no pyramid level is coarse enough, build one in memory and cache it.
        """
        pyramid = Pyramid(slide.size_l0)
        box = pyramid.box(level, column, row)
        if box is None:
            return None
        scale = pyramid.level_scale(level)
        if level > pyramid.coarse_level or scale <= _MAX_REDUCTION * _downsample_for(slide, scale):
            with self._slots:
                return _average_area(slide, scale, box, awaited)
        coarse_scale = pyramid.level_scale(pyramid.coarse_level)

        def average_slide() -> NDArray[np.uint8]:
            with self._slots:
                return _average_area(slide, coarse_scale, (0, 0, *pyramid.level_size(pyramid.coarse_level)), awaited)

        coarse_pixels = self._coarse.get_or_make(str(slide.path), average_slide)
        factor = scale // coarse_scale
        x, y, width, height = (extent * factor for extent in box)
        part = np.ascontiguousarray(coarse_pixels[y : y + height, x : x + width])
        return np.asarray(Image.fromarray(part).reduce(factor))
