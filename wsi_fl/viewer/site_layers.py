"""Layers over a slide in `view`: from the site's table and stores, and from predictions."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from wsi_fl.slides.patching.annotations import read_annotations
from wsi_fl.slides.patching.artifacts import KINDS
from wsi_fl.slides.patching.grid import patch_side_l0
from wsi_fl.slides.patching.slide_plan import PlanParams, plan_slide
from wsi_fl.slides.patching.slide_survey import build_slide_geometry
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.tile import read_excluded
from wsi_fl.stages.prepare.tile_plans import build_grid_spec, build_tissue_params
from wsi_fl.stages.site.site_data import open_bags, open_store
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.fields import read_marked
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import read_json
from wsi_fl.types import GridSpec, SlideRecord, WsiFlError
from wsi_fl.viewer.gallery import Layer, Overlay, finite_or_none

_NO_ROWS = np.empty(0, np.int64)
_ATTENTION = "attention"
_DECIMALS = 4


def _outline_layer(rings: Iterable[NDArray[np.float64]]) -> Layer:
    """Return a layer of closed lines through points [m, 2] each."""
    return {"rings": [_flatten_points(ring) for ring in rings if len(ring) > 2]}


def _tissue_rings(mask: NDArray[np.bool_], downsample: float) -> list[NDArray[np.float64]]:
    """Return the edges [m, 2] of a mask bool[h, w] in level-0 pixels, simplified to 1/4 pixel of the mask."""
    from skimage.measure import approximate_polygon, find_contours

    edges = find_contours(np.pad(mask.astype(np.float32), 1), 0.5)
    # Row and column refer to the centres of pixels, with a frame of one pixel.
    return [(approximate_polygon(edge, 0.25)[:, ::-1] - 0.5) * downsample for edge in edges]


def patch_layer(
    xy_l0: NDArray[np.int64],
    side_l0: float,
    group: NDArray[np.int64],
    groups: Sequence[str],
    *,
    first: int = 0,
    crossed: bool = False,
) -> Layer:
    """Return a layer of squares with top-left corners [n, 2], coloured by their group [n], a position in `groups`.

    `first` is the index of the first group's colour; squares may be crossed out.
    """
    group_fields = {"group": group.tolist(), "groups": list(groups), "first": first, "crossed": crossed}
    return {"xy": _flatten_points(xy_l0), "side": float(side_l0), **group_fields}


def value_layer(
    xy_l0: NDArray[np.int64], side_l0: float, columns: Mapping[str, NDArray[np.float64]], first_column: str
) -> Layer:
    """Return a layer of squares coloured by a selectable column of values [n] from 0 to 1, initially `first_column`."""
    rounded = [[*map(finite_or_none, np.round(column, _DECIMALS).tolist())] for column in columns.values()]
    names = list(columns)
    return {
        "xy": _flatten_points(xy_l0),
        "side": float(side_l0),
        "columns": names,
        "values": rounded,
        "shown": names.index(first_column),
    }


def _flatten_points(points: NDArray[Any]) -> list[int]:
    flat: list[int] = np.round(points).astype(np.int64).ravel().tolist()
    return flat


class SiteLayers:
    """Layers of a site's slides from its table and stores; `store` and `mosaic` are None where missing.

    Raises:
        WsiFlError: for a damaged store, or another site's.
    """

    def __init__(self, study: Study, site: str, pipeline: Pipeline) -> None:
        self._origin = study.load_site(site).annotations_origin
        self._pipeline, self._tissue_settings = pipeline, build_tissue_params(study, pipeline, self._origin)
        self.store: PatchStore | None = None
        self.mosaic: BagStore | None = None
        self._excluded: Mapping[str, Mapping[str, int]] = {}
        """Slide → artifact → number of excluded patches."""
        self._rows: Mapping[str, NDArray[np.int64]] = {}
        self._bags: Mapping[str, int] = {}
        self._reading = Lock()
        if study.store_path(site).exists():
            self.store = open_store(study, site)
            self._excluded = read_excluded(study.store_path(site).parent / "quality.csv")
            self._rows = _rows_by_slide(self.store.table.slide)
        if study.mosaic_path(site).exists():
            self.mosaic = open_bags(study, site, "mosaics")
            self._bags = {str(name): k for k, name in enumerate(self.mosaic.table.slide)}

    @property
    def _grid_spec(self) -> GridSpec:
        """The grid of the site's patches, by default the pipeline's."""
        return self.store.meta.spec if self.store is not None else build_grid_spec(self._pipeline)

    def list_overlays(self, record: SlideRecord) -> list[Overlay]:
        """Return the layers of a slide, in drawing order."""
        slide = record.slide
        layers: list[Overlay] = []
        if slide in self._rows:
            layers.append(Overlay("kept patches", "patches", partial(self._draw_kept, slide)))
            if self._excluded.get(slide):
                layers.append(Overlay("excluded", "patches", partial(self._draw_excluded, slide)))
        if self.mosaic is not None and slide in self._bags:
            draw = partial(_draw_mosaic, self.mosaic, self._bags[slide])
            layers.append(Overlay("mosaic", "patches", draw))
        layers.append(Overlay("tissue", "outlines", partial(self._draw_tissue, record)))
        if record.annotation is not None:
            layers.append(Overlay("annotation", "outlines", partial(self._draw_annotation, record.annotation)))
        return layers

    def summarize_slide(self, slide: str) -> str:
        """Summarise the kept patches of a slide, or the reason why there are none."""
        parts: list[str] = []
        if (store := self.store) is not None:
            rows = self._rows.get(slide, _NO_ROWS)
            labels = np.bincount(store.table.label[rows], minlength=len(store.meta.classes))
            counts = [f"{n} {name}" for n, name in zip(labels, store.meta.classes, strict=True) if n]
            reasons = ", ".join(f"{n} {kind}" for kind, n in self._excluded.get(slide, {}).items())
            no_patches = f"no patch kept: all excluded ({reasons})" if reasons else "no patch in the store"
            parts = [", ".join(counts) or no_patches, *np.unique(store.table.split[rows]).tolist()]
        if self.mosaic is not None and slide in self._bags:
            parts.append(f"mosaic of {self.mosaic.bag_sizes[self._bags[slide]]}")
        return " · ".join(parts)

    def _check_quickhash(self, name: str, slide: Slide) -> None:
        """Refuse a slide that was replaced since it was tiled; a copy of the store without its shards can't tell."""
        assert self.store is not None
        quickhash = ""
        with self._reading, suppress(WsiFlError):
            quickhash = str(self.store.open_shard(name).attrs.get("quickhash", ""))
        if quickhash and quickhash != slide.quickhash:
            raise WsiFlError(f"{slide.path.name}: not the slide that was tiled; run `wsi-fl tile` again")

    def _draw_kept(self, name: str, slide: Slide) -> Layer:
        assert self.store is not None
        self._check_quickhash(name, slide)
        table, rows = self.store.table, self._rows[name]
        side_l0 = patch_side_l0(self._grid_spec, slide.mpp)
        return patch_layer(table.xy_l0[rows], side_l0, table.label[rows], self.store.meta.classes)

    def _draw_excluded(self, name: str, slide: Slide) -> Layer:
        """Return the excluded patches; an artifact has the same colour on each slide, unlike all classes."""
        assert self.store is not None
        self._check_quickhash(name, slide)
        with self._reading:
            excluded = read_marked(self.store.open_shard(name), "aside")
        groups = list(dict.fromkeys([*KINDS, *(cause for _, _, cause in excluded)]))
        corners = np.array([(x, y) for x, y, _ in excluded], np.int64).reshape(-1, 2)
        reason = np.array([groups.index(cause) for _, _, cause in excluded], np.int64)
        n_classes = len(self.store.meta.classes)
        return patch_layer(
            corners, patch_side_l0(self._grid_spec, slide.mpp), reason, groups, first=n_classes, crossed=True
        )

    def _draw_tissue(self, record: SlideRecord, slide: Slide) -> Layer:
        """Return the tissue outlines as in `tile` and `predict`, independent of the slide's label."""
        plain = replace(record, annotation=None, supervision="negative", positive=False)
        params = PlanParams(min_tissue=self._pipeline.tile.min_tissue, tissue=self._tissue_settings)
        reader = self._pipeline.slides.reader
        check_opens_safely(record.path, record.mpp_override, reader)
        plan = plan_slide(plain, self._grid_spec, params, reader=reader)
        return _outline_layer(_tissue_rings(plan.tissue, plan.downsample))

    def _draw_annotation(self, path: Path, slide: Slide) -> Layer:
        """Return the outlines of tumour, and those without a known class."""
        ground = build_slide_geometry(slide, replace(self._tissue_settings, masks=""))
        annotations = read_annotations(path, self._pipeline.tile.groups, ground, self._origin)
        rings = shapely.get_rings(shapely.get_parts([annotations.tumor, annotations.unsure]))
        return _outline_layer(shapely.get_coordinates(ring) for ring in rings)


