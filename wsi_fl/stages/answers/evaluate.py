"""`evaluate`: what answers for every site, on the merged multi-centric test set and on each site's part.

*Internal* is a site's own part, *external* are the parts of all the others. An external set is of sites that take no
part in the run, all of whose patches are new to its models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.learning.counts import Between
from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.local import probabilities, probabilities_of_each, undecided_where_broken
from wsi_fl.learning.metrics import mean_and_sd
from wsi_fl.learning.predictions import Predictions, aggregated_scores, measured, of_tumor_types
from wsi_fl.learning.tasks import Task, scored
from wsi_fl.learning.validation import ANSWERS, LONE, STACK, answered, roles
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.report.words import SCORES, SHORT, classes_of_parts, known, measured_in, number, received, spread
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.between import between_lines, between_of
from wsi_fl.stages.answers.predictions import seal_of, write_predictions
from wsi_fl.stages.answers.trained import TrainedModels, answering, offered, settings_of
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.party import RunContext, as_begun
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.stages.work.job import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import value_of
from wsi_fl.types import SPLITS, BagTable, UsageError, WsiFlError

_TestPart = tuple[Examples, dict[str, NDArray[Any]]]
"""A site's test examples, and what else is known of each: where a patch lies, or of a slide before the diagnosis."""


_Scores = dict[str, float | None]
_Spreads = dict[str, dict[str, float | None]]
"""Mean and sd by score."""


class _Together(TypedDict):
    """All sites' predictions as one, by rule, and the rule of the run."""

    rule: str
    rules: dict[str, _Scores]


class _Outside(TypedDict):
    """What was reached on sites that took no part."""

    sites: list[str]
    n: int
    rows: list[dict[str, object]]
    aggregated: dict[str, _Scores] | None
    left_out: dict[str, object] | None


class Evaluation(TypedDict):
    """The document of `evaluate`; a site has its scores by name, beside what else is known of its model."""

    run: str
    method: str
    task: str
    scores: list[str]
    examples: str
    model: str
    shared: bool
    merged: _Spreads | None
    internal: _Spreads
    external: _Spreads | None
    models: dict[str, dict[str, _Spreads | None]]
    aggregated: _Together | None
    external_set: _Outside | None
    parts: dict[str, _Spreads] | None
    sites: list[dict[str, Any]]
    inference_sites: dict[str, Any] | None
    global_head: list[dict[str, Any]] | None
    cross_site: Between | None
    bootstrap: dict[str, object]


def evaluate(
    study: Study, run_name: str, *, overrides: Sequence[str] = (), watcher: Watcher | None = None
) -> Evaluation:
    """Evaluates a run, writes evaluation.json and each site's predictions.csv, returns the document.

    Where a site is real and does not let its patches be read by others, each model is evaluated on its own
    site's part alone and `merged` is null. `cross_site` has what the hospitals told of what travelled, by counts.

    Args:
        overrides: `predict.KEY=VALUE` over the run's configuration.
    """
    watcher = watcher or Silent()
    run = RunFolder(study.run(run_name))
    study = as_begun(study, run)
    with RunContext.of_run(study, run, settings_of(study, run, overrides)) as party:
        document = _document(party, watcher)
    run.write("evaluation", document)
    return document


