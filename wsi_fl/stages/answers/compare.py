"""`compare`: methods side by side, mean ± sd over sites and seeds, paired tests, and the baseline that matters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from wsi_fl.federation.methods import ALONE
from wsi_fl.learning.metrics import mean_and_sd, mean_of_known
from wsi_fl.learning.verdict import Paired, holm, paired
from wsi_fl.report import comparison, words
from wsi_fl.report import worth as worth_figure
from wsi_fl.report.comparison import Series, settings_words
from wsi_fl.stages.answers.compare_runs import Run, differing, is_baseline, named, with_baseline
from wsi_fl.stages.answers.compare_worth import BALANCED, Gain, compared_by_site, compared_over_all
from wsi_fl.stages.answers.predictions import read_answers
from wsi_fl.stages.site.data import kind_of
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_bytes, write_csv, write_text
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from wsi_fl.stages.answers.evaluate import Evaluation

_ENOUGH_SEEDS = 3
"""With fewer common seeds than this, pairs are sites."""
_GUARANTEES = ("none", "nominal", "shared", "guaranteed")
"""From the weakest to the strongest."""


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
    first = given[0]
    everything, notes = with_baseline(study, given, train_missing=baseline, watcher=watcher)
    evaluations = [_evaluation(study, run, watcher) for run in everything]
    on = "merged" if all(e["merged"] is not None for e in evaluations) else "own"
    if first.member.left_out is not None:
        on = "left_out"
    if on == "own":
        own = "each model is measured on its own site's test part"
        notes.append(f"Not every run has a merged test set: {own}.")
        notes += filter(None, [words.classes_of_parts(evaluations[0]["sites"])])
    if lost := sorted({site for run in everything for site in run.summary["lost"]}):
        notes.append(f"Lost during training in some run: {', '.join(lost)}.")
    rows = _grouped(everything, evaluations, on, first)
    _require_one_store(evaluations)
    scores = tuple(evaluations[0]["scores"])
    worth, gains = _worth(rows, first, on)
    metric = "macro_accuracy" if worth and worth["measure"] == BALANCED else scores[0]
    rows.sort(key=lambda row: inf if (mean := row.spread(metric)["mean"]) is None else -mean)
    alone = next(row.label for row in rows if row.is_alone(first))
    reference = next(row.label for row in rows if first in row.runs)
    table = [row.document(scores) for row in rows]
    measured = (*scores, f"own_{scores[0]}")
    tests = _tests(rows, reference, alone, measured if on == "merged" else scores, on)
    word = kind_of(first.pipeline).word
    found = comparison.findings(table, tests, alone, word, metric, gains)
    names = " ".join(sorted(run.folder.name for run in given))  # the same runs make the same folder
    methods, digest = "-".join(dict.fromkeys(run.method for run in given)), hashlib.sha256(names.encode())
    folder = study.root / "comparisons" / f"{methods}-{digest.hexdigest()[:8]}"
    document = {
        "runs": [study.relative(run.folder.path) for run in everything],
        "benefit": worth and worth | {"figure": study.relative(folder / "benefit.png")},
        "on": on,
        "scores": list(scores),
        "examples": word,
        "rows": table,
        "paired": tests,
        "baseline": alone,
        "reference": reference,
        "findings": [one._asdict() for one in found],
        "notes": [*notes, *comparison.cautions(table, tests, classes="accuracy" in scores)],
        "page": study.relative(folder / "index.html"),
        "figure": study.relative(folder / "figure.png"),
        "table": study.relative(folder / "table.csv"),
    }
    if worth:
        write_bytes(folder / "benefit.png", worth_figure.png(worth))
    series = [row.series(on, scores[0], baseline=row.label == alone) for row in rows]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    sites = list(dict.fromkeys(site["site"] for run in given for site in run.summary["sites"]))
    write_text(folder / "index.html", comparison.render(document, series, created=made, sites=sites))
    write_bytes(folder / "figure.png", comparison.png(series, words.SCORES[scores[0]]))
    write_csv(folder / "table.csv", _lines(table, measured))
    return document


def _require_one_store(evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Refuse runs that were tested on different stores of the same site that was left out."""
    seen: dict[str, str] = {}
    for one in evaluations:
        left_out = (one.get("external_set") or {}).get("left_out")
        if left_out and seen.setdefault(left_out["site"], left_out["store"]) != left_out["store"]:
            raise WsiFlError(
                f"{one['run']} was tested on other slides of {left_out['site']} than the others; evaluate all runs anew"
            )


