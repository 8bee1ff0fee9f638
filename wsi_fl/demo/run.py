"""`wsi-fl demo`: the whole workflow on simulated slides, in minutes, on any machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.demo.simulated_slides import plan_slides, simulate_archive, simulate_slide, write_pyramid
from wsi_fl.evidence.compare import compare_methods, render_comparison_lines
from wsi_fl.models.weights import random_weights
from wsi_fl.oneshot.build_projection import build_projection, render_projection_lines
from wsi_fl.report.formatting import Json
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.evaluation_lines import render_evaluation_lines
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.prepare.build_bags import make_features
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import render_tile_lines, tile_slides
from wsi_fl.stages.runtime.console import Lines, ProgressBars, print_lines, print_message
from wsi_fl.stages.training.train import summary_lines, train
from wsi_fl.study.folder import Study
from wsi_fl.system.tensors import save_tensors
from wsi_fl.types import UsageError

_ENCODER, INPUT_PX = "resnet18", 64
_PATCH_PX, _PUBLIC_PX, _GLASS_LEVEL = 256, 1024, 225
_PIPELINE = "demo"
_N_SITES = 4
_PATIENTS_PER_SITE = 20
_SLIDE_PX = 1536
_METASTASIS_SHARES = (1.0, 0.5, 0.15, 0.0)
"""Share of patients with metastases by hospital: one hospital has few, one none."""
_WEIGHTS, _PROJECTION, _PUBLIC = "weights/untrained.safetensors", "weights/projection.safetensors", "public"
_PUBLIC_SEED, _N_DIMENSIONS, _PUBLIC_MPP = 99, 16, 0.5
"""Hospitals have 9 to 15 patients each: too few for 32 dimensions."""


def run_demo(folder: Path) -> Json:
    """Simulate slides, tile, encode, train local and federated models, compare and report, into `folder`.

    An interrupted demo is resumed: simulated slides and finished shards are kept.

    Returns:
        The `--json` document; its `report` is the page on each hospital's benefit.
    """
    study = _prepare_study(folder)
    with ProgressBars("tile") as bars:
        print_lines(render_tile_lines(tile_slides(study, site=None, pipeline_name=_PIPELINE, watcher=bars)))
    weights = study.root / _WEIGHTS
    if not weights.exists():
        write_untrained_weights(weights)
    with ProgressBars("features") as bars:
        make_features(study, site=None, pipeline_name=_PIPELINE, watcher=bars)
    if not (study.root / _PROJECTION).exists():
        _build_projection(study)
    runs = {name: _train_and_evaluate(study, step) for name, step in _STEPS.items()}
    print_message("The benefit of each hospital", style="bold")
    compare_with = [runs[name]["run"] for name in ("federated", "proxyfl", "pooled")]
    with ProgressBars("compare") as bars:
        comparison = compare_methods(study, compare_with, watcher=bars)
    print_lines(render_comparison_lines(comparison))
    page = write_report(study, runs["federated"]["run"])
    return {
        "study": str(study.root),
        "runs": runs,
        "benefit": comparison["benefit"],
        "report": str(study.root / comparison["page"]),
        "run_report": str(page),
    }


@dataclass(frozen=True)
class _DemoStep:
    heading: str
    method: str
    backend: str
    overrides: tuple[str, ...] = ()


_LOCAL = ("privacy.enabled=false", "train.tune=true", "train.rounds=1")
_STEPS = {
    "local": _DemoStep("Local models: each hospital with its own data, tuned", "regular", "local", _LOCAL),
    "pooled": _DemoStep("Pooled data: all data in one place, as a reference only", "joint", "local", _LOCAL),
    "proxyfl": _DemoStep(
        "ProxyFL, the paper's method: four hospitals, one MPI rank each, exchange only noisy proxies, in ten rounds",
        "proxyfl",
        "mpi",
        ("train.rounds=10", "train.eval_every=10"),
    ),
    "federated": _DemoStep(
        "One-shot: each hospital releases noisy class statistics once, instead of proxies in rounds", "oneshot", "local"
    ),
}


def _train_and_evaluate(study: Study, step: _DemoStep) -> Json:
    print_message(step.heading, style="bold")
    with ProgressBars("train") as bars:
        summary = train(
            study,
            method=step.method,
            pipeline_name=_PIPELINE,
            overrides=step.overrides,
            backend=step.backend,
            watcher=bars,
        )
    print_lines(summary_lines(summary))
    with ProgressBars("evaluate") as bars:
        evaluation = evaluate(study, summary["run"], watcher=bars)
    print_lines(render_evaluation_lines(evaluation))
    return {"run": summary["run"], "merged": evaluation["merged"]}


def _build_projection(study: Study) -> None:
    """Simulate public reference slides, and compute the projection from them."""
    public = study.root / _PUBLIC
    public.mkdir(exist_ok=True)
    for slide in plan_slides(_N_SITES, 1, _SLIDE_PX, _PUBLIC_SEED):
        write_pyramid(public / f"{slide.name}.tif", simulate_slide(slide), _PUBLIC_MPP)
    out = study.root / _PROJECTION
    with ProgressBars("projection") as bars:
        document = build_projection(
            study, [public], out=out, pipeline_name=_PIPELINE, n_dimensions=_N_DIMENSIONS, watcher=bars
        )
    print_lines(render_projection_lines(document))


def write_untrained_weights(path: Path) -> None:
    """Write the untrained weights of the demo's encoder, always the same, with timm's names.

    The demo downloads nothing; studies take a pretrained encoder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, random_weights(_ENCODER, draw_public_patches()), {})


