"""`compare_methods`: methods by mean ± sd over sites and seeds, paired tests, and the benefit over local models."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from wsi_fl.data.metrics import mean_and_sd, mean_of_available
from wsi_fl.evidence import benefit_figure as worth_figure
from wsi_fl.evidence import comparison_page
from wsi_fl.evidence.benefit import BALANCED, Gain, compare_by_site, compare_over_all
from wsi_fl.evidence.compare_runs import (
    add_baseline,
    baseline_pipeline,
    find_differing_settings,
    is_baseline,
    resolve_runs,
)
from wsi_fl.evidence.comparison_page import ChartRow, settings_words
from wsi_fl.evidence.verdict import PairedTest, compare_pairs, holm_adjust
from wsi_fl.federation.methods import LOCAL_METHOD
from wsi_fl.report import formatting
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
) -> dict[str, Any]:
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
    selected = resolve_runs(study, runs)
    first = selected[0]
    all_runs, notes = add_baseline(study, selected, train_missing=baseline, watcher=watcher)
    evaluations = [_load_evaluation(study, run, watcher) for run in all_runs]
    test_set = "merged" if all(e["merged"] is not None for e in evaluations) else "own"
    if first.repetition.left_out is not None:
        test_set = "left_out"
    if test_set == "own":
        note = "each model is evaluated on its own site's test part"
        notes.append(f"Not every run has a merged test set: {note}.")
        notes += filter(None, [formatting.describe_part_classes(evaluations[0]["sites"])])
    if lost := sorted({site for run in all_runs for site in run.summary["lost"]}):
        notes.append(f"Dropped out during training in some run: {', '.join(lost)}.")
    rows = _group_runs(all_runs, evaluations, test_set, first)
    _require_one_store(evaluations)
    scores = tuple(evaluations[0]["scores"])
    benefit, gains = _measure_benefit(rows, first, test_set)
    metric = "macro_accuracy" if benefit and benefit["measure"] == BALANCED else scores[0]
    rows.sort(key=lambda row: inf if (mean := row.summarize_metric(metric)["mean"]) is None else -mean)
    baseline_label = next(row.label for row in rows if row.is_local_baseline(first))
    reference = next(row.label for row in rows if first in row.runs)
    table = [row.build_document(scores) for row in rows]
    measured = (*scores, f"own_{scores[0]}")
    tests = _test_pairs(rows, reference, baseline_label, measured if test_set == "merged" else scores, test_set)
    example_word = find_example_kind(first.pipeline).plural
    findings = comparison_page.list_comparison_findings(table, tests, baseline_label, example_word, metric, gains)
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
        "notes": [*notes, *comparison_page.list_cautions(table, tests, classes="accuracy" in scores)],
        "page": study.relative_path(folder / "index.html"),
        "figure": study.relative_path(folder / "figure.png"),
        "table": study.relative_path(folder / "table.csv"),
    }
    if benefit:
        write_bytes(folder / "benefit.png", worth_figure.render_benefit_png(benefit))
    series = [row.build_series(test_set, scores[0], baseline=row.label == baseline_label) for row in rows]
    created_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    sites = list(dict.fromkeys(site["site"] for run in selected for site in run.summary["sites"]))
    write_text(
        folder / "index.html", comparison_page.render_comparison_page(document, series, created=created_at, sites=sites)
    )
    write_bytes(folder / "figure.png", comparison_page.render_comparison_png(series, formatting.SCORES[scores[0]]))
    write_csv(folder / "table.csv", _iterate_table_rows(table, measured))
    return document


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
    document, ensemble = run.folder.read_evaluation(), run.pipeline.predict.model
    evaluation_path, summary_path = (run.folder.path / f"{name}.json" for name in ("evaluation", "summary"))
    current = document and evaluation_path.stat().st_mtime_ns >= summary_path.stat().st_mtime_ns
    if document and current and document["model"] == ensemble:
        return cast("Evaluation", document)
    from wsi_fl.stages.evaluation.evaluate import evaluate  # imports PyTorch

    watcher.print_message(f"  {study.relative_path(run.folder.path)} is not evaluated yet; doing it now")
    return evaluate(study, str(run.folder.path), watcher=watcher)


@dataclass(frozen=True)
class _MethodRow:
    """The runs of one method with the same settings, and their evaluations, in the order of seeds and folds.

    Attributes:
        settings: distinguish the row from others of its method.
        values: per run, {site: {metric: value or None}} by the model's site, or by the left-out site.
        patient_scores: by test set, {(site, patient): mean accuracy of the models}; for folds only, with each patient
            in one test part per seed.
    """

    method: str
    dp: bool
    settings: dict[str, Any]
    runs: list[FinishedRun] = field(default_factory=list)
    values: list[dict[str, dict[str, float | None]]] = field(default_factory=list)
    patient_scores: dict[str, dict[Any, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{formatting.method_name(self.method)} {'with' if self.dp else 'without'} DP"

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, settings_words(self.settings))))

    def is_local_baseline(self, first: FinishedRun) -> bool:
        """Return whether the row is the local baseline with the settings of the first run."""
        return not self.runs or is_baseline(self.runs[0], first)

    def group_values(
        self, key: Callable[[FinishedRun, str], Any], metric: str, seeds: Iterable[int] | None = None
    ) -> dict[Any, list[float]]:
        """Return the known values of a metric, grouped by a key of run and site; of runs with these seeds, or of
        all."""
        groups: dict[Any, list[float]] = {}
        for run, values in zip(self.runs, self.values, strict=True):
            for site, scores in values.items():
                if (value := scores[metric]) is not None and (seeds is None or run.seed in seeds):
                    groups.setdefault(key(run, site), []).append(value)
        return groups

    def summarize_metric(self, metric: str) -> dict[str, float | None]:
        """Return mean and standard deviation over all sites of all runs, and the number of values."""
        values = self.group_values(lambda run, site: None, metric).get(None, [])
        return {**mean_and_sd([*values]), "n": len(values)}

    def build_document(self, scores: Sequence[str]) -> dict[str, Any]:
        """Return the row of the ``--json`` document."""
        summaries = [run.summary for run in self.runs]
        sites = [site for summary in summaries for site in summary["sites"]]
        guarantees = {site["guarantee"] for site in sites}
        weakest = next((guarantee for guarantee in _GUARANTEES if guarantee in guarantees), "none")
        epsilons = [site["epsilon"] for site in sites]
        private = self.dp and weakest != "none" and bool(epsilons) and None not in epsilons
        members = [run.repetition for run in self.runs]
        site_names = {site: None for values in self.values for site in values}
        site_values = self.group_values(lambda run, site: site, scores[0])
        return {
            "label": self.label,
            "method": self.method,
            "dp": self.dp,
            "settings": self.settings,
            "guarantee": weakest,
            "epsilon": max(epsilons) if private else None,
            "seeds": sorted({run.seed for run in self.runs}),
            "folds": sorted({member.fold for member in members if member.fold is not None}),
            "left_out": sorted({member.left_out for member in members if member.left_out is not None}),
            "runs": [run.folder.name for run in self.runs],
            "n_sites": max((len(summary["sites"]) for summary in summaries), default=None),
            **{metric: self.summarize_metric(metric) for metric in (*scores, f"own_{scores[0]}")},
            "sites": {site: fmean(site_values[site]) if site in site_values else None for site in site_names},
            "communication": self.mean_communication(),
            "seconds_per_round": mean_of_available(
                [summary["seconds"] / _count_rounds(summary) for summary in summaries]
            ),
        }

    def mean_communication(self) -> dict[str, float | None]:
        """Return per round the mean messages and bytes of a site, the bytes of the busiest, and the seconds of the
        slowest.

        The busiest site is known only where the metrics of all sites are here.
        """
        kinds = ("messages", "bytes", "busiest_bytes", "seconds")
        values: dict[str, list[float | None]] = {kind: [] for kind in kinds}
        for run in self.runs:
            total, rounds, n_sites = (
                run.summary["communication"],
                _count_rounds(run.summary),
                len(run.summary["sites"]),
            )
            values["messages"].append(total["messages"] / rounds / n_sites)
            values["bytes"].append(total["bytes"] / rounds / n_sites)
            lines = [run.folder.site_folder(site["site"]).read_metrics() for site in run.summary["sites"]]
            sent = [sum(line["bytes"] for line in site) for site in lines]
            values["busiest_bytes"].append(max(sent) / rounds if all(lines) else None)
            values["seconds"].append(total["seconds"] / rounds)
        return {key: mean_of_available(run_values) for key, run_values in values.items()}

    def build_series(self, on: str, score: str, *, baseline: bool) -> ChartRow:
        """Return the row's values for charts."""
        curves = []
        for run in self.runs:
            for site in run.summary["sites"]:
                lines = run.folder.site_folder(site["site"]).read_metrics()
                points = [(line["round"], (line.get(on) or {}).get(score)) for line in lines]
                curves.append([(round_, value) for round_, value in points if value is not None])
        summary, sent = self.summarize_metric(score), self.mean_communication()
        return ChartRow(
            label=self.name,
            settings=settings_words(self.settings),
            dp=self.dp,
            baseline=baseline,
            mean=summary["mean"],
            sd=summary["sd"],
            values=self.group_values(lambda run, site: run.seed, score),
            curves=[points for points in curves if points],
            sent_bytes=sent["bytes"],
            busiest_bytes=sent["busiest_bytes"],
        )


