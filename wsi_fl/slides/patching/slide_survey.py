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
from PIL.TiffImagePlugin import TiffImageFile

from wsi_fl.slides.patching.grid import grid_positions, patch_side_l0
from wsi_fl.slides.patching.outline_files import Corner, read_outlines
from wsi_fl.slides.patching.outline_placement import (
    Origin,
    SlideGeometry,
    choose_corner,
    place_outlines,
    rasterize_area,
    transform_area,
)
from wsi_fl.slides.patching.tissue import NoTissueError, TissueParams, TissueSegmentation, find_tissue, tissue_fraction
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.system.file_names import find_file
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError, single_line

_UPSAMPLING_TOLERANCE = 0.1
PICTURE_PX = 1024
_MAX_THUMBNAIL_PX = 2048
_MAX_MASK_PX = 1 << 26
_SHAPE_TOLERANCE = 0.05
_ORIENTATION_TAG = 274
_TURNED_VENDOR = "plain picture"
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
    segmentation: TissueSegmentation
    side_l0: float
    """Side of a patch in level-0 pixels."""
    xy_l0: NDArray[np.int64]
    """[n, 2] corners (x, y) of all patches of the grid, row by row."""
    tissue: NDArray[np.float32]
    """[n] share of tissue of each patch."""
    slide_geometry: SlideGeometry


