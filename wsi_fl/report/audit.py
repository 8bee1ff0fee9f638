"""The section on attacks: who could tell what was trained on, what letters tell, and ε between its two bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from wsi_fl.privacy.audit import found as found_at
from wsi_fl.report.figures import ACCENT, INK, MUTED, Chart, new_figure, shortened, to_svg
from wsi_fl.report.words import DASH, Finding, Json, known, number, percent

_MODELS = {
    "private": "Private model",
    "proxy": "Proxy, as it left the site",
    "shared": "Shared head, as it left the site",
    "released": "Model, as it left the site",
    "central": "Central model",
}
"""What the models of an audit are called."""
_FEWEST = 1e-4
_FOUND = ("μ at most", "found at 1 %", "noise redrawn", "guarantee", "found at 0.1 %", "others unknown")
_MOVED = ("site", "moves the sum by at most", "length with noise", "head without it", "answers without it")


def section(audit: Json | None, colors: Mapping[str, str]) -> dict[str, object] | None:
    """What the section shows; None for a run that was not audited."""
    if audit is None:
        return None
    rows = _rows(audit)
    planted = [row for row in rows if row["canaries"]]
    return {
        "rows": rows,
        "merged": any(row.get("merged") for row in rows),
        "rocs": _rocs(rows, colors),
        "bounds": _bounds_chart(planted) if planted else None,
        "tests": f"{audit['tested']} {audit['adjacency']}" if audit["tests"] else "",
        "planted": max((row["canaries"]["n"] for row in planted), default=0),
        "findings": list(findings(audit)),
        "letters": tables(audit),
        "tails": [_tail(site) for site in _with_tails(audit)],
    }


def _rows(audit: Json) -> list[dict[str, Any]]:
    return [
        {
            **model,
            **model["membership"],
            **{key: site[key] for key in ("site", "guarantee")},
            "title": _MODELS.get(model["model"], model["model"]),
        }
        for site in audit["sites"]
        for model in site["models"]
    ]


def _tail(site: Json) -> tuple[str, Chart]:
    """How many are found over the rate of false alarms, on average and of the most exposed, and at most."""
    tail = site["tail"]
    points = tail["attackers"]["others" if tail["sigma"] else "population"]["curve"]
    curves = {
        name: [(point[0], point[k]) for point in points] for k, name in ((1, "all"), (2, "most exposed"))
    }
    if tail["sigma"]:
        limit = {"guarantee": [(point[0], float(found_at(1 / tail["sigma"], point[0]))) for point in points]}
        curves = limit | curves
    colors = {"all": INK, "most exposed": ACCENT, "guarantee": MUTED}
    return f"Found in the letter of {site['site']}", _roc_chart(curves, colors, f"Letter of {site['site']}")


def findings(audit: Json) -> Iterator[Finding]:
    """Yield what is alarming, of the models and of the letters; "bad" where a promise is broken or what left tells."""
    for row in _rows(audit):
        who, planted = f"{row['title']} of {row['site']}", row["canaries"]
        if row["own"]["alarm"]:
            tone = "bad" if row["model"] != "private" else "unclear"
            auroc = number(row["own"]["auroc"])
            yield Finding(tone, f"{who}: its losses tell who was in the training data (AUROC {auroc}).")
        if planted and planted["broken"]:
            least, most = (number(planted[key], 2) for key in ("epsilon_lower_corrected", "epsilon_upper"))
            text = f"{who}: ε is at least {least}, though the {row['guarantee']} one is {most}."
            yield Finding("bad", text)
    for one in audit.get("influence") or ():
        if one["refused"]:
            yield Finding("bad", f"the letter of {one['site']} is refused: {one['refused']}.")
    for site in _with_tails(audit):
        name, tail = site["site"], site["tail"]
        if tail["beyond"]:
            who = ", ".join(tail["beyond"])
            yield Finding("bad", f"{name}: more are found in its letter than is guaranteed: {who}.")
        if not tail["sigma"]:
            groups = tail["attackers"]["population"]["groups"]
            everybody, most = (percent(group["found"]["0.01"]["exact"], 1) for group in groups[:2])
            text = (
                f"{name}: whoever knows all other {tail['unit']}s finds each in its letter, which has no noise; "
                f"whoever knows none finds {everybody}, of the most exposed {most}."
            )
            yield Finding("unclear", text)


def tables(audit: Json) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Return title, headings and rows of the tables on letters of an audit's document; none for other methods."""
    tails = [
        [site["site"], group["group"], str(group["n"]), *_cells(site["tail"], group, other)]
        for site in _with_tails(audit)
        for group, other in zip(*(who["groups"] for who in site["tail"]["attackers"].values()), strict=True)
    ]
    moved = [
        [
            row["site"],
            str(row["n"]),
            number(row["length"], 1),
            percent(row["moved"], 1),
            percent(row["answers_changed"], 1),
        ]
        for row in audit.get("influence") or ()
    ]
    title = "Who is found in a letter, with so many false alarms"
    found = [(title, ("site", "who", "n", *_FOUND), tails), ("What each letter changes", _MOVED, moved)]
    return [one for one in found if one[2]]


def _cells(tail: Json, group: Json, other: Json) -> list[str]:
    often, rare = (group["found"][rate] for rate in ("0.01", "0.001"))
    low, high = often.get("interval", (None, None))
    shares = ((tail["guaranteed"] or {}).get("0.01"), rare["exact"], other["found"]["0.01"]["exact"])
    most = number(group["most"], 2) if known(group["most"]) else "∞"
    drawn = f"{100 * low:.1f}–{percent(high, 1)}" if known(low) else DASH
    return [most, percent(often["exact"], 1), drawn, *(percent(share, 1) for share in shares)]


def _with_tails(audit: Json) -> list[Json]:
    return [site for site in audit["sites"] if site.get("tail")]


def _rocs(rows: Sequence[Json], colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """A chart per kind of model, a curve per site."""
    charts = []
    for name in dict.fromkeys(row["model"] for row in rows):
        curves = {
            row["site"]: row["own"]["roc"] for row in rows if row["model"] == name and row["own"]["roc"]
        }
        if curves:
            charts.append((_MODELS.get(name, name), _roc_chart(curves, colors, f"Membership, {name}")))
    return charts


def _roc_chart(
    curves: Mapping[str, Sequence[Sequence[float]]], colors: Mapping[str, str], what: str
) -> Chart:
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
        nearest = {
            site: min(points, key=lambda point: abs(point[0] - 0.1)) for site, points in curves.items()
        }
        ends = "; ".join(f"{site}: {number(point[1])}" for site, point in nearest.items())
        alt = f"{what}: true positive rate at a false positive rate of about 0.1. {ends}."
        return Chart(to_svg(figure, what), alt)


def _bounds_chart(rows: Sequence[Json]) -> Chart:
    """ε of every model with canaries: from what the audit shows at least to what the ledger says at most."""
    labels = [f"{row['site']}, {row['model']}" for row in rows]
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
        said = "; ".join(
            f"{label} at least {number(row['canaries']['epsilon_lower'], 2)}, at most "
            f"{number(row['canaries']['epsilon_upper'], 2)}"
            for label, row in zip(labels, rows, strict=True)
        )
        return Chart(to_svg(figure, "Bounds on epsilon"), f"Bounds on ε: {said}.")
