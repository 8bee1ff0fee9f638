"""Grids of patches as one picture."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_GAP_PX = 2
_SIDE_PX = 96
"""Patches smaller than that are enlarged by a whole factor, so that their pixels can be seen."""


def enlarged(patch: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The patch uint8[h, w, c], its pixels repeated where it is small."""
    factor = max(1, _SIDE_PX // patch.shape[0])
    return patch.repeat(factor, 0).repeat(factor, 1)


def grid(rows: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Rows of patches uint8[n, h, w, c] as one picture uint8[H, W, 3] on white; rows may differ in length."""
    side = len(enlarged(rows[0][0]))
    step = side + _GAP_PX
    width = max(len(row) for row in rows)
    out = np.full((len(rows) * step + _GAP_PX, width * step + _GAP_PX, 3), 255, np.uint8)
    for r, row in enumerate(rows):
        for k, patch in enumerate(row):
            y, x = r * step + _GAP_PX, k * step + _GAP_PX
            out[y : y + side, x : x + side] = enlarged(patch)
    return out


def png_of(picture: NDArray[np.uint8]) -> bytes:
    """uint8[h, w, 3] as PNG."""
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()
