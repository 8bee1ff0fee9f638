"""Regions of masks: grown, closed, and without small ones."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray


def dilated(mask: NDArray[np.bool_], radius_px: float) -> NDArray[np.bool_]:
    """Return the dilation of a mask bool[h, w] with a disc.

    As a stack of runs of pixels, which is many times faster than by distances.
    """
    reach, (height, width) = int(radius_px), mask.shape
    room = np.pad(mask, reach)
    run = room[:, reach : reach + width].copy()  # of so many pixels to each side
    out = np.zeros_like(mask)
    for k in range(reach + 1):
        if k:
            run |= room[:, reach - k : reach - k + width]
            run |= room[:, reach + k : reach + k + width]
        for row in range(-reach, reach + 1):
            if int(sqrt(radius_px**2 - row**2)) == k:
                out |= run[reach + row : reach + row + height]
    return out


def without_small(mask: NDArray[np.bool_], min_px: float) -> NDArray[np.bool_]:
    """Return a mask bool[h, w] without its connected objects of fewer than min_px pixels."""
    if not mask.any():
        return mask
    from skimage.measure import label

    objects = label(mask, connectivity=1)
    large = np.bincount(objects.ravel()) >= min_px
    large[0] = False
    return np.asarray(np.take(large, objects), bool)


def closed(mask: NDArray[np.bool_], radius_px: float) -> NDArray[np.bool_]:
    """Return the closing of a mask bool[h, w] with a disc, which bridges gaps of less than its diameter."""
    return ~dilated(~dilated(mask, radius_px), radius_px)
