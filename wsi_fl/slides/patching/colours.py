"""The colours of a picture, and which of them no stain has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

TRUNCATE = 3
"""Standard deviations at which the smoothing kernel ends."""
_INK_CHROMA = 15 / 255
_BLACK = 25 / 255
_DARK, _GREY_CHROMA = 100 / 255, 20 / 255
_VIVID_CHROMA, _VIVID_SATURATION = 0.4, 0.6
_LOGARITHM = np.log10((np.arange(256, dtype=np.float32) + 1) / 256)
"""Of the light that comes through, by the value of a channel."""

Planes = NDArray[np.float32]


@dataclass(frozen=True)
class Colours:
    """The planes [h, w] of a smoothed picture, each from 0 to 1.

    Attributes:
        red, green, blue: the channels.
        high: the largest of them.
        chroma: how far the smallest is below it.
    """

    red: NDArray[np.float32]
    green: NDArray[np.float32]
    blue: NDArray[np.float32]
    high: NDArray[np.float32]
    chroma: NDArray[np.float32]

    @property
    def saturation(self) -> NDArray[np.float32]:
        """HSV saturation [h, w]."""
        return np.asarray(self.chroma / np.maximum(self.high, np.float32(1 / 255)), np.float32)


def colours(picture: NDArray[np.uint8], sigma_px: float) -> Colours:
    """Return the planes of a picture uint8[h, w, 3], smoothed where sigma_px is half a pixel or more."""
    from scipy.ndimage import gaussian_filter1d

    planes = np.moveaxis(picture, -1, 0).astype(np.float32)
    planes /= np.float32(255)
    if sigma_px >= 0.5:
        smoothed = partial(gaussian_filter1d, sigma=sigma_px, mode="nearest", truncate=TRUNCATE)
        planes = along_both(smoothed, planes)
    red, green, blue = planes
    high = np.maximum(np.maximum(red, green), blue)
    return Colours(red, green, blue, high, high - np.minimum(np.minimum(red, green), blue))


def along_both(smoothed: Callable[[Planes], Planes], planes: Planes) -> Planes:
    """Return planes [..., h, w] after a filter of the last axis was applied to their columns, then to their rows.

    The filter always finds its lines in one piece of memory, where it takes a third of the time.
    """
    for _ in range(2):
        planes = smoothed(np.ascontiguousarray(planes.swapaxes(-1, -2)))
    return planes


def optical_density(picture: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the optical density float32[h, w] of a picture uint8[h, w, 3]: the mean of its channels; white has 0."""
    red, green, blue = (_LOGARITHM[picture[..., channel]] for channel in range(3))
    return np.asarray(-(red + green + blue) / 3, np.float32)


def is_black(seen: Colours) -> NDArray[np.bool_]:
    """Return where nothing was scanned."""
    return np.asarray(seen.high < _BLACK, bool)


def is_ink(seen: Colours) -> NDArray[np.bool_]:
    """Return where the colour is one that H&E never has: green, cyan, blue, red and black ink."""
    greener_than_red = (seen.green - seen.red > 0.03) & (seen.chroma > _INK_CHROMA)
    pure_red = _pure(seen.red, seen.green, seen.blue) & (seen.red > 0.5)
    pure_blue = _pure(seen.blue, seen.red, seen.green)
    grey = (seen.high < _DARK) & (seen.chroma < _GREY_CHROMA) & ~is_black(seen)
    return np.asarray(greener_than_red | pure_red | pure_blue | grey, bool)


def is_vivid(seen: Colours) -> NDArray[np.bool_]:
    """Return where the colour is one that no stain has, blue haematoxylin and brown DAB among them."""
    strong = (seen.chroma > _VIVID_CHROMA) | (
        (seen.saturation > _VIVID_SATURATION) & (seen.chroma > _INK_CHROMA)
    )
    cold = (seen.red < seen.green) & (seen.red < seen.blue) & strong
    green = (seen.green > seen.red) & (seen.green > seen.blue) & (seen.chroma > _INK_CHROMA)
    pure_red = _pure(seen.red, seen.green, seen.blue) & (seen.red > 0.5)
    return np.asarray(cold | green | pure_red | _pure(seen.blue, seen.red, seen.green), bool)


def _pure(
    one: NDArray[np.float32], second: NDArray[np.float32], third: NDArray[np.float32]
) -> NDArray[np.bool_]:
    """Where one channel stands alone: both others are low and alike."""
    alone: NDArray[np.bool_] = one - np.maximum(second, third) > 0.65 * one
    alike: NDArray[np.bool_] = np.abs(second - third) < 0.2 * one
    return alone & alike
