"""Hyperparameters of local models, chosen by cross-validation over the site's patients.

For models without differential privacy: regularisation, learning rate and class weights by the loss on held-out
patients. Test sets are never used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.metrics import Labels, Probabilities, mean_over_classes, one_each
from wsi_fl.learning.tasks import CLASSES, Predicted, Task, Truth, quality, strata

_FOLDS = 5
_STRENGTHS = (1e-2, 1e-1, 1.0, 10.0, 100.0)
"""C of the logistic regression, times the number of features."""
_USUAL = 1.0
"""Default of the strengths, where nothing can be held out."""
_SURE = 1e-12


@dataclass(frozen=True)
class FittedHead:
    """A linear head fitted to all examples of a site; on held-out ones its boundary lies midway between classes.

    Attributes:
        weight, bias: float64[outputs, d], float64[outputs].
        strength: C of the regularisation, in scikit-learn's sense.
        loss: balanced log-loss of `held_out`, or the mean loss of another task; None where nothing could be held out.
        held_out: float64[n, outputs], cross-validated predictions, each by a head without the patient; None likewise.
    """

    weight: NDArray[np.float64]
    bias: NDArray[np.float64]
    strength: float
    loss: float | None
    held_out: Probabilities | None

    @property
    def facts(self) -> dict[str, Any]:
        """Return the record of the fit for a run."""
        return {"by": "cross-validation", "strength": self.strength, "loss": self.loss}


def fitted_head(
    x: NDArray[Any], labels: Truth, patient: NDArray[np.str_], n_classes: int, task: Task = CLASSES
) -> FittedHead:
    """Fit a linear head with the best regularisation on held-out patients.

    For classes it is a balanced logistic regression, for a number ridge regression, for survival a hazard regression.

    With few examples of a class the overfitted head scores held-out ones too low. So the bias is moved to make scores
    of held-out examples equal midway between the classes' means, if this lessens their balanced log-loss. Features are
    first rotated into the span of the examples, with the same solution.

    Args:
        x: float[n, d], features as the linear layer takes them.
        labels: int64[n], or the truth of another task.
        patient: str[n]; "" for an unknown one, different from all others.
        n_classes: or the number of outputs of another task.
    """
    if task.kind != "classes":
        return _fitted_line(x, labels, patient, n_classes, task)
    present = np.unique(labels)
    d = x.shape[1]
    if len(present) < 2:  # a constant prediction
        bias = np.full(n_classes, 0.0)
        bias[present] = 1.0
        return FittedHead(np.zeros((n_classes, d)), bias, _USUAL / d, None, None)

    def judged(logits: NDArray[np.float64]) -> tuple[float, Probabilities]:
        said = softmax(logits)
        return _balanced_loss(said, labels), said

    head = _by_cross_validation(
        x, labels, n_classes, _logistic, judged, list(_held_out_folds(labels, patient))
    )
    if head.loss is not None and head.held_out is not None:
        middle = _middle(head.held_out, labels)
        moved = softmax(_logs(head.held_out) - middle)
        if (better := _balanced_loss(moved, labels)) < head.loss:
            return replace(head, bias=head.bias - middle, loss=better, held_out=moved)
    return head


def _fitted_line(
    x: NDArray[Any], truth: Truth, patient: NDArray[np.str_], n_outputs: int, task: Task
) -> FittedHead:
    """Fit the head of a number by ridge regression, or of hazards by logistic regression.

    The hazards of all intervals share one slope: logistic regression with a row for each interval reached by a patient
    (Allison, "Discrete-time methods for the analysis of event histories", Sociological Methodology 1982).
    """
    import torch

    known = torch.from_numpy(truth)

    def judged(outputs: NDArray[np.float64]) -> tuple[float, Predicted]:
        told = torch.from_numpy(outputs)
        return float(task.losses(told, known).mean()), task.said(told).numpy()

    column, fit = task.columns(known).numpy(), _ridge if task.kind == "number" else _hazards
    folds = list(_held_out_folds(column > np.median(column), patient))
    return _by_cross_validation(x, column, n_outputs, fit, judged, folds)


_Fit = Callable[
    [NDArray[np.float64], NDArray[Any], float, int], tuple[NDArray[np.float64], NDArray[np.float64]]
]
"""(rows, their truth, strength, number of outputs) → weights [outputs, d] and bias [outputs]."""


def _by_cross_validation(
    x: NDArray[Any],
    truth: NDArray[Any],
    n_outputs: int,
    fit: _Fit,
    judged: Callable[[NDArray[np.float64]], tuple[float, Predicted]],
    folds: Sequence[NDArray[np.bool_]],
) -> FittedHead:
    """Return the head of the strength with the least loss on held-out rows.

    Args:
        evaluate: outputs float64[n, k] of all rows → their loss and predictions.
    """
    d, x = x.shape[1], x.astype(np.float64)
    basis = np.linalg.qr(x.T)[0] if len(x) < d else np.eye(d)
    rows, found = x @ basis, []
    for strength in (one / d for one in _STRENGTHS) if folds else ():
        outputs = np.empty((len(rows), n_outputs))
        for fold in folds:
            weight, bias = fit(rows[~fold], truth[~fold], strength, n_outputs)
            outputs[fold] = rows[fold] @ weight.T + bias
        loss, said = judged(outputs)
        found.append((loss, strength, said))
    best = min(found, key=lambda one: one[0]) if found else (None, _USUAL / d, None)
    weight, bias = fit(rows, truth, best[1], n_outputs)
    return FittedHead(weight @ basis.T, bias, best[1], best[0], best[2])


def _ridge(
    rows: NDArray[np.float64], share: NDArray[np.float64], strength: float, n_outputs: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights [1, d] and bias [1] of ridge regression on places in the range, from −1 to 1."""
    from sklearn.linear_model import Ridge

    found = Ridge(alpha=1 / strength).fit(rows, 2 * share - 1)
    return found.coef_[None], np.full(n_outputs, found.intercept_)