def _evaluation(study: Study, run: Run, watcher: Watcher) -> Evaluation:
    """The run's evaluation, made now where there is none of what it is by now: a lost site may have come back, or
    another answer was asked for than the run's own.
    """
    document, wanted = run.folder.evaluation(), run.pipeline.predict.model
    made, finished = (run.folder.path / f"{name}.json" for name in ("evaluation", "summary"))
    current = document and made.stat().st_mtime_ns >= finished.stat().st_mtime_ns
    if document and current and document["model"] == wanted:
        return cast("Evaluation", document)
    from wsi_fl.stages.answers.evaluate import (
        evaluate,  # and with it PyTorch; evaluated runs need not wait for it
    )

    watcher.say(f"  {study.relative(run.folder.path)} is not evaluated yet; doing it now")
    return evaluate(study, str(run.folder.path), watcher=watcher)


@dataclass(frozen=True)
class _Row:
    """The runs of one method with the same settings, and their evaluations, in the order of seeds and folds.

    Attributes:
        settings: what sets it apart from other rows of its method.
        values: per run, {site: {metric: value or None}}; the site is whose model it is, or the one that was left out.
        right: by where it is measured, {(site, patient): how often the models were right}; of folds alone, which test
            each patient once per seed.
    """

    method: str
    dp: bool
    settings: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    values: list[dict[str, dict[str, float | None]]] = field(default_factory=list)
    right: dict[str, dict[Any, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{words.method_name(self.method)} {'with' if self.dp else 'without'} DP"

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, settings_words(self.settings))))

    def is_alone(self, first: Run) -> bool:
        """Whether it is every hospital alone, with the settings of the first run."""
        return not self.runs or is_baseline(self.runs[0], first)

    def by(
        self, key: Callable[[Run, str], Any], metric: str, seeds: Iterable[int] | None = None
    ) -> dict[Any, list[float]]:
        """The known values of a metric, grouped by a key of run and site; of runs with these seeds, or of all."""
        found: dict[Any, list[float]] = {}
        for run, values in zip(self.runs, self.values, strict=True):
            for site, scores in values.items():
                if (value := scores[metric]) is not None and (seeds is None or run.seed in seeds):
                    found.setdefault(key(run, site), []).append(value)
        return found

    def spread(self, metric: str) -> dict[str, float | None]:
        """Mean and standard deviation over all sites of all runs, and the number of values."""
        values = self.by(lambda run, site: None, metric).get(None, [])
        return {**mean_and_sd([*values]), "n": len(values)}

    def document(self, scores: Sequence[str]) -> dict[str, Any]:
        """The row as ``--json`` has it."""
        summaries = [run.summary for run in self.runs]
        sites = [site for summary in summaries for site in summary["sites"]]
        guarantees = {site["guarantee"] for site in sites}
        weakest = next((g for g in _GUARANTEES if g in guarantees), "none")
        spent = [site["epsilon"] for site in sites]
        private = self.dp and weakest != "none" and bool(spent) and None not in spent
        members = [run.member for run in self.runs]
        seen = {site: None for values in self.values for site in values}
        known = self.by(lambda run, site: site, scores[0])
        return {
            "label": self.label,
            "method": self.method,
            "dp": self.dp,
            "settings": self.settings,
            "guarantee": weakest,
            "epsilon": max(spent) if private else None,
            "seeds": sorted({run.seed for run in self.runs}),
            "folds": sorted({one.fold for one in members if one.fold is not None}),
            "left_out": sorted({one.left_out for one in members if one.left_out is not None}),
            "runs": [run.folder.name for run in self.runs],
            "n_sites": max((len(summary["sites"]) for summary in summaries), default=None),
            **{metric: self.spread(metric) for metric in (*scores, f"own_{scores[0]}")},
            "sites": {site: fmean(known[site]) if site in known else None for site in seen},
            "communication": self.communication(),
            "seconds_per_round": mean_of_known([one["seconds"] / _rounds(one) for one in summaries]),
        }

    def communication(self) -> dict[str, float | None]:
        """Per round: messages and bytes a site sends on average, bytes of the one that sends most, seconds of the
        slowest. The busiest site is known only where the metrics of all sites lie here.
        """
        kinds = ("messages", "bytes", "busiest_bytes", "seconds")
        found: dict[str, list[float | None]] = {kind: [] for kind in kinds}
        for run in self.runs:
            total, rounds, n = run.summary["communication"], _rounds(run.summary), len(run.summary["sites"])
            found["messages"].append(total["messages"] / rounds / n)
            found["bytes"].append(total["bytes"] / rounds / n)
            lines = [run.folder.site(site["site"]).metrics() for site in run.summary["sites"]]
            sent = [sum(line["bytes"] for line in site) for site in lines]
            found["busiest_bytes"].append(max(sent) / rounds if all(lines) else None)
            found["seconds"].append(total["seconds"] / rounds)
        return {key: mean_of_known(values) for key, values in found.items()}

    def series(self, on: str, score: str, *, baseline: bool) -> Series:
        """What the charts show of it."""
        curves = []
        for run in self.runs:
            for site in run.summary["sites"]:
                lines = run.folder.site(site["site"]).metrics()
                seen = [(line["round"], (line.get(on) or {}).get(score)) for line in lines]
                curves.append([(round_, value) for round_, value in seen if value is not None])
        found, sent = self.spread(score), self.communication()
        return Series(
            label=self.name,
            settings=settings_words(self.settings),
            dp=self.dp,
            baseline=baseline,
            mean=found["mean"],
            sd=found["sd"],
            values=self.by(lambda run, site: run.seed, score),
            curves=[points for points in curves if points],
            sent_bytes=sent["bytes"],
            busiest_bytes=sent["busiest_bytes"],
        )


