"""The section on privacy attacks: membership, exposure of class statistics, and ε between its two bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter, NullLocator

from wsi_fl.evidence.attacks import best_test_tpr as found_at
from wsi_fl.report.figures import ACCENT, INK, MUTED, Chart, open_figure, render_svg, shorten_label
from wsi_fl.report.formatting import DASH, Finding, Json, format_number, format_percent, is_number
from wsi_fl.report.sections import PageSection, SectionContext

_MODEL_TITLES = {
    "private": "Private model",
    "proxy": "Proxy, as it left the site",
    "shared": "Shared head, as it left the site",
    "released": "Model, as it left the site",
    "central": "Central model",
}
"""Titles of the models of an audit."""
_MIN_FALSE_POSITIVE_RATE = 1e-4
_TAIL_HEADINGS = ("μ at most", "TPR at 1 %", "noise redrawn", "guarantee", "TPR at 0.1 %", "others unknown")
SOURCE_HEADINGS = ("records", "n", "accuracy", "95 %", "label alone", "chance", "bound", "bound, whole sites")
_INFLUENCE_HEADINGS = ("site", "largest norm", "norm with noise", "change of the head", "changed predictions")


def build_section(context: SectionContext) -> PageSection | None:
    """Return the section "Audit" of a run's page; None for a run without audit."""
    audit = context.run_context.run.read("audit")
    if audit is None:
        return None
    rows = list_model_rows(audit)
    planted, roc_charts = [row for row in rows if row["canaries"]], []
    for name in dict.fromkeys(row["model"] for row in rows):
        curves = {row["site"]: row["own"]["roc"] for row in rows if row["model"] == name and row["own"]["roc"]}
        if curves:
            chart = _roc_chart(curves, context.colors, f"Membership, {name}")
            roc_charts.append((_MODEL_TITLES.get(name, name), chart))
    values = {
        "document": audit,
        "rows": rows,
        "merged": any(row.get("merged") for row in rows),
        "rocs": roc_charts,
        "bounds": _bounds_chart(planted) if planted else None,
        "tests": f"{audit['tested']} {audit['adjacency']}" if audit["tests"] else "",
        "planted": max((row["canaries"]["n"] for row in planted), default=0),
        "findings": list(list_audit_findings(audit)),
        "sources": audit.get("sources"),
        "source_table": (SOURCE_HEADINGS, build_source_table(audit)),
        "letters": build_statistics_tables(audit),
        "tails": [_tail_chart(site) for site in _sites_with_tails(audit)],
    }
    return PageSection("audit", "Audit", "privacy", context.fill_template("audit", Path(__file__).parent, values))


def list_model_rows(audit: Json) -> list[Json]:
    """Return a row for each audited model, with its site and its attacks by name."""
    return [
        {
            **model,
            **model["membership"],
            **{key: site[key] for key in ("site", "guarantee")},
            "title": _MODEL_TITLES.get(model["model"], model["model"]),
        }
        for site in audit["sites"]
        for model in site["models"]
    ]


def _tail_chart(site: Json) -> tuple[str, Chart]:
    """Return a ROC chart of the optimal attack on class statistics: average, most exposed, and the guarantee."""
    tail = site["tail"]
    points = tail["attackers"]["others" if tail["sigma"] else "population"]["curve"]
    curves = {name: [(point[0], point[k]) for point in points] for k, name in ((1, "all"), (2, "most exposed"))}
    if tail["sigma"]:
        limit = {"guarantee": [(point[0], float(found_at(1 / tail["sigma"], point[0]))) for point in points]}
        curves = limit | curves
    colors = {"all": INK, "most exposed": ACCENT, "guarantee": MUTED}
    return f"Exposure at {site['site']}", _roc_chart(curves, colors, f"Class statistics of {site['site']}")


