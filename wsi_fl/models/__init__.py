"""One file per architecture; BUILDERS is the table of them, and `build` the door.

A builder takes the number of classes, of input channels and the image size in pixels, and returns a module
that maps float32[b, channels, size_px, size_px] to logits float32[b, n_classes]. None uses BatchNorm, whose
batch statistics tie the examples of a batch together and void differential privacy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import torch
from torch import nn

from wsi_fl.models.cnn import cnn1, cnn2, gn_cnn, gn_cnn_small
from wsi_fl.models.lenet import lenet5
from wsi_fl.models.mlp import mlp
from wsi_fl.models.vgg import vgg11
from wsi_fl.types import UsageError

Builder = Callable[[int, int, int], nn.Module]


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


def build(name: str, *, n_classes: int, in_channels: int, size_px: int, seed: int) -> nn.Module:
    """A freshly initialised model, the same for the same seed whatever ran before.

    Args:
        name: a key of BUILDERS, or `timm:NAME` for any timm architecture (BatchNorm becomes GroupNorm).

    Raises:
        UsageError: for an unknown name, or images too small for the architecture.

    Example:
        >>> model = build("mlp", n_classes=10, in_channels=1, size_px=28, seed=0)
        >>> sum(p.numel() for p in model.parameters())
        199210
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name.startswith("timm:"):
            from wsi_fl.models.timm import timm_model

            return timm_model(name.removeprefix("timm:"), n_classes, in_channels)
        if name not in BUILDERS:
            raise UsageError(f"unknown model {name!r}; known: {', '.join(BUILDERS)}, timm:NAME")
        return BUILDERS[name](n_classes, in_channels, size_px)


def schema(model: nn.Module) -> str:
    """A digest of the trained parameters' names and shapes: peers can mix only what has the same one."""
    shapes = [[name, list(p.shape)] for name, p in model.named_parameters() if p.requires_grad]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
