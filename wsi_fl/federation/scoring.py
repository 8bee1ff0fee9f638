"""Evaluate a site's models on its test sets, and the other sites' models as all sites agree.

What is scored between hospitals, and by whom, follows from what each tells all, so that nobody waits in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.examples import Examples
from wsi_fl.learning.local import probabilities, undecided_where_broken
from wsi_fl.learning.metrics import Probabilities, operating_point, slide_level
from wsi_fl.learning.stacking import FEWEST, Stack, gated_stack, harms, own_alone, shared_alone, stack_by_rows
from wsi_fl.learning.tasks import scored, strata
from wsi_fl.learning.validation import COMMON, LONE, STACK, answered, best_answer, reached, roles
from wsi_fl.models.shared_head import SharedHead


def evaluate(site: Site, schedule: Schedule, alive: Callable[[], None]) -> dict[str, Any]:
    """Return the scores of a site's answer on every test set, by name; where it has several, which of them is "model".

    Those of a proxy or shared head are told too, on the last set. `alive` is called with every batch.
    """
    line: dict[str, Any] = {}
    answer, stack = schedule.answer, None
    if answer in ("auto", STACK):
        chosen = choose_answer(site, schedule, alive) or {"model": "private"}
        answer, stack = chosen["model"], Stack.of(chosen["ensemble"]) if "ensemble" in chosen else None
    if not site.learners.keys() >= set(roles(answer, stack, site.learners)):
        answer = "private"
    if len(site.learners) > 1:
        line["model"] = answer
    sets, common = list(site.tests.items()), _common(site)
    for name, examples in sets:
        wanted = dict.fromkeys(roles(answer, stack, site.learners))
        if common and name == sets[-1][0]:
            wanted[common] = None
        said = _predictions(site, wanted, examples, alive)
        line[name] = scored(answered(said, answer, stack), examples.label, examples.task)
        if common and name == sets[-1][0]:
            line[common] = {"on": name, **scored(said[common], examples.label, examples.task)}
    return line


def _common(site: Site) -> str:
    """Return the role of the model that all sites have alike beside their own; "" where there is none."""
    return next((role for role in COMMON if role in site.learners), "")


def choose_answer(site: Site, schedule: Schedule, alive: Callable[[], None]) -> dict[str, Any] | None:
    """Return which model or mixture should answer at a site, as its run keeps it; None where there is no choice.

    Of classes, and with a shared head, it is the mixture of what the site would answer alone with what it has by
    joining, where it knows both. Else it is what does best on the site's validation split; without one nothing speaks
    against staying alone.
    """
    task, examples, lone = site.train.task, site.validation, LONE in site.learners
    if len(site.learners) == 1:
        if site.held_out is None:
            return None
        point = _slide_threshold(site.held_out, site.train)
        return {"model": "private", "by": "cross-validation", "n": len(site.train), "slide_threshold": point}
    said = _predictions(site, site.learners, examples, alive) if examples is not None else {}
    found = {}
    if examples is not None:
        name = "macro_accuracy" if task.kind == "classes" else task.scores[0]
        found[name] = reached(said, examples.label, task)
    common = _common(site)
    shared = common != "" and isinstance(site.learners[common].model, SharedHead)
    if schedule.answer == STACK or shared or (lone and task.kind == "classes"):
        mixture = _mixture(site, said, alive) | found
        stays = lone and schedule.answer != STACK and not mixture["ensemble"]["weight"]
        return mixture | {"model": LONE} if stays else mixture
    if examples is None:
        return {"model": LONE, "by": "validation", "n": 0} if lone else None
    return {"model": best_answer(said, examples.label, task), "by": "validation", "n": len(examples)} | found


def _mixture(site: Site, validated: Mapping[str, Probabilities], alive: Callable[[], None]) -> dict[str, Any]:
    """Return a site's mixture, as its run keeps it, given what its models say of its validation split, by role.

    A site that lacks a class, or has one number or no event, asks what it has by joining; so does one with a single row
    of a class, unless a letter says what that row is worth. Any other keeps to its lone model, unless rows that neither
    has learned by heart speak for more; it also does where a shared head does harm on them.
    """
    lone = LONE if LONE in site.learners else "private"
    joined = _common(site) or "private"
    head, task = site.learners[joined].model, site.train.task
    n_strata = site.n_classes if task.kind == "classes" else 2
    counts = np.bincount(strata(site.train.label, task), minlength=n_strata)
    if counts.min() < (1 if isinstance(head, SharedHead) or task.kind != "classes" else FEWEST):
        stack, seen = shared_alone(site.n_classes), None
    else:
        if site.validation is not None and lone == LONE:
            candidates = {role: one for role, one in validated.items() if role != LONE}
            joined = best_answer(candidates, site.validation.label)
        seen = _unseen(site, lone, joined, validated, alive)
        if isinstance(head, SharedHead):
            said = {} if seen else _predictions(site, (lone, joined), site.train, alive)
            rows, own, theirs = seen or (site.train, said[lone], said[joined])
            stack = stack_by_rows(own, theirs, rows.label, head.worth(), task, rows.patient)
            if seen and stack.weight and harms(stack, own, theirs, rows.label, task):
                stack = own_alone(site.n_classes)
        elif seen is None:
            stack = own_alone(site.n_classes)
        else:
            rows, own, theirs = seen
            stack = gated_stack(own, theirs, rows.label, rows.patient)
    return {
        "model": STACK,
        "by": STACK,
        "n": 0 if seen is None else len(seen[0]),
        "ensemble": asdict(replace(stack, own=lone, shared=joined, of_logits=task.kind == "classes")),
        "slide_threshold": None if seen is None else _slide_threshold(stack(*seen[1:]), seen[0]),
    }


_Told = tuple[Examples, Probabilities, Probabilities]
"""Rows, and what the lone and the joined model say of them."""


def _unseen(
    site: Site, lone: str, joined: str, validated: Mapping[str, Probabilities], alive: Callable[[], None]
) -> _Told | None:
    """Return rows that neither model has learned by heart, with their answers; None where there are none.

    A proxy under noise has memorised no training rows, and a head along few directions very little. What the lone model
    would say of them is known by cross-validation.
    """
    epsilon = site.ledger.epsilon()
    noisy = epsilon is not None and epsilon <= _NOT_BY_HEART
    models = [site.learners[role] for role in roles(joined, there=site.learners)]
    if site.held_out is not None and all(
        isinstance(one.model, SharedHead) or (noisy and one.with_dp) for one in models
    ):
        theirs = answered(_predictions(site, roles(joined, there=site.learners), site.train, alive), joined)
        return site.train, site.held_out, theirs
    rows = site.validation
    if rows is None or len(np.unique(strata(rows.label, rows.task))) < 2:
        return None
    return rows, validated[lone], answered(validated, joined)


_NOT_BY_HEART = 10.0  # the largest ε with which a model counts as not knowing its training rows by heart


def _slide_threshold(said: Probabilities, rows: Examples) -> float | None:
    """Return the score from which on the site's own slides are best called positive; None where that is not known."""
    if rows.task.kind != "classes":
        return None
    slides = slide_level(said, rows.label, rows.slide)
    return None if slides is None else operating_point(slides[0][:, 1], slides[1])


def _predictions(
    site: Site, asked: Iterable[str], examples: Examples, alive: Callable[[], None]
) -> dict[str, Probabilities]:
    """Return float64[n, classes] of some of a site's models, by role."""
    said = {
        role: probabilities(site.learners[role].logits, examples, site.device, alive=alive) for role in asked
    }
    return {role: undecided_where_broken(one, examples) for role, one in said.items()}
