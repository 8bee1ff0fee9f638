"""Learners, and what one of them does in one round at its own site."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from wsi_fl.learning.examples import Examples, batches
from wsi_fl.learning.objectives import mutual
from wsi_fl.models.checkpoint import load_slots, slots_of, under
from wsi_fl.privacy.choice import AUTO, MODES
from wsi_fl.privacy.dpsgd import DPTrainer

Learners = Mapping[str, "Learner"]
"""The models of one site by role: "private", "proxy"."""

Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""What models see [b, …], labels int64[b], and where the unit of privacy is a patient, whose each row is, int64[b]."""


@dataclass(frozen=True)
class DPSettings:
    """How a learner trains with differential privacy: σ, C, the divisor B, and the way to per-example gradients.

    Attributes:
        modes: what `auto` chooses from.
        unit: whose gradients are clipped, a "row"'s or a "patient"'s.
    """

    sigma: float
    clip: float
    batch_size: int
    grad_mode: str = AUTO
    modes: tuple[str, ...] = MODES
    unit: str = "row"


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
    ) -> None:
        self.model = model.to(device)
        self.device = device
        self.frozen = False
        """While set, steps change nothing."""
        if dp is None and device.type == "cpu":
            self.model.to(memory_format=torch.channels_last)  # pooling and small convolutions gain a third
        self.optimizer = torch.optim.Adam(
            self._parameters(), lr=lr, weight_decay=weight_decay, fused=device.type in ("cpu", "cuda")
        )
        self._dp: DPTrainer | None = None
        if dp is not None:
            self._dp = DPTrainer(
                self.model,
                self.optimizer,
                sigma=dp.sigma,
                clip=dp.clip,
                batch_size=dp.batch_size,
                grad_mode=dp.grad_mode,
                modes=dp.modes,
                unit=dp.unit,
            )

    @property
    def with_dp(self) -> bool:
        """Whether it trains with differential privacy."""
        return self._dp is not None

    @property
    def trainer(self) -> DPTrainer | None:
        """What takes its steps with differential privacy; None without."""
        return self._dp

    @property
    def grad_mode(self) -> str | None:
        """How per-example gradients are taken; None before the first step, or without differential privacy."""
        return self._dp.mode if self._dp is not None else None

    @grad_mode.setter
    def grad_mode(self, mode: str | None) -> None:
        if self._dp is not None and mode is not None:
            self._dp.choose(mode)

    def step(
        self,
        x: Tensor,
        loss_of: Callable[[Tensor], Tensor],
        noise: torch.Generator,
        *,
        logits: Tensor | None = None,
        patient: Tensor | None = None,
    ) -> float:
        """One optimizer step on the mean loss of the batch; an empty batch moves only a DP learner.

        Args:
            logits: what `forward` returned for x, where that was needed before; for learners without DP.
            patient: int64[b], whose each row is; for learners under DP whose unit is a patient.
        """
        if self.frozen:
            return float("nan")
        self.model.train()
        if self._dp is not None:
            return self._dp.step(x, loss_of, noise, patient)
        if not len(x):
            return float("nan")
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.forward(x) if logits is None else logits)
        torch.autograd.backward(loss)
        self.optimizer.step()
        return float(loss.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Logits [b, classes] in training mode, with gradients."""
        self.model.train()
        out: Tensor = self.model(x)
        return out

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Logits [b, classes] in evaluation mode, without gradients."""
        self.model.eval()
        out: Tensor = self.model(x)
        return out

    def vector(self) -> NDArray[np.float32]:
        """All trained parameters as one float32[d]."""
        flat = torch.cat([p.detach().reshape(-1) for p in self._parameters()])
        return flat.cpu().numpy().astype(np.float32, copy=False)

    def load_vector(self, vector: NDArray[np.float32]) -> None:
        """Overwrites the trained parameters in place; the optimizer's state stays."""
        values = torch.from_numpy(np.array(vector, np.float32)).to(self.device)
        with torch.no_grad():
            start = 0
            for parameter in self._parameters():
                part = values[start : start + parameter.numel()]
                parameter.copy_(part.view_as(parameter))
                start += parameter.numel()

    def state(self) -> dict[str, Tensor]:
        """Parameters and optimizer state as named tensors, for a checkpoint."""
        tensors = {f"model/{name}": value.detach().cpu() for name, value in self.model.state_dict().items()}
        return tensors | slots_of(self.optimizer, "optimizer")

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `state` returned."""
        self.model.load_state_dict(under(tensors, "model/"))
        load_slots(self.optimizer, tensors, "optimizer")

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def supervised_step(learner: Learner, batch: Batch, noise: torch.Generator) -> float:
    """One step on cross-entropy (eq. 2)."""
    x, y, patient = _parts(batch)
    return learner.step(x, lambda logits: mutual(logits, y, None, 0.0), noise, patient=patient)


def mutual_step(
    student: Learner,
    answers: Tensor | None,
    weight: float,
    batch: Batch,
    noise: torch.Generator,
    *,
    logits: Tensor | None = None,
) -> float:
    """One step of the student on eq. 4 or 5.

    Args:
        answers: logits [b, classes] of the teacher, which is fixed; None for none.
        weight: α or β.
        logits: the student's own for this batch, where they are known already.
    """
    x, y, patient = _parts(batch)
    return student.step(x, lambda own: mutual(own, y, answers, weight), noise, logits=logits, patient=patient)


def _parts(batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    return (*batch, None) if len(batch) == 2 else batch


def mean_losses(steps: Iterator[dict[str, float]]) -> dict[str, float | None]:
    """Mean of each loss over the steps of a round; None where every batch was empty."""
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
    batch_size: int = 256,
    *,
    alive: Callable[[], None] | None = None,
) -> NDArray[np.float64]:
    """Class probabilities float64[n, classes] of all examples, in order; 0 where a class is not allowed.

    Args:
        predict: images float32[b, c, h, w] in [−1, 1], or bags → logits [b, classes].
        alive: called with every batch, so that nobody thinks this long job hangs.
    """
    parts = []
    for logits, _ in _answers(predict, examples, device, batch_size):
        parts.append(torch.softmax(logits, dim=1).double().cpu().numpy())
        if alive is not None:
            alive()
    return np.concatenate(parts)


def undecided_where_broken(
    said: NDArray[np.float64], allowed: NDArray[np.bool_] | None
) -> NDArray[np.float64]:
    """Return class probabilities float64[n, classes] with rows that are not finite replaced.

    A model that has diverged answers with such rows. It says nothing, so all classes that are allowed are equally
    probable there, and scores can be computed.

    Args:
        said: float64[n, classes].
        allowed: bool[n, classes] the possible classes; None for all.
    """
    broken = ~np.isfinite(said).all(axis=1, keepdims=True)
    if not broken.any():
        return said
    possible = np.ones(said.shape) if allowed is None else allowed.astype(float)
    return np.where(broken, possible / possible.sum(1, keepdims=True), said)


@torch.no_grad()
def cross_entropies(
    predict: Callable[[Tensor], Tensor], examples: Examples, device: torch.device, batch_size: int = 256
) -> NDArray[np.float64]:
    """float64[n]: the loss of every example, in order, precise where a model is all but certain."""
    parts = [np.zeros(0)]
    for logits, labels in _answers(predict, examples, device, batch_size) if len(examples) else ():
        loss = functional.cross_entropy(logits.double(), labels, reduction="none")
        parts.append(loss.cpu().numpy())
    return np.concatenate(parts)


def _answers(
    predict: Callable[[Tensor], Tensor], examples: Examples, device: torch.device, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [b, classes], −∞ where a class is not allowed, labels int64[b]) of all examples, in order."""
    rows = np.array_split(np.arange(len(examples)), range(batch_size, len(examples), batch_size))
    drawn = batches(examples, iter(rows), augment=None, device=device)
    for (x, y), chosen in zip(drawn, rows, strict=True):
        logits = predict(x)
        if examples.allowed is not None:
            possible = torch.from_numpy(examples.allowed[chosen]).to(logits.device)
            logits = logits.masked_fill(~possible, -torch.inf)
        yield logits, y
