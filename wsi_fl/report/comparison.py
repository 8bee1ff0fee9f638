"""The page that sets methods side by side: the document of ``compare --json`` in, sentences and HTML out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NotRequired, TypedDict

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wsi_fl.learning.verdict import Estimate, of_repetitions, verdict
from wsi_fl.report import figures, words, worth
from wsi_fl.report.figures import Chart
from wsi_fl.report.fill import fill
from wsi_fl.report.words import Finding, Json, known, number

ALONE = "a hospital alone without DP"
WHERE = {
    "merged": "on the merged test set",
    "own": "on each site's own test part",
    "left_out": "on the site that was left out",
}
_JITTER = 0.22
"""How far single values lie off their row, in rows: one line of dots per seed."""
_LINE = 22
"""Characters in a line of a row's name."""
_NAMED = 6
"""With more rows than this a legend would hide the curves."""
_TOP = -0.85
"""Upper end of the rows, the first of which is 0: room for what the dashed line is called."""


def repeated(rows: Sequence[Json]) -> str:
    """Return what values are spread over, in words.

    Example:
        >>> repeated([{"seeds": [0], "folds": [1, 2]}])
        'sites, seeds and folds'
    """
    if any(row.get("left_out") for row in rows):
        return "sites left out and seeds"
    return "sites, seeds and folds" if any(row.get("folds") for row in rows) else "sites and seeds"


def findings(
    rows: Sequence[Json],
    tests: Sequence[Json],
    baseline: str,
    examples: str = "patches",
    metric: str = "accuracy",
    gains: Mapping[str, Json] | None = None,
) -> list[Finding]:
    """What the numbers say about federation: the baseline first, then a sentence per method.

    Args:
        rows, tests: as in the document; of the tests those against the row ``baseline`` are looked at.
        metric: the score that is compared, "macro_accuracy" where tests are skewed.
        gains: what joining brings over all sites, by the label of a row. Where it is known it alone says whether
            joining pays, so that a page has one verdict, and what is reached: means of patients, not of sites or folds.
    """
    alone = next(row for row in rows if row["label"] == baseline)
    if not known(alone[metric]["mean"]):
        text = (
            f"There is no run of {ALONE} on these {examples}, so nothing here says whether federation pays."
        )
        return [Finding("unclear", text)]
    n, seeds = alone["n_sites"], len(alone["seeds"])
    folds = f", {len(alone['folds'])} folds" if alone.get("folds") else ""
    measured = f"({n} site{'' if n == 1 else 's'}, {seeds} seed{'' if seeds == 1 else 's'}{folds})"
    told = next((gain for gain in (gains or {}).values() if gain.get("local")), {"local": alone[metric]})
    together = f" in {told['measure']} over all test {examples}" if "measure" in told else ""
    reached = f"A{ALONE[1:]} reaches {number(told['local']['mean'], 2)}{together} {measured}."
    over = f" as a mean over {repeated(rows)}" if together else ""
    against = {(test["a"], test["metric"]): test for test in tests if test["b"] == baseline}
    whole = next((gain for gain in (gains or {}).values() if gain["pooled_gain"]), None)
    pooled = next((row["label"] for row in rows if words.is_pooled(row["method"]) and not row["dp"]), None)
    return [Finding("unclear", reached)] + [
        worth.finding(gain, _reached(row, gain.get("federated") or row[metric]), ALONE)
        if (gain := (gains or {}).get(row["label"]))
        else _against(row, test, whole if row["label"] == pooled else None, over)
        for row in rows
        if (test := against.get((row["label"], metric)))
    ]


def _against(row: Json, test: Json, whole: Json | None, over: str) -> Finding:
    """One method against the hospital alone, where nothing tells what joining brings each patient.

    Repetitions with other seeds then do, by the same rule; pairs of sites or folds of the same run do not.

    Args:
        whole: what joining brings, where this method pools all data: it has what that reaches and gains.
        over: what its mean is of, where the hospital alone has another one.
    """
    reached = _reached(row, whole["pooled"]) if whole else f"{_reached(row, row[test['metric']])}{over}"
    d = test["difference"]
    if not words.is_federated(row["method"]):
        apart = f"{abs(d):.2f} {'above' if d > 0 else 'below'}" if round(abs(d), 2) else "as much as"
        side = f"{apart} {ALONE} ({p_value(test['p_holm'])} over {_pairs(test)})"
        side = f"{worth.gain_words({'gain': whole['pooled_gain']})} over {ALONE}" if whole else side
        meaning = "; this is what its noise costs" if row["dp"] else ""
        meaning = "; nobody may pool the data like that" if words.is_pooled(row["method"]) else meaning
        return Finding("unclear", f"{reached}, {side}{meaning}.")
    gain = of_repetitions(d, test["sd"], test["n"]) if test["unit"] == "seed" else Estimate(d, None, None)
    return worth.finding({"gain": gain.document(), "verdict": verdict(gain, None)}, reached, ALONE)


