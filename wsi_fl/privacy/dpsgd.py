"""DP-SGD (Abadi et al., 2016): Poisson batches, clipped per-example gradients, Gaussian noise.

The mean gradient is (Σ clip(g_i, C) + N(0, σ²C² I)) / B with the public constant B, never the size of the
batch that came out (ProxyFL, eq. 7).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from wsi_fl.models.checkpoint import laid_out_like
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.gradients import (
    ENGINES,
    GHOSTS,
    GradientSums,
    LossOf,
    Weigh,
    added,
    engine_of,
    squared_norms,
    summed_in_parts,
    trained,
)
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.system.bulk import Portion, few
from wsi_fl.types import UsageError, WsiFlError

_ROUND_OFF = 1e-6
"""Fraction of C: more than the round-off of float32 weights and of their products with gradients."""
_CHUNK = 64  # rows that go through the model at a time, however many a patient has


def _summed_by_patient(
    model: nn.Module, x: Tensor, patient: Tensor, loss_of: LossOf, weigh: Weigh, *, chunk: int = _CHUNK
) -> tuple[GradientSums, Tensor]:
    """Return (Σ_p c_p g_p of each trained parameter, mean loss over all rows): ε protects the patient and not a row.

    A patient's gradient g_p is the *mean* over its rows in the batch, and c_p = min(1, C / |g_p|). Whatever a patient's
    rows are, and however many, the sum changes by at most C when the patient is added or removed; patients are sampled
    whole, each with probability q. So a step is the Poisson-subsampled Gaussian mechanism with noise multiplier σ, its
    unit being one patient. Which of its rows a patient brings is drawn anew in each step and independent of all others:
    given the draw the bound holds, and so it does on average (Rényi divergence is quasi-convex). The mean, and not the
    sum, since its length does not grow with the number of rows: the same C suits rows and patients.

    By plain backward passes, one patient after the other: memory holds two gradients and the activations of one chunk.

    Args:
        x: [b, …], b > 0.
        patient: int64[b], whose each row is.
        weigh: norm |g_p|, float64[1] → weight c_p [1]; a patient of weight 0 has no part in the sums.
    """
    sums: GradientSums = [None] * len(trained(model))
    said: Tensor | None = None
    for one in sorted(set(patient.tolist())):
        rows = (patient == one).nonzero().flatten()
        gradient: GradientSums = [None] * len(sums)
        for part in torch.split(rows, chunk):
            logits = model(x[part])
            if said is None:
                said = logits.new_zeros(len(x), *logits.shape[1:])
            # rows beside this part are constants here, so that only its own losses have a gradient
            whole = torch.zeros_like(said).index_copy(0, part, logits)
            loss = loss_of(whole) * (len(x) / len(rows))
            found = torch.autograd.grad(loss, trained(model), allow_unused=True)
            gradient = [added(total, more) for total, more in zip(gradient, found, strict=True)]
            said[part] = logits.detach()
        squares = x.new_zeros(1, dtype=torch.float64)
        squares = sum((squared_norms(g.reshape(1, -1)) for g in gradient if g is not None), squares)
        c = float(weigh(squares.sqrt()))
        scaled = [None if g is None else g * c if c > 0 else torch.zeros_like(g) for g in gradient]
        sums = [added(total, more) for total, more in zip(sums, scaled, strict=True)]
    assert said is not None
    with torch.no_grad():
        return sums, loss_of(said)


_UNTRAINABLE = "model cannot be trained with differential privacy"


def _check_trainable(model: nn.Module) -> None:
    """Refuse a model whose per-example gradients are not defined, as those of BatchNorm are not.

    Raises:
        UsageError: in one line, with the first module that cannot be.
    """
    if all(map(_ties_nothing, model.modules())):
        return  # importing Opacus takes a rank a second
    from opacus.validators import ModuleValidator

    model.train()  # it looks at no other
    problems = ModuleValidator.validate(model, strict=False)
    if problems:
        reason = _one_line(problems[0]).split(". ")[0]
        raise UsageError(f"{_UNTRAINABLE}: {reason}")


def _ties_nothing(module: nn.Module) -> bool:
    """Return whether a module, without its children, is known to treat the examples of a batch independently."""
    if type(module) in GHOSTS:
        return True
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not own and not isinstance(module, _NormBase)


def check_per_example_gradients(model: nn.Module, input_shape: tuple[int, ...], n_classes: int) -> str:
    """Return the first engine whose per-example gradients agree with those of single examples, on a copy of the model.

    Clipping means nothing where they differ, and an architecture from elsewhere may do what an engine does not see: use
    parameters outside their module, operate in place, tie the examples of a batch together. `input_shape` is that of
    one example, such as channels, height and width.

    Raises:
        UsageError: when the model does not map such images to logits, or no engine is right.
    """
    _check_trainable(model)
    shape = "×".join(map(str, input_shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe = _generic_copy(model)
        x, y = torch.randn(2, *input_shape), torch.arange(2) % n_classes
        state = torch.get_rng_state()
        try:
            logits = probe(x)
        except Exception as error:  # whatever somebody's architecture raises
            raise UsageError(f"model cannot take images of {shape}: {_one_line(error)}") from None
        if not isinstance(logits, Tensor) or logits.shape != (2, n_classes):
            raise UsageError(f"model does not map images of {shape} to {n_classes} logits each")
        if not torch.equal(state, torch.get_rng_state()) or not torch.equal(logits, probe(x)):
            raise UsageError(f"{_UNTRAINABLE}: it draws random numbers in training; set its dropout to 0")
        try:
            singly = _gradients_singly(probe, x, y)
        except Exception as error:
            raise UsageError(f"{_UNTRAINABLE} on images of {shape}: {_one_line(error)}") from None
        best, faults = engine_of(model), []
        for engine in dict.fromkeys((best, "hooks")):
            fault = _fault(engine, probe, x, y, singly)
            if fault is None:
                return engine
            faults.append(fault)
    raise UsageError(f"{_UNTRAINABLE} on images of {shape}: {faults[0]}")


_GRADIENT_RTOL, _GRADIENT_ATOL, _NORM_RTOL = 1e-2, 1e-5, 1e-3
"""Of a parameter's gradient, of the whole, and of the norm: far above round-off, far below a mistake's effect."""


def _generic_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU in training mode, its constant weights replaced: they may hide other gradients."""
    model = copy.deepcopy(model).cpu()
    _train_without_dropout(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.min() == parameter.max():  # a layer scale of 10⁻⁶, a gain of 0
                parameter.uniform_(0.5, 1.5)
                if parameter.dim() > 1:  # a matrix of a size that keeps that of what it is applied to
                    parameter.div_(parameter[0].numel())
    return model


def _train_without_dropout(model: nn.Module) -> None:
    """Set training mode where a module has parameters. Dropout has none; its random mask would have to stay secret."""
    for module in model.modules():
        module.training = any(True for _ in module.parameters(recurse=False))


def _gradients_singly(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return per-example gradients [b, …] by parameter, from b passes of one example each."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for k in range(len(x)):
        loss = functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1])
        rows.append(torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True))
    return {name: torch.stack(g) for name, g in zip(parameters, zip(*rows, strict=True), strict=True)}


