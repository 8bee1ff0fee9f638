"""What lies over a slide in `view`: what the site's table and stores say of it, and what models do."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.slides.patching.annotations import read_annotations
from wsi_fl.slides.patching.grid import size_in_l0
from wsi_fl.slides.patching.patches import PlanParams, plan_slide
from wsi_fl.slides.patching.quality import KINDS
from wsi_fl.slides.patching.survey import ground_of
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.tile import read_set_aside
from wsi_fl.stages.prepare.tile_plans import spec_of, tissue_of
from wsi_fl.stages.site.data import open_bags, open_store
from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.fields import read_marked
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import read_json
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError
from wsi_fl.viewer.gallery import Layer, Overlay, finite

_NO_ROWS = np.empty(0, np.int64)
_ATTENTION = "attention"
_DECIMALS = 4


def _outlines(rings: Iterable[NDArray[np.float64]]) -> Layer:
    """A layer of closed lines through points [m, 2] each."""
    return {"rings": [_flat(ring) for ring in rings if len(ring) > 2]}


def _tissue_rings(mask: NDArray[np.bool_], downsample: float) -> list[NDArray[np.float64]]:
    """The edges [m, 2] of a mask bool[h, w] in level-0 pixels, thinned to a quarter of a pixel of the mask."""
    from skimage.measure import approximate_polygon, find_contours

    edges = find_contours(np.pad(mask.astype(np.float32), 1), 0.5)
    # Row and column count from the middle of a pixel, and from before the frame of one pixel.
    return [(approximate_polygon(edge, 0.25)[:, ::-1] - 0.5) * downsample for edge in edges]


def patches(
    xy_l0: NDArray[np.int64],
    side_l0: float,
    group: NDArray[np.int64],
    groups: Sequence[str],
    *,
    first: int = 0,
    crossed: bool = False,
) -> Layer:
    """Return a layer of squares with top-left corners [n, 2], coloured by their group [n], a position in `groups`.

    `first` is the colour of the first group, after those of another layer; squares may be crossed out.
    """
    said = {"group": group.tolist(), "groups": list(groups), "first": first, "crossed": crossed}
    return {"xy": _flat(xy_l0), "side": float(side_l0), **said}


def values(
    xy_l0: NDArray[np.int64], side_l0: float, columns: Mapping[str, NDArray[np.float64]], shown: str
) -> Layer:
    """Return a layer of squares coloured by a column of values [n] from 0 to 1 that people choose; first by `shown`."""
    rounded = [[*map(finite, np.round(column, _DECIMALS).tolist())] for column in columns.values()]
    names = list(columns)
    return {
        "xy": _flat(xy_l0),
        "side": float(side_l0),
        "columns": names,
        "values": rounded,
        "shown": names.index(shown),
    }


def _flat(points: NDArray[Any]) -> list[int]:
    found: list[int] = np.round(points).astype(np.int64).ravel().tolist()
    return found


class SiteLayers:
    """The layers that a site's own table and stores have for its slides; `store` and `mosaic` are what there is of it.

    Raises:
        WsiFlError: when a store is damaged, or another site's.
    """

    def __init__(self, study: Study, site: str, pipeline: Pipeline) -> None:
        self._origin = study.site(site).annotations_origin
        self._pipeline, self._found_by = pipeline, tissue_of(study, pipeline, self._origin)
        self.store: PatchStore | None = None
        self.mosaic: BagStore | None = None
        self._set_aside: Mapping[str, Mapping[str, int]] = {}
        """Slide → how many of its patches were set aside for which fault."""
        self._rows: Mapping[str, NDArray[np.int64]] = {}
        self._bags: Mapping[str, int] = {}
        self._reading = Lock()
        if study.store(site).exists():
            self.store = open_store(study, site)
            self._set_aside = read_set_aside(study.store(site).parent / "quality.csv")
            self._rows = _rows_by_slide(self.store.table.slide)
        if study.mosaic(site).exists():
            self.mosaic = open_bags(study, site, "mosaics")
            self._bags = {str(name): k for k, name in enumerate(self.mosaic.table.slide)}

    @property
    def _spec(self) -> GridSpec:
        """The grid of the site's patches; where it has none yet, the pipeline's."""
        return self.store.meta.spec if self.store is not None else spec_of(self._pipeline)

    def over(self, record: SlideRecord) -> list[Overlay]:
        """Return the layers of a slide, in the order in which they are drawn."""
        slide = record.slide
        layers: list[Overlay] = []
        if slide in self._rows:
            layers.append(Overlay("kept patches", "patches", partial(self._of_store, slide)))
            if self._set_aside.get(slide):
                layers.append(Overlay("set aside", "patches", partial(self._aside, slide)))
        if self.mosaic is not None and slide in self._bags:
            draw = partial(_mosaic, self.mosaic, self._bags[slide])
            layers.append(Overlay("mosaic", "patches", draw))
        layers.append(Overlay("tissue", "outlines", partial(self._tissue, record)))
        if record.annotation is not None:
            layers.append(Overlay("annotation", "outlines", partial(self._annotation, record.annotation)))
        return layers

    def note(self, slide: str) -> str:
        """Return in a few words what the stores kept of a slide, and why nothing."""
        parts: list[str] = []
        if (store := self.store) is not None:
            rows = self._rows.get(slide, _NO_ROWS)
            labels = np.bincount(store.table.label[rows], minlength=len(store.meta.classes))
            counts = [f"{n} {name}" for n, name in zip(labels, store.meta.classes, strict=True) if n]
            faults = ", ".join(f"{n} {kind}" for kind, n in self._set_aside.get(slide, {}).items())
            none = f"no patch kept: all set aside ({faults})" if faults else "no patch kept"
            parts = [", ".join(counts) or none, *np.unique(store.table.split[rows]).tolist()]
        if self.mosaic is not None and slide in self._bags:
            parts.append(f"mosaic of {self.mosaic.sizes[self._bags[slide]]}")
        return " · ".join(parts)

    def _of_store(self, name: str, slide: Slide) -> Layer:
        assert self.store is not None
        table, rows = self.store.table, self._rows[name]
        side_l0 = size_in_l0(self._spec, slide.mpp)
        return patches(table.xy_l0[rows], side_l0, table.label[rows], self.store.meta.classes)

    def _aside(self, name: str, slide: Slide) -> Layer:
        """The patches that were set aside; a fault has the same colour on each slide, and is no class."""
        assert self.store is not None
        with self._reading:
            aside = read_marked(self.store.shard(name), "aside")
        groups = list(dict.fromkeys([*KINDS, *(why for _, _, why in aside)]))
        corners = np.array([(x, y) for x, y, _ in aside], np.int64).reshape(-1, 2)
        reason = np.array([groups.index(why) for _, _, why in aside], np.int64)
        after = len(self.store.meta.classes)
        return patches(corners, size_in_l0(self._spec, slide.mpp), reason, groups, first=after, crossed=True)

    def _tissue(self, record: SlideRecord, slide: Slide) -> Layer:
        """The tissue as `tile` and `predict` find it, which do not ask what the slide is labelled with for that."""
        plain = replace(record, annotation=None, supervision="negative", positive=False)
        params = PlanParams(min_tissue=self._pipeline.tile.min_tissue, tissue=self._found_by)
        reader = self._pipeline.slides.reader
        check_opens_safely(record.path, record.mpp_override, reader)
        plan = plan_slide(plain, self._spec, params, reader=reader)
        return _outlines(_tissue_rings(plan.tissue, plan.downsample))

    def _annotation(self, path: Path, slide: Slide) -> Layer:
        """The outlines of tumour, and those of which nobody said what they hold."""
        ground = ground_of(slide, replace(self._found_by, masks=""))
        found = read_annotations(path, self._pipeline.tile.groups, ground, self._origin)
        rings = shapely.get_rings(shapely.get_parts([found.tumor, found.unsure]))
        return _outlines(shapely.get_coordinates(ring) for ring in rings)


def _rows_by_slide(slides: NDArray[np.str_]) -> dict[str, NDArray[np.int64]]:
    order = np.argsort(slides, kind="stable")
    names, first = np.unique(slides[order], return_index=True)
    return dict(zip(names.tolist(), np.split(order, first[1:]), strict=True)) if len(names) else {}


def _mosaic(store: BagStore, bag: int, slide: Slide) -> Layer:
    """The patches of a bag; those of imported features may lie nobody knows where."""
    found = store.bag(bag)
    if not found.placed:
        raise WsiFlError(f"{store.path.name}: the places of these features' patches are unknown")
    side_l0 = size_in_l0(store.meta.spec, slide.mpp)
    return patches(found.xy_l0, side_l0, np.zeros(len(found.xy_l0), np.int64), ["mosaic"])


@dataclass(frozen=True)
class Prediction:
    """What `predict` wrote of one slide: the folder with its files, and the document `score.json`."""

    folder: Path
    score: Mapping[str, Any]

    @property
    def slide(self) -> str:
        return str(self.score["slide"])

    @property
    def site(self) -> str:
        """The site whose models answered."""
        return str(self.score["site"])

    @property
    def value(self) -> float | None:
        """The number by which slides are ranked; None where there is none."""
        score = self.score
        try:
            if "score" in score:
                return finite(float(score["score"]["top_k_mean"]))
            found = next((score[key] for key in ("probability", "risk", "value") if key in score), None)
            return None if found is None else finite(float(found))
        except (KeyError, TypeError, ValueError):
            raise _foreign(self.folder) from None

    @property
    def words(self) -> str:
        said = self.score.get("class") or self.score.get("target") or "risk"
        return f"{said} {self.value:.2f}" if self.value is not None else str(said)

    def overlays(self) -> list[Overlay]:
        """Return its layers: what is said of each patch, and the attention of models of whole slides.

        Patches of imported features may have no place.
        """
        with _opened(self.folder / "patches.csv") as file:
            rows = csv.DictReader(file)
            first, names = next(rows, None), rows.fieldnames or []
        if not (first and first["size_l0"]):
            return []
        said = [name for name in names if name.startswith(("p_", "without_event_"))]
        shown = {"model": said, _ATTENTION: [name for name in names if name == _ATTENTION]}
        return [
            Overlay(f"{what} of {self.site}", "values", partial(self._draw, columns))
            for what, columns in shown.items()
            if columns
        ]

    def _draw(self, columns: Sequence[str], slide: Slide) -> Layer:
        """A layer of some columns of the table; attention as a share of the highest, as in the heatmap."""
        if self.score.get("quickhash", slide.quickhash) != slide.quickhash:
            raise WsiFlError(
                f"{slide.path.name}: not the slide that was predicted; run `wsi-fl predict` again"
            )
        xy_l0, side_l0, table = _read(self.folder / "patches.csv", columns)
        if _ATTENTION in table:
            share = table[_ATTENTION]
            share /= np.max(share, initial=np.finfo(np.float64).tiny, where=np.isfinite(share))
        named = {name.removeprefix("p_"): column for name, column in table.items()}
        asked = str(self.score.get("class"))
        return values(xy_l0, side_l0, named, asked if asked in named else list(named)[-1])


def of_folder(folder: Path) -> Prediction:
    """Return what `predict` wrote in a folder.

    Raises:
        WsiFlError: when it did not write that.
    """
    score = read_json(folder / "score.json")
    if not isinstance(score, dict) or not score.keys() >= {"run", "site", "slide", "model"}:
        raise _foreign(folder)
    return Prediction(folder, score)


def _foreign(folder: Path) -> WsiFlError:
    return WsiFlError(f"{folder}/score.json: not what `wsi-fl predict` writes; predict the slide again")


def _read(
    path: Path, columns: Sequence[str]
) -> tuple[NDArray[np.int64], float, dict[str, NDArray[np.float64]]]:
    """(corners [n, 2], side, column → [n]) of a patches.csv."""
    try:
        with _opened(path) as file:
            rows = list(csv.DictReader(file))
        xy_l0 = np.array([(int(row["x_l0"]), int(row["y_l0"])) for row in rows], np.int64)
        table = {name: np.array([float(row[name]) for row in rows]) for name in columns}
        return xy_l0, float(rows[0]["size_l0"]), table
    except (KeyError, TypeError, ValueError, IndexError):
        raise WsiFlError(f"{path}: no table of patches that `wsi-fl predict` wrote; predict again") from None


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise WsiFlError(f"{path}: no such file; predict the slide again")
    return path.open(newline="", encoding="utf-8")
