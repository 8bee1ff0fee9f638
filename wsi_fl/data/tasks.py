"""Prediction tasks: classes, numbers and times of events; the losses, predictions and scores of each.

The *truth* of n examples is int64[n] positions in the classes, float64[n] numbers, or float64[n, 2] of times and
whether the event was seen then (1) or the patient was last seen without it (0): double, since single precision tells
0.1 years from the end of an interval at 0.1. A model's *outputs* are float32[b, k]; its *predictions* are
float64[n, k]: probabilities of the classes, the number itself, or the probability of being without the event at the end
of each interval.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data import metrics, survival
from wsi_fl.data.metrics import (
    Measure,
    Weights,
    bootstrap_intervals,
    build_class_measure,
    build_exact_interval,
    choose_classes,
    score_unweighted,
    share_interval,
)

if TYPE_CHECKING:
    from torch import Tensor

PredictionArray = NDArray[np.float64]
Truth = NDArray[Any]
_Scores = Mapping[str, float | None]

_JACKKNIFE_ROWS = 256
"""Examples per step of the jackknife."""
_ROUNDING = 1e-12
"""Relative tolerance: smaller differences, in parts of the distance from the mean, count as none."""


class Task(ABC):
    """A kind of prediction task.

    Attributes:
        kind: "classes", "number" or "survival".
        scores: the names of its scores. The first is the main one; higher is better.
    """

    kind: ClassVar[Literal["classes", "number", "survival"]]
    scores: ClassVar[tuple[str, ...]]

    @abstractmethod
    def compute_losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """Return the loss of each example, float32[b], independent of the other examples."""

    @abstractmethod
    def compute_divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence of outputs from a teacher's, the mean over the batch; the teacher is fixed."""

    @abstractmethod
    def find_valid(self, truth: Truth, n_outputs: int) -> NDArray[np.bool_]:
        """Return the mask bool[n] of truths that a model of so many outputs can learn; all False for another shape."""

    @abstractmethod
    def describe_valid(self, n_outputs: int) -> str:
        """Describe valid truths in words."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predictions float[b, k] of outputs."""

    @abstractmethod
    def baseline_prediction(self, n_outputs: int) -> PredictionArray:
        """Return the prediction float64[k] of a model without information."""

    @abstractmethod
    def build_measure(self, predictions: PredictionArray, truth: Truth) -> Measure:
        """Return a function of weights of the examples that computes every score."""

    def compute_scores(self, predictions: PredictionArray, truth: Truth) -> _Scores:
        """Return every score by name; None where it cannot be computed."""
        return score_unweighted(self.build_measure(predictions, truth), len(truth))

    def example_scores(self, predictions: PredictionArray, truth: Truth) -> PredictionArray | None:
        """Return float64[n], the contribution of each example to the first score, their mean.

        None without a score, or where the score is of a single example (as the only event), without which there is
        none: its contribution is then unknown.

        They are jackknife pseudo-values: n times the score less n − 1 times the score without the example, centred on
        the score.

        Reference: Tukey, "Bias and confidence in not-quite large samples", Annals of Mathematical Statistics 29, 1958.
        """
        n, name = len(truth), self.scores[0]
        total_score = self.compute_scores(predictions, truth)[name]
        if total_score is None:
            return None
        measure, left_out_scores = self.build_measure(predictions, truth), np.empty(n)
        for start in range(0, n, _JACKKNIFE_ROWS):
            rows = np.arange(start, min(start + _JACKKNIFE_ROWS, n))
            weights = np.ones((len(rows), n), np.int32)
            weights[np.arange(len(rows)), rows] = 0
            left_out_scores[rows] = measure(weights)[name]
        if not np.isfinite(left_out_scores).all():
            return None
        pseudo = (n - 1) * (total_score - left_out_scores)
        pseudo_values: PredictionArray = total_score + pseudo - pseudo.mean()
        return pseudo_values