def _pairs(test: Json) -> str:
    return f"{test['n']} {test['unit']}{'' if test['n'] == 1 else 's'}"


def _spoken(row: Json) -> str:
    """A row as the subject of a sentence."""
    if words.is_federated(row["method"]):
        return str(row["label"])
    name = "A model of all data pooled" if words.is_pooled(row["method"]) else "A hospital alone"
    with_dp = f"{name} {'with' if row['dp'] else 'without'} DP"
    return ", ".join(filter(None, (with_dp, settings_words(row["settings"]))))


def _reached(row: Json, value: Json) -> str:
    return f"{_spoken(row)} reaches {number(value['mean'], 2)}{_price(row)}"


def _price(row: Json) -> str:
    return f" (ε {row['guarantee']} {number(row['epsilon'], 1)})" if known(row["epsilon"]) else ""


def p_value(p: float | None) -> str:
    """A p-value in words.

    >>> p_value(0.0312), p_value(2e-6), p_value(None)
    ('p = 0.031', 'p < 0.001', 'no p-value')
    """
    if p is None:
        return "no p-value"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def cautions(rows: Sequence[Json], tests: Sequence[Json], *, classes: bool = True) -> list[str]:
    """What a reader has to know before believing the sentences.

    Args:
        classes: whether classes were asked for.
    """
    balance = " and the weights of its classes" if classes else ""
    found = [
        f"A hospital alone chose its regularisation{balance} by cross-validation on its own patients. Give the same "
        "care to every method before you believe in a loss, and to the pooled model."
    ]
    if any(test["unit"] == "fold" for test in tests):
        found.append(
            "Where a test pairs folds, its p-value is too small: any two folds train on mostly the same patients. "
            "Tests by patient do not know how much chance there is in training; repeat with other seeds (--seeds 3)."
        )
    if any(test["unit"] == "site" for test in tests):
        found.append(
            "Where fewer than three seeds are common to both, a test pairs the sites. Sites of one run learned from "
            "each other and share a test set, so such a p-value is too small; repeat with other seeds "
            "(train --seeds 5) before believing it."
        )
    if any(words.is_federated(row["method"]) and len(row["seeds"]) == 1 for row in rows):
        found.append(
            "Intervals of a single run know of its test patients, and of the privacy noise where a head was "
            "made of letters; of other training patients, and of the noise in training, they know nothing. Repeat it "
            "(train --seeds 5) before a hospital decides."
        )
    private = [row for row in rows if known(row["epsilon"])]
    if len({number(row["epsilon"], 1) for row in private}) > 1:
        spent = words.span([row["epsilon"] for row in private], 1)
        found.append(f"The methods did not spend the same ε ({spent}), so they did not pay the same price.")
    if any(row["guarantee"] == "nominal" for row in private):
        found.append(
            "An ε called nominal is no guarantee: the proxy learned from a private model trained without noise."
        )
    if any(row["guarantee"] == "shared" for row in private):
        found.append(
            "An ε called shared is guaranteed to all who see the sum of all sites, and against as many colluding sites "
            "as privacy.colluding says; a site that adds less noise than it says weakens it for all."
        )
    if len({tuple(row["seeds"]) for row in rows if row["seeds"]}) > 1:
        found.append(
            "Not every method was run with the same seeds; differences use the seeds that both have."
        )
    return found


def render(document: Json, series: Sequence[Series], *, created: str, sites: Sequence[str]) -> str:
    """One HTML document that needs nothing beside it.

    Args:
        document: of ``compare --json``.
        series: what the charts show, one per row and in the order of the rows.
        created: when, as text.
        sites: their names, in order.
    """
    scores, gains = document["scores"], document.get("benefit")
    first, own = words.SCORES[scores[0]], f"own_{scores[0]}"
    metrics = {name: words.SCORES[name] for name in scores}
    values = [v for row in document["rows"] for v in row["sites"].values() if known(v)]
    context = {
        "document": document,
        "title": f"{len(document['rows'])} method{'s'[: len(document['rows']) > 1]} on the same {document['examples']}",
        "where": WHERE[document["on"]],
        "over": repeated(document["rows"]),
        "measure": gains["measure"] if gains else first.lower(),
        "own": own,
        "legend": [(_color_name(k, series), one.words) for k, one in enumerate(series)],
        "more_than_colors": sum(not one.baseline for one in series) > figures.N_COLORS,
        "charts": _charts(series, first),
        "worth": worth.chart(gains) if gains else None,
        "gains": worth.rows_of(gains) if gains else [],
        "said": worth,
        "settings_words": settings_words,
        "p_value": p_value,
        "metrics": metrics,
        "tested": metrics | ({own: "Own part"} if document["on"] == "merged" else {}),
        "differences": _differences(document["paired"]),
        "by_site": any(test["unit"] == "site" for test in document["paired"]),
        "sites": sites,
        "first": first,
        "span": (min(values), max(values)) if values else None,
        "created": created,
    }
    return fill("comparison", context)


