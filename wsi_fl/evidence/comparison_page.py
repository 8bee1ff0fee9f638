"""The page of a comparison, from the document of ``compare --json``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wsi_fl.evidence import benefit_figure
from wsi_fl.evidence.verdict import Estimate, decide_verdict, estimate_from_repetitions
from wsi_fl.report import figures, formatting
from wsi_fl.report.figures import Chart
from wsi_fl.report.formatting import Finding, Json, format_number, is_number
from wsi_fl.report.templates import fill_template

LOCAL_BASELINE = "a local model without DP"
TEST_SET_WORDS = {
    "merged": "on the merged test set",
    "own": "on each site's local test part",
    "left_out": "on the left-out site",
}
_DOT_SPREAD = 0.22
"""Largest vertical offset of single values from their row, in rows: one line of dots per seed."""
_LABEL_WIDTH = 22
"""Characters in a line of a row's name."""
_MAX_LEGEND_ROWS = 6
"""Largest number of rows with a legend."""
_AXIS_TOP = -0.85
"""Upper limit of the axis in rows, with room for the label of the dashed line."""


def repetition_words(rows: Sequence[Json]) -> str:
    """Return the repetitions over which values are averaged, in words.

    Example:
        >>> repetition_words([{"seeds": [0], "folds": [1, 2]}])
        'sites, seeds and folds'
    """
    if any(row.get("left_out") for row in rows):
        return "left-out sites and seeds"
    return "sites, seeds and folds" if any(row.get("folds") for row in rows) else "sites and seeds"


def list_comparison_findings(
    rows: Sequence[Json],
    tests: Sequence[Json],
    baseline: str,
    examples: str = "patches",
    metric: str = "accuracy",
    gains: Mapping[str, Json] | None = None,
) -> list[Finding]:
    """Return a sentence on the baseline, then one per method.

    Args:
        rows, tests: as in the document; only tests against the row ``baseline`` are used.
        metric: the compared score, "macro_accuracy" where tests are skewed.
        gains: benefit over all sites by the label of a row. Where known, the verdict and the scores are its (means over
            patients, not over sites or folds), so that a page has one verdict.
    """
    local_row = next(row for row in rows if row["label"] == baseline)
    if not is_number(local_row[metric]["mean"]):
        text = f"There is no run of {LOCAL_BASELINE} on these {examples}, so the benefit of federation is unknown."
        return [Finding("unclear", text)]
    n, seeds = local_row["n_sites"], len(local_row["seeds"])
    folds = f", {len(local_row['folds'])} folds" if local_row.get("folds") else ""
    measured = f"({n} site{'' if n == 1 else 's'}, {seeds} seed{'' if seeds == 1 else 's'}{folds})"
    baseline_gain = next((gain for gain in (gains or {}).values() if gain.get("local")), {"local": local_row[metric]})
    measure_text = f" in {baseline_gain['measure']} over all test {examples}" if "measure" in baseline_gain else ""
    baseline_sentence = f"A{LOCAL_BASELINE[1:]} reaches {format_number(baseline_gain['local']['mean'], 2)}"
    baseline_sentence += f"{measure_text} {measured}."
    mean_text = f" as a mean over {repetition_words(rows)}" if measure_text else ""
    tests_by_row = {(test["a"], test["metric"]): test for test in tests if test["b"] == baseline}
    known_gain = next((gain for gain in (gains or {}).values() if gain["pooled_gain"]), None)
    pooled = next((row["label"] for row in rows if formatting.is_pooled(row["method"]) and not row["dp"]), None)
    return [Finding("unclear", baseline_sentence)] + [
        benefit_figure.build_benefit_finding(
            gain, _score_text(row, gain.get("federated") or row[metric]), LOCAL_BASELINE
        )
        if (gain := (gains or {}).get(row["label"]))
        else _local_comparison(row, test, known_gain if row["label"] == pooled else None, mean_text)
        for row in rows
        if (test := tests_by_row.get((row["label"], metric)))
    ]


