"""The values of a run's page, and its sections on results, training and privacy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.cross_site_counts import CrossSiteScores
from wsi_fl.data.metrics import mean_of_available
from wsi_fl.federation.methods import METHODS
from wsi_fl.report import figures, formatting
from wsi_fl.report.figures import Chart, Points
from wsi_fl.report.formatting import Finding, Json, format_number, is_number
from wsi_fl.report.sections import find_benefit_measure

_MAX_TABLE_SITES = 12
"""Largest number of sites of a heatmap with numbers."""


@dataclass(frozen=True)
class Page:
    """The content of a run's page. Any number may be None; missing documents are None or empty."""

    run: str
    """Name of the run's folder, ``00001-proxyfl-camelyon17``."""
    method: str
    pipeline: str
    classes: tuple[str, ...]
    config_toml: str
    manifest: Json
    """``created`` (ISO time), ``argv``, ``versions`` by package, ``git``, ``inputs`` (hash by site)."""
    summary: Json
    """The document of ``train --json``; each site may carry ``max_epsilon``, its budget."""
    evaluation: Json | None = None
    """The document of ``evaluate --json``. ``confusion`` rows are true classes, columns predicted ones."""
    metrics: Mapping[str, Sequence[Json]] = field(default_factory=dict)
    """Lines of ``metrics.jsonl`` by site; ``messages``, ``bytes`` and seconds are those of the round."""
    baselines: Sequence[Json] = ()
    """Other evaluated runs of the study."""
    stores: Sequence[Json] = ()
    patches: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]] = field(default_factory=dict)
    """Sample patches by site: (label, uint8[h, w, 3])."""
    overviews: Mapping[str, Sequence[tuple[str, bytes]]] = field(default_factory=dict)
    """Overview pictures by site, of a sample of its slides: (slide, PNG bytes)."""
    n_slides: Mapping[str, int] = field(default_factory=dict)
    """Slides with an overview picture by site."""
    groups: Mapping[str, Json] = field(default_factory=dict)
    """Group privacy of each site's largest patient: ``list_runs``, ``epsilon`` (None beyond 1000), ``delta``."""
    between: CrossSiteScores | None = None
    """Cross-site scores of the released models from counts, as in ``evaluate --json``."""
    generated: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]] = field(default_factory=dict)
    """Images that were generated for this run, by the site whose denoiser they come from."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sites of real patients whose ``patches``, ``overviews`` or ``generated`` images are omitted."""
    patients_of: Sequence[str] = ()
    """Sites of real patients with pictures on the page."""
    scores: tuple[str, ...] = ("accuracy", "macro_accuracy", "auroc")
    """Names of the scores, the main one first; higher is better."""
    task: str = "classes"
    """The kind of task: "classes", "number" or "survival"."""
    outputs: tuple[str, ...] = ()
    """Names of a model's outputs; of survival the ends of the intervals."""
    predictions: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=dict)
    """(truth, predictions) of test examples by site, for numbers and survival."""
    examples: str = "patches"
    """Plural of an example: patches, slides or patients."""


def build_headline(page: Page, n_sites: int) -> dict[str, object]:
    """Return the values of the first section: method, score, and benefit of federation."""
    merged = (page.evaluation or {}).get("merged") or {}
    evaluated = (page.evaluation or {}).get("sites", ())
    score = page.scores[0]
    has_score = is_number((merged.get(score) or {}).get("mean"))
    references = _select_references(page.baselines, score)
    is_compared = has_score and n_sites > 1 and formatting.is_federated(page.method)
    local_references = {k: v for k, v in references.items() if formatting.is_local(v["method"])} if is_compared else {}
    has_proxy = page.method in METHODS and METHODS[page.method].mixing_role in ("proxy", "shared")
    private = has_proxy and all(s.get("model", "private") == "private" for s in evaluated)
    shared = (page.evaluation or {}).get("shared")
    return {
        "reached": has_score,
        "whose": "shared models" if shared else "private models" if private else "models",
        "references": references,
        "verdicts": [
            finding
            for name, run in local_references.items()
            if (finding := _verdict_on_federation(merged, run, name, score))
        ],
        "gain": _first_gain(merged, *next(iter(local_references.items())), score) if local_references else None,
        "majority": _majority_class(evaluated[0].get("confusion"), page.classes) if evaluated else None,
        "over_classes": formatting.describe_part_classes(evaluated),
        "rounds": max((n for s in page.summary.get("sites", ()) if is_number(n := s.get("rounds"))), default=None),
    }


