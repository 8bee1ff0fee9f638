"""Does a generator copy its training images? Exact nearest neighbours of plain arrays, and a calibrated verdict.

The distance is the Euclidean one divided by √d, of pixels in [0, 1] (Carlini et al., "Extracting training data from
diffusion models", 2023, section 4.2; Table 4 of the MPCPA paper). A fixed threshold on it means nothing across
resolutions and kinds of image: at 32 px two different chest films are closer than 0.1. So the verdict asks how near
*held-out* real images are to the training images, and what is usual around each image: section 5.1 of Carlini et al.
divides by the mean distance to the nearest 50 training images, which a copy alone makes small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
"""uint8[n, …], each image in any layout, the same for all."""
Distances = NDArray[np.float64]

_PAPER_THRESHOLD = 0.1
"""Below it the paper calls an image memorised; reported, never the verdict."""
_NEIGHBOURS = 50
ALPHA = 0.5
"""n and α of Carlini et al., section 5.1."""
COPY = 0.5
"""A copy's relative distance is below this share of the median one of held-out images."""
LEAST_HELD_OUT = 20
"""With fewer held-out images nothing can be told."""
_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True)
class Nearest:
    """Of each image, among some references.

    Attributes:
        row: int64[n] of its nearest reference.
        distance: float64[n], the normalised Euclidean distance to it.
        relative: float64[n], that over α times the mean of the nearest 50 (fewer where there are fewer).
    """

    row: NDArray[np.int64]
    distance: Distances
    relative: Distances


@dataclass(frozen=True)
class Memorization:
    """What is known of the copying of one generator.

    Attributes:
        least, median: of the distances of generated images to their nearest training images.
        held_out_least, held_out_median: the same of held-out real images.
        below_paper, held_out_below_paper: numbers nearer than 0.1.
        copy_below: a copy's relative distance is below this; None where it could not be calibrated.
        copies, held_out_copies: numbers of them.
        duplicates: training images that are the same, pixel by pixel, as an earlier one.
        reasons: why this is no generator to release; empty where it is.
    """

    n_generated: int
    n_held_out: int
    least: float
    median: float
    held_out_least: float | None
    held_out_median: float | None
    below_paper: int
    held_out_below_paper: int
    copy_below: float | None
    copies: int
    held_out_copies: int
    duplicates: int
    reasons: list[str]


def duplicates(images: Images) -> NDArray[np.int64]:
    """int64[m]: the rows that are exactly the same as an earlier one.

    Example:
        >>> duplicates(np.array([[1, 2], [3, 4], [1, 2]], np.uint8)).tolist()
        [2]
    """
    if not len(images):
        return np.zeros(0, np.int64)
    _, first, which = np.unique(_flat(images), axis=0, return_index=True, return_inverse=True)
    return np.flatnonzero(first[which.reshape(-1)] != np.arange(len(images)))


def nearest(
    images: Images,
    references: Images,
    *,
    neighbours: int = _NEIGHBOURS,
    alpha: float = ALPHA,
    memory_bytes: int = _MEMORY_BYTES,
) -> Nearest:
    """The nearest reference of every image, exactly.

    Pixels are whole numbers, so are squared distances, and double precision holds them without rounding.

    Args:
        references: at least one.
        memory_bytes: for blocks of both sets and their distances; what is kept of each image comes on top.
    """
    a, b = _flat(images), _flat(references)
    k = min(neighbours, len(b))
    rows, kept = np.zeros(len(a), np.int64), np.empty((len(a), k))
    mine, theirs = _block_sizes(a.shape[1], len(b), k, memory_bytes)
    for start in range(0, len(a), mine):
        block = a[start : start + mine].astype(np.float64)
        best, where = _nearest_of_block(block, b, k, theirs)
        rows[start : start + mine], kept[start : start + mine] = where, best
    distance = np.sqrt(kept / a.shape[1]) / 255
    usual = alpha * distance.mean(axis=1)
    relative = np.divide(distance[:, 0], usual, out=np.zeros(len(a)), where=usual > 0)
    return Nearest(rows, distance[:, 0].copy(), relative)


