"""Parts of a decoded tile to their places in patches, by `_scatter.c` where it was compiled, else by numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

_by_c: Callable[[Pixels, NDArray[np.int64], list[Pixels]], None] | None
try:
    from wsi_fl.slides.reading._scatter import scatter as _by_c
except ImportError:  # no compiler when wsi-fl was installed
    _by_c = None


def is_compiled() -> bool:
    """Whether `scatter` is the faster one."""
    return _by_c is not None


def scatter(tile: Pixels, parts: NDArray[np.int64], patches: list[Pixels]) -> None:
    """Copies parts of a tile, each into a patch of its own; other threads run meanwhile.

    Args:
        tile: [h, w, c], contiguous.
        parts: [p, 7], contiguous: as in `Cuts.parts`; the first column is not used.
        patches: p arrays [H, W, c], contiguous, one for each part.

    Raises:
        ValueError: when a part lies beyond its tile or its patch.

    Example:
        >>> tile = np.arange(4, dtype=np.uint8).reshape(2, 2, 1)
        >>> patch = np.zeros((3, 3, 1), np.uint8)
        >>> scatter(tile, np.array([[0, 0, 2, 1, 2, 1, 0]]), [patch])
        >>> patch[..., 0].tolist()
        [[0, 0, 0], [1, 0, 0], [3, 0, 0]]
    """
    if _by_c is not None:
        _by_c(tile, parts, patches)
    else:
        _by_numpy(tile, parts, patches)


def _by_numpy(tile: Pixels, parts: NDArray[np.int64], patches: list[Pixels]) -> None:
    for (_, top, bottom, left, right, row, column), patch in zip(parts.tolist(), patches, strict=True):
        part, there = (
            tile[top:bottom, left:right],
            patch[row : row + bottom - top, column : column + right - left],
        )
        if part.shape != there.shape or part.shape[:2] != (bottom - top, right - left):
            raise ValueError("a part lies beyond its tile or its patch")
        there[:] = part
