"""The benefit of federation in words and figures: local, federated and pooled models by site, with intervals and ε."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wsi_fl.report import figures
from wsi_fl.report.figures import TOKENS, Chart, build_png_style, load_palette
from wsi_fl.report.formatting import Json, format_number, format_signed, is_number

ALL_SITES = "all sites"
_MODEL_MARKS = {"local": ("ink", "o", -0.24), "federated": ("s0", "o", 0.0), "pooled": ("muted", "D", 0.24)}
"""Colour, marker and vertical offset of each model."""
_MODEL_LABELS = {
    "local": "local, without DP",
    "federated": "federated",
    "pooled": "all data pooled, which privacy forbids",
}
_ROW_IN, _LEFT_IN, _RIGHT_IN, _WIDTH_IN = 0.55, 0.95, 3.0, 8.6


def list_benefit_rows(document: Json) -> list[tuple[str, Json]]:
    """Return (name, values) of every site and, where there are several, of their mean.

    Args:
        document: `benefit` of ``compare --json``.
    """
    rows = [(str(site["site"]), site) for site in document["sites"]]
    return rows if len(rows) == 1 else [*rows, (ALL_SITES, document["all"])]


def plot_benefit(document: Json) -> Chart:
    """Return the figure as a chart of the page."""
    rows = list_benefit_rows(document)
    means_text = "; ".join(
        f"{name}: " + ", ".join(f"{kind} {format_number(row[kind]['mean'])}" for kind in _MODEL_MARKS if row.get(kind))
        for name, row in rows
    )
    with figures.open_figure(height_in=0.6 + _ROW_IN * len(rows), left_in=_LEFT_IN) as (figure, axes):
        _draw_rows(axes, rows, TOKENS, document["measure"])
        alt = f"{document['measure'].capitalize()} by site. {means_text}."
        return Chart(figures.render_svg(figure, "Benefit of federation"), alt)


def render_benefit_png(document: Json) -> bytes:
    """Return the figure as a PNG for slides and papers."""
    rows = list_benefit_rows(document)
    height = 1.25 + _ROW_IN * len(rows)
    with mpl.rc_context(build_png_style()):
        figure = Figure(figsize=(_WIDTH_IN, height))
        left_share, right_share = _LEFT_IN / _WIDTH_IN, _RIGHT_IN / _WIDTH_IN
        axes = figure.add_axes((left_share, 0.42 / height, 1 - left_share - right_share, 1 - 1.04 / height))
        colors = load_palette()
        _draw_rows(axes, rows, colors, document["measure"])
        write = partial(axes.annotate, xycoords=("axes fraction", "data"), textcoords="offset points", va="center")
        for y, (_, row) in enumerate(rows):
            write(f"gain: {gain_words(row)}", (1.0, y - 0.13), (12, 0), fontsize=9.5, color=colors["ink"])
            write(price_words(row), (1.0, y + 0.2), (12, 0), fontsize=8.5, color=colors["muted"])
        for k, (kind, (color, marker, _)) in enumerate(_MODEL_MARKS.items()):
            if any(row.get(kind) for _, row in rows):
                fill = _mark_fill(kind, colors)
                federated_name = f": {figures.shorten_label(document['federated'], 36)}" if kind == "federated" else ""
                axes.plot(
                    [], [], marker, color=colors[color], mfc=fill, label=_MODEL_LABELS[kind] + federated_name, zorder=k
                )
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=3,
            frameon=False,
            fontsize=9,
            handletextpad=0.2,
            columnspacing=1.0,
        )
        return figures.render_png(figure)


def _mark_fill(kind: str, colors: Mapping[str, str]) -> str:
    return colors[_MODEL_MARKS[kind][0]] if kind == "federated" else colors["paper"]


def _draw_rows(axes: Axes, rows: Sequence[tuple[str, Json]], colors: Mapping[str, str], measure: str) -> None:
    """Draw a row per site: three marks with their intervals."""
    axes.set_ylim(len(rows) - 0.45, -0.55)
    for y, (_, row) in enumerate(rows):
        for kind, (color, marker, offset) in _MODEL_MARKS.items():
            if value := row.get(kind):
                mean, low, high = (value[key] for key in ("mean", "low", "high"))
                distances = [mean - low, high - mean] if is_number(low) else [0, 0]
                fill = _mark_fill(kind, colors)
                figures.draw_mark(axes, mean, y + offset, distances, colors[color], fill=fill, marker=marker)
    names = [figures.shorten_label(name, 14) for name, _ in rows]
    bold = [name == ALL_SITES for name, _ in rows]
    figures.name_rows(axes, names, [colors["ink"]] * len(rows), bold)
    if len(rows) > 1:
        axes.axhline(len(rows) - 1.5, color=colors["muted"], lw=0.7)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_xlabel(measure, loc="right", labelpad=1)
    axes.margins(x=0.06)


def gain_words(row: Json) -> str:
    """Return the gain with its interval.

    >>> gain_words({"gain": {"mean": 0.0612, "low": 0.04, "high": 0.083}})
    '+0.061 (+0.040 to +0.083)'
    """
    gain = row.get("gain")
    if not gain:
        return "not measured here"
    mean, low, high = (format_signed(gain[key], 3) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})" if is_number(gain["low"]) and gain["low"] < gain["high"] else mean


_VERDICT_WORDS = {
    "join": "this hospital should take part",
    "local": "this hospital's local model is better",
    "nothing to gain": "there is nothing to gain: pooled data would not help either",
    "inconclusive": "these runs do not show whether it should take part",
}
_AVERAGE_VERDICT_WORDS = _VERDICT_WORDS | {
    "join": "on average federation pays",
    "local": "on average federation does not pay",
    "inconclusive": "these runs do not show whether federation pays on average",
}


def sources_words(row: Json) -> str:
    """Return the standard error of the gain by each known source of variance.

    >>> sources = {"patients": 0.011, "seeds": None, "noise": 0.004}
    >>> sources_words({"gain": {"n_patients": 60, "sources": sources}})
    'standard error 0.011 by 60 test patients, 0.004 by noise'
    """
    source_names = {"patients": _patients_text(row.get("gain") or {}), "seeds": "seeds", "noise": "noise"}
    sources = ((row.get("gain") or {}).get("sources") or {}).items()
    source_texts = [f"{value:.3f} by {source_names[name]}" for name, value in sources if is_number(value)]
    return f"standard error {', '.join(source_texts)}" if source_texts else ""


def _patients_text(gain: Json) -> str:
    return f"{gain['n_patients']} test patients" if gain.get("n_patients") else "test patients"


def verdict_words(row: Json, name: str) -> str:
    """Return the verdict for a hospital or "all sites", with the share of the gap to pooled data that is closed.

    >>> gain = {"mean": 0.1, "low": 0.07, "high": 0.13}
    >>> room = {"mean": 0.62, "low": 0.5, "high": 0.71}
    >>> verdict_words({"gain": gain, "verdict": "join", "gap_closed": room}, "C1")
    'this hospital should take part (62 % of the gain of pooling, 50 to 71 %)'
    >>> verdict_words({"gain": {"mean": 0.0, "low": 0.0, "high": 0.0, "n_patients": 2}}, "C1")
    'its local model makes the same predictions, on 2 test patients'
    """
    gain = row.get("gain")
    if not gain:
        return ""
    is_constant = (gain.get("sources") or {}).get("patients") == 0 or gain["low"] == gain["high"]
    if gain["mean"] == 0 and is_constant and is_number(gain["low"]):
        return f"its local model makes the same predictions, on {_patients_text(gain)}"
    verdict_text = (_AVERAGE_VERDICT_WORDS if name == ALL_SITES else _VERDICT_WORDS).get(row.get("verdict", ""), "")
    gap_closed = row.get("gap_closed")
    if not gap_closed or gap_closed["mean"] <= 0:
        return verdict_text
    mean, low, high = (format_number(gap_closed[key] and 100 * gap_closed[key], 0) for key in ("mean", "low", "high"))
    interval_text = f", {low} to {high} %" if is_number(gap_closed["low"]) else ""
    return f"{verdict_text} ({mean} % of the gain of pooling{interval_text})"


def price_words(row: Json) -> str:
    """Return the privacy cost; "" for all sites together."""
    if "guarantee" not in row:
        return ""
    epsilon_text = f"for ε = {format_number(row['epsilon'], 2)}, {row['guarantee']}"
    return epsilon_text if is_number(row["epsilon"]) else "no differential privacy"
