"""Multithreaded reading of the patches of one slide; each native tile is decoded once for all its patches."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.native_tiles import NativeLevel, TiledImage, split_at_tiles
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.system.direct_io import BufferPool
from wsi_fl.system.prefetch import map_in_order
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError

_Rows = NDArray[np.int64]


class _CutPlan(NamedTuple):
    """The plan of decoding and copying, strip by strip."""

    jobs: _Rows
    """[j, 4] strip, tile, first part, end of parts; sorted by strip and tile."""
    parts: _Rows
    """[p, 7] patch; first and end row, first and end column in the tile; row and column in the patch."""

    def select_strip(self, strip: int) -> _CutPlan:
        """Return the plan of one strip; its first part has number 0."""
        begin, end = np.searchsorted(self.jobs[:, 0], (strip, strip + 1))
        jobs = self.jobs[begin:end].copy()
        first, last = (int(jobs[0, 2]), int(jobs[-1, 3])) if len(jobs) else (0, 0)
        jobs[:, 2:] -= first
        return _CutPlan(jobs, self.parts[first:last])


def _plan_cuts(image: TiledImage, corners: _Rows, patch: _Rows, size_px: int, *, step: int, reach: int) -> _CutPlan:
    """Return the plan for patches at [n, 2] in the image's pixels, ascending numbers [n]; number // step is a strip.

    A tile is decoded in the first strip that needs it, for all strips up to `reach` further on; the first of later
    strips decodes it again.
    """
    column_parts, first_column, n_columns = _split_axis(corners[:, 0], size_px, image.tile_px[0], image.size_px[0])
    row_parts, first_row, n_rows = _split_axis(corners[:, 1], size_px, image.tile_px[1], image.size_px[1])
    n_parts = n_columns * n_rows
    patch_index = np.repeat(np.arange(len(corners)), n_parts)
    k = np.arange(len(patch_index)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    column = column_parts[first_column[patch_index] + k % n_columns[patch_index]]
    row = row_parts[first_row[patch_index] + k // n_columns[patch_index]]
    tile = row[:, 0] * image.n_columns + column[:, 0]
    strip = patch[patch_index] // step

    order = np.argsort(tile, kind="stable")
    tile, strip = tile[order], strip[order]
    begins = _mark_changes(tile)
    begins = _mark_changes(tile, (strip - strip[_last_true_index(begins)]) // (reach + 1))
    owner = strip[_last_true_index(begins)]

    by_owner = np.lexsort((tile, owner))
    order, owner, tile = order[by_owner], owner[by_owner], tile[by_owner]
    first = np.flatnonzero(begins[by_owner])
    end = np.append(first, len(order))[1:]
    parts = np.stack(
        [patch[patch_index], row[:, 1], row[:, 2], column[:, 1], column[:, 2], row[:, 3], column[:, 3]], axis=1
    )[order]
    return _CutPlan(np.stack([owner[first], tile[first], first, end], axis=1), parts)


def _split_axis(start: _Rows, size_px: int, tile_px: int, extent_px: int) -> tuple[_Rows, _Rows, _Rows]:
    """Split patches along one axis: (pieces [m, 4] as tile, its first and end pixel, pixel of the patch; first piece of
    each patch [n]; number of its pieces [n])."""
    unique_starts, inverse = np.unique(start, return_inverse=True)
    axis_parts = [
        [(piece.number, piece.tile_slice.start, piece.tile_slice.stop, piece.box_slice.start) for piece in start_parts]
        for start_parts in (split_at_tiles(first, size_px, tile_px, extent_px) for first in unique_starts.tolist())
    ]
    table = np.array([piece for start_parts in axis_parts for piece in start_parts], np.int64).reshape(-1, 4)
    bounds = np.cumsum([0, *map(len, axis_parts)])
    return table, bounds[inverse], np.diff(bounds)[inverse]


def _mark_changes(*columns: _Rows) -> NDArray[np.bool_]:
    """Return where a row differs from its predecessor; the first does."""
    changes = np.ones(len(columns[0]), bool)
    changes[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return changes


def _last_true_index(begins: NDArray[np.bool_]) -> _Rows:
    """Return for each position the last true position up to it."""
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))


_REACH_BYTES = 1 << 28
"""Bytes of patches up to which a tile is decoded ahead; later patches decode it again. The next row of the grid should
lie within."""
_STRIP_BUFFERS = BufferPool(capacity=8)
"""Memory of strips, for reuse."""


class _Sweep:
    """Reads patches with corners [n, 2] from an open slide, in strips of `step` patches.

    Threads call `fill_strip` once for each strip, about in order. A strip can be taken when its call and all earlier
    ones have returned. `first_row` is the row of the first patch among all patches of the slide.
    """

    def __init__(self, slide: Slide, xy_l0: NDArray[np.int64], spec: GridSpec, step: int, first_row: int = 0) -> None:
        self._slide, self._spec, self._step, self._first_row = slide, spec, step, first_row
        native = slide.find_native_positions(xy_l0, spec.size_px, spec.mpp)
        self._level: NativeLevel | None = None
        is_tiled = is_over_edge = np.zeros(len(xy_l0), bool)
        if native is not None:
            self._level, corners, is_tiled = native
            rows = np.flatnonzero(is_tiled)
            reach = max(1, _REACH_BYTES // (step * spec.size_px**2 * 3))
            self._cuts = _plan_cuts(self._level.image, corners[rows], rows, spec.size_px, step=step, reach=reach)
            ends = corners + spec.size_px > self._level.image.size_px
            is_over_edge = is_tiled & ((corners < 0) | ends).any(axis=1)
        strips = (slice(start, start + step) for start in range(0, len(xy_l0), step))
        self._strips = {k: _Strip(xy_l0[span], is_tiled[span], is_over_edge[span]) for k, span in enumerate(strips)}
        self._n_strips = len(self._strips)
        self._allocation_lock = threading.Lock()

    def __len__(self) -> int:
        return self._n_strips

    def fill_strip(self, number: int) -> int:
        """Decode the tiles under a strip that no earlier strip decodes, and return its number.

        Patches without tiles are read from the slide.
        """
        strip = self._strips[number]
        self._read_patches(strip, np.flatnonzero(~strip.is_tiled).tolist())
        if self._level is not None:
            self._decode_tiles(self._level, self._cuts, number)
        return number

    def take_strip(self, number: int, excluded: dict[int, str] | None) -> tuple[int, NDArray[np.uint8]]:
        """Remove a strip and return (row of the first patch, pixels uint8[b, size_px, size_px, 3] of readable patches).

        Unreadable ones are added to `excluded`, row → reason. Without it the first raises WsiFlError.
        """
        strip = self._strips.pop(number)
        self._read_patches(strip, sorted(strip.doubtful))
        first, pixels = self._first_row + number * self._step, self._strip_pixels(strip)
        if not strip.unreadable:
            return first, pixels
        if excluded is None:
            raise WsiFlError(strip.unreadable[min(strip.unreadable)])
        excluded.update((first + k, strip.unreadable[k]) for k in sorted(strip.unreadable))
        return first, np.delete(pixels, list(strip.unreadable), 0)

    def _read_patches(self, strip: _Strip, patches: Iterable[int]) -> None:
        size, overlapping = self._spec.size_px, self._spec.stride_px < self._spec.size_px
        pixels = self._strip_pixels(strip)
        for k in patches:
            x, y = strip.corners[k].tolist()
            try:
                self._slide.read((x, y), size, self._spec.mpp, pixels[k], overlapping)
            except WsiFlError as error:
                strip.unreadable[k] = str(error)

    def _decode_tiles(self, level: NativeLevel, cuts: _CutPlan, number: int) -> None:
        jobs, parts = cuts.select_strip(number)
        first, end = jobs[:, 2:].T
        strip_numbers, positions = (column.tolist() for column in np.divmod(parts[:, 0], self._step))
        pixels = {strip: self._strip_pixels(self._strips[strip]) for strip in sorted(set(strip_numbers))}
        patches = [pixels[strip][k] for strip, k in zip(strip_numbers, positions, strict=True)]
        scratch, size = level.scratch_tile(), self._spec.size_px
        is_whole = np.all(parts[:, 1:5] == (0, size, 0, size), axis=1) & (level.tile_shape[:2] == (size, size))
        is_single = (end - first == 1) & is_whole[first]
        spans = zip(first.tolist(), end.tolist(), is_single.tolist(), strict=True)
        placements = parts[:, 1:].tolist()
        for stream, (begin, last, is_direct) in zip(level.read_streams(jobs[:, 1]), spans, strict=True):
            try:
                level.image.codec.decode_tile(stream, patches[begin] if is_direct else scratch)
            except WsiFlError:
                for patch in parts[begin:last, 0].tolist():
                    strip, k = divmod(patch, self._step)
                    self._strips[strip].doubtful.add(k)
                continue
            if not is_direct:
                for placement, patch in zip(placements[begin:last], patches[begin:last], strict=True):
                    y_min, y_max, x_min, x_max, row, column = placement
                    part = scratch[y_min:y_max, x_min:x_max]
                    patch[row : row + y_max - y_min, column : column + x_max - x_min] = part

    def _strip_pixels(self, strip: _Strip) -> NDArray[np.uint8]:
        """Return the strip's array, made at the first call; patches over the edge have the background's colour."""
        with self._allocation_lock:
            if strip.pixels is None:
                size = self._spec.size_px
                memory = _STRIP_BUFFERS.empty((self._step, size, size, 3), np.uint8)  # of one size, so it is reused
                strip.pixels = memory[: len(strip.corners)]
                if self._level is not None and strip.is_over_edge.any():
                    strip.pixels[strip.is_over_edge] = self._level.background
            return strip.pixels


@dataclass
class _Strip:
    """Successive patches of one array."""

    corners: _Rows
    is_tiled: NDArray[np.bool_]
    """Whether they are composed of tiles."""
    is_over_edge: NDArray[np.bool_]
    """Whether they lie over the edge."""
    pixels: NDArray[np.uint8] | None = None
    doubtful: set[int] = field(default_factory=set)
    """Patches over a tile that cannot be decoded."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Patch → reason why it cannot be read."""


