"""Three tables of builders, of images, bags and vectors, and `build` the door to all.

What a builder returns maps a batch of its kind of input to logits float32[b, n_classes]: images
float32[b, channels, size_px, size_px], bags float32[b, m, n_features + 1] (see `mil`), or vectors
float32[b, n_features]. None uses BatchNorm, whose batch statistics tie the examples of a batch together and void
differential privacy. Networks of images may start from published weights (see `pretrained`).
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

from wsi_fl.models.cnn import BUILDERS
from wsi_fl.models.directions import N_RANDOM
from wsi_fl.models.mil import BAG_BUILDERS, VECTOR_BUILDERS
from wsi_fl.models.shared_head import Kind, SharedHead
from wsi_fl.types import Bags, Images, Shape, UsageError, Vectors

if TYPE_CHECKING:
    from wsi_fl.models.pretrained import Part

_SEEN: dict[str, tuple[str, str, dict[str, Callable[[int, int], nn.Module]]]] = {
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
        train: everything, the classifier, the last block and what comes after it, gains and biases of normalisation
            layers and the classifier, or low-rank adapters and the classifier.
        weights: a file, a folder with NAME.safetensors, or "hub"; None for the architecture alone, whose weights will
            be loaded afterwards.
        cache: where the tensors of a pickle are kept when its own folder cannot be written.
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
        UsageError: for a name that is unknown, sees another kind of input, has no published weights to start from, or
            images too small for it.
        WsiFlError: when the weights cannot be had or do not fit.

    Example:
        >>> sum(p.numel() for p in build("mlp", n_classes=10, shape=Images(1, 28), seed=0).parameters())
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

    return pretrained_model(name.removeprefix("timm:"), n_classes, shape, start)


def _of_features(name: str, n_classes: int, shape: Bags | Vectors) -> nn.Module:
    kind = "bags" if isinstance(shape, Bags) else "vectors"
    made, *how = name.split(":")
    if made == "shared_head":  # of `oneshot`: how many directions, and where no classes are asked what is
        n, asked = int(how[0]) if how else N_RANDOM, cast(Kind, how[1] if len(how) > 1 else "classes")
        return SharedHead(n_classes, shape.n_features, bags=kind == "bags", directions=n, kind=asked)
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


def parameters_digest(model: nn.Module) -> str:
    """Return the SHA-256 over names and shapes of all parameters of a model, and which of them are trained."""
    shapes = [[name, list(p.shape), p.requires_grad] for name, p in model.named_parameters()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()


def started_from(model: nn.Module) -> str:
    """Return the SHA-256 of the weights that a model started from; "" for random ones."""
    started = getattr(model, "started", None)
    return bytes(started.tolist()).hex() if isinstance(started, torch.Tensor) else ""
