"""Held-out patients of a site, as folds or for validation, and the selection of its prediction model on these."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.metrics import Labels, Probabilities, fill_patient_names
from wsi_fl.data.tasks import CLASSES, Task, selection_score
from wsi_fl.learning.ensemble import Ensemble
from wsi_fl.types import UsageError

COMMON = ("proxy", "shared")
"""The roles of models that all sites have alike: a proxy that travels, or a model computed from what all release."""
MODEL_CHOICES = ("private", "mean", *COMMON)
"""Choices of a site's prediction model; of equally good ones the first."""
LOCAL = "local"
"""Role of the local model, trained on the site's examples beside the models of the method."""
ENSEMBLE = "ensemble"
"""Choice of the ensemble of the local and the federated model."""


@dataclass(frozen=True)
class HoldoutDraw:
    """The held-out draw: pseudorandom numbers of patients from a seed, their names and the site's secret.

    Attributes:
        secret: of the hospital, so that the choice of a seed is no choice of held-out patients; empty for a simulated
            site, whose results follow from the seed.
    """

    secret: bytes = b""

    def draw_number(self, purpose: str, seed: int, name: str) -> int:
        """Return a number in [0, 2²⁵⁶), pseudorandom without the secret (HMAC-SHA256)."""
        if self.secret:
            text = json.dumps([purpose, seed, name]).encode()
            return int.from_bytes(hmac.digest(self.secret, text, "sha256"), "big")
        return int.from_bytes(hashlib.sha256(f"{purpose}{seed} {name}".encode()).digest(), "big")

    @property
    def secret_digest(self) -> str:
        """Return a digest of the secret for the hospital's run folders; "" without a secret."""
        return hmac.digest(self.secret, b"mark", "sha256").hex() if self.secret else ""


PUBLIC_DRAW = HoldoutDraw()
"""The draw without a secret, which follows from the seed."""


def draw_held_out(
    patient: NDArray[np.str_], fraction: float, seed: int, holdout: HoldoutDraw = PUBLIC_DRAW
) -> NDArray[np.bool_]:
    """Return bool[rows]: each patient is held out with probability `fraction`, independently of all others.

    A patient's draw depends on the name and the secret only; for a row without a patient on its position, so such rows
    are refused under noise. In a stratified split, or one of fixed size, one record would decide which others are
    trained on, and ε would not cover that. So a small site may have no validation rows, or no training rows.
    """
    names = fill_patient_names(patient).tolist()
    shares = {name: (holdout.draw_number("", seed, name) >> 208) / 2**48 for name in set(names)}
    return np.array([shares[name] < fraction for name in names], bool)


def require_patient_names(patient: NDArray[np.str_], site: str) -> None:
    """Refuse rows without a patient where a validation split is drawn under privacy.

    Such a row's draw depends on its position: with a row less, others change sides, and ε does not cover that.

    Raises:
        UsageError: with the number of rows without a patient.
    """
    if n := int((patient == "").sum()):
        raise UsageError(
            f"site {site}: {n} training rows have no patient, so train.val_fraction cannot draw them without voiding "
            "ε; name the patients in the site's table of slides, or set train.val_fraction=0"
        )


# ---- folds


_MIN_FOLDS = 2


