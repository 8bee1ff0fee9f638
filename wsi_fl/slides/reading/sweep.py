"""Multithreaded reading of the patches of one slide; each native tile is decoded once for all its patches."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.native import NativeLevel, TiledImage, pieces
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.system import jpeg
from wsi_fl.system.bulk import BufferPool
from wsi_fl.system.ordered import in_order
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError

_Rows = NDArray[np.int64]


class _Cuts(NamedTuple):
    """The plan of decoding and copying, strip by strip."""

    jobs: _Rows
    """[j, 4] strip, tile, first part, end of parts; sorted by strip and tile."""
    parts: _Rows
    """[p, 7] patch; first and end row, first and end column in the tile; row and column in the patch."""

    def of(self, strip: int) -> _Cuts:
        """Return the plan of one strip; its first part has number 0."""
        begin, end = np.searchsorted(self.jobs[:, 0], (strip, strip + 1))
        jobs = self.jobs[begin:end].copy()
        first, last = (int(jobs[0, 2]), int(jobs[-1, 3])) if len(jobs) else (0, 0)
        jobs[:, 2:] -= first
        return _Cuts(jobs, self.parts[first:last])


def _cut(image: TiledImage, at: _Rows, patch: _Rows, size_px: int, *, step: int, reach: int) -> _Cuts:
    """Return the plan for patches at [n, 2] in the image's pixels, ascending numbers [n]; number // step is a strip.

    A tile is decoded in the first strip that needs it, for all strips up to `reach` further on; the first of later
    strips decodes it again.
    """
    across, first_across, n_across = _along(at[:, 0], size_px, image.tile_px[0], image.size_px[0])
    down, first_down, n_down = _along(at[:, 1], size_px, image.tile_px[1], image.size_px[1])
    n = n_across * n_down
    of = np.repeat(np.arange(len(at)), n)
    k = np.arange(len(of)) - np.repeat(np.cumsum(n) - n, n)
    column = across[first_across[of] + k % n_across[of]]
    row = down[first_down[of] + k // n_across[of]]
    tile = row[:, 0] * image.n_columns + column[:, 0]
    strip = patch[of] // step

    order = np.argsort(tile, kind="stable")
    tile, strip = tile[order], strip[order]
    begins = _changes(tile)
    begins = _changes(tile, (strip - strip[_last_true(begins)]) // (reach + 1))
    owner = strip[_last_true(begins)]

    again = np.lexsort((tile, owner))
    order, owner, tile = order[again], owner[again], tile[again]
    first = np.flatnonzero(begins[again])
    end = np.append(first, len(order))[1:]
    parts = np.stack(
        [patch[of], row[:, 1], row[:, 2], column[:, 1], column[:, 2], row[:, 3], column[:, 3]], axis=1
    )[order]
    return _Cuts(np.stack([owner[first], tile[first], first, end], axis=1), parts)


def _along(start: _Rows, size_px: int, tile_px: int, extent_px: int) -> tuple[_Rows, _Rows, _Rows]:
    """Split patches along one axis: (pieces [m, 4] as tile, its first and end pixel, pixel of the patch; first piece of
    each patch [n]; number of its pieces [n])."""
    known, of = np.unique(start, return_inverse=True)
    found = [
        [(piece.number, piece.of.start, piece.of.stop, piece.to.start) for piece in some]
        for some in (pieces(at, size_px, tile_px, extent_px) for at in known.tolist())
    ]
    table = np.array([piece for some in found for piece in some], np.int64).reshape(-1, 4)
    bounds = np.cumsum([0, *map(len, found)])
    return table, bounds[of], np.diff(bounds)[of]


def _changes(*columns: _Rows) -> NDArray[np.bool_]:
    """Return where a row differs from its predecessor; the first does."""
    changes = np.ones(len(columns[0]), bool)
    changes[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return changes


def _last_true(begins: NDArray[np.bool_]) -> _Rows:
    """Return for each position the last true position up to it."""
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))


_REACH_BYTES = 1 << 28
"""Bytes of patches up to which a tile is decoded ahead; later patches decode it again. The next row of the grid should
lie within."""
_MEMORY = BufferPool(most=8)
"""Memory of strips, for reuse."""


class _Sweep:
    """Reads patches with corners [n, 2] from an open slide, in strips of `step` patches.

    Threads call `fill_strip` once for each strip, about in order. A strip can be taken when its call and all earlier
    ones have returned. `first_row` is the row of the first patch among all patches of the slide.
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
            self._cuts = _cut(self._level.image, at[rows], rows, spec.size_px, step=step, reach=reach)
            ends = at + spec.size_px > self._level.image.size_px
            over = tiled & ((at < 0) | ends).any(axis=1)
        strips = (slice(start, start + step) for start in range(0, len(xy_l0), step))
        self._strips = {k: _Strip(xy_l0[some], tiled[some], over[some]) for k, some in enumerate(strips)}
        self._n = len(self._strips)
        self._allocating = threading.Lock()

    def __len__(self) -> int:
        return self._n

    def fill(self, number: int) -> int:
        """Decode the tiles under a strip that no earlier strip decodes, and return its number.

        Patches without tiles are read from the slide.
        """
        strip = self._strips[number]
        self._read(strip, np.flatnonzero(~strip.tiled).tolist())
        if self._level is not None:
            self._decode(self._level, self._cuts, number)
        return number

    def take(self, number: int, aside: dict[int, str] | None) -> tuple[int, NDArray[np.uint8]]:
        """Remove a strip and return (row of the first patch, pixels uint8[b, size_px, size_px, 3] of readable patches).

        Unreadable ones are added to `excluded`, row → reason. Without it the first raises WsiFlError.
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
        size, overlapping = self._spec.size_px, self._spec.stride_px < self._spec.size_px
        pixels = self._pixels(strip)
        for k in some:
            x, y = strip.corners[k].tolist()
            try:
                self._slide.read((x, y), size, self._spec.mpp, pixels[k], overlapping)
            except WsiFlError as error:
                strip.bad[k] = str(error)

    def _decode(self, level: NativeLevel, cuts: _Cuts, number: int) -> None:
        jobs, parts = cuts.of(number)
        first, end = jobs[:, 2:].T
        of, within = (column.tolist() for column in np.divmod(parts[:, 0], self._step))
        pixels = {strip: self._pixels(self._strips[strip]) for strip in sorted(set(of))}
        patches = [pixels[strip][k] for strip, k in zip(of, within, strict=True)]
        scratch, size = level.room(), self._spec.size_px
        whole = np.all(parts[:, 1:5] == (0, size, 0, size), axis=1) & (level.tile_shape[:2] == (size, size))
        alone = (end - first == 1) & whole[first]
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
                for place, patch in zip(places[begin:stop], patches[begin:stop], strict=True):
                    top, bottom, left, right, row, column = place
                    part = scratch[top:bottom, left:right]
                    patch[row : row + bottom - top, column : column + right - left] = part

    def _pixels(self, strip: _Strip) -> NDArray[np.uint8]:
        """Return the strip's array, made at the first call; patches over the edge have the background's colour."""
        with self._allocating:
            if strip.pixels is None:
                size = self._spec.size_px
                strip.pixels = _MEMORY.empty((len(strip.corners), size, size, 3), np.uint8)
                if self._level is not None and strip.over.any():
                    strip.pixels[strip.over] = self._level.background
            return strip.pixels


@dataclass
class _Strip:
    """Successive patches of one array."""

    corners: _Rows
    tiled: NDArray[np.bool_]
    """Whether they are composed of tiles."""
    over: NDArray[np.bool_]
    """Whether they lie over the edge."""
    pixels: NDArray[np.uint8] | None = None
    doubtful: set[int] = field(default_factory=set)
    """Patches over a tile that cannot be decoded."""
    bad: dict[int, str] = field(default_factory=dict)
    """Patch → reason why it cannot be read."""


_BATCH, _BATCH_BYTES = 32, 20 << 20
_AHEAD, _AHEAD_BYTES = 1, 1 << 28
"""Batches beyond those in work, and memory limit for all of them."""
_AT_ONCE = 1 << 14
"""Patches of one plan: plans of millions would not be small."""


def read_patches(
    record: SlideRecord,
    xy_l0: NDArray[np.int64],
    spec: GridSpec,
    *,
    threads: int,
    reader: Reader = "auto",
    aside: dict[int, str] | None = None,
    notes: set[str] | None = None,
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield (row of the first patch, pixels uint8[b, size_px, size_px, 3]) batch by batch, in order.

    Threads share one slide (the decoders release the interpreter's lock); memory is bounded. A native tile under
    several patches is decoded once.

    Args:
        xy_l0: the patches' corners [n, 2].
        threads: number of decoding threads.
        excluded: filled with row → one-line reason of the patches that cannot be decoded, before their batch is
            yielded. They are left out of the batch, which may become empty.
        notes: filled with the slide's notes of replaced damage, after the last batch.

    Raises:
        WsiFlError: when a patch cannot be decoded and `excluded` is None.
    """
    threads = max(1, threads)
    ahead = max(1, min(threads + _AHEAD, _AHEAD_BYTES // (spec.size_px**2 * 3)))
    # Strips in work span about two rows of the grid, whose tiles are cached for resampled patches.
    in_memory = min(_BATCH_BYTES, _AHEAD_BYTES // ahead) // (spec.size_px**2 * 3)
    in_two_rows = 2 * len(xy_l0) // max(1, len(np.unique(xy_l0[:, 1])))
    step = max(1, min(_BATCH, in_memory, in_two_rows // ahead))
    with Slide(record.path, record.mpp_override, reader) as slide:
        for first in range(0, len(xy_l0), _AT_ONCE):
            sweep = _Sweep(slide, xy_l0[first : first + _AT_ONCE], spec, step, first)
            with closing(in_order(sweep.fill, range(len(sweep)), threads=threads, ahead=ahead)) as filled:
                for number in filled:
                    yield sweep.take(number, aside)
        if notes is not None:
            notes.update(slide.notes)