def nearest_other(
    images: Images, patient: NDArray[np.str_], *, memory_bytes: int = _MEMORY_BYTES
) -> Distances:
    """float64[n]: how near every image is to the nearest different one of another patient, infinite without one.

    Args:
        patient: str[n], whose each is.
    """
    a = _flat(images)
    whose = np.unique(patient, return_inverse=True)[1]
    out = np.full(len(a), np.inf)
    if not len(a):
        return out
    mine, theirs = _block_sizes(a.shape[1], len(a), 1, memory_bytes)
    for start in range(0, len(a), mine):
        rows = slice(start, start + mine)
        block = a[rows].astype(np.float64)
        for first, part in _blocks(a, theirs):
            found = _squares(block, part)
            found[(whose[rows, None] == whose[first : first + len(part)]) | (found == 0)] = np.inf
            out[rows] = np.minimum(out[rows], found.min(axis=1))
    distances: Distances = np.sqrt(out / a.shape[1]) / 255
    return distances


def _flat(images: Images) -> Images:
    return np.ascontiguousarray(images).reshape(len(images), int(np.prod(images.shape[1:])))


def _block_sizes(d: int, n_references: int, k: int, memory_bytes: int) -> tuple[int, int]:
    """(images, references) held at a time as float64[·, d], with their distances and the k best."""
    values = max(memory_bytes // 8, 4 * (d + k) + 16)
    side = max(1, int(values // (2 * d + 4 * k)))
    while side > 1 and 2 * side * d + 3 * side * side + 2 * side * k > values:
        side = side * 3 // 4
    return side, max(1, min(side, n_references))


def _nearest_of_block(
    block: NDArray[np.float64], references: Images, k: int, size: int
) -> tuple[Distances, NDArray[np.int64]]:
    """(float64[b, k] squared distances in pixel values, ascending; int64[b] row of the nearest)."""
    best, where = np.full((len(block), k), np.inf), np.zeros(len(block), np.int64)
    for start, part in _blocks(references, size):
        found = _squares(block, part)
        at = found.argmin(axis=1)
        nearer = found[np.arange(len(block)), at] < best[:, 0]
        where = np.where(nearer, start + at, where)
        best = np.sort(np.concatenate([best, found], axis=1), axis=1)[:, :k]
    return best, where


def _squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared distances [n, m] of whole numbers, exact."""
    found: NDArray[np.float64] = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    return found


def _blocks(images: Images, size: int) -> Iterator[tuple[int, NDArray[np.float64]]]:
    for start in range(0, len(images), size):
        yield start, images[start : start + size].astype(np.float64)


def judged(generated: Nearest, held_out: Nearest, n_duplicates: int) -> Memorization:
    """The verdict on one generator.

    An image counts as a copy where its nearest training image stands out among its 50 nearest more than twice as
    much as is usual for held-out images. Real images may have twins too, of the same patient say, so what counts
    is whether generated images are copies more often than held-out ones.

    Args:
        generated: of generated images among the training images.
        held_out: of real images that were not trained on, among the same.
    """
    calibrated = len(held_out.distance) >= LEAST_HELD_OUT
    below = COPY * float(np.median(held_out.relative)) if calibrated else None
    copies = int((generated.relative < below).sum()) if below is not None else 0
    theirs = int((held_out.relative < below).sum()) if below is not None else 0
    n, m = len(generated.distance), len(held_out.distance)
    reasons = []
    if not calibrated:
        reasons.append(
            f"only {m} held-out images (split val or test): with fewer than {LEAST_HELD_OUT} copying cannot be "
            "told from likeness"
        )
    elif copies * m > theirs * n:
        reasons.append(
            f"{copies} of {n} generated images are copies of training images (held-out images: {theirs} of {m})"
        )
    return Memorization(
        n_generated=n,
        n_held_out=m,
        least=float(generated.distance.min()),
        median=float(np.median(generated.distance)),
        held_out_least=float(held_out.distance.min()) if m else None,
        held_out_median=float(np.median(held_out.distance)) if m else None,
        below_paper=int((generated.distance < _PAPER_THRESHOLD).sum()),
        held_out_below_paper=int((held_out.distance < _PAPER_THRESHOLD).sum()),
        copy_below=below,
        copies=copies,
        held_out_copies=theirs,
        duplicates=n_duplicates,
        reasons=reasons,
    )
