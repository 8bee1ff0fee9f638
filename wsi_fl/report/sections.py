"""What each section of the page shows, worked out from its plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.methods import METHODS
from wsi_fl.report import figures, pictures, words, worth
from wsi_fl.report.figures import Chart, Points
from wsi_fl.report.page import Json, Page

MANY_SITES = figures.N_COLORS
PATCHES_SHOWN = 6
"""Sample patches per site and label; half as many when there are many sites."""
CELLS_IN_TABLE = 12
"""A heatmap of more sites than this is drawn, not written."""


def metrics(page: Page) -> dict[str, str]:
    """Return what the scores of a run are called, by name."""
    return {name: words.SCORES[name] for name in page.scores}


def headline(page: Page, n_sites: int) -> dict[str, Any]:
    """The opening: what was done, what came out, and whether federation helped."""
    merged = (page.evaluation or {}).get("merged") or {}
    evaluated = (page.evaluation or {}).get("sites", ())
    score = page.scores[0]
    reached = words.known((merged.get(score) or {}).get("mean"))
    references = words.references(_others(page), score)
    compared = reached and n_sites > 1 and words.is_federated(page.method)
    alone = {k: v for k, v in references.items() if words.is_alone(v["method"])} if compared else {}
    return {
        "setting": words.setting(page.method, n_sites),
        "n": evaluated[0].get("n") if evaluated else None,
        "slides": ((evaluated[0].get("slides") or {}).get("n")) if evaluated else None,
        "merged": merged,
        "reached": reached,
        "whose": "shared models"
        if (page.evaluation or {}).get("shared")
        else "private models"
        if _has_proxy(page.method) and all(s.get("with", "private") == "private" for s in evaluated)
        else "models",
        "references": references,
        "verdicts": [_verdict(merged, run, name, score) for name, run in alone.items()],
        **_gain(merged, alone, score),
        "score": score,
        "article": "an" if words.SCORES[score][0] in "AR" else "a",
        "measure": words.SCORES[score].lower(),
        "tiles": [name for name in (score, "auroc", "mae", "integrated_brier") if name in page.scores],
        "majority": words.majority(evaluated[0].get("confusion"), page.classes) if evaluated else None,
        "rounds": max(
            (s["rounds"] for s in page.summary.get("sites", ()) if words.known(s.get("rounds"))), default=None
        ),
        "lost": list(page.summary.get("lost", ())),
        "events": list(_events(page)),
    }


def _verdict(merged: Json, run: Json, name: str, score: str) -> words.Finding:
    """Whether joining pays, by the rule of comparisons."""
    more = merged[score]["mean"] - run[score]["mean"]
    if run["dp"]:
        side = "above" if more >= 0 else "below"
        text = f"{words.SCORES[score]} is {words.number(abs(more), 2)} {side} that of {name}"
        return words.Finding("unclear", f"{text}, whose model carries the noise itself.")
    gain = run.get("gain") or {"gain": {"mean": more, "low": None, "high": None}, "verdict": "not shown"}
    reached = words.number((gain.get("joined") or merged[score])["mean"], 2)
    measure = gain.get("measure", words.measured_in(score))
    return worth.finding(gain, f"In this run joining reaches {reached} in {measure}", name)


def _gain(merged: Mapping[str, Any], alone: Mapping[str, Mapping[str, Any]], score: str) -> dict[str, Any]:
    """What the first of the models alone is exceeded by, over whom, and in which measure."""
    if not alone:
        return {"gain_over": None}
    name, run = next(iter(alone.items()))
    gain = (run.get("gain") or {}).get("gain")
    return {
        "gain_over": name,
        "gain_in": run["gain"]["measure"] if gain else words.SCORES[score].lower(),
        "gain": gain["mean"] if gain else merged[score]["mean"] - run[score]["mean"],
    }


def _has_proxy(method: str) -> bool:
    return method in METHODS and METHODS[method].travels == "proxy"


def _events(page: Page) -> Iterable[str]:
    """What did not go as planned, in sentences: sites that were lost, that left, and models that were rejected."""
    for loss in page.summary.get("losses", ()):
        yield f"{loss['site']} was lost in round {loss['round']}: {loss['reason']}."
    yield from words.absences(page.summary.get("sites", ()))
    if letters := page.summary.get("letters"):
        yield f"The head is made of {len(letters)} letters: {words.letters(letters)}."
    yield from words.received(page.evaluation or {})
    for row in page.summary.get("sites", ()):
        lines = page.metrics.get(row["site"], ())
        if row.get("max_epsilon") is not None and lines and lines[-1].get("takes_part") is False:
            yield (
                f"{row['site']} took part in {row['rounds']} rounds: the next would have crossed its "
                f"max_epsilon of {row['max_epsilon']:g}."
            )
        if n := row.get("rejected"):
            yield f"{row['site']} rejected {n} model{'' if n == 1 else 's'} of its peers (log.txt says why)."


def privacy(page: Page) -> dict[str, Any]:
    """ε of all sites as one statement; ``guarantee`` is the weakest any site has."""
    sites = page.summary.get("sites", ())
    spent = [s for s in sites if words.known(s.get("epsilon"))]
    guarantees = {s.get("guarantee") or "none" for s in spent}
    weakest = next((g for g in ("none", "nominal", "shared", "guaranteed") if g in guarantees), "none")
    return {
        "on": bool(spent),
        "epsilon": words.span([s["epsilon"] for s in spent]),
        "detected": words.detected_of(sites),
        "deltas": sorted({words.scientific(s.get("delta")) for s in spent}),
        "units": sorted({s["unit"] for s in spent if s.get("unit")}),
        "guarantee": weakest,
        "without": [s["site"] for s in sites if not words.known(s.get("epsilon"))],
        "groups": [words.group(s["site"], found) for s in sites if (found := page.groups.get(s["site"]))],
        "planted": [f"{s['canaries']} at {s['site']}" for s in sites if s.get("canaries")],
    }


def rows(page: Page) -> list[dict[str, Any]]:
    """This run and its baselines, best merged accuracy first; runs without a number last."""
    spent_by_all = privacy(page)
    this = {
        "run": page.run,
        "method": page.method,
        "dp": spent_by_all["on"],
        "epsilon": spent_by_all["epsilon"],
        "guarantee": spent_by_all["guarantee"],
        "this": True,
        **{metric: ((page.evaluation or {}).get("merged") or {}).get(metric) for metric in page.scores},
    }
    others = [{**b, "epsilon": words.number(b.get("epsilon"), 2), "this": False} for b in _others(page)]
    runs = [this, *others] if page.evaluation else others
    for row in runs:
        row["name"], row["does"] = words.method_name(row["method"]), words.method_does(row["method"])
    return sorted(runs, key=lambda run: -_mean_or(run, page.scores[0], -np.inf))


def _others(page: Page) -> list[Json]:
    return [b for b in page.baselines if b["run"] != page.run]


def _mean_or(row: Json, metric: str, otherwise: float) -> float:
    value = _mean(row, metric)
    return otherwise if value is None else float(value)


def _mean(row: Json, metric: str) -> Any:
    value = (row.get(metric) or {}).get("mean")
    return value if words.known(value) else None


def comparison(page: Page, rows: Sequence[Json], colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """A chart per metric over all runs; nothing to draw for a single run."""
    charts = []
    for metric, title in metrics(page).items():
        bars = [
            figures.Bar(
                label=_label(row, rows),
                mean=_mean(row, metric),
                sd=row[metric].get("sd"),
                dp=bool(row["dp"]),
                this=row["this"],
                sites=_dots(page, metric, colors) if row["this"] else (),
            )
            for row in rows
            if _mean(row, metric) is not None
        ]
        if len(bars) > 1:
            charts.append((title, figures.comparison(bars, f"{title} on the merged test set")))
    return charts


def _label(row: Json, rows: Sequence[Json]) -> str:
    label = f"{row['name']}{', DP' if row['dp'] else ''}"
    alike = [r for r in rows if r["method"] == row["method"] and bool(r["dp"]) == bool(row["dp"])]
    return label if len(alike) == 1 else f"{label} ({row['run'].split('-')[0]})"


def _dots(page: Page, metric: str, colors: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    sites = (page.evaluation or {}).get("sites", ())
    return tuple((colors[s["site"]], s[metric]) for s in sites if words.known(s.get(metric)))


def _series(page: Page, *keys: str) -> dict[str, Points]:
    """(round, value) by site of one entry of the metrics, rounds without it left out."""
    series: dict[str, Points] = {}
    for site, lines in page.metrics.items():
        points = []
        for line in lines:
            value: Any = line
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if words.known(value):
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
        ("merged", "auroc"): ("Merged test set, AUROC", "Ranking quality, whatever the threshold."),
    }


def curves(page: Page, colors: Mapping[str, str]) -> list[tuple[str, str, Chart]]:
    """(title, explanation, chart) over rounds, losses last; the accuracies share their axis."""
    score = page.scores[0]
    shown = _over_rounds(score)
    series = {keys: _series(page, *keys) for keys in shown}
    ylim = _limits(v for keys, s in series.items() if keys[1] == score for p in s.values() for _, v in p)
    references = words.references(_others(page), score)
    alone = references.get("a site alone without DP", {}) if words.is_federated(page.method) else {}
    charts = []
    for keys, (title, text) in shown.items():
        if series[keys]:
            level = _mean(alone, keys[1]) if keys[0] == "merged" else None
            chart = figures.curves(
                series[keys],
                colors,
                title,
                ylim=ylim if keys[1] == score else None,
                reference=None if level is None else ("alone, no DP", level),
            )
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
    budgets = {
        s["site"]: float(s["max_epsilon"])
        for s in page.summary.get("sites", ())
        if words.known(s.get("max_epsilon"))
    }
    return figures.budget_curves(series, colors, budgets, f"ε spent ({privacy(page)['guarantee']})")


def reliability(evaluated: Sequence[Json], colors: Mapping[str, str]) -> list[tuple[str, Chart]]:
    """A diagram per site, or one for all when there are many."""
    series: dict[str, Points] = {}
    for site in evaluated:
        bins = (site.get("calibration") or {}).get("bins", ())
        points = [
            (b["confidence"], b["accuracy"])
            for b in bins
            if words.known(b.get("confidence")) and words.known(b.get("accuracy"))
        ]
        if points:
            series[site["site"]] = points
    if len(series) > MANY_SITES:
        return [("", figures.reliability(series, colors, "Reliability of all sites"))]
    return [
        (site, figures.reliability({site: points}, colors, f"Reliability {position}"))
        for position, (site, points) in enumerate(series.items(), start=1)
    ]


def pooled(evaluated: Sequence[Json]) -> list[list[int]] | None:
    """The confusion matrices of all sites' models, added up."""
    found = [np.asarray(s["confusion"]) for s in evaluated if s.get("confusion")]
    return np.sum(found, axis=0).tolist() if found else None


