"""Where a slide holds tissue, seen in its thumbnail."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.choosing.areas import area_mean
from wsi_fl.types import WsiFlError

_MIN_AREA_PX = 4
"""Objects and holes below this many thumbnail pixels are noise at any resolution."""
_INK_CHROMA = 15 / 255
_BLACK = 25 / 255
_DARK, _GREY_CHROMA = 100 / 255, 20 / 255
_STRIP_PX = 1 << 16
"""Pixels of the thumbnail looked at together."""
_TRUNCATE = 3
"""Standard deviations at which the smoothing kernel ends."""


class NoTissueError(WsiFlError):
    """A thumbnail without tissue; the message holds what was measured."""


@dataclass(frozen=True)
class TissueParams:
    """How tissue is told from background. Lengths in µm act only where they exceed a thumbnail pixel."""

    min_saturation: float = 0.05
    """Otsu's threshold on HSV saturation is never below this: on an empty slide it would split noise."""
    max_saturation: float = 0.07
    """Nor above this: on a slide full of tissue, or with a clean background, it would split pale from dark."""
    smooth_um: float = 4.0
    """Standard deviation of the Gaussian that removes sensor and JPEG noise first."""
    close_um: float = 16.0
    """Radius of the closing that bridges gaps between cells."""
    min_object_um2: float = 5_000.0
    """Smaller specks are dropped; also smaller spots of ink or black are not taken for ink or padding."""
    max_hole_um2: float = 5_000.0
    """Smaller holes are filled: vessels, glands, fat cells."""


def tissue_mask(
    thumbnail: NDArray[np.uint8], downsample_mpp: float | None, params: TissueParams | None = None
) -> NDArray[np.bool_]:
    """Mask bool[h, w] of the tissue in a thumbnail uint8[h, w, 3].

    Tissue is what is more saturated than the background. Black padding and marker ink are background: ink is
    greener than red, pure red or dark grey, which haematoxylin and eosin, both absorbing green most, never are.

    Args:
        downsample_mpp: µm per thumbnail pixel; None, where it is not known, leaves out smoothing and closing.

    Raises:
        NoTissueError: when nothing is left.
    """
    params = params or TissueParams()
    um_per_px = downsample_mpp or float("inf")
    sigma_px = params.smooth_um / um_per_px
    saturation, foreign = _looks(thumbnail, sigma_px if sigma_px >= 0.5 else 0)
    min_px = max(_MIN_AREA_PX, params.min_object_um2 / um_per_px**2)
    excluded = _without_small(foreign, min_px)
    if excluded.any():  # smoothing mixed its rim with what is beside it
        excluded = _dilated(excluded, 1 + 2 * sigma_px)
    threshold = _threshold(saturation[~excluded], params)
    mask = (saturation > threshold) & ~excluded
    if params.close_um >= um_per_px:
        radius_px = params.close_um / um_per_px
        mask = ~_dilated(~_dilated(mask, radius_px), radius_px) & ~excluded
    mask = ~_without_small(~mask, max(_MIN_AREA_PX, params.max_hole_um2 / um_per_px**2)) & ~excluded
    mask = _without_small(mask, min(min_px, mask.size / 2))
    if not mask.any():
        top = float(saturation[~excluded].max(initial=0))
        raise NoTissueError(
            f"no tissue found: {excluded.mean():.0%} of the thumbnail is black or ink, the rest reaches saturation "
            f"{top:.3f} with the threshold at {threshold:.3f}, in no spot of {min_px:.0f} thumbnail pixels or more"
        )
    return mask


def tissue_fraction(
    mask: NDArray[np.bool_], xy_l0: NDArray[np.int64], size_l0: float, downsample: float
) -> NDArray[np.float32]:
    """Share float32[n] of each square's area that is tissue; outside the slide counts as none.

    Exact also where squares cut thumbnail pixels.

    Args:
        mask: bool[h, w], one element per thumbnail pixel.
        xy_l0: [n, 2] top-left corners in level-0 pixels.
        size_l0: side of the squares in level-0 pixels.
        downsample: level-0 pixels per thumbnail pixel.
    """
    share = area_mean(mask, xy_l0 / downsample, size_l0 / downsample)
    return np.clip(share, 0, 1).astype(np.float32)


