"""Per-example gradients of a layer, from its input A and its output gradients G alone.

A layer with T positions (pixels, instances of a bag) has the per-example gradient GᵀA of p × D numbers. Its norm needs
no such matrix: |GᵀA|² = Σ (AAᵀ)∘(GGᵀ), with T × T inner products on either side. Where T is large and the layer small,
the matrix itself is cheaper (mixed ghost clipping: Bu, Mao and Xu, NeurIPS 2022). Convolutions unfold their input for
neither: inner products of patches are sums, along diagonals, of inner products of pixels; and the gradients of b
examples are the weight gradient of one convolution with b times the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from wsi_fl.models.cnn import FrozenNorm

ModuleUse = tuple[Tensor, Tensor]
"""Input A[b, …] and output gradient G[b, …] of one use of a module."""

ParameterGradients = dict[Tensor, Tensor]
"""Gradients by parameter."""

RowSelection = Tensor | slice
"""Places of the examples with a weight, int64[k], or all of them."""


@dataclass(frozen=True)
class LayerGradients:
    """Per-example gradients g_i of a module."""

    squares: Tensor  # |g_i|², float64[b]
    # c[b] and the kept examples → Σ_i c_i g_i over these, of each trained parameter
    weighted_sum: Callable[[Tensor, RowSelection], ParameterGradients]


def find_obstacle(model: nn.Module) -> str | None:
    """Return the reason against per-example gradients layer by layer; None where they can be computed."""
    owner: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        module_parameters = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        if module_parameters and (
            not _is_supported(type(module)) or not module_parameters.keys() <= {"weight", "bias"}
        ):
            kind = type(module).__name__
            return f"it has no rule for the parameters of {f'{name} ({kind})' if name else kind}"
        for parameter in module_parameters.values():
            if parameter in owner:
                return f"{owner[parameter]} and {name} share a parameter"
            owner[parameter] = name
    return None


def _is_supported(kind: type[nn.Module]) -> bool:
    """Return whether a kind of module has one input, the batch first, and a rule for per-example gradients."""
    if kind in GHOST_RULES or _find_norm_rule(kind) is not None:
        return True
    from opacus import GradSampleModule

    ours = kind.__module__.startswith("torch.nn.modules") and kind is not nn.EmbeddingBag
    return ours and kind in GradSampleModule.GRAD_SAMPLERS


def layer_gradients(module: nn.Module, uses: Sequence[ModuleUse]) -> LayerGradients:
    """Return the per-example gradients of a supported module, summed over its uses."""
    ghost = GHOST_RULES.get(type(module))
    gradients = ghost(module, *uses[0]) if ghost is not None and len(uses) == 1 else None
    return gradients or _materialize_gradients([compute_per_example(module, a, g) for a, g in uses])


def _materialize_gradients(uses: Sequence[ParameterGradients]) -> LayerGradients:
    """Return norms and sums from the gradients themselves, [b, …] of each parameter in each use."""
    flat = {parameter: sum((use[parameter] for use in uses[1:]), g).flatten(1) for parameter, g in uses[0].items()}
    squares = [square_norms(g) for g in flat.values()]

    def sum_weighted(c: Tensor, selection: RowSelection) -> ParameterGradients:
        return {parameter: (c[selection] @ g[selection]).view_as(parameter) for parameter, g in flat.items()}

    return LayerGradients(torch.stack(squares).sum(0), sum_weighted)


def compute_per_example(module: nn.Module, a: Tensor, g: Tensor) -> ParameterGradients:
    """Return the gradients [b, …] of each trained parameter."""
    if isinstance(module, nn.Conv2d):
        return _conv2d_per_example(module, a, g)
    if type(module) is nn.Linear:
        return _linear_per_example(module, a.contiguous(), g)
    if rule := _find_norm_rule(type(module)):
        return rule(module, a, g)
    from opacus import GradSampleModule

    sampler = GradSampleModule.GRAD_SAMPLERS[type(module)]
    gradients: ParameterGradients = sampler(module, [a.contiguous()], g)
    return gradients


def _is_ghost_smaller(n_positions: int, n_entries: int) -> bool:
    """Return whether two matrices of inner products are smaller than the gradient."""
    return 2 * n_positions**2 <= n_entries


def _linear_ghost(module: nn.Linear, a: Tensor, g: Tensor) -> LayerGradients | None:
    """Return gradients from A[b, …, d] and G[b, …, p]; None where the gradient is smaller than inner products."""
    a, g = (z.flatten(1, -2) if z.dim() > 2 else z.unsqueeze(1) for z in (a, g))
    n_positions = a.shape[1]
    if not (module.weight.requires_grad and _is_ghost_smaller(n_positions, module.weight.numel())):
        return None
    bias_gradients = g.sum(1) if n_positions > 1 else g.squeeze(1)
    bias_squares = square_norms(bias_gradients)
    squares = _inner_products(_gram_matrix(a), _gram_matrix(g)) if n_positions > 1 else square_norms(a) * bias_squares
    if _is_trained(module.bias):
        squares = squares + bias_squares

    def sum_weighted(c: Tensor, selection: RowSelection) -> ParameterGradients:
        rows = (g[selection] * c[selection].view(-1, 1, 1)).flatten(0, 1)
        return _compute_trained(
            module, lambda: rows.mT @ a[selection].flatten(0, 1), lambda: c[selection] @ bias_gradients[selection]
        )

    return LayerGradients(squares, sum_weighted)


def _conv2d_ghost(module: nn.Conv2d, a: Tensor, g: Tensor) -> LayerGradients | None:
    """Return gradients from A[b, c, h, w] and G[b, p, h', w']; None where these are smaller than inner products."""
    pad_left, pad_right, pad_top, pad_bottom = module._reversed_padding_repeated_twice
    n_pixels = (a.shape[2] + pad_top + pad_bottom) * (a.shape[3] + pad_left + pad_right)
    if not (module.weight.requires_grad and _is_ghost_smaller(n_pixels, module.weight.numel() // module.groups)):
        return None
    squares, bias_gradients = _patch_squares(module, a, g), g
    if _is_trained(module.bias):
        bias_gradients = g.sum((2, 3))
        squares = squares + square_norms(bias_gradients)

    def sum_weighted(c: Tensor, selection: RowSelection) -> ParameterGradients:
        rows = g[selection] * c[selection].view(-1, 1, 1, 1)
        with _disable_tf32(g):
            kernels = _weight_gradient(module, a[selection], rows)
        return _compute_trained(module, lambda: kernels, lambda: c[selection] @ bias_gradients[selection])

    return LayerGradients(squares, sum_weighted)


def _patch_squares(module: nn.Conv2d, a: Tensor, g: Tensor) -> Tensor:
    """Return |g_i|² of the kernels, [b], from inner products of patches and of output gradients."""
    n_rows = len(a) * module.groups
    x, g = (z.reshape(n_rows, -1, *z.shape[2:]) for z in (_pad_input(module, a), g))
    at_once = max(1, (_GRAM_ENTRIES_CUDA if x.is_cuda else _GRAM_ENTRIES_CPU) // x[0, 0].numel() ** 2)
    size = g.shape[2:]
    parts = []
    for images, rows in zip(torch.split(x, at_once), torch.split(g.flatten(2), at_once), strict=True):
        parts.append(_inner_products(_patch_gram(module, images, size), (rows.mT @ rows).view(-1, *size, *size)))
    return torch.cat(parts).view(-1, module.groups).sum(1)


_GRAM_ENTRIES_CPU, _GRAM_ENTRIES_CUDA = 2**21, 2**27
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
    row_step, column_step = module.stride[0] * width, module.stride[1]
    strides = (gram.stride(0), row_step * n_pixels, column_step * n_pixels, row_step, column_step)
    return gram.as_strided((n, *size, *size), strides)


def _conv2d_per_example(module: nn.Conv2d, a: Tensor, g: Tensor) -> ParameterGradients:
    """Return the gradients [b, …] of each trained parameter; the examples become groups of one image's channels."""

    def compute_kernels() -> Tensor:
        kernels = _weight_gradient(module, a.flatten(0, 1)[None], g.flatten(0, 1)[None], n_examples=len(a))
        return kernels.view(len(a), *module.weight.shape)

    return _compute_trained(module, compute_kernels, lambda: g.sum((2, 3)))


