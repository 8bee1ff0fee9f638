"""Weighted sums of per-example gradients, two ways.

An engine takes the batch, asks for a weight c_i of each example once it knows the norms |g_i| of its gradients,
and returns Σ_i c_i g_i over the examples that have one:

- `ghost` never holds the g_i: one backward pass gives every layer's output gradients, and a layer's rule the
  norms and the sum (book-keeping: Bu, Wang, Zha and Karypis, ICML 2023);
- `hooks` holds all b gradients, by Opacus, and suits every model that Opacus knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from wsi_fl.models.norm import FrozenNorm
from wsi_fl.privacy.ghost import (
    ByParameter,
    Gradients,
    Kept,
    Use,
    gradients_of,
    obstacle,
    per_example,
    squared_norms,
)
from wsi_fl.types import WsiFlError

LossOf = Callable[[Tensor], Tensor]
"""Logits [b, classes] → the mean of per-example losses."""

Weigh = Callable[[Tensor], Tensor]
"""Norms |g_i|, float64[b] → weights c_i [b]; an example of weight 0 has no part in the sums, even if g_i is NaN."""

GradientSums = list[Tensor | None]
"""Σ_i c_i g_i of each trained parameter, in the model's order; None where the loss does not depend on it."""

Engine = Callable[[nn.Module, Tensor, LossOf, Weigh], tuple[GradientSums, Tensor]]
"""(model, x[b, …], loss_of, weigh) → (sums, mean loss)."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer moves."""
    return [p for p in model.parameters() if p.requires_grad]


# ghost


class _Recorded(NamedTuple):
    module: nn.Module
    x: Tensor
    version: int
    output: GradientEdge


def _ghost(model: nn.Module, x: Tensor, loss_of: LossOf, weigh: Weigh) -> tuple[GradientSums, Tensor]:
    # 1. forward: record input and output of every layer
    with _recording(model) as records:
        logits = model(x)
    loss = loss_of(logits)
    # 2. backward with respect to outputs alone: autograd then leaves the weights' gradients out
    outputs = [record.output for record in records]
    # of the sum and not of the mean; `grad_outputs` would import all of SymPy
    backprops = list(torch.autograd.grad(loss * len(x), outputs, allow_unused=True)) if outputs else []
    # 3. |g_i|² from inputs and output gradients, then Σ_i c_i g_i (book-keeping)
    with torch.no_grad():
        uses: dict[nn.Module, list[Use]] = {}
        while records:
            record, g = records.pop(), backprops.pop()
            if g is not None:
                uses.setdefault(record.module, []).append((_unchanged(record, len(x)), g))
        layers: list[Gradients] = [gradients_of(module, uses.pop(module)) for module in list(uses)]
        squares = x.new_zeros(len(x), dtype=torch.float64)
        c = weigh(sum((layer.squares for layer in layers), squares).sqrt()).to(loss.dtype)
        sums, kept = ByParameter(), _kept(c)
        while layers:
            sums.update(layers.pop().weighted(c, kept))
    return [sums.get(p) for p in trained(model)], loss.detach()


def _kept(c: Tensor) -> Kept:
    """Return which examples have a weight above 0; the others are left out, since 0 · ∞ is NaN."""
    return slice(None) if bool((c > 0).all()) else (c > 0).nonzero().flatten()


