"""Augmentation of one image with MONAI; parameters are constants, never statistics of a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wsi_fl.learning.examples import Augment
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import UsageError

if TYPE_CHECKING:
    from monai.transforms import RandomizableTransform


def _flips() -> list[RandomizableTransform]:
    """Return transforms that draw one of the eight symmetries of the square: a patch has no up."""
    from monai.transforms import RandFlip, RandRotate90

    return [RandFlip(0.5, spatial_axis=0), RandFlip(0.5, spatial_axis=1), RandRotate90(0.5, max_k=3)]


def _stain() -> list[RandomizableTransform]:
    """Return symmetries, and per colour channel a gain about mid-grey and an offset: other laboratories' stains."""
    from monai.transforms import RandScaleIntensity, RandShiftIntensity

    return [
        *_flips(),
        RandScaleIntensity(factors=0.4, prob=0.8, channel_wise=True),
        RandShiftIntensity(offsets=0.5, prob=0.8, channel_wise=True),
    ]


AUGMENTATIONS: dict[str, Callable[[], list[RandomizableTransform]]] = {
    "none": list,
    "flips": _flips,
    "stain": _stain,
}


def augmentation(name: str, stream: CipherStream) -> Augment | None:
    """Return the named augmentation of images float32[c, h, w] in [−1, 1], drawn by the stream.

    Raises:
        UsageError: for an unknown name.
    """
    if name not in AUGMENTATIONS:
        raise UsageError(f"unknown augmentation {name!r}; known: {', '.join(AUGMENTATIONS)}")
    transforms = AUGMENTATIONS[name]()
    if not transforms:
        return None
    from monai.data.meta_obj import set_track_meta

    set_track_meta(False)
    for transform in transforms:  # one by one: MONAI's Compose gives each a seed of 32 bits
        transform.set_random_state(state=_Drawn(stream))

    def augment(image: Tensor) -> Tensor:
        for transform in transforms:
            image = torch.as_tensor(transform(image))
        return image

    return augment


class _Drawn(np.random.RandomState):
    """What MONAI's transforms draw on: a numpy generator by type, whose numbers are those of a stream."""

    def __init__(self, stream: CipherStream) -> None:
        super().__init__()  # of the operating system, should a transform ever draw what is not overridden here
        self._stream = stream

    def rand(self) -> float:  # type: ignore[override]
        """Return a number in [0, 1)."""
        return self._stream.below(2**53) * 2.0**-53

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:  # type: ignore[override]
        """Return a number in [low, high)."""
        return low + (high - low) * self.rand()

    def randint(self, low: int, high: int | None = None) -> int:  # type: ignore[override]
        """Return a whole number in [low, high), or in [0, low)."""
        return self._stream.below(low) if high is None else low + self._stream.below(high - low)