def _fault(engine: str, model: nn.Module, x: Tensor, y: Tensor, singly: Mapping[str, Tensor]) -> str | None:
    """Return what is wrong with the sums and norms of an engine, in words; None where they are right."""
    c, told = torch.linspace(1.0, 0.25, len(x)), []

    def weigh(norms: Tensor) -> Tensor:
        told.append(norms)
        return c

    try:
        sums, _ = ENGINES[engine](
            copy.deepcopy(model), x, lambda logits: functional.cross_entropy(logits, y), weigh
        )
    except Exception as error:
        return _one_line(error)
    norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in singly.values()]).norm(dim=0)
    for (name, each), found in zip(singly.items(), sums, strict=True):
        if found is None:
            return f"{engine} finds no per-example gradients of {name}"
        wanted = torch.einsum("n,n...->...", c, each)
        tolerance = _GRADIENT_RTOL * float(wanted.norm()) + _GRADIENT_ATOL * float(norms.norm())
        if found.shape != wanted.shape or not float((found - wanted).norm()) <= tolerance:
            return f"{engine}: per-example gradients of {name} are wrong"
    if not torch.allclose(told[0], norms.double(), rtol=_NORM_RTOL):
        return f"{engine}: norms of per-example gradients are wrong"
    return None


def _one_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