_BATCH, _BATCH_BYTES = 32, 20 << 20
_BATCHES_AHEAD, _MAX_BYTES_AHEAD = 1, 1 << 28
"""Batches beyond those in work, and memory limit for all of them."""
_PLAN_PATCHES = 1 << 14
"""Patches of one plan: plans of millions would not be small."""


def read_patches(
    record: SlideRecord,
    xy_l0: NDArray[np.int64],
    spec: GridSpec,
    *,
    threads: int,
    reader: Reader = "auto",
    excluded: dict[int, str] | None = None,
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
    batches_ahead = max(1, min(threads + _BATCHES_AHEAD, _MAX_BYTES_AHEAD // (spec.size_px**2 * 3)))
    # Strips in work span about two rows of the grid, whose tiles are cached for resampled patches.
    in_memory = min(_BATCH_BYTES, _MAX_BYTES_AHEAD // batches_ahead) // (spec.size_px**2 * 3)
    in_two_rows = 2 * len(xy_l0) // max(1, len(np.unique(xy_l0[:, 1])))
    step = max(1, min(_BATCH, in_memory, in_two_rows // batches_ahead))
    with Slide(record.path, record.mpp_override, reader) as slide:
        for first in range(0, len(xy_l0), _PLAN_PATCHES):
            sweep = _Sweep(slide, xy_l0[first : first + _PLAN_PATCHES], spec, step, first)
            with closing(
                map_in_order(sweep.fill_strip, range(len(sweep)), threads=threads, ahead=batches_ahead)
            ) as strip_numbers:
                for number in strip_numbers:
                    yield sweep.take_strip(number, excluded)
        if notes is not None:
            notes.update(slide.notes)
