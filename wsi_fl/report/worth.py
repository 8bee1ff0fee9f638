"""The benefit of federation in words and figures: local, federated and pooled models by site, with intervals and ε."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wsi_fl.report import figures
from wsi_fl.report.figures import TOKENS, Chart, palette, png_style
from wsi_fl.report.words import Finding, Json, known, number, signed

ALL = "all sites"
_KINDS = {"local": ("ink", "o", -0.24), "federated": ("s0", "o", 0.0), "pooled": ("muted", "D", 0.24)}
"""Colour, marker and vertical offset of each model."""
_SAYS = {
    "local": "local, without DP",
    "federated": "federated",
    "pooled": "all data pooled, which privacy forbids",
}
_ROW_IN, _LEFT_IN, _RIGHT_IN, _WIDTH_IN = 0.55, 0.95, 3.0, 8.6


def rows_of(document: Json) -> list[tuple[str, Json]]:
    """Return (name, values) of every site and, where there are several, of their mean.

    Args:
        document: `benefit` of ``compare --json``.
    """
    rows = [(str(site["site"]), site) for site in document["sites"]]
    return rows if len(rows) == 1 else [*rows, (ALL, document["all"])]


def chart(document: Json) -> Chart:
    """Return the figure as a chart of the page."""
    rows = rows_of(document)
    said = "; ".join(
        f"{name}: " + ", ".join(f"{kind} {number(row[kind]['mean'])}" for kind in _KINDS if row.get(kind))
        for name, row in rows
    )
    with figures.new_figure(height_in=0.6 + _ROW_IN * len(rows), left_in=_LEFT_IN) as (figure, axes):
        _draw(axes, rows, TOKENS, document["measure"])
        alt = f"{document['measure'].capitalize()} by site. {said}."
        return Chart(figures.to_svg(figure, "Benefit of federation"), alt)


def png(document: Json) -> bytes:
    """Return the figure as a PNG for slides and papers."""
    rows = rows_of(document)
    height = 1.25 + _ROW_IN * len(rows)
    with mpl.rc_context(png_style()):
        figure = Figure(figsize=(_WIDTH_IN, height))
        left, right = _LEFT_IN / _WIDTH_IN, _RIGHT_IN / _WIDTH_IN
        axes = figure.add_axes((left, 0.42 / height, 1 - left - right, 1 - 1.04 / height))
        colors = palette()
        _draw(axes, rows, colors, document["measure"])
        _tell(axes, rows, colors)
        for k, (kind, (color, marker, _)) in enumerate(_KINDS.items()):
            if any(row.get(kind) for _, row in rows):
                fill = _fill(kind, colors)
                named = f": {figures.shortened(document['federated'], 36)}" if kind == "federated" else ""
                axes.plot([], [], marker, color=colors[color], mfc=fill, label=_SAYS[kind] + named, zorder=k)
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": 3}
        axes.legend(**place, frameon=False, fontsize=9, handletextpad=0.2)
        return figures.to_png(figure)


def _fill(kind: str, colors: Mapping[str, str]) -> str:
    return colors[_KINDS[kind][0]] if kind == "federated" else colors["paper"]


def _draw(axes: Axes, rows: Sequence[tuple[str, Json]], colors: Mapping[str, str], measure: str) -> None:
    """Draw a row per site: three marks with their intervals."""
    axes.set_ylim(len(rows) - 0.45, -0.55)
    for y, (_, row) in enumerate(rows):
        for kind, (color, marker, offset) in _KINDS.items():
            if value := row.get(kind):
                mean, low, high = (value[key] for key in ("mean", "low", "high"))
                around = [mean - low, high - mean] if known(low) else [0, 0]
                fill = _fill(kind, colors)
                figures.mark(axes, mean, y + offset, around, colors[color], fill=fill, marker=marker)
    names = [figures.shortened(name, 14) for name, _ in rows]
    bold = [name == ALL for name, _ in rows]
    figures.name_rows(axes, names, [colors["ink"]] * len(rows), bold)
    if len(rows) > 1:
        axes.axhline(len(rows) - 1.5, color=colors["muted"], lw=0.7)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_xlabel(measure, loc="right", labelpad=1)
    axes.margins(x=0.06)


def _tell(axes: Axes, rows: Sequence[tuple[str, Json]], colors: Mapping[str, str]) -> None:
    """Write the gain and the privacy cost of each site on the right."""
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    for y, (_, row) in enumerate(rows):
        for text, below, size, color in (
            (f"gain: {gain_words(row)}", -0.13, 9.5, "ink"),
            (price(row), 0.2, 8.5, "muted"),
        ):
            axes.annotate(
                text, (1.0, y + below), (12, 0), fontsize=size, color=colors[color], va="center", **place
            )


def gain_words(row: Json) -> str:
    """Return the gain with its interval.

    >>> gain_words({"gain": {"mean": 0.0612, "low": 0.04, "high": 0.083}})
    '+0.061 (+0.040 to +0.083)'
    """
    gain = row.get("gain")
    if not gain:
        return "not measured here"
    mean, low, high = (signed(gain[key], 3) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})" if known(gain["low"]) and gain["low"] < gain["high"] else mean


_MEANS = {
    "join": "this hospital should take part",
    "local": "this hospital's local model is better",
    "nothing to gain": "there is nothing to gain: pooled data would not help either",
    "inconclusive": "these runs do not show whether it should take part",
}
_MEANS_OF_ALL = _MEANS | {
    "join": "on average federation pays",
    "local": "on average federation does not pay",
    "inconclusive": "these runs do not show whether federation pays on average",
}


def finding(row: Json, reached: str, alone: str) -> Finding:
    """Return the average benefit of a method as a sentence, the same on the console and on pages.

    Args:
        row: the values over all sites.
        score_text: the score of the method, in words.
        baseline: the baseline, in words.
    """
    text = f"{reached}, {gain_words(row)} over {alone}: {verdict_words(row, ALL)}."
    return Finding({"join": "good", "local": "bad"}.get(row["verdict"], "unclear"), text)


def sources_words(row: Json) -> str:
    """Return the standard error of the gain by each known source of variance.

    >>> sources = {"patients": 0.011, "seeds": None, "noise": 0.004}
    >>> sources_words({"gain": {"n_patients": 60, "sources": sources}})
    'standard error 0.011 by 60 test patients, 0.004 by noise'
    """
    named = {"patients": _asked(row.get("gain") or {}), "seeds": "seeds", "noise": "noise"}
    found = ((row.get("gain") or {}).get("sources") or {}).items()
    told = [f"{value:.3f} by {named[name]}" for name, value in found if known(value)]
    return f"standard error {', '.join(told)}" if told else ""


def _asked(gain: Json) -> str:
    n = gain.get("n_patients")
    return f"{n} test patients" if n else "test patients"


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
    alike = (gain.get("sources") or {}).get("patients") == 0 or gain["low"] == gain["high"]
    if gain["mean"] == 0 and alike and known(gain["low"]):
        return f"its local model makes the same predictions, on {_asked(gain)}"
    said = (_MEANS_OF_ALL if name == ALL else _MEANS).get(row.get("verdict", ""), "")
    room = row.get("gap_closed")
    if not room or room["mean"] <= 0:
        return said
    mean, low, high = (number(room[key] and 100 * room[key], 0) for key in ("mean", "low", "high"))
    around = f", {low} to {high} %" if known(room["low"]) else ""
    return f"{said} ({mean} % of the gain of pooling{around})"


def price(row: Json) -> str:
    """Return the privacy cost; "" for all sites together."""
    if "guarantee" not in row:
        return ""
    spent = f"for ε = {number(row['epsilon'], 2)}, {row['guarantee']}"
    return spent if known(row["epsilon"]) else "no differential privacy"
