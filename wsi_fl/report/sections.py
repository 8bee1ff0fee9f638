"""The plain values of the page of a run, and what its sections on results, training and privacy make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.methods import METHODS
from wsi_fl.learning.counts import Between
from wsi_fl.report import figures, words, worth
from wsi_fl.report.figures import Chart, Points
from wsi_fl.report.words import Finding, Json, known, number

_NUMBER_WORDS = (
    *("No", "One", "Two", "Three", "Four", "Five", "Six"),
    *("Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve"),
)
_CELLS_IN_TABLE = 12
"""A heatmap of more sites than this is drawn, not written."""


@dataclass(frozen=True)
class Page:
    """Everything the page shows. Any number may be None; what has not been done yet is None or empty."""

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
    """Overview pictures by site: (slide, PNG bytes)."""
    groups: Mapping[str, Json] = field(default_factory=dict)
    """What ε per row is worth to each site's largest patient: ``rows``, ``epsilon`` (None beyond 1000), ``delta``."""
    clinical: Json | None = None
    """The document of ``clinical --json``."""
    audit: Json | None = None
    """The document of ``audit --json``."""
    between: Between | None = None
    """What hospitals that keep their test parts told of what travelled, as ``evaluate --json`` has it."""
    mpcpa: Json | None = None
    """The document of ``train --method mpcpa --baselines``."""
    generated: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]] = field(default_factory=dict)
    """Images that were generated for this run, by the site whose denoiser they come from."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sites of real patients whose ``patches``, ``overviews`` or ``generated`` images are not shown."""
    patients_of: Sequence[str] = ()
    """Sites of real patients of whom the page holds pictures."""
    scores: tuple[str, ...] = ("accuracy", "macro_accuracy", "auroc")
    """Names of the scores, the most telling first, which is better when it is higher."""
    task: str = "classes"
    """What models answer: "classes", a "number", or "survival"."""
    outputs: tuple[str, ...] = ()
    """What each output of a model is called; of survival the ends of the intervals."""
    said: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=dict)
    """(truth, what the model says) of test examples by site, for numbers and survival."""
    examples: str = "patches"
    """What a model is asked about: patches, or whole slides, of which there are no pixels."""


def headline(page: Page, n_sites: int) -> dict[str, object]:
    """The opening: what was done, what came out, and whether federation helped."""
    merged = (page.evaluation or {}).get("merged") or {}
    evaluated = (page.evaluation or {}).get("sites", ())
    score = page.scores[0]
    reached = known((merged.get(score) or {}).get("mean"))
    references = _references(page.baselines, score)
    compared = reached and n_sites > 1 and words.is_federated(page.method)
    alone = {k: v for k, v in references.items() if words.is_alone(v["method"])} if compared else {}
    has_proxy = page.method in METHODS and METHODS[page.method].travels in ("proxy", "shared")
    private = has_proxy and all(s.get("model", "private") == "private" for s in evaluated)
    shared = (page.evaluation or {}).get("shared")
    return {
        "setting": setting(page.method, n_sites),
        "reached": reached,
        "whose": "shared models" if shared else "private models" if private else "models",
        "references": references,
        "verdicts": [_verdict(merged, run, name, score) for name, run in alone.items()],
        "gain": _gain(merged, *next(iter(alone.items())), score) if alone else None,
        "majority": _majority(evaluated[0].get("confusion"), page.classes) if evaluated else None,
        "over_classes": words.classes_of_parts(evaluated),
        "rounds": max(
            (n for s in page.summary.get("sites", ()) if known(n := s.get("rounds"))), default=None
        ),
        "events": list(_events(page)),
    }


def setting(method: str, n_sites: int) -> str:
    """What was done, in one sentence."""
    word = _NUMBER_WORDS[n_sites] if n_sites < len(_NUMBER_WORDS) else str(n_sites)
    who, spoken = f"{word} site{'' if n_sites == 1 else 's'}", words.method_name(method)
    if words.is_pooled(method):
        return f"The training data of {who.lower()} were pooled: a reference, not a federation."
    if words.is_alone(method):
        return f"{who} trained {'alone' if n_sites == 1 else 'each on its own'}; nothing was exchanged."
    if n_sites == 1:
        return f"{who} trained with {spoken}; without a second site there is nobody to learn with."
    return f"{who} trained together with {spoken}; no slide left its site."


