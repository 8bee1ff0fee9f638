"""Mix the answers of a site's own and of the shared model, with weights fitted on the site's own rows.

The own model's answers come from models that have not seen the row's patient, the shared model's are computed without
the site's own part. So neither is believed for what it has memorised (stacked generalisation; Wolpert, 1992).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.metrics import Labels, Probabilities
from wsi_fl.learning.tuning import balanced_loss

_WEIGHTS = np.linspace(0, 1, 26)
_LEAST = 1e-12
_PULL = 0.05
"""Strength, for one row, of the pull of slope and biases towards 0."""


@dataclass(frozen=True)
class Stack:
    """A mixture of two models' logits, calibrated so that all classes count alike.

    Attributes:
        weight: of the shared model, from 0 to 1.
        scales: what the logits of the own and of the shared model are divided by.
        slope, bias: of the mixture, one number and one for each class.
    """

    weight: float
    scales: tuple[float, float]
    slope: float
    bias: tuple[float, ...]

    def __call__(self, own: Probabilities, shared: Probabilities) -> Probabilities:
        """Return probabilities float64[n, classes] of both models' probabilities float64[n, classes]."""
        mixed = self.mixed(_logits(own), _logits(shared)) * self.slope + np.array(self.bias)
        impossible = (own == 0) & (shared == 0)
        raised = np.where(impossible, 0.0, np.exp(mixed - mixed.max(1, keepdims=True)))
        found: Probabilities = raised / raised.sum(1, keepdims=True)
        return found

    def mixed(self, own: NDArray[np.float64], shared: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mixture of two models' logits float64[n, classes], not calibrated yet."""
        a, b = self.scales
        return (1 - self.weight) * own / a + self.weight * shared / b

    @staticmethod
    def of(document: Mapping[str, Any]) -> Stack:
        """Return the stack of a document that `asdict` made."""
        scales = (float(document["scales"][0]), float(document["scales"][1]))
        bias = tuple(map(float, document["bias"]))
        return Stack(float(document["weight"]), scales, float(document["slope"]), bias)


def shared_alone(n_classes: int) -> Stack:
    """Return the stack that uses the shared model alone, for a site whose own rows cannot fit one."""
    return Stack(1.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def own_alone(n_classes: int) -> Stack:
    """Return the stack that uses the site's own model alone."""
    return Stack(0.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def stack_by_rows(
    own: Probabilities, shared: Probabilities, labels: Labels, own_rows: float, shared_rows: float
) -> Stack:
    """Return the stack that follows from how many rows both models rest on; nothing is fitted.

    A head along few directions is never worth more than `_ENOUGH` rows of each class to a model that sees all features.
    The own one counts as much as twice the squared ratio of both numbers, at least half as much as the shared one, and
    answers alone where it would count four times as much. Both models' logits are brought to the spread of the own
    one's.

    Args:
        own, shared: float64[n, classes], of the same rows.
        labels: int64[n].
        own_rows, shared_rows: of each class, that the models have learned from.

    Example:
        >>> said = np.array([[0.9, 0.1], [0.2, 0.8]])
        >>> two = np.array([0, 1])
        >>> stack_by_rows(said, said, two, own_rows=5, shared_rows=30).weight
        0.6666666666666666
        >>> stack_by_rows(said, said, two, own_rows=500, shared_rows=900).weight
        0.0
    """
    ratio = own_rows * (1 / max(shared_rows, _LEAST) + 1 / _ENOUGH)
    part = max(_LEAST_OWN, 2 * ratio**2)
    if part > _ALONE:
        return own_alone(own.shape[1])
    spread = tuple(_spread(_logits(said), labels) for said in (own, shared))
    scales = (spread[0], spread[1])
    return Stack(1 / (1 + part), scales, scales[0], (0.0,) * own.shape[1])


_ENOUGH = 60.0
_LEAST_OWN, _ALONE = 0.5, 4.0
"""Part of the own model beside 1 of the shared one: at least, and from where on it answers alone."""


def _spread(logits: NDArray[np.float64], labels: Labels) -> float:
    """Return the standard deviation of logits float64[n, classes] where all classes that occur count alike; 1 for 0."""
    counts = np.bincount(labels)
    weights = (1 / counts[labels]) / (counts > 0).sum()
    centred = logits - weights @ logits
    return float(np.sqrt((weights @ centred**2).mean())) or 1.0


def fitted_stack(own: Probabilities, shared: Probabilities, labels: Labels) -> Stack:
    """Return the stack whose balanced log-loss on these rows is least.

    Args:
        own: float64[n, classes], of rows whose patients the model had not seen.
        shared: float64[n, classes], of the same rows.
        labels: int64[n], of at least two classes.

    Example:
        >>> right = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.2, 0.8]])
        >>> fitted_stack(right, np.full((4, 2), 0.5), np.array([0, 0, 1, 1])).weight
        0.0
    """
    logits = _logits(own), _logits(shared)
    spread = [float(one.std()) or 1.0 for one in logits]
    best: tuple[float, Stack] | None = None
    for weight in _WEIGHTS:
        plain = Stack(float(weight), (spread[0], spread[1]), 1.0, (0.0,) * own.shape[1])
        slope, bias = _calibrated(plain.mixed(*logits), labels)
        stack = Stack(plain.weight, plain.scales, slope, bias)
        loss = balanced_loss(stack(own, shared), labels)
        if best is None or loss < best[0] - _LEAST:
            best = loss, stack
    assert best is not None
    return best[1]


def _calibrated(mixed: NDArray[np.float64], labels: Labels) -> tuple[float, tuple[float, ...]]:
    """Return the slope and biases of the mixture's logits float64[n, classes] with the least balanced log-loss.

    They are pulled a little towards 0: with few rows in a class, many would separate it equally well.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    # 1. balanced weights: every class has the same total
    n, n_classes = mixed.shape
    counts = np.bincount(labels, minlength=n_classes)
    weights = 1 / counts[labels] / (counts > 0).sum()
    truth = np.eye(n_classes)[labels]

    # 2. log-loss of softmax(slope · logits + bias) plus an L2 penalty, and its gradient
    def loss(at: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        said = log_softmax(mixed * at[0] + at[1:], axis=1)
        wrong = (np.exp(said) - truth) * weights[:, None]
        value = -float(weights @ said[np.arange(n), labels]) + _PULL / n * float(at @ at)
        return value, np.array([(wrong * mixed).sum(), *wrong.sum(0)]) + 2 * _PULL / n * at

    # 3. minimised from the uncalibrated logits on, with a slope of at least 0
    start = np.array([1.0, *np.zeros(n_classes)])
    bounds = [(0.0, None), *[(None, None)] * n_classes]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return float(found[0]), tuple(found[1:].tolist())


def _logits(said: Probabilities) -> NDArray[np.float64]:
    """Return logits of probabilities: their logarithms, centred over the classes."""
    logs = np.log(np.clip(said, _LEAST, None))
    centred: NDArray[np.float64] = logs - logs.mean(1, keepdims=True)
    return centred