def _count_rounds(summary: Mapping[str, Any]) -> int:
    return max(1, *(int(site["rounds"]) for site in summary["sites"]))


def _group_runs(
    runs: Sequence[FinishedRun], evaluations: Sequence[Mapping[str, Any]], on: str, first: FinishedRun
) -> list[_MethodRow]:
    """Return runs grouped into rows, with an empty row for a missing baseline."""
    keys = find_differing_settings(runs)
    rows: dict[str, _MethodRow] = {}
    for run, evaluation in sorted(zip(runs, evaluations, strict=True), key=lambda pair: pair[0].repetition.sort_key):
        row = _MethodRow(run.method, run.dp, {key: run.settings[key] for key in keys if key in run.settings})
        row = rows.setdefault(row.label, row)
        row.runs.append(run)
        row.values.append(_site_values(evaluation, on))
    if not any(row.is_local_baseline(first) for row in rows.values()):
        local_settings = effective_settings(LOCAL_METHOD, baseline_pipeline(first.pipeline))
        empty = _MethodRow(LOCAL_METHOD, False, {key: local_settings[key] for key in keys if key in local_settings})
        if other_row := rows.get(empty.label):  # local models with other settings
            other_settings = other_row.runs[0].settings
            empty.settings.update(
                {key: value for key, value in local_settings.items() if other_settings.get(key) != value}
            )
        rows[empty.label] = empty
    if first.pipeline.train.folds:
        for row in rows.values():
            row.patient_scores.update({test_set: _score_by_patient(row, test_set) for test_set in ("merged", "own")})
    return list(rows.values())


