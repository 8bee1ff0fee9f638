"""`compare`: methods side by side, mean ± sd over sites and seeds, paired tests, and the baseline that matters."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import inf
from typing import Any

from wsi_fl.report import comparison, words
from wsi_fl.report import worth as worth_figure
from wsi_fl.report.comparison_figures import png
from wsi_fl.stages.answers.compare_baseline import with_baseline
from wsi_fl.stages.answers.compare_rows import (
    ComparedRow,
    comparisons,
    described,
    grouped,
    is_alone,
    measured,
    series_of,
    spread_of,
)
from wsi_fl.stages.answers.compare_runs import Run, named
from wsi_fl.stages.answers.compare_worth import BALANCED, verdicts, worth
from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.site.slides import kind_of
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_bytes, write_text
from wsi_fl.types import WsiFlError


def compare(
    study: Study, runs: Sequence[str], *, baseline: bool = True, watcher: Watcher | None = None
) -> dict[str, Any]:
    """Compares finished runs on the same stores; returns the document and writes page, figure and table.

    A row is a method, whether it had DP, and the settings in which the runs differ; runs that differ in their
    seed, their fold or the site that they leave out are repetitions of one row. The baseline row, every hospital
    alone without DP, is always there.

    Args:
        runs: folders, names, numbers, ranges (3-8) or patterns; the first one's row is the reference.
        baseline: whether runs of the baseline that are missing are trained.

    Raises:
        WsiFlError: when a run has not finished, or learned from other patches than the first.
    """
    watcher = watcher or Silent()
    given = named(study, runs)
    everything, notes = with_baseline(study, given, train_missing=baseline, watcher=watcher)
    evaluations = [_evaluation(study, run, watcher) for run in everything]
    on = "merged" if all(e["merged"] is not None for e in evaluations) else "own"
    if given[0].member.left_out is not None:
        on = "left_out"
    if on == "own":
        notes.append(
            "Not every run has a merged test set: each model is measured on its own site's test part."
        )
    if lost := sorted({site for run in everything for site in run.summary["lost"]}):
        notes.append(f"Lost during training in some run: {', '.join(lost)}.")
    rows = grouped(everything, evaluations, on, given[0])
    _require_one_store(evaluations)
    scores = words.scores_of(evaluations[0])
    of_all = verdicts(rows, given[0], on)
    gains = worth(rows, given[0], on, of_all)
    metric = "macro_accuracy" if gains and gains["measure"] == BALANCED else scores[0]
    document = _document(rows, given[0], on, notes, scores, metric=metric, gains=of_all)
    document["worth"] = gains
    document["runs"] = [study.relative(run.folder.path) for run in everything]
    folder = study.root / "comparisons" / _slug(given)
    for kind, name in (("page", "index.html"), ("figure", "figure.png"), ("table", "table.csv")):
        document[kind] = study.relative(folder / name)
    if document["worth"]:
        document["worth"]["figure"] = study.relative(folder / "worth.png")
        write_bytes(folder / "worth.png", worth_figure.png(document["worth"]))
    series = [series_of(row, on, scores[0], baseline=row.label == document["baseline"]) for row in rows]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    sites = list(dict.fromkeys(site["site"] for run in given for site in run.summary["sites"]))
    write_text(folder / "index.html", comparison.render(document, series, created=made, sites=sites))
    write_bytes(folder / "figure.png", png(series, words.SCORES[scores[0]]))
    write_text(folder / "table.csv", _csv(document["rows"], measured(scores)))
    return document


def _document(
    rows: list[ComparedRow],
    first: Run,
    on: str,
    notes: list[str],
    scores: Sequence[str],
    *,
    metric: str,
    gains: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """What is known of all rows, which it puts in order: best first by the metric, rows without a number last."""
    reference = next(row.label for row in rows if first in row.runs)
    alone = next(row.label for row in rows if is_alone(row, first))
    means = {row.label: spread_of(row, metric)["mean"] for row in rows}
    rows.sort(key=lambda row: inf if (mean := means[row.label]) is None else -mean)
    table = [described(row, scores) for row in rows]
    tests = comparisons(rows, reference, alone, measured(scores) if on == "merged" else scores, on)
    word = kind_of(first.pipeline).word
    found = comparison.findings(table, tests, alone, word, metric, gains)
    return {
        "runs": [],
        "worth": None,
        "on": on,
        "scores": list(scores),
        "examples": word,
        "rows": table,
        "paired": tests,
        "baseline": alone,
        "reference": reference,
        "findings": [asdict(one) for one in found],
        "notes": [*notes, *comparison.cautions(table, tests, classes="accuracy" in scores)],
    }


def _require_one_store(evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Refuse runs that were tested on different stores of the same site that was left out."""
    seen: dict[str, str] = {}
    for one in evaluations:
        left_out = (one.get("external_set") or {}).get("left_out")
        if left_out and seen.setdefault(left_out["site"], left_out["store"]) != left_out["store"]:
            raise WsiFlError(
                f"{one['run']} was tested on other slides of {left_out['site']} than the others; evaluate all runs anew"
            )


