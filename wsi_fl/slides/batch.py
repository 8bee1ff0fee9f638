"""Patches on their way from a slide into one array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wsi_fl.bulk import aligned_empty
from wsi_fl.slides.reader import Slide
from wsi_fl.types import GridSpec, WsiFlError


class Batch:
    """Neighbouring patches; several threads may fill one batch.

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
        self._todo = iter(enumerate(corners))  # whose steps are atomic under the interpreter's lock
        self._pixels = aligned_empty((len(corners), spec.size_px, spec.size_px, 3))

    def fill(self, slide: Slide) -> None:
        """Reads patches until none is left to begin."""
        overlapping = self._spec.stride_px < self._spec.size_px
        for k, (x, y) in self._todo:
            try:
                slide.read((x, y), self._spec.size_px, self._spec.mpp, self._pixels[k], overlapping)
            except WsiFlError as error:
                self.bad[self._first + k] = str(error)

    def given(self, aside: dict[int, str] | None) -> tuple[int, NDArray[np.uint8]]:
        """(row of the first patch, the good ones' pixels); notes the others."""
        if aside is None or not self.bad:
            return self._first, self._pixels
        aside.update(sorted(self.bad.items()))
        return self._first, np.delete(self._pixels, [row - self._first for row in self.bad], 0)
