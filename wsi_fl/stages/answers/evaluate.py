"""`evaluate`: what answers for every site, on the merged multi-centric test set and on each site's part.

*Internal* is a site's own part, *external* are the parts of all the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.aggregation import aggregated_scores
from wsi_fl.learning.examples import Examples
from wsi_fl.learning.local import probabilities, undecided_where_broken
from wsi_fl.learning.metrics import (
    calibration,
    confusion,
    mean_and_sd,
    slide_level,
)
from wsi_fl.learning.tasks import Said, Task, Truth, intervals, scored
from wsi_fl.learning.validation import ANSWERS, STACK, answered, roles
from wsi_fl.report.words import SCORES, SHORT, number
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.between import between_of, print_between
from wsi_fl.stages.answers.outside import outside
from wsi_fl.stages.answers.predictions import write_predictions
from wsi_fl.stages.answers.trained import answering, answers_with, settings_of
from wsi_fl.stages.site.data import Data, Table
from wsi_fl.stages.site.kept import as_begun
from wsi_fl.stages.site.party import Party
from wsi_fl.stages.work.console import Silent, Watcher, print_table, say
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.types import BagTable, WsiFlError


def evaluate(
    study: Study, run_name: str, *, overrides: Sequence[str] = (), watcher: Watcher | None = None
) -> dict[str, Any]:
    """Evaluates a run, writes evaluation.json and each site's predictions.csv, returns the document.

    Where a site is real and does not let its patches be read by others, each model is evaluated on its own
    site's part alone and `merged` is null. `between` has what the hospitals told of what travelled, by counts.

    Args:
        overrides: `predict.KEY=VALUE` over the run's configuration.
    """
    watcher = watcher or Silent()
    run = RunFolder(study.run(run_name))
    study = as_begun(study, run)
    with Party.of_run(study, run, settings_of(study, run, overrides)) as party:
        document = _document(party, watcher)
    run.write_evaluation(document)
    return document


def _document(party: Party, watcher: Watcher) -> dict[str, Any]:
    pipeline, merged, lost = party.pipeline, party.may_merge, party.lost
    sites = [
        site for site in party.sites if merged or party.has_store(site.name)
    ]  # a hospital has its own alone
    parts = {site.name: _test_part(party.data(site.name)) for site in sites}
    if not any(len(part) for part, _ in parts.values()):
        command = party.kind.cut_by
        raise WsiFlError(f"no site has test {party.examples}; {command} with {command}.test_fraction above 0")
    rows, answers = [], []
    taking_part = [site for site in sites if site.name not in lost]
    for index, site in enumerate(taking_part):
        watcher.update("evaluate", index, len(taking_part), site.name)
        seen = parts if merged else {site.name: parts[site.name]}
        row, answer = _evaluate_site(party, site, seen)
        rows.append(row)
        answers.append(answer)
        watcher.update("evaluate", index + 1, len(taking_part), site.name)
    if not rows:
        raise WsiFlError(f"{party.run.name}: every site whose store is here was lost and has no model")
    weights = [float((party.data(one.name).table.split == "train").sum()) for one in taking_part]
    several, task = merged and len(rows) > 1, party.task
    shared = list(rows[0]["parts"]) if merged else []
    return {
        "run": party.study.relative(party.run.path),
        "method": party.name,
        "task": task.kind,
        "scores": list(task.scores),
        "examples": party.examples,
        "with": pipeline.predict.with_,
        "merged": _over_sites(rows, task) if merged else None,
        "internal": _over_sites([row["own"] for row in rows], task),
        "external": _over_sites([row["external"] for row in rows], task) if several else None,
        "models": _over_models(rows, task, merged=merged),
        "aggregated": _aggregated(pipeline, weights, answers, parts)
        if several and task.kind == "classes"
        else None,
        "external_set": outside(party, taking_part, weights),
        "parts": {name: _over_sites([row["parts"][name] for row in rows], task) for name in shared}
        if merged
        else None,
        "sites": rows,
        "between": between_of(party),
        "bootstrap": {"repeats": pipeline.evaluate.bootstrap, "cluster": "patient", "level": 0.95},
    }


def _over_sites(parts: Sequence[Mapping[str, Any]], task: Task) -> dict[str, Any]:
    """Mean ± sd of every score; null where some site has none."""
    return {name: mean_and_sd([part[name] for part in parts]) for name in task.scores}


def _over_models(rows: Sequence[Mapping[str, Any]], task: Task, *, merged: bool) -> dict[str, Any]:
    """Mean ± sd of every score by what could answer; of methods without a proxy, the private models alone."""
    found: dict[str, Any] = {}
    for answer in (*ANSWERS, STACK):
        said = [row["models"][answer] for row in rows if answer in row["models"]]
        if said:
            whole = _over_sites(said, task) if merged else None
            found[answer] = {"merged": whole, "internal": _over_sites([one["own"] for one in said], task)}
    return found


def _test_part(data: Data) -> tuple[Examples, Table]:
    return data.held_out, data.table.take(np.flatnonzero(data.table.split == "test"))


def _evaluate_site(
    party: Party, site: SiteFile, seen: Mapping[str, tuple[Examples, Table]]
) -> tuple[dict[str, Any], dict[str, Said]]:
    """What answers for one site, on the parts that it may see, its own or everybody's; and what it said of each."""
    run, pipeline, data = party.run, party.pipeline, party.data(site.name)
    meta = data.store.meta
    run.site(site.name).remember_store(data.digest(), data.facts())
    said = _predicted(party, site, {name: examples for name, (examples, _) in seen.items()})
    answer = answers_with(run, pipeline, site.name)
    predicted = said[answer]
    folder, task = run.site(site.name), data.task
    tables = {name: seen[name][1] for name in predicted}
    write_predictions(folder, predicted, tables, data.classes, task)
    # images of a partitioned data set are no slides, and other questions are asked of slides or patients anyway
    point = (folder.kept("choice") or {}).get("slide_threshold") if meta.spec.mpp > 0 else None
    level = Level(task, pipeline.evaluate.bootstrap, slides=meta.spec.mpp > 0, point=point)
    own = level.of(predicted[site.name], tables[site.name]) if site.name in predicted else _nothing(task)
    everything = level.of(np.concatenate(list(predicted.values())), _pooled(tables)) if len(seen) > 1 else own
    others = {name: p for name, p in predicted.items() if name != site.name}
    row = {
        "site": site.name,
        "with": answer,
        **everything,
        "own": own,
        "external": _external(others, {name: tables[name] for name in others}, task)
        if len(seen) > 1
        else None,
        "parts": {name: scored(p, tables[name].label, task) for name, p in predicted.items()},
        "models": {name: _scores(p, tables, site.name, task) for name, p in said.items()},
    }
    return row, predicted


