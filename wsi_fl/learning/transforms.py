"""Augmentation of one image with MONAI; parameters are constants, never statistics of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wsi_fl.learning.examples import Augment
from wsi_fl.types import UsageError

if TYPE_CHECKING:
    from monai.transforms import Transform


def _flips() -> list[Transform]:
    """The eight symmetries of the square: a patch has no up."""
    from monai.transforms import RandFlip, RandRotate90

    return [RandFlip(0.5, spatial_axis=0), RandFlip(0.5, spatial_axis=1), RandRotate90(0.5, max_k=3)]


def _stain() -> list[Transform]:
    """Symmetries, and per colour channel a gain about mid-grey and an offset: other laboratories' stains."""
    from monai.transforms import RandScaleIntensity, RandShiftIntensity

    return [
        *_flips(),
        RandScaleIntensity(factors=0.4, prob=0.8, channel_wise=True),
        RandShiftIntensity(offsets=0.5, prob=0.8, channel_wise=True),
    ]


AUGMENTATIONS: dict[str, Callable[[], list[Transform]]] = {
    "none": list,
    "flips": _flips,
    "stain": _stain,
}


def augmentation(name: str, seed: int) -> Augment | None:
    """The named augmentation of images float32[c, h, w] in [−1, 1], the same sequence for the same seed.

    Raises:
        UsageError: for an unknown name.
    """
    if name not in AUGMENTATIONS:
        raise UsageError(f"unknown augmentation {name!r}; known: {', '.join(AUGMENTATIONS)}")
    transforms = AUGMENTATIONS[name]()
    if not transforms:
        return None
    from monai.data.meta_obj import set_track_meta
    from monai.transforms import Compose

    set_track_meta(False)
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    chain = Compose(transforms).set_random_state(state=generator)

    def augment(image: Tensor) -> Tensor:
        out: Tensor = torch.as_tensor(chain(image))
        return out

    return augment
