"""What each tissue of a lymph node looks like: tileable concentrations of haematoxylin and eosin to cut slides from.

Nothing here knows slides, sites or colours. The bank is computed once per process and depends on no seed: slides
differ by where they cut from it, sites by how they stain and scan it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import ceil

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

BANK_PX = 512
"""Side of a texture in pixels of 0.5 µm; a power of two, so that wrapping is a mask."""
_SEED = 4217

Field = NDArray[np.float32]


class Tissue(IntEnum):
    """The kinds of tissue, in the order of the bank."""

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
class Cells:
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
class _Recipe:
    """What a tissue is made of."""

    haematoxylin: float
    """Between the nuclei; likewise eosin."""
    eosin: float
    cells: tuple[Cells, ...] = ()
    fibres: float = 0.0
    """Eosin of wavy fibres that lie across."""
    gap_px: float = 5.0
    """Size of empty spaces, of which there are the fewer, the higher `gap_above`."""
    gap_above: float = 9.0


_LYMPHOCYTE = Cells(14.2, 6.0, 1.15, present=0.93)
_SCATTERED = Cells(18, 6.0, 1.18, present=0.05)
_RECIPES = {
    Tissue.GLASS: _Recipe(0.0, 0.012),
    Tissue.FAT: _Recipe(0.0, 0.01, (Cells(85, 46, 0.0, wall=0.6), Cells(40, 4.2, 0.9, present=0.06))),
    Tissue.STROMA: _Recipe(
        0.06, 0.62, (Cells(30, 4.6, 0.85, aspect=0.6, present=0.4), _SCATTERED), fibres=0.2
    ),
    Tissue.SINUS: _Recipe(
        0.06, 0.3, (Cells(29, 7.4, 0.62, 0.4, present=0.5), _SCATTERED), gap_px=9, gap_above=0.2
    ),
    Tissue.LYMPHOID: _Recipe(0.2, 0.36, (_LYMPHOCYTE,), gap_above=1.1),
    Tissue.PARACORTEX: _Recipe(0.2, 0.42, (Cells(16, 6.0, 1.15, present=0.8),), gap_above=1.1),
    Tissue.GERMINAL: _Recipe(0.2, 0.34, (Cells(18.5, 7.2, 0.74, 0.38, present=0.9), _SCATTERED)),
    Tissue.TUMOUR_SOLID: _Recipe(
        0.14, 0.5, (Cells(28, 9.6, 0.95, 0.36, aspect=0.2), _SCATTERED), fibres=0.04
    ),
    Tissue.TUMOUR_GLANDULAR: _Recipe(
        0.14, 0.5, (Cells(27, 9.4, 0.98, 0.32, aspect=0.3), _SCATTERED), gap_px=21, gap_above=1.5
    ),
}


def noise(rng: Generator, sigma: float | tuple[float, float]) -> Field:
    """[BANK_PX, BANK_PX] smooth tileable noise of variance 1, correlation length `sigma` pixels (y, x)."""
    white = rng.standard_normal((BANK_PX, BANK_PX), dtype=np.float32)
    field = gaussian_filter(white, sigma, mode="wrap", truncate=3.0)
    return np.asarray(field / field.std(), np.float32)


def _distance(rng: Generator, cells: Cells) -> Field:
    """[BANK_PX, BANK_PX] how far the nearest nucleus is, in its own radii: 0 in the middle, 1 on the outline."""
    n = 2 * round(BANK_PX / cells.pitch / 2)
    row, column = np.mgrid[:n, :n].reshape(2, -1)
    places = np.stack([row, column + 0.5 * (row % 2)]) + rng.normal(0.5, 0.15, (2, n * n))
    places = places[:, rng.random(n * n) < cells.present] * (BANK_PX / n)
    angle = rng.uniform(0, np.pi, (places.shape[1], 1, 1))
    stretch = np.exp(rng.normal(cells.aspect / 2, cells.aspect, angle.shape))
    radius = cells.radius * np.exp(rng.normal(0, 0.1, angle.shape))
    reach = ceil(1.5 * cells.radius)
    y, x = np.round(places)[..., None, None] + np.mgrid[-reach : reach + 1, -reach : reach + 1][:, None]
    dy, dx = y - places[0][:, None, None], x - places[1][:, None, None]
    along, across = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
    far = np.hypot(along / stretch, across * stretch) / radius
    nearest = np.full((BANK_PX, BANK_PX), 9, np.float32)
    np.minimum.at(nearest, (y.astype(int) % BANK_PX, x.astype(int) % BANK_PX), far.astype(np.float32))
    return nearest


def _stamp(rng: Generator, h: Field, e: Field, cells: Cells) -> None:
    """Paint one population of cells over the concentrations of haematoxylin `h` and eosin `e`, in place."""
    far = _distance(rng, cells) * (1 + 0.07 * noise(rng, cells.radius * 0.45))
    inside = np.clip((1 - far) * cells.radius * 0.8 + 0.5, 0, 1)
    rim = np.exp(-(((far - 0.9) / 0.16) ** 2))
    chromatin = 1 + 0.2 * noise(rng, 1.2) + 0.1 * noise(rng, 2 * cells.radius)
    tone = cells.stain * ((1 - cells.vesicle) * chromatin + cells.vesicle * rim)
    h += inside * (np.clip(tone, 0, 2.4) - h)
    e += inside * (0.35 * cells.stain - e) * 0.6
    e += cells.wall * np.exp(-(((far - 1) * cells.radius / 1.8) ** 2))


def _texture(kind: Tissue) -> tuple[Field, Field]:
    """Concentrations of (haematoxylin, eosin) in one tissue."""
    rng, made_of = np.random.default_rng([_SEED, int(kind)]), _RECIPES[kind]
    space = np.clip((made_of.gap_above - noise(rng, made_of.gap_px)) * 5, 0, 1)
    fibre = noise(rng, (1.2, 14)) + 0.8 * noise(rng, (4.5, 34))
    e = space * np.clip(made_of.eosin * (1 + 0.2 * noise(rng, 7)) + made_of.fibres * fibre, 0, 1.3)
    h = space * made_of.haematoxylin
    for cells in made_of.cells:
        _stamp(rng, h, e, cells)
    return h, e


@cache
def bank() -> tuple[Field, Field]:
    """[len(Tissue), BANK_PX, BANK_PX] haematoxylin and eosin of all tissues, the same in every process."""
    h, e = zip(*map(_texture, Tissue), strict=True)
    return np.stack(h), np.stack(e)
