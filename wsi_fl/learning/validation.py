"""Which patients of a site are held out, as folds or for validation; and who answers for it by what those show."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, subset
from wsi_fl.learning.metrics import Labels, Probabilities, one_each
from wsi_fl.learning.stacking import Stack
from wsi_fl.learning.tasks import CLASSES, Task, quality
from wsi_fl.types import UsageError

ANSWERS = ("private", "mean", "proxy")
"""Whose probabilities are a site's answer; of equally good ones the first."""
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

    def lot(name: str) -> float:
        return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big") / 2**48

    names = one_each(examples.patient).tolist()
    lots = {name: lot(name) for name in set(names)}
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


# ---- folds


_FEWEST_FOLDS = 2


def folds_of(
    patient: NDArray[np.str_], label: NDArray[np.int64], *, n_folds: int, seed: int, stratified: bool
) -> NDArray[np.int64]:
    """Return int64[rows] in [0, n_folds): the fold of each row, the same for all rows of a patient, in whatever order.

    Not stratified, a patient's fold follows from `seed` and the patient's name alone, whoever else there is, as ε asks
    for: with one patient more or less, all others stay where they are.

    Stratified, a patient's class is the highest label of its rows, as a patient with tumour on one slide has a tumour.
    The patients of a class, in an order drawn from `seed` and their names, go round the folds, and the next class
    begins where the last one ended. So folds differ by at most one patient, in every class and in all.

    Raises:
        UsageError: for rows without a patient, and for fewer patients than folds.
    """
    if n := int((patient == "").sum()):
        raise UsageError(
            f"{n} rows have no patient, but folds divide patients; name them in the table of slides"
        )
    names, which = np.unique(patient, return_inverse=True)
    if len(names) < n_folds:
        way_on = (
            f"set train.folds to {len(names)} or less"
            if len(names) >= _FEWEST_FOLDS
            else "leave the site out"
        )
        raise UsageError(f"{len(names)} patients cannot be divided into {n_folds} folds; {way_on}")
    lots = [hashlib.sha256(f"fold {seed} {name}".encode()).digest() for name in names.tolist()]
    if not stratified:
        return np.array([int.from_bytes(lot[:8], "big") % n_folds for lot in lots], np.int64)[which]
    kind = _kinds(which, label, len(names))
    order = sorted(range(len(names)), key=lambda k: (kind[k], lots[k]))
    fold = np.empty(len(names), np.int64)
    fold[order] = np.arange(len(names)) % n_folds
    return fold[which]


def rare_classes(patient: NDArray[np.str_], label: NDArray[np.int64], *, n_folds: int) -> dict[int, int]:
    """Return {class: patients} of classes with fewer patients than there are folds, so that some folds test none."""
    names, which = np.unique(patient, return_inverse=True)
    counts = np.bincount(_kinds(which, label, len(names)))
    return {int(k): int(counts[k]) for k in np.flatnonzero((counts > 0) & (counts < n_folds))}


def _kinds(which: NDArray[np.int64], label: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return int64[n], the highest label of each of n patients."""
    kind = np.zeros(n, np.int64)
    np.maximum.at(kind, which, label)
    return kind


# ---- who answers


def roles(answer: str, stack: Stack | None = None) -> tuple[str, ...]:
    """Return the roles of the models that an answer needs."""
    if answer == STACK and stack is not None:
        return tuple(dict.fromkeys((*roles(stack.own), *roles(stack.shared))))
    return ("private", "proxy") if answer == "mean" else (answer,)


def answered(
    predicted: Mapping[str, Probabilities], answer: str, stack: Stack | None = None
) -> Probabilities:
    """Return float64[n, classes], the predictions of one model, the mean of two, or a mixture by a stack.

    Args:
        predicted: probabilities by role.
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
