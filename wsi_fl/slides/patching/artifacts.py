"""Artifacts of patches: pen, black, folds, bubbles, blur. Classical measures, none learned.

Pen, black, folds and bubbles are areas of the thumbnail; blur is measured on the patch at 2 µm per pixel. The defaults
were chosen on real tissue with ink, folds and blur (docs/how-to/prepare-data.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.mask_regions import close_mask, dilate_mask, drop_small_objects
from wsi_fl.slides.patching.slide_survey import SlideSurvey
from wsi_fl.slides.patching.tissue import ColorPlanes, find_ink, optical_density, split_colors, tissue_fraction
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.types import GridSpec

_Kind = Literal["pen", "black", "fold", "bubble", "blur"]
KINDS: tuple[_Kind, ...] = get_args(_Kind)
"""In order of precedence: the first artifact above its limit is a patch's reason."""

_BLUR_MPP = 2.0
"""µm per pixel at which sharpness is measured: nuclei are three to five pixels wide there."""
_BLOCK_PX = 16
"""Side of the parts of a patch in which sharpness is measured."""
_MIN_SHARPNESS = 0.35
"""Least energy of fine detail over that of coarse detail; parts of a patch with less are blurred."""
_LEAST_FINE = 4.0
"""Energy of fine detail, in squared grey levels, of noise."""
_TISSUE_OF_GLASS = 0.93
"""Brightness over that of glass below which a part is tissue."""
_SMOOTH_UM = 4.0
_MIN_SPOT_UM2 = 2_000.0
_FOLD_SMOOTH_UM = 16.0
_FOLD_FACTOR = 1.6
_RIM_CHROMA, _RIM_BRIGHTEST, _RIM_DARKEST = 22 / 255, 190 / 255, 25 / 255
_RIM_CLOSE_UM, _RIM_SMOOTH_UM = 24.0, 2.0
_MIN_ROUNDNESS = 0.7
"""Least share of its circle covered by a bubble."""


@dataclass(frozen=True)
class QualityParams:
    """The artifacts for which patches are excluded, and the largest share of a patch for each.

    `segmenter` is the SHA-256 of the segmenter's file, "" without one.
    """

    kinds: tuple[_Kind, ...] = ()
    max_pen: float = 0.05
    max_black: float = 0.05
    max_fold: float = 0.25
    max_bubble: float = 0.25
    max_blur: float = 0.4
    segmenter: str = ""


class ArtifactSegmenter(Protocol):
    """A model that segments artifacts on patches of `mpp` µm per pixel, in place of the measures here. Its classes with
    the name of a kind are artifacts."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def mpp(self) -> float: ...

    def shares(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the share float32[b, n_classes] of each class in each of the patches uint8[b, h, w, 3]."""
        ...


def find_artifacts(
    survey: SlideSurvey, rows: NDArray[np.int64], params: QualityParams, segmenter: ArtifactSegmenter | None
) -> NDArray[np.str_]:
    """Return the artifact for which each of these rows of the grid is excluded, "" for good ones."""
    classes = segmenter.classes if segmenter is not None else ()
    shares: dict[_Kind, NDArray[np.float32]] = {}
    measure_patches = partial(_measure_patches, survey, rows)
    um_per_px = survey.downsample * survey.mpp
    planes = cache(lambda: split_colors(survey.thumbnail, _SMOOTH_UM / um_per_px))
    for kind in [kind for kind in params.kinds if kind not in classes]:
        if kind == "blur":
            glass = float(np.percentile(survey.thumbnail[..., 1], 99))
            shares[kind] = measure_patches(_BLUR_MPP, partial(_blur_share, glass=glass))
        else:
            mask = _find_area(kind, survey, um_per_px, planes)
            shares[kind] = tissue_fraction(mask, survey.xy_l0, survey.side_l0, survey.downsample)[rows]
    if segmenter is not None and (segmented_kinds := [kind for kind in params.kinds if kind in classes]):
        class_shares = measure_patches(segmenter.mpp, segmenter.shares)
        shares |= {kind: class_shares[:, classes.index(kind)] for kind in segmented_kinds}
    reason = np.full(len(rows), "", "<U6")
    for kind in reversed([kind for kind in KINDS if kind in shares]):
        reason[shares[kind] > getattr(params, f"max_{kind}")] = kind
    return reason


