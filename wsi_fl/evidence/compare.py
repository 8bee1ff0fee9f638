"""`compare_methods`: methods by mean ± sd over sites and seeds, paired tests, and the benefit over local models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from wsi_fl.data.metrics import mean_and_sd, mean_of_available
from wsi_fl.evidence import benefit_figure, compare_runs, comparison_findings, comparison_page
from wsi_fl.evidence.benefit import BALANCED, Gain, compare_by_site, measure_benefit
from wsi_fl.evidence.comparison_findings import settings_words
from wsi_fl.evidence.comparison_page import COMMUNICATION, ChartRow
from wsi_fl.evidence.verdict import PairedTest, compare_pairs, holm_adjust
from wsi_fl.federation.methods import LOCAL_METHOD
from wsi_fl.learning.ensemble import LOCAL
from wsi_fl.report import formatting
from wsi_fl.report.formatting import Json
from wsi_fl.stages.evaluation.write_predictions import read_example_scores
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.stages.site.example_kind import find_example_kind
from wsi_fl.stages.training.finished_runs import FinishedRun, effective_settings
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_bytes, write_csv, write_text
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from wsi_fl.stages.evaluation.evaluate import Evaluation

_MIN_COMMON_SEEDS = 3
"""Smallest number of common seeds for tests by seed; else pairs are sites."""
_GUARANTEES = ("none", "nominal", "shared", "guaranteed")
"""Guarantee levels, from the weakest to the strongest."""


def compare_methods(
    study: Study, runs: Sequence[str], *, baseline: bool = True, watcher: Watcher | None = None
) -> Json:
    """Compare finished runs on the same stores; return the document and write page, figure and table.

    A row is a method with or without DP and the settings in which the runs differ; runs with another seed, fold or
    left-out site are repetitions of a row. The baseline row, local models without DP, is always included.

    Args:
        runs: folders, names, numbers, ranges (3-8) or patterns; the row of the first is the reference.
        baseline: whether missing runs of the baseline are trained.

    Raises:
        WsiFlError: when a run is not finished, or was trained on other patches than the first.
    """
    watcher = watcher or SilentProgress()
    selected = compare_runs.resolve_runs(study, runs)
    first = selected[0]
    all_runs, notes = compare_runs.add_baseline(study, selected, train_missing=baseline, watcher=watcher)
    evaluations = [_load_evaluation(study, run, watcher) for run in all_runs]
    has_merged = all(evaluation["merged"] is not None for evaluation in evaluations)
    test_set = "left_out" if first.repetition.left_out is not None else "merged" if has_merged else "own"
    if test_set == "own":
        notes.append("Not every run has a merged test set: each model is evaluated on its own site's test part.")
        notes += filter(None, [formatting.describe_part_classes(evaluations[0]["sites"])])
    if lost := sorted({site for run in all_runs for site in run.summary["lost"]}):
        notes.append(f"Dropped out during training in some run: {', '.join(lost)}.")
    notes += _list_local_answers(all_runs, evaluations)
    rows = _group_runs(all_runs, evaluations, test_set, first)
    _require_one_store(evaluations)
    scores = tuple(evaluations[0]["scores"])
    benefit, gains = _measure_benefit(rows, first, test_set)
    metric = "macro_accuracy" if benefit and benefit["measure"] == BALANCED else scores[0]
    rows.sort(key=lambda row: inf if (mean := row.summarize_metric(metric)["mean"]) is None else -mean)
    baseline_label = next(row.label for row in rows if row.is_local_baseline(first))
    reference = next(row.label for row in rows if first in row.runs)
    table = [row.build_document(scores) for row in rows]
    measured = (*scores, *([f"own_{scores[0]}"] if test_set == "merged" else ()))
    tests = _test_pairs(rows, reference, baseline_label, measured, test_set)
    example_word = find_example_kind(first.pipeline).plural
    findings = comparison_findings.list_comparison_findings(table, tests, baseline_label, example_word, metric, gains)
    names = " ".join(sorted(run.folder.name for run in selected))  # the same runs make the same folder
    methods, digest = "-".join(dict.fromkeys(run.method for run in selected)), hashlib.sha256(names.encode())
    folder = study.root / "comparisons" / f"{methods}-{digest.hexdigest()[:8]}"
    document = {
        "runs": [study.relative_path(run.folder.path) for run in all_runs],
        "benefit": benefit and benefit | {"figure": study.relative_path(folder / "benefit.png")},
        "on": test_set,
        "scores": list(scores),
        "examples": example_word,
        "rows": table,
        "paired": tests,
        "baseline": baseline_label,
        "reference": reference,
        "findings": [finding._asdict() for finding in findings],
        "notes": [*notes, *comparison_findings.list_cautions(table, tests, classes="accuracy" in scores)],
        "page": study.relative_path(folder / "index.html"),
        "figure": study.relative_path(folder / "figure.png"),
        "table": study.relative_path(folder / "table.csv"),
    }
    sites = list(dict.fromkeys(site["site"] for run in selected for site in run.summary["sites"]))
    _write_files(folder, document, rows, sites)
    return document


def _list_local_answers(runs: Sequence[FinishedRun], evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note for each federated method of which some scores are those of local models that answer."""
    is_local: dict[str, list[bool]] = {}
    for run, evaluation in zip(runs, evaluations, strict=True):
        if formatting.is_federated(run.method):
            answers = is_local.setdefault(formatting.method_name(run.method), [])
            answers += [site["model"] == LOCAL for site in evaluation["sites"]]
    return [
        f"{name}: {sum(answers)} of {len(answers)} prediction models are local models, trained alone; train with "
        "predict.model=private to compare the method's own."
        for name, answers in is_local.items()
        if any(answers)
    ]


