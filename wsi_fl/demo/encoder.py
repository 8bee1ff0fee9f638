"""An encoder for the demo, which may download nothing: a network that was never trained.

Its filters are random, and its normalisation layers have seen a few public slides, painted like all others. Such
features tell textures and colours apart, no more. Studies take a pretrained encoder.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from torch import nn

from wsi_fl.demo.phantom import paint_slide, plan_slides
from wsi_fl.system.files import atomic

ENCODER, INPUT_PX = "resnet18", 64
_PATCH_PX, _SLIDE_PX, _PUBLIC_SEED, _GLASS = 256, 1024, 99, 225
_BATCH = 64


def write_untrained(path: Path) -> None:
    """Write the weights of the demo's encoder, always the same, with timm's names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(ENCODER, num_classes=2)
    expected = resolve_model_data_config(model)
    mean, std = (torch.tensor(expected[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    images = (torch.from_numpy(_public_patches()).permute(0, 3, 1, 2).float() / 255 - mean) / std
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over batches
    model.train()
    with torch.no_grad():
        for first in range(0, len(images), _BATCH):
            model(images[first : first + _BATCH])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as unfinished:
        save_file(model.state_dict(), unfinished)


def _public_patches() -> NDArray[np.uint8]:
    """Patches uint8[n, INPUT_PX, INPUT_PX, 3] of tissue of slides that belong to no hospital of the demo."""
    step, found = _PATCH_PX // INPUT_PX, []
    for slide in plan_slides(4, 1, _SLIDE_PX, _PUBLIC_SEED):
        picture = paint_slide(slide)[::step, ::step]
        grid = picture.reshape(_SLIDE_PX // _PATCH_PX, INPUT_PX, _SLIDE_PX // _PATCH_PX, INPUT_PX, 3)
        patches = grid.swapaxes(1, 2).reshape(-1, INPUT_PX, INPUT_PX, 3)
        found.append(patches[patches.mean((1, 2, 3)) < _GLASS])
    return np.concatenate(found)