def survey_slide(
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
        side_l0, in_tiles = patch_side_l0(spec, mpp), slide.has_whole_tiles(spec)
        thumbnail_px = ceil(max(size_l0) / side_l0 * patch_px)
        thumbnail, downsample = slide.thumbnail(min(max(thumbnail_px, PICTURE_PX), _MAX_THUMBNAIL_PX))
        notes = [*slide.notes, *([] if slide.vendor == _TURNED_VENDOR else _note_turn(record.path))]
    slide_geometry = SlideGeometry(size_l0, bounds_l0, mpp, downsample, thumbnail.shape[:2], levels)
    try:
        if tissue.masks:
            if slide_geometry.is_cropped:
                slide_geometry = replace(slide_geometry, tissue=_find_tissue_or_none(thumbnail, slide_geometry))
            mask, remarks = _read_mask(_find_mask_file(Path(tissue.masks), record.slide), slide_geometry, tissue.origin)
            notes += remarks
            segmentation = TissueSegmentation(mask, "masks", nan)
        else:
            segmentation = find_tissue(thumbnail, downsample * mpp, tissue)
    except WsiFlError as error:
        raise type(error)(f"{record.path.name}: {error}") from None
    xy_l0 = grid_positions(size_l0, spec, mpp)
    return SlideSurvey(
        record=record,
        spec=spec,
        mpp=mpp,
        size_l0=size_l0,
        bounds_l0=bounds_l0,
        quickhash=quickhash,
        in_tiles=in_tiles,
        downsample=downsample,
        notes=tuple(notes),
        reader=reader,
        thumbnail=thumbnail,
        segmentation=segmentation,
        side_l0=side_l0,
        xy_l0=xy_l0,
        tissue=tissue_fraction(segmentation.mask, xy_l0, side_l0, downsample),
        slide_geometry=replace(slide_geometry, tissue=segmentation.mask),
    )


def build_slide_geometry(slide: Slide, tissue: TissueParams) -> SlideGeometry:
    """Return the geometry of a slide for outlines, with its tissue if the scanned area has another corner."""
    downsample = max(1.0, max(slide.size_l0) / PICTURE_PX)
    width, height = (ceil(extent / downsample) for extent in slide.size_l0)
    facts = slide.size_l0, slide.bounds_l0, slide.mpp
    slide_geometry = SlideGeometry(*facts, downsample, (height, width), slide.level_downsamples)
    if not slide_geometry.is_cropped:
        return slide_geometry
    thumbnail, downsample = slide.thumbnail(PICTURE_PX)
    slide_geometry = replace(slide_geometry, downsample=downsample, shape=thumbnail.shape[:2])
    return replace(slide_geometry, tissue=_find_tissue_or_none(thumbnail, slide_geometry, tissue))


def _note_turn(path: Path) -> list[str]:
    """Return a note on the orientation of a TIFF's first picture (TIFF 6.0, tag 274), which OpenSlide ignores."""
    try:
        with TiffImageFile(path) as picture:
            orientation = picture.tag_v2.get(_ORIENTATION_TAG, 1)
    except (OSError, SyntaxError, TypeError, ValueError):  # Pillow's, for other files
        return []
    if orientation not in range(2, 9):
        return []
    return [f"has TIFF orientation {orientation}, which is ignored; it is read unrotated, as OpenSlide shows it"]


def _find_tissue_or_none(
    thumbnail: NDArray[np.uint8], slide_geometry: SlideGeometry, params: TissueParams | None = None
) -> NDArray[np.bool_] | None:
    try:
        return find_tissue(thumbnail, slide_geometry.downsample * slide_geometry.mpp, params).mask
    except NoTissueError:
        return None


def digest_mask(folder: Path, slide: str) -> str:
    """Return the SHA-256 of the mask file of a slide."""
    return hashlib.sha256(_find_mask_file(folder, slide).read_bytes()).hexdigest()


def _find_mask_file(folder: Path, slide: str) -> Path:
    for suffix in (".geojson", ".json", ".png"):
        if (path := find_file(folder / f"{slide}{suffix}")).is_file():
            return path
    raise WsiFlError(f"{folder}: no mask of {slide} ({slide}.geojson or {slide}.png); tissue.method names the folder")


def _read_mask(path: Path, slide_geometry: SlideGeometry, origin: Origin = None) -> tuple[NDArray[np.bool_], list[str]]:
    """Return a mask bool[h, w] over a slide's thumbnail, from QuPath, TRIDENT or by hand, and notes on it.

    Outlines of a GeoJSON file, of any class, are in level-0 pixels; a PNG covers the whole slide or its scanned
    area at any scale. Opaque pixels are tissue; without an alpha channel, pixels brighter than half the maximum.
    """
    if path.suffix == ".png":
        mask, notes = _read_png_mask(path, slide_geometry, origin)
    else:
        outlines = read_outlines(path)
        corner, notes = place_outlines(outlines, slide_geometry, origin)
        tissue = transform_area(shapely.unary_union([area for _, area in outlines.areas]), corner)
        mask = rasterize_area(tissue, slide_geometry.shape, slide_geometry.downsample)
        notes = [note for note in (outlines.remark, *notes) if note]
    if not mask.any():
        raise WsiFlError("; ".join([f"{path}: holds no tissue on the slide", *notes]))
    return mask, [f"{path.name}: {note}" for note in notes]


def _read_png_mask(path: Path, slide_geometry: SlideGeometry, origin: Origin) -> tuple[NDArray[np.bool_], list[str]]:
    gray = _open_mask_picture(path)
    windows: dict[Corner, tuple[slice, slice]] = {
        "slide": (slice(0, slide_geometry.shape[0]), slice(0, slide_geometry.shape[1]))
    }
    if slide_geometry.is_cropped:
        x_min, y_min, x_max, y_max = (round(v / slide_geometry.downsample) for v in slide_geometry.bounds_l0)
        x_min, y_min = min(x_min, slide_geometry.shape[1] - 1), min(y_min, slide_geometry.shape[0] - 1)
        windows["bounds"] = slice(y_min, max(y_max, y_min + 1)), slice(x_min, max(x_max, x_min + 1))
    blank = np.zeros(slide_geometry.shape, bool)
    masks: dict[Corner, NDArray[np.bool_]] = {}
    for corner, window in windows.items():
        height, width = blank[window].shape
        if abs(gray.width / gray.height * height / width - 1) <= _SHAPE_TOLERANCE:
            masks[corner] = blank.copy()
            values = np.asarray(gray.resize((width, height)), np.uint8)
            masks[corner][window] = values > values.max() / 2
    if not masks or (origin is not None and slide_geometry.is_cropped and origin not in masks):
        raise WsiFlError(
            f"{path}: {gray.width} × {gray.height} pixels are not of the slide's shape ({slide_geometry.shape[1]} × "
            f"{slide_geometry.shape[0]} in its thumbnail)"
        )
    if len(masks) == 1:
        return next(iter(masks.values())), []
    tissue = blank if slide_geometry.tissue is None else slide_geometry.tissue
    shares = {corner: float((mask & tissue).sum() / max(mask.sum(), 1)) for corner, mask in masks.items()}
    corner, notes = choose_corner(shares, "slide", origin, "its tissue")
    return masks[corner], notes


def _open_mask_picture(path: Path) -> Image.Image:
    """Return a PNG's alpha channel, or its brightness if it has none."""
    try:
        with PngImageFile(path) as image:
            if image.width * image.height > _MAX_MASK_PX:
                raise WsiFlError(
                    f"{path}: {image.width} × {image.height} pixels are more than a mask needs; make it smaller"
                )
            alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
            is_opaque = alpha is None or np.asarray(alpha).min() == 255
            return image.convert("L") if alpha is None or is_opaque else alpha
    except (OSError, ValueError, SyntaxError) as error:
        raise WsiFlError(f"{path}: not a readable PNG ({single_line(error)})") from None
