"""Learners, and their steps and predictions at a site."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import Cohort
from wsi_fl.data.tasks import CLASSES, MutualLoss, Task
from wsi_fl.models.checkpoint import Adam, copy_slots, load_slots, strip_prefix
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.privacy.gradients import trainable_parameters
from wsi_fl.privacy.privacy_plan import PrivateTrainer
from wsi_fl.privacy.row_independence import train_without_dropout
from wsi_fl.system.direct_io import BatchSizeFinder, rows_at_once

Learners = Mapping[str, "Learner"]
"""The models of one site by role: "private", "proxy" or "shared"."""

Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""Inputs [b, …], labels int64[b], and for the privacy unit patient the patient int64[b] of each example."""


_PREDICTION_ROWS = 256
"""Examples per batch of predictions."""


@dataclass(frozen=True)
class DPSettings:
    """Settings of differentially private training: σ, C and the divisor B.

    Attributes:
        unit: of the clipped gradients, "row" or "patient".
        engine: of their sums; None for the model's default.
    """

    sigma: float
    clip: float
    batch_size: int
    unit: str = "row"
    engine: str | None = None


class Learner:
    """A model with its optimizer (Adam), trained with or without differential privacy."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        weight_decay: float,
        device: torch.device,
        dp: DPSettings | None,
        class_weights: Sequence[float] | None = None,
        task: Task = CLASSES,
        bfloat16: bool = False,
        build_trainer: Callable[[Learner, DPSettings], PrivateTrainer] | None = None,
    ) -> None:
        self.model = model.to(device)
        use_bfloat16 = bfloat16 and dp is None
        self._precision = partial(torch.autocast, device.type, torch.bfloat16) if use_bfloat16 else nullcontext
        self.task = task
        self.device = device
        self._portion = BatchSizeFinder()
        self.frozen = False
        """Whether steps are disabled."""
        self.fitted = False
        """Whether the model was fitted to all examples at once, without steps."""
        self.class_weights = None if class_weights is None else torch.tensor(class_weights, device=device)
        if dp is None and device.type == "cpu":  # GPUs have no GroupNorm of that order
            self.model.to(memory_format=torch.channels_last)  # pooling and small convolutions gain a third
        self.optimizer = Adam(
            trainable_parameters(self.model), lr=lr, weight_decay=weight_decay, fused=device.type in ("cpu", "cuda")
        )
        self.trainer = None if dp is None else (build_trainer or build_dp_trainer)(self, dp)
        """The differentially private trainer, by default DP-SGD; None without."""

    @property
    def is_private(self) -> bool:
        """Return whether training is differentially private."""
        return self.trainer is not None

    def step(
        self,
        x: Tensor,
        loss_of: Callable[[Tensor], Tensor],
        noise: CipherStream,
        *,
        logits: Tensor | None = None,
        patient: Tensor | None = None,
    ) -> float:
        """Take one optimizer step on the mean loss of a batch, and return the loss; only DP learners use empty batches.

        Args:
            predict_logits: the logits of x in training mode, where they are known; for learners without DP.
            patient: int64[b], the patient of each example; for DP learners with the privacy unit patient.
        """
        if self.frozen or self.fitted:
            return float("nan")
        self.model.train()
        if isinstance(self.trainer, DPTrainer):
            return self.trainer.step(x, loss_of, noise, patient)
        if not len(x):
            return float("nan")
        loss = self._portion.run_with_fitting_batch(len(x), lambda k: self._run_backward(x, loss_of, logits, k))
        self.optimizer.step()
        return loss

    def _run_backward(
        self, x: Tensor, loss_of: Callable[[Tensor], Tensor], logits: Tensor | None, chunk_rows: int
    ) -> float:
        """Set the gradients of the mean loss, `chunk_rows` examples per forward pass."""
        self.optimizer.zero_grad(set_to_none=True)
        is_whole = chunk_rows >= len(x)
        loss = loss_of(logits if is_whole and logits is not None else self._forward_in_parts(x, chunk_rows))
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _forward_in_parts(self, x: Tensor, chunk_rows: int) -> Tensor:
        """Return logits with gradient checkpointing: memory holds one part, recomputed in the backward pass."""
        if chunk_rows >= len(x):
            return _predict_chunks(self._call_model, x, chunk_rows)
        from torch.utils.checkpoint import checkpoint

        parts = [checkpoint(self._call_model, part, use_reentrant=False) for part in torch.split(x, chunk_rows)]
        return torch.cat(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float32[b, classes] in training mode, with gradients."""
        self.model.train()
        if self.is_private:  # as in `DPTrainer`
            train_without_dropout(self.model)
        return self._portion.run_with_fitting_batch(max(1, len(x)), lambda k: self._forward_in_parts(x, k))

    @torch.no_grad()
    def predict_logits(self, x: Tensor) -> Tensor:
        """Return logits float32[b, classes] in evaluation mode, without gradients."""
        self.model.eval()
        return _predict_chunks(self._call_model, x, len(x))

    def _call_model(self, x: Tensor) -> Tensor:
        with self._precision():
            out: Tensor = self.model(x)
        return out.float() if out.dtype == torch.bfloat16 else out

    def parameter_vector(self) -> NDArray[np.float32]:
        """Return all trained parameters as one float32[d]."""
        flat = torch.cat([p.detach().reshape(-1) for p in trainable_parameters(self.model)])
        return flat.cpu().numpy().astype(np.float32, copy=False)

    def load_vector(self, vector: NDArray[np.float32]) -> None:
        """Overwrite the trained parameters in place, from float32[d]; the optimizer's state stays."""
        values = torch.from_numpy(np.array(vector, np.float32)).to(self.device)
        with torch.no_grad():
            parameters = trainable_parameters(self.model)
            parts = torch.split(values, [p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

    def state_tensors(self) -> dict[str, Tensor]:
        """Return parameters and optimizer state as named tensors, for a checkpoint."""
        tensors = {f"model/{name}": value.detach().cpu() for name, value in self.model.state_dict().items()}
        return tensors | copy_slots(self.optimizer, "optimizer")

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore parameters and optimizer state."""
        self.model.load_state_dict(strip_prefix(tensors, "model/"))
        load_slots(self.optimizer, tensors, "optimizer")


def build_dp_trainer(learner: Learner, dp: DPSettings) -> PrivateTrainer:
    """Return the DP-SGD trainer of a learner's model."""
    return DPTrainer(learner.model, learner.optimizer, **asdict(dp))


def take_supervised_step(learner: Learner, batch: Batch, noise: CipherStream) -> float:
    """Take one step on the loss of the task, cross-entropy for classes (eq. 2), and return it."""
    return take_mutual_step(learner, None, 0.0, batch, noise)


def take_mutual_step(
    student: Learner,
    teacher_logits: Tensor | None,
    weight: float,
    batch: Batch,
    noise: CipherStream,
    *,
    logits: Tensor | None = None,
) -> float:
    """Take one step of the student on eq. 4 or 5, and return the loss.

    Args:
        teacher_logits: fixed logits [b, classes] of the teacher; None without one.
        weight: α or β.
        logits: the student's for this batch, where they are known.
    """
    x, y, *patients = batch
    patient = patients[0] if patients else None
    return student.step(
        x,
        MutualLoss(y, teacher_logits, weight, student.class_weights, student.task),
        noise,
        logits=logits,
        patient=patient,
    )


def mean_losses(steps: Iterator[dict[str, float]]) -> dict[str, float | None]:
    """Return the mean of each loss over the steps of a round; None where every batch was empty."""
    values_by_role: dict[str, list[float]] = {}
    for losses in steps:
        for role, value in losses.items():
            values_by_role.setdefault(role, []).append(value)
    means = {role: np.array(values)[np.isfinite(values)] for role, values in values_by_role.items()}
    return {role: float(values.mean()) if len(values) else None for role, values in means.items()}


def predict_examples(
    predict: Callable[[Tensor], Tensor],
    examples: Cohort,
    device: torch.device,
    batch_size: int = _PREDICTION_ROWS,
    *,
    alive: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Return a model's predictions for all examples, in order: float64[n, k] as their task has them.

    For classes they are probabilities, 0 where a class is not allowed.

    Args:
        predict: images float32[b, c, h, w] in [−1, 1], or bags → outputs [b, k].
        alive: called with every batch, as a heartbeat.
    """
    (predictions,) = predict_with_models([predict], examples, device, batch_size, alive=alive)
    return np.asarray(predictions)


@torch.no_grad()
def predict_with_models(
    models: Sequence[Callable[[Tensor], Tensor]],
    examples: Cohort,
    device: torch.device,
    batch_size: int = _PREDICTION_ROWS,
    *,
    alive: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Return the predictions float64[r, n, k] of r models for all examples, which are read once."""

    def stack_outputs(x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in models], dim=1)

    parts = []
    for outputs, _ in _iterate_logits(stack_outputs, examples, device, batch_size):
        # single precision would round probabilities above 1 − 6e-8 to 1 and lose their order
        predictions = torch.stack([examples.task.predict(logits.double()) for logits in outputs.unbind(1)])
        parts.append(predictions.cpu().numpy())
        alive()
    return np.concatenate(parts, axis=1)


def replace_nonfinite(predictions: NDArray[np.float64], examples: Cohort) -> NDArray[np.float64]:
    """Return predictions float64[n, k] with rows that are not finite replaced by the baseline prediction.

    Diverged models predict such rows. In the baseline all allowed classes are equally probable, so that scores can be
    computed.
    """
    is_broken = ~np.isfinite(predictions).all(axis=1, keepdims=True)
    if not is_broken.any():
        return predictions
    if (allowed := examples.allowed) is not None:
        return np.where(is_broken, allowed / allowed.sum(1, keepdims=True), predictions)
    return np.where(is_broken, examples.task.baseline_prediction(predictions.shape[1]), predictions)


@torch.no_grad()
def example_losses(
    predict: Callable[[Tensor], Tensor], examples: Cohort, device: torch.device, batch_size: int = _PREDICTION_ROWS
) -> NDArray[np.float64]:
    """Return the loss float64[n] of every example, in order, in double precision for confident predictions."""
    parts = [np.zeros(0)]
    for logits, labels in _iterate_logits(predict, examples, device, batch_size) if len(examples) else ():
        parts.append(examples.task.compute_losses(logits.double(), labels).cpu().numpy())
    return np.concatenate(parts)


def _iterate_logits(
    predict: Callable[[Tensor], Tensor], examples: Cohort, device: torch.device, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits [b, classes], −∞ where a class is not allowed, labels int64[b]) of all examples, in order."""
    size = min(batch_size, examples.at_once or batch_size)
    chunks = np.array_split(np.arange(len(examples)), range(size, len(examples), size))
    inputs, portion = load_batches(examples, iter(chunks), augment=None, device=device), BatchSizeFinder()
    for (x, y), chunk in zip(inputs, chunks, strict=True):
        logits = portion.run_with_fitting_batch(len(x), partial(_predict_chunks, predict, x))
        if examples.allowed is not None:
            possible = torch.from_numpy(examples.allowed[chunk]).to(logits.device)
            possible = possible.view(len(x), *[1] * (logits.ndim - 2), -1)
            logits = logits.masked_fill(~possible, -torch.inf)
        yield logits, y


def _predict_chunks(predict: Callable[[Tensor], Tensor], x: Tensor, chunk_rows: int) -> Tensor:
    """Return a model's outputs for x[b, …], at most `chunk_rows` examples per forward pass."""
    chunk_rows = rows_at_once(chunk_rows, x.shape[1:], gpu=x.is_cuda)
    return torch.cat([predict(part) for part in torch.split(x, chunk_rows)])
