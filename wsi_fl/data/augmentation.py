"""Augmentation of training images by name: symmetries, changes of colour, and random transforms of MONAI.

Parameters are constants, never statistics of a data set. All draws come from one stream, for each image anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wsi_fl.types import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from wsi_fl.privacy.cipher import CipherStream

Augment = Callable[["Tensor"], "Tensor"]
"""One image float32[channels, h, w], normalised to [−1, 1] → another, possibly outside this range."""

_MONAI = "monai:"


def build_augmentation(names: str | Sequence[str], stream: CipherStream) -> Augment | None:
    """Return the named augmentation of images float32[c, h, w] in [−1, 1], drawn by the stream; None for `none`.

    - `mirror` exchanges left and right with probability 1/2.
    - `quarter_turns` rotates by 0, 90, 180 or 270 degrees, all equally likely. After `mirror` all eight symmetries of
      the square are.
    - `flips` draws the eight symmetries unevenly: 1/6 each for none, both flips and the half turn, 1/12 each for the
      others. So do MONAI's RandFlip of both axes and RandRotate90 with probability 1/2 each.
    - `stain` is `flips`, then per colour channel a gain about mid-grey and an offset, as of other laboratories' stains.
      The latter two equal MONAI's RandScaleIntensity and RandShiftIntensity.
    - `monai:NAME` or `monai:NAME(argument=value)` is a random transform of MONAI, which is imported for it alone.

    Args:
        names: a name, or several to be applied in this order.

    Raises:
        UsageError: for an unknown name, or a transform or an argument of MONAI that is refused.
        WsiFlError: where a transform of MONAI is named and MONAI is not installed.

    Example:
        >>> import torch
        >>> from wsi_fl.privacy.cipher import CipherStream
        >>> augment = build_augmentation(["mirror", "quarter_turns"], CipherStream.from_seed(1))
        >>> augment(torch.zeros(3, 8, 8)).shape
        torch.Size([3, 8, 8])
    """
    chosen = [names] if isinstance(names, str) else names
    steps = [_build_step(name, stream) for name in chosen if name != "none"]
    if len(steps) < 2:
        return steps[0] if steps else None

    def apply_steps(image: Tensor) -> Tensor:
        for step in steps:
            image = step(image)
        return image

    return apply_steps


def check_augmentation(names: str | Sequence[str]) -> None:
    """Refuse names that `build_augmentation` or training would refuse; MONAI's are tried on images of noise."""
    for name in [names] if isinstance(names, str) else names:
        if name.startswith(_MONAI):
            from wsi_fl.data.monai_transforms import check_transform

            check_transform(name.removeprefix(_MONAI))
        elif name not in ("none", *_BUILDERS):
            raise UsageError(f"unknown augmentation {name!r}; known: none, {', '.join(_BUILDERS)}, monai:NAME")


def _build_step(name: str, stream: CipherStream) -> Augment:
    if name.startswith(_MONAI):
        from wsi_fl.data.monai_transforms import build_transform

        return build_transform(name.removeprefix(_MONAI), stream)
    check_augmentation(name)
    return _BUILDERS[name](stream)


def _build_mirror(stream: CipherStream) -> Augment:
    return lambda image: image.flip(2) if stream.randbelow(2) else image


def _build_quarter_turns(stream: CipherStream) -> Augment:
    return lambda image: image.rot90(stream.randbelow(4), (1, 2))


def _build_flips(stream: CipherStream) -> Augment:
    def draw_symmetry(image: Tensor) -> Tensor:
        for axis in (1, 2):
            if _draw_number(stream) < 0.5:
                image = image.flip(axis)
        return image.rot90(stream.randbelow(3) + 1, (1, 2)) if _draw_number(stream) < 0.5 else image

    return draw_symmetry


def _build_stain(stream: CipherStream) -> Augment:
    import torch

    flip = _build_flips(stream)

    def draw_channels(image: Tensor, center: float, bound: float) -> Tensor:
        numbers = [center + (2 * bound * _draw_number(stream) - bound) for _ in image]
        return torch.tensor(numbers, dtype=image.dtype, device=image.device)[:, None, None]

    def change_colors(image: Tensor) -> Tensor:
        image = flip(image)
        if _draw_number(stream) < 0.8:
            image = image * draw_channels(image, 1, 0.4)
        return image + draw_channels(image, 0, 0.5) if _draw_number(stream) < 0.8 else image

    return change_colors


def _draw_number(stream: CipherStream) -> float:
    """Return a number of [0, 1)."""
    return stream.randbelow(2**53) * 2.0**-53


_BUILDERS: dict[str, Callable[[CipherStream], Augment]] = {
    "mirror": _build_mirror,
    "quarter_turns": _build_quarter_turns,
    "flips": _build_flips,
    "stain": _build_stain,
}
