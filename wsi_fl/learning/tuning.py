"""What a hospital can do alone: settings chosen by cross-validation over its own patients.

A model that learns without differential privacy is given the regularisation, the learning rate and the weights of the
classes that serve rows of patients best that it has not seen. Nothing here looks at a test set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.metrics import Labels, Probabilities
from wsi_fl.learning.tasks import CLASSES, Predicted, Task, Truth, quality, strata

_FOLDS = 5
_STRENGTHS = (1e-2, 1e-1, 1.0, 10.0, 100.0)
"""C of the logistic regression, times the number of features."""
_USUAL = 1.0
"""Of these, where nothing can be held out."""
_SURE = 1e-12


@dataclass(frozen=True)
class FittedHead:
    """A linear head fitted to all rows of a site, its decision boundary midway between the classes on unseen rows.

    Attributes:
        weight, bias: float64[classes, d], float64[classes].
        strength: C of the regularisation, in scikit-learn's sense.
        loss: balanced log-loss of `held_out`; None where nothing could be held out.
        held_out: float64[n, classes], what heads that had not seen a row's patient said of it; None likewise.
    """

    weight: NDArray[np.float64]
    bias: NDArray[np.float64]
    strength: float
    loss: float | None
    held_out: Probabilities | None

    @property
    def facts(self) -> dict[str, Any]:
        """What a run keeps of it."""
        return {"by": "cross-validation", "strength": self.strength, "loss": self.loss}


def fitted_head(x: NDArray[Any], labels: Labels, patient: NDArray[np.str_], n_classes: int) -> FittedHead:
    """Fit a balanced logistic regression whose regularisation is the best on patients that were held out.

    Few rows of a class leave its scores too low, since the head knows them by heart. So the bias is moved to where the
    scores of held-out rows are equal midway between the classes' means, if that lessens their balanced log-loss.
    Features are rotated into the span of the rows first, which changes nothing about the solution.

    Args:
        x: float[n, d], features as the linear layer sees them.
        labels: int64[n].
        patient: str[n]; "" where it is not known, and then the row is one of its own.

    Example:
        >>> x = np.array([[0.0, 1.0], [0.1, 1.0], [1.0, 0.0], [0.9, 0.0]])
        >>> found = fitted_head(x, np.array([0, 0, 1, 1]), np.array(["a", "b", "c", "d"]), 2)
        >>> (x @ found.weight.T + found.bias).argmax(1).tolist()
        [0, 0, 1, 1]
    """
    present = np.unique(labels)
    d = x.shape[1]
    if len(present) < 2:  # it can say nothing else
        bias = np.full(n_classes, 0.0)
        bias[present] = 1.0
        return FittedHead(np.zeros((n_classes, d)), bias, _USUAL / d, None, None)
    x = x.astype(np.float64)
    basis = np.linalg.qr(x.T)[0] if len(x) < d else np.eye(d)
    rows, folds = x @ basis, list(held_out_folds(labels, patient))
    found: list[tuple[float, float, Probabilities]] = []
    for strength in (one / d for one in _STRENGTHS) if folds else ():
        said = np.empty((len(rows), n_classes))
        for fold in folds:
            seen = ~fold
            weight, bias = _logistic(rows[seen], labels[seen], strength, n_classes)
            said[fold] = softmax(rows[fold] @ weight.T + bias)
        found.append((balanced_loss(said, labels), strength, said))
    loss, strength, held_out = min(found, key=lambda one: one[0]) if found else (None, _USUAL / d, None)
    weight, bias = _logistic(rows, labels, strength, n_classes)
    if loss is not None and held_out is not None:
        middle = _middle(held_out, labels)
        moved = softmax(_logs(held_out) - middle)
        if (better := balanced_loss(moved, labels)) < loss:
            bias, loss, held_out = bias - middle, better, moved
    return FittedHead(weight @ basis.T, bias, strength, loss, held_out)


def _middle(said: Probabilities, labels: Labels) -> NDArray[np.float64]:
    """Return logarithms [classes] of probabilities midway between the means of the classes that occur; 0 for others."""
    present = np.unique(labels)
    means = np.mean([_logs(said)[labels == one].mean(0) for one in present], axis=0)
    found: NDArray[np.float64] = np.where(np.isin(np.arange(said.shape[1]), present), means, 0.0)
    return found


def _logs(said: Probabilities) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.log(np.clip(said, _SURE, None))
    return found


def _logistic(
    rows: NDArray[np.float64], labels: Labels, strength: float, n_classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights [classes, d] and bias [classes] of a balanced logistic regression; absent classes get −∞."""
    from sklearn.linear_model import LogisticRegression

    found = LogisticRegression(C=strength, class_weight="balanced", solver="newton-cg").fit(rows, labels)
    weight, bias = np.zeros((n_classes, rows.shape[1])), np.full(n_classes, _NEVER)
    if len(found.classes_) == 2:  # one row for both
        for sign, one in zip((-0.5, 0.5), found.classes_, strict=True):
            weight[one], bias[one] = sign * found.coef_[0], sign * found.intercept_[0]
    else:
        weight[found.classes_], bias[found.classes_] = found.coef_, found.intercept_
    return weight, bias


