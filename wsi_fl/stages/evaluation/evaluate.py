"""`evaluate`: scores of each site's prediction model, on the merged multi-centric test set and on each site's part.

*Internal* is the local test part, *external* are the parts of all other sites. An external set is of sites without part
in the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort
from wsi_fl.data.cross_site_counts import CrossSiteScores
from wsi_fl.data.metrics import mean_and_sd
from wsi_fl.data.prediction_table import PredictionTable, measure_predictions, score_tumor_types, tabulate_examples
from wsi_fl.data.tasks import Task, score_predictions
from wsi_fl.learning.ensemble import ENSEMBLE, LOCAL, MODEL_CHOICES, combine_predictions, roles_of_choice
from wsi_fl.learning.local_training import predict_examples, predict_with_models, replace_nonfinite
from wsi_fl.report.formatting import Json, describe_unscored
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.external_set import AggregatedScores, ExternalScores, evaluate_external, score_rules
from wsi_fl.stages.evaluation.load_models import (
    TrainedModels,
    available_models,
    load_prediction_models,
    load_run_settings,
)
from wsi_fl.stages.evaluation.write_predictions import compute_seal, write_predictions
from wsi_fl.stages.runtime.console import SilentProgress, Watcher
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.run_context import RunContext, restore_study
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import WsiFlError

_Spreads = dict[str, dict[str, float | None]]
"""Mean and sd by score."""


class Evaluation(TypedDict):
    """The document of `evaluate`; the entry of a site holds its scores by name."""

    run: str
    method: str
    task: str
    scores: list[str]
    examples: str
    model: str
    shared: bool
    merged: _Spreads | None
    internal: _Spreads
    external: _Spreads | None
    models: dict[str, dict[str, _Spreads | None]]
    aggregated: AggregatedScores | None
    external_set: ExternalScores | None
    parts: dict[str, _Spreads] | None
    unscored: dict[str, int]
    sites: list[Json]
    inference_sites: Json | None
    global_head: list[Json] | None
    cross_site: CrossSiteScores | None
    bootstrap: dict[str, object]


def evaluate(
    study: Study, run_name: str, *, overrides: Sequence[str] = (), watcher: Watcher | None = None
) -> Evaluation:
    """Evaluate a run, write evaluation.json and each site's predictions.csv, and return the document.

    Where a real site does not allow others to read its patches, each model is evaluated on the local test part only and
    `merged` is null. `cross_site` has the cross-site scores from counts.

    Args:
        overrides: `predict.KEY=VALUE` over the run's configuration.
    """
    watcher = watcher or SilentProgress()
    run = RunFolder(study.find_run(run_name))
    study = restore_study(study, run)
    with RunContext.restore(study, run, load_run_settings(study, run, overrides)) as context:
        document = _build_document(context, watcher)
    run.write("evaluation", document)
    return document


def _build_document(context: RunContext, watcher: Watcher) -> Evaluation:
    pipeline, task, merged = context.pipeline, context.task, context.may_merge
    sites = [site for site in context.members if merged or context.has_store(site.name)]
    parts = {site.name: context.open_data(site.name).test_examples for site in sites}
    released = _score_released_heads(context, parts) if context.method.payload.is_single_release else None
    receivers = _evaluate_receivers(context, released or []) if context.receivers else None
    finishers = [site for site in sites if site.name not in context.sites_lost]
    predicts = bool(receivers and receivers["sites"])
    unscored = _sum_unscored([context.open_data(site.name).count_unscored() for site in sites])
    if not predicts and not any(map(len, parts.values())):
        if unscored:
            raise WsiFlError(f"there is nothing to score. {describe_unscored(unscored)}")
        command = "import" if all(site.slides is None for site in sites) else context.kind.tiling_command
        raise WsiFlError(f"no site has test {context.kind.plural}; {command} with slides.test_fraction above 0")
    if not predicts and not finishers:
        raise WsiFlError(f"{context.run.name}: every site whose store is here dropped out and has no model")
    rows, tables = [], []
    for index, site in enumerate(finishers):
        watcher.update("evaluate", index, len(finishers), site.name)
        row, table = _evaluate_site(context, site, parts if merged else {site.name: parts[site.name]})
        rows.append(row)
        tables.append(table)
        watcher.update("evaluate", index + 1, len(finishers), site.name)
    several, part_names = merged and len(rows) > 1, rows[0]["parts"] if rows else ()
    rules = score_rules(context, finishers, tables) if merged else None
    return {
        "run": context.study.relative_path(context.run.path),
        "method": context.name,
        "task": task.kind,
        "scores": list(task.scores),
        "examples": context.kind.plural,
        "model": pipeline.predict.model,
        "shared": several and all(row["model"] == available_models(context.method).get("shared") for row in rows),
        "merged": _summarize_sites(rows, task) if merged else None,
        "internal": _summarize_sites([row["own"] for row in rows], task),
        "external": _summarize_sites([row["external"] for row in rows], task) if several else None,
        "models": _summarize_models(rows, task, merged=merged),
        "aggregated": {"rule": context.hooks.voting_rule(pipeline), "rules": rules} if rules else None,
        "external_set": evaluate_external(context, finishers),
        "parts": {name: _summarize_sites([row["parts"][name] for row in rows], task) for name in part_names}
        if merged
        else None,
        "unscored": unscored,
        "sites": rows,
        "inference_sites": receivers,
        "global_head": released,
        "cross_site": context.load_cross_site_scores(),
        "bootstrap": {"repeats": pipeline.evaluate.bootstrap, "cluster": "patient", "level": 0.95},
    }


def _sum_unscored(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the number of test slides of all sites without a choice of diagnosis, by tumour type."""
    kinds = sorted({kind for count in counts for kind in count})
    return {kind: sum(count.get(kind, 0) for count in counts) for kind in kinds}


