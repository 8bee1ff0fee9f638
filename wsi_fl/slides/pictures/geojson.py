"""Predictions as QuPath's GeoJSON: outlines to look at and edit, patches to colour by their probability.

The structure is the one QuPath 0.4 and later write and read (`QuPathTypeAdapters` in QuPath's source, "Exporting
annotations" in its manual): coordinates are level-0 pixels, `objectType` says what an object is, `classification` has a
name and a colour [red, green, blue], `measurements` is an object of numbers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import shapely

from wsi_fl.slides.pictures.heatmap import Heat
from wsi_fl.system.files import atomic

Color = tuple[int, int, int]

_NAMESPACE = uuid.UUID("0f0d4e0e-4e6b-5d0e-9a43-6f1a1e2f7c55")
"""Ids are made from names, so that a prediction made again brings the same objects."""


def write_geojson(path: Path, heat: Heat, colors: Sequence[Color], identity: str) -> None:
    """Writes the regions of a slide as annotations and its patches as tiles, feature by feature.

    Args:
        colors: of each class.
        identity: what the objects' ids are made from: run, site and slide.
    """
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"type": "FeatureCollection", "features": [')
        separator = "\n"
        for feature in features(heat, colors, identity):
            file.write(separator + json.dumps(feature, ensure_ascii=False, allow_nan=False))
            separator = ",\n"
        file.write("\n]}\n")


def features(heat: Heat, colors: Sequence[Color], identity: str) -> Iterator[dict[str, Any]]:
    """The regions, largest first, then the patches."""
    seen: dict[int, int] = {}
    for region in heat.regions:
        number = seen[region.kind] = seen.get(region.kind, 0) + 1
        title = _title(heat.classes[region.kind])
        yield {
            "type": "Feature",
            "id": str(uuid.uuid5(_NAMESPACE, f"{identity}/{title} {number}")),
            "geometry": {"type": "Polygon", "coordinates": _rings(region.polygon)},
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
    yield from _tiles(heat, colors)


def _tiles(heat: Heat, colors: Sequence[Color]) -> Iterator[dict[str, Any]]:
    """Every patch; of two classes it belongs to the second from the threshold on, else to the first."""
    titles = [_title(name) for name in heat.classes]
    of_two = len(titles) == 2
    for box, p, kind, above in zip(
        heat.boxes_l0.tolist(),
        heat.probabilities.tolist(),
        heat.kind.tolist(),
        heat.above.tolist(),
        strict=True,
    ):
        left, top, right, bottom = box
        own = int(above) if of_two else kind
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


def _rings(polygon: Any) -> list[list[list[int]]]:
    """The exterior, then the holes, each closed; corners of patches are whole pixels."""
    rings = shapely.get_rings(polygon)
    return [shapely.get_coordinates(ring).round().astype(int).tolist() for ring in rings]


def _title(name: str) -> str:
    """QuPath spells its own classes with a capital: Tumor."""
    return name[:1].upper() + name[1:]
