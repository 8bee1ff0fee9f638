"""The files of annotations: the outlines in ASAP XML and QuPath GeoJSON, told apart by content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.system.files import ordinary
from wsi_fl.types import WsiFlError

Geometry: TypeAlias = Any

_NOT_DRAWN = {"detection", "cell", "tile", "tma_core"}
"""QuPath's objects that an analysis made, not a person."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_REASON_CHARS = 200
"""The longest reason that a message repeats from a file."""

_MOST_CROSSINGS = 100_000
"""How often an outline may cross itself; repairing it takes time and memory for each crossing."""
_PROBES = 256
"""Sides of an outline that are looked at to estimate how often it crosses itself."""

_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


class _Wrong(ValueError):
    """What is wrong with a file, in words for people."""


def outlines_of(path: Path) -> Iterator[tuple[str, Geometry]]:
    """Yield (group, polygon) of every outline with area.

    Raises:
        WsiFlError: when the file cannot be read, or is no such file.
    """
    try:
        data = ordinary(path).read_bytes()
    except OSError as error:
        raise WsiFlError(f"{path}: cannot read the annotation: {error.strerror}") from None
    try:
        yield from _asap(data) if _is_xml(data) else _geojson(data)
    except _Wrong as error:
        raise WsiFlError(
            f"{path}: not ASAP XML or QuPath GeoJSON: {shortened(str(error), _REASON_CHARS)}"
        ) from None
    except RecursionError:
        raise WsiFlError(f"{path}: malformed annotation: nested too deeply") from None
    except (ElementTree.ParseError, json.JSONDecodeError) as error:
        raise WsiFlError(f"{path}: malformed annotation: {error}") from None
    except UnicodeDecodeError:
        raise WsiFlError(f"{path}: malformed annotation: its text is neither UTF-8 nor UTF-16") from None
    except (LookupError, ValueError):  # of the parsers: a codec, a number of thousands of digits
        raise WsiFlError(
            f"{path}: malformed annotation: its encoding is unknown, or a number has thousands of digits"
        ) from None


