"""Ensembles of a site's local and federated model.

They are fitted to held-out predictions: of the local model cross-validated by patient, of the federated one from models
that are not overfitted to the example. So memorisation earns no weight (stacked generalisation; Wolpert, 1992).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from wsi_fl.learning.metrics import Labels, Probabilities, mean_over_classes, one_each
from wsi_fl.learning.tasks import CLASSES, Predicted, Task, Truth
from wsi_fl.learning.tuning import criterion, log_losses, softmax

_LEAST = 1e-12


@dataclass(frozen=True)
class Stack:
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

    def __call__(self, own: Probabilities, shared: Probabilities) -> Probabilities:
        """Return probabilities float64[n, classes] of both models' probabilities float64[n, classes]."""
        if not self.of_logits:
            return self._mixed(own, shared)
        mixed = self._mixed(_logits(own), _logits(shared)) * self.slope + np.array(self.bias)
        impossible = (own == 0) & (shared == 0)
        raised = np.where(impossible, 0.0, np.exp(mixed - mixed.max(1, keepdims=True)))
        found: Probabilities = raised / raised.sum(1, keepdims=True)
        return found

    def _mixed(self, own: NDArray[np.float64], shared: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weighted mean float64[n, classes] before calibration."""
        a, b = self.scales
        return (1 - self.weight) * own / a + self.weight * shared / b

    @staticmethod
    def of(document: Mapping[str, Any]) -> Stack:
        """Return the ensemble of a JSON document."""
        return TypeAdapter(Stack).validate_python(document)


def shared_alone(n_classes: int) -> Stack:
    """Return the ensemble of the federated model only, for a site with too few examples to fit one."""
    return Stack(1.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def own_alone(n_classes: int) -> Stack:
    """Return the ensemble of the local model only."""
    return Stack(0.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def stack_by_rows(
    own: Predicted,
    shared: Predicted,
    labels: Truth,
    worth: tuple[float, float],
    task: Task = CLASSES,
    patient: NDArray[np.str_] | None = None,
) -> Stack:
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
    own_rows, shared_rows = worth
    ratio = own_rows * (1 / max(shared_rows, _LEAST) + 1 / _ENOUGH)
    part = max(_LEAST_OWN, 2 * ratio**2)
    if task.kind == "classes" and patient is not None and _one_patient(labels, patient):
        part = max(part, _LEAST_OF_ONE_PATIENT)
    if part > _ALONE:
        return own_alone(own.shape[1])
    if task.kind != "classes":
        return replace(shared_alone(own.shape[1]), weight=1 / (1 + part), of_logits=False)
    scales = _spread(_logits(own), labels), _spread(_logits(shared), labels)
    return Stack(1 / (1 + part), scales, scales[0], (0.0,) * own.shape[1])


_ENOUGH = 60.0
_LEAST_OWN, _LEAST_OF_ONE_PATIENT, _ALONE = 0.5, 2.0, 4.0
"""Part of the local model to 1 of the federated one: minimum, minimum where one patient has all examples of a class,
and limit beyond which only the local model remains."""


def harms(stack: Stack, own: Predicted, shared: Predicted, labels: Truth, task: Task = CLASSES) -> bool:
    """Return whether an ensemble has a higher selection loss on these examples than the local model.

    For survival also whether the Brier score is worse: concordance on examples in the federated head's training set
    proves little. This detects corrupted class statistics, and statistics of tissue that looks different.

    Args:
        local, federated: predictions float64[n, k], of the local model cross-validated by patient.
    """
    mixed = stack(own, shared)
    if task.kind == "survival":
        far, before = (task.scored(one, labels)["integrated_brier"] or 0.0 for one in (mixed, own))
        if far > before:
            return True
    return criterion(mixed, labels, task) > criterion(own, labels, task)


def _spread(logits: NDArray[np.float64], labels: Labels) -> float:
    """Return the standard deviation of logits float64[n, classes], with equal weight of all classes; 1 for 0."""
    counts = np.bincount(labels)
    weights = (1 / counts[labels]) / (counts > 0).sum()
    centred = logits - weights @ logits
    return float(np.sqrt((weights @ centred**2).mean())) or 1.0


def gated_stack(
    own: Probabilities, joined: Probabilities, labels: Labels, patient: NDArray[np.str_]
) -> Stack:
    """Return the ensemble that is better than the local model beyond chance, else the local model only.

    The federated logits are rescaled to the spread of the local ones and shifted midway between the classes. Of three
    weights, the result has the greatest gain in balanced log-loss over the local model, less a standard error over
    patients, which is larger where a class has few. Both are temperature-scaled first, so that an ensemble does not win
    by less confidence (Guo et al., "On calibration of modern neural networks", ICML 2017). With n patients of the
    rarest class a weight is at most n / (n + 7.5), or 1/3 (studies/WORTH.md, Rounds). One patient of a class gives no
    standard error.

    Args:
        local, federated: predictions float64[n, classes], of the local model cross-validated by patient, of the federated
            one not overfitted to these examples.
        labels: int64[n], of at least two classes.
        patient: str[n]; "" for an unknown one, different from all others.
    """
    logits = _logits(own), _logits(joined)
    scales = _spread(logits[0], labels), _spread(logits[1], labels)
    middle = mean_over_classes(logits[1], labels) / scales[1]
    best, most, n = own_alone(own.shape[1]), 0.0, _fewest(labels, patient)
    if n < FEWEST:
        return best
    alone = logits[0] / scales[0]
    before = log_losses(softmax(_slope(alone, scales[0], labels) * alone), labels)
    for weight in (one for one in _WEIGHTS if one <= max(_WEIGHTS[0], n / (n + _PRIOR))):
        mixed = (1 - weight) * alone + weight * (logits[1] / scales[1] - middle)
        slope = _slope(mixed, scales[0], labels)
        stack = Stack(weight, scales, slope, tuple((-slope * weight * middle).tolist()))
        sure = _surely(before - log_losses(stack(own, joined), labels), labels, patient)
        if sure > most:
            best, most = stack, sure
    return best


_WEIGHTS = (1 / 3, 1 / 2, 2 / 3)
_PRIOR = 7.5
"""Prior weight of the local model, in patients of the rarest class."""
FEWEST = 2
"""Minimum number of examples of a class for held-out ones, and of patients for an ensemble."""


def _slope(logits: NDArray[np.float64], usual: float, labels: Labels) -> float:
    """Return the factor of logits float64[n, classes] of least balanced log-loss, 1/4 to 4 times the initial one."""
    from scipy.optimize import minimize_scalar

    def loss(log_factor: float) -> float:
        said = softmax(usual * np.exp(log_factor) * logits)
        return float(mean_over_classes(log_losses(said, labels), labels))

    return usual * float(np.exp(minimize_scalar(loss, bounds=(-np.log(4), np.log(4)), method="bounded").x))


def stacked(
    own: Probabilities | None,
    joined: Probabilities,
    labels: Labels,
    patient: NDArray[np.str_],
    worth: tuple[float, float] | None = None,
) -> Stack:
    """Return the ensemble of a hospital's local head and its federated model.

    Args:
        local: float64[n, classes], cross-validated predictions of the local head for the hospital's examples; None with
            too few patients.
        federated: float64[n, classes], of the same examples.
        sample_sizes: of a one-shot global head, the effective sample sizes of the local and the federated examples.
    """
    n_classes = joined.shape[1]
    if np.bincount(labels, minlength=n_classes).min() < (1 if worth else FEWEST):
        return shared_alone(n_classes)
    if own is None:
        return own_alone(n_classes)
    if worth is None:
        return gated_stack(own, joined, labels, patient)
    stack = stack_by_rows(own, joined, labels, worth, patient=patient)
    return own_alone(n_classes) if harms(stack, own, joined, labels) else stack


def _surely(gains: NDArray[np.float64], labels: Labels, patient: NDArray[np.str_]) -> float:
    """Return the mean of gains float64[n], with equal weight of all classes, less an inflated standard error."""
    present, of_class, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.bincount(of_class, gains) / counts
    apart = (gains - means[of_class]) / counts[of_class] / len(present)
    whose = np.unique(one_each(patient), return_inverse=True)[1]
    error = np.sqrt((np.bincount(whose, apart) ** 2).sum())
    return float(means.mean() - error * (1 + _FEW / _fewest(labels, patient)))


def _fewest(labels: Labels, patient: NDArray[np.str_]) -> int:
    """Return the number of patients of the class with fewest."""
    whose = one_each(patient)
    return min(len(np.unique(whose[labels == one])) for one in np.unique(labels))


def _one_patient(labels: Labels, patient: NDArray[np.str_]) -> bool:
    """Return whether several examples of a class are all of one patient."""
    whose = one_each(patient)
    of_class = (whose[labels == one] for one in np.unique(labels))
    return any(len(names) > 1 == len(np.unique(names)) for names in of_class)


_FEW = 2.0
"""Number of patients of a class that doubles the standard error."""


def _logits(said: Probabilities) -> NDArray[np.float64]:
    """Return logits of probabilities: their logarithms, centred over the classes."""
    logs = np.log(np.clip(said, _LEAST, None))
    centred: NDArray[np.float64] = logs - logs.mean(1, keepdims=True)
    return centred
