"""Rows of a comparison: runs of one method and setting, their spread over sites, seeds and folds, and paired tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, TypeVar

from wsi_fl.learning.metrics import mean_and_sd
from wsi_fl.learning.verdict import holm, paired
from wsi_fl.report import words
from wsi_fl.report.comparison import settings_words
from wsi_fl.report.comparison_figures import Series
from wsi_fl.stages.answers.compare_baseline import BASELINE, baseline_settings, is_baseline
from wsi_fl.stages.answers.compare_runs import Run, differing
from wsi_fl.stages.answers.predictions import read_answers

_ENOUGH_SEEDS = 3
"""With fewer common seeds than this, pairs are sites."""
AnyKey = TypeVar("AnyKey")
Patient = tuple[str, str]
"""Site and name."""
_GUARANTEES = ("none", "nominal", "shared", "guaranteed")
"""From the weakest to the strongest."""


@dataclass(frozen=True)
class ComparedRow:
    """The runs of one method with the same settings, and their evaluations, in the order of seeds and folds.

    Attributes:
        settings: what sets it apart from other rows of its method.
        values: per run, {site: {metric: value or None}}; the site is whose model it is, or the one that was left out.
        right: by where it is measured, {patient: how often the models were right}; of folds alone, which test each
            patient once per seed.
    """

    method: str
    dp: bool
    settings: dict[str, Any]
    runs: list[Run]
    values: list[dict[str, dict[str, float | None]]]
    right: dict[str, dict[Patient, float]]

    @property
    def name(self) -> str:
        return f"{words.method_name(self.method)} {'with' if self.dp else 'without'} DP"

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, settings_words(self.settings))))

    def by_seed(self, metric: str) -> dict[int, list[dict[str, float]]]:
        """Per seed, a dict of the known values by site for every run."""
        found: dict[int, list[dict[str, float]]] = {}
        for run, values in zip(self.runs, self.values, strict=True):
            known = {site: v for site, row in values.items() if (v := row[metric]) is not None}
            found.setdefault(run.seed, []).append(known)
        return found


def grouped(
    runs: Sequence[Run], evaluations: Sequence[Mapping[str, Any]], on: str, first: Run
) -> list[ComparedRow]:
    """Runs grouped into rows, and an empty row for a baseline that is missing."""
    keys = differing(runs)
    rows: dict[str, ComparedRow] = {}
    for run, evaluation in sorted(zip(runs, evaluations, strict=True), key=lambda pair: pair[0].member.place):
        apart = {key: run.settings[key] for key in keys if key in run.settings}
        row = ComparedRow(run.method, run.dp, apart, [], [], {})
        row = rows.setdefault(row.label, row)
        row.runs.append(run)
        row.values.append(_measured_in(evaluation, on))
    if not any(is_alone(row, first) for row in rows.values()):
        wanted = baseline_settings(first)
        empty = ComparedRow(BASELINE, False, {key: wanted[key] for key in keys if key in wanted}, [], [], {})
        rows[empty.label] = empty
    if first.pipeline.train.folds:
        for row in rows.values():
            row.right.update({where: _by_patient(row, where) for where in ("merged", "own")})
    return list(rows.values())


def _by_patient(row: ComparedRow, where: str) -> dict[Patient, float]:
    """How often all models of a row were right about each patient, whom each seed tests in one fold."""
    said: dict[Patient, list[float]] = {}
    for run in row.runs:
        for site in run.summary["sites"]:
            for key, (value, _) in (read_answers(run.folder.site(site["site"]), where) or {}).items():
                said.setdefault((key[0], key[1]), []).append(value)
    return {patient: fmean(values) for patient, values in said.items()}


def _measured_in(evaluation: Mapping[str, Any], on: str) -> dict[str, dict[str, float | None]]:
    """The values of one run: of each site's model, or of the site that was left out the mean over all models."""
    scores = words.scores_of(evaluation)
    if on != "left_out":
        return {site["site"]: _measured(site, on, scores) for site in evaluation["sites"]}
    found = evaluation["external_set"]["left_out"]
    means = {name: _average(row[name] for row in found["rows"]) for name in scores}
    return {found["site"]: means | {f"own_{scores[0]}": means[scores[0]]}}


