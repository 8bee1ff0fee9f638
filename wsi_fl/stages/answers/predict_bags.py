"""`predict` of a run on mosaics: what a whole slide is, and which of its patches that rests on."""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.learning.bags import allowed_classes, packed, unlabelled_bags
from wsi_fl.models.bags import BagModel
from wsi_fl.runs.run import RunFolder
from wsi_fl.slides.choosing.grid import size_in_l0
from wsi_fl.slides.pictures.heat import Heat, patch_boxes
from wsi_fl.slides.pictures.heatmap import Caption, draw_heatmap
from wsi_fl.slides.reading.probe import vouch_for
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.answers.bag_answers import Answer
from wsi_fl.stages.answers.trained import Answering, answering
from wsi_fl.stages.prepare.mosaic import work_of
from wsi_fl.stages.prepare.mosaic_slides import Work, bag_of_slide
from wsi_fl.stages.site.data import open_mosaic
from wsi_fl.stages.site.encoders import encoder_of
from wsi_fl.stages.site.kept import remembered_mosaics
from wsi_fl.stages.site.targets import task_of
from wsi_fl.stages.work.console import Watcher
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.stores.features import Bag, FeatureMeta, FeatureStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import atomic, write_bytes, write_json
from wsi_fl.types import SlideRecord, UsageError, WsiFlError

_THUMBNAIL_PX = 1200
_OTHERWISE = (150, 150, 150)
_ATTENTION = (200, 0, 0)


@dataclass(frozen=True)
class BagPredictor:
    """What answers for one site, and the mosaics that are at hand.

    Attributes:
        meta: of the mosaics it learned from.
        store: the site's mosaics, if they lie here.
        tumor_type: of all slides that are predicted; None for what the store says of each.
    """

    study: Study
    run: RunFolder
    site: SiteFile
    pipeline: Pipeline
    meta: FeatureMeta
    store: FeatureStore | None
    models: Answering
    tumor_type: str | None

    @cached_property
    def work(self) -> Work:
        """How the run's mosaics were made, whatever the pipeline says now.

        Raises:
            WsiFlError: when the encoder has other weights by now.
        """
        threads = len(os.sched_getaffinity(0))
        encoder = encoder_of(self.study, self.pipeline.mosaic, threads)
        if encoder.label != self.meta.encoder:
            raise WsiFlError(
                f"{self.run.name} was trained on features of {self.meta.encoder}, but the configuration now names "
                f"{encoder.label}; restore mosaic.encoder and mosaic.weights, or train again"
            )
        work = work_of(self.study, self.pipeline, self.site.name, encoder, threads)
        return replace(work, spec=self.meta.spec, params=replace(work.params, **self.meta.recipe))


def load_bag_predictor(
    study: Study, run: RunFolder, pipeline: Pipeline, site: SiteFile, tumor_type: str | None
) -> BagPredictor:
    """The trained model of a site, with its mosaics.

    Raises:
        UsageError: when the run knows no such tumour type, or the mosaics have another encoder by now.
    """
    meta, shape = remembered_mosaics(run.site(site.name))
    known = meta.tumor_types
    if tumor_type is not None and tumor_type not in known:
        raise UsageError(f"unknown tumour type {tumor_type!r}; known: {', '.join(known) or 'none'}")
    store = open_mosaic(study, site.name) if study.mosaic(site.name).exists() else None
    if store is not None and store.meta.encoder != meta.encoder:
        raise UsageError(
            f"site {site.name}: its mosaics are of {store.meta.encoder} by now, {run.name} learned from "
            f"{meta.encoder}; run `wsi-fl mosaic` with that encoder, or train a new run"
        )
    models = answering(run, pipeline, site, meta.classes, shape, device_of_rank())
    return BagPredictor(study, run, site, pipeline, meta, store, models, tumor_type)


def bag_of(predictor: BagPredictor, record: SlideRecord) -> Bag:
    """The mosaic of a slide: from the site's store, else made now with the run's parameters and encoder.

    Raises:
        WsiFlError: when there is no such slide, it gives no mosaic, or the encoder is another one.
    """
    row = _row_of(predictor.store, record)
    if predictor.store is not None and row is not None:
        return predictor.store.bag(row)
    path = slide_file(predictor.study, predictor.site, record)
    if path is None:
        raise WsiFlError(f"{record.path}: no such slide, and none of that name among {record.site}'s mosaics")
    return bag_of_slide(replace(record, path=path), predictor.work)


def _row_of(store: FeatureStore | None, record: SlideRecord) -> int | None:
    """Where the slide stands in the store; it may be given by file or by name."""
    slides = np.empty(0, np.str_) if store is None else store.table.slide
    for name in (record.path.name, record.slide):
        if len(found := np.flatnonzero(slides == name)):
            return int(found[0])
    return None


