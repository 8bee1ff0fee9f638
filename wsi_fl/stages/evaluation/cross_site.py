"""Cross-site scores of the released models, from counts of the hospitals' test parts."""

from __future__ import annotations

from typing import cast

from wsi_fl.data.cross_site_counts import CrossSiteCounts, CrossSiteScores, score_cross_site
from wsi_fl.report.formatting import format_auroc, format_number
from wsi_fl.stages.runtime.console import MAX_SITE_COLUMNS, Lines, TextTable
from wsi_fl.stages.site.run_context import RunContext


def load_cross_site_scores(context: RunContext) -> CrossSiteScores | None:
    """Return the scores of the released models on each hospital's test part and on all; None without counts.

    Every site of a run stores the same counts, so those of the first site here are read.
    """
    for name in context.local_names:
        if (counts := context.run.site_folder(name).read_document("scores")) is not None:
            return score_cross_site(cast(CrossSiteCounts, counts))
    return None


def render_cross_site_lines(cross_site: CrossSiteScores) -> Lines:
    """Yield a table of each model's accuracy on each hospital's test part, and of its scores on all parts."""
    hospitals = cross_site["hospitals"]
    hospitals = hospitals if len(hospitals) <= MAX_SITE_COLUMNS else []  # the report has room for them
    headings = ["model", *hospitals, "all", "macro-acc.", "AUROC", "n"]
    rows: list[list[str] | None] = []
    for name, model in cross_site["models"].items():
        merged = model["merged"]
        parts = [*(model["hospitals"][hospital] for hospital in hospitals), merged]
        areas = [format_number(merged["macro_accuracy"]), format_auroc(merged), str(merged["n"])]
        rows.append([name, *(format_number(part["accuracy"]) for part in parts), *areas])
    yield TextTable("cross-site accuracy of released models", headings, rows)
