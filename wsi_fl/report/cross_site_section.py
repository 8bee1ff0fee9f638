"""Cross-site scores from counts of the hospitals, and the page of a run's coordinator.

The coordinator's page holds only what all sites of the run see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from wsi_fl.data.cross_site_counts import (
    Constant,
    CountScores,
    CrossSiteCounts,
    CrossSiteScores,
    ModelScores,
    score_cross_site,
    sum_confusions,
)
from wsi_fl.report import figures, formatting
from wsi_fl.report.formatting import SCORES, Json, format_number, is_number
from wsi_fl.report.templates import fill_template

_Metric = Literal["accuracy", "macro_accuracy", "auroc"]
_METRICS: tuple[_Metric, ...] = ("accuracy", "macro_accuracy", "auroc")


def build_cross_site_section(cross_site: CrossSiteScores | None) -> dict[str, object] | None:
    """Return the values of the cross-site section; None without scores.

    Args:
        cross_site: the scores by model and hospital.

    Returns:
        `hospitals` with the number of test examples of each (`sizes`) and of all (`n`), and a table (`tables`) for each
        known metric: its rows of cells, and the `low` and `high` end of its colours. `over` is a sentence on parts that
        lack classes.
    """
    if not cross_site or not cross_site["models"]:
        return None
    hospitals, models = cross_site["hospitals"], cross_site["models"]
    sizes = {name: max(model["hospitals"][name]["n"] for model in models.values()) for name in hospitals}
    present = {
        name: max(model["hospitals"][name].get("n_classes", 0) for model in models.values()) for name in hospitals
    }
    return {
        "hospitals": hospitals,
        "sizes": sizes,
        "over": formatting.describe_class_coverage(present, cross_site.get("n_classes", 0)),
        "n": sum(sizes.values()),
        "one": next(iter(models)) if len(models) == 1 else None,
        "tables": [table for metric in _METRICS if (table := _metric_table(hospitals, models, metric))],
        "verdict": _best_model_sentence(models, cross_site.get("constant")),
    }


def _metric_table(hospitals: list[str], models: Mapping[str, ModelScores], metric: _Metric) -> dict[str, object] | None:
    """Return the table of a metric; a cell is a score and the bound of its error (`within`), None where exact."""

    def score_cell(scores: CountScores) -> dict[str, float | None]:
        within = scores.get("auroc_within") if metric == "auroc" else None
        return {"value": scores[metric], "within": within}

    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "cells": [score_cell(model["hospitals"][hospital]) for hospital in hospitals],
            "own": hospitals.index(name) if name in hospitals else None,
            "merged": score_cell(model["merged"]),
        }
        for name, model in models.items()
    ]
    values = [c["value"] for row in rows for c in [*row["cells"], row["merged"]] if is_number(c["value"])]
    if not values:
        return None
    return {"title": SCORES[metric], "rows": rows, "low": min(values), "high": max(values)}


def _best_model_sentence(models: Mapping[str, ModelScores], constant: Constant | None) -> str:
    """Return a sentence on the models with the highest accuracy on all test parts together."""
    accuracies = {
        name: accuracy for name, model in models.items() if is_number(accuracy := model["merged"]["accuracy"])
    }
    top = max(accuracies.values(), default=None)
    if top is None:
        return ""
    if constant is not None and top <= constant["accuracy"]:
        negation = "the model does not do" if len(accuracies) == 1 else "no model does"
        score = f"which has an accuracy of {format_number(constant['accuracy'])}"
        return f"There {negation} better than always predicting {constant['class']}, {score}."
    if len(accuracies) == 1:
        return ""
    best_models = [name for name, value in accuracies.items() if value == top]
    score = f"with an accuracy of {format_number(top)}"
    if len(best_models) == 1:
        return f"There the model of {best_models[0]} does best, {score}."
    if len(best_models) == len(accuracies):
        return f"There all models do equally well, {score}."
    prefix = "both " if len(best_models) == 2 else "each "
    return f"There the models of {', '.join(best_models[:-1])} and {best_models[-1]} do best, {prefix}{score}."


def render_coordinator(summary: Json, scores: CrossSiteCounts | None) -> str:
    """Return the coordinator's page as one HTML document without external files.

    Args:
        summary: of the run, as `train --json` prints it.
        scores: the counts that the hospitals released (`scores.json`); None without any.
    """
    sites = list(summary["sites"])
    sites_with_epsilon = [row for row in sites if is_number(row.get("epsilon"))]
    context = {
        "summary": summary,
        "sites": sites,
        "slots": figures.assign_color_slots([row["site"] for row in sites]),
        "rounds": max((row["rounds"] for row in sites), default=0),
        "epsilon": formatting.format_span([row["epsilon"] for row in sites_with_epsilon])
        if sites_with_epsilon
        else None,
        "without": [row["site"] for row in sites if row not in sites_with_epsilon],
        "between": None,
    }
    if scores:
        counts = scores["counts"]  # of each model over all hospitals, confusions [true][predicted]
        confusions = [(model, sum_confusions(list(counts[model].values()))) for model in scores["models"]]
        context |= {
            "between": build_cross_site_section(score_cross_site(scores)),
            "classes": scores["classes"],
            "confusions": confusions,
        }
    return fill_template("coordinator", context)