def predict_bag(
    study: Study, predictor: BagPredictor, record: SlideRecord, folder: Path, watcher: Watcher
) -> dict[str, Any]:
    """All files of one slide, and its row of the document; no heatmap without slide or places."""
    watcher.update(record.slide, 0, 1)
    meta, bag = predictor.meta, bag_of(predictor, record)
    kind = _tumor_type(predictor, record)
    answer = answer_of(predictor, bag, kind)
    path = slide_file(study, predictor.site, record) if bag.placed else None
    size_l0 = None
    if path is not None:
        reader = predictor.pipeline.slides.reader
        vouch_for(path, record.mpp_override, reader)
        with Slide(path, record.mpp_override, reader) as slide:
            write_bytes(folder / "heatmap.png", _picture(predictor, record, slide, bag, answer))
            size_l0 = size_in_l0(meta.spec, slide.mpp)
    _write_patches(folder / "patches.csv", bag, answer, size_l0)
    row = {
        "slide": record.slide,
        "patches": len(bag.features),
        "tumor_type": kind,
        **answer.facts,
    }
    origin = {
        "run": study.relative(predictor.run.path),
        "site": record.site,
        "path": None if path is None else study.relative(path.resolve()),
        "with": predictor.models.answer,
        "encoder": meta.encoder,
    }
    write_json(folder / "score.json", origin | row | {"size_px": meta.spec.size_px, "mpp": meta.spec.mpp})
    watcher.update(record.slide, 1, 1)
    files = {"heatmap": "heatmap.png", "csv": "patches.csv", "json": "score.json"}
    made = {key: study.relative(folder / file) for key, file in files.items()}
    return row | made | ({"heatmap": None} if path is None else {})


def _tumor_type(predictor: BagPredictor, record: SlideRecord) -> str | None:
    """As asked for, else as the store has it; None where nothing is known."""
    row = _row_of(predictor.store, record)
    if predictor.tumor_type is not None or predictor.store is None or row is None:
        return predictor.tumor_type
    return str(predictor.store.table.tumor_type[row]) or None


def answer_of(predictor: BagPredictor, bag: Bag, tumor_type: str | None) -> Answer:
    """The model's answer for a bag, of the classes that a tumour type may have.

    Raises:
        WsiFlError: when the features are not the model's, or it gives no numbers.
    """
    meta, task = predictor.meta, task_of(predictor.pipeline.target)
    allowed = allowed_classes(np.array([tumor_type or ""]), meta.classes, meta.tumor_types)[0]

    def asked(bags: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        return predictor.models.probabilities(unlabelled_bags(bags, allowed, task))

    with torch.inference_mode():
        whole = asked([bag.features])[0]
        alone = asked([patch[None] for patch in bag.features])
        attention = _attention(predictor.models, bag)
    if not np.isfinite(whole).all() or not np.isfinite(alone).all():
        raise WsiFlError("the model gives no numbers; it did not train well")
    return Answer(task, meta.classes, whole, alone, attention)


def _attention(models: Answering, bag: Bag) -> NDArray[np.float64] | None:
    """float64[m], of two models the mean; None unless every model that is asked weighs its patches."""
    x = torch.from_numpy(packed([bag.features])).to(models.device)
    weights = [model.attention(x) if isinstance(model, BagModel) else None for model in models.asked]
    known = [one[0].double().cpu().numpy() for one in weights if one is not None]
    return np.mean(known, axis=0) if len(known) == len(weights) else None


def slide_file(study: Study, site: SiteFile, record: SlideRecord) -> Path | None:
    """The slide's file: as given, else among the site's slides; None where it is in neither place."""
    if record.path.exists():
        return record.path
    patterns = [site.slides] if isinstance(site.slides, str) else site.slides or []
    root = Study(Path(glob.escape(str(study.root))))
    for pattern in patterns:
        for found in glob.iglob(str(root.resolve(pattern)), recursive=True):  # noqa: PTH207 may be absolute
            if record.path.name in (Path(found).name, Path(found).stem):
                return Path(found)
    return None


def _picture(predictor: BagPredictor, record: SlideRecord, slide: Slide, bag: Bag, answer: Answer) -> bytes:
    """The heatmap over the slide's thumbnail."""
    spec = predictor.meta.spec
    thumbnail, downsample = slide.thumbnail(_THUMBNAIL_PX)
    boxes = patch_boxes(bag.xy_l0, spec, slide.mpp, slide.size_l0)
    (said, more), (shown, legend) = answer.words, answer.legend
    values = np.stack([1 - answer.heat, answer.heat], axis=1)
    heat = Heat(boxes, ("other", shown), values, predictor.pipeline.predict.threshold)
    caption = Caption(
        record.slide,
        f"{predictor.run.name} · {predictor.site.name} · mosaic of {len(boxes)} patches of {spec.size_px} px "
        f"at {spec.mpp:g} µm",
        said,
        more,
        legend,
    )
    return draw_heatmap(thumbnail, downsample, slide.mpp, heat, [_OTHERWISE, _ATTENTION], caption)


def _write_patches(path: Path, bag: Bag, answer: Answer, size_l0: float | None) -> None:
    """patches.csv: a row per patch of the mosaic; what the model would say of that patch alone."""
    weighs = answer.attention is not None
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        heading = ["x_l0", "y_l0", "size_l0", *(["attention"] if weighs else [])]
        writer.writerow([*heading, *answer.columns])
        side = "" if size_l0 is None else f"{size_l0:.3f}".rstrip("0").rstrip(".")
        for k, (x, y) in enumerate(bag.xy_l0.tolist()):
            weight = [] if answer.attention is None else [f"{answer.attention[k]:.6f}"]
            writer.writerow([x, y, side, *weight, *(f"{p:.6f}" for p in answer.alone[k].tolist())])
