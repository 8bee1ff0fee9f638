"""Encoders that were never trained, for where nothing may be downloaded: random filters tell textures apart.


Their normalisation layers have seen some images, without which all features would look alike.
"""

from __future__ import annotations

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from timm.data import resolve_model_data_config
from torch import Tensor, nn

_BATCH = 64


def untrained_weights(name: str, images: NDArray[np.uint8], seed: int = 0) -> dict[str, Tensor]:
    """Return weights with timm's names, always the same for the same images.

    Args:
        name: of a timm architecture with BatchNorm.
        images: uint8[n, h, w, 3] that its normalisation layers see.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = timm.create_model(name, num_classes=2)
    expected = resolve_model_data_config(model)
    mean, std = (torch.tensor(expected[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    normalised = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over batches
    model.train()
    with torch.no_grad():
        for first in range(0, len(normalised), _BATCH):
            model(normalised[first : first + _BATCH])
    weights: dict[str, Tensor] = model.state_dict()
    return weights
