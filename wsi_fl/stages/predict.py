"""`predict`: what a site's private model says of new slides: heatmap, outlines for QuPath, patches, score.

Only the run, the slides given and, where it is there, the site's own store are opened.
"""

from __future__ import annotations

import csv
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl import config
from wsi_fl.config import Pipeline
from wsi_fl.files import atomic, write_bytes, write_json
from wsi_fl.learning.examples import resized, unlabelled
from wsi_fl.learning.local import probabilities
from wsi_fl.report.heatmap import Caption, draw_heatmap
from wsi_fl.runs import RunFolder
from wsi_fl.slides.geojson import Color, write_geojson
from wsi_fl.slides.heat import Heat, leading, patch_boxes, score
from wsi_fl.slides.planning import PlanParams, SlidePlan, plan_slide, read_patches
from wsi_fl.slides.reader import Reader
from wsi_fl.stages.console import Silent, Watcher, say
from wsi_fl.stages.devices import device_of_rank
from wsi_fl.stages.tile import spec_of
from wsi_fl.stages.tile_plans import one_line
from wsi_fl.stages.trained import Inputs, inputs_of, private_model
from wsi_fl.stages.workshop import open_store, store_digest
from wsi_fl.study import Study
from wsi_fl.types import CLASSES, DiskFull, SetAside, SlideRecord, UsageError, WsiFlError

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
    """One site's private model, and how slides are cut for it."""

    run: RunFolder
    site: config.Site
    pipeline: Pipeline
    inputs: Inputs
    model: torch.nn.Module
    device: torch.device


def predict(
    study: Study,
    run_name: str,
    *,
    site: str,
    slides: Sequence[Path],
    out: Path | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Predicts slides one by one; returns the `--json` document, whose `failed` names those that could not be.

    Args:
        out: folder for one folder per slide; default RUN/predictions/SITE.
        overrides: `predict.KEY=VALUE` over the run's configuration.
    """
    began = time.perf_counter()
    watcher = watcher or Silent()
    names = _names(slides)
    predictor = load_predictor(study, run_name, site, overrides, watcher)
    folder = out.resolve() if out is not None else predictor.run.path / "predictions" / site
    rows: list[dict[str, Any]] = []
    failed: list[SetAside] = []
    for path, name in zip(slides, names, strict=True):
        record = SlideRecord(
            path, name, "", site, "negative", positive=False, mpp_override=predictor.site.mpp_override
        )
        try:
            rows.append(_predict_slide(study, predictor, record, folder / name, watcher))
        except (DiskFull, UsageError):
            raise
        except WsiFlError as error:
            failed.append(SetAside(name, str(error)))
        except Exception as error:  # one slide that a library chokes on must not end the others
            failed.append(SetAside(name, one_line(error)))
        if failed and failed[-1].slide == name:
            watcher.say(f"  {name} failed: {failed[-1].reason}")
    return {
        "run": study.relative(predictor.run.path),
        "site": site,
        "slides": rows,
        "failed": [{"slide": one.slide, "reason": one.reason} for one in failed],
        "seconds": time.perf_counter() - began,
    }


def _names(slides: Sequence[Path]) -> list[str]:
    """The slides' names: file names without suffix, as in a store."""
    names = [path.name if path.is_dir() else path.stem for path in slides]
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"two slides are called {twice[0]}; predict them one after the other with --out")
    return names


def load_predictor(
    study: Study, run_name: str, site_name: str, overrides: Sequence[str], watcher: Watcher
) -> Predictor:
    """The trained model of a site.

    Raises:
        UsageError, WsiFlError: when the run, the site or its model is not there, or the site was lost.
    """
    run = RunFolder(study.run(run_name))
    if strange := [one for one in overrides if not one.strip().startswith("predict.")]:
        raise UsageError(f"--set {strange[0]}: a run keeps its configuration; only predict.* can be changed")
    pipeline = study.pipeline(str(run.path / "config.toml"), overrides)
    site = study.site(site_name)
    if not run.site(site_name).path.is_dir():
        took_part = ", ".join(sorted(p.name for p in run.path.glob("sites/*"))) or "none"
        raise UsageError(f"{run.name}: site {site_name} took no part in this run; these did: {took_part}")
    for loss in run.losses():
        if loss["site"] == site_name:
            raise WsiFlError(
                f"{run.name}: site {site_name} was lost in round {loss['round']} and has no model; "
                f"take it back in with `wsi-fl train --resume {run.name}`"
            )
    inputs = _inputs(study, run, pipeline, site_name, watcher)
    device = device_of_rank()
    model = private_model(run, pipeline, site, inputs, device)
    return Predictor(run, site, pipeline, inputs, model, device)


def _inputs(study: Study, run: RunFolder, pipeline: Pipeline, site: str, watcher: Watcher) -> Inputs:
    """What the model was trained on: the site's store says it, or the run's configuration where that is gone."""
    why = "is not here"
    if study.store(site).exists():
        with open_store(study, site) as store:
            if store.meta.spec.mpp <= 0 or store.channels != 3:
                raise UsageError(f"site {site}: its store holds images, not slides; predict reads slides")
            if run.site(site).store_digest() in (None, store_digest(store)):
                return inputs_of(pipeline, store)
        why = "was made anew since this run"
    watcher.say(f"the store of {site} {why}: slides are tiled as the run's config.toml says")
    return Inputs(CLASSES, 3, spec_of(pipeline), pipeline.train.input_px or pipeline.tile.size_px)


def _predict_slide(
    study: Study, predictor: Predictor, record: SlideRecord, folder: Path, watcher: Watcher
) -> dict[str, Any]:
    """All files of one slide, and its row of the document."""
    watcher.update(record.slide, 0, 1, "finding tissue")
    tile = predictor.pipeline.tile
    reader = predictor.pipeline.slides.reader
    plan = plan_slide(record, predictor.inputs.spec, PlanParams(min_tissue=tile.min_tissue), reader=reader)
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
        {"run": study.relative(predictor.run.path), "site": record.site}
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
            p = probabilities(predictor.model, unlabelled(images), predictor.device, size)
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
        f"{_percent(found['fraction'])} of patches at {settings.threshold:g} or more",
    )


def _percent(share: float) -> str:
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


def print_predictions(document: dict[str, Any]) -> None:
    """A row per slide, then the pictures' paths on stdout."""
    from rich.table import Table

    from wsi_fl.stages.console import stderr

    if document["slides"]:
        table = Table(title=f"private model of {document['site']}", title_justify="left")
        for heading in ("slide", "patches", "max", "top k", "over threshold"):
            table.add_column(heading, justify="left" if heading == "slide" else "right", no_wrap=True)
        for row in document["slides"]:
            found = row["score"]
            table.add_row(
                row["slide"],
                str(row["patches"]),
                f"{found['max']:.3f}",
                f"{found['top_k_mean']:.3f}",
                _percent(found["fraction"]),
            )
        stderr.print(table)
    else:
        say("no slide could be predicted", style="bold yellow")
    for row in document["slides"]:
        print(row["heatmap"])
