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

_MAX_SAMPLES = 256
"""Of pixels along each side of a region."""
_MIN_SAMPLES = 16
"""Differing samples from which a region counts as damaged."""
_COLOR_DISTANCE, _GRAY_DISTANCE, _MIN_CHROMA = 32, 80, 16
"""Grey levels from the background: of coloured and of grey pixels (glass is grey), and least chroma of the former."""
_MAX_PROBES, _PROBE_PX = 64, 4
"""Places compared with the next finer level, and their side in its pixels."""


class LevelRegion(NamedTuple):
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


def find_holes(
    region: Image.Image, fill: tuple[int, int, int] | None, slide_box_px: tuple[int, int, int, int]
) -> _Mask | None:
    """Return bool[h, w] of the pixels of an RGBA region that may be missing from the file; None if about all are there.

    Args:
        fill: the colour of missing pixels; None if they are transparent.
        slide_box_px: (left, top, right, bottom) of the slide in pixels of the region, which may reach beyond the slide.
    """
    x_min, y_min, x_max, y_max = (max(0, v) for v in slide_box_px)
    if fill is None:
        alpha = np.asarray(region.getchannel("A"))
        if alpha.all():
            return None
        holes = alpha == 0
    else:
        numbers = np.frombuffer(region.tobytes(), "<u4").reshape(region.height, region.width)  # alpha is highest
        holes = numbers & 0xFFFFFF == int.from_bytes(fill, "little")
    for margin in (np.s_[:y_min], np.s_[y_max:], np.s_[:, :x_min], np.s_[:, x_max:]):
        holes[margin] = False
    return holes if np.count_nonzero(holes) >= _MIN_SAMPLES else None


def has_lost_pixels(holes: _Mask, region: LevelRegion, read: _ReadRegion) -> bool:
    """Return whether other levels show something in the holes of a level's region.

    Coarser levels are compared as a whole, the next finer one at a sample of places.

    Args:
        holes: bool[h, w] in pixels of the level.
    """
    step = -(-max(holes.shape) // _MAX_SAMPLES)
    holes = holes[::step, ::step]
    for coarser in range(region.level + 1, len(region.downsamples)):
        ratio = region.downsamples[region.level] / region.downsamples[coarser]
        rows, columns = (((np.arange(n) * step + 0.5) * ratio).astype(int) for n in holes.shape)
        try:
            pixels = np.asarray(read(region.corner_l0, coarser, (int(columns[-1]) + 1, int(rows[-1]) + 1)))
        except WsiFlError:
            continue
        samples = pixels[np.ix_(rows, columns)]
        inner_holes = _erode_holes(holes, 2 / (ratio * step))
        if int((inner_holes & _find_foreground(samples, region.background)).sum()) >= _MIN_SAMPLES:
            return True
        blank = (samples[..., 3] == 0) | (region.is_filled & (samples[..., :3] == region.background).all(axis=-1))
        holes = holes & blank
        if not holes.any():
            return False
    return region.level > 0 and _has_finer_pixels(holes, step, region, read)


def _has_finer_pixels(holes: _Mask, step: int, region: LevelRegion, read: _ReadRegion) -> bool:
    """Return whether the next finer level shows something at places spread over the holes."""
    rows, columns = np.nonzero(_erode_holes(holes, 2 / step))
    if not len(rows):
        return False
    n_samples, downsample = 0, region.downsamples[region.level]
    for k in np.unique(np.linspace(0, len(rows) - 1, _MAX_PROBES).astype(int)).tolist():
        sample = (int(columns[k]), int(rows[k]))
        x, y = (round(v + (pixel * step + 0.5) * downsample) for v, pixel in zip(region.corner_l0, sample, strict=True))
        try:
            pixels = np.asarray(read((x, y), region.level - 1, (_PROBE_PX, _PROBE_PX)))
        except WsiFlError:
            continue
        n_samples += int(_find_foreground(pixels, region.background).sum())
        if n_samples >= _MIN_SAMPLES:
            return True
    return False


def _find_foreground(pixels: NDArray[np.uint8], background: tuple[int, int, int]) -> _Mask:
    """Return bool[h, w] of opaque RGBA pixels [h, w, 4] that differ from the background by more than empty glass."""
    colors = pixels[..., :3].astype(np.int16)
    distance = np.abs(colors - np.array(background, np.int16)).max(axis=-1)
    chroma = colors.max(axis=-1) - colors.min(axis=-1)
    differs = (distance > _GRAY_DISTANCE) | ((distance > _COLOR_DISTANCE) & (chroma > _MIN_CHROMA))
    return np.asarray((pixels[..., 3] == 255) & differs, bool)


def _erode_holes(holes: _Mask, margin: float) -> _Mask:
    """Return the holes without a margin of so many samples, where resampling mixed pixels."""
    from scipy.ndimage import binary_erosion

    n = int(np.ceil(margin))
    return np.asarray(binary_erosion(holes, np.ones((3, 3), bool), iterations=n, border_value=1), bool)
