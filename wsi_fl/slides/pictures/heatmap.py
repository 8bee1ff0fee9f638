"""A model's predictions on a slide, patch by patch, as a heatmap and as QuPath's GeoJSON.

The structure of the latter is that of QuPath 0.4 and later (`QuPathTypeAdapters` in QuPath's source, "Exporting
annotations" in its manual): coordinates are level-0 pixels from the corner of the scanned area, `objectType` is the
kind of an object, `classification` has a name and a colour [red, green, blue], `measurements` is an object of numbers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wsi_fl.slides.patching.grid import patch_side_l0
from wsi_fl.slides.pictures.drawing import (
    INK,
    PAPER,
    Color,
    draw_scale_bar,
    encode_png,
    load_font,
    resize_picture,
    shorten_to_fit,
    wrap_rows,
)
from wsi_fl.system.files import atomic_path
from wsi_fl.types import GridSpec

TOP_K = 20
"""Patches in a slide's mean score: enough against a single odd patch, few enough for a small lesion."""
_NAMESPACE = uuid.UUID("0f0d4e0e-4e6b-5d0e-9a43-6f1a1e2f7c55")
"""Ids are made from names, so that a repeated prediction has the same objects."""


@dataclass(frozen=True)
class PatchPredictions:
    """A model's predictions for the n patches of one slide.

    With two classes every patch shows the probability of the second ("tumor"). With more, every patch shows its most
    probable class and that probability, and each class has its regions.
    """

    boxes_l0: NDArray[np.int64]
    """[n, 4] (left, top, right, bottom) in level-0 pixels."""
    classes: tuple[str, ...]
    probabilities: NDArray[np.float64]
    """[n, classes]"""
    threshold: float = 0.5
    """Least probability of outlined patches; of two classes 0.5 is the more likely one. For other operating points the
    probabilities are in patches.csv."""

    @cached_property
    def class_index(self) -> NDArray[np.int64]:
        """[n] class shown for each patch, as an index of `classes`."""
        if len(self.classes) == 2:
            return np.ones(len(self.probabilities), np.int64)
        return np.asarray(self.probabilities.argmax(axis=1), np.int64)

    @cached_property
    def class_probability(self) -> NDArray[np.float64]:
        """[n] the probability of `class_index`."""
        return np.asarray(self.probabilities[np.arange(len(self.class_index)), self.class_index])

    @property
    def is_above(self) -> NDArray[np.bool_]:
        """[n] whether patches reach the threshold."""
        return self.class_probability >= self.threshold

    @property
    def region_classes(self) -> tuple[int, ...]:
        """The classes with regions, as indices of `classes`."""
        return (1,) if len(self.classes) == 2 else tuple(range(len(self.classes)))

    @cached_property
    def regions(self) -> list[_Region]:
        """The connected regions of patches above the threshold, largest first."""
        regions = [region for kind in self.region_classes for region in _find_regions(self, kind)]
        return sorted(regions, key=lambda region: -region.polygon.area)


@dataclass(frozen=True)
class _Region:
    """A connected region of n patches of one class (by index) above the threshold, and the mean and maximum of their
    probabilities."""

    class_index: int
    polygon: Any
    """Valid shapely Polygon in level-0 pixels, its exterior counterclockwise by signed area (RFC 7946)."""
    n_patches: int
    mean_probability: float
    max_probability: float


def patch_boxes(
    xy_l0: NDArray[np.int64], spec: GridSpec, slide_mpp: float, size_l0: tuple[int, int]
) -> NDArray[np.int64]:
    """Return the boxes int64[n, 4] (left, top, right, bottom) of patches, clipped at the slide's edge.

    Where the grid's step is a fraction of a pixel, a patch ends exactly where its neighbour begins, so that
    unions of patches have no slivers. Grids of other tools may begin anywhere.

    Args:
        slide_mpp: µm per level-0 pixel by which the patches were cut.

    Example:
        >>> patch_boxes(np.array([[0, 0], [208, 0]]), GridSpec(96, 0.5, 96), 0.2308, (400, 400)).tolist()
        [[0, 0, 208, 208], [208, 0, 400, 208]]
    """
    step = spec.stride_px * spec.mpp / slide_mpp
    on_grid = np.round(xy_l0 / step) * step
    corner = np.where(np.round(on_grid) == xy_l0, on_grid, xy_l0)
    far_corner = np.round(corner + (step if spec.stride_px == spec.size_px else patch_side_l0(spec, slide_mpp)))
    return np.concatenate([xy_l0, np.minimum(far_corner.astype(np.int64), np.array(size_l0))], axis=1)