def _hazards(
    rows: NDArray[np.float64], column: Labels, strength: float, n_outputs: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights [k, d], the same for all, and bias [k] of the logits of hazards in k intervals."""
    from sklearn.linear_model import LogisticRegression

    seen, interval = column < n_outputs, np.arange(n_outputs)
    reached = np.where(seen, column + 1, column - n_outputs)
    row, at = np.nonzero(interval < reached[:, None])
    event = seen[row] & (at == column[row])
    if not 0 < event.sum() < len(event):
        return np.zeros((n_outputs, rows.shape[1])), np.full(n_outputs, -_NEVER if event.any() else _NEVER)
    scale = _FREE * np.sqrt(rows.shape[1])
    person_periods = np.concatenate([rows[row], scale * (at[:, None] == interval)], axis=1)
    found = LogisticRegression(C=strength, fit_intercept=False, solver="newton-cg").fit(person_periods, event)
    slope, bias = np.split(found.coef_[0], [rows.shape[1]])
    return np.tile(slope, (n_outputs, 1)), scale * bias


_FREE = 10.0
"""Factor of the intercepts' features: the hazards of intervals are regularised less than the slope."""


def _middle(said: Probabilities, labels: Labels) -> NDArray[np.float64]:
    """Return log-probabilities [classes] midway between the means of the classes that occur; 0 for others."""
    means = mean_over_classes(_logs(said), labels)
    found: NDArray[np.float64] = np.where(np.isin(np.arange(said.shape[1]), labels), means, 0.0)
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
"""Logit of a class without examples."""


def _held_out_folds(labels: Labels, patient: NDArray[np.str_]) -> Iterator[NDArray[np.bool_]]:
    """Yield the held-out rows bool[n] of up to five folds: whole patients, stratified by class.

    Of a class with a single patient, single rows are held out: a threshold fitted to the patient's other rows is better
    than the initial one (studies/WORTH.md). Without a second row of a class there are no folds.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    names = one_each(patient)
    for one in np.unique(labels):
        if len(np.unique(names[mine := labels == one])) == 1:
            names = np.where(mine, np.char.add("row ", np.arange(len(names)).astype(str)), names)
    patients = [len(np.unique(names[labels == one])) for one in np.unique(labels)]
    n_folds = min(_FOLDS, *patients)
    if n_folds < 2 or len(patients) < 2:
        return
    splitter = StratifiedGroupKFold(n_folds, shuffle=True, random_state=0)
    for seen, held in splitter.split(np.zeros(len(labels)), labels, names):
        if len(np.unique(labels[seen])) == len(patients):
            yield np.isin(np.arange(len(labels)), held)


def _balanced_loss(said: Probabilities, labels: Labels) -> float:
    """Return the log-loss of float64[n, classes], averaged within each class that occurs and then over classes."""
    return float(mean_over_classes(log_losses(said, labels), labels))


def log_losses(said: Probabilities, labels: Labels) -> NDArray[np.float64]:
    """Return float64[n], the log-loss of every row of float64[n, classes]."""
    found: NDArray[np.float64] = -np.log(np.clip(said[np.arange(len(labels)), labels], _SURE, None))
    return found


def softmax(logits: NDArray[np.float64]) -> Probabilities:
    """Return probabilities of logits float64[n, classes]."""
    raised = np.exp(logits - logits.max(1, keepdims=True))
    found: Probabilities = raised / raised.sum(1, keepdims=True)
    return found


@dataclass(frozen=True)
class HyperParameters:
    """Settings of training that a site may tune.

    Attributes:
        balance: whether examples are weighted so that all classes count alike.
    """

    lr: float
    weight_decay: float
    balance: bool


def criterion(said: Predicted, truth: Truth, task: Task) -> float:
    """Return the loss for selection: the balanced log-loss of classes, else minus the first score."""
    if task.kind == "classes":
        return _balanced_loss(said, truth)
    reached = quality(said, truth, task)
    return np.inf if reached is None else -reached


def tuned(
    labels: Truth,
    patient: NDArray[np.str_],
    usual: HyperParameters,
    trained: Callable[[HyperParameters, NDArray[np.bool_]], Probabilities],
    *,
    folds: int,
    task: Task = CLASSES,
) -> tuple[HyperParameters, Predicted | None]:
    """Tune settings in turn: class balance (for classes), then weight decay, then the learning rate.

    Args:
        labels: the truth of n examples.
        defaults: the initial settings.
        train_and_predict: settings, training mask bool[n] → predictions for the other examples by a model trained on these.
        folds: number of folds for a choice, where there are enough patients.

    Returns:
        The settings of least loss, and their cross-validated predictions float64[n, k]; the initial settings and None
        where nothing can be held out.
    """
    parts = list(_held_out_folds(strata(labels, task), patient))
    if not parts:
        return usual, None
    asked = np.concatenate([np.flatnonzero(fold) for fold in parts[:folds]])
    tried: dict[HyperParameters, tuple[float, list[Probabilities]]] = {}

    def loss(way: HyperParameters) -> float:
        if way not in tried:
            said = [trained(way, ~fold) for fold in parts[:folds]]
            tried[way] = criterion(np.concatenate(said), labels[asked], task), said
        return tried[way][0]

    balances = (True, False) if task.kind == "classes" else (False,)
    best = min((replace(usual, balance=one) for one in balances), key=loss)
    best = min((replace(best, weight_decay=one) for one in (usual.weight_decay, *_DECAYS)), key=loss)
    best = min((replace(best, lr=one * usual.lr) for one in (1.0, *_RATES)), key=loss)
    if not np.any(parts, axis=0).all():  # rows without a cross-validated prediction
        return best, None
    said = tried[best][1] + [trained(best, ~fold) for fold in parts[folds:]]
    held_out = np.empty((len(labels), said[0].shape[1]))
    for fold, one in zip(parts, said, strict=True):
        held_out[fold] = one
    return best, held_out


_DECAYS, _RATES = (1e-3, 1e-2, 1e-1), (0.3,)
