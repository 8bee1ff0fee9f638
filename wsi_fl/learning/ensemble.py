"""The prediction model of a site: one of its models, the mean of two, or an ensemble of its local and federated model.

Ensembles are fitted to held-out predictions: of the local model cross-validated by patient, of the federated one from
models that are not overfitted to the example. So memorisation earns no weight (stacked generalisation; Wolpert, 1992).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from wsi_fl.data.metrics import Labels, Probabilities, fill_patient_names, mean_over_classes
from wsi_fl.data.tasks import CLASSES, PredictionArray, Task, Truth, fold_strata, selection_score
from wsi_fl.learning.tuning import log_losses, log_probabilities, selection_loss, softmax

COMMON = ("proxy", "shared")
"""The roles of models that all sites have alike: the proxy, and of `oneshot` the shared head."""
MODEL_CHOICES = ("private", "mean", *COMMON)
"""Choices of a site's prediction model; of equally good ones the first."""
LOCAL = "local"
"""Role of the local model, trained on the site's examples beside the models of the method."""
ENSEMBLE = "ensemble"
"""Choice of the ensemble of the local and the federated model."""
_MIN_PROBABILITY = 1e-12


@dataclass(frozen=True)
class Ensemble:
    """A weighted mean of two models' logits, calibrated with equal weight of all classes, or of predictions otherwise.

    Attributes:
        weight: of the federated model, from 0 to 1.
        scales: divisors of the logits of the local and of the federated model.
        slope, bias: of the calibration, one number and one for each class.
        own, shared: the roles of the local and of the federated model.
        of_logits: whether predictions are probabilities of classes; numbers and survival curves are averaged directly.
    """

    weight: float
    scales: tuple[float, float]
    slope: float
    bias: tuple[float, ...]
    own: str = "private"
    shared: str = "proxy"
    of_logits: bool = True

    def __call__(self, local: Probabilities, federated: Probabilities) -> Probabilities:
        """Return probabilities float64[n, classes] of both models' probabilities float64[n, classes]."""
        if not self.of_logits:
            return self._mix_logits(local, federated)
        mixed = self._mix_logits(_compute_logits(local), _compute_logits(federated)) * self.slope + np.array(self.bias)
        impossible = (local == 0) & (federated == 0)
        exponentials = np.where(impossible, 0.0, np.exp(mixed - mixed.max(1, keepdims=True)))
        probabilities: Probabilities = exponentials / exponentials.sum(1, keepdims=True)
        return probabilities

    def _mix_logits(self, local: NDArray[np.float64], federated: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weighted mean float64[n, classes] before calibration."""
        a, b = self.scales
        return (1 - self.weight) * local / a + self.weight * federated / b

    @staticmethod
    def parse_document(document: Mapping[str, Any]) -> Ensemble:
        """Return the ensemble of a JSON document."""
        return TypeAdapter(Ensemble).validate_python(document)


def single_federated_ensemble(n_classes: int) -> Ensemble:
    """Return the ensemble of the federated model only, for a site with too few examples to fit one."""
    return Ensemble(1.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def single_local_ensemble(n_classes: int) -> Ensemble:
    """Return the ensemble of the local model only."""
    return Ensemble(0.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def weight_by_sample_size(
    local: PredictionArray,
    federated: PredictionArray,
    labels: Truth,
    sample_sizes: tuple[float, float],
    task: Task = CLASSES,
    patient: NDArray[np.str_] | None = None,
) -> Ensemble:
    """Return the ensemble with weights from the models' effective sample sizes; nothing is fitted.

    A head on a projection of few components is at most worth 60 examples of each class to a model of all features. The
    local model's part is twice the squared ratio of both sizes to 1 of the federated model's, at least 1/2; beyond 4
    only the local model remains. Where all examples of a class are of one patient, its part is at least 2, since they
    do not show the quality of the released statistics (studies/WORTH.md). Both models' logits are rescaled to the
    spread of the local ones; predictions of other tasks have the same unit.

    Args:
        local, federated: predictions float64[n, k] of the local and the federated model for the same examples.
        sample_sizes: effective examples of each class of the local and of the federated model.
        patient: str[n], "" for an unknown one; None for a different patient of each example.
    """
    local_rows, federated_rows = sample_sizes
    ratio = local_rows * (1 / max(federated_rows, _MIN_PROBABILITY) + 1 / _MAX_ROWS)
    part = max(_MIN_LOCAL_PART, 2 * ratio**2)
    if task.kind == "classes" and patient is not None and _has_single_patient(labels, patient):
        part = max(part, _MIN_SINGLE_PATIENT_PART)
    if part > _LOCAL_ONLY_PART:
        return single_local_ensemble(local.shape[1])
    if task.kind != "classes":
        return replace(single_federated_ensemble(local.shape[1]), weight=1 / (1 + part), of_logits=False)
    scales = _logit_scale(_compute_logits(local), labels), _logit_scale(_compute_logits(federated), labels)
    return Ensemble(1 / (1 + part), scales, scales[0], (0.0,) * local.shape[1])


_MAX_ROWS = 60.0
_MIN_LOCAL_PART, _MIN_SINGLE_PATIENT_PART, _LOCAL_ONLY_PART = 0.5, 2.0, 4.0
"""Part of the local model to 1 of the federated one: minimum, minimum where one patient has all examples of a class,
and limit beyond which only the local model remains."""


def is_worse_than_local(
    ensemble: Ensemble, local: PredictionArray, federated: PredictionArray, labels: Truth, task: Task = CLASSES
) -> bool:
    """Return whether an ensemble has a higher selection loss on these examples than the local model.

    For survival also whether the Brier score is worse: concordance on examples in the federated head's training set
    proves little. This detects corrupted class statistics, and statistics of tissue that looks different.

    Args:
        local, federated: predictions float64[n, k], of the local model cross-validated by patient.
    """
    mixed = ensemble(local, federated)
    if task.kind == "survival":
        ensemble_error, local_error = (
            task.compute_scores(predictions, labels)["integrated_brier"] or 0.0 for predictions in (mixed, local)
        )
        if ensemble_error > local_error:
            return True
    return selection_loss(mixed, labels, task) > selection_loss(local, labels, task)


def _logit_scale(logits: NDArray[np.float64], labels: Labels) -> float:
    """Return the standard deviation of logits float64[n, classes], with equal weight of all classes; 1 for 0."""
    counts = np.bincount(labels)
    weights = (1 / counts[labels]) / (counts > 0).sum()
    centered = logits - weights @ logits
    return float(np.sqrt((weights @ centered**2).mean())) or 1.0


def gate_ensemble(
    local: Probabilities, federated: Probabilities, labels: Labels, patient: NDArray[np.str_]
) -> Ensemble:
    """Return the ensemble that is better than the local model beyond chance, else the local model only.

    The federated logits are rescaled to the spread of the local ones and shifted midway between the classes. Of three
    weights, the result has the greatest gain in balanced log-loss over the local model, less a standard error over
    patients, which is larger where a class has few. Both are temperature-scaled first, so that an ensemble does not win
    by less confidence (Guo et al., "On calibration of modern neural networks", ICML 2017). With n patients of the
    rarest class a weight is at most n / (n + 7.5), or 1/3 (studies/WORTH.md, Rounds). One patient of a class gives no
    standard error.

    Args:
        local, federated: predictions float64[n, classes], of the local model cross-validated by patient, of the
            federated one not overfitted to these examples.
        labels: int64[n], of at least two classes.
        patient: str[n]; "" for an unknown one, different from all others.
    """
    logits = _compute_logits(local), _compute_logits(federated)
    scales = _logit_scale(logits[0], labels), _logit_scale(logits[1], labels)
    middle = mean_over_classes(logits[1], labels) / scales[1]
    best, best_gain, n = single_local_ensemble(local.shape[1]), 0.0, _min_patients(labels, patient)
    if n < MIN_PATIENTS:
        return best
    local_logits = logits[0] / scales[0]
    local_losses = log_losses(softmax(_fit_slope(local_logits, scales[0], labels) * local_logits), labels)
    for weight in (candidate for candidate in _WEIGHTS if candidate <= max(_WEIGHTS[0], n / (n + _PRIOR_PATIENTS))):
        mixed = (1 - weight) * local_logits + weight * (logits[1] / scales[1] - middle)
        slope = _fit_slope(mixed, scales[0], labels)
        ensemble = Ensemble(weight, scales, slope, tuple((-slope * weight * middle).tolist()))
        gain = _lower_bound_of_gain(local_losses - log_losses(ensemble(local, federated), labels), labels, patient)
        if gain > best_gain:
            best, best_gain = ensemble, gain
    return best


_WEIGHTS = (1 / 3, 1 / 2, 2 / 3)
_PRIOR_PATIENTS = 7.5
"""Prior weight of the local model, in patients of the rarest class."""
MIN_PATIENTS = 2
"""Minimum number of examples of a class for held-out ones, and of patients for an ensemble."""


def _fit_slope(logits: NDArray[np.float64], initial: float, labels: Labels) -> float:
    """Return the factor of logits float64[n, classes] of least balanced log-loss, 1/4 to 4 times the initial one."""
    from scipy.optimize import minimize_scalar

    def loss_at_factor(log_factor: float) -> float:
        probabilities = softmax(initial * np.exp(log_factor) * logits)
        return float(mean_over_classes(log_losses(probabilities, labels), labels))

    return initial * float(np.exp(minimize_scalar(loss_at_factor, bounds=(-np.log(4), np.log(4)), method="bounded").x))


def build_ensemble(
    local: Probabilities | None,
    federated: Probabilities,
    labels: Labels,
    patient: NDArray[np.str_],
    sample_sizes: tuple[float, float] | None = None,
    task: Task = CLASSES,
) -> Ensemble:
    """Return the ensemble of a hospital's local head and its federated model; of a task without classes it has
    sample sizes.

    Args:
        local: float64[n, classes], cross-validated predictions of the local head for the hospital's examples; None with
            too few patients.
        federated: float64[n, classes], of the same examples.
        sample_sizes: of a one-shot global head, the effective sample sizes of the local and the federated examples.
    """
    n_classes = federated.shape[1]
    n_strata = n_classes if task.kind == "classes" else 2
    if np.bincount(fold_strata(labels, task), minlength=n_strata).min() < (1 if sample_sizes else MIN_PATIENTS):
        return single_federated_ensemble(n_classes)
    if local is None:
        return single_local_ensemble(n_classes)
    if sample_sizes is None:
        return gate_ensemble(local, federated, labels, patient)
    ensemble = weight_by_sample_size(local, federated, labels, sample_sizes, task, patient)
    is_worse = is_worse_than_local(ensemble, local, federated, labels, task)
    return single_local_ensemble(n_classes) if is_worse else ensemble


def _lower_bound_of_gain(gains: NDArray[np.float64], labels: Labels, patient: NDArray[np.str_]) -> float:
    """Return the mean of gains float64[n], with equal weight of all classes, less an inflated standard error."""
    present, class_index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.bincount(class_index, gains) / counts
    deviations = (gains - means[class_index]) / counts[class_index] / len(present)
    patient_index = np.unique(fill_patient_names(patient), return_inverse=True)[1]
    error = np.sqrt((np.bincount(patient_index, deviations) ** 2).sum())
    return float(means.mean() - error * (1 + _DOUBLING_PATIENTS / _min_patients(labels, patient)))


def _min_patients(labels: Labels, patient: NDArray[np.str_]) -> int:
    """Return the number of patients of the class with fewest."""
    names = fill_patient_names(patient)
    return min(len(np.unique(names[labels == label])) for label in np.unique(labels))


def _has_single_patient(labels: Labels, patient: NDArray[np.str_]) -> bool:
    """Return whether several examples of a class are all of one patient."""
    all_names = fill_patient_names(patient)
    names_by_class = (all_names[labels == label] for label in np.unique(labels))
    return any(len(names) > 1 == len(np.unique(names)) for names in names_by_class)


_DOUBLING_PATIENTS = 2.0
"""Number of patients of a class that doubles the standard error."""


def _compute_logits(probabilities: Probabilities) -> NDArray[np.float64]:
    """Return logits of probabilities: their logarithms, centred over the classes."""
    logs = log_probabilities(probabilities)
    centered: NDArray[np.float64] = logs - logs.mean(1, keepdims=True)
    return centered


def roles_of_choice(model: str, ensemble: Ensemble | None = None, available: Collection[str] = ()) -> tuple[str, ...]:
    """Return the roles of the models for a prediction model."""
    if model == ENSEMBLE and ensemble is not None:
        return tuple(dict.fromkeys((*roles_of_choice(ensemble.own), *roles_of_choice(ensemble.shared))))
    return ("private", "shared" if "shared" in available else "proxy") if model == "mean" else (model,)


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
    predictions = [predicted[role] for role in roles_of_choice(model, available=predicted)]
    return predictions[0] if len(predictions) == 1 else np.mean(predictions, axis=0)


def score_candidates(
    predicted: Mapping[str, Probabilities], labels: Labels, task: Task = CLASSES
) -> dict[str, float | None]:
    """Return the selection score of every choice possible with these models, the local model first."""
    choices = [
        choice
        for choice in (LOCAL, *MODEL_CHOICES)
        if set(roles_of_choice(choice, available=predicted)) <= predicted.keys()
    ]
    return {choice: selection_score(combine_predictions(predicted, choice), labels, task) for choice in choices}


def select_model(predicted: Mapping[str, Probabilities], labels: Labels, task: Task = CLASSES) -> str:
    """Return the choice with the best selection score; "private" where it cannot be computed, as with one class."""
    if len(np.unique(labels, axis=0)) < 2:
        return "private"
    scores = score_candidates(predicted, labels, task)
    return max(scores, key=lambda choice: -np.inf if (value := scores[choice]) is None else value)