def score_class(predictions: PatchPredictions, class_index: int, top_k: int = TOP_K) -> dict[str, float]:
    """Return a slide's scores of a class: highest probability, mean of the top_k highest, fraction above the threshold.

    Of more than two classes, only patches in which the class is the most probable count.
    """
    is_of_class = predictions.class_index == class_index
    probabilities = np.sort(predictions.class_probability[is_of_class])[::-1]
    return {
        "max": float(probabilities[0]) if len(probabilities) else 0.0,
        "top_k_mean": float(probabilities[:top_k].mean()) if len(probabilities) else 0.0,
        "fraction": float((predictions.is_above & is_of_class).mean()),
    }


def find_leading_class(predictions: PatchPredictions) -> int:
    """Return the class for a slide's score: the second of two, else that of most patches above the threshold, or of
    most where none is."""
    if len(predictions.classes) == 2:
        return 1
    rows = predictions.is_above if predictions.is_above.any() else slice(None)
    return int(np.bincount(predictions.class_index[rows]).argmax())


def _find_regions(predictions: PatchPredictions, class_index: int) -> list[_Region]:
    rows = np.flatnonzero(predictions.is_above & (predictions.class_index == class_index))
    if not len(rows):
        return []
    boxes = predictions.boxes_l0[rows].astype(np.float64)
    union = shapely.union_all(shapely.box(*boxes.T)).simplify(0)  # points along straight edges go
    polygons = shapely.orient_polygons(shapely.get_parts(union), exterior_cw=False)
    centres = shapely.points((boxes[:, :2] + boxes[:, 2:]) / 2)
    polygon_index, patch_index = shapely.STRtree(centres).query(polygons, predicate="contains")
    probabilities = predictions.class_probability[rows]
    parts = (probabilities[patch_index[polygon_index == k]] for k in range(len(polygons)))
    return [
        _Region(class_index, polygon, len(part), float(part.mean()), float(part.max()))
        for polygon, part in zip(polygons, parts, strict=True)
    ]


_LONG_SIDE_PX = 1200
_MIN_WIDTH_PX = 860
_TITLE_PX, _LEGEND_PX, _MARGIN_PX = 74, 84, 16
_MUTED_COLOR = (95, 95, 95)
_BAR_PX = (300, 18)
_ROW_PX, _LINE_PX = 24, 36
"""Height of a row in the legend of outlines, and width of the line before a name."""
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TISSUE_GRAY = 222
"""The grey of faded tissue, under the colour bar as under the patches."""


@dataclass(frozen=True)
class Caption:
    """The text of a heatmap, a line each; `legend` is the meaning of colour, by default a probability."""

    slide: str
    origin: str
    score: str
    detail: str
    legend: str = ""