def _select_references(baselines: Sequence[Mapping[str, Any]], score: str) -> dict[str, Mapping[str, Any]]:
    """Return the best run of each kind of baseline."""
    kinds = {
        "a local model without DP": (formatting.is_local, False),
        "a local model with DP": (formatting.is_local, True),
        "all data pooled without DP": (formatting.is_pooled, False),
        "all data pooled with DP": (formatting.is_pooled, True),
    }
    measured = [b for b in baselines if _find_mean(b, score) is not None]
    runs_by_kind = {
        name: [b for b in measured if is_kind(b["method"]) and bool(b["dp"]) == dp]
        for name, (is_kind, dp) in kinds.items()
    }
    return {name: max(runs, key=lambda b: b[score]["mean"]) for name, runs in runs_by_kind.items() if runs}


def _majority_class(confusion: Sequence[Sequence[int]] | None, classes: Sequence[str]) -> tuple[str, float] | None:
    """Return the most frequent true class and its share, the accuracy of a constant prediction.

    >>> _majority_class([[30, 10], [20, 40]], ("healthy", "tumor"))
    ('tumor', 0.6)
    """
    if not confusion or not (total := sum(map(sum, confusion))):
        return None
    sums = [sum(row) for row in confusion]
    top = sums.index(max(sums))
    return classes[top], sums[top] / total


def _verdict_on_federation(merged: Json, run: Json, name: str, score: str) -> Finding | None:
    """Return the benefit of federation over a baseline, by the rule of comparisons; None where nothing measures it."""
    difference = merged[score]["mean"] - run[score]["mean"]
    if run["dp"]:
        direction = "above" if difference >= 0 else "below"
        text = f"{formatting.SCORES[score]} is {format_number(abs(difference), 2)} {direction} that of {name}"
        return Finding("unclear", f"{text}, whose model is trained with noise.")
    if (benefit := find_benefit_measure()) is None:
        return None
    gain = run.get("gain") or {"gain": {"mean": difference, "low": None, "high": None}, "verdict": "inconclusive"}
    score_text = format_number((gain.get("federated") or merged[score])["mean"], 2)
    measure = gain.get("measure", formatting.score_in_sentence(score))
    return benefit.describe_benefit(gain, f"In this run federation reaches {score_text} in {measure}", name)


def _first_gain(merged: Json, baseline: str, run: Json, score: str) -> dict[str, object]:
    """Return the gain over the first local baseline: its name, the measure and the value."""
    gain = (run.get("gain") or {}).get("gain")
    return {
        "over": baseline,
        "in": run["gain"]["measure"] if gain else formatting.score_in_sentence(score),
        "value": gain["mean"] if gain else merged[score]["mean"] - run[score]["mean"],
    }


def summarize_privacy(page: Page) -> Json:
    """Return the privacy spent by all sites; ``guarantee`` is the weakest of them."""
    sites = page.summary.get("sites", ())
    sites_with_epsilon = [s for s in sites if is_number(s.get("epsilon"))]
    guarantees = {s.get("guarantee") or "none" for s in sites_with_epsilon}
    weakest = next((g for g in ("none", "nominal", "shared", "guaranteed") if g in guarantees), "none")
    return {
        "on": bool(sites_with_epsilon),
        "epsilon": formatting.format_span([s["epsilon"] for s in sites_with_epsilon]),
        "detected": formatting.describe_worst_detection(sites),
        "deltas": sorted({formatting.format_scientific(s.get("delta")) for s in sites_with_epsilon}),
        "units": sorted({s["unit"] for s in sites_with_epsilon if s.get("unit")}),
        "guarantee": weakest,
        "lost": [
            (loss["site"], loss["round"], _last_epsilon(page, loss["site"]))
            for loss in formatting.find_departures(page.summary)
        ],
        "has_lifetime": any(s.get("real") for s in sites),
        "without": [s["site"] for s in sites if not is_number(s.get("epsilon"))],
        "groups": [(s["site"], group) for s in sites if (group := page.groups.get(s["site"]))],
        "planted": [f"{s['canaries']} at {s['site']}" for s in sites if s.get("canaries")],
    }


def _last_epsilon(page: Page, site: str) -> float | None:
    """Return the ε of the last round of a site whose part of the run is here."""
    lines = page.metrics.get(site, ())
    return lines[-1].get("epsilon") if lines else None


