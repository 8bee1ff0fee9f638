"""A model's predictions on a slide, patch by patch, as a heatmap and as QuPath's GeoJSON.

The structure of the latter is that of QuPath 0.4 and later (`QuPathTypeAdapters` in QuPath's source,
"Exporting annotations" in its manual): coordinates are level-0 pixels from the corner of the scanned area, `objectType`
is the kind of an object, `classification` has a name and a colour [red, green, blue], `measurements` is an object of
numbers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wsi_fl.slides.patching.grid import size_in_l0
from wsi_fl.slides.pictures.drawing import (
    INK,
    PAPER,
    Color,
    draw_scale_bar,
    enlarged,
    fitted,
    font,
    png,
    wrap_rows,
)
from wsi_fl.system.files import atomic
from wsi_fl.types import GridSpec

TOP_K = 20
"""Patches in a slide's mean score: enough against a single odd patch, few enough for a small lesion."""
_NAMESPACE = uuid.UUID("0f0d4e0e-4e6b-5d0e-9a43-6f1a1e2f7c55")
"""Ids are made from names, so that a repeated prediction has the same objects."""


@dataclass(frozen=True)
class Heat:
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
    def kind(self) -> NDArray[np.int64]:
        """[n] class shown for each patch, as an index of `classes`."""
        if len(self.classes) == 2:
            return np.ones(len(self.probabilities), np.int64)
        return np.asarray(self.probabilities.argmax(axis=1), np.int64)

    @cached_property
    def probability(self) -> NDArray[np.float64]:
        """[n] the probability of `class_index`."""
        return np.asarray(self.probabilities[np.arange(len(self.kind)), self.kind])

    @property
    def above(self) -> NDArray[np.bool_]:
        """[n] whether patches reach the threshold."""
        return self.probability >= self.threshold

    @property
    def shown(self) -> tuple[int, ...]:
        """The classes with regions, as indices of `classes`."""
        return (1,) if len(self.classes) == 2 else tuple(range(len(self.classes)))

    @cached_property
    def regions(self) -> list[_Region]:
        """The connected regions of patches above the threshold, largest first."""
        found = [region for kind in self.shown for region in _regions(self, kind)]
        return sorted(found, key=lambda region: -region.polygon.area)


@dataclass(frozen=True)
class _Region:
    """A connected region of n patches of one class (by index) above the threshold, and the mean and maximum of their
    probabilities."""

    kind: int
    polygon: Any
    """Valid shapely Polygon in level-0 pixels, its exterior counterclockwise by signed area (RFC 7946)."""
    n_patches: int
    mean: float
    highest: float


def patch_boxes(
    xy_l0: NDArray[np.int64], spec: GridSpec, slide_mpp: float, size_l0: tuple[int, int]
) -> NDArray[np.int64]:
    """Return the boxes int64[n, 4] (left, top, right, bottom) of grid positions, clipped at the slide's edge.

    Where the grid's step is a fraction of a pixel, a patch ends exactly where its neighbour begins, so that
    unions of patches have no slivers.

    Example:
        >>> patch_boxes(np.array([[0, 0], [208, 0]]), GridSpec(96, 0.5, 96), 0.2308, (400, 400)).tolist()
        [[0, 0, 208, 208], [208, 0, 400, 208]]
    """
    step = spec.stride_px * spec.mpp / slide_mpp
    cell = np.round(xy_l0 / step)
    apart = spec.stride_px == spec.size_px
    far = np.round((cell + 1) * step if apart else cell * step + size_in_l0(spec, slide_mpp))
    return np.concatenate([xy_l0, np.minimum(far.astype(np.int64), np.array(size_l0))], axis=1)


def score(heat: Heat, kind: int, top_k: int = TOP_K) -> dict[str, float]:
    """Return a slide's scores of a class: highest probability, mean of the top_k highest, fraction above the threshold.

    Of more than two classes, only patches in which the class is the most probable count.
    """
    mine = heat.kind == kind
    p = np.sort(heat.probability[mine])[::-1]
    return {
        "max": float(p[0]) if len(p) else 0.0,
        "top_k_mean": float(p[:top_k].mean()) if len(p) else 0.0,
        "fraction": float((heat.above & mine).mean()),
    }


def leading(heat: Heat) -> int:
    """Return the class for a slide's score: the second of two, else that of most patches."""
    if len(heat.classes) == 2:
        return 1
    return int(np.bincount(heat.kind[heat.above], minlength=len(heat.classes)).argmax())


def _regions(heat: Heat, kind: int) -> list[_Region]:
    rows = np.flatnonzero(heat.above & (heat.kind == kind))
    if not len(rows):
        return []
    boxes = heat.boxes_l0[rows].astype(np.float64)
    union = shapely.union_all(shapely.box(*boxes.T)).simplify(0)  # points along straight edges go
    polygons = shapely.orient_polygons(shapely.get_parts(union), exterior_cw=False)
    centres = shapely.points((boxes[:, :2] + boxes[:, 2:]) / 2)
    which, patch = shapely.STRtree(centres).query(polygons, predicate="contains")
    p = heat.probability[rows]
    return [
        _Region(kind, polygon, len(mine), float(mine.mean()), float(mine.max()))
        for k, polygon in enumerate(polygons)
        for mine in (p[patch[which == k]],)
    ]