def _score_by_patient(row: _MethodRow, test_set: str) -> dict[Any, float]:
    """Return the mean accuracy of a row's models for each patient, tested in one fold per seed."""
    values: dict[Any, list[float]] = {}
    for run in row.runs:
        for site in run.summary["sites"]:
            for key, (value, _) in (read_example_scores(run.folder.site_folder(site["site"]), test_set) or {}).items():
                values.setdefault(key[:2], []).append(value)
    return {patient: fmean(patient_values) for patient, patient_values in values.items()}


def _site_values(evaluation: Mapping[str, Any], on: str) -> dict[str, dict[str, float | None]]:
    """Return the values of a run: of each site's model, or the mean over models on the left-out site."""
    scores = evaluation["scores"]
    local_key = f"own_{scores[0]}"
    if on == "left_out":
        left_out = evaluation["external_set"]["left_out"]
        means = {name: mean_of_available([row[name] for row in left_out["rows"]]) for name in scores}
        return {left_out["site"]: means | {local_key: means[scores[0]]}}
    scored_rows = {site["site"]: site if on == "merged" else site["own"] for site in evaluation["sites"]}
    return {
        site["site"]: {name: scored_rows[site["site"]][name] for name in scores} | {local_key: site["own"][scores[0]]}
        for site in evaluation["sites"]
    }


