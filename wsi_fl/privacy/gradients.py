"""Weighted sums of per-example gradients, two ways.

An engine computes the norms |g_i| of the gradients of a batch, gets a weight c_i of each example from them, and returns
Σ_i c_i g_i over the examples with a weight:

- `hooks` holds all b gradients, by Opacus, and suits every model that Opacus supports;
- `ghost` never holds the g_i: one backward pass gives every layer's output gradients G, and a layer's rule
  (`layer_gradients`) computes the norms and the sum from its input A and G alone (book-keeping: Bu, Wang, Zha and
  Karypis, ICML 2023).
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

from wsi_fl.privacy.layer_gradients import (
    NORM_RULES,
    LayerGradients,
    ModuleUse,
    ParameterGradients,
    RowSelection,
    compute_per_example,
    find_obstacle,
    layer_gradients,
    square_norms,
)
from wsi_fl.privacy.rowwise_loss import LossOf, loss_of_rows
from wsi_fl.types import WsiFlError

Weigh = Callable[[Tensor], Tensor]
"""Norms |g_i|, float64[b] → weights c_i [b]; an example of weight 0 has no part in the sums, even if g_i is NaN."""

GradientSums = list[Tensor | None]
"""Σ_i c_i g_i of each trained parameter, in the model's order; None where the loss does not depend on it."""

