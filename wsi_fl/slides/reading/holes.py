"""Places where a file holds no pixels, and whether it should: what one level lacks, another may show.

Scanners leave out what they did not scan, in all levels alike. A level that holds nothing where another shows tissue
is damaged.
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
"""(level-0 corner, level, (width, height) in its pixels) → RGBA; WsiFlError where it is damaged."""

_SAMPLES = 256
"""Along each side of a region; more are not looked at."""
_LEAST = 16
"""Samples that must differ."""
_APART, _FAR_APART, _CHROMA = 32, 80, 16
"""Grey levels from the background: of what has some colour, and of what is grey, as glass is."""
_PLACES, _PLACE_PX = 64, 4
"""Where finer levels are looked at, and how many of their pixels along a side."""


class Place(NamedTuple):
    """Where a region lies.

    Attributes:
        corner_l0: its corner in level-0 pixels.
        level: the number of its level.
        downsamples: level-0 pixels per pixel of every level.
        background: what stands for pixels that the file does not hold.
        is_filled: whether they have that colour themselves, instead of being transparent.
    """

    corner_l0: tuple[int, int]
    level: int
    downsamples: Sequence[float]
    background: tuple[int, int, int]
    is_filled: bool


def holes_in(
    region: Image.Image, fill: tuple[int, int, int] | None, inside_px: tuple[int, int, int, int]
) -> _Mask | None:
    """Return bool[h, w] of the pixels of an RGBA region that the file may not hold; None where it holds about all.

    Args:
        fill: the colour of what the file does not hold, where it is not transparent.
        inside_px: (left, top, right, bottom) of the slide in pixels of the region, which may lie beyond it.
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

    Coarser levels are compared as a whole, the next finer one at some places alone.

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
    """Return whether the next finer level shows something at some places that are spread over the holes."""
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
    """Where RGBA pixels [h, w, 4] are there and differ from the background by more than empty glass may."""
    colours = pixels[..., :3].astype(np.int16)
    apart = np.abs(colours - np.array(background, np.int16)).max(axis=-1)
    chroma = colours.max(axis=-1) - colours.min(axis=-1)
    differs = (apart > _FAR_APART) | ((apart > _APART) & (chroma > _CHROMA))
    return np.asarray((pixels[..., 3] == 255) & differs, bool)


def _inner(holes: _Mask, margin: float) -> _Mask:
    """The holes without a margin of so many samples, whose pixels are mixed with those beside them."""
    from scipy.ndimage import binary_erosion

    n = int(np.ceil(margin))
    return np.asarray(binary_erosion(holes, np.ones((3, 3), bool), iterations=n, border_value=1), bool)
