"""Tiles for several people at once: as many are read at a time as there are processors, and none that nobody awaits."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock, Semaphore
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.slides.reading.reader import Slide
from wsi_fl.viewer.pyramid import TILE_PX, Pyramid, downsample_for, read_tile

_COARSE_BYTES = 256 << 20
_MOST_REDUCTION = 4
"""Pixels of a slide's level per pixel of a tile, in each direction, beyond which a tile is cut from a coarse level."""


T = TypeVar("T", bytes, NDArray[np.uint8])


class Recent(Generic[T]):
    """The values that were asked for last; all methods may be called from several threads.

    Args:
        most_bytes: of all that are kept; the latest is kept whatever its size.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._making: dict[Hashable, Lock] = {}
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; whoever asks while it is made waits for it, and nobody else does.

        Args:
            make: makes the value where it is not kept. What it raises is raised, and the next who asks tries again.
        """
        with self._lock:
            making = self._making.setdefault(key, Lock())
        with making:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
            value = make()
            with self._lock:
                self._values[key] = value
                self._drop()
        return value

    def _drop(self) -> None:
        while len(self._values) > 1 and sum(map(_n_bytes, self._values.values())) > self._most_bytes:
            self._values.popitem(last=False)


def _n_bytes(value: bytes | NDArray[np.uint8]) -> int:
    return len(value) if isinstance(value, bytes) else value.nbytes


class TileReader:
    """Reads tiles of slides; may be called from several threads."""

    def __init__(self) -> None:
        self._slots = Semaphore(len(os.sched_getaffinity(0)))
        self._coarse: Recent[NDArray[np.uint8]] = Recent(_COARSE_BYTES)

    def read(
        self, slide: Slide, level: int, column: int, row: int, awaited: Callable[[], bool] = lambda: True
    ) -> NDArray[np.uint8] | None:
        """Return the pixels of a tile, as `read_tile` does.

        If no pyramid level is coarse enough, build one in memory and cache it.

        Args:
            awaited: whether somebody still wants it; asked before each part is read.

        Raises:
            NotAwaited: when nobody does.
            WsiFlError: when the slide cannot be decoded there.
        """
        pyramid = Pyramid(slide.size_l0)
        box = pyramid.box(level, column, row)
        if box is None:
            return None
        scale = pyramid.scale(level)
        if level > pyramid.coarse or scale <= _MOST_REDUCTION * downsample_for(slide, scale):
            return self._read(slide, level, column, row, awaited)
        whole = self._coarse.get(str(slide.path), lambda: self._coarse_level(slide, pyramid, awaited))
        factor = scale // pyramid.scale(pyramid.coarse)
        left, top, width, height = (extent * factor for extent in box)
        part = np.ascontiguousarray(whole[top : top + height, left : left + width])
        return np.asarray(Image.fromarray(part).reduce(factor))

    def _read(
        self, slide: Slide, level: int, column: int, row: int, awaited: Callable[[], bool]
    ) -> NDArray[np.uint8] | None:
        with self._slots:
            return read_tile(slide, level, column, row, awaited)

    def _coarse_level(self, slide: Slide, pyramid: Pyramid, awaited: Callable[[], bool]) -> NDArray[np.uint8]:
        """A whole level, uint8[h, w, 3]."""
        width, height = pyramid.size(pyramid.coarse)
        out = np.empty((height, width, 3), np.uint8)
        for row in range(-(-height // TILE_PX)):
            for column in range(-(-width // TILE_PX)):
                tile = self._read(slide, pyramid.coarse, column, row, awaited)
                assert tile is not None
                top, left = row * TILE_PX, column * TILE_PX
                out[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
        return out
