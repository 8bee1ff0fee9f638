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
_MAX_FAILURES, _MAX_MISSING_SHARE = 400, 0.5


class _MissingParts(NamedTuple):
    """The unreadable parts of a picture, the last error, and whether so much failed that the rest was skipped."""

    areas: list[Area]
    error: WsiFlError | None
    is_hopeless: bool


def paint_areas(
    shape: tuple[int, int], areas: Sequence[Area], painter: Callable[[Area], None], step: int
) -> _MissingParts:
    """Call `painter` for strips of `step` rows of the areas of a picture [rows, columns].

    After a WsiFlError it is called for halves, and for halves of these.
    """
    smallest_px = max(8, max(shape) // 64)
    missing: list[Area] = []
    n_failures, n_missing, last_error = 0, 0, None
    queue = [
        (slice(top, min(top + step, rows.stop)), columns)
        for rows, columns in areas
        for top in range(rows.start, rows.stop, step)
    ][::-1]
    while queue:
        area = queue.pop()
        try:
            painter(area)
        except WsiFlError as error:
            n_failures, last_error = n_failures + 1, error
            sides = [part.stop - part.start for part in area]
            axis = int(np.argmax(sides))
            is_smallest = sides[axis] <= smallest_px
            if is_smallest:
                missing.append(area)
                n_missing += sides[0] * sides[1]
            else:
                middle = (area[axis].start + area[axis].stop) // 2
                halves = (slice(middle, area[axis].stop), slice(area[axis].start, middle))
                queue += [(half, area[1]) if axis == 0 else (area[0], half) for half in halves]
            if n_failures > _MAX_FAILURES or n_missing > _MAX_MISSING_SHARE * shape[0] * shape[1]:
                return _MissingParts(missing + queue[::-1], last_error, is_hopeless=True)
    return _MissingParts(missing, last_error if missing else None, is_hopeless=False)


def fill_from_surroundings(out: NDArray[np.uint8], areas: Sequence[Area]) -> NDArray[np.uint8]:
    """Return a picture [rows, columns, 3] with some areas filled by the nearest pixels outside them."""
    if not areas:
        return out
    from scipy.ndimage import distance_transform_edt

    missing = np.zeros(out.shape[:2], bool)
    for area in areas:
        missing[area] = True
    nearest_pixels = distance_transform_edt(missing, return_distances=False, return_indices=True)
    return np.asarray(out[tuple(nearest_pixels)])


def resample_box(
    region: Image.Image, size: tuple[int, int], reduction: float, box: tuple[float, float, float, float]
) -> Image.Image:
    """Return the box of a region as a picture of that size, averaged by area where it shrinks."""
    x_min, y_min, x_max, y_max = (round(v) for v in box)
    is_integral = all(v == round(v) for v in (reduction, *box))
    if is_integral and x_max - x_min == size[0] * reduction:
        small = region.reduce(round(reduction), (x_min, y_min, x_max, y_max))
        if small.size == size:
            return small
    resampling = Image.Resampling.BOX if reduction > 1 else Image.Resampling.BILINEAR
    return region.resize(size, resampling, box=box)
