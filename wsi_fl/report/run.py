"""The page of a run: its sections, and those on what there was to learn from, on test sets, and on single answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.survival import kaplan_meier, logrank, risk
from wsi_fl.report import aggregation, audit, between, clinical, figures, pictures, sections, tripod, words
from wsi_fl.report.figures import ACCENT, INK, MUTED, Chart, new_figure, to_svg
from wsi_fl.report.fill import fill
from wsi_fl.report.page import Json, Page
from wsi_fl.report.words import number

Floats = NDArray[np.float64]


def render(page: Page) -> str:
    """One HTML document that needs nothing beside it.

    Raises WsiFlError where an overview is no picture.
    """
    return fill("run", _context(page))


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
        "clinical": clinical.section(page.clinical, colors),
        "checklist": tripod.checklist(page),
        "audit": audit.section(page, colors),
        "aggregation": aggregation.section(page, colors),
        "rows": rows,
        "comparison": sections.comparison(page, rows, colors),
        "curves": sections.curves(page, colors),
        "has_accuracy": any(
            line.get("own") or line.get("merged") for m in page.metrics.values() for line in m
        ),
        "spent": sections.spent(page, colors),
        "answers": _answers(page),
        "reliability": sections.reliability(evaluated, colors),
        "pooled": sections.pooled(evaluated),
        "heats": sections.heats(evaluated, page.scores[0]),
        "between": between.section(page.between),
        "data": _data(page),
        "slidewise": page.examples != "patches",
        "tests": _test_sets(page),
        "tumor_types": _tumor_types(evaluated),
        "traffic": sections.traffic(page),
        "patches": sections.patches(page, names),
        "overviews": pictures.overview_uris(page.overviews),
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


def _data(page: Page) -> dict[str, Any]:
    """Examples per site, split and class, with sums; the splits any store has, in their usual order."""
    tables = {s["site"]: s.get("table") or {} for s in page.stores}
    splits = [x for x in ("train", "val", "test") if any(x in t for t in tables.values())]
    sums = {
        (split, label): sum(t.get(split, {}).get(label) or 0 for t in tables.values())
        for split in splits
        for label in page.classes
    }
    row_sums = {
        (site, split): sum(table[split].get(label) or 0 for label in page.classes)
        for site, table in tables.items()
        for split in splits
        if split in table
    }
    geometries = {(s.get("size_px"), s.get("mpp")) for s in page.stores}
    return {
        "splits": splits,
        "sums": sums,
        "row_sums": row_sums,
        "patients": sum(s.get("patients") or 0 for s in page.stores),
        "slides": sum(s.get("slides") or 0 for s in page.stores),
        "geometry": geometries.pop() if len(geometries) == 1 else None,
        "encoder": next((s["encoder"] for s in page.stores if s.get("encoder")), None),
        "single": _of_one_site(tables, page.classes),
    }


def _of_one_site(tables: Mapping[str, Json], classes: Sequence[str]) -> list[tuple[str, str]]:
    """(class, site) of the classes that only one site of several has."""
    holders = {
        label: [site for site, table in tables.items() if any(counts.get(label) for counts in table.values())]
        for label in classes
    }
    return [(label, of[0]) for label, of in holders.items() if len(of) == 1 and len(tables) > 1]


def _test_sets(page: Page) -> list[dict[str, Any]]:
    """Mean ± sd over sites on the internal and the external test sets; empty without others' test sets."""
    evaluation = page.evaluation or {}
    if not evaluation.get("external"):
        return []
    named = (
        ("Internal", "internal", "each model on its own site's test part"),
        ("External", "external", "each model on the test parts of all other sites of the run"),
        ("Merged", "merged", "each model on the test parts of all sites"),
    )
    return [{"name": name, "what": what, **evaluation[key]} for name, key, what in named]


def _tumor_types(evaluated: Sequence[Json]) -> list[dict[str, Any]]:
    """Per tumour type: slides, and mean ± sd over sites of both accuracies on the set of the headline."""
    kinds = sorted({kind for site in evaluated for kind in site.get("tumor_types") or {}})
    found = []
    for kind in kinds:
        rows = [site["tumor_types"][kind] for site in evaluated if kind in (site.get("tumor_types") or {})]
        means = {key: _spread([row[key] for row in rows]) for key in ("accuracy", "macro_accuracy")}
        found.append({"name": kind, "n": max(row["n"] for row in rows), **means})
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "sd": float(np.std(values))}


def _answers(page: Page) -> list[tuple[str, Chart, str]]:
    """Return (title, chart, caption) of each site's own test part; nothing where classes are asked."""
    if page.task == "number":
        return [(site, _against_truth(site, *found), "") for site, found in page.said.items()]
    ends = [float(name) for name in page.outputs] if page.task == "survival" else []
    return [(site, *_by_risk(site, truth, said, ends)) for site, (truth, said) in page.said.items()]


def _against_truth(site: str, truth: Floats, said: Floats) -> Chart:
    """A dot per example, and the line on which the model is right."""
    low, high = (float(f([f(truth), f(said)])) for f in (np.min, np.max))
    with new_figure() as (figure, axes):
        axes.plot([low, high], [low, high], color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.plot(truth[:, 0], said[:, 0], "o", color=ACCENT, ms=4, alpha=0.6)
        axes.set(xlabel="true", ylabel="predicted")
        svg = to_svg(figure, f"Predicted against true, {site}")
    return Chart(svg, f"Predicted against true numbers of {len(truth)} test examples of {site}.")


def _by_risk(site: str, truth: Floats, said: Floats, ends: list[float]) -> tuple[Chart, str]:
    """Kaplan–Meier curves of the half of the patients with the higher predicted risk, and of the others."""
    stated = risk(said, ends)
    high = stated > np.median(stated)
    p = logrank(truth, high)
    with new_figure() as (figure, axes):
        for mine, color, name in ((high, ACCENT, "higher risk"), (~high, INK, "lower risk")):
            if mine.any():
                times, share = kaplan_meier(truth[mine])
                axes.step(times, share, where="post", color=color, label=f"{name} ({int(mine.sum())})")
        axes.set(ylim=(0, 1.03), xlabel="time", ylabel="without the event")
        axes.legend(frameon=False, loc="lower left")
        svg = to_svg(figure, f"Survival by predicted risk, {site}")
    tested = "Too few patients or events for a test." if p is None else f"Log-rank p = {number(p)}."
    return Chart(
        svg, f"Kaplan–Meier curves of two halves of {len(truth)} test patients of {site}. {tested}"
    ), tested
