"""Painting one slide: cutting its tissues out of the bank, staining them as a hospital does, scanning them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from scipy.ndimage import gaussian_filter

from wsi_fl.demo.phantom.anatomy import LABEL_PX, Anatomy, slow, upsample
from wsi_fl.demo.phantom.cells import BANK_PX
from wsi_fl.demo.phantom.tissues import Tissue, bank

_STRIP_PX = 256
_CODE = 100.0  # concentrations travel as uint8: 0 to 2.55

_Number = TypeVar("_Number", np.int32, np.float32)


@dataclass(frozen=True)
class Hospital:
    """How one imaginary hospital stains and scans."""

    haematoxylin: tuple[float, float, float]
    """Optical density of unit concentration in (red, green, blue); likewise eosin."""
    eosin: tuple[float, float, float]
    strength: tuple[float, float]
    """Multiplies the (haematoxylin, eosin) concentrations."""
    white: tuple[float, float, float] = (244.0, 243.0, 244.0)
    blur_px: float = 0.7
    sharpen: float = 0.0
    """Unsharp masking by the scanner."""
    gamma: float = 1.0
    noise: float = 2.0
    """Standard deviation of the sensor's noise in grey levels."""
    banding: float = 0.01
    """Relative brightness difference across one scan line."""
    padded: bool = False
    """Whether black surrounds the scanned rectangle."""
    ink: tuple[float, float, float] | None = None
    """Transmittance of a pen mark on the glass."""


