"""One file per architecture; three tables of builders, of images, bags and vectors, and `build` the door to all.

What a builder returns maps a batch of its kind of input to logits float32[b, n_classes]: images
float32[b, channels, size_px, size_px], bags float32[b, m, n_features + 1] (see `bags`), or vectors
float32[b, n_features]. None uses BatchNorm, whose batch statistics tie the examples of a batch together and void
differential privacy. Networks of images may start from published weights (see `pretrained`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from wsi_fl.models.cnn import cnn1, cnn2, gn_cnn, gn_cnn_small, lenet5, mlp, vgg11
from wsi_fl.models.directions import N_RANDOM
from wsi_fl.models.heads import linear_head, mean_head, mlp_head
from wsi_fl.models.mil import abmil, clam_sb, deepset, deepset_attention, deepset_max, transmil
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.types import Bags, Images, Shape, UsageError, Vectors

if TYPE_CHECKING:
    from wsi_fl.models.pretrained import Part

_Builder = Callable[[int, int, int], nn.Module]
"""(n_classes, in_channels, size_px) → a model of images."""

_FeatureBuilder = Callable[[int, int], nn.Module]
"""(n_classes, n_features) → a model of bags, or of vectors."""


def _resnet18(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    from wsi_fl.models.cnn import resnet18  # torchvision costs every rank half a second

    return resnet18(n_classes, in_channels, size_px)


BUILDERS: dict[str, _Builder] = {
    "resnet18": _resnet18,
    "gn_cnn": gn_cnn,
    "gn_cnn_small": gn_cnn_small,
    "lenet5": lenet5,
    "mlp": mlp,
    "cnn1": cnn1,
    "cnn2": cnn2,
    "vgg11": vgg11,
}


BAG_BUILDERS: dict[str, _FeatureBuilder] = {
    "deepset": deepset,
    "deepset_max": deepset_max,
    "deepset_attention": deepset_attention,
    "abmil": abmil,
    "clam_sb": clam_sb,
    "transmil": transmil,
    "mean_head": mean_head,
}

VECTOR_BUILDERS: dict[str, _FeatureBuilder] = {"linear_head": linear_head, "mlp_head": mlp_head}


_SEEN = {
    "bags": ("bags of features", "mosaics", BAG_BUILDERS),
    "vectors": ("the features of a patch", "features", VECTOR_BUILDERS),
}
"""What models of features see, in words; the `train.data` that gives it; and who sees it."""


HUB: Literal["hub"] = "hub"
"""Weights that timm publishes."""


@dataclass(frozen=True)
class Start:
    """The weights that a network starts from, and the part of it that is trained.

    Attributes:
        train, weights, cache: as `pretrained_model` takes them.
    """

    train: Part = "all"
    weights: Path | Literal["hub"] | None = None
    cache: Path | None = None


def build(name: str, *, n_classes: int, shape: Shape, seed: int, start: Start | None = None) -> nn.Module:
    """A freshly initialised model, the same for the same seed whatever ran before.

    Args:
        name: a key of the builders of this kind of input, or `timm:NAME` for any timm architecture of images (BatchNorm
            becomes GroupNorm).
        start: what a timm architecture starts from, or `resnet18`, which is timm's then; None for random weights.

    Raises:
        UsageError: for an unknown name, one that sees another kind of input, or images too small for it; one that has
            no published weights where it is to start from some.
        WsiFlError: when the weights cannot be had or do not fit.

    Example:
        >>> model = build("mlp", n_classes=10, shape=Images(1, 28), seed=0)
        >>> sum(p.numel() for p in model.parameters())
        199210
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if start is not None:
            return _started(name, n_classes, shape, start)
        if not isinstance(shape, Images):
            return _of_features(name, n_classes, shape)
        if name.startswith("timm:"):
            from wsi_fl.models.pretrained import timm_model

            return timm_model(name.removeprefix("timm:"), n_classes, shape.channels)
        for sees, data, builders in _SEEN.values():
            if name in builders:
                raise UsageError(f"model {name!r} sees {sees}, not images; set train.data = {data!r}")
        if name not in BUILDERS:
            raise UsageError(f"unknown model {name!r}; known: {', '.join(BUILDERS)}, timm:NAME")
        return BUILDERS[name](n_classes, shape.channels, shape.size_px)


def _started(name: str, n_classes: int, shape: Shape, start: Start) -> nn.Module:
    if not isinstance(shape, Images) or not (name == "resnet18" or name.startswith("timm:")):
        raise UsageError(
            f"model {name!r} starts from no weights; those that do are resnet18 and timm:NAME, of patches"
        )
    from wsi_fl.models.pretrained import pretrained_model

    architecture = name.removeprefix("timm:")
    return pretrained_model(architecture, n_classes, shape, start.train, start.weights, start.cache)


def _of_features(name: str, n_classes: int, shape: Bags | Vectors) -> nn.Module:
    kind = "bags" if isinstance(shape, Bags) else "vectors"
    made, _, directions = name.partition(":")
    if made == "shared_head":  # of `oneshot` alone
        return SharedHead(
            n_classes, shape.n_features, bags=kind == "bags", directions=int(directions or N_RANDOM)
        )
    sees, _, builders = _SEEN[kind]
    if name not in builders:
        sees = kind if kind == "bags" else sees
        raise UsageError(f"model {name!r} does not see {sees}; those that do: {', '.join(builders)}")
    return builders[name](n_classes, shape.n_features)


def schema(model: nn.Module) -> str:
    """A digest of the trained parameters' names and shapes: peers can mix only what has the same one.

    It covers the weights that a model started from, since what is not trained never travels.
    """
    said: list[object] = [[name, list(p.shape)] for name, p in model.named_parameters() if p.requires_grad]
    if start := started_from(model):
        said.append(start)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def started_from(model: nn.Module) -> str:
    """Return the SHA-256 of the weights that a model started from; "" for random ones."""
    started = getattr(model, "started", None)
    return bytes(started.tolist()).hex() if isinstance(started, torch.Tensor) else ""
