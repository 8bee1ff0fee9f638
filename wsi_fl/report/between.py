"""Cross-site scores from counts of the hospitals, and the page of a run's coordinator.

The coordinator's page holds only what all sites of the run see.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from wsi_fl.learning.counts import Between, Constant, OfCounts, OfModel, Scores, confusion_of, results
from wsi_fl.report import figures, words
from wsi_fl.report.fill import fill
from wsi_fl.report.words import SCORES, Json, known, number

_Metric = Literal["accuracy", "macro_accuracy", "auroc"]
_METRICS: tuple[_Metric, ...] = ("accuracy", "macro_accuracy", "auroc")


def section(between: Between | None) -> dict[str, object] | None:
    """Return the values of the cross-site section; None without scores.

    Args:
        cross_site: the scores by model and hospital.

    Returns:
        `hospitals` with the number of test examples of each (`sizes`) and of all (`n`), and a table (`tables`) for each
        known metric: its rows of cells, and the `low` and `high` end of its colours. `over` is a sentence on parts that
        lack classes.
    """
    if not between or not between["models"]:
        return None
    hospitals, models = between["hospitals"], between["models"]
    sizes = {name: max(one["hospitals"][name]["n"] for one in models.values()) for name in hospitals}
    present = {
        name: max(one["hospitals"][name].get("n_classes", 0) for one in models.values()) for name in hospitals
    }
    return {
        "hospitals": hospitals,
        "sizes": sizes,
        "over": words.over_classes(present, between.get("n_classes", 0)),
        "n": sum(sizes.values()),
        "one": next(iter(models)) if len(models) == 1 else None,
        "tables": [table for metric in _METRICS if (table := _table(hospitals, models, metric))],
        "verdict": _verdict(models, between.get("constant")),
    }


def _table(hospitals: list[str], models: Mapping[str, OfModel], metric: _Metric) -> dict[str, object] | None:
    """Return the table of a metric; a cell is a score and the bound of its error (`within`), None where exact."""

    def cell(scores: OfCounts) -> dict[str, float | None]:
        within = scores.get("auroc_within") if metric == "auroc" else None
        return {"value": scores[metric], "within": within}

    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "cells": [cell(one["hospitals"][hospital]) for hospital in hospitals],
            "own": hospitals.index(name) if name in hospitals else None,
            "merged": cell(one["merged"]),
        }
        for name, one in models.items()
    ]
    values = [c["value"] for row in rows for c in [*row["cells"], row["merged"]] if known(c["value"])]
    if not values:
        return None
    return {"title": SCORES[metric], "rows": rows, "low": min(values), "high": max(values)}


def _verdict(models: Mapping[str, OfModel], constant: Constant | None) -> str:
    """Return a sentence on the models with the highest accuracy on all test parts together."""
    found = {name: v for name, one in models.items() if known(v := one["merged"]["accuracy"])}
    top = max(found.values(), default=None)
    if top is None:
        return ""
    if constant is not None and top <= constant["accuracy"]:
        none = "the model does not do" if len(found) == 1 else "no model does"
        score = f"which has an accuracy of {number(constant['accuracy'])}"
        return f"There {none} better than always predicting {constant['class']}, {score}."
    if len(found) == 1:
        return ""
    first = [name for name, value in found.items() if value == top]
    score = f"with an accuracy of {number(top)}"
    if len(first) == 1:
        return f"There the model of {first[0]} does best, {score}."
    if len(first) == len(found):
        return f"There all models do equally well, {score}."
    both = "both " if len(first) == 2 else "each "
    return f"There the models of {', '.join(first[:-1])} and {first[-1]} do best, {both}{score}."


def render_coordinator(summary: Json, scores: Scores | None) -> str:
    """Return the coordinator's page as one HTML document without external files.

    Args:
        summary: of the run, as `train --json` prints it.
        scores: the counts that the hospitals released (`scores.json`); None without any.
    """
    sites = list(summary["sites"])
    spent = [row for row in sites if known(row.get("epsilon"))]
    context = {
        "summary": summary,
        "sites": sites,
        "slots": figures.slots([row["site"] for row in sites]),
        "rounds": max((row["rounds"] for row in sites), default=0),
        "epsilon": words.span([row["epsilon"] for row in spent]) if spent else None,
        "without": [row["site"] for row in sites if row not in spent],
        "between": None,
    }
    if scores:
        counts = scores["counts"]  # of each model over all hospitals, confusions [true][predicted]
        confusions = [(model, confusion_of(list(counts[model].values()))) for model in scores["models"]]
        context |= {
            "between": section(results(scores)),
            "classes": scores["classes"],
            "confusions": confusions,
        }
    return fill("coordinator", context)