def _references(baselines: Sequence[Mapping[str, Any]], score: str) -> dict[str, Mapping[str, Any]]:
    """The runs a federation is measured against: the best of each kind, so that no comparison is easier than the study
    allows.
    """
    kinds = {
        "a site alone without DP": (words.is_alone, False),
        "a site alone with DP": (words.is_alone, True),
        "all data pooled without DP": (words.is_pooled, False),
        "all data pooled with DP": (words.is_pooled, True),
    }
    measured = [b for b in baselines if _mean(b, score) is not None]
    found = {
        name: [b for b in measured if is_kind(b["method"]) and bool(b["dp"]) == dp]
        for name, (is_kind, dp) in kinds.items()
    }
    return {name: max(runs, key=lambda b: b[score]["mean"]) for name, runs in found.items() if runs}


def _majority(confusion: Sequence[Sequence[int]] | None, classes: Sequence[str]) -> tuple[str, float] | None:
    """The commonest true class and its share: what answering always the same would score.

    >>> _majority([[30, 10], [20, 40]], ("healthy", "tumor"))
    ('tumor', 0.6)
    """
    if not confusion or not (total := sum(map(sum, confusion))):
        return None
    sums = [sum(row) for row in confusion]
    top = sums.index(max(sums))
    return classes[top], sums[top] / total


def _verdict(merged: Json, run: Json, name: str, score: str) -> Finding:
    """Whether joining pays, by the rule of comparisons."""
    more = merged[score]["mean"] - run[score]["mean"]
    if run["dp"]:
        side = "above" if more >= 0 else "below"
        text = f"{words.SCORES[score]} is {number(abs(more), 2)} {side} that of {name}"
        return Finding("unclear", f"{text}, whose model carries the noise itself.")
    gain = run.get("gain") or {"gain": {"mean": more, "low": None, "high": None}, "verdict": "inconclusive"}
    reached = number((gain.get("federated") or merged[score])["mean"], 2)
    measure = gain.get("measure", words.measured_in(score))
    return worth.finding(gain, f"In this run joining reaches {reached} in {measure}", name)


def _gain(merged: Json, over: str, run: Json, score: str) -> dict[str, object]:
    """What the first of the models alone is exceeded by, over whom, and in which measure."""
    gain = (run.get("gain") or {}).get("gain")
    return {
        "over": over,
        "in": run["gain"]["measure"] if gain else words.SCORES[score].lower(),
        "value": gain["mean"] if gain else merged[score]["mean"] - run[score]["mean"],
    }


def _events(page: Page) -> Iterable[str]:
    """What did not go as planned, in sentences: sites that were lost, that left, and models that were rejected."""
    for loss in page.summary.get("losses", ()):
        yield f"{loss['site']} was lost in round {loss['round']}: {loss['reason']}."
    yield from words.absences(page.summary.get("sites", ()))
    if letters := page.summary.get("statistics"):
        yield f"The head is made of {len(letters)} letters: {words.letters(letters)}."
    yield from words.received(page.evaluation or {})
    for row in page.summary.get("sites", ()):
        lines = page.metrics.get(row["site"], ())
        if row.get("max_epsilon") is not None and lines and lines[-1].get("takes_part") is False:
            most = f"the next would have crossed its max_epsilon of {row['max_epsilon']:g}"
            yield f"{row['site']} took part in {row['rounds']} rounds: {most}."
        if n := row.get("rejected"):
            yield f"{row['site']} rejected {n} model{'' if n == 1 else 's'} of its peers (log.txt says why)."


def privacy(page: Page) -> dict[str, Any]:
    """ε of all sites as one statement; ``guarantee`` is the weakest any site has."""
    sites = page.summary.get("sites", ())
    spent = [s for s in sites if known(s.get("epsilon"))]
    guarantees = {s.get("guarantee") or "none" for s in spent}
    weakest = next((g for g in ("none", "nominal", "shared", "guaranteed") if g in guarantees), "none")
    return {
        "on": bool(spent),
        "epsilon": words.span([s["epsilon"] for s in spent]),
        "detected": words.detected_of(sites),
        "deltas": sorted({words.scientific(s.get("delta")) for s in spent}),
        "units": sorted({s["unit"] for s in spent if s.get("unit")}),
        "guarantee": weakest,
        "without": [s["site"] for s in sites if not known(s.get("epsilon"))],
        "groups": [_group(s["site"], found) for s in sites if (found := page.groups.get(s["site"]))],
        "planted": [f"{s['canaries']} at {s['site']}" for s in sites if s.get("canaries")],
    }