def _document(party: RunContext, watcher: Watcher) -> Evaluation:
    pipeline, merged, lost = party.pipeline, party.may_merge, party.lost
    sites = [one for one in party.members if merged or party.has_store(one.name)]  # a hospital has its own
    parts = {site.name: _test_part(party.data(site.name)) for site in sites}
    released = _released(party, parts) if party.method.once else None
    receivers = _received(party, released or []) if party.receivers else None
    predicts = receivers and receivers["sites"]
    if not any(len(part) for part, _ in parts.values()) and not predicts:
        command = party.kind.cut_by
        raise WsiFlError(f"no site has test {party.examples}; {command} with slides.test_fraction above 0")
    rows, answers = [], []
    taking_part = [site for site in sites if site.name not in lost]
    for index, site in enumerate(taking_part):
        watcher.update("evaluate", index, len(taking_part), site.name)
        row, answer = _evaluate_site(party, site, parts if merged else {site.name: parts[site.name]})
        rows.append(row)
        answers.append(answer)
        watcher.update("evaluate", index + 1, len(taking_part), site.name)
    if not rows and not predicts:
        raise WsiFlError(f"{party.run.name}: every site whose store is here was lost and has no model")
    weights = [float((party.data(one.name).table.split == "train").sum()) for one in taking_part]
    several, task = merged and len(rows) > 1, party.task
    together: _Together | None = None
    if several and task.kind == "classes":  # a site weighs its training rows
        rules = aggregated_scores([table.answers for table in answers], answers[0].truth, weights)
        together = {"rule": value_of(pipeline, "mpcpa.aggregate") or "mean", "rules": rules}
    over_parts = None
    if merged:
        names = rows[0]["parts"]
        over_parts = {name: _over_sites([row["parts"][name] for row in rows], task) for name in names}
    return {
        "run": party.study.relative(party.run.path),
        "method": party.name,
        "task": task.kind,
        "scores": list(task.scores),
        "examples": party.examples,
        "model": pipeline.predict.model,
        "shared": several and all(row["model"] == offered(party.method).get("shared") for row in rows),
        "merged": _over_sites(rows, task) if merged else None,
        "internal": _over_sites([row["own"] for row in rows], task),
        "external": _over_sites([row["external"] for row in rows], task) if several else None,
        "models": _over_models(rows, task, merged=merged),
        "aggregated": together,
        "external_set": _outside(party, taking_part, weights),
        "parts": over_parts,
        "sites": rows,
        "inference_sites": receivers,
        "global_head": released,
        "cross_site": between_of(party),
        "bootstrap": {"repeats": pipeline.evaluate.bootstrap, "cluster": "patient", "level": 0.95},
    }


def _over_sites(parts: Sequence[Mapping[str, Any]], task: Task) -> _Spreads:
    """Mean ± sd of every score; null where some site has none."""
    return {name: mean_and_sd([part[name] for part in parts]) for name in task.scores}


def _over_models(
    rows: Sequence[Mapping[str, Any]], task: Task, *, merged: bool
) -> dict[str, dict[str, _Spreads | None]]:
    """Mean ± sd of every score by what could answer; of methods without a proxy, the private models alone."""
    found: dict[str, dict[str, _Spreads | None]] = {}
    for answer in (*ANSWERS, LONE, STACK):
        said = [row["models"][answer] for row in rows if answer in row["models"]]
        if said:
            whole = _over_sites(said, task) if merged else None
            found[answer] = {"merged": whole, "internal": _over_sites([one["own"] for one in said], task)}
    return found


def _test_part(data: Data) -> _TestPart:
    table, rows = data.table, np.flatnonzero(data.table.split == "test")
    if isinstance(table, BagTable):
        return data.held_out, {"tumor_type": table.tumor_type[rows]}
    return data.held_out, {"x_l0": table.xy_l0[rows, 0], "y_l0": table.xy_l0[rows, 1]}


def _evaluate_site(
    party: RunContext, site: SiteFile, seen: Mapping[str, _TestPart]
) -> tuple[dict[str, Any], Predictions]:
    """What answers for one site, on the parts that it may see, its own or everybody's; and what it said of each."""
    folder = party.run.site(site.name)
    found, table = _predicted(party, site, seen)
    moved = _moved_by_noise(found, seen, table)
    # images of a partitioned data set are no slides, and other questions are asked of slides or patients anyway
    slides, choice = party.data(site.name).store.meta.spec.mpp > 0, folder.kept("prediction_model") or {}
    point = choice.get("slide_threshold") if slides and choice.get("model") == table.answer else None
    level = partial(measured, repeats=party.pipeline.evaluate.bootstrap, slides=slides, point=point)
    mine, others = table.own, table.others
    own, merged = level(mine) | {"noise": moved and moved[1]}, len(seen) > 1
    row = {
        "site": site.name,
        "model": table.answer,
        "predictions": seal_of(folder),
        **(level(table) | {"noise": moved and moved[0]} if merged else own),
        "own": own,
        "external": others.scores() | {"tumor_types": of_tumor_types(others)} if merged else None,
        "parts": {name: part.scores() for name, part in table.by("part").items()},
        "models": {model: _scores(table, model) | {"own": _scores(mine, model)} for model in table.said},
    }
    return row, table


