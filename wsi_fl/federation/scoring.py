"""What a site's models are worth: on its test sets, and on its own rows, for what answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.competence import Measured, fitting_answer, measured
from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.local import probabilities, undecided_where_broken
from wsi_fl.learning.metrics import Probabilities, macro_accuracy, scores
from wsi_fl.learning.validation import ANSWERS, answered, best_answer, roles


def evaluate(site: Site, schedule: Schedule, alive: Callable[[], None]) -> dict[str, Any]:
    """Return the scores of a site's answer on every test set, by name; with a proxy also "with" and "proxy".

    Args:
        alive: called with every batch.
    """
    line: dict[str, Any] = {}
    answer = "private"
    if "proxy" in site.learners:
        answer = schedule.answer
        if answer in ("auto", "competence"):
            answer = (choose_answer(site, schedule, alive) or {"with": "private"})["with"]
        line["with"] = answer
    sets = list(site.tests.items())
    for name, examples in sets:
        wanted = dict.fromkeys(roles(answer))
        if "proxy" in site.learners and name == sets[-1][0]:
            wanted["proxy"] = None
        said = {role: _predict(site, role, examples, alive) for role in wanted}
        line[name] = scores(answered(said, answer), examples.label)
        if "proxy" in said and name == sets[-1][0]:
            line["proxy"] = {"on": name, **scores(said["proxy"], examples.label)}
    return line


def choose_answer(site: Site, schedule: Schedule, alive: Callable[[], None]) -> dict[str, Any] | None:
    """Return what should answer at a site, as its run remembers it; None where nothing can be chosen.

    It is what does best on the site's validation split, or what competence says where that is asked for.
    """
    examples = site.validation
    if "proxy" not in site.learners:
        return None
    if schedule.answer == "competence":
        found = _judge_proxy(site, alive)
        return {"with": fitting_answer(found), "by": "competence", "competence": asdict(found)}
    if examples is None:
        return None
    said = {role: _predict(site, role, examples, alive) for role in ("private", "proxy")}
    reached = {answer: macro_accuracy(answered(said, answer), examples.label) for answer in ANSWERS}
    return {
        "with": best_answer(said, examples.label),
        "by": "validation",
        "n": len(examples),
        "macro_accuracy": reached,
    }


def _judge_proxy(site: Site, alive: Callable[[], None]) -> Measured:
    """Return what the site finds out about its proxy, from rows that it did not memorise."""
    validation = site.validation
    protected = site.plan is not None and site.plan.sigma > 0
    parts = [examples for examples in (validation, site.train if protected else None) if examples is not None]
    judged = joined(parts)
    teacher = _predict(site, "proxy", judged, alive)
    duel = None
    if validation is not None:
        pupil = _predict(site, "private", validation, alive)
        duel = teacher[: len(validation)], pupil, validation.label
    return measured(
        teacher, judged.label, allowed=judged.allowed, training_labels=site.train.label, duel=duel
    )


def _predict(site: Site, role: str, examples: Examples, alive: Callable[[], None]) -> Probabilities:
    """Return float64[n, classes] of one of a site's models."""
    said = probabilities(site.learners[role].logits, examples, site.device, alive=alive)
    return undecided_where_broken(said, examples.allowed)