@contextmanager
def _recording(model: nn.Module) -> Iterator[list[_Recorded]]:
    """Record input and output of every use of a module with trained parameters."""
    records: list[_Recorded] = []

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) != 1 or not isinstance(output, Tensor):
            raise WsiFlError(
                f"ghost clipping: {type(module).__name__} must take and give one tensor, by position"
            )
        if output.requires_grad:  # its edge stays what it is when the output is changed in place
            (x,) = inputs
            records.append(_Recorded(module, x.detach(), x._version, get_gradient_edge(output)))

    handles = [
        module.register_forward_hook(record)
        for module in model.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _unchanged(record: _Recorded, b: int) -> Tensor:
    """Return the input, still as the module saw it.

    Raises:
        WsiFlError: when it was changed in place, or does not have one row per example.
    """
    kind = type(record.module).__name__
    if record.x._version != record.version:
        raise WsiFlError(f"ghost clipping: the input of {kind} was changed in place after its use")
    if len(record.x) != b:
        raise WsiFlError(f"ghost clipping: the input of {kind} has {len(record.x)} rows, not one per example")
    return record.x


# hooks


def _hooks(model: nn.Module, x: Tensor, loss_of: LossOf, weigh: Weigh) -> tuple[GradientSums, Tensor]:
    with _sampling(model) as wrapped:
        with _OutOfPlace():
            logits = wrapped(x)
        loss = loss_of(logits)
        with _quiet_hooks():
            torch.autograd.backward(loss)
        samples = [getattr(p, "grad_sample", None) for p in trained(model)]
    rows = [None if g is None else g.reshape(len(g), -1) for g in samples]
    squares = x.new_zeros(len(x), dtype=torch.float64)
    c = weigh(sum((squared_norms(g) for g in rows if g is not None), squares).sqrt()).to(loss.dtype)
    kept = _kept(c)
    sums = [
        None if g is None else (c[kept] @ g[kept]).view_as(p)
        for p, g in zip(trained(model), rows, strict=True)
    ]
    return sums, loss.detach()


@contextmanager
def _sampling(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model wrapped by Opacus, whose backward pass leaves `grad_sample` [b, …]; restore it afterwards."""
    from opacus import GradSampleModule

    GradSampleModule.GRAD_SAMPLERS[FrozenNorm] = lambda module, a, g: per_example(module, a[0], g)
    # strict, it refuses constant statistics beside a trained gain; what ties examples was refused before
    wrapped = GradSampleModule(model, batch_first=True, loss_reduction="mean", strict=False)
    handles = [
        module.register_forward_pre_hook(_contiguous)
        for module in model.modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    try:
        yield wrapped
    finally:
        wrapped.to_standard_module()
        for handle in handles:
            handle.remove()
        for module in model.modules():  # what Opacus leaves where the backward pass did not come by
            for left in ("activations", "max_batch_len"):
                module.__dict__.pop(left, None)
        for parameter in model.parameters():
            parameter.grad = None


def _contiguous(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make inputs contiguous: Opacus's unfold silently misreads the strides of any other layout."""
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)


class _OutOfPlace(TorchFunctionMode):
    """Computes `x += y` as `x = x + y`: autograd forbids the former on what Opacus's hooks return."""

    _INSTEAD: Mapping[Any, Any] = {
        Tensor.add_: Tensor.add,
        Tensor.sub_: Tensor.sub,
        Tensor.mul_: Tensor.mul,
        Tensor.div_: Tensor.div,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computed = isinstance(args[0], Tensor) and args[0].grad_fn is not None if args else False
        return (self._INSTEAD.get(func, func) if computed else func)(*args, **(kwargs or {}))


@contextmanager
def _quiet_hooks() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        yield


ENGINES: Mapping[str, Engine] = {"ghost": _ghost, "hooks": _hooks}


def summed_in_parts(
    engine: Engine,
    model: nn.Module,
    x: Tensor,
    loss_of: LossOf,
    weigh: Weigh,
    *,
    at_once: int,
) -> tuple[GradientSums, Tensor]:
    """Return what an engine does, that sees so many rows at a time; the more there are, the more memory it takes.

    Args:
        loss_of: maps logits [b, classes] of all rows to the mean of per-example losses.
    """
    if at_once >= len(x):
        return engine(model, x, loss_of, weigh)
    sums: GradientSums = [None] * len(trained(model))
    said: list[Tensor] = []

    def loss_of_part(logits: Tensor) -> Tensor:
        # rows beside this part are constants here, so that only its own losses have a gradient
        before = sum(map(len, said))
        rest = logits.new_zeros(len(x) - before - len(logits), *logits.shape[1:])
        loss = loss_of(torch.cat([*said, logits, rest])) * (len(x) / len(logits))
        said.append(logits.detach())
        return loss

    for part in torch.split(x, at_once):
        found, _ = engine(model, part, loss_of_part, weigh)
        sums = [added(total, more) for total, more in zip(sums, found, strict=True)]
    return sums, loss_of(torch.cat(said))


def added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, each None where there is none."""
    return more if total is None else total if more is None else total + more


def engine_of(model: nn.Module) -> str:
    """Return the engine that a model gets: "ghost" wherever it can, "hooks" elsewhere.

    Example:
        >>> engine_of(nn.Linear(2, 2)), engine_of(nn.PReLU())
        ('ghost', 'hooks')
    """
    return "ghost" if obstacle(model) is None else "hooks"
