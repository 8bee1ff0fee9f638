"""Augmentation of one image; parameters are constants, never statistics of a data set."""

from __future__ import annotations

import torch
from torch import Tensor

from wsi_fl.learning.examples import Augment
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import UsageError

AUGMENTATIONS = ("none", "flips", "stain")


def augmentation(name: str, stream: CipherStream) -> Augment | None:
    """Return the named augmentation of images float32[c, h, w] in [−1, 1], drawn by the stream.

    `flips` draws one of the eight symmetries of the square, since a patch has no up; `stain` also, per colour channel,
    a gain about mid-grey and an offset, as of other laboratories' stains. They draw and compute what MONAI's RandFlip,
    RandRotate90, RandScaleIntensity and RandShiftIntensity do, whose import takes longer than a small run.

    Raises:
        UsageError: for an unknown name.
    """
    if name not in AUGMENTATIONS:
        raise UsageError(f"unknown augmentation {name!r}; known: {', '.join(AUGMENTATIONS)}")
    if name == "none":
        return None

    def number() -> float:
        return stream.below(2**53) * 2.0**-53

    def within(image: Tensor, bound: float) -> list[float]:
        return [2 * bound * number() - bound for _ in image]

    def by_channel(image: Tensor, numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=image.dtype, device=image.device)[:, None, None]

    def augment(image: Tensor) -> Tensor:
        for axis in (1, 2):
            if number() < 0.5:
                image = image.flip(axis)
        if number() < 0.5:
            image = torch.rot90(image, stream.below(3) + 1, (1, 2))
        if name == "stain":
            if number() < 0.8:
                image = image * by_channel(image, [1 + one for one in within(image, 0.4)])
            if number() < 0.8:
                image = image + by_channel(image, within(image, 0.5))
        return image

    return augment