def _local_comparison(row: Json, test: Json, pooled_gain: Json | None, mean_text: str) -> Finding:
    """Return a method's difference from the local baseline, where the benefit by patient is unknown.

    The verdict then needs repetitions with other seeds; pairs of sites or folds of one run do not suffice.

    Args:
        pooled_gain: benefit of federation, where this method pools all data: it holds the pooled score and gain.
        mean_text: the repetitions of its mean, where those of the baseline differ.
    """
    d = test["difference"]
    score_text = f"{_score_text(row, row[test['metric']])}{mean_text}"
    if not formatting.is_federated(row["method"]):
        distance = f"{abs(d):.2f} {'above' if d > 0 else 'below'}" if round(abs(d), 2) else "as much as"
        gain_text = f"{distance} {LOCAL_BASELINE} ({format_p_value(test['p_holm'])} over {_pairs_text(test)})"
        if pooled_gain:
            score_text = _score_text(row, pooled_gain["pooled"])
            gain_text = f"{benefit_figure.gain_words({'gain': pooled_gain['pooled_gain']})} over {LOCAL_BASELINE}"
        meaning = "; this is what its noise costs" if row["dp"] else ""
        meaning = "; privacy forbids pooling the data" if formatting.is_pooled(row["method"]) else meaning
        return Finding("unclear", f"{score_text}, {gain_text}{meaning}.")
    gain = estimate_from_repetitions(d, test["sd"], test["n"]) if test["unit"] == "seed" else Estimate(d, None, None)
    return benefit_figure.build_benefit_finding(
        {"gain": gain.build_document(), "verdict": decide_verdict(gain, None)}, score_text, LOCAL_BASELINE
    )


def _pairs_text(test: Json) -> str:
    return f"{test['n']} {test['unit']}{'' if test['n'] == 1 else 's'}"


def _subject_of_row(row: Json) -> str:
    """Return a row as the subject of a sentence."""
    if formatting.is_federated(row["method"]):
        return str(row["label"])
    name = "A model of pooled data" if formatting.is_pooled(row["method"]) else "A local model"
    with_dp = f"{name} {'with' if row['dp'] else 'without'} DP"
    return ", ".join(filter(None, (with_dp, settings_words(row["settings"]))))


def _score_text(row: Json, value: Json) -> str:
    return f"{_subject_of_row(row)} reaches {format_number(value['mean'], 2)}{_epsilon_text(row)}"


def _epsilon_text(row: Json) -> str:
    return f" (ε {row['guarantee']} {format_number(row['epsilon'], 1)})" if is_number(row["epsilon"]) else ""