def settings_words(settings: Mapping[str, Any]) -> str:
    """Settings as one writes them after ``--set``.

    >>> settings_words({"train.alpha": 0.3, "train.input_px": None, "model.proxy": "mlp"})
    'train.alpha=0.3, train.input_px=default, model.proxy=mlp'
    """
    plain = {None: "default", True: "true", False: "false"}
    return ", ".join(
        f"{key}={plain[value] if value is None or isinstance(value, bool) else value}"
        for key, value in settings.items()
    )


class _Difference(TypedDict):
    """All tests of two rows, by score, and over how many pairs: the words of `units`, in their order, are `n`."""

    a: str
    b: str
    tests: dict[str, Json]
    units: dict[str, None]
    n: NotRequired[str]


def _differences(tests: Sequence[Json]) -> list[_Difference]:
    pairs: dict[tuple[str, str], _Difference] = {}
    for test in tests:
        empty: _Difference = {"a": test["a"], "b": test["b"], "tests": {}, "units": {}}
        line = pairs.setdefault((test["a"], test["b"]), empty)
        line["tests"][test["metric"]] = test
        line["units"][_pairs(test)] = None
        line["n"] = ", ".join(line["units"])
    return list(pairs.values())


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

    @property
    def words(self) -> str:
        """Label and settings in one line."""
        return ", ".join(filter(None, (self.label, self.settings)))

    @cached_property
    def band(self) -> list[tuple[float, float, float]]:
        """(round, mean, standard deviation) over all curves."""
        return figures.band(self.curves)

    @cached_property
    def lines(self) -> list[str]:
        """The label, and below it the settings without their sections."""
        settings = re.sub(r"\b\w+\.(\w+=)", r"\1", self.settings)
        wrapped = textwrap.wrap(settings, _LINE, break_long_words=False, break_on_hyphens=False)
        return [figures.shortened(line, _LINE) for line in (self.label, *wrapped)]


_Draw = Callable[[Axes, Sequence[Series], Mapping[str, str]], None]
"""Draws all rows into axes, in the colours of these names."""


def _color_name(position: int, series: Sequence[Series]) -> str:
    """Which colour a row has: ink for the baseline, then one each while they last."""
    if series[position].baseline:
        return "ink"
    earlier = sum(not one.baseline for one in series[:position])
    return f"s{earlier}" if earlier < figures.N_COLORS else "muted"


def _charts(series: Sequence[Series], what: str) -> list[tuple[str, str, Chart]]:
    """(title, explanation, chart) for the page: accuracies, accuracy over rounds, bytes; without what is unknown."""
    wide = {"height_in": _height_in(series), "left_in": _left_in(series)}
    found = []
    if said := [
        f"{one.words} {words.spread({'mean': one.mean, 'sd': one.sd})}"
        for one in series
        if one.mean is not None
    ]:
        text = "Small dots: every site of every run. Circle and bar: mean ± standard deviation; hollow without DP."
        alt = f"{what}, mean ± standard deviation over sites and seeds: {'; '.join(said)}."
        found.append((what, text, _chart(_draw_scores, series, alt, **wide)))
    if said := [f"{one.words} ends at {number(one.band[-1][1])}" for one in series if one.band]:
        text = "Mean over sites and seeds; the band is one standard deviation wide to either side."
        alt = f"{what} by round: {'; '.join(said)}."
        found.append((f"{what} by round", text, _chart(_draw_curves, series, alt)))
    if any(one.sent_bytes for one in series):
        said = [f"{one.words} {words.size(one.sent_bytes)}" for one in series if one.sent_bytes is not None]
        text = "Bar: mean over sites. Diamond: the site that sends most, where one does."
        alt = f"Sent per round and site: {'; '.join(said)}."
        found.append(("Sent per round and site", text, _chart(_draw_bytes, series, alt, **wide)))
    return found


