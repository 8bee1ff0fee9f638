"""Means of an image over squares that need not fall on its pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def area_mean(
    image: NDArray[np.bool_] | NDArray[np.uint8], corner: NDArray[np.float64], side: float
) -> NDArray[np.float64]:
    """Mean float64[n] of an image [h, w] over squares; beyond its edge it counts as zero.

    Exact also where squares cut pixels: the integral image is bilinear within a pixel.

    Args:
        image: of at most 4096² pixels.
        corner, side: top-left corners (x, y) [n, 2] and side of the squares, in pixels of the image.
    """
    height, width = image.shape
    integral = np.zeros((width + 1, height + 1), np.uint32)  # by column and row: sums along memory are fast
    across = np.cumsum(image, axis=1, dtype=np.uint32)
    np.cumsum(np.ascontiguousarray(across.T), axis=1, out=integral[1:, 1:])

    def below(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum above and left of each point."""
        x, y = np.clip(x, 0, width), np.clip(y, 0, height)
        column = np.minimum(x.astype(np.int64), width - 1)
        row = np.minimum(y.astype(np.int64), height - 1)
        u, v = x - column, y - row
        upper = integral[column, row] * (1 - u) + integral[column + 1, row] * u
        lower = integral[column, row + 1] * (1 - u) + integral[column + 1, row + 1] * u
        total: NDArray[np.float64] = upper * (1 - v) + lower * v
        return total

    left, top = corner[:, 0], corner[:, 1]
    right, bottom = left + side, top + side
    total = below(right, bottom) - below(left, bottom) - below(right, top) + below(left, top)
    mean: NDArray[np.float64] = total / side**2
    return mean
