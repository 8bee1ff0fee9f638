"""What a site's models are worth: on its test sets, and on its own rows, for what answers and how far to listen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from wsi_fl.federation.methods import Method, Weights
from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.competence import Measured, fitting_answer, measured
from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.local import probabilities, undecided_where_broken
from wsi_fl.learning.metrics import Probabilities, macro_accuracy, scores
from wsi_fl.learning.validation import ANSWERS, answered, best_answer, roles


def evaluated(site: Site, method: Method, schedule: Schedule, alive: Callable[[], None]) -> dict[str, Any]:
    """Scores of the site's answer on every test set; where there is a proxy also its own on the last of them."""
    line: dict[str, Any] = {}
    answer = "private"
    if "proxy" in site.learners:
        answer = schedule.answer
        if answer in ("auto", "competence"):
            answer = (chosen(site, method, schedule, alive) or {"with": "private"})["with"]
        line["with"] = answer
    sets = list(site.tests.items())
    for name, examples in sets:
        wanted = dict.fromkeys(roles(answer))
        if "proxy" in site.learners and name == sets[-1][0]:
            wanted["proxy"] = None
        said = {role: _said(site, method, role, examples, alive) for role in wanted}
        line[name] = scores(answered(said, answer), examples.label)
        if "proxy" in said and name == sets[-1][0]:
            line["proxy"] = {"on": name, **scores(said["proxy"], examples.label)}
    return line


def chosen(
    site: Site, method: Method, schedule: Schedule, alive: Callable[[], None]
) -> dict[str, Any] | None:
    """What should answer, as its run remembers it; None where nothing can be chosen.

    By what does best on the site's validation split, or by competence where that is asked for.
    """
    examples = site.validation
    if "proxy" not in site.learners:
        return None
    if schedule.answer == "competence":
        found = _judged(site, method, alive)
        return {"with": fitting_answer(found), "by": "competence", "competence": _told(found)}
    if examples is None:
        return None
    said = {role: _said(site, method, role, examples, alive) for role in ("private", "proxy")}
    reached = {answer: macro_accuracy(answered(said, answer), examples.label) for answer in ANSWERS}
    return {
        "with": best_answer(said, examples.label),
        "by": "validation",
        "n": len(examples),
        "macro_accuracy": reached,
    }


def heeded(
    site: Site, method: Method, schedule: Schedule, alive: Callable[[], None]
) -> tuple[Weights, dict[str, Any]]:
    """(α and β of the coming round, what to log of them).

    By competence, α is the part that the proxy deserves as it stands before the round. The proxy is judged by the
    validation split and, where noise keeps it from memorising them, the training rows. None of this leaves the
    site or touches the proxy: the private model alone hears of it.
    """
    weights = schedule.weights
    if not schedule.by_competence or "proxy" not in site.learners:
        return weights, {}
    found = _judged(site, method, alive)
    alpha = weights.alpha * found.share
    return replace(weights, alpha=alpha), {"alpha": alpha, "competence": _told(found)}


def _judged(site: Site, method: Method, alive: Callable[[], None]) -> Measured:
    """What the site finds out about its proxy."""
    validation = site.validation
    protected = site.plan is not None and site.plan.sigma > 0
    parts = [examples for examples in (validation, site.train if protected else None) if examples is not None]
    judged = joined(parts)
    teacher = _said(site, method, "proxy", judged, alive)
    duel = None
    if validation is not None:
        pupil = _said(site, method, "private", validation, alive)
        duel = teacher[: len(validation)], pupil, validation.label
    return measured(
        teacher, judged.label, allowed=judged.allowed, training_labels=site.train.label, duel=duel
    )


def _told(found: Measured) -> dict[str, float | None]:
    """What is logged of it."""
    return {"score": found.score, "chance": found.chance, "known": found.known, "lacking": found.lacking}


def _said(
    site: Site, method: Method, role: str, examples: Examples, alive: Callable[[], None]
) -> Probabilities:
    """Probabilities of a site's model, "private" being what its method predicts with."""
    learner = site.learners[role].logits
    if role == "private":
        learner = partial(method.predict, site.learners)
    said = probabilities(learner, examples, site.device, alive=alive)
    return undecided_where_broken(said, examples.allowed)
