"""The patches of one slide in order: each native tile is decoded once and gives every patch its part."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.cuts import Cuts, cut
from wsi_fl.slides.reading.native import NativeLevel
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.system import jpeg
from wsi_fl.system.memory import BufferPool
from wsi_fl.types import GridSpec, WsiFlError

_REACH_BYTES = 1 << 28
"""How far ahead a tile gives, in pixels of the patches between; patches still further on decode it again. The next row
of the grid should lie within."""
_MEMORY = BufferPool(most=8)
"""Of strips that were written."""


class Sweep:
    """Reads patches strip by strip.

    Threads call `fill` once for each strip, about in order. A strip can be taken once its own call and all before it
    have returned.

    Args:
        slide: open; it stays open.
        xy_l0: the patches' corners [n, 2].
        spec: their size and resolution.
        step: patches in a strip.
        first: row of the first patch among all that are read.
    """

    def __init__(
        self, slide: Slide, xy_l0: NDArray[np.int64], spec: GridSpec, step: int, first: int = 0
    ) -> None:
        self._slide, self._spec, self._step, self._first = slide, spec, step, first
        native = slide.native_positions(xy_l0, spec.size_px, spec.mpp)
        self._level: NativeLevel | None = None
        tiled = over = np.zeros(len(xy_l0), bool)
        if native is not None:
            self._level, at, tiled = native
            rows = np.flatnonzero(tiled)
            reach = max(1, _REACH_BYTES // (step * spec.size_px**2 * 3))
            self._cuts = cut(self._level.image, at[rows], rows, spec.size_px, step=step, reach=reach)
            ends = at + spec.size_px > self._level.image.size_px
            over = tiled & ((at < 0) | ends).any(axis=1)
        strips = (slice(start, start + step) for start in range(0, len(xy_l0), step))
        self._strips = {k: _Strip(xy_l0[some], tiled[some], over[some]) for k, some in enumerate(strips)}
        self._n = len(self._strips)
        self._allocating = threading.Lock()

    def __len__(self) -> int:
        return self._n

    def fill(self, number: int) -> int:
        """Decode the tiles under a strip that none before it decodes, and return its number.

        What has no tiles is read from the slide.
        """
        strip = self._strips[number]
        self._read(strip, np.flatnonzero(~strip.tiled).tolist())
        if self._level is not None:
            self._decode(self._level, self._cuts, number)
        return number

    def take(self, number: int, aside: dict[int, str] | None) -> tuple[int, NDArray[np.uint8]]:
        """(row of the first patch, the good ones' pixels uint8[b, size_px, size_px, 3]); the strip is gone then.

        Args:
            number: of the strip.
            aside: row → why it cannot be decoded; the bad ones are added.

        Raises:
            WsiFlError: when one is bad and `aside` is None.
        """
        strip = self._strips.pop(number)
        self._read(strip, sorted(strip.doubtful))
        first, pixels = self._first + number * self._step, self._pixels(strip)
        if not strip.bad:
            return first, pixels
        if aside is None:
            raise WsiFlError(strip.bad[min(strip.bad)])
        aside.update((first + k, strip.bad[k]) for k in sorted(strip.bad))
        return first, np.delete(pixels, list(strip.bad), 0)

    def _read(self, strip: _Strip, some: Iterable[int]) -> None:
        """These patches, one by one."""
        size, overlapping = self._spec.size_px, self._spec.stride_px < self._spec.size_px
        pixels = self._pixels(strip)
        for k in some:
            x, y = strip.corners[k].tolist()
            try:
                self._slide.read((x, y), size, self._spec.mpp, pixels[k], overlapping)
            except WsiFlError as error:
                strip.bad[k] = str(error)

    def _decode(self, level: NativeLevel, cuts: Cuts, number: int) -> None:
        jobs, parts = cuts.of(number)
        first, end = jobs[:, 2:].T
        patches, scratch = self._patches(parts[:, 0]), level.room()
        alone = (end - first == 1) & _whole(parts, level.tile_shape, self._spec.size_px)[first]
        served = zip(first.tolist(), end.tolist(), alone.tolist(), strict=True)
        places = parts[:, 1:].tolist()
        for stream, (begin, stop, direct) in zip(level.streams(jobs[:, 1]), served, strict=True):
            try:
                jpeg.decode(stream, patches[begin] if direct else scratch)
            except WsiFlError:
                for patch in parts[begin:stop, 0].tolist():
                    strip, k = divmod(patch, self._step)
                    self._strips[strip].doubtful.add(k)
                continue
            if not direct:
                for part, patch in zip(places[begin:stop], patches[begin:stop], strict=True):
                    _copy(scratch, part, patch)

    def _patches(self, numbers: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Where these patches go."""
        strips, k = np.divmod(numbers, self._step)
        pixels = {strip: self._pixels(self._strips[strip]) for strip in np.unique(strips).tolist()}
        return [pixels[strip][k] for strip, k in zip(strips.tolist(), k.tolist(), strict=True)]

    def _pixels(self, strip: _Strip) -> NDArray[np.uint8]:
        """The strip's array, made when it is first wanted; patches over the edge have the background's colour."""
        with self._allocating:
            if strip.pixels is None:
                size = self._spec.size_px
                strip.pixels = _MEMORY.empty((len(strip.corners), size, size, 3), np.uint8)
                if self._level is not None and strip.over.any():
                    strip.pixels[strip.over] = self._level.background
            return strip.pixels


class _Strip:
    """Successive patches on their way into one array: their corners, whether tiles make them, whether they lie over
    the edge."""

    def __init__(self, corners: NDArray[np.int64], tiled: NDArray[np.bool_], over: NDArray[np.bool_]) -> None:
        self.corners, self.tiled, self.over = corners, tiled, over
        self.pixels: NDArray[np.uint8] | None = None
        self.doubtful: set[int] = set()
        """Over a tile that cannot be decoded."""
        self.bad: dict[int, str] = {}
        """Patch → why it cannot be read."""


def _copy(tile: NDArray[np.uint8], part: Sequence[int], patch: NDArray[np.uint8]) -> None:
    """Copy a part of a tile, as in `Cuts.parts` without the patch's number, to its place in a patch."""
    top, bottom, left, right, row, column = part
    patch[row : row + bottom - top, column : column + right - left] = tile[top:bottom, left:right]


def _whole(parts: NDArray[np.int64], tile_shape: tuple[int, ...], size_px: int) -> NDArray[np.bool_]:
    """[p] whether a part is a whole tile and a whole patch."""
    if tile_shape[:2] != (size_px, size_px):
        return np.zeros(len(parts), bool)
    return np.asarray(np.all(parts[:, 1:5] == (0, size_px, 0, size_px), axis=1))