def _measure_patches(
    survey: SlideSurvey,
    rows: NDArray[np.int64],
    mpp: float,
    measure: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Return a measure of each patch, read at `mpp` or as fine as the slide is.

    It is 0 for unreadable ones, which tiling reports.
    """
    mpp = max(mpp, survey.mpp)
    side_px = max(1, round(survey.side_l0 * survey.mpp / mpp))
    unreadable: dict[int, str] = {}
    spec = GridSpec(side_px, mpp, side_px)
    batches = read_patches(
        survey.record, survey.xy_l0[rows], spec, threads=1, reader=survey.reader, excluded=unreadable
    )
    values = np.concatenate([measure(patches) for _, patches in batches])
    out = np.zeros((len(rows), *values.shape[1:]), np.float32)
    out[np.setdiff1d(np.arange(len(rows)), list(unreadable))] = values
    return out


def describe_reasons(reasons: NDArray[np.str_]) -> str:
    """Return the number of patches by reason, in words.

    Example:
        >>> describe_reasons(np.array(["blur", "pen", "blur"]))
        '1 pen, 2 blur'
    """
    return ", ".join(f"{n} {kind}" for kind in KINDS if (n := int((reasons == kind).sum())))


def _find_area(
    kind: _Kind, survey: SlideSurvey, um_per_px: float, planes: Callable[[], ColorPlanes]
) -> NDArray[np.bool_]:
    """Return where the thumbnail [h, w] shows pen, black, a fold or a bubble.

    Folds exceed the usual density of tissue. Where tissue was not found by saturation, its stain may have the colour of
    ink.
    """
    least_px = max(4, _MIN_SPOT_UM2 / um_per_px**2)
    if kind == "fold":
        return drop_small_objects(_find_folds(survey.thumbnail, um_per_px, survey.segmentation.mask), least_px)
    if kind == "bubble":
        return drop_small_objects(_find_bubbles(survey.thumbnail, um_per_px), least_px)
    if kind == "black":
        return drop_small_objects(planes().black, least_px)
    is_ordinary = survey.segmentation.method == "saturation"
    ink = planes().ink if is_ordinary else find_ink(survey.thumbnail, planes(), um_per_px)
    return dilate_mask(drop_small_objects(ink, least_px), 1.0)  # pixels at the edge mix ink and tissue


def _blur_share(patches: NDArray[np.uint8], glass: float) -> NDArray[np.float32]:
    """Return the share float32[b] of out-of-focus tissue in patches uint8[b, h, w, 3] at 2 µm per pixel.

    The measure of a part of a patch is the energy of a Laplacian on its pixels over that of a Laplacian on means of
    2 × 2 pixels. It does not depend on the strength of the stain: sharp tissue has 0.5 to 2, tissue blurred by a
    Gaussian of 2 µm 0.13 to 0.28.

    Args:
        glass: brightness of the slide's background, from 0 to 255; parts that bright are not tissue.

    Example:
        >>> noise = np.random.default_rng(0).integers(90, 190, (1, 64, 64, 1), np.uint8).repeat(3, 3)
        >>> _blur_share(noise, glass=240).tolist()
        [0.0]
    """
    green = patches[..., 1].astype(np.float32)
    block = min(_BLOCK_PX, min(green.shape[1:]) // 2 * 2)
    if block < 4:
        return np.zeros(len(patches), np.float32)
    fine = _block_means(np.square(_filter_laplacian(green)), block)
    coarse = _block_means(np.square(_filter_laplacian(_block_means(green, 2))), block // 2)
    tissue = _block_means(green, block) < _TISSUE_OF_GLASS * glass
    is_blurred = tissue & (fine < np.maximum(_MIN_SHARPNESS * coarse, _LEAST_FINE))
    return np.asarray(is_blurred.sum((1, 2)) / np.maximum(tissue.sum((1, 2)), 1), np.float32)


def _filter_laplacian(gray: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each pixel of [b, h, w] less the mean of its four neighbours; edge pixels are repeated."""
    padded = np.pad(gray, ((0, 0), (1, 1), (1, 1)), mode="edge")
    out = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1]
    out += padded[:, 1:-1, :-2]
    out += padded[:, 1:-1, 2:]
    out *= -0.25
    out += gray
    return np.asarray(out, np.float32)


def _block_means(gray: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Return the means of [b, h, w] over squares of this side; remainders at the edge are left out.

    By halves, several times faster than a sum over axes.
    """
    rows, columns = (extent // side * side for extent in gray.shape[1:])
    out, n = gray[:, :rows, :columns], side
    while n % 2 == 0:
        out = out[:, 0::2] + out[:, 1::2]
        out = out[:, :, 0::2] + out[:, :, 1::2]
        n //= 2
    if n > 1:
        out = out.reshape(len(out), rows // side, n, columns // side, n).sum((2, 4))
    return np.asarray(out / side**2, np.float32)


def _find_folds(thumbnail: NDArray[np.uint8], um_per_px: float, tissue: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where tissue absorbs much more than the slide's median, as where it lies double."""
    from scipy.ndimage import gaussian_filter

    density = gaussian_filter(optical_density(thumbnail), _FOLD_SMOOTH_UM / um_per_px)
    usual = density[tissue]
    if not len(usual):
        return np.zeros(tissue.shape, bool)
    return np.asarray(tissue & (density > _FOLD_FACTOR * np.median(usual)), bool)


def _find_bubbles(thumbnail: NDArray[np.uint8], um_per_px: float) -> NDArray[np.bool_]:
    """Return the areas within closed circular grey rims: neither stain nor ink is grey."""
    from scipy.ndimage import binary_fill_holes
    from skimage.measure import label, regionprops

    colors = split_colors(thumbnail, _RIM_SMOOTH_UM / um_per_px)
    rim = (colors.chroma < _RIM_CHROMA) & (colors.high < _RIM_BRIGHTEST) & (colors.high > _RIM_DARKEST)
    reach = max(1.0, _RIM_CLOSE_UM / um_per_px)
    filled = np.asarray(binary_fill_holes(close_mask(rim, reach)), bool)
    bubbles = np.zeros(rim.shape, bool)
    for region in regionprops(label(filled, connectivity=1)):
        height, width = region.bbox[2] - region.bbox[0], region.bbox[3] - region.bbox[1]
        circle = np.pi / 4 * max(height, width) ** 2
        is_hollow = rim[region.slice][region.image].mean() < 0.5
        if is_hollow and region.area > _MIN_ROUNDNESS * circle:
            bubbles[region.slice] |= region.image
    return bubbles