def shortened(text: str, most: int) -> str:
    """Return a text in one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def polygons(geometry: Geometry) -> list[Geometry]:
    """Return the polygons with area in a geometry of any kind."""
    flat = shapely.get_parts(shapely.get_parts(np.atleast_1d(geometry)))
    return [part for part in flat if part.geom_type == "Polygon" and part.area > 0]


def _is_xml(data: bytes) -> bool:
    if data.startswith(_UTF16):
        return (
            data[2:]
            .decode("utf-16-be" if data[:1] == b"\xfe" else "utf-16-le", "replace")
            .lstrip()
            .startswith("<")
        )
    return data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def _repaired(shell: NDArray[np.float64], holes: Sequence[NDArray[np.float64]] = ()) -> list[Geometry]:
    """Valid polygons of a ring [n, 2] and its holes; none when it has fewer than three points."""
    if any(not np.isfinite(ring).all() for ring in (shell, *holes)):
        raise _Wrong("a coordinate is not a finite number")
    if len(shell) < 3:
        return []
    polygon = shapely.Polygon(shell, [ring for ring in holes if len(ring) >= 3])
    if not polygon.is_valid:
        for ring in (shell, *holes):
            _refuse_tangled(ring)
        polygon = shapely.make_valid(polygon, method="structure", keep_collapsed=False)
    return polygons(polygon)


def _refuse_tangled(ring: NDArray[np.float64]) -> None:
    """Refuse an outline that crosses itself so often that nobody can have drawn it, by a sample of its sides."""
    n = len(ring)
    if n * (n - 1) // 2 <= _MOST_CROSSINGS:
        return
    sides = shapely.linestrings(np.stack([ring, np.roll(ring, -1, 0)], 1))
    probes = sides[np.linspace(0, n - 1, _PROBES).astype(np.int64)]
    met, _ = shapely.STRtree(sides).query(probes, predicate="intersects")
    crossings = max(0, len(met) - 3 * len(probes)) * n // (2 * len(probes))  # itself and its two neighbours
    if crossings > _MOST_CROSSINGS:
        raise _Wrong(
            f"an outline of {n} points crosses itself about {crossings} times, which no drawing does; draw it anew"
        )


def _asap(data: bytes) -> Iterator[tuple[str, Geometry]]:
    root = ElementTree.fromstring(data)
    if root.tag != "ASAP_Annotations":
        raise _Wrong(f"its root element is {root.tag}, not ASAP_Annotations")
    for annotation in root.iter("Annotation"):
        points = annotation.findall("Coordinates/Coordinate")
        points.sort(key=lambda point: _number(point, "Order", "0"))
        ring = [(_number(point, "X"), _number(point, "Y")) for point in points]
        for polygon in _repaired(np.array(ring, np.float64).reshape(-1, 2)):
            yield annotation.get("PartOfGroup", ""), polygon


def _number(point: ElementTree.Element, name: str, default: str | None = None) -> float:
    text = point.get(name, default)
    if text is None:
        raise _Wrong(f"a Coordinate has no {name}")
    try:
        return float(text)
    except ValueError:
        raise _Wrong(f"a Coordinate has {name} = {text!r}, which is no number") from None


def _geojson(data: bytes) -> Iterator[tuple[str, Geometry]]:
    document = json.loads(data)
    features = document if isinstance(document, list) else _object(document, "it").get("features", [document])
    for one in _list(features, "features"):
        feature = _object(one, "a feature")
        is_feature = _of(feature, "type", "a feature") == "Feature"
        properties = _object(feature.get("properties") or {}, "properties") if is_feature else {}
        geometry = _of(feature, "geometry", "a feature") if is_feature else feature
        if geometry is None or str(properties.get("objectType")) in _NOT_DRAWN:
            continue
        for polygon in _geojson_polygons(geometry):
            yield _geojson_group(properties), polygon


def _geojson_group(properties: Mapping[str, Any]) -> str:
    """QuPath's classification (a derived class counts as its base), else the object's name."""
    classification = properties.get("classification") or ""
    if isinstance(classification, Mapping):
        names = _list(classification.get("names") or [""], "names")
        classification = classification.get("name") or names[0]
    return str(classification or properties.get("name") or "")


def _geojson_polygons(given: Any) -> Iterator[Geometry]:
    geometry = _object(given, "a geometry")
    kind = _of(geometry, "type", "a geometry")
    if kind == "GeometryCollection":
        for member in _list(_of(geometry, "geometries", "a collection"), "geometries"):
            yield from _geojson_polygons(member)
    elif kind in ("Polygon", "MultiPolygon"):
        found = _list(_of(geometry, "coordinates", "a geometry"), "coordinates")
        for one in [found] if kind == "Polygon" else found:
            rings = [_ring(ring) for ring in _list(one, "a polygon")]
            if rings:
                yield from _repaired(rings[0], rings[1:])
    elif kind not in ("Point", "MultiPoint", "LineString", "MultiLineString"):
        raise _Wrong(f"unknown geometry {kind}")


def _ring(given: Any) -> NDArray[np.float64]:
    """The points [n, 2] of a ring; a third number of a point is passed over."""
    points = _list(given, "a ring")
    for point in points:
        if not isinstance(point, list) or len(point) < 2:
            raise _Wrong(f"a point is {_kind(point)}, not a list of two numbers")
        if strange := [value for value in point[:2] if type(value) not in (int, float)]:
            raise _Wrong(f"a coordinate is {_kind(strange[0])}, not a number")
    try:
        return np.array([point[:2] for point in points], np.float64).reshape(-1, 2)
    except OverflowError:
        raise _Wrong("a coordinate is not a finite number") from None


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{what} is {_kind(value)}, not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"{what} is {_kind(value)}, not a list")
    return value


def _of(value: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in value:
        raise _Wrong(f"{what} has no {key!r}")
    return value[key]


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    return _KINDS.get(type(value), "a number") if not isinstance(value, list) or value else "an empty list"
