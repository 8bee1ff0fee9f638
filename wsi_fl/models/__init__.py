"""Models of images, bags and vectors by name.

They map a batch of their kind of input to logits float32[b, n_classes]: images float32[b, channels, size_px, size_px],
bags float32[b, m, n_features + 1] (see `mil`), or vectors float32[b, n_features]. None uses BatchNorm, whose batch
statistics make examples dependent and void differential privacy. Networks of images may start from published weights
(see `pretrained`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import nn

from wsi_fl.models.cnn import IMAGE_BUILDERS
from wsi_fl.models.mil import BAG_BUILDERS, VECTOR_BUILDERS
from wsi_fl.plugins import PAYLOAD_MODELS
from wsi_fl.types import Bags, Images, Shape, UsageError, Vectors

if TYPE_CHECKING:
    from wsi_fl.models.pretrained import Part

_FEATURE_BUILDERS: dict[str, tuple[str, str, dict[str, Callable[[int, int], nn.Module]]]] = {
    "bags": ("bags of features", "mosaics", BAG_BUILDERS),
    "vectors": ("the features of a patch", "features", VECTOR_BUILDERS),
}
"""Kind of features → its description, its `train.data`, and the builders of its models."""

HUB: Literal["hub"] = "hub"
"""Weights that timm publishes."""


@dataclass(frozen=True)
class StartWeights:
    """Initial weights of a network and its trained part.

    Attributes:
        train: all parameters, the classifier, the last block and all after it, gains and biases of normalisation layers
            and the classifier, or low-rank adapters and the classifier.
        weights: a file, a folder with NAME.safetensors, or "hub"; None for the architecture only, whose weights are
            loaded afterwards.
    """

    train: Part = "all"
    weights: Path | Literal["hub"] | None = None


def create_model(name: str, *, n_classes: int, shape: Shape, seed: int, start: StartWeights | None = None) -> nn.Module:
    """Build a model initialised deterministically from a seed.

    Args:
        name: a key of the builders of this kind of input, `timm:NAME` for any timm architecture of images, or
            `monai:NAME` for a classifier of MONAI; their BatchNorm becomes GroupNorm.
        start: initial weights of a timm architecture or `resnet18`, then timm's; None for random weights.

    Raises:
        UsageError: for an unknown name, a model of another kind of input or without published weights, or images too
            small for it.
        WsiFlError: when the weights are not available or do not fit.

    Example:
        >>> sum(p.numel() for p in create_model("mlp", n_classes=10, shape=Images(1, 28), seed=0).parameters())
        199210
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if start is not None:
            return _build_pretrained(name, n_classes, shape, start)
        family, *options = name.split(":")
        if family in PAYLOAD_MODELS:
            return cast(nn.Module, PAYLOAD_MODELS[family](n_classes, shape, *options))
        if not isinstance(shape, Images):
            return _build_feature_model(name, n_classes, shape)
        if name.startswith("timm:"):
            from wsi_fl.models.pretrained import build_timm_model

            return build_timm_model(name.removeprefix("timm:"), n_classes, shape.channels)
        if name.startswith("monai:"):
            from wsi_fl.models.monai_networks import build_monai_model

            return build_monai_model(name.removeprefix("monai:"), n_classes, shape)
        for sees, data, builders in _FEATURE_BUILDERS.values():
            if name in builders:
                raise UsageError(f"model {name!r} takes {sees}, not images; set train.data = {data!r}")
        if name not in IMAGE_BUILDERS:
            raise UsageError(f"unknown model {name!r}; known: {', '.join(IMAGE_BUILDERS)}, timm:NAME, monai:NAME")
        return IMAGE_BUILDERS[name](n_classes, shape.channels, shape.size_px)


def _build_pretrained(name: str, n_classes: int, shape: Shape, start: StartWeights) -> nn.Module:
    if not isinstance(shape, Images) or not (name == "resnet18" or name.startswith("timm:")):
        raise UsageError(f"model {name!r} starts from no weights; those that do are resnet18 and timm:NAME, of patches")
    from wsi_fl.models.pretrained import build_pretrained_model

    return build_pretrained_model(name.removeprefix("timm:"), n_classes, shape, start)


def _build_feature_model(name: str, n_classes: int, shape: Bags | Vectors) -> nn.Module:
    kind = "bags" if isinstance(shape, Bags) else "vectors"
    sees, _, builders = _FEATURE_BUILDERS[kind]
    if name not in builders:
        sees = kind if kind == "bags" else sees
        raise UsageError(f"model {name!r} does not take {sees}; those that do: {', '.join(builders)}")
    return builders[name](n_classes, shape.n_features)


def schema_digest(model: nn.Module) -> str:
    """Return the digest of the trained parameters' names and shapes, which peers must share to average models.

    It covers the initial weights, since parameters that are not trained never leave the site.
    """
    layout: list[object] = [[name, list(p.shape)] for name, p in model.named_parameters() if p.requires_grad]
    if start := start_digest(model):
        layout.append(start)
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def parameters_digest(model: nn.Module) -> str:
    """Return the SHA-256 over names, shapes and trained flags of all parameters of a model."""
    shapes = [[name, list(p.shape), p.requires_grad] for name, p in model.named_parameters()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def start_digest(model: nn.Module) -> str:
    """Return the SHA-256 of the initial weights of a model; "" for random ones."""
    digest = getattr(model, "started", None)
    return bytes(digest.tolist()).hex() if isinstance(digest, torch.Tensor) else ""
