"""Placement of a file's outlines on a slide: the corner from which they count, their unit, and their fit to the tissue.

A slide may be empty around the scanned area (MRXS, SCN, Argos, TIFF with unwritten tiles). OpenSlide and ASAP count
from the corner of the whole slide. QuPath shows only the scanned area and counts from its corner, but not with
`--no-crop` or by Bio-Formats, nor, for plain TIFF, with an OpenSlide before 4.0.1; files do not state it. So the usual
corner of a format is assumed, and compared with the tissue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wsi_fl.slides.patching.outline_files import Corner, Outlines, list_polygons
from wsi_fl.types import WsiFlError

Origin: TypeAlias = Corner | None
"""The corner from which outlines count; None for that of their format, unless it contradicts the tissue."""
_Mask = NDArray[np.bool_]
_Points = NDArray[np.float64]
_Geometry: TypeAlias = Any

_CORNERS: dict[Corner, str] = {"bounds": "scanned area", "slide": "whole slide"}
_OTHER_CORNER: dict[Corner, Corner] = {"bounds": "slide", "slide": "bounds"}
_GOOD_FIT = 0.5
"""Share of correctly placed outlines on tissue; fat, lumen and broad strokes are beside it."""
_NOTABLE_DIFFERENCE = 0.2
"""Difference of such shares from which a note is made."""
_SURE_FIT, _SURE_RATIO = 0.75, 3
"""Another unit is named where it puts such a share on tissue, and so many times as much."""
_MAX_FOREIGN_FIT, _MIN_FIT = 0.1, 0.25
"""Shares on tissue below which another unit is assumed, and below which a file seems to be of another slide."""
_CORNER_SHARE = 0.005
"""Share of the slide's sides: outlines that near its corner are in a larger unit than pixels."""
_OUTSIDE_SHARE = 0.05
_MAGNIFICATIONS = {"of half the magnification": 2.0, "of a quarter of it": 4.0, "of twice the magnification": 0.5}
_SCALE_TOLERANCE = 0.1


@dataclass(frozen=True)
class SlideGeometry:
    """The geometry of a slide and its thumbnail, for the placement of outlines.

    Attributes:
        size_l0: (width, height) in level-0 pixels.
        bounds_l0: (left, top, right, bottom) of the scanned area in level-0 pixels.
        mpp: µm per level-0 pixel.
        downsample: level-0 pixels per pixel of the thumbnail.
        shape: (height, width) of the thumbnail.
        levels: level-0 pixels per pixel of each level.
        tissue: bool[height, width] over the thumbnail; None if unknown.
    """

    size_l0: tuple[int, int]
    bounds_l0: tuple[int, int, int, int]
    mpp: float
    downsample: float
    shape: tuple[int, int]
    levels: tuple[float, ...] = (1.0,)
    tissue: _Mask | None = None

    @property
    def is_cropped(self) -> bool:
        """Whether the corners of the scanned area and of the slide differ."""
        return self.bounds_l0[:2] != (0, 0)

    def find_corner(self, name: Corner) -> tuple[int, int]:
        """Return the level-0 pixel from which a file counts."""
        return self.bounds_l0[:2] if name == "bounds" else (0, 0)

    def tissue_share(self, area: _Geometry) -> float:
        """Return the share of an area, in level-0 pixels, on tissue, or in the scanned area if tissue is unknown."""
        visible = shapely.intersection(area, shapely.box(0, 0, *self.size_l0))
        mask = _cover_area(visible, self.shape, self.downsample)
        if (tissue := self.tissue) is None:
            tissue = _cover_area(shapely.box(*self.bounds_l0), self.shape, self.downsample)
        return float((mask & tissue).sum() / max(area.area / self.downsample**2, mask.sum(), 1))


def _cover_area(area: _Geometry, shape: tuple[int, int], downsample: float) -> _Mask:
    """Return the pixels bool[height, width] that an area touches, so that small outlines have some."""
    canvas = Image.new("1", (shape[1], shape[0]))
    draw = ImageDraw.Draw(canvas)
    # The largest ring first: a hole is drawn before an island in it.
    by_size = sorted(list_polygons(area), key=lambda part: -shapely.Polygon(part.exterior).area)
    for polygon in by_size:
        for ring, fill in [(polygon.exterior, 1), *((hole, 0) for hole in polygon.interiors)]:
            draw.polygon([(x, y) for x, y in shapely.get_coordinates(ring) / downsample], fill=fill)
    return np.array(canvas, bool)