def format_p_value(p: float | None) -> str:
    """Return a p-value in words.

    >>> format_p_value(0.0312), format_p_value(2e-6), format_p_value(None)
    ('p = 0.031', 'p < 0.001', 'no p-value')
    """
    if p is None:
        return "no p-value"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def list_cautions(rows: Sequence[Json], tests: Sequence[Json], *, classes: bool = True) -> list[str]:
    """Return the limits of the findings, in sentences.

    Args:
        classes: whether the task is one of classes.
    """
    balance = " and the weights of its classes" if classes else ""
    sentences = [
        f"Local models chose their regularisation{balance} by cross-validation on the site's patients. Tune every "
        "method and the pooled model as carefully before you believe in a loss."
    ]
    if any(test["unit"] == "fold" for test in tests):
        sentences.append(
            "Where a test pairs folds, its p-value is too small: any two folds train on mostly the same patients. "
            "Tests by patient ignore the variance of training; repeat with other seeds (--seeds 3)."
        )
    if any(test["unit"] == "site" for test in tests):
        sentences.append(
            "With fewer than three common seeds a test pairs the sites. Sites of one run train together and share a "
            "test set, so the p-value is too small; repeat with other seeds (train --seeds 5) before believing it."
        )
    if any(formatting.is_federated(row["method"]) and len(row["seeds"]) == 1 for row in rows):
        sentences.append(
            "Intervals of a single run cover its test patients, and the privacy noise of a one-shot global head; they "
            "do not cover other training patients or noise in training. Repeat the run (train --seeds 5) before a "
            "hospital decides."
        )
    private_rows = [row for row in rows if is_number(row["epsilon"])]
    if len({format_number(row["epsilon"], 1) for row in private_rows}) > 1:
        span_text = formatting.format_span([row["epsilon"] for row in private_rows], 1)
        sentences.append(f"The methods spent different ε ({span_text}), so their privacy cost differs.")
    if any(row["guarantee"] == "nominal" for row in private_rows):
        sentences.append("A nominal ε is no guarantee: the proxy learned from a private model trained without noise.")
    if any(row["guarantee"] == "shared" for row in private_rows):
        sentences.append(
            "A shared ε is guaranteed against all who see the sum over sites, and against up to privacy.colluding "
            "colluding sites; a site that adds less noise than agreed weakens it for all."
        )
    if len({tuple(row["seeds"]) for row in rows if row["seeds"]}) > 1:
        sentences.append("Not every method was run with the same seeds; differences use the common seeds.")
    return sentences


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
        "where": TEST_SET_WORDS[document["on"]],
        "over": repetition_words(document["rows"]),
        "measure": gains["measure"] if gains else first.lower(),
        "own": local_score,
        "legend": [(_color_name(k, series), row.full_label) for k, row in enumerate(series)],
        "more_than_colors": sum(not row.baseline for row in series) > figures.N_COLORS,
        "charts": _build_charts(series, first),
        "worth": benefit_figure.plot_benefit(gains) if gains else None,
        "gains": benefit_figure.list_benefit_rows(gains) if gains else [],
        "said": benefit_figure,
        "settings_words": settings_words,
        "p_value": format_p_value,
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


def settings_words(settings: Mapping[str, Any]) -> str:
    """Return settings as written after ``--set``.

    >>> settings_words({"train.alpha": 0.3, "train.input_px": None, "model.proxy": "mlp"})
    'train.alpha=0.3, train.input_px=default, model.proxy=mlp'
    """
    plain = {None: "default", True: "true", False: "false"}
    return ", ".join(
        f"{key}={plain[value] if value is None or isinstance(value, bool) else value}"
        for key, value in settings.items()
    )


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
            "n": ", ".join(dict.fromkeys(map(_pairs_text, group))),
        }
        for (a, b), group in groups.items()
    ]


