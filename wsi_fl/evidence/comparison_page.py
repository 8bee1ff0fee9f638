"""The page of a comparison, from the document of ``compare --json``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wsi_fl.evidence import benefit_figure, comparison_findings
from wsi_fl.report import figures, formatting
from wsi_fl.report.figures import Chart
from wsi_fl.report.formatting import Json, format_number, is_number
from wsi_fl.report.templates import fill_template

COMMUNICATION = ("messages", "bytes", "busiest_bytes", "seconds")
"""What is reported of the communication in a round."""
_DOT_SPREAD = 0.22
"""Largest vertical offset of single values from their row, in rows: one line of dots per seed."""
_LABEL_WIDTH = 22
"""Characters in a line of a row's name."""
_MAX_LEGEND_ROWS = 6
"""Largest number of rows with a legend."""
_AXIS_TOP = -0.85
"""Upper limit of the axis in rows, with room for the label of the dashed line."""


def render_comparison_page(document: Json, series: Sequence[ChartRow], *, created: str, sites: Sequence[str]) -> str:
    """Return the page as one HTML document without external files.

    Args:
        document: of ``compare --json``.
        series: values of the charts, in the order of the rows.
        created: when, as text.
        sites: their names, in order.
    """
    scores, gains = document["scores"], document.get("benefit")
    first, local_score = formatting.SCORES[scores[0]], f"own_{scores[0]}"
    metrics = {name: formatting.SCORES[name] for name in scores}
    values = [v for row in document["rows"] for v in row["sites"].values() if is_number(v)]
    context = {
        "document": document,
        "title": f"{len(document['rows'])} method{'s'[: len(document['rows']) > 1]} on the same {document['examples']}",
        "where": comparison_findings.TEST_SET_WORDS[document["on"]],
        "over": comparison_findings.repetition_words(document["rows"]),
        "measure": gains["measure"] if gains else first.lower(),
        "own": local_score,
        "legend": [(_color_name(k, series), row.label) for k, row in enumerate(series)],
        "more_than_colors": sum(not row.baseline for row in series) > figures.N_COLORS,
        "charts": _build_charts(series, first),
        "worth": benefit_figure.plot_benefit(gains) if gains else None,
        "gains": benefit_figure.list_benefit_rows(gains) if gains else [],
        "said": benefit_figure,
        "settings_words": comparison_findings.settings_words,
        "p_value": formatting.format_p_value,
        "metrics": metrics,
        "tested": metrics | ({local_score: "Own part"} if document["on"] == "merged" else {}),
        "differences": _group_tests(document["paired"]),
        "by_site": any(test["unit"] == "site" for test in document["paired"]),
        "sites": sites,
        "first": first,
        "span": (min(values), max(values)) if values else None,
        "created": created,
    }
    return fill_template("comparison", context, Path(__file__).parent)


def _group_tests(tests: Sequence[Json]) -> list[dict[str, object]]:
    """Return the tests of each two rows by score (`tests`), and the numbers of pairs (`n`)."""
    groups: dict[tuple[str, str], list[Json]] = {}
    for test in tests:
        groups.setdefault((test["a"], test["b"]), []).append(test)
    return [
        {
            "a": a,
            "b": b,
            "tests": {test["metric"]: test for test in group},
            "n": ", ".join(dict.fromkeys(map(comparison_findings.count_pairs, group))),
        }
        for (a, b), group in groups.items()
    ]