# The stain vectors lie near what Macenko's method finds in the slides of five real hospitals.
_HOSPITALS = (
    Hospital(
        (0.53, 0.74, 0.42), (0.20, 0.83, 0.48), strength=(1.0, 0.62), white=(246, 243, 245), blur_px=0.8
    ),
    Hospital(
        *((0.58, 0.72, 0.42), (0.34, 0.76, 0.47)),
        strength=(1.35, 0.48),
        white=(246, 246, 243),
        blur_px=0.55,
        sharpen=0.5,
        gamma=1.04,
        noise=2.5,
        padded=True,
    ),
    Hospital(
        *((0.64, 0.74, 0.22), (0.24, 0.93, 0.28)),
        strength=(1.08, 0.8),
        white=(236, 228, 242),
        blur_px=1.0,
        gamma=0.96,
        noise=1.5,
        ink=(0.2, 0.62, 0.42),
    ),
    Hospital(
        *((0.54, 0.74, 0.40), (0.16, 0.84, 0.56)),
        strength=(1.75, 0.95),
        white=(250, 242, 240),
        sharpen=0.3,
        noise=3.5,
        banding=0.03,
    ),
    Hospital(
        *((0.67, 0.68, 0.30), (0.20, 0.94, 0.28)),
        strength=(0.82, 0.62),
        white=(242, 238, 245),
        blur_px=1.25,
        gamma=0.92,
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
    return replace(base, haematoxylin=tuple(h), eosin=tuple(e), strength=tuple(strength),
                   gamma=base.gamma * rng.uniform(0.94, 1.06))  # fmt: skip


_SCAN_ONCE = Lock()  # threads that begin with a new scanner wait for the first of them


@lru_cache(maxsize=8)
def as_scanned(at: Hospital) -> NDArray[np.uint16]:
    """[len(Tissue) · BANK_PX²] the bank as one scanner resolves it, (haematoxylin << 8 | eosin) in codes."""
    codes = []
    for field in (bank().haematoxylin, bank().eosin):
        sharp = np.empty_like(field)
        for kind, texture in enumerate(field):
            soft = gaussian_filter(texture, at.blur_px, mode="wrap", truncate=3.0)
            halo = gaussian_filter(soft, 2.0, mode="wrap", truncate=2.5) if at.sharpen else soft
            sharp[kind] = soft + at.sharpen * (soft - halo)
        codes.append(np.clip(sharp * _CODE, 0, 255).round().astype(np.uint16))
    return np.asarray((codes[0] << 8 | codes[1]).ravel())


def beer_lambert(at: Hospital, batch: NDArray[np.float64]) -> NDArray[np.float32]:
    """[65536, 3] the colour of every (haematoxylin << 8 | eosin) code: white · exp(-concentration · density)^gamma.

    `batch` [2] multiplies the hospital's usual strength of (haematoxylin, eosin).
    """
    grey = np.arange(256) / _CODE
    h = np.exp(-grey[:, None] * np.asarray(at.haematoxylin) * at.strength[0] * batch[0])
    e = np.exp(-grey[:, None] * np.asarray(at.eosin) * at.strength[1] * batch[1])
    light = (h[:, None] * e[None]).reshape(-1, 3) ** at.gamma
    return np.asarray(light * np.asarray(at.white), np.float32)


@dataclass(frozen=True)
class _Cut:
    """Where in the bank the pixels of a slide come from: bent, turned and flipped, so that no two slides repeat."""

    y: NDArray[np.int32]
    """[n, n] bank row minus slide row of every LABEL_PX square; likewise x."""
    x: NDArray[np.int32]
    sign: tuple[int, int]
    swap: bool

    @staticmethod
    def draw(rng: Generator, size_px: int) -> _Cut:
        """A random cut for one slide."""
        n = max(8, size_px // 128)
        bends = [55 * slow(rng, n, 4.0) + 110 * slow(rng, n, 12.0) + rng.integers(BANK_PX) for _ in range(2)]
        y, x = (upsample(b, size_px // LABEL_PX).round().astype(np.int32) for b in bends)
        flips = rng.integers(0, 2, 3)
        return _Cut(y, x, (1 - 2 * int(flips[0]), 1 - 2 * int(flips[1])), bool(flips[2]))

    def strip(self, rows: slice) -> NDArray[np.int32]:
        """[h, w] flat bank position of the level-0 pixels in `rows`, whose bounds are multiples of LABEL_PX."""
        down, right = _rulers(rows, len(self.x) * LABEL_PX)
        y = (_enlarge(self.y, rows) + self.sign[0] * down) & (BANK_PX - 1)
        x = (_enlarge(self.x, rows) + self.sign[1] * right) & (BANK_PX - 1)
        return x * BANK_PX + y if self.swap else y * BANK_PX + x


def _rulers(rows: slice, width: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[h, 1] and [1, width] the level-0 y and x of a strip."""
    return np.arange(rows.start, rows.stop, dtype=np.int32)[:, None], np.arange(width, dtype=np.int32)[None]


def _enlarge(squares: NDArray[_Number], rows: slice) -> NDArray[_Number]:
    """The level-0 pixels in `rows` of an array with one value per LABEL_PX square."""
    part = squares[rows.start // LABEL_PX : rows.stop // LABEL_PX]
    return np.repeat(np.repeat(part, LABEL_PX, 0), LABEL_PX, 1)


def _tissue_of(
    label: NDArray[np.uint8], cut: _Cut, rows: slice, where: NDArray[np.int32]
) -> NDArray[np.int32]:
    """[h, w] the Tissue of each pixel: that of its lymphocyte's middle, so that borders cut no cell in two.

    The outer edge has no cells to spare: there a pixel keeps its own tissue, but for a little fraying.
    """
    n = len(label)
    to_y, to_x = (v.ravel().take(where) for v in (bank().to_centre[::-1] if cut.swap else bank().to_centre))
    down, right = _rulers(rows, n * LABEL_PX)

    def look(part: int) -> NDArray[np.uint8]:
        y = np.clip((down + cut.sign[0] * to_y // part) // LABEL_PX, 0, n - 1)
        x = np.clip((right + cut.sign[1] * to_x // part) // LABEL_PX, 0, n - 1)
        return np.asarray(label.ravel().take(y * n + x))

    whole, own = look(1), look(5)
    outside = (whole <= Tissue.FAT) | (own <= Tissue.FAT)
    return np.where(outside, own, whole).astype(np.int32)


def paint(rng: Generator, anatomy: Anatomy, at: Hospital) -> NDArray[np.uint8]:
    """[size_px, size_px, 3] the slide as this hospital's scanner sees it."""
    label, size_px = anatomy.label, len(anatomy.label) * LABEL_PX
    table = beer_lambert(at, np.exp(rng.normal(0, 0.08, 2)))
    with _SCAN_ONCE:
        codes = as_scanned(at)
    cut = _Cut.draw(rng, size_px)
    thick = 1 + 0.09 * upsample(slow(rng, max(8, size_px // 128), 3.0), len(label))
    scan = (np.arange(size_px) + rng.integers(1024)) % 1024 / 1024
    gain = (1 + at.banding * (np.sin(np.pi * scan) - 0.64))[:, None].astype(np.float32)
    grain = at.noise * rng.standard_normal((_STRIP_PX, size_px, 3), dtype=np.float32)
    if cut.swap:  # what lies across in the bank then stands upright on the slide
        across, upright = label == Tissue.STROMA, label == Tissue.STROMA_UPRIGHT
        label = np.where(across, Tissue.STROMA_UPRIGHT, np.where(upright, Tissue.STROMA, label))
    picture = np.empty((size_px, size_px, 3), np.uint8)
    for top in range(0, size_px, _STRIP_PX):
        rows = slice(top, min(top + _STRIP_PX, size_px))
        where = cut.strip(rows)
        kind = _tissue_of(label, cut, rows, where)
        code, level = codes.take(kind * BANK_PX**2 + where), _enlarge(thick, rows)
        h, e = (np.minimum(stain * level, 255).astype(np.uint16) for stain in (code >> 8, code & 255))
        light = table[h << 8 | e] * gain + np.roll(grain, int(rng.integers(size_px)), 1)[: len(code)]
        picture[rows] = np.clip(light, 0, 255)
    if at.ink:
        _mark(rng, picture, at.ink)
    if at.padded:
        _pad(rng, picture)
    return picture


def _mark(rng: Generator, picture: NDArray[np.uint8], ink: tuple[float, float, float]) -> None:
    """A stroke of a felt pen across one corner of the glass, in place."""
    n = len(picture) // 8
    along = np.linspace(0, 1, 24)
    bow = 0.012 * np.sin(along * rng.uniform(4, 9) + rng.uniform(0, 6))
    path = np.stack([0.04 + 0.23 * along + bow, 0.27 - 0.23 * along + bow], 1)
    corner = rng.integers(0, 2, 2)
    path = np.where(corner, 1 - path, path) * n
    canvas = Image.new("L", (n, n))
    ImageDraw.Draw(canvas).line([(float(x), float(y)) for x, y in path], 235, max(2, n // 40), joint="curve")
    shade = canvas.filter(ImageFilter.GaussianBlur(n / 500)).resize(
        picture.shape[1::-1], Image.Resampling.BILINEAR
    )
    cover = np.asarray(shade)
    inked = cover > 0
    share = cover[inked][:, None].astype(np.float32) / 255
    picture[inked] = picture[inked] * (1 - share + share * np.asarray(ink, np.float32))


def _pad(rng: Generator, picture: NDArray[np.uint8]) -> None:
    """Black outside the scanned rectangle, in place."""
    left, top, right, bottom = (int(len(picture) * v) for v in rng.uniform(0.015, 0.04, 4))
    picture[:top], picture[len(picture) - bottom :] = 0, 0
    picture[:, :left], picture[:, len(picture) - right :] = 0, 0