@dataclass(frozen=True)
class ChartRow:
    """The values of a comparison's row for charts.

    Attributes:
        settings: distinguish the row from others of its method; a second line below the label.
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

    @property
    def full_label(self) -> str:
        """The label and the settings in one line."""
        return ", ".join(filter(None, (self.label, self.settings)))

    @cached_property
    def mean_band(self) -> list[tuple[float, float, float]]:
        """The (round, mean, standard deviation) over all curves."""
        return figures.mean_band(self.curves)

    @cached_property
    def label_lines(self) -> list[str]:
        """The label, followed by the settings without their sections."""
        settings = re.sub(r"\b\w+\.(\w+=)", r"\1", self.settings)
        wrapped = textwrap.wrap(settings, _LABEL_WIDTH, break_long_words=False, break_on_hyphens=False)
        return [figures.shorten_label(line, _LABEL_WIDTH) for line in (self.label, *wrapped)]


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
    figure_size = {"height_in": _height_in(series), "left_in": _margin_in(series)}
    means = [(row, {"mean": row.mean, "sd": row.sd}) for row in series if row.mean is not None]
    bands = [(row, row.mean_band[-1][1]) for row in series if row.mean_band]
    sent = [(row, row.sent_bytes) for row in series if row.sent_bytes is not None]
    charts = []
    if means:
        values_text = "; ".join(f"{row.full_label} {formatting.format_spread(value)}" for row, value in means)
        text = "Small dots: every site of every run. Circle and bar: mean ± standard deviation; hollow without DP."
        alt = f"{title}, mean ± standard deviation over sites and seeds: {values_text}."
        charts.append((title, text, _build_chart(_draw_scores, series, alt, **figure_size)))
    if bands:
        values_text = "; ".join(f"{row.full_label} ends at {format_number(value)}" for row, value in bands)
        text = "Mean over sites and seeds; the band is one standard deviation wide to either side."
        charts.append(
            (f"{title} by round", text, _build_chart(_draw_curves, series, f"{title} by round: {values_text}."))
        )
    if any(n_bytes for _, n_bytes in sent):
        values_text = "; ".join(f"{row.full_label} {formatting.format_size(n_bytes)}" for row, n_bytes in sent)
        text = "Bar: mean over sites. Diamond: the site that sends most."
        alt = f"Sent per round and site: {values_text}."
        charts.append(("Sent per round and site", text, _build_chart(_draw_bytes, series, alt, **figure_size)))
    return charts


def _build_chart(draw: _Draw, series: Sequence[ChartRow], alt: str, **size: float) -> Chart:
    with figures.open_figure(**size) as (figure, axes):
        draw(axes, series, figures.TOKENS)
        return Chart(figures.render_svg(figure, alt.split(":", maxsplit=1)[0]), alt)


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
                if len(series) <= _MAX_LEGEND_ROWS and all(len(row.full_label) <= 1.6 * _LABEL_WIDTH for row in series):
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
        if row.mean is None:
            continue
        if row.baseline:
            axes.axvline(row.mean, color=colors["ink"], lw=1.1, ls=(0, (4, 3)), zorder=1)
            baseline_mean = row.mean
        fill = color if row.dp else colors["paper"]
        figures.draw_mark(axes, row.mean, y, [row.sd or 0] * 2, color, fill=fill)
    _name_rows(axes, series, colors)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.margins(x=0.08)
    if baseline_mean is not None:
        is_right_half = baseline_mean > float(np.mean(axes.get_xlim()))
        text_options: dict[str, Any] = {
            "ha": "right" if is_right_half else "left",
            "va": "top",
            "textcoords": "offset points",
        }
        text_position = (baseline_mean, _AXIS_TOP), (-5 if is_right_half else 5, -3)
        axes.annotate("local, no DP", *text_position, fontsize=8.5, color=colors["muted"], **text_options)


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
            label=None if color == colors["muted"] else row.full_label, marker="o" if len(rounds) < 4 else None, ms=3.5,
        )  # fmt: skip
    figures.format_round_axis(axes, {str(k): [(r, m) for r, m, _ in row.mean_band] for k, row in enumerate(series)})


def _draw_bytes(axes: Axes, series: Sequence[ChartRow], colors: Mapping[str, str]) -> None:
    """Draw a bar per method of the bytes per site and round, and a diamond where one site sends more than others."""
    top = max([b for row in series for b in (row.sent_bytes, row.busiest_bytes) if b], default=1.0)
    power = next(p for p in (9, 6, 3, 0) if top >= 10**p or p == 0)
    unit = {9: "GB", 6: "MB", 3: "kB", 0: "B"}[power]
    for y, row in enumerate(series):
        if row.sent_bytes is None:
            continue
        color = colors[_color_name(y, series)]
        value = row.sent_bytes / 10**power
        axes.barh(y, value, height=0.42, color=color, alpha=0.85)
        text = formatting.format_size(row.sent_bytes) if row.sent_bytes else "nothing"
        text_options: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5, "color": colors["muted"]}
        if row.busiest_bytes and row.busiest_bytes > 1.01 * row.sent_bytes:
            end = row.busiest_bytes / 10**power
            axes.plot(end, y, "D", color=color, mfc=colors["paper"], ms=5, mew=1.4)
            axes.annotate(formatting.format_size(row.busiest_bytes), (end, y), (7, 0), va="center", **text_options)
            axes.annotate(text, (0, y - 0.21), (3, 1), va="bottom", **text_options)
        else:
            axes.annotate(text, (value, y), (7, 0), va="center", **text_options)
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
