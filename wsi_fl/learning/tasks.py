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

from wsi_fl.learning import metrics, survival
from wsi_fl.learning.metrics import (
    Measure,
    Weights,
    choose_classes,
    counted_once,
    exact_interval,
    measure_of_classes,
    resampled,
)
from wsi_fl.privacy.audit import share_interval

if TYPE_CHECKING:
    from torch import Tensor

Predicted = NDArray[np.float64]
Truth = NDArray[Any]
_Scores = Mapping[str, float | None]

_AT_ONCE = 256
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
    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """Return the loss of each example, float32[b], independent of the other examples."""

    @abstractmethod
    def divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence of outputs from a teacher's, the mean over the batch; the teacher is fixed."""

    @abstractmethod
    def possible(self, truth: Truth, n_outputs: int) -> NDArray[np.bool_]:
        """Return the mask bool[n] of truths that a model of so many outputs can learn; all False for another shape."""

    @abstractmethod
    def asks_for(self, n_outputs: int) -> str:
        """Describe valid truths in words."""

    @abstractmethod
    def said(self, outputs: Tensor) -> Tensor:
        """Return the predictions float[b, k] of outputs."""

    @abstractmethod
    def columns(self, truth: Tensor) -> Tensor:
        """Return the columns of the class statistics in which examples count, int64[b] or float64[b]."""

    @abstractmethod
    def guess(self, n_outputs: int) -> Predicted:
        """Return the prediction float64[k] of a model without information."""

    @abstractmethod
    def measure(self, said: Predicted, truth: Truth) -> Measure:
        """Return a function of weights of the examples that computes every score."""

    def scored(self, said: Predicted, truth: Truth) -> _Scores:
        """Return every score by name; None where it cannot be computed."""
        return counted_once(self.measure(said, truth), len(truth))

    def each(self, said: Predicted, truth: Truth) -> Predicted | None:
        """Return float64[n], the contribution of each example to the first score, their mean; None without a score.

        They are jackknife pseudo-values: n times the score less n − 1 times the score without the example, centred on
        the score.

        Reference: Tukey, "Bias and confidence in not-quite large samples", Annals of Mathematical Statistics 29, 1958.
        """
        n, name = len(truth), self.scores[0]
        whole = self.scored(said, truth)[name]
        if whole is None:
            return None
        measure, without = self.measure(said, truth), np.empty(n)
        for first in range(0, n, _AT_ONCE):
            rows = np.arange(first, min(first + _AT_ONCE, n))
            weights = np.ones((len(rows), n), np.int32)
            weights[np.arange(len(rows)), rows] = 0
            without[rows] = measure(weights)[name]
        pseudo = (n - 1) * (whole - np.where(np.isfinite(without), without, whole))
        found: Predicted = whole + pseudo - pseudo.mean()
        return found


