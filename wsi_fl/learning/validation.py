"""A validation split for a site whose store has none, and the model that does best on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, subset
from wsi_fl.learning.metrics import Labels, Probabilities
from wsi_fl.learning.stacking import Stack
from wsi_fl.learning.tasks import CLASSES, Task, quality
from wsi_fl.types import UsageError

_PredictionSource = Literal["private", "mean", "proxy"]
"""Whose probabilities are a site's answer; of equally good ones the first."""
ANSWERS: tuple[_PredictionSource, ...] = get_args(_PredictionSource)
LONE = "alone"
"""The role of the model that a site would have alone: it learns from the site's rows beside those of the method."""
STACK = "stack"
"""The answer that mixes what a site would answer alone with what it has by joining, by a `Stack`."""


def with_validation(examples: Examples, fraction: float, seed: int) -> tuple[Examples, Examples]:
    """Return (training, validation): each patient is held out with probability `fraction`, independently of all others.

    A patient's lot depends on the name alone, that of a row without a patient on its place, which is why such rows
    are refused under noise (`require_names`). A split that looked at labels, or took so many of all patients, would
    let one record decide which others are trained on, and ε would not cover that. So a small site may be left without
    validation rows, or without training rows.
    """
    names = [name or f"row {row}" for row, name in enumerate(examples.patient.tolist())]
    lots = {name: _lot(seed, name) for name in set(names)}
    held = np.array([lots[name] < fraction for name in names], bool)
    return subset(examples, np.flatnonzero(~held)), subset(examples, np.flatnonzero(held))


def require_names(patient: NDArray[np.str_], site: str) -> None:
    """Refuse rows without a patient where a validation split is drawn under privacy.

    Such a row's lot is drawn from its place: with a row less, others change sides, and ε does not cover that.

    Raises:
        UsageError: says how many rows have no patient.
    """
    if n := int((patient == "").sum()):
        raise UsageError(
            f"site {site}: {n} training rows have no patient, so train.val_fraction cannot draw them without voiding "
            "ε; name the patients in the site's table of slides, or set train.val_fraction=0"
        )


def _lot(seed: int, name: str) -> float:
    """Return a patient's pseudorandom number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big") / 2**48


def roles(answer: str, stack: Stack | None = None) -> tuple[str, ...]:
    """Return the roles of the models that an answer needs."""
    if answer == STACK and stack is not None:
        return tuple(dict.fromkeys((*roles(stack.own), *roles(stack.shared))))
    return ("private", "proxy") if answer == "mean" else (answer,)


def answered(
    predicted: Mapping[str, Probabilities], answer: str, stack: Stack | None = None
) -> Probabilities:
    """Return float64[n, classes], the predictions of one model, the mean of two, or a mixture.

    Args:
        predicted: probabilities by role.
        stack: how both are mixed, where that is the answer.
    """
    if answer == STACK:
        assert stack is not None
        return stack(answered(predicted, stack.own), answered(predicted, stack.shared))
    said = [predicted[role] for role in roles(answer)]
    return said[0] if len(said) == 1 else np.mean(said, axis=0)


def reached(
    predicted: Mapping[str, Probabilities], labels: Labels, task: Task = CLASSES
) -> dict[str, float | None]:
    """Return the `tasks.quality` of every answer that these models can give, the model alone first."""
    known = [one for one in (LONE, *ANSWERS) if set(roles(one)) <= predicted.keys()]
    return {one: quality(answered(predicted, one), labels, task) for one in known}


def best_answer(predicted: Mapping[str, Probabilities], labels: Labels, task: Task = CLASSES) -> str:
    """Return the answer with the best `tasks.quality`; "private" where it cannot be computed, as with one class."""
    if len(np.unique(labels, axis=0)) < 2:
        return "private"
    found = reached(predicted, labels, task)
    return max(found, key=lambda one: -np.inf if (value := found[one]) is None else value)
