"""Survey of a slide by its thumbnail: the grid over it, and its tissue, segmented here or read from a mask."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from math import ceil, nan
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from wsi_fl.slides.patching.grid import grid_positions, size_in_l0
from wsi_fl.slides.patching.outline_files import Corner, outlines_of
from wsi_fl.slides.patching.placing import Ground, Origin, better_corner, mask_of, place, transform
from wsi_fl.slides.patching.tissue import Found, NoTissueError, TissueParams, find_tissue, tissue_fraction
from wsi_fl.slides.reading.orientation import orientation_of
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.system.names import find_file
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError, one_line

_UPSAMPLING_TOLERANCE = 0.1
PICTURE_PX = 1024
_MOST_THUMBNAIL_PX = 2048
_MOST_MASK_PX = 1 << 26
_SHAPE_TOLERANCE = 0.05
_TURNED = "plain picture"
"""Vendor of the only slides that are turned by their orientation tag."""


@dataclass(frozen=True)
class SlideFacts:
    """Facts of a slide, and the positions of a grid and a thumbnail on it."""

    record: SlideRecord
    spec: GridSpec
    mpp: float
    """µm per level-0 pixel."""
    size_l0: tuple[int, int]
    bounds_l0: tuple[int, int, int, int]
    """(left, top, right, bottom) of the scanned area."""
    quickhash: str
    in_tiles: bool
    """Whether patches are whole native tiles of the slide, except those over its edge."""
    downsample: float
    """Level-0 pixels per thumbnail pixel."""
    notes: tuple[str, ...]
    """Notes on the slide, its mask and its outlines, a line each."""


@dataclass(frozen=True)
class SlideSurvey(SlideFacts):
    """The grid over a slide and the tissue in it."""

    reader: Reader
    """The reader of the slide."""
    thumbnail: NDArray[np.uint8]
    """[h, w, 3]"""
    found: Found
    side_l0: float
    """Side of a patch in level-0 pixels."""
    xy_l0: NDArray[np.int64]
    """[n, 2] corners (x, y) of all patches of the grid, row by row."""
    tissue: NDArray[np.float32]
    """[n] share of tissue of each patch."""
    ground: Ground


def survey(
    record: SlideRecord, spec: GridSpec, tissue: TissueParams, *, patch_px: int, section: str, reader: Reader
) -> SlideSurvey:
    """Find the tissue of a slide in its thumbnail, with patches of about `patch_px` a side.

    Raises:
        WsiFlError: for an unusable slide: unreadable, without mpp, coarser by over 10 % than the `spec` in a `section`
            of the configuration, without tissue.
    """
    with Slide(record.path, record.mpp_override, reader) as slide:
        mpp, size_l0, bounds_l0 = slide.mpp, slide.size_l0, slide.bounds_l0
        quickhash, levels = slide.quickhash, slide.level_downsamples
        if spec.mpp < mpp * (1 - _UPSAMPLING_TOLERANCE):  # no detail is made up
            raise WsiFlError(
                f"{record.path.name}: patches at {spec.mpp:g} µm per pixel were asked for but the slide has {mpp:g}; "
                f"set {section}.mpp = {mpp:g} or more, or mpp_override in the site's file if the slide is wrong"
            )
        side_l0, in_tiles = size_in_l0(spec, mpp), slide.has_tiles_of(spec)
        wanted_px = ceil(max(size_l0) / side_l0 * patch_px)
        thumbnail, downsample = slide.thumbnail(min(max(wanted_px, PICTURE_PX), _MOST_THUMBNAIL_PX))
        notes = [*slide.notes, *([] if slide.vendor == _TURNED else _turn_of(record.path))]
    ground = Ground(size_l0, bounds_l0, mpp, downsample, thumbnail.shape[:2], levels)
    try:
        if tissue.masks:
            if ground.is_cropped:
                ground = replace(ground, tissue=_tissue_or_none(thumbnail, ground))
            mask, remarks = _read_mask(_mask_file(Path(tissue.masks), record.slide), ground, tissue.origin)
            notes += remarks
            found = Found(mask, "masks", nan)
        else:
            found = find_tissue(thumbnail, downsample * mpp, tissue)
    except WsiFlError as error:
        raise type(error)(f"{record.path.name}: {error}") from None
    xy_l0 = grid_positions(size_l0, spec, mpp)
    shares = tissue_fraction(found.mask, xy_l0, side_l0, downsample)
    facts = record, spec, mpp, size_l0, bounds_l0, quickhash, in_tiles, downsample, tuple(notes)
    ground = replace(ground, tissue=found.mask)
    return SlideSurvey(*facts, reader, thumbnail, found, side_l0, xy_l0, shares, ground)


def ground_of(slide: Slide, tissue: TissueParams) -> Ground:
    """Return the geometry of a slide for outlines, with its tissue if the scanned area has another corner."""
    downsample = max(1.0, max(slide.size_l0) / PICTURE_PX)
    width, height = (ceil(extent / downsample) for extent in slide.size_l0)
    facts = slide.size_l0, slide.bounds_l0, slide.mpp
    ground = Ground(*facts, downsample, (height, width), slide.level_downsamples)
    if not ground.is_cropped:
        return ground
    thumbnail, downsample = slide.thumbnail(PICTURE_PX)
    ground = replace(ground, downsample=downsample, shape=thumbnail.shape[:2])
    return replace(ground, tissue=_tissue_or_none(thumbnail, ground, tissue))


def _turn_of(path: Path) -> list[str]:
    orientation = orientation_of(path)
    if orientation == 1:
        return []
    return [
        f"has TIFF orientation {orientation}, which is ignored; it is read unrotated, as OpenSlide shows it"
    ]


def _tissue_or_none(
    thumbnail: NDArray[np.uint8], ground: Ground, params: TissueParams | None = None
) -> NDArray[np.bool_] | None:
    try:
        return find_tissue(thumbnail, ground.downsample * ground.mpp, params).mask
    except NoTissueError:
        return None


def mask_digest(folder: Path, slide: str) -> str:
    """Return the SHA-256 of the mask file of a slide."""
    return hashlib.sha256(_mask_file(folder, slide).read_bytes()).hexdigest()


def _mask_file(folder: Path, slide: str) -> Path:
    for suffix in (".geojson", ".json", ".png"):
        if (path := find_file(folder / f"{slide}{suffix}")).is_file():
            return path
    raise WsiFlError(
        f"{folder}: no mask of {slide} ({slide}.geojson or {slide}.png); tissue.method names the folder"
    )


def _read_mask(path: Path, ground: Ground, origin: Origin = None) -> tuple[NDArray[np.bool_], list[str]]:
    """Return a mask bool[h, w] over a slide's thumbnail, from QuPath, TRIDENT or by hand, and notes on it.

    Outlines of a GeoJSON file, of any class, are in level-0 pixels; a PNG covers the whole slide or its scanned
    area at any scale. Opaque pixels are tissue; without an alpha channel, pixels brighter than half the maximum.

    Raises:
        WsiFlError: when the file is damaged, too large, in another unit, or without tissue.
    """
    if path.suffix == ".png":
        mask, notes = _of_png(path, ground, origin)
    else:
        outlines = outlines_of(path)
        corner, notes = place(outlines, ground, origin)
        tissue = transform(shapely.unary_union([area for _, area in outlines.areas]), corner)
        mask = mask_of(tissue, ground.shape, ground.downsample)
        notes = [note for note in (outlines.remark, *notes) if note]
    if not mask.any():
        raise WsiFlError("; ".join([f"{path}: holds no tissue on the slide", *notes]))
    return mask, [f"{path.name}: {note}" for note in notes]


def _of_png(path: Path, ground: Ground, origin: Origin) -> tuple[NDArray[np.bool_], list[str]]:
    grey = _picture_of(path)
    windows: dict[Corner, tuple[slice, slice]] = {
        "slide": (slice(0, ground.shape[0]), slice(0, ground.shape[1]))
    }
    if ground.is_cropped:
        left, top, right, bottom = (round(v / ground.downsample) for v in ground.bounds_l0)
        left, top = min(left, ground.shape[1] - 1), min(top, ground.shape[0] - 1)
        windows["bounds"] = slice(top, max(bottom, top + 1)), slice(left, max(right, left + 1))
    whole = np.zeros(ground.shape, bool)
    masks: dict[Corner, NDArray[np.bool_]] = {}
    for corner, window in windows.items():
        height, width = whole[window].shape
        if abs(grey.width / grey.height * height / width - 1) <= _SHAPE_TOLERANCE:
            masks[corner] = whole.copy()
            values = np.asarray(grey.resize((width, height)), np.uint8)
            masks[corner][window] = values > values.max() / 2
    if not masks or (origin is not None and ground.is_cropped and origin not in masks):
        raise WsiFlError(
            f"{path}: {grey.width} × {grey.height} pixels are not of the slide's shape ({ground.shape[1]} × "
            f"{ground.shape[0]} in its thumbnail)"
        )
    if len(masks) == 1:
        return next(iter(masks.values())), []
    tissue = whole if ground.tissue is None else ground.tissue
    shares = {corner: float((mask & tissue).sum() / max(mask.sum(), 1)) for corner, mask in masks.items()}
    corner, notes = better_corner(shares, "slide", origin, "its tissue")
    return masks[corner], notes


def _picture_of(path: Path) -> Image.Image:
    """Return a PNG's alpha channel, or its brightness if it has none."""
    try:
        with PngImageFile(path) as image:
            if image.width * image.height > _MOST_MASK_PX:
                raise WsiFlError(
                    f"{path}: {image.width} × {image.height} pixels are more than a mask needs; make it smaller"
                )
            alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
            opaque = alpha is None or np.asarray(alpha).min() == 255
            return image.convert("L") if alpha is None or opaque else alpha
    except (OSError, ValueError, SyntaxError) as error:
        raise WsiFlError(f"{path}: not a readable PNG ({one_line(error)})") from None
