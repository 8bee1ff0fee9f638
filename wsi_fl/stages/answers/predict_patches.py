"""`predict` of a run on patches: heatmap, outlines for QuPath, patches, score of one slide."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, resized, unlabelled
from wsi_fl.models.encoder import Encoder, encode
from wsi_fl.runs.run import RunFolder
from wsi_fl.slides.choosing.patches import SlidePlan, plan_slide
from wsi_fl.slides.choosing.quality import Segmenter
from wsi_fl.slides.pictures.geojson import Color, write_geojson
from wsi_fl.slides.pictures.heat import Heat, leading, patch_boxes, score
from wsi_fl.slides.pictures.heatmap import Caption, draw_heatmap
from wsi_fl.slides.reading.patches import read_patches
from wsi_fl.slides.reading.probe import vouch_for
from wsi_fl.slides.reading.reader import Reader
from wsi_fl.stages.answers.trained import Answering, Inputs, answering
from wsi_fl.stages.prepare.quality import params_of, segmenter_of
from wsi_fl.stages.site.encoders import encoder_of
from wsi_fl.stages.site.kinds import kind_of
from wsi_fl.stages.work.console import Watcher
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import atomic, write_bytes, write_json
from wsi_fl.types import GridSpec, SlideRecord, UsageError, WsiFlError

_BATCH, _BATCH_PIXELS = 256, 1 << 22
"""Images a model sees at once: as many as `evaluate` shows it, fewer where they are large."""

_COLORS: tuple[Color, ...] = ((150, 200, 150), (200, 0, 0))
"""Healthy, and QuPath's own red for Tumor."""
_MORE_COLORS: tuple[Color, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
)
"""Okabe and Ito's, for more than two classes."""


@dataclass(frozen=True)
class Predictor:
    """What answers for one site, and how slides are cut for it.

    Attributes:
        encoder: of runs on features; None where models see pixels.
        segmenter: tells faults, where the pipeline names one.
    """

    run: RunFolder
    site: SiteFile
    pipeline: Pipeline
    inputs: Inputs
    models: Answering
    encoder: Encoder | None = None
    segmenter: Segmenter | None = None

    def seen(self, images: NDArray[np.uint8]) -> Examples:
        """Images uint8[b, h, w, 3] as the models see them."""
        return unlabelled(images if self.encoder is None else encode([images], self.encoder))


def load_predictor(study: Study, run: RunFolder, pipeline: Pipeline, site: SiteFile) -> Predictor:
    """The trained models of a site, and how slides are cut for them."""
    inputs = _inputs(run, pipeline, site.name)
    encoder = None if kind_of(pipeline).of_images else _encoder(study, run, pipeline, site.name)
    models = answering(run, pipeline, site, inputs.classes, inputs.shape, device_of_rank())
    return Predictor(run, site, pipeline, inputs, models, encoder, segmenter_of(study, pipeline))


def _encoder(study: Study, run: RunFolder, pipeline: Pipeline, site: str) -> Encoder:
    """The encoder of a run on features.

    Raises:
        WsiFlError: when it has other weights by now.
    """
    encoder = encoder_of(study, pipeline.encoding, len(os.sched_getaffinity(0)), "features")
    began = run.site(site).store_facts()["encoder"]
    if encoder.label != began:
        raise WsiFlError(
            f"{run.name} was trained on features of {began}, but the configuration now names "
            f"{encoder.label}; restore features.encoder and features.weights, or train again"
        )
    return encoder


def _inputs(run: RunFolder, pipeline: Pipeline, site: str) -> Inputs:
    """What a site's models learned from."""
    facts = run.site(site).store_facts()
    spec, min_tissue = GridSpec(**facts["spec"]), facts["min_tissue"]
    if spec.mpp <= 0 or facts.get("channels", 3) != 3:
        raise UsageError(f"site {site}: {run.name} learned from images, not slides; predict reads slides")
    return Inputs(
        classes=tuple(facts["classes"]),
        spec=spec,
        input_px=(kind_of(pipeline).of_images and pipeline.train.input_px) or spec.size_px,
        min_tissue=pipeline.tile.min_tissue if min_tissue is None else float(min_tissue),
        n_features=facts.get("n_features"),
    )