class _RowTest(PairedTest):
    """A paired test of two rows."""

    a: str
    b: str
    metric: str
    unit: str


class _CorrectedTest(_RowTest):
    p_holm: float | None


def _test_pairs(
    rows: Sequence[_MethodRow], reference: str, baseline_label: str, metrics: Sequence[str], on: str
) -> list[_CorrectedTest]:
    """Test every row against the baseline and the reference, with Holm's correction by metric."""
    by_label = {row.label: row for row in rows}
    pairs = [(a, b) for b in dict.fromkeys((baseline_label, reference)) for a in by_label if a != b]
    pairs = [(a, b) for a, b in pairs if (a, b) != (baseline_label, reference)]  # the reverse pair is included
    tests: list[_CorrectedTest] = []
    for metric in metrics:
        family = [_test_pair(by_label[a], by_label[b], metric, on) for a, b in pairs]
        found_tests = [test for test in family if test is not None]
        for test, corrected in zip(found_tests, holm_adjust([test["p"] for test in found_tests]), strict=True):
            tests.append({**test, "p_holm": corrected})
    return tests


def _test_pair(a: _MethodRow, b: _MethodRow, metric: str, on: str) -> _RowTest | None:
    """Return the paired test of two rows; None without any pair.

    Pairs are seeds; with too few common seeds patients or folds of a cross-validation, else sites. A pair uses only
    sites of both rows, since one may have dropped out.
    """
    common = sorted({run.seed for run in a.runs} & {run.seed for run in b.runs})
    test_set = {"accuracy": on, "own_accuracy": "own"}.get(metric, "")

    def mean_values(
        key: Callable[[FinishedRun, str], Any], seeds: Sequence[int] | None = None
    ) -> list[dict[Any, float]]:
        values = [row.group_values(key, metric, seeds) for row in (a, b)]
        return [{group: fmean(values) for group, values in groups.items()} for groups in values]

    if len(common) >= _MIN_COMMON_SEEDS:
        unit, sides = "seed", mean_values(lambda run, site: (run.seed, site))
        keys_by_seed = [[key for key in sides[0] if key[0] == seed and key in sides[1]] for seed in common]
        pairs = [tuple(fmean(side[key] for key in keys) for side in sides) for keys in keys_by_seed if keys]
    else:
        if a.patient_scores.get(test_set) and b.patient_scores.get(test_set):
            unit, sides = "patient", [a.patient_scores[test_set], b.patient_scores[test_set]]
        elif a.patient_scores and b.patient_scores:
            unit, sides = "fold", mean_values(lambda run, site: str(run.repetition))
        else:
            unit, sides = "site", mean_values(lambda run, site: site, common or None)
        pairs = [(value, sides[1][key]) for key, value in sides[0].items() if key in sides[1]]
    if not pairs:
        return None
    result = compare_pairs([x for x, _ in pairs], [y for _, y in pairs])
    test: _RowTest = {"a": a.label, "b": b.label, "metric": metric, **result, "unit": unit}
    return test


