"""Images from a trained generator, as a store keeps them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.synthesis.stylegan2 import Generator

_BATCH = 64


def device_of(generator: Generator) -> torch.device:
    return generator.synthesis.constant.device


@torch.no_grad()
def sampled(generator: Generator, labels: NDArray[np.int64], *, seed: int, truncation: float = 1.0) -> Tensor:
    """Draw uint8[n, c, h, h] on the CPU, one image per label int64[n], n > 0; the same for the same seed and device.

    Args:
        truncation: 1 draws from the whole distribution, less draws styles towards their mean.
    """
    device = device_of(generator)
    z = torch.randn(len(labels), generator.shape.z_dim, generator=torch.Generator().manual_seed(seed))
    noise = torch.Generator(device).manual_seed(seed)
    batches = zip(torch.split(z, _BATCH), torch.split(torch.from_numpy(labels), _BATCH), strict=True)
    drawn = (generator(*(x.to(device) for x in b), truncation=truncation, generator=noise) for b in batches)
    return torch.cat([to_pixels(images).cpu() for images in drawn])


def to_images(pixels: Tensor) -> Tensor:
    """Return uint8 pixels as float32 in [−1, 1]."""
    return pixels.float() / 127.5 - 1


def to_pixels(images: Tensor) -> Tensor:
    """Return images in [−1, 1] as uint8, rounded; what lies outside is cut off."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def balanced_labels(n_classes: int, n_per_class: int) -> NDArray[np.int64]:
    """Return labels int64[n_classes · n_per_class], n_per_class of each class, in turn.

    Example:
        >>> balanced_labels(2, 3).tolist()
        [0, 1, 0, 1, 0, 1]
    """
    return np.tile(np.arange(n_classes, dtype=np.int64), n_per_class)