def is_alone(row: ComparedRow, first: Run) -> bool:
    return not row.runs or is_baseline(row.runs[0], first)


def measured(scores: Sequence[str]) -> tuple[str, ...]:
    """Return what is known of each row: the scores, and the first of them on the sites' own parts."""
    return (*scores, f"own_{scores[0]}")


def _measured(site: Mapping[str, Any], on: str, scores: Sequence[str]) -> dict[str, float | None]:
    where = site if on == "merged" else site["own"]
    return {**{name: where[name] for name in scores}, f"own_{scores[0]}": site["own"][scores[0]]}


def spread_of(row: ComparedRow, metric: str) -> dict[str, Any]:
    """Mean and standard deviation over all sites of all runs, and the number of values."""
    values: list[float | None] = [
        v for runs in row.by_seed(metric).values() for sites in runs for v in sites.values()
    ]
    return {**mean_and_sd(values), "n": len(values)}


def _average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def described(row: ComparedRow, scores: Sequence[str]) -> dict[str, Any]:
    """A row as it stands in the document."""
    summaries = [run.summary for run in row.runs]
    sites = [site for summary in summaries for site in summary["sites"]]
    guarantees = {site["guarantee"] for site in sites}
    weakest = next((g for g in _GUARANTEES if g in guarantees), "none")
    spent = [site["epsilon"] for site in sites]
    private = row.dp and weakest != "none" and bool(spent) and None not in spent
    seen = {site: None for values in row.values for site in values}
    return {
        "label": row.label,
        "method": row.method,
        "dp": row.dp,
        "settings": row.settings,
        "guarantee": weakest,
        "epsilon": max(spent) if private else None,
        "seeds": sorted({run.seed for run in row.runs}),
        "folds": sorted({run.member.fold for run in row.runs if run.member.fold is not None}),
        "left_out": sorted({run.member.left_out for run in row.runs if run.member.left_out is not None}),
        "runs": [run.folder.name for run in row.runs],
        "n_sites": max((len(summary["sites"]) for summary in summaries), default=None),
        **{metric: spread_of(row, metric) for metric in measured(scores)},
        "sites": {site: _average(v[site][scores[0]] for v in row.values if site in v) for site in seen},
        "communication": _communication(row.runs),
        "seconds_per_round": _average(summary["seconds"] / _rounds(summary) for summary in summaries),
    }


def _rounds(summary: Mapping[str, Any]) -> int:
    return max(1, *(int(site["rounds"]) for site in summary["sites"]))


def _communication(runs: Sequence[Run]) -> dict[str, float | None]:
    """Per round: messages and bytes a site sends on average, bytes of the one that sends most, seconds of the slowest.

    The busiest site is known only where the metrics of all sites lie here.
    """
    found: dict[str, list[float | None]] = {"messages": [], "bytes": [], "busiest_bytes": [], "seconds": []}
    for run in runs:
        total, rounds, n = run.summary["communication"], _rounds(run.summary), len(run.summary["sites"])
        found["messages"].append(total["messages"] / rounds / n)
        found["bytes"].append(total["bytes"] / rounds / n)
        lines = [run.folder.site(site["site"]).metrics() for site in run.summary["sites"]]
        sent = [sum(line["bytes"] for line in site) for site in lines]
        found["busiest_bytes"].append(max(sent) / rounds if all(lines) else None)
        found["seconds"].append(total["seconds"] / rounds)
    return {key: _average(values) for key, values in found.items()}


