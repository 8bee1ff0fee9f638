"""Charts that set methods side by side, for the page (SVG) and for slides and papers (one PNG)."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wsi_fl.report import figures, words
from wsi_fl.report.figures import Chart

N_COLORS = figures.N_COLORS
_JITTER = 0.22
"""How far single values lie off their row, in rows: one line of dots per seed."""
_LINE = 22
"""Characters in a line of a row's name."""
_NAMED = 6
"""With more rows than this a legend would hide the curves."""
_TOP = -0.85
"""Upper end of the rows, the first of which is 0: room for what the dashed line is called."""
TOKENS = {
    "ink": figures.INK,
    "muted": figures.MUTED,
    "line": figures.LINE,
    "paper": figures.PAPER,
    **{f"s{k}": figures.site_color(k, N_COLORS) for k in range(N_COLORS)},
}
"""What stands for the page's colours, by the name of their variable."""


@dataclass(frozen=True)
class Series:
    """One row of the comparison as charts need it.

    Attributes:
        settings: what sets the row apart from others of its method; a second line below the label.
        values: by seed, one accuracy per site.
        curves: (round, accuracy) of every site of every run.
        sent_bytes: per round and site.
        busiest_bytes: per round, of the site that sends most.
    """

    label: str
    settings: str
    dp: bool
    baseline: bool
    mean: float | None
    sd: float | None
    values: Mapping[int, Sequence[float]] = field(default_factory=dict)
    curves: Sequence[figures.Points] = ()
    sent_bytes: float | None = None
    busiest_bytes: float | None = None


Draw = Callable[[Axes, Sequence[Series], Mapping[str, str]], None]
"""Draws all rows into axes, in the colours of these names."""


def palette() -> dict[str, str]:
    """The colours of the page's light theme by the name of their variable (``ink``, ``s0``, …)."""
    css = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    light = css[: css.index("@media")]
    return {name: color for name, color in re.findall(r"--(\w+): (#\w+)", light) if name in TOKENS}


def png_style() -> Any:
    """Matplotlib's settings for a figure that looks like the page's charts, in real colours."""
    real = {TOKENS[name]: color for name, color in palette().items()}
    style = {key: real.get(value, value) for key, value in figures.STYLE.items() if isinstance(value, str)}
    return {**figures.STYLE, **style, "figure.dpi": 160, "savefig.facecolor": palette()["paper"]}


def color_name(position: int, series: Sequence[Series]) -> str:
    """Which colour a row has: ink for the baseline, then one each while they last."""
    if series[position].baseline:
        return "ink"
    earlier = sum(not one.baseline for one in series[:position])
    return f"s{earlier}" if earlier < N_COLORS else "muted"


def charts(series: Sequence[Series], what: str) -> list[tuple[str, str, Chart]]:
    """(title, explanation, chart) for the page: accuracies, accuracy over rounds, bytes; without what is unknown."""
    wide = {"height_in": _height_in(series), "left_in": _left_in(series)}
    found = []
    if said := [f"{_one_line(one)} {_spread(one)}" for one in series if one.mean is not None]:
        text = "Small dots: every site of every run. Circle and bar: mean ± standard deviation; hollow without DP."
        alt = f"{what}, mean ± standard deviation over sites and seeds: {'; '.join(said)}."
        found.append((what, text, _chart(draw_accuracies, series, alt, **wide)))
    if said := [
        f"{_one_line(one)} ends at {words.number(_band(one)[-1][1])}" for one in series if _band(one)
    ]:
        text = "Mean over sites and seeds; the band is one standard deviation wide to either side."
        alt = f"{what} by round: {'; '.join(said)}."
        found.append((f"{what} by round", text, _chart(draw_curves, series, alt)))
    if any(one.sent_bytes for one in series):
        said = [
            f"{_one_line(one)} {words.size(one.sent_bytes)}" for one in series if one.sent_bytes is not None
        ]
        text = "Bar: mean over sites. Diamond: the site that sends most, where one does."
        alt = f"Sent per round and site: {'; '.join(said)}."
        found.append(("Sent per round and site", text, _chart(draw_bytes, series, alt, **wide)))
    return found