def _summarize_sites(parts: Sequence[Json], task: Task) -> _Spreads:
    """Return mean ± sd of every score; null where a site lacks it."""
    return {name: mean_and_sd([part[name] for part in parts]) for name in task.scores}


def _summarize_models(rows: Sequence[Json], task: Task, *, merged: bool) -> dict[str, dict[str, _Spreads | None]]:
    """Return mean ± sd of every score by available prediction model."""
    summaries: dict[str, dict[str, _Spreads | None]] = {}
    for choice in (*MODEL_CHOICES, LOCAL, ENSEMBLE):
        if scores := [row["models"][choice] for row in rows if choice in row["models"]]:
            summaries[choice] = {
                "merged": _summarize_sites(scores, task) if merged else None,
                "internal": _summarize_sites([row["own"] for row in scores], task),
            }
    return summaries


def _evaluate_site(context: RunContext, site: SiteFile, parts: Mapping[str, Cohort]) -> tuple[Json, PredictionTable]:
    """Return a site's scores and predictions on the given test parts."""
    folder, spec = context.run.site_folder(site.name), context.open_data(site.name).store.meta.spec
    models, table = _predict_site(context, site, parts)
    choice = folder.read_document("prediction_model") or {}
    measure = partial(
        measure_predictions,
        repeats=context.pipeline.evaluate.bootstrap,
        with_slides=spec.mpp > 0,  # images of a partitioned data set are no slides
        threshold=choice.get("slide_threshold") if spec.mpp > 0 and choice.get("model") == table.model else None,
    )
    noise, own_noise = _noise_effect(context, models, parts, table) or (None, None)
    local, other = table.local_rows, table[table.obs["part"] != table.site]
    local_scores, merged = measure(local) | {"noise": own_noise}, len(parts) > 1
    row = {
        "site": site.name,
        "model": table.model,
        "predictions": compute_seal(folder),
        **(measure(table) | {"noise": noise} if merged else local_scores),
        "own": local_scores,
        "external": other.compute_scores() | {"tumor_types": score_tumor_types(other)} if merged else None,
        "parts": {name: part.compute_scores() for name, part in table.group_by("part").items()},
        "models": {
            model: _score_model(table, model) | {"own": _score_model(local, model)} for model in table.predictions
        },
    }
    return row, table


def _score_released_heads(context: RunContext, parts: Mapping[str, Cohort]) -> list[Json]:
    """Return the scores on each test part of the model that follows from released numbers alone."""
    rows: list[Json] = []
    for name, part in parts.items():
        if len(part) and name not in context.sites_lost:
            models = _load_models(context, context.find_site(name))
            model = context.method.payload.strip_local_state(models.models["shared"])
            predictions = predict_examples(model, part, models.device)
            rows.append({"site": name, "n": len(part), **score_predictions(predictions, part.label, context.task)})
    return rows