def draw_heatmap(
    thumbnail: NDArray[np.uint8],
    downsample: float,
    mpp: float,
    predictions: PatchPredictions,
    colors: Sequence[Color],
    caption: Caption,
) -> bytes:
    """Return a PNG of the thumbnail under the probabilities, with outlines, colour bar and scale bar.

    Args:
        thumbnail: uint8[h, w, 3] of the whole slide, with `downsample` level-0 pixels per pixel.
        mpp: µm per level-0 pixel.
        colors: of each class, for outlines of more than two.
    """
    gray, zoom = resize_picture(Image.fromarray(thumbnail).convert("L"), _LONG_SIDE_PX)
    size, picture_scale = gray.size, zoom / downsample
    # Grey and light, so that only probability has colour.
    picture = _tint_patches(
        Image.blend(gray, Image.new("L", size, 255), 0.25).convert("RGB"), predictions, picture_scale
    )
    _draw_regions(picture, predictions, colors, picture_scale)
    width = max(size[0], _MIN_WIDTH_PX)
    outlines = _place_outlines(predictions, width)
    legend_px = _ROW_PX * outlines[-1][0]
    page = Image.new("RGB", (width, size[1] + _TITLE_PX + _LEGEND_PX + legend_px), PAPER)
    page.paste(picture, ((page.width - size[0]) // 2, _TITLE_PX))
    draw, x_max = ImageDraw.Draw(page), page.width - _MARGIN_PX
    for y, name_text, value_text, face, ink in (
        (26, caption.slide, caption.score, load_font(20, bold=True), INK),
        (53, caption.origin, caption.detail, load_font(15), _MUTED_COLOR),
    ):
        draw.text((x_max, y), value_text, ink, face, anchor="rm")
        room_px = x_max - draw.textlength(value_text, face) - 2 * _MARGIN_PX
        draw.text((_MARGIN_PX, y), shorten_to_fit(draw, name_text, room_px, face), ink, face, anchor="lm")
    top = page.height - _LEGEND_PX - legend_px
    _draw_legend(page, top, predictions, caption.legend, um_per_px=mpp / picture_scale)
    for class_index, (row, x, name) in zip(predictions.region_classes, outlines, strict=True):
        middle = top + 34 + _BAR_PX[1] // 2 + row * _ROW_PX
        draw.line((x, middle, x + 28, middle), fill=_line_color(predictions, class_index, colors), width=3)
        draw.text((x + _LINE_PX, middle), name, INK, load_font(), anchor="lm")
    return encode_png(page)


def _map_colors(p: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (colour [..., 3] of 0 to 255, opacity [...]): viridis, faint at low probability."""
    from matplotlib import colormaps

    rgb = colormaps["viridis"](p)[..., :3] * 255
    return rgb, 0.1 + 0.7 * p


def _tint_patches(picture: Image.Image, predictions: PatchPredictions, picture_scale: float) -> Image.Image:
    """Return the picture under the patches' colours; overlapping patches take that of their mean."""
    pixels = np.asarray(picture, np.float64)
    total, count = np.zeros((2, *pixels.shape[:2]), np.float32)
    boxes = np.round(predictions.boxes_l0 * picture_scale).astype(np.int64)
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    for (x_min, y_min, x_max, y_max), p in zip(boxes.tolist(), predictions.class_probability.tolist(), strict=True):
        total[y_min:y_max, x_min:x_max] += p
        count[y_min:y_max, x_min:x_max] += 1
    is_covered = count > 0
    rgb, opacity = _map_colors(total[is_covered].astype(np.float64) / count[is_covered])
    out = pixels.copy()
    out[is_covered] += (rgb - out[is_covered]) * opacity[:, None]
    return Image.fromarray(out.round().astype(np.uint8))


def _draw_regions(
    picture: Image.Image, predictions: PatchPredictions, colors: Sequence[Color], picture_scale: float
) -> None:
    """Draw the edges of regions, dark on a light rim for any background."""
    draw = ImageDraw.Draw(picture)
    for width in (7, 3):
        for region in predictions.regions:
            fill = PAPER if width == 7 else _line_color(predictions, region.class_index, colors)
            for ring in shapely.get_rings(region.polygon):
                points = [(float(x), float(y)) for x, y in shapely.get_coordinates(ring) * picture_scale]
                draw.line(points, fill=fill, width=width, joint="curve")


def _line_color(predictions: PatchPredictions, class_index: int, colors: Sequence[Color]) -> Color:
    return INK if len(predictions.classes) == 2 else colors[class_index]


def _place_outlines(predictions: PatchPredictions, width: int) -> list[tuple[int, float, str]]:
    """Return (row, left, text) of the legend for each class with outlines.

    The first row ends where the scale bar begins.
    """
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    x_min = _MARGIN_PX + 6 + _BAR_PX[0] + 36
    room_px = width - x_min - _MARGIN_PX
    first_px = room_px - width / 6 - 20
    names = [
        shorten_to_fit(
            draw,
            f"{predictions.classes[class_index]}: {predictions.threshold:g} or more",
            first_px - _LINE_PX,
            load_font(),
        )
        for class_index in predictions.region_classes
    ]
    places = wrap_rows(
        [_LINE_PX + draw.textlength(name, load_font()) + 20 for name in names], [first_px + 20, room_px + 20]
    )
    return [(row, x_min + x, name) for (row, x), name in zip(places, names, strict=True)]


def _draw_legend(page: Image.Image, top: int, predictions: PatchPredictions, legend: str, *, um_per_px: float) -> None:
    """Draw the colours from 0 to 1 as on tissue, with numbers and a mark at the threshold, and a scale bar."""
    draw, (width, height) = ImageDraw.Draw(page), _BAR_PX
    is_binary = len(predictions.classes) == 2
    default = f"{predictions.classes[1]} probability" if is_binary else "probability of the likeliest class"
    x_min, y_min, y_max = _MARGIN_PX + 6, top + 34, top + 34 + height
    text = shorten_to_fit(draw, legend or default, page.width - x_min - _MARGIN_PX, load_font())
    draw.text((x_min, top + 16), text, INK, load_font(), anchor="lm")
    rgb, opacity = _map_colors(np.linspace(0, 1, width))
    row = _TISSUE_GRAY + (rgb - _TISSUE_GRAY) * opacity[:, None]
    page.paste(Image.fromarray(np.broadcast_to(row, (height, width, 3)).round().astype(np.uint8)), (x_min, y_min))
    for tick in _TICKS:
        x = x_min + tick * (width - 1)
        draw.line((x, y_max, x, y_max + 4), fill=INK, width=1)
        draw.text((x, y_max + 7), f"{tick:g}", INK, load_font(13), anchor="mt")
    x = x_min + predictions.threshold * (width - 1)
    for ink, line_px in ((PAPER, 5), (INK, 3)):
        draw.line((x, y_min - 4, x, y_max), fill=ink, width=line_px)
    draw_scale_bar(draw, (page.width - _MARGIN_PX, y_min + height // 2 + 7), um_per_px, page.width / 6)


def write_geojson(
    path: Path,
    predictions: PatchPredictions,
    colors: Sequence[Color],
    identity: str,
    corner_l0: tuple[int, int] = (0, 0),
) -> None:
    """Write the regions of a slide as annotations and its patches as tiles, feature by feature, in colours of classes.

    Ids of objects are made from the `identity`: run, site and slide. Coordinates count from the level-0 pixel at which
    the scanned area begins, as QuPath's do.
    """
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"type": "FeatureCollection", "features": [')
        separator = "\n"
        for feature in _iterate_features(predictions, colors, identity, corner_l0):
            file.write(separator + json.dumps(feature, ensure_ascii=False, allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")


def _iterate_features(
    predictions: PatchPredictions, colors: Sequence[Color], identity: str, corner_l0: tuple[int, int] = (0, 0)
) -> Iterator[Mapping[str, object]]:
    """Yield the features of regions, largest first, then of patches."""
    titles = [name[:1].upper() + name[1:] for name in predictions.classes]  # as in QuPath (Tumor)
    if len(set(titles)) < len(titles):
        titles = list(predictions.classes)
    counts: dict[int, int] = {}
    corner = np.array(corner_l0)
    for region in predictions.regions:
        number = counts[region.class_index] = counts.get(region.class_index, 0) + 1
        title = titles[region.class_index]
        rings = map(shapely.get_coordinates, shapely.get_rings(region.polygon))
        yield {
            "type": "Feature",
            "id": str(uuid.uuid5(_NAMESPACE, f"{identity}/{title} {number}")),
            "geometry": {
                "type": "Polygon",
                "coordinates": [(ring.round().astype(int) - corner).tolist() for ring in rings],
            },
            "properties": {
                "objectType": "annotation",
                "name": f"{title} {number}",
                "classification": {"name": title, "color": list(colors[region.class_index])},
                "isLocked": False,
                "measurements": {
                    f"{title} probability": round(region.mean_probability, 6),
                    f"{title} probability max": round(region.max_probability, 6),
                    "Patches": region.n_patches,
                },
            },
        }
    # Of two classes a patch belongs to the second from the threshold on, else to the first.
    is_binary = len(titles) == 2
    class_indices = predictions.is_above.astype(np.int64) if is_binary else predictions.class_index
    columns = predictions.boxes_l0 - np.tile(corner, 2), predictions.probabilities, class_indices
    for (x_min, y_min, x_max, y_max), p, class_index in zip(*(column.tolist() for column in columns), strict=True):
        ring = [[x_min, y_min], [x_max, y_min], [x_max, y_max], [x_min, y_max], [x_min, y_min]]
        yield {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": {
                "objectType": "tile",
                "classification": {"name": titles[class_index], "color": list(colors[class_index])},
                "measurements": {f"{titles[k]} probability": round(p[k], 6) for k in predictions.region_classes},
            },
        }