def _linear_per_example(module: nn.Linear, a: Tensor, g: Tensor) -> ParameterGradients:
    """Return the gradients [b, …] of each trained parameter; Opacus's rule, whose import takes a rank a second."""
    return _compute_trained(
        module, lambda: torch.einsum("n...i,n...j->nij", g, a), lambda: torch.einsum("n...k->nk", g)
    )


_NormRule = Callable[[Any, Tensor, Tensor], ParameterGradients]
"""(module, A[b, …], G[b, …]) → the gradients [b, …] of each trained parameter of a normalisation layer."""


def _gain_gradients(
    module: Any, normalize: Callable[[], Tensor], g: Tensor, sum_positions: Callable[[Tensor], Tensor]
) -> ParameterGradients:
    """Return gradients of a gain γ and a bias β in y = x̂ · γ + β, with x̂ normalised, summed over positions."""
    return _compute_trained(module, lambda: sum_positions(normalize() * g), lambda: sum_positions(g))


def _rule_frozen_norm(module: FrozenNorm, a: Tensor, g: Tensor) -> ParameterGradients:
    return _gain_gradients(module, lambda: module.normalize_input(a), g, lambda z: z.reshape(*z.shape[:2], -1).sum(2))


def _rule_group_norm(module: nn.GroupNorm, a: Tensor, g: Tensor) -> ParameterGradients:
    def normalize_input() -> Tensor:
        return functional.group_norm(a.contiguous(), module.num_groups, eps=module.eps)

    return _gain_gradients(module, normalize_input, g, lambda z: torch.einsum("ni...->ni", z))