def heats(evaluated: Sequence[Json], score: str) -> list[dict[str, Any]]:
    """Who generalises to whom: models × test parts, for the most telling score, and AUROC where there is one."""
    names = [s["site"] for s in evaluated if s.get("parts")]
    found = []
    for metric in (score, "auroc"):
        grid = [
            [(s["parts"].get(part) or {}).get(metric) for part in names] for s in evaluated if s.get("parts")
        ]
        values = [v for row in grid for v in row if words.known(v)]
        if len(names) > 1 and values:
            low, high = min(values), max(values)
            elsewhere = [_average(v for j, v in enumerate(row) if j != i) for i, row in enumerate(grid)]
            reached = [_average(row[j] for i, row in enumerate(grid) if i != j) for j in range(len(names))]
            title = f"{words.SCORES[metric]} of models on test parts"
            found.append({
                "metric": words.SCORES[metric], "names": names, "grid": grid, "low": low, "high": high,
                "elsewhere": elsewhere, "reached": reached,
                "best": _named(max, names, elsewhere), "hardest": _named(min, names, reached),
                "chart": figures.matrix(grid, (low, high), title) if len(names) > CELLS_IN_TABLE else None,
            })  # fmt: skip
    return found


def _average(values: Iterable[Any]) -> float | None:
    found = [v for v in values if words.known(v)]
    return sum(found) / len(found) if found else None


