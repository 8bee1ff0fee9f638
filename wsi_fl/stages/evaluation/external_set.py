"""Scores on sites without part in the run, and those of the sites' aggregated predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from wsi_fl.data.cohort import Cohort, concatenate_examples
from wsi_fl.data.prediction_table import PredictionTable, score_voting_rules, tabulate_examples
from wsi_fl.data.tasks import POSSIBLE_CLASSES
from wsi_fl.stages.evaluation.load_models import load_prediction_models
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import select_choices
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import SPLITS, UsageError

_Scores = dict[str, float | None]


class AggregatedScores(TypedDict):
    """Scores of the aggregated predictions of all sites by rule, and the rule of the run."""

    rule: str
    rules: dict[str, _Scores]


class ExternalScores(TypedDict):
    """Scores on sites without part in the run."""

    sites: list[str]
    n: int
    rows: list[dict[str, object]]
    aggregated: dict[str, _Scores] | None
    left_out: dict[str, object] | None


def score_rules(
    context: RunContext, sites: Sequence[SiteFile], tables: Sequence[PredictionTable]
) -> dict[str, _Scores] | None:
    """Return the scores of the sites' aggregated predictions for the same examples by rule; None for a single site.

    A site weighs its training rows.
    """
    if len(tables) < 2 or tables[0].task.kind != "classes":
        return None
    splits = [context.open_data(site.name).cohort.obs["split"] for site in sites]
    weights = [float((split == "train").sum()) for split in splits]
    predictions = [table.model_predictions for table in tables]
    possible = predictions[0] > 0 if tables[0].task is POSSIBLE_CLASSES else None
    return score_voting_rules(predictions, tables[0].truth, weights, possible)


def evaluate_external(context: RunContext, sites: Sequence[SiteFile]) -> ExternalScores | None:
    """Return every site's scores on `evaluate.external` and the left-out site, and those of aggregated predictions.

    None where both are missing.
    """
    left_out = context.pipeline.train.left_out
    names = [name for name in context.pipeline.evaluate.external if name != left_out]
    names += [] if left_out is None else [left_out]
    if not names:
        return None
    first = context.open_data(sites[0].name)
    parts = {name: _load_external_patches(context, name, first.classes) for name in names}
    cohort, examples, tables = concatenate_examples([*parts.values()]), tabulate_examples(parts), []
    for site in sites:
        models = load_prediction_models(
            context.run, context.pipeline, site, first.classes, first.shape, select_device()
        )
        with torch.no_grad():
            predictions = {models.ensemble: models.predict(cohort)}
        tables.append(PredictionTable(site.name, models.ensemble, examples, predictions, first.classes, cohort.task))
    result: ExternalScores = {
        "sites": names,
        "n": len(examples),
        "rows": [{"site": table.site, **table.compute_scores()} for table in tables],
        "aggregated": score_rules(context, sites, tables),
        "left_out": None,
    }
    if left_out is not None:
        result["left_out"] = {
            "site": left_out,
            "store": context.open_data(left_out).digest(),
            "rows": [{"site": table.site, **table[examples["part"] == left_out].compute_scores()} for table in tables],
        }
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
    parts = [select_choices(data.load_examples(split)) for split in SPLITS]
    if not any(map(len, parts)):
        raise UsageError(f"evaluate.external: no slide of site {name} has a choice of diagnosis")
    return concatenate_examples([part for part in parts if len(part)])
