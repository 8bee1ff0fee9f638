"""Own and shared knowledge as one answer: how much of each, found on a site's own rows.

The own model says of each row what models say that have not seen its patient, and the shared one what it says
without the site's own part. So neither is believed for what it has learned by heart (stacked generalisation; Wolpert,
1992).
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
        """Return what `asdict` made a document of."""
        scales = (float(document["scales"][0]), float(document["scales"][1]))
        bias = tuple(map(float, document["bias"]))
        return Stack(float(document["weight"]), scales, float(document["slope"]), bias)


def shared_alone(n_classes: int) -> Stack:
    """Return the stack of a site whose own rows cannot tell: what the shared model says."""
    return Stack(1.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


def own_alone(n_classes: int) -> Stack:
    """Return the stack of a site to which the shared model says nothing: what its own model says."""
    return Stack(0.0, (1.0, 1.0), 1.0, (0.0,) * n_classes)


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
    """Slope and bias of the mixture's logits float64[n, classes] at which the balanced log-loss is least.

    Biases are drawn a little towards 0, since few rows of a class can be parted from all others by any of many.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    n, n_classes = mixed.shape
    counts = np.bincount(labels, minlength=n_classes)
    weights = 1 / counts[labels] / (counts > 0).sum()
    truth = np.eye(n_classes)[labels]

    def loss(at: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        said = log_softmax(mixed * at[0] + at[1:], axis=1)
        wrong = (np.exp(said) - truth) * weights[:, None]
        value = -float(weights @ said[np.arange(n), labels]) + _PULL / n * float(at @ at)
        return value, np.array([(wrong * mixed).sum(), *wrong.sum(0)]) + 2 * _PULL / n * at

    start = np.array([1.0, *np.zeros(n_classes)])
    bounds = [(0.0, None), *[(None, None)] * n_classes]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return float(found[0]), tuple(found[1:].tolist())


def _logits(said: Probabilities) -> NDArray[np.float64]:
    """Logits of probabilities: their logarithms, centred over the classes."""
    logs = np.log(np.clip(said, _LEAST, None))
    centred: NDArray[np.float64] = logs - logs.mean(1, keepdims=True)
    return centred
