"""Painting one slide: cutting its tissues out of the bank, staining them as a hospital does, scanning them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from scipy.ndimage import gaussian_filter

from wsi_fl.demo.phantom.anatomy import LABEL_PX, Anatomy, slow, upsample
from wsi_fl.demo.phantom.tissues import BANK_PX, bank

_STRIP_PX = 256
_CODE = 100.0  # concentrations travel as uint8: 0 to 2.55

Colour = tuple[float, float, float]
"""(red, green, blue)."""


@dataclass(frozen=True)
class Hospital:
    """How one imaginary hospital stains and scans."""

    haematoxylin: Colour
    """Optical density of unit concentration; likewise eosin."""
    eosin: Colour
    strength: tuple[float, float]
    """Multiplies the (haematoxylin, eosin) concentrations."""
    white: Colour
    blur_px: float
    noise: float
    """Standard deviation of the sensor's noise in grey levels."""
    padded: bool = False
    """Whether black surrounds the scanned rectangle."""
    ink: Colour | None = None
    """Transmittance of a pen mark on the glass."""


# The stain vectors lie near what Macenko's method finds in the slides of five real hospitals.
_HOSPITALS = (
    Hospital((0.53, 0.74, 0.42), (0.20, 0.83, 0.48), (1.0, 0.62), (246, 243, 245), 0.8, 2.0),
    Hospital((0.58, 0.72, 0.42), (0.34, 0.76, 0.47), (1.4, 0.5), (246, 246, 243), 0.55, 2.5, padded=True),
    Hospital(
        (0.64, 0.74, 0.22), (0.24, 0.93, 0.28), (1.04, 0.77), (236, 228, 242), 1.0, 1.5, ink=(0.2, 0.62, 0.42)
    ),
    Hospital((0.54, 0.74, 0.40), (0.16, 0.84, 0.56), (1.75, 0.95), (250, 242, 240), 0.6, 3.5),
    Hospital(
        (0.67, 0.68, 0.30),
        (0.20, 0.94, 0.28),
        (0.75, 0.57),
        (242, 238, 245),
        1.25,
        2.0,
        ink=(0.22, 0.35, 0.75),
    ),
)


def hospital(site: int) -> Hospital:
    """The stain and scanner of a site; beyond the fifth, the five again with other strengths and colours."""
    base = _HOSPITALS[site % len(_HOSPITALS)]
    if site < len(_HOSPITALS):
        return base
    rng = np.random.default_rng([77, site])
    h, e = (np.asarray(v) * rng.normal(1, 0.08, 3) for v in (base.haematoxylin, base.eosin))
    strength = np.asarray(base.strength) * rng.uniform(0.8, 1.25, 2)
    return replace(base, haematoxylin=tuple(h), eosin=tuple(e), strength=tuple(strength))


@lru_cache(maxsize=8)
def _as_scanned(blur_px: float) -> NDArray[np.uint16]:
    """[len(Tissue) · BANK_PX²] the bank as one scanner resolves it, (haematoxylin << 8 | eosin) in codes."""
    soft = (gaussian_filter(field, (0, blur_px, blur_px), mode="wrap", truncate=3.0) for field in bank())
    h, e = (np.clip(field * _CODE, 0, 255).round().astype(np.uint16) for field in soft)
    return np.asarray((h << 8 | e).ravel())


def _beer_lambert(at: Hospital, batch: NDArray[np.float64]) -> NDArray[np.float32]:
    """[65536, 3] the colour of every (haematoxylin << 8 | eosin) code: white · exp(-concentration · density).

    `batch` [2] multiplies the hospital's usual strength of (haematoxylin, eosin).
    """
    grey = np.arange(256)[:, None] / _CODE
    h = np.exp(-grey * np.asarray(at.haematoxylin) * at.strength[0] * batch[0])
    e = np.exp(-grey * np.asarray(at.eosin) * at.strength[1] * batch[1])
    return np.asarray((h[:, None] * e[None]).reshape(-1, 3) * np.asarray(at.white), np.float32)


def _enlarge(squares: NDArray[np.int32], rows: slice) -> NDArray[np.int32]:
    """The level-0 pixels in `rows` of an array with one value per LABEL_PX square."""
    part = squares[rows.start // LABEL_PX : rows.stop // LABEL_PX]
    return np.repeat(np.repeat(part, LABEL_PX, 0), LABEL_PX, 1)


def paint(rng: Generator, anatomy: Anatomy, at: Hospital) -> NDArray[np.uint8]:
    """[size_px, size_px, 3] the slide as this hospital's scanner sees it."""
    n = len(anatomy.label)
    size_px = n * LABEL_PX
    table = _beer_lambert(at, np.exp(rng.normal(0, 0.08, 2)))
    codes = _as_scanned(at.blur_px)
    # Where in the bank the pixels come from, bent so that no two slides repeat: bank row and column minus the slide's.
    coarse = max(8, size_px // 128)
    bends = (
        55 * slow(rng, coarse, 4.0) + 110 * slow(rng, coarse, 12.0) + rng.integers(BANK_PX) for _ in range(2)
    )
    bend_y, bend_x = (upsample(bend, n).round().astype(np.int32) for bend in bends)
    kinds = anatomy.label.astype(np.int32) * BANK_PX**2
    down, right = np.arange(size_px, dtype=np.int32)[:, None], np.arange(size_px, dtype=np.int32)[None]
    grain = at.noise * rng.standard_normal((_STRIP_PX, size_px, 3), dtype=np.float32)
    picture = np.empty((size_px, size_px, 3), np.uint8)
    for top in range(0, size_px, _STRIP_PX):
        rows = slice(top, min(top + _STRIP_PX, size_px))
        y = (_enlarge(bend_y, rows) + down[rows]) & (BANK_PX - 1)
        x = (_enlarge(bend_x, rows) + right) & (BANK_PX - 1)
        code = codes.take(_enlarge(kinds, rows) + y * BANK_PX + x)
        light = table[code] + np.roll(grain, int(rng.integers(size_px)), 1)[: len(code)]
        picture[rows] = np.clip(light, 0, 255)
    if at.ink:
        _mark(rng, picture, at.ink)
    if at.padded:
        left, top, right_px, bottom = (int(size_px * v) for v in rng.uniform(0.015, 0.04, 4))
        scanned = (slice(top, size_px - bottom), slice(left, size_px - right_px))
        inner = picture[scanned].copy()
        picture[:] = 0
        picture[scanned] = inner
    return picture


def _mark(rng: Generator, picture: NDArray[np.uint8], ink: Colour) -> None:
    """A stroke of a felt pen across one corner of the glass, in place."""
    n = len(picture) // 8
    along = np.linspace(0, 1, 24)
    bow = 0.012 * np.sin(along * rng.uniform(4, 9) + rng.uniform(0, 6))
    path = np.stack([0.04 + 0.23 * along + bow, 0.27 - 0.23 * along + bow], 1)
    path = np.where(rng.integers(0, 2, 2), 1 - path, path) * n
    canvas = Image.new("L", (n, n))
    ImageDraw.Draw(canvas).line([(float(x), float(y)) for x, y in path], 235, max(2, n // 40), joint="curve")
    cover = np.asarray(canvas.filter(ImageFilter.GaussianBlur(n / 500)).resize(picture.shape[1::-1]))
    inked = cover > 0
    share = cover[inked][:, None].astype(np.float32) / 255
    picture[inked] = picture[inked] * (1 - share + share * np.asarray(ink, np.float32))