@dataclass(frozen=True)
class _Classes(Task):
    """Classification: cross-entropy; accuracy, macro-accuracy and AUROC."""

    kind = "classes"
    scores = metrics.SCORES

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(outputs, truth, reduction="none")

    def divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        return kl_divergence(outputs, teacher)

    def possible(self, truth: Truth, n_outputs: int) -> NDArray[np.bool_]:
        if truth.ndim != 1 or truth.dtype.kind not in "iuf":
            return np.array([isinstance(one, int) and 0 <= one < n_outputs for one in truth.tolist()], bool)
        with np.errstate(invalid="ignore"):
            return np.asarray((truth >= 0) & (truth < n_outputs) & (truth == np.floor(truth)))

    def asks_for(self, n_outputs: int) -> str:
        return f"positions in {n_outputs} classes, 0 to {n_outputs - 1}"

    def said(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def columns(self, truth: Tensor) -> Tensor:
        return truth

    def guess(self, n_outputs: int) -> Predicted:
        return np.full(n_outputs, 1 / n_outputs)

    def measure(self, said: Predicted, truth: Truth) -> Measure:
        return measure_of_classes(choose_classes(said) == truth, said, truth)

    def each(self, said: Predicted, truth: Truth) -> Predicted | None:
        """Return 1 for each correct prediction, else 0."""
        right: Predicted = (choose_classes(said) == truth).astype(np.float64)
        return right


@dataclass(frozen=True)
class Number(Task):
    """Regression of a number in a range common to all sites; squared error, in units of half the range.

    The loss is the negative log-likelihood of a Gaussian of fixed width, the divergence that of two of them.
    """

    low: float
    high: float
    kind = "number"
    scores = ("r2", "mae", "rmse")

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        above = (truth.double() - self.low).to(outputs.dtype)  # dates are large relative to their range
        wanted = 2 * above / (self.high - self.low) - 1
        return (outputs[:, 0] - wanted).square() / 2

    def divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        return (outputs - teacher.detach()).square().mean() / 2

    def possible(self, truth: Truth, n_outputs: int) -> NDArray[np.bool_]:
        if truth.ndim != 1 or truth.dtype.kind != "f":
            return np.zeros(len(truth), bool)
        return np.isfinite(truth)

    def asks_for(self, n_outputs: int) -> str:
        return "finite numbers float32[n]"

    def said(self, outputs: Tensor) -> Tensor:
        return self.low + (outputs.clamp(-1, 1) + 1) / 2 * (self.high - self.low)

    def columns(self, truth: Tensor) -> Tensor:
        """Return float64[b], each clipped place in the range, the weight in the second of two columns."""
        return ((truth.double() - self.low) / (self.high - self.low)).clamp(0, 1)

    def guess(self, n_outputs: int) -> Predicted:
        return np.full(n_outputs, (self.low + self.high) / 2)

    def measure(self, said: Predicted, truth: Truth) -> Measure:
        """Return a function for R², which needs two different numbers, mean absolute and root mean square error."""
        wrong = said[:, 0] - truth
        apart = truth - np.mean(truth, dtype=np.float64) if len(truth) else wrong
        moments = np.stack([np.ones(len(truth)), np.abs(wrong), wrong**2, apart, apart**2], axis=1)

        def measure(weights: Weights) -> dict[str, Predicted]:
            n, absolute, squared, shift, around = (weights @ moments).T
            with np.errstate(invalid="ignore", divide="ignore"):
                spread = around - shift**2 / n  # Σ (t − mean)², from sums around another mean
                spread = np.where(spread > _ROUNDING * around, spread, np.nan)
                return {"r2": 1 - squared / spread, "mae": absolute / n, "rmse": np.sqrt(squared / n)}

        return measure


@dataclass(frozen=True)
class Survival(Task):
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

    def losses(self, outputs: Tensor, truth: Tensor) -> Tensor:
        from torch.nn import functional

        passed, failed = (known.to(outputs.dtype) for known in self._known(truth))
        return -(passed * functional.logsigmoid(-outputs) + failed * functional.logsigmoid(outputs)).sum(1)

    def _known(self, truth: Tensor) -> tuple[Tensor, Tensor]:
        """Return masks bool[b, k] of the intervals passed by each patient, and of the interval of the event."""
        from torch.nn import functional

        time, seen, ends = truth[:, :1], truth[:, 1:] > 0.5, truth.new_tensor(self.ends)
        begins = functional.pad(ends[:-1], (1, 0))
        left_late = time >= (begins + ends) / 2  # the second half of an interval counts as passed
        passed = (time > ends).where(seen, left_late)
        return passed, seen & ((begins < time) | (begins == 0)) & (time <= ends)

    def possible(self, truth: Truth, n_outputs: int) -> NDArray[np.bool_]:
        if truth.ndim != 2 or truth.shape[1] != 2 or truth.dtype.kind != "f" or n_outputs != len(self.ends):
            return np.zeros(len(truth), bool)
        time, seen = truth.T
        return np.asarray(np.isfinite(time) & (time >= 0) & ((seen == 0) | (seen == 1)))

    def asks_for(self, n_outputs: int) -> str:
        return (
            "times from 0 on and 1 or 0, whether the event was seen, as float32[n, 2], for a model of "
            f"{len(self.ends)} outputs"
        )

    def divergence(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """Return KL of the events in each interval, summed over the intervals."""
        from torch.nn.functional import logsigmoid

        fixed = teacher.detach()
        event = outputs.sigmoid() * (logsigmoid(outputs) - logsigmoid(fixed))
        none = (-outputs).sigmoid() * (logsigmoid(-outputs) - logsigmoid(-fixed))
        return (event + none).sum(1).mean()

    def said(self, outputs: Tensor) -> Tensor:
        return (-outputs).sigmoid().cumprod(dim=1)

    def columns(self, truth: Tensor) -> Tensor:
        """Return int64[b], sufficient for the loss: the interval of the event, or k + the number of the k intervals
        that a censored patient has passed.
        """
        passed, failed = self._known(truth)
        through = passed.sum(1)
        return through.where(failed.any(1), through + len(self.ends))

    def guess(self, n_outputs: int) -> Predicted:
        return np.cumprod(np.full(n_outputs, 0.5))

    def measure(self, said: Predicted, truth: Truth) -> Measure:
        risk = survival.risk(said, self.ends)

        def measure(weights: Weights) -> dict[str, Predicted]:
            return {
                "concordance": survival.concordances(risk, truth, weights),
                "integrated_brier": survival.integrated_briers(said, truth, self.ends, weights),
            }

        return measure


CLASSES = _Classes()


def scored(said: Predicted, truth: Truth, task: Task = CLASSES) -> dict[str, float | None]:
    """Return n and every score by name, None where it cannot be computed."""
    return {"n": len(truth), **task.scored(said, truth)}


def quality(said: Predicted, truth: Truth, task: Task = CLASSES) -> float | None:
    """Return the score for model selection, higher is better; None where it cannot be computed.

    For classes it is macro-accuracy: by accuracy, a site with mostly one class would choose a constant model.
    """
    name = "macro_accuracy" if task.kind == "classes" else task.scores[0]
    return task.scored(said, truth)[name]


def intervals(
    said: Predicted, truth: Truth, cluster: NDArray[np.str_], task: Task = CLASSES, *, repeats: int
) -> dict[str, list[float] | None]:
    """Return percentile intervals of every score from a bootstrap over clusters (patients).

    A score that no resample changes has the exact interval of a share: of the clusters, or for concordance of pairs of
    which no two share a cluster. Errors of numbers have no bound, so they get None.
    """
    measure = task.measure(said, truth)
    if task.kind == "classes":
        exact = exact_interval(measure, truth, cluster)
    else:
        exact = partial(_exact, task, len(np.unique(cluster)))
    return resampled(measure, task.scores, cluster, exact, repeats=repeats)


def _exact(task: Task, n_clusters: int, name: str, value: float) -> list[float] | None:
    if task.kind == "number":
        return None
    if name == "concordance" and value not in (0, 1):
        return [value, value]  # equal risks rank no pair
    return [*share_interval(value, n_clusters // 2 if name == "concordance" else n_clusters)]


def strata(truth: Truth, task: Task) -> NDArray[np.int64]:
    """Return the strata int64[n] of folds: the class, whether the event was seen, or the half of the numbers.

    Where all had the event it is the half of their times.
    """
    if task.kind == "classes":
        return truth
    if task.kind == "survival":
        seen = truth[:, 1] > 0.5
        halves = truth[:, 0] > np.median(truth[:, 0]) if seen.all() else seen
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


def mutual(
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

    losses = task.losses(outputs, truth)
    if class_weights is None:
        own = losses.mean()
    else:
        counts = class_weights[truth]
        own = (losses * counts).sum() / counts.sum()
    if teacher is None or weight == 0:
        return own
    return torch.lerp(own, task.divergence(outputs, teacher), weight)


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
        return mutual(outputs, self.truth, self.teacher, self.weight, self.class_weights, self.task)
