"""Where the tissues of one imaginary lymph node lie, and where its metastases are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from wsi_fl.demo.phantom.cells import Field
from wsi_fl.demo.phantom.tissues import Tissue

MPP = 0.5
"""Micrometres per level-0 pixel of every imaginary slide."""
COARSE_PX = 16
"""Level-0 pixels between the nodes of the fields that shape a slide."""
LABEL_PX = 4
"""Side of the squares of a label map, in level-0 pixels."""


@dataclass(frozen=True)
class Anatomy:
    """Where everything lies on one slide; fields have a node every COARSE_PX, at the middle of its square."""

    label: NDArray[np.uint8]
    """[n, n] the Tissue of every LABEL_PX square."""
    tumour: Field | None
    """[m, m] roughly pixels inside (+) or outside (-) the tumour; None on a negative slide."""


def slow(rng: Generator, n: int, sigma: float) -> Field:
    """[n, n] smooth noise of variance 1, correlation length `sigma` nodes."""
    pad = int(4 * sigma)
    field = gaussian_filter(rng.standard_normal((n + 2 * pad, n + 2 * pad)), sigma)
    return np.asarray(field[pad : pad + n, pad : pad + n] / field.std(), np.float32)


def upsample(field: Field, size_px: int) -> Field:
    """[size_px, size_px] a square field, linear between its nodes."""
    image = Image.fromarray(np.asarray(field, np.float32))
    return np.asarray(image.resize((size_px, size_px), Image.Resampling.BILINEAR))


def _blob(n: int, centre: tuple[float, float], axes: tuple[float, float], angle: float) -> Field:
    """[n, n] distance in nodes (roughly) inside an ellipse; all lengths as shares of the side."""
    y, x = (np.mgrid[:n, :n] + 0.5) / n
    dy, dx = y - centre[0], x - centre[1]
    u, v = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
    far = np.hypot(u / axes[0], v / axes[1])
    return np.asarray((1 - far) * min(axes) * n, np.float32)


def _node(rng: Generator, n: int) -> Field:
    """An irregular bean of tissue, in nodes inside (+) or outside (-)."""
    centre = (rng.uniform(0.48, 0.52), rng.uniform(0.48, 0.52))
    axes = (rng.uniform(0.4, 0.43), rng.uniform(0.335, 0.38))
    angle = rng.uniform(0, np.pi)
    wobble = n * (0.018 * slow(rng, n, n / 14) + 0.004 * slow(rng, n, n / 50))
    turn = rng.uniform(0, 2 * np.pi)
    dent = (centre[0] + 0.42 * np.sin(turn), centre[1] + 0.42 * np.cos(turn))
    return np.asarray(
        np.minimum(_blob(n, centre, axes, angle) + wobble, -_blob(n, dent, (0.11, 0.07), turn)), np.float32
    )


def _tumour(rng: Generator, node: Field) -> Field:
    """One large island, a few small ones, often a hole; nowhere outside the node. Unit: level-0 pixels."""
    n = len(node)
    inner = np.argwhere(node > 0.17 * n)
    best = np.full_like(node, -np.inf)
    sizes = [rng.uniform(0.215, 0.245), *rng.uniform(0.03, 0.07, rng.integers(1, 4))]
    for size in sizes:
        middle = rng.choice(inner if size > 0.1 else np.argwhere(node > (size + 0.02) * n))
        axes = (size * rng.uniform(1.0, 1.2), size * rng.uniform(0.8, 1.0))
        best = np.maximum(best, _blob(n, tuple((middle + 0.5) / n), axes, rng.uniform(0, np.pi)))
    best = best + n * 0.013 * slow(rng, n, n / 26) + n * 0.004 * slow(rng, n, n / 80)
    hole = rng.choice(np.argwhere(best > 0.08 * n)) if (best > 0.08 * n).any() else None
    if hole is not None:
        size = rng.uniform(0.028, 0.045)
        cut = _blob(n, tuple((hole + 0.5) / n), (size, size * 0.7), rng.uniform(0, np.pi))
        best = np.minimum(best, -cut + n * 0.003 * slow(rng, n, n / 60))
    best = np.minimum(best, node - 0.012 * n)
    best[[0, -1]], best[:, [0, -1]] = -n, -n  # so that every outline closes
    return np.asarray(best * COARSE_PX, np.float32)


def _healthy_label(rng: Generator, node: Field) -> NDArray[np.uint8]:
    """Capsule, cortex with follicles, paracortex, sinuses, vessels and fat around, per LABEL_PX square."""
    n = len(node)
    fine = n * COARSE_PX // LABEL_PX
    depth = upsample(node, fine) * (COARSE_PX * MPP)  # in µm
    near = upsample(slow(rng, n, n / 12), fine)
    label = np.full((fine, fine), Tissue.GLASS, np.uint8)
    fat_reach = 0.06 * n * COARSE_PX * MPP * np.clip(upsample(slow(rng, n, n / 9), fine), 0, 2)
    label[depth > -fat_reach] = Tissue.FAT
    label[depth > -6 - 8 * np.clip(near, 0, 2)] = Tissue.STROMA
    inside = depth > 12 + 6 * near
    label[inside] = np.where(near > 0.15, Tissue.LYMPHOID, Tissue.PARACORTEX)[inside]
    sinus = upsample(slow(rng, n, 9.0), fine)
    deep = depth > 0.1 * n * COARSE_PX * MPP
    label[inside & (depth < 22 + 6 * near)] = Tissue.SINUS
    label[deep & (np.abs(sinus) < 0.16)] = Tissue.SINUS
    label[deep & (np.abs(sinus) < 0.03)] = Tissue.STROMA
    _follicles(rng, label, depth)
    _vessels(rng, label, depth)
    return label


def _follicles(rng: Generator, label: NDArray[np.uint8], depth_um: Field) -> None:
    """Germinal centres with a dense mantle, in the cortex, in place."""
    n = len(label)
    wobble = upsample(slow(rng, max(8, n // 8), 5.0), n)
    cortex = np.argwhere((depth_um > 0.05 * n * LABEL_PX * MPP) & (depth_um < 0.16 * n * LABEL_PX * MPP))
    for middle in rng.permutation(cortex)[: int(rng.integers(6, 11))]:
        size = rng.uniform(0.03, 0.062)
        shape = _blob(n, tuple((middle + 0.5) / n), (size * 1.15, size), rng.uniform(0, np.pi))
        shape += 0.09 * size * n * wobble
        label[(shape > -0.016 * n) & (depth_um > 30)] = Tissue.LYMPHOID
        label[(shape > 0) & (depth_um > 40)] = Tissue.GERMINAL


def _vessels(rng: Generator, label: NDArray[np.uint8], depth_um: Field) -> None:
    """Small vessels: a pink wall, red cells inside, in place."""
    n = len(label)
    for y, x in rng.permutation(np.argwhere(depth_um > 40))[: int(n * n * 4e-5)]:
        length, width, angle = rng.uniform(5, 15), rng.uniform(3, 6), rng.uniform(0, np.pi)
        reach = 22
        top, left = max(0, y - reach), max(0, x - reach)
        part = label[top : y + reach, left : x + reach]
        rows, cols = np.mgrid[: part.shape[0], : part.shape[1]]
        dy, dx = rows + top - y, cols + left - x
        u, v = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
        far = np.hypot(u / length, v / width)
        part[far < 1 + 3 / width] = Tissue.STROMA
        part[far < 1] = Tissue.BLOOD


def _metastasize(rng: Generator, label: NDArray[np.uint8], tumour: Field) -> None:
    """Put tumour into the label map, here and there with a rim of stroma, in place."""
    inside = upsample(tumour, len(label))
    rim_px = 14 * (upsample(slow(rng, len(tumour), 4.0), len(label)) - 0.6)
    label[inside > 0] = rng.integers(Tissue.TUMOUR_SOLID, Tissue.TUMOUR_DISCOHESIVE + 1)
    label[np.abs(inside + 3) < rim_px] = Tissue.STROMA


def _align_fibres(label: NDArray[np.uint8], depth: Field) -> None:
    """Let the fibres of the stroma run along the capsule, in place."""
    down, right = np.gradient(depth)
    label[(label == Tissue.STROMA) & (np.abs(right) > np.abs(down))] = Tissue.STROMA_UPRIGHT


def lay_out(rng: Generator, size_px: int, positive: bool) -> Anatomy:
    """Invent one section of a lymph node, with tumour or without.

    `size_px` is a multiple of COARSE_PX.
    """
    node = _node(rng, size_px // COARSE_PX)
    label = _healthy_label(rng, node)
    tumour = _tumour(rng, node) if positive else None
    if tumour is not None:
        _metastasize(rng, label, tumour)
    _align_fibres(label, upsample(node, len(label)))
    return Anatomy(label, tumour)


def tumour_mask(anatomy: Anatomy) -> NDArray[np.bool_]:
    """[size_px, size_px] which level-0 pixels are tumour."""
    size_px = len(anatomy.label) * LABEL_PX
    if anatomy.tumour is None:
        return np.zeros((size_px, size_px), np.bool_)
    return upsample(anatomy.tumour, size_px) > 0
