"""`evaluate`: what answers for every site, on the merged multi-centric test set and on each site's part.

*Internal* is a site's own part, *external* are the parts of all the others. An external set is of sites that take no
part in the run, all of whose patches are new to its models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.local import probabilities, probabilities_of_each, undecided_where_broken
from wsi_fl.learning.metrics import mean_and_sd
from wsi_fl.learning.predictions import Predictions, aggregated_scores, measured, of_tumor_types
from wsi_fl.learning.tasks import Task, scored
from wsi_fl.learning.validation import ANSWERS, LONE, STACK, answered, roles
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.report.words import SCORES, SHORT, known, measured_in, number, received, spread
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.between import between_lines, between_of
from wsi_fl.stages.answers.leaving import offered
from wsi_fl.stages.answers.predictions import write_predictions
from wsi_fl.stages.answers.trained import TrainedModels, answering, settings_of
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.stages.work.job import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import value_of
from wsi_fl.types import SPLITS, BagTable, UsageError, WsiFlError

TestPart = tuple[Examples, dict[str, NDArray[Any]]]
"""A site's test examples, and what else is known of each: where a patch lies, or of a slide before the diagnosis."""


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
    with RunContext.of_run(study, run, settings_of(study, run, overrides)) as party:
        document = _document(party, watcher)
    run.write_evaluation(document)
    return document


def _document(party: RunContext, watcher: Watcher) -> dict[str, Any]:
    pipeline, merged, lost = party.pipeline, party.may_merge, party.lost
    sites = [
        site for site in party.members if merged or party.has_store(site.name)
    ]  # a hospital has its own alone
    parts = {site.name: _test_part(party.data(site.name)) for site in sites}
    receivers = _received(party, parts) if party.receivers else None
    if not any(len(part) for part, _ in parts.values()) and not (receivers and receivers["sites"]):
        command = party.kind.cut_by
        raise WsiFlError(f"no site has test {party.examples}; {command} with slides.test_fraction above 0")
    rows, answers = [], []
    taking_part = [site for site in sites if site.name not in lost]
    for index, site in enumerate(taking_part):
        watcher.update("evaluate", index, len(taking_part), site.name)
        seen = parts if merged else {site.name: parts[site.name]}
        row, answer = _evaluate_site(party, site, seen)
        rows.append(row)
        answers.append(answer)
        watcher.update("evaluate", index + 1, len(taking_part), site.name)
    if not rows and not (receivers and receivers["sites"]):
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
        "shared": several and all(row["with"] == offered(party.method).get("shared") for row in rows),
        "merged": _over_sites(rows, task) if merged else None,
        "internal": _over_sites([row["own"] for row in rows], task),
        "external": _over_sites([row["external"] for row in rows], task) if several else None,
        "models": _over_models(rows, task, merged=merged),
        "aggregated": _aggregated(pipeline, weights, answers) if several and task.kind == "classes" else None,
        "external_set": _outside(party, taking_part, weights),
        "parts": {name: _over_sites([row["parts"][name] for row in rows], task) for name in shared}
        if merged
        else None,
        "sites": rows,
        "receivers": receivers,
        "between": between_of(party),
        "bootstrap": {"repeats": pipeline.evaluate.bootstrap, "cluster": "patient", "level": 0.95},
    }


def _over_sites(parts: Sequence[Mapping[str, Any]], task: Task) -> dict[str, Any]:
    """Mean ± sd of every score; null where some site has none."""
    return {name: mean_and_sd([part[name] for part in parts]) for name in task.scores}


def _over_models(rows: Sequence[Mapping[str, Any]], task: Task, *, merged: bool) -> dict[str, Any]:
    """Mean ± sd of every score by what could answer; of methods without a proxy, the private models alone."""
    found: dict[str, Any] = {}
    for answer in (*ANSWERS, LONE, STACK):
        said = [row["models"][answer] for row in rows if answer in row["models"]]
        if said:
            whole = _over_sites(said, task) if merged else None
            found[answer] = {"merged": whole, "internal": _over_sites([one["own"] for one in said], task)}
    return found