def rasterize_area(area: _Geometry, shape: tuple[int, int], downsample: float) -> _Mask:
    """Return a mask bool[height, width] of an area in level-0 pixels, with `downsample` of them per pixel.

    A pixel is in the area if its centre is: an odd number of edges cross its row of centres on its left.
    """
    height, width = shape
    crossings = np.zeros((height, width + 1), np.int32)
    for ring in shapely.get_rings(list_polygons(area)):
        x, y = (shapely.get_coordinates(ring) / downsample - 0.5).T
        lower, upper = np.ceil(np.clip(np.sort([y[:-1], y[1:]], axis=0), 0, height)).astype(np.int64)
        edge = np.repeat(np.arange(len(lower)), upper - lower)
        row = np.arange(len(edge)) + np.repeat(upper - np.cumsum(upper - lower), upper - lower)
        column = x[edge] + (row - y[edge]) * (np.diff(x) / np.where(upper > lower, np.diff(y), 1))[edge]
        np.add.at(crossings, (row, np.ceil(np.clip(column, 0, width)).astype(np.int64)), 1)
    return np.asarray(np.cumsum(crossings[:, :width], axis=1) % 2 == 1, bool)


def transform_area(area: _Geometry, offset: Sequence[float] | _Points, matrix: _Points | None = None) -> _Geometry:
    """Return an area, or an array of areas, with each point x moved to x @ matrix + offset."""
    linear_map = np.eye(2) if matrix is None else matrix
    return shapely.transform(area, lambda xy: xy @ linear_map + offset)


def place_outlines(
    outlines: Outlines, slide_geometry: SlideGeometry, origin: Origin = None, target: _Geometry = None
) -> tuple[tuple[int, int], list[str]]:
    """Return the level-0 pixel from which a file counts, and notes on the placement of its outlines.

    Args:
        target: the area, in the file's coordinates, that should lie on tissue; by default all outlines.

    Raises:
        WsiFlError: when the file is in another unit than level-0 pixels.
    """
    if not outlines.areas:
        return (0, 0), []
    polygons = np.array([polygon for _, polygon in outlines.areas])
    if target is None or target.is_empty:
        target = shapely.union_all(polygons)
    _require_pixels(outlines, polygons, target, slide_geometry)
    corner, notes = _find_corner(outlines, target, slide_geometry, origin)
    return corner, notes + _describe_misfit(outlines, target, slide_geometry, corner, is_settled=origin is not None)


def choose_corner(
    shares: dict[Corner, float], default: Corner, origin: Origin, subject: str
) -> tuple[Corner, list[str]]:
    """Return the corner from which a file counts, and a line of doubt about it, if any.

    Args:
        shares: share on tissue by corner.
        default: the corner of its format.
        subject: subject of the line, such as "its tissue".
    """
    corner: Corner = origin or default
    other_corner = _OTHER_CORNER[corner]
    comparison = f"{shares[other_corner]:.0%} of {subject} would lie on tissue, and {shares[corner]:.0%} otherwise"
    if shares[other_corner] >= _GOOD_FIT and shares[corner] <= shares[other_corner] / 2:
        if origin is None:
            line = f"is taken to count from the corner of the {_CORNERS[other_corner]}, where {comparison}"
            return other_corner, [f"{line}; annotations_origin in the site's file settles it"]
    elif shares[other_corner] - shares[corner] < _NOTABLE_DIFFERENCE:
        return corner, []
    hint = f'with annotations_origin = "{other_corner}" {comparison}'
    return corner, [f"counts from the corner of the {_CORNERS[corner]}, though {hint}"]


def _find_corner(
    outlines: Outlines, target: _Geometry, slide_geometry: SlideGeometry, origin: Origin
) -> tuple[tuple[int, int], list[str]]:
    if not slide_geometry.is_cropped:
        return (0, 0), []
    shares = {
        name: slide_geometry.tissue_share(transform_area(target, slide_geometry.find_corner(name)))
        for name in _OTHER_CORNER
    }
    name, notes = choose_corner(shares, outlines.corner, origin, "what it outlines")
    is_open = origin is None and shares["slide"] > shares["bounds"] - _NOTABLE_DIFFERENCE
    if name == "bounds" and is_open and not notes:
        notes = [
            "is taken to count from the corner of the scanned area, as QuPath does unless it shows the whole slide; it "
            "would lie on tissue from either corner, and annotations_origin in the site's file settles it"
        ]
    return slide_geometry.find_corner(name), notes


