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

from wsi_fl.federation.methods import METHODS
from wsi_fl.learning.examples import (
    Examples,
    allowed_classes,
    packed,
    reduced,
    unlabelled_bags,
)
from wsi_fl.learning.metrics import choose_classes
from wsi_fl.learning.survival import risk
from wsi_fl.learning.tasks import Number, Survival, Task
from wsi_fl.models.encoder import Encoder, encode
from wsi_fl.models.mil import BagModel
from wsi_fl.runs.run import RunFolder
from wsi_fl.slides.patching.patches import SlidePlan, plan_slide
from wsi_fl.slides.patching.quality import Segmenter
from wsi_fl.slides.pictures.heatmap import Heat, patch_boxes
from wsi_fl.slides.reading.formats import slide_name
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.slides.reading.sweep import read_patches
from wsi_fl.stages.answers.predictions import COLUMNS
from wsi_fl.stages.answers.trained import TrainedModels, answering, settings_of
from wsi_fl.stages.prepare.bags import OfSlides
from wsi_fl.stages.prepare.tile_plans import params_of, segmenter_of
from wsi_fl.stages.site.data import ExampleKind, kind_of, open_bags, slides_of
from wsi_fl.stages.site.encoders import encoder_of
from wsi_fl.stages.site.party import as_begun
from wsi_fl.stages.site.targets import task_of
from wsi_fl.stages.work.console import Watcher
from wsi_fl.stages.work.job import device_of_rank
from wsi_fl.stores.bags import Bag, BagMeta, BagStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.machine import share_of_threads
from wsi_fl.system.names import compose_text
from wsi_fl.types import GridSpec, Images, SlideRecord, UsageError, WsiFlError, encoder_differences

_BATCH, _BATCH_PIXELS = 256, 1 << 22
"""Largest number of images in a batch, as in `evaluate`, and of their pixels."""
_THUMBNAIL_PX = 1200
_OF_FEATURES = (".h5", ".h5ad", ".pt")
"""Suffixes of imported feature files, which have no pixels."""

_Floats = NDArray[np.float64]


class Base(NamedTuple):
    """The background of a heatmap: a thumbnail uint8[h, w, 3] at 1/`downsample` of level 0 with `mpp` µm per pixel."""

    path: Path
    thumbnail: NDArray[np.uint8]
    downsample: float
    mpp: float
    size_l0: tuple[int, int]
    bounds_l0: tuple[int, int, int, int]
    quickhash: str


class Seen(NamedTuple):
    """The m patches of a slide with their predictions or features.

    Attributes:
        xy_l0: int64[m, 2].
        probabilities: float64[m, classes], predictions of models of patches; None for models of bags.
        bag: features; None for models of patches.
        base: None without the slide's file or the coordinates of the patches.
        n_excluded: number of unreadable patches.
    """

    xy_l0: NDArray[np.int64]
    said: _Floats | None
    bag: Bag | None
    base: Base | None
    n_aside: int = 0


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
    whole: _Floats
    alone: _Floats
    attention: _Floats | None

    @property
    def _best(self) -> int:
        """The index of the most probable class."""
        return int(choose_classes(self.whole[None])[0])

    @property
    def facts(self) -> dict[str, object]:
        """The entries of the document."""
        if self.task.kind == "number":
            return {"target": self.names[0], "value": float(self.whole[0])}
        if isinstance(self.task, Survival):
            said = dict(zip(self.names, self.whole.tolist(), strict=True))
            return {"without_event": said, "risk": float(risk(self.whole[None], self.task.ends)[0])}
        return {
            "class": self.names[self._best],
            "probability": float(self.whole[self._best]),
            "probabilities": dict(zip(self.names, self.whole.tolist(), strict=True)),
        }

    @property
    def words(self) -> tuple[str, str]:
        """The (prediction, further outputs) in a few words."""
        if self.task.kind == "number":
            return f"{self.names[0]} {self.whole[0]:.3g}", ""
        if self.task.kind == "survival":
            *before, (end, last) = zip(self.names, self.whole.tolist(), strict=True)
            earlier = "; ".join(f"{p:.2f} at {name}" for name, p in before)
            return f"{last:.2f} without the event at {end}", earlier
        ranked = sorted(zip(self.whole.tolist(), self.names, strict=True), reverse=True)[1:3]
        others = "; ".join(f"{other} {p:.2f}" for p, other in ranked if p > 0)
        return f"{self.names[self._best]} {self.whole[self._best]:.2f}", others

    @property
    def legend(self) -> tuple[str, str]:
        """The (short, long) name of the heatmap's values."""
        if self.attention is not None:
            return "attention", "attention, share of the highest"
        if self.task.kind == "number":
            return self.names[0], f"{self.names[0]}, single patch, share of its range"
        if self.task.kind == "survival":
            return "event", f"event by {self.names[-1]}, single patch"
        return self.names[self._best], f"{self.names[self._best]} probability, single patch"

    @property
    def heat(self) -> _Floats:
        """float64[m] in [0, 1]: attention as a share of the highest, else the prediction of the single patch."""
        if self.attention is not None:
            return self.attention / max(float(self.attention.max()), np.finfo(np.float64).tiny)
        if isinstance(self.task, Number):
            return (self.alone[:, 0] - self.task.low) / (self.task.high - self.task.low)
        return 1 - self.alone[:, -1] if self.task.kind == "survival" else self.alone[:, self._best]

    @property
    def columns(self) -> dict[str, _Floats]:
        """The columns of a table of patches: heading → float64[m]."""
        attention = {} if self.attention is None else {"attention": self.attention}
        heading = COLUMNS[self.task.kind][1]
        return attention | {heading.format(name): self.alone[:, k] for k, name in enumerate(self.names)}