def _threshold(saturation: NDArray[np.float32], params: TissueParams) -> float:
    """Otsu's threshold within the plausible range."""
    if saturation.size == 0 or np.ptp(saturation) == 0:
        return params.max_saturation
    from skimage.filters import threshold_otsu

    return float(np.clip(threshold_otsu(saturation), params.min_saturation, params.max_saturation))


def _looks(thumbnail: NDArray[np.uint8], sigma_px: float) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """HSV saturation [h, w] of the smoothed thumbnail, and where it is ink or black.

    In strips that fit the cache, which takes a third of the time of whole pictures.
    """
    from scipy.ndimage import gaussian_filter

    height, width, _ = thumbnail.shape
    saturation, foreign = np.empty((height, width), np.float32), np.empty((height, width), bool)
    reach = int(_TRUNCATE * sigma_px + 0.5)
    step = max(_STRIP_PX // width, 4 * reach, 1)
    for top in range(0, height, step):
        first, rows = max(0, top - reach), slice(top, top + step)
        planes = np.moveaxis(thumbnail[first : top + step + reach], -1, 0).astype(np.float32)
        planes /= np.float32(255)
        if reach:
            planes = gaussian_filter(planes, (0, sigma_px, sigma_px), mode="nearest", truncate=_TRUNCATE)
        red, green, blue = planes[:, top - first : top - first + step]
        high = np.maximum(np.maximum(red, green), blue)
        chroma = high - np.minimum(np.minimum(red, green), blue)
        saturation[rows] = chroma / np.maximum(high, np.float32(1 / 255))
        foreign[rows] = _ink_or_black(red, green, blue, high, chroma)
    return saturation, foreign


def _ink_or_black(
    red: NDArray[np.float32],
    green: NDArray[np.float32],
    blue: NDArray[np.float32],
    high: NDArray[np.float32],
    chroma: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """Pixels with a colour that H&E never has: green, cyan and blue ink, red ink, black ink, black padding."""
    greener_than_red = (green - red > 0.03) & (chroma > _INK_CHROMA)
    pure_red = _pure(red, green, blue) & (red > 0.5)
    pure_blue = _pure(blue, red, green)
    black = (high < _BLACK) | ((high < _DARK) & (chroma < _GREY_CHROMA))
    return greener_than_red | pure_red | pure_blue | black


def _pure(
    one: NDArray[np.float32], second: NDArray[np.float32], third: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """Where one channel stands alone: both others are low and alike."""
    alone: NDArray[np.bool_] = one - np.maximum(second, third) > 0.65 * one
    alike: NDArray[np.bool_] = np.abs(second - third) < 0.2 * one
    return alone & alike


def _dilated(mask: NDArray[np.bool_], radius_px: float) -> NDArray[np.bool_]:
    """Dilation with a disc as a stack of runs of pixels, many times faster than by distances."""
    reach, (height, width) = int(radius_px), mask.shape
    room = np.pad(mask, reach)
    run = room[:, reach : reach + width].copy()  # of so many pixels to each side
    out = np.zeros_like(mask)
    for k in range(reach + 1):
        if k:
            run |= room[:, reach - k : reach - k + width]
            run |= room[:, reach + k : reach + k + width]
        for row in range(-reach, reach + 1):
            if int(sqrt(radius_px**2 - row**2)) == k:
                out |= run[reach + row : reach + row + height]
    return out


def _without_small(mask: NDArray[np.bool_], min_px: float) -> NDArray[np.bool_]:
    """The mask without connected objects of fewer than min_px pixels."""
    if not mask.any():
        return mask
    from skimage.measure import label

    objects = label(mask, connectivity=1)
    large = np.bincount(objects.ravel()) >= min_px
    large[0] = False
    kept: NDArray[np.bool_] = large[objects]
    return kept
