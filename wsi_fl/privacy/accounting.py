"""ε of the subsampled Gaussian mechanism by Rényi differential privacy (Mironov et al., 2019).

Without sampling, as for class statistics, ε is exact: the composition of Gaussian mechanisms is one Gaussian mechanism
with a known δ(ε) (Balle and Wang, ICML 2018, theorem 8). The privacy unit is one row of a store by default; the number
of rows is public.

Group privacy, ε of a patient with k rows, follows from an ε per row. Of the k rows of a group each enters a batch with
probability q, so the sum moves by a vector v_S with |v_S| ≤ |S| C, where |S| is binomial. One step is then a mixture P
= Σ_S p_S N(v_S, σ²C²) against Q = N(0, σ²C²). The likelihood ratio dP/dQ = Σ_S p_S exp(⟨x, v_S⟩/σ²C² − |v_S|²/2σ²C²) is
a sum of log-normals whose exponents have the covariances ⟨v_S, v_T⟩/σ²C² ≤ |S||T|/σ². By Kahane's convexity inequality
(1985) its expectation under every convex function is largest where these are equalities: where all gradients have norm
C and one direction. Rényi divergences of both directions are such expectations, so a mixture of normals on a line
remains,

    L(x) = Σ_j Binom(k, q)(j) exp(jx/σ − j²/2σ²),   x ~ N(0, 1),

integrated numerically. (Ganesh, "Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians
mechanisms", 2024, shows the same of hockey-stick divergences, which are expectations of convex functions too; their
sum, `epsilon_by_loss`, is tighter where rows are rare.) Patients with fewer rows are covered: some of the gradients may
be 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp, expm1, inf, isfinite, log, log1p
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.renyi import NORMAL_CUTOFF, compute_step_rdp, convert_divergences
from wsi_fl.types import UsageError

_ORDERS = (*(1 + tenths / 10 for tenths in range(1, 100)), *range(12, 64))
"""The Rényi orders of Opacus, copied because its import takes seconds."""
WHOLE_ORDERS: tuple[float, ...] = tuple(range(2, 65))
"""Orders for an ε that is computed a hundred times faster and is a little too high."""
ACCOUNTANT = "rdp"
_EPSILON_PRECISION = 1e-12  # relative precision of an exact ε
_BISECTION_STEPS = 60  # of an interval of rates, to the precision of a float64
_MIN_REMAINING_SHARE = 0.005  # fraction of the target ε below which no noise multiplier is searched


@dataclass(frozen=True)
class Mechanism:
    """`steps` applications of the Gaussian mechanism to Poisson samples.

    Attributes:
        sigma: noise multiplier; the noise's standard deviation is sigma * clip.
        clip: clipping norm C, bound on the L2 norm of one unit's gradient.
        sample_rate: probability q of each unit to enter a batch.
        steps: number of applications.
    """

    sigma: float
    clip: float
    sample_rate: float
    steps: int


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Return ceil(n / B), the inverse of the sample rate: an epoch sees each row once on average.

    Raises:
        UsageError: when n or B is below 1.
    """
    if n < 1 or batch_size < 1:
        raise UsageError(f"an epoch needs at least one row and batches of at least one, not n={n}, B={batch_size}")
    return ceil(n / batch_size)


def plan_mechanism(n: int, batch_size: int, epochs: float, sigma: float, clip: float) -> Mechanism:
    """Return the mechanism of `epochs` epochs over n rows in batches of `batch_size` on average.

    Raises:
        UsageError: when a number is out of range.
    """
    if not (0 <= epochs < inf and 0 <= sigma < inf):
        raise UsageError(f"epochs and sigma must be numbers from 0 on: epochs={epochs:g}, sigma={sigma:g}")
    per_epoch = steps_per_epoch(n, batch_size)
    return Mechanism(sigma, clip, 1 / per_epoch, round(epochs * per_epoch))


