"""`train --method mpcpa --baselines`: the paper's tables in one command.

A1…An train on local images, B1…Bn on the others' generated ones too; both are aggregated; all original and all
generated images pooled; FedAvg. One table (the paper's Tables 1, 3, 4 and 7) beside the run of mpcpa. Each row scores
the model of its own name, whichever model `predict.model` lets answer: FedAvg's row is of the model that all share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict

from wsi_fl.data.metrics import SCORES
from wsi_fl.federation.methods import METHODS
from wsi_fl.report.formatting import Json, format_number
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.load_models import available_models
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.finished_runs import find_finished_run
from wsi_fl.stages.training.train import train_pipeline
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.keys import Ddpm, Mpcpa
from wsi_fl.synthesis.stages.baselines_section import BASELINES_FILE
from wsi_fl.system.files import read_json, write_sealed
from wsi_fl.types import UsageError

_REGULAR, _MPCPA, _JOINT, _GENERATED, _FEDAVG = "regular", "mpcpa", "joint", "generated", "fedavg"
_Scores = dict[str, float | None]
_ROW_PREFIXES = {"A": _REGULAR, "B": _MPCPA}


class _BaselinesDocument(TypedDict):
    """The document `mpcpa.json` of a run."""

    run: str
    runs: dict[str, str]
    """Method → its run."""
    seed: int
    n_test: int
    aggregate: str
    rows: list[dict[str, str | float | None]]
    """Name and scores of each model, in the order of the paper's tables."""
    aggregated: dict[str, Json]
    transfers: dict[str, int]
    memorization: list[Json]
    """Table 4, a row for each site."""
    curve: list[Json]
    """Figure 5: accuracies by number of generated images of each class."""


def run_baselines(
    study: Study,
    *,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    resume: bool = True,
    watcher: Watcher | None = None,
) -> _BaselinesDocument:
    """Train and evaluate mpcpa and its baselines unless done; write `mpcpa.json` into the run.

    With `resume` unfinished runs of the same settings go on.

    Raises:
        UsageError: without permission to read all sites' test patches.
    """
    name = study.pipeline_name(pipeline_name)
    pipeline = study.load_pipeline(name, overrides)
    context = RunContext.create(study, pipeline, _MPCPA)
    _check_request(context)
    watcher = watcher or SilentProgress()

    def run_method(method: str, pipeline: Pipeline) -> tuple[RunFolder, Json]:
        """Return the run of a method with these settings on the stores of today, unless done, and its evaluation."""
        with RunContext.create(study, pipeline, method) as context:
            inputs = {name: context.open_data(name).digest() for name in context.names}
        if existing := find_finished_run(study, method, pipeline, inputs):  # same settings, same data
            run = existing.folder
        else:
            watcher.print_message(f"  training {method}")
            summary = train_pipeline(study, pipeline, method, name, backend=backend, resume=resume, watcher=watcher)
            run = RunFolder(study.find_run(summary["run"]))
        evaluation = run.read("evaluation")
        if evaluation and evaluation.get("aggregated"):
            evaluation["aggregated"]["rule"] = pipeline.find_section(Mpcpa).aggregate
            return run, evaluation
        return run, evaluate(study, str(run.path))

    runs, evaluations = {}, {}
    mpcpa, n_drawn = pipeline.find_section(Mpcpa), pipeline.find_section(Ddpm).samples_per_class
    federated = pipeline.replace_keys(train={"rounds": _fedavg_rounds(pipeline)})
    for method in (_MPCPA, _REGULAR, _JOINT, _GENERATED, _FEDAVG):
        runs[method], evaluations[method] = run_method(method, federated if method == _FEDAVG else pipeline)
    curve = {0: evaluations[_REGULAR], min(mpcpa.per_class or n_drawn, n_drawn): evaluations[_MPCPA]}
    for n in mpcpa.curve:
        curve[n] = curve.get(n) or run_method(_MPCPA, pipeline.replace_keys(mpcpa={"per_class": n}))[1]
    document = _build_document(context, runs, evaluations, curve)
    write_sealed(runs[_MPCPA].path / BASELINES_FILE, document)
    return document


def _fedavg_rounds(pipeline: Pipeline) -> int:
    return pipeline.find_section(Mpcpa).fedavg_rounds or pipeline.train.rounds


def _check_request(context: RunContext) -> None:
    if not context.may_merge or len(context.sites) < 2:
        raise UsageError(
            "--baselines measures every model on all sites' test patches, which needs two sites or more that "
            'all allow = ["patches"]'
        )
    n_drawn = context.pipeline.find_section(Ddpm).samples_per_class
    if (largest := max(context.pipeline.find_section(Mpcpa).curve, default=0)) > n_drawn:
        raise UsageError(
            f"mpcpa.curve: {largest} images of each class, but ddpm.samples_per_class = {n_drawn} are drawn"
        )


