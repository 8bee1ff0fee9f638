"""The stain of a laboratory as the absorption of its two dyes, and patches in another's (Macenko et al., ISBI 2009)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CENTRE = np.array([0.5626, 0.7201, 0.4062, 0.2159, 0.8012, 0.5581, 1.9705, 1.0308])
"""Public: the reference of the paper's authors. Haematoxylin and eosin (red, green, blue), then how strong they get."""
_SCALE = np.repeat([0.3, 1.5], [6, 2])
"""Public constants that put the stains of laboratories roughly within [−1, 1]."""
_THIN, _OPAQUE_BY = 0.15, 0.05
"""Optical density above which a pixel is looked at, and below which it is background."""
_TAIL = 1.0
"""Per cent of the pixels on either side that the extreme directions leave out."""
_LEAST_TISSUE, _MOST_PX = 0.05, 64
_LEAST_ANGLE, _LEAST_STRENGTH = 0.15, 0.1
_MOST_RATIO = 2.0

N_NUMBERS = 8


@dataclass(frozen=True)
class Dyes:
    """Optical density of haematoxylin and eosin.

    Attributes:
        haematoxylin, eosin: unit vectors over (red, green, blue).
        strength: of each, the 99th percentile over tissue.
    """

    haematoxylin: tuple[float, float, float]
    eosin: tuple[float, float, float]
    strength: tuple[float, float]


def patch_dyes(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Scaled directions and strengths float64[n, 8] of the dyes in each patch.

    Every row depends on one patch alone. A patch with too little tissue counts as the reference, so that the number of
    rows stays that of the patches.

    Args:
        pixels: uint8[n, h, w, 3].
    """
    out = np.zeros((len(pixels), N_NUMBERS))
    for row, patch in enumerate(pixels):
        step = max(1, patch.shape[0] // _MOST_PX)
        density = _density(patch[::step, ::step]).reshape(-1, 3)
        tissue = density[(density > _THIN).all(1)]
        if len(tissue) >= max(_LEAST_TISSUE * len(density), N_NUMBERS):
            out[row] = (_dyes_of(tissue) - _CENTRE) / _SCALE
    return out


def _dyes_of(tissue: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[8] of optical densities [m, 3]: the extreme directions within their two main axes."""
    axes = np.linalg.eigh(np.cov(tissue.T))[1][:, 1:]
    axes = axes * np.where(axes.sum(0) < 0, -1, 1)
    angle = np.arctan2(*(tissue @ axes).T)
    extremes = np.percentile(angle, [_TAIL, 100 - _TAIL])
    pair = np.array([axes @ (np.sin(a), np.cos(a)) for a in extremes])
    pair = pair[np.argsort(-pair[:, 0])]  # haematoxylin takes more of the red
    strength = np.percentile(np.linalg.lstsq(pair.T, tissue.T, rcond=None)[0], 99, axis=1)
    return np.concatenate([pair.ravel(), strength])


def dyes_of(numbers: NDArray[np.float64]) -> Dyes:
    """The dyes whose mean numbers float64[8] these are. Where noise made both alike, the reference's directions."""
    values = numbers * _SCALE + _CENTRE
    pair = _unit(values[:6].reshape(2, 3))
    if np.linalg.norm(np.cross(*pair)) < _LEAST_ANGLE:
        pair = _unit(_CENTRE[:6].reshape(2, 3))
    (h, e), strength = pair.tolist(), np.maximum(values[6:], _LEAST_STRENGTH).tolist()
    return Dyes(tuple(h), tuple(e), tuple(strength))


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    positive = np.maximum(vectors, 1e-3)
    unit: NDArray[np.float64] = positive / np.linalg.norm(positive, axis=1, keepdims=True)
    return unit


def redyed(pixels: NDArray[np.uint8], own: Dyes, other: Dyes) -> NDArray[np.uint8]:
    """Patches uint8[..., 3] as a laboratory with the other dyes would show them; background stays as it is.

    What neither dye explains is kept. Strengths are at most doubled or halved.
    """
    density = _density(pixels)
    ratio = np.clip(np.divide(other.strength, own.strength), 1 / _MOST_RATIO, _MOST_RATIO)
    amounts = density @ np.linalg.inv(_basis(own)) * np.append(ratio, 1.0)
    moved = 256 * np.exp(-(amounts @ _basis(other))) - 1
    tissue = np.clip((density.max(-1, keepdims=True) - _OPAQUE_BY) / (_THIN - _OPAQUE_BY), 0, 1)
    shown = pixels + tissue * (moved - pixels)
    rounded: NDArray[np.uint8] = shown.round().clip(0, 255).astype(np.uint8)
    return rounded


def _basis(dyes: Dyes) -> NDArray[np.float64]:
    """Rows: both dyes, and what is at right angles to them."""
    h, e = np.array(dyes.haematoxylin), np.array(dyes.eosin)
    rest = np.cross(h, e)
    return np.stack([h, e, rest / np.linalg.norm(rest)])


def _density(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Optical density, of the natural logarithm."""
    density: NDArray[np.float64] = -np.log((pixels.astype(np.float64) + 1) / 256)
    return density