class Composition:
    """Mechanisms applied one after the other, whose sums are kept: ε takes as long however many they are.

    Args:
        mechanisms: the first ones.
        orders: Rényi orders to take the least bound over; every choice is valid.
    """

    def __init__(self, mechanisms: Iterable[Mechanism] = (), orders: tuple[float, ...] = _ORDERS) -> None:
        self.has_noise, self.is_sampled = True, False
        self._precision = 0.0  # Σ steps / σ²
        self._orders, self._divergences = orders, np.zeros(len(orders))
        self._pending: list[Mechanism] = []  # not yet in the divergences, which only sampling needs
        for mechanism in mechanisms:
            self.add_mechanism(mechanism)

    def add_mechanism(self, mechanism: Mechanism) -> None:
        """Add a mechanism; one without steps changes nothing."""
        if not mechanism.steps:
            return
        self._pending.append(mechanism)
        self.is_sampled |= mechanism.sample_rate != 1
        if mechanism.sigma > 0:
            self._precision += mechanism.steps / mechanism.sigma**2
        else:
            self.has_noise = False

    @property
    def gaussian_mu(self) -> float:
        """Return μ of the composition without sampling, which is one Gaussian mechanism."""
        return float(self._precision**0.5)

    def sum_divergences(self) -> NDArray[np.float64]:
        """Return the Rényi divergence for every order, float64[orders], the sum over all steps."""
        total = self._divergences
        for mechanism in self._pending:
            total = total + mechanism.steps * compute_step_rdp(mechanism.sigma, mechanism.sample_rate, self._orders)
        self._divergences, self._pending = total, []
        return total

    def with_mechanisms(self, mechanisms: Iterable[Mechanism]) -> Composition:
        """Return the composition with further mechanisms; this one stays as it is."""
        if self.is_sampled and self.has_noise:
            self.sum_divergences()
        extended = copy(self)
        extended._pending = [*self._pending]
        for mechanism in mechanisms:
            extended.add_mechanism(mechanism)
        return extended

    def compute_epsilon(self, delta: float | None) -> float:
        """Return ε at `delta`; 0 without mechanisms, infinite without noise.

        Raises:
            UsageError: when `delta` is not between 0 and 1.
        """
        if delta is None or not 0 < delta < 1:
            raise UsageError(f"delta must lie between 0 and 1, not {delta}")
        if not self.has_noise:
            return inf
        # 1. without sampling: Gaussian mechanisms compose to one, with μ² = Σ steps / σ²
        unsampled = _gaussian_epsilon(self.gaussian_mu, delta)
        # 2. sampling never costs more
        return min(unsampled, self.renyi_epsilon(delta)) if self.is_sampled else unsampled

    def renyi_epsilon(self, delta: float) -> float:
        """Return ε at `delta` by Rényi divergences, so that plans can be compared; there must be noise."""
        return convert_divergences(self.sum_divergences(), self._orders, delta)


def epsilon(
    mechanisms: Mechanism | Iterable[Mechanism], delta: float | None = None, orders: tuple[float, ...] = _ORDERS
) -> float:
    """Return ε of the composition of all mechanisms at `delta`; 0 for none, infinite without noise.

    ε is exact where every mechanism sees all records, and an upper bound elsewhere.

    Args:
        mechanisms: a single one, such as the plan of a round, or several.
        delta: None for the δ of a single plan.
        orders: Rényi orders to take the least bound over; every choice is valid.

    Raises:
        UsageError: when `delta` is not between 0 and 1.

    Example (ProxyFL, Table 2, site C1):
        >>> round(epsilon([plan_mechanism(n=2338, batch_size=32, epochs=30, sigma=1.4, clip=0.7)], 1e-5), 2)
        2.36
    """
    if isinstance(mechanisms, Mechanism):
        delta = getattr(mechanisms, "delta", None) if delta is None else delta
        mechanisms = [mechanisms]
    return Composition(mechanisms, orders).compute_epsilon(delta)


def renyi_epsilon(mechanisms: Sequence[Mechanism], delta: float, orders: tuple[float, ...] = _ORDERS) -> float:
    """Return ε by Rényi divergences for every mechanism, so that plans can be compared.

    Args:
        mechanisms: with noise.
    """
    return Composition(mechanisms, orders).renyi_epsilon(delta)


def pricing_method(mechanisms: Sequence[Mechanism], delta: float) -> Literal["exact", "rdp", "unsampled"]:
    """Return how ε is computed: exactly, by Rényi divergences, or as if nothing was sampled."""
    applied = Composition(mechanisms)
    if not (applied.has_noise and applied.is_sampled):
        return "exact"
    return "rdp" if applied.renyi_epsilon(delta) < _gaussian_epsilon(applied.gaussian_mu, delta) else "unsampled"


