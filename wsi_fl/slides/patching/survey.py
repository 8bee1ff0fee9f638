"""A slide seen in its thumbnail: what every choice of patches begins with."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, nan
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.grid import grid_positions, size_in_l0
from wsi_fl.slides.patching.masks import mask_file, read_mask
from wsi_fl.slides.patching.tissue import Found, TissueParams, find_tissue, tissue_fraction
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError

_UPSAMPLING_TOLERANCE = 0.1
PICTURE_PX = 1024
_MOST_THUMBNAIL_PX = 2048


@dataclass(frozen=True)
class SlideSurvey:
    """The grid over a slide and the tissue in it.

    Attributes:
        mpp: µm per level-0 pixel.
        size_l0: width and height in level-0 pixels.
        quickhash: the slide's, as OpenSlide makes it.
        in_tiles: whether patches are whole native tiles of the slide, but for those over its edge.
        thumbnail: uint8[h, w, 3].
        downsample: level-0 pixels per thumbnail pixel.
        found: the tissue in the thumbnail, bool[h, w], and how it was told from background.
        side_l0: side of a patch in level-0 pixels.
        xy_l0: int64[n, 2], the corners (x, y) of all patches of the grid, row by row.
        tissue: float32[n], the share of each patch that is tissue.
    """

    mpp: float
    size_l0: tuple[int, int]
    quickhash: str
    in_tiles: bool
    thumbnail: NDArray[np.uint8]
    downsample: float
    found: Found
    side_l0: float
    xy_l0: NDArray[np.int64]
    tissue: NDArray[np.float32]


def survey(
    record: SlideRecord, spec: GridSpec, tissue: TissueParams, *, patch_px: int, section: str, reader: Reader
) -> SlideSurvey:
    """Look for tissue in a slide's thumbnail; its pixels are not read.

    Args:
        record: the slide.
        spec: of the patches.
        tissue: how tissue is told from background.
        patch_px: side that a patch should have in the thumbnail.
        section: of the configuration that asks for the patches, for errors.
        reader: see `Slide`.

    Raises:
        WsiFlError: when the slide cannot be used: unreadable, without mpp, coarser than `spec` by over 10 %, without
            tissue.
    """
    with Slide(record.path, record.mpp_override, reader) as slide:
        mpp, size_l0, quickhash = slide.mpp, slide.size_l0, slide.quickhash
        if spec.mpp < mpp * (1 - _UPSAMPLING_TOLERANCE):  # nobody invents detail that the slide does not have
            raise WsiFlError(
                f"{record.path.name}: patches at {spec.mpp:g} µm per pixel were asked for but the slide has {mpp:g}; "
                f"set {section}.mpp = {mpp:g} or more, or mpp_override in the site's file if the slide is wrong"
            )
        side_l0, in_tiles = size_in_l0(spec, mpp), slide.has_tiles_of(spec)
        wanted_px = ceil(max(size_l0) / side_l0 * patch_px)
        thumbnail, downsample = slide.thumbnail(min(max(wanted_px, PICTURE_PX), _MOST_THUMBNAIL_PX))
    try:
        found = _tissue_of(record, thumbnail, downsample, mpp, tissue)
    except WsiFlError as error:
        raise type(error)(f"{record.path.name}: {error}") from None
    xy_l0 = grid_positions(size_l0, spec, mpp)
    shares = tissue_fraction(found.mask, xy_l0, side_l0, downsample)
    return SlideSurvey(
        mpp, size_l0, quickhash, in_tiles, thumbnail, downsample, found, side_l0, xy_l0, shares
    )


def _tissue_of(
    record: SlideRecord, thumbnail: NDArray[np.uint8], downsample: float, mpp: float, params: TissueParams
) -> Found:
    """Find the tissue, or read what others found."""
    if not params.masks:
        return find_tissue(thumbnail, downsample * mpp, params)
    file = mask_file(Path(params.masks), record.slide)
    return Found(read_mask(file, thumbnail.shape[:2], downsample), "masks", nan)
