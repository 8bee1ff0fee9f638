"""What pathologists outlined on a slide, by what their groups mean, and its exact share of patches."""

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

from wsi_fl.slides.patching.outline_files import outlines_of, polygons_of, shorten
from wsi_fl.slides.patching.placing import Ground, Origin, place, transform
from wsi_fl.types import WsiFlError

Outlined: TypeAlias = Literal["tumor", "hole", "unsure", "ignored"]
"""What a group of outlines says of what it holds; nothing that counts where it is ignored."""
_Geometry: TypeAlias = Any

_KNOWN: dict[str, Outlined] = {
    **dict.fromkeys(("metastases", "metastasis", "tumor", "tumour", "_0", "_1"), "tumor"),
    **dict.fromkeys(("normal", "exclusion", "_2"), "hole"),
    **dict.fromkeys(("none", "unsure", "ignore*"), "unsure"),
    "region*": "ignored",
}
"""What Camelyon16, Camelyon17, ASAP and QuPath call them; compared without regard to case."""
_MAX_VERTICES = 128
_MAX_DEPTH = 40
_NO_GROUP = ("", "none")
_NAMED = 5
"""Unknown groups that a message names; it counts the others."""
_NAME_CHARS = 40
"""The longest name that a message repeats from a file."""


@dataclass(frozen=True)
class Annotations:
    """The outlines of one slide as shapely (Multi)Polygons in level-0 pixels: tumour, its holes taken out, and what
    nobody said what it holds; how many outlines each group has, as spelled in the file ("" for none); how many things
    of the file are no outlined areas, by kind; and what people should know of the file, a line each."""

    tumor: _Geometry
    unsure: _Geometry
    groups: Mapping[str, int] = field(default_factory=dict)
    omissions: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_annotations(
    path: Path,
    named: Mapping[str, Outlined] = MappingProxyType({}),
    ground: Ground | None = None,
    origin: Origin = None,
) -> Annotations:
    """Return the outlines of an ASAP XML or GeoJSON file.

    Holes are painted last, as Camelyon17 asks: they are taken out of all tumour. An outline without a group
    (ASAP's `None`, QuPath without classification or name) is tumour in a file that names no group at all; in a
    file that does, nobody has said what it is, and it counts as unsure. Outlines that cross themselves are
    repaired so that everything they go around is inside; what has no area is left out.

    Args:
        named: what groups outline, by name without regard to case, beside those of Camelyon16, Camelyon17, ASAP and
            QuPath. A class that QuPath derives ("Tumor: Positive") is its base ("Tumor"), unless it is named.
        ground: the slide, on which the outlines are moved to where they belong; without it they stay as they are.
        origin: from which corner of it they count.

    Raises:
        WsiFlError: when the file is missing or malformed, in another unit than level-0 pixels of the slide, or holds a
            group that nobody knows.
    """
    outlines = outlines_of(path)
    groups = Counter(group for group, _ in outlines.areas)
    meaning = _meaning_of(path, groups, named)

    def area(role: Outlined) -> _Geometry:
        return shapely.union_all([geometry for group, geometry in outlines.areas if meaning[group] == role])

    corner, notes = (0, 0), [outlines.remark] if outlines.remark else []
    tumor, holes = area("tumor"), area("hole")
    if ground is not None:
        corner, remarks = place(outlines, ground, origin, tumor)
        notes += remarks
    tumor, unsure = (
        transform(shapely.union_all(polygons_of(shapely.difference(each, holes))), corner)
        for each in (tumor, area("unsure"))
    )
    lines = tuple(f"{path.name}: {note}" for note in notes)
    return Annotations(tumor, unsure, dict(groups), {k: n for k, n in outlines.omissions.items() if n}, lines)


def _meaning_of(path: Path, groups: Mapping[str, int], named: Mapping[str, Outlined]) -> dict[str, Outlined]:
    """What each group of a file outlines."""
    roles = _KNOWN | {_key(group): role for group, role in named.items()}
    if all(_key(group) in _NO_GROUP for group in groups):
        roles |= dict.fromkeys(_NO_GROUP, "tumor")
    roles.setdefault("", roles.get("none", "unsure"))
    keys = {group: _key(group) for group in groups}
    keys = {group: key if key in roles else key.partition(":")[0].strip() for group, key in keys.items()}
    if unknown := sorted(group for group, key in keys.items() if key not in roles):
        names = [shorten(name, _NAME_CHARS) for name in unknown]
        more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
        raise WsiFlError(
            f"{path}: unknown annotation groups {', '.join([*names[:_NAMED], *more])}; known are {', '.join(roles)}; "
            f'say in tile.groups what each outlines: {{"{names[0]}" = "tumor"}}, or "hole", "unsure", "ignored"'
        )
    return {group: roles[key] for group, key in keys.items()}


def _key(group: str) -> str:
    return group.strip().casefold()


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
    waiting = [(part, 0) for part in polygons_of(geometry)]
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
            waiting += [(piece, depth + 1) for piece in polygons_of(half)]
    return done