_LONG_SIDE_PX = 1200
_LEAST_WIDTH_PX = 860
_TITLE_PX, _LEGEND_PX, _MARGIN_PX = 74, 84, 16
_MUTED = (95, 95, 95)
_BAR_PX = (300, 18)
_ROW_PX, _LINE_PX = 24, 36
"""Height of a row in the legend of outlines, and width of the line before a name."""
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
_BENEATH = 222
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
    heat: Heat,
    colors: Sequence[Color],
    caption: Caption,
) -> bytes:
    """Return a PNG of the thumbnail under the probabilities, with outlines, colour bar and scale bar.

    Args:
        thumbnail: uint8[h, w, 3] of the whole slide, with `downsample` level-0 pixels per pixel.
        mpp: µm per level-0 pixel.
        colors: of each class, for outlines of more than two.
    """
    grey, zoom = enlarged(Image.fromarray(thumbnail).convert("L"), _LONG_SIDE_PX)
    size, to_picture = grey.size, zoom / downsample
    # Grey and light, so that only probability has colour.
    picture = _tinted(Image.blend(grey, Image.new("L", size, 255), 0.25).convert("RGB"), heat, to_picture)
    _draw_regions(picture, heat, colors, to_picture)
    width = max(size[0], _LEAST_WIDTH_PX)
    outlines = _outline_places(heat, width)
    further = _ROW_PX * outlines[-1][0]
    page = Image.new("RGB", (width, size[1] + _TITLE_PX + _LEGEND_PX + further), PAPER)
    page.paste(picture, ((page.width - size[0]) // 2, _TITLE_PX))
    draw, right = ImageDraw.Draw(page), page.width - _MARGIN_PX
    for y, left_text, right_text, face, ink in (
        (26, caption.slide, caption.score, font(20, bold=True), INK),
        (53, caption.origin, caption.detail, font(15), _MUTED),
    ):
        draw.text((right, y), right_text, ink, face, anchor="rm")
        room = right - draw.textlength(right_text, face) - 2 * _MARGIN_PX
        draw.text((_MARGIN_PX, y), fitted(draw, left_text, room, face), ink, face, anchor="lm")
    top = page.height - _LEGEND_PX - further
    _draw_legend(page, top, heat, caption.legend, um_per_px=mpp / to_picture)
    for kind, (row, x, name) in zip(heat.shown, outlines, strict=True):
        middle = top + 34 + _BAR_PX[1] // 2 + row * _ROW_PX
        draw.line((x, middle, x + 28, middle), fill=_line_colour(heat, kind, colors), width=3)
        draw.text((x + _LINE_PX, middle), name, INK, font(), anchor="lm")
    return png(page)


def _colours(p: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (colour [..., 3] of 0 to 255, opacity [...]): viridis, faint at low probability."""
    from matplotlib import colormaps

    rgb = colormaps["viridis"](p)[..., :3] * 255
    return rgb, 0.1 + 0.7 * p


def _tinted(picture: Image.Image, heat: Heat, to_picture: float) -> Image.Image:
    """Return the picture under the patches' colours; overlapping patches take that of their mean."""
    pixels = np.asarray(picture, np.float64)
    total, count = np.zeros((2, *pixels.shape[:2]), np.float32)
    boxes = np.round(heat.boxes_l0 * to_picture).astype(np.int64)
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    for (left, top, right, bottom), p in zip(boxes.tolist(), heat.probability.tolist(), strict=True):
        total[top:bottom, left:right] += p
        count[top:bottom, left:right] += 1
    covered = count > 0
    rgb, opacity = _colours(total[covered].astype(np.float64) / count[covered])
    out = pixels.copy()
    out[covered] += (rgb - out[covered]) * opacity[:, None]
    return Image.fromarray(out.round().astype(np.uint8))


def _draw_regions(picture: Image.Image, heat: Heat, colors: Sequence[Color], to_picture: float) -> None:
    """Draw the edges of regions, dark on a light rim for any background."""
    draw = ImageDraw.Draw(picture)
    for width in (7, 3):
        for region in heat.regions:
            fill = PAPER if width == 7 else _line_colour(heat, region.kind, colors)
            for ring in shapely.get_rings(region.polygon):
                points = [(float(x), float(y)) for x, y in shapely.get_coordinates(ring) * to_picture]
                draw.line(points, fill=fill, width=width, joint="curve")


def _line_colour(heat: Heat, kind: int, colors: Sequence[Color]) -> Color:
    return INK if len(heat.classes) == 2 else colors[kind]


def _outline_places(heat: Heat, width: int) -> list[tuple[int, float, str]]:
    """Return (row, left, text) of the legend for each class with outlines.

    The first row ends where the scale bar begins.
    """
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    left = _MARGIN_PX + 6 + _BAR_PX[0] + 36
    room = width - left - _MARGIN_PX
    first = room - width / 6 - 20
    names = [
        fitted(draw, f"{heat.classes[kind]}: {heat.threshold:g} or more", first - _LINE_PX, font())
        for kind in heat.shown
    ]
    places = wrap_rows(
        [_LINE_PX + draw.textlength(name, font()) + 20 for name in names], [first + 20, room + 20]
    )
    return [(row, left + x, name) for (row, x), name in zip(places, names, strict=True)]


def _draw_legend(page: Image.Image, top: int, heat: Heat, said: str, *, um_per_px: float) -> None:
    """Draw a colour bar with numbers, and a scale bar."""
    draw = ImageDraw.Draw(page)
    of_two = len(heat.classes) == 2
    what = f"{heat.classes[1]} probability" if of_two else "probability of the likeliest class"
    left, bar_top = _MARGIN_PX + 6, top + 34
    room = page.width - left - _MARGIN_PX
    draw.text((left, top + 16), fitted(draw, said or what, room, font()), INK, font(), anchor="lm")
    _draw_bar(page, (left, bar_top), heat.threshold)
    scale = (page.width - _MARGIN_PX, bar_top + _BAR_PX[1] // 2 + 7)
    draw_scale_bar(draw, scale, um_per_px, page.width / 6)


def _draw_bar(page: Image.Image, corner: tuple[int, int], threshold: float) -> None:
    """Draw the colours from 0 to 1 as on tissue, with numbers and a mark at the threshold."""
    draw, (width, height), (left, top) = ImageDraw.Draw(page), _BAR_PX, corner
    rgb, opacity = _colours(np.linspace(0, 1, width))
    row = _BENEATH + (rgb - _BENEATH) * opacity[:, None]
    page.paste(Image.fromarray(np.broadcast_to(row, (height, width, 3)).round().astype(np.uint8)), corner)
    for tick in _TICKS:
        x = left + tick * (width - 1)
        draw.line((x, top + height, x, top + height + 4), fill=INK, width=1)
        draw.text((x, top + height + 7), f"{tick:g}", INK, font(13), anchor="mt")
    x = left + threshold * (width - 1)
    draw.line((x, top - 4, x, top + height), fill=PAPER, width=5)
    draw.line((x, top - 4, x, top + height), fill=INK, width=3)


def write_geojson(
    path: Path, heat: Heat, colors: Sequence[Color], identity: str, corner_l0: tuple[int, int] = (0, 0)
) -> None:
    """Write the regions of a slide as annotations and its patches as tiles, feature by feature, in colours of classes.

    Ids of objects are made from the `identity`: run, site and slide. Coordinates count from the level-0 pixel at which
    the scanned area begins, as QuPath's do.
    """
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"type": "FeatureCollection", "features": [')
        separator = "\n"
        for feature in _features(heat, colors, identity, corner_l0):
            file.write(separator + json.dumps(feature, ensure_ascii=False, allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")


def _features(
    heat: Heat, colors: Sequence[Color], identity: str, corner_l0: tuple[int, int] = (0, 0)
) -> Iterator[dict[str, Any]]:
    """Yield the features of regions, largest first, then of patches."""
    titles = _titles(heat.classes)
    seen: dict[int, int] = {}
    corner = np.array(corner_l0)
    for region in heat.regions:
        number = seen[region.kind] = seen.get(region.kind, 0) + 1
        title = titles[region.kind]
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
                "classification": {"name": title, "color": list(colors[region.kind])},
                "isLocked": False,
                "measurements": {
                    f"{title} probability": round(region.mean, 6),
                    f"{title} probability max": round(region.highest, 6),
                    "Patches": region.n_patches,
                },
            },
        }
    # Of two classes a patch belongs to the second from the threshold on, else to the first.
    of_two = len(titles) == 2
    own_class = heat.above.astype(np.int64) if of_two else heat.kind
    columns = heat.boxes_l0 - np.tile(corner, 2), heat.probabilities, own_class
    for (left, top, right, bottom), p, own in zip(*(one.tolist() for one in columns), strict=True):
        ring = [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]
        yield {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": {
                "objectType": "tile",
                "classification": {"name": titles[own], "color": list(colors[own])},
                "measurements": {f"{titles[k]} probability": round(p[k], 6) for k in heat.shown},
            },
        }


def _titles(classes: Sequence[str]) -> list[str]:
    """Return the distinct names of classes in QuPath, which begin with a capital (Tumor)."""
    titles = [name[:1].upper() + name[1:] for name in classes]
    return titles if len(set(titles)) == len(titles) else list(classes)