def _measure_benefit(
    rows: Sequence[_MethodRow], first: FinishedRun, on: str
) -> tuple[dict[str, Any] | None, dict[str, Gain]]:
    """Return the benefit of federation: each site's score with three models, and the gain over all sites by federated
    row.

    None and {} without a federated method, or with a left-out site. *Alone* is the baseline of local models without DP,
    *joined* the first federated row, *pooled* a model of all data, preferably without DP. Values are means over seeds;
    the gain is over common seeds, with an interval over seeds and patients. The headroom is the share of the gap to
    pooled data that is closed; `verdict` is the recommendation for the hospital.
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
    gains = {row.label: compare_over_all(reference_runs | {"federated": row.runs}, on) for row in federated}
    measure, by_site = compare_by_site(reference_runs | {"federated": federated_row.runs}, on)
    return {
        "local": local_rows[0].label,
        "federated": federated_row.label,
        "pooled": pooled[0].label if pooled else None,
        "on": on,
        "measure": measure,
        "sites": [
            {"site": name, **site_gain, **_largest_epsilon(federated_row, name)} for name, site_gain in by_site.items()
        ],
        "all": gains[federated_row.label],
    }, gains


def _largest_epsilon(row: _MethodRow, name: str) -> dict[str, float | str | None]:
    """Return the largest ε of a site over the runs, and its guarantee level."""
    site_rows = [site for run in row.runs for site in run.summary["sites"] if site["site"] == name]
    epsilons = [site["epsilon"] for site in site_rows if site["epsilon"] is not None]
    return {"epsilon": max(epsilons, default=None), "guarantee": site_rows[0]["guarantee"] if site_rows else "none"}


def _iterate_table_rows(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the headings of table.csv, then a row per method; unknown values are empty."""
    plain_columns = ("label", "method", "dp", "guarantee", "epsilon", "n_sites")
    spreads = [(metric, part) for metric in metrics for part in ("mean", "sd", "n")]
    communication_columns = ("messages", "bytes", "busiest_bytes", "seconds")
    per_round = [*(f"{key}_per_round" for key in communication_columns), "seconds_per_round_in_all"]
    yield [*plain_columns, "seeds", *map("_".join, spreads), *per_round]
    for row in rows:
        cells = [row[key] for key in plain_columns] + [" ".join(map(str, row["seeds"]))]
        cells += [row[metric][part] for metric, part in spreads] + [
            row["communication"][key] for key in communication_columns
        ]
        yield [*cells, row["seconds_per_round"]]


def render_comparison_lines(document: dict[str, Any]) -> Lines:
    """Yield a row per method, then findings and notes."""
    names = [formatting.SHORT_SCORES.get(name, formatting.SCORES[name].lower()) for name in document["scores"]]
    rows = []
    for row in document["rows"]:
        epsilon_text = "–" if row["epsilon"] is None else f"{row['epsilon']:.1f} {row['guarantee']}"
        numbers = (formatting.format_spread(row[metric], 2) for metric in document["scores"])
        parts = len(row["folds"]) or len(row["left_out"])
        repeats = f"{len(row['seeds'])}" + (f" × {parts}" if parts else "")
        rows.append(
            [row["label"], repeats, *numbers, epsilon_text, formatting.format_size(row["communication"]["bytes"])]
        )
    repeats_text = f"mean ± sd over {comparison_page.repetition_words(document['rows'])}"
    title = f"models {comparison_page.TEST_SET_WORDS[document['on']]}, {repeats_text}"
    yield TextTable(title, ["method", "seeds", *names, "ε", "sent"], rows)
    if document["benefit"]:
        several = sum(formatting.is_federated(row["method"]) for row in document["rows"]) > 1
        method_note = f" ({document['benefit']['federated']})" if several else ""
        for name, row in worth_figure.list_benefit_rows(document["benefit"]):
            gain, verdict = worth_figure.gain_words(row), worth_figure.verdict_words(row, name)
            yield TextLine(
                f"  {name}: {gain} by federation{method_note}; {verdict}" if verdict else f"  {name}: {gain}"
            )
    yield from (TextLine(finding["text"]) for finding in document["findings"])
    yield from (TextLine(note, "dim") for note in document["notes"])
    yield TextLine(document["page"])
