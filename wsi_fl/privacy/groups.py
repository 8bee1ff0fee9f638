"""Group privacy of DP-SGD: ε of a patient with k rows, from an ε per row.

Of the k rows of a group each enters a batch with probability q, so the sum moves by a vector v_S with |v_S| ≤ |S| C,
where |S| is binomial. One step is then a mixture P = Σ_S p_S N(v_S, σ²C²) against Q = N(0, σ²C²). The likelihood ratio
dP/dQ = Σ_S p_S exp(⟨x, v_S⟩/σ²C² − |v_S|²/2σ²C²) is a sum of log-normals whose exponents have the covariances
⟨v_S, v_T⟩/σ²C² ≤ |S||T|/σ². By Kahane's convexity inequality (1985) its expectation under every convex function is
largest where these are equalities: where all gradients have norm C and one direction. Rényi divergences of both
directions are such expectations, so what is left is a mixture of normals on a line,

    L(x) = Σ_j Binom(k, q)(j) exp(jx/σ − j²/2σ²),   x ~ N(0, 1),

integrated numerically. (Ganesh, "Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians
mechanisms", 2024, shows the same of hockey-stick divergences.) Patients with fewer rows are covered: some of the
gradients may be 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import expm1, inf, isfinite, log, log1p

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.types import UsageError

MOST_EPSILON = 1e3
"""Beyond it an ε says nothing."""

_ORDERS = 1 + np.geomspace(0.01, 63, 40)
_FAR = 12.0
"""Standard deviations beyond which a normal density is nothing."""
_WIDEST = 4000.0
"""Largest half-width of the range of integration; orders that need a wider one are left out."""
_CELLS = 1 << 21
_LARGE = 128
"""Rows of a group beyond which smaller ones are looked at first."""


def group_epsilon(mechanisms: Iterable[Mechanism], delta: float, k: int) -> float | None:
    """Return ε at `delta` for all k rows of a group together, the lesser of two bounds; None above 1000.

    Args:
        mechanisms: what was applied, with its ε per row.
        k: rows of the group, at least 1.

    Raises:
        UsageError: when k is below 1.

    Example:
        >>> step = Mechanism(sigma=1.4, clip=1.0, sample_rate=0.01, steps=1000)
        >>> [round(group_epsilon([step], 1e-5, k), 1) for k in (1, 4)]
        [1.1, 5.3]
    """
    if k < 1:
        raise UsageError(f"a group has at least one row, not {k}")
    applied = [one for one in mechanisms if one.steps]
    if k == 1 or any(one.sigma <= 0 for one in applied):
        value = epsilon(applied, delta)
    elif all(one.sample_rate == 1 for one in applied):  # the group is a row that is k times as long
        value = epsilon([replace(one, sigma=one.sigma / k) for one in applied], delta)
    else:
        size = min(k, _LARGE)
        value = by_mixture(applied, delta, size)
        while size < k and value <= MOST_EPSILON:  # ε grows with k, and so does the time
            size = min(k, 2 * size)
            value = by_mixture(applied, delta, size)
        value = min(value, by_textbook(applied, delta, k))
    return value if value <= MOST_EPSILON else None


def by_mixture(mechanisms: Sequence[Mechanism], delta: float, k: int) -> float:
    """Return ε by the mixture of normals, at `delta` and for k rows."""
    # 1. Rényi divergences in both directions, added over all steps
    total = np.zeros((2, len(_ORDERS)))
    for one in mechanisms:
        total = total + one.steps * np.array(_divergences(one.sigma, one.sample_rate, k))
    # 2. turned into ε (Canonne, Kamath and Steinke, 2020, proposition 12); the worse direction counts
    spent = total + np.log1p(-1 / _ORDERS) - np.log(delta * _ORDERS) / (_ORDERS - 1)
    return max(0.0, float(spent.min(axis=1).max()))


@lru_cache(maxsize=256)
def _divergences(sigma: float, rate: float, k: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (D_α(P‖Q), D_α(Q‖P)) of one step at every order, infinite where that is beyond computing."""
    if rate >= 1:  # the group as a whole is a shift by k
        shifted = tuple((_ORDERS * k**2 / (2 * sigma**2)).tolist())
        return shifted, shifted
    from scipy.special import logsumexp

    # 1. range of integration: at order α the integrand's mass lies up to αk/σ
    reach = _ORDERS * k / sigma + _FAR
    feasible = reach <= max(_WIDEST, float(reach[0]))
    if not (feasible.any() and reach[0] <= 10 * _WIDEST):
        nothing = (inf,) * len(_ORDERS)
        return nothing, nothing
    # 2. log L and the log-density of N(0, 1), times the step, on a grid
    step = min(0.05, sigma / 20)
    x = np.arange(-reach[feasible].max(), reach[feasible].max() + step, step)
    ratio = _log_ratio(x, sigma, rate, k)
    density = -(x**2) / 2 + log(step) - 0.5 * log(2 * np.pi)
    # 3. D_α(P‖Q) = log E_Q[L^α] / (α − 1), and D_α(Q‖P) = log E_Q[L^(1 − α)] / (α − 1)
    forth, back = np.full(len(_ORDERS), inf), np.full(len(_ORDERS), inf)
    for at in np.flatnonzero(feasible):
        order = _ORDERS[at]
        forth[at] = max(0.0, float(logsumexp(density + order * ratio)) / (order - 1))
        back[at] = max(0.0, float(logsumexp(density - (order - 1) * ratio)) / (order - 1))
    return tuple(forth.tolist()), tuple(back.tolist())


def _log_ratio(x: NDArray[np.float64], sigma: float, rate: float, k: int) -> NDArray[np.float64]:
    """Return log L(x), float64[len(x)]."""
    from scipy.special import gammaln, logsumexp

    j = np.arange(k + 1)
    weight = gammaln(k + 1) - gammaln(j + 1) - gammaln(k - j + 1) + j * log(rate) + (k - j) * log1p(-rate)
    weight = weight - j**2 / (2 * sigma**2)
    at_once = max(1, _CELLS // (k + 1))
    parts = [
        logsumexp(weight + np.outer(x[first : first + at_once], j / sigma), axis=1)
        for first in range(0, len(x), at_once)
    ]
    return np.concatenate(parts)


def by_textbook(mechanisms: Sequence[Mechanism], delta: float, k: int) -> float:
    """Return kε at the δ' for which δ' (e^{kε} − 1) / (e^ε − 1) is at most `delta` (Vadhan, 2017, lemma 2.2).

    The smaller δ', the larger ε; the largest one that suffices is searched among powers of ten. Any that suffices is a
    bound, so that the search may halve its steps.
    """

    def bound(step: int) -> float | None:
        """Return kε where this δ' suffices, infinity where kε is too large, None where δ' is too large."""
        smaller = delta * 10.0 ** (-step / 4)
        value = epsilon(mechanisms, smaller) if smaller > 0 else inf
        if not isfinite(value) or k * value > MOST_EPSILON:
            return inf
        grown = 1.0 if value == 0 else expm1(k * value) / expm1(value) if k * value < 700 else inf
        return k * value if smaller * (grown if value else k) <= delta else None

    first = bisect_left(range(_STEPS), True, key=lambda step: bound(step) is not None)
    found = bound(first) if first < _STEPS else None
    return inf if found is None else found


_STEPS = 1200
"""Quarters of a power of ten."""
