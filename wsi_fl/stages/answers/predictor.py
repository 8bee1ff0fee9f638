"""What answers for a site about new slides: how these are cut into patches, and what its models say of them."""

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
"""Images a model sees at once: as many as `evaluate` shows it, fewer where they are large."""
_THUMBNAIL_PX = 1200
_OF_FEATURES = (".h5", ".h5ad", ".pt")
"""Endings of files that a site imported, which show nothing."""

_Floats = NDArray[np.float64]


class Base(NamedTuple):
    """A slide as pictures of it show it: with a thumbnail uint8[h, w, 3], one pixel of which is `downsample` level-0
    pixels of `mpp` µm each.
    """

    path: Path
    thumbnail: NDArray[np.uint8]
    downsample: float
    mpp: float
    size_l0: tuple[int, int]
    bounds_l0: tuple[int, int, int, int]
    quickhash: str


class Seen(NamedTuple):
    """The m patches of a slide that a model was asked about.

    Attributes:
        xy_l0: int64[m, 2].
        said: float64[m, classes], of each patch alone; None for bags, of which all is said at once.
        bag: their features; None where models are asked about each patch.
        base: None where the slide's file is not at hand, or nobody knows where the patches lie.
        n_aside: how many could not be read.
    """

    xy_l0: NDArray[np.int64]
    said: _Floats | None
    bag: Bag | None
    base: Base | None
    n_aside: int = 0


@dataclass(frozen=True)
class SlidePrediction:
    """What a model says of one slide with m patches.

    Attributes:
        task: what was asked.
        names: what each of the k outputs is called.
        whole: float64[k], what is said of the slide; of classes probabilities, 0 for what its tumour type cannot be.
        alone: float64[m, k], the same of each patch by itself.
        attention: float64[m], adding up to 1; None for models that do not weigh their patches.
    """

    task: Task
    names: tuple[str, ...]
    whole: _Floats
    alone: _Floats
    attention: _Floats | None

    @property
    def _best(self) -> int:
        """The position of the most probable class."""
        return int(choose_classes(self.whole[None])[0])

    @property
    def facts(self) -> dict[str, object]:
        """What the document says of it."""
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
        """(the answer, what else is to be said), each in a few words."""
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
        """(short, long) name of what the heatmap shows."""
        if self.attention is not None:
            return "attention", "attention, share of the highest"
        if self.task.kind == "number":
            return self.names[0], f"{self.names[0]}, patch alone, share of its range"
        if self.task.kind == "survival":
            return "event", f"event by {self.names[-1]}, patch alone"
        return self.names[self._best], f"{self.names[self._best]} probability, patch alone"

    @property
    def heat(self) -> _Floats:
        """float64[m] in [0, 1]: attention as a share of the highest, else what is said of the patch alone."""
        if self.attention is not None:
            return self.attention / max(float(self.attention.max()), np.finfo(np.float64).tiny)
        if isinstance(self.task, Number):
            return (self.alone[:, 0] - self.task.low) / (self.task.high - self.task.low)
        return 1 - self.alone[:, -1] if self.task.kind == "survival" else self.alone[:, self._best]

    @property
    def columns(self) -> dict[str, _Floats]:
        """What a table of patches says of each: heading → float64[m]."""
        attention = {} if self.attention is None else {"attention": self.attention}
        heading = COLUMNS[self.task.kind][1]
        return attention | {heading.format(name): self.alone[:, k] for k, name in enumerate(self.names)}


