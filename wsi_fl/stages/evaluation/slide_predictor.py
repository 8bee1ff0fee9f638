"""Prediction of new slides with a site's models: patches, features, predictions, attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort, downsample_pixels, find_allowed_classes, pack_bags
from wsi_fl.data.metrics import choose_classes
from wsi_fl.data.survival import compute_risk
from wsi_fl.data.tasks import NumberTask, SurvivalTask, Task
from wsi_fl.federation.methods import METHODS
from wsi_fl.models.encoder import Encoder, encode_batches
from wsi_fl.models.mil import BagModel
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.slides.patching.slide_plan import SlidePlan, plan_slide
from wsi_fl.slides.pictures.heatmap import PatchPredictions, patch_boxes
from wsi_fl.slides.reading.formats import slide_name
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.evaluation.load_models import TrainedModels, load_prediction_models, load_run_settings
from wsi_fl.stages.evaluation.write_predictions import COLUMNS
from wsi_fl.stages.prepare.build_bags import build_mosaic_selector
from wsi_fl.stages.prepare.tile_plans import build_plan_params
from wsi_fl.stages.runtime.console import Watcher
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stages.site.example_kind import ExampleKind, find_example_kind
from wsi_fl.stages.site.run_context import restore_study
from wsi_fl.stages.site.site_data import open_bags
from wsi_fl.stages.site.slide_files import list_slides
from wsi_fl.stages.site.target_labels import build_task
from wsi_fl.stores.bag_store import Bag, BagMeta, BagStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.file_names import compose_text
from wsi_fl.system.machine import threads_per_rank
from wsi_fl.types import GridSpec, Images, SlideRecord, UsageError, WsiFlError, encoder_differences

_BATCH, _BATCH_PIXELS = 256, 1 << 22
"""Largest number of images in a batch, as in `evaluate`, and of their pixels."""
_THUMBNAIL_PX = 1200
_FEATURE_SUFFIXES = (".h5", ".h5ad", ".npz", ".pt")
"""Suffixes of imported feature files, which have no pixels."""

_Floats = NDArray[np.float64]


class SlideImage(NamedTuple):
    """The background of a heatmap: a thumbnail uint8[h, w, 3] at 1/`downsample` of level 0 with `mpp` µm per pixel."""

    path: Path
    thumbnail: NDArray[np.uint8]
    downsample: float
    mpp: float
    size_l0: tuple[int, int]
    bounds_l0: tuple[int, int, int, int]
    quickhash: str


class SlidePatches(NamedTuple):
    """The m patches of a slide with their predictions or features.

    Attributes:
        xy_l0: int64[m, 2].
        probabilities: float64[m, classes], predictions of models of patches; None for models of bags.
        bag: features; None for models of patches.
        base: None without the slide's file or the coordinates of the patches.
        n_excluded: number of unreadable patches.
        mpp_l0: µm per level-0 pixel by which the patches were cut; None if unknown.
    """

    xy_l0: NDArray[np.int64]
    probabilities: _Floats | None
    bag: Bag | None
    base: SlideImage | None
    n_excluded: int = 0
    mpp_l0: float | None = None


@dataclass(frozen=True)
class SlidePrediction:
    """The prediction of one slide with m patches.

    Attributes:
        task: the prediction task.
        names: names of the k outputs.
        slide_values: float64[k], prediction of the slide; a probability is 0 where the tumour type excludes a class.
        patch_values: float64[m, k], predictions of single patches.
        attention: float64[m], adding up to 1; None for models without attention.
    """

    task: Task
    names: tuple[str, ...]
    slide_values: _Floats
    patch_values: _Floats
    attention: _Floats | None

    @property
    def _best_class(self) -> int:
        """The index of the most probable class."""
        return int(choose_classes(self.slide_values[None])[0])

    @property
    def document_fields(self) -> dict[str, object]:
        """The entries of the document."""
        if self.task.kind == "number":
            return {"target": self.names[0], "value": float(self.slide_values[0])}
        if isinstance(self.task, SurvivalTask):
            probabilities = dict(zip(self.names, self.slide_values.tolist(), strict=True))
            return {
                "without_event": probabilities,
                "risk": float(compute_risk(self.slide_values[None], self.task.ends)[0]),
            }
        return {
            "class": self.names[self._best_class],
            "probability": float(self.slide_values[self._best_class]),
            "probabilities": dict(zip(self.names, self.slide_values.tolist(), strict=True)),
        }

    @property
    def caption_texts(self) -> tuple[str, str]:
        """The (prediction, further outputs) in a few words."""
        if self.task.kind == "number":
            return f"{self.names[0]} {self.slide_values[0]:.3g}", ""
        if self.task.kind == "survival":
            *earlier_ends, (end, last) = zip(self.names, self.slide_values.tolist(), strict=True)
            earlier = "; ".join(f"{p:.2f} at {name}" for name, p in earlier_ends)
            return f"{last:.2f} without the event at {end}", earlier
        ranked = sorted(zip(self.slide_values.tolist(), self.names, strict=True), reverse=True)[1:3]
        others = "; ".join(f"{other} {p:.2f}" for p, other in ranked if p > 0)
        return f"{self.names[self._best_class]} {self.slide_values[self._best_class]:.2f}", others

    @property
    def legend(self) -> tuple[str, str]:
        """The (short, long) name of the heatmap's values."""
        if self.attention is not None:
            return "attention", "attention, share of the highest"
        if self.task.kind == "number":
            return self.names[0], f"{self.names[0]}, single patch, share of its range"
        if self.task.kind == "survival":
            return "event", f"event by {self.names[-1]}, single patch"
        return self.names[self._best_class], f"{self.names[self._best_class]} probability, single patch"

    @property
    def heat_values(self) -> _Floats:
        """float64[m] in [0, 1]: attention as a share of the highest, else the prediction of the single patch."""
        if self.attention is not None:
            return self.attention / max(float(self.attention.max()), np.finfo(np.float64).tiny)
        if isinstance(self.task, NumberTask):
            return (self.patch_values[:, 0] - self.task.low) / (self.task.high - self.task.low)
        return 1 - self.patch_values[:, -1] if self.task.kind == "survival" else self.patch_values[:, self._best_class]

    @property
    def columns(self) -> dict[str, _Floats]:
        """The columns of a table of patches: heading → float64[m]."""
        attention = {} if self.attention is None else {"attention": self.attention}
        heading = COLUMNS[self.task.kind][1]
        return attention | {heading.format(name): self.patch_values[:, k] for k, name in enumerate(self.names)}


