"""`evaluate`: scores of each site's prediction model, on the merged multi-centric test set and on each site's part.

*Internal* is the local test part, *external* are the parts of all other sites. An external set is of sites without part
in the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort, concatenate_examples
from wsi_fl.data.cross_site_counts import CrossSiteScores
from wsi_fl.data.metrics import mean_and_sd
from wsi_fl.data.prediction_table import PredictionTable, measure_predictions, score_tumor_types, score_voting_rules
from wsi_fl.data.tasks import Task, score_predictions
from wsi_fl.data.validation import ENSEMBLE, LOCAL, MODEL_CHOICES, combine_predictions, roles_of_choice
from wsi_fl.learning.local_training import predict_examples, predict_with_models, replace_nonfinite
from wsi_fl.report.formatting import (
    SCORES,
    SHORT_SCORES,
    describe_part_classes,
    describe_receivers,
    format_number,
    format_spread,
    is_number,
    score_in_sentence,
)
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.cross_site import load_cross_site_scores, render_cross_site_lines
from wsi_fl.stages.evaluation.load_models import (
    TrainedModels,
    available_models,
    load_prediction_models,
    load_run_settings,
)
from wsi_fl.stages.evaluation.write_predictions import compute_seal, write_predictions
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.run_context import RunContext, restore_study
from wsi_fl.stages.site.site_data import SiteData
from wsi_fl.study.folder import Study
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import SPLITS, BagTable, UsageError, WsiFlError

_TestExamples = tuple[Cohort, dict[str, NDArray[Any]]]
"""A site's test examples, and columns on each: coordinates of a patch, or the tumour type of a slide."""


_Scores = dict[str, float | None]
_Spreads = dict[str, dict[str, float | None]]
"""Mean and sd by score."""


class _AggregatedScores(TypedDict):
    """Scores of the aggregated predictions of all sites by rule, and the rule of the run."""

    rule: str
    rules: dict[str, _Scores]


class _ExternalScores(TypedDict):
    """Scores on sites without part in the run."""

    sites: list[str]
    n: int
    rows: list[dict[str, object]]
    aggregated: dict[str, _Scores] | None
    left_out: dict[str, object] | None


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
    aggregated: _AggregatedScores | None
    external_set: _ExternalScores | None
    parts: dict[str, _Spreads] | None
    sites: list[dict[str, Any]]
    inference_sites: dict[str, Any] | None
    global_head: list[dict[str, Any]] | None
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
    pipeline, merged, lost = context.pipeline, context.may_merge, context.sites_lost
    sites = [site for site in context.members if merged or context.has_store(site.name)]
    parts = {site.name: _load_test_part(context.open_data(site.name)) for site in sites}
    released = _score_released_heads(context, parts) if context.method.payload.is_single_release else None
    receivers = _evaluate_receivers(context, released or []) if context.receivers else None
    predicts = receivers and receivers["sites"]
    if not any(len(part) for part, _ in parts.values()) and not predicts:
        command = context.kind.tiling_command
        raise WsiFlError(f"no site has test {context.example_plural}; {command} with slides.test_fraction above 0")
    rows, tables = [], []
    finishers = [site for site in sites if site.name not in lost]
    for index, site in enumerate(finishers):
        watcher.update("evaluate", index, len(finishers), site.name)
        row, table = _evaluate_site(context, site, parts if merged else {site.name: parts[site.name]})
        rows.append(row)
        tables.append(table)
        watcher.update("evaluate", index + 1, len(finishers), site.name)
    if not rows and not predicts:
        raise WsiFlError(f"{context.run.name}: every site whose store is here dropped out and has no model")
    weights = [float((context.open_data(site.name).table.split == "train").sum()) for site in finishers]
    several, task = merged and len(rows) > 1, context.task
    aggregated: _AggregatedScores | None = None
    if several and task.kind == "classes":  # a site weighs its training rows
        rules = score_voting_rules([site_table.model_predictions for site_table in tables], tables[0].truth, weights)
        aggregated = {"rule": context.hooks.voting_rule(pipeline), "rules": rules}
    part_scores = None
    if merged:
        names = rows[0]["parts"]
        part_scores = {name: _summarize_sites([row["parts"][name] for row in rows], task) for name in names}
    return {
        "run": context.study.relative_path(context.run.path),
        "method": context.name,
        "task": task.kind,
        "scores": list(task.scores),
        "examples": context.example_plural,
        "model": pipeline.predict.model,
        "shared": several and all(row["model"] == available_models(context.method).get("shared") for row in rows),
        "merged": _summarize_sites(rows, task) if merged else None,
        "internal": _summarize_sites([row["own"] for row in rows], task),
        "external": _summarize_sites([row["external"] for row in rows], task) if several else None,
        "models": _summarize_models(rows, task, merged=merged),
        "aggregated": aggregated,
        "external_set": _evaluate_external(context, finishers, weights),
        "parts": part_scores,
        "sites": rows,
        "inference_sites": receivers,
        "global_head": released,
        "cross_site": load_cross_site_scores(context),
        "bootstrap": {"repeats": pipeline.evaluate.bootstrap, "cluster": "patient", "level": 0.95},
    }


