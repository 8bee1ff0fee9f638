"""Files of outlines, ASAP XML and QuPath GeoJSON by content: their areas, and counts of other objects.

Sources: ASAP's `annotation/XmlRepository.cpp` and `Annotation.cpp`; QuPath's `QuPathTypeAdapters`, which reads the
spellings of all its versions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar
from xml.etree import ElementTree

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.system.files import require_regular_file
from wsi_fl.types import WsiFlError, shorten_text

Corner = Literal["bounds", "slide"]
"""The origin of coordinates: the corner of the scanned area, as in QuPath, or that of the slide, as in OpenSlide."""
_Geometry: TypeAlias = Any
_Ring: TypeAlias = NDArray[np.float64]

_MAX_REASON_CHARS = 200
"""Length of a file's text in messages."""
_ANALYSIS_KINDS = {
    **dict.fromkeys(("tile", "PathTileObject"), "tile"),
    **dict.fromkeys(("cell", "PathCellObject"), "cell"),
    **dict.fromkeys(("detection", "PathDetectionObject"), "detection"),
    **dict.fromkeys(("tma_core", "tmaCore", "TMACoreObject"), "TMA core"),
    **dict.fromkeys(("root", "PathRootObject"), ""),
}
"""QuPath's objects made by an analysis, not by a person, in the spellings of its versions; "" is not counted."""
_ANNOTATION_KINDS = {"annotation", "PathAnnotationObject"}
_ASAP_AREAS = ("polygon", "rectangle", "spline", "")
_ASAP_POINTS = ("dot", "pointset")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MAX_CROSSINGS = 100_000
"""Most self-crossings of an outline; repairing takes time and memory for each."""
_SAMPLED_SIDES = 256
"""Sampled sides of an outline for the estimate of its self-crossings."""
_JSON_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
_T = TypeVar("_T", dict[str, Any], list[Any])


@dataclass
class Outlines:
    """The outlines of a file, in the file's coordinates.

    Attributes:
        path: of the file.
        areas: (group as spelled, shapely Polygon) of every outline with area; the group is "" for none.
        omissions: kind → number of objects of the file that are no outlined areas.
        corner: the usual origin of such files.
    """

    path: Path
    areas: list[tuple[str, Any]] = field(default_factory=list)
    omissions: Counter[str] = field(default_factory=Counter)
    corner: Corner = "slide"

    def add(self, group: str, polygons: Sequence[_Geometry]) -> None:
        """Add an outline as its valid polygons, or count it as one without area."""
        self.areas += [(group, polygon) for polygon in polygons]
        self.omissions["outline without area"] += not polygons

    @property
    def remark(self) -> str:
        """A note on the file, as "left out as no outlined areas: 12 cells", or ""."""
        counts = [(n, kind) for kind, n in sorted(self.omissions.items()) if n]
        parts = [
            f"{n} {kind}" if n == 1 else re.sub(r"(TMA )?\w+", rf"{n} \g<0>s", kind, count=1) for n, kind in counts
        ]
        if not parts:
            return "" if self.areas else "holds no outline"
        enumeration = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
        prefix = "" if self.areas else "nothing was taken from it; "
        return f"{prefix}left out as no outlined areas: {enumeration}"


def list_polygons(geometry: _Geometry) -> list[_Geometry]:
    """Return the polygons with area in a shapely geometry of any kind."""
    flat = shapely.get_parts(shapely.get_parts(np.atleast_1d(geometry)))
    return [part for part in flat if part.geom_type == "Polygon" and part.area > 0]


class _FormatError(ValueError):
    """An error in a file, in words for users."""


def read_outlines(path: Path) -> Outlines:
    """Return the outlines of a file.

    Raises:
        WsiFlError: when the file cannot be read, or has another format.
    """
    try:
        data = require_regular_file(path).read_bytes()
    except OSError as error:
        raise WsiFlError(f"{path}: cannot read the annotation: {error.strerror}") from None
    try:
        return _parse_asap(data, path) if _is_xml(data) else _parse_geojson(data, path)
    except _FormatError as error:
        reason = shorten_text(str(error), _MAX_REASON_CHARS)
        raise WsiFlError(f"{path}: not ASAP XML or QuPath GeoJSON: {reason}") from None
    except (ElementTree.ParseError, json.JSONDecodeError) as error:
        reason = str(error)
    except RecursionError:
        reason = "nested too deeply"
    except UnicodeDecodeError:
        reason = "its text is neither UTF-8 nor UTF-16"
    except (LookupError, ValueError):  # of the parsers
        reason = "its encoding is unknown, or a number has thousands of digits"
    raise WsiFlError(f"{path}: malformed annotation: {reason}")


