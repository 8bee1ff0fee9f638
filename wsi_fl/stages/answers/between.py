"""Cross-site scores of the released models, from counts of the hospitals' test parts."""

from __future__ import annotations

from typing import cast

from wsi_fl.learning.counts import Between, Scores, results
from wsi_fl.report.words import area_words, number
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.work.console import MOST_COLUMNS, Lines, Table


def between_of(party: RunContext) -> Between | None:
    """Return the scores of the released models on each hospital's test part and on all; None without counts.

    Every site of a run stores the same counts, so those of the first site here are read.
    """
    for name in party.here:
        if (kept := party.run.site(name).kept("scores")) is not None:
            return results(cast(Scores, kept))
    return None


def between_lines(between: Between) -> Lines:
    """Yield a table of each model's accuracy on each hospital's test part, and of its scores on all parts."""
    hospitals = between["hospitals"]
    hospitals = hospitals if len(hospitals) <= MOST_COLUMNS else []  # the report has room for them
    headings = ["model", *hospitals, "all", "macro-acc.", "AUROC", "n"]
    rows: list[list[str] | None] = []
    for name, model in between["models"].items():
        whole = model["merged"]
        parts = [*(model["hospitals"][hospital] for hospital in hospitals), whole]
        areas = [number(whole["macro_accuracy"]), area_words(whole), str(whole["n"])]
        rows.append([name, *(number(part["accuracy"]) for part in parts), *areas])
    yield Table("cross-site accuracy of released models", headings, rows)
