"""What lies over a slide in `view`: what the site's table and stores say of it, and what models said."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.slides.choosing.annotations import HOLE_GROUPS, TUMOR_GROUPS, read_annotations
from wsi_fl.slides.choosing.grid import size_in_l0
from wsi_fl.slides.choosing.patches import PlanParams, plan_slide
from wsi_fl.slides.choosing.tissue import TissueParams
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.quality import tissue_of
from wsi_fl.stages.prepare.tile import spec_of
from wsi_fl.stages.site.data import open_mosaic, open_store
from wsi_fl.stores.features import FeatureStore
from wsi_fl.stores.fields import read_marked
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError
from wsi_fl.view.gallery import Overlay
from wsi_fl.view.layers import Layer, outlines, patches, tissue_rings, values

ATTENTION = "attention"


@dataclass(frozen=True)
class SiteLayers:
    """The layers that a site's own table and stores have for its slides.

    Attributes:
        store, mosaic: what there is of the site.
    """

    pipeline: Pipeline
    tissue: TissueParams
    store: PatchStore | None
    mosaic: FeatureStore | None

    @staticmethod
    def of(study: Study, site: str, pipeline: Pipeline) -> SiteLayers:
        """Open the stores that a site has.

        Raises:
            WsiFlError: when a store is damaged, or another site's.
        """
        store = open_store(study, site) if study.store(site).exists() else None
        mosaic = open_mosaic(study, site) if study.mosaic(site).exists() else None
        return SiteLayers(pipeline, tissue_of(study, pipeline), store, mosaic)

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
        """Return in a few words what the stores kept of a slide."""
        parts = []
        if (store := self.store) is not None:
            rows = store.table.slide == slide
            labels = np.bincount(store.table.label[rows], minlength=len(store.meta.classes))
            counts = [f"{n} {name}" for n, name in zip(labels, store.meta.classes, strict=True) if n]
            parts += [", ".join(counts) or "no patch kept", *np.unique(store.table.split[rows]).tolist()]
        if self.mosaic is not None and (bag := self._bag(slide)) is not None:
            parts.append(f"mosaic of {self.mosaic.sizes[bag]}")
        return " · ".join(parts)

    def _kept(self, slide: str) -> list[Overlay]:
        layers = []
        if (store := self.store) is not None:
            rows = store.table.slide == slide
            xy_l0, label = store.table.xy_l0[rows], store.table.label[rows]
            if len(label):
                draw = partial(_squares, store.meta.spec, xy_l0, label, store.meta.classes)
                layers.append(Overlay("kept patches", "patches", draw))
            if len(label) and (aside := read_marked(store.shard(slide), "aside")):
                reasons, reason = np.unique([why for _, _, why in aside], return_inverse=True)
                corners = np.array([(x, y) for x, y, _ in aside], np.int64)
                after = len(store.meta.classes)
                draw = partial(_squares, store.meta.spec, corners, reason, reasons.tolist(), first=after)
                layers.append(Overlay("set aside", "patches", draw))
        if self.mosaic is not None and (bag := self._bag(slide)) is not None:
            layers.append(Overlay("mosaic", "patches", partial(_mosaic, self.mosaic, bag)))
        return layers

    def _bag(self, slide: str) -> int | None:
        """Where a slide stands among the mosaics."""
        assert self.mosaic is not None
        found = np.flatnonzero(self.mosaic.table.slide == slide)
        return int(found[0]) if len(found) else None

    def _tissue(self, record: SlideRecord, slide: Slide) -> Layer:
        """The tissue as `tile` and `predict` find it, which do not ask what the slide is labelled with for that."""
        plain = replace(record, annotation=None, supervision="negative", positive=False)
        params = PlanParams(min_tissue=self.pipeline.tile.min_tissue, tissue=self.tissue)
        plan = plan_slide(plain, self.spec, params, reader=self.pipeline.slides.reader)
        return outlines(tissue_rings(plan.tissue, plan.downsample))

    def _annotation(self, path: Path, slide: Slide) -> Layer:
        """The outlines of tumour, and those of which nobody said what they hold."""
        settings = self.pipeline.tile
        found = read_annotations(
            path,
            tumor_groups=settings.tumor_groups or TUMOR_GROUPS,
            hole_groups=settings.hole_groups or HOLE_GROUPS,
            ignored_groups=settings.ignored_groups,
        )
        rings = shapely.get_rings([*_parts(found.tumor), *_parts(found.unsure)])
        return outlines(shapely.get_coordinates(ring) for ring in rings)


def _parts(geometry: Any) -> list[Any]:
    return [part for part in shapely.get_parts(geometry) if part.geom_type == "Polygon"]


def _squares(
    spec: GridSpec,
    xy_l0: NDArray[np.int64],
    group: NDArray[np.int64],
    groups: Sequence[str],
    slide: Slide,
    first: int = 0,
) -> Layer:
    return patches(xy_l0, size_in_l0(spec, slide.mpp), group, groups, first)


def _mosaic(store: FeatureStore, bag: int, slide: Slide) -> Layer:
    """The patches of a bag; those of imported features may lie nobody knows where."""
    found = store.bag(bag)
    if not found.placed:
        raise WsiFlError(f"{store.path.name}: nobody knows where the patches of these features lie")
    return _squares(store.meta.spec, found.xy_l0, np.zeros(len(found.xy_l0), np.int64), ["mosaic"], slide)


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
        """The number by which slides are ranked."""
        score = self.score
        if "score" in score:
            return float(score["score"]["top_k_mean"])
        found = next((score[key] for key in ("probability", "risk", "value") if key in score), None)
        return None if found is None else float(found)

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
        if placed and any(name != ATTENTION for name in columns):
            said = partial(self._draw, [name for name in columns if name != ATTENTION])
            layers.append(Overlay(f"model of {self.site}", "values", said))
        if placed and ATTENTION in columns:
            layers.append(Overlay(f"{ATTENTION} of {self.site}", "values", partial(self._draw, [ATTENTION])))
        return layers

    def _draw(self, columns: Sequence[str], slide: Slide) -> Layer:
        """A layer of some columns of the table; attention as a share of the highest, as in the heatmap."""
        if self.score.get("quickhash", slide.quickhash) != slide.quickhash:
            raise WsiFlError(
                f"{slide.path.name}: not the slide that was predicted; run `wsi-fl predict` again"
            )
        xy_l0, side_l0, table = _read(self.folder / "patches.csv", columns)
        if ATTENTION in table:
            table[ATTENTION] /= max(float(table[ATTENTION].max()), np.finfo(np.float64).tiny)
        named = {name.removeprefix("p_"): column for name, column in table.items()}
        asked = str(self.score.get("class"))
        return values(xy_l0, side_l0, named, asked if asked in named else list(named)[-1])


def _heading(path: Path) -> tuple[list[str], bool]:
    """(columns of a patches.csv that are shares, whether patches have places)."""
    with _opened(path) as file:
        rows = csv.DictReader(file)
        first = next(rows, None)
        names = rows.fieldnames or []
    shares = ("p_", "without_event_", ATTENTION)
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