def _is_xml(data: bytes) -> bool:
    if data.startswith(_UTF16):
        return data[2:].replace(b"\0", b"").lstrip().startswith(b"<")
    return data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def _repair_ring(shell: _Ring, holes: Sequence[_Ring] = ()) -> list[_Geometry]:
    """Return the valid polygons of a ring [n, 2] and its holes; [] for fewer than three points."""
    if any(not np.isfinite(ring).all() for ring in (shell, *holes)):
        raise _FormatError("a coordinate is not a finite number")
    if len(shell) < 3:
        return []
    polygon = shapely.Polygon(shell, [ring for ring in holes if len(ring) >= 3])
    if not polygon.is_valid:
        for ring in (shell, *holes):
            _refuse_tangled(ring)
        polygon = shapely.make_valid(polygon, method="structure", keep_collapsed=False)
    return list_polygons(polygon)


def _refuse_tangled(ring: _Ring) -> None:
    """Refuse an outline with implausibly many self-crossings, by a sample of its sides."""
    n = len(ring)
    if n * (n - 1) // 2 <= _MAX_CROSSINGS:
        return
    sides = shapely.linestrings(np.stack([ring, np.roll(ring, -1, 0)], 1))
    probes = sides[np.linspace(0, n - 1, _SAMPLED_SIDES).astype(np.int64)]
    hits, _ = shapely.STRtree(sides).query(probes, predicate="intersects")
    crossings = max(0, len(hits) - 3 * len(probes)) * n // (2 * len(probes))  # itself and its two neighbours
    if crossings > _MAX_CROSSINGS:
        raise _FormatError(
            f"an outline of {n} points crosses itself about {crossings} times, which no drawing does; draw it anew"
        )


def _parse_asap(data: bytes, path: Path) -> Outlines:
    root = ElementTree.fromstring(data)
    if root.tag != "ASAP_Annotations":
        raise _FormatError(f"its root element is {root.tag}, not ASAP_Annotations")
    outlines = Outlines(path)
    for annotation in root.iter("Annotation"):
        points = annotation.findall("Coordinates/Coordinate")
        points.sort(key=lambda point: _parse_number(point, "Order", "0"))
        ring = np.array([(_parse_number(point, "X"), _parse_number(point, "Y")) for point in points], np.float64)
        kind = annotation.get("Type", "")
        if kind.casefold() in _ASAP_AREAS:
            if kind.casefold() == "rectangle" and len(ring) == 2:  # two corners
                ring = shapely.get_coordinates(shapely.box(*ring.ravel()))
            outlines.add(annotation.get("PartOfGroup", ""), _repair_ring(ring.reshape(-1, 2)))
        elif kind.casefold() in _ASAP_POINTS:
            outlines.omissions["point"] += len(ring)
        elif kind.casefold() == "measurement":
            outlines.omissions["measurement"] += 1
        else:
            outlines.omissions[f'annotation of type "{shorten_text(kind, 20)}"'] += 1
    return outlines


def _parse_number(point: ElementTree.Element, name: str, default: str | None = None) -> float:
    text = point.get(name, default)
    if text is None:
        raise _FormatError(f"a Coordinate has no {name}")
    try:
        return float(text)
    except ValueError:
        raise _FormatError(f"a Coordinate has {name} = {text!r}, which is no number") from None


def _parse_geojson(data: bytes, path: Path) -> Outlines:
    document, outlines = json.loads(data), Outlines(path)
    if not isinstance(document, list):
        document = _require_kind(dict, document, "it").get("features", [document])
    for value in _require_kind(list, document, "features"):
        _add_feature(_require_kind(dict, value, "a feature"), outlines)
    return outlines


def _add_feature(feature: Mapping[str, Any], outlines: Outlines) -> None:
    """Add the outlines of a feature and its children."""
    if _require_key(feature, "type", "a feature") != "Feature":
        return _add_geometry(feature, "", outlines)
    properties = _require_kind(dict, feature.get("properties") or {}, "properties")
    kind = _object_type(feature, properties)
    if kind is not None or "classification" in properties:
        outlines.corner = "bounds"
    # QuPath leaves out the geometry of objects without one
    geometry = _require_key(feature, "geometry", "a feature") if kind is None else feature.get("geometry")
    if kind in _ANALYSIS_KINDS:
        outlines.omissions[_ANALYSIS_KINDS[kind]] += bool(_ANALYSIS_KINDS[kind])
    elif geometry is None:
        outlines.omissions["object without a shape"] += 1
    else:
        _add_geometry(geometry, _geojson_group(properties), outlines)
    children = properties.get("childObjects", properties.get("children"))
    for child in children if isinstance(children, list) else ():
        if isinstance(child, dict) and "type" in child:
            _add_feature(child, outlines)
    return None