def max_tpr(mechanisms: Iterable[Mechanism], false_positive_rate: float = 0.01) -> float:
    """Return the largest true positive rate of any membership test at a false positive rate.

    The test may use all releases of the mechanisms and all other records. This is the trade-off curve of the
    composition itself (Dong, Roth and Su, "Gaussian differential privacy", JRSS B 2022), more informative than any
    (ε, δ). It is exact where every mechanism sees all records, and elsewhere an upper bound (Balle et al., "Hypothesis
    testing interpretations and Rényi differential privacy", AISTATS 2020). Mechanisms without noise hide nothing.

    Raises:
        UsageError: when the test's false positive rate is not between 0 and 1.
    """
    from scipy.special import ndtr, ndtri

    if not 0 < false_positive_rate < 1:
        raise UsageError(f"a false positive rate must lie between 0 and 1, not {false_positive_rate}")
    used = Composition(mechanisms)
    if not used.has_noise:
        return 1.0
    # 1. without sampling: one Gaussian mechanism, whose trade-off curve is Φ(Φ⁻¹(α) + μ)
    unsampled = float(ndtr(ndtri(false_positive_rate) + used.gaussian_mu))
    if not used.is_sampled:
        return unsampled
    # 2. with sampling: no event may be further apart than the Rényi divergence of any order allows
    order, divergence = np.asarray(_ORDERS), used.sum_divergences()
    low, high = np.full(len(order), false_positive_rate), np.ones(len(order))
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        fits = _bernoulli_divergence(middle, false_positive_rate, order) <= divergence
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return min(unsampled, float(high.min()))


