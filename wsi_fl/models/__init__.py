"""One file per architecture; two tables of builders, of images and of bags, and `build` the door to both.

What a builder returns maps a batch of its kind of input to logits float32[b, n_classes]: images
float32[b, channels, size_px, size_px], or bags float32[b, m, n_features + 1] (see `deepset`). None uses BatchNorm,
whose batch statistics tie the examples of a batch together and void differential privacy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from wsi_fl.models.cnn import cnn1, cnn2, gn_cnn, gn_cnn_small
from wsi_fl.models.deepset import deepset, deepset_attention, deepset_max
from wsi_fl.models.lenet import lenet5
from wsi_fl.models.mlp import mlp
from wsi_fl.models.vgg import vgg11
from wsi_fl.types import UsageError


@dataclass(frozen=True)
class Images:
    """Square images as input."""

    channels: int
    size_px: int

    def __str__(self) -> str:
        return f"{self.size_px}-px images of {self.channels} channel{'' if self.channels == 1 else 's'}"


@dataclass(frozen=True)
class Bags:
    """Bags of patch features as input, of any length each."""

    n_features: int

    def __str__(self) -> str:
        return f"bags of {self.n_features} features per patch"


Shape = Images | Bags
"""What a model sees."""

Builder = Callable[[int, int, int], nn.Module]
"""(n_classes, in_channels, size_px) → a model of images."""

BagBuilder = Callable[[int, int], nn.Module]
"""(n_classes, n_features) → a model of bags."""


def _resnet18(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    from wsi_fl.models.resnet import resnet18  # torchvision costs every rank half a second

    return resnet18(n_classes, in_channels, size_px)


BUILDERS: dict[str, Builder] = {
    "resnet18": _resnet18,
    "gn_cnn": gn_cnn,
    "gn_cnn_small": gn_cnn_small,
    "lenet5": lenet5,
    "mlp": mlp,
    "cnn1": cnn1,
    "cnn2": cnn2,
    "vgg11": vgg11,
}


BAG_BUILDERS: dict[str, BagBuilder] = {
    "deepset": deepset,
    "deepset_max": deepset_max,
    "deepset_attention": deepset_attention,
}


def build(name: str, *, n_classes: int, shape: Shape, seed: int) -> nn.Module:
    """A freshly initialised model, the same for the same seed whatever ran before.

    Args:
        name: a key of BUILDERS or BAG_BUILDERS, or `timm:NAME` for any timm architecture of images (BatchNorm
            becomes GroupNorm).

    Raises:
        UsageError: for an unknown name, one that sees another kind of input, or images too small for it.

    Example:
        >>> model = build("mlp", n_classes=10, shape=Images(1, 28), seed=0)
        >>> sum(p.numel() for p in model.parameters())
        199210
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(shape, Bags):
            if name not in BAG_BUILDERS:
                raise UsageError(
                    f"model {name!r} does not see bags; those that do: {', '.join(BAG_BUILDERS)}"
                )
            return BAG_BUILDERS[name](n_classes, shape.n_features)
        if name.startswith("timm:"):
            from wsi_fl.models.timm import timm_model

            return timm_model(name.removeprefix("timm:"), n_classes, shape.channels)
        if name in BAG_BUILDERS:
            raise UsageError(f"model {name!r} sees bags of features, not images; set train.data = 'mosaics'")
        if name not in BUILDERS:
            raise UsageError(f"unknown model {name!r}; known: {', '.join(BUILDERS)}, timm:NAME")
        return BUILDERS[name](n_classes, shape.channels, shape.size_px)


def schema(model: nn.Module) -> str:
    """A digest of the trained parameters' names and shapes: peers can mix only what has the same one."""
    shapes = [[name, list(p.shape)] for name, p in model.named_parameters() if p.requires_grad]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
