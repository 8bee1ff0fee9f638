"""The figure that answers a hospital's question: alone, joined, pooled, site by site, with intervals and ε."""

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
"""Colour, marker and place in the row of each model."""
_SAYS = {
    "local": "alone, without DP",
    "federated": "joined",
    "pooled": "all data pooled, which nobody may do",
}
_ROW_IN, _LEFT_IN, _RIGHT_IN, _WIDTH_IN = 0.55, 0.95, 3.0, 8.6


def rows_of(document: Json) -> list[tuple[str, Json]]:
    """(name, values) of every site and, where there are several, of their mean.

    Args:
        document: `benefit` of ``compare --json``.
    """
    rows = [(str(site["site"]), site) for site in document["sites"]]
    return rows if len(rows) == 1 else [*rows, (ALL, document["all"])]


def chart(document: Json) -> Chart:
    """For the page."""
    rows = rows_of(document)
    said = "; ".join(
        f"{name}: " + ", ".join(f"{kind} {number(row[kind]['mean'])}" for kind in _KINDS if row.get(kind))
        for name, row in rows
    )
    with figures.new_figure(height_in=0.6 + _ROW_IN * len(rows), left_in=_LEFT_IN) as (figure, axes):
        _draw(axes, rows, TOKENS, document["measure"])
        alt = f"{document['measure'].capitalize()} by site. {said}."
        return Chart(figures.to_svg(figure, "What joining brings"), alt)


def png(document: Json) -> bytes:
    """For slides and papers."""
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
    """A row per site: three marks with their intervals."""
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
    """On the right, in words, what joining brings and costs."""
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    for y, (_, row) in enumerate(rows):
        for text, below, size, color in (
            (f"joining: {gain_words(row)}", -0.13, 9.5, "ink"),
            (price(row), 0.2, 8.5, "muted"),
        ):
            axes.annotate(
                text, (1.0, y + below), (12, 0), fontsize=size, color=colors[color], va="center", **place
            )


def gain_words(row: Json) -> str:
    """What joining brings, with its interval.

    >>> gain_words({"gain": {"mean": 0.0612, "low": 0.04, "high": 0.083}})
    '+0.061 (+0.040 to +0.083)'
    """
    gain = row.get("gain")
    if not gain:
        return "not measured here"
    mean, low, high = (signed(gain[key], 3) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})" if known(gain["low"]) and gain["low"] < gain["high"] else mean


_MEANS = {
    "join": "this hospital should join",
    "local": "this hospital does better alone",
    "nothing to gain": "there is nothing to gain: data pooled in one place would not help either",
    "inconclusive": "these runs do not show whether it should join",
}
_MEANS_OF_ALL = _MEANS | {
    "join": "on average joining pays",
    "local": "on average joining does not pay",
    "inconclusive": "these runs do not show whether joining pays on average",
}


def finding(row: Json, reached: str, alone: str) -> Finding:
    """What joining by one method brings on average, as a sentence: the one verdict of console and pages.

    Args:
        row: what `rows_of` says of all sites.
        reached, alone: what the method reaches, and the hospital that it is measured against, in words.
    """
    text = f"{reached}, {gain_words(row)} over {alone}: {verdict_words(row, ALL)}."
    return Finding({"join": "good", "local": "bad"}.get(row["verdict"], "unclear"), text)


def sources_words(row: Json) -> str:
    """Where chance came in: the standard error of the gain by each source that is known.

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
    """What follows for a hospital, or for "all sites", and which part of what pooling would bring is reached.

    >>> gain = {"mean": 0.1, "low": 0.07, "high": 0.13}
    >>> room = {"mean": 0.62, "low": 0.5, "high": 0.71}
    >>> verdict_words({"gain": gain, "verdict": "join", "gap_closed": room}, "C1")
    'this hospital should join (62 % of what pooling would bring, 50 to 71 %)'
    >>> verdict_words({"gain": {"mean": 0.0, "low": 0.0, "high": 0.0, "n_patients": 2}}, "C1")
    'it gives the same answers alone, to 2 test patients'
    """
    gain = row.get("gain")
    if not gain:
        return ""
    alike = (gain.get("sources") or {}).get("patients") == 0 or gain["low"] == gain["high"]
    if gain["mean"] == 0 and alike and known(gain["low"]):
        return f"it gives the same answers alone, to {_asked(gain)}"
    said = (_MEANS_OF_ALL if name == ALL else _MEANS).get(row.get("verdict", ""), "")
    room = row.get("gap_closed")
    if not room or room["mean"] <= 0:
        return said
    mean, low, high = (number(room[key] and 100 * room[key], 0) for key in ("mean", "low", "high"))
    around = f", {low} to {high} %" if known(room["low"]) else ""
    return f"{said} ({mean} % of what pooling would bring{around})"


def price(row: Json) -> str:
    """What it costs in privacy; empty for all sites together."""
    if "guarantee" not in row:
        return ""
    spent = f"for ε = {number(row['epsilon'], 2)}, {row['guarantee']}"
    return spent if known(row["epsilon"]) else "no differential privacy"
