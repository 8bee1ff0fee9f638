"""Patches to features: any timm model without its classifier, run over batches that are read meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from wsi_fl.models.weights import digest_of, fit, published_weights, read_weights, refuse_file_name
from wsi_fl.system.ordered import made_ahead
from wsi_fl.types import UsageError, WsiFlError

_CPU_PX = 1 << 19
"""Most pixels of a forward pass on processors, where larger ones leave the caches and are slower."""
_DIGITS = 16
_AHEAD = 2


class EncoderError(WsiFlError):
    """The encoder itself failed, whatever slide it was busy with."""


class Encoder:
    """A timm model in evaluation mode whose pooled output is the feature of a patch.

    Attributes:
        name: timm's.
        label: name and digest of the weights, which tells whether features of two sites mean the same; also the size
            that patches are resized to, where they are.
        n_features: d.
        device: where it runs; half precision on GPUs, single elsewhere.

    Args:
        name: of a timm architecture, with or without the tag of its weights.
        weights: a safetensors file with the names of timm, torchvision or KimiaNet; None for timm's published ones.
        input_px: patches are resized to it; None takes them as they are, or where the architecture has but one
            size (vision transformers), that.
        batch_size: most patches of a forward pass.
        section: of the configuration that said so, for errors.

    Raises:
        WsiFlError: when the weights cannot be had or do not fit.
        UsageError: for a name that timm does not know.
    """

    def __init__(
        self,
        name: str,
        weights: Path | None = None,
        *,
        input_px: int | None = None,
        batch_size: int = 32,
        device: torch.device | None = None,
        section: str = "mosaic",
    ) -> None:
        from timm.data import resolve_model_data_config

        self.name, self.batch_size, self._section = name, batch_size, section
        self.device = device or torch.device("cpu")
        model = _architecture(name, section)
        path = weights or published_weights(name, getattr(model, "pretrained_cfg", {}).get("hf_hub_id"))
        if fit(model, read_weights(path), str(path)):
            _without_last_relu(model, section)
        digest = digest_of(model)[:_DIGITS]
        data = resolve_model_data_config(model)
        self.input_px = _input_px(model, data, input_px, section)
        self.label = f"{name}{f' at {self.input_px} px' if self.input_px else ''} sha256:{digest}"
        self._mode = data["interpolation"] if data["interpolation"] in {"bilinear", "bicubic"} else "bicubic"
        self._mean, self._std = (
            torch.tensor(data[key], device=self.device).view(1, -1, 1, 1) for key in ("mean", "std")
        )
        self._model = model.eval().requires_grad_(False).to(self.device)
        self._model.to(memory_format=torch.channels_last)
        size = self.input_px or int(data["input_size"][-1])
        self.n_features = self(np.zeros((1, size, size, 3), np.uint8)).shape[1]

    def __call__(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        """float32[b, d] of patches uint8[b, h, w, 3].

        Raises:
            EncoderError: when the device's memory does not hold them, or a feature is no number.
        """
        try:
            with torch.inference_mode(), self._precision():
                pixels = torch.from_numpy(np.ascontiguousarray(patches)).to(self.device)
                pooled = self._model(self.prepared(pixels))
                features: NDArray[np.float32] = pooled.float().cpu().numpy()
        except torch.OutOfMemoryError:
            size = f"{len(patches)} patches of {patches.shape[1]} px"
            raise EncoderError(
                f"{self.device}: no memory for {size}; lower {self._section}.batch_size"
            ) from None
        if not np.isfinite(features).all():
            raise EncoderError(
                f"{self.label}: gives features that are no numbers; check {self._section}.weights"
            )
        return features

    def network(self) -> nn.Module:
        """Return the encoder as a module on the CPU, from images float32[b, 3, h, w] in [−1, 1] to features."""
        return _Network(self)

    def prepared(self, pixels: torch.Tensor) -> torch.Tensor:
        """float32[b, 3, h, w], resized and normalised, of uint8[b, h, w, 3]."""
        images = _resized(pixels.permute(0, 3, 1, 2).float().div_(255), self.input_px, self._mode)
        return images.sub_(self._mean).div_(self._std)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.device.type == "cpu":
            return nullcontext()
        half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        return torch.autocast(self.device.type, half)

    def batch_of(self, size_px: int) -> int:
        """How many patches of this size go through at once: `batch_size`, on processors fewer where they are large."""
        if self.device.type != "cpu":
            return self.batch_size
        return max(1, min(self.batch_size, _CPU_PX // (self.input_px or size_px) ** 2))


def _resized(images: torch.Tensor, size_px: int | None, mode: str) -> torch.Tensor:
    """Images [b, 3, h, w] in [0, 1] at size_px; as they are where it is None."""
    if not size_px or images.shape[-2:] == (size_px, size_px):
        return images
    return functional.interpolate(images, (size_px, size_px), mode=mode, antialias=True).clamp_(0, 1)


class _Network(nn.Module):
    """An encoder that begins with images as models of patches see them."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.model = copy.deepcopy(encoder._model).cpu()
        self.size_px, self.mode = encoder.input_px, encoder._mode
        self.register_buffer("mean", encoder._mean.cpu())
        self.register_buffer("std", encoder._std.cpu())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = _resized(images * 0.5 + 0.5, self.size_px, self.mode)
        features: torch.Tensor = self.model((images - self.mean) / self.std)
        return features


