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

from wsi_fl.data.metrics import Labels, Probabilities, fill_patient_names, mean_over_classes
from wsi_fl.data.tasks import CLASSES, PredictionArray, Task, Truth, fold_strata, selection_score, target_columns

_FOLDS = 5
_STRENGTHS = (1e-2, 1e-1, 1.0, 10.0, 100.0)
"""C of the logistic regression, times the number of features."""
_DEFAULT_STRENGTH = 1.0
"""Default of the strengths, where nothing can be held out."""
_MIN_PROBABILITY = 1e-12


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


def fit_linear_head(
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
        return _fit_task_head(x, labels, patient, n_classes, task)
    present = np.unique(labels)
    d = x.shape[1]
    if len(present) < 2:  # a constant prediction
        bias = np.full(n_classes, 0.0)
        bias[present] = 1.0
        return FittedHead(np.zeros((n_classes, d)), bias, _DEFAULT_STRENGTH / d, None, None)

    def evaluate_logits(logits: NDArray[np.float64]) -> tuple[float, Probabilities]:
        probabilities = softmax(logits)
        return _class_balanced_loss(probabilities, labels), probabilities

    head = _cross_validate(x, labels, n_classes, _fit_logistic, evaluate_logits, list(_split_folds(labels, patient)))
    if head.loss is not None and head.held_out is not None:
        middle = _class_midpoint(head.held_out, labels)
        shifted = softmax(log_probabilities(head.held_out) - middle)
        if (shifted_loss := _class_balanced_loss(shifted, labels)) < head.loss:
            return replace(head, bias=head.bias - middle, loss=shifted_loss, held_out=shifted)
    return head


def _fit_task_head(x: NDArray[Any], truth: Truth, patient: NDArray[np.str_], n_outputs: int, task: Task) -> FittedHead:
    """Fit the head of a number by ridge regression, or of hazards by logistic regression.

    The hazards of all intervals share one slope: logistic regression with a row for each interval reached by a patient
    (Allison, "Discrete-time methods for the analysis of event histories", Sociological Methodology 1982).
    """
    import torch

    targets = torch.from_numpy(truth)

    def evaluate_outputs(outputs: NDArray[np.float64]) -> tuple[float, PredictionArray]:
        tensor = torch.from_numpy(outputs)
        return float(task.compute_losses(tensor, targets).mean()), task.predict(tensor).numpy()

    column, fit = (target_columns(task, targets).numpy(), _fit_ridge if task.kind == "number" else _fit_hazards)
    folds = list(_split_folds(column > np.median(column), patient))
    return _cross_validate(x, column, n_outputs, fit, evaluate_outputs, folds)


_Fit = Callable[[NDArray[np.float64], NDArray[Any], float, int], tuple[NDArray[np.float64], NDArray[np.float64]]]
"""(rows, their truth, strength, number of outputs) → weights [outputs, d] and bias [outputs]."""


def _cross_validate(
    x: NDArray[Any],
    truth: NDArray[Any],
    n_outputs: int,
    fit: _Fit,
    evaluate: Callable[[NDArray[np.float64]], tuple[float, PredictionArray]],
    folds: Sequence[NDArray[np.bool_]],
) -> FittedHead:
    """Return the head of the strength with the least loss on held-out rows; of the default one where folds leave out
    rows, which then have no held-out prediction."""
    folds = folds if np.any(folds, axis=0).all() else ()
    d, x = x.shape[1], x.astype(np.float64)
    basis = np.linalg.qr(x.T)[0] if len(x) < d else np.eye(d)
    rows, candidates = x @ basis, []
    for strength in (factor / d for factor in _STRENGTHS) if folds else ():
        outputs = np.empty((len(rows), n_outputs))
        for fold in folds:
            weight, bias = fit(rows[~fold], truth[~fold], strength, n_outputs)
            outputs[fold] = rows[fold] @ weight.T + bias
        loss, predictions = evaluate(outputs)
        candidates.append((loss, strength, predictions))
    best = min(candidates, key=lambda candidate: candidate[0]) if candidates else (None, _DEFAULT_STRENGTH / d, None)
    weight, bias = fit(rows, truth, best[1], n_outputs)
    return FittedHead(weight @ basis.T, bias, best[1], best[0], best[2])


def _fit_ridge(
    rows: NDArray[np.float64], share: NDArray[np.float64], strength: float, n_outputs: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights [1, d] and bias [1] of ridge regression on places in the range, from −1 to 1."""
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=1 / strength).fit(rows, 2 * share - 1)
    return model.coef_[None], np.full(n_outputs, model.intercept_)


def _fit_hazards(
    rows: NDArray[np.float64], column: Labels, strength: float, n_outputs: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights [k, d], the same for all, and bias [k] of the logits of hazards in k intervals."""
    from sklearn.linear_model import LogisticRegression

    observed, interval = column < n_outputs, np.arange(n_outputs)
    n_reached = np.where(observed, column + 1, column - n_outputs)
    row, interval_index = np.nonzero(interval < n_reached[:, None])
    event = observed[row] & (interval_index == column[row])
    if not 0 < event.sum() < len(event):
        return np.zeros((n_outputs, rows.shape[1])), np.full(
            n_outputs, -_UNSEEN_LOGIT if event.any() else _UNSEEN_LOGIT
        )
    scale = _INTERVAL_SCALE * np.sqrt(rows.shape[1])
    person_periods = np.concatenate([rows[row], scale * (interval_index[:, None] == interval)], axis=1)
    model = LogisticRegression(C=strength, fit_intercept=False, solver="newton-cg").fit(person_periods, event)
    slope, bias = np.split(model.coef_[0], [rows.shape[1]])
    return np.tile(slope, (n_outputs, 1)), scale * bias


_INTERVAL_SCALE = 10.0
"""Factor of the intercepts' features: the hazards of intervals are regularised less than the slope."""


def _class_midpoint(probabilities: Probabilities, labels: Labels) -> NDArray[np.float64]:
    """Return log-probabilities [classes] midway between the means of the classes that occur; 0 for others."""
    means = mean_over_classes(log_probabilities(probabilities), labels)
    midpoint: NDArray[np.float64] = np.where(np.isin(np.arange(probabilities.shape[1]), labels), means, 0.0)
    return midpoint


def log_probabilities(probabilities: Probabilities) -> NDArray[np.float64]:
    """Return the logarithms of probabilities, of 0 a finite one."""
    logs: NDArray[np.float64] = np.log(np.clip(probabilities, _MIN_PROBABILITY, None))
    return logs


def _fit_logistic(
    rows: NDArray[np.float64], labels: Labels, strength: float, n_classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return weights [classes, d] and bias [classes] of a balanced logistic regression; absent classes get −∞."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, class_weight="balanced", solver="newton-cg").fit(rows, labels)
    weight, bias = np.zeros((n_classes, rows.shape[1])), np.full(n_classes, _UNSEEN_LOGIT)
    if len(model.classes_) == 2:  # one row for both
        for sign, label in zip((-0.5, 0.5), model.classes_, strict=True):
            weight[label], bias[label] = sign * model.coef_[0], sign * model.intercept_[0]
    else:
        weight[model.classes_], bias[model.classes_] = model.coef_, model.intercept_
    return weight, bias


_UNSEEN_LOGIT = -30.0
"""Logit of a class without examples."""


def _split_folds(labels: Labels, patient: NDArray[np.str_]) -> Iterator[NDArray[np.bool_]]:
    """Yield the held-out rows bool[n] of up to five folds: whole patients, stratified by class.

    Of a class with a single patient, single rows are held out: a threshold fitted to the patient's other rows is better
    than the initial one (studies/WORTH.md). Without a second row of a class there are no folds.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    names = fill_patient_names(patient)
    for label in np.unique(labels):
        if len(np.unique(names[rows := labels == label])) == 1:
            names = np.where(rows, np.char.add("row ", np.arange(len(names)).astype(str)), names)
    patients = [len(np.unique(names[labels == label])) for label in np.unique(labels)]
    n_folds = min(_FOLDS, *patients)
    if n_folds < 2 or len(patients) < 2:
        return
    splitter = StratifiedGroupKFold(n_folds, shuffle=True, random_state=0)
    for train_rows, test_rows in splitter.split(np.zeros(len(labels)), labels, names):
        if len(np.unique(labels[train_rows])) == len(patients):
            yield np.isin(np.arange(len(labels)), test_rows)


def _class_balanced_loss(probabilities: Probabilities, labels: Labels) -> float:
    """Return the log-loss of float64[n, classes], averaged within each class that occurs and then over classes."""
    return float(mean_over_classes(log_losses(probabilities, labels), labels))


def log_losses(probabilities: Probabilities, labels: Labels) -> NDArray[np.float64]:
    """Return float64[n], the log-loss of every row of float64[n, classes]."""
    return -log_probabilities(probabilities[np.arange(len(labels)), labels])


def softmax(logits: NDArray[np.float64]) -> Probabilities:
    """Return probabilities of logits float64[n, classes]."""
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    probabilities: Probabilities = exponentials / exponentials.sum(1, keepdims=True)
    return probabilities


@dataclass(frozen=True)
class HyperParameters:
    """Settings of training that a site may tune.

    Attributes:
        balance: whether examples are weighted so that all classes count alike.
    """

    lr: float
    weight_decay: float
    balance: bool


def selection_loss(predictions: PredictionArray, truth: Truth, task: Task) -> float:
    """Return the loss for selection: the balanced log-loss of classes, else minus the first score."""
    if task.kind == "classes":
        return _class_balanced_loss(predictions, truth)
    score = selection_score(predictions, truth, task)
    return np.inf if score is None else -score


def tune_hyperparameters(
    labels: Truth,
    patient: NDArray[np.str_],
    defaults: HyperParameters,
    train_and_predict: Callable[[HyperParameters, NDArray[np.bool_]], Probabilities],
    *,
    folds: int,
    task: Task = CLASSES,
) -> tuple[HyperParameters, PredictionArray | None]:
    """Tune settings in turn: class balance (for classes), then weight decay, then the learning rate.

    Args:
        labels: the truth of n examples.
        defaults: the initial settings.
        train_and_predict: settings, training mask bool[n] → predictions for the other examples by a model trained on
            these.
        folds: number of folds for a choice, where there are enough patients.

    Returns:
        The settings of least loss, and their cross-validated predictions float64[n, k]; the initial settings and None
        where nothing can be held out.
    """
    parts = list(_split_folds(fold_strata(labels, task), patient))
    if not parts:
        return defaults, None
    tested_rows = np.concatenate([np.flatnonzero(fold) for fold in parts[:folds]])
    results: dict[HyperParameters, tuple[float, list[Probabilities]]] = {}

    def fold_loss(settings: HyperParameters) -> float:
        if settings not in results:
            predictions = [train_and_predict(settings, ~fold) for fold in parts[:folds]]
            results[settings] = (selection_loss(np.concatenate(predictions), labels[tested_rows], task), predictions)
        return results[settings][0]

    balances = (True, False) if task.kind == "classes" else (False,)
    best = min((replace(defaults, balance=balance) for balance in balances), key=fold_loss)
    best = min((replace(best, weight_decay=decay) for decay in (defaults.weight_decay, *_WEIGHT_DECAYS)), key=fold_loss)
    best = min((replace(best, lr=factor * defaults.lr) for factor in (1.0, *_RATE_FACTORS)), key=fold_loss)
    if not np.any(parts, axis=0).all():  # rows without a cross-validated prediction
        return best, None
    predictions = results[best][1] + [train_and_predict(best, ~fold) for fold in parts[folds:]]
    held_out = np.empty((len(labels), predictions[0].shape[1]))
    for fold, fold_predictions in zip(parts, predictions, strict=True):
        held_out[fold] = fold_predictions
    return best, held_out


_WEIGHT_DECAYS, _RATE_FACTORS = (1e-3, 1e-2, 1e-1), (0.3,)
