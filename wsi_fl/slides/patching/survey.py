"""A slide seen in its thumbnail: the grid over it, and the tissue that is found here or that others outlined."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import ceil, nan
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngImageFile

from wsi_fl.slides.patching.annotations import outlines_of
from wsi_fl.slides.patching.grid import grid_positions, size_in_l0
from wsi_fl.slides.patching.tissue import Found, TissueParams, find_tissue, tissue_fraction
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.system.names import find_file
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError, one_line

_UPSAMPLING_TOLERANCE = 0.1
PICTURE_PX = 1024
_MOST_THUMBNAIL_PX = 2048
_MOST_MASK_PX = 1 << 26


@dataclass(frozen=True)
class SlideFacts:
    """A slide, and how patches of a grid and a thumbnail lie on it."""

    record: SlideRecord
    spec: GridSpec
    mpp: float
    """µm per level-0 pixel."""
    size_l0: tuple[int, int]
    quickhash: str
    in_tiles: bool
    """Whether patches are whole native tiles of the slide, but for those over its edge."""
    downsample: float
    """Level-0 pixels per thumbnail pixel."""
    notes: tuple[str, ...]
    """What of the slide is damaged though the rest makes up for it."""


@dataclass(frozen=True)
class SlideSurvey(SlideFacts):
    """The grid over a slide and the tissue in it."""

    reader: Reader
    """As what the slide was opened."""
    thumbnail: NDArray[np.uint8]
    """[h, w, 3]"""
    found: Found
    side_l0: float
    """Of a patch, in level-0 pixels."""
    xy_l0: NDArray[np.int64]
    """[n, 2] corners (x, y) of all patches of the grid, row by row."""
    tissue: NDArray[np.float32]
    """[n] share of each patch that is tissue."""


def survey(
    record: SlideRecord, spec: GridSpec, tissue: TissueParams, *, patch_px: int, section: str, reader: Reader
) -> SlideSurvey:
    """Look for tissue in a slide's thumbnail, in which a patch should have `patch_px` a side; its pixels are not read.

    Raises:
        WsiFlError: when the slide cannot be used: unreadable, without mpp, coarser by over 10 % than the `spec` in a
            `section` of the configuration, without tissue.
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
        notes = slide.notes
    try:
        if tissue.masks:
            file = _mask_file(Path(tissue.masks), record.slide)
            found = Found(_read_mask(file, thumbnail.shape[:2], downsample), "masks", nan)
        else:
            found = find_tissue(thumbnail, downsample * mpp, tissue)
    except WsiFlError as error:
        raise type(error)(f"{record.path.name}: {error}") from None
    xy_l0 = grid_positions(size_l0, spec, mpp)
    shares = tissue_fraction(found.mask, xy_l0, side_l0, downsample)
    facts = record, spec, mpp, size_l0, quickhash, in_tiles, downsample, notes
    return SlideSurvey(*facts, reader, thumbnail, found, side_l0, xy_l0, shares)


def mask_digest(folder: Path, slide: str) -> str:
    """Return the SHA-256 of the mask of a slide that others made."""
    return hashlib.sha256(_mask_file(folder, slide).read_bytes()).hexdigest()


def _mask_file(folder: Path, slide: str) -> Path:
    for suffix in (".geojson", ".json", ".png"):
        if (path := find_file(folder / f"{slide}{suffix}")).is_file():
            return path
    raise WsiFlError(
        f"{folder}: no mask of {slide} ({slide}.geojson or {slide}.png); tissue.method names the folder"
    )


def _read_mask(path: Path, shape: tuple[int, int], downsample: float) -> NDArray[np.bool_]:
    """Return a mask bool[h, w] over a slide's thumbnail of that shape, as QuPath, TRIDENT and people make them.

    Outlines of a GeoJSON file, of whatever class, are in level-0 pixels, of which a thumbnail's pixel has `downsample`.
    A PNG covers the whole slide at any scale. Opaque pixels are tissue; without an alpha channel, pixels brighter than
    half the maximum.

    Raises:
        WsiFlError: when the file is damaged, too large, or holds no tissue.
    """
    mask = _of_png(path, shape) if path.suffix == ".png" else _of_outlines(path, shape, downsample)
    if not mask.any():
        raise WsiFlError(f"{path}: holds no tissue on the slide")
    return mask


def _of_outlines(path: Path, shape: tuple[int, int], downsample: float) -> NDArray[np.bool_]:
    drawn = Image.new("1", (shape[1], shape[0]))
    draw = ImageDraw.Draw(drawn)
    polygons = shapely.get_parts(shapely.unary_union([polygon for _, polygon in outlines_of(path)]))
    polygons = polygons[shapely.get_type_id(polygons) == shapely.GeometryType.POLYGON]
    # The largest ring first: a hole is drawn before the island that lies in it.
    for one in sorted(polygons, key=lambda one: shapely.Polygon(one.exterior).area, reverse=True):
        for ring, fill in [(one.exterior, 1), *((hole, 0) for hole in one.interiors)]:
            draw.polygon([(x, y) for x, y in shapely.get_coordinates(ring) / downsample], fill=fill)
    return np.array(drawn, bool)


def _of_png(path: Path, shape: tuple[int, int]) -> NDArray[np.bool_]:
    try:
        with PngImageFile(path) as image:
            width, height = image.size
            if width * height > _MOST_MASK_PX:
                raise WsiFlError(
                    f"{path}: {width} × {height} pixels are more than a mask needs; make it smaller"
                )
            if abs(width / height * shape[0] / shape[1] - 1) > 0.05:
                raise WsiFlError(
                    f"{path}: {width} × {height} pixels are not of the slide's shape ({shape[1]} × {shape[0]} in its "
                    "thumbnail)"
                )
            alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
            opaque = alpha is None or np.asarray(alpha).min() == 255
            said = image.convert("L") if alpha is None or opaque else alpha
            grey = np.asarray(said.resize((shape[1], shape[0])), np.uint8)
            return np.asarray(grey > grey.max() / 2)
    except (OSError, ValueError, SyntaxError) as error:
        raise WsiFlError(f"{path}: not a readable PNG ({one_line(error)})") from None
