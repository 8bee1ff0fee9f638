"""The page of whoever coordinates a run: what all sites know of it, and nothing that one hospital keeps to itself."""

from __future__ import annotations

from typing import Any

from wsi_fl.learning.counts import Scores, merged, results
from wsi_fl.report import between, figures, words
from wsi_fl.report.fill import fill
from wsi_fl.report.page import Json


def render_coordinator(summary: Json, scores: Scores | None) -> str:
    """Return one HTML document that needs nothing beside it, made of two documents that all sites hold.

    Args:
        summary: of the run, as `train --json` prints it.
        scores: the counts that the hospitals let go (`scores.json`); None where there are none.
    """
    return fill("coordinator.html.j2", _context(summary, scores))


def _context(summary: Json, scores: Scores | None) -> dict[str, Any]:
    sites = list(summary["sites"])
    names = [row["site"] for row in sites]
    spent = [row for row in sites if words.known(row.get("epsilon"))]
    many = len(names) > figures.N_COLORS
    return {
        "summary": summary,
        "method": words.method_name(summary["method"]),
        "does": words.method_does(summary["method"]),
        "sites": sites,
        "slots": {name: 0 if many else k for k, name in enumerate(names)},
        "rounds": max((row["rounds"] for row in sites), default=0),
        "epsilon": words.span([row["epsilon"] for row in spent]) if spent else None,
        "without": [row["site"] for row in sites if row not in spent],
        "between": between.section(results(scores)) if scores else None,
        "confusions": _confusions(scores) if scores else [],
        "classes": scores["classes"] if scores else [],
    }


def _confusions(scores: Scores) -> list[tuple[str, list[list[int]]]]:
    """Return the confusion matrix of each model over all hospitals that told counts, [true][predicted]."""
    return [
        (model, merged(list(scores["counts"][model].values()))["confusion"]) for model in scores["models"]
    ]
