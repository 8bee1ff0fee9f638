"""Networks with published initial weights, of which a part is trained and the remainder frozen.

Frozen weights are public and the same at all sites: they never leave the site, and cost no ε.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from timm.layers import LayerNorm
from timm.models import group_parameters
from torch import Tensor, nn

from wsi_fl.models.cnn import replace_batch_norm
from wsi_fl.models.weights import create_timm_model, download_weights, load_weights, read_weights, weights_digest
from wsi_fl.types import Images, UsageError, single_line

if TYPE_CHECKING:
    from wsi_fl.models import StartWeights


def build_timm_model(name: str, n_classes: int, in_channels: int) -> nn.Module:
    """Build a timm architecture with random weights, ready for per-example gradients."""
    description = f"{n_classes} classes and {in_channels} channels"
    return replace_batch_norm(create_timm_model(name, description, num_classes=n_classes, in_chans=in_channels))


Part = Literal["all", "head", "last", "norm", "lora"]
_LORA_RANK = 4
"""Rank of adapters: low, since noise grows with the number of trained parameters (Yu et al., ICLR 2022)."""


class _Pretrained(nn.Module):
    """A timm model of images in [−1, 1], normalised as its weights require."""

    mean: Tensor
    sd: Tensor
    # SHA-256 uint8[32] of the initial weights, stored with the weights, 0 where they are loaded afterwards; models of
    # different initial weights cannot be averaged
    started: Tensor

    def __init__(self, model: Any, start: str) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("started", torch.tensor([*bytes.fromhex(start or "00" * 32)], dtype=torch.uint8))
        for name, key in (("mean", "mean"), ("sd", "std")):
            self.register_buffer(name, torch.tensor(model.pretrained_cfg[key]).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model((images * 0.5 + 0.5 - self.mean) / self.sd)
        return logits


def build_pretrained_model(name: str, n_classes: int, shape: Images, start: StartWeights) -> _Pretrained:
    """Build a timm architecture with initial weights and a random classifier; its BatchNorm is frozen.

    Raises:
        UsageError: when timm has no such model, or none of this size, or the model no such part.
        WsiFlError: when the weights are not available or do not fit.
    """
    if shape.channels != 3:
        raise UsageError(f"published weights are for images of 3 channels, and these have {shape.channels}")
    model = create_timm_model(name, "weights without classes", num_classes=0)
    digest = "" if start.weights is None else _load_weights(model, name, start.weights)
    _fit_size(model, name, shape.size_px)
    model.reset_classifier(n_classes)
    trained = _PARTS[start.train](model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    for module in model.modules():
        if type(module) is LayerNorm:  # timm's own, whose numbers are those of its base
            module.__class__ = nn.LayerNorm
    return _Pretrained(replace_batch_norm(model, frozen=True), digest)


def _load_weights(model: Any, name: str, weights: Path | Literal["hub"]) -> str:
    """Load weights into a model without classifier; return the digest of weights and normalisation."""
    if isinstance(weights, str):
        path = download_weights(name, model.pretrained_cfg.get("hf_hub_id"))
    else:
        path = weights / f"{name}.safetensors" if weights.is_dir() else weights
    load_weights(model, read_weights(path), str(path))
    return weights_digest(_Pretrained(model, ""))


def _fit_size(model: Any, name: str, size_px: int) -> None:
    """Set the size of images of a model, which interpolates its positional embeddings."""
    if hasattr(model, "set_input_size"):
        try:
            model.set_input_size(img_size=size_px)
        except Exception as error:  # each architecture has its own way to refuse
            raise UsageError(f"timm makes no {name} of images of {size_px} px: {single_line(error)}") from None


def _classifier_layers(model: Any) -> list[nn.Module]:
    """Return the layers of the classifier; some architectures have two."""
    classifier = model.get_classifier()
    return list(classifier) if isinstance(classifier, tuple) else [classifier]


def _head_parameters(model: Any) -> list[nn.Parameter]:
    return [parameter for layer in _classifier_layers(model) for parameter in layer.parameters()]


def _last_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters of the last block and after it, as timm divides its models."""
    if not hasattr(model, "group_matcher"):
        raise UsageError(f"timm does not divide a {type(model).__name__} into blocks; set model.train = 'norm'")
    depth = group_parameters(model, model.group_matcher(), return_values=False, reverse=True)
    last = sorted(set(depth.values()))[-2:]
    named = dict(model.named_parameters())
    return [*_head_parameters(model), *(named[name] for name, k in depth.items() if k in last)]


def _norm_parameters(model: Any) -> list[nn.Parameter]:
    layers = [module for module in model.modules() if "Norm" in type(module).__name__]
    return [*_head_parameters(model), *(p for layer in layers for p in layer.parameters(recurse=False))]


def _add_lora(model: Any) -> list[nn.Parameter]:
    """Add low-rank adapters to linear layers (Hu et al., 2021), else to convolutions; return the trained parameters."""
    classifier_ids = {id(module) for layer in _classifier_layers(model) for module in layer.modules()}
    layers = [module for module in model.modules() if id(module) not in classifier_ids]
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    convolutions = [layer for layer in layers if type(layer) is nn.Conv2d and layer.groups == 1]
    return [*_head_parameters(model), *(p for layer in linear or convolutions for p in _add_adapter(layer))]


class _Adapted(nn.Module):
    """A layer plus a product of two small layers, initially 0 (Hu et al., 2021)."""

    down: nn.Module
    up: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        delta: Tensor = self.up(self.down(x))
        output: Tensor = super().forward(x)
        return output + delta


class _AdaptedLinear(_Adapted, nn.Linear):
    """A linear layer with an adapter."""


class _AdaptedConv2d(_Adapted, nn.Conv2d):
    """A convolution with an adapter: a convolution of the same kernel to few channels, and one of 1 × 1."""


_KERNEL_SETTINGS = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


def _add_adapter(layer: nn.Linear | nn.Conv2d) -> Iterable[nn.Parameter]:
    """Add an adapter to a layer in place, whose parameters keep their names; return the adapter's parameters."""
    if isinstance(layer, nn.Linear):
        down: nn.Module = nn.Linear(layer.in_features, _LORA_RANK, bias=False)
        up: nn.Linear | nn.Conv2d = nn.Linear(_LORA_RANK, layer.out_features, bias=False)
        layer.__class__ = _AdaptedLinear
    else:
        kernel_settings = {name: getattr(layer, name) for name in _KERNEL_SETTINGS}
        down = nn.Conv2d(layer.in_channels, _LORA_RANK, bias=False, **kernel_settings)
        up = nn.Conv2d(_LORA_RANK, layer.out_channels, 1, bias=False)
        layer.__class__ = _AdaptedConv2d
    nn.init.zeros_(up.weight)
    layer.down, layer.up = down, up
    return [*down.parameters(), *up.parameters()]


_PARTS: dict[Part, Callable[[Any], list[nn.Parameter]]] = {
    "all": lambda model: list(model.parameters()),
    "head": _head_parameters,
    "last": _last_parameters,
    "norm": _norm_parameters,
    "lora": _add_lora,
}
