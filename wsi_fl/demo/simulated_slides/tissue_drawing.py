"""Simulation of one lymph node slide: tissues, their places, metastases, stain and scanner.

The textures of tissues, tileable concentrations of haematoxylin and eosin, are computed once per process and depend on
no seed: slides differ by where they cut from this bank, sites by how they stain and scan it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, lru_cache
from math import ceil

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from scipy.ndimage import gaussian_filter

_BANK_PX = 512
"""Side of a texture in pixels of 0.5 µm; a power of two, so that wrapping is a mask."""
_SEED = 4217

_Field = NDArray[np.float32]


class TissueKind(IntEnum):
    """The kinds of tissue, in the order of the texture bank."""

    GLASS = 0
    FAT = 1
    STROMA = 2
    SINUS = 3
    LYMPHOID = 4
    PARACORTEX = 5
    GERMINAL = 6
    TUMOUR_SOLID = 7
    TUMOUR_GLANDULAR = 8


@dataclass(frozen=True)
class _Cells:
    """One population of cells in a tissue; lengths in pixels, stains as concentrations."""

    pitch: float
    """Between neighbours, if every place is taken."""
    radius: float
    """Of the nucleus."""
    stain: float
    """Haematoxylin in the nucleus."""
    vesicle: float = 0.2
    """How much paler than its rim the nucleus is inside."""
    aspect: float = 0.12
    """Sd of log elongation."""
    present: float = 0.95
    """Share of the places that hold a cell."""
    wall: float = 0.0
    """Eosin of the outline."""


@dataclass(frozen=True)
class _StainRecipe:
    haematoxylin: float
    """Between the nuclei; likewise eosin."""
    eosin: float
    cells: tuple[_Cells, ...] = ()
    fibres: float = 0.0
    """Eosin of wavy fibres that lie across."""
    gap_px: float = 5.0
    """Size of empty spaces, of which there are the fewer, the higher `gap_above`."""
    gap_above: float = 9.0


_LYMPHOCYTE = _Cells(14.2, 6.0, 1.15, present=0.93)
_SCATTERED = _Cells(18, 6.0, 1.18, present=0.05)
_RECIPES = {
    TissueKind.GLASS: _StainRecipe(0.0, 0.012),
    TissueKind.FAT: _StainRecipe(0.0, 0.01, (_Cells(85, 46, 0.0, wall=0.6), _Cells(40, 4.2, 0.9, present=0.06))),
    TissueKind.STROMA: _StainRecipe(
        0.06, 0.62, (_Cells(30, 4.6, 0.85, aspect=0.6, present=0.4), _SCATTERED), fibres=0.2
    ),
    TissueKind.SINUS: _StainRecipe(
        0.06, 0.3, (_Cells(29, 7.4, 0.62, 0.4, present=0.5), _SCATTERED), gap_px=9, gap_above=0.2
    ),
    TissueKind.LYMPHOID: _StainRecipe(0.2, 0.36, (_LYMPHOCYTE,), gap_above=1.1),
    TissueKind.PARACORTEX: _StainRecipe(0.2, 0.42, (_Cells(16, 6.0, 1.15, present=0.8),), gap_above=1.1),
    TissueKind.GERMINAL: _StainRecipe(0.2, 0.34, (_Cells(18.5, 7.2, 0.74, 0.38, present=0.9), _SCATTERED)),
    TissueKind.TUMOUR_SOLID: _StainRecipe(
        0.14, 0.5, (_Cells(28, 9.6, 0.95, 0.36, aspect=0.2), _SCATTERED), fibres=0.04
    ),
    TissueKind.TUMOUR_GLANDULAR: _StainRecipe(
        0.14, 0.5, (_Cells(27, 9.4, 0.98, 0.32, aspect=0.3), _SCATTERED), gap_px=21, gap_above=1.5
    ),
}


def _tileable_noise(rng: Generator, sigma: float | tuple[float, float]) -> _Field:
    """Return smooth tileable noise [_BANK_PX, _BANK_PX] of variance 1, correlation length `sigma` pixels (y, x)."""
    white = rng.standard_normal((_BANK_PX, _BANK_PX), dtype=np.float32)
    field = gaussian_filter(white, sigma, mode="wrap", truncate=3.0)
    return np.asarray(field / field.std(), np.float32)


def _nucleus_distance(rng: Generator, cells: _Cells) -> _Field:
    """Return the distance [_BANK_PX, _BANK_PX] to the nearest nucleus in its radii: 0 inside, 1 at the outline."""
    n = 2 * round(_BANK_PX / cells.pitch / 2)
    row, column = np.mgrid[:n, :n].reshape(2, -1)
    places = np.stack([row, column + 0.5 * (row % 2)]) + rng.normal(0.5, 0.15, (2, n * n))
    places = places[:, rng.random(n * n) < cells.present] * (_BANK_PX / n)
    angle = rng.uniform(0, np.pi, (places.shape[1], 1, 1))
    stretch = np.exp(rng.normal(cells.aspect / 2, cells.aspect, angle.shape))
    radius = cells.radius * np.exp(rng.normal(0, 0.1, angle.shape))
    reach = ceil(1.5 * cells.radius)
    y, x = np.round(places)[..., None, None] + np.mgrid[-reach : reach + 1, -reach : reach + 1][:, None]
    dy, dx = y - places[0][:, None, None], x - places[1][:, None, None]
    along, across = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
    distance = np.hypot(along / stretch, across * stretch) / radius
    nearest = np.full((_BANK_PX, _BANK_PX), 9, np.float32)
    np.minimum.at(nearest, (y.astype(int) % _BANK_PX, x.astype(int) % _BANK_PX), distance.astype(np.float32))
    return nearest


def _draw_cells(rng: Generator, h: _Field, e: _Field, cells: _Cells) -> None:
    """Draw one population of cells over the concentrations of haematoxylin `h` and eosin `e`, in place."""
    distance = _nucleus_distance(rng, cells) * (1 + 0.07 * _tileable_noise(rng, cells.radius * 0.45))
    coverage = np.clip((1 - distance) * cells.radius * 0.8 + 0.5, 0, 1)
    rim = np.exp(-(((distance - 0.9) / 0.16) ** 2))
    chromatin = 1 + 0.2 * _tileable_noise(rng, 1.2) + 0.1 * _tileable_noise(rng, 2 * cells.radius)
    tone = cells.stain * ((1 - cells.vesicle) * chromatin + cells.vesicle * rim)
    h += coverage * (np.clip(tone, 0, 2.4) - h)
    e += coverage * (0.35 * cells.stain - e) * 0.6
    e += cells.wall * np.exp(-(((distance - 1) * cells.radius / 1.8) ** 2))


def _build_texture(kind: TissueKind) -> tuple[_Field, _Field]:
    """Return the concentrations of (haematoxylin, eosin) in one tissue."""
    rng, recipe = np.random.default_rng([_SEED, int(kind)]), _RECIPES[kind]
    space = np.clip((recipe.gap_above - _tileable_noise(rng, recipe.gap_px)) * 5, 0, 1)
    fibre = _tileable_noise(rng, (1.2, 14)) + 0.8 * _tileable_noise(rng, (4.5, 34))
    e = space * np.clip(recipe.eosin * (1 + 0.2 * _tileable_noise(rng, 7)) + recipe.fibres * fibre, 0, 1.3)
    h = space * recipe.haematoxylin
    for cells in recipe.cells:
        _draw_cells(rng, h, e, cells)
    return h, e


@cache
def texture_bank() -> tuple[_Field, _Field]:
    """Return haematoxylin and eosin of all tissues, each [kinds, _BANK_PX, _BANK_PX], the same in every process."""
    h, e = zip(*map(_build_texture, TissueKind), strict=True)
    return np.stack(h), np.stack(e)


MPP = 0.5
"""Micrometres per level-0 pixel of every simulated slide."""
COARSE_PX = 16
"""Level-0 pixels between the nodes of the fields of a slide."""
LABEL_PX = 4
"""Side of the squares of a label map, in level-0 pixels."""


@dataclass(frozen=True)
class Anatomy:
    """The places of tissues on one slide; fields have a node every COARSE_PX, at the middle of its square."""

    label: NDArray[np.uint8]
    """[n, n] the Tissue of every LABEL_PX square."""
    tumor: _Field | None
    """[m, m] roughly pixels inside (+) or outside (-) the tumour; None on a negative slide."""


def _smooth_noise(rng: Generator, n: int, sigma: float) -> _Field:
    """Return smooth noise [n, n] of variance 1, correlation length `sigma` nodes."""
    pad = int(4 * sigma)
    field = gaussian_filter(rng.standard_normal((n + 2 * pad, n + 2 * pad)), sigma)
    return np.asarray(field[pad : pad + n, pad : pad + n] / field.std(), np.float32)


def _upsample_field(field: _Field, size_px: int) -> _Field:
    """Return a square field at [size_px, size_px], linear between its nodes."""
    image = Image.fromarray(np.asarray(field, np.float32))
    return np.asarray(image.resize((size_px, size_px), Image.Resampling.BILINEAR))


def _draw_ellipse(rng: Generator, n: int, centre: tuple[float, float], axes: tuple[float, float]) -> _Field:
    """Return the distance [n, n] in nodes inside a randomly turned ellipse; lengths as shares of the side."""
    y, x = (np.mgrid[:n, :n] + 0.5) / n
    dy, dx, angle = y - centre[0], x - centre[1], rng.uniform(0, np.pi)
    u, v = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
    return np.asarray((1 - np.hypot(u / axes[0], v / axes[1])) * min(axes) * n, np.float32)


def _draw_node(rng: Generator, n: int) -> _Field:
    """Return an irregular bean of tissue, in nodes inside (+) or outside (-)."""
    centre = (rng.uniform(0.48, 0.52), rng.uniform(0.48, 0.52))
    bean = _draw_ellipse(rng, n, centre, (rng.uniform(0.4, 0.43), rng.uniform(0.335, 0.38)))
    bean += n * (0.018 * _smooth_noise(rng, n, n / 14) + 0.004 * _smooth_noise(rng, n, n / 50))
    turn = rng.uniform(0, 2 * np.pi)
    dent = (centre[0] + 0.42 * np.sin(turn), centre[1] + 0.42 * np.cos(turn))
    return np.minimum(bean, -_draw_ellipse(rng, n, dent, (0.11, 0.07)))


def _draw_tumor(rng: Generator, node: _Field) -> _Field:
    """Return one large tumour island with a hole and a few small ones inside the node, in level-0 pixels."""
    n = len(node)

    def draw_island(where: NDArray[np.bool_], size: float) -> _Field:
        y, x = (rng.choice(np.argwhere(where)) + 0.5) / n
        return _draw_ellipse(rng, n, (y, x), (size * rng.uniform(1.0, 1.2), size * rng.uniform(0.8, 1.0)))

    field = draw_island(node > 0.17 * n, rng.uniform(0.215, 0.245))
    for size in rng.uniform(0.03, 0.07, rng.integers(1, 4)):
        field = np.maximum(field, draw_island(node > (size + 0.02) * n, size))
    field += n * (0.013 * _smooth_noise(rng, n, n / 26) + 0.004 * _smooth_noise(rng, n, n / 80))
    field = np.minimum(field, -draw_island(field > min(0.08 * n, field.max() / 2), rng.uniform(0.028, 0.045)))
    field = np.minimum(field, node - 0.012 * n)
    field[[0, -1]], field[:, [0, -1]] = -n, -n  # so that every outline closes
    return np.asarray(field * COARSE_PX, np.float32)


def _draw_healthy_labels(rng: Generator, node: _Field) -> NDArray[np.uint8]:
    """Return capsule, lymphoid tissue, germinal centres, sinuses, strands, and fat around, per LABEL_PX square."""
    n = len(node)
    fine, width_um = n * COARSE_PX // LABEL_PX, n * COARSE_PX * MPP
    depth_um = _upsample_field(node, fine) * (COARSE_PX * MPP)
    rim_noise, fat, strands, follicles = (
        _upsample_field(_smooth_noise(rng, n, s), fine) for s in (n / 12, n / 9, 9.0, n / 26)
    )
    in_node, is_deep = depth_um > 12 + 6 * rim_noise, depth_um > 0.1 * width_um
    label = np.full((fine, fine), TissueKind.GLASS, np.uint8)
    label[depth_um > -0.06 * width_um * np.clip(fat, 0, 2)] = TissueKind.FAT
    label[depth_um > -6 - 8 * np.clip(rim_noise, 0, 2)] = TissueKind.STROMA
    label[in_node] = np.where(rim_noise > 0.15, TissueKind.LYMPHOID, TissueKind.PARACORTEX)[in_node]
    label[(in_node & (depth_um < 22 + 6 * rim_noise)) | (is_deep & (np.abs(strands) < 0.16))] = TissueKind.SINUS
    label[is_deep & (np.abs(strands) < 0.05)] = TissueKind.STROMA
    label[(depth_um > 40) & (depth_um < 0.2 * width_um) & (follicles > 1)] = TissueKind.GERMINAL
    return label


def draw_anatomy(rng: Generator, size_px: int, positive: bool) -> Anatomy:
    """Simulate one section of a lymph node, with tumour or without.

    `size_px` is a multiple of COARSE_PX.
    """
    node = _draw_node(rng, size_px // COARSE_PX)
    label = _draw_healthy_labels(rng, node)
    tumor = _draw_tumor(rng, node) if positive else None
    if tumor is not None:
        label[_upsample_field(tumor, len(label)) > 0] = rng.choice(
            [TissueKind.TUMOUR_SOLID, TissueKind.TUMOUR_GLANDULAR]
        )
    return Anatomy(label, tumor)


def tumor_mask(anatomy: Anatomy) -> NDArray[np.bool_]:
    """Return the tumour mask [size_px, size_px] in level-0 pixels; drawn tissue follows it in squares of LABEL_PX."""
    size_px = len(anatomy.label) * LABEL_PX
    if anatomy.tumor is None:
        return np.zeros((size_px, size_px), np.bool_)
    return _upsample_field(anatomy.tumor, size_px) > 0


_STRIP_PX = 256
_CODE = 100.0  # concentrations travel as uint8: 0 to 2.55

_Color = tuple[float, float, float]
"""(red, green, blue)."""


@dataclass(frozen=True)
class _ScannerProfile:
    """The stain and scanner of one simulated hospital."""

    haematoxylin: _Color
    """Optical density of unit concentration; likewise eosin."""
    eosin: _Color
    strength: tuple[float, float]
    """Multiplies the (haematoxylin, eosin) concentrations."""
    white: _Color
    blur_px: float
    noise: float
    """Standard deviation of the sensor's noise in grey levels."""
    padded: bool = False
    """Whether black surrounds the scanned rectangle."""
    ink: _Color | None = None
    """Transmittance of a pen mark on the glass."""


