"""Learners, and what one of them does in one round at its own site."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wsi_fl.learning.examples import Examples, batches
from wsi_fl.learning.metrics import one_each
from wsi_fl.learning.tasks import CLASSES, MutualLoss, Task
from wsi_fl.models.checkpoint import Adam, load_slots, slots_of, under
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.privacy.gradients import trained
from wsi_fl.privacy.independence import train_without_dropout
from wsi_fl.privacy.sums import NoisySums
from wsi_fl.system.bulk import Portion, few

Learners = Mapping[str, "Learner"]
"""The models of one site by role: "private", "proxy" or "shared"."""

Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""What models see [b, …], labels int64[b], and where the unit of privacy is a patient, whose each row is, int64[b]."""


_BATCH = 256
"""Examples that a model is asked about at a time."""


@dataclass(frozen=True)
class DPSettings:
    """How a learner trains with differential privacy: σ, C and the divisor B.

    Attributes:
        unit: whose gradients are clipped, a "row"'s or a "patient"'s.
        engine: what sums the clipped gradients; None for what suits the model.
    """

    sigma: float
    clip: float
    batch_size: int
    unit: str = "row"
    engine: str | None = None


class Learner:
    """One model with its optimizer (Adam), trained with or without differential privacy."""

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
    ) -> None:
        self.model = model.to(device)
        half = bfloat16 and dp is None
        self._precision = partial(torch.autocast, device.type, torch.bfloat16) if half else nullcontext
        self.task = task
        self.device = device
        self._portion = Portion()
        self.frozen = False
        """While set, steps change nothing."""
        self.fitted = False
        """Whether it was fitted to all rows at once, so that there are no steps to take."""
        self.class_weights = None if class_weights is None else torch.tensor(class_weights, device=device)
        if dp is None and device.type == "cpu":  # GPUs have no GroupNorm of that order
            self.model.to(memory_format=torch.channels_last)  # pooling and small convolutions gain a third
        self.optimizer = Adam(
            trained(self.model), lr=lr, weight_decay=weight_decay, fused=device.type in ("cpu", "cuda")
        )
        self.trainer = None if dp is None else _trainer(self.model, self.optimizer, dp)
        """What takes its steps with differential privacy; None without."""

    @property
    def with_dp(self) -> bool:
        """Return whether it trains with differential privacy."""
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
        """Take one optimizer step on the mean loss of a batch, and return that; an empty batch moves only a DP learner.

        Args:
            logits: what `forward` returned for x, where that was needed before; for learners without DP.
            patient: int64[b], whose each row is; for learners under DP whose unit is a patient.
        """
        if self.frozen or self.fitted:
            return float("nan")
        self.model.train()
        if isinstance(self.trainer, DPTrainer):
            return self.trainer.step(x, loss_of, noise, patient)
        if not len(x):
            return float("nan")
        loss = self._portion.tried(len(x), lambda k: self._backward(x, loss_of, logits, k))
        self.optimizer.step()
        return loss

    def _backward(
        self, x: Tensor, loss_of: Callable[[Tensor], Tensor], logits: Tensor | None, at_once: int
    ) -> float:
        """Set the gradients of the mean loss, with so many rows going through the model at once."""
        self.optimizer.zero_grad(set_to_none=True)
        whole = at_once >= len(x)
        loss = loss_of(logits if whole and logits is not None else self._in_parts(x, at_once))
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _in_parts(self, x: Tensor, at_once: int) -> Tensor:
        """Return logits of which the backward pass computes every part anew, so that memory holds one."""
        if at_once >= len(x):
            return _predicted(self._called, x, at_once)
        from torch.utils.checkpoint import checkpoint

        parts = [checkpoint(self._called, part, use_reentrant=False) for part in torch.split(x, at_once)]
        return torch.cat(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float32[b, classes] in training mode, with gradients."""
        self.model.train()
        if self.with_dp:  # as `DPTrainer` has it
            train_without_dropout(self.model)
        return self._portion.tried(max(1, len(x)), lambda k: self._in_parts(x, k))

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return logits float32[b, classes] in evaluation mode, without gradients."""
        self.model.eval()
        return _predicted(self._called, x, len(x))

    def _called(self, x: Tensor) -> Tensor:
        with self._precision():
            out: Tensor = self.model(x)
        return out.float() if out.dtype == torch.bfloat16 else out

    def vector(self) -> NDArray[np.float32]:
        """Return all trained parameters as one float32[d]."""
        flat = torch.cat([p.detach().reshape(-1) for p in trained(self.model)])
        return flat.cpu().numpy().astype(np.float32, copy=False)

    def load_vector(self, vector: NDArray[np.float32], *, n_sites: int = 0) -> None:
        """Overwrite the trained parameters in place, from float32[d]; the optimizer's state stays.

        Args:
            n_sites: how many sites the vector is the mean of; a head that is made of sums must know.
        """
        if isinstance(self.model, SharedHead):
            self.model.n_sites.fill_(n_sites)
        values = torch.from_numpy(np.array(vector, np.float32)).to(self.device)
        with torch.no_grad():
            parameters = trained(self.model)
            parts = torch.split(values, [p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

    def state(self) -> dict[str, Tensor]:
        """Return parameters and optimizer state as named tensors, for a checkpoint."""
        tensors = {f"model/{name}": value.detach().cpu() for name, value in self.model.state_dict().items()}
        return tensors | slots_of(self.optimizer, "optimizer")

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Bring back what `state` returned."""
        self.model.load_state_dict(under(tensors, "model/"))
        load_slots(self.optimizer, tensors, "optimizer")


def _trainer(model: nn.Module, optimizer: torch.optim.Optimizer, dp: DPSettings) -> DPTrainer | NoisySums:
    """Return the private trainer of a model: DP-SGD for most, noisy sums for heads that are made of sums."""
    if isinstance(model, SharedHead):
        return NoisySums(dp.sigma, dp.clip, dp.batch_size, dp.unit)
    return DPTrainer(model, optimizer, **asdict(dp))


def know_rows(learner: Learner, rows: Examples) -> None:
    """Let a shared head know all rows of its site, and which of them are of one patient; nothing of this leaves."""
    head = learner.model
    assert isinstance(head, SharedHead)
    if not len(rows):
        return
    patient = torch.from_numpy(np.unique(one_each(rows.patient), return_inverse=True)[1]).to(learner.device)
    for x, y in batches(rows, iter([np.arange(len(rows))]), augment=None, device=learner.device):
        head.know(head.embedded(x), learner.task.columns(y), patient)


def sum_up(learner: Learner, batch: Batch, noise: CipherStream) -> None:
    """Compute the sums of a batch of all rows, with noise where the learner is under privacy."""
    head = learner.model
    assert isinstance(head, SharedHead)
    x, y, *whose = batch
    dp = learner.trainer if isinstance(learner.trainer, NoisySums) else NoisySums(0.0, 1.0, len(x))
    dp.fill(head, x, learner.task.columns(y), noise, whose[0] if whose else None)


def supervised_step(learner: Learner, batch: Batch, noise: CipherStream) -> float:
    """Take one step on the loss of the task, cross-entropy for classes (eq. 2), and return it."""
    return mutual_step(learner, None, 0.0, batch, noise)


def mutual_step(
    student: Learner,
    answers: Tensor | None,
    weight: float,
    batch: Batch,
    noise: CipherStream,
    *,
    logits: Tensor | None = None,
) -> float:
    """Take one step of the student on eq. 4 or 5, and return the loss.

    Args:
        answers: logits [b, classes] of the teacher, which is fixed; None for none.
        weight: α or β.
        logits: the student's own for this batch, where they are known already.
    """
    x, y, *whose = batch
    patient = whose[0] if whose else None
    return student.step(
        x,
        MutualLoss(y, answers, weight, student.class_weights, student.task),
        noise,
        logits=logits,
        patient=patient,
    )


def mean_losses(steps: Iterator[dict[str, float]]) -> dict[str, float | None]:
    """Return the mean of each loss over the steps of a round; None where every batch was empty."""
    seen: dict[str, list[float]] = {}
    for losses in steps:
        for role, value in losses.items():
            seen.setdefault(role, []).append(value)
    means = {role: np.array(values)[np.isfinite(values)] for role, values in seen.items()}
    return {role: float(values.mean()) if len(values) else None for role, values in means.items()}


def probabilities(
    predict: Callable[[Tensor], Tensor],
    examples: Examples,
    device: torch.device,
    batch_size: int = _BATCH,
    *,
    alive: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Return what a model says of all examples, in order: float64[n, k] as their task has it.

    Of classes they are probabilities, 0 where a class is not allowed.

    Args:
        predict: images float32[b, c, h, w] in [−1, 1], or bags → outputs [b, k].
        alive: called with every batch, so that nobody thinks this long job hangs.
    """
    (found,) = probabilities_of_each([predict], examples, device, batch_size, alive=alive)
    return np.asarray(found)


def probabilities_of_each(
    models: Sequence[Callable[[Tensor], Tensor]],
    examples: Examples,
    device: torch.device,
    batch_size: int = _BATCH,
    *,
    alive: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Return what each of r models says of all examples, float64[r, n, k], as `probabilities`; they are read once."""

    def predict(x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in models], dim=1)

    parts = []
    for outputs, _ in _answers(predict, examples, device, batch_size):
        # in single precision all that is likelier than 1 − 6e-8 would be certain, and no order be left among it
        said = torch.stack([examples.task.said(one.double()) for one in outputs.unbind(1)])
        parts.append(said.cpu().numpy())
        alive()
    return np.concatenate(parts, axis=1)


def undecided_where_broken(said: NDArray[np.float64], examples: Examples) -> NDArray[np.float64]:
    """Return what a model says, float64[n, k] of n examples, with rows that are not finite replaced.

    A model that has diverged answers with such rows. It knows nothing, so it is given a guess there: all classes that
    are allowed are equally probable. Then scores can be computed.
    """
    broken = ~np.isfinite(said).all(axis=1, keepdims=True)
    if not broken.any():
        return said
    if (allowed := examples.allowed) is not None:
        return np.where(broken, allowed / allowed.sum(1, keepdims=True), said)
    return np.where(broken, examples.task.guess(said.shape[1]), said)


@torch.no_grad()
def losses_of(
    predict: Callable[[Tensor], Tensor], examples: Examples, device: torch.device, batch_size: int = _BATCH
) -> NDArray[np.float64]:
    """Return float64[n], the loss of every example, in order, precise where a model is all but certain."""
    parts = [np.zeros(0)]
    for logits, labels in _answers(predict, examples, device, batch_size) if len(examples) else ():
        parts.append(examples.task.losses(logits.double(), labels).cpu().numpy())
    return np.concatenate(parts)


def _answers(
    predict: Callable[[Tensor], Tensor], examples: Examples, device: torch.device, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits [b, classes], −∞ where a class is not allowed, labels int64[b]) of all examples, in order."""
    size = min(batch_size, examples.at_once or batch_size)
    rows = np.array_split(np.arange(len(examples)), range(size, len(examples), size))
    drawn, portion = batches(examples, iter(rows), augment=None, device=device), Portion()
    for (x, y), chosen in zip(drawn, rows, strict=True):
        logits = portion.tried(len(x), partial(_predicted, predict, x))
        if examples.allowed is not None:
            possible = torch.from_numpy(examples.allowed[chosen]).to(logits.device)
            possible = possible.view(len(x), *[1] * (logits.ndim - 2), -1)
            logits = logits.masked_fill(~possible, -torch.inf)
        yield logits, y


def _predicted(predict: Callable[[Tensor], Tensor], x: Tensor, at_once: int) -> Tensor:
    """Return what a model says of x[b, …], so many rows of which it sees at once, or a few."""
    at_once = few(at_once, x.shape[1:], gpu=x.is_cuda)
    return torch.cat([predict(part) for part in torch.split(x, at_once)])
