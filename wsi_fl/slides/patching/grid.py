"""The regular lattice of patches over a slide; its origin is (0, 0) of level 0."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from wsi_fl.types import GridSpec

_TOLERANCE_PX = 1e-6
_SNAP_PX = 0.01


def patch_side_l0(spec: GridSpec, slide_mpp: float) -> float:
    """Return the side of a patch in level-0 pixels.

    Files store rounded µm per pixel: a side within a hundredth of a pixel of a whole number is that number, so that
    patches which only touch an outline share no area with it.

    Example:
        >>> patch_side_l0(GridSpec(96, 0.972, 96), slide_mpp=0.9719999), patch_side_l0(GridSpec(96, 0.5, 96), 0.23)
        (96.0, 208.69565217391303)
    """
    side = spec.size_px * spec.mpp / slide_mpp
    return float(round(side)) if abs(side - round(side)) < _SNAP_PX else side


def grid_positions(size_l0: tuple[int, int], spec: GridSpec, slide_mpp: float) -> NDArray[np.int64]:
    """Return the top-left corners (x, y) int64[n, 2] of all patches, row by row.

    Per axis there are ceil((extent − size) / step) + 1 patches, so the last row and column are never lost: the
    last patch may reach beyond the edge, where the reader pads with white. Positions are rounded one by one,
    so that rounding does not accumulate.

    Example:
        >>> grid_positions((250, 100), GridSpec(size_px=100, mpp=0.5, stride_px=100), slide_mpp=0.5).tolist()
        [[0, 0], [100, 0], [200, 0]]
    """
    size = patch_side_l0(spec, slide_mpp)
    step = spec.stride_px * spec.mpp / slide_mpp
    columns, rows = (
        np.round(np.arange(max(0, ceil((extent - size - _TOLERANCE_PX) / step)) + 1) * step).astype(np.int64)
        for extent in size_l0
    )
    x, y = np.meshgrid(columns, rows)
    return np.stack([x.ravel(), y.ravel()], axis=1)
