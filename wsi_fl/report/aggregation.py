"""The section on aggregated predictions: all sites' answers as one, and what MPCPA's models learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsi_fl.report import sections, words
from wsi_fl.report.figures import ACCENT, INK, MUTED, Bar, Chart, comparison, new_figure, to_svg
from wsi_fl.report.page import Json, Page

RULES = {
    "mean": "Mean of the probabilities",
    "weighted_mean": "Mean, weighted by training rows",
    "absolute": "Absolute majority of votes",
    "relative": "Relative majority of votes",
    "weighted": "Votes weighted by training rows",
}
_DECISIVE = ("aggregated A", "aggregated B")


def section(page: Page, colors: Mapping[str, str]) -> dict[str, Any] | None:
    """What the section shows; None where fewer than two sites answered for the same test set."""
    together = (page.evaluation or {}).get("aggregated")
    if not together:
        return None
    table = page.mpcpa
    curve = table["curve"] if table else ()
    return {
        "used": RULES[together["rule"]],
        "rules": [(RULES[name], scores) for name, scores in together["rules"].items()],
        "findings": list(_findings(page, together)),
        "table": table,
        "chart": models_chart(table["rows"]) if table else None,
        "curve": curve_chart(curve, colors) if len(curve) > 2 else None,
        "rule": RULES[table["aggregate"]] if table else None,
        "failed": [row["site"] for row in table["memorization"] if not row["passed"]] if table else [],
        "generated": sections.picture_uris(page.generated, page.classes, sections.PATCHES_SHOWN),
    }


def _findings(page: Page, together: Json) -> Sequence[words.Finding]:
    assert page.evaluation is not None
    mean = page.evaluation["merged"]["accuracy"]["mean"]
    one = together["rules"][together["rule"]]["accuracy"]
    if mean is None or one is None:
        return []
    tone = "good" if one > mean else "unclear"
    text = (
        f"All sites' predictions as one reach an accuracy of {words.number(one)}, one site's {words.number(mean)} on "
        "average. One run is one draw: a few points mean nothing."
    )
    return [words.Finding(tone, text)]


def models_chart(rows: Sequence[Json]) -> Chart:
    """Accuracy of every model of the comparison, below each other; aggregations stand out."""
    labels = [f"{row['row']}, {row['site']}" if "site" in row else row["row"] for row in rows]
    bars = [
        Bar(label, row["accuracy"], None, dp=True, this=row["row"] in _DECISIVE)
        for label, row in zip(labels, rows, strict=True)
    ]
    return Chart(
        comparison(bars, "Own and generated images").svg,
        "Accuracy on the merged test set: "
        + "; ".join(f"{bar.label} {words.number(bar.mean)}" for bar in bars)
        + ".",
    )


def curve_chart(points: Sequence[Json], colors: Mapping[str, str]) -> Chart:
    """Accuracy over the number of generated images of each class from each denoiser (the paper's Figure 5)."""
    x = [point["per_class"] for point in points]
    with new_figure(left_in=0.6) as (figure, axes):
        for site in points[0]["sites"]:
            axes.plot(
                x,
                [point["sites"][site] for point in points],
                color=colors.get(site, MUTED),
                lw=1.1,
                alpha=0.8,
            )
        axes.plot(x, [point["mean"] for point in points], color=INK, ls=(0, (4, 3)))
        axes.plot(x, [point["aggregated"] for point in points], color=ACCENT, marker="o", ms=4)
        axes.set(xlabel="generated images of each class", ylabel="accuracy")
        svg = to_svg(figure, "Number of generated images")
    said = "; ".join(
        f"{point['per_class']}: {words.number(point['aggregated'])}, sites {words.number(point['mean'])} on average"
        for point in points
    )
    return Chart(svg, f"Accuracy of the aggregated predictions over generated images of each class: {said}.")