def _evaluation(study: Study, run: Run, watcher: Watcher) -> dict[str, Any]:
    """The run's evaluation, made now where there is none of what it is by now: a lost site may have come back, or
    another answer was asked for than the run's own.
    """
    document, wanted = run.folder.evaluation(), run.pipeline.predict.with_
    made, finished = (run.folder.path / f"{name}.json" for name in ("evaluation", "summary"))
    current = document and made.stat().st_mtime_ns >= finished.stat().st_mtime_ns
    if document and current and document["with"] == wanted:
        return document
    watcher.say(f"  {study.relative(run.folder.path)} is not evaluated yet; doing it now")
    return evaluate(study, str(run.folder.path), watcher=watcher)


def _slug(given: Sequence[Run]) -> str:
    """The same runs make the same folder."""
    methods = "-".join(dict.fromkeys(run.method for run in given))
    names = " ".join(sorted(run.folder.name for run in given))
    return f"{methods}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"


def _csv(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> str:
    """table.csv: a row per method; what is unknown is empty."""
    text = io.StringIO()
    plain = ("label", "method", "dp", "guarantee", "epsilon", "n_sites")
    spreads = [(metric, part) for metric in metrics for part in ("mean", "sd", "n")]
    sent = ("messages", "bytes", "busiest_bytes", "seconds")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            *plain,
            "seeds",
            *("_".join(s) for s in spreads),
            *(f"{k}_per_round" for k in sent),
            "seconds_per_round_in_all",
        ]
    )
    for row in rows:
        cells = [row[key] for key in plain] + [" ".join(map(str, row["seeds"]))]
        cells += [row[metric][part] for metric, part in spreads] + [row["communication"][key] for key in sent]
        writer.writerow(["" if cell is None else cell for cell in [*cells, row["seconds_per_round"]]])
    return text.getvalue()


def compare_lines(document: dict[str, Any]) -> Lines:
    """Yield a row per method, then what it means."""
    names = [words.SHORT.get(name, words.SCORES[name].lower()) for name in document["scores"]]
    rows = []
    for row in document["rows"]:
        spent = "–" if row["epsilon"] is None else f"{row['epsilon']:.1f} {row['guarantee']}"
        numbers = (words.spread(row[metric], 2) for metric in document["scores"])
        parts = len(row["folds"]) or len(row["left_out"])
        repeats = f"{len(row['seeds'])}" + (f" × {parts}" if parts else "")
        rows.append([row["label"], repeats, *numbers, spent, words.size(row["communication"]["bytes"])])
    over = f"mean ± sd over {comparison.repeated(document['rows'])}"
    title = f"models {comparison.WHERE[document['on']]}, {over}"
    yield Table(title, ["method", "seeds", *names, "ε", "sent"], rows)
    if document["worth"]:
        for name, row in worth_figure.rows_of(document["worth"]):
            gain, verdict = worth_figure.gain_words(row), worth_figure.verdict_words(row, name)
            yield Line(f"  {name}: {gain} by joining; {verdict}" if verdict else f"  {name}: {gain}")
    yield from (Line(finding["text"]) for finding in document["findings"])
    yield from (Line(note, "dim") for note in document["notes"])
    yield Line(document["page"])