def _summarize_sites(parts: Sequence[Mapping[str, Any]], task: Task) -> _Spreads:
    """Return mean ± sd of every score; null where a site lacks it."""
    return {name: mean_and_sd([part[name] for part in parts]) for name in task.scores}


def _summarize_models(
    rows: Sequence[Mapping[str, Any]], task: Task, *, merged: bool
) -> dict[str, dict[str, _Spreads | None]]:
    """Return mean ± sd of every score by available prediction model."""
    summaries: dict[str, dict[str, _Spreads | None]] = {}
    for ensemble in (*MODEL_CHOICES, LOCAL, ENSEMBLE):
        scores = [row["models"][ensemble] for row in rows if ensemble in row["models"]]
        if scores:
            merged_scores = _summarize_sites(scores, task) if merged else None
            summaries[ensemble] = {
                "merged": merged_scores,
                "internal": _summarize_sites([row["own"] for row in scores], task),
            }
    return summaries


def _load_test_part(data: SiteData) -> _TestExamples:
    table, rows = data.table, np.flatnonzero(data.table.split == "test")
    if isinstance(table, BagTable):
        return data.test_examples, {"tumor_type": table.tumor_type[rows]}
    return data.test_examples, {"x_l0": table.xy_l0[rows, 0], "y_l0": table.xy_l0[rows, 1]}


def _evaluate_site(
    context: RunContext, site: SiteFile, parts: Mapping[str, _TestExamples]
) -> tuple[dict[str, Any], PredictionTable]:
    """Return a site's scores and predictions on the given test parts."""
    folder = context.run.site_folder(site.name)
    models, table = _predict_site(context, site, parts)
    noise_sds = _noise_effect(context, models, parts, table)
    # images of a partitioned data set are no slides, and other tasks are on slides or patients
    slides, choice = (
        context.open_data(site.name).store.meta.spec.mpp > 0,
        folder.read_document("prediction_model") or {},
    )
    point = choice.get("slide_threshold") if slides and choice.get("model") == table.model else None
    measure_scores = partial(
        measure_predictions, repeats=context.pipeline.evaluate.bootstrap, with_slides=slides, threshold=point
    )
    local_table, other_table = table.local_rows, table.other_rows
    local_scores, merged = measure_scores(local_table) | {"noise": noise_sds and noise_sds[1]}, len(parts) > 1
    row = {
        "site": site.name,
        "model": table.model,
        "predictions": compute_seal(folder),
        **(measure_scores(table) | {"noise": noise_sds and noise_sds[0]} if merged else local_scores),
        "own": local_scores,
        "external": other_table.compute_scores() | {"tumor_types": score_tumor_types(other_table)} if merged else None,
        "parts": {name: part.compute_scores() for name, part in table.group_by("part").items()},
        "models": {
            model: _score_model(table, model) | {"own": _score_model(local_table, model)} for model in table.predictions
        },
    }
    return row, table


def _score_released_heads(context: RunContext, parts: Mapping[str, _TestExamples]) -> list[dict[str, Any]]:
    """Return the scores on each test part of the model that follows from released numbers alone."""
    rows = []
    for name, (part, _) in parts.items():
        if len(part) and name not in context.sites_lost:
            models = _load_models(context, context.find_site(name))
            model = context.method.payload.strip_local_state(models.models["shared"])
            predictions = predict_examples(model, part, models.device)
            rows.append({"site": name, "n": len(part), **score_predictions(predictions, part.label, context.task)})
    return rows