def _object_type(feature: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """Return QuPath's object type of a feature; None for features of other tools."""
    for key in ("objectType", "object_type"):
        if key in properties:
            return str(properties[key])
    for value in (str(properties.get("type")), str(feature.get("id"))):
        if value in _ANALYSIS_KINDS or value in _ANNOTATION_KINDS:
            return value
    return None


def _geojson_group(properties: Mapping[str, Any]) -> str:
    """Return QuPath's classification, a derived class as "base: derived", else the object's name.

    Tables of shapes (LazySlide) have it as JSON text, or its name in a column.
    """
    classification = properties.get("classification") or properties.get("classification_name") or ""
    if isinstance(classification, str) and classification.lstrip().startswith("{"):
        with suppress(json.JSONDecodeError):
            classification = json.loads(classification)
    if isinstance(classification, Mapping):
        classification = ": ".join(_class_names(classification))
    return str(classification or properties.get("name") or "")


def _class_names(classification: Mapping[str, Any]) -> list[str]:
    """Return the names of a class of QuPath, the base first: from `name`, `names` or `parentClass`."""
    parent = classification.get("parentClass")
    names = _require_kind(list, classification.get("names") or [], "names")
    name = classification.get("name")
    return [*(_class_names(parent) if isinstance(parent, Mapping) else []), *([str(name)] if name else map(str, names))]


def _add_geometry(value: Any, group: str, outlines: Outlines) -> None:
    geometry = _require_kind(dict, value, "a geometry")
    kind = _require_key(geometry, "type", "a geometry")
    if kind == "GeometryCollection":
        for member in _require_kind(list, _require_key(geometry, "geometries", "a collection"), "geometries"):
            _add_geometry(member, group, outlines)
        return
    if kind not in ("Polygon", "MultiPolygon", "Point", "MultiPoint", "LineString", "MultiLineString"):
        raise _FormatError(f"unknown geometry {kind}")
    coordinates = _require_kind(list, _require_key(geometry, "coordinates", "a geometry"), "coordinates")
    if kind in ("Polygon", "MultiPolygon"):
        parts = [
            _require_kind(list, rings, "a polygon") for rings in ([coordinates] if kind == "Polygon" else coordinates)
        ]
        polygons = [[_parse_ring(ring) for ring in rings] for rings in parts]
        outlines.add(group, [area for rings in polygons if rings for area in _repair_ring(rings[0], rings[1:])])
    elif kind in ("Point", "MultiPoint"):
        outlines.omissions["point"] += 1 if kind == "Point" else len(coordinates)
    else:
        outlines.omissions["line"] += 1


def _parse_ring(value: Any) -> _Ring:
    """Return the points [n, 2] of a ring; a third number of a point is ignored."""
    points = _require_kind(list, value, "a ring")
    for point in points:
        if not isinstance(point, list) or len(point) < 2:
            raise _FormatError(f"a point is {_kind_name(point)}, not a list of two numbers")
        if wrong_values := [value for value in point[:2] if type(value) not in (int, float)]:
            raise _FormatError(f"a coordinate is {_kind_name(wrong_values[0])}, not a number")
    try:
        return np.array([point[:2] for point in points], np.float64).reshape(-1, 2)
    except OverflowError:
        raise _FormatError("a coordinate is not a finite number") from None


def _require_kind(kind: type[_T], value: Any, subject: str) -> _T:
    """Return the value if it is of a kind of JSON; else raise."""
    if not isinstance(value, kind):
        raise _FormatError(f"{subject} is {_kind_name(value)}, not {_JSON_KINDS[kind]}")
    return value


def _require_key(value: Mapping[str, Any], key: str, subject: str) -> Any:
    if key not in value:
        raise _FormatError(f"{subject} has no {key!r}")
    return value[key]


def _kind_name(value: Any) -> str:
    """Return the kind of a JSON value, in words."""
    return _JSON_KINDS.get(type(value), "a number") if not isinstance(value, list) or value else "an empty list"
