"""Outlines drawn by pathologists: ASAP XML and QuPath GeoJSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.slides.patching.outlines import Geometry, outlines_of, polygons, shortened
from wsi_fl.types import WsiFlError

Outlined: TypeAlias = Literal["tumor", "hole", "unsure", "ignored"]
"""What a group of outlines says of what it holds; nothing that counts where it is ignored."""
_OUTCOMES: tuple[Outlined, Outlined] = ("tumor", "unsure")
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
_NAME_CHARS = 40
"""The longest name that a message repeats from a file."""


@dataclass(frozen=True)
class Annotations:
    """The outlines of one slide, in level-0 pixels.

    Attributes:
        tumor: shapely (Multi)Polygon, holes taken out.
        unsure: (Multi)Polygon of outlines that do not say what they hold.
        groups: how many outlines each group has, as spelled in the file ("" for none).
    """

    tumor: Geometry
    unsure: Geometry
    groups: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def tumor_tree(self) -> Geometry:
        """An STRtree of small pieces that make up the tumour."""
        return shapely.STRtree(_pieces(self.tumor))

    @cached_property
    def unsure_tree(self) -> Geometry:
        """An STRtree of small pieces that make up the unsure area."""
        return shapely.STRtree(_pieces(self.unsure))


def read_annotations(path: Path, named: Mapping[str, Outlined] = MappingProxyType({})) -> Annotations:
    """Return the outlines of an ASAP XML or GeoJSON file, told apart by content.

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
    unknown = sorted({group for group in groups if _key(group) not in roles})
    if unknown:
        example = shortened(unknown[0], _NAME_CHARS)
        raise WsiFlError(
            f"{path}: unknown annotation groups {_counted(unknown)}; known are {', '.join(roles)}; say in tile.groups "
            f'what each outlines: {{"{example}" = "tumor"}}, or "hole", "unsure", "ignored"'
        )

    def area(role: Outlined) -> Geometry:
        return shapely.union_all([geometry for group, geometry in outlines if roles[_key(group)] == role])

    holes = area("hole")
    tumor, unsure = (_polygonal(shapely.difference(area(role), holes)) for role in _OUTCOMES)
    return Annotations(tumor, unsure, dict(groups))


def _counted(unknown: Sequence[str]) -> str:
    """Names as far as a line has room for them, then how many more there are."""
    more = [f"and {len(unknown) - _NAMED} more"] if len(unknown) > _NAMED else []
    return ", ".join([shortened(name, _NAME_CHARS) for name in unknown[:_NAMED]] + more)


def tumor_fraction(annotations: Annotations, xy_l0: NDArray[np.int64], size_l0: float) -> NDArray[np.float32]:
    """Exact share float32[n] of each square's area that is tumour.

    Args:
        xy_l0: [n, 2] top-left corners in level-0 pixels.
        size_l0: side of the squares in level-0 pixels.
    """
    return _share(annotations.tumor_tree, xy_l0, size_l0)


def unsure_fraction(
    annotations: Annotations, xy_l0: NDArray[np.int64], size_l0: float
) -> NDArray[np.float32]:
    """Exact share float32[n] of each square's area inside outlines that do not say what they hold."""
    return _share(annotations.unsure_tree, xy_l0, size_l0)


def _share(tree: Geometry, xy_l0: NDArray[np.int64], size_l0: float) -> NDArray[np.float32]:
    """Covered share of each square; below a billionth is rounding, not area."""
    left, top = xy_l0[:, 0].astype(np.float64), xy_l0[:, 1].astype(np.float64)
    squares = shapely.box(left, top, left + size_l0, top + size_l0)
    square, piece = tree.query(squares)
    areas = shapely.area(shapely.intersection(squares[square], tree.geometries[piece]))
    share = np.bincount(square, weights=areas, minlength=len(squares)) / size_l0**2
    share[share < 1e-9] = 0
    share[share > 1 - 1e-9] = 1
    return share.astype(np.float32)


def _pieces(geometry: Geometry) -> list[Geometry]:
    """Polygons of at most _MAX_VERTICES vertices that make up the geometry: halved until they are small."""
    done: list[Geometry] = []
    waiting = [(part, 0) for part in polygons(geometry)]
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
            waiting += [(piece, depth + 1) for piece in polygons(half)]
    return done


def _key(group: str) -> str:
    return group.strip().casefold()


def _polygonal(geometry: Geometry) -> Geometry:
    """The polygons of a geometry as one, without lines and points."""
    return shapely.union_all(polygons(geometry))
