"""The section on attacks: who could tell what was trained on, and ε between its two bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from wsi_fl.privacy.audit import found
from wsi_fl.report import exposed, words
from wsi_fl.report.figures import ACCENT, INK, MUTED, Chart, new_figure, shortened, to_svg
from wsi_fl.report.page import Json, Page

MODELS = {
    "private": "Private model",
    "proxy": "Proxy, as it left the site",
    "released": "Model, as it left the site",
    "central": "Central model",
}
"""What the models of an audit are called."""
_FEWEST = 1e-4


def section(page: Page, colors: Mapping[str, str]) -> dict[str, Any] | None:
    """What the section shows; None for a run that was not audited."""
    if page.audit is None:
        return None
    rows = [
        {
            "site": site["site"],
            "model": MODELS.get(model["model"], model["model"]),
            "name": model["model"],
            "dp": model["dp"],
            "own": model["membership"]["own"],
            "merged": model["membership"].get("merged"),
            "canaries": model["canaries"],
            "guarantee": site["guarantee"],
        }
        for site in page.audit["sites"]
        for model in site["models"]
    ]
    planted = [row for row in rows if row["canaries"]]
    return {
        "rows": rows,
        "merged": any(row["merged"] for row in rows),
        "rocs": _rocs(rows, colors),
        "bounds": bounds_chart(planted) if planted else None,
        "confidence": page.audit["confidence"],
        "tests": _tests(page.audit),
        "planted": max((row["canaries"]["n"] for row in planted), default=0),
        "findings": [finding for row in rows for finding in _findings(row)]
        + [
            words.Finding("bad" if bad else "unclear", f"{said}.")
            for said, bad in exposed.findings(page.audit)
        ],
        "letters": exposed.tables(page.audit),
        "tails": [_tail(site) for site in page.audit["sites"] if site.get("tail")],
    }


def _tail(site: Json) -> tuple[str, Chart]:
    """How many are found over the rate of false alarms, on average and of the most exposed, and at most."""
    tail = site["tail"]
    attacker = "others" if tail["sigma"] else "population"
    points = tail["attackers"][attacker]["curve"]
    named = ((1, "all"), (2, "most exposed"))
    curves = {name: [(point[0], point[k]) for point in points] for k, name in named}
    if tail["sigma"]:
        limit = {"guarantee": [(point[0], float(found(1 / tail["sigma"], point[0]))) for point in points]}
        curves = limit | curves
    colors = {"all": INK, "most exposed": ACCENT, "guarantee": MUTED}
    return f"Found in the letter of {site['site']}", roc_chart(curves, colors, f"Letter of {site['site']}")


def _tests(audit: Json) -> str:
    """How many models are tested at which level, and what ε is about; nothing where no ε was tested."""
    if not audit["tests"]:
        return ""
    return f"{audit['tested']} {audit['adjacency']}"


def _findings(row: Json) -> list[words.Finding]:
    who = f"{row['model']} of {row['site']}"
    found = []
    if row["own"]["alarm"]:
        found.append(
            words.Finding(
                "bad" if row["name"] != "private" else "unclear",
                f"{who}: its losses tell who was in the training data (AUROC {words.number(row['own']['auroc'])}).",
            )
        )
    if row["canaries"] and row["canaries"]["broken"]:
        planted = row["canaries"]
        corrected = planted["epsilon_lower_corrected"]
        at_least, at_most = (words.number(value, 2) for value in (corrected, planted["epsilon_upper"]))
        text = f"{who}: ε is at least {at_least}, though the {row['guarantee']} one is {at_most}."
        found.append(words.Finding("bad", text))
    return found


def _rocs(rows: Sequence[Json], colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """A chart per kind of model, a curve per site."""
    charts = []
    for name in dict.fromkeys(row["name"] for row in rows):
        curves = {row["site"]: row["own"]["roc"] for row in rows if row["name"] == name and row["own"]["roc"]}
        if curves:
            charts.append((MODELS.get(name, name), roc_chart(curves, colors, f"Membership, {name}")))
    return charts


def roc_chart(curves: Mapping[str, Sequence[Sequence[float]]], colors: Mapping[str, str], what: str) -> Chart:
    """True against false positive rates, both on log axes; on the dashed line an attack knows nothing."""
    least = max(_FEWEST, min(point[0] for points in curves.values() for point in points))
    with new_figure(width_in=3.3, height_in=3.0, left_in=0.65) as (figure, axes):
        axes.plot([least / 2, 1], [least / 2, 1], color=MUTED, lw=1, ls=(0, (4, 3)))
        for site, points in curves.items():
            shown = [(x, y) for x, y in points if y > 0]
            axes.plot([x for x, _ in shown], [y for _, y in shown], color=colors.get(site, INK), alpha=0.9)
        axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least / 2, 1.1))
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
            axis.set_minor_locator(NullLocator())
        svg = to_svg(figure, what)
    ends = "; ".join(f"{site}: {words.number(_nearest(points, 0.1))}" for site, points in curves.items())
    return Chart(svg, f"{what}: true positive rate at a false positive rate of about 0.1. {ends}.")


def _nearest(points: Sequence[Sequence[float]], rate: float) -> float:
    return min(points, key=lambda point: abs(point[0] - rate))[1]


def bounds_chart(rows: Sequence[Json]) -> Chart:
    """ε of every model with canaries: from what the audit shows at least to what the ledger says at most."""
    labels = [f"{row['site']}, {row['name']}" for row in rows]
    left_in = min(1.9, 0.2 + 0.075 * max(len(shortened(label)) for label in labels))
    with new_figure(height_in=0.62 + 0.34 * len(rows), left_in=left_in, bottom_in=0.45) as (figure, axes):
        for y, row in enumerate(rows):
            low, high = row["canaries"]["epsilon_lower"], row["canaries"]["epsilon_upper"]
            if high is not None:
                axes.plot([low, high], [y, y], color=ACCENT, lw=5, alpha=0.35, solid_capstyle="butt")
                axes.plot(high, y, "|", color=ACCENT, ms=12, mew=2)
            axes.plot(low, y, "o", color=ACCENT if high is not None else MUTED, ms=6)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [shortened(label) for label in labels])
        axes.set_xlim(left=-0.05 * max(1.0, axes.get_xlim()[1]))
        axes.set_xlabel("ε")
        axes.grid(axis="y", visible=False)
        svg = to_svg(figure, "Bounds on epsilon")
    said = "; ".join(
        f"{label} at least {words.number(row['canaries']['epsilon_lower'], 2)}, at most "
        f"{words.number(row['canaries']['epsilon_upper'], 2)}"
        for label, row in zip(labels, rows, strict=True)
    )
    return Chart(svg, f"Bounds on ε: {said}.")
