"""`demo`: the whole job on painted slides, in minutes, on any machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.demo.phantom import paint_archive, paint_slide, plan_slides, write_pyramid
from wsi_fl.models.weights import untrained_weights
from wsi_fl.stages.answers.compare import compare, compare_lines
from wsi_fl.stages.answers.evaluate import evaluate, evaluation_lines
from wsi_fl.stages.answers.report import report
from wsi_fl.stages.prepare.bags import features
from wsi_fl.stages.prepare.directions import directions, directions_lines
from wsi_fl.stages.prepare.init import init
from wsi_fl.stages.prepare.tile import tile, tile_lines
from wsi_fl.stages.training.train import summary_lines, train
from wsi_fl.stages.work.console import Bars, Lines, render, say
from wsi_fl.study.folder import Study
from wsi_fl.system.tensors import save_tensors
from wsi_fl.types import UsageError

_ENCODER, INPUT_PX = "resnet18", 64
_PATCH_PX, _PUBLIC_PX, _GLASS = 256, 1024, 225
_PIPELINE = "demo"
_N_SITES = 4
_PATIENTS_PER_SITE = 20
_SLIDE_PX = 1536
_ILL = (1.0, 0.5, 0.15, 0.0)
"""Share of each hospital's patients who have metastases: one hospital sees few, one none."""
_WEIGHTS, _DIRECTIONS, _PUBLIC = "weights/untrained.safetensors", "weights/projection.safetensors", "public"
_PUBLIC_SEED, _N_DIRECTIONS, _PUBLIC_MPP = 99, 16, 0.5
"""There are 9 to 15 patients in a hospital, for whom 32 directions are many."""


def demo(folder: Path) -> dict[str, Any]:
    """Paint, tile, encode, train each hospital alone and all together, compare and report, into `folder`.

    A demo that was interrupted goes on where it can: painted slides and finished shards are kept.

    Returns:
        The `--json` document, of which `report` is the page that says what joining brings each hospital.
    """
    study = _study(folder)
    with Bars("tile") as bars:
        render(tile_lines(tile(study, site=None, pipeline_name=_PIPELINE, watcher=bars)))
    weights = study.root / _WEIGHTS
    if not weights.exists():
        write_untrained(weights)
    with Bars("features") as bars:
        features(study, site=None, pipeline_name=_PIPELINE, watcher=bars)
    if not (study.root / _DIRECTIONS).exists():
        _find_directions(study)
    runs = {name: _trained(study, step) for name, step in _STEPS.items()}
    say("What joining brings each hospital", style="bold")
    compare_with = [runs[name]["run"] for name in ("federated", "proxyfl", "pooled")]
    with Bars("compare") as bars:
        compared = compare(study, compare_with, watcher=bars)
    render(compare_lines(compared))
    page = report(study, runs["federated"]["run"])
    return {
        "study": str(study.root),
        "runs": runs,
        "benefit": compared["benefit"],
        "report": str(study.root / compared["page"]),
        "run_report": str(page),
    }


@dataclass(frozen=True)
class _Step:
    says: str
    method: str
    backend: str
    overrides: tuple[str, ...] = ()


_ALONE = ("privacy.enabled=false", "train.tune=true", "train.rounds=1")
_STEPS = {
    "local": _Step("What each hospital reaches alone, at its best", "regular", "local", _ALONE),
    "pooled": _Step("What all data in one place would reach, which nobody may do", "joint", "local", _ALONE),
    "proxyfl": _Step(
        "ProxyFL, the paper's method: four hospitals, one MPI rank each; only noisy proxies travel, in ten rounds",
        "proxyfl",
        "mpi",
        ("train.rounds=10", "train.eval_every=10"),
    ),
    "federated": _Step(
        "One letter: each hospital releases noisy sums of its classes, once, instead of proxies in rounds",
        "oneshot",
        "mpi",
    ),
}


def _trained(study: Study, step: _Step) -> dict[str, Any]:
    say(step.says, style="bold")
    with Bars("train") as bars:
        summary = train(
            study,
            method=step.method,
            pipeline_name=_PIPELINE,
            overrides=step.overrides,
            backend=step.backend,
            watcher=bars,
        )
    render(summary_lines(summary))
    with Bars("evaluate") as bars:
        evaluation = evaluate(study, summary["run"], watcher=bars)
    render(evaluation_lines(evaluation))
    return {"run": summary["run"], "merged": evaluation["merged"]}


def _find_directions(study: Study) -> None:
    """Paint slides of no hospital, and find in them along which directions features are summed."""
    public = study.root / _PUBLIC
    public.mkdir(exist_ok=True)
    for slide in plan_slides(_N_SITES, 1, _SLIDE_PX, _PUBLIC_SEED):
        write_pyramid(public / f"{slide.name}.tif", paint_slide(slide), _PUBLIC_MPP)
    out = study.root / _DIRECTIONS
    with Bars("projection") as bars:
        found = directions(study, [public], out=out, pipeline_name=_PIPELINE, n=_N_DIRECTIONS, watcher=bars)
    render(directions_lines(found))


def write_untrained(path: Path) -> None:
    """Write the weights of the demo's encoder, always the same, with timm's names.

    It was never trained, since the demo may download nothing; studies take a pretrained one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, untrained_weights(_ENCODER, public_patches()), {})


def public_patches() -> NDArray[np.uint8]:
    """Return patches uint8[n, INPUT_PX, INPUT_PX, 3] of tissue, painted of slides that belong to no hospital."""
    step, found = _PATCH_PX // INPUT_PX, []
    for slide in plan_slides(4, 1, _PUBLIC_PX, _PUBLIC_SEED):
        picture = paint_slide(slide)[::step, ::step]
        side = _PUBLIC_PX // _PATCH_PX
        grid = picture.reshape(side, INPUT_PX, side, INPUT_PX, 3)
        patches = grid.swapaxes(1, 2).reshape(-1, INPUT_PX, INPUT_PX, 3)
        found.append(patches[patches.mean((1, 2, 3)) < _GLASS])
    return np.concatenate(found)


_UNFINISHED = {"archive", "archive.unfinished", "pipelines", "sites.unfinished"}
"""What a demo that was killed before its study was whole may have left."""


def _study(folder: Path) -> Study:
    root = folder.resolve()
    if (root / "sites").is_dir() and (root / "pipelines" / f"{_PIPELINE}.toml").is_file():
        return Study(root)
    if root.exists() and any(p.name not in _UNFINISHED for p in root.iterdir()):
        raise UsageError(f"{folder}: is not empty and no demo; choose another --out")
    for name in ("pipelines", "sites.unfinished"):
        shutil.rmtree(root / name, ignore_errors=True)
    archive, unfinished = root / "archive", root / "archive.unfinished"
    if not archive.is_dir():
        say("Painting the slides of four hospitals", style="bold")
        shutil.rmtree(unfinished, ignore_errors=True)
        size = {"n_sites": _N_SITES, "patients_per_site": _PATIENTS_PER_SITE, "size_px": _SLIDE_PX}
        with Bars("paint") as bars:
            paint_archive(unfinished, **size, ill=_ILL, progress=partial(bars.update, "slides"))
        unfinished.rename(archive)
    init(root, archive=archive, pipeline=_PIPELINE)
    return Study(root)


def demo_lines(document: dict[str, Any]) -> Lines:
    yield document["report"]