@dataclass(frozen=True)
class _ClassesTask(Task):
    """Classification: cross-entropy; accuracy, macro-accuracy and AUROC."""

    kind = "classes"
    scores = metrics.SCORES

    def compute_losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(outputs, truth, reduction="none")

    def compute_divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        return kl_divergence(outputs, teacher)

    def find_valid(self, truth: Truth, n_outputs: int) -> NDArray[np.bool_]:
        if truth.ndim != 1 or truth.dtype.kind not in "iuf":
            return np.array([isinstance(value, int) and 0 <= value < n_outputs for value in truth.tolist()], bool)
        with np.errstate(invalid="ignore"):
            return np.asarray((truth >= 0) & (truth < n_outputs) & (truth == np.floor(truth)))

    def describe_valid(self, n_outputs: int) -> str:
        return f"positions in {n_outputs} classes, 0 to {n_outputs - 1}"

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def baseline_prediction(self, n_outputs: int) -> PredictionArray:
        return np.full(n_outputs, 1 / n_outputs)

    def build_measure(self, predictions: PredictionArray, truth: Truth) -> Measure:
        return build_class_measure(choose_classes(predictions) == truth, predictions, truth)

    def example_scores(self, predictions: PredictionArray, truth: Truth) -> PredictionArray | None:
        """Return 1 for each correct prediction, else 0."""
        correct: PredictionArray = (choose_classes(predictions) == truth).astype(np.float64)
        return correct


@dataclass(frozen=True)
class NumberTask(Task):
    """Regression of a number in a range common to all sites; squared error, in units of half the range.

    The loss is the negative log-likelihood of a Gaussian of fixed width, the divergence that of two of them.
    """

    low: float
    high: float
    kind = "number"
    scores = ("r2", "mae", "rmse")

    def compute_losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        offset = (truth.double() - self.low).to(outputs.dtype)  # dates are large relative to their range
        target = 2 * offset / (self.high - self.low) - 1
        return (outputs[:, 0] - target).square() / 2

    def compute_divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        return (outputs - teacher.detach()).square().mean() / 2

    def find_valid(self, truth: Truth, n_outputs: int) -> NDArray[np.bool_]:
        if truth.ndim != 1 or truth.dtype.kind != "f":
            return np.zeros(len(truth), bool)
        return np.isfinite(truth)

    def describe_valid(self, n_outputs: int) -> str:
        return "finite numbers float32[n]"

    def predict(self, outputs: Tensor) -> Tensor:
        return self.low + (outputs.clamp(-1, 1) + 1) / 2 * (self.high - self.low)

    def baseline_prediction(self, n_outputs: int) -> PredictionArray:
        return np.full(n_outputs, (self.low + self.high) / 2)

    def build_measure(self, predictions: PredictionArray, truth: Truth) -> Measure:
        """Return a function for R², which needs two different numbers, mean absolute and root mean square error."""
        errors = predictions[:, 0] - truth
        deviations = truth - np.mean(truth, dtype=np.float64) if len(truth) else errors
        moments = np.stack([np.ones(len(truth)), np.abs(errors), errors**2, deviations, deviations**2], axis=1)

        def compute_scores(weights: Weights) -> dict[str, PredictionArray]:
            n, absolute, squared, shift, squares = (weights @ moments).T
            with np.errstate(invalid="ignore", divide="ignore"):
                spread = squares - shift**2 / n  # Σ (t − mean)², from sums around another mean
                spread = np.where(spread > _ROUNDING * squares, spread, np.nan)
                return {"r2": 1 - squared / spread, "mae": absolute / n, "rmse": np.sqrt(squared / n)}

        return compute_scores