@dataclass(frozen=True)
class Predictor:
    """A site's models with the parameters by which the run's slides were cut into patches.

    Attributes:
        meta: of the training patches or bags.
        input_px: the size to which images are reduced.
        store: the site's mosaics, for runs on mosaics, if they are here.
        tumor_type: of all predicted slides; None for that in the store.
        segmenter: of artifacts, if the pipeline has one.
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
    segmenter: Segmenter | None = None

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of a run on features; WsiFlError if its weights have changed."""
        section: Literal["features", "mosaic"] = "mosaic" if self.kind.data == "mosaics" else "features"
        encoder = encoder_of(self.study, self.pipeline, section, share_of_threads())
        if any(encoder_differences([encoder.label, self.meta.encoder])):
            raise WsiFlError(
                f"{self.run.name} was trained on features of {self.meta.encoder}, but the configuration now names "
                f"{encoder.label}; restore {section}.encoder and {section}.weights, or train again"
            )
        return encoder

    def _require_encoder(self, record: SlideRecord) -> None:
        """Refuse a new slide where the training features were imported and are of another encoder than the study's."""
        wanted = self.meta.encoder
        if not self._imported or not any(encoder_differences([self.pipeline.mosaic.encoder, wanted])):
            return
        receives = 'import its features as a site with role = "receiver" and train again, or '
        raise WsiFlError(
            f"{record.slide}: not in the store of site {self.site.name}, "
            f"whose features of {wanted} were imported, so "
            f"a new slide can't be encoded here; {receives if METHODS[self.run.manifest['method']].once else ''}"
            f"give its features to the file of `wsi-fl export --run {self.run.name} --model MODEL --format onnx`"
        )

    @property
    def _imported(self) -> bool:
        """Whether the run was trained on imported features, whose stores lack the selection of patches."""
        return self.kind.data == "mosaics" and not self.meta.recipe

    def seen(self, record: SlideRecord, watcher: Watcher) -> Seen:
        """Return the patches of a slide or of its mosaic."""
        return self._mosaic(record) if self.kind.data == "mosaics" else self._all_patches(record, watcher)

    def _mosaic(self, record: SlideRecord) -> Seen:
        """Return a mosaic from the site's store, else computed with the run's parameters and encoder."""
        row, path = self._row_of(record), _slide_file(self.study, self.site, record)
        if self.store is not None and row is not None:
            bag = self.store.bag(row)
            path = None if self._imported and path and path.suffix in _OF_FEATURES else path
        elif path is None:
            raise WsiFlError(
                f"{record.path}: no such slide, and none of that name among {record.site}'s mosaics"
            )
        else:
            self._require_encoder(record)
            way = OfSlides(self.study, self.pipeline, self.site.name, self.encoder, share_of_threads())
            way.spec, way.params = self.meta.spec, replace(way.params, **self.meta.recipe)
            bag = way.bag(replace(record, path=path))
        base = self._base(record, path) if path and bag.placed else None
        if self.kind.example != "patch":
            return Seen(bag.xy_l0, None, bag, base)
        return Seen(bag.xy_l0, self.models.probabilities(Examples.of(bag.features)), None, base)

    def _base(self, record: SlideRecord, path: Path) -> Base:
        reader = self.pipeline.slides.reader
        check_opens_safely(path, record.mpp_override, reader)
        with Slide(path, record.mpp_override, reader) as slide:
            thumbnail, downsample = slide.thumbnail(_THUMBNAIL_PX)
            extent = slide.size_l0, slide.bounds_l0
            return Base(path, thumbnail, downsample, slide.mpp, *extent, slide.quickhash)

    def _all_patches(self, record: SlideRecord, watcher: Watcher) -> Seen:
        watcher.update(record.site, 0, 1, f"{record.slide}, finding tissue")
        reader, least = self.pipeline.slides.reader, self.meta.recipe.get("min_tissue")
        params = params_of(self.study, self.pipeline, self.site.annotations_origin)
        if least is not None:
            params = replace(params, min_tissue=float(least))
        check_opens_safely(record.path, record.mpp_override, reader)
        plan = plan_slide(record, self.meta.spec, params, reader=reader, segmenter=self.segmenter)
        aside: dict[int, str] = {}
        notes = set(plan.notes)
        parts, features = [], []
        with torch.inference_mode():
            for images in self._batches(plan, aside, notes):
                shown = images if self.kind.of_images else encode([images], self.encoder)
                if self.kind.example == "patch":
                    parts.append(self.models.probabilities(Examples.of(shown), len(images)))
                else:
                    features.append(shown)
                done = sum(map(len, parts or features)) / len(plan.xy_l0)
                watcher.update(record.site, done, 1, record.slide)
        if not parts and not features:
            raise WsiFlError(next(iter(aside.values())))
        for note in sorted(notes):
            watcher.say(f"  {record.slide}: {note}")
        xy_l0 = np.delete(plan.xy_l0, list(aside), axis=0)
        bag = Bag(np.concatenate(features), xy_l0) if features else None
        extent = plan.size_l0, plan.bounds_l0
        base = Base(record.path, plan.thumbnail, plan.downsample, plan.mpp, *extent, plan.quickhash)
        return Seen(xy_l0, np.concatenate(parts) if parts else None, bag, base, len(aside))

    def _batches(
        self, plan: SlidePlan, aside: dict[int, str], notes: set[str]
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield images uint8[b, input_px, input_px, 3] as in training; unreadable rows go to `excluded` with the
        reason."""
        size = max(1, min(_BATCH, _BATCH_PIXELS // self.input_px**2))
        waiting: list[NDArray[np.uint8]] = []
        threads, reader = share_of_threads(), self.pipeline.slides.reader
        for _, pixels in read_patches(
            plan.record, plan.xy_l0, plan.spec, threads=threads, reader=reader, aside=aside, notes=notes
        ):
            if not len(pixels):
                continue
            waiting.append(reduced(pixels, self.input_px))
            if sum(map(len, waiting)) >= size:
                yield np.concatenate(waiting)
                waiting = []
        if waiting:
            yield np.concatenate(waiting)

    def heat(self, slide: str, seen: Seen) -> Heat:
        """Return the heatmap of predictions of patches."""
        assert seen.said is not None
        if not np.isfinite(seen.said).all():
            raise WsiFlError(f"{slide}: the model gives no numbers; it did not train well")
        if (base := seen.base) is None:
            raise WsiFlError(f"{slide}: the coordinates of its patches are unknown, or its file is not here")
        boxes = patch_boxes(seen.xy_l0, self.meta.spec, base.mpp, base.size_l0)
        return Heat(boxes, self.meta.classes, seen.said)

    def answer(self, bag: Bag, tumor_type: str | None) -> SlidePrediction:
        """Return the prediction of a bag by models of slides or patients, among the classes of its tumour type."""
        task, features = task_of(self.pipeline.target), bag.features
        allowed = allowed_classes(np.array([tumor_type or ""]), self.meta.classes, self.meta.tumor_types)[0]
        slide = self.kind.example == "slide"
        whole = features if slide else features.mean(axis=0, dtype=np.float64)[None]

        def asked(bags: Sequence[NDArray[np.float32]]) -> _Floats:
            examples = unlabelled_bags(bags, allowed, task)
            if not slide:
                rows = np.concatenate(bags).astype(np.float32)
                examples = replace(examples, read=lambda chosen: rows[chosen])
            return self.models.probabilities(examples)

        with torch.inference_mode():
            of_all, alone = asked([whole])[0], asked([patch[None] for patch in features])
            attention = self._attention(bag) if slide else None
        if not np.isfinite(of_all).all() or not np.isfinite(alone).all():
            raise WsiFlError("the model gives no numbers; it did not train well")
        return SlidePrediction(task, self.meta.classes, of_all, alone, attention)

    def _attention(self, bag: Bag) -> _Floats | None:
        """Return the attention float64[m], the mean over models; None if a model of the ensemble has none."""
        x = torch.from_numpy(packed([bag.features])).to(self.models.device)
        weights = [model.attention(x) if isinstance(model, BagModel) else None for model in self.models.asked]
        known = [one[0].double().cpu().numpy() for one in weights if one is not None]
        return np.mean(known, axis=0) if len(known) == len(weights) else None

    def tumor_type_of(self, record: SlideRecord) -> str | None:
        """Return the given tumour type, else that in the store; None where unknown."""
        row = self._row_of(record)
        if self.tumor_type is not None or self.store is None or row is None:
            return self.tumor_type
        return str(self.store.table.tumor_type[row]) or None

    def _row_of(self, record: SlideRecord) -> int | None:
        """Return the row of the slide, given by file or by name, in the store; None without one."""
        slides = np.empty(0, np.str_) if self.store is None else self.store.table.slide
        for name in (record.path.name, record.slide):
            if len(found := np.flatnonzero(slides == name)):
                return int(found[0])
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
    run = RunFolder(study.run(run_name))
    began = as_begun(study, run)
    pipeline, site = settings_of(began, run, overrides), began.site(site_name)
    if not run.site(site_name).path.is_dir():
        took_part = ", ".join(sorted(p.name for p in run.path.glob("sites/*"))) or "none"
        raise UsageError(f"{run.name}: site {site_name} took no part in this run; these did: {took_part}")
    for loss in run.losses():
        if loss["site"] == site_name:
            raise WsiFlError(
                f"{run.name}: site {site_name} dropped out in round {loss['round']} and has no model; "
                f"continue with it by `wsi-fl train --resume {run.name}`"
            )
    kind, facts = kind_of(pipeline), run.site(site.name).store_facts()
    meta = _remembered(site.name, facts)
    if kind.data != "mosaics" and (meta.spec.mpp <= 0 or facts.get("channels", 3) != 3):
        raise UsageError(
            f"site {site.name}: {run.name} learned from images, not slides; predict reads slides"
        )
    if tumor_type is not None and kind.data != "mosaics":
        raise UsageError("--tumor-type is for runs on mosaics (train.data); this one learned from patches")
    if tumor_type is not None and tumor_type not in meta.tumor_types:
        known = ", ".join(meta.tumor_types) or "none"
        raise UsageError(f"unknown tumour type {tumor_type!r}; known: {known}")
    size = (kind.of_images and pipeline.train.input_px) or meta.spec.size_px
    shape = Images(3, size) if kind.of_images else kind.shape(int(facts["n_features"]))
    models = answering(run, pipeline, site, meta.classes, shape, device_of_rank())
    store = _mosaics(study, run, site.name, meta) if kind.data == "mosaics" else None
    segmenter = None if kind.data == "mosaics" else segmenter_of(study, pipeline)
    found = Predictor(study, run, site, pipeline, kind, meta, size, models, store, tumor_type, segmenter)
    if kind.data == "features":
        found.encoder  # noqa: B018 refused here; with mosaics it is needed only for slides outside the store
    return found


def _remembered(site: str, facts: Mapping[str, Any]) -> BagMeta:
    """Return the metadata of the training patches or bags of a site's models."""
    types = {kind: tuple(classes) for kind, classes in facts.get("tumor_types", {}).items()}
    classes, spec = tuple(facts["classes"]), GridSpec(**facts["spec"])
    recipe = facts.get("recipe", {"min_tissue": facts.get("min_tissue")})
    return BagMeta(site, classes, facts.get("encoder", ""), spec, "", types, recipe)


def _mosaics(study: Study, run: RunFolder, site: str, meta: BagMeta) -> BagStore | None:
    if not study.mosaic(site).exists():
        return None
    store = open_bags(study, site, "mosaics")
    if any(encoder_differences([store.meta.encoder, meta.encoder])):
        raise UsageError(
            f"site {site}: its mosaics are of {store.meta.encoder} now, but {run.name} learned from {meta.encoder}; "
            "run `wsi-fl mosaic` with that encoder, or train a new run"
        )
    return store


def _slide_file(study: Study, site: SiteFile, record: SlideRecord) -> Path | None:
    """Return the slide's file: the given path, else among the site's slides; None where there is neither."""
    if record.path.exists():
        return record.path
    name = compose_text(record.path.name)
    found = (path for path in slides_of(study, site) if name in (compose_text(path.name), slide_name(path)))
    return next(found, None)