_NEVER = -30.0
"""Logit of a class that was never seen."""


def held_out_folds(
    labels: Labels, patient: NDArray[np.str_], most: int = _FOLDS
) -> Iterator[NDArray[np.bool_]]:
    """Yield the rows bool[n] that each of up to `most` folds holds out: whole patients, of all classes alike.

    Nothing is yielded where a class has fewer than two patients.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    names = np.array([name or f"row {row}" for row, name in enumerate(patient.tolist())])
    patients = [len(np.unique(names[labels == one])) for one in np.unique(labels)]
    n_folds = min(most, *patients)
    if n_folds < 2 or len(patients) < 2:
        return
    splitter = StratifiedGroupKFold(n_folds, shuffle=True, random_state=0)
    for seen, held in splitter.split(np.zeros(len(labels)), labels, names):
        if len(np.unique(labels[seen])) == len(patients):
            fold = np.zeros(len(labels), bool)
            fold[held] = True
            yield fold


def balanced_loss(said: Probabilities, labels: Labels) -> float:
    """Return the log-loss of float64[n, classes], averaged within each class that occurs and then over classes."""
    losses = -np.log(np.clip(said[np.arange(len(labels)), labels], _SURE, None))
    return float(np.mean([losses[labels == one].mean() for one in np.unique(labels)]))


def softmax(logits: NDArray[np.float64]) -> Probabilities:
    """Return probabilities of logits float64[n, classes]."""
    raised = np.exp(logits - logits.max(1, keepdims=True))
    found: Probabilities = raised / raised.sum(1, keepdims=True)
    return found


@dataclass(frozen=True)
class HyperParameters:
    """Settings of training that a site may choose for itself.

    Attributes:
        balance: whether rows are weighed so that all classes count alike.
    """

    lr: float
    weight_decay: float
    balance: bool

    @property
    def facts(self) -> dict[str, Any]:
        """What a run keeps of it."""
        return asdict(self)


Trained = Callable[[HyperParameters, NDArray[np.bool_]], Probabilities]
"""(settings, rows bool[n] to learn from) → what a model that learned from these says of all others, in order."""


def _loss(said: Predicted, truth: Truth, task: Task) -> float:
    """Return the criterion of settings, lower is better: balanced log-loss of classes, else minus the first score."""
    if task.kind == "classes":
        return balanced_loss(said, truth)
    reached = quality(said, truth, task)
    return np.inf if reached is None else -reached


def tuned(
    labels: Truth,
    patient: NDArray[np.str_],
    usual: HyperParameters,
    trained: Trained,
    *,
    folds: int,
    task: Task = CLASSES,
) -> tuple[HyperParameters, Predicted | None]:
    """Choose settings one by one: balance where classes are asked, then the decay of weights, then the learning rate.

    Args:
        labels: the truth of n rows.
        usual: the settings to begin with.
        folds: how many times rows are held out, where there are patients enough.

    Returns:
        The best settings by balanced log-loss, or by the first score of another task, and what was said with them of
        rows that were held out, float64[n, k]; the usual ones and None where nothing can be held out.
    """
    parts = list(held_out_folds(strata(labels, task), patient))[:folds]
    if not parts:
        return usual, None
    asked = np.concatenate([np.flatnonzero(fold) for fold in parts])
    tried: dict[HyperParameters, tuple[float, list[Probabilities]]] = {}

    def loss(way: HyperParameters) -> float:
        if way not in tried:
            said = [trained(way, ~fold) for fold in parts]
            tried[way] = _loss(np.concatenate(said), labels[asked], task), said
        return tried[way][0]

    balances = (True, False) if task.kind == "classes" else (False,)
    best = min((replace(usual, balance=one) for one in balances), key=loss)
    best = min((replace(best, weight_decay=one) for one in (usual.weight_decay, *_DECAYS)), key=loss)
    best = min((replace(best, lr=one * usual.lr) for one in (1.0, *_RATES)), key=loss)
    if len(parts) < _FOLDS:
        return best, None
    held_out = np.empty((len(labels), tried[best][1][0].shape[1]))
    for fold, said in zip(parts, tried[best][1], strict=True):
        held_out[fold] = said
    return best, held_out


_DECAYS, _RATES = (1e-3, 1e-2, 1e-1), (0.3,)
