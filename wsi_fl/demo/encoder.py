"""The encoder of the demo, which may download nothing: it was never trained. Studies take a pretrained one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.demo.phantom import paint_slide, plan_slides
from wsi_fl.models.weights import untrained_weights
from wsi_fl.system.tensors import save_tensors

ENCODER, INPUT_PX = "resnet18", 64
_PATCH_PX, _SLIDE_PX, _PUBLIC_SEED, _GLASS = 256, 1024, 99, 225


def write_untrained(path: Path) -> None:
    """Write the weights of the demo's encoder, always the same, with timm's names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, untrained_weights(ENCODER, public_patches()), {})


def public_patches() -> NDArray[np.uint8]:
    """Return patches uint8[n, INPUT_PX, INPUT_PX, 3] of tissue, painted of slides that belong to no hospital."""
    step, found = _PATCH_PX // INPUT_PX, []
    for slide in plan_slides(4, 1, _SLIDE_PX, _PUBLIC_SEED):
        picture = paint_slide(slide)[::step, ::step]
        side = _SLIDE_PX // _PATCH_PX
        grid = picture.reshape(side, INPUT_PX, side, INPUT_PX, 3)
        patches = grid.swapaxes(1, 2).reshape(-1, INPUT_PX, INPUT_PX, 3)
        found.append(patches[patches.mean((1, 2, 3)) < _GLASS])
    return np.concatenate(found)