def _chart(draw: Draw, series: Sequence[Series], alt: str, **size: float) -> Chart:
    with figures.new_figure(**size) as (figure, axes):
        draw(axes, series, TOKENS)
        return Chart(figures.to_svg(figure, alt.split(":", maxsplit=1)[0]), alt)


def png(series: Sequence[Series], what: str) -> bytes:
    """The three charts side by side; accuracies and bytes share their rows."""
    left, width, bottom, gap = _left_in(series) + 0.25, 13.0, 0.62, 0.2
    height = max(3.2, _height_in(series) + 0.75)
    share = (width - left - 1.15) / 3
    panels: list[tuple[str, Draw, float, float]] = [
        (what, draw_accuracies, left, 1.25 * share),
        ("Sent per round and site", draw_bytes, left + 1.25 * share + gap, 0.7 * share),
        (f"{what} by round", draw_curves, left + 1.95 * share + gap + 0.65, 1.05 * share),
    ]
    with mpl.rc_context(png_style()):
        figure = Figure(figsize=(width, height))
        for title, draw, start_in, width_in in panels:
            place = (start_in / width, bottom / height, width_in / width, (height - bottom - 0.45) / height)
            axes = figure.add_axes(place)
            axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=8)
            draw(axes, series, palette())
            if draw is draw_bytes:  # its rows are named on the left
                axes.set_yticks(range(len(series)), [""] * len(series))
            elif draw is draw_curves and axes.lines:
                _name_lines(axes, series)
        return figures.to_png(figure)


def _name_lines(axes: Axes, series: Sequence[Series]) -> None:
    """A legend where there is room for one; the rows on the left have the same colours."""
    if len(series) <= _NAMED and all(len(_one_line(one)) <= 1.6 * _LINE for one in series):
        axes.legend(frameon=False, fontsize=8, handlelength=1.4, labelspacing=0.3)
    else:
        axes.set_title("colours as on the left", loc="right", fontsize=8, color=palette()["muted"])


def draw_accuracies(axes: Axes, series: Sequence[Series], colors: Mapping[str, str]) -> None:
    """A row per method: every value as a small dot, mean ± sd, and a dashed line through the baseline's mean."""
    marked = None
    for y, one in enumerate(series):
        color = colors[color_name(y, series)]
        seeds = sorted(one.values)
        for k, seed in enumerate(seeds):
            offset = _JITTER * (2 * (k + 1) / (len(seeds) + 1) - 1)
            values = one.values[seed]
            axes.plot(values, np.full(len(values), y + offset), "o", color=color, ms=3.2, mew=0, alpha=0.5)
        if one.mean is None:
            continue
        if one.baseline:
            axes.axvline(one.mean, color=colors["ink"], lw=1.1, ls=(0, (4, 3)), zorder=1)
            marked = one.mean
        fill = color if one.dp else colors["paper"]
        figures.mark(axes, one.mean, y, [one.sd or 0] * 2, color, fill=fill)
    _rows(axes, series, colors)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.margins(x=0.08)
    if marked is not None:
        right = marked > float(np.mean(axes.get_xlim()))
        axes.annotate(
            "alone, no DP",
            (marked, _TOP),
            (-5 if right else 5, -3),
            textcoords="offset points",
            ha="right" if right else "left",
            va="top",
            fontsize=8.5,
            color=colors["muted"],
        )