def _rounds(summary: Mapping[str, Any]) -> int:
    return max(1, *(int(site["rounds"]) for site in summary["sites"]))


def _grouped(
    runs: Sequence[Run], evaluations: Sequence[Mapping[str, Any]], on: str, first: Run
) -> list[_Row]:
    """Runs grouped into rows, and an empty row for a baseline that is missing."""
    keys = differing(runs)
    rows: dict[str, _Row] = {}
    for run, evaluation in sorted(zip(runs, evaluations, strict=True), key=lambda pair: pair[0].member.place):
        row = _Row(run.method, run.dp, {key: run.settings[key] for key in keys if key in run.settings})
        row = rows.setdefault(row.label, row)
        row.runs.append(run)
        row.values.append(_values(evaluation, on))
    if not any(row.is_alone(first) for row in rows.values()):
        wanted = first.settings_alone
        empty = _Row(ALONE, False, {key: wanted[key] for key in keys if key in wanted})
        if alike := rows.get(empty.label):  # a hospital alone, but not as well tuned
            known = alike.runs[0].settings
            empty.settings.update({key: value for key, value in wanted.items() if known.get(key) != value})
        rows[empty.label] = empty
    if first.pipeline.train.folds:
        for row in rows.values():
            row.right.update({where: _by_patient(row, where) for where in ("merged", "own")})
    return list(rows.values())


def _by_patient(row: _Row, where: str) -> dict[Any, float]:
    """How often all models of a row were right about each patient, whom each seed tests in one fold."""
    said: dict[Any, list[float]] = {}
    for run in row.runs:
        for site in run.summary["sites"]:
            for key, (value, _) in (read_answers(run.folder.site(site["site"]), where) or {}).items():
                said.setdefault(key[:2], []).append(value)
    return {patient: fmean(values) for patient, values in said.items()}


def _values(evaluation: Mapping[str, Any], on: str) -> dict[str, dict[str, float | None]]:
    """The values of one run: of each site's model, or of the site that was left out the mean over all models."""
    scores = evaluation["scores"]
    own = f"own_{scores[0]}"
    if on == "left_out":
        found = evaluation["external_set"]["left_out"]
        means = {name: mean_of_known([row[name] for row in found["rows"]]) for name in scores}
        return {found["site"]: means | {own: means[scores[0]]}}
    where = {site["site"]: site if on == "merged" else site["own"] for site in evaluation["sites"]}
    return {
        site["site"]: {name: where[site["site"]][name] for name in scores} | {own: site["own"][scores[0]]}
        for site in evaluation["sites"]
    }


class _Test(Paired):
    """A paired test of two rows."""

    a: str
    b: str
    metric: str
    unit: str


class _OfFamily(_Test):
    p_holm: float | None


def _tests(
    rows: Sequence[_Row], reference: str, alone: str, metrics: Sequence[str], on: str
) -> list[_OfFamily]:
    """Every row against the baseline and against the reference, each metric a family of its own for Holm."""
    by_label = {row.label: row for row in rows}
    pairs = [(a, b) for b in dict.fromkeys((alone, reference)) for a in by_label if a != b]
    pairs = [(a, b) for a, b in pairs if (a, b) != (alone, reference)]  # the other way round is there
    tests: list[_OfFamily] = []
    for metric in metrics:
        family = [_test(by_label[a], by_label[b], metric, on) for a, b in pairs]
        made = [test for test in family if test is not None]
        for test, corrected in zip(made, holm([test["p"] for test in made]), strict=True):
            tests.append({**test, "p_holm": corrected})
    return tests