def encode(batches: Iterable[NDArray[np.uint8]], encoder: Encoder) -> NDArray[np.float32]:
    """Return the features float32[n, d] of n patches that come in batches uint8[b, h, w, 3] of any length.

    The next batches are made in a thread of their own while the encoder runs; how they were divided makes no
    difference. An error of theirs is raised here.
    """
    with closing(made_ahead(regrouped(batches, encoder), _AHEAD)) as ready:
        found = [encoder(batch) for batch in ready]
    return np.concatenate(found) if found else np.empty((0, encoder.n_features), np.float32)


def regrouped(batches: Iterable[NDArray[np.uint8]], encoder: Encoder) -> Iterator[NDArray[np.uint8]]:
    """Yield the same patches in batches as the encoder wants them, copied."""
    waiting: NDArray[np.uint8] | None = None
    filled = 0
    for batch in batches:
        taken = 0
        while taken < len(batch):
            if waiting is None:
                waiting = np.empty((encoder.batch_of(batch.shape[1]), *batch.shape[1:]), np.uint8)
                filled = 0
            n = min(len(waiting) - filled, len(batch) - taken)
            waiting[filled : filled + n] = batch[taken : taken + n]
            filled, taken = filled + n, taken + n
            if filled == len(waiting):
                yield waiting
                waiting = None
    if waiting is not None:
        yield waiting[:filled]


def _architecture(name: str, section: str) -> nn.Module:
    """Without classifier; its random weights are to be replaced."""
    import timm

    refuse_file_name(name)
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=0)
    except Exception as error:  # each architecture has its own way to refuse
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        near = timm.list_models(f"*{name.split('.', maxsplit=1)[0]}*")[:3]
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UsageError(f"{section}.encoder = {name!r}: timm makes no such model ({reason}){hint}") from None
    return model


def _without_last_relu(model: nn.Module, section: str) -> None:
    """KimiaNet pools the last normalisation as it is; torchvision and timm put a ReLU between."""
    last = getattr(getattr(model, "features", None), "norm5", None)
    if last is None or not hasattr(last, "act"):
        raise WsiFlError(
            f"weights with KimiaNet's names fit DenseNets alone; set {section}.encoder = 'densenet121'"
        )
    last.act = nn.Identity()


def _input_px(model: nn.Module, data: dict[str, Any], wanted: int | None, section: str) -> int | None:
    """What patches are resized to; None leaves them as they are."""
    if not getattr(model, "pretrained_cfg", {}).get("fixed_input_size"):
        return wanted
    only = int(data["input_size"][-1])
    if wanted not in {None, only}:
        raise UsageError(
            f"{section}.input_px = {wanted}: this encoder takes patches of {only} px alone; leave it out"
        )
    return only
