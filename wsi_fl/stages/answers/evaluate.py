"""`evaluate`: what answers for every site, on the merged multi-centric test set and on each site's part.

*Internal* is a site's own part, *external* are the parts of all the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.aggregation import aggregated_scores
from wsi_fl.learning.examples import Examples
from wsi_fl.learning.local import probabilities, undecided_where_broken
from wsi_fl.learning.metrics import (
    SCORES,
    accuracy,
    bootstrap_intervals,
    calibration,
    confusion,
    macro_accuracy,
    mean_and_sd,
    scores,
    slide_level,
)
from wsi_fl.learning.validation import ANSWERS, STACK, answered, roles
from wsi_fl.report.words import number
from wsi_fl.runs import RunFolder
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
from wsi_fl.system.files import write_json
from wsi_fl.types import BagTable, WsiFlError

Probabilities = NDArray[np.float64]


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
    write_json(run.path / "evaluation.json", document)
    return document


def _document(party: Party, watcher: Watcher) -> dict[str, Any]:
    pipeline, merged, lost = party.pipeline, party.may_merge, party.lost
    sites = [
        site for site in party.sites if merged or party.has_store(site.name)
    ]  # a hospital has its own alone
    parts = {site.name: _test_part(party.data(site.name)) for site in sites}
    if not any(len(part) for part, _ in parts.values()):
        command = party.kind.cut_by
        raise WsiFlError(
            f"no site has test {party.kind.word}; {command} with {command}.test_fraction above 0"
        )
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
    several = merged and len(rows) > 1
    return {
        "run": party.study.relative(party.run.path),
        "method": party.name,
        "examples": party.kind.word,
        "with": pipeline.predict.with_,
        "merged": _over_sites(rows) if merged else None,
        "internal": _over_sites([row["own"] for row in rows]),
        "external": _over_sites([row["external"] for row in rows]) if several else None,
        "models": _over_models(rows, merged=merged),
        "aggregated": _aggregated(pipeline, weights, answers, parts) if several else None,
        "external_set": outside(party, taking_part, weights),
        "parts": {name: _over_sites([row["parts"][name] for row in rows]) for name in _shared_parts(rows)}
        if merged
        else None,
        "sites": rows,
        "between": between_of(party),
        "bootstrap": {"repeats": pipeline.evaluate.bootstrap, "cluster": "patient", "level": 0.95},
    }


def _over_sites(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean ± sd of every score; null where some site has none."""
    return {name: mean_and_sd([part[name] for part in parts]) for name in SCORES}


def _shared_parts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sites whose part every model was evaluated on."""
    return list(rows[0]["parts"]) if rows else []


def _over_models(rows: Sequence[Mapping[str, Any]], *, merged: bool) -> dict[str, Any]:
    """Mean ± sd of every score by what could answer; of methods without a proxy, the private models alone."""
    found: dict[str, Any] = {}
    for answer in (*ANSWERS, STACK):
        said = [row["models"][answer] for row in rows if answer in row["models"]]
        if said:
            whole = _over_sites(said) if merged else None
            found[answer] = {"merged": whole, "internal": _over_sites([one["own"] for one in said])}
    return found


def _test_part(data: Data) -> tuple[Examples, Table]:
    return data.held_out, data.table.take(np.flatnonzero(data.table.split == "test"))


def _evaluate_site(
    party: Party, site: SiteFile, seen: Mapping[str, tuple[Examples, Table]]
) -> tuple[dict[str, Any], dict[str, Probabilities]]:
    """What answers for one site, on the parts that it may see, its own or everybody's; and what it said of each."""
    run, pipeline, data = party.run, party.pipeline, party.data(site.name)
    meta = data.store.meta
    run.site(site.name).remember_store(data.digest(), data.facts())
    said = _predicted(party, site, {name: examples for name, (examples, _) in seen.items()})
    answer = answers_with(run, pipeline, site.name)
    predicted = said[answer]
    folder = run.site(site.name)
    tables = {name: seen[name][1] for name in predicted}
    write_predictions(folder, predicted, tables, meta.classes)
    repeats = pipeline.evaluate.bootstrap
    slides = meta.spec.mpp > 0  # images of a partitioned data set are no slides
    point = (folder.kept("choice") or {}).get("slide_threshold") if slides else None
    own = (
        _metrics(predicted[site.name], tables[site.name], repeats, slides=slides, point=point)
        if site.name in predicted
        else _NOTHING
    )
    everything = (
        _metrics(
            np.concatenate(list(predicted.values())), _pooled(tables), repeats, slides=slides, point=point
        )
        if len(seen) > 1
        else own
    )
    others = {name: p for name, p in predicted.items() if name != site.name}
    row = {
        "site": site.name,
        "with": answer,
        **everything,
        "own": own,
        "external": _external(others, {name: tables[name] for name in others}) if len(seen) > 1 else None,
        "parts": {name: scores(p, tables[name].label) for name, p in predicted.items()},
        "models": {name: _scores(p, tables, site.name) for name, p in said.items()},
    }
    return row, predicted