def _chart(draw: _Draw, series: Sequence[Series], alt: str, **size: float) -> Chart:
    with figures.new_figure(**size) as (figure, axes):
        draw(axes, series, figures.TOKENS)
        return Chart(figures.to_svg(figure, alt.split(":", maxsplit=1)[0]), alt)


def png(series: Sequence[Series], what: str) -> bytes:
    """The three charts side by side; accuracies and bytes share their rows."""
    left, width, bottom, gap = _left_in(series) + 0.25, 13.0, 0.62, 0.2
    height = max(3.2, _height_in(series) + 0.75)
    share = (width - left - 1.15) / 3
    panels: list[tuple[str, _Draw, float, float]] = [
        (what, _draw_scores, left, 1.25 * share),
        ("Sent per round and site", _draw_bytes, left + 1.25 * share + gap, 0.7 * share),
        (f"{what} by round", _draw_curves, left + 1.95 * share + gap + 0.65, 1.05 * share),
    ]
    with mpl.rc_context(figures.png_style()):
        figure = Figure(figsize=(width, height))
        for title, draw, start_in, width_in in panels:
            place = (start_in / width, bottom / height, width_in / width, (height - bottom - 0.45) / height)
            axes = figure.add_axes(place)
            axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=8)
            draw(axes, series, figures.palette())
            if draw is _draw_bytes:  # its rows are named on the left
                axes.set_yticks(range(len(series)), [""] * len(series))
            elif draw is _draw_curves and axes.lines:
                if len(series) <= _NAMED and all(len(one.words) <= 1.6 * _LINE for one in series):
                    axes.legend(frameon=False, fontsize=8, handlelength=1.4, labelspacing=0.3)
                else:  # no room for a legend
                    color = figures.palette()["muted"]
                    axes.set_title("colours as on the left", loc="right", fontsize=8, color=color)
        return figures.to_png(figure)


def _draw_scores(axes: Axes, series: Sequence[Series], colors: Mapping[str, str]) -> None:
    """A row per method: every value as a small dot, mean ± sd, and a dashed line through the baseline's mean."""
    marked = None
    for y, one in enumerate(series):
        color = colors[_color_name(y, series)]
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
        how: dict[str, Any] = {"ha": "right" if right else "left", "va": "top", "textcoords": "offset points"}
        place = (marked, _TOP), (-5 if right else 5, -3)
        axes.annotate("alone, no DP", *place, fontsize=8.5, color=colors["muted"], **how)


def _draw_curves(axes: Axes, series: Sequence[Series], colors: Mapping[str, str]) -> None:
    """Mean over sites and seeds against the round, in a band of one standard deviation."""
    for position, one in enumerate(series):
        if not one.band:
            continue
        rounds, mean, sd = (np.array(column) for column in zip(*one.band, strict=True))
        color = colors[_color_name(position, series)]
        axes.fill_between(rounds, mean - sd, mean + sd, color=color, alpha=0.13, lw=0)
        axes.plot(
            rounds, mean, color=color, lw=1.8, ls=(0, (4, 2)) if one.baseline else "-",
            label=None if color == colors["muted"] else one.words, marker="o" if len(rounds) < 4 else None, ms=3.5,
        )  # fmt: skip
    figures.round_axis(axes, {str(k): [(r, m) for r, m, _ in one.band] for k, one in enumerate(series)})


def _draw_bytes(axes: Axes, series: Sequence[Series], colors: Mapping[str, str]) -> None:
    """A bar per method with what a site sends in a round, and a diamond where one site sends more than others."""
    top = max([b for one in series for b in (one.sent_bytes, one.busiest_bytes) if b], default=1.0)
    power = next(p for p in (9, 6, 3, 0) if top >= 10**p or p == 0)
    unit = {9: "GB", 6: "MB", 3: "kB", 0: "B"}[power]
    for y, one in enumerate(series):
        if one.sent_bytes is None:
            continue
        color = colors[_color_name(y, series)]
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
    names = ["\n".join(one.lines) for one in series]
    figures.name_rows(axes, names, [colors["ink"]] * len(series), [one.baseline for one in series])
    for text in axes.get_yticklabels():
        text.set_linespacing(1.1)


def _height_in(series: Sequence[Series]) -> float:
    return 0.85 + sum(0.22 + 0.14 * len(one.lines) for one in series)


def _left_in(series: Sequence[Series]) -> float:
    return min(1.9, 0.2 + 0.078 * max(len(line) for one in series for line in one.lines))