# The stain vectors lie near what Macenko's method finds in the slides of five real hospitals.
_PROFILES = (
    _ScannerProfile((0.53, 0.74, 0.42), (0.20, 0.83, 0.48), (1.0, 0.62), (246, 243, 245), 0.8, 2.0),
    _ScannerProfile((0.58, 0.72, 0.42), (0.34, 0.76, 0.47), (1.4, 0.5), (246, 246, 243), 0.55, 2.5, padded=True),
    _ScannerProfile(
        (0.64, 0.74, 0.22), (0.24, 0.93, 0.28), (1.04, 0.77), (236, 228, 242), 1.0, 1.5, ink=(0.2, 0.62, 0.42)
    ),
    _ScannerProfile((0.54, 0.74, 0.40), (0.16, 0.84, 0.56), (1.75, 0.95), (250, 242, 240), 0.6, 3.5),
    _ScannerProfile(
        (0.67, 0.68, 0.30), (0.20, 0.94, 0.28), (0.75, 0.57), (242, 238, 245), 1.25, 2.0, ink=(0.22, 0.35, 0.75)
    ),
)


def scanner_profile(site: int) -> _ScannerProfile:
    """Return the stain and scanner of a site; beyond the fifth, the five again with other strengths and colours."""
    base = _PROFILES[site % len(_PROFILES)]
    if site < len(_PROFILES):
        return base
    rng = np.random.default_rng([77, site])
    h, e = (np.asarray(v) * rng.normal(1, 0.08, 3) for v in (base.haematoxylin, base.eosin))
    strength = np.asarray(base.strength) * rng.uniform(0.8, 1.25, 2)
    return replace(base, haematoxylin=tuple(h), eosin=tuple(e), strength=tuple(strength))


