"""DP-SGD (Abadi et al., 2016): Poisson batches, clipped per-example gradients, Gaussian noise.

The mean gradient is (Σ clip(g_i, C) + N(0, σ²C² I)) / B with the public constant B, not the size of the sampled batch
(ProxyFL, eq. 7).

ε assumes that one unit, a row or a patient, moves the clipped sum by at most C. Each term is at most C long, so the
bound holds where the terms of all other units are the same without it. `DPTrainer` enforces this for every model and
loss, or refuses them in one line:

- Built-in parts (PyTorch's layers of rows, wsi-fl's own models, plain mean losses) go through an engine.
- Models of timm, torchvision and MONAI go through an engine measured on two real rows, and every step checks that
  buffers, weights and generators of random numbers are unchanged.
- Custom models get one unit at a time, and custom losses one row. No measurement of their behaviour on batches is
  needed, at the cost of a backward pass for each row.

Not covered: deliberate evasion, by state outside the model or numbers computed from an earlier batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite

import torch
from torch import Tensor, nn

from wsi_fl.models.checkpoint import Adam, match_strides
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.engine_selection import ROW_BY_ROW, are_rows_equal, check_per_example_gradients, select_engine
from wsi_fl.privacy.gradients import (
    ENGINES,
    GradientSums,
    Weigh,
    add_gradients,
    default_engine,
    sum_in_parts,
    trainable_parameters,
)
from wsi_fl.privacy.layer_gradients import square_norms
from wsi_fl.privacy.privacy_plan import PrivacyPlan
from wsi_fl.privacy.row_independence import UNTRAINABLE, ModelSnapshot, model_origin, train_without_dropout
from wsi_fl.privacy.rowwise_loss import LossOf, RowwiseLoss, is_mean_of_rows, loss_of_rows
from wsi_fl.system.direct_io import BatchSizeFinder, rows_at_once
from wsi_fl.types import UsageError, WsiFlError, single_line

__all__ = ["DPTrainer", "check_per_example_gradients"]

_CLIP_ROUND_OFF = 1e-6
"""Fraction of C: more than the round-off of float32 weights and of their products with gradients."""
_CHUNK_ROWS = 64  # rows per forward pass, however many a patient has


def _sum_unit_gradients(
    model: nn.Module,
    x: Tensor,
    unit: Tensor,
    loss_of: LossOf,
    weigh: Weigh,
    *,
    chunk: int = _CHUNK_ROWS,
    memory: ModelSnapshot | None = None,
) -> tuple[GradientSums, Tensor]:
    """Return (Σ_u c_u g_u of each trained parameter, mean loss over all rows), from the rows of one unit at a time.

    The gradient g_u of a unit, a patient or a row, is the *mean* over its rows in the batch, and c_u = min(1, C /
    |g_u|). No forward pass has rows of two units, so g_u depends on no other unit for any model. For any rows of a
    patient, and any number of them, the sum changes by at most C when the patient is added or removed; patients are
    sampled whole, each with probability q. So a step is the Poisson-subsampled Gaussian mechanism with noise multiplier
    σ and one patient as its unit. A patient's rows in a step are drawn independently of all others: given the draw the
    bound holds, and so it does on average (Rényi divergence is quasi-convex). The length of the mean, unlike that of
    the sum, does not grow with the number of rows: the same C suits rows and patients.

    Plain backward passes, one unit after the other: memory holds two gradients and the activations of one chunk.

    Args:
        x: [b, …], b > 0.
        unit: int64[b], the unit of each row.
        weigh: norm |g_u|, float64[1] → weight c_u [1]; a unit of weight 0 has no part in the sums.
        memory: snapshot of a custom model, which is restored after each unit.
    """
    sums: GradientSums = [None] * len(trainable_parameters(model))
    outputs: Tensor | None = None
    start: tuple[Tensor, Tensor] | None = None
    for k in sorted(set(unit.tolist())):
        rows = (unit == k).nonzero().flatten()
        if memory is not None and start is None:
            start = rows[:chunk], _stable_outputs(model, x[rows[:chunk]])
            memory.restore()
        gradient: GradientSums = [None] * len(sums)
        for part in torch.split(rows, chunk):
            logits = model(x[part])
            if outputs is None:
                outputs = logits.new_zeros(len(x), *logits.shape[1:])
            # other rows are constants here, so that only the losses of this part have a gradient
            all_outputs = torch.zeros_like(outputs).index_copy(0, part, logits)
            loss = loss_of_rows(loss_of, all_outputs, part.tolist()) * (len(x) / len(rows))
            part_gradient = torch.autograd.grad(loss, trainable_parameters(model), allow_unused=True)
            gradient = [add_gradients(total, addend) for total, addend in zip(gradient, part_gradient, strict=True)]
            outputs[part] = logits.detach()
        squares = x.new_zeros(1, dtype=torch.float64)
        squares = sum((square_norms(g.reshape(1, -1)) for g in gradient if g is not None), squares)
        c = float(weigh(squares.sqrt()))
        scaled = [None if g is None else g * c if c > 0 else torch.zeros_like(g) for g in gradient]
        sums = [add_gradients(total, addend) for total, addend in zip(sums, scaled, strict=True)]
        if memory is not None:
            memory.restore()
    assert outputs is not None
    with torch.no_grad():
        if start is not None and memory is not None:
            _require_stable(model(x[start[0]]), start[1])
            memory.restore()
        return sums, loss_of_rows(loss_of, outputs, ())


@torch.no_grad()
def _stable_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs of a model, equal in two passes."""
    first_outputs: Tensor = model(x)
    second_outputs: Tensor = model(x)
    _require_stable(second_outputs, first_outputs)
    return first_outputs