class DPTrainer:
    """A model and its optimizer, stepping with differential privacy.

    Args:
        model: without BatchNorm; its trained parameters all take part in the loss.
        optimizer: over the model's parameters; DP-Adam is Adam on the noisy gradient.
        sigma: noise multiplier; 0 switches the noise off.
        clip: bound C on per-example gradients; infinity switches clipping off, without noise only.
        batch_size: the divisor B, in units.
        unit: whose gradients are clipped: one "row"'s, or one "patient"'s, which asks for no engine.
        engine: a key of ENGINES that is known to be right about the model; None for `engine_of` it.
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
        _check_trainable(model)
        if sigma > 0 and not isfinite(clip):
            raise UsageError(f"noise is a multiple of clip, which cannot be {clip:g}")
        self._model, self._optimizer = model, optimizer
        self.sigma, self.clip, self.batch_size = sigma, clip, batch_size
        self.unit, self._portion = unit, Portion()
        self._parameters = trained(model)
        self.engine = engine or engine_of(model)

    @classmethod
    def of(cls, plan: PrivacyPlan, model: nn.Module, *, lr: float = 1e-3) -> DPTrainer:
        """Return the trainer of a model by Adam with a plan's σ, C, B and unit."""
        optimizer = torch.optim.Adam(trained(model), lr=lr)
        return cls(
            model, optimizer, clip=plan.clip, sigma=plan.sigma, batch_size=plan.batch_size, unit=plan.unit
        )

    def step(self, x: Tensor, loss_of: LossOf, noise: CipherStream, patient: Tensor | None = None) -> float:
        """Take one step on the batch x[b, …], of pure noise when b = 0; return the mean loss, NaN when b = 0.

        Args:
            loss_of: maps logits [b, classes] to the mean of per-example losses.
            noise: the stream that it is drawn from.
            patient: int64[b], the patient of each row, where the unit is a patient.

        Raises:
            WsiFlError: when patients are missing, or a parameter has no gradient.
        """
        _train_without_dropout(self._model)
        n_numbers = sum(p.numel() for p in self._parameters) if self.sigma else 0

        def weigh(norms: Tensor) -> Tensor:
            noise.draw_ahead(n_numbers, norms.device)  # a GPU is busy with the norms meanwhile
            # min(1, C / |g_i|), a little less for round-off; 0, so that g_i is left out, where it is not finite, or the
            # weight is subnormal in float32: such numbers are too coarse to keep to C
            weights = (self.clip * (1 - _ROUND_OFF) / norms).clamp(max=1.0)
            return weights.where(weights >= torch.finfo(torch.float32).tiny, 0.0)

        # 1. Σ_i g_i · min(1, C / |g_i|) of each parameter (ProxyFL, eq. 7)
        if len(x) and self.unit == "patient":
            if patient is None:
                raise WsiFlError("a step with patients as units must know whose each row is")
            of, rows = patient, min(len(x), _CHUNK)
            sums, loss = self._portion.tried(
                rows, lambda k: _summed_by_patient(self._model, x, of, loss_of, weigh, chunk=k)
            )
        elif len(x):
            if x.dim() == 4 and not x.is_cuda and self.engine == "ghost":
                x = x.contiguous(memory_format=torch.channels_last)  # faster by a third
            rows_of = partial(summed_in_parts, ENGINES[self.engine], self._model, x, loss_of, weigh)
            sums, loss = self._portion.tried(
                few(len(x), x.shape[1:], gpu=x.is_cuda), lambda k: rows_of(at_once=k)
            )
        else:
            sums, loss = [torch.zeros_like(p) for p in self._parameters], torch.tensor(torch.nan)
        found = [total for total in sums if total is not None]
        if len(found) < len(sums):
            missing = len(sums) - len(found)
            raise WsiFlError(f"{missing} parameters got no gradient; freeze what the loss does not use")
        # 2. noise N(0, σ²C²), divided by the public B
        totals = [total.contiguous() for total in found]
        if self.sigma:
            noise.add_normal(totals, self.sigma * self.clip)
        for parameter, total in zip(self._parameters, totals, strict=True):
            parameter.grad = laid_out_like(parameter, total.div_(self.batch_size))
        # 3. the optimizer's step: post-processing
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)
