"""Outlines drawn by pathologists: ASAP XML and QuPath GeoJSON, told apart by content."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar
from xml.etree import ElementTree

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.system.files import ordinary
from wsi_fl.types import WsiFlError

Outlined: TypeAlias = Literal["tumor", "hole", "unsure", "ignored"]
"""What a group of outlines says of what it holds; nothing that counts where it is ignored."""
_Geometry: TypeAlias = Any
_Ring: TypeAlias = NDArray[np.float64]

_KNOWN: dict[str, Outlined] = {
    **dict.fromkeys(("metastases", "metastasis", "tumor", "tumour", "_0", "_1"), "tumor"),
    **dict.fromkeys(("normal", "exclusion", "_2"), "hole"),
    **dict.fromkeys(("none", "unsure", "ignore*"), "unsure"),
}
"""What Camelyon16, Camelyon17, ASAP and QuPath call them; compared without regard to case."""
_MAX_VERTICES = 128
_MAX_DEPTH = 40
_NO_GROUP = ("", "none")
_NAMED = 5
"""Unknown groups that a message names; it counts the others."""
_NAME_CHARS, _REASON_CHARS = 40, 200
"""The longest name and the longest reason that a message repeats from a file."""
_NOT_DRAWN = {"detection", "cell", "tile", "tma_core"}
"""QuPath's objects that an analysis made, not a person."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MOST_CROSSINGS = 100_000
"""How often an outline may cross itself; repairing it takes time and memory for each crossing."""
_PROBES = 256
"""Sides of an outline that are looked at to estimate how often it crosses itself."""
_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
_T = TypeVar("_T", dict[str, Any], list[Any])


@dataclass(frozen=True)
class Annotations:
    """The outlines of one slide as shapely (Multi)Polygons in level-0 pixels: tumour, its holes taken out, and what
    nobody said what it holds; and how many outlines each group has, as spelled in the file ("" for none)."""

    tumor: _Geometry
    unsure: _Geometry
    groups: Mapping[str, int] = field(default_factory=dict)


def read_annotations(path: Path, named: Mapping[str, Outlined] = MappingProxyType({})) -> Annotations:
    """Return the outlines of an ASAP XML or GeoJSON file.

    Holes are painted last, as Camelyon17 asks: they are taken out of all tumour. An outline without a group
    (ASAP's `None`, QuPath without classification or name) is tumour in a file that names no group at all; in a
    file that does, nobody has said what it is, and it counts as unsure. Outlines that cross themselves are
    repaired so that everything they go around is inside; what has no area is dropped.

    Args:
        named: what groups outline, by name without regard to case, beside those of Camelyon16, Camelyon17, ASAP and
            QuPath.

    Raises:
        WsiFlError: when the file is missing or malformed, or holds a group that nobody knows.
    """
    outlines = list(outlines_of(path))
    groups = Counter(group for group, _ in outlines)
    roles = _KNOWN | {_key(group): role for group, role in named.items()}
    if all(_key(group) in _NO_GROUP for group in groups):
        roles |= dict.fromkeys(_NO_GROUP, "tumor")
    roles.setdefault("", roles.get("none", "unsure"))
    if unknown := sorted({group for group in groups if _key(group) not in roles}):
        names = [_shortened(name, _NAME_CHARS) for name in unknown]
        more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
        raise WsiFlError(
            f"{path}: unknown annotation groups {', '.join([*names[:_NAMED], *more])}; known are {', '.join(roles)}; "
            f'say in tile.groups what each outlines: {{"{names[0]}" = "tumor"}}, or "hole", "unsure", "ignored"'
        )

    def area(role: Outlined) -> _Geometry:
        return shapely.union_all([geometry for group, geometry in outlines if roles[_key(group)] == role])

    holes = area("hole")
    tumor, unsure = (
        shapely.union_all(_polygons(shapely.difference(area(role), holes))) for role in ("tumor", "unsure")
    )
    return Annotations(tumor, unsure, dict(groups))


def _key(group: str) -> str:
    return group.strip().casefold()


