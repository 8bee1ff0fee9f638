"""Cross-site scores from counts of the hospitals, and the page of a run's coordinator.

The coordinator's page holds only what all sites of the run see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
from wsi_fl.report.formatting import SCORES, Json, is_number
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
        "best": _find_best(models, cross_site.get("constant")),
    }


def _metric_table(hospitals: list[str], models: Mapping[str, ModelScores], metric: _Metric) -> dict[str, object] | None:
    """Return the table of a metric; a cell is a score and the bound of its error (`within`), None where exact."""

    def score_cell(scores: CountScores) -> dict[str, float | None]:
        within = scores.get("auroc_within") if metric == "auroc" else None
        return {"value": scores[metric], "within": within}

    rows: list[Json] = [
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


def _find_best(models: Mapping[str, ModelScores], constant: Constant | None) -> dict[str, object]:
    """Return the highest accuracy on all test parts together, its models, the number of models with one, and the
    constant prediction where it is no worse."""
    accuracies = {
        name: accuracy for name, model in models.items() if is_number(accuracy := model["merged"]["accuracy"])
    }
    top = max(accuracies.values(), default=None)
    return {
        "accuracy": top,
        "models": [name for name, accuracy in accuracies.items() if accuracy == top],
        "n_models": len(accuracies),
        "constant": constant if constant and top is not None and top <= constant["accuracy"] else None,
    }


def render_coordinator(summary: Json, scores: CrossSiteCounts | None) -> str:
    """Return the coordinator's page as one HTML document without external files.

    Args:
        summary: of the run, as `train --json` prints it.
        scores: the counts that the hospitals released (`scores.json`); None without any.
    """
    slots = figures.assign_color_slots([row["site"] for row in summary["sites"]])
    context: dict[str, object] = {"summary": summary, "slots": slots, "between": None}
    if scores:
        counts = scores["counts"]  # of each model over all hospitals, confusions [true][predicted]
        confusions = [(model, sum_confusions(list(counts[model].values()))) for model in scores["models"]]
        context |= {
            "between": build_cross_site_section(score_cross_site(scores)),
            "classes": scores["classes"],
            "confusions": confusions,
        }
    return fill_template("coordinator", context)