def _build_document(
    context: RunContext, runs: Mapping[str, RunFolder], evaluations: Mapping[str, Json], curve: Mapping[int, Json]
) -> _BaselinesDocument:
    study, pipeline = context.study, context.pipeline
    rule = pipeline.find_section(Mpcpa).aggregate
    curves = [(n, score_method(_MPCPA, evaluation), evaluation) for n, evaluation in sorted(curve.items())]
    return {
        "run": study.relative_path(runs[_MPCPA].path),
        "runs": {method: study.relative_path(run.path) for method, run in runs.items()},
        "seed": pipeline.train.seed,
        "n_test": evaluations[_MPCPA]["sites"][0]["n"],
        "aggregate": rule,
        "rows": list(_build_rows(rule, evaluations)),
        "aggregated": {name: evaluations[method]["aggregated"]["rules"] for name, method in _ROW_PREFIXES.items()},
        "transfers": {
            "mpcpa": runs[_MPCPA].require_summary()["communication"]["messages"],
            "fedavg": 2 * len(context.sites) * _fedavg_rounds(pipeline),
        },
        "memorization": [_read_memorization(study, name) for name in context.names],
        "curve": [
            {
                "per_class": n,
                "sites": {site: scores["accuracy"] for site, scores in scored.sites.items()},
                "mean": scored.mean["accuracy"],
                "aggregated": evaluation["aggregated"]["rules"][rule]["accuracy"],
            }
            for n, scored, evaluation in curves
        ],
    }


class MethodScores(NamedTuple):
    """The scores of one method's own model on the merged test set.

    Attributes:
        model: its name, "private" where it stays at its site and "shared" where all sites have the same.
        sites: scores of each site's.
        mean: over the sites, whose models may differ by their initial weights.
    """

    model: str
    sites: dict[str, _Scores]
    mean: _Scores


def score_method(method: str, evaluation: Json) -> MethodScores:
    """Select the scores of a method's own model by name, in the document of `evaluate` on a merged test set.

    The evaluation's other scores are of whatever answers: it can be a site's local model, or an ensemble with it.
    """
    ((model, role),) = available_models(METHODS[method]).items()
    sites = {row["site"]: {name: row["models"][role][name] for name in SCORES} for row in evaluation["sites"]}
    mean = {name: evaluation["models"][role]["merged"][name]["mean"] for name in SCORES}
    return MethodScores(model, sites, mean)


def _build_rows(rule: str, evaluations: Mapping[str, Json]) -> Iterator[dict[str, str | float | None]]:
    scored = {method: score_method(method, evaluation) for method, evaluation in evaluations.items()}

    def build_mean_row(label: str, method: str) -> dict[str, str | float | None]:
        return {"row": label, "model": scored[method].model, **scored[method].mean}

    for prefix, method in _ROW_PREFIXES.items():
        model, sites, _ = scored[method]
        for k, (site, scores) in enumerate(sites.items(), 1):
            yield {"row": f"{prefix}{k}", "site": site, "model": model, **scores}
    for prefix, method in _ROW_PREFIXES.items():
        yield build_mean_row(f"mean {prefix}", method)
    for prefix, method in _ROW_PREFIXES.items():
        rules = evaluations[method]["aggregated"]["rules"]
        scores = {name: rules[rule][name] for name in SCORES}
        yield {"row": f"aggregated {prefix}", "model": scored[method].model, **scores}
    for label, method in (("all original", _JOINT), ("all generated", _GENERATED), ("FedAvg", _FEDAVG)):
        yield build_mean_row(label, method)


def _read_memorization(study: Study, site: str) -> dict[str, object]:
    """Return a site's row of Table 4 with the result of its check."""
    check = read_json(study.denoiser_path(site) / "check.json")
    keys = ("least", "median", "held_out_least", "held_out_median", "n_generated", "below_paper", "copies")
    return {
        "site": site,
        "passed": check["passed"],
        **{key: check["memorization"][key] for key in (*keys, "duplicates")},
        "page": check["files"]["page"],
    }


def render_baseline_lines(document: _BaselinesDocument) -> Lines:
    """Yield accuracies of all models, transfers, and distances of all denoisers' images."""
    rows = [[str(row["row"]), *(format_number(row[name]) for name in SCORES)] for row in document["rows"]]
    title = f"on {document['n_test']} test images of all sites"
    yield TextTable(title, ("model", "accuracy", "macro-acc.", "AUROC"), rows)
    if len(document["curve"]) > 2:
        for point in document["curve"]:
            yield TextLine(
                f"  {point['per_class']} generated images of each class: mean {format_number(point['mean'])}, "
                f"aggregated {format_number(point['aggregated'])}"
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
