"""Damage detection: regions without pixels in one level of a slide and with tissue in another.

Scanners leave out unscanned areas in all levels alike. A level without pixels where another level shows tissue is
damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.types import WsiFlError

_Mask = NDArray[np.bool_]
_ReadRegion = Callable[[tuple[int, int], int, tuple[int, int]], Image.Image]
"""(level-0 corner, level, (width, height) in its pixels) → RGBA; WsiFlError for a damaged region."""

_SAMPLES = 256
"""Of pixels along each side of a region."""
_LEAST = 16
"""Differing samples from which a region counts as damaged."""
_APART, _FAR_APART, _CHROMA = 32, 80, 16
"""Grey levels from the background: of coloured and of grey pixels (glass is grey), and least chroma of the former."""
_PLACES, _PLACE_PX = 64, 4
"""Places compared with the next finer level, and their side in its pixels."""


class Place(NamedTuple):
    """The position of a region in a slide, and its background.

    Attributes:
        corner_l0: its corner in level-0 pixels.
        level: the number of its level.
        downsamples: level-0 pixels per pixel of every level.
        background: colour of pixels that are not in the file.
        is_filled: whether these pixels have that colour instead of being transparent.
    """

    corner_l0: tuple[int, int]
    level: int
    downsamples: Sequence[float]
    background: tuple[int, int, int]
    is_filled: bool


def holes_in(
    region: Image.Image, fill: tuple[int, int, int] | None, inside_px: tuple[int, int, int, int]
) -> _Mask | None:
    """Return bool[h, w] of the pixels of an RGBA region that may be missing from the file; None if about all are there.

    Args:
        fill: the colour of missing pixels; None if they are transparent.
        slide_box_px: (left, top, right, bottom) of the slide in pixels of the region, which may reach beyond the slide.
    """
    left, top, right, bottom = (max(0, v) for v in inside_px)
    if fill is None:
        alpha = np.asarray(region.getchannel("A"))
        if alpha.all():
            return None
        holes = alpha == 0
    else:
        holes = (np.asarray(region)[..., :3] == fill).all(axis=-1)
    for beyond in (np.s_[:top], np.s_[bottom:], np.s_[:, :left], np.s_[:, right:]):
        holes[beyond] = False
    return holes if np.count_nonzero(holes) >= _LEAST else None


def is_lost(holes: _Mask, place: Place, read: _ReadRegion) -> bool:
    """Return whether other levels show something in the holes of a level's region.

    Coarser levels are compared as a whole, the next finer one at a sample of places.

    Args:
        holes: bool[h, w] in pixels of the level.
    """
    step = -(-max(holes.shape) // _SAMPLES)
    holes = holes[::step, ::step]
    for other in range(place.level + 1, len(place.downsamples)):
        ratio = place.downsamples[place.level] / place.downsamples[other]
        rows, columns = (((np.arange(n) * step + 0.5) * ratio).astype(int) for n in holes.shape)
        try:
            seen = np.asarray(read(place.corner_l0, other, (int(columns[-1]) + 1, int(rows[-1]) + 1)))
        except WsiFlError:
            continue
        there = seen[np.ix_(rows, columns)]
        sure = _inner(holes, 2 / (ratio * step))
        if int((sure & _shows(there, place.background)).sum()) >= _LEAST:
            return True
        blank = (there[..., 3] == 0) | (place.is_filled & (there[..., :3] == place.background).all(axis=-1))
        holes = holes & blank
        if not holes.any():
            return False
    return place.level > 0 and _is_shown_finer(holes, step, place, read)


def _is_shown_finer(holes: _Mask, step: int, place: Place, read: _ReadRegion) -> bool:
    """Return whether the next finer level shows something at places spread over the holes."""
    rows, columns = np.nonzero(_inner(holes, 2 / step))
    if not len(rows):
        return False
    n, downsample = 0, place.downsamples[place.level]
    for k in np.unique(np.linspace(0, len(rows) - 1, _PLACES).astype(int)).tolist():
        at = (int(columns[k]), int(rows[k]))
        x, y = (
            round(v + (pixel * step + 0.5) * downsample) for v, pixel in zip(place.corner_l0, at, strict=True)
        )
        try:
            seen = np.asarray(read((x, y), place.level - 1, (_PLACE_PX, _PLACE_PX)))
        except WsiFlError:
            continue
        n += int(_shows(seen, place.background).sum())
        if n >= _LEAST:
            return True
    return False


def _shows(pixels: NDArray[np.uint8], background: tuple[int, int, int]) -> _Mask:
    """Return bool[h, w] of opaque RGBA pixels [h, w, 4] that differ from the background by more than empty glass."""
    colours = pixels[..., :3].astype(np.int16)
    apart = np.abs(colours - np.array(background, np.int16)).max(axis=-1)
    chroma = colours.max(axis=-1) - colours.min(axis=-1)
    differs = (apart > _FAR_APART) | ((apart > _APART) & (chroma > _CHROMA))
    return np.asarray((pixels[..., 3] == 255) & differs, bool)


def _inner(holes: _Mask, margin: float) -> _Mask:
    """Return the holes without a margin of so many samples, where resampling mixed pixels."""
    from scipy.ndimage import binary_erosion

    n = int(np.ceil(margin))
    return np.asarray(binary_erosion(holes, np.ones((3, 3), bool), iterations=n, border_value=1), bool)