def draw_curves(axes: Axes, series: Sequence[Series], colors: Mapping[str, str]) -> None:
    """Mean over sites and seeds against the round, in a band of one standard deviation."""
    for position, one in enumerate(series):
        band = _band(one)
        if not band:
            continue
        rounds, mean, sd = (np.array(column) for column in zip(*band, strict=True))
        color = colors[color_name(position, series)]
        axes.fill_between(rounds, mean - sd, mean + sd, color=color, alpha=0.13, lw=0)
        axes.plot(
            rounds, mean, color=color, lw=1.8, ls=(0, (4, 2)) if one.baseline else "-",
            label=None if color == colors["muted"] else _one_line(one), marker="o" if len(rounds) < 4 else None, ms=3.5,
        )  # fmt: skip
    figures.round_axis(axes, {str(k): [(r, m) for r, m, _ in _band(one)] for k, one in enumerate(series)})


def draw_bytes(axes: Axes, series: Sequence[Series], colors: Mapping[str, str]) -> None:
    """A bar per method with what a site sends in a round, and a diamond where one site sends more than others."""
    top = max([b for one in series for b in (one.sent_bytes, one.busiest_bytes) if b], default=1.0)
    power = next(p for p in (9, 6, 3, 0) if top >= 10**p or p == 0)
    unit = {9: "GB", 6: "MB", 3: "kB", 0: "B"}[power]
    for y, one in enumerate(series):
        if one.sent_bytes is None:
            continue
        color = colors[color_name(y, series)]
        value = one.sent_bytes / 10**power
        axes.barh(y, value, height=0.42, color=color, alpha=0.85)
        text = words.size(one.sent_bytes) if one.sent_bytes else "nothing"
        place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5, "color": colors["muted"]}
        if one.busiest_bytes and one.busiest_bytes > 1.01 * one.sent_bytes:
            end = one.busiest_bytes / 10**power
            axes.plot(end, y, "D", color=color, mfc=colors["paper"], ms=5, mew=1.4)
            axes.annotate(words.size(one.busiest_bytes), (end, y), (7, 0), va="center", **place)
            axes.annotate(text, (0, y - 0.21), (3, 1), va="bottom", **place)
        else:
            axes.annotate(text, (value, y), (7, 0), va="center", **place)
    _rows(axes, series, colors)
    axes.set_xlim(0, 1.4 * top / 10**power)  # room for the numbers
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.set_xlabel(unit, loc="right", labelpad=1)


def _rows(axes: Axes, series: Sequence[Series], colors: Mapping[str, str]) -> None:
    axes.set_ylim(len(series) - 0.5, _TOP)
    names = ["\n".join(_lines(one)) for one in series]
    figures.name_rows(axes, names, [colors["ink"]] * len(series), [one.baseline for one in series])
    for text in axes.get_yticklabels():
        text.set_linespacing(1.1)


def _band(one: Series) -> list[tuple[float, float, float]]:
    """(round, mean, sd) over all curves at every round where each has a value."""
    columns = [dict(points) for points in one.curves if points]
    shared = sorted(set.intersection(*(set(c) for c in columns))) if columns else []
    return [
        (x, float(np.mean([c[x] for c in columns])), float(np.std([c[x] for c in columns]))) for x in shared
    ]


def _lines(one: Series) -> list[str]:
    """The label, and below it the settings without their sections."""
    settings = re.sub(r"\b\w+\.(\w+=)", r"\1", one.settings)
    wrapped = textwrap.wrap(settings, _LINE, break_long_words=False, break_on_hyphens=False)
    return [figures.shortened(line, _LINE) for line in (one.label, *wrapped)]


def _one_line(one: Series) -> str:
    return ", ".join(filter(None, (one.label, one.settings)))


def _spread(one: Series) -> str:
    return words.spread({"mean": one.mean, "sd": one.sd})


def _height_in(series: Sequence[Series]) -> float:
    return 0.85 + sum(0.22 + 0.14 * len(_lines(one)) for one in series)


def _left_in(series: Sequence[Series]) -> float:
    return min(1.9, 0.2 + 0.078 * max(len(line) for one in series for line in _lines(one)))
