"""Encoders of patches to features: a preset or any timm model without its classifier, with prefetched batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from wsi_fl.models.golden import GoldenVectors, cut_patches, project_features
from wsi_fl.models.presets import PRESETS, Pooling, Preset, Transform, suggest_encoder
from wsi_fl.models.weights import (
    create_timm_model,
    download_weights,
    load_weights,
    read_weights,
    refuse_file_name,
    weights_digest,
)
from wsi_fl.system.prefetch import prefetch_items
from wsi_fl.types import GridSpec, UsageError, WsiFlError, encoder_label

_T = TypeVar("_T")
_Patches = NDArray[np.uint8]
_Features = NDArray[np.float32]

_CLASS_TOKEN, _CLASS_AND_MEAN = "class token", "class token and mean of patches"
_GPU_BATCH = 256  # patches; with 32 a GPU waits for the CPU half of the time
_CPU_PX = 1 << 19
"""Maximum number of pixels of a forward pass on CPUs: larger ones exceed the caches and are slower."""
_PREFETCH_BATCHES = 2


class Network(nn.Module):
    """Map patches uint8[b, h, w, 3] to features float[b, d], on the module's own device.

    Args:
        model: a timm model without classifier.
        pooling: of the tokens of a patch, in words; None for the model's own pooling.
    """

    def __init__(self, model: nn.Module, transform: Transform, pooling: Pooling | None = None) -> None:
        super().__init__()
        self.model, self.transform = model, transform
        pool_name = getattr(model, "global_pool", "")
        default_pooling = (
            f"pooling {pool_name}" if isinstance(pool_name, str) and pool_name else "the model's own pooling"
        )
        self.pooling = pooling or default_pooling
        for name, values in (("mean", transform.mean), ("sd", transform.sd)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.encode_images(pixels.permute(0, 3, 1, 2).float().div_(255))

    def encode_images(self, images: torch.Tensor) -> torch.Tensor:
        """Return features [b, d] of images float32[b, 3, h, w] in [0, 1]; the input may be overwritten."""
        images = self._normalize_images(images)
        if self.pooling not in {_CLASS_TOKEN, _CLASS_AND_MEAN}:
            pooled: torch.Tensor = self.model(images)
            return pooled
        tokens: torch.Tensor = self.model.forward_features(images)  # type: ignore[operator]
        if self.pooling == _CLASS_TOKEN:
            return tokens[:, 0]
        patches = tokens[:, self.model.num_prefix_tokens :]
        return torch.cat([tokens[:, 0], patches.mean(1)], 1)

    def _normalize_images(self, images: torch.Tensor) -> torch.Tensor:
        transform = self.transform
        size = transform.resize_px or transform.px
        if size and images.shape[-2:] != (size, size):
            images = functional.interpolate(images, (size, size), mode=transform.interpolation, antialias=True)
            images = images.clamp_(0, 1)
        if size and transform.px and transform.px < size:
            first = (size - transform.px) // 2
            images = images[..., first : first + transform.px, first : first + transform.px]
        return images.sub_(self.mean).div_(self.sd)  # type: ignore[arg-type]


def build_preset_model(preset: Preset) -> nn.Module:
    """Build the architecture of a preset on PyTorch's meta device: names and shapes without memory."""
    import timm
    from timm.layers import SwiGLUPacked

    gated = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU} if preset.swiglu else {}
    with torch.device("meta"):
        model: nn.Module = timm.create_model(
            preset.architecture, pretrained=False, num_classes=0, **preset.arguments, **gated
        )
    return model


class EncoderError(WsiFlError):
    """A failure of the encoder, independent of the slide."""