def _aggregated(
    pipeline: Pipeline,
    weights: Sequence[float],
    answers: Sequence[Mapping[str, Said]],
    parts: Mapping[str, tuple[Examples, Table]],
) -> dict[str, Any]:
    """All sites' answers as one, on the merged test set, by every rule; a site weighs its training rows."""
    said = [np.concatenate([answer[name] for name in answers[0]]) for answer in answers]
    labels = np.concatenate([parts[name][1].label for name in answers[0]])
    return {"rule": pipeline.mpcpa.aggregate, "rules": aggregated_scores(said, labels, weights)}


def _scores(
    predicted: Mapping[str, Said], tables: Mapping[str, Table], own: str, task: Task
) -> dict[str, Any]:
    """Scores on all parts together, and on the site's own."""
    if not predicted:
        return _nothing(task) | {"own": _nothing(task)}
    labels = np.concatenate([tables[name].label for name in predicted])
    mine = scored(predicted[own], tables[own].label, task) if own in predicted else _nothing(task)
    return {**scored(np.concatenate(list(predicted.values())), labels, task), "own": mine}


def _predicted(party: Party, site: SiteFile, sets: Mapping[str, Examples]) -> dict[str, dict[str, Said]]:
    """By answer, the probabilities on every set that is not empty; of a proxy and the mean where there is a proxy."""
    import torch

    data, device = party.data(site.name), device_of_rank()
    classes = data.classes
    found = answering(party.run, party.pipeline, site, classes, data.shape, device, every=True)
    some = {name: one for name, one in sets.items() if len(one)}
    with torch.no_grad():
        by_role = {
            name: {
                role: undecided_where_broken(probabilities(model, one, device), one)
                for role, model in found.models.items()
            }
            for name, one in some.items()
        }
    known = (*ANSWERS, *[STACK] * (found.stack is not None))
    possible = [answer for answer in known if set(roles(answer)) <= found.models.keys()]
    return {
        answer: {name: answered(p, answer, found.stack) for name, p in by_role.items()} for answer in possible
    }


def _nothing(task: Task) -> dict[str, Any]:
    """The scores of no example at all."""
    return {"n": 0, **dict.fromkeys(task.scores), "tumor_types": {}}