def list_runs(page: Page) -> list[Json]:
    """Return this run and its baselines, best merged accuracy first; runs without a number last."""
    privacy_summary = summarize_privacy(page)
    own_row = {
        **{"run": page.run, "method": page.method, "dp": privacy_summary["on"], "this": True},
        **{key: privacy_summary[key] for key in ("epsilon", "guarantee")},
        **{metric: ((page.evaluation or {}).get("merged") or {}).get(metric) for metric in page.scores},
    }
    others = [{**b, "epsilon": format_number(b.get("epsilon"), 2), "this": False} for b in page.baselines]
    runs = [own_row, *others] if page.evaluation else others
    means = {run["run"]: _find_mean(run, page.scores[0]) for run in runs}
    return sorted(runs, key=lambda run: np.inf if (mean := means[run["run"]]) is None else -mean)


def _find_mean(row: Json, metric: str) -> Any:
    value = (row.get(metric) or {}).get("mean")
    return value if is_number(value) else None


def plot_comparisons(page: Page, rows: Sequence[Json], colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """Return a chart per metric over all runs; none for a single run."""
    charts, evaluated = [], (page.evaluation or {}).get("sites", ())
    for metric in page.scores:
        bars = [
            figures.Bar(
                label=_run_label(row, rows),
                mean=_find_mean(row, metric),
                sd=row[metric].get("sd"),
                dp=bool(row["dp"]),
                this=row["this"],
                sites=[(colors[s["site"]], s[metric]) for s in evaluated if is_number(s.get(metric))]
                if row["this"]
                else (),
            )
            for row in rows
            if _find_mean(row, metric) is not None
        ]
        if len(bars) > 1:
            title = formatting.SCORES[metric]
            set_title = f"{title} on the merged test set"
            measure = f"{set_title}, mean ± standard deviation over sites"
            charts.append((title, figures.plot_bars(bars, set_title, measure)))
    return charts


def _run_label(row: Json, rows: Sequence[Json]) -> str:
    label = f"{formatting.method_name(row['method'])}{', DP' if row['dp'] else ''}"
    same_kind = [r for r in rows if r["method"] == row["method"] and bool(r["dp"]) == bool(row["dp"])]
    return label if len(same_kind) == 1 else f"{label} ({row['run'].split('-')[0]})"


def _metric_series(page: Page, *keys: str) -> dict[str, Points]:
    """Return (round, value) by site of an entry of the metrics, without rounds that lack it."""

    def read(line: Any) -> Any:
        return reduce(lambda part, key: (part or {}).get(key), keys, line)

    series: dict[str, Points] = {}
    for site, lines in page.metrics.items():
        values = [(line["round"], read(line)) for line in lines]
        if points := [(number, value) for number, value in values if is_number(value)]:
            series[site] = points
    return series


def _curve_titles(score: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return (test set or model, score) → title and explanation of its curve."""
    word = formatting.score_in_sentence(score)
    return {
        ("merged", score): (f"Merged test set, {word}", "Each site's model on the test parts of all sites."),
        ("own", score): (f"Own test part, {word}", "Each site's model on the test part of that site."),
        ("proxy", score): (f"Proxy model, {word}", "The model that is exchanged."),
        ("shared", score): (f"Shared head, {word}", "The model that all sites make together."),
        ("merged", "auroc"): ("Merged test set, AUROC", "Ranking quality, whatever the threshold."),
    }


def plot_round_curves(page: Page, colors: Mapping[str, str]) -> list[tuple[str, str, Chart]]:
    """Return (title, explanation, chart) over rounds, losses last; the accuracies share their axis."""
    score = page.scores[0]
    titles = _curve_titles(score)
    series = {keys: _metric_series(page, *keys) for keys in titles}
    ylim = _axis_limits(v for keys, s in series.items() if keys[1] == score for p in s.values() for _, v in p)
    references = _select_references(page.baselines, score)
    local_run = references.get("a local model without DP", {}) if formatting.is_federated(page.method) else {}
    charts = []
    for keys, (title, text) in titles.items():
        if series[keys]:
            level = _find_mean(local_run, keys[1]) if keys[0] == "merged" else None
            reference = None if level is None else ("local, no DP", level)
            limits = ylim if keys[1] == score else None
            chart = figures.plot_curves(series[keys], colors, title, ylim=limits, reference=reference)
            charts.append((title, text, chart))
    kinds = dict.fromkeys(k for lines in page.metrics.values() for line in lines for k in line.get("loss") or {})
    for kind in kinds:
        title = f"Training loss, {kind}"
        if losses := _metric_series(page, "loss", kind):
            charts.append((title, "", figures.plot_curves(losses, colors, title)))
    return charts


def _axis_limits(values: Iterable[float]) -> tuple[float, float] | None:
    numbers = list(values)
    if not numbers:
        return None
    pad = max(0.02, 0.06 * (max(numbers) - min(numbers)))
    lowest = 0.0 if min(numbers) >= 0 else -np.inf
    return max(lowest, min(numbers) - pad), min(1.01, max(numbers) + pad)


def plot_epsilon(page: Page, colors: Mapping[str, str]) -> Chart | None:
    series = _metric_series(page, "epsilon")
    if not series:
        return None
    sites = page.summary.get("sites", ())
    # that of a real site is for all its runs
    budgets = {
        s["site"]: float(s["max_epsilon"]) for s in sites if is_number(s.get("max_epsilon")) and not s.get("real")
    }
    return figures.plot_budget_curves(series, colors, budgets, f"ε spent ({summarize_privacy(page)['guarantee']})")


def plot_reliabilities(evaluated: Sequence[Json], colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """Return a reliability diagram per site, or one for all of many sites."""
    series: dict[str, Points] = {}
    for site in evaluated:
        bins = (site.get("calibration") or {}).get("bins", ())
        points = [(b.get("confidence"), b.get("accuracy")) for b in bins]
        if points := [(x, y) for x, y in points if is_number(x) and is_number(y)]:
            series[site["site"]] = points
    if len(series) > figures.N_COLORS:
        return [("", figures.plot_reliability(series, colors, "Reliability of all sites"))]
    return [
        (site, figures.plot_reliability({site: points}, colors, f"Reliability {position}"))
        for position, (site, points) in enumerate(series.items(), start=1)
    ]


def build_heatmaps(evaluated: Sequence[Json], score: str) -> list[dict[str, object]]:
    """Return cross-site heatmaps, models × test parts, of the main score, and of AUROC where known."""
    parts = {s["site"]: s["parts"] for s in evaluated if s.get("parts")}
    names = list(parts)
    heatmaps: list[dict[str, object]] = []
    for metric in (score, "auroc"):
        grid = [[(scores.get(part) or {}).get(metric) for part in names] for scores in parts.values()]
        values = [v for row in grid for v in row if is_number(v)]
        if len(names) > 1 and values:
            low, high = min(values), max(values)
            mean_elsewhere = [mean_of_available(v for j, v in enumerate(row) if j != i) for i, row in enumerate(grid)]
            reached = [mean_of_available(row[j] for i, row in enumerate(grid) if i != j) for j in range(len(names))]
            title = f"{formatting.SCORES[metric]} of models on test parts"
            heatmaps.append({
                "score": metric, "metric": formatting.SCORES[metric], "names": names, "grid": grid,
                "low": low, "high": high, "elsewhere": mean_elsewhere, "reached": reached,
                "best": _unique_extreme(max, names, mean_elsewhere),
                "hardest": _unique_extreme(min, names, reached),
                "chart": figures.plot_matrix(grid, (low, high), title) if len(names) > _MAX_TABLE_SITES else None,
            })  # fmt: skip
    return heatmaps


def _unique_extreme(
    select: Callable[..., Any], names: Sequence[str], values: Sequence[float | None]
) -> tuple[str, float] | None:
    """Return the name with the highest or lowest value; None for a tie."""
    end = select((value for value in values if value is not None), default=None)
    names_at_end = [name for name, value in zip(names, values, strict=True) if value == end]
    return (names_at_end[0], end) if end is not None and len(names_at_end) == 1 else None


def sum_traffic(page: Page) -> list[dict[str, object]]:
    """Return the messages, bytes and seconds of each site over the whole run."""
    keys = ("messages", "bytes", "communication_seconds", "seconds")
    rows: list[dict[str, object]] = []
    for site, lines in page.metrics.items():
        values = {key: [line[key] for line in lines if is_number(line.get(key))] for key in keys}
        if lines:
            sums = {key: sum(values) if values else None for key, values in values.items()}
            rows.append({"site": site, **sums, "rounds": len(lines)})
    return rows
