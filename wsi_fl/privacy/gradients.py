"""Weighted sums of per-example gradients, two ways.

An engine computes the norms |g_i| of the gradients of a batch, gets a weight c_i of each example from them, and returns
Σ_i c_i g_i over the examples with a weight:

- `hooks` holds all b gradients, by Opacus, and suits every model that Opacus supports;
- `ghost` never holds the g_i: one backward pass gives every layer's output gradients G, and a layer's rule computes the
  norms and the sum from its input A and G alone (book-keeping: Bu, Wang, Zha and Karypis, ICML 2023).

A layer with T positions (pixels, instances of a bag) has the per-example gradient GᵀA of p × D numbers. Its norm needs
no such matrix: |GᵀA|² = Σ (AAᵀ)∘(GGᵀ), with T × T inner products on either side. Where T is large and the layer small,
the matrix itself is cheaper (mixed ghost clipping: Bu, Mao and Xu, NeurIPS 2022). Convolutions unfold their input for
neither: inner products of patches are sums, along diagonals, of inner products of pixels; and the gradients of b
examples are the weight gradient of one convolution with b times the groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.nn.grad import conv2d_weight
from torch.overrides import TorchFunctionMode

from wsi_fl.models.cnn import FrozenNorm
from wsi_fl.privacy.losses import LossOf, loss_of_some
from wsi_fl.types import WsiFlError

Weigh = Callable[[Tensor], Tensor]
"""Norms |g_i|, float64[b] → weights c_i [b]; an example of weight 0 has no part in the sums, even if g_i is NaN."""

GradientSums = list[Tensor | None]
"""Σ_i c_i g_i of each trained parameter, in the model's order; None where the loss does not depend on it."""

_Engine = Callable[[nn.Module, Tensor, LossOf, Weigh], tuple[GradientSums, Tensor]]
"""(model, x[b, …], loss_of, weigh) → (sums, mean loss)."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with a gradient."""
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
        uses: dict[nn.Module, list[_Use]] = {}
        while records:
            record, g = records.pop(), backprops.pop()
            if g is not None:
                uses.setdefault(record.module, []).append((_unchanged(record, len(x)), g))
        layers: list[_Gradients] = [_gradients_of(module, uses.pop(module)) for module in list(uses)]
        squares = x.new_zeros(len(x), dtype=torch.float64)
        c = weigh(sum((layer.squares for layer in layers), squares).sqrt()).to(loss.dtype)
        sums, kept = _ByParameter(), _kept(c)
        while layers:
            sums.update(layers.pop().weighted(c, kept))
    return [sums.get(p) for p in trained(model)], loss.detach()


def _kept(c: Tensor) -> _Kept:
    """Return the places of examples with a weight above 0; the others are left out, since 0 · ∞ is NaN."""
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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
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

    for kind in _NORMS:
        GradSampleModule.GRAD_SAMPLERS[kind] = lambda module, a, g: _per_example(module, a[0], g)
    # strict, it refuses constant statistics beside a trained gain; models that tie examples were refused before
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
        for module in model.modules():  # attributes that Opacus leaves on modules without a backward pass
            for left in ("activations", "max_batch_len"):
                module.__dict__.pop(left, None)
        for parameter in model.parameters():
            parameter.grad = None


def _contiguous(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make inputs contiguous: Opacus's unfold silently misreads the strides of any other layout."""
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)