def _external(predicted: Mapping[str, Said], tables: Mapping[str, Table], task: Task) -> dict[str, Any]:
    """Scores of a model on what the other sites hold for testing."""
    if not predicted:
        return _nothing(task)
    p, table = np.concatenate(list(predicted.values())), _pooled(tables)
    return {**scored(p, table.label, task), "tumor_types": _tumor_types(p, table)}


def _tumor_types(predicted: Said, table: Table) -> dict[str, Any]:
    """n, accuracy and macro-accuracy of the slides of each tumour type; empty where none is known."""
    if not isinstance(table, BagTable):
        return {}
    found = {}
    for kind in sorted(set(table.tumor_type.tolist()) - {""}):
        rows = table.tumor_type == kind
        known = scored(predicted[rows], table.label[rows])
        found[kind] = {name: known[name] for name in ("n", "accuracy", "macro_accuracy")}
    return found


@dataclass(frozen=True)
class Level:
    """How everything is measured that is said about one model on one set.

    Attributes:
        repeats: of the bootstrap.
        slides: whether patches are of slides, so that these are measured too.
        point: score from which on a slide is called positive, as the run found on the site's own slides.
    """

    task: Task
    repeats: int
    slides: bool
    point: float | None

    def of(self, predicted: Said, table: Table) -> dict[str, Any]:
        """Return what is known of a model by what it says of a table's examples; of patches, of slides too."""
        by_slide = (
            slide_level(predicted, table.label, table.slide, threshold=self.point)
            if self.slides and self.task.kind == "classes"
            else None
        )
        return {
            **self._of(predicted, table.label, table.patient),
            "slides": (
                self._of(by_slide[0], by_slide[1], table.patient[by_slide[2]]) | {"threshold": self.point}
                if by_slide
                else None
            ),
            "tumor_types": _tumor_types(predicted, table),
        }

    def _of(self, predicted: Said, labels: Truth, patient: NDArray[np.str_]) -> dict[str, Any]:
        """Scores and intervals clustered by patient; of classes confusion and calibration too."""
        found = {
            **scored(predicted, labels, self.task),
            "intervals": intervals(predicted, labels, patient, self.task, repeats=self.repeats),
        }
        if self.task.kind != "classes":
            return found
        return found | {
            "confusion": confusion(predicted, labels),
            "calibration": calibration(predicted, labels),
        }


def _pooled(tables: Mapping[str, Table]) -> Table:
    """The rows of all sites; slides and patients of different sites stay apart where their names agree."""
    named = [
        replace(
            table,
            slide=np.array([f"{site}/{name}" for name in table.slide]),
            patient=np.array([f"{site}/{name}" for name in table.patient]),
        )
        for site, table in tables.items()
    ]
    first = named[0]
    columns = {f.name: np.concatenate([getattr(table, f.name) for table in named]) for f in fields(first)}
    return type(first)(**columns)


def print_evaluation(document: dict[str, Any]) -> None:
    """Print a row per site, then mean ± sd."""
    where = "merged test set" if document["merged"] is not None else "own test set"
    several = any(row["with"] != "private" for row in document["sites"])
    whose = "models" if several else "private models"
    scores = document["scores"]
    first = scores[0]
    names = [SHORT.get(name, SCORES[name].lower()) for name in scores]
    headings = ["site", "n", *names, "own part", "others'", *["with"] * several]
    rows: list[list[str] | None] = [
        [
            row["site"],
            str(row["n"]),
            *(number(row[name]) for name in scores),
            number(row["own"][first]),
            number((row["external"] or {}).get(first)),
            *[row["with"]] * several,
        ]
        for row in document["sites"]
    ]
    if document["merged"] is not None:
        spreads = [document["merged"][name] for name in scores]
        spreads += [(document[which] or {}).get(first) or {} for which in ("internal", "external")]
        rows += [
            None,
            ["mean ± sd", "", *(f"{number(m.get('mean'))} ± {number(m.get('sd'))}" for m in spreads)],
        ]
    print_table(f"{whose} on the {where} ({document['examples']})", headings, rows)
    if together := document["aggregated"]:
        one = together["rules"][together["rule"]]
        say(
            f"all sites' predictions as one ({together['rule'].replace('_', ' ')}): {number(one['accuracy'])} accuracy"
        )
    if document["parts"]:
        reached = {name: part[first] for name, part in document["parts"].items()}
        spread = ", ".join(f"{name} {number(m['mean'])} ± {number(m['sd'])}" for name, m in reached.items())
        say(f"  {SCORES[first].lower()} on each site's part over all models: {spread}")
    if document["between"]:
        print_between(document["between"])
    say(f"{document['run']} evaluated; next: wsi-fl report {document['run']}")
