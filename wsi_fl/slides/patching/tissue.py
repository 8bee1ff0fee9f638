"""Where a slide holds tissue, seen in its thumbnail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.slides.patching.colours import (
    TRUNCATE,
    Colours,
    along_both,
    colours,
    is_black,
    is_ink,
    is_vivid,
    optical_density,
)
from wsi_fl.slides.patching.regions import area_mean, closed, dilated, without_small
from wsi_fl.types import WsiFlError

_MIN_AREA_PX = 4
"""Objects and holes below this many thumbnail pixels are noise at any resolution."""
_STRIP_PX = 1 << 16
"""Pixels of the thumbnail looked at together."""
_DIM_GLASS = 200 / 255
"""Glass is at least as bright as this."""
_TEXTURE_UM = 32.0
_SMOOTH, _SMOOTH_AT = 0.07, 2.0
"""Standard deviation of brightness below which what has the colour of ink is ink, and the µm per pixel at which that
holds: through it, tissue of H&E shows 0.05, and blue counterstain has 0.09 or more."""
_EVEN = 0.03
"""The same among the pixels of that colour alone: black ink has 0.02 in the thinnest line, dark tissue 0.03 or more."""
_MISSED = 0.05
"""Share of the area by density beyond which saturation is not believed."""
_JUDGED_PX = 384


class NoTissueError(WsiFlError):
    """A thumbnail without tissue; the message holds what was measured."""


Method = Literal["auto", "saturation", "density", "texture"]


@dataclass(frozen=True)
class TissueParams:
    """How tissue is told from background. Lengths in µm act only where they exceed a thumbnail pixel."""

    method: Method = "auto"
    """How it is told where there are no masks. `saturation` is for ordinary stains, `density` for pale ones and
    immunohistochemistry, `texture` for tissue that hardly absorbs light. `auto` takes density where saturation would
    miss much of what absorbs light."""
    masks: str = ""
    """Folder of masks that others made; "" to find tissue here."""
    min_saturation: float = 0.05
    """Otsu's threshold on HSV saturation is never below this: on an empty slide it would split noise."""
    max_saturation: float = 0.07
    """Nor above this: on a slide full of tissue, or with a clean background, it would split pale from dark."""
    min_density: float = 0.02
    """Likewise for optical density above that of the glass."""
    max_density: float = 0.05
    min_texture: float = 0.004
    """Likewise for the standard deviation of optical density around a place."""
    max_texture: float = 0.015
    smooth_um: float = 4.0
    """Standard deviation of the Gaussian that removes sensor and JPEG noise first."""
    close_um: float = 16.0
    """Radius of the closing that bridges gaps between cells."""
    min_object_um2: float = 5_000.0
    """Smaller specks are dropped; also smaller spots of ink or black are not taken for ink or padding."""
    max_hole_um2: float = 5_000.0
    """Smaller holes are filled: vessels, glands, fat cells."""


@dataclass(frozen=True)
class Found:
    """Tissue, and how it was told from background.

    Attributes:
        mask: bool[h, w].
        method: which of the three methods made it, or "masks".
        gain: its area for each of that by saturation; infinity where saturation finds nothing, nan where it
            was not asked.
    """

    mask: NDArray[np.bool_]
    method: str
    gain: float = 1.0


def tissue_mask(
    thumbnail: NDArray[np.uint8], downsample_mpp: float | None, params: TissueParams | None = None
) -> NDArray[np.bool_]:
    """Return the mask bool[h, w] of `find_tissue`, which see."""
    return find_tissue(thumbnail, downsample_mpp, params).mask


def find_tissue(
    thumbnail: NDArray[np.uint8], downsample_mpp: float | None, params: TissueParams | None = None
) -> Found:
    """Find the tissue in a thumbnail uint8[h, w, 3].

    By saturation, tissue is what is more saturated than the background. Black padding and marker ink are background:
    ink is greener than red, pure red or dark grey, which haematoxylin and eosin, both absorbing green most, never
    are. By density, tissue is what absorbs more light than the glass and is not smooth; only vivid colours are ink.

    Args:
        downsample_mpp: µm per thumbnail pixel; None, where it is not known, leaves out smoothing and closing.

    Raises:
        NoTissueError: when nothing is left.
    """
    params = params or TissueParams()
    um_per_px = downsample_mpp or float("inf")
    if params.method == "saturation":
        return Found(_by_saturation(thumbnail, um_per_px, params), "saturation")
    factor = ceil(max(thumbnail.shape[:2]) / _JUDGED_PX)
    small = np.asarray(Image.fromarray(thumbnail).reduce(factor))
    method = "density" if params.method == "auto" else params.method
    other, saturated = (_tried(one, small, um_per_px * factor, params) for one in (method, "saturation"))
    if params.method == "auto" and (other & ~saturated).sum() <= _MISSED * other.sum():
        return Found(_by_saturation(thumbnail, um_per_px, params), "saturation")
    gain = float(other.sum() / saturated.sum()) if saturated.any() else float("inf")
    return Found(_METHODS[method](thumbnail, um_per_px, params), method, gain)