def _released(party: RunContext, parts: Mapping[str, _TestPart]) -> list[dict[str, Any]]:
    """Return what the head of letters alone, which receivers have and `export` writes, reaches on each test part."""
    rows = []
    for name, (part, _) in parts.items():
        if len(part) and name not in party.lost:
            found = _models(party, party.site(name))
            head = found.models["shared"]
            assert isinstance(head, SharedHead)
            said = probabilities(head.as_released(), part, found.device)
            rows.append({"site": name, "n": len(part), **scored(said, part.label, party.task)})
    return rows


def _received(party: RunContext, released: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write what the head that receivers have says of all their examples; return what is to be known of that.

    Nobody knows what is true of them. What to expect is what the same head reaches on the test parts of the members.
    """
    rows = []
    for name in filter(party.has_store, party.receivers):
        _, table = _predicted(party, party.site(name), {name: _test_part(party.data(name))}, known=False)
        rows.append({"site": name, "n": len(table), "model": table.answer})
    values = {score: [v for one in released if (v := one[score]) is not None] for score in party.task.scores}
    expected = {
        score: {"mean": float(np.mean(found)), "low": min(found), "high": max(found)}
        for score, found in values.items()
        if found and len(found) == len(released)
    }
    return {"sites": rows, "reference_sites": [one["site"] for one in released], "expected": expected}


def _scores(table: Predictions, model: str) -> dict[str, object]:
    return {**table.scores(model), **({} if len(table) else {"tumor_types": {}})}


_REDRAWS = 32
"""How often the noise of a head is drawn anew: its standard deviation is then known to an eighth."""


def _moved_by_noise(
    found: TrainedModels, seen: Mapping[str, _TestPart], table: Predictions
) -> tuple[dict[str, float], dict[str, float]] | None:
    """How much the noise of the letters moves every score, on all parts and on the site's own: standard deviations of
    heads whose noise is drawn anew, mixed as the site mixes its own.

    None where the answer does not rest on a head of letters with noise: what was learned in steps can't be drawn anew.
    """
    head = found.models.get("shared")
    if not isinstance(head, SharedHead) or "shared" not in roles(found.answer, found.stack, found.models):
        return None
    if not head.is_noisy or not len(table):
        return None
    rng = np.random.default_rng(0)
    heads = [head.redrawn(rng).eval() for _ in range(_REDRAWS)]
    said = np.concatenate(
        [probabilities_of_each(heads, one, found.device) for one, _ in seen.values() if len(one)], axis=1
    )
    answers = (answered({**table.said, "shared": one}, table.answer, found.stack) for one in said)
    tables = [replace(table, said={table.answer: one}) for one in answers]
    return _spread([one.scores() for one in tables]), _spread([one.own.scores() for one in tables])


def _spread(scores: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The standard deviation of every score that is always there."""
    known = [name for name in scores[0] if all(one[name] is not None for one in scores)]
    return {name: float(np.std([one[name] for one in scores], ddof=1)) for name in known if name != "n"}


def _models(party: RunContext, site: SiteFile) -> TrainedModels:
    data = party.data(site.name)
    return answering(party.run, party.pipeline, site, data.classes, data.shape, device_of_rank(), every=True)


def _predicted(
    party: RunContext, site: SiteFile, seen: Mapping[str, _TestPart], *, known: bool = True
) -> tuple[TrainedModels, Predictions]:
    """A site's models, and what each of them says of every part, and every mixture of them; which is written down.

    Args:
        known: whether anybody knows what is true of the examples.
    """
    data, folder = party.data(site.name), party.run.site(site.name)
    folder.remember_store(data.digest(), data.facts())
    found = _models(party, site)

    def said_of(model: torch.nn.Module, part: Examples) -> NDArray[np.float64]:
        if not len(part):
            return np.empty((0, len(data.classes)))
        return undecided_where_broken(probabilities(model, part, found.device), part)

    with torch.no_grad():
        by_role = {
            role: np.concatenate([said_of(model, part) for part, _ in seen.values()])
            for role, model in found.models.items()
        }
    columns = next(iter(seen.values()))[1]
    answers = (*ANSWERS, LONE, *[STACK] * (found.stack is not None))
    possible = [
        answer for answer in answers if found.models.keys() >= set(roles(answer, found.stack, found.models))
    ]
    table = Predictions.of(
        {name: part for name, (part, _) in seen.items()},
        site=site.name,
        answer=found.answer,
        said={answer: answered(by_role, answer, found.stack) for answer in possible},
        outputs=data.classes,
        about={name: np.concatenate([about[name] for _, about in seen.values()]) for name in columns},
    )
    write_predictions(folder, table, known=known)
    return found, table


def _outside(party: RunContext, sites: Sequence[SiteFile], weights: Sequence[float]) -> _Outside | None:
    """Every site's scores on `evaluate.external` and the site that was left out, and those of all predictions as one;
    None where there is neither.

    Args:
        weights: of the sites, for weighted aggregation.
    """
    left_out = party.pipeline.train.left_out
    names = [name for name in party.pipeline.evaluate.external if name != left_out]
    names += [] if left_out is None else [left_out]
    if not names:
        return None
    first = party.data(sites[0].name)
    parts = {name: _whole(party, name, first.classes) for name in names}
    examples, said = joined([*parts.values()]), []
    for site in sites:
        found = answering(party.run, party.pipeline, site, first.classes, first.shape, device_of_rank())
        with torch.no_grad():
            answers = {found.answer: found.probabilities(examples)}
        said.append(
            Predictions.of(parts, site=site.name, answer=found.answer, said=answers, outputs=first.classes)
        )
    several = len(said) > 1 and examples.task.kind == "classes"
    together = aggregated_scores([one.answers for one in said], examples.label, weights) if several else None
    found_outside: _Outside = {
        "sites": names,
        "n": len(examples),
        "rows": [{"site": table.site, **table.scores()} for table in said],
        "aggregated": together,
        "left_out": None,
    }
    if left_out is not None:
        theirs = [{"site": one.site, **one.where(one.part == left_out).scores()} for one in said]
        store = party.data(left_out).digest()
        found_outside["left_out"] = {"site": left_out, "store": store, "rows": theirs}
    return found_outside


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


def evaluation_lines(document: Evaluation) -> Lines:
    """Yield a row per site, then mean ± sd."""
    scores = document["scores"]
    first = scores[0]
    if document["sites"]:
        yield _table(document)
        over = classes_of_parts(document["sites"])
        # only there stands the macro-accuracy of parts
        if over and (document["merged"] is None or document["shared"]):
            yield Line(f"  {over}")
    for said in received(document):
        yield Line(f"  {said}")
    if together := document["aggregated"]:
        one = together["rules"][together["rule"]]
        yield Line(
            f"all sites' predictions as one ({together['rule'].replace('_', ' ')}): {number(one['accuracy'])} accuracy"
        )
    if document["parts"] and not document["shared"]:
        reached = {name: part[first] for name, part in document["parts"].items()}
        nothing = "not known (too few events or classes there)"
        said = ", ".join(
            f"{name} {spread(m) if known(m['mean']) else nothing}" for name, m in reached.items()
        )
        yield Line(f"  {SCORES[first].lower()} on each site's part over all models: {said}")
    if document["sites"] and all(row["model"] == LONE for row in document["sites"]):
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
    if document["cross_site"]:
        yield from between_lines(document["cross_site"])
    yield Line(f"{document['run']} evaluated; next: wsi-fl report {document['run']}")


def _table(document: Evaluation) -> Table:
    """What answers for each site, then mean ± sd; of one model that all share its scores on each part and on all."""
    scores, examples, sites = document["scores"], document["examples"], document["sites"]
    first = scores[0]
    headings = ["site", "n", *(SHORT.get(name, SCORES[name].lower()) for name in scores)]

    def cells(name: str, found: Mapping[str, Any]) -> list[str]:
        return [name, str(found["n"]), *(number(found[score]) for score in scores)]

    if document["shared"]:
        rows = [*(cells(row["site"], row["own"]) for row in sites), None, cells("all", sites[0])]
        return Table(
            f"the shared model on each site's part and the merged test set ({examples})", headings, rows
        )
    where = "merged test set" if document["merged"] is not None else "own test set"
    several = any(row["model"] != "private" for row in sites)
    rows = [
        [
            *cells(row["site"], row),
            number(row["own"][first]),
            number((row["external"] or {}).get(first)),
            *[row["model"]] * several,
        ]
        for row in sites
    ]
    if document["merged"] is not None:
        spreads = [document["merged"][name] for name in scores]
        both = (document["internal"], document["external"])
        spreads += [(one or {}).get(first) or {} for one in both]
        rows += [None, ["mean ± sd", "", *map(spread, spreads)]]
    whose = "models" if several else "private models"
    headings += ["own part", "others'", *["model"] * several]
    return Table(f"{whose} on the {where} ({examples})", headings, rows)
