"""What a site's models are worth: on its test sets, and on its own rows, for what answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.examples import Examples
from wsi_fl.learning.local import probabilities, undecided_where_broken
from wsi_fl.learning.metrics import Probabilities, operating_point, slide_level
from wsi_fl.learning.stacking import Stack, fitted_stack, own_alone, shared_alone
from wsi_fl.learning.tasks import quality, scored
from wsi_fl.learning.tuning import balanced_loss
from wsi_fl.learning.validation import ANSWERS, STACK, answered, best_answer, roles
from wsi_fl.models.shared_head import SharedHead


def evaluate(site: Site, schedule: Schedule, alive: Callable[[], None]) -> dict[str, Any]:
    """Return the scores of a site's answer on every test set, by name; with a proxy also "with" and "proxy".

    Args:
        alive: called with every batch.
    """
    line: dict[str, Any] = {}
    answer, stack = "private", None
    if "proxy" in site.learners:
        answer = schedule.answer
        if answer in ("auto", STACK):
            chosen = choose_answer(site, schedule, alive) or {"with": "private"}
            answer, stack = chosen["with"], Stack.of(chosen["stack"]) if "stack" in chosen else None
        line["with"] = answer
    sets = list(site.tests.items())
    for name, examples in sets:
        wanted = dict.fromkeys(roles(answer))
        if "proxy" in site.learners and name == sets[-1][0]:
            wanted["proxy"] = None
        said = {role: _predict(site, role, examples, alive) for role in wanted}
        line[name] = scored(answered(said, answer, stack), examples.label, examples.task)
        if "proxy" in said and name == sets[-1][0]:
            line["proxy"] = {"on": name, **scored(said["proxy"], examples.label, examples.task)}
    return line


def choose_answer(site: Site, schedule: Schedule, alive: Callable[[], None]) -> dict[str, Any] | None:
    """Return what should answer at a site, as its run remembers it; None where nothing can be chosen.

    It is what does best on the site's validation split, or the mixture of both models where that is asked for.
    """
    examples = site.validation
    if "proxy" not in site.learners:
        if site.held_out is None:
            return None
        point = _slide_threshold(site.held_out, site.train)
        return {"with": "private", "by": "cross-validation", "n": len(site.train), "slide_threshold": point}
    if schedule.answer == STACK:
        stack, rows, said_of_rows = _stack(site, alive)
        point = None if rows is None or said_of_rows is None else _slide_threshold(said_of_rows, rows)
        n = 0 if rows is None else len(rows)
        return {"with": STACK, "by": STACK, "n": n, "stack": asdict(stack), "slide_threshold": point}
    if examples is None:
        return None
    said = {role: _predict(site, role, examples, alive) for role in ("private", "proxy")}
    task = examples.task
    reached = {answer: quality(answered(said, answer), examples.label, task) for answer in ANSWERS}
    return {
        "with": best_answer(said, examples.label, task),
        "by": "validation",
        "n": len(examples),
        "macro_accuracy" if task.kind == "classes" else task.scores[0]: reached,
    }


def _stack(site: Site, alive: Callable[[], None]) -> tuple[Stack, Examples | None, Probabilities | None]:
    """Return how a site mixes its models, from which rows that was found, and what the mixture says of these.

    They are rows of which the private model says what models say that have not seen the patient. A proxy under noise
    has not learned them by heart, and a head made of sums answers without the site's own.
    """
    alone = shared_alone(site.n_classes)
    if site.held_out is not None:
        rows, own = site.train, site.held_out
    elif site.validation is not None:
        rows, own = site.validation, _predict(site, "private", site.validation, alive)
    else:
        return _unmixed(site, alive), None, None
    if len(set(rows.label.tolist())) < 2:
        return alone, None, None
    theirs = _said_by_shared(site, rows, alive)
    stack = fitted_stack(own, theirs, rows.label)
    return stack, rows, stack(own, theirs)


def _unmixed(site: Site, alive: Callable[[], None]) -> Stack:
    """Return one of both models alone, where no rows can be held out to mix them.

    A site of one class can only ask the shared one. Any other asks it if it tells the site's classes apart better than
    a guess; it has not seen these rows, or not learned them by heart.
    """
    own_rows = site.train
    if len(set(own_rows.label.tolist())) > 1:
        shared = _said_by_shared(site, own_rows, alive)
        guess = np.full(shared.shape, 1 / site.n_classes)
        if balanced_loss(shared, own_rows.label) >= balanced_loss(guess, own_rows.label):
            return own_alone(site.n_classes)
    return shared_alone(site.n_classes)


def _said_by_shared(site: Site, rows: Examples, alive: Callable[[], None]) -> Probabilities:
    """Return float64[n, classes]: what the shared model says, a head made of sums without the site's own part."""
    model = site.learners["proxy"].model
    asked = partial(model, own=False) if isinstance(model, SharedHead) else site.learners["proxy"].logits
    said = probabilities(_without_gradients(asked), rows, site.device, alive=alive)
    return undecided_where_broken(said, rows)


def _slide_threshold(said: Probabilities, rows: Examples) -> float | None:
    """Return the score from which on the site's own slides are best called positive; None where that is not known."""
    if rows.task.kind != "classes":
        return None
    slides = slide_level(said, rows.label, rows.slide)
    return None if slides is None else operating_point(slides[0][:, 1], slides[1])


def _without_gradients(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def asked(x: Tensor) -> Tensor:
        return model(x).detach()

    return asked


def _predict(site: Site, role: str, examples: Examples, alive: Callable[[], None]) -> Probabilities:
    """Return float64[n, classes] of one of a site's models."""
    said = probabilities(site.learners[role].logits, examples, site.device, alive=alive)
    return undecided_where_broken(said, examples)