@dataclass(frozen=True)
class SurvivalTask(Task):
    """Survival: a discrete-time likelihood in intervals common to all sites.

    Outputs are the logits of the hazards: the probability of the event in an interval, given that the patient reached
    it (Gensheimer and Narasimhan, "A scalable discrete-time survival model for neural networks", PeerJ 2019). The loss
    of a patient is a sum over the intervals of that patient only, as differential privacy needs it.

    Attributes:
        ends: of the intervals, rising, in the unit of the times. An interval includes its end, the first begins at 0,
            and events after the last are not distinguished. The prediction for an end is the probability of being
            without the event after it, as in Kaplan–Meier curves.
    """

    ends: tuple[float, ...]
    kind = "survival"
    scores = ("concordance", "integrated_brier")

    def compute_losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        from torch.nn import functional

        passed, failed = (mask.to(outputs.dtype) for mask in self._interval_masks(truth))
        return -(passed * functional.logsigmoid(-outputs) + failed * functional.logsigmoid(outputs)).sum(1)

    def _interval_masks(self, truth: Tensor) -> tuple[Tensor, Tensor]:
        """Return masks bool[b, k] of the intervals passed by each patient, and of the interval of the event."""
        from torch.nn import functional

        time, observed, ends = truth[:, :1], truth[:, 1:] > 0.5, truth.new_tensor(self.ends)
        begins = functional.pad(ends[:-1], (1, 0))
        left_late = time >= (begins + ends) / 2  # the second half of an interval counts as passed
        passed = (time > ends).where(observed, left_late)
        return passed, observed & ((begins < time) | (begins == 0)) & (time <= ends)

    def find_valid(self, truth: Truth, n_outputs: int) -> NDArray[np.bool_]:
        if truth.ndim != 2 or truth.shape[1] != 2 or truth.dtype.kind != "f" or n_outputs != len(self.ends):
            return np.zeros(len(truth), bool)
        time, observed = truth.T
        return np.asarray(np.isfinite(time) & (time >= 0) & ((observed == 0) | (observed == 1)))

    def describe_valid(self, n_outputs: int) -> str:
        return (
            "times from 0 on and 1 or 0, whether the event was seen, as float32[n, 2], for a model of "
            f"{len(self.ends)} outputs"
        )

    def compute_divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Return KL of the events in each interval, summed over the intervals."""
        from torch.nn.functional import logsigmoid

        fixed = teacher.detach()
        event = outputs.sigmoid() * (logsigmoid(outputs) - logsigmoid(fixed))
        no_event = (-outputs).sigmoid() * (logsigmoid(-outputs) - logsigmoid(-fixed))
        return (event + no_event).sum(1).mean()

    def predict(self, outputs: Tensor) -> Tensor:
        return (-outputs).sigmoid().cumprod(dim=1)

    def baseline_prediction(self, n_outputs: int) -> PredictionArray:
        return np.cumprod(np.full(n_outputs, 0.5))

    def build_measure(self, predictions: PredictionArray, truth: Truth) -> Measure:
        risk = survival.compute_risk(predictions, self.ends)

        def compute_scores(weights: Weights) -> dict[str, PredictionArray]:
            return {
                "concordance": survival.compute_concordances(risk, truth, weights),
                "integrated_brier": survival.compute_integrated_briers(predictions, truth, self.ends, weights),
            }

        return compute_scores


class _PossibleClassesTask(_ClassesTask):
    """Classification of examples that may have some of the classes only, which are those of positive probability."""

    def predict(self, outputs: Tensor) -> Tensor:
        """Return probabilities, 0 where an output is −∞ alone."""
        probabilities = outputs.softmax(dim=1)
        smallest = probabilities.new_tensor(np.finfo(np.float32).tiny)
        return probabilities.where(outputs.isneginf(), probabilities.maximum(smallest))

    def build_measure(self, predictions: PredictionArray, truth: Truth) -> Measure:
        return build_class_measure(choose_classes(predictions) == truth, predictions, truth, predictions > 0)


CLASSES, POSSIBLE_CLASSES = _ClassesTask(), _PossibleClassesTask()


def target_columns(task: Task, truth: Tensor) -> Tensor:
    """Return the columns in which truths count where a model is fitted from sums, int64[b], or weights float64[b].

    For classes it is the class; for numbers the clipped place in the range, the weight in the second of two columns.
    For survival it is sufficient for the loss: the interval of the event, or k + the number of the k intervals that a
    censored patient has passed.
    """
    if isinstance(task, NumberTask):
        return ((truth.double() - task.low) / (task.high - task.low)).clamp(0, 1)
    if isinstance(task, SurvivalTask):
        passed, failed = task._interval_masks(truth)
        n_passed = passed.sum(1)
        return n_passed.where(failed.any(1), n_passed + len(task.ends))
    return truth


def score_predictions(predictions: PredictionArray, truth: Truth, task: Task = CLASSES) -> dict[str, float | None]:
    """Return n and every score by name, None where it cannot be computed."""
    return {"n": len(truth), **task.compute_scores(predictions, truth)}


def selection_score(predictions: PredictionArray, truth: Truth, task: Task = CLASSES) -> float | None:
    """Return the score for model selection, higher is better; None where it cannot be computed.

    For classes it is macro-accuracy: by accuracy, a site with mostly one class would choose a constant model.
    """
    name = "macro_accuracy" if task.kind == "classes" else task.scores[0]
    return task.compute_scores(predictions, truth)[name]


def score_intervals(
    predictions: PredictionArray, truth: Truth, cluster: NDArray[np.str_], task: Task = CLASSES, *, repeats: int
) -> dict[str, list[float] | None]:
    """Return percentile intervals of every score from a bootstrap over clusters (patients).

    A score that no resample changes has the exact interval of a share: of the clusters, or for concordance of pairs of
    which no two share a cluster. Errors of numbers have no bound, so they get None.
    """
    measure = task.build_measure(predictions, truth)
    if task.kind == "classes":
        exact = build_exact_interval(measure, truth, cluster, predictions > 0 if task is POSSIBLE_CLASSES else None)
    else:
        exact = partial(_constant_interval, task, truth, cluster)
    return bootstrap_intervals(measure, task.scores, cluster, exact, repeats=repeats)


def _constant_interval(
    task: Task, truth: Truth, cluster: NDArray[np.str_], name: str, value: float
) -> list[float] | None:
    if task.kind == "number":
        return None
    n_clusters = len(np.unique(cluster))
    if name != "concordance":
        return [*share_interval(value, n_clusters)]
    if value not in (0, 1):
        return [value, value]  # equal risks rank no pair
    n_events = len(np.unique(cluster[truth[:, 1] > 0.5]))  # of each pair one had the event
    return [*share_interval(value, min(n_clusters // 2, n_events))]


def fold_strata(truth: Truth, task: Task) -> NDArray[np.int64]:
    """Return the strata int64[n] of folds: the class, whether the event was seen, or the half of the numbers.

    Where all had the event it is the half of their times.
    """
    if task.kind == "classes":
        return truth
    if task.kind == "survival":
        observed = truth[:, 1] > 0.5
        halves = truth[:, 0] > np.median(truth[:, 0]) if observed.all() else observed
    else:
        halves = truth > np.median(truth)
    return np.asarray(halves, np.int64)


# The losses of deep mutual learning as in ProxyFL (eqs. 2 to 5), for every task.


def kl_divergence(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return KL[student ‖ teacher] = Σ_c p_c (log p_c − log q_c), mean over the batch (eq. 3)."""
    from torch.nn import functional

    log_p = functional.log_softmax(student_logits, dim=1)
    log_q = functional.log_softmax(teacher_logits.detach(), dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()


def mutual_loss(
    outputs: Tensor,
    truth: Tensor,
    teacher: Tensor | None,
    weight: float,
    class_weights: Tensor | None = None,
    task: Task = CLASSES,
) -> Tensor:
    """Return (1 − weight) · loss + weight · divergence from the teacher (eqs. 4 and 5); without a teacher, the loss.

    Args:
        outputs: float32[b, k] of the student; for classes their logits.
        truth: of the b examples, as the task has it; for classes int64[b].
        teacher: float32[b, k], or None.
        weight: α for the private model, β for the proxy.
        class_weights: float32[classes], the weight of an example of each class; None for equal weights.
    """
    import torch

    losses = task.compute_losses(outputs, truth)
    if class_weights is None:
        loss = losses.mean()
    else:
        row_weights = class_weights[truth]
        loss = (losses * row_weights).sum() / row_weights.sum()
    if teacher is None or weight == 0:
        return loss
    return torch.lerp(loss, task.compute_divergence(outputs, teacher), weight)


@dataclass(frozen=True)
class MutualLoss:
    """The mutual-learning loss of a batch as a function of the outputs."""

    truth: Tensor
    teacher: Tensor | None
    weight: float
    class_weights: Tensor | None
    task: Task

    @property
    def is_mean_of_rows(self) -> bool:
        """Whether the loss is a mean of losses of single examples, as differential privacy needs it.

        With class weights it is not: their sum is that of the batch.
        """
        return self.class_weights is None and type(self.task).__module__ == __name__

    def __call__(self, outputs: Tensor) -> Tensor:
        return mutual_loss(outputs, self.truth, self.teacher, self.weight, self.class_weights, self.task)
