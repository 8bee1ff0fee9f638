"""`train --method mpcpa --baselines`: the paper's tables in one command.

A1…An learn from their own images, B1…Bn from the others' generated ones too; both are aggregated; all original and all
generated images pooled; FedAvg. One table (the paper's Tables 1, 3, 4 and 7) beside the run of mpcpa.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wsi_fl.learning.metrics import SCORES
from wsi_fl.report.words import format_number
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.compare_runs import find_finished_run
from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.train import begin_run
from wsi_fl.stages.work.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.keys import Ddpm, Mpcpa
from wsi_fl.system.files import read_json
from wsi_fl.types import UsageError

_OWN, _BOTH, _ORIGINAL, _GENERATED, _FEDAVG = "regular", "mpcpa", "joint", "generated", "fedavg"
_LETTERS = {"A": _OWN, "B": _BOTH}


def baselines(
    study: Study,
    *,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Trains and evaluates mpcpa and its baselines, where that was not done; writes `mpcpa.json` into the run.

    Raises:
        UsageError: when nobody may read all sites' test patches.
    """
    watcher = watcher or SilentProgress()
    name = study.pipeline_name(pipeline_name)
    pipeline = study.load_pipeline(name, overrides)
    party = RunContext.create(study, pipeline, _BOTH)
    if not party.may_merge or len(party.sites) < 2:
        raise UsageError(
            "--baselines measures every model on all sites' test patches, which needs two sites or more that "
            'all allow = ["patches"]'
        )
    mpcpa, drawn = pipeline.find_section(Mpcpa), pipeline.find_section(Ddpm).samples_per_class
    if (most := max(mpcpa.curve, default=0)) > drawn:
        raise UsageError(f"mpcpa.curve: {most} images of each class, but ddpm.samples_per_class = {drawn} are drawn")

    def done(method: str, pipeline: Pipeline) -> tuple[RunFolder, Mapping[str, Any]]:
        with RunContext.create(study, pipeline, method) as one:
            inputs = {name: one.open_data(name).digest() for name in one.names}
        if last := find_finished_run(study, method, pipeline, inputs):  # the same in all that matters
            run = last.folder
        else:
            watcher.print_message(f"  training {method}")
            summary = begin_run(study, pipeline, method, name, backend=backend, watcher=watcher)
            run = RunFolder(study.find_run(summary["run"]))
        known = run.read_evaluation()
        if known and known.get("aggregated"):
            known["aggregated"]["rule"] = pipeline.find_section(Mpcpa).aggregate
            return run, known
        return run, evaluate(study, str(run.path))

    runs, evaluations = {}, {}
    for method in (_BOTH, _OWN, _ORIGINAL, _GENERATED, _FEDAVG):
        runs[method], evaluations[method] = done(method, pipeline)
    curve = {0: evaluations[_OWN], min(mpcpa.per_class or drawn, drawn): evaluations[_BOTH]}
    for n in mpcpa.curve:
        curve[n] = curve.get(n) or done(_BOTH, pipeline.replace_keys(mpcpa={"per_class": n}))[1]
    document = _document(party, runs, evaluations)
    document["curve"] = [_point(pipeline, n, one) for n, one in sorted(curve.items())]
    runs[_BOTH].write("mpcpa", document)
    return document


def _point(pipeline: Pipeline, n: int, evaluation: Mapping[str, Any]) -> dict[str, object]:
    """Of the paper's Figure 5: accuracies with so many generated images of each class from each denoiser."""
    together = evaluation["aggregated"]["rules"][pipeline.find_section(Mpcpa).aggregate]
    return {
        "per_class": n,
        "sites": {one["site"]: one["accuracy"] for one in evaluation["sites"]},
        "mean": evaluation["merged"]["accuracy"]["mean"],
        "aggregated": together["accuracy"],
    }


def _document(
    party: RunContext, runs: Mapping[str, RunFolder], evaluations: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    study, pipeline = party.study, party.pipeline
    return {
        "run": study.relative_path(runs[_BOTH].path),
        "runs": {method: study.relative_path(run.path) for method, run in runs.items()},
        "seed": pipeline.train.seed,
        "n_test": evaluations[_BOTH]["sites"][0]["n"],
        "aggregate": pipeline.find_section(Mpcpa).aggregate,
        "rows": list(_rows(pipeline, evaluations)),
        "aggregated": {name: evaluations[m]["aggregated"]["rules"] for name, m in _LETTERS.items()},
        "transfers": {
            "mpcpa": runs[_BOTH].require_summary()["communication"]["messages"],
            "fedavg": 2 * len(party.sites) * pipeline.train.rounds,
        },
        "memorization": [_memorization(study, name) for name in party.names],
    }


def _rows(pipeline: Pipeline, evaluations: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, str | float | None]]:
    def scores(one: Mapping[str, Any]) -> dict[str, float | None]:
        return {name: one[name] for name in SCORES}

    def means(method: str) -> dict[str, float | None]:
        """Over the sites' models: of one kind of training set, each from its own start."""
        return {name: evaluations[method]["merged"][name]["mean"] for name in SCORES}

    for letter, method in _LETTERS.items():
        for k, one in enumerate(evaluations[method]["sites"], 1):
            yield {"row": f"{letter}{k}", "site": one["site"], **scores(one)}
    for letter, method in _LETTERS.items():
        yield {"row": f"mean {letter}", **means(method)}
    for letter, method in _LETTERS.items():
        one = evaluations[method]["aggregated"]["rules"][pipeline.find_section(Mpcpa).aggregate]
        yield {"row": f"aggregated {letter}", **scores(one)}
    for label, method in (("all original", _ORIGINAL), ("all generated", _GENERATED), ("FedAvg", _FEDAVG)):
        yield {"row": label, **means(method)}


def _memorization(study: Study, site: str) -> dict[str, object]:
    """A site's row of Table 4, and what it is worth."""
    check = read_json(study.denoiser_path(site) / "check.json")
    kept = ("least", "median", "held_out_least", "held_out_median", "n_generated", "below_paper", "copies")
    return {
        "site": site,
        "passed": check["passed"],
        **{key: check["memorization"][key] for key in (*kept, "duplicates")},
        "page": check["files"]["page"],
    }


def baselines_lines(document: dict[str, Any]) -> Lines:
    """Accuracy of every model, transfers, and the nearest training image of every denoiser."""
    rows = [[row["row"], *(format_number(row[name]) for name in SCORES)] for row in document["rows"]]
    title = f"on {document['n_test']} test images of all sites"
    yield TextTable(title, ("model", "accuracy", "macro-acc.", "AUROC"), rows)
    if len(document["curve"]) > 2:
        for point in document["curve"]:
            yield TextLine(
                f"  {point['per_class']} generated images of each class: mean {format_number(point['mean'])}, "
                "aggregated "
                f"{format_number(point['aggregated'])}"
            )
    yield TextLine(f"transfers: {document['transfers']['mpcpa']}; FedAvg {document['transfers']['fedavg']}")
    for row in document["memorization"]:
        yield TextLine(
            f"  {row['site']}: nearest training image {row['least']:.4f} (paper's Table 4), held-out real images "
            f"{format_number(row['held_out_least'])}; {row['copies']} copies in {row['n_generated']}; check "
            f"{'passed' if row['passed'] else 'NOT passed'}"
        )
    yield TextLine(f"{document['run']}/mpcpa.json; one seed is one draw: differences of a few points mean nothing")
    yield TextLine(f"next: wsi-fl report {document['run']}")