def _evaluate_receivers(context: RunContext, released: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the predictions of sites without labels, and return their summary.

    Their expected scores are those of the same head on the members' test parts.
    """
    rows = []
    for name in filter(context.has_store, context.receivers):
        _, table = _predict_site(
            context, context.find_site(name), {name: _load_test_part(context.open_data(name))}, has_truth=False
        )
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


_NOISE_REDRAWS = 32
"""Number of redraws of noise, which estimate the standard deviation to about 1/8."""


def _noise_effect(
    context: RunContext, models: TrainedModels, parts: Mapping[str, _TestExamples], table: PredictionTable
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Return the standard deviations of every score over redraws of the noise, on all parts and the local one.

    None where the prediction model contains no payload whose noise can be redrawn: that in training cannot.
    """
    if "shared" not in roles_of_choice(models.ensemble, models.stack, models.models) or not len(table):
        return None
    rng, payload, model = np.random.default_rng(0), context.method.payload, models.models["shared"]
    redrawn = [copy for _ in range(_NOISE_REDRAWS) if (copy := payload.redraw_noise(model, rng)) is not None]
    if not redrawn:
        return None
    networks = [network.eval() for network in redrawn]
    predictions = np.concatenate(
        [predict_with_models(networks, part, models.device) for part, _ in parts.values() if len(part)], axis=1
    )
    ensembles = (
        combine_predictions({**table.predictions, "shared": proxy}, table.model, models.stack) for proxy in predictions
    )
    tables = [replace(table, predictions={table.model: values}) for values in ensembles]
    return _score_deviations([redraw.compute_scores() for redraw in tables]), _score_deviations(
        [redraw.local_rows.compute_scores() for redraw in tables]
    )


def _score_deviations(scores: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the standard deviation of every score without missing values."""
    names = [name for name in scores[0] if all(row[name] is not None for row in scores)]
    return {name: float(np.std([row[name] for row in scores], ddof=1)) for name in names if name != "n"}


def _load_models(context: RunContext, site: SiteFile) -> TrainedModels:
    data = context.open_data(site.name)
    return load_prediction_models(
        context.run, context.pipeline, site, data.classes, data.shape, select_device(), all_roles=True
    )


def _predict_site(
    context: RunContext, site: SiteFile, parts: Mapping[str, _TestExamples], *, has_truth: bool = True
) -> tuple[TrainedModels, PredictionTable]:
    """Return a site's models, and their predictions and those of ensembles on every part, which are also written.

    Args:
        has_truth: whether the true values of the examples are known.
    """
    data, folder = context.open_data(site.name), context.run.site_folder(site.name)
    folder.record_store(data.digest(), data.describe_store())
    models = _load_models(context, site)

    def predict_part(model: torch.nn.Module, part: Cohort) -> NDArray[np.float64]:
        if not len(part):
            return np.empty((0, len(data.classes)))
        return replace_nonfinite(predict_examples(model, part, models.device), part)

    with torch.no_grad():
        by_role = {
            role: np.concatenate([predict_part(model, part) for part, _ in parts.values()])
            for role, model in models.models.items()
        }
    columns = next(iter(parts.values()))[1]
    ensembles = (*MODEL_CHOICES, LOCAL, *[ENSEMBLE] * (models.stack is not None))
    available = [
        answer
        for answer in ensembles
        if models.models.keys() >= set(roles_of_choice(answer, models.stack, models.models))
    ]
    table = PredictionTable.from_examples(
        {name: part for name, (part, _) in parts.items()},
        site=site.name,
        model=models.ensemble,
        predictions={answer: combine_predictions(by_role, answer, models.stack) for answer in available},
        outputs=data.classes,
        extra_columns={name: np.concatenate([about[name] for _, about in parts.values()]) for name in columns},
    )
    write_predictions(folder, table, has_truth=has_truth)
    return models, table


def _evaluate_external(
    context: RunContext, sites: Sequence[SiteFile], weights: Sequence[float]
) -> _ExternalScores | None:
    """Return every site's scores on `evaluate.external` and the left-out site, and those of aggregated predictions.

    None where both are missing.

    Args:
        weights: of the sites, for weighted aggregation.
    """
    left_out = context.pipeline.train.left_out
    names = [name for name in context.pipeline.evaluate.external if name != left_out]
    names += [] if left_out is None else [left_out]
    if not names:
        return None
    first = context.open_data(sites[0].name)
    parts = {name: _load_external_patches(context, name, first.classes) for name in names}
    examples, tables = concatenate_examples([*parts.values()]), []
    for site in sites:
        models = load_prediction_models(
            context.run, context.pipeline, site, first.classes, first.shape, select_device()
        )
        with torch.no_grad():
            predictions = {models.ensemble: models.predict(examples)}
        tables.append(
            PredictionTable.from_examples(
                parts, site=site.name, model=models.ensemble, predictions=predictions, outputs=first.classes
            )
        )
    several = len(tables) > 1 and examples.task.kind == "classes"
    aggregated = (
        score_voting_rules([site_table.model_predictions for site_table in tables], examples.label, weights)
        if several
        else None
    )
    result: _ExternalScores = {
        "sites": names,
        "n": len(examples),
        "rows": [{"site": table.site, **table.compute_scores()} for table in tables],
        "aggregated": aggregated,
        "left_out": None,
    }
    if left_out is not None:
        left_out_rows = [
            {"site": site_table.site, **site_table.select_rows(site_table.part == left_out).compute_scores()}
            for site_table in tables
        ]
        store = context.open_data(left_out).digest()
        result["left_out"] = {"site": left_out, "store": store, "rows": left_out_rows}
    return result


def _load_external_patches(context: RunContext, name: str, classes: tuple[str, ...]) -> Cohort:
    """Return all patches of an external site, whatever their split."""
    site = context.study.load_site(name)
    if name in context.names:
        raise UsageError(f"evaluate.external: site {name} took part in the run")
    if not site.allows("patches"):
        raise UsageError(f'sites/{name}.toml: evaluate.external reads its patches; add allow = ["patches"] if it may')
    data = context.open_data(name)
    if (other_classes := data.classes) != classes:
        raise UsageError(f"evaluate.external: site {name} has other classes, {', '.join(other_classes)}")
    parts = [data.load_examples(split) for split in SPLITS]
    return concatenate_examples([part for part in parts if len(part)])


def render_evaluation_lines(document: Evaluation) -> Lines:
    """Yield a row per site, then mean ± sd."""
    scores = document["scores"]
    first = scores[0]
    if document["sites"]:
        yield _render_table(document)
        class_note = describe_part_classes(document["sites"])
        # only this table has the macro-accuracy of parts
        if class_note and (document["merged"] is None or document["shared"]):
            yield TextLine(f"  {class_note}")
    for sentence in describe_receivers(document):
        yield TextLine(f"  {sentence}")
    if aggregated := document["aggregated"]:
        scores_of_rule = aggregated["rules"][aggregated["rule"]]
        yield TextLine(
            f"aggregated predictions ({aggregated['rule'].replace('_', ' ')}): "
            f"{format_number(scores_of_rule['accuracy'])} accuracy"
        )
    if document["parts"] and not document["shared"]:
        part_scores = {name: part[first] for name, part in document["parts"].items()}
        unknown_text = "not known (too few events or classes there)"
        sentence = ", ".join(
            f"{name} {format_spread(spread_values) if is_number(spread_values['mean']) else unknown_text}"
            for name, spread_values in part_scores.items()
        )
        yield TextLine(f"  {SCORES[first].lower()} on each site's part over all models: {sentence}")
    if document["sites"] and all(row["model"] == LOCAL for row in document["sites"]):
        yield TextLine(
            "each site predicts with its local model: no held-out rows show a gain of federation; "
            "networks need validation rows for that (train.val_fraction)"
        )
    noise_sds = [(row.get("noise") or {}).get(first) for row in document["sites"]]
    if known_sds := [value for value in noise_sds if is_number(value)]:
        yield TextLine(
            f"  the noise of class statistics changes {score_in_sentence(first)} by ±{max(known_sds):.3f} (standard "
            f"deviation over {_NOISE_REDRAWS} redraws)"
        )
    if document["cross_site"]:
        yield from render_cross_site_lines(document["cross_site"])
    yield TextLine(f"{document['run']} evaluated; next: wsi-fl report {document['run']}")


def _render_table(document: Evaluation) -> TextTable:
    """Return the table of each site's scores and mean ± sd; of a shared model the scores on each part and on all."""
    scores, examples, sites = document["scores"], document["examples"], document["sites"]
    first = scores[0]
    headings = ["site", "n", *(SHORT_SCORES.get(name, SCORES[name].lower()) for name in scores)]

    def format_cells(name: str, values: Mapping[str, Any]) -> list[str]:
        return [name, str(values["n"]), *(format_number(values[score]) for score in scores)]

    if document["shared"]:
        rows = [*(format_cells(row["site"], row["own"]) for row in sites), None, format_cells("all", sites[0])]
        return TextTable(f"the shared model on each site's part and the merged test set ({examples})", headings, rows)
    test_set = "merged test set" if document["merged"] is not None else "local test set"
    several = any(row["model"] != "private" for row in sites)
    rows = [
        [
            *format_cells(row["site"], row),
            format_number(row["own"][first]),
            format_number((row["external"] or {}).get(first)),
            *[row["model"]] * several,
        ]
        for row in sites
    ]
    if document["merged"] is not None:
        spreads = [document["merged"][name] for name in scores]
        groups = (document["internal"], document["external"])
        spreads += [(group or {}).get(first) or {} for group in groups]
        rows += [None, ["mean ± sd", "", *map(format_spread, spreads)]]
    model_words = "models" if several else "private models"
    headings += ["own test set", "other sites", *["model"] * several]
    return TextTable(f"{model_words} on the {test_set} ({examples})", headings, rows)
