"""Artifacts of patches: pen, black, blur. Classical measures, none learned.

Pen and black are areas of the thumbnail; blur is measured on the patch at 2 µm per pixel. The defaults were chosen on
real tissue with ink and blur (docs/how-to/prepare-data.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.mask_regions import dilate_mask, drop_small_objects
from wsi_fl.slides.patching.slide_survey import SlideSurvey
from wsi_fl.slides.patching.tissue import ColorPlanes, find_ink, split_colors, tissue_fraction
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.types import GridSpec

ArtifactKind = Literal["pen", "black", "blur"]
KINDS: tuple[ArtifactKind, ...] = get_args(ArtifactKind)
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


def find_artifacts(
    survey: SlideSurvey, rows: NDArray[np.int64], max_shares: Mapping[ArtifactKind, float]
) -> NDArray[np.str_]:
    """Return the artifact for which each of these rows of the grid is excluded, "" for good ones.

    Args:
        max_shares: the artifacts to find, each with the largest share of a patch that it may cover.
    """
    shares: dict[ArtifactKind, NDArray[np.float32]] = {}
    um_per_px = survey.downsample * survey.mpp
    planes = cache(lambda: split_colors(survey.thumbnail, _SMOOTH_UM / um_per_px))
    for kind in max_shares:
        if kind == "blur":
            shares[kind] = _measure_blur(survey, rows)
        else:
            is_pen = kind == "pen"
            mask = _find_pen(survey, planes(), um_per_px) if is_pen else _drop_spots(planes().black, um_per_px)
            shares[kind] = tissue_fraction(mask, survey.xy_l0, survey.side_l0, survey.downsample)[rows]
    reason = np.full(len(rows), "", "<U6")
    for kind in reversed([kind for kind in KINDS if kind in shares]):
        reason[shares[kind] > max_shares[kind]] = kind
    return reason


def _measure_blur(survey: SlideSurvey, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the share of blur in each patch, read at 2 µm per pixel or as fine as the slide is.

    It is 0 for unreadable ones, which tiling reports.
    """
    glass = float(np.percentile(survey.thumbnail[..., 1], 99))
    mpp = max(_BLUR_MPP, survey.mpp)
    side_px = max(1, round(survey.side_l0 * survey.mpp / mpp))
    unreadable: dict[int, str] = {}
    spec = GridSpec(side_px, mpp, side_px)
    batches = read_patches(
        survey.record, survey.xy_l0[rows], spec, threads=1, reader=survey.reader, excluded=unreadable
    )
    values = np.concatenate([_blur_share(patches, glass) for _, patches in batches])
    out = np.zeros(len(rows), np.float32)
    out[np.setdiff1d(np.arange(len(rows)), list(unreadable))] = values
    return out


def describe_reasons(reasons: NDArray[np.str_]) -> str:
    """Return the number of patches by reason, in words.

    Example:
        >>> describe_reasons(np.array(["blur", "pen", "blur"]))
        '1 pen, 2 blur'
    """
    return ", ".join(f"{n} {kind}" for kind in KINDS if (n := int((reasons == kind).sum())))


def _find_pen(survey: SlideSurvey, planes: ColorPlanes, um_per_px: float) -> NDArray[np.bool_]:
    """Return where the thumbnail [h, w] shows ink.

    Where tissue was not found by saturation, its stain may have the colour of ink.
    """
    is_ordinary = survey.segmentation.method == "saturation"
    ink = planes.ink if is_ordinary else find_ink(survey.thumbnail, planes, um_per_px)
    return dilate_mask(_drop_spots(ink, um_per_px), 1.0)  # pixels at the edge mix ink and tissue


def _drop_spots(mask: NDArray[np.bool_], um_per_px: float) -> NDArray[np.bool_]:
    return drop_small_objects(mask, max(4, _MIN_SPOT_UM2 / um_per_px**2))


def _blur_share(patches: NDArray[np.uint8], glass: float) -> NDArray[np.float32]:
    """Return the share float32[b] of out-of-focus tissue in patches uint8[b, h, w, 3] at 2 µm per pixel, on this glass.

    The measure of a part of a patch is the energy of a Laplacian on its pixels over that of a Laplacian on means of
    2 × 2 pixels. It does not depend on the strength of the stain: sharp tissue has 0.5 to 2, tissue blurred by a
    Gaussian of 2 µm 0.13 to 0.28.
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
