"""Evidence on a generator: how far its images are from the real ones, and whether it copies its training set.

Distances between sets: FID (Heusel et al., NeurIPS 2017) and KID (Bińkowski et al., ICLR 2018), on the features of
any encoder. The verdict on copying rests on a comparison that needs no threshold of its own: a generator that has
learned the *distribution* is as near to images of it that were held out as to those it was trained on; one that
has memorised is nearer to the latter. Distances are those to the generator over those to the nearest training image
of another patient: a fixed threshold means nothing across resolutions and tissues, and some images are far from all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import fisher_exact, mannwhitneyu, wilcoxon

Distances = NDArray[np.float64]
Features = NDArray[np.float32]

ALPHA = 0.01
"""Of each one-sided test of the verdict."""
_NEARER = 0.6
"""A shift fails where a training image is nearer than a held-out one in so many pairs (half without copying)."""
_TAIL = 0.05
"""The tail are distances below this quantile of the held-out images'."""
_TAIL_EXCESS = 2.0
"""A tail fails where training images are in it so many times as often."""
COPY = 0.1
"""A copy is nearer to its original than this share of what the nearest training image of another patient is."""
LEAST_HELD_OUT = 20
"""With fewer held-out images nothing can be told."""
CRITERIA = 1
"""Version of the verdict's rules; one that was reached by others does not count."""


@dataclass(frozen=True)
class Spread:
    """A set of distances in four numbers."""

    n: int
    median: float
    q05: float
    least: float


@dataclass(frozen=True)
class Moved:
    """Paired distances with and without the privacy loss, and the one-sided signed-rank test that the first are larger.

    Attributes:
        raised: share of pairs in which the distance grew.
    """

    n: int
    median_difference: float
    raised: float
    p: float | None


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

    training: Spread
    held_out: Spread
    nearer: float
    p_nearer: float
    tail_training: float
    tail_held_out: float
    p_tail: float
    copies_training: int
    copies_held_out: int

    def reasons(self, what: str) -> list[str]:
        """Why this looks like copying; empty where it does not."""
        found = []
        if self.copies_training and self._copied_more():
            found.append(
                f"{what}: {self.copies_training} of {self.training.n} training images are met almost exactly "
                f"(held-out images: {self.copies_held_out} of {self.held_out.n})"
            )
        if self.p_nearer < ALPHA and self.nearer >= _NEARER:
            found.append(
                f"{what}: training images are nearer than held-out ones in {self.nearer:.0%} of pairs "
                f"(p = {self.p_nearer:.1g})"
            )
        if self.p_tail < ALPHA and self.tail_training >= _TAIL_EXCESS * max(self.tail_held_out, _TAIL):
            found.append(
                f"{what}: {self.tail_training:.0%} of the training images are nearer than {_TAIL:.0%} of the "
                f"held-out ones are (p = {self.p_tail:.1g})"
            )
        return found

    def _copied_more(self) -> bool:
        return self.copies_training * self.held_out.n > self.copies_held_out * self.training.n


def spread(distances: Distances) -> Spread:
    values = np.asarray(distances, np.float64)
    return Spread(
        len(values), float(np.median(values)), float(np.quantile(values, 0.05)), float(values.min())
    )


def compared(training: Distances, held_out: Distances, *, copy_below: float = COPY) -> Comparison:
    """Whether training images are nearer to a generator than held-out ones.

    Args:
        training, held_out: distance of each real image to the nearest synthetic one (or to its projection).
        copy_below: what counts as met almost exactly.
    """
    a, b = np.asarray(training, np.float64), np.asarray(held_out, np.float64)
    test = mannwhitneyu(a, b, alternative="less")
    edge = float(np.quantile(b, _TAIL))
    inside = [int((a < edge).sum()), int((b < edge).sum())]
    table = [inside, [len(a) - inside[0], len(b) - inside[1]]]
    return Comparison(
        training=spread(a),
        held_out=spread(b),
        nearer=1 - float(test.statistic) / (len(a) * len(b)),
        p_nearer=float(test.pvalue),
        tail_training=inside[0] / len(a),
        tail_held_out=inside[1] / len(b),
        p_tail=float(fisher_exact(table, alternative="greater").pvalue),
        copies_training=int((a < copy_below).sum()),
        copies_held_out=int((b < copy_below).sum()),
    )


def over_usual(distance: Distances, usual: Distances) -> Distances:
    """Each image's distance over its usual one, that to the nearest different training image of another patient.

    By chance more images that are far from everything may be held out; what a generator remembers shows in the
    quotient. Other patients' images alone are compared with, for a held-out image has no others, and a twin of a
    training image is no measure of what is usual (twins are copied first). Where there is no such image (infinite),
    or a held-out image is in the training set too (0), the image is left out.

    Example:
        >>> over_usual(np.array([0.1, 0.3, 0.2]), np.array([0.2, 0.0, np.inf])).tolist()
        [0.5]
    """
    known = (usual > 0) & np.isfinite(usual)
    quotient: Distances = distance[known] / usual[known]
    return quotient


def can_be_told(training: Distances, held_out: Distances) -> bool:
    """Whether both have enough relative distances for a verdict."""
    return len(training) > 0 and len(held_out) >= LEAST_HELD_OUT


def moved(after: Distances, before: Distances) -> Moved:
    """The paired comparison of Fig. 3; p is None where nothing differs.

    Reference: Wilcoxon, "Individual comparisons by ranking methods", Biometrics Bulletin 1, 1945.
    """
    difference = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    p = float(wilcoxon(difference, alternative="greater").pvalue) if np.any(difference) else None
    return Moved(len(difference), float(np.median(difference)), float((difference > 0).mean()), p)


def doubts(comparisons: Mapping[str, Comparison], n_held_out: int) -> list[str]:
    """Return why a generator does not pass: it looks like copying, or that cannot be told. Empty where it passes."""
    if n_held_out < LEAST_HELD_OUT:
        return [
            f"only {n_held_out} held-out images (split val or test): with fewer than {LEAST_HELD_OUT} "
            "copying cannot be told from likeness"
        ]
    if not comparisons:
        return ["too few images differ from all others: copying cannot be told from likeness"]
    return [reason for what, one in comparisons.items() for reason in one.reasons(what)]


def frechet_distance(a: Features, b: Features) -> float:
    """FID: |μ_a − μ_b|² + tr(Σ_a + Σ_b − 2 (Σ_a Σ_b)^½) of features a [n, d] and b [m, d].

    With A and B the centred features over √(n − 1) and √(m − 1), the last trace is the sum of the singular values
    of A Bᵀ, which needs no root of a singular d × d matrix.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    shift = x.mean(axis=0) - y.mean(axis=0)
    x = (x - x.mean(axis=0)) / np.sqrt(len(x) - 1)
    y = (y - y.mean(axis=0)) / np.sqrt(len(y) - 1)
    shared = np.linalg.svd(x @ y.T, compute_uv=False).sum()
    return float(shift @ shift + (x**2).sum() + (y**2).sum() - 2 * shared)


def kernel_distance(a: Features, b: Features) -> float:
    """KID: the unbiased squared maximum mean discrepancy under the kernel (x·y/d + 1)³; it may be slightly negative."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    d = x.shape[1]

    def kernel(u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = (u @ v.T / d + 1) ** 3
        return found

    xx, yy = kernel(x, x), kernel(y, y)
    n, m = len(x), len(y)
    within = (xx.sum() - np.trace(xx)) / (n * (n - 1)) + (yy.sum() - np.trace(yy)) / (m * (m - 1))
    return float(within - 2 * kernel(x, y).mean())