def _tried(
    method: str, thumbnail: NDArray[np.uint8], um_per_px: float, params: TissueParams
) -> NDArray[np.bool_]:
    """Return the mask of a method, empty where it finds nothing."""
    try:
        return _METHODS[method](thumbnail, um_per_px, params)
    except NoTissueError:
        return np.zeros(thumbnail.shape[:2], bool)


def _by_saturation(thumbnail: NDArray[np.uint8], um_per_px: float, params: TissueParams) -> NDArray[np.bool_]:
    sigma_px = _sigma(um_per_px, params)
    saturation, foreign = _looks(thumbnail, sigma_px)
    excluded = _excluded(foreign, sigma_px, um_per_px, params)
    threshold = _threshold(saturation[~excluded], params.min_saturation, params.max_saturation)
    mask = _cleaned(saturation > threshold, excluded, um_per_px, params)
    return _found(mask, saturation, excluded, threshold, "saturation")


def _by_density(thumbnail: NDArray[np.uint8], um_per_px: float, params: TissueParams) -> NDArray[np.bool_]:
    density, excluded = _absorbed(thumbnail, um_per_px, params)
    threshold = _threshold(density[~excluded], params.min_density, params.max_density)
    mask = _cleaned(density > threshold, excluded, um_per_px, params)
    rough = _texture(optical_density(thumbnail), um_per_px) > params.min_texture
    return _found(_without_smooth(mask, rough), density, excluded, threshold, "optical density")


def _by_texture(thumbnail: NDArray[np.uint8], um_per_px: float, params: TissueParams) -> NDArray[np.bool_]:
    density, excluded = _absorbed(thumbnail, um_per_px, params)
    texture = _texture(density, um_per_px)
    threshold = _threshold(texture[~excluded], params.min_texture, params.max_texture)
    mask = _cleaned(texture > threshold, excluded, um_per_px, params)
    return _found(mask, texture, excluded, threshold, "texture")


_METHODS = {"saturation": _by_saturation, "density": _by_density, "texture": _by_texture}