def _rows_by_slide(slides: NDArray[np.str_]) -> dict[str, NDArray[np.int64]]:
    order = np.argsort(slides, kind="stable")
    names, first = np.unique(slides[order], return_index=True)
    return dict(zip(names.tolist(), np.split(order, first[1:]), strict=True)) if len(names) else {}


def _draw_mosaic(store: BagStore, bag: int, slide: Slide) -> Layer:
    """Return the layer of a bag's patches; imported features may lack their places."""
    patches = store.read_bag(bag)
    if not patches.has_places:
        raise WsiFlError(f"{store.path.name}: the places of these features' patches are unknown")
    mpp_l0 = slide.mpp if store.mpp_l0 is None else float(store.mpp_l0[bag])  # by which the patches were cut
    side_l0 = patch_side_l0(store.meta.spec, mpp_l0)
    return patch_layer(patches.xy_l0, side_l0, np.zeros(len(patches.xy_l0), np.int64), ["mosaic"])


@dataclass(frozen=True)
class Prediction:
    """The prediction of one slide by `predict`: the folder with its files, and the document `score.json`."""

    folder: Path
    score: Mapping[str, Any]

    @property
    def slide(self) -> str:
        return str(self.score["slide"])

    @property
    def site(self) -> str:
        """The site of the models."""
        return str(self.score["site"])

    @property
    def value(self) -> float | None:
        """The ranking score of the slide; None without any."""
        score = self.score
        try:
            if "score" in score:
                return finite_or_none(float(score["score"]["top_k_mean"]))
            number = next((score[key] for key in ("probability", "risk", "value") if key in score), None)
            return None if number is None else finite_or_none(float(number))
        except (KeyError, TypeError, ValueError):
            raise _foreign_error(self.folder) from None

    @property
    def mpp_l0(self) -> float | None:
        """µm per level-0 pixel by which the slide was cut, as of `predict --mpp`; None if unknown."""
        mpp = self.score.get("slide_mpp")
        return finite_or_none(float(mpp)) if isinstance(mpp, float) else None

    @property
    def summary(self) -> str:
        label = self.score.get("class") or self.score.get("target") or "risk"
        return f"{label} {self.value:.2f}" if self.value is not None else str(label)

    def list_overlays(self) -> list[Overlay]:
        """Return its layers: predictions of patches, and the attention of slide-level models; none without places."""
        with _open_csv(self.folder / "patches.csv") as file:
            rows = csv.DictReader(file)
            first, names = next(rows, None), rows.fieldnames or []
        if not (first and first["size_l0"]):
            return []
        model_columns = [name for name in names if name.startswith(("p_", "without_event_"))]
        columns_by_kind = {"model": model_columns, _ATTENTION: [name for name in names if name == _ATTENTION]}
        return [
            Overlay(f"{kind} of {self.site}", "values", partial(self._draw_columns, columns))
            for kind, columns in columns_by_kind.items()
            if columns
        ]

    def _draw_columns(self, columns: Sequence[str], slide: Slide) -> Layer:
        """Return a layer of columns of the table; attention relative to the highest, as in the heatmap."""
        if self.score.get("quickhash", slide.quickhash) != slide.quickhash:
            raise WsiFlError(f"{slide.path.name}: not the slide that was predicted; run `wsi-fl predict` again")
        xy_l0, side_l0, table = _read_patches(self.folder / "patches.csv", columns)
        if _ATTENTION in table:
            share = table[_ATTENTION]
            share /= np.max(share, initial=np.finfo(np.float64).tiny, where=np.isfinite(share))
        columns_by_name = {name.removeprefix("p_"): column for name, column in table.items()}
        class_name = str(self.score.get("class"))
        return value_layer(
            xy_l0, side_l0, columns_by_name, class_name if class_name in columns_by_name else list(columns_by_name)[-1]
        )