_Engine = Callable[[nn.Module, Tensor, LossOf, Weigh], tuple[GradientSums, Tensor]]
"""(model, x[b, …], loss_of, weigh) → (sums, mean loss)."""


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with a gradient."""
    return [p for p in model.parameters() if p.requires_grad]


# ghost


class _ModuleCall(NamedTuple):
    module: nn.Module
    x: Tensor
    version: int
    output: GradientEdge


def _ghost_clipping(model: nn.Module, x: Tensor, loss_of: LossOf, weigh: Weigh) -> tuple[GradientSums, Tensor]:
    # 1. forward: record input and output of every layer
    with _record_calls(model) as records:
        logits = model(x)
    loss = loss_of(logits)
    # 2. backward with respect to outputs alone: autograd then leaves the weights' gradients out
    outputs = [record.output for record in records]
    # of the sum and not of the mean; `grad_outputs` would import all of SymPy
    backprops = list(torch.autograd.grad(loss * len(x), outputs, allow_unused=True)) if outputs else []
    # 3. |g_i|² from inputs and output gradients, then Σ_i c_i g_i (book-keeping)
    with torch.no_grad():
        uses: dict[nn.Module, list[ModuleUse]] = {}
        while records:
            record, g = records.pop(), backprops.pop()
            if g is not None:
                uses.setdefault(record.module, []).append((_require_unchanged(record, len(x)), g))
        layers: list[LayerGradients] = [layer_gradients(module, uses.pop(module)) for module in list(uses)]
        squares = x.new_zeros(len(x), dtype=torch.float64)
        c = weigh(sum((layer.squares for layer in layers), squares).sqrt()).to(loss.dtype)
        sums, selection = ParameterGradients(), _select_weighted(c)
        while layers:
            sums.update(layers.pop().weighted_sum(c, selection))
    return [sums.get(p) for p in trainable_parameters(model)], loss.detach()


@contextmanager
def _record_calls(model: nn.Module) -> Iterator[list[_ModuleCall]]:
    """Record input and output of every use of a module with trained parameters."""
    records: list[_ModuleCall] = []

    def record_call(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) != 1 or not isinstance(output, Tensor):
            raise WsiFlError(f"ghost clipping: {type(module).__name__} must take and give one tensor, by position")
        if output.requires_grad:  # its edge stays what it is when the output is changed in place
            (x,) = inputs
            records.append(_ModuleCall(module, x.detach(), x._version, get_gradient_edge(output)))

    handles = [
        module.register_forward_hook(record_call)
        for module in model.modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _require_unchanged(record: _ModuleCall, b: int) -> Tensor:
    kind = type(record.module).__name__
    if record.x._version != record.version:
        raise WsiFlError(f"ghost clipping: the input of {kind} was changed in place after its use")
    if len(record.x) != b:
        raise WsiFlError(f"ghost clipping: the input of {kind} has {len(record.x)} rows, not one per example")
    return record.x


def _select_weighted(c: Tensor) -> RowSelection:
    """Return the places of examples with a weight above 0; the others are left out, since 0 · ∞ is NaN."""
    return slice(None) if bool((c > 0).all()) else (c > 0).nonzero().flatten()


# hooks


def _hook_clipping(model: nn.Module, x: Tensor, loss_of: LossOf, weigh: Weigh) -> tuple[GradientSums, Tensor]:
    with _wrap_model(model) as wrapped:
        with _OutOfPlace():
            logits = wrapped(x)
        loss = loss_of(logits)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
            torch.autograd.backward(loss)
        samples = [getattr(p, "grad_sample", None) for p in trainable_parameters(model)]
    rows = [None if g is None else g.reshape(len(g), -1) for g in samples]
    squares = x.new_zeros(len(x), dtype=torch.float64)
    c = weigh(sum((square_norms(g) for g in rows if g is not None), squares).sqrt()).to(loss.dtype)
    selection = _select_weighted(c)
    sums = [
        None if g is None else (c[selection] @ g[selection]).view_as(p)
        for p, g in zip(trainable_parameters(model), rows, strict=True)
    ]
    return sums, loss.detach()


@contextmanager
def _wrap_model(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model wrapped by Opacus, whose backward pass leaves `grad_sample` [b, …]; restore it afterwards."""
    from opacus import GradSampleModule

    for kind in NORM_RULES:
        GradSampleModule.GRAD_SAMPLERS[kind] = lambda module, a, g: compute_per_example(module, a[0], g)
    # strict, it refuses constant statistics beside a trained gain; models that tie examples were refused before
    wrapped = GradSampleModule(model, batch_first=True, loss_reduction="mean", strict=False)
    handles = [
        module.register_forward_pre_hook(_make_contiguous)
        for module in model.modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    try:
        yield wrapped
    finally:
        wrapped.to_standard_module()
        for handle in handles:
            handle.remove()
        for module in model.modules():  # attributes that Opacus leaves on modules without a backward pass
            for attribute in ("activations", "max_batch_len"):
                module.__dict__.pop(attribute, None)
        for parameter in model.parameters():
            parameter.grad = None


def _make_contiguous(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make inputs contiguous: Opacus's unfold silently misreads the strides of any other layout."""
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)


class _OutOfPlace(TorchFunctionMode):
    """Compute `x += y` as `x = x + y`: autograd forbids the former on outputs of Opacus's hooks."""

    _REPLACEMENTS: Mapping[Any, Any] = {
        Tensor.add_: Tensor.add,
        Tensor.sub_: Tensor.sub,
        Tensor.mul_: Tensor.mul,
        Tensor.div_: Tensor.div,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computed = isinstance(args[0], Tensor) and args[0].grad_fn is not None if args else False
        return (self._REPLACEMENTS.get(func, func) if computed else func)(*args, **(kwargs or {}))


ENGINES: Mapping[str, _Engine] = {"ghost": _ghost_clipping, "hooks": _hook_clipping}


def sum_in_parts(
    engine: _Engine, model: nn.Module, x: Tensor, loss_of: LossOf, weigh: Weigh, *, at_once: int
) -> tuple[GradientSums, Tensor]:
    """Return the sums and the mean loss of an engine, computed for so many rows at a time to limit memory."""
    if at_once >= len(x):
        return engine(model, x, loss_of, weigh)
    sums: GradientSums = [None] * len(trainable_parameters(model))
    part_logits: list[Tensor] = []

    def loss_of_part(logits: Tensor) -> Tensor:
        # other rows are constants here, so that only the losses of this part have a gradient
        n_before = sum(map(len, part_logits))
        padding = logits.new_zeros(len(x) - n_before - len(logits), *logits.shape[1:])
        all_logits, rows = torch.cat([*part_logits, logits, padding]), range(n_before, n_before + len(logits))
        loss = loss_of_rows(loss_of, all_logits, rows) * (len(x) / len(logits))
        part_logits.append(logits.detach())
        return loss

    for part in torch.split(x, at_once):
        part_sums, _ = engine(model, part, loss_of_part, weigh)
        sums = [add_gradients(total, addend) for total, addend in zip(sums, part_sums, strict=True)]
    return sums, loss_of_rows(loss_of, torch.cat(part_logits), ())


def add_gradients(total: Tensor | None, addend: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, each None where there is none."""
    return addend if total is None else total if addend is None else total + addend


def default_engine(model: nn.Module) -> str:
    """Return the engine of a model: "ghost" where every layer has a rule, else "hooks"."""
    return "ghost" if find_obstacle(model) is None else "hooks"