def iterate_table_rows(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the headings of table.csv, then a row per method; unknown values are empty."""
    plain_columns = ("label", "method", "dp", "guarantee", "epsilon", "n_sites")
    spreads = [(metric, part) for metric in metrics for part in ("mean", "sd", "n")]
    per_round = [*(f"{key}_per_round" for key in COMMUNICATION), "seconds_per_round_in_all"]
    yield [*plain_columns, "seeds", *map("_".join, spreads), *per_round]
    for row in rows:
        cells = [row[key] for key in plain_columns] + [" ".join(map(str, row["seeds"]))]
        cells += [row[metric][part] for metric, part in spreads] + [row["communication"][key] for key in COMMUNICATION]
        yield [*cells, row["seconds_per_round"]]


@dataclass(frozen=True)
class ChartRow:
    """The values of a comparison's row for charts.

    Attributes:
        row: of the document.
        baseline: whether it is the local baseline.
        score: mean and standard deviation (sd) of the first score.
        values: by seed, one score per site.
        curves: (round, score) of every site of every run.
    """

    row: Json
    baseline: bool
    score: Json
    values: Mapping[int, Sequence[float]]
    curves: Sequence[figures.Points]

    @property
    def label(self) -> str:
        return str(self.row["label"])

    @cached_property
    def mean_band(self) -> list[tuple[float, float, float]]:
        """The (round, mean, standard deviation) over all curves."""
        return figures.mean_band(self.curves)

    @cached_property
    def label_lines(self) -> list[str]:
        """The method, followed by the settings without their sections."""
        words = comparison_findings.settings_words(self.row["settings"])
        short = re.sub(r"\b\w+\.(\w+=)", r"\1", words)
        wrapped = textwrap.wrap(short, _LABEL_WIDTH, break_long_words=False, break_on_hyphens=False)
        return [figures.shorten_label(line, _LABEL_WIDTH) for line in (self.label.removesuffix(f", {words}"), *wrapped)]


_Draw = Callable[[Axes, Sequence[ChartRow], Mapping[str, str]], None]
"""A function that draws all rows into axes, given colours by name."""


def _color_name(position: int, series: Sequence[ChartRow]) -> str:
    """Return the colour of a row: ink for the baseline, N_COLORS for the first others, then muted."""
    if series[position].baseline:
        return "ink"
    earlier = sum(not row.baseline for row in series[:position])
    return f"s{earlier}" if earlier < figures.N_COLORS else "muted"


def _build_charts(series: Sequence[ChartRow], title: str) -> list[tuple[str, str, Chart]]:
    """Return (title, explanation, chart) of known values: accuracies, accuracy over rounds, bytes."""
    size = {"height_in": _height_in(series), "left_in": _margin_in(series)}
    spreads = {row.label: formatting.format_spread(row.score) for row in series if row.score["mean"] is not None}
    ends = {row.label: f"ends at {format_number(row.mean_band[-1][1])}" for row in series if row.mean_band}
    sent = {row.label: row.row["communication"]["bytes"] for row in series}
    sizes = {label: formatting.format_size(n_bytes) for label, n_bytes in sent.items() if n_bytes is not None}
    charts = []
    if spreads:
        text = "Small dots: every site of every run. Circle and bar: mean ± standard deviation; hollow without DP."
        alt = f"{title}, mean ± standard deviation over sites and seeds"
        charts.append((title, text, _build_chart(_draw_scores, series, alt, spreads, **size)))
    if ends:
        text = "Mean over sites and seeds; the band is one standard deviation wide to either side."
        charts.append((f"{title} by round", text, _build_chart(_draw_curves, series, f"{title} by round", ends)))
    if any(sent.values()):
        text, heading = "Bar: mean over sites. Diamond: the site that sends most.", "Sent per round and site"
        charts.append((heading, text, _build_chart(_draw_bytes, series, heading, sizes, **size)))
    return charts


def _build_chart(
    draw: _Draw, series: Sequence[ChartRow], title: str, values: Mapping[str, str], **size: float
) -> Chart:
    with figures.open_figure(**size) as (figure, axes):
        draw(axes, series, figures.TOKENS)
        values_text = "; ".join(f"{label} {value}" for label, value in values.items())
        return Chart(figures.render_svg(figure, title), f"{title}: {values_text}.")


def render_comparison_png(series: Sequence[ChartRow], score_title: str) -> bytes:
    """Return the three charts side by side as a PNG; accuracies and bytes share their rows."""
    left_in, width, bottom, gap = _margin_in(series) + 0.25, 13.0, 0.62, 0.2
    height = max(3.2, _height_in(series) + 0.75)
    share = (width - left_in - 1.15) / 3
    panels: list[tuple[str, _Draw, float, float]] = [
        (score_title, _draw_scores, left_in, 1.25 * share),
        ("Sent per round and site", _draw_bytes, left_in + 1.25 * share + gap, 0.7 * share),
        (f"{score_title} by round", _draw_curves, left_in + 1.95 * share + gap + 0.65, 1.05 * share),
    ]
    with mpl.rc_context(figures.build_png_style()):
        figure = Figure(figsize=(width, height))
        for title, draw, start_in, width_in in panels:
            bounds = (start_in / width, bottom / height, width_in / width, (height - bottom - 0.45) / height)
            axes = figure.add_axes(bounds)
            axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=8)
            draw(axes, series, figures.load_palette())
            if draw is _draw_bytes:  # its rows are named on the left
                axes.set_yticks(range(len(series)), [""] * len(series))
            elif draw is _draw_curves and axes.lines:
                if len(series) <= _MAX_LEGEND_ROWS and all(len(row.label) <= 1.6 * _LABEL_WIDTH for row in series):
                    axes.legend(frameon=False, fontsize=8, handlelength=1.4, labelspacing=0.3)
                else:  # no room for a legend
                    color = figures.load_palette()["muted"]
                    axes.set_title("colours as on the left", loc="right", fontsize=8, color=color)
        return figures.render_png(figure)


def _draw_scores(axes: Axes, series: Sequence[ChartRow], colors: Mapping[str, str]) -> None:
    """Draw a row per method: every value as a small dot, mean ± sd, and a dashed line at the baseline's mean."""
    baseline_mean = None
    for y, row in enumerate(series):
        color = colors[_color_name(y, series)]
        seeds = sorted(row.values)
        for k, seed in enumerate(seeds):
            offset = _DOT_SPREAD * (2 * (k + 1) / (len(seeds) + 1) - 1)
            values = row.values[seed]
            axes.plot(values, np.full(len(values), y + offset), "o", color=color, ms=3.2, mew=0, alpha=0.5)
        mean, sd = row.score["mean"], row.score["sd"]
        if mean is None:
            continue
        if row.baseline:
            axes.axvline(mean, color=colors["ink"], lw=1.1, ls=(0, (4, 3)), zorder=1)
            baseline_mean = mean
        fill = color if row.row["dp"] else colors["paper"]
        figures.draw_mark(axes, mean, y, [sd or 0] * 2, color, fill=fill)
    _name_rows(axes, series, colors)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.margins(x=0.08)
    if baseline_mean is not None:
        is_right_half = baseline_mean > float(np.mean(axes.get_xlim()))
        axes.annotate(
            "local, no DP", (baseline_mean, _AXIS_TOP), (-5 if is_right_half else 5, -3), textcoords="offset points",
            ha="right" if is_right_half else "left", va="top", fontsize=8.5, color=colors["muted"],
        )  # fmt: skip


def _draw_curves(axes: Axes, series: Sequence[ChartRow], colors: Mapping[str, str]) -> None:
    """Draw the mean over sites and seeds by round, in a band of one standard deviation."""
    for position, row in enumerate(series):
        if not row.mean_band:
            continue
        rounds, mean, sd = (np.array(column) for column in zip(*row.mean_band, strict=True))
        color = colors[_color_name(position, series)]
        axes.fill_between(rounds, mean - sd, mean + sd, color=color, alpha=0.13, lw=0)
        axes.plot(
            rounds, mean, color=color, lw=1.8, ls=(0, (4, 2)) if row.baseline else "-",
            label=None if color == colors["muted"] else row.label, marker="o" if len(rounds) < 4 else None, ms=3.5,
        )  # fmt: skip
    figures.format_round_axis(axes, {str(k): [(r, m) for r, m, _ in row.mean_band] for k, row in enumerate(series)})


def _draw_bytes(axes: Axes, series: Sequence[ChartRow], colors: Mapping[str, str]) -> None:
    """Draw a bar per method of the bytes per site and round, and a diamond where one site sends more than others."""
    sent = [(row.row["communication"]["bytes"], row.row["communication"]["busiest_bytes"]) for row in series]
    top = max([n_bytes for pair in sent for n_bytes in pair if n_bytes], default=1.0)
    power = next(p for p in (9, 6, 3, 0) if top >= 10**p or p == 0)
    unit = {9: "GB", 6: "MB", 3: "kB", 0: "B"}[power]
    write = partial(axes.annotate, textcoords="offset points", fontsize=8.5, color=colors["muted"])
    for y, (mean, busiest) in enumerate(sent):
        if mean is None:
            continue
        color = colors[_color_name(y, series)]
        axes.barh(y, mean / 10**power, height=0.42, color=color, alpha=0.85)
        text = formatting.format_size(mean) if mean else "nothing"
        if busiest and busiest > 1.01 * mean:
            end = busiest / 10**power
            axes.plot(end, y, "D", color=color, mfc=colors["paper"], ms=5, mew=1.4)
            write(formatting.format_size(busiest), (end, y), (7, 0), va="center")
            write(text, (0, y - 0.21), (3, 1), va="bottom")
        else:
            write(text, (mean / 10**power, y), (7, 0), va="center")
    _name_rows(axes, series, colors)
    axes.set_xlim(0, 1.4 * top / 10**power)  # room for the numbers
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.set_xlabel(unit, loc="right", labelpad=1)


def _name_rows(axes: Axes, series: Sequence[ChartRow], colors: Mapping[str, str]) -> None:
    axes.set_ylim(len(series) - 0.5, _AXIS_TOP)
    names = ["\n".join(row.label_lines) for row in series]
    figures.name_rows(axes, names, [colors["ink"]] * len(series), [row.baseline for row in series])
    for text in axes.get_yticklabels():
        text.set_linespacing(1.1)


def _height_in(series: Sequence[ChartRow]) -> float:
    return 0.85 + sum(0.22 + 0.14 * len(row.label_lines) for row in series)


def _margin_in(series: Sequence[ChartRow]) -> float:
    return min(1.9, 0.2 + 0.078 * max(len(line) for row in series for line in row.label_lines))