def _evaluate_receivers(context: RunContext, released: Sequence[Json]) -> Json:
    """Write the predictions of sites without labels; return a summary with the head's scores on test parts."""
    rows = []
    for name in filter(context.has_store, context.receivers):
        part = context.open_data(name).test_examples
        _, table = _predict_site(context, context.find_site(name), {name: part}, has_truth=False)
        rows.append({"site": name, "n": len(table), "model": table.model})
    values = {score: [value for row in released if (value := row[score]) is not None] for score in context.task.scores}
    expected = {
        score: {"mean": float(np.mean(sites_scores)), "low": min(sites_scores), "high": max(sites_scores)}
        for score, sites_scores in values.items()
        if sites_scores and len(sites_scores) == len(released)
    }
    return {"sites": rows, "reference_sites": [row["site"] for row in released], "expected": expected}


def _score_model(table: PredictionTable, model: str) -> dict[str, object]:
    return {**table.compute_scores(model), **({} if len(table) else {"tumor_types": {}})}


NOISE_REDRAWS = 32
"""Number of redraws of noise, which estimate the standard deviation to about 1/8."""


def _noise_effect(
    context: RunContext, models: TrainedModels, parts: Mapping[str, Cohort], table: PredictionTable
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return the standard deviations of scores over redraws of the noise, on all and local rows; None without such."""
    if "shared" not in roles_of_choice(models.ensemble, models.stack, models.models) or not len(table):
        return None
    rng, payload, model = np.random.default_rng(0), context.method.payload, models.models["shared"]
    copies = [payload.redraw_noise(model, rng) for _ in range(NOISE_REDRAWS)]
    networks = [copy.eval() for copy in copies if copy is not None]
    if not networks:
        return None
    predictions = np.concatenate(
        [predict_with_models(networks, part, models.device) for part in parts.values() if len(part)], axis=1
    )
    ensembles = (
        combine_predictions({**table.predictions, "shared": proxy}, table.model, models.stack) for proxy in predictions
    )
    tables = [replace(table, predictions={table.model: values}) for values in ensembles]
    return _score_deviations([redraw.compute_scores() for redraw in tables]), _score_deviations(
        [redraw.local_rows.compute_scores() for redraw in tables]
    )


def _score_deviations(scores: Sequence[Json]) -> dict[str, float]:
    """Return the standard deviation of every score without missing values."""
    names = [name for name in scores[0] if all(row[name] is not None for row in scores)]
    return {name: float(np.std([row[name] for row in scores], ddof=1)) for name in names if name != "n"}


def _load_models(context: RunContext, site: SiteFile) -> TrainedModels:
    data = context.open_data(site.name)
    return load_prediction_models(
        context.run, context.pipeline, site, data.classes, data.shape, select_device(), all_roles=True
    )


def _predict_site(
    context: RunContext, site: SiteFile, parts: Mapping[str, Cohort], *, has_truth: bool = True
) -> tuple[TrainedModels, PredictionTable]:
    """Return a site's models, and their predictions and those of ensembles on every part, which are also written."""
    data, folder = context.open_data(site.name), context.run.site_folder(site.name)
    folder.record_store(data.digest(), data.describe_store())
    models = _load_models(context, site)

    def predict_part(model: torch.nn.Module, part: Cohort) -> NDArray[np.float64]:
        if not len(part):
            return np.empty((0, len(data.classes)))
        return replace_nonfinite(predict_examples(model, part, models.device), part)

    with torch.no_grad():
        by_role = {
            role: np.concatenate([predict_part(model, part) for part in parts.values()])
            for role, model in models.models.items()
        }
    choices = (*MODEL_CHOICES, LOCAL, *[ENSEMBLE] * (models.stack is not None))
    predictions = {
        choice: combine_predictions(by_role, choice, models.stack)
        for choice in choices
        if models.models.keys() >= set(roles_of_choice(choice, models.stack, models.models))
    }
    examples = tabulate_examples(parts)
    table = PredictionTable(site.name, models.ensemble, examples, predictions, data.classes, context.task)
    write_predictions(folder, table, has_truth=has_truth)
    return models, table