def list_audit_findings(audit: Json) -> Iterator[Finding]:
    """Yield the alarming results; "bad" for a broken guarantee or a leaking release."""
    for row in list_model_rows(audit):
        subject, planted = f"{row['title']} of {row['site']}", row["canaries"]
        if row["own"]["alarm"]:
            tone, auroc = "unclear" if row["model"] == "private" else "bad", format_number(row["own"]["auroc"])
            yield Finding(tone, f"{subject}: its losses reveal members of the training data (AUROC {auroc}).")
        if planted and planted["broken"]:
            lower, upper = (format_number(planted[key], 2) for key in ("epsilon_lower_corrected", "epsilon_upper"))
            yield Finding("bad", f"{subject}: ε is at least {lower}, though the {row['guarantee']} one is {upper}.")
    yield from _list_source_findings(audit.get("sources"))
    for influence in audit.get("influence") or ():
        if influence["refused"]:
            yield Finding("bad", f"the class statistics of {influence['site']} are refused: {influence['refused']}.")
    for site in _sites_with_tails(audit):
        name, tail = site["site"], site["tail"]
        if tail["beyond"]:
            subject = ", ".join(tail["beyond"])
            yield Finding("bad", f"{name}: more are identified than guaranteed in its statistics: {subject}.")
        if not tail["sigma"]:
            groups = tail["attackers"]["population"]["groups"]
            share_of_all, upper = (format_percent(group["found"]["0.01"]["exact"], 1) for group in groups[:2])
            text = (
                f"{name}: an attacker who knows all other {tail['unit']}s identifies each in its statistics, which "
                f"have no noise; one who knows none identifies {share_of_all}, of the most exposed {upper}."
            )
            yield Finding("unclear", text)


def _list_source_findings(sources: Json | None) -> Iterator[Finding]:
    """Yield that the source of records was guessed better than by chance, for intervals above it."""
    if not sources:
        return
    chance, records = 1 / len(sources["sites"]), sources["records"]
    shares = {key: row["accuracy"] for key, row in records.items() if row["interval"] and row["interval"][0] > chance}
    if shares:
        release = "class statistics" if sources["attack"] == "statistics" else "models"
        texts = " and ".join(f"{format_percent(share)} of {key}" for key, share in shares.items())
        reason = " Sites differ, which no ε of a row or patient bounds." if "unseen" in shares else ""
        text = f"The {release} tell the site of {texts} {sources['unit']}s, chance {format_percent(chance)}.{reason}"
        yield Finding("unclear", text)


def build_source_table(audit: Json) -> list[list[str]]:
    """Return the rows of the table on source inference; none without."""
    sources = audit.get("sources") or {"records": {}}
    return [
        [
            f"{name} {sources['unit']}s",
            str(row["n"]),
            format_percent(row["accuracy"], 1),
            DASH.join(format_percent(end, 1) for end in row["interval"] or ()) or DASH,
            format_percent(row["by_label"], 1),
            format_percent(1 / len(sources["sites"]), 1),
            format_percent(sources["bound"] if name == "training" else None, 1),
            format_percent(sources["bound_whole_sites"], 1),
        ]
        for name, row in sources["records"].items()
    ]