@lru_cache(maxsize=8)
def _blur_bank(blur_px: float) -> NDArray[np.uint16]:
    """Return the bank [kinds · BANK_PX²] at one scanner's resolution, in codes (haematoxylin << 8 | eosin)."""
    soft = (gaussian_filter(field, (0, blur_px, blur_px), mode="wrap", truncate=3.0) for field in texture_bank())
    h, e = (np.clip(field * _CODE, 0, 255).round().astype(np.uint16) for field in soft)
    return np.asarray((h << 8 | e).ravel())


def _compute_colors(profile: _ScannerProfile, batch: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the colour [65536, 3] of every (haematoxylin << 8 | eosin) code: white · exp(-concentration · density).

    `batch` [2] multiplies the hospital's usual strength of (haematoxylin, eosin).
    """
    grey = np.arange(256)[:, None] / _CODE
    h = np.exp(-grey * np.asarray(profile.haematoxylin) * profile.strength[0] * batch[0])
    e = np.exp(-grey * np.asarray(profile.eosin) * profile.strength[1] * batch[1])
    return np.asarray((h[:, None] * e[None]).reshape(-1, 3) * np.asarray(profile.white), np.float32)


def _enlarge_rows(squares: NDArray[np.int32], rows: slice) -> NDArray[np.int32]:
    """Return the level-0 pixels in `rows` of an array with one value per LABEL_PX square."""
    part = squares[rows.start // LABEL_PX : rows.stop // LABEL_PX]
    return np.repeat(np.repeat(part, LABEL_PX, 0), LABEL_PX, 1)


def draw_picture(rng: Generator, anatomy: Anatomy, profile: _ScannerProfile) -> NDArray[np.uint8]:
    """Return the pixels [size_px, size_px, 3] of a slide with a hospital's stain and scanner."""
    n = len(anatomy.label)
    size_px = n * LABEL_PX
    table = _compute_colors(profile, np.exp(rng.normal(0, 0.08, 2)))
    codes = _blur_bank(profile.blur_px)
    # Where in the bank the pixels come from, bent so that no two slides repeat: bank row and column minus the slide's.
    coarse = max(8, size_px // 128)
    bends = (
        55 * _smooth_noise(rng, coarse, 4.0) + 110 * _smooth_noise(rng, coarse, 12.0) + rng.integers(_BANK_PX)
        for _ in range(2)
    )
    bend_y, bend_x = (_upsample_field(bend, n).round().astype(np.int32) for bend in bends)
    kinds = anatomy.label.astype(np.int32) * _BANK_PX**2
    row_index, column_index = (np.arange(size_px, dtype=np.int32)[:, None], np.arange(size_px, dtype=np.int32)[None])
    grain = profile.noise * rng.standard_normal((_STRIP_PX, size_px, 3), dtype=np.float32)
    picture = np.empty((size_px, size_px, 3), np.uint8)
    for first_row in range(0, size_px, _STRIP_PX):
        rows = slice(first_row, min(first_row + _STRIP_PX, size_px))
        y = (_enlarge_rows(bend_y, rows) + row_index[rows]) & (_BANK_PX - 1)
        x = (_enlarge_rows(bend_x, rows) + column_index) & (_BANK_PX - 1)
        code = codes.take(_enlarge_rows(kinds, rows) + y * _BANK_PX + x)
        light = table[code] + np.roll(grain, int(rng.integers(size_px)), 1)[: len(code)]
        picture[rows] = np.clip(light, 0, 255)
    if profile.ink:
        _draw_pen_mark(rng, picture, profile.ink)
    if profile.padded:
        left_px, first_row, right_px, bottom = (int(size_px * v) for v in rng.uniform(0.015, 0.04, 4))
        inner_area = (slice(first_row, size_px - bottom), slice(left_px, size_px - right_px))
        inner = picture[inner_area].copy()
        picture[:] = 0
        picture[inner_area] = inner
    return picture


def _draw_pen_mark(rng: Generator, picture: NDArray[np.uint8], ink: _Color) -> None:
    """Draw a stroke of a felt pen across one corner of the glass, in place."""
    n = len(picture) // 8
    position = np.linspace(0, 1, 24)
    bow = 0.012 * np.sin(position * rng.uniform(4, 9) + rng.uniform(0, 6))
    path = np.stack([0.04 + 0.23 * position + bow, 0.27 - 0.23 * position + bow], 1)
    path = np.where(rng.integers(0, 2, 2), 1 - path, path) * n
    canvas = Image.new("L", (n, n))
    ImageDraw.Draw(canvas).line([(float(x), float(y)) for x, y in path], 235, max(2, n // 40), joint="curve")
    cover = np.asarray(canvas.filter(ImageFilter.GaussianBlur(n / 500)).resize(picture.shape[1::-1]))
    is_inked = cover > 0
    share = cover[is_inked][:, None].astype(np.float32) / 255
    picture[is_inked] = picture[is_inked] * (1 - share + share * np.asarray(ink, np.float32))