def _describe_misfit(
    outlines: Outlines, target: _Geometry, slide_geometry: SlideGeometry, corner: tuple[int, int], *, is_settled: bool
) -> list[str]:
    """Return doubts about the placement of a file's outlines; raise if its unit is wrong and its origin not settled."""
    area = transform_area(target, corner)
    inside_share = shapely.intersection(area, shapely.box(0, 0, *slide_geometry.size_l0)).area / area.area
    notes = []
    if inside_share < 1 - _OUTSIDE_SHARE:
        notes.append(f"{1 - inside_share:.0%} of what it outlines lies outside the slide")
    if slide_geometry.tissue is None or (share := slide_geometry.tissue_share(area)) >= _GOOD_FIT:
        return notes
    fact = f"only {share:.0%} of what it outlines lies on tissue"
    readings = {
        name: slide_geometry.tissue_share(transform_area(target, offset + corner, matrix))
        for name, matrix, offset in _list_readings(slide_geometry)
    }
    names = [name for name, fit in readings.items() if fit >= max(_SURE_FIT, _SURE_RATIO * share)]
    if names:
        fit = max(readings[name] for name in names)
        line = f"{fact}, but {fit:.0%} would if it were {' or '.join(names)}; export it in level-0 pixels"
        if share < _MAX_FOREIGN_FIT and not is_settled:
            way_out = "or set annotations_origin in the site's file where it is right as it is"
            raise WsiFlError(f"{outlines.path}: {line}, {way_out}")
        notes.append(line)
    elif share < _MIN_FIT <= inside_share:
        notes.append(f"{fact}; is it of another slide?")
    return notes


def _list_readings(slide_geometry: SlideGeometry) -> Iterator[tuple[str, _Points, _Points]]:
    """Yield other conventions of coordinates: (description, matrix [2, 2], offset [2]) for their conversion."""
    zero, height = np.zeros(2), slide_geometry.bounds_l0[3] - slide_geometry.bounds_l0[1]
    levels = {f"in pixels of level {k}": scale for k, scale in enumerate(slide_geometry.levels) if k}
    scales = {"in µm": 1 / slide_geometry.mpp} | levels
    for name, scale in _MAGNIFICATIONS.items():
        if not any(abs(scale / level_scale - 1) < _SCALE_TOLERANCE for level_scale in levels.values()):
            scales[name] = scale
    for name, scale in scales.items():
        if abs(scale - 1) > _SCALE_TOLERANCE:
            yield name, scale * np.eye(2), zero
    yield "with x and y exchanged", np.array([[0.0, 1.0], [1.0, 0.0]]), zero
    flip = np.diag([1.0, -1.0])
    yield "with y counted upwards from the edge", flip, np.array([0.0, height])
    yield "with y counted upwards from 0", flip, zero


def _require_pixels(
    outlines: Outlines, polygons: NDArray[Any], target: _Geometry, slide_geometry: SlideGeometry
) -> None:
    """Refuse coordinates in millimetres, degrees or fractions of the slide."""
    x_min, y_min, x_max, y_max = shapely.total_bounds(polygons)
    reach = np.abs([[x_min, y_min], [x_max, y_max]]).max(axis=0)
    total = float(shapely.area(polygons).sum())
    if total >= 1 and (reach > _CORNER_SHARE * np.array(slide_geometry.size_l0)).any():
        return
    scales = {
        "millimetres": np.full(2, 1000 / slide_geometry.mpp),
        "fractions of the slide": np.array(slide_geometry.size_l0, float),
    }
    limit = np.array(slide_geometry.size_l0) * 1.01
    shares = {
        name: slide_geometry.tissue_share(transform_area(target, (0, 0), np.diag(scale)))
        for name, scale in scales.items()
        if min(x_min, y_min) >= 0 and (reach * scale <= limit).all()
    }
    best_share = max(shares.values(), default=0.0)
    names = [name for name, share in shares.items() if share >= best_share / 2]
    if not names:
        is_on_earth = reach[0] <= 180 and reach[1] <= 90
        names = ["millimetres", "degrees"] if is_on_earth else ["another unit"]
    raise WsiFlError(
        f"{outlines.path}: all it outlines covers {total:.2g} square pixels from ({x_min:.3g}, {y_min:.3g}) to "
        f"({x_max:.3g}, {y_max:.3g}): it seems to be in {' or '.join(names)}; export it in level-0 pixels"
    )
