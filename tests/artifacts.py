"""Simulated pen, black and blur artifacts at known places of a picture."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter

INKS = {"black": (22, 22, 26), "blue": (30, 55, 165), "green": (25, 125, 65), "red": (200, 22, 35)}
GLASS = 243


def stroke(shape, um_per_px, rng, width_um=300.0):
    """Return bool[h, w], a curved line across the picture like the stroke of a marker."""
    height, width = shape
    points = [(x * width / 6, height * (0.5 + rng.uniform(-0.35, 0.35))) for x in range(7)]
    mask = Image.new("1", (width, height))
    px = max(2, round(width_um / um_per_px))
    ImageDraw.Draw(mask).line(points, fill=1, width=px, joint="curve")
    return np.array(mask)


def disc(shape, centre, radius_px):
    """Return bool[h, w], a disc around (x, y)."""
    y, x = np.mgrid[: shape[0], : shape[1]]
    return (x - centre[0]) ** 2 + (y - centre[1]) ** 2 < radius_px**2


def inked(image, where, colour, opacity=0.85):
    """Return the picture uint8[h, w, 3] under a marker's ink."""
    out = image.astype(float)
    out[where] = (1 - opacity) * out[where] + opacity * np.array(INKS[colour])
    return out.round().astype(np.uint8)


def translucent(image, where, colour, strength=0.85):
    """Return the picture under streaks of translucent ink."""
    streaks = gaussian_filter(np.random.default_rng(5).normal(size=where.shape), 8)
    passing = 1 - strength * (1 - np.array(INKS[colour]) / GLASS)
    passing = passing * (1 + 0.08 * streaks / streaks.std())[..., None]
    out = image.astype(float)
    out[where] *= passing.clip(0, 1)[where]
    return out.round().astype(np.uint8)


def blackened(image, where):
    """Return the picture with unscanned, black places."""
    out = image.copy()
    out[where] = 0
    return out


def blurred(image, where, sigma_um, um_per_px):
    """Return the picture out of focus at places."""
    out = image.copy()
    for channel in range(3):
        soft = gaussian_filter(image[..., channel].astype(np.float32), sigma_um / um_per_px)
        out[..., channel][where] = soft[where].round().astype(np.uint8)
    return out
