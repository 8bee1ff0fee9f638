"""Evidence on a generator: the distance of its images from real ones, and whether it copies its training images.

The verdict on copying rests on comparisons without a fixed threshold: a generator of the *distribution* is as near to
held-out images as to training images; one that has memorised is nearer to the latter. A fixed threshold does not hold
across resolutions and tissues, and some images are far from all others. So distances to the generator are taken over
those to the nearest training image of another patient, and the distance of a generated image over the usual one around
it: section 5.1 of Carlini et al., "Extracting training data from diffusion models", 2023, divides by
the mean distance to the nearest 50 training images; only copies have a small quotient.

Nearest neighbours are exact, of plain arrays. Their distance is the Euclidean one divided by √d, of pixels in [0, 1]
(Carlini et al., section 4.2; Table 4 of the MPCPA paper). Distances between sets are FID (Heusel et al., NeurIPS 2017)
and KID (Bińkowski et al., ICLR 2018), on the features of any encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.stats import fisher_exact, mannwhitneyu, wilcoxon

_Distances = NDArray[np.float64]
_Images = NDArray[np.uint8]
"""uint8[n, …], each image in any layout, the same for all."""
_Features = NDArray[np.float32]

CRITERIA = 1
"""Version of the verdict's rules; verdicts of other versions do not count."""
MIN_HELD_OUT = 20
"""Fewest held-out images for a verdict."""
_ALPHA = 0.01
"""Of each one-sided test of the verdict."""
_MIN_NEARER_SHARE = 0.6
"""Share of pairs with the training image nearer from which a shift fails (half without copying)."""
_TAIL_QUANTILE = 0.05
"""Quantile of the held-out images' distances that bounds the tail."""
_TAIL_EXCESS = 2.0
"""Excess of training images in the tail from which it fails."""
COPY_THRESHOLD = 0.1
"""Distance of a copy to its original over that to the nearest training image of another patient, at most."""
_PAPER_THRESHOLD = 0.1
"""Distance of memorised images in the MPCPA paper; reported, never the verdict."""
_NEIGHBOURS, _USUAL_FACTOR = 50, 0.5
"""n and α of Carlini et al., section 5.1."""
_COPY_FACTOR = 0.5
"""Relative distance of a generated copy over the median one of held-out images, at most."""
_MEMORY_BYTES = 256 << 20


# ---- nearest images


@dataclass(frozen=True)
class Nearest:
    """The nearest reference of each image.

    Attributes:
        row: int64[n] of its nearest reference.
        distance: float64[n], the normalised Euclidean distance to it.
        relative: float64[n], that over α times the mean of the nearest 50 (fewer where there are fewer).
    """

    row: NDArray[np.int64]
    distance: _Distances
    relative: _Distances


def count_duplicates(images: _Images) -> int:
    """Return the number of images that equal an earlier one."""
    return len(images) - len({image.tobytes() for image in images})


def find_nearest(images: _Images, references: _Images, *, memory_bytes: int = _MEMORY_BYTES) -> Nearest:
    """Return the nearest reference of every image, exactly.

    Args:
        references: at least one.
        memory_bytes: for blocks of both sets and their distances; results come on top.
    """
    a, b = _flatten_images(images), _flatten_images(references)
    k = min(_NEIGHBOURS, len(b))
    rows, smallest = np.zeros(len(a), np.int64), np.full((len(a), k), np.inf)
    for rows_slice, first, squares in _iterate_squares(a, b, k, memory_bytes):
        columns = squares.argmin(axis=1)
        is_nearer = squares[np.arange(len(columns)), columns] < smallest[rows_slice, 0]
        rows[rows_slice] = np.where(is_nearer, first + columns, rows[rows_slice])
        smallest[rows_slice] = np.sort(np.concatenate([smallest[rows_slice], squares], axis=1), axis=1)[:, :k]
    distance = np.sqrt(smallest / a.shape[1]) / 255
    usual_distance = _USUAL_FACTOR * distance.mean(axis=1)
    relative = np.divide(distance[:, 0], usual_distance, out=np.zeros(len(a)), where=usual_distance > 0)
    return Nearest(rows, distance[:, 0].copy(), relative)


