"""`train --seeds N`: the same run from several seeds, told together; resuming one of them completes all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from wsi_fl.runs import RunFolder
from wsi_fl.stages.training.train import Series, begin, resume
from wsi_fl.stages.work.console import Silent, Watcher, say
from wsi_fl.stages.work.job import launched_ranks
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import UsageError


def train_series(
    study: Study,
    *,
    seeds: int,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Trains one run for each of train.seed, train.seed + 1, … and returns {"method", "seeds", "runs"}."""
    if seeds < 1:
        raise UsageError("--seeds must be at least 1")
    if launched_ranks() is not None:
        raise UsageError(
            "--seeds starts ranks of its own; leave out mpiexec or srun, or train one seed after another"
        )
    name = study.pipeline_name(pipeline_name)
    pipeline = study.pipeline(name, overrides)
    first = pipeline.train.seed
    series = Series(uuid4().hex, tuple(range(first, first + seeds)))
    return _complete(study, series, method, name, pipeline, backend=backend, watcher=watcher or Silent())


def resume_series(
    study: Study, run_name: str, *, backend: str = "mpi", watcher: Watcher | None = None
) -> dict[str, Any] | None:
    """Completes the series that a run belongs to; None where it belongs to none, or under mpiexec of one's own."""
    if launched_ranks() is not None:
        return None
    run = RunFolder(study.run(run_name))
    manifest = run.manifest
    if not manifest.get("series"):
        return None
    series = Series(manifest["series"]["id"], tuple(manifest["series"]["seeds"]))
    pipeline = load_pipeline(run.path / "config.toml")
    return _complete(
        study,
        series,
        manifest["method"],
        manifest["pipeline"],
        pipeline,
        backend=backend,
        watcher=watcher or Silent(),
    )


def _complete(
    study: Study,
    series: Series,
    method: str,
    name: str,
    pipeline: Pipeline,
    *,
    backend: str,
    watcher: Watcher,
) -> dict[str, Any]:
    """The runs of all seeds: those there are finished, the others begun."""
    begun = _begun(study, series)
    summaries = []
    for number, seed in enumerate(series.seeds, 1):
        say(f"seed {seed} ({number} of {len(series.seeds)})")
        if seed in begun and (summary := begun[seed].summary()) is not None:
            summaries.append(summary)
            continue
        if seed in begun:
            summaries.append(resume(study, begun[seed].name, backend=backend, watcher=watcher))
            continue
        seeded = pipeline.model_copy(update={"train": pipeline.train.model_copy(update={"seed": seed})})
        summaries.append(begin(study, seeded, method, name, backend=backend, watcher=watcher, series=series))
    return {"method": method, "seeds": list(series.seeds), "runs": summaries}


def _begun(study: Study, series: Series) -> dict[int, RunFolder]:
    """The runs of the series by seed."""
    found = {}
    for path in sorted(study.runs.glob("[0-9]*-*/manifest.json")):
        run = RunFolder(path.parent)
        if (run.manifest.get("series") or {}).get("id") == series.id:
            found[load_pipeline(run.path / "config.toml").train.seed] = run
    return found


def print_series(document: dict[str, Any]) -> None:
    """The runs for people."""
    runs = " ".join(summary["run"] for summary in document["runs"])
    seconds = sum(summary["seconds"] for summary in document["runs"])
    say(
        f"{len(document['runs'])} seeds of {document['method']} done in {seconds:.0f} s; next: wsi-fl compare {runs}"
    )