def _aggregated(
    pipeline: Pipeline,
    weights: Sequence[float],
    answers: Sequence[Mapping[str, Probabilities]],
    parts: Mapping[str, tuple[Examples, Table]],
) -> dict[str, Any]:
    """All sites' answers as one, on the merged test set, by every rule; a site weighs its training rows."""
    said = [np.concatenate([answer[name] for name in answers[0]]) for answer in answers]
    labels = np.concatenate([parts[name][1].label for name in answers[0]])
    return {"rule": pipeline.mpcpa.aggregate, "rules": aggregated_scores(said, labels, weights)}


def _scores(predicted: Mapping[str, Probabilities], tables: Mapping[str, Table], own: str) -> dict[str, Any]:
    """Scores on all parts together, and on the site's own."""
    if not predicted:
        return {"n": 0, **dict.fromkeys(SCORES), "own": _NOTHING}
    labels = np.concatenate([tables[name].label for name in predicted])
    mine = scores(predicted[own], tables[own].label) if own in predicted else _NOTHING
    return {**scores(np.concatenate(list(predicted.values())), labels), "own": mine}


def _predicted(
    party: Party, site: SiteFile, sets: Mapping[str, Examples]
) -> dict[str, dict[str, Probabilities]]:
    """By answer, the probabilities on every set that is not empty; of a proxy and the mean where there is a proxy."""
    import torch

    data, device = party.data(site.name), device_of_rank()
    classes = data.store.meta.classes
    found = answering(party.run, party.pipeline, site, classes, data.shape, device, every=True)
    some = {name: one for name, one in sets.items() if len(one)}
    with torch.no_grad():
        by_role = {
            name: {
                role: undecided_where_broken(probabilities(model, one, device), one.allowed)
                for role, model in found.models.items()
            }
            for name, one in some.items()
        }
    known = (*ANSWERS, *[STACK] * (found.stack is not None))
    possible = [answer for answer in known if set(roles(answer)) <= found.models.keys()]
    return {
        answer: {name: answered(p, answer, found.stack) for name, p in by_role.items()} for answer in possible
    }


_NOTHING: dict[str, Any] = {"n": 0} | dict.fromkeys(SCORES) | {"tumor_types": {}}
"""The scores of no example at all."""


def _external(predicted: Mapping[str, Probabilities], tables: Mapping[str, Table]) -> dict[str, Any]:
    """Scores of a model on what the other sites hold for testing."""
    if not predicted:
        return _NOTHING
    p, table = np.concatenate(list(predicted.values())), _pooled(tables)
    return {**scores(p, table.label), "tumor_types": _tumor_types(p, table)}


def _tumor_types(predicted: Probabilities, table: Table) -> dict[str, Any]:
    """n, accuracy and macro-accuracy of the slides of each tumour type; empty where none is known."""
    if not isinstance(table, BagTable):
        return {}
    found = {}
    for kind in sorted(set(table.tumor_type.tolist()) - {""}):
        rows = table.tumor_type == kind
        p, label = predicted[rows], table.label[rows]
        found[kind] = {
            "n": len(label),
            "accuracy": accuracy(p, label),
            "macro_accuracy": macro_accuracy(p, label),
        }
    return found


def _metrics(
    predicted: Probabilities, table: Table, repeats: int, *, slides: bool, point: float | None
) -> dict[str, Any]:
    """Everything said about one model on one set; of patches, at slide level too.

    Args:
        point: score from which on a slide is called positive, as the run found on the site's own slides.
    """
    by_slide = slide_level(predicted, table.label, table.slide, threshold=point) if slides else None
    return {
        **_level(predicted, table.label, table.patient, repeats),
        "slides": (
            _level(by_slide[0], by_slide[1], table.patient[by_slide[2]], repeats) | {"threshold": point}
            if by_slide
            else None
        ),
        "tumor_types": _tumor_types(predicted, table),
    }


def _level(
    predicted: Probabilities, labels: NDArray[np.int64], patient: NDArray[np.str_], repeats: int
) -> dict[str, Any]:
    """Scores, intervals clustered by patient, confusion and calibration."""
    return {
        **scores(predicted, labels),
        "intervals": bootstrap_intervals(predicted, labels, patient, repeats=repeats),
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
    headings = ["site", "n", "accuracy", "macro-acc.", "AUROC", "own part", "others'", *["with"] * several]
    rows: list[list[str] | None] = [
        [
            row["site"],
            str(row["n"]),
            *(number(row[name]) for name in SCORES),
            number(row["own"]["accuracy"]),
            number((row["external"] or {}).get("accuracy")),
            *[row["with"]] * several,
        ]
        for row in document["sites"]
    ]
    if document["merged"] is not None:
        spreads = [document["merged"][name] for name in SCORES]
        spreads += [(document[which] or {}).get("accuracy") or {} for which in ("internal", "external")]
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
        reached = {name: part["accuracy"] for name, part in document["parts"].items()}
        spread = ", ".join(f"{name} {number(m['mean'])} ± {number(m['sd'])}" for name, m in reached.items())
        say(f"  accuracy on each site's part over all models: {spread}")
    if document["between"]:
        print_between(document["between"])
    say(f"{document['run']} evaluated; next: wsi-fl report {document['run']}")
