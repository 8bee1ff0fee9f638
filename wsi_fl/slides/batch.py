"""Patches on their way from a slide into one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wsi_fl.bulk import aligned_empty
from wsi_fl.slides.reader import Slide
from wsi_fl.types import GridSpec, WsiFlError


class Batch:
    """Neighbouring patches.

    Args:
        first: row of the first patch.
        corners: (x, y) of each in level-0 pixels.
        spec: their size and resolution.
    """

    def __init__(self, first: int, corners: list[tuple[int, int]], spec: GridSpec) -> None:
        self.bad: dict[int, str] = {}
        """Row → reason."""
        self._first = first
        self._spec = spec
        self._corners = corners
        self._pixels = aligned_empty((len(corners), spec.size_px, spec.size_px, 3))

    def fill(self, slide: Slide) -> None:
        """Reads all of them, those that touch each other together."""
        size, mpp = self._spec.size_px, self._spec.mpp
        overlapping = self._spec.stride_px < size
        for row in _rows(self._corners, 1 if overlapping else len(self._corners)):
            touching = slice(row.start, row.stop)
            if len(row) > 1 and slide.read_row(self._corners[touching], mpp, self._pixels[touching]):
                continue
            for k in row:
                try:
                    slide.read(self._corners[k], size, mpp, self._pixels[k], overlapping)
                except WsiFlError as error:
                    self.bad[self._first + k] = str(error)

    def given(self, aside: dict[int, str] | None) -> tuple[int, NDArray[np.uint8]]:
        """(row of the first patch, the good ones' pixels); notes the others."""
        if aside is None or not self.bad:
            return self._first, self._pixels
        aside.update(sorted(self.bad.items()))
        return self._first, np.delete(self._pixels, [row - self._first for row in self.bad], 0)


def _rows(corners: Sequence[tuple[int, int]], most: int) -> list[range]:
    """Pieces of at most so many patches whose corners lie on one line, the same distance apart.

    Example:
        >>> _rows([(0, 0), (8, 0), (16, 0), (40, 0), (0, 8)], 4)
        [range(0, 3), range(3, 4), range(4, 5)]
    """
    rows, first = [], 0
    for k in range(1, len(corners) + 1):
        (left, y), step = corners[first], corners[min(first + 1, len(corners) - 1)][0] - corners[first][0]
        if k == len(corners) or k - first == most or corners[k] != (left + (k - first) * step, y):
            rows.append(range(first, k))
            first = k
    return rows