def _named(
    choose: Callable[..., tuple[str, float]], names: Sequence[str], values: Sequence[float | None]
) -> tuple[str, float] | None:
    """The name with the highest or lowest value; None where several have it, as a tie has no winner."""
    found = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    if not found:
        return None
    chosen = choose(found, key=lambda pair: pair[1])
    return chosen if sum(value == chosen[1] for _, value in found) == 1 else None


def _total(values: Iterable[Any]) -> float | None:
    found = [v for v in values if words.known(v)]
    return sum(found) if found else None


def traffic(page: Page) -> list[dict[str, Any]]:
    """What each site sent over the whole run."""
    return [
        {
            "site": site,
            **{
                key: _total(line.get(key) for line in lines)
                for key in ("messages", "bytes", "communication_seconds", "seconds")
            },
            "rounds": len(lines),
        }
        for site, lines in page.metrics.items()
        if lines
    ]


def patches(page: Page, names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Data URIs by site and label; labels in the order of the classes."""
    limit = PATCHES_SHOWN if len(names) <= MANY_SITES else PATCHES_SHOWN // 2
    return picture_uris(page.patches, page.classes, limit)


def picture_uris(
    pictures_of: Mapping[str, Sequence[tuple[str, NDArray[np.uint8]]]], classes: Sequence[str], limit: int
) -> dict[str, dict[str, list[str]]]:
    """Data URIs by site and label, at most so many of each; labels in the order of the classes."""
    shown: dict[str, dict[str, list[str]]] = {}
    for site, samples in pictures_of.items():
        labels = dict.fromkeys([*classes, *(label for label, _ in samples)])
        chosen = {label: [p for own, p in samples if own == label][:limit] for label in labels}
        shown[site] = {label: [pictures.patch_uri(p) for p in some] for label, some in chosen.items() if some}
    return {site: by_label for site, by_label in shown.items() if by_label}