def predict_patches(
    study: Study, predictor: Predictor, record: SlideRecord, folder: Path, watcher: Watcher
) -> dict[str, Any]:
    """All files of one slide, and its row of the document."""
    watcher.update(record.slide, 0, 1, "finding tissue")
    inputs, reader = predictor.inputs, predictor.pipeline.slides.reader
    params = replace(params_of(study, predictor.pipeline), min_tissue=inputs.min_tissue)
    vouch_for(record.path, record.mpp_override, reader)
    plan = plan_slide(record, inputs.spec, params, reader=reader, segmenter=predictor.segmenter)
    heat, aside = heat_of(predictor, plan, watcher)
    if aside:
        plan = replace(plan, xy_l0=np.delete(plan.xy_l0, list(aside), axis=0))
    settings = predictor.pipeline.predict
    kind = leading(heat)
    slide_score = score(heat, kind, settings.top_k)
    colors = colors_of(heat.classes)
    files = {
        "heatmap": folder / "heatmap.png",
        "geojson": folder / "tumor.geojson",
        "csv": folder / "patches.csv",
        "json": folder / "score.json",
    }
    caption = _caption(predictor, plan, heat, slide_score, kind)
    picture = draw_heatmap(plan.thumbnail, plan.downsample, plan.mpp, heat, colors, caption)
    write_bytes(files["heatmap"], picture)
    identity = f"{predictor.run.name}/{record.site}/{record.slide}"
    write_geojson(files["geojson"], heat, colors, identity)
    _write_patches(files["csv"], plan, heat)
    row = {"slide": record.slide, "patches": len(plan.xy_l0), "set_aside": len(aside), "score": slide_score}
    write_json(
        files["json"],
        {
            "run": study.relative(predictor.run.path),
            "site": record.site,
            "path": study.relative(record.path.resolve()),
            "with": predictor.models.answer,
        }
        | row
        | {
            "class": heat.classes[kind],
            "classes": {heat.classes[k]: score(heat, k, settings.top_k) for k in heat.shown},
            "regions": len(heat.regions),
            "threshold": settings.threshold,
            "top_k": settings.top_k,
            "size_px": plan.spec.size_px,
            "mpp": plan.spec.mpp,
            "stride_px": plan.spec.stride_px,
            "slide_mpp": plan.mpp,
            "quickhash": plan.quickhash,
        },
    )
    return row | {name: study.relative(path) for name, path in files.items()}


def heat_of(predictor: Predictor, plan: SlidePlan, watcher: Watcher) -> tuple[Heat, dict[int, str]]:
    """The model's probabilities of every patch of a plan; holds a few batches of pixels at a time.

    Also row → reason of the patches that cannot be decoded, which are left out.

    Raises:
        WsiFlError: when no patch can, or the model gives no numbers.
    """
    aside: dict[int, str] = {}
    n = len(plan.xy_l0)
    inputs = predictor.inputs
    predicted = np.empty((n, len(inputs.classes)))
    size = max(1, min(_BATCH, _BATCH_PIXELS // inputs.input_px**2))
    done = 0
    with torch.inference_mode():
        for images in _batches(plan, inputs.input_px, size, predictor.pipeline.slides.reader, aside):
            p = predictor.models.probabilities(predictor.seen(images), size)
            predicted[done : done + len(p)] = p
            done += len(p)
            watcher.update(plan.record.slide, done, n)
    if not done:
        raise WsiFlError(next(iter(aside.values())))
    predicted = predicted[:done]
    if not np.isfinite(predicted).all():
        raise WsiFlError(f"{plan.record.slide}: the model gives no numbers; it did not train well")
    boxes = patch_boxes(np.delete(plan.xy_l0, list(aside), axis=0), plan.spec, plan.mpp, plan.size_l0)
    return Heat(boxes, inputs.classes, predicted, predictor.pipeline.predict.threshold), aside


def _batches(
    plan: SlidePlan, input_px: int, size: int, reader: Reader, aside: dict[int, str]
) -> Iterator[NDArray[np.uint8]]:
    """Images uint8[b, input_px, input_px, 3], reduced as for training, `size` or a few more at a time."""
    waiting: list[NDArray[np.uint8]] = []
    threads = len(os.sched_getaffinity(0))
    for _, pixels in read_patches(
        plan.record, plan.xy_l0, plan.spec, threads=threads, reader=reader, aside=aside
    ):
        if not len(pixels):
            continue
        waiting.append(resized(unlabelled(pixels), input_px).read(np.arange(len(pixels))))
        if sum(map(len, waiting)) >= size:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


def colors_of(classes: Sequence[str]) -> list[Color]:
    """A colour for each class."""
    if len(classes) == 2:
        return list(_COLORS)
    return [_MORE_COLORS[k % len(_MORE_COLORS)] for k in range(len(classes))]


def _caption(
    predictor: Predictor, plan: SlidePlan, heat: Heat, found: dict[str, float], kind: int
) -> Caption:
    settings = predictor.pipeline.predict
    n = len(plan.xy_l0)
    name = heat.classes[kind]
    return Caption(
        plan.record.slide,
        f"{predictor.run.name} · {predictor.site.name} · {n} patches of {plan.spec.size_px} px "
        f"at {plan.spec.mpp:g} µm",
        f"{name} {found['top_k_mean']:.2f}",
        f"mean of the {min(settings.top_k, n)} highest; highest {found['max']:.2f}; "
        f"{percent(found['fraction'])} of patches at {settings.threshold:g} or more",
    )


def percent(share: float) -> str:
    """Whole per cent, but never 0 % of something."""
    return "under 1 %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")


def _write_patches(path: Path, plan: SlidePlan, heat: Heat) -> None:
    """patches.csv: a row per patch, its side and corner in level-0 pixels."""
    side = f"{plan.spec.size_px * plan.spec.mpp / plan.mpp:.3f}".rstrip("0").rstrip(".")
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["x_l0", "y_l0", "size_l0", *(f"p_{name}" for name in heat.classes)])
        for (x, y), p in zip(plan.xy_l0.tolist(), heat.probabilities.tolist(), strict=True):
            writer.writerow([x, y, side, *(f"{value:.6f}" for value in p)])