class Encoder:
    """A model in evaluation mode with pooled outputs as features of patches.

    Args:
        name: of a preset, or of a timm architecture with or without the tag of its weights.
        weights: a file with the names of timm, torchvision, transformers or KimiaNet; None for the published ones.
        input_px: size of resized patches; None for the only size of the encoder (presets, vision transformers), else
            the original one.
        batch_size: None for 256 on a GPU, 32 elsewhere.
        half_precision: whether matrix products on a GPU have half the bits.
        compiled: whether PyTorch compiles the network for a GPU.
        tell: called with notices, one line each.

    Attributes:
        label: name, size of resized patches and digest of the weights, then `parts`: mean, sd, size, pooling and
            a plugin's package with its version in words; features of two sites are compatible if it is the same.
        network: from pixels to features.
        n_features: d.
        half: type of matrix products on GPUs, bfloat16 or float16; None for float32, as on CPUs.
        batch_size: maximum number of patches of a forward pass; halved when the device runs out of memory.

    Raises:
        WsiFlError: when the weights are not available or do not fit.
        UsageError: for a name of neither a preset nor a timm model.
    """

    def __init__(
        self,
        name: str,
        weights: str | Path | None = None,
        *,
        input_px: int | None = None,
        batch_size: int | None = None,
        device: torch.device | None = None,
        half_precision: bool = True,
        compiled: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name, self._tell, self.device = name, tell, device or torch.device("cpu")
        self.batch_size = batch_size or (32 if self.device.type == "cpu" else _GPU_BATCH)
        weights = None if weights is None else Path(weights)
        network = (_build_from_preset if name in PRESETS else _build_from_timm)(name, weights, input_px)
        network_parts = (*network.transform.parts, network.pooling)
        self.parts = PRESETS[name].parts if name in PRESETS else network_parts
        if name in PRESETS and (version := PRESETS.package_version(name)):  # its weights may be in its code
            self.parts = (*self.parts, version)
        self.input_px = network.transform.px
        size = f" at {self.input_px} px" if self.input_px else ""
        self.label = encoder_label(f"{name}{size} sha256:{weights_digest(network.model)}", self.parts)
        self.network = network.eval().requires_grad_(False).to(self.device)
        self.network.to(memory_format=torch.channels_last)
        self.half = None
        if half_precision and self.device.type != "cpu":
            self.half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        for module in self.network.modules() if self.half is not None else ():
            if type(module) in {nn.Linear, nn.Conv2d}:  # autocast would convert their weights for every batch
                module.to(self.half)
        self._compiled: Callable[[torch.Tensor], torch.Tensor] | None = None
        side = self.input_px or int(_input_config(network.model)["input_size"][-1])
        shape = self(np.zeros((1, side, side, 3), np.uint8)).shape
        if len(shape) != 2 or (name in PRESETS and shape[1] != PRESETS[name].n_features):
            raise EncoderError(
                f"{name} gives {shape[-1]} numbers for a patch instead of {PRESETS[name].n_features} features"
                if name in PRESETS and len(shape) == 2
                else f"{name} gives numbers of the shape {shape[1:]} for a patch; it needs a pooling of its tokens"
            )
        self.n_features = shape[1]
        if compiled and self.device.type != "cpu":
            self._compiled = torch.compile(self.network)

    def __call__(self, patches: _Patches) -> _Features:
        """Return features float32[b, d] of patches uint8[b, h, w, 3]."""
        return self.start_batch(patches)()

    def start_batch(self, patches: _Patches) -> Callable[[], _Features]:
        """Start encoding patches uint8[b, h, w, 3] and return a function that waits for features float32[b, d].

        So a GPU can work on the next batch.

        Raises:
            EncoderError: when the device runs out of memory; by the function, when a feature is not finite.
        """
        pending: Callable[[], _Features] | None = None
        with suppress(torch.OutOfMemoryError):
            pending = self._launch_batch(patches)
        if pending is None:  # memory of the attempt is free by now
            features = self._encode_in_halves(patches)
            return lambda: features

        def wait_for_features() -> _Features:
            features = pending()
            if not np.isfinite(features).all():
                raise EncoderError(f"{self.label}: gives features that are no numbers; check its weights")
            return features

        return wait_for_features

    def _launch_batch(self, patches: _Patches) -> Callable[[], _Features]:
        with torch.inference_mode(), self.autocast_context():
            pixels = torch.from_numpy(np.ascontiguousarray(patches))
            features = self._run_network(pixels.to(self.device, non_blocking=True)).float()
            if self.device.type == "cpu":
                return partial(torch.Tensor.numpy, features)
            host_features = torch.empty(features.shape, pin_memory=True)
            host_features.copy_(features, non_blocking=True)
        copy_event = torch.cuda.current_stream(self.device).record_event()
        return partial(_wait_for_copy, copy_event, host_features, pixels)

    def _run_network(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return features of pixels on the device, padded to the compiled batch size."""
        if self._compiled is None or len(pixels) > self.batch_size:
            features: torch.Tensor = self.network(pixels)
            return features
        padded = pixels.new_zeros(self.batch_size, *pixels.shape[1:])
        padded[: len(pixels)] = pixels
        return self._compiled(padded)[: len(pixels)]

    def allocate_batch(self, shape: tuple[int, ...]) -> _Patches:
        """Return an empty array of patches, in pinned memory for a GPU."""
        if self.device.type == "cpu":
            return np.empty(shape, np.uint8)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()

    def _encode_in_halves(self, patches: _Patches) -> _Features:
        """Encode a batch that does not fit in parts, halved until they fit, and lower the batch size likewise."""
        n, size = len(patches), f"of {patches.shape[1]} px"
        if n == 1:
            raise EncoderError(f"{self.device}: no memory for a patch {size}; lower input_px")
        if (half := n // 2) < self.batch_size:
            self.batch_size = half
            self._tell(f"{self.device}: no memory for {n} patches {size} at once; goes on with {half}")
        size_now = self.batch_size
        return np.concatenate([self(patches[k : k + size_now]) for k in range(0, n, size_now)])

    def autocast_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context for calls of the network."""
        return nullcontext() if self.half is None else torch.autocast(self.device.type, self.half)

    def batch_size_for(self, size_px: int) -> int:
        """Return the number of patches of this size per forward pass: `batch_size`, on CPUs fewer large ones."""
        if self.device.type != "cpu":
            return self.batch_size
        return max(1, min(self.batch_size, _CPU_PX // (self.input_px or size_px) ** 2))


def _wait_for_copy(copy_event: torch.cuda.Event, host_features: torch.Tensor, _: torch.Tensor) -> _Features:
    """Return features on the host after a copy; the reference to pixels keeps their buffer until then."""
    copy_event.synchronize()
    return host_features.numpy().copy()


def _build_from_preset(name: str, weights: Path | None, input_px: int | None) -> Network:
    preset = PRESETS[name]
    _require_input_px(preset.transform.px or 0, input_px)
    if preset.build is not None:
        return Network(preset.build(weights), preset.transform, preset.pooling)
    path = weights or download_weights(name, preset.hub_id, preset.hub_files)
    model = build_preset_model(preset)
    load_weights(model, read_weights(path), str(path), assign=True)
    return Network(model, preset.transform, preset.pooling)


def _build_from_timm(name: str, weights: Path | None, input_px: int | None) -> Network:
    refuse_file_name(name)
    try:
        model = create_timm_model(name, "features", num_classes=0)
    except UsageError as error:
        advice = suggest_encoder(name) or f"{error}; presets are {', '.join(PRESETS)}"
        raise UsageError(f"encoder = {name!r}: {advice}") from None
    path = weights or download_weights(name, getattr(model, "pretrained_cfg", {}).get("hf_hub_id"))
    if load_weights(model, read_weights(path), str(path)):
        _remove_last_relu(model)
    data = _input_config(model)
    interpolation = data["interpolation"] if data["interpolation"] in {"bilinear", "bicubic"} else "bicubic"
    if getattr(model, "pretrained_cfg", {}).get("fixed_input_size"):
        input_px = _require_input_px(int(data["input_size"][-1]), input_px)
    return Network(model, Transform(tuple(data["mean"]), tuple(data["std"]), input_px, interpolation))


def _input_config(model: nn.Module) -> Any:
    from timm.data import resolve_model_data_config

    return resolve_model_data_config(model)


def _require_input_px(fixed_px: int, input_px: int | None) -> int:
    if input_px not in {None, fixed_px}:
        raise UsageError(f"input_px = {input_px}: this encoder takes only patches of {fixed_px} px; leave it out")
    return fixed_px


@dataclass
class StageSeconds:
    """Seconds of reading, encoding and writing patches; reading and writing overlap with encoding."""

    read: float = 0.0
    encode: float = 0.0
    write: float = 0.0

    def __add__(self, other: StageSeconds) -> StageSeconds:
        return StageSeconds(self.read + other.read, self.encode + other.encode, self.write + other.write)


@dataclass
class EncodedItem(Generic[_T]):
    """Features float32[n, d] of one item's patches, or the error of reading them."""

    item: _T
    features: _Features
    error: Exception | None = None
    spent: StageSeconds = field(default_factory=StageSeconds)


def encode_items(
    items: Iterable[tuple[_T, Iterable[_Patches]]], encoder: Encoder
) -> Generator[EncodedItem[_T], None, None]:
    """Encode the patches of many items, each in batches uint8[b, h, w, 3] of any length, and yield them in order.

    One thread iterates over items and batches, a few batches ahead of the encoder and across items, so the encoder does
    not wait. Errors of iterating over items are raised here; those over an item's batches are part of its result.
    """
    parts: list[_Features] = []
    spent = StageSeconds()
    with closing(prefetch_items(_stream_batches(items, encoder), _PREFETCH_BATCHES)) as stream:
        for item, batch, reading, start_seconds in _start_ahead(stream, encoder):
            start = time.perf_counter()
            if callable(batch):
                parts.append(batch())
                spent += StageSeconds(reading, start_seconds + time.perf_counter() - start)
                continue
            features = np.concatenate(parts) if parts else np.empty((0, encoder.n_features), np.float32)
            yield EncodedItem(item, features, batch, spent + StageSeconds(reading))
            parts, spent = [], StageSeconds()


def _start_ahead(
    stream: Iterable[tuple[_T, _Patches | Exception | None, float]], encoder: Encoder
) -> Iterator[tuple[_T, Callable[[], _Features] | Exception | None, float, float]]:
    """Replace batches by functions that wait for their features, with the seconds of the start, one batch behind."""
    pending: list[Any] = []
    for item, batch, reading in stream:
        start = time.perf_counter()
        if not isinstance(batch, np.ndarray):
            pending.append((item, batch, reading, 0.0))
            continue
        waiter = encoder.start_batch(batch)
        seconds = time.perf_counter() - start
        yield from pending
        pending = [(item, waiter, reading, seconds)]
    yield from pending


def _stream_batches(
    items: Iterable[tuple[_T, Iterable[_Patches]]], encoder: Encoder
) -> Iterator[tuple[_T, _Patches | Exception | None, float]]:
    """Yield (item, batch, seconds of reading), and at the end of an item its error or None instead of a batch."""
    for item, batches in items:
        regrouped = _regroup_batches(batches, encoder)
        while True:
            start = time.perf_counter()
            try:
                batch: _Patches | Exception | None = next(regrouped, None)
            except Exception as error:
                batch = error
            yield item, batch, time.perf_counter() - start
            if not isinstance(batch, np.ndarray):
                break


def encode_batches(batches: Iterable[_Patches], encoder: Encoder) -> _Features:
    """Encode n patches in batches uint8[b, h, w, 3] of any length to features float32[n, d].

    A thread prefetches batches while the encoder runs; results do not depend on the batches.
    """
    with closing(encode_items([(None, batches)], encoder)) as encoded:
        (result,) = encoded
    if result.error is not None:
        raise result.error
    return result.features


def encode_golden(encoder: Encoder, spec: GridSpec) -> GoldenVectors:
    """Return the vectors of the golden patches, cut as those of a store."""
    patches = cut_patches(spec)
    return project_features(encode_batches([patches], encoder)) if len(patches) else ()


def _regroup_batches(batches: Iterable[_Patches], encoder: Encoder) -> Iterator[_Patches]:
    buffer: _Patches | None = None
    n_filled = 0
    for batch in batches:
        n_copied = 0
        while n_copied < len(batch):
            if buffer is None:
                buffer = encoder.allocate_batch((encoder.batch_size_for(batch.shape[1]), *batch.shape[1:]))
                n_filled = 0
            n = min(len(buffer) - n_filled, len(batch) - n_copied)
            buffer[n_filled : n_filled + n] = batch[n_copied : n_copied + n]
            n_filled, n_copied = n_filled + n, n_copied + n
            if n_filled == len(buffer):
                yield buffer
                buffer = None
    if buffer is not None:
        yield buffer[:n_filled]


def _remove_last_relu(model: nn.Module) -> None:
    """Remove the ReLU after the last normalisation of torchvision and timm, which KimiaNet lacks."""
    last = getattr(getattr(model, "features", None), "norm5", None)
    if last is None or not hasattr(last, "act"):
        raise WsiFlError("weights with KimiaNet's names fit only DenseNets; set encoder = 'densenet121'")
    last.act = nn.Identity()