@dataclass(frozen=True)
class Predictor:
    """A site's models with the parameters by which the run's slides were cut into patches.

    Attributes:
        meta: of the training patches or bags.
        input_px: the size to which images are reduced.
        store: the site's mosaics, for runs on mosaics, if they are here.
        tumor_type: of all predicted slides; None for that in the store.
    """

    study: Study
    run: RunFolder
    site: SiteFile
    pipeline: Pipeline
    kind: ExampleKind
    meta: BagMeta
    input_px: int
    models: TrainedModels
    store: BagStore | None = None
    tumor_type: str | None = None

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of a run on features; WsiFlError if its weights have changed."""
        section: Literal["features", "mosaic"] = "mosaic" if self.kind.data == "mosaics" else "features"
        encoder = load_encoder(self.study, self.pipeline, section, threads_per_rank())
        if any(encoder_differences([encoder.label, self.meta.encoder])):
            raise WsiFlError(
                f"{self.run.name} was trained on features of {self.meta.encoder}, but the configuration now names "
                f"{encoder.label}; restore {section}.encoder and {section}.weights, or train again"
            )
        return encoder

    def _require_encoder(self, record: SlideRecord) -> None:
        """Refuse a new slide where the training features were imported and are of another encoder than the study's."""
        encoder_label = self.meta.encoder
        if not self._has_imported_features or not any(
            encoder_differences([self.pipeline.mosaic.encoder, encoder_label])
        ):
            return
        has_receivers = METHODS[self.run.manifest["method"]].payload.is_single_release
        receiver_hint = 'import its features as a site with role = "receiver" and train again, or '
        raise WsiFlError(
            f"{record.slide}: not in the store of site {self.site.name}, whose features of {encoder_label} were "
            "imported, so a new slide can't be encoded here; "
            f"{receiver_hint if has_receivers else ''}give its features to the file "
            f"of `wsi-fl export --run {self.run.name} --model MODEL --format onnx`"
        )

    @property
    def _has_imported_features(self) -> bool:
        """Whether the run was trained on imported features, whose stores lack the selection of patches."""
        return self.kind.data == "mosaics" and not self.meta.recipe

    def load_patches(self, record: SlideRecord, watcher: Watcher) -> SlidePatches:
        """Return the patches of a slide or of its mosaic."""
        return self._load_mosaic(record) if self.kind.data == "mosaics" else self._cut_patches(record, watcher)

    def _load_mosaic(self, record: SlideRecord) -> SlidePatches:
        """Return a mosaic from the site's store, else computed with the run's parameters and encoder."""
        row, path, mpp_l0 = self._find_row(record), _find_slide_file(self.study, self.site, record), None
        if self.store is not None and row is not None:
            bag, mpp_l0 = self.store.read_bag(row), None if self.store.mpp_l0 is None else self.store.mpp_l0[row]
            path = None if self._has_imported_features and path and path.suffix.lower() in _FEATURE_SUFFIXES else path
        elif path is None:
            raise WsiFlError(f"{record.path}: no such slide, and none of that name among {record.site}'s mosaics")
        else:
            self._require_encoder(record)
            selector = build_mosaic_selector(self.study, self.pipeline, self.site, threads_per_rank())
            params = replace(selector.params, **self.meta.recipe)
            selector = replace(selector, spec=self.meta.spec, params=params)
            bag = selector.build_bag(replace(record, path=path), self.encoder)
        image = self._load_image(record, path) if path and bag.has_places else None
        mpp_l0 = image.mpp if mpp_l0 is None and image else mpp_l0
        if self.kind.example != "patch":
            return SlidePatches(bag.xy_l0, None, bag, image, mpp_l0=mpp_l0)
        probabilities = self.models.predict(Cohort.from_arrays(bag.features))
        return SlidePatches(bag.xy_l0, probabilities, None, image, mpp_l0=mpp_l0)

    def _load_image(self, record: SlideRecord, path: Path) -> SlideImage:
        reader = self.pipeline.slides.reader
        check_opens_safely(path, record.mpp_override, reader)
        with Slide(path, record.mpp_override, reader) as slide:
            thumbnail, downsample = slide.thumbnail(_THUMBNAIL_PX)
            extent = slide.size_l0, slide.bounds_l0
            return SlideImage(path, thumbnail, downsample, slide.mpp, *extent, slide.quickhash)

    def _cut_patches(self, record: SlideRecord, watcher: Watcher) -> SlidePatches:
        watcher.update(record.site, 0, 1, f"{record.slide}, finding tissue")
        reader, min_tissue = self.pipeline.slides.reader, self.meta.recipe.get("min_tissue")
        params = build_plan_params(self.study, self.pipeline, self.site.annotations_origin)
        if min_tissue is not None:
            params = replace(params, min_tissue=float(min_tissue))
        check_opens_safely(record.path, record.mpp_override, reader)
        plan = plan_slide(record, self.meta.spec, params, reader=reader)
        excluded: dict[int, str] = {}
        notes = set(plan.notes)
        parts, features = [], []
        with torch.inference_mode():
            for images in self._iterate_batches(plan, excluded, notes):
                inputs = images if self.kind.is_images else encode_batches([images], self.encoder)
                if self.kind.example == "patch":
                    parts.append(self.models.predict(Cohort.from_arrays(inputs), len(images)))
                else:
                    features.append(inputs)
                done = sum(map(len, parts or features)) / len(plan.xy_l0)
                watcher.update(record.site, done, 1, record.slide)
        if not parts and not features:
            raise WsiFlError(next(iter(excluded.values())))
        for note in sorted(notes):
            watcher.print_message(f"  {record.slide}: {note}")
        xy_l0 = np.delete(plan.xy_l0, list(excluded), axis=0)
        bag = Bag(np.concatenate(features), xy_l0) if features else None
        extent = plan.size_l0, plan.bounds_l0
        image = SlideImage(record.path, plan.thumbnail, plan.downsample, plan.mpp, *extent, plan.quickhash)
        return SlidePatches(xy_l0, np.concatenate(parts) if parts else None, bag, image, len(excluded), plan.mpp)

    def _iterate_batches(
        self, plan: SlidePlan, excluded: dict[int, str], notes: set[str]
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield images uint8[b, input_px, input_px, 3] as in training; unreadable rows go to `excluded` with the
        reason."""
        size = max(1, min(_BATCH, _BATCH_PIXELS // self.input_px**2))
        pending: list[NDArray[np.uint8]] = []
        threads, reader = threads_per_rank(), self.pipeline.slides.reader
        for _, pixels in read_patches(
            plan.record, plan.xy_l0, plan.spec, threads=threads, reader=reader, excluded=excluded, notes=notes
        ):
            if not len(pixels):
                continue
            pending.append(downsample_pixels(pixels, self.input_px))
            if sum(map(len, pending)) >= size:
                yield np.concatenate(pending)
                pending = []
        if pending:
            yield np.concatenate(pending)

    def build_heatmap(self, slide: str, patches: SlidePatches) -> PatchPredictions:
        """Return the heatmap of predictions of patches."""
        assert patches.probabilities is not None
        if not np.isfinite(patches.probabilities).all():
            raise WsiFlError(f"{slide}: the model gives no numbers; it did not train well")
        if patches.base is None or patches.mpp_l0 is None:
            raise WsiFlError(f"{slide}: the coordinates of its patches are unknown, or its file is not here")
        boxes = patch_boxes(patches.xy_l0, self.meta.spec, patches.mpp_l0, patches.base.size_l0)
        return PatchPredictions(boxes, self.meta.classes, patches.probabilities)

    def predict_slide(self, bag: Bag, tumor_type: str | None) -> SlidePrediction:
        """Return the prediction of a bag by models of slides or patients, among the classes of its tumour type."""
        task, features = build_task(self.pipeline.target), bag.features
        allowed = find_allowed_classes(np.array([tumor_type or ""]), self.meta.classes, self.meta.tumor_types)[0]
        slide = self.kind.example == "slide"
        slide_rows = [features] if slide else features.mean(axis=0, dtype=np.float64)[None]
        patch_rows = [patch[None] for patch in features] if slide else features

        def predict_rows(rows: NDArray[Any] | Sequence[NDArray[np.float32]]) -> _Floats:
            possible = np.tile(allowed, (len(rows), 1)) if task.kind == "classes" else None
            return self.models.predict(replace(Cohort.from_arrays(rows).load_inputs(), allowed=possible, task=task))

        with torch.inference_mode():
            slide_values, patch_values = predict_rows(slide_rows)[0], predict_rows(patch_rows)
            attention = self._mean_attention(bag) if slide else None
        if not np.isfinite(slide_values).all() or not np.isfinite(patch_values).all():
            raise WsiFlError("the model gives no numbers; it did not train well")
        return SlidePrediction(task, self.meta.classes, slide_values, patch_values, attention)

    def _mean_attention(self, bag: Bag) -> _Floats | None:
        """Return the attention float64[m], the mean over models; None if a model of the ensemble has none."""
        x = torch.from_numpy(pack_bags([bag.features])).to(self.models.device)
        weights = [
            model.patch_attention(x) if isinstance(model, BagModel) else None for model in self.models.ensemble_models
        ]
        attentions = [weight[0].double().cpu().numpy() for weight in weights if weight is not None]
        return np.mean(attentions, axis=0) if len(attentions) == len(weights) else None

    def find_tumor_type(self, record: SlideRecord) -> str | None:
        """Return the given tumour type, else that in the store; None where unknown."""
        row = self._find_row(record)
        if self.tumor_type is not None or self.store is None or row is None:
            return self.tumor_type
        return str(self.store.table.tumor_type[row]) or None

    def _find_row(self, record: SlideRecord) -> int | None:
        """Return the row of the slide, given by file or by name, in the store; None without one."""
        slides = np.empty(0, np.str_) if self.store is None else self.store.table.slide
        for name in (record.path.name, record.slide):
            if len(rows := np.flatnonzero(slides == name)):
                return int(rows[0])
        return None


def load_predictor(
    study: Study, run_name: str, site_name: str, tumor_type: str | None = None, overrides: Sequence[str] = ()
) -> Predictor:
    """Load the trained models of a site, and open its mosaics for runs on mosaics.

    Args:
        overrides: `predict.KEY=VALUE` over the run's configuration.

    Raises:
        UsageError: for an unknown tumour type, images that are no slides, or another site or encoder than the run's.
        WsiFlError: when the site dropped out, or the encoder's weights have changed.
    """
    run = RunFolder(study.find_run(run_name))
    run_study = restore_study(study, run)
    pipeline, site = load_run_settings(run_study, run, overrides), run_study.load_site(site_name)
    if not run.site_folder(site_name).path.is_dir():
        took_part = ", ".join(sorted(p.name for p in run.path.glob("sites/*"))) or "none"
        raise UsageError(f"{run.name}: site {site_name} took no part in this run; these did: {took_part}")
    for loss in run.list_dropouts():
        if loss["site"] == site_name:
            raise WsiFlError(
                f"{run.name}: site {site_name} dropped out in round {loss['round']} and has no model; "
                f"continue with it by `wsi-fl train --resume {run.name}`"
            )
    kind, facts = find_example_kind(pipeline), run.site_folder(site.name).store_facts()
    meta = _bag_meta_of_run(site.name, facts)
    if kind.data != "mosaics" and (meta.spec.mpp <= 0 or facts.get("channels", 3) != 3):
        raise UsageError(f"site {site.name}: {run.name} learned from images, not slides; predict reads slides")
    if tumor_type is not None and kind.data != "mosaics":
        raise UsageError("--tumor-type is for runs on mosaics (train.data); this one learned from patches")
    if tumor_type is not None and tumor_type not in meta.tumor_types:
        known_types = ", ".join(meta.tumor_types) or "none"
        raise UsageError(f"unknown tumour type {tumor_type!r}; known: {known_types}")
    size = (kind.is_images and pipeline.train.input_px) or meta.spec.size_px
    shape = Images(3, size) if kind.is_images else kind.shape(int(facts["n_features"]))
    models = load_prediction_models(run, pipeline, site, meta.classes, shape, select_device())
    store = _open_mosaics(study, run, site.name, meta) if kind.data == "mosaics" else None
    predictor = Predictor(study, run, site, pipeline, kind, meta, size, models, store, tumor_type)
    if kind.data == "features":
        predictor.encoder  # noqa: B018 refused here; with mosaics it is needed only for slides outside the store
    return predictor


def _bag_meta_of_run(site: str, facts: Mapping[str, Any]) -> BagMeta:
    """Return the metadata of the training patches or bags of a site's models."""
    types = {kind: tuple(classes) for kind, classes in facts.get("tumor_types", {}).items()}
    classes, spec = tuple(facts["classes"]), GridSpec(**facts["spec"])
    recipe = facts.get("recipe", {"min_tissue": facts.get("min_tissue")})
    return BagMeta(site, classes, facts.get("encoder", ""), spec, "", types, recipe)


def _open_mosaics(study: Study, run: RunFolder, site: str, meta: BagMeta) -> BagStore | None:
    if not study.mosaic_path(site).exists():
        return None
    store = open_bags(study, site, "mosaics")
    if any(encoder_differences([store.meta.encoder, meta.encoder])):
        raise UsageError(
            f"site {site}: its mosaics are of {store.meta.encoder} now, but {run.name} learned from {meta.encoder}; "
            "run `wsi-fl mosaic` with that encoder, or train a new run"
        )
    return store


def _find_slide_file(study: Study, site: SiteFile, record: SlideRecord) -> Path | None:
    """Return the slide's file: the given path, else among the site's slides; None where there is neither."""
    if record.path.exists():
        return record.path
    name = compose_text(record.path.name)
    matches = (path for path in list_slides(study, site) if name in (compose_text(path.name), slide_name(path)))
    return next(matches, None)
