"""What lies over a slide in `view`: what the site's table and stores say of it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from wsi_fl.slides.patching.tissue import TissueParams
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.tables import read_set_aside
from wsi_fl.stages.prepare.tile_plans import spec_of, tissue_of
from wsi_fl.stages.site.data import open_bags, open_store
from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.fields import read_marked
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import read_json
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError
from wsi_fl.viewer.gallery import Overlay
from wsi_fl.viewer.layers import Layer, finite, outlines, patches, tissue_rings, values

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class SiteLayers:
    """The layers that a site's own table and stores have for its slides.

    Attributes:
        store, mosaic: what there is of the site.
        set_aside: slide → how many of its patches were set aside for which fault.
    """

    pipeline: Pipeline
    tissue: TissueParams
    store: PatchStore | None
    mosaic: BagStore | None
    set_aside: Mapping[str, Mapping[str, int]]
    _rows: Mapping[str, NDArray[np.int64]]
    _bags: Mapping[str, int]
    _reading: Lock = field(default_factory=Lock)

    @staticmethod
    def of(study: Study, site: str, pipeline: Pipeline) -> SiteLayers:
        """Open the stores that a site has.

        Raises:
            WsiFlError: when a store is damaged, or another site's.
        """
        store = open_store(study, site) if study.store(site).exists() else None
        mosaic = open_bags(study, site, "mosaics") if study.mosaic(site).exists() else None
        aside = {} if store is None else read_set_aside(study.store(site).parent / "quality.csv")
        rows = {} if store is None else _rows_by_slide(store.table.slide)
        bags = {} if mosaic is None else {str(name): k for k, name in enumerate(mosaic.table.slide)}
        return SiteLayers(pipeline, tissue_of(study, pipeline), store, mosaic, aside, rows, bags)

    @property
    def spec(self) -> GridSpec:
        """The grid of the site's patches; where it has none yet, the pipeline's."""
        return self.store.meta.spec if self.store is not None else spec_of(self.pipeline)

    def over(self, record: SlideRecord) -> list[Overlay]:
        """Return the layers of a slide, in the order in which they are drawn."""
        layers = [
            *self._kept(record.slide),
            Overlay("tissue", "outlines", partial(self._tissue, record)),
        ]
        if record.annotation is not None:
            layers.append(Overlay("annotation", "outlines", partial(self._annotation, record.annotation)))
        return layers

    def note(self, slide: str) -> str:
        """Return in a few words what the stores kept of a slide, and why nothing."""
        parts = []
        if (store := self.store) is not None:
            rows = self._rows.get(slide, _NO_ROWS)
            labels = np.bincount(store.table.label[rows], minlength=len(store.meta.classes))
            counts = [f"{n} {name}" for n, name in zip(labels, store.meta.classes, strict=True) if n]
            parts += [
                ", ".join(counts) or self._why_none(slide),
                *np.unique(store.table.split[rows]).tolist(),
            ]
        if self.mosaic is not None and slide in self._bags:
            parts.append(f"mosaic of {self.mosaic.sizes[self._bags[slide]]}")
        return " · ".join(parts)

    def _why_none(self, slide: str) -> str:
        faults = ", ".join(f"{n} {kind}" for kind, n in self.set_aside.get(slide, {}).items())
        return f"no patch kept: all set aside ({faults})" if faults else "no patch kept"

    def _kept(self, slide: str) -> list[Overlay]:
        layers = []
        if slide in self._rows:
            layers.append(Overlay("kept patches", "patches", partial(self._of_store, slide)))
            if self.set_aside.get(slide):
                layers.append(Overlay("set aside", "patches", partial(self._aside, slide)))
        if self.mosaic is not None and slide in self._bags:
            draw = partial(_mosaic, self.mosaic, self._bags[slide])
            layers.append(Overlay("mosaic", "patches", draw))
        return layers

    def _of_store(self, name: str, slide: Slide) -> Layer:
        """The patches of a slide in the colours of their labels."""
        assert self.store is not None
        table, rows = self.store.table, self._rows[name]
        side_l0 = size_in_l0(self.spec, slide.mpp)
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
        return patches(corners, size_in_l0(self.spec, slide.mpp), reason, groups, first=after, crossed=True)

    def _tissue(self, record: SlideRecord, slide: Slide) -> Layer:
        """The tissue as `tile` and `predict` find it, which do not ask what the slide is labelled with for that."""
        plain = replace(record, annotation=None, supervision="negative", positive=False)
        params = PlanParams(min_tissue=self.pipeline.tile.min_tissue, tissue=self.tissue)
        reader = self.pipeline.slides.reader
        check_opens_safely(record.path, record.mpp_override, reader)
        plan = plan_slide(plain, self.spec, params, reader=reader)
        return outlines(tissue_rings(plan.tissue, plan.downsample))

    def _annotation(self, path: Path, slide: Slide) -> Layer:
        """The outlines of tumour, and those of which nobody said what they hold."""
        found = read_annotations(path, self.pipeline.tile.groups)
        rings = shapely.get_rings([*_parts(found.tumor), *_parts(found.unsure)])
        return outlines(shapely.get_coordinates(ring) for ring in rings)


def _rows_by_slide(slides: NDArray[np.str_]) -> dict[str, NDArray[np.int64]]:
    """Return slide → its rows, in order."""
    order = np.argsort(slides, kind="stable")
    names, first = np.unique(slides[order], return_index=True)
    return dict(zip(names.tolist(), np.split(order, first[1:]), strict=True)) if len(names) else {}


def _parts(geometry: Any) -> list[Any]:
    return [part for part in shapely.get_parts(geometry) if part.geom_type == "Polygon"]


def _mosaic(store: BagStore, bag: int, slide: Slide) -> Layer:
    """The patches of a bag; those of imported features may lie nobody knows where."""
    found = store.bag(bag)
    if not found.placed:
        raise WsiFlError(f"{store.path.name}: the places of these features' patches are unknown")
    side_l0 = size_in_l0(store.meta.spec, slide.mpp)
    return patches(found.xy_l0, side_l0, np.zeros(len(found.xy_l0), np.int64), ["mosaic"])


_ATTENTION = "attention"


@dataclass(frozen=True)
class Prediction:
    """What `predict` wrote of one slide.

    Attributes:
        folder: with its files.
        score: the document `score.json`.
    """

    folder: Path
    score: Mapping[str, Any]

    @property
    def slide(self) -> str:
        """The slide's name."""
        return str(self.score["slide"])

    @property
    def site(self) -> str:
        """The site whose models answered."""
        return str(self.score["site"])

    @property
    def value(self) -> float | None:
        """The number by which slides are ranked; None where there is none.

        Raises:
            WsiFlError: when the document says it otherwise than `predict` does.
        """
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
        """What was said of the slide."""
        said = self.score.get("class") or self.score.get("target") or "risk"
        return f"{said} {self.value:.2f}" if self.value is not None else str(said)

    def overlays(self) -> list[Overlay]:
        """Return its layers: what is said of each patch, and the attention of models of whole slides.

        Raises:
            WsiFlError: when its table is missing.
        """
        columns, placed = _heading(self.folder / "patches.csv")
        layers = []
        if placed and any(name != _ATTENTION for name in columns):
            said = partial(self._draw, [name for name in columns if name != _ATTENTION])
            layers.append(Overlay(f"model of {self.site}", "values", said))
        if placed and _ATTENTION in columns:
            layers.append(
                Overlay(f"{_ATTENTION} of {self.site}", "values", partial(self._draw, [_ATTENTION]))
            )
        return layers

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
    if not isinstance(score, dict) or not score.keys() >= {"run", "site", "slide", "with"}:
        raise _foreign(folder)
    return Prediction(folder, score)


def _foreign(folder: Path) -> WsiFlError:
    return WsiFlError(f"{folder}/score.json: not what `wsi-fl predict` writes; predict the slide again")


def _heading(path: Path) -> tuple[list[str], bool]:
    """(columns of a patches.csv that are shares, whether patches have places)."""
    with _opened(path) as file:
        rows = csv.DictReader(file)
        first = next(rows, None)
        names = rows.fieldnames or []
    shares = ("p_", "without_event_", _ATTENTION)
    return [name for name in names if name.startswith(shares)], bool(first and first["size_l0"])


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