def _bernoulli_divergence(p: NDArray[np.float64], q: float, order: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Rényi divergence, for every order, of a coin with probability p of heads from a coin with q."""
    with np.errstate(divide="ignore"):
        heads = order * np.log(p) + (1 - order) * np.log(q)
        tails = order * np.log1p(-p) + (1 - order) * np.log1p(-q)
    divergence: NDArray[np.float64] = np.logaddexp(heads, tails) / (order - 1)
    return divergence


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """Return ε at `delta` of a Gaussian mechanism with a sensitivity of `mu` standard deviations of its noise.

    Source: Balle and Wang, "Improving the Gaussian mechanism for differential privacy", ICML 2018, theorem 8.
    """
    if mu == 0 or _gaussian_delta(0.0, mu) <= delta:
        return 0.0
    # 1. δ(ε) falls: double ε until it suffices
    low, high = 0.0, 1.0
    while _gaussian_delta(high, mu) > delta:
        low, high = high, 2 * high
    # 2. bisect, and return the upper end
    while high - low > _EPSILON_PRECISION * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if _gaussian_delta(middle, mu) > delta else (low, middle)
    return high


def _gaussian_delta(value: float, mu: float) -> float:
    """Return δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ); the second term is computed by its logarithm."""
    from scipy.special import log_ndtr, ndtr

    exponent = value + float(log_ndtr(-mu / 2 - value / mu))
    return float(ndtr(mu / 2 - value / mu)) - exp(min(exponent, 0.0))


def find_sigma(
    target_epsilon: float,
    sample_rate: float,
    steps: int,
    delta: float,
    *,
    spent: Sequence[Mechanism] = (),
    orders: tuple[float, ...] = _ORDERS,
    near: float = 1.0,
    price: Callable[[Sequence[Mechanism], float, tuple[float, ...]], float] = epsilon,
) -> float:
    """Return the smallest noise multiplier, to three decimals, for a target ε on top of the mechanisms in `spent`.

    The search begins at `near`; `price` computes ε of all mechanisms.

    Raises:
        UsageError: when no noise multiplier up to 1000 suffices, or next to nothing of the target is left.
    """

    def price_sigma(thousandths: int) -> float:
        if not thousandths:
            return inf
        return price([*spent, Mechanism(thousandths / 1000, 1.0, sample_rate, steps)], delta, orders)

    low, high = 0, 1_000_000  # too little, enough
    spent_epsilon = price(spent, delta, orders) if spent else 0.0
    is_exhausted = spent_epsilon > (1 - _MIN_REMAINING_SHARE) * target_epsilon
    if not 0 < target_epsilon < inf or is_exhausted or price_sigma(high) > target_epsilon:
        spent_text = f" on top of {spent_epsilon:.3g}" if spent else ""
        raise UsageError(f"no noise level reaches epsilon {target_epsilon:g}{spent_text} at delta {delta:g}")
    thousandths, step = max(1, round(near * 1000)), 0
    while high - low > 1:
        value = price_sigma(thousandths)
        low, high = (low, thousandths) if value <= target_epsilon else (thousandths, high)
        # ε falls roughly as 1/σ; an evaluation can take half a second
        next_thousandths = round(thousandths * min(4.0, max(0.25, value / target_epsilon)))
        if abs(next_thousandths - thousandths) <= 2:  # then on to the other side of the target
            step = 2 * step + 1
            next_thousandths = thousandths - step if value <= target_epsilon else thousandths + step
        thousandths = next_thousandths if low < next_thousandths < high else (low + high) // 2
    return high / 1000


MAX_GROUP_EPSILON = 1e3
"""The largest ε that is reported."""

_GROUP_ORDERS = 1 + np.geomspace(0.01, 63, 40)
_MAX_HALF_WIDTH = 4000.0  # largest half-width of the range of integration; orders that need more are left out
_GRID_CELLS = 1 << 21
_LARGE_GROUP = 128  # rows of a group beyond which smaller groups are computed first
_MAX_GROUP_ROWS = 2048  # beyond which the integrals take too long


def group_epsilon(mechanisms: Iterable[Mechanism], delta: float, k: int) -> float | None:
    """Return an upper bound on ε at `delta` for all k rows of a group; None above 1000.

    The bound is never below ε of one row, which is computed another way.

    Raises:
        UsageError: when k is below 1.

    Example:
        >>> step = Mechanism(sigma=1.4, clip=1.0, sample_rate=0.01, steps=1000)
        >>> [round(group_epsilon([step], 1e-5, k), 1) for k in (1, 4)]
        [1.1, 4.8]
    """
    if k < 1:
        raise UsageError(f"a group has at least one row, not {k}")
    applied = [mechanism for mechanism in mechanisms if mechanism.steps]
    if k == 1 or any(mechanism.sigma <= 0 for mechanism in applied):
        value = epsilon(applied, delta)
    elif all(mechanism.sample_rate == 1 for mechanism in applied):  # the group is a row of k times the length
        value = epsilon([replace(mechanism, sigma=mechanism.sigma / k) for mechanism in applied], delta)
    else:
        value = max(epsilon(applied, delta), _sampling_group_epsilon(tuple(applied), delta, k))
    return value if value <= MAX_GROUP_EPSILON else None


@lru_cache(maxsize=256)
def _sampling_group_epsilon(mechanisms: tuple[Mechanism, ...], delta: float, k: int) -> float:
    """Return ε of k rows where batches are sampled; infinite beyond 1000.

    The distribution of the privacy loss gives the least bound wherever it can be computed. Elsewhere the bound is the
    lesser of the bounds by Rényi divergences and by the textbook.
    """
    from wsi_fl.privacy.loss_distribution import epsilon_by_loss, min_mean_loss  # and with it SciPy

    if min_mean_loss(mechanisms, k) > 2 * MAX_GROUP_EPSILON:  # and no bound by divergences is below that
        return inf
    value = epsilon_by_loss(mechanisms, delta, k, MAX_GROUP_EPSILON)
    if value <= MAX_GROUP_EPSILON:
        return value
    if k > _MAX_GROUP_ROWS:
        return _textbook_epsilon(mechanisms, delta, k)
    size = min(k, _LARGE_GROUP)
    value = _mixture_epsilon(mechanisms, delta, size)
    while size < k and value <= MAX_GROUP_EPSILON:  # ε grows with k, and so does the time
        size = min(k, 2 * size)
        value = _mixture_epsilon(mechanisms, delta, size)
    return min(value, _textbook_epsilon(mechanisms, delta, k))


def _mixture_epsilon(mechanisms: Sequence[Mechanism], delta: float, k: int) -> float:
    """Return ε of k rows at `delta` by the mixture of normals."""
    # 1. Rényi divergences in both directions, added over all steps
    total = np.zeros((2, len(_GROUP_ORDERS)))
    for mechanism in mechanisms:
        total = total + mechanism.steps * _group_divergences(mechanism.sigma, mechanism.sample_rate, k)
    # 2. turned into ε (Canonne, Kamath and Steinke, 2020, proposition 12); the worse direction counts
    spent = total + np.log1p(-1 / _GROUP_ORDERS) - np.log(delta * _GROUP_ORDERS) / (_GROUP_ORDERS - 1)
    return max(0.0, float(spent.min(axis=1).max()))


@lru_cache(maxsize=256)
def _group_divergences(sigma: float, rate: float, k: int) -> NDArray[np.float64]:
    """Return [2, orders], D_α(P‖Q) and D_α(Q‖P) of one step, infinite where it cannot be computed."""
    if rate >= 1:  # the group as a whole is a shift by k
        return np.stack([_GROUP_ORDERS * k**2 / (2 * sigma**2)] * 2)
    from scipy.special import logsumexp

    # 1. range of integration: at order α the integrand's mass lies up to αk/σ
    reach = _GROUP_ORDERS * k / sigma + NORMAL_CUTOFF
    feasible = reach <= max(_MAX_HALF_WIDTH, float(reach[0]))
    divergences = np.full((2, len(_GROUP_ORDERS)), inf)
    if not (feasible.any() and reach[0] <= 10 * _MAX_HALF_WIDTH):
        return divergences
    # 2. log L and the log-density of N(0, 1), times the step, on a grid
    step = min(0.05, sigma / 20)
    x = np.arange(-reach[feasible].max(), reach[feasible].max() + step, step)
    ratio = _log_ratio(x, sigma, rate, k)
    density = -(x**2) / 2 + log(step) - 0.5 * log(2 * np.pi)
    # 3. D_α(P‖Q) = log E_Q[L^α] / (α − 1), and D_α(Q‖P) = log E_Q[L^(1 − α)] / (α − 1)
    for at in np.flatnonzero(feasible):
        order = _GROUP_ORDERS[at]
        logs = (logsumexp(density + power * ratio) for power in (order, 1 - order))
        divergences[:, at] = [max(0.0, float(value) / (order - 1)) for value in logs]
    return divergences


def _log_ratio(x: NDArray[np.float64], sigma: float, rate: float, k: int) -> NDArray[np.float64]:
    """Return log L(x), float64[len(x)]."""
    from scipy.special import gammaln, logsumexp

    j = np.arange(k + 1)
    weight = gammaln(k + 1) - gammaln(j + 1) - gammaln(k - j + 1) + j * log(rate) + (k - j) * log1p(-rate)
    weight = weight - j**2 / (2 * sigma**2)
    at_once = max(1, _GRID_CELLS // (k + 1))
    parts = [
        logsumexp(weight + np.outer(x[first : first + at_once], j / sigma), axis=1)
        for first in range(0, len(x), at_once)
    ]
    return np.concatenate(parts)


def _textbook_epsilon(mechanisms: Sequence[Mechanism], delta: float, k: int) -> float:
    """Return kε at the δ' for which δ' (e^{kε} − 1) / (e^ε − 1) is at most `delta` (Vadhan, 2017, lemma 2.2).

    The smaller δ', the larger ε; the largest sufficient δ' is searched among powers of ten. Every sufficient δ' gives a
    bound, so the search may bisect.
    """

    def epsilon_bound(step: int) -> float | None:
        smaller = delta * 10.0 ** (-step / 4)
        value = epsilon(mechanisms, smaller) if smaller > 0 else inf
        if not isfinite(value) or k * value > MAX_GROUP_EPSILON:
            return inf
        factor = 1.0 if value == 0 else expm1(k * value) / expm1(value) if k * value < 700 else inf
        return k * value if smaller * (factor if value else k) <= delta else None

    first = bisect_left(range(_TEXTBOOK_STEPS), True, key=lambda step: epsilon_bound(step) is not None)
    result = epsilon_bound(first) if first < _TEXTBOOK_STEPS else None
    return inf if result is None else result


_TEXTBOOK_STEPS = 1200  # quarters of a power of ten
