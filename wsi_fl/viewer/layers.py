"""What lies over a slide, as documents that the page draws: outlines, patches in groups, values of patches.

All coordinates are whole level-0 pixels, [x, y, x, y, …] in one list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

Layer = Mapping[str, Any]
"""What the page gets of a layer, beside its name and kind."""

_DECIMALS = 4


def outlines(rings: Iterable[NDArray[np.float64]]) -> Layer:
    """Return a layer of closed lines.

    Args:
        rings: [m, 2] points (x, y) in level-0 pixels each.
    """
    return {"rings": [_flat(ring) for ring in rings if len(ring) > 2]}


def tissue_rings(mask: NDArray[np.bool_], downsample: float) -> list[NDArray[np.float64]]:
    """Return the edges [m, 2] of a mask bool[h, w] in level-0 pixels, thinned to a quarter of a pixel of the mask.

    Args:
        downsample: level-0 pixels per pixel of the mask.
    """
    from skimage.measure import approximate_polygon, find_contours

    edges = find_contours(np.pad(mask.astype(np.float32), 1), 0.5)
    # Row and column count from the middle of a pixel, and from before the frame of one pixel.
    return [(approximate_polygon(edge, 0.25)[:, ::-1] - 0.5) * downsample for edge in edges]


def patches(
    xy_l0: NDArray[np.int64],
    side_l0: float,
    group: NDArray[np.int64],
    groups: Sequence[str],
    *,
    first: int = 0,
    crossed: bool = False,
) -> Layer:
    """Return a layer of squares, coloured by their group.

    Args:
        xy_l0: [n, 2] their top-left corners.
        side_l0: of each, in level-0 pixels.
        group: [n] positions in `groups`.
        groups: what the page calls them: a label, or the reason for which patches were set aside.
        first: the colour of the first group, after those of another layer.
        crossed: whether they are crossed out.
    """
    said = {"group": group.tolist(), "groups": list(groups), "first": first, "crossed": crossed}
    return {"xy": _flat(xy_l0), "side": float(side_l0), **said}


def values(
    xy_l0: NDArray[np.int64], side_l0: float, columns: Mapping[str, NDArray[np.float64]], shown: str
) -> Layer:
    """Return a layer of squares, coloured by a value between 0 and 1.

    Args:
        columns: name → [n] values; the page lets people choose which is drawn. What is no number is null there.
        shown: the column that is drawn first.
    """
    rounded = [[*map(finite, np.round(column, _DECIMALS).tolist())] for column in columns.values()]
    names = list(columns)
    return {
        "xy": _flat(xy_l0),
        "side": float(side_l0),
        "columns": names,
        "values": rounded,
        "shown": names.index(shown),
    }


def finite(number: float | None) -> float | None:
    """Return a number that JSON can say, or None.

    Example:
        >>> finite(0.5), finite(float("nan")), finite(None)
        (0.5, None, None)
    """
    return number if number is not None and isfinite(number) else None


def encoded(document: Mapping[str, Any]) -> bytes:
    """Return a document as JSON."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _flat(points: NDArray[Any]) -> list[int]:
    found: list[int] = np.round(points).astype(np.int64).ravel().tolist()
    return found
