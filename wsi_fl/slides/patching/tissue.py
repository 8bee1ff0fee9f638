"""Tissue segmentation by the colours of a thumbnail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.slides.patching.mask_regions import area_mean, close_mask, dilate_mask, drop_small_objects
from wsi_fl.slides.patching.outline_placement import Origin
from wsi_fl.types import WsiFlError

Method = Literal["auto", "saturation", "density", "texture"]
_Mask = NDArray[np.bool_]
_Plane = NDArray[np.float32]
_Picture = NDArray[np.uint8]

_THRESHOLD_BOUNDS = {"saturation": (0.05, 0.07), "density": (0.02, 0.05), "texture": (0.004, 0.015)}
"""Bounds of Otsu's threshold: lower, on an empty slide it would split noise; higher, on a slide full of tissue or with
a clean background, pale from dark. Density is optical density above that of the glass, texture its local standard
deviation."""
_SMOOTH_UM = 4.0
"""Standard deviation of the Gaussian that removes sensor and JPEG noise first."""
_CLOSE_UM = 16.0
"""Radius of the closing that bridges gaps between cells."""
_MIN_OBJECT_UM2 = 5_000.0
"""Least area of tissue, and of spots of ink and of black padding."""
_MAX_HOLE_UM2 = 5_000.0
"""Largest filled hole: vessels, glands, fat cells."""
_MIN_AREA_PX = 4
"""Objects and holes below this many thumbnail pixels are noise at any resolution."""
_STRIP_PX = 1 << 16
"""Pixels of the thumbnail in one step."""
_DIM_GLASS = 200 / 255
"""Least brightness of glass."""
_TEXTURE_UM = 32.0
_MAX_INK_TEXTURE, _INK_TEXTURE_MPP = 0.07, 2.0
"""Standard deviation of brightness below which pixels of the colour of ink are ink, and its µm per pixel: H&E tissue
shows 0.05 through ink, and blue counterstain has 0.09 or more."""
_MAX_EVEN_TEXTURE = 0.03
"""The same among pixels of that colour only: black ink has 0.02 in the thinnest line, dark tissue 0.03 or more."""
_MAX_MISSED_SHARE = 0.05
"""Share of the area by density that saturation may miss."""
_TRIAL_PX = 384

_TRUNCATE = 3
"""Standard deviations at which the smoothing kernel ends."""
_INK_CHROMA = 15 / 255
_MAX_BLACK = 25 / 255
_MAX_DARK, _GRAY_CHROMA = 100 / 255, 20 / 255
_VIVID_CHROMA, _VIVID_SATURATION = 0.4, 0.6
_LOG_TRANSMITTANCE = np.log10((np.arange(256, dtype=np.float32) + 1) / 256)
"""Logarithm of transmitted light, by the value of a channel."""


class NoTissueError(WsiFlError):
    """A thumbnail has no tissue; the message has the measurements."""


@dataclass(frozen=True)
class TissueParams:
    """Parameters of tissue segmentation."""

    method: Method = "auto"
    """The method without masks: `saturation` for ordinary stains, `density` for pale ones and immunohistochemistry,
    `texture` for tissue that hardly absorbs light. `auto` takes density where saturation would miss much of the
    absorbing area."""
    masks: str = ""
    """Folder of masks from other tools; "" for none."""
    origin: Origin = None
    """The corner of the slide from which masks count."""


@dataclass(frozen=True)
class TissueSegmentation:
    """Tissue bool[h, w], its method (one of three, or "masks"), and its area over that by saturation: infinity if
    saturation finds nothing, nan for masks."""

    mask: _Mask
    method: str
    gain: float = 1.0


@dataclass(frozen=True)
class ColorPlanes:
    """The planes [h, w] of a smoothed picture, from 0 to 1: its channels, their maximum, and maximum less minimum.
    Derived masks are bool[h, w]."""

    red: _Plane
    green: _Plane
    blue: _Plane
    high: _Plane
    chroma: _Plane

    @property
    def saturation(self) -> _Plane:
        """HSV saturation [h, w]."""
        return np.asarray(self.chroma / np.maximum(self.high, np.float32(1 / 255)), np.float32)

    @property
    def black(self) -> _Mask:
        """Unscanned areas."""
        return np.asarray(self.high < _MAX_BLACK, bool)

    @property
    def ink(self) -> _Mask:
        """Colours that H&E never has: green, cyan, blue, red and black ink."""
        is_greener = (self.green - self.red > 0.03) & (self.chroma > _INK_CHROMA)
        is_gray = (self.high < _MAX_DARK) & (self.chroma < _GRAY_CHROMA) & ~self.black
        return np.asarray(is_greener | self._pure_red_or_blue | is_gray, bool)

    @property
    def vivid(self) -> _Mask:
        """Colours that no stain has, not even blue haematoxylin and brown DAB."""
        is_saturated = (self.saturation > _VIVID_SATURATION) & (self.chroma > _INK_CHROMA)
        is_strong = (self.chroma > _VIVID_CHROMA) | is_saturated
        is_cold = (self.red < self.green) & (self.red < self.blue) & is_strong
        is_green = (self.green > self.red) & (self.green > self.blue) & (self.chroma > _INK_CHROMA)
        return np.asarray(is_cold | is_green | self._pure_red_or_blue, bool)

    @property
    def _pure_red_or_blue(self) -> _Mask:
        is_red = _is_pure(self.red, self.green, self.blue) & (self.red > 0.5)
        return np.asarray(is_red | _is_pure(self.blue, self.red, self.green), bool)


def _is_pure(channel: _Plane, second: _Plane, third: _Plane) -> _Mask:
    """Return where one channel dominates: both others are low and similar."""
    is_dominant = channel - np.maximum(second, third) > 0.65 * channel
    return np.asarray(is_dominant & (np.abs(second - third) < 0.2 * channel), bool)


def split_colors(picture: _Picture, sigma_px: float) -> ColorPlanes:
    """Return the planes of a picture uint8[h, w, 3], smoothed if sigma_px is half a pixel or more."""
    from scipy.ndimage import gaussian_filter1d

    planes = np.moveaxis(picture, -1, 0).astype(np.float32)
    planes /= np.float32(255)
    if sigma_px >= 0.5:
        smooth_rows = partial(gaussian_filter1d, sigma=sigma_px, mode="nearest", truncate=_TRUNCATE)
        planes = _filter_both_axes(smooth_rows, planes)
    red, green, blue = planes
    high = np.maximum(np.maximum(red, green), blue)
    return ColorPlanes(red, green, blue, high, high - np.minimum(np.minimum(red, green), blue))


def _optical_density(picture: _Picture) -> _Plane:
    """Return the optical density float32[h, w] of a picture uint8[h, w, 3]: the mean of its channels; white has 0."""
    red, green, blue = (_LOG_TRANSMITTANCE[picture[..., channel]] for channel in range(3))
    return np.asarray(-(red + green + blue) / 3, np.float32)


def _filter_both_axes(filter_rows: Callable[[_Plane], _Plane], planes: _Plane) -> _Plane:
    """Apply a filter of the last axis to the columns of planes [..., h, w], then to their rows.

    The filtered axis is contiguous in memory, which takes a third of the time.
    """
    for _ in range(2):
        planes = filter_rows(np.ascontiguousarray(planes.swapaxes(-1, -2)))
    return planes


def tissue_mask(thumbnail: _Picture, downsample_mpp: float | None, params: TissueParams | None = None) -> _Mask:
    """Return the mask bool[h, w] of the tissue in a thumbnail uint8[h, w, 3]; see `find_tissue`."""
    return find_tissue(thumbnail, downsample_mpp, params).mask


def find_tissue(
    thumbnail: _Picture, downsample_mpp: float | None, params: TissueParams | None = None
) -> TissueSegmentation:
    """Find the tissue in a thumbnail uint8[h, w, 3].

    By saturation, tissue is more saturated than the background. Black padding and marker ink are background: ink is
    greener than red, pure red or dark grey; haematoxylin and eosin, which absorb green most, never are. By density,
    tissue absorbs more light than the glass and is not smooth; only vivid colours are ink.

    Args:
        downsample_mpp: µm per thumbnail pixel; None for unknown, without smoothing and closing.

    Raises:
        NoTissueError: when there is no tissue.
    """
    params, um_per_px = params or TissueParams(), downsample_mpp or inf
    method = "density" if params.method == "auto" else params.method
    gain = 1.0
    if method != "saturation":
        factor = ceil(max(thumbnail.shape[:2]) / _TRIAL_PX)
        small_copy = np.asarray(Image.fromarray(thumbnail).reduce(factor))
        mask, saturated_mask = (_try_method(name, small_copy, um_per_px * factor) for name in (method, "saturation"))
        if params.method == "auto" and (mask & ~saturated_mask).sum() <= _MAX_MISSED_SHARE * mask.sum():
            method = "saturation"
        else:
            gain = float(mask.sum() / saturated_mask.sum()) if saturated_mask.any() else inf
    return TissueSegmentation(_segment_by(method, thumbnail, um_per_px), method, gain)


def _try_method(method: str, thumbnail: _Picture, um_per_px: float) -> _Mask:
    try:
        return _segment_by(method, thumbnail, um_per_px)
    except NoTissueError:
        return np.zeros(thumbnail.shape[:2], bool)


def _segment_by(method: str, thumbnail: _Picture, um_per_px: float) -> _Mask:
    measure = _measure_saturation if method == "saturation" else _measure_density
    sigma_px = _SMOOTH_UM / um_per_px
    values, excluded = measure(thumbnail, sigma_px if sigma_px >= 0.5 else 0, um_per_px)
    if method == "texture":
        values = _measure_texture(values, um_per_px)
    (min_threshold, threshold), included = _THRESHOLD_BOUNDS[method], values[~excluded]
    if included.size and np.ptp(included):
        from skimage.filters import threshold_otsu

        threshold = float(np.clip(threshold_otsu(included), min_threshold, threshold))
    mask = _clean_mask(values > threshold, excluded, um_per_px)
    if method == "density":
        is_rough = _measure_texture(_optical_density(thumbnail), um_per_px) > _THRESHOLD_BOUNDS["texture"][0]
        mask = _drop_smooth_objects(mask, is_rough)
    if not mask.any():
        max_value = float(included.max(initial=0))
        quantity = "optical density" if method == "density" else method
        raise NoTissueError(
            f"no tissue found: {excluded.mean():.0%} of the thumbnail is black or ink; the rest reaches "
            f"{quantity} {max_value:.3f} at a threshold of {threshold:.3f}, and no spot above it is large enough"
        )
    return mask


def _measure_saturation(thumbnail: _Picture, sigma_px: float, um_per_px: float) -> tuple[_Plane, _Mask]:
    """Return the HSV saturation [h, w] of the smoothed thumbnail, and where it is ink or black.

    In strips that fit the cache, in a third of the time for whole pictures.
    """
    height, width, _ = thumbnail.shape
    saturation, is_foreign = np.empty((height, width), np.float32), np.empty((height, width), bool)
    reach = int(_TRUNCATE * sigma_px + 0.5)
    step = max(_STRIP_PX // width, 4 * reach, 1)
    for top in range(0, height, step):
        first_row, rows = max(0, top - reach), slice(top, top + step)
        colors = split_colors(thumbnail[first_row : top + step + reach], sigma_px)
        inner = slice(top - first_row, top - first_row + step)
        saturation[rows] = colors.saturation[inner]
        is_foreign[rows] = (colors.ink | colors.black)[inner]
    return saturation, _clean_excluded(is_foreign, sigma_px, um_per_px)


def _measure_density(thumbnail: _Picture, sigma_px: float, um_per_px: float) -> tuple[_Plane, _Mask]:
    """Return the optical density [h, w] above that of the glass, −log10(I / I_glass), the mean of three channels
    (Beer–Lambert), and where it is black or ink."""
    colors = split_colors(thumbnail, sigma_px)
    ink = find_ink(thumbnail, colors, um_per_px)
    excluded = _clean_excluded(colors.black | ink, sigma_px, um_per_px)
    density = np.zeros(colors.high.shape, np.float32)
    for plane in (colors.red, colors.green, colors.blue):
        bright_values = plane[~excluded]
        glass = np.clip(np.percentile(bright_values, 99) if bright_values.size else 1.0, _DIM_GLASS, 1.0)
        density -= np.log10(np.clip(plane, 1 / 255, glass) / glass).astype(np.float32) / 3
    return density, excluded


def find_ink(thumbnail: _Picture, colors: ColorPlanes, um_per_px: float) -> _Mask:
    """Return where a thumbnail uint8[h, w, 3] with these smoothed colours has ink, for any stain.

    Blue counterstain has colours of ink. So ink must be vivid, or have such a colour and be smooth: together with its
    surroundings, or by itself, as a thin line.
    """
    ink = colors.ink
    if ink.any():
        brightness = np.asarray(thumbnail.mean(-1, dtype=np.float32) / 255)
        fineness = np.sqrt(_INK_TEXTURE_MPP / um_per_px)  # coarse pixels show less of nuclei
        max_texture = _MAX_INK_TEXTURE * np.clip(fineness, 0.45, 1)
        is_varied = _measure_texture(brightness, um_per_px, ink) > _MAX_EVEN_TEXTURE
        ink &= ~_drop_smooth_objects(ink, is_varied & (_measure_texture(brightness, um_per_px) > max_texture))
    return colors.vivid | ink


def _measure_texture(values: _Plane, um_per_px: float, mask: _Mask | None = None) -> _Plane:
    """Return the local standard deviation of values [h, w], or of those in a mask."""
    from scipy.ndimage import uniform_filter1d

    side = max(3, round(_TEXTURE_UM / um_per_px))
    weights = np.ones_like(values) if mask is None else mask.astype(np.float32)
    sums = np.stack([weights, weights * values, weights * np.square(values)])
    share, mean, mean_square = _filter_both_axes(partial(uniform_filter1d, size=side), sums)
    share = np.maximum(share, 1e-3)
    return np.asarray(np.sqrt(np.maximum(mean_square / share - np.square(mean / share), 0)), np.float32)


def _drop_smooth_objects(mask: _Mask, is_rough: _Mask) -> _Mask:
    """Return the mask without mostly smooth connected objects: shadows, glue, the edge of a coverslip."""
    from skimage.measure import label

    objects = label(mask, connectivity=1)
    n = np.bincount(objects.ravel())
    keep = np.bincount(objects.ravel(), is_rough.ravel()) >= 0.5 * n
    keep[0] = False
    return np.asarray(keep[objects], bool)


def _clean_excluded(is_foreign: _Mask, sigma_px: float, um_per_px: float) -> _Mask:
    excluded = drop_small_objects(is_foreign, max(_MIN_AREA_PX, _MIN_OBJECT_UM2 / um_per_px**2))
    if excluded.any():  # smoothing mixed its rim with its surroundings
        excluded = dilate_mask(excluded, 1 + 2 * sigma_px)
    return excluded


def _clean_mask(mask: _Mask, excluded: _Mask, um_per_px: float) -> _Mask:
    """Return the mask closed, without small holes, small objects and excluded areas."""
    mask = mask & ~excluded
    if um_per_px <= _CLOSE_UM:
        mask = close_mask(mask, _CLOSE_UM / um_per_px) & ~excluded
    mask = ~drop_small_objects(~mask, max(_MIN_AREA_PX, _MAX_HOLE_UM2 / um_per_px**2)) & ~excluded
    return drop_small_objects(mask, min(max(_MIN_AREA_PX, _MIN_OBJECT_UM2 / um_per_px**2), mask.size / 2))


def tissue_fraction(mask: _Mask, xy_l0: NDArray[np.int64], size_l0: float, downsample: float) -> _Plane:
    """Return the share float32[n] of tissue in each square, exact also where squares cut pixels of the mask [h, w].

    Args:
        xy_l0, size_l0: top-left corners [n, 2] and side of the squares in level-0 pixels; beyond the mask is no tissue.
        downsample: level-0 pixels per pixel of the mask.
    """
    if not mask.any():
        return np.zeros(len(xy_l0), np.float32)
    share = area_mean(mask, xy_l0 / downsample, size_l0 / downsample)
    return np.clip(share, 0, 1).astype(np.float32)
