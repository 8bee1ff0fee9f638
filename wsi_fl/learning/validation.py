"""Which patients of a site are held out, as folds or for validation; and who answers for it by what those show."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.metrics import Labels, Probabilities, one_each
from wsi_fl.learning.stacking import Stack
from wsi_fl.learning.tasks import CLASSES, Task, quality
from wsi_fl.types import UsageError

COMMON = ("proxy", "shared")
"""The roles of models that all sites have alike: the proxy, and of `oneshot` the shared head."""
ANSWERS = ("private", "mean", *COMMON)
"""Whose probabilities are a site's answer; of equally good ones the first."""
LONE = "local"
"""The role of the model that a site would have alone: it learns from the site's rows beside those of the method."""
STACK = "ensemble"
"""The answer that mixes what a site would answer alone with what it has by joining, by a `Stack`."""


@dataclass(frozen=True)
class Lots:
    """What draws who is held out, by a seed and the patients' names.

    Attributes:
        secret: of the hospital, so that whoever chooses the seed cannot choose whom it holds out; empty for a simulated
            site, whose results follow from the seed alone.
    """

    secret: bytes = b""

    def draw(self, purpose: str, seed: int, name: str) -> int:
        """Return a number in [0, 2²⁵⁶), as good as random to whoever lacks the secret (HMAC-SHA256)."""
        if self.secret:
            text = json.dumps([purpose, seed, name]).encode()
            return int.from_bytes(hmac.digest(self.secret, text, "sha256"), "big")
        return int.from_bytes(hashlib.sha256(f"{purpose}{seed} {name}".encode()).digest(), "big")

    @property
    def mark(self) -> str:
        """Return what tells one secret from another, for the hospital's own run folders; "" without a secret."""
        return hmac.digest(self.secret, b"mark", "sha256").hex() if self.secret else ""


OPEN_LOTS = Lots()
"""Those that follow from the seed alone."""


def held_out(
    patient: NDArray[np.str_], fraction: float, seed: int, lots: Lots = OPEN_LOTS
) -> NDArray[np.bool_]:
    """Return bool[rows]: each patient is held out with probability `fraction`, independently of all others.

    A patient's lot depends on the name and the lots' secret alone, that of a row without a patient on its place, which
    is why such rows are refused under noise (`require_names`). A split that looked at labels, or took so many of all
    patients, would let one record decide which others are trained on, and ε would not cover that. So a small site may
    be left without validation rows, or without training rows.
    """
    names = one_each(patient).tolist()
    lot = {name: (lots.draw("", seed, name) >> 208) / 2**48 for name in set(names)}
    return np.array([lot[name] < fraction for name in names], bool)


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
    patient: NDArray[np.str_],
    label: NDArray[np.int64],
    *,
    n_folds: int,
    seed: int,
    stratified: bool,
    lots: Lots = OPEN_LOTS,
) -> NDArray[np.int64]:
    """Return int64[rows] in [0, n_folds): the fold of each row, the same for all rows of a patient, in whatever order.

    Not stratified, a patient's fold follows from `seed`, the lots' secret and the patient's name alone, whoever else
    there is, as ε asks for: with one patient more or less, all others stay where they are. A fold may be empty then.

    Stratified, a patient's class is the highest label of its rows, as a patient with tumour on one slide has a tumour.
    The patients of a class, in an order drawn from `seed` and their names, go round the folds, and the next class
    begins where the last one ended. So folds differ by at most one patient, in every class and in all.

    Raises:
        UsageError: for rows without a patient, and for fewer patients than folds, unless lots are secret and folds not
            stratified.
    """
    if n := int((patient == "").sum()):
        raise UsageError(
            f"{n} rows have no patient, but folds divide patients; name them in the table of slides"
        )
    names, which = np.unique(patient, return_inverse=True)
    # a hospital does not tell how many patients it has
    if len(names) < n_folds and (stratified or not lots.secret):
        fewer = f"set train.folds to {len(names)} or less"
        way_on = fewer if len(names) >= _FEWEST_FOLDS else "leave the site out"
        raise UsageError(f"{len(names)} patients cannot be divided into {n_folds} folds; {way_on}")
    drawn = [lots.draw("fold ", seed, name) for name in names.tolist()]
    if not stratified:
        return np.array([(lot >> 192) % n_folds for lot in drawn], np.int64)[which]
    kind = _kinds(which, label, len(names))
    order = sorted(range(len(names)), key=lambda k: (kind[k], drawn[k]))
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


def roles(answer: str, stack: Stack | None = None, there: Collection[str] = ()) -> tuple[str, ...]:
    """Return the roles of the models that an answer needs, of those that are there."""
    if answer == STACK and stack is not None:
        return tuple(dict.fromkeys((*roles(stack.own), *roles(stack.shared))))
    return ("private", "shared" if "shared" in there else "proxy") if answer == "mean" else (answer,)


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
    said = [predicted[role] for role in roles(answer, there=predicted)]
    return said[0] if len(said) == 1 else np.mean(said, axis=0)


def reached(
    predicted: Mapping[str, Probabilities], labels: Labels, task: Task = CLASSES
) -> dict[str, float | None]:
    """Return the `tasks.quality` of every answer that these models can give, the model alone first."""
    known = [one for one in (LONE, *ANSWERS) if set(roles(one, there=predicted)) <= predicted.keys()]
    return {one: quality(answered(predicted, one), labels, task) for one in known}


def best_answer(predicted: Mapping[str, Probabilities], labels: Labels, task: Task = CLASSES) -> str:
    """Return the answer with the best `tasks.quality`; "private" where it cannot be computed, as with one class."""
    if len(np.unique(labels, axis=0)) < 2:
        return "private"
    found = reached(predicted, labels, task)
    return max(found, key=lambda one: -np.inf if (value := found[one]) is None else value)