def build_statistics_tables(audit: Json) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Return title, headings and rows of the tables on class statistics; none for methods without."""
    tails = [
        [site["site"], group["group"], str(group["n"]), *_format_cells(site["tail"], group, other)]
        for site in _sites_with_tails(audit)
        for group, other in zip(*(attacker["groups"] for attacker in site["tail"]["attackers"].values()), strict=True)
    ]
    influence_rows = [
        [row["site"], str(row["n"]), format_number(row["length"], 1)]
        + [format_percent(row[share], 1) for share in ("moved", "answers_changed")]
        for row in audit.get("influence") or ()
    ]
    title = "Membership inference in class statistics"
    tables = [
        (title, ("site", "group", "n", *_TAIL_HEADINGS), tails),
        ("Influence of class statistics", _INFLUENCE_HEADINGS, influence_rows),
    ]
    return [table for table in tables if table[2]]


def _format_cells(tail: Json, group: Json, other: Json) -> list[str]:
    at_1_percent, at_01_percent = (group["found"][rate] for rate in ("0.01", "0.001"))
    low, high = at_1_percent.get("interval", (None, None))
    shares = ((tail["guaranteed"] or {}).get("0.01"), at_01_percent["exact"], other["found"]["0.01"]["exact"])
    max_mu = format_number(group["most"], 2) if is_number(group["most"]) else "∞"
    interval_text = f"{100 * low:.1f}–{format_percent(high, 1)}" if is_number(low) else DASH
    return [max_mu, format_percent(at_1_percent["exact"], 1), interval_text, *(format_percent(x, 1) for x in shares)]


def _sites_with_tails(audit: Json) -> list[Json]:
    return [site for site in audit["sites"] if site.get("tail")]


def _roc_chart(curves: Mapping[str, Sequence[Sequence[float]]], colors: Mapping[str, str], title: str) -> Chart:
    """Return a chart of true against false positive rates on log axes; the dashed line is guessing."""
    lowest_rate = max(_MIN_FALSE_POSITIVE_RATE, min(point[0] for points in curves.values() for point in points))
    with open_figure(width_in=3.3, height_in=3.0, left_in=0.65) as (figure, axes):
        axes.plot([lowest_rate / 2, 1], [lowest_rate / 2, 1], color=MUTED, lw=1, ls=(0, (4, 3)))
        for site, points in curves.items():
            visible = [(x, y) for x, y in points if y > 0]
            axes.plot([x for x, _ in visible], [y for _, y in visible], color=colors.get(site, INK), alpha=0.9)
        axes.set(xscale="log", yscale="log", xlim=(lowest_rate, 1), ylim=(lowest_rate / 2, 1.1))
        axes.set(xlabel="false positive rate", ylabel="true positive rate")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
            axis.set_minor_locator(NullLocator())
        nearest_points = {site: min(points, key=lambda point: abs(point[0] - 0.1)) for site, points in curves.items()}
        ends = "; ".join(f"{site}: {format_number(point[1])}" for site, point in nearest_points.items())
        alt = f"{title}: true positive rate at a false positive rate of about 0.1. {ends}."
        return Chart(render_svg(figure, title), alt)


def _bounds_chart(rows: Sequence[Json]) -> Chart:
    """Return a chart of ε of every model with canaries, from the audit's lower to the ledger's upper bound."""
    labels = [f"{row['site']}, {row['model']}" for row in rows]
    left_in = min(1.9, 0.2 + 0.075 * max(len(shorten_label(label)) for label in labels))
    with open_figure(height_in=0.62 + 0.34 * len(rows), left_in=left_in, bottom_in=0.45) as (figure, axes):
        for y, row in enumerate(rows):
            low, high = row["canaries"]["epsilon_lower"], row["canaries"]["epsilon_upper"]
            if high is not None:
                axes.plot([low, high], [y, y], color=ACCENT, lw=5, alpha=0.35, solid_capstyle="butt")
                axes.plot(high, y, "|", color=ACCENT, ms=12, mew=2)
            axes.plot(low, y, "o", color=ACCENT if high is not None else MUTED, ms=6)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [shorten_label(label) for label in labels])
        axes.set_xlim(left=-0.05 * max(1.0, axes.get_xlim()[1]))
        axes.set_xlabel("ε")
        axes.grid(axis="y", visible=False)
        ends = [[format_number(row["canaries"][f"epsilon_{end}"], 2) for end in ("lower", "upper")] for row in rows]
        texts = (f"{label} at least {low}, at most {high}" for label, (low, high) in zip(labels, ends, strict=True))
        return Chart(render_svg(figure, "Bounds on epsilon"), f"Bounds on ε: {'; '.join(texts)}.")