@dataclass(frozen=True)
class Predictor:
    """What answers for one site, and how slides are cut for it, whatever the pipeline says now.

    Attributes:
        meta: of the patches or bags that it learned from.
        input_px: the size that pixels are reduced to.
        store: the mosaics of the site, if it learned from such and they lie here.
        tumor_type: of all slides that are predicted; None for what the store says of each.
        segmenter: tells faults, where the pipeline names one.
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
        """The encoder of a run on features, if it has the same weights still."""
        section: Literal["features", "mosaic"] = "mosaic" if self.kind.data == "mosaics" else "features"
        encoder = encoder_of(self.study, self.pipeline, section, share_of_threads())
        if any(encoder_differences([encoder.label, self.meta.encoder])):
            raise WsiFlError(
                f"{self.run.name} was trained on features of {self.meta.encoder}, but the configuration now names "
                f"{encoder.label}; restore {section}.encoder and {section}.weights, or train again"
            )
        return encoder

    def _require_encoder(self, record: SlideRecord) -> None:
        """Refuse a new slide where features of another encoder than the study's were imported."""
        wanted = self.meta.encoder
        if not self._imported or not any(encoder_differences([self.pipeline.mosaic.encoder, wanted])):
            return
        receives = 'import its features as a site with role = "receiver" and train again, or '
        raise WsiFlError(
            f"{record.slide}: not in the store of site {self.site.name}, whose features of {wanted} were imported, so "
            f"a new slide can't be encoded here; {receives if METHODS[self.run.manifest['method']].once else ''}"
            f"give its features to the file of `wsi-fl export --run {self.run.name} --model MODEL --format onnx`"
        )

    @property
    def _imported(self) -> bool:
        """Whether the run learned from features that were brought: their stores do not say how patches were chosen."""
        return self.kind.data == "mosaics" and not self.meta.recipe

    def seen(self, record: SlideRecord, watcher: Watcher) -> Seen:
        """Return the patches of a slide: of its mosaic, or all of them."""
        return self._mosaic(record) if self.kind.data == "mosaics" else self._all_patches(record, watcher)

    def _mosaic(self, record: SlideRecord) -> Seen:
        """From the site's store, else made now with the run's parameters and encoder."""
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
        """Images uint8[b, input_px, input_px, 3], reduced as for training, few at a time; row → why it is missing."""
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
        """Return what models of patches say of each of them."""
        assert seen.said is not None
        if not np.isfinite(seen.said).all():
            raise WsiFlError(f"{slide}: the model gives no numbers; it did not train well")
        if (base := seen.base) is None:
            raise WsiFlError(f"{slide}: the places of its patches are unknown, or its file is not here")
        boxes = patch_boxes(seen.xy_l0, self.meta.spec, base.mpp, base.size_l0)
        return Heat(boxes, self.meta.classes, seen.said)

    def answer(self, bag: Bag, tumor_type: str | None) -> SlidePrediction:
        """Return what models of slides or patients say of a bag, of the classes that a tumour type may have."""
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
        """float64[m], of two models the mean; None unless every model that is asked weighs its patches."""
        x = torch.from_numpy(packed([bag.features])).to(self.models.device)
        weights = [model.attention(x) if isinstance(model, BagModel) else None for model in self.models.asked]
        known = [one[0].double().cpu().numpy() for one in weights if one is not None]
        return np.mean(known, axis=0) if len(known) == len(weights) else None

    def tumor_type_of(self, record: SlideRecord) -> str | None:
        """Return the tumour type as asked for, else as the store has it; None where nothing is known."""
        row = self._row_of(record)
        if self.tumor_type is not None or self.store is None or row is None:
            return self.tumor_type
        return str(self.store.table.tumor_type[row]) or None

    def _row_of(self, record: SlideRecord) -> int | None:
        """Where the slide stands in the store; it may be given by file or by name."""
        slides = np.empty(0, np.str_) if self.store is None else self.store.table.slide
        for name in (record.path.name, record.slide):
            if len(found := np.flatnonzero(slides == name)):
                return int(found[0])
        return None


def load_predictor(
    study: Study, run_name: str, site_name: str, tumor_type: str | None = None, overrides: Sequence[str] = ()
) -> Predictor:
    """Load the trained models of a site that was not lost, and open its mosaics where it learned from such.

    Refused are an unknown tumour type, images that are no slides, and an encoder that has other weights by now.

    Args:
        overrides: `predict.KEY=VALUE` over the run's configuration.
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
                f"{run.name}: site {site_name} was lost in round {loss['round']} and has no model; "
                f"take it back in with `wsi-fl train --resume {run.name}`"
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
        found.encoder  # noqa: B018 refused now; of a mosaic it is needed only where a slide is not in the store
    return found


def _remembered(site: str, facts: Mapping[str, Any]) -> BagMeta:
    """Return what the patches or bags were like that a site's models learned from."""
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
    """Return the slide's file: as given, else among the site's slides; None where it is in neither place."""
    if record.path.exists():
        return record.path
    name = compose_text(record.path.name)
    found = (path for path in slides_of(study, site) if name in (compose_text(path.name), slide_name(path)))
    return next(found, None)