def _absorbed(
    thumbnail: NDArray[np.uint8], um_per_px: float, params: TissueParams
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the optical density above that of the glass, and what is black or vivid ink."""
    # 1. smooth, and exclude black padding and vivid ink
    sigma_px = _sigma(um_per_px, params)
    seen = colours(thumbnail, sigma_px)
    ink = ink_beside_any_stain(thumbnail, seen, um_per_px)
    excluded = _excluded(is_black(seen) | ink, sigma_px, um_per_px, params)
    # 2. optical density −log10(I / I_glass), the mean of three channels (Beer–Lambert)
    density = np.zeros(seen.high.shape, np.float32)
    for plane in (seen.red, seen.green, seen.blue):
        bright = plane[~excluded]
        glass = np.clip(np.percentile(bright, 99) if bright.size else 1.0, _DIM_GLASS, 1.0)
        density -= np.log10(np.clip(plane, 1 / 255, glass) / glass).astype(np.float32) / 3
    return density, excluded


def ink_beside_any_stain(thumbnail: NDArray[np.uint8], seen: Colours, um_per_px: float) -> NDArray[np.bool_]:
    """Return where a thumbnail uint8[h, w, 3] has ink, whatever its tissue is stained with.

    Blue counterstain has colours of ink. So ink is only what is vivid, or has such a colour and is smooth: with what is
    around it, or by itself as a thin line is.

    Args:
        seen: the colours of the thumbnail, smoothed.
    """
    ink = is_ink(seen)
    if ink.any():
        brightness = np.asarray(thumbnail.mean(-1, dtype=np.float32) / 255)
        fineness = np.sqrt(_SMOOTH_AT / um_per_px)  # coarse pixels show less of nuclei
        smooth = _SMOOTH * np.clip(fineness, 0.45, 1)
        varied = _texture(brightness, um_per_px, ink) > _EVEN
        ink &= ~_without_smooth(ink, varied & (_texture(brightness, um_per_px) > smooth))
    return is_vivid(seen) | ink


def _texture(
    values: NDArray[np.float32], um_per_px: float, within: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Return the standard deviation of values [h, w] around each place: of those in a mask, where one is given."""
    from scipy.ndimage import uniform_filter1d

    side = max(3, round(_TEXTURE_UM / um_per_px))
    inside = np.ones_like(values) if within is None else within.astype(np.float32)
    sums = np.stack([inside, inside * values, inside * np.square(values)])
    share, mean, of_squares = along_both(partial(uniform_filter1d, size=side), sums)
    share = np.maximum(share, 1e-3)
    return np.asarray(np.sqrt(np.maximum(of_squares / share - np.square(mean / share), 0)), np.float32)


def _without_smooth(mask: NDArray[np.bool_], rough: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the mask without connected objects that are mostly smooth: shadows, glue, the edge of a coverslip."""
    from skimage.measure import label

    objects = label(mask, connectivity=1)
    n = np.bincount(objects.ravel())
    keep = np.bincount(objects.ravel(), rough.ravel()) >= 0.5 * n
    keep[0] = False
    return np.asarray(keep[objects], bool)


def _sigma(um_per_px: float, params: TissueParams) -> float:
    """Return the standard deviation of the smoothing in pixels; 0 where it would do nothing."""
    sigma_px = params.smooth_um / um_per_px
    return sigma_px if sigma_px >= 0.5 else 0


def _excluded(
    foreign: NDArray[np.bool_], sigma_px: float, um_per_px: float, params: TissueParams
) -> NDArray[np.bool_]:
    excluded = without_small(foreign, max(_MIN_AREA_PX, params.min_object_um2 / um_per_px**2))
    if excluded.any():  # smoothing mixed its rim with what is beside it
        excluded = dilated(excluded, 1 + 2 * sigma_px)
    return excluded


def _cleaned(
    mask: NDArray[np.bool_], excluded: NDArray[np.bool_], um_per_px: float, params: TissueParams
) -> NDArray[np.bool_]:
    """Return the mask closed, without small holes and small objects, and without what is excluded."""
    mask = mask & ~excluded
    if params.close_um >= um_per_px:
        mask = closed(mask, params.close_um / um_per_px) & ~excluded
    mask = ~without_small(~mask, max(_MIN_AREA_PX, params.max_hole_um2 / um_per_px**2)) & ~excluded
    return without_small(mask, min(max(_MIN_AREA_PX, params.min_object_um2 / um_per_px**2), mask.size / 2))


def _found(
    mask: NDArray[np.bool_],
    values: NDArray[np.float32],
    excluded: NDArray[np.bool_],
    threshold: float,
    of: str,
) -> NDArray[np.bool_]:
    """Return the mask.

    Raises:
        NoTissueError: when it is empty.
    """
    if not mask.any():
        top = float(values[~excluded].max(initial=0))
        raise NoTissueError(
            f"no tissue found: {excluded.mean():.0%} of the thumbnail is black or ink; the rest reaches {of} {top:.3f} "
            f"at a threshold of {threshold:.3f}, and no spot above it is large enough"
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
    if not mask.any():
        return np.zeros(len(xy_l0), np.float32)
    share = area_mean(mask, xy_l0 / downsample, size_l0 / downsample)
    return np.clip(share, 0, 1).astype(np.float32)


def _threshold(values: NDArray[np.float32], least: float, most: float) -> float:
    """Otsu's threshold within the plausible range."""
    if values.size == 0 or np.ptp(values) == 0:
        return most
    from skimage.filters import threshold_otsu

    return float(np.clip(threshold_otsu(values), least, most))


def _looks(thumbnail: NDArray[np.uint8], sigma_px: float) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """HSV saturation [h, w] of the smoothed thumbnail, and where it is ink or black.

    In strips that fit the cache, which takes a third of the time of whole pictures.
    """
    height, width, _ = thumbnail.shape
    saturation, foreign = np.empty((height, width), np.float32), np.empty((height, width), bool)
    reach = int(TRUNCATE * sigma_px + 0.5)
    step = max(_STRIP_PX // width, 4 * reach, 1)
    for top in range(0, height, step):
        first, rows = max(0, top - reach), slice(top, top + step)
        seen = colours(thumbnail[first : top + step + reach], sigma_px)
        inner = slice(top - first, top - first + step)
        saturation[rows] = seen.saturation[inner]
        foreign[rows] = (is_ink(seen) | is_black(seen))[inner]
    return saturation, foreign