def _shortened(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def share_inside(area: Any, xy_l0: NDArray[np.int64], size_l0: float) -> NDArray[np.float32]:
    """Return the exact share float32[n] of squares that lies in a shapely (Multi)Polygon; below 1e-9 is rounding.

    Corners [n, 2] and side of the squares are in level-0 pixels, as the area is.
    """
    tree = shapely.STRtree(_pieces(area))
    left, top = xy_l0[:, 0].astype(np.float64), xy_l0[:, 1].astype(np.float64)
    squares = shapely.box(left, top, left + size_l0, top + size_l0)
    square, piece = tree.query(squares)
    areas = shapely.area(shapely.intersection(squares[square], tree.geometries[piece]))
    share = np.bincount(square, weights=areas, minlength=len(squares)) / size_l0**2
    share[share < 1e-9] = 0
    share[share > 1 - 1e-9] = 1
    return share.astype(np.float32)


def _pieces(geometry: _Geometry) -> list[_Geometry]:
    """Polygons of at most _MAX_VERTICES vertices that make up the geometry: halved until they are small."""
    done: list[_Geometry] = []
    waiting = [(part, 0) for part in _polygons(geometry)]
    while waiting:
        part, depth = waiting.pop()
        if shapely.get_num_coordinates(part) <= _MAX_VERTICES or depth == _MAX_DEPTH:
            done.append(part)
            continue
        left, top, right, bottom = part.bounds
        if right - left > bottom - top:
            middle = (left + right) / 2
            halves = shapely.box([left, middle], top, [middle, right], bottom)
        else:
            middle = (top + bottom) / 2
            halves = shapely.box(left, [top, middle], right, [middle, bottom])
        for half in shapely.intersection(part, halves):
            waiting += [(piece, depth + 1) for piece in _polygons(half)]
    return done


def _polygons(geometry: _Geometry) -> list[_Geometry]:
    """The polygons with area in a geometry of any kind."""
    flat = shapely.get_parts(shapely.get_parts(np.atleast_1d(geometry)))
    return [part for part in flat if part.geom_type == "Polygon" and part.area > 0]


class _Wrong(ValueError):
    """What is wrong with a file, in words for people."""


def outlines_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (group, shapely Polygon) of every outline with area.

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
        reason = _shortened(str(error), _REASON_CHARS)
        raise WsiFlError(f"{path}: not ASAP XML or QuPath GeoJSON: {reason}") from None
    except (ElementTree.ParseError, json.JSONDecodeError) as error:
        reason = str(error)
    except RecursionError:
        reason = "nested too deeply"
    except UnicodeDecodeError:
        reason = "its text is neither UTF-8 nor UTF-16"
    except (LookupError, ValueError):  # of the parsers
        reason = "its encoding is unknown, or a number has thousands of digits"
    else:
        return
    raise WsiFlError(f"{path}: malformed annotation: {reason}")


def _is_xml(data: bytes) -> bool:
    if data.startswith(_UTF16):
        return data[2:].replace(b"\0", b"").lstrip().startswith(b"<")
    return data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def _repaired(shell: _Ring, holes: Sequence[_Ring] = ()) -> list[_Geometry]:
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
    return _polygons(polygon)


def _refuse_tangled(ring: _Ring) -> None:
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


def _asap(data: bytes) -> Iterator[tuple[str, _Geometry]]:
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


def _geojson(data: bytes) -> Iterator[tuple[str, _Geometry]]:
    document = json.loads(data)
    if not isinstance(document, list):
        document = _a(dict, document, "it").get("features", [document])
    for one in _a(list, document, "features"):
        feature = _a(dict, one, "a feature")
        is_feature = _of(feature, "type", "a feature") == "Feature"
        properties = _a(dict, feature.get("properties") or {}, "properties") if is_feature else {}
        geometry = _of(feature, "geometry", "a feature") if is_feature else feature
        if geometry is None or str(properties.get("objectType")) in _NOT_DRAWN:
            continue
        for polygon in _geojson_polygons(geometry):
            yield _geojson_group(properties), polygon


def _geojson_group(properties: Mapping[str, Any]) -> str:
    """QuPath's classification (a derived class counts as its base), else the object's name."""
    classification = properties.get("classification") or ""
    if isinstance(classification, Mapping):
        names = _a(list, classification.get("names") or [""], "names")
        classification = classification.get("name") or names[0]
    return str(classification or properties.get("name") or "")


def _geojson_polygons(given: Any) -> Iterator[_Geometry]:
    geometry = _a(dict, given, "a geometry")
    kind = _of(geometry, "type", "a geometry")
    if kind == "GeometryCollection":
        for member in _a(list, _of(geometry, "geometries", "a collection"), "geometries"):
            yield from _geojson_polygons(member)
    elif kind in ("Polygon", "MultiPolygon"):
        found = _a(list, _of(geometry, "coordinates", "a geometry"), "coordinates")
        for one in [found] if kind == "Polygon" else found:
            rings = [_ring(ring) for ring in _a(list, one, "a polygon")]
            if rings:
                yield from _repaired(rings[0], rings[1:])
    elif kind not in ("Point", "MultiPoint", "LineString", "MultiLineString"):
        raise _Wrong(f"unknown geometry {kind}")


def _ring(given: Any) -> _Ring:
    """The points [n, 2] of a ring; a third number of a point is passed over."""
    points = _a(list, given, "a ring")
    for point in points:
        if not isinstance(point, list) or len(point) < 2:
            raise _Wrong(f"a point is {_kind(point)}, not a list of two numbers")
        if strange := [value for value in point[:2] if type(value) not in (int, float)]:
            raise _Wrong(f"a coordinate is {_kind(strange[0])}, not a number")
    try:
        return np.array([point[:2] for point in points], np.float64).reshape(-1, 2)
    except OverflowError:
        raise _Wrong("a coordinate is not a finite number") from None


def _a(kind: type[_T], value: Any, what: str) -> _T:
    """The value, which must be of a kind of JSON."""
    if not isinstance(value, kind):
        raise _Wrong(f"{what} is {_kind(value)}, not {_KINDS[kind]}")
    return value


def _of(value: Mapping[str, Any], key: str, what: str) -> Any:
    if key not in value:
        raise _Wrong(f"{what} has no {key!r}")
    return value[key]


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    return _KINDS.get(type(value), "a number") if not isinstance(value, list) or value else "an empty list"