def assign_folds(
    patient: NDArray[np.str_],
    label: NDArray[np.int64],
    *,
    n_folds: int,
    seed: int,
    stratified: bool,
    holdout: HoldoutDraw = PUBLIC_DRAW,
) -> NDArray[np.int64]:
    """Return int64[rows] in [0, n_folds): the fold of each row, the same for all rows of a patient, in any order.

    Without stratification, a patient's fold follows from `seed`, the secret and the patient's name only, as ε requires:
    with one patient more or less, all others keep their fold. A fold may be empty.

    With stratification, a patient's class is the highest label of its rows, as a patient with tumour on one slide has a
    tumour. The patients of a class, in an order drawn from `seed` and their names, go round the folds, and the next
    class begins where the last one ended. So folds differ by at most one patient, in every class and in all.

    Raises:
        UsageError: for rows without a patient, and for fewer patients than folds, unless the draw is secret and not
            stratified.
    """
    if n := int((patient == "").sum()):
        raise UsageError(f"{n} rows have no patient, but folds divide patients; name them in the table of slides")
    names, patient_index = np.unique(patient, return_inverse=True)
    # a hospital does not disclose its number of patients
    if len(names) < n_folds and (stratified or not holdout.secret):
        advice = f"set train.folds to {len(names)} or less"
        remedy = advice if len(names) >= _MIN_FOLDS else "leave the site out"
        raise UsageError(f"{len(names)} patients cannot be divided into {n_folds} folds; {remedy}")
    draws = [holdout.draw_number("fold ", seed, name) for name in names.tolist()]
    if not stratified:
        return np.array([(draw >> 192) % n_folds for draw in draws], np.int64)[patient_index]
    kind = _patient_classes(patient_index, label, len(names))
    order = sorted(range(len(names)), key=lambda k: (kind[k], draws[k]))
    fold = np.empty(len(names), np.int64)
    fold[order] = np.arange(len(names)) % n_folds
    return fold[patient_index]


def rare_classes(patient: NDArray[np.str_], label: NDArray[np.int64], *, n_folds: int) -> dict[int, int]:
    """Return {class: patients} of the classes with fewer patients than folds, so absent from some folds."""
    names, patient_index = np.unique(patient, return_inverse=True)
    counts = np.bincount(_patient_classes(patient_index, label, len(names)))
    return {int(k): int(counts[k]) for k in np.flatnonzero((counts > 0) & (counts < n_folds))}


def _patient_classes(patient_index: NDArray[np.int64], label: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return int64[n], the highest label of each of n patients."""
    kind = np.zeros(n, np.int64)
    np.maximum.at(kind, patient_index, label)
    return kind


# ---- the prediction model


def roles_of_choice(model: str, ensemble: Ensemble | None = None, there: Collection[str] = ()) -> tuple[str, ...]:
    """Return the roles of the models for a prediction model."""
    if model == ENSEMBLE and ensemble is not None:
        return tuple(dict.fromkeys((*roles_of_choice(ensemble.own), *roles_of_choice(ensemble.shared))))
    return ("private", "shared" if "shared" in there else "proxy") if model == "mean" else (model,)


def combine_predictions(
    predicted: Mapping[str, Probabilities], model: str, ensemble: Ensemble | None = None
) -> Probabilities:
    """Return float64[n, classes], the predictions of one model, the mean of two, or those of an ensemble.

    Args:
        predicted: probabilities by role.
    """
    if model == ENSEMBLE:
        assert ensemble is not None
        return ensemble(combine_predictions(predicted, ensemble.own), combine_predictions(predicted, ensemble.shared))
    predictions = [predicted[role] for role in roles_of_choice(model, there=predicted)]
    return predictions[0] if len(predictions) == 1 else np.mean(predictions, axis=0)


def score_candidates(
    predicted: Mapping[str, Probabilities], labels: Labels, task: Task = CLASSES
) -> dict[str, float | None]:
    """Return the selection score of every choice possible with these models, the local model first."""
    choices = [
        choice
        for choice in (LOCAL, *MODEL_CHOICES)
        if set(roles_of_choice(choice, there=predicted)) <= predicted.keys()
    ]
    return {choice: selection_score(combine_predictions(predicted, choice), labels, task) for choice in choices}


def select_model(predicted: Mapping[str, Probabilities], labels: Labels, task: Task = CLASSES) -> str:
    """Return the choice with the best selection score; "private" where it cannot be computed, as with one class."""
    if len(np.unique(labels, axis=0)) < 2:
        return "private"
    scores = score_candidates(predicted, labels, task)
    return max(scores, key=lambda choice: -np.inf if (value := scores[choice]) is None else value)