def _rule_layer_norm(module: nn.LayerNorm, a: Tensor, g: Tensor) -> ParameterGradients:
    """Return gradients from A and G [b, …, d], or with more normalised axes."""

    def sum_positions(z: Tensor) -> Tensor:
        position_axes = list(range(1, z.dim() - len(module.normalized_shape)))
        return z.sum(position_axes) if position_axes else z

    def normalize_input() -> Tensor:
        return functional.layer_norm(a.contiguous(), module.normalized_shape, eps=module.eps)

    return _gain_gradients(module, normalize_input, g, sum_positions)


def _rule_channels_last(rule: _NormRule) -> _NormRule:
    """Return the rule for images [b, channels, h, w] with normalised channels."""
    return lambda module, a, g: rule(module, a.permute(0, 2, 3, 1), g.permute(0, 2, 3, 1))


def _rule_with_activation(rule: _NormRule, norm: Callable[[Any, Tensor], Tensor]) -> _NormRule:
    """Return the rule of a norm followed by `drop`, off in training with privacy, and `act`."""

    def apply_rule(module: Any, a: Tensor, g: Tensor) -> ParameterGradients:
        with torch.enable_grad():
            z = norm(module, a).detach().requires_grad_()
            (g,) = torch.autograd.grad(module.act(module.drop(z.clone())), z, g)
        return rule(module, a, g)

    return apply_rule


def _find_norm_rule(kind: type[nn.Module]) -> _NormRule | None:
    """Return the rule of a normalisation layer; for timm by its name, since importing timm takes seconds."""
    return NORM_RULES.get(kind) or _TIMM_NORM_RULES.get(f"{kind.__module__}.{kind.__qualname__}")


def _weight_gradient(module: nn.Conv2d, a: Tensor, g: Tensor, n_examples: int = 1) -> Tensor:
    """Return the kernels' gradient; for several examples one each, stacked along the first axis."""
    kernels, *kernel = module.weight.shape
    x, padding = a, module.padding
    if isinstance(padding, str) or module.padding_mode != "zeros":
        x, padding = _pad_input(module, a), (0, 0)
    shape, groups = (n_examples * kernels, *kernel), n_examples * module.groups
    gradient: Tensor = conv2d_weight(x, shape, g, module.stride, padding, module.dilation, groups)  # type: ignore[no-untyped-call]
    return gradient


