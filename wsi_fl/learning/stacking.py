"""Mix the answers of the model that a site would have alone and of what it has by joining.

The lone model's answers come from models that have not seen the row's patient, the joined ones from models that have
not learned it by heart. So neither is believed for what it has memorised (stacked generalisation; Wolpert, 1992).
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
    """A mixture of two models' logits, calibrated so that all classes count alike, or of what they say of other tasks.

    Attributes:
        weight: of the shared model, from 0 to 1.
        scales: what the logits of the own and of the shared model are divided by.
        slope, bias: of the mixture, one number and one for each class.
        own, shared: the answers that are mixed, as `validation.answered` knows them.
        of_logits: whether both say probabilities of classes; numbers and curves of survival are averaged as they are.
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
        """Return the mixture of logits float64[n, classes], not calibrated yet."""
        a, b = self.scales
        return (1 - self.weight) * own / a + self.weight * shared / b

    @staticmethod
    def of(document: Mapping[str, Any]) -> Stack:
        """Return the stack of a document that `asdict` made."""
        return TypeAdapter(Stack).validate_python(document)


def shared_alone(n_classes: int) -> Stack:
    """Return the stack that uses the shared model alone, for a site whose own rows cannot fit one."""
    return Stack(1.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def own_alone(n_classes: int) -> Stack:
    """Return the stack that uses the site's own model alone."""
    return Stack(0.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def stack_by_rows(
    own: Predicted,
    shared: Predicted,
    labels: Truth,
    worth: tuple[float, float],
    task: Task = CLASSES,
    patient: NDArray[np.str_] | None = None,
) -> Stack:
    """Return the stack that follows from how many rows both models rest on; nothing is fitted.

    A head along few directions is never worth more than `_ENOUGH` rows of each class to a model that sees all features.
    The own one counts as much as twice the squared ratio of both numbers, at least half as much as the shared one, and
    answers alone where it would count four times as much. Where the rows of a class are all of one patient, it counts
    at least twice as much, since they do not show what is left of the letter (studies/WORTH.md). Both models' logits
    are brought to the spread of the own one's; what they say of other tasks is in one unit.

    Args:
        own, shared: float64[n, k], of the same rows.
        worth: rows of each class that the own and the shared model have learned from (`SharedHead.worth`).
        patient: str[n], as in `gated_stack`; by default each row is one of its own.
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
"""Part of the own model beside 1 of the shared one: at least, likewise where one patient has all rows of a class, and
from where on it answers alone."""


def harms(stack: Stack, own: Predicted, shared: Predicted, labels: Truth, task: Task = CLASSES) -> bool:
    """Return whether a stack does worse than the own model on these rows, by `tuning.criterion`.

    Of survival it is also where the Brier score is worse: the order of rows that a shared head has seen says little.
    A letter that was spoilt, or is of tissue that looks otherwise, is noticed so.

    Args:
        own, shared: float64[n, k], of rows whose patients the own model had not seen.
    """
    mixed = stack(own, shared)
    if task.kind == "survival":
        far, before = (task.scored(one, labels)["integrated_brier"] or 0.0 for one in (mixed, own))
        if far > before:
            return True
    return criterion(mixed, labels, task) > criterion(own, labels, task)


def _spread(logits: NDArray[np.float64], labels: Labels) -> float:
    """Return the standard deviation of logits float64[n, classes] where all classes that occur count alike; 1 for 0."""
    counts = np.bincount(labels)
    weights = (1 / counts[labels]) / (counts > 0).sum()
    centred = logits - weights @ logits
    return float(np.sqrt((weights @ centred**2).mean())) or 1.0


def gated_stack(
    own: Probabilities, joined: Probabilities, labels: Labels, patient: NDArray[np.str_]
) -> Stack:
    """Return the stack that keeps the own model alone unless these rows show that a mixture is better.

    The joined model's logits are brought to the spread of the own one's, and midway between the classes. Of three
    weights that one is taken whose balanced log-loss is most surely less than the own model's: by more than a standard
    error over patients, which is raised where a class has few. Both are tempered first, so that a mixture is not better
    for being less sure of itself (Guo et al., "On calibration of modern neural networks", ICML 2017). With n patients
    of the rarest class a weight is at most n / (n + 7.5), or a third (studies/WORTH.md, Rounds). With one patient of a
    class nobody knows what chance could make.

    Args:
        own, joined: float64[n, classes], of rows whose patients the own model had not seen and the joined one does not
            know by heart.
        labels: int64[n], of at least two classes.
        patient: str[n]; "" where it is not known, and then the row is one of its own.
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
"""Patients that speak for the own model, beside those of the rarest class."""
FEWEST = 2
"""Rows of a class below which nothing can be held out, and patients below which they speak for no mixture."""


def _slope(logits: NDArray[np.float64], usual: float, labels: Labels) -> float:
    """Return what float64[n, classes] are multiplied with so that their balanced log-loss is least.

    It is a quarter of what is usual at least, and four times that at most.
    """
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
    """Return how a hospital with a lone head mixes it with what it has by joining.

    Args:
        own: float64[n, classes], what the lone head says of the hospital's rows, none of which it had seen; None where
            it has too few patients for that.
        joined: float64[n, classes], of the same rows.
        worth: of a head made of letters, how many rows own and shared ones are worth (`SharedHead.worth`).
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
    """Return the mean of gains float64[n], all classes counting alike, less what chance could make of it."""
    present, of_class, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.bincount(of_class, gains) / counts
    apart = (gains - means[of_class]) / counts[of_class] / len(present)
    whose = np.unique(one_each(patient), return_inverse=True)[1]
    error = np.sqrt((np.bincount(whose, apart) ** 2).sum())
    return float(means.mean() - error * (1 + _FEW / _fewest(labels, patient)))


def _fewest(labels: Labels, patient: NDArray[np.str_]) -> int:
    """Return how many patients the class that fewest have has."""
    whose = one_each(patient)
    return min(len(np.unique(whose[labels == one])) for one in np.unique(labels))


def _one_patient(labels: Labels, patient: NDArray[np.str_]) -> bool:
    """Return whether several rows of a class are all of one patient."""
    whose = one_each(patient)
    of_class = (whose[labels == one] for one in np.unique(labels))
    return any(len(names) > 1 == len(np.unique(names)) for names in of_class)


_FEW = 2.0
"""Patients of a class with which the standard error counts twice."""


def _logits(said: Probabilities) -> NDArray[np.float64]:
    """Return logits of probabilities: their logarithms, centred over the classes."""
    logs = np.log(np.clip(said, _LEAST, None))
    centred: NDArray[np.float64] = logs - logs.mean(1, keepdims=True)
    return centred