def find_nearest_other(images: _Images, patient: NDArray[np.str_], *, memory_bytes: int = _MEMORY_BYTES) -> _Distances:
    """Return the distance float64[n] of every image to the nearest different one of another patient, or infinity.

    Args:
        patient: str[n], of each image.
    """
    a, patient_index = _flatten_images(images), np.unique(patient, return_inverse=True)[1]
    out = np.full(len(a), np.inf)
    for rows_slice, first, squares in _iterate_squares(a, a, 1, memory_bytes):
        other_patients = patient_index[first : first + squares.shape[1]]
        squares[(patient_index[rows_slice, None] == other_patients) | (squares == 0)] = np.inf
        out[rows_slice] = np.minimum(out[rows_slice], squares.min(axis=1))
    distances: _Distances = np.sqrt(out / a.shape[1]) / 255
    return distances


def _flatten_images(images: _Images) -> _Images:
    return np.ascontiguousarray(images).reshape(len(images), int(np.prod(images.shape[1:])))


def _iterate_squares(
    a: _Images, b: _Images, k: int, memory_bytes: int
) -> Iterator[tuple[slice, int, NDArray[np.float64]]]:
    """Yield blocks of the squared distances of flat images: (rows of a, first row of b, float64[·, ·]).

    Squared distances of whole-number pixels are exact in double precision. Memory holds both blocks as float64[·, d],
    their distances and the k best: 2 · side · (d + k) + 3 · side² numbers.
    """
    half = a.shape[1] + k
    side = max(1, int((sqrt(half**2 + 3 * memory_bytes / 8) - half) / 3))
    for start in range(0, len(a), side):
        block = a[start : start + side].astype(np.float64)
        for first in range(0, len(b), side):
            other_block = b[first : first + side].astype(np.float64)
            squares = (block**2).sum(axis=1)[:, None] + (other_block**2).sum(axis=1) - 2 * block @ other_block.T
            yield slice(start, start + side), first, squares


# ---- whether generated images are copies