def _require_stable(outputs: Tensor, expected: Tensor) -> None:
    if not are_rows_equal(outputs, expected):
        raise UsageError(
            f"{UNTRAINABLE}: its outputs for a row change from one time to the next (a memory, or random numbers)"
        )


@contextmanager
def _disable_autocast(device: torch.device) -> Iterator[None]:
    """Compute in the precision of the weights: sums in half precision are too coarse for the bound C."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


def _require_all_parameters(parameters: list[nn.Parameter], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # refuse an optimizer of other parameters than the model's
    groups = getattr(optimizer, "param_groups", None)  # a custom optimizer may have none
    if groups is None:
        return
    optimized = {id(p) for group in groups for p in group["params"]}
    n_foreign = len(optimized - {id(p) for p in model.parameters()})
    if n_foreign:
        raise UsageError(
            f"the optimizer has {n_foreign} parameters that are not the model's and get no gradient, such as those of "
            "a loss or of a copy; give it model.parameters()"
        )
    if missing := sum(id(p) not in optimized for p in parameters):
        raise UsageError(f"the optimizer lacks {missing} of the model's trained parameters; freeze them or add them")


class DPTrainer:
    """A model and its optimizer, stepping with differential privacy.

    Args:
        model: without norms over the batch; its trained parameters all take part in the loss. Custom modules get a row
            at a time, which takes a backward pass for each row.
        optimizer: over the model's parameters; DP-Adam is Adam on the noisy gradient.
        sigma: noise multiplier; 0 switches the noise off.
        clip: clipping norm C of per-example gradients; infinity switches clipping off, without noise only.
        batch_size: the divisor B, in units.
        unit: privacy unit of the clipped gradients, "row" or "patient", which needs no engine.
        engine: a key of ENGINES to try first, where the model may have one; None for the model's default.

    Raises:
        UsageError: when the model has norms over the batch or weights of half precision, or C fits no noise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sigma: float,
        clip: float,
        batch_size: int,
        unit: str = "row",
        engine: str | None = None,
    ) -> None:
        custom = model_origin(model) == "custom"
        if sigma > 0 and not isfinite(clip):
            raise UsageError(f"noise is a multiple of clip, which cannot be {clip:g}")
        self._model, self._optimizer = model, optimizer
        self.sigma, self.clip, self.batch_size = sigma, clip, batch_size
        self.unit, self._batch_finder = unit, BatchSizeFinder()
        self._parameters = trainable_parameters(model)
        kinds = {p.dtype for p in self._parameters}
        if len(kinds) > 1 or not kinds <= {torch.float32, torch.float64}:
            names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            raise UsageError(f"{UNTRAINABLE}: its weights are {names}; make them float32 by model.float()")
        _require_all_parameters(self._parameters, model, optimizer)
        self.engine = ROW_BY_ROW if custom else engine or default_engine(model)
        self._measured: tuple[object, ...] = ()  # the layers, and the axes of rows
        self._constants: dict[tuple[str, ...], tuple[float, ...]] = {}  # of losses

    @classmethod
    def from_plan(cls, plan: PrivacyPlan, model: nn.Module, *, lr: float = 1e-3) -> DPTrainer:
        """Return the trainer of a model with Adam and a plan's σ, C, B and unit."""
        optimizer = Adam(trainable_parameters(model), lr=lr, fused=True)
        return cls(model, optimizer, clip=plan.clip, sigma=plan.sigma, batch_size=plan.batch_size, unit=plan.unit)

    def step(self, x: Tensor, loss_of: LossOf, noise: CipherStream, patient: Tensor | None = None) -> float:
        """Take one step on the batch x[b, …], of pure noise when b = 0; return the mean loss, NaN when b = 0.

        Args:
            loss_of: maps logits [b, classes] to the mean of per-example losses. One call of cross-entropy or of another
                usual mean is recognized; any other loss is computed row by row.
            noise: the stream of the noise.
            patient: int64[b], the patient of each row, where the unit is a patient.

        Raises:
            UsageError: when the model or the loss lets one row depend on another, or keeps state of rows.
            WsiFlError: when patients are missing, or a parameter has no gradient.
        """
        self._optimizer.zero_grad()  # gradients of other code have no noise
        train_without_dropout(self._model)
        n_numbers = sum(p.numel() for p in self._parameters) if self.sigma else 0

        def weigh_norms(norms: Tensor) -> Tensor:
            noise.draw_ahead(n_numbers, norms.device)  # a GPU is busy with the norms meanwhile
            # min(1, C / |g_i|), a little less for round-off; 0, so that g_i is left out, where g_i is not finite, or
            # the weight is subnormal in float32: such numbers are too coarse for the bound C
            weights = (self.clip * (1 - _CLIP_ROUND_OFF) / norms).clamp(max=1.0)
            return weights.where(weights >= torch.finfo(torch.float32).tiny, 0.0)

        # 1. Σ_i g_i · min(1, C / |g_i|) of each parameter (ProxyFL, eq. 7)
        if len(x):
            with _disable_autocast(x.device), torch.enable_grad():
                sums, loss = self._sum_clipped(x, loss_of, weigh_norms, patient)
        else:
            sums, loss = [torch.zeros_like(p) for p in self._parameters], torch.tensor(torch.nan)
        present_sums = [total for total in sums if total is not None]
        if len(present_sums) < len(self._parameters):
            missing = len(self._parameters) - len(present_sums)
            raise WsiFlError(f"{missing} parameters got no gradient; freeze what the loss does not use")
        # 2. noise N(0, σ²C²), divided by the public B
        totals = [total.contiguous() for total in present_sums]
        if self.sigma:
            noise.add_normal(totals, self.sigma * self.clip)
        for parameter, total in zip(self._parameters, totals, strict=True):
            parameter.grad = match_strides(parameter, total.div_(self.batch_size))
        # 3. the optimizer's step: post-processing
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)

    def _sum_clipped(
        self, x: Tensor, loss_of: LossOf, weigh: Weigh, patient: Tensor | None
    ) -> tuple[GradientSums, Tensor]:
        # return the clipped sums of a batch, at most C from each unit, and the mean loss
        if self.unit == "patient" and patient is None:
            raise WsiFlError("a step with patients as privacy units needs the patient of each row")
        unit = patient if self.unit == "patient" else None
        origin = model_origin(self._model)  # it may have changed since
        self._require_same_parameters(x)
        custom, of_rows = origin == "custom", is_mean_of_rows(loss_of)
        memory = None if origin == "built-in" and of_rows else ModelSnapshot(self._model, attributes=custom)
        layers = (x.dim(), *((id(part), type(part)) for part in self._model.modules()))
        is_measured = self._measured == layers  # it may have changed since
        method = self.engine if is_measured else select_engine(self._model, x, unit, self.engine)
        if method is not None and not is_measured:
            self.engine, self._measured = method, layers
        elif method is None and unit is None and len(x) == 1:
            # a single row depends on no other; its engine is the one of other steps, in whichever step a process begins
            method = select_engine(self._model, torch.cat([x, x]), None, self.engine)
        loss_of = loss_of if of_rows else RowwiseLoss(loss_of, self._constants, self._parameters)
        if custom or unit is not None or method in (None, ROW_BY_ROW):
            unit_of_row = torch.arange(len(x), device=x.device) if unit is None else unit
            sums, loss = self._sum_by_unit(x, unit_of_row, loss_of, weigh, memory if custom else None)
        else:
            sums, loss = self._sum_by_engine(x, loss_of, weigh)
        if memory is not None:
            memory.require_unchanged(lambda: self._model(x[:1]))
        return sums, loss

    def _sum_by_unit(
        self, x: Tensor, unit: Tensor, loss_of: LossOf, weigh: Weigh, memory: ModelSnapshot | None
    ) -> tuple[GradientSums, Tensor]:
        def sum_chunk(chunk: int) -> tuple[GradientSums, Tensor]:
            return _sum_unit_gradients(self._model, x, unit, loss_of, weigh, chunk=chunk, memory=memory)

        try:
            return self._batch_finder.run_with_fitting_batch(min(len(x), _CHUNK_ROWS), sum_chunk)
        except (WsiFlError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any error of a custom architecture
            raise UsageError(f"{UNTRAINABLE}: {single_line(error)[:200]}") from error

    def _sum_by_engine(self, x: Tensor, loss_of: LossOf, weigh: Weigh) -> tuple[GradientSums, Tensor]:
        if x.dim() == 4 and not x.is_cuda and self.engine == "ghost":
            x = x.contiguous(memory_format=torch.channels_last)  # faster by a third
        rows_of = partial(sum_in_parts, ENGINES[self.engine], self._model, x, loss_of, weigh)
        return self._batch_finder.run_with_fitting_batch(
            rows_at_once(len(x), x.shape[1:], gpu=x.is_cuda), lambda k: rows_of(at_once=k)
        )

    def _require_same_parameters(self, x: Tensor) -> None:
        # refuse a model with other trained parameters than at the beginning, or rows of another type
        present = trainable_parameters(self._model)
        if len(present) != len(self._parameters) or any(
            a is not b for a, b in zip(present, self._parameters, strict=True)
        ):
            raise UsageError("the model's trained parameters changed; make a new DPTrainer of it")
        if present and x.is_floating_point() and x.dtype != present[0].dtype:
            kinds = [str(kind).removeprefix("torch.") for kind in (present[0].dtype, x.dtype)]
            raise UsageError(f"the model's weights are {kinds[0]} and the rows {kinds[1]}; make both float32")
