"""The patches of one slide in order: each native tile is decoded once and gives every patch its part."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from wsi_fl.recycled import Recycled
from wsi_fl.slides.cuts import Cuts, cut
from wsi_fl.slides.native import NativeLevel, TileReader
from wsi_fl.slides.reader import Slide
from wsi_fl.types import GridSpec, WsiFlError

_REACH_BYTES = 1 << 28
"""How far ahead a tile gives, in pixels of the patches between; patches still further on decode it again. The next row
of the grid should lie within."""
_SCRATCH_BYTES = 600_000
"""Tiles that are decoded before they are copied; more would not fit the cache of a core."""
_MEMORY = Recycled(most=8)
"""Of strips that are gone."""

Position = tuple[int, int] | None
"""(x, y) in pixels of a level; None where a patch is not made of its tiles."""


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
        corners = [(x, y) for x, y in xy_l0.tolist()]
        native = slide.native_positions(corners, spec.size_px, spec.mpp)
        self._level: NativeLevel | None = None
        at: list[Position] = [None] * len(corners)
        if native is not None:
            self._level, at = native
            self._cuts = self._cut(self._level, at)
        self._strips = {
            number: _Strip(corners[start : start + step], at[start : start + step])
            for number, start in enumerate(range(0, len(corners), step))
        }
        self._n = len(self._strips)
        self._allocating = threading.Lock()
        self._scratch = threading.local()

    def __len__(self) -> int:
        return self._n

    def fill(self, number: int) -> None:
        """Decodes the tiles under a strip that none before it decodes; what has no tiles is read from the slide."""
        strip = self._strips[number]
        self._read(strip, [k for k, xy in enumerate(strip.at) if xy is None])
        if self._level is not None:
            self._decode(self._level, self._cuts, number)

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

    def _cut(self, level: NativeLevel, at: list[Position]) -> Cuts:
        size = self._spec.size_px
        rows = [row for row, xy in enumerate(at) if xy is not None]
        return cut(
            level.image,
            np.array([at[row] for row in rows], np.int64).reshape(-1, 2),
            np.array(rows, np.int64),
            size,
            step=self._step,
            reach=max(1, _REACH_BYTES // (self._step * size**2 * 3)),
            together=_most_tiles(level) if self._spec.stride_px >= size else 1,
        )

    def _read(self, strip: _Strip, some: Iterable[int]) -> None:
        """These patches, one by one."""
        size, overlapping = self._spec.size_px, self._spec.stride_px < self._spec.size_px
        pixels = self._pixels(strip)
        for k in some:
            try:
                self._slide.read(strip.corners[k], size, self._spec.mpp, pixels[k], overlapping)
            except WsiFlError as error:
                strip.bad[k] = str(error)

    def _decode(self, level: NativeLevel, cuts: Cuts, number: int) -> None:
        jobs, parts = cuts.of(number)
        patches = self._patches({part[0] for part in parts})
        tiles = TileReader(level, [tile + k for _, tile, n, *_ in jobs for k in range(n)])
        width = level.tile_shape[1]
        scratch = self._room(level)
        for _, _, n, first, end in jobs:
            given = parts[first:end]
            direct = n == len(given) == 1 and _is_whole(given[0], level, patches)
            room = patches[given[0][0]][None] if direct else scratch[:n]
            damaged = False
            for tile in room:
                try:
                    tiles.decode(tile)
                except WsiFlError:
                    damaged = True
            if damaged:
                for patch, *_ in given:
                    strip, k = divmod(patch, self._step)
                    self._strips[strip].doubtful.add(k)
            elif n > 1:
                for patch, top, bottom, _, _, y, x in given:
                    _copy_side_by_side(
                        room[:, top:bottom], patches[patch][y : y + bottom - top, x : x + n * width]
                    )
            elif not direct:
                tile = room[0]
                for patch, top, bottom, left, right, y, x in given:
                    patches[patch][y : y + bottom - top, x : x + right - left] = tile[top:bottom, left:right]

    def _patches(self, numbers: set[int]) -> dict[int, NDArray[np.uint8]]:
        """Where these patches go."""
        pixels = {strip: self._pixels(self._strips[strip]) for strip in {n // self._step for n in numbers}}
        return {n: pixels[n // self._step][n % self._step] for n in numbers}

    def _pixels(self, strip: _Strip) -> NDArray[np.uint8]:
        """The strip's array, made when it is first wanted; patches over the edge have the background's colour."""
        with self._allocating:
            if strip.pixels is None:
                size = self._spec.size_px
                room = _MEMORY.empty((self._step, size, size, 3), np.uint8)  # the same for the last one
                strip.pixels = room[: len(strip.corners)]
                for k, xy in enumerate(strip.at):
                    if (
                        xy is not None
                        and self._level is not None
                        and not self._level.within((*xy, size, size))
                    ):
                        strip.pixels[k] = self._level.background
            return strip.pixels

    def _room(self, level: NativeLevel) -> NDArray[np.uint8]:
        """This thread's, for as many tiles as are taken together."""
        room: NDArray[np.uint8] | None = getattr(self._scratch, "room", None)
        if room is None:
            room = self._scratch.room = np.empty((_most_tiles(level), *level.tile_shape), np.uint8)
        return room


class _Strip:
    """Successive patches on their way into one array: their corners, and where in the level those with tiles lie."""

    def __init__(self, corners: list[tuple[int, int]], at: list[Position]) -> None:
        self.corners, self.at = corners, at
        self.pixels: NDArray[np.uint8] | None = None
        self.doubtful: set[int] = set()
        """Over a tile that cannot be decoded."""
        self.bad: dict[int, str] = {}
        """Patch → why it cannot be read."""


def _most_tiles(level: NativeLevel) -> int:
    height, width, channels = level.tile_shape
    return max(1, _SCRATCH_BYTES // (height * width * channels))


def _is_whole(part: list[int], level: NativeLevel, patches: dict[int, NDArray[np.uint8]]) -> bool:
    """Whether the part is the whole tile and the whole patch."""
    patch, top, bottom, left, right, _, _ = part
    return patches[patch].shape == level.tile_shape == (bottom - top, right - left, 3)


def _copy_side_by_side(tiles: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Tiles [n, height, width, 3] into `out` [height, n · width, 3].

    Line by line through all of them: memory that is written from front to back takes half the time of memory that is
    written by columns.
    """
    n, height, width, channels = tiles.shape
    lines = out.reshape(height, n, width * channels)  # a view, as the lines of `out` are contiguous
    lines[:] = tiles.reshape(n, height, width * channels).swapaxes(0, 1)