@dataclass(frozen=True)
class Memorization:
    """The evidence of copying by one generator.

    Attributes:
        least, median: of the distances of generated images to their nearest training images.
        held_out_least, held_out_median: the same for held-out real images.
        below_paper, held_out_below_paper: numbers of images nearer than 0.1.
        copy_below: upper bound of a copy's relative distance; None without calibration.
        copies, held_out_copies: numbers of copies.
        duplicates: number of training images that equal an earlier one.
        reasons: reasons against release; empty if there are none.
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


def judge_copies(generated: Nearest, held_out: Nearest, n_duplicates: int) -> Memorization:
    """Return the verdict on generated images.

    A copy has a nearest training image that stands out among its 50 nearest more than twice as much as is usual for
    held-out images. Real images may have twins too, for example of the same patient, so generated images fail if they
    are copies more often than held-out ones.

    Args:
        generated: generated images among the training images.
        held_out: held-out real images among the same.
    """
    n, m = len(generated.distance), len(held_out.distance)
    threshold, n_copies, n_held_out_copies = None, 0, 0
    reasons = _explain_too_few(m)
    if not reasons:
        threshold = _COPY_FACTOR * float(np.median(held_out.relative))
        n_copies, n_held_out_copies = (int((result.relative < threshold).sum()) for result in (generated, held_out))
        if n_copies * m > n_held_out_copies * n:
            reasons = [
                f"{n_copies} of {n} generated images are copies of training images "
                f"(held-out images: {n_held_out_copies} of {m})"
            ]
    return Memorization(
        n_generated=n,
        n_held_out=m,
        least=float(generated.distance.min()),
        median=float(np.median(generated.distance)),
        held_out_least=float(held_out.distance.min()) if m else None,
        held_out_median=float(np.median(held_out.distance)) if m else None,
        below_paper=int((generated.distance < _PAPER_THRESHOLD).sum()),
        held_out_below_paper=int((held_out.distance < _PAPER_THRESHOLD).sum()),
        copy_below=threshold,
        copies=n_copies,
        held_out_copies=n_held_out_copies,
        duplicates=n_duplicates,
        reasons=reasons,
    )


def _explain_too_few(n_held_out: int) -> list[str]:
    if n_held_out >= MIN_HELD_OUT:
        return []
    return [
        f"only {n_held_out} held-out images (split val or test): with fewer than {MIN_HELD_OUT} copying cannot "
        "be distinguished from likeness"
    ]


# ---- whether training images are nearer than held-out ones


@dataclass(frozen=True)
class _Spread:
    """Summary of a set of distances."""

    n: int
    median: float
    q05: float
    least: float


@dataclass(frozen=True)
class Comparison:
    """Distances of training images to a generator's nearest images, against those of held-out images.

    Attributes:
        nearer: probability that a training image is nearer than a held-out one (ties count half).
        p_nearer: one-sided Mann–Whitney test.
        tail_training, tail_held_out: shares below the held-out images' 5 % quantile.
        p_tail: one-sided Fisher test that training images are there more often.
        copies_training, copies_held_out: numbers nearer than the threshold of a copy.
    """

    training: _Spread
    held_out: _Spread
    nearer: float
    p_nearer: float
    tail_training: float
    tail_held_out: float
    p_tail: float
    copies_training: int
    copies_held_out: int

    def list_reasons(self, subject: str) -> list[str]:
        """Return the signs of copying; [] if there are none."""
        lines, n, m = [], self.training.n, self.held_out.n
        if self.copies_training and self.copies_training * m > self.copies_held_out * n:
            lines.append(
                f"{subject}: {self.copies_training} of {n} training images are reproduced almost exactly "
                f"(held-out images: {self.copies_held_out} of {m})"
            )
        if self.p_nearer < _ALPHA and self.nearer >= _MIN_NEARER_SHARE:
            lines.append(
                f"{subject}: training images are nearer than held-out ones in {self.nearer:.0%} of pairs "
                f"(p = {self.p_nearer:.1g})"
            )
        if self.p_tail < _ALPHA and self.tail_training >= _TAIL_EXCESS * max(self.tail_held_out, _TAIL_QUANTILE):
            lines.append(
                f"{subject}: {self.tail_training:.0%} of the training images are nearer than "
                f"{_TAIL_QUANTILE:.0%} of the held-out ones are (p = {self.p_tail:.1g})"
            )
        return lines


def summarize_distances(distances: _Distances) -> _Spread:
    """Return the summary of a set of distances."""
    q05 = float(np.quantile(distances, 0.05))
    return _Spread(len(distances), float(np.median(distances)), q05, float(distances.min()))


def _compare_distances(training: _Distances, held_out: _Distances) -> Comparison:
    """Return whether training images are nearer to their nearest synthetic one than held-out images are."""
    a, b = training, held_out
    test = mannwhitneyu(a, b, alternative="less")
    edge = float(np.quantile(b, _TAIL_QUANTILE))
    n_inside = [int((a < edge).sum()), int((b < edge).sum())]
    table = [n_inside, [len(a) - n_inside[0], len(b) - n_inside[1]]]
    return Comparison(
        training=summarize_distances(a),
        held_out=summarize_distances(b),
        nearer=1 - float(test.statistic) / (len(a) * len(b)),
        p_nearer=float(test.pvalue),
        tail_training=n_inside[0] / len(a),
        tail_held_out=n_inside[1] / len(b),
        p_tail=float(fisher_exact(table, alternative="greater").pvalue),
        copies_training=int((a < COPY_THRESHOLD).sum()),
        copies_held_out=int((b < COPY_THRESHOLD).sum()),
    )


def _relative_distances(distance: _Distances, usual: _Distances) -> _Distances:
    """Return each image's distance over its usual one, that to the nearest different training image of another patient.

    By chance more images that are far from all others may be held out; the quotient corrects for it. Only other
    patients' images are compared, for a held-out image has no others, and twins of a training image are not typical
    (they are copied first). Without such an image (infinite), or with the held-out image in the training set (0), the
    image is left out.

    Example:
        >>> _relative_distances(np.array([0.1, 0.3, 0.2]), np.array([0.2, 0.0, np.inf])).tolist()
        [0.5]
    """
    is_known = (usual > 0) & np.isfinite(usual)
    quotient: _Distances = distance[is_known] / usual[is_known]
    return quotient


def compare_relative(
    distances: Sequence[_Distances], usual: Sequence[_Distances], min_held_out: int = MIN_HELD_OUT
) -> Comparison | None:
    """Return the comparison of distances of training and of held-out images, over the usual ones of both.

    None if copying cannot be distinguished from likeness: no training image, or fewer held-out than `min_held_out`.
    """
    training, held_out = map(_relative_distances, distances, usual)
    return _compare_distances(training, held_out) if len(training) and len(held_out) >= min_held_out else None


def list_doubts(comparisons: Mapping[str, Comparison], n_held_out: int) -> list[str]:
    """Return why a generator does not pass: signs of copying, or too few images; [] if it passes."""
    if reasons := _explain_too_few(n_held_out):
        return reasons
    if not comparisons:
        return ["too few images differ from all others: copying cannot be distinguished from likeness"]
    return [reason for subject, comparison in comparisons.items() for reason in comparison.list_reasons(subject)]


@dataclass(frozen=True)
class _Moved:
    """Paired distances with and without the privacy loss, and a one-sided signed-rank test of their increase."""

    n: int
    median_difference: float
    raised: float  # share of pairs in which the distance grew
    p: float | None


def compare_paired(with_loss: _Distances, without_loss: _Distances) -> _Moved:
    """Return the paired comparison of Fig. 3; p is None without any difference.

    Reference: Wilcoxon, "Individual comparisons by ranking methods", Biometrics Bulletin 1, 1945.
    """
    difference = with_loss - without_loss
    p = float(wilcoxon(difference, alternative="greater").pvalue) if np.any(difference) else None
    return _Moved(len(difference), float(np.median(difference)), float((difference > 0).mean()), p)


# ---- distances between sets


def frechet_distance(a: _Features, b: _Features) -> float | None:
    """Return FID: |μ_a − μ_b|² + tr(Σ_a + Σ_b − 2 (Σ_a Σ_b)^½) of features a [n, d] and b [m, d].

    None for fewer than two images of either, which have no covariance; at least 0. With A
    and B the centred features over √(n − 1) and √(m − 1), the last trace is the sum of the singular values of A Bᵀ,
    which needs no root of a singular d × d matrix.
    """
    if min(len(a), len(b)) < 2:
        return None
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    shift = x.mean(axis=0) - y.mean(axis=0)
    x = (x - x.mean(axis=0)) / np.sqrt(len(x) - 1)
    y = (y - y.mean(axis=0)) / np.sqrt(len(y) - 1)
    trace = np.linalg.svd(x @ y.T, compute_uv=False).sum()
    return max(0.0, float(shift @ shift + (x**2).sum() + (y**2).sum() - 2 * trace))


def kernel_distance(a: _Features, b: _Features) -> float | None:
    """Return KID, the unbiased squared maximum mean discrepancy under the kernel (x·y/d + 1)³; it may be negative.

    None for fewer than two images of either.
    """
    from sklearn.metrics.pairwise import polynomial_kernel

    if min(len(a), len(b)) < 2:
        return None
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)

    def mean_kernel(u: NDArray[np.float64]) -> float:
        k = polynomial_kernel(u)
        return float((k.sum() - np.trace(k)) / (len(u) * (len(u) - 1)))

    return float(mean_kernel(x) + mean_kernel(y) - 2 * polynomial_kernel(x, y).mean())
