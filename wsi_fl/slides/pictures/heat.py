"""Probabilities over a slide: where its patches lie, the regions above a threshold, the slide's score."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.slides.patching.grid import size_in_l0
from wsi_fl.types import GridSpec

THRESHOLD = 0.5
"""From here on a patch is outlined: of two classes it is the more likely one. The probabilities themselves are in
patches.csv, for whoever has a better operating point."""
TOP_K = 20
"""Patches whose mean is a slide's score: enough that one odd patch does not decide, few enough for a small lesion."""


@dataclass(frozen=True)
class Heat:
    """What a model says of the n patches of one slide.

    With two classes every patch has the probability of the second ("tumor"). With more, every patch has its most
    probable class and that probability, and each class has regions of its own.

    Attributes:
        boxes_l0: int64[n, 4] (left, top, right, bottom) in level-0 pixels.
        classes: names of all classes.
        probabilities: float64[n, classes].
        threshold: patches of this probability or more are outlined.
    """

    boxes_l0: NDArray[np.int64]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float64]
    threshold: float = THRESHOLD

    @cached_property
    def kind(self) -> NDArray[np.int64]:
        """[n] the class whose probability a patch shows, as a position in `classes`."""
        if len(self.classes) == 2:
            return np.ones(len(self.probabilities), np.int64)
        best: NDArray[np.int64] = self.probabilities.argmax(axis=1).astype(np.int64)
        return best

    @cached_property
    def probability(self) -> NDArray[np.float64]:
        """[n] the probability of `kind`."""
        p: NDArray[np.float64] = self.probabilities[np.arange(len(self.kind)), self.kind]
        return p

    @property
    def above(self) -> NDArray[np.bool_]:
        """[n] which patches reach the threshold."""
        return self.probability >= self.threshold

    @property
    def shown(self) -> tuple[int, ...]:
        """The classes that have regions, as positions in `classes`."""
        return (1,) if len(self.classes) == 2 else tuple(range(len(self.classes)))

    @cached_property
    def regions(self) -> list[Region]:
        """The connected regions of patches above the threshold, largest first."""
        return sorted(
            (region for kind in self.shown for region in _regions(self, kind)),
            key=lambda region: -region.polygon.area,
        )


@dataclass(frozen=True)
class Region:
    """Patches of one class above the threshold that share edges.

    Attributes:
        kind: position in the classes.
        polygon: valid shapely Polygon in level-0 pixels, its exterior counterclockwise by signed area (RFC 7946).
        n_patches: how many patches have their centre in it.
        mean, highest: of their probabilities.
    """

    kind: int
    polygon: Any
    n_patches: int
    mean: float
    highest: float


def patch_boxes(
    xy_l0: NDArray[np.int64], spec: GridSpec, slide_mpp: float, size_l0: tuple[int, int]
) -> NDArray[np.int64]:
    """Boxes int64[n, 4] (left, top, right, bottom) of grid positions, cut off at the slide's edge.

    Where the grid's step is a fraction of a pixel, a patch ends exactly where its neighbour begins, so that
    unions of patches have no slivers.

    Example:
        >>> patch_boxes(np.array([[0, 0], [208, 0]]), GridSpec(96, 0.5, 96), 0.2308, (400, 400)).tolist()
        [[0, 0, 208, 208], [208, 0, 400, 208]]
    """
    step = spec.stride_px * spec.mpp / slide_mpp
    cell = np.round(xy_l0 / step)
    if spec.stride_px == spec.size_px:
        far = np.round((cell + 1) * step)
    else:
        far = np.round(cell * step + size_in_l0(spec, slide_mpp))
    far = np.minimum(far.astype(np.int64), np.array(size_l0))
    return np.concatenate([xy_l0, far], axis=1)


def score(heat: Heat, kind: int, top_k: int = TOP_K) -> dict[str, float]:
    """One class over the slide: highest probability, mean of the top_k highest, fraction of all patches above.

    Of more than two classes, only the patches in which the class is the most probable count.
    """
    mine = heat.kind == kind
    p = np.sort(heat.probability[mine])[::-1]
    return {
        "max": float(p[0]) if len(p) else 0.0,
        "top_k_mean": float(p[:top_k].mean()) if len(p) else 0.0,
        "fraction": float((heat.above & mine).mean()),
    }


def leading(heat: Heat) -> int:
    """The class a slide's score speaks of: the second of two, else the one that most patches belong to."""
    if len(heat.classes) == 2:
        return 1
    return int(np.bincount(heat.kind[heat.above], minlength=len(heat.classes)).argmax())


def _regions(heat: Heat, kind: int) -> list[Region]:
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
        Region(kind, polygon, len(mine), float(mine.mean()), float(mine.max()))
        for k, polygon in enumerate(polygons)
        for mine in (p[patch[which == k]],)
    ]
