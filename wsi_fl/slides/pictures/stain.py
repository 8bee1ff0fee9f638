"""A picture of a site's patches as other laboratories would show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wsi_fl.slides.pictures.drawing import INK, PAPER, fitted, font, png
from wsi_fl.slides.stains.methods import AnyStain, restained

_CELL_PX, _GAP_PX, _BAND_PX = 128, 6, 30


def draw_stains(
    site: str, patches: Sequence[NDArray[np.uint8]], own: AnyStain, others: Mapping[str, AnyStain]
) -> bytes:
    """PNG: a row per patch, its own look first and then one column per other site.

    Args:
        patches: uint8[h, w, 3] each.
    """
    columns: list[AnyStain | None] = [None, *others.values()]
    step = _CELL_PX + _GAP_PX
    size = (len(columns) * step + _GAP_PX, _BAND_PX + max(1, len(patches)) * step)
    picture = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(picture)
    for column, (name, other) in enumerate(zip([site, *others], columns, strict=True)):
        x = _GAP_PX + column * step
        title = name if other is None else f"as {name}"
        shown = fitted(draw, title, _CELL_PX, font())
        draw.text((x + _CELL_PX / 2, _BAND_PX / 2), shown, INK, font(), anchor="mm")
        for row, patch in enumerate(patches):
            seen = patch if other is None else restained(patch, own, other)
            cell = Image.fromarray(seen).resize((_CELL_PX, _CELL_PX), Image.Resampling.BICUBIC)
            picture.paste(cell, (x, _BAND_PX + row * step))
    return png(picture)
