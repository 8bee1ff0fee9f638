"""The page of a run as one HTML document."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from wsi_fl.report import aggregation, answers, audit, between, figures, pictures, sections, sets, words
from wsi_fl.report.fill import fill
from wsi_fl.report.page import Page


def render(page: Page) -> str:
    """One HTML document that needs nothing beside it.

    Raises WsiFlError where an overview is no picture.
    """
    return fill("template.html.j2", _context(page))


def _context(page: Page) -> dict[str, Any]:
    names = _site_names(page)
    evaluated = list((page.evaluation or {}).get("sites", ()))
    colors = {name: figures.site_color(i, len(names)) for i, name in enumerate(names)}
    rows = sections.rows(page)
    return {
        "page": page,
        "names": names,
        "many": len(names) > sections.MANY_SITES,
        "slots": {name: i if len(names) <= sections.MANY_SITES else 0 for i, name in enumerate(names)},
        "title": f"{words.method_name(page.method)} on {page.pipeline}",
        "method": words.method_name(page.method),
        "metric_names": sections.metrics(page),
        "evaluated": evaluated,
        "headline": sections.headline(page, len(names)),
        "privacy": sections.privacy(page),
        "audit": audit.section(page, colors),
        "aggregation": aggregation.section(page, colors),
        "rows": rows,
        "comparison": sections.comparison(page, rows, colors),
        "curves": sections.curves(page, colors),
        "has_accuracy": any(
            line.get("own") or line.get("merged") for m in page.metrics.values() for line in m
        ),
        "spent": sections.spent(page, colors),
        "answers": answers.figures_of(page),
        "reliability": sections.reliability(evaluated, colors),
        "pooled": sections.pooled(evaluated),
        "heats": sections.heats(evaluated, page.scores[0]),
        "between": between.section(page.between),
        "data": sets.data(page),
        "slidewise": page.examples != "patches",
        "tests": sets.test_sets(page),
        "tumor_types": sets.tumor_types(evaluated),
        "traffic": sections.traffic(page),
        "patches": sections.patches(page, names),
        "overviews": pictures.overview_uris(page.overviews),
        "svg": lambda chart: Markup(chart.svg),
    }


def _site_names(page: Page) -> list[str]:
    """Every site that any part of the page mentions, in the order of the run."""
    everywhere = [
        *(s["site"] for s in page.summary.get("sites", ())),
        *(s["site"] for s in (page.evaluation or {}).get("sites", ())),
        *page.metrics,
        *(s["site"] for s in page.stores),
    ]
    return list(dict.fromkeys(everywhere))
