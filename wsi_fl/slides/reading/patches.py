"""The patches of one slide, read in batches by threads that share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.slides.reading.sweep import Sweep
from wsi_fl.system.ordered import in_order
from wsi_fl.types import GridSpec, SlideRecord

_BATCH, _BATCH_BYTES = 32, 20 << 20
_AHEAD, _AHEAD_BYTES = 1, 1 << 28
"""Batches beyond those that threads are filling, and the most memory for all of them."""
_AT_ONCE = 1 << 14
"""Patches whose reading is planned at once: plans of millions would not be small."""


def read_patches(
    record: SlideRecord,
    xy_l0: NDArray[np.int64],
    spec: GridSpec,
    *,
    threads: int,
    reader: Reader = "auto",
    aside: dict[int, str] | None = None,
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(row of the first patch, pixels uint8[b, size_px, size_px, 3]) batch by batch, in order.

    Threads share one slide (the decoders release the interpreter's lock) and run only so far ahead that memory stays
    bounded. A native tile under several patches is decoded once; see `sweep`.

    Args:
        record, xy_l0, spec: which slide, the patches' corners [n, 2], their size and resolution.
        threads: how many decode.
        reader: see `Slide`.
        aside: row → one-line reason of the patches that cannot be decoded. They are left out of their batch, which
            may become empty; a batch's entries are there when it is yielded.

    Raises:
        WsiFlError: when a patch cannot be decoded and `aside` is None.
    """
    threads = max(1, threads)
    ahead = max(1, min(threads + _AHEAD, _AHEAD_BYTES // (spec.size_px**2 * 3)))
    with Slide(record.path, record.mpp_override, reader) as slide:
        step = _strip_size(xy_l0, spec, ahead)
        for first in range(0, len(xy_l0), _AT_ONCE):
            sweep = Sweep(slide, xy_l0[first : first + _AT_ONCE], spec, step, first)
            with closing(in_order(sweep.fill, range(len(sweep)), threads=threads, ahead=ahead)) as filled:
                for number in filled:
                    yield sweep.take(number, aside)


def _strip_size(xy_l0: NDArray[np.int64], spec: GridSpec, in_hand: int) -> int:
    """Patches in each of so many batches; together they span about two rows of the grid, whose tiles are kept where
    patches are resampled from them."""
    in_memory = min(_BATCH_BYTES, _AHEAD_BYTES // in_hand) // (spec.size_px**2 * 3)
    in_two_rows = 2 * len(xy_l0) // max(1, len(np.unique(xy_l0[:, 1])))
    return max(1, min(_BATCH, in_memory, in_two_rows // in_hand))
