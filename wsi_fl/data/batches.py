"""Batches of examples for training and prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.augmentation import Augment
from wsi_fl.data.cohort import Cohort, Inputs, require_labels
from wsi_fl.system.direct_io import BufferPool
from wsi_fl.system.prefetch import prefetch_items

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wsi_fl.privacy.cipher import CipherStream

_PREFETCH_BATCHES = 2
_DRAW_RANGE = 1 << 62
"""Range of the numbers drawn for the views of examples."""
_NORMALIZE_VALUES = 1 << 17
"""Values normalised at a time."""
_BATCH_BUFFERS = BufferPool(capacity=2)
"""Buffers of past batches for reuse."""


def _normalize_pixels(pixels: NDArray[np.uint8]) -> Tensor:
    """Normalise uint8[b, h, w, c] to float32[b, c, h, w] in [−1, 1] by constants, independent of other records.

    In chunks that fit the processor's cache, without torch's threads: twice as fast as on entire arrays.
    """
    import torch

    pixels_out = _BATCH_BUFFERS.empty(pixels.shape, np.float32)
    target, source = pixels_out.reshape(-1), np.ascontiguousarray(pixels).reshape(-1)
    for start in range(0, len(source), _NORMALIZE_VALUES):
        chunk = target[start : start + _NORMALIZE_VALUES]
        np.divide(source[start : start + _NORMALIZE_VALUES], np.float32(127.5), out=chunk)
        np.subtract(chunk, np.float32(1), out=chunk)
    return torch.from_numpy(pixels_out).permute(0, 3, 1, 2)


def build_tensor(inputs: Inputs, device: torch.device | None = None) -> Tensor:
    """Return model inputs on a device: images as float32[b, c, h, w] in [−1, 1], features unchanged.

    Images go to a GPU as bytes, a quarter of their size in float32, and are converted there.
    """
    import torch

    if device is None or device.type == "cpu":
        return _normalize_pixels(inputs) if inputs.dtype == np.uint8 else torch.from_numpy(inputs)
    values = torch.from_numpy(np.ascontiguousarray(inputs)).pin_memory().to(device, non_blocking=True)
    if inputs.dtype != np.uint8:
        return values
    planes = values.permute(0, 3, 1, 2)  # also in memory order: GPUs have no other GroupNorm
    return planes.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1)


def draw_epoch_rows(n: int, batch_size: int, epochs: int, *, sampler: CipherStream) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of ceil(n / batch_size) batches in each of `epochs` shuffled passes; without privacy."""
    for _ in range(epochs):
        yield from np.array_split(sampler.permutation(n), range(batch_size, n, batch_size))


def load_batches(
    examples: Cohort,
    rows: Iterator[NDArray[np.int64]],
    *,
    augment: Augment | None,
    device: torch.device,
    draws: CipherStream | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (normalised and augmented images or features, labels int64[b]) on `device`; b may be 0.

    For a GPU a thread prefetches a few batches, so that the GPU need not wait for the disk.

    Args:
        rows: of each batch, int64[b].
        draws: stream of the numbers for the training inputs of `Cohort.show`; None for the inputs of `read`.
    """
    import torch

    require_labels(examples)

    def read_inputs(chosen: NDArray[np.int64]) -> Inputs:
        if draws is None or examples.show is None:
            return examples.read(chosen)
        return examples.show(chosen, (draws.uniform(len(chosen)) * _DRAW_RANGE).astype(np.int64))

    def generate_batches() -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in rows:
            images = build_tensor(read_inputs(chosen), device)
            if augment is not None and len(images):
                images = torch.stack([augment(image) for image in images])
            yield images, torch.from_numpy(examples.label[chosen]).to(device)

    yield from (prefetch_items(generate_batches(), _PREFETCH_BATCHES) if device.type == "cuda" else generate_batches())
