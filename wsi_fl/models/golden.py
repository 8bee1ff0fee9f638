"""Golden patches: a painted picture whose features tell two encoders apart, or one encoder with two preprocessings.

Names of encoders are no identity: versions of one tool crop, scale or normalise differently under one name. So every
site encodes the same patches, which show no patient, and the preflight compares a few numbers of each vector. Features
of other tools have them too, where the picture was among the slides.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.system.files import atomic_path
from wsi_fl.types import GOLDEN_NUMBERS, GridSpec, UsageError

GOLDEN_SLIDE, GOLDEN_MPP = "wsi-fl-golden", 0.5
"""Name of the picture as a slide, and its µm per pixel."""
_WIDTH, _HEIGHT = 2048, 1024
_N_PATCHES = 32
_TISSUE, _NUCLEUS = (228, 168, 204), (92, 62, 140)

GoldenVectors = tuple[float | None, ...]
"""Eight numbers of each golden patch, in rows from the left; None for patches without."""


@cache
def paint_picture() -> NDArray[np.uint8]:
    """Return the picture uint8[1024, 2048, 3] of 0.5 µm/px: tissue with nuclei, the same on every machine."""
    bits = np.random.PCG64(32)

    def draw_noise(side: int) -> NDArray[np.int32]:
        shape = _HEIGHT // side + 2, _WIDTH // side + 2
        raw = np.asarray(bits.random_raw(shape[0] * shape[1]), np.uint64)
        values = (raw >> np.uint64(56)).astype(np.int32).reshape(shape)
        for _ in range(2):  # the mean of `side` pixels of each column, by sums, then of each row
            sums = values.repeat(side, 0).cumsum(0, dtype=np.int32)
            values = ((sums[side:] - sums[:-side]) // side).T
        return values[:_HEIGHT, :_WIDTH]

    density, nuclei = draw_noise(256), draw_noise(12)
    texture = (draw_noise(2) + draw_noise(5) + draw_noise(40)) // 3 - 128
    tissue = np.where((nuclei + density // 2 > 215)[..., None], _NUCLEUS, _TISSUE)
    picture: NDArray[np.uint8] = np.clip(tissue + texture[..., None], 0, 255).astype(np.uint8)
    return picture


def write_picture(path: Path) -> None:
    """Write the picture as `wsi-fl-golden.png` for other tools, atomically.

    Raises:
        UsageError: for a file of another name, by which import would not find its features.
    """
    if path.name != f"{GOLDEN_SLIDE}.png":
        raise UsageError(f"--golden {path}: call the file {GOLDEN_SLIDE}.png, the name by which import finds it")
    with atomic_path(path) as temporary:
        Image.fromarray(paint_picture()).save(temporary, "PNG")


def cut_patches(spec: GridSpec) -> NDArray[np.uint8]:
    """Return the first patches of the picture, uint8[n, size, size, 3] with n up to 32, in rows from its corner."""
    picture, (side, corners) = paint_picture(), _list_corners(spec)
    patches = [picture[y : y + side, x : x + side] for x, y in corners]
    if side != spec.size_px:
        size = (spec.size_px, spec.size_px)
        patches = [np.asarray(Image.fromarray(patch).resize(size, Image.Resampling.BICUBIC)) for patch in patches]
    return np.array(patches, np.uint8).reshape(-1, spec.size_px, spec.size_px, 3)


def _list_corners(spec: GridSpec) -> tuple[int, list[tuple[int, int]]]:
    """Return the side of the golden patches in the picture, and their top-left corners (x, y) in rows."""
    side = round(spec.size_px * (spec.mpp or GOLDEN_MPP) / GOLDEN_MPP)
    corners = ((x, y) for y in range(0, _HEIGHT - side + 1, side) for x in range(0, _WIDTH - side + 1, side))
    return side, [*islice(corners, _N_PATCHES)]


def select_golden(features: NDArray[np.float32], xy: NDArray[np.int64], spec: GridSpec) -> GoldenVectors:
    """Return the vectors of the golden patches among patches that another tool cut of the picture; () without any.

    Args:
        features, xy: float32[m, d] and int64[m, 2], top-left corners.
    """
    rows = np.full((_N_PATCHES, features.shape[1]), np.nan, np.float32)
    places = {corner: place for place, corner in enumerate(_list_corners(spec)[1])}
    for row, (x, y) in zip(features, xy.tolist(), strict=True):
        if (x, y) in places:
            rows[places[x, y]] = row
    return project_features(rows) if np.isfinite(rows).any() else ()


def project_features(features: NDArray[np.float32]) -> GoldenVectors:
    """Return eight numbers for each row of features float32[n, d]: sums with random signs, which keep distances.

    Example:
        >>> project_features(np.ones((1, 4), np.float32))
        (1.0, 1.0, 0.0, 2.0, 1.0, -1.0, -1.0, -1.0)
    """
    raw = np.asarray(np.random.PCG64(features.shape[1]).random_raw(features.shape[1]), np.uint64)
    signs = (raw[:, None] >> np.arange(40, 40 + GOLDEN_NUMBERS, dtype=np.uint64) & np.uint64(1)).astype(
        np.float64
    ) * 2 - 1
    numbers = features.astype(np.float64) @ signs / np.sqrt(len(signs))
    return tuple(float(f"{number:.5g}") if np.isfinite(number) else None for number in numbers.ravel().tolist())