def _test(a: _Row, b: _Row, metric: str, on: str) -> _Test | None:
    """The paired test of two rows; None without any pair.

    Pairs are seeds, or where too few seeds are common patients or folds of a cross-validation, or else sites. A pair
    takes only what both rows have: one may have lost a site.
    """
    common = sorted({run.seed for run in a.runs} & {run.seed for run in b.runs})
    where = {"accuracy": on, "own_accuracy": "own"}.get(metric, "")

    def means(key: Callable[[Run, str], Any], seeds: Sequence[int] | None = None) -> list[dict[Any, float]]:
        found = [row.by(key, metric, seeds) for row in (a, b)]
        return [{one: fmean(values) for one, values in groups.items()} for groups in found]

    if len(common) >= _ENOUGH_SEEDS:
        unit, sides = "seed", means(lambda run, site: (run.seed, site))
        both = [[key for key in sides[0] if key[0] == seed and key in sides[1]] for seed in common]
        pairs = [tuple(fmean(side[key] for key in keys) for side in sides) for keys in both if keys]
    else:
        if a.right.get(where) and b.right.get(where):
            unit, sides = "patient", [a.right[where], b.right[where]]
        elif a.right and b.right:
            unit, sides = "fold", means(lambda run, site: str(run.member))
        else:
            unit, sides = "site", means(lambda run, site: site, common or None)
        pairs = [(value, sides[1][key]) for key, value in sides[0].items() if key in sides[1]]
    if not pairs:
        return None
    told = paired([x for x, _ in pairs], [y for _, y in pairs])
    found: _Test = {"a": a.label, "b": b.label, "metric": metric, **told, "unit": unit}
    return found


def _worth(rows: Sequence[_Row], first: Run, on: str) -> tuple[dict[str, Any] | None, dict[str, Gain]]:
    """What joining brings: every site's own score with each of three models, and by the label of each federated row
    what it brings over all sites. None and {} where no federated method is compared, or a whole site is left out.

    *Alone* is the baseline without DP, *joined* the first federated row given, *pooled* a model of all data, without DP
    where there is one. Values are means over the seeds of each; the gain is over the seeds that both have, its interval
    that of drawing seeds and patients anew. The headroom is the part of what pooling would bring that joining brings;
    `verdict` says in a word what follows for the hospital.
    """
    made = [row for row in rows if row.runs]
    alone = [row for row in made if row.is_alone(first)]
    federated = [row for row in made if words.is_federated(row.method)]
    pooled = sorted((row for row in made if words.is_pooled(row.method)), key=lambda row: row.dp)
    if not alone or not federated or on == "left_out":
        return None, {}
    joined = min(federated, key=lambda row: first not in row.runs)
    references = {"local": alone[0]} | ({"pooled": pooled[0]} if pooled else {})
    known = {kind: row.runs for kind, row in references.items()}
    gains = {row.label: compared_over_all(known | {"federated": row.runs}, on) for row in federated}
    measure, by_site = compared_by_site(known | {"federated": joined.runs}, on)
    return {
        "local": alone[0].label,
        "federated": joined.label,
        "pooled": pooled[0].label if pooled else None,
        "on": on,
        "measure": measure,
        "sites": [{"site": name, **found, **_spent(joined, name)} for name, found in by_site.items()],
        "all": gains[joined.label],
    }, gains


def _spent(row: _Row, name: str) -> dict[str, float | str | None]:
    """The largest ε of a site over the runs, and what it is worth."""
    mine = [site for run in row.runs for site in run.summary["sites"] if site["site"] == name]
    spent = [site["epsilon"] for site in mine if site["epsilon"] is not None]
    return {"epsilon": max(spent, default=None), "guarantee": mine[0]["guarantee"] if mine else "none"}


def _lines(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> Iterator[list[Any]]:
    """Yield those of table.csv: the headings, then a row per method; what is unknown is empty."""
    plain = ("label", "method", "dp", "guarantee", "epsilon", "n_sites")
    spreads = [(metric, part) for metric in metrics for part in ("mean", "sd", "n")]
    sent = ("messages", "bytes", "busiest_bytes", "seconds")
    per_round = [*(f"{key}_per_round" for key in sent), "seconds_per_round_in_all"]
    yield [*plain, "seeds", *map("_".join, spreads), *per_round]
    for row in rows:
        cells = [row[key] for key in plain] + [" ".join(map(str, row["seeds"]))]
        cells += [row[metric][part] for metric, part in spreads] + [row["communication"][key] for key in sent]
        yield [*cells, row["seconds_per_round"]]


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
    if document["benefit"]:
        several = sum(words.is_federated(row["method"]) for row in document["rows"]) > 1
        by = f" ({document['benefit']['federated']})" if several else ""
        for name, row in worth_figure.rows_of(document["benefit"]):
            gain, verdict = worth_figure.gain_words(row), worth_figure.verdict_words(row, name)
            yield Line(f"  {name}: {gain} by joining{by}; {verdict}" if verdict else f"  {name}: {gain}")
    yield from (Line(finding["text"]) for finding in document["findings"])
    yield from (Line(note, "dim") for note in document["notes"])
    yield Line(document["page"])
