"""Morphology of masks, and means of images over squares."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray


def dilate_mask(mask: NDArray[np.bool_], radius_px: float) -> NDArray[np.bool_]:
    """Return the dilation of a mask bool[h, w] with a disc.

    By runs of pixels, many times faster than by distances.
    """
    reach, (height, width) = int(radius_px), mask.shape
    padded = np.pad(mask, reach)
    run = padded[:, reach : reach + width].copy()  # k pixels to each side
    out = np.zeros_like(mask)
    for k in range(reach + 1):
        if k:
            run |= padded[:, reach - k : reach - k + width]
            run |= padded[:, reach + k : reach + k + width]
        for row in range(-reach, reach + 1):
            if int(sqrt(radius_px**2 - row**2)) == k:
                out |= run[reach + row : reach + row + height]
    return out


def drop_small_objects(mask: NDArray[np.bool_], min_px: float) -> NDArray[np.bool_]:
    """Return a mask bool[h, w] without connected objects of fewer than min_px pixels."""
    if not mask.any():
        return mask
    from skimage.measure import label

    objects = label(mask, connectivity=1)
    is_large = np.bincount(objects.ravel()) >= min_px
    is_large[0] = False
    return np.asarray(np.take(is_large, objects), bool)


def close_mask(mask: NDArray[np.bool_], radius_px: float) -> NDArray[np.bool_]:
    """Return the closing of a mask bool[h, w] with a disc: gaps below its diameter are bridged."""
    return ~dilate_mask(~dilate_mask(mask, radius_px), radius_px)


def area_mean(
    image: NDArray[np.bool_] | NDArray[np.uint8], corner: NDArray[np.float64], side: float
) -> NDArray[np.float64]:
    """Return the means float64[n] of an image [h, w] of at most 4096² pixels over squares; beyond its edge it is zero.

    Exact also where squares cut pixels: the integral image is bilinear within a pixel. Corners (x, y) [n, 2] and side
    of the squares are in pixels of the image.
    """
    height, width = image.shape
    integral = np.zeros((width + 1, height + 1), np.uint32)  # by column and row: sums along memory are fast
    row_sums = np.cumsum(image, axis=1, dtype=np.uint32)
    np.cumsum(np.ascontiguousarray(row_sums.T), axis=1, out=integral[1:, 1:])

    def sum_below(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum above and left of each point."""
        x, y = np.clip(x, 0, width), np.clip(y, 0, height)
        column = np.minimum(x.astype(np.int64), width - 1)
        row = np.minimum(y.astype(np.int64), height - 1)
        u, v = x - column, y - row
        upper = integral[column, row] * (1 - u) + integral[column + 1, row] * u
        lower = integral[column, row + 1] * (1 - u) + integral[column + 1, row + 1] * u
        total: NDArray[np.float64] = upper * (1 - v) + lower * v
        return total

    x_min, y_min = corner[:, 0], corner[:, 1]
    x_max, y_max = x_min + side, y_min + side
    sums = sum_below(x_max, y_max) - sum_below(x_min, y_max) - sum_below(x_max, y_min) + sum_below(x_min, y_min)
    mean: NDArray[np.float64] = sums / side**2
    return mean