def comparisons(
    rows: Sequence[ComparedRow], reference: str, alone: str, metrics: Sequence[str], on: str
) -> list[dict[str, Any]]:
    """Every row against the baseline and against the reference, each metric a family of its own for Holm."""
    by_label = {row.label: row for row in rows}
    pairs = [(a, b) for b in dict.fromkeys((alone, reference)) for a in by_label if a != b]
    pairs = [(a, b) for a, b in pairs if (a, b) != (alone, reference)]  # the other way round is there
    tests: list[dict[str, Any]] = []
    for metric in metrics:
        family = [_test(by_label[a], by_label[b], metric, on) for a, b in pairs]
        made = [test for test in family if test is not None]
        for test, corrected in zip(made, holm([test["p"] for test in made]), strict=True):
            tests.append({**test, "p_holm": corrected})
    return tests


def _test(a: ComparedRow, b: ComparedRow, metric: str, on: str) -> dict[str, Any] | None:
    """The paired test of two rows; None without any pair.

    Pairs are seeds, or where too few seeds are common patients or folds of a cross-validation, or else sites.
    """
    ours, theirs = a.by_seed(metric), b.by_seed(metric)
    common = sorted(ours.keys() & theirs.keys())
    where = {"accuracy": on, "own_accuracy": "own"}.get(metric, "")
    if len(common) >= _ENOUGH_SEEDS:
        unit = "seed"
        by_seed = [_shared(_by_site(ours, [seed]), _by_site(theirs, [seed])) for seed in common]
        pairs = [(fmean(x for x, _ in sites), fmean(y for _, y in sites)) for sites in by_seed if sites]
    elif a.right.get(where) and b.right.get(where):
        unit = "patient"
        pairs = _shared(a.right[where], b.right[where])
    elif a.right and b.right:
        unit = "fold"
        pairs = _shared(_by_fold(a, metric), _by_fold(b, metric))
    else:
        unit = "site"
        pairs = _shared(_by_site(ours, common or list(ours)), _by_site(theirs, common or list(theirs)))
    if not pairs:
        return None
    found = asdict(paired([x for x, _ in pairs], [y for _, y in pairs]))
    return {"a": a.label, "b": b.label, "metric": metric, **found, "unit": unit}


def _by_fold(row: ComparedRow, metric: str) -> dict[str, float]:
    """Mean over sites, by seed and fold."""
    means = (_average(site[metric] for site in values.values()) for values in row.values)
    return {str(run.member): mean for run, mean in zip(row.runs, means, strict=True) if mean is not None}


def _shared(ours: Mapping[AnyKey, float], theirs: Mapping[AnyKey, float]) -> list[tuple[float, float]]:
    """The values of what both have: one may have lost a site."""
    return [(ours[key], theirs[key]) for key in ours if key in theirs]


def _by_site(values: Mapping[int, Sequence[Mapping[str, float]]], seeds: Sequence[int]) -> dict[str, float]:
    """Mean over runs of these seeds, by site."""
    runs = [run for seed in seeds for run in values[seed]]
    return {
        site: fmean(run[site] for run in runs if site in run) for site in {s: 0 for run in runs for s in run}
    }


def series_of(row: ComparedRow, on: str, score: str, *, baseline: bool) -> Series:
    """What the charts show of a row."""
    curves = []
    for run in row.runs:
        for site in run.summary["sites"]:
            lines = run.folder.site(site["site"]).metrics()
            seen = [(line["round"], (line.get(on) or {}).get(score)) for line in lines]
            curves.append([(round_, value) for round_, value in seen if value is not None])
    found = spread_of(row, score)
    sent = _communication(row.runs)
    return Series(
        label=row.name,
        settings=settings_words(row.settings),
        dp=row.dp,
        baseline=baseline,
        mean=found["mean"],
        sd=found["sd"],
        values={seed: [v for run in runs for v in run.values()] for seed, runs in row.by_seed(score).items()},
        curves=[points for points in curves if points],
        sent_bytes=sent["bytes"],
        busiest_bytes=sent["busiest_bytes"],
    )
