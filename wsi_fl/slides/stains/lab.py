"""8-bit sRGB to CIELAB (D65, 2°) and back by tables, several times faster than through powers and roots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from skimage.color.colorconv import rgb_from_xyz, xyz_from_rgb

Lab = NDArray[np.float32]

_WHITE = np.array([0.95047, 1.0, 1.08883])
_TO_XYZ = (np.asarray(xyz_from_rgb) / _WHITE[:, None]).T.astype(np.float32)
_TO_RGB = (np.asarray(rgb_from_xyz) * _WHITE[None]).T.astype(np.float32)

_FINE = 1 << 16
"""Steps of the tables over [0, 1]: errors stay below a tenth of a unit of CIELAB and one level of sRGB."""
_UNIT = np.arange(_FINE + 1) / _FINE
_LEVEL = np.arange(256) / 255
_LINEAR = np.where(_LEVEL <= 0.04045, _LEVEL / 12.92, ((_LEVEL + 0.055) / 1.055) ** 2.4).astype(np.float32)
_GAMMA = np.where(_UNIT <= 0.0031308, 12.92 * _UNIT, 1.055 * _UNIT ** (1 / 2.4) - 0.055)
_SRGB = (255 * _GAMMA).round().astype(np.uint8)
_ROOT = np.where(_UNIT > 0.008856, np.cbrt(_UNIT), 7.787 * _UNIT + 16 / 116).astype(np.float32)


def lab_of(pixels: NDArray[np.uint8]) -> Lab:
    """float32[..., 3] L*, a*, b* of sRGB uint8[..., 3]."""
    root = _ROOT[_place(_LINEAR[pixels] @ _TO_XYZ)]
    x, y, z = root[..., 0], root[..., 1], root[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def rgb_of(lab: Lab) -> NDArray[np.uint8]:
    """sRGB uint8[..., 3] of L*, a*, b*; colours that no screen has are clipped.

    Example:
        >>> grey = np.full((1, 1, 3), 119, np.uint8)
        >>> rgb_of(lab_of(grey)).tolist()
        [[[119, 119, 119]]]
    """
    y = (lab[..., 0] + 16) / 116
    root = np.stack([y + lab[..., 1] / 500, y, y - lab[..., 2] / 200], axis=-1)
    xyz = np.where(root > 0.2068966, root * root * root, (root - np.float32(16 / 116)) / np.float32(7.787))
    return _SRGB[_place(xyz @ _TO_RGB)]


def _place(unit: NDArray[np.float32]) -> NDArray[np.int32]:
    return (np.clip(unit, 0, 1) * _FINE + 0.5).astype(np.int32)
