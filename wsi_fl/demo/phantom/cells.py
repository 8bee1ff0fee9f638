"""Tileable fields of single cells: random textures, lattices of cells, and nuclei stamped onto them.

Everything is [BANK_PX, BANK_PX] and wraps around. Lengths are pixels of 0.5 µm, stains are concentrations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.fft import irfft2
from scipy.ndimage import map_coordinates

BANK_PX = 1024
"""Side of a texture; a power of two, so that wrapping is a mask."""

Field = NDArray[np.float32]


@dataclass(frozen=True)
class Lattice:
    """For every pixel, the jittered lattice site it belongs to."""

    site: NDArray[np.int32]
    """[h, w] number of the nearest site."""
    dx: Field
    """[h, w] pixels from the nearest site, x."""
    dy: Field
    edge: Field
    """[h, w] how much farther the second nearest site is: 0 on the border between two sites."""
    n: int
    """Number of sites."""

    def moved(self, rng: Generator) -> Lattice:
        """The same sites somewhere else, a cheap stand-in for another lattice of this pitch."""
        by = tuple(int(v) for v in rng.integers(0, BANK_PX, 2))
        dx, dy, edge = (np.roll(v, by, (0, 1)) for v in (self.dx, self.dy, self.edge))
        return Lattice(np.roll(self.site, by, (0, 1)), dx, dy, edge, self.n)


@dataclass(frozen=True)
class Nuclei:
    """One population of cells."""

    radius: float
    spread: float = 0.08
    """Relative sd of the radius from cell to cell."""
    aspect: float = 0.12
    """Sd of log elongation."""
    ragged: float = 0.06
    """Relative irregularity of the outline."""
    stain: float = 1.0
    """Haematoxylin in a solid nucleus."""
    vesicle: float = 0.2
    """How much paler than its rim the nucleus is inside."""
    clumps: float = 0.2
    """Relative sd of the chromatin."""
    nucleolus: float = 0.0
    """Share of cells with a nucleolus."""
    present: float = 0.95
    """Share of the lattice sites that hold a cell."""
    clustered: float = 0.0
    """How much `present` follows a slow random field instead of chance alone."""
    body: float = 0.0
    """Eosin of the cytoplasm around the nucleus, out to `reach` radii."""
    reach: float = 1.5
    angle: float | None = None
    """Direction of elongated nuclei (radians); None for any."""


def noise(rng: Generator, sigma: float | tuple[float, float]) -> Field:
    """Smooth Gaussian noise of mean 0 and variance 1 with correlation length `sigma` pixels (y, x)."""
    sigma_y, sigma_x = (sigma, sigma) if isinstance(sigma, float | int) else sigma
    # Drawn in Fourier space, only where the Gaussian's spectrum counts: slow fields cost next to nothing.
    fall_y, fall_x = (np.exp(-2 * (np.pi * s * np.fft.rfftfreq(BANK_PX)) ** 2) for s in (sigma_y, sigma_x))
    n_y, n_x = (max(2, int((fall > 1e-3).sum())) for fall in (fall_y, fall_x))
    fall_y = np.concatenate([fall_y[:n_y], fall_y[n_y - 1 : 0 : -1]])
    weight = fall_y[:, None] * fall_x[None, :n_x]
    weight[0, 0] = 0
    drawn = (rng.standard_normal((2, *weight.shape)) * weight).astype(np.float32)
    rows = np.r_[0:n_y, BANK_PX - n_y + 1 : BANK_PX] % BANK_PX
    spectrum = np.zeros((BANK_PX, BANK_PX // 2 + 1), np.complex64)
    spectrum[rows, :n_x] = drawn[0] + 1j * drawn[1]
    field = irfft2(spectrum, s=(BANK_PX, BANK_PX))
    return np.asarray(field / field.std(), np.float32)


def bend(field: Field, shift_y: Field, shift_x: Field) -> Field:
    """`field` sampled at (y + shift_y, x + shift_x), wrapped around."""
    rows, cols = np.mgrid[: field.shape[0], : field.shape[1]].astype(np.float32)
    moved = map_coordinates(field, [rows + shift_y, cols + shift_x], order=1, mode="grid-wrap")
    return np.asarray(moved, np.float32)


def lattice(rng: Generator, pitch: float, jitter: float = 0.2, warp_px: float = 9.0) -> Lattice:
    """Assign every pixel to the nearest site of a jittered, warped hexagonal lattice (Worley's cells), tileable."""
    n = 2 * round(BANK_PX / pitch / 2)
    bump = rng.normal(0, jitter, (2, n, n)).clip(-0.45, 0.45).astype(np.float32)
    y, x = np.mgrid[:BANK_PX, :BANK_PX].astype(np.float32)
    y, x = (v + warp_px * noise(rng, 70.0) for v in (y, x))
    # A few rows at a time stay in the processor's cache, which is twice as fast.
    strips = [_nearest(y[i : i + 32], x[i : i + 32], bump, n) for i in range(0, BANK_PX, 32)]
    site, dx, dy, edge = (np.concatenate(parts) for parts in zip(*strips, strict=True))
    return Lattice(site, dx, dy, edge, n * n)


def _nearest(y: Field, x: Field, bump: Field, n: int) -> tuple[NDArray[np.int32], Field, Field, Field]:
    """(site, dx, dy, edge) as in `Lattice` of the points (y, x), for an n by n lattice moved by `bump` cells."""
    cell = np.float32(BANK_PX / n)
    y, x = y / cell, x / cell
    row0 = np.floor(y).astype(np.int32)
    best = np.full(y.shape, np.inf, np.float32)
    second, dx, dy = best.copy(), np.zeros_like(best), np.zeros_like(best)
    site = np.zeros(y.shape, np.int32)
    for down in (-1, 0, 1):
        row = row0 + np.int32(down)
        odd = (row & 1).astype(np.float32) * np.float32(0.5)
        col0 = np.floor(x - odd).astype(np.int32)
        row_y, row_start = row + np.float32(0.5), row % n * n
        for right in (-1, 0, 1):
            col = col0 + np.int32(right)
            number = row_start + col % n
            to_y = y - row_y.astype(np.float32) - bump[0].take(number)
            to_x = x - (col + odd).astype(np.float32) - np.float32(0.5) - bump[1].take(number)
            far = to_y * to_y + to_x * to_x
            nearer = far < best
            np.minimum(second, np.maximum(best, far), out=second)
            np.minimum(best, far, out=best)
            for kept, new in ((dy, to_y), (dx, to_x), (site, number)):
                np.copyto(kept, new, where=nearer)
    return site, dx * cell, dy * cell, (np.sqrt(second) - np.sqrt(best)) * cell


def occupied(rng: Generator, cells: Lattice, kind: Nuclei) -> NDArray[np.bool_]:
    """Which sites hold a cell: by chance, or in clusters."""
    chance = rng.random(cells.n)
    if kind.clustered:
        slow = noise(rng, 45.0)
        at_site = np.zeros(cells.n, np.float32)
        at_site[cells.site.ravel()] = slow.ravel()
        chance = chance - kind.clustered * at_site
    return np.asarray(chance < kind.present)


def stamp(rng: Generator, h: Field, e: Field, cells: Lattice, kind: Nuclei) -> None:
    """Paint one population of cells over the concentrations of haematoxylin `h` and eosin `e`, in place."""
    here = occupied(rng, cells, kind)[cells.site]
    angle = rng.uniform(0, np.pi, cells.n) if kind.angle is None else rng.normal(kind.angle, 0.25, cells.n)
    long = np.exp(np.abs(rng.normal(0, kind.aspect, cells.n)) + kind.aspect / 2)
    sizes = kind.radius * np.exp(rng.normal(0, kind.spread, cells.n))
    sin, cos, stretch, radius = (
        v.astype(np.float32)[cells.site] for v in (np.sin(angle), np.cos(angle), long, sizes)
    )
    u, v = (cells.dx * cos + cells.dy * sin) / stretch, (cells.dy * cos - cells.dx * sin) * stretch
    far = np.hypot(u, v) / radius * (1 + kind.ragged * noise(rng, kind.radius * 0.45))
    far[~here] = 9.0
    if kind.body:
        around = np.clip((kind.reach - far) * 2.5, 0, 1)
        e += around * (kind.body - e)
        h *= 1 - 0.7 * around
    inside = np.clip((1 - far) * radius * 0.8 + 0.5, 0, 1)
    rim = np.exp(-(((far - 0.9) / 0.16) ** 2))
    chromatin = 1 + kind.clumps * noise(rng, max(1.0, kind.radius * 0.16))
    depth = rng.normal(1, 0.1, cells.n).astype(np.float32)[cells.site]
    tone = kind.stain * depth * ((1 - kind.vesicle) * chromatin + kind.vesicle * rim)
    if kind.nucleolus:
        tone = tone + _nucleoli(rng, cells, radius, kind)
    h += inside * (np.clip(tone, 0.05, 2.4) - h)
    e += inside * (0.35 * kind.stain - e) * 0.6


def _nucleoli(rng: Generator, cells: Lattice, radius: Field, kind: Nuclei) -> Field:
    """One dark dot off the centre of a share of the nuclei."""
    off = rng.normal(0, 0.22, (2, cells.n)).astype(np.float32)
    has = (rng.random(cells.n) < kind.nucleolus)[cells.site]
    far = np.hypot(cells.dx / radius - off[0][cells.site], cells.dy / radius - off[1][cells.site])
    return np.asarray(has * 0.65 * kind.stain * np.exp(-((far / 0.2) ** 2)), np.float32)