def read_prediction(folder: Path) -> Prediction:
    """Read the prediction in a folder.

    Raises:
        WsiFlError: for another document.
    """
    score = read_json(folder / "score.json")
    if not isinstance(score, dict) or not score.keys() >= {"run", "site", "slide", "model"}:
        raise _foreign_error(folder)
    return Prediction(folder, score)


def _foreign_error(folder: Path) -> WsiFlError:
    return WsiFlError(f"{folder}/score.json: not what `wsi-fl predict` writes; predict the slide again")


def _read_patches(
    path: Path, columns: Sequence[str]
) -> tuple[NDArray[np.int64], float, dict[str, NDArray[np.float64]]]:
    """Read (corners [n, 2], side, column → [n]) from a patches.csv."""
    try:
        with _open_csv(path) as file:
            rows = list(csv.DictReader(file))
        xy_l0 = np.array([(int(row["x_l0"]), int(row["y_l0"])) for row in rows], np.int64)
        table = {name: np.array([float(row[name]) for row in rows]) for name in columns}
        return xy_l0, float(rows[0]["size_l0"]), table
    except (KeyError, TypeError, ValueError, IndexError):
        raise WsiFlError(f"{path}: no table of patches that `wsi-fl predict` wrote; predict again") from None


def _open_csv(path: Path) -> Any:
    if not path.is_file():
        raise WsiFlError(f"{path}: no such file; predict the slide again")
    return path.open(newline="", encoding="utf-8")