class _OutOfPlace(TorchFunctionMode):
    """Compute `x += y` as `x = x + y`: autograd forbids the former on outputs of Opacus's hooks."""

    _INSTEAD: Mapping[Any, Any] = {
        Tensor.add_: Tensor.add,
        Tensor.sub_: Tensor.sub,
        Tensor.mul_: Tensor.mul,
        Tensor.div_: Tensor.div,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computed = isinstance(args[0], Tensor) and args[0].grad_fn is not None if args else False
        return (self._INSTEAD.get(func, func) if computed else func)(*args, **(kwargs or {}))


ENGINES: Mapping[str, _Engine] = {"ghost": _ghost, "hooks": _hooks}


def summed_in_parts(
    engine: _Engine,
    model: nn.Module,
    x: Tensor,
    loss_of: LossOf,
    weigh: Weigh,
    *,
    at_once: int,
) -> tuple[GradientSums, Tensor]:
    """Return the sums and the mean loss of an engine, computed for so many rows at a time to limit memory."""
    if at_once >= len(x):
        return engine(model, x, loss_of, weigh)
    sums: GradientSums = [None] * len(trained(model))
    said: list[Tensor] = []

    def loss_of_part(logits: Tensor) -> Tensor:
        # other rows are constants here, so that only the losses of this part have a gradient
        before = sum(map(len, said))
        rest = logits.new_zeros(len(x) - before - len(logits), *logits.shape[1:])
        whole, rows = torch.cat([*said, logits, rest]), range(before, before + len(logits))
        loss = loss_of_some(loss_of, whole, rows) * (len(x) / len(logits))
        said.append(logits.detach())
        return loss

    for part in torch.split(x, at_once):
        found, _ = engine(model, part, loss_of_part, weigh)
        sums = [added(total, more) for total, more in zip(sums, found, strict=True)]
    return sums, loss_of_some(loss_of, torch.cat(said), ())


def added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, each None where there is none."""
    return more if total is None else total if more is None else total + more


def engine_of(model: nn.Module) -> str:
    """Return the engine of a model: "ghost" where every layer has a rule, else "hooks"."""
    return "ghost" if _obstacle(model) is None else "hooks"


_Use = tuple[Tensor, Tensor]  # input A[b, …] and output gradient G[b, …] of a module, once

_ByParameter = dict[Tensor, Tensor]

_Kept = Tensor | slice  # places of the examples that have a weight, int64[k], or all of them


@dataclass(frozen=True)
class _Gradients:
    """Per-example gradients g_i of a module."""

    squares: Tensor  # |g_i|², float64[b]
    # c[b] and the kept examples → Σ_i c_i g_i over these, of each trained parameter
    weighted: Callable[[Tensor, _Kept], _ByParameter]


def _obstacle(model: nn.Module) -> str | None:
    """Return the reason against per-example gradients layer by layer; None where they can be computed."""
    owner: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        if own and (not _known(type(module)) or not own.keys() <= {"weight", "bias"}):
            kind = type(module).__name__
            return f"it has no rule for the parameters of {f'{name} ({kind})' if name else kind}"
        for parameter in own.values():
            if parameter in owner:
                return f"{owner[parameter]} and {name} share a parameter"
            owner[parameter] = name
    return None


def _known(kind: type[nn.Module]) -> bool:
    """Return whether a kind of module has one input, the batch first, and a rule for per-example gradients."""
    if kind in GHOSTS or _norm_rule(kind) is not None:
        return True
    from opacus import GradSampleModule

    ours = kind.__module__.startswith("torch.nn.modules") and kind is not nn.EmbeddingBag
    return ours and kind in GradSampleModule.GRAD_SAMPLERS


def _gradients_of(module: nn.Module, uses: Sequence[_Use]) -> _Gradients:
    """Return the per-example gradients of a supported module, summed over its uses."""
    ghost = GHOSTS.get(type(module))
    found = ghost(module, *uses[0]) if ghost is not None and len(uses) == 1 else None
    return found or _materialised([_per_example(module, a, g) for a, g in uses])


def _materialised(uses: Sequence[_ByParameter]) -> _Gradients:
    """Return norms and sums from the gradients themselves, [b, …] of each parameter in each use."""
    flat = {
        parameter: sum((use[parameter] for use in uses[1:]), g).flatten(1) for parameter, g in uses[0].items()
    }
    squares = [squared_norms(g) for g in flat.values()]

    def weighted(c: Tensor, kept: _Kept) -> _ByParameter:
        return {parameter: (c[kept] @ g[kept]).view_as(parameter) for parameter, g in flat.items()}

    return _Gradients(torch.stack(squares).sum(0), weighted)


def _per_example(module: nn.Module, a: Tensor, g: Tensor) -> _ByParameter:
    """Return the gradients [b, …] of each trained parameter."""
    if isinstance(module, nn.Conv2d):
        return _conv2d_per_example(module, a, g)
    if type(module) is nn.Linear:
        return _linear_per_example(module, a.contiguous(), g)
    if rule := _norm_rule(type(module)):
        return rule(module, a, g)
    from opacus import GradSampleModule

    sampler = GradSampleModule.GRAD_SAMPLERS[type(module)]
    found: _ByParameter = sampler(module, [a.contiguous()], g)
    return found


def _pays(n_positions: int, n_entries: int) -> bool:
    """Return whether two matrices of inner products are smaller than the gradient."""
    return 2 * n_positions**2 <= n_entries


def _linear(module: nn.Linear, a: Tensor, g: Tensor) -> _Gradients | None:
    """Return gradients from A[b, …, d] and G[b, …, p]; None where the gradient is smaller than inner products."""
    a, g = (z.flatten(1, -2) if z.dim() > 2 else z.unsqueeze(1) for z in (a, g))
    n_positions = a.shape[1]
    if not (module.weight.requires_grad and _pays(n_positions, module.weight.numel())):
        return None
    each = g.sum(1) if n_positions > 1 else g.squeeze(1)
    of_bias = squared_norms(each)
    squares = _inner(_gram(a), _gram(g)) if n_positions > 1 else squared_norms(a) * of_bias
    bias = _trained_bias(module)
    if bias is not None:
        squares = squares + of_bias

    def weighted(c: Tensor, kept: _Kept) -> _ByParameter:
        rows = (g[kept] * c[kept].view(-1, 1, 1)).flatten(0, 1)
        sums: _ByParameter = {module.weight: rows.mT @ a[kept].flatten(0, 1)}
        return sums if bias is None else {**sums, bias: c[kept] @ each[kept]}

    return _Gradients(squares, weighted)


def _conv2d(module: nn.Conv2d, a: Tensor, g: Tensor) -> _Gradients | None:
    """Return gradients from A[b, c, h, w] and G[b, p, h', w']; None where these are smaller than inner products."""
    left, right, top, bottom = module._reversed_padding_repeated_twice
    n_pixels = (a.shape[2] + top + bottom) * (a.shape[3] + left + right)
    if not (module.weight.requires_grad and _pays(n_pixels, module.weight.numel() // module.groups)):
        return None
    squares = _patch_squares(module, a, g)
    bias = _trained_bias(module)
    each = g.sum((2, 3)) if bias is not None else g
    if bias is not None:
        squares = squares + squared_norms(each)

    def weighted(c: Tensor, kept: _Kept) -> _ByParameter:
        rows = g[kept] * c[kept].view(-1, 1, 1, 1)
        with _full_precision(g):
            sums: _ByParameter = {module.weight: _weight_gradient(module, a[kept], rows)}
        return sums if bias is None else {**sums, bias: c[kept] @ each[kept]}

    return _Gradients(squares, weighted)


def _patch_squares(module: nn.Conv2d, a: Tensor, g: Tensor) -> Tensor:
    """Return |g_i|² of the kernels, [b], from inner products of patches and of output gradients."""
    n_rows = len(a) * module.groups
    x, g = (z.reshape(n_rows, -1, *z.shape[2:]) for z in (_padded(module, a), g))
    at_once = max(1, (_GRAM_CUDA if x.is_cuda else _GRAM_CPU) // x[0, 0].numel() ** 2)
    size = g.shape[2:]
    parts = []
    for some, rows in zip(torch.split(x, at_once), torch.split(g.flatten(2), at_once), strict=True):
        parts.append(_inner(_patch_gram(module, some, size), (rows.mT @ rows).view(-1, *size, *size)))
    return torch.cat(parts).view(-1, module.groups).sum(1)


_GRAM_CPU, _GRAM_CUDA = 2**21, 2**27
"""Inner products of pixels at a time: as many as fit a cache, or the memory of a GPU."""


def _patch_gram(module: nn.Conv2d, x: Tensor, size: torch.Size) -> Tensor:
    """Return [n, h', w', h', w'], the inner products of a kernel's patches at its h' × w' positions.

    Pixels are numbered row by row. Each tap of the kernel moves both pixels of a pair by the same number k,
    that is down the diagonal of their N × N inner products: by k(N + 1) entries.
    """
    n, _, height, width = x.shape
    n_pixels = height * width
    x = x.flatten(2)
    gram = (x.mT @ x).flatten(1)
    for taps, dilation, pixels in zip(module.kernel_size, module.dilation, (width, 1), strict=True):
        move = dilation * pixels * (n_pixels + 1)
        length = gram.shape[1] - (taps - 1) * move
        first, *others = (gram[:, k * move : k * move + length] for k in range(taps))
        gram = first.clone() if others else first
        for other in others:
            gram += other
    down, right = module.stride[0] * width, module.stride[1]
    strides = (gram.stride(0), down * n_pixels, right * n_pixels, down, right)
    return gram.as_strided((n, *size, *size), strides)


def _conv2d_per_example(module: nn.Conv2d, a: Tensor, g: Tensor) -> _ByParameter:
    """Return the gradients [b, …] of each trained parameter; the examples become groups of one image's channels."""
    found: _ByParameter = {}
    if module.weight.requires_grad:
        kernels = _weight_gradient(module, a.flatten(0, 1)[None], g.flatten(0, 1)[None], n_examples=len(a))
        found[module.weight] = kernels.view(len(a), *module.weight.shape)
    bias = _trained_bias(module)
    return found if bias is None else {**found, bias: g.sum((2, 3))}


def _linear_per_example(module: nn.Linear, a: Tensor, g: Tensor) -> _ByParameter:
    """Return the gradients [b, …] of each trained parameter; Opacus's rule, whose import takes a rank a second."""
    found: _ByParameter = {}
    if module.weight.requires_grad:
        found[module.weight] = torch.einsum("n...i,n...j->nij", g, a)
    bias = _trained_bias(module)
    return found if bias is None else {**found, bias: torch.einsum("n...k->nk", g)}


_NormRule = Callable[[Any, Tensor, Tensor], _ByParameter]
"""(module, A[b, …], G[b, …]) → the gradients [b, …] of each trained parameter of a normalisation layer."""


def _gains(
    module: Any, normalised: Callable[[], Tensor], g: Tensor, total: Callable[[Tensor], Tensor]
) -> _ByParameter:
    """Return gradients of a gain γ and a bias β in y = x̂ · γ + β, with x̂ normalised, summed over positions."""
    of = {module.weight: lambda: normalised() * g, module.bias: lambda: g}
    return {p: total(of[p]()) for p in of if p is not None and p.requires_grad}


def _frozen_norm(module: FrozenNorm, a: Tensor, g: Tensor) -> _ByParameter:
    return _gains(module, lambda: module.normalised(a), g, lambda z: z.reshape(*z.shape[:2], -1).sum(2))


def _group_norm(module: nn.GroupNorm, a: Tensor, g: Tensor) -> _ByParameter:
    def normalised() -> Tensor:
        return functional.group_norm(a.contiguous(), module.num_groups, eps=module.eps)

    return _gains(module, normalised, g, lambda z: torch.einsum("ni...->ni", z))


def _layer_norm(module: nn.LayerNorm, a: Tensor, g: Tensor) -> _ByParameter:
    """Return gradients from A and G [b, …, d], or with more normalised axes."""

    def total(z: Tensor) -> Tensor:
        between = list(range(1, z.dim() - len(module.normalized_shape)))
        return z.sum(between) if between else z

    def normalised() -> Tensor:
        return functional.layer_norm(a.contiguous(), module.normalized_shape, eps=module.eps)

    return _gains(module, normalised, g, total)


def _channels_last(rule: _NormRule) -> _NormRule:
    """Return the rule for images [b, channels, h, w] with normalised channels."""
    return lambda module, a, g: rule(module, a.permute(0, 2, 3, 1), g.permute(0, 2, 3, 1))


def _before_activation(rule: _NormRule, norm: Callable[[Any, Tensor], Tensor]) -> _NormRule:
    """Return the rule of a norm followed by `drop`, off in training with privacy, and `act`."""

    def of(module: Any, a: Tensor, g: Tensor) -> _ByParameter:
        with torch.enable_grad():
            z = norm(module, a).detach().requires_grad_()
            (g,) = torch.autograd.grad(module.act(module.drop(z.clone())), z, g)
        return rule(module, a, g)

    return of


def _norm_rule(kind: type[nn.Module]) -> _NormRule | None:
    """Return the rule of a normalisation layer; for timm by its name, since importing timm takes seconds."""
    return _NORMS.get(kind) or _NORMS_OF_TIMM.get(f"{kind.__module__}.{kind.__qualname__}")


def _weight_gradient(module: nn.Conv2d, a: Tensor, g: Tensor, n_examples: int = 1) -> Tensor:
    """Return the kernels' gradient; for several examples one each, stacked along the first axis."""
    kernels, *kernel = module.weight.shape
    x, padding = a, module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        x, padding = _padded(module, a), (0, 0)
    shape, groups = (n_examples * kernels, *kernel), n_examples * module.groups
    gradient: Tensor = conv2d_weight(x, shape, g, module.stride, padding, module.dilation, groups)  # type: ignore[no-untyped-call]
    return gradient


def _padded(module: nn.Conv2d, a: Tensor) -> Tensor:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(a, module._reversed_padding_repeated_twice, mode)


@contextmanager
def _full_precision(g: Tensor) -> Iterator[None]:
    """Switch TensorFloat-32 off: sums must agree with the norms to more than three digits."""
    if not g.is_cuda:
        yield
        return
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        yield


def _trained_bias(module: nn.Linear | nn.Conv2d) -> Tensor | None:
    return module.bias if module.bias is not None and module.bias.requires_grad else None


def squared_norms(rows: Tensor) -> Tensor:
    """Return |r_i|², float64[b], of the float32 rows [b, …]; ∞ or NaN where their squares are too large.

    A sequential float32 sum of 10⁸ numbers is too small by percents; the sum of one block is not.
    """
    rows = rows.flatten(1)
    whole = rows.shape[1] // _BLOCK * _BLOCK
    squares: Tensor = torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square()
    if whole:
        blocks = torch.linalg.vector_norm(rows[:, :whole].view(len(rows), -1, _BLOCK), dim=2)
        squares += blocks.double().square().sum(1)
    return squares


_BLOCK = 256
"""Numbers that float32 squares and adds with an error of 5e-7, in any order, in eight or more partial sums."""


def _gram(z: Tensor) -> Tensor:
    """Return [b, T, 1, T, 1], the inner products of the T positions of [b, T, d]."""
    return (z @ z.mT)[:, :, None, :, None]


def _inner(one: Tensor, other: Tensor) -> Tensor:
    """Return float64[n], the inner product of each pair of Gram matrices [n, h, w, h, w], never too small.

    Where the products cancel, round-off of |A|²|G|² remains, which may be 0 although the gradient is not.
    """
    products = (one * other).flatten(1).sum(1).double().clamp(min=0)
    lengths = [torch.einsum("nhwhw->n", gram).double() for gram in (one, other)]
    return products + _ROUND_OFF * lengths[0] * lengths[1]


_ROUND_OFF = 1e-6
"""Fraction of |A|²|G|²: more than the error of float32 inner products (up to 7e-7 for 4096 equal numbers)."""


_NORMS: Mapping[type[nn.Module], _NormRule] = {
    FrozenNorm: _frozen_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}
"""Rules of normalisation layers, whose small gradients are computed explicitly."""

_NORMS_OF_TIMM: Mapping[str, _NormRule] = {
    "timm.layers.norm.GroupNorm": _group_norm,
    "timm.layers.norm.GroupNorm1": _group_norm,
    "timm.layers.norm.LayerNorm": _layer_norm,
    "timm.layers.norm.LayerNorm2d": _channels_last(_layer_norm),
    "timm.layers.norm_act.GroupNormAct": _before_activation(_group_norm, nn.GroupNorm.forward),
    "timm.layers.norm_act.GroupNorm1Act": _before_activation(_group_norm, nn.GroupNorm.forward),
    "timm.layers.norm_act.LayerNormAct": _before_activation(_layer_norm, nn.LayerNorm.forward),
}

GHOSTS: Mapping[type[nn.Module], Callable[[Any, Tensor, Tensor], _Gradients | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
}
