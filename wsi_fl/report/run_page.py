"""The page of a run, with its sections on data, test sets, single predictions and aggregated predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.cross_site_counts import sum_confusions
from wsi_fl.data.metrics import mean_and_sd
from wsi_fl.data.survival import compute_risk, kaplan_meier, logrank_test
from wsi_fl.report import cross_site_section, figures, formatting, inline_pictures, run_sections
from wsi_fl.report.figures import ACCENT, INK, MUTED, N_COLORS, TOKENS, Chart, open_figure, render_svg
from wsi_fl.report.formatting import Json
from wsi_fl.report.run_sections import Page
from wsi_fl.report.sections import SectionContext, build_sections
from wsi_fl.report.templates import fill_template

_Floats = NDArray[np.float64]
_PATCHES_SHOWN = 6
"""Sample patches per site and label; half as many when there are many sites."""


def render_run_page(page: Page, run_context: Any = None) -> str:
    """Return the page as one HTML document without external files.

    Args:
        run_context: the run's `RunContext`, for sections of other packages; None for none.

    Raises:
        WsiFlError: when an overview is no picture.
    """
    evaluation = page.evaluation or {}
    evaluated = list(evaluation.get("sites", ()))
    rows = [*page.summary.get("sites", ()), *evaluated, *({"site": name} for name in page.metrics), *page.stores]
    names = list(dict.fromkeys(row["site"] for row in rows))  # in the order of the run
    counted = [row for row in evaluated if row.get("confusion")]
    many, slots = len(names) > N_COLORS, figures.assign_color_slots(names)
    colors = {name: TOKENS[f"s{slot}"] for name, slot in slots.items()}
    runs = run_sections.list_runs(page)
    added = [] if run_context is None else build_sections(SectionContext(run_context, page, colors, slots, many))
    context = {
        "page": page,
        "names": names,
        "many": many,
        "slots": slots,
        "measures": ", ".join(formatting.score_in_sentence(name) for name in page.scores),
        "metric_names": {name: formatting.SCORES[name] for name in page.scores},
        "evaluated": evaluated,
        "headline": run_sections.build_headline(page, len(names)),
        "privacy": run_sections.summarize_privacy(page),
        "added": added,
        "answers": {number: answer for section in added for number, answer in section.checklist.items()},
        "generated": _encode_pictures(page.generated, page.classes, _PATCHES_SHOWN),
        "rows": runs,
        "comparison": run_sections.plot_comparisons(page, runs, colors),
        "curves": run_sections.plot_round_curves(page, colors),
        "has_accuracy": any(line.get("own") or line.get("merged") for m in page.metrics.values() for line in m),
        "spent": run_sections.plot_epsilon(page, colors),
        "patient_charts": _prediction_charts(page),
        "reliability": run_sections.plot_reliabilities(evaluated, colors),
        "pooled": sum_confusions(counted) if counted else None,
        "heats": run_sections.build_heatmaps(evaluated, page.scores[0]),
        "between": cross_site_section.build_cross_site_section(page.between),
        "data": _summarize_data(page),
        "slidewise": page.examples != "patches",
        "unscored": formatting.describe_unscored((page.evaluation or {}).get("unscored", {})),
        "tumor_types": _summarize_tumor_types(evaluated, merged=bool(evaluation.get("merged"))),
        "traffic": run_sections.sum_traffic(page),
        "patches": _encode_pictures(page.patches, page.classes, _PATCHES_SHOWN // (2 if many else 1)),
        "overviews": inline_pictures.encode_overviews(page.overviews),
    }
    return fill_template("run", context)


def _summarize_data(page: Page) -> dict[str, object]:
    """Return the examples per site, split and class with sums, and the classes at one site only (`single`)."""
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
    holders = {
        label: [site for site, table in tables.items() if any(counts.get(label) for counts in table.values())]
        for label in page.classes
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
        "single": [(label, sites[0]) for label, sites in holders.items() if len(sites) == 1 and len(tables) > 1],
    }


def _summarize_tumor_types(evaluated: Sequence[Json], *, merged: bool) -> list[dict[str, object]]:
    """Return by tumour type the slides, and mean ± sd over sites of both accuracies.

    Args:
        merged: whether all models were tested on the same slides, else each on those of its site.
    """
    rows_by_type: dict[str, list[Json]] = {}
    for site in evaluated:
        for kind, row in (site.get("tumor_types") or {}).items():
            rows_by_type.setdefault(kind, []).append(row)
    return [
        {
            "name": kind,
            "n": (max if merged else sum)(row["n"] for row in rows),
            **{key: mean_and_sd([row[key] for row in rows]) for key in ("accuracy", "macro_accuracy")},
        }
        for kind, rows in sorted(rows_by_type.items())
    ]


def _encode_pictures(
    pictures_of: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]], classes: Sequence[str], limit: int
) -> dict[str, dict[str, list[str]]]:
    """Return data URIs by site and label, at most `limit` of each; labels in the order of the classes."""
    uris: dict[str, dict[str, list[str]]] = {}
    for site, samples in pictures_of.items():
        for label in dict.fromkeys([*classes, *(label for label, _ in samples)]):
            if chosen := [pixels for patch_label, pixels in samples if patch_label == label][:limit]:
                uris.setdefault(site, {})[label] = [inline_pictures.encode_patch(pixels) for pixels in chosen]
    return uris


def _prediction_charts(page: Page) -> list[tuple[str, Chart, str]]:
    """Return (title, chart, caption) of each site's local test part, for numbers and survival."""
    if page.task == "number":
        return [(site, _truth_chart(site, *values), "") for site, values in page.predictions.items()]
    ends = [float(name) for name in page.outputs] if page.task == "survival" else []
    return [(site, *_risk_chart(site, *values, ends)) for site, values in page.predictions.items()]


def _truth_chart(site: str, truth: _Floats, predictions: _Floats) -> Chart:
    """Return a scatter plot of predicted against true numbers with the diagonal."""
    low, high = (float(f([f(truth), f(predictions)])) for f in (np.min, np.max))
    with open_figure() as (figure, axes):
        axes.plot([low, high], [low, high], color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.plot(truth[:, 0], predictions[:, 0], "o", color=ACCENT, ms=4, alpha=0.6)
        axes.set(xlabel="true", ylabel="predicted")
        alt = f"Predicted against true numbers of {len(truth)} test examples of {site}."
        return Chart(render_svg(figure, f"Predicted against true, {site}"), alt)


def _risk_chart(site: str, truth: _Floats, predictions: _Floats, ends: list[float]) -> tuple[Chart, str]:
    """Return Kaplan–Meier curves above and below the median predicted risk, and the p-value in words."""
    risks = compute_risk(predictions, ends)
    high = risks > np.median(risks)
    p = logrank_test(truth, high)
    with open_figure() as (figure, axes):
        for group, color, name in ((high, ACCENT, "higher risk"), (~high, INK, "lower risk")):
            if group.any():
                times, share = kaplan_meier(truth[group])
                axes.step(times, share, where="post", color=color, label=f"{name} ({int(group.sum())})")
        axes.set(ylim=(0, 1.03), xlabel="time", ylabel="without the event")
        axes.legend(frameon=False, loc="lower left")
        test_text = (
            "Too few patients or events for a test." if p is None else f"Log-rank {formatting.format_p_value(p)}."
        )
        alt = f"Kaplan–Meier curves of two halves of {len(truth)} test patients of {site}. {test_text}"
        return Chart(render_svg(figure, f"Survival by predicted risk, {site}"), alt), test_text