def _write_files(folder: Path, document: Mapping[str, Any], rows: Sequence[_MethodRow], sites: Sequence[str]) -> None:
    """Write page, figures and table of a comparison."""
    scores = document["scores"]
    series = [
        row.build_series(described, document["on"], scores[0], baseline=row.label == document["baseline"])
        for row, described in zip(rows, document["rows"], strict=True)
    ]
    if document["benefit"]:
        write_bytes(folder / "benefit.png", benefit_figure.render_benefit_png(document["benefit"]))
    created = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    page = comparison_page.render_comparison_page(document, series, created=created, sites=sites)
    write_text(folder / "index.html", page)
    write_bytes(folder / "figure.png", comparison_page.render_comparison_png(series, formatting.SCORES[scores[0]]))
    write_csv(folder / "table.csv", comparison_page.iterate_table_rows(document["rows"], (*scores, f"own_{scores[0]}")))


def _require_one_store(evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Refuse runs with different stores of the same left-out site."""
    stores: dict[str, str] = {}
    for evaluation in evaluations:
        left_out = (evaluation.get("external_set") or {}).get("left_out")
        if left_out and stores.setdefault(left_out["site"], left_out["store"]) != left_out["store"]:
            raise WsiFlError(
                f"{evaluation['run']} was tested on other slides of {left_out['site']} than the others; "
                "evaluate all runs again"
            )


def _load_evaluation(study: Study, run: FinishedRun, watcher: Watcher) -> Evaluation:
    """Return the run's evaluation, computed now if it is missing, older than the run, or of another `predict.model`."""
    document, ensemble = run.folder.read("evaluation"), run.pipeline.predict.model
    evaluation_path, summary_path = (run.folder.path / f"{name}.json" for name in ("evaluation", "summary"))
    current = document and evaluation_path.stat().st_mtime_ns >= summary_path.stat().st_mtime_ns
    if document and current and document["model"] == ensemble:
        return cast("Evaluation", document)
    from wsi_fl.stages.evaluation.evaluate import evaluate  # imports PyTorch

    watcher.print_message(f"  {study.relative_path(run.folder.path)} is not evaluated yet; doing it now")
    return evaluate(study, str(run.folder.path), watcher=watcher)


@dataclass(frozen=True)
class _MethodRow:
    """The runs of one method with the same settings, in the order of seeds and folds.

    Attributes:
        settings: distinguish the row from others of its method.
        values: a line per run and site of the model, or left-out site, with `seed`, `repetition`, `site` and metrics.
        patient_scores: by test set, the mean accuracy of the models by (site, patient); for folds only, with each
            patient in one test part per seed.
    """

    method: str
    dp: bool
    settings: Mapping[str, Any]
    runs: Sequence[FinishedRun]
    values: pd.DataFrame
    patient_scores: Mapping[str, pd.Series]

    @property
    def label(self) -> str:
        name = f"{formatting.method_name(self.method)} {'with' if self.dp else 'without'} DP"
        return ", ".join(filter(None, (name, settings_words(self.settings))))

    def is_local_baseline(self, first: FinishedRun) -> bool:
        """Return whether the row is the local baseline with the settings of the first run."""
        return not self.runs or compare_runs.is_baseline(self.runs[0], first)

    def summarize_metric(self, metric: str) -> dict[str, float | None]:
        """Return mean and standard deviation over all sites of all runs, and the number of values."""
        values = self.values[metric].dropna()
        return {**mean_and_sd([*values]), "n": len(values)}

    def build_document(self, scores: Sequence[str]) -> Json:
        """Return the row of the ``--json`` document."""
        summaries = [run.summary for run in self.runs]
        sites = [site for summary in summaries for site in summary["sites"]]
        guarantees = {site["guarantee"] for site in sites}
        weakest = next((guarantee for guarantee in _GUARANTEES if guarantee in guarantees), "none")
        epsilons = [site["epsilon"] for site in sites]
        private = self.dp and weakest != "none" and bool(epsilons) and None not in epsilons
        members = [run.repetition for run in self.runs]
        durations = [summary["seconds"] / _count_rounds(summary) for summary in summaries]
        site_means = self.values.groupby("site", sort=False)[scores[0]].mean()
        return {
            "label": self.label,
            "method": self.method,
            "dp": self.dp,
            "settings": self.settings,
            "guarantee": weakest,
            "epsilon": max(epsilons) if private else None,
            "unit": " or ".join(sorted({site["unit"] for site in sites})),
            "seeds": sorted({run.seed for run in self.runs}),
            "folds": sorted({member.fold for member in members if member.fold is not None}),
            "left_out": sorted({member.left_out for member in members if member.left_out is not None}),
            "runs": [run.folder.name for run in self.runs],
            "n_sites": max((len(summary["sites"]) for summary in summaries), default=None),
            **{metric: self.summarize_metric(metric) for metric in (*scores, f"own_{scores[0]}")},
            "sites": {site: None if np.isnan(mean) else mean for site, mean in site_means.items()},
            "communication": self._mean_communication(),
            "seconds_per_round": mean_of_available(durations),
        }

    def _mean_communication(self) -> dict[str, float | None]:
        """Return per round the mean messages and bytes of a site, the bytes of the busiest if the metrics of all sites
        are here, and the seconds of the slowest.
        """
        rows = []
        for run in self.runs:
            total, rounds, lines = run.summary["communication"], _count_rounds(run.summary), _read_metrics(run)
            row = {kind: total[kind] / rounds / len(run.summary["sites"]) for kind in ("messages", "bytes")}
            sent = [sum(line["bytes"] for line in site) for site in lines]
            rows.append(row | {"busiest_bytes": max(sent) / rounds if all(lines) else None})
            rows[-1]["seconds"] = total["seconds"] / rounds
        return {kind: mean_of_available(row[kind] for row in rows) for kind in COMMUNICATION}

    def build_series(self, row: Json, on: str, score: str, *, baseline: bool) -> ChartRow:
        """Return the values of its row of the document for charts."""
        curves = [
            [(line["round"], value) for line in lines if (value := (line.get(on) or {}).get(score)) is not None]
            for run in self.runs
            for lines in _read_metrics(run)
        ]
        values = {seed: [*values] for seed, values in self.values.dropna(subset=score).groupby("seed")[score]}
        return ChartRow(row, baseline, row[score], values, [points for points in curves if points])


def _read_metrics(run: FinishedRun) -> list[Sequence[Json]]:
    """Return the lines of `metrics.jsonl` of each site."""
    return [run.folder.site_folder(site["site"]).read_metrics() for site in run.summary["sites"]]


def _count_rounds(summary: Mapping[str, Any]) -> int:
    return max(1, *(int(site["rounds"]) for site in summary["sites"]))


def _group_runs(
    runs: Sequence[FinishedRun], evaluations: Sequence[Mapping[str, Any]], on: str, first: FinishedRun
) -> list[_MethodRow]:
    """Return runs grouped into rows, with an empty row for a missing baseline."""
    keys = compare_runs.find_differing_settings(runs)
    groups: dict[tuple[str, bool, str], list[tuple[FinishedRun, Mapping[str, Any]]]] = {}
    for run, evaluation in sorted(zip(runs, evaluations, strict=True), key=lambda pair: pair[0].repetition.sort_key):
        settings = {key: run.settings[key] for key in keys if key in run.settings}
        groups.setdefault((run.method, run.dp, settings_words(settings)), []).append((run, evaluation))
    rows, test_sets = [], ("merged", "own") if first.pipeline.train.folds else ()
    for (method, dp, _), members in groups.items():
        row_runs = [run for run, _ in members]
        settings = {key: row_runs[0].settings[key] for key in keys if key in row_runs[0].settings}
        values = pd.DataFrame([line for member in members for line in _list_values(*member, on)])
        patient_scores = {name: _score_by_patient(row_runs, name) for name in test_sets}
        rows.append(_MethodRow(method, dp, settings, row_runs, values, patient_scores))
    if not any(row.is_local_baseline(first) for row in rows):
        local_settings = effective_settings(LOCAL_METHOD, compare_runs.baseline_pipeline(first.pipeline))
        settings = {key: local_settings[key] for key in keys if key in local_settings}
        empty = _MethodRow(LOCAL_METHOD, False, settings, (), rows[0].values[:0], {})
        for row in rows:
            if row.label == empty.label:  # local models with other settings
                other = row.runs[0].settings
                settings |= {key: value for key, value in local_settings.items() if other.get(key) != value}
        rows.append(empty)
    return rows


def _score_by_patient(runs: Sequence[FinishedRun], test_set: str) -> pd.Series:
    """Return the mean accuracy of a row's models for each patient, tested in one fold per seed."""
    scores = [
        ("\n".join(key[:2]), value)
        for run in runs
        for site in run.summary["sites"]
        for key, (value, _) in (read_example_scores(run.folder.site_folder(site["site"]), test_set) or {}).items()
    ]
    return pd.DataFrame(scores, columns=["patient", "value"]).groupby("patient", sort=False)["value"].mean()


def _list_values(run: FinishedRun, evaluation: Mapping[str, Any], on: str) -> Iterator[Json]:
    """Yield the metrics of a run: of each site's model, or the mean over models on the left-out site."""
    scores, member = evaluation["scores"], {"seed": run.seed, "repetition": str(run.repetition)}
    local_key = f"own_{scores[0]}"
    if on == "left_out":
        left_out = evaluation["external_set"]["left_out"]
        means = {name: mean_of_available([row[name] for row in left_out["rows"]]) for name in scores}
        yield member | {"site": left_out["site"]} | means | {local_key: means[scores[0]]}
        return
    for site in evaluation["sites"]:
        row = site if on == "merged" else site["own"]
        metrics = {name: row[name] for name in scores}
        yield member | {"site": site["site"]} | metrics | {local_key: site["own"][scores[0]]}


class _RowTest(PairedTest):
    """A paired test of two rows; `p_holm` is corrected for the number of tests of the metric."""

    a: str
    b: str
    metric: str
    unit: str
    p_holm: float | None


def _test_pairs(
    rows: Sequence[_MethodRow], reference: str, baseline_label: str, metrics: Sequence[str], on: str
) -> list[_RowTest]:
    """Test every row against the baseline and the reference, with Holm's correction by metric."""
    by_label = {row.label: row for row in rows}
    pairs = [(a, b) for b in dict.fromkeys((baseline_label, reference)) for a in by_label if a != b]
    pairs = [(a, b) for a, b in pairs if (a, b) != (baseline_label, reference)]  # the reverse pair is included
    tests: list[_RowTest] = []
    for metric in metrics:
        family = [test for a, b in pairs if (test := _test_pair(by_label[a], by_label[b], metric, on))]
        for test, p in zip(family, holm_adjust([test["p"] for test in family]), strict=True):
            tests.append({**test, "p_holm": p})
    return tests


def _test_pair(a: _MethodRow, b: _MethodRow, metric: str, on: str) -> _RowTest | None:
    """Return the paired test of two rows by seed, patient, fold or site; None without any pair.

    A pair uses only sites of both rows, since one may have dropped out.
    """
    common = sorted({run.seed for run in a.runs} & {run.seed for run in b.runs})
    test_set = {"accuracy": on, "own_accuracy": "own"}.get(metric, "")

    def join_means(*by: str, seeds: Sequence[int] = ()) -> pd.DataFrame:
        """Return the means of both rows by group, of common seeds only where given; groups of both rows only."""
        frames = [row.values[row.values["seed"].isin(seeds)] if seeds else row.values for row in (a, b)]
        return pd.concat([frame.groupby([*by], sort=False)[metric].mean() for frame in frames], axis=1).dropna()

    if len(common) >= _MIN_COMMON_SEEDS:
        unit, pairs = "seed", join_means("seed", "site", seeds=common).groupby("seed").mean()
    elif test_set in a.patient_scores and test_set in b.patient_scores:
        scores = [row.patient_scores[test_set] for row in (a, b)]
        unit, pairs = "patient", pd.concat(scores, axis=1).dropna()
    elif a.patient_scores and b.patient_scores:
        unit, pairs = "fold", join_means("repetition")
    else:
        unit, pairs = "site", join_means("site", seeds=common)
    if pairs.empty:
        return None
    result = compare_pairs(*pairs.to_numpy(float).T)
    return {"a": a.label, "b": b.label, "metric": metric, **result, "unit": unit, "p_holm": None}


def _measure_benefit(
    rows: Sequence[_MethodRow], first: FinishedRun, on: str
) -> tuple[dict[str, object] | None, dict[str, Gain]]:
    """Return the benefit of federation: each site's score with three models, and the gain over all sites by federated
    row.

    None and {} without a federated method, or with a left-out site. `local` is the baseline of local models without DP,
    `federated` the row of the first run or the first such row, `pooled` a model of all data, preferably without DP.
    """
    rows_with_runs = [row for row in rows if row.runs]
    local_rows = [row for row in rows_with_runs if row.is_local_baseline(first)]
    federated = [row for row in rows_with_runs if formatting.is_federated(row.method)]
    pooled = sorted((row for row in rows_with_runs if formatting.is_pooled(row.method)), key=lambda row: row.dp)
    if not local_rows or not federated or on == "left_out":
        return None, {}
    federated_row = min(federated, key=lambda row: first not in row.runs)
    references = {"local": local_rows[0]} | ({"pooled": pooled[0]} if pooled else {})
    reference_runs = {kind: row.runs for kind, row in references.items()}
    gains = {row.label: measure_benefit(reference_runs | {"federated": row.runs}, on) for row in federated}
    measure, by_site = compare_by_site(reference_runs | {"federated": federated_row.runs}, on)
    sites = []
    for name, gain in by_site.items():
        costs = [site for run in federated_row.runs for site in run.summary["sites"] if site["site"] == name]
        epsilon = max((cost["epsilon"] for cost in costs if cost["epsilon"] is not None), default=None)
        sites.append({"site": name, **gain, "epsilon": epsilon, "guarantee": costs[0]["guarantee"]})
    return {
        "local": local_rows[0].label,
        "federated": federated_row.label,
        "pooled": pooled[0].label if pooled else None,
        "on": on,
        "measure": measure,
        "sites": sites,
        "all": gains[federated_row.label],
    }, gains


def render_comparison_lines(document: Json) -> Lines:
    """Yield a row per method, then findings and notes."""
    names = [formatting.SHORT_SCORES.get(name, formatting.SCORES[name].lower()) for name in document["scores"]]
    rows = []
    for row in document["rows"]:
        cost = f"{row['epsilon'] or 0:.1f} {row['guarantee']} per {row['unit']}"
        epsilon_text = formatting.DASH if row["epsilon"] is None else cost
        numbers = (formatting.format_spread(row[metric], 2) for metric in document["scores"])
        parts = len(row["folds"]) or len(row["left_out"])
        repeats = f"{len(row['seeds'])}" + (f" × {parts}" if parts else "")
        sent = formatting.format_size(row["communication"]["bytes"])
        rows.append([row["label"], repeats, *numbers, epsilon_text, sent])
    repeats_text = f"mean ± sd over {comparison_findings.repetition_words(document['rows'])}"
    title = f"models {comparison_findings.TEST_SET_WORDS[document['on']]}, {repeats_text}"
    yield TextTable(title, ["method", "seeds", *names, "ε", "sent"], rows)
    if document["benefit"]:
        several = sum(formatting.is_federated(row["method"]) for row in document["rows"]) > 1
        method_note = f" ({document['benefit']['federated']})" if several else ""
        for name, row in benefit_figure.list_benefit_rows(document["benefit"]):
            gain, verdict = benefit_figure.gain_words(row), benefit_figure.verdict_words(row, name)
            yield TextLine(f"  {name}: {gain}" + (f" by federation{method_note}; {verdict}" if verdict else ""))
    yield from (TextLine(finding["text"]) for finding in document["findings"])
    yield from (TextLine(note, "dim") for note in document["notes"])
    yield TextLine(document["page"])
