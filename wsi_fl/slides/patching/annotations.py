"""Pathologists' outlines on a slide, by the meaning of their groups, and their exact share of patches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.slides.patching.outline_files import list_polygons, read_outlines
from wsi_fl.slides.patching.outline_placement import Origin, SlideGeometry, place_outlines, transform_area
from wsi_fl.types import WsiFlError, shorten_text

OutlineRole: TypeAlias = Literal["tumor", "hole", "unsure", "ignored"]
"""The meaning of a group of outlines."""
_Geometry: TypeAlias = Any

_KNOWN_GROUPS: dict[str, OutlineRole] = {
    **dict.fromkeys(("metastases", "metastasis", "tumor", "tumour", "_0", "_1"), "tumor"),
    **dict.fromkeys(("normal", "exclusion", "_2"), "hole"),
    **dict.fromkeys(("none", "unsure", "ignore*"), "unsure"),
    "region*": "ignored",
}
"""Groups of Camelyon16, Camelyon17, ASAP and QuPath, in lower case."""
_MAX_VERTICES = 128
_MAX_DEPTH = 40
_UNGROUPED = ("", "none")
_MAX_NAMED_GROUPS = 5
"""Unknown groups that a message names; others are counted."""
_MAX_NAME_CHARS = 40
"""Length of a file's names in messages."""


@dataclass(frozen=True)
class Annotations:
    """The outlines of one slide as shapely (Multi)Polygons in level-0 pixels: tumour without its holes, and areas of
    unknown content; the number of outlines of each group, as spelled in the file ("" for none); the number of objects
    that are no outlined areas, by kind; and notes on the file, a line each."""

    tumor: _Geometry
    unsure: _Geometry
    groups: Mapping[str, int] = field(default_factory=dict)
    omissions: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_annotations(
    path: Path,
    group_roles: Mapping[str, OutlineRole] = MappingProxyType({}),
    slide_geometry: SlideGeometry | None = None,
    origin: Origin = None,
) -> Annotations:
    """Return the outlines of an ASAP XML or GeoJSON file.

    Holes come last, as Camelyon17 prescribes: they are subtracted from all tumour. An outline without a group (ASAP's
    `None`, QuPath without classification or name) is tumour in a file without groups, and unsure in other files,
    unless `group_roles` has a meaning of `None`.
    Outlines that cross themselves are repaired so that everything they surround is inside; those without area are
    left out.

    Args:
        group_roles: meaning of groups by name, in any case, besides those of Camelyon16, Camelyon17, ASAP and QuPath. A
            derived class of QuPath ("Tumor: Positive") is its base ("Tumor"), unless it is named.
        slide_geometry: the slide on which the outlines are placed; without it they stay as they are.
        origin: the corner of the slide from which they count.

    Raises:
        WsiFlError: when the file is missing or malformed, in another unit than level-0 pixels of the slide, or has an
            unknown group.
    """
    outlines = read_outlines(path)
    groups = Counter(group for group, _ in outlines.areas)
    roles = _assign_roles(path, groups, group_roles)

    def unite_role(role: OutlineRole) -> _Geometry:
        return shapely.union_all([geometry for group, geometry in outlines.areas if roles[group] == role])

    corner, notes = (0, 0), [outlines.remark] if outlines.remark else []
    tumor, holes = unite_role("tumor"), unite_role("hole")
    if slide_geometry is not None:
        corner, remarks = place_outlines(outlines, slide_geometry, origin, tumor)
        notes += remarks
    tumor, unsure = (
        transform_area(shapely.union_all(list_polygons(shapely.difference(area, holes))), corner)
        for area in (tumor, unite_role("unsure"))
    )
    lines = tuple(f"{path.name}: {note}" for note in notes)
    return Annotations(tumor, unsure, dict(groups), {k: n for k, n in outlines.omissions.items() if n}, lines)


def _assign_roles(
    path: Path, groups: Mapping[str, int], group_roles: Mapping[str, OutlineRole]
) -> dict[str, OutlineRole]:
    """Return the meaning of each group of a file."""
    is_ungrouped = all(_group_key(group) in _UNGROUPED for group in groups)
    known_roles = _KNOWN_GROUPS | ({"none": "tumor"} if is_ungrouped else {})
    roles = known_roles | {_group_key(group): role for group, role in group_roles.items()}
    roles.setdefault("", roles["none"])
    keys = {group: _group_key(group) for group in groups}
    keys = {group: key if key in roles else key.partition(":")[0].strip() for group, key in keys.items()}
    if unknown := sorted(group for group, key in keys.items() if key not in roles):
        names = [shorten_text(name, _MAX_NAME_CHARS) for name in unknown]
        more = [f"and {len(names) - _MAX_NAMED_GROUPS} more"] if len(names) > _MAX_NAMED_GROUPS else []
        raise WsiFlError(
            f"{path}: unknown annotation groups {', '.join([*names[:_MAX_NAMED_GROUPS], *more])}; "
            f"known are {', '.join(roles)}; "
            f'set in tile.groups what each outlines: {{"{names[0]}" = "tumor"}}, or "hole", "unsure", "ignored"'
        )
    return {group: roles[key] for group, key in keys.items()}


def _group_key(group: str) -> str:
    return group.strip().casefold()


def share_inside(area: Any, xy_l0: NDArray[np.int64], size_l0: float) -> NDArray[np.float32]:
    """Return the exact share float32[n] of squares inside a shapely (Multi)Polygon; below 1e-9 is rounding.

    Corners [n, 2] and side of the squares, and the area, are in level-0 pixels.
    """
    tree = shapely.STRtree(_split_geometry(area))
    x_min, y_min = xy_l0[:, 0].astype(np.float64), xy_l0[:, 1].astype(np.float64)
    squares = shapely.box(x_min, y_min, x_min + size_l0, y_min + size_l0)
    square, piece = tree.query(squares)
    areas = shapely.area(shapely.intersection(squares[square], tree.geometries[piece]))
    share = np.bincount(square, weights=areas, minlength=len(squares)) / size_l0**2
    share[share < 1e-9] = 0
    share[share > 1 - 1e-9] = 1
    return share.astype(np.float32)


def _split_geometry(geometry: _Geometry) -> list[_Geometry]:
    """Split a geometry into polygons of at most _MAX_VERTICES vertices, by halves."""
    small_parts: list[_Geometry] = []
    queue = [(part, 0) for part in list_polygons(geometry)]
    while queue:
        part, depth = queue.pop()
        if shapely.get_num_coordinates(part) <= _MAX_VERTICES or depth == _MAX_DEPTH:
            small_parts.append(part)
            continue
        x_min, y_min, x_max, y_max = part.bounds
        if x_max - x_min > y_max - y_min:
            middle = (x_min + x_max) / 2
            halves = shapely.box([x_min, middle], y_min, [middle, x_max], y_max)
        else:
            middle = (y_min + y_max) / 2
            halves = shapely.box(x_min, [y_min, middle], x_max, [middle, y_max])
        for half in shapely.intersection(part, halves):
            queue += [(piece, depth + 1) for piece in list_polygons(half)]
    return small_parts
