"""ε of a group of rows by its privacy loss distribution, bounded from above on a grid.

One step is dominated by the pair P = Σ_j Binom(k, q)(j) N(j, σ²) against Q = N(0, σ²), in both directions (Kahane, see
`accounting`; Ganesh, 2024, for hockey-stick divergences), and steps by the product of such pairs (Zhu, Dong and Wang,
"Optimal accounting of differential privacy via characteristic function", AISTATS 2022, theorem 10). With the likelihood
ratio L = dP/dQ, which grows along the line, δ(ε) = E_Q[(L − e^ε)₊] and E_Q[(1 − e^ε L)₊] are expectations of convex
functions of L. So each of these only makes δ larger:

1. A cell of the line, with L between two points of the grid, becomes two atoms at these points with the same masses
   under P and under Q (a spread of L with the same mean, by Jensen; "connecting the dots" of Doroshenko et al., PETS
   2022). Round-off goes to the atom with the larger loss.
2. Mass beyond the line's ends and omitted members of the mixture have infinite loss.
3. Losses of steps add up, by Fourier transform on a circle. Losses too large for the circle are bounded by Chernoff's
   bound and count as infinite; losses too small wrap around to its upper end.
4. A bound on the transform's round-off is added to δ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf, log, sqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from wsi_fl.privacy.accounting import Mechanism

_POINTS_PER_DEVIATION = 20
"""Points of the grid in the standard deviation of the loss of one step."""
_CELLS_PER_BIN, _COARSE_CELLS = 4, 2048
_MAX_BINS, _MAX_CELLS, _MAX_TERMS, _BATCH_TERMS = 1 << 15, 1 << 17, 1 << 23, 1 << 20
_MAX_CIRCLE_POINTS, _CIRCLE_DEVIATIONS = 1 << 19, 20
"""Most points of the circle, and the standard deviations of the whole loss that should fit on it."""
_END_SHARE = 1e-4
"""Share of δ for the mass omitted at each end."""
_MIN_TAIL = 1e-200
_MAX_NORMALS = 1024
_MAX_KINDS = 64
"""Most mechanisms with different noise or sampling rate."""
_MAX_STEP_LOSS = 500.0
"""Largest loss of one step; e^loss is not computed beyond it."""
_LOSS_ROUND_OFF = 1e-12
_TRANSFORM_ROUND_OFF = 4e-16
_EPSILON_PRECISION = 1e-6
_TILTS = np.geomspace(0.02, 20, 25)

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class _NormalMixture:
    """P in units of the noise: normals around `shift` float64[m] with `weight` float64[m].

    `lost` is the mass of omitted normals, and `reach` the distance from their middle at which normals are cut off.
    """

    weight: _Array
    shift: _Array
    lost: float
    reach: float

    @staticmethod
    def build_mixture(sigma: float, rate: float, k: int, tail: float) -> _NormalMixture:
        """Return the mixture of k rows, with a mass of up to `tail` omitted at both ends of the number of rows."""
        from scipy.special import bdtr, bdtrc, gammaln, ndtri

        reach = float(-ndtri(tail))
        if rate >= 1:
            return _NormalMixture(np.ones(1), np.array([k / sigma]), 0.0, reach)
        # 1. numbers of rows, so far around their mean that Bernstein's bound leaves less than any tail beyond them
        middle, far = k * rate, 45 * sqrt(k * rate * (1 - rate)) + 1000
        row_counts = np.arange(max(0, floor(middle - far)), min(k, ceil(middle + far)) + 1.0)
        below, above = bdtr(row_counts, k, rate), bdtrc(row_counts, k, rate)
        first, last = int((below <= tail).sum()), int((above > tail).sum())
        lost = float((below[first - 1] if first else 0.0) + above[last])
        # 2. their probabilities; very many are binned, each bin counting as its largest number with the longest step
        j = row_counts[first : last + 1]
        log_choices = gammaln(k + 1) - gammaln(j + 1) - gammaln(k - j + 1)
        weight = np.exp(log_choices + j * log(rate) + (k - j) * np.log1p(-rate))
        bin_starts = np.arange(0, len(j), -(-len(j) // _MAX_NORMALS))
        bin_ends = np.append(bin_starts[1:], len(j)) - 1
        return _NormalMixture(np.add.reduceat(weight, bin_starts), j[bin_ends] / sigma, lost, reach)

    @property
    def tail_masses(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(Mass of P, mass of Q) left of the ends, and right of them."""
        from scipy.special import ndtr

        left_end, right_end = self.line_ends
        below, above = ndtr(left_end - self.shift), ndtr(self.shift - right_end)
        return (float(self.weight @ below), float(ndtr(left_end))), (
            float(self.weight @ above),
            float(ndtr(-right_end)),
        )

    def loss_moments(self) -> tuple[float, float]:
        """Return approximate mean and variance of the loss of P against Q, by which the grid is chosen."""
        edges = np.linspace(*self.line_ends, _COARSE_CELLS)
        p, _ = self.cell_masses(edges)
        ratio = self.log_ratio((edges[1:] + edges[:-1]) / 2)
        mean = float(p @ ratio)
        return mean, float(p @ (ratio - mean) ** 2)

    @property
    def line_ends(self) -> tuple[float, float]:
        """The ends of the computed part of the line."""
        return -self.reach, float(self.shift[-1] + self.reach)

    def log_ratio(self, x: _Array) -> _Array:
        """Return log dP/dQ at x float64[n]."""
        from scipy.special import logsumexp

        at_once = max(1, _BATCH_TERMS // len(self.shift))
        parts = [
            logsumexp(np.outer(x[i : i + at_once], self.shift) - self.shift**2 / 2, axis=1, b=self.weight)
            for i in range(0, len(x), at_once)
        ]
        return np.concatenate(parts)

    def cell_masses(self, edges: _Array) -> tuple[_Array, _Array]:
        """Return the masses float64[n - 1] of the cells between edges float64[n], under P and under Q."""
        p = np.zeros(len(edges) - 1)
        for weight, shift in zip(self.weight.tolist(), self.shift.tolist(), strict=True):
            p += weight * _normal_masses(edges - shift)
        return p, _normal_masses(edges)


def _normal_masses(edges: _Array) -> _Array:
    """Return the mass of N(0, 1) in each cell, with all its digits in both tails."""
    from scipy.special import ndtr

    low, high, is_right = ndtr(edges), ndtr(-edges), edges[:-1] > 0
    mass: _Array = np.where(is_right, high[:-1] - high[1:], low[1:] - low[:-1])
    return mass


@dataclass(frozen=True)
class _LossGrid:
    """The loss of one step on the grid: `mass` float64[n] at (first + i) h, and `lost` where it is infinite."""

    first: int
    mass: _Array
    lost: float

    def trim_ends(self, tail: float) -> _LossGrid:
        """Return the loss without far ends: a mass of up to `tail` is lost at the top, or moved up at the bottom."""
        top = len(self.mass) - int(np.searchsorted(np.cumsum(self.mass[::-1]), tail))
        bottom = min(int(np.searchsorted(np.cumsum(self.mass), tail)), top - 1)
        mass = self.mass[bottom:top].copy()
        mass[0] += self.mass[:bottom].sum()
        return _LossGrid(self.first + bottom, mass, self.lost + float(self.mass[top:].sum()))


def _step_losses(mixture: _NormalMixture, h: float, tail: float, max_terms: int) -> tuple[_LossGrid, _LossGrid]:
    """Return the loss of P against Q under P, and that of Q against P under Q, each bounded from above."""
    # 1. cells, so many that few lie across a point of the grid
    left_end, right_end = mixture.line_ends
    low_end, high_end = mixture.log_ratio(np.array([left_end, right_end]))
    n_cells = ceil(_CELLS_PER_BIN * (high_end - low_end) / h)
    n_cells = min(_MAX_CELLS, max_terms // len(mixture.shift), n_cells)
    edges = np.linspace(left_end, right_end, max(_COARSE_CELLS, n_cells))
    p, q = mixture.cell_masses(edges)
    ratio = mixture.log_ratio(edges)
    # 2. each becomes two atoms at points of the grid around it, with its masses
    error = _LOSS_ROUND_OFF * (1 + np.abs(ratio))
    low = np.floor((ratio - error)[:-1] / h).astype(np.int64)
    high = np.maximum(np.ceil((ratio + error)[1:] / h).astype(np.int64), low + 1)
    grown, width = q * np.exp(low * h), np.expm1((high - low) * h)
    spread, error = (p - grown) / width, _LOSS_ROUND_OFF * (p + grown) / width
    p_high = np.clip((spread + error) * np.exp((high - low) * h), 0, p)
    q_low = np.clip(q - (spread - error) * np.exp(-low * h), 0, q)
    first, last = int(low.min()), int(high.max())

    def place_mass(positions: NDArray[np.int64], mass: _Array) -> _Array:
        placed: _Array = np.bincount(positions - first, weights=mass, minlength=last - first + 1).astype(np.float64)
        return placed

    under_p = place_mass(high, p_high) + place_mass(low, p - p_high)
    under_q = place_mass(low, q_low) + place_mass(high, q - q_low)
    # 3. beyond the ends, losses are smaller than at the end, or count as infinite
    (p_below, q_below), (p_above, q_above) = mixture.tail_masses
    under_p[high[0] - first] += p_below
    under_q[low[-1] - first] += q_above
    forth = _LossGrid(first, under_p, mixture.lost + p_above)
    back = _LossGrid(-last, under_q[::-1], q_below)
    return forth.trim_ends(tail), back.trim_ends(tail)


def min_mean_loss(mechanisms: Sequence[Mechanism], k: int) -> float:
    """Return a lower bound on the mean privacy loss of all steps for k rows.

    The mean is the Kullback–Leibler divergence; of all P with a mean of kq/σ the normal one has the least.
    """
    return sum(mechanism.steps * (k * mechanism.sample_rate / mechanism.sigma) ** 2 / 2 for mechanism in mechanisms)


def epsilon_by_loss(mechanisms: Sequence[Mechanism], delta: float, k: int, max_epsilon: float) -> float:
    """Return ε at `delta` for all k rows of a group; infinite above `max_epsilon`, or where it cannot be computed.

    Args:
        mechanisms: with noise and at least one step each.
    """
    times: Counter[tuple[float, float]] = Counter()  # steps of each noise multiplier and sampling rate
    for mechanism in mechanisms:
        times[mechanism.sigma, mechanism.sample_rate] += mechanism.steps
    steps = np.array([*times.values()], np.float64)
    tail = delta * _END_SHARE / float(steps.sum())
    if tail < _MIN_TAIL or len(times) > _MAX_KINDS:
        return inf
    mixtures = [_NormalMixture.build_mixture(sigma, rate, k, tail) for sigma, rate in times]
    # 1. the grid: fine against the whole loss, and not finer than can be computed
    if any(np.abs(mixture.log_ratio(np.array(mixture.line_ends))).max() > _MAX_STEP_LOSS for mixture in mixtures):
        return inf
    spread = sqrt(sum(n * mixture.loss_moments()[1] for n, mixture in zip(steps, mixtures, strict=True)))
    span = max(float(np.ptp(mixture.log_ratio(np.array(mixture.line_ends)))) for mixture in mixtures)
    h = max(
        spread / (_POINTS_PER_DEVIATION * sqrt(float(steps.sum()))),
        span / _MAX_BINS,
        _CIRCLE_DEVIATIONS * spread / _MAX_CIRCLE_POINTS,
    )
    # 2. both directions; the worse one counts
    losses = [_step_losses(mixture, h, tail, _MAX_TERMS // len(mixtures)) for mixture in mixtures]
    epsilons = (
        _compose_losses([pair[direction] for pair in losses], steps, h, delta, max_epsilon) for direction in (0, 1)
    )
    return max(epsilons)


def _compose_losses(losses: Sequence[_LossGrid], steps: _Array, h: float, delta: float, max_epsilon: float) -> float:
    """Return ε at `delta` of all steps of each loss."""
    lost = float(sum(n * step_loss.lost for n, step_loss in zip(steps, losses, strict=True)))
    # 1. the circle holds all but a mass of `_END_SHARE` δ at each end
    low, high = _circle_ends(losses, steps, h, delta * _END_SHARE)
    size = 1 << max(10, (high - low).bit_length())
    if size > _MAX_CIRCLE_POINTS:
        return inf
    # 2. losses of steps add up
    spectrum = np.ones(size // 2 + 1, np.complex128)
    for n, step_loss in zip(steps, losses, strict=True):
        place = (step_loss.first + np.arange(len(step_loss.mass))) % size
        spectrum *= np.fft.rfft(np.bincount(place, weights=step_loss.mass, minlength=size)) ** n
    mass: _Array = np.roll(np.fft.irfft(spectrum, size), -(low % size)).astype(np.float64)
    # 3. round-off in all points together is at most this share of the norm
    error = _TRANSFORM_ROUND_OFF * float(steps.sum()) * log(size) * float(np.sqrt((mass**2).sum() * size))
    remaining_delta = delta * (1 - _END_SHARE) - lost - error
    loss: _Array = (low + np.arange(size, dtype=np.float64)) * h
    return _epsilon_from_masses(loss, np.maximum(mass, 0), remaining_delta, max_epsilon)


def _circle_ends(losses: Sequence[_LossGrid], steps: _Array, h: float, tail: float) -> tuple[int, int]:
    """Return the ends of the whole loss on the grid, with a mass of at most `tail` beyond, by Chernoff's bound."""
    bounds = []
    for sign in (-1, 1):
        values = [sign * h * (step_loss.first + np.arange(len(step_loss.mass))) for step_loss in losses]
        scale = sqrt(
            sum(
                n * float(step_loss.mass @ (v - step_loss.mass @ v) ** 2)
                for n, step_loss, v in zip(steps, losses, values, strict=True)
            )
        )
        best = inf
        for tilt in sqrt(-2 * log(tail)) / max(scale, h) * _TILTS:
            total = -log(tail)
            for n, step_loss, value in zip(steps, losses, values, strict=True):
                top = float(tilt * value[-1 if sign > 0 else 0])
                total += n * (top + log(float(step_loss.mass @ np.exp(tilt * value - top))))
            best = min(best, total / tilt)
        bounds.append(ceil(best / h) + 1)
    return -bounds[0], bounds[1]


def _epsilon_from_masses(loss: _Array, mass: _Array, delta: float, max_epsilon: float) -> float:
    """Return the least ε with Σ mass (1 − e^(ε − loss))₊ of at most `delta`, from above."""

    def delta_at(value: float) -> float:
        at = int(np.searchsorted(loss, value, "right"))
        return float(mass[at:] @ -np.expm1(value - loss[at:]))

    if delta <= 0 or delta_at(max_epsilon) > delta:
        return inf
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, max_epsilon
    while high - low > _EPSILON_PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high