def _test_part(data: Data) -> TestPart:
    table, rows = data.table, np.flatnonzero(data.table.split == "test")
    if isinstance(table, BagTable):
        return data.held_out, {"tumor_type": table.tumor_type[rows]}
    return data.held_out, {"x_l0": table.xy_l0[rows, 0], "y_l0": table.xy_l0[rows, 1]}


def _evaluate_site(
    party: RunContext, site: SiteFile, seen: Mapping[str, TestPart]
) -> tuple[dict[str, Any], Predictions]:
    """What answers for one site, on the parts that it may see, its own or everybody's; and what it said of each."""
    run, pipeline, data = party.run, party.pipeline, party.data(site.name)
    meta = data.store.meta
    folder = run.site(site.name)
    folder.remember_store(data.digest(), data.facts())
    found = answering(run, pipeline, site, data.classes, data.shape, device_of_rank(), every=True)
    table = _predicted(party, site, seen, found)
    write_predictions(folder, table)
    moved = _moved_by_noise(found, seen, table)
    # images of a partitioned data set are no slides, and other questions are asked of slides or patients anyway
    choice = folder.kept("choice") or {}
    point = (
        choice.get("slide_threshold") if meta.spec.mpp > 0 and choice.get("with") == table.answer else None
    )
    level = partial(measured, repeats=pipeline.evaluate.bootstrap, slides=meta.spec.mpp > 0, point=point)
    mine, others = table.own, table.others
    own, merged = level(mine) | {"noise": moved and moved[1]}, len(seen) > 1
    row = {
        "site": site.name,
        "with": table.answer,
        **(level(table) | {"noise": moved and moved[0]} if merged else own),
        "own": own,
        "external": others.scores() | {"tumor_types": of_tumor_types(others)} if merged else None,
        "parts": {name: part.scores() for name, part in table.by("part").items()},
        "models": {model: _scores(table, model) | {"own": _scores(mine, model)} for model in table.said},
    }
    return row, table


def _received(party: RunContext, parts: Mapping[str, TestPart]) -> dict[str, Any]:
    """Write what the head that receivers have says of all their examples; return what is to be known of that.

    Nobody knows what is true of them. What to expect is what the same head, made of letters alone, reaches on the test
    parts of the members that are here.
    """
    rows, told = [], {}
    for name in filter(party.has_store, party.receivers):
        data, folder = party.data(name), party.run.site(name)
        folder.remember_store(data.digest(), data.facts())
        site = party.site(name)
        found = answering(
            party.run, party.pipeline, site, data.classes, data.shape, device_of_rank(), every=True
        )
        table = _predicted(party, site, {name: _test_part(data)}, found)
        write_predictions(folder, table, known=False)
        rows.append({"site": name, "n": len(table), "with": table.answer})
    for name in (name for name, (part, _) in parts.items() if len(part)):
        data, part, device = party.data(name), parts[name][0], device_of_rank()
        site, run = party.site(name), party.run
        found = answering(run, party.pipeline, site, data.classes, data.shape, device, every=True)
        head = found.models["proxy"]
        assert isinstance(head, SharedHead)
        told[name] = scored(probabilities(head.as_released(), part, device), part.label, party.task)
    values = {score: [one[score] for one in told.values()] for score in party.task.scores}
    expected = {
        score: {"mean": float(np.mean(found)), "low": min(found), "high": max(found)}
        for score, found in values.items()
        if found and None not in found
    }
    return {"sites": rows, "told_by": list(told), "expected": expected}


def _scores(table: Predictions, model: str) -> dict[str, Any]:
    return table.scores(model) if len(table) else table.scores(model) | {"tumor_types": {}}


def _aggregated(pipeline: Pipeline, weights: Sequence[float], said: Sequence[Predictions]) -> dict[str, Any]:
    """All sites' answers as one, on the merged test set, by every rule; a site weighs its training rows."""
    rules = aggregated_scores([table.answers for table in said], said[0].truth, weights)
    return {"rule": value_of(pipeline, "mpcpa.aggregate") or "mean", "rules": rules}