def _group(site: str, found: Mapping[str, Any]) -> str:
    """What ε of one row is worth to the patient with the most rows, in a sentence.

    >>> _group("C1", {"rows": 8, "epsilon": 12.05, "delta": 1e-5})
    'C1: the 8 rows of its largest patient together have ε = 12.1 at δ = 10⁻⁵.'
    >>> _group("C1", {"rows": 200, "epsilon": None, "delta": 1e-5})
    'C1: the 200 rows of its largest patient together have no useful ε (it is beyond 1,000).'
    """
    who = f"{site}: the {words.count(found['rows'])} rows of its largest patient together have"
    if not known(found.get("epsilon")):
        return f"{who} no useful ε (it is beyond 1,000)."
    return f"{who} ε = {number(found['epsilon'], 1)} at δ = {words.scientific(found.get('delta'))}."


def rows(page: Page) -> list[dict[str, Any]]:
    """This run and its baselines, best merged accuracy first; runs without a number last."""
    spent_by_all = privacy(page)
    this = {
        **{"run": page.run, "method": page.method, "dp": spent_by_all["on"], "this": True},
        **{key: spent_by_all[key] for key in ("epsilon", "guarantee")},
        **{metric: ((page.evaluation or {}).get("merged") or {}).get(metric) for metric in page.scores},
    }
    others = [{**b, "epsilon": number(b.get("epsilon"), 2), "this": False} for b in page.baselines]
    runs = [this, *others] if page.evaluation else others
    means = {run["run"]: _mean(run, page.scores[0]) for run in runs}
    return sorted(runs, key=lambda run: np.inf if (mean := means[run["run"]]) is None else -mean)


def _mean(row: Json, metric: str) -> Any:
    value = (row.get(metric) or {}).get("mean")
    return value if known(value) else None


