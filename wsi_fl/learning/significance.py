"""Paired t-tests between methods, corrected for multiple testing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

_NO_SPREAD = 1e-12
"""Differences this close to each other are equal but for rounding."""


@dataclass(frozen=True)
class Paired:
    """The mean of the differences a − b, their standard deviation, and how surprising that mean is."""

    difference: float
    sd: float | None
    """Of the differences, with n − 1 in the divisor; None for a single pair."""
    n: int
    p: float | None
    """Two-sided; None for fewer than two pairs, or where all differences are equal (t is not defined)."""


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Return Student's paired t-test.

    Args:
        a, b: n values each; a[k] and b[k] were measured under the same conditions.

    Raises:
        ValueError: when there is no pair, or a value without a partner.

    Example:
        >>> found = paired([0.71, 0.74, 0.70], [0.64, 0.65, 0.66])
        >>> round(found.difference, 4), round(found.p, 4), found.n
        (0.0667, 0.0444, 3)

    Reference: Student, "The probable error of a mean", Biometrika 6, 1908.
    """
    if not a or len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values make no pairs")
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    n, mean = len(differences), float(differences.mean())
    if n < 2:
        return Paired(mean, None, n, None)
    if float(np.ptp(differences)) <= _NO_SPREAD:
        return Paired(mean, 0.0, n, None)
    from scipy.stats import ttest_rel

    p = float(ttest_rel(a, b).pvalue)
    return Paired(mean, float(differences.std(ddof=1)), n, p if isfinite(p) else None)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values of one family of tests, adjusted by Holm's method.

    The k-th smallest of m is multiplied by m − k + 1, and none may fall below a smaller one's. None, a test that
    could not be made, stays None and does not count.

    Example:
        >>> holm([0.01, None, 0.04, 0.03])
        [0.03, None, 0.06, 0.06]

    Reference: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        corrected[index] = highest
    return corrected
