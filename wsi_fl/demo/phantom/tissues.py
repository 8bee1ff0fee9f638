"""What each tissue of a lymph node looks like: tileable concentrations of haematoxylin and eosin to cut slides from.

Nothing here knows slides, sites or colours. The bank is computed once per process and depends on no seed: slides
differ by where they cut from it, sites by how they stain and scan it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, partial

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from wsi_fl.demo.phantom.cells import Field, Lattice, Nuclei, bend, lattice, noise, stamp

_SEED = 4217
_PACKING_PX = 13.6  # between packed lymphocytes: 6.8 µm

Stains = tuple[Field, Field]
"""Concentrations of (haematoxylin, eosin)."""


class Tissue(IntEnum):
    """The kinds of tissue, in the order of the bank."""

    GLASS = 0
    FAT = 1
    STROMA = 2  # fibres lie across, along x
    STROMA_UPRIGHT = 3
    SINUS = 4
    LYMPHOID = 5
    PARACORTEX = 6
    GERMINAL = 7
    BLOOD = 8
    TUMOUR_SOLID = 9
    TUMOUR_GLANDULAR = 10
    TUMOUR_DISCOHESIVE = 11


_LYMPHOCYTE = Nuclei(6.0, 0.1, stain=1.18, vesicle=0.22, clumps=0.24, present=0.97, clustered=0.02)
_SCATTERED = replace(_LYMPHOCYTE, vesicle=0.1, present=0.03, clustered=0.035)
_IMMUNOBLAST = Nuclei(
    8.2,
    0.12,
    0.22,
    stain=0.6,
    vesicle=0.42,
    nucleolus=0.3,
    clustered=0.05,
    present=0.05,
    body=0.4,
    reach=1.45,
)
_HISTIOCYTE = Nuclei(
    7.4, 0.14, 0.2, stain=0.62, vesicle=0.4, nucleolus=0.25, clustered=0.22, present=0.55, body=0.5, reach=1.8
)
_CENTROBLAST = Nuclei(7.2, 0.16, 0.18, 0.09, stain=0.74, vesicle=0.38, nucleolus=0.35, present=0.9)
_TINGIBLE_BODY = Nuclei(10.0, stain=0.42, vesicle=0.5, present=0.16, body=0.12, reach=1.7)
_FIBROCYTE = Nuclei(4.6, 0.15, 0.6, stain=0.85, vesicle=0.1, present=0.5, clustered=0.12, angle=0.0)
_ADIPOCYTE = Nuclei(4.2, aspect=0.45, stain=0.95, present=0.5)
_CARCINOMA = {
    Tissue.TUMOUR_SOLID: Nuclei(9.6, 0.17, 0.2, 0.12, stain=0.72, vesicle=0.45, nucleolus=0.6),
    Tissue.TUMOUR_GLANDULAR: Nuclei(
        8.4, 0.16, 0.3, 0.12, stain=0.86, vesicle=0.32, clumps=0.26, nucleolus=0.3, present=0.93
    ),
    Tissue.TUMOUR_DISCOHESIVE: Nuclei(
        9.0, 0.26, 0.22, 0.17, stain=0.98, vesicle=0.25, clumps=0.32, nucleolus=0.3, present=0.72
    ),
}


def _fibres(rng: Generator, upright: bool = False) -> tuple[Field, Field, Field]:
    """Wavy fibre noise and the warp (y, x) that made it, so that nuclei can follow."""
    sway_y, sway_x = (30 * noise(rng, 60.0) + 4 * noise(rng, 15.0) for _ in range(2))
    thin, thick = ((13.0, 1.1), (34.0, 4.5)) if upright else ((1.1, 13.0), (4.5, 34.0))
    straight = noise(rng, thin) + 0.8 * noise(rng, thick) + 0.3 * noise(rng, 1.2)
    return bend(straight, sway_y, sway_x), sway_y, sway_x


def _glass(rng: Generator, small: Lattice) -> Stains:
    """Nothing but a little dust."""
    dust = np.clip(noise(rng, 2.2) - 3.9, 0, 1)
    return 0.1 * dust, 0.012 + 0.25 * dust


def _stroma(rng: Generator, small: Lattice) -> Stains:
    """Collagen: pink wavy fibres across, clefts, spindle nuclei along them."""
    fibre, sway_y, sway_x = _fibres(rng)
    e = np.clip(0.62 + 0.2 * fibre + 0.1 * noise(rng, 30.0), 0.02, 1.3)
    h = np.full_like(e, 0.06)
    stamp(rng, h, e.copy(), lattice(rng, 34), _FIBROCYTE)
    h = bend(h, sway_y, sway_x)
    stamp(rng, h, e, small, _SCATTERED)
    return h, e


def _stroma_upright(rng: Generator, small: Lattice) -> Stains:
    h, e = _stroma(rng, small)
    return h.T, e.T


def _fat(rng: Generator, small: Lattice) -> Stains:
    """Adipocytes: empty vacuoles, thin membranes, a nucleus pressed into a corner here and there."""
    cells = lattice(rng, 92, jitter=0.28, warp_px=12)
    wall = np.exp(-((cells.edge / (2.2 + 0.8 * noise(rng, 25.0))) ** 2))
    corner = np.exp(-((cells.edge / 7.0) ** 2)) * np.clip(noise(rng, 9.0) - 1.1, 0, 1)
    e = 0.5 * wall * np.clip(1 + 0.3 * noise(rng, 6.0), 0.3, 2) + 0.5 * corner + 0.01
    nuclei = np.zeros_like(e)
    stamp(rng, nuclei, e.copy(), small, _ADIPOCYTE)
    return np.maximum(0.06 * wall, nuclei * (3 * corner + 0.25 * wall > 0.24)), e


def _sinus(rng: Generator, small: Lattice) -> Stains:
    """Medullary sinus: pale spaces, reticulum, histiocytes with pink bodies, scattered lymphocytes."""
    net = np.exp(-((noise(rng, 9.0) / 0.22) ** 2))
    h, e = 0.08 * net, np.clip(0.13 + 0.25 * net + 0.1 * noise(rng, 20.0), 0.0, 1)
    stamp(rng, h, e, lattice(rng, 29), _HISTIOCYTE)
    stamp(rng, h, e, small, replace(_SCATTERED, present=0.26, clustered=0.15))
    return h, e


def _lymphoid(rng: Generator, small: Lattice, loose: bool) -> Stains:
    """Small dark round nuclei, packed or (in the paracortex) looser; white gaps; a few pale larger cells."""
    cells = lattice(rng, 16.0) if loose else small
    slack = np.clip(0.35 + 0.6 * noise(rng, 5.0) + 0.35 * noise(rng, 40.0), 0, 1)
    gap = np.clip(1.25 - cells.edge / 3.4, 0, 1) * slack
    e = np.clip((0.42 if loose else 0.36) + 0.1 * noise(rng, 8.0), 0, 1) * (1 - 0.75 * gap)
    h = 0.2 * (1 - gap)
    stamp(rng, h, e, cells, replace(_LYMPHOCYTE, present=0.86, clustered=0.08) if loose else _LYMPHOCYTE)
    stamp(rng, h, e, lattice(rng, 31), replace(_IMMUNOBLAST, present=0.2) if loose else _IMMUNOBLAST)
    fibre, _, _ = _fibres(rng)
    strand = np.clip((fibre - (1.9 if loose else 2.6)) * 1.5, 0, 1)
    return h * (1 - 0.8 * strand), e + strand * (0.8 - e)


def _germinal(rng: Generator, small: Lattice) -> Stains:
    """Germinal centre: larger, paler nuclei, macrophages with cell debris."""
    e = np.clip(0.36 + 0.08 * noise(rng, 7.0), 0, 1)
    h = np.clip(0.2 + 0.05 * noise(rng, 4.0), 0, 1)
    stamp(rng, h, e, lattice(rng, 18.5), _CENTROBLAST)
    stamp(rng, h, e, lattice(rng, 46), _TINGIBLE_BODY)
    stamp(rng, h, e, small, replace(_SCATTERED, present=0.09))
    return h, e


def _blood(rng: Generator, small: Lattice) -> Stains:
    """Red cells in a vessel: small bright eosin discs without nuclei."""
    far = np.hypot(small.dx, small.dy) * (1 + 0.08 * noise(rng, 5.0))
    disc = np.clip((6.6 - far) * 0.7, 0, 1) * (1 - 0.25 * np.exp(-((far / 2.5) ** 2)))
    disc = disc * (rng.random(small.n) < 0.93)[small.site]
    return np.full_like(disc, 0.02), 0.12 + disc * (1 + 0.1 * noise(rng, 8.0))


def _tumour(rng: Generator, small: Lattice, kind: Tissue) -> Stains:
    """Carcinoma: large, pale, irregular nuclei far apart, pink cytoplasm, septa, a few lymphocytes."""
    solid = kind is Tissue.TUMOUR_SOLID
    cells = lattice(rng, 28.0 if solid else 25.0, jitter=0.24)
    border = np.exp(-((cells.edge / 2.2) ** 2)) * np.clip(0.4 + 0.6 * noise(rng, 7.0), 0, 1)
    e = np.clip(0.5 + 0.1 * noise(rng, 5.0) + 0.08 * noise(rng, 24.0) - 0.22 * border, 0.05, 1.2)
    h = np.clip(0.17 + 0.04 * noise(rng, 3.0) - 0.1 * border, 0.0, 1)
    stamp(rng, h, e, cells, _CARCINOMA[kind])
    if kind is Tissue.TUMOUR_GLANDULAR:
        lumen = np.clip((noise(rng, 21.0) - 1.35) * 6, 0, 1)
        h, e = h * (1 - lumen), e * (1 - 0.93 * lumen)
    fibre, _, _ = _fibres(rng, upright=not solid)
    septum = np.clip((0.16 - np.abs(noise(rng, 40.0)) + 0.13 * noise(rng, 55.0)) * 9, 0, 1)
    h = h + septum * (0.06 - h)
    e = e + septum * (np.clip(0.6 + 0.2 * fibre, 0.05, 1.3) - e)
    if kind is Tissue.TUMOUR_DISCOHESIVE:
        e = e * np.clip(1.25 - 0.5 * np.clip(noise(rng, 11.0), 0, 2), 0.15, 1)
    stamp(rng, h, e, small, _SCATTERED)
    return h, e


_RECIPES: dict[Tissue, Callable[[Generator, Lattice], Stains]] = {
    Tissue.GLASS: _glass,
    Tissue.FAT: _fat,
    Tissue.STROMA: _stroma,
    Tissue.STROMA_UPRIGHT: _stroma_upright,
    Tissue.SINUS: _sinus,
    Tissue.LYMPHOID: partial(_lymphoid, loose=False),
    Tissue.PARACORTEX: partial(_lymphoid, loose=True),
    Tissue.GERMINAL: _germinal,
    Tissue.BLOOD: _blood,
    Tissue.TUMOUR_SOLID: partial(_tumour, kind=Tissue.TUMOUR_SOLID),
    Tissue.TUMOUR_GLANDULAR: partial(_tumour, kind=Tissue.TUMOUR_GLANDULAR),
    Tissue.TUMOUR_DISCOHESIVE: partial(_tumour, kind=Tissue.TUMOUR_DISCOHESIVE),
}
"""Each paints its tissue from random numbers and a lattice of small cells."""


def _texture(kind: Tissue, packing: Lattice) -> Stains:
    rng = np.random.default_rng([_SEED, int(kind)])
    # Borders between tissues follow the packed lymphocytes, so only these must lie exactly on the packing.
    h, e = _RECIPES[kind](rng, packing if kind is Tissue.LYMPHOID else packing.moved(rng))
    return np.asarray(h, np.float32), np.asarray(e, np.float32)


@dataclass(frozen=True)
class Bank:
    """Concentrations of every tissue, and the outlines of single lymphocytes."""

    haematoxylin: Field
    """[len(Tissue), BANK_PX, BANK_PX]"""
    eosin: Field
    to_centre: NDArray[np.int32]
    """[2, BANK_PX, BANK_PX] (y, x) pixels to the middle of the lymphocyte at a pixel: borders follow whole cells."""


@cache
def bank() -> Bank:
    """The textures of all tissues, the same in every process."""
    packing = lattice(np.random.default_rng(_SEED), _PACKING_PX)
    with ThreadPoolExecutor(2) as pool:
        pairs = list(pool.map(lambda kind: _texture(kind, packing), Tissue))
    centre = -np.stack([packing.dy, packing.dx]).round().astype(np.int32)
    return Bank(np.stack([h for h, _ in pairs]), np.stack([e for _, e in pairs]), centre)
