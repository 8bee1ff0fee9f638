"""Pictures composed of readable and unreadable parts; resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.types import WsiFlError

Area = tuple[slice, slice]
"""Rows and columns of a picture."""
_MOST_FAILURES, _MOST_MISSING = 400, 0.5


class Unpainted(NamedTuple):
    """The missing parts of a picture.

    Attributes:
        areas: the parts that could not be read.
        error: the error of the last of them; None where there are none.
        is_hopeless: whether so much failed that the remaining parts were skipped.
    """

    areas: list[Area]
    error: WsiFlError | None
    hopeless: bool


def paint(
    shape: tuple[int, int], areas: Sequence[Area], painter: Callable[[Area], None], step: int
) -> Unpainted:
    """Call `painter` for strips of `step` rows of the areas of a picture [rows, columns].

    After a WsiFlError it is called for halves, and for halves of these.
    """
    smallest_px = max(8, max(shape) // 64)
    missing: list[Area] = []
    n_failures, n_missing, last = 0, 0, None
    waiting = [
        (slice(top, min(top + step, rows.stop)), columns)
        for rows, columns in areas
        for top in range(rows.start, rows.stop, step)
    ][::-1]
    while waiting:
        area = waiting.pop()
        try:
            painter(area)
        except WsiFlError as error:
            n_failures, last = n_failures + 1, error
            sides = [part.stop - part.start for part in area]
            axis = int(np.argmax(sides))
            is_smallest = sides[axis] <= smallest_px
            if is_smallest:
                missing.append(area)
                n_missing += sides[0] * sides[1]
            else:
                middle = (area[axis].start + area[axis].stop) // 2
                halves = (slice(middle, area[axis].stop), slice(area[axis].start, middle))
                waiting += [(half, area[1]) if axis == 0 else (area[0], half) for half in halves]
            if n_failures > _MOST_FAILURES or n_missing > _MOST_MISSING * shape[0] * shape[1]:
                return Unpainted(missing + waiting[::-1], last, hopeless=True)
    return Unpainted(missing, last if missing else None, hopeless=False)


def continue_surroundings(out: NDArray[np.uint8], areas: Sequence[Area]) -> NDArray[np.uint8]:
    """Return a picture [rows, columns, 3] with some areas filled by the nearest pixels outside them."""
    if not areas:
        return out
    from scipy.ndimage import distance_transform_edt

    missing = np.zeros(out.shape[:2], bool)
    for area in areas:
        missing[area] = True
    nearest = distance_transform_edt(missing, return_distances=False, return_indices=True)
    return np.asarray(out[tuple(nearest)])


def resample(
    region: Image.Image, size: tuple[int, int], reduction: float, box: tuple[float, float, float, float]
) -> Image.Image:
    """Return the box of a region as a picture of that size, averaged by area where it shrinks."""
    left, top, right, bottom = (round(v) for v in box)
    whole = all(v == round(v) for v in (reduction, *box))
    if whole and right - left == size[0] * reduction:
        small = region.reduce(round(reduction), (left, top, right, bottom))
        if small.size == size:
            return small
    how = Image.Resampling.BOX if reduction > 1 else Image.Resampling.BILINEAR
    return region.resize(size, how, box=box)