def _pad_input(module: nn.Conv2d, a: Tensor) -> Tensor:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(a, module._reversed_padding_repeated_twice, mode)


@contextmanager
def _disable_tf32(g: Tensor) -> Iterator[None]:
    """Switch TensorFloat-32 off: sums must agree with the norms to more than three digits."""
    if not g.is_cuda:
        yield
        return
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
        yield


def _is_trained(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def _compute_trained(module: Any, weight: Callable[[], Tensor], bias: Callable[[], Tensor]) -> ParameterGradients:
    """Return the gradients of a module's weight and bias, of those that are trained."""
    terms = {module.weight: weight, module.bias: bias}
    return {parameter: compute() for parameter, compute in terms.items() if _is_trained(parameter)}


def square_norms(rows: Tensor) -> Tensor:
    """Return |r_i|², float64[b], of the float32 rows [b, …]; ∞ or NaN where their squares are too large.

    A sequential float32 sum of 10⁸ numbers is too small by percents; the sum of one block is not.
    """
    rows = rows.flatten(1)
    n_blocked = rows.shape[1] // _BLOCK_NUMBERS * _BLOCK_NUMBERS
    squares: Tensor = torch.linalg.vector_norm(rows[:, n_blocked:], dim=1).double().square()
    if n_blocked:
        blocks = torch.linalg.vector_norm(rows[:, :n_blocked].view(len(rows), -1, _BLOCK_NUMBERS), dim=2)
        squares += blocks.double().square().sum(1)
    return squares


_BLOCK_NUMBERS = 256
"""Numbers that float32 squares and adds with an error of 5e-7, in any order, in eight or more partial sums."""


def _gram_matrix(z: Tensor) -> Tensor:
    """Return [b, T, 1, T, 1], the inner products of the T positions of [b, T, d]."""
    return (z @ z.mT)[:, :, None, :, None]


def _inner_products(first: Tensor, second: Tensor) -> Tensor:
    """Return float64[n], the inner product of each pair of Gram matrices [n, h, w, h, w], never too small.

    Where the products cancel, round-off of |A|²|G|² remains, which may be 0 although the gradient is not.
    """
    products = (first * second).flatten(1).sum(1).double().clamp(min=0)
    lengths = [torch.einsum("nhwhw->n", gram).double() for gram in (first, second)]
    return products + _PRODUCT_ROUND_OFF * lengths[0] * lengths[1]


_PRODUCT_ROUND_OFF = 1e-6
"""Fraction of |A|²|G|²: more than the error of float32 inner products (up to 7e-7 for 4096 equal numbers)."""


NORM_RULES: Mapping[type[nn.Module], _NormRule] = {
    FrozenNorm: _rule_frozen_norm,
    nn.GroupNorm: _rule_group_norm,
    nn.LayerNorm: _rule_layer_norm,
}
"""Rules of normalisation layers, whose small gradients are computed explicitly."""

_TIMM_NORM_RULES: Mapping[str, _NormRule] = {
    "timm.layers.norm.GroupNorm": _rule_group_norm,
    "timm.layers.norm.GroupNorm1": _rule_group_norm,
    "timm.layers.norm.LayerNorm": _rule_layer_norm,
    "timm.layers.norm.LayerNorm2d": _rule_channels_last(_rule_layer_norm),
    "timm.layers.norm_act.GroupNormAct": _rule_with_activation(_rule_group_norm, nn.GroupNorm.forward),
    "timm.layers.norm_act.GroupNorm1Act": _rule_with_activation(_rule_group_norm, nn.GroupNorm.forward),
    "timm.layers.norm_act.LayerNormAct": _rule_with_activation(_rule_layer_norm, nn.LayerNorm.forward),
}

GHOST_RULES: Mapping[type[nn.Module], Callable[[Any, Tensor, Tensor], LayerGradients | None]] = {
    nn.Linear: _linear_ghost,
    nn.Conv2d: _conv2d_ghost,
}
