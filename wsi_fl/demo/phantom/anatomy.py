"""Where the tissues of one imaginary lymph node lie, and where its metastases are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from wsi_fl.demo.phantom.tissues import Field, Tissue

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


def _blob(rng: Generator, n: int, centre: tuple[float, float], axes: tuple[float, float]) -> Field:
    """[n, n] distance in nodes (roughly) inside an ellipse, turned by chance; all lengths as shares of the side."""
    y, x = (np.mgrid[:n, :n] + 0.5) / n
    dy, dx, angle = y - centre[0], x - centre[1], rng.uniform(0, np.pi)
    u, v = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
    return np.asarray((1 - np.hypot(u / axes[0], v / axes[1])) * min(axes) * n, np.float32)


def _node(rng: Generator, n: int) -> Field:
    """An irregular bean of tissue, in nodes inside (+) or outside (-)."""
    centre = (rng.uniform(0.48, 0.52), rng.uniform(0.48, 0.52))
    bean = _blob(rng, n, centre, (rng.uniform(0.4, 0.43), rng.uniform(0.335, 0.38)))
    bean += n * (0.018 * slow(rng, n, n / 14) + 0.004 * slow(rng, n, n / 50))
    turn = rng.uniform(0, 2 * np.pi)
    dent = (centre[0] + 0.42 * np.sin(turn), centre[1] + 0.42 * np.cos(turn))
    return np.minimum(bean, -_blob(rng, n, dent, (0.11, 0.07)))


def _tumour(rng: Generator, node: Field) -> Field:
    """One large island with a hole, a few small ones; nowhere outside the node. Unit: level-0 pixels."""
    n = len(node)

    def island(where: NDArray[np.bool_], size: float) -> Field:
        y, x = (rng.choice(np.argwhere(where)) + 0.5) / n
        return _blob(rng, n, (y, x), (size * rng.uniform(1.0, 1.2), size * rng.uniform(0.8, 1.0)))

    best = island(node > 0.17 * n, rng.uniform(0.215, 0.245))
    for size in rng.uniform(0.03, 0.07, rng.integers(1, 4)):
        best = np.maximum(best, island(node > (size + 0.02) * n, size))
    best += n * (0.013 * slow(rng, n, n / 26) + 0.004 * slow(rng, n, n / 80))
    best = np.minimum(best, -island(best > min(0.08 * n, best.max() / 2), rng.uniform(0.028, 0.045)))
    best = np.minimum(best, node - 0.012 * n)
    best[[0, -1]], best[:, [0, -1]] = -n, -n  # so that every outline closes
    return np.asarray(best * COARSE_PX, np.float32)


def _healthy_label(rng: Generator, node: Field) -> NDArray[np.uint8]:
    """Capsule, lymphoid tissue with germinal centres, sinuses, strands, and fat around, per LABEL_PX square."""
    n = len(node)
    fine, width_um = n * COARSE_PX // LABEL_PX, n * COARSE_PX * MPP
    depth_um = upsample(node, fine) * (COARSE_PX * MPP)
    near, fat, strands, follicles = (upsample(slow(rng, n, s), fine) for s in (n / 12, n / 9, 9.0, n / 26))
    inside, deep = depth_um > 12 + 6 * near, depth_um > 0.1 * width_um
    label = np.full((fine, fine), Tissue.GLASS, np.uint8)
    label[depth_um > -0.06 * width_um * np.clip(fat, 0, 2)] = Tissue.FAT
    label[depth_um > -6 - 8 * np.clip(near, 0, 2)] = Tissue.STROMA
    label[inside] = np.where(near > 0.15, Tissue.LYMPHOID, Tissue.PARACORTEX)[inside]
    label[(inside & (depth_um < 22 + 6 * near)) | (deep & (np.abs(strands) < 0.16))] = Tissue.SINUS
    label[deep & (np.abs(strands) < 0.05)] = Tissue.STROMA
    label[(depth_um > 40) & (depth_um < 0.2 * width_um) & (follicles > 1)] = Tissue.GERMINAL
    return label


def lay_out(rng: Generator, size_px: int, positive: bool) -> Anatomy:
    """Invent one section of a lymph node, with tumour or without.

    `size_px` is a multiple of COARSE_PX.
    """
    node = _node(rng, size_px // COARSE_PX)
    label = _healthy_label(rng, node)
    tumour = _tumour(rng, node) if positive else None
    if tumour is not None:
        label[upsample(tumour, len(label)) > 0] = rng.choice([Tissue.TUMOUR_SOLID, Tissue.TUMOUR_GLANDULAR])
    return Anatomy(label, tumour)


def tumour_mask(anatomy: Anatomy) -> NDArray[np.bool_]:
    """[size_px, size_px] which level-0 pixels are tumour."""
    size_px = len(anatomy.label) * LABEL_PX
    if anatomy.tumour is None:
        return np.zeros((size_px, size_px), np.bool_)
    return upsample(anatomy.tumour, size_px) > 0