def comparison(page: Page, rows: Sequence[Json], colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """A chart per metric over all runs; nothing to draw for a single run."""
    charts, evaluated = [], (page.evaluation or {}).get("sites", ())
    for metric in page.scores:
        bars = [
            figures.Bar(
                label=_label(row, rows),
                mean=_mean(row, metric),
                sd=row[metric].get("sd"),
                dp=bool(row["dp"]),
                this=row["this"],
                sites=[(colors[s["site"]], s[metric]) for s in evaluated if known(s.get(metric))]
                if row["this"]
                else (),
            )
            for row in rows
            if _mean(row, metric) is not None
        ]
        if len(bars) > 1:
            title = words.SCORES[metric]
            what = f"{title} on the merged test set"
            measure = f"{what}, mean ± standard deviation over sites"
            charts.append((title, figures.comparison(bars, what, measure)))
    return charts


def _label(row: Json, rows: Sequence[Json]) -> str:
    label = f"{words.method_name(row['method'])}{', DP' if row['dp'] else ''}"
    alike = [r for r in rows if r["method"] == row["method"] and bool(r["dp"]) == bool(row["dp"])]
    return label if len(alike) == 1 else f"{label} ({row['run'].split('-')[0]})"


def _series(page: Page, *keys: str) -> dict[str, Points]:
    """(round, value) by site of one entry of the metrics, rounds without it left out."""
    series: dict[str, Points] = {}
    for site, lines in page.metrics.items():
        points = []
        for line in lines:
            value: Any = line
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if known(value):
                points.append((line["round"], value))
        if points:
            series[site] = points
    return series


def _over_rounds(score: str) -> dict[tuple[str, str], tuple[str, str]]:
    """(set or model, score) → title and explanation of its curve."""
    word = words.SCORES[score].lower()
    return {
        ("merged", score): (f"Merged test set, {word}", "Each site's model on the test parts of all sites."),
        ("own", score): (f"Own test part, {word}", "Each site's model on the test part of that site."),
        ("proxy", score): (f"Proxy model, {word}", "The model that leaves the site."),
        ("shared", score): (f"Shared head, {word}", "The model that all sites make together."),
        ("merged", "auroc"): ("Merged test set, AUROC", "Ranking quality, whatever the threshold."),
    }


def curves(page: Page, colors: Mapping[str, str]) -> list[tuple[str, str, Chart]]:
    """(title, explanation, chart) over rounds, losses last; the accuracies share their axis."""
    score = page.scores[0]
    shown = _over_rounds(score)
    series = {keys: _series(page, *keys) for keys in shown}
    ylim = _limits(v for keys, s in series.items() if keys[1] == score for p in s.values() for _, v in p)
    references = _references(page.baselines, score)
    alone = references.get("a site alone without DP", {}) if words.is_federated(page.method) else {}
    charts = []
    for keys, (title, text) in shown.items():
        if series[keys]:
            level = _mean(alone, keys[1]) if keys[0] == "merged" else None
            reference = None if level is None else ("alone, no DP", level)
            limits = ylim if keys[1] == score else None
            chart = figures.curves(series[keys], colors, title, ylim=limits, reference=reference)
            charts.append((title, text, chart))
    kinds = dict.fromkeys(
        k for lines in page.metrics.values() for line in lines for k in line.get("loss") or {}
    )
    for kind in kinds:
        title = f"Training loss, {kind}"
        if losses := _series(page, "loss", kind):
            charts.append((title, "", figures.curves(losses, colors, title)))
    return charts


def _limits(values: Iterable[float]) -> tuple[float, float] | None:
    found = list(values)
    if not found:
        return None
    pad = max(0.02, 0.06 * (max(found) - min(found)))
    lowest = 0.0 if min(found) >= 0 else -np.inf
    return max(lowest, min(found) - pad), min(1.01, max(found) + pad)


def spent(page: Page, colors: Mapping[str, str]) -> Chart | None:
    series = _series(page, "epsilon")
    if not series:
        return None
    sites = page.summary.get("sites", ())
    budgets = {s["site"]: float(s["max_epsilon"]) for s in sites if known(s.get("max_epsilon"))}
    return figures.budget_curves(series, colors, budgets, f"ε spent ({privacy(page)['guarantee']})")


def reliability(evaluated: Sequence[Json], colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """A diagram per site, or one for all when there are many."""
    series: dict[str, Points] = {}
    for site in evaluated:
        bins = (site.get("calibration") or {}).get("bins", ())
        points = [(b.get("confidence"), b.get("accuracy")) for b in bins]
        if points := [(x, y) for x, y in points if known(x) and known(y)]:
            series[site["site"]] = points
    if len(series) > figures.N_COLORS:
        return [("", figures.reliability(series, colors, "Reliability of all sites"))]
    return [
        (site, figures.reliability({site: points}, colors, f"Reliability {position}"))
        for position, (site, points) in enumerate(series.items(), start=1)
    ]


def pooled(evaluated: Sequence[Json]) -> list[list[int]] | None:
    """The confusion matrices of all sites' models, added up."""
    found = [np.asarray(s["confusion"]) for s in evaluated if s.get("confusion")]
    return np.sum(found, axis=0).tolist() if found else None


def heats(evaluated: Sequence[Json], score: str) -> list[dict[str, object]]:
    """Who generalises to whom: models × test parts, for the most telling score, and AUROC where there is one."""
    parts = {s["site"]: s["parts"] for s in evaluated if s.get("parts")}
    names = list(parts)
    found: list[dict[str, object]] = []
    for metric in (score, "auroc"):
        grid = [[(of.get(part) or {}).get(metric) for part in names] for of in parts.values()]
        values = [v for row in grid for v in row if known(v)]
        if len(names) > 1 and values:
            low, high = min(values), max(values)
            elsewhere = [_average(v for j, v in enumerate(row) if j != i) for i, row in enumerate(grid)]
            reached = [_average(row[j] for i, row in enumerate(grid) if i != j) for j in range(len(names))]
            title = f"{words.SCORES[metric]} of models on test parts"
            found.append({
                "metric": words.SCORES[metric], "names": names, "grid": grid, "low": low, "high": high,
                "elsewhere": elsewhere, "reached": reached,
                "best": _named(max, names, elsewhere), "hardest": _named(min, names, reached),
                "chart": figures.matrix(grid, (low, high), title) if len(names) > _CELLS_IN_TABLE else None,
            })  # fmt: skip
    return found


def _average(values: Iterable[Any]) -> float | None:
    found = [v for v in values if known(v)]
    return sum(found) / len(found) if found else None


def _named(
    choose: Callable[..., Any], names: Sequence[str], values: Sequence[float | None]
) -> tuple[str, float] | None:
    """The name with the highest or lowest value; None where several have it, as a tie has no winner."""
    end = choose((value for value in values if value is not None), default=None)
    first = [name for name, value in zip(names, values, strict=True) if value == end]
    return (first[0], end) if end is not None and len(first) == 1 else None


def traffic(page: Page) -> list[dict[str, object]]:
    """What each site sent over the whole run."""
    keys = ("messages", "bytes", "communication_seconds", "seconds")
    found: list[dict[str, object]] = []
    for site, lines in page.metrics.items():
        told = {key: [line[key] for line in lines if known(line.get(key))] for key in keys}
        if lines:
            sums = {key: sum(values) if values else None for key, values in told.items()}
            found.append({"site": site, **sums, "rounds": len(lines)})
    return found