_REDRAWS = 32
"""How often the noise of a head is drawn anew: its standard deviation is then known to an eighth."""


def _moved_by_noise(
    found: TrainedModels, seen: Mapping[str, TestPart], table: Predictions
) -> tuple[dict[str, float], dict[str, float]] | None:
    """How much the noise of the letters moves every score, on all parts and on the site's own: standard deviations of
    heads whose noise is drawn anew, mixed as the site mixes its own.

    None where the answer does not rest on a head of letters with noise: what was learned in steps can't be drawn anew.
    """
    head = found.models.get("proxy")
    if not isinstance(head, SharedHead) or "proxy" not in roles(found.answer, found.stack):
        return None
    if not head.is_noisy or not len(table):
        return None
    rng = np.random.default_rng(0)
    heads = [head.redrawn(rng).eval() for _ in range(_REDRAWS)]
    said = np.concatenate(
        [probabilities_of_each(heads, one, found.device) for one, _ in seen.values() if len(one)], axis=1
    )
    answers = (answered({**table.said, "proxy": one}, table.answer, found.stack) for one in said)
    tables = [replace(table, said={table.answer: one}) for one in answers]
    return _spread([one.scores() for one in tables]), _spread([one.own.scores() for one in tables])


def _spread(scores: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The standard deviation of every score that is always there."""
    known = [name for name in scores[0] if all(one[name] is not None for one in scores)]
    return {name: float(np.std([one[name] for one in scores], ddof=1)) for name in known if name != "n"}


def _predicted(
    party: RunContext, site: SiteFile, seen: Mapping[str, TestPart], found: TrainedModels
) -> Predictions:
    """What each of a site's models says of every part, and every mixture of them."""
    device, classes = found.device, party.data(site.name).classes
    with torch.no_grad():
        by_role = {
            role: np.concatenate(
                [
                    undecided_where_broken(probabilities(model, one, device), one)
                    if len(one)
                    else np.empty((0, len(classes)))
                    for one, _ in seen.values()
                ]
            )
            for role, model in found.models.items()
        }
    first = next(iter(seen.values()))[1]
    known = (*ANSWERS, LONE, *[STACK] * (found.stack is not None))
    possible = [answer for answer in known if found.models.keys() >= set(roles(answer, found.stack))]
    return Predictions.of(
        {name: one for name, (one, _) in seen.items()},
        site=site.name,
        answer=found.answer,
        said={answer: answered(by_role, answer, found.stack) for answer in possible},
        outputs=classes,
        about={name: np.concatenate([about[name] for _, about in seen.values()]) for name in first},
    )


def _outside(party: RunContext, sites: Sequence[SiteFile], weights: Sequence[float]) -> dict[str, Any] | None:
    """Every site's scores on `evaluate.external` and the site that was left out, and those of all predictions as one;
    None where there is neither.

    Args:
        weights: of the sites, for weighted aggregation.

    Raises:
        UsageError: when an external site took part, tells other classes apart, or does not let its patches be read.
    """
    left_out = party.pipeline.train.left_out
    names = [name for name in party.pipeline.evaluate.external if name != left_out]
    names += [] if left_out is None else [left_out]
    if not names:
        return None
    first = party.data(sites[0].name)
    classes, device = first.classes, device_of_rank()
    parts = {name: _whole(party, name, classes) for name in names}
    examples, said = joined([*parts.values()]), []
    for site in sites:
        found = answering(party.run, party.pipeline, site, classes, first.shape, device)
        with torch.no_grad():
            answers = {found.answer: found.probabilities(examples)}
        said.append(Predictions.of(parts, site=site.name, answer=found.answer, said=answers, outputs=classes))
    several = len(said) > 1 and examples.task.kind == "classes"
    together = aggregated_scores([one.answers for one in said], examples.label, weights) if several else None
    return {
        "sites": names,
        "n": len(examples),
        "rows": _rows_of(said),
        "aggregated": together,
        "left_out": None
        if left_out is None
        else {
            "site": left_out,
            "store": party.data(left_out).digest(),
            "rows": _rows_of([table.where(table.part == left_out) for table in said]),
        },
    }


def _rows_of(said: Sequence[Predictions]) -> list[dict[str, Any]]:
    return [{"site": table.site, **table.scores()} for table in said]


def _whole(party: RunContext, name: str, classes: tuple[str, ...]) -> Examples:
    """All patches of an external site, whatever their split."""
    site = party.study.site(name)
    if name in party.names:
        raise UsageError(f"evaluate.external: site {name} took part in the run")
    if not site.allows("patches"):
        raise UsageError(
            f'sites/{name}.toml: evaluate.external reads its patches; add allow = ["patches"] if it may'
        )
    data = party.data(name)
    if (theirs := data.classes) != classes:
        raise UsageError(f"evaluate.external: site {name} has other classes, {', '.join(theirs)}")
    parts = [data.examples(split) for split in SPLITS]
    return joined([part for part in parts if len(part)])


def evaluation_lines(document: dict[str, Any]) -> Lines:
    """Yield a row per site, then mean ± sd."""
    scores = document["scores"]
    first = scores[0]
    if document["sites"]:
        yield _table_of_one(document) if document["shared"] else _table_of_sites(document)
    for said in received(document):
        yield Line(f"  {said}")
    if together := document["aggregated"]:
        one = together["rules"][together["rule"]]
        yield Line(
            f"all sites' predictions as one ({together['rule'].replace('_', ' ')}): {number(one['accuracy'])} accuracy"
        )
    if document["parts"] and not document["shared"]:
        reached = {name: part[first] for name, part in document["parts"].items()}
        said = ", ".join(
            f"{name} {spread(m)}"
            if known(m["mean"])
            else f"{name} not known (too few events or classes there)"
            for name, m in reached.items()
        )
        yield Line(f"  {SCORES[first].lower()} on each site's part over all models: {said}")
    if document["sites"] and all(row["with"] == LONE for row in document["sites"]):
        yield Line(
            "each site answers as it would alone: no rows show that joining adds to it; "
            "networks need validation rows for that (train.val_fraction)"
        )
    moved = [(row.get("noise") or {}).get(first) for row in document["sites"]]
    if known_ones := [one for one in moved if known(one)]:
        yield Line(
            f"  the noise of the letters moves {measured_in(first)} by ±{max(known_ones):.3f} (standard deviation over "
            f"{_REDRAWS} heads whose noise was drawn anew)"
        )
    if document["between"]:
        yield from between_lines(document["between"])
    yield Line(f"{document['run']} evaluated; next: wsi-fl report {document['run']}")


def _names(document: Mapping[str, Any]) -> list[str]:
    """What the scores are called above columns."""
    return [SHORT.get(name, SCORES[name].lower()) for name in document["scores"]]


def _table_of_one(document: Mapping[str, Any]) -> Table:
    """The model that all sites share, on each site's part and on the merged test set."""
    scores = document["scores"]
    rows: list[list[str] | None] = [
        [row["site"], str(row["own"]["n"]), *(number(row["own"][name]) for name in scores)]
        for row in document["sites"]
    ]
    whole = document["sites"][0]
    rows += [None, ["all", str(whole["n"]), *(number(whole[name]) for name in scores)]]
    title = f"the shared model on each site's part and the merged test set ({document['examples']})"
    return Table(title, ["site", "n", *_names(document)], rows)


def _table_of_sites(document: Mapping[str, Any]) -> Table:
    """What answers for each site, then mean ± sd."""
    where = "merged test set" if document["merged"] is not None else "own test set"
    several = any(row["with"] != "private" for row in document["sites"])
    whose = "models" if several else "private models"
    scores = document["scores"]
    first = scores[0]
    headings = ["site", "n", *_names(document), "own part", "others'", *["with"] * several]
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
        rows += [None, ["mean ± sd", "", *map(spread, spreads)]]
    return Table(f"{whose} on the {where} ({document['examples']})", headings, rows)
