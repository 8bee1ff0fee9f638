"""Artifacts of patches: pen, black, folds, bubbles, blur. Classical measures, none learned.

Pen, black, folds and bubbles are areas of the thumbnail; blur is measured on the patch at 2 µm per pixel. The defaults
were chosen on real tissue with ink, folds and blur (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.regions import closed, dilated, without_small
from wsi_fl.slides.patching.survey import SlideSurvey
from wsi_fl.slides.patching.tissue import (
    Colours,
    colours,
    ink_beside_any_stain,
    optical_density,
    tissue_fraction,
)
from wsi_fl.slides.reading.sweep import read_patches
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
_ROUND = 0.7
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


class Segmenter(Protocol):
    """A model that segments artifacts on patches of `mpp` µm per pixel, in place of the measures here. Its classes with
    the name of a kind are artifacts."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def mpp(self) -> float: ...

    def shares(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the share float32[b, n_classes] of each class in each of the patches uint8[b, h, w, 3]."""
        ...


def faults(
    seen: SlideSurvey, rows: NDArray[np.int64], params: QualityParams, segmenter: Segmenter | None
) -> NDArray[np.str_]:
    """Return the artifact for which each of these rows of the grid is excluded, "" for good ones."""
    known = segmenter.classes if segmenter is not None else ()
    found: dict[_Kind, NDArray[np.float32]] = {}
    measured = partial(_measured, seen, rows)
    um_per_px = seen.downsample * seen.mpp
    planes = cache(lambda: colours(seen.thumbnail, _SMOOTH_UM / um_per_px))
    for kind in [kind for kind in params.kinds if kind not in known]:
        if kind == "blur":
            glass = float(np.percentile(seen.thumbnail[..., 1], 99))
            found[kind] = measured(_BLUR_MPP, partial(_blurred_share, glass=glass))
        else:
            mask = _area(kind, seen, um_per_px, planes)
            found[kind] = tissue_fraction(mask, seen.xy_l0, seen.side_l0, seen.downsample)[rows]
    if segmenter is not None and (told := [kind for kind in params.kinds if kind in known]):
        each = measured(segmenter.mpp, segmenter.shares)
        found |= {kind: each[:, known.index(kind)] for kind in told}
    reason = np.full(len(rows), "", "<U6")
    for kind in reversed([kind for kind in KINDS if kind in found]):
        reason[found[kind] > getattr(params, f"max_{kind}")] = kind
    return reason


def _measured(
    seen: SlideSurvey,
    rows: NDArray[np.int64],
    mpp: float,
    measure: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Return a measure of each patch, read at `mpp` or as fine as the slide is.

    It is 0 for unreadable ones, which tiling reports.
    """
    mpp = max(mpp, seen.mpp)
    side_px = max(1, round(seen.side_l0 * seen.mpp / mpp))
    unread: dict[int, str] = {}
    spec = GridSpec(side_px, mpp, side_px)
    batches = read_patches(seen.record, seen.xy_l0[rows], spec, threads=1, reader=seen.reader, aside=unread)
    found = np.concatenate([measure(patches) for _, patches in batches])
    out = np.zeros((len(rows), *found.shape[1:]), np.float32)
    out[np.setdiff1d(np.arange(len(rows)), list(unread))] = found
    return out


def said_of(reasons: NDArray[np.str_]) -> str:
    """Return the number of patches by reason, in words.

    Example:
        >>> describe_reasons(np.array(["blur", "pen", "blur"]))
        '1 pen, 2 blur'
    """
    return ", ".join(f"{n} {kind}" for kind in KINDS if (n := int((reasons == kind).sum())))


def _area(
    kind: _Kind, seen: SlideSurvey, um_per_px: float, planes: Callable[[], Colours]
) -> NDArray[np.bool_]:
    """Return where the thumbnail [h, w] shows pen, black, a fold or a bubble.

    Folds exceed the usual density of tissue. Where tissue was not found by saturation, its stain may have the colour of
    ink.
    """
    least_px = max(4, _MIN_SPOT_UM2 / um_per_px**2)
    if kind == "fold":
        return without_small(_folds(seen.thumbnail, um_per_px, seen.found.mask), least_px)
    if kind == "bubble":
        return without_small(_bubbles(seen.thumbnail, um_per_px), least_px)
    if kind == "black":
        return without_small(planes().black, least_px)
    ordinary = seen.found.method == "saturation"
    ink = planes().ink if ordinary else ink_beside_any_stain(seen.thumbnail, planes(), um_per_px)
    return dilated(without_small(ink, least_px), 1.0)  # pixels at the edge mix ink and tissue


def _blurred_share(patches: NDArray[np.uint8], glass: float) -> NDArray[np.float32]:
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
    fine = _block_means(np.square(_laplacian(green)), block)
    coarse = _block_means(np.square(_laplacian(_block_means(green, 2))), block // 2)
    tissue = _block_means(green, block) < _TISSUE_OF_GLASS * glass
    soft = tissue & (fine < np.maximum(_MIN_SHARPNESS * coarse, _LEAST_FINE))
    return np.asarray(soft.sum((1, 2)) / np.maximum(tissue.sum((1, 2)), 1), np.float32)


def _laplacian(grey: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return each pixel of [b, h, w] less the mean of its four neighbours; edge pixels are repeated."""
    wide = np.pad(grey, ((0, 0), (1, 1), (1, 1)), mode="edge")
    out = wide[:, :-2, 1:-1] + wide[:, 2:, 1:-1]
    out += wide[:, 1:-1, :-2]
    out += wide[:, 1:-1, 2:]
    out *= -0.25
    out += grey
    return np.asarray(out, np.float32)


def _block_means(grey: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Return the means of [b, h, w] over squares of this side; remainders at the edge are left out.

    By halves, several times faster than a sum over axes.
    """
    rows, columns = (extent // side * side for extent in grey.shape[1:])
    out, n = grey[:, :rows, :columns], side
    while n % 2 == 0:
        out = out[:, 0::2] + out[:, 1::2]
        out = out[:, :, 0::2] + out[:, :, 1::2]
        n //= 2
    if n > 1:
        out = out.reshape(len(out), rows // side, n, columns // side, n).sum((2, 4))
    return np.asarray(out / side**2, np.float32)


def _folds(thumbnail: NDArray[np.uint8], um_per_px: float, tissue: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where tissue absorbs much more than the slide's median, as where it lies double."""
    from scipy.ndimage import gaussian_filter

    density = gaussian_filter(optical_density(thumbnail), _FOLD_SMOOTH_UM / um_per_px)
    usual = density[tissue]
    if not len(usual):
        return np.zeros(tissue.shape, bool)
    return np.asarray(tissue & (density > _FOLD_FACTOR * np.median(usual)), bool)


def _bubbles(thumbnail: NDArray[np.uint8], um_per_px: float) -> NDArray[np.bool_]:
    """Return the areas within closed circular grey rims: neither stain nor ink is grey."""
    from scipy.ndimage import binary_fill_holes
    from skimage.measure import label, regionprops

    seen = colours(thumbnail, _RIM_SMOOTH_UM / um_per_px)
    rim = (seen.chroma < _RIM_CHROMA) & (seen.high < _RIM_BRIGHTEST) & (seen.high > _RIM_DARKEST)
    reach = max(1.0, _RIM_CLOSE_UM / um_per_px)
    filled = np.asarray(binary_fill_holes(closed(rim, reach)), bool)
    found = np.zeros(rim.shape, bool)
    for one in regionprops(label(filled, connectivity=1)):
        height, width = one.bbox[2] - one.bbox[0], one.bbox[3] - one.bbox[1]
        circle = np.pi / 4 * max(height, width) ** 2
        hollow = rim[one.slice][one.image].mean() < 0.5
        if hollow and one.area > _ROUND * circle:
            found[one.slice] |= one.image
    return found
