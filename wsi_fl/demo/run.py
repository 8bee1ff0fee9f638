"""`demo`: the whole job on painted slides, in minutes, on any machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from wsi_fl.demo.phantom import paint_archive
from wsi_fl.stages.answers.evaluate import evaluate, print_evaluation
from wsi_fl.stages.answers.report import report
from wsi_fl.stages.prepare.init import init
from wsi_fl.stages.prepare.tables import print_tile
from wsi_fl.stages.prepare.tile import tile
from wsi_fl.stages.training.train import print_summary, train
from wsi_fl.stages.work.console import Bars, say
from wsi_fl.study.folder import Study
from wsi_fl.types import UsageError

_PIPELINE = "demo"
_N_SITES = 4
_PATIENTS_PER_SITE = 5


def demo(folder: Path) -> dict[str, Any]:
    """Paints, tiles, trains ProxyFL and its baseline, evaluates and reports into `folder`.

    A demo that was interrupted goes on where it can: painted slides and finished shards are kept.
    """
    study = _study(folder)
    with Bars("tile") as bars:
        print_tile(tile(study, site=None, pipeline_name=_PIPELINE, watcher=bars))
    runs = {}
    for name, method, overrides in (
        ("alone", "regular", ["privacy.enabled=false"]),
        ("together", "proxyfl", []),
    ):
        say(_STEPS[name], style="bold")
        with Bars("train") as bars:
            summary = train(study, method=method, pipeline_name=_PIPELINE, overrides=overrides, watcher=bars)
        print_summary(summary)
        with Bars("evaluate") as bars:
            evaluation = evaluate(study, summary["run"], watcher=bars)
        print_evaluation(evaluation)
        runs[name] = {"run": summary["run"], "merged": evaluation["merged"]}
    page = report(study, runs["together"]["run"])
    return {"study": str(study.root), "runs": runs, "report": str(page)}


_STEPS = {
    "alone": "What each hospital reaches alone, without privacy noise",
    "together": "ProxyFL: four hospitals, one MPI rank each; only differentially private proxies travel",
}


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
        total = _N_SITES * _PATIENTS_PER_SITE * 2
        painted: list[str] = []
        with Bars("paint") as bars:

            def progress(slide: str) -> None:
                painted.append(slide)
                bars.update("slides", len(painted), total, slide)

            paint_archive(
                unfinished, n_sites=_N_SITES, patients_per_site=_PATIENTS_PER_SITE, progress=progress
            )
        unfinished.rename(archive)
    init(root, archive=archive, pipeline=_PIPELINE)
    return Study(root)


def print_demo(document: dict[str, Any]) -> None:
    print(document["report"])