def draw_public_patches() -> NDArray[np.uint8]:
    """Return tissue patches uint8[n, INPUT_PX, INPUT_PX, 3] of simulated public slides."""
    step, patch_batches = _PATCH_PX // INPUT_PX, []
    for slide in plan_slides(4, 1, _PUBLIC_PX, _PUBLIC_SEED):
        picture = simulate_slide(slide)[::step, ::step]
        side = _PUBLIC_PX // _PATCH_PX
        grid = picture.reshape(side, INPUT_PX, side, INPUT_PX, 3)
        patches = grid.swapaxes(1, 2).reshape(-1, INPUT_PX, INPUT_PX, 3)
        patch_batches.append(patches[patches.mean((1, 2, 3)) < _GLASS_LEVEL])
    return np.concatenate(patch_batches)


_LEFTOVER_NAMES = {"archive", "archive.unfinished", "pipelines", "sites.unfinished"}
"""Possible leftovers of a killed demo."""


def _prepare_study(folder: Path) -> Study:
    root = folder.resolve()
    if (root / "sites").is_dir() and (root / "pipelines" / f"{_PIPELINE}.toml").is_file():
        return Study(root)
    if root.exists() and any(p.name not in _LEFTOVER_NAMES for p in root.iterdir()):
        raise UsageError(f"{folder}: is not empty and no demo; choose another --out")
    for name in ("pipelines", "sites.unfinished"):
        shutil.rmtree(root / name, ignore_errors=True)
    archive, unfinished = root / "archive", root / "archive.unfinished"
    if not archive.is_dir():
        print_message("Simulating the slides of four hospitals", style="bold")
        shutil.rmtree(unfinished, ignore_errors=True)
        size = {"n_sites": _N_SITES, "patients_per_site": _PATIENTS_PER_SITE, "size_px": _SLIDE_PX}
        with ProgressBars("simulate") as bars:
            simulate_archive(
                unfinished, **size, metastasis_shares=_METASTASIS_SHARES, progress=partial(bars.update, "slides")
            )
        unfinished.rename(archive)
    init_study(root, archive=archive, pipeline=_PIPELINE)
    return Study(root)


def render_demo_lines(document: Json) -> Lines:
    yield document["report"]
