"""The stain of a laboratory as six numbers, and patches shown in another one (Reinhard et al., 2001, in CIELAB)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from skimage.color import lab2rgb, rgb2lab

_CENTRE = np.array([63.0, 19.0, -17.0])
_SCALE = np.array([40.0, 20.0, 20.0])
"""Public constants that put the colours of stained tissue roughly within [−1, 1]."""
_WHITE, _PALE = 92.0, 84.0
"""Lightness of what certainly is background, and of what certainly is tissue."""
_LEAST_TISSUE, _LEAST_SD = 0.01, 1.0
_MOST_RATIO = 2.0

_MOST_PX = 64
"""Along each side of a patch; more would only take time."""

N_MOMENTS = 6


@dataclass(frozen=True)
class Stain:
    """The colour of tissue in CIELAB (D65).

    Attributes:
        mean, sd: (L*, a*, b*).
    """

    mean: tuple[float, float, float]
    sd: tuple[float, float, float]


def tissue_moments(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """First and second moments float64[n, 6] of the tissue's scaled colours in each patch.

    Every row depends on one patch alone. A patch without tissue counts as the neutral colour, so that the number
    of rows stays that of the patches.

    Args:
        pixels: uint8[n, h, w, 3].
    """
    out = np.zeros((len(pixels), N_MOMENTS))
    for row, patch in enumerate(pixels):
        step = max(1, patch.shape[0] // _MOST_PX)
        lab = rgb2lab(patch[::step, ::step]).reshape(-1, 3)
        tissue = lab[lab[:, 0] < (_WHITE + _PALE) / 2]
        if len(tissue) >= _LEAST_TISSUE * len(lab):
            scaled = (tissue - _CENTRE) / _SCALE
            out[row] = np.concatenate([scaled.mean(0), (scaled**2).mean(0)])
    return out


def stain_of(moments: NDArray[np.float64]) -> Stain:
    """The stain whose mean moments float64[6] these are; noise may have made them slightly impossible."""
    mean, square = moments[:3], moments[3:]
    sd = np.sqrt(np.maximum(square - mean**2, 0)) * _SCALE
    return Stain(_three(mean * _SCALE + _CENTRE), _three(np.maximum(sd, _LEAST_SD)))


def restained(pixels: NDArray[np.uint8], own: Stain, other: Stain) -> NDArray[np.uint8]:
    """Patches uint8[..., 3] as a laboratory with the other stain would show them; background stays as it is.

    Colours are moved so that `own`'s mean and standard deviation become `other`'s; contrast is at most doubled or
    halved, since noise may have made a released standard deviation far too small or large.
    """
    lab = rgb2lab(pixels.astype(np.float32) / 255)
    ratio = np.clip(np.array(other.sd) / np.array(own.sd), 1 / _MOST_RATIO, _MOST_RATIO)
    offset = np.array(other.mean) - np.array(own.mean) * ratio
    moved = lab * ratio.astype(np.float32) + offset.astype(np.float32)
    tissue = np.clip((_WHITE - lab[..., :1]) / (_WHITE - _PALE), 0, 1)
    shown = lab + tissue * (moved - lab)
    shown[..., 0] = np.maximum(shown[..., 0], 0)  # what no light can be: scikit-image would warn of it
    shown[..., 2] = np.minimum(shown[..., 2], 199.9 * (shown[..., 0] + 16) / 116)
    return np.asarray((lab2rgb(shown) * 255).round(), np.uint8)


def _three(values: NDArray[np.float64]) -> tuple[float, float, float]:
    first, second, third = (float(value) for value in values)
    return first, second, third
