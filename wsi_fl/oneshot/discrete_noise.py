"""Distributed discrete Gaussian noise: sites add shares of it to whole numbers, so that their sum is private.

Each site quantizes its statistics to whole numbers, adds a share of the noise (`discrete_gaussian` with σ from
`share_sigma`), and the sum is formed by secure aggregation. `noise_multiplier` gives the cost on the account of a site.

Sources:
    Canonne, Kamath & Steinke (2020), The discrete Gaussian for differential privacy: the sampler, and the Rényi
    divergence of shifted discrete Gaussians, which is at most that of normal distributions (arXiv:2004.00010).
    Kairouz, Liu & Steinke (2021), The distributed discrete Gaussian mechanism: sums of them (arXiv:2102.06387).
"""

from __future__ import annotations

from fractions import Fraction
from math import exp, inf, isfinite, nextafter, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import UsageError, WsiFlError

_MAX_SIGMA = 2.0**50
"""The largest σ: a draw beyond an int64 is one of 2¹³ σ, less likely than exp(−2²⁴)."""
_MAX_STEPS = 2.0**62  # bound on the whole numbers of a sum, so that noise fits into an int64
_NEGLIGIBLE_GAP = 1e-100
"""The largest negligible distance between a sum of discrete Gaussians and one discrete Gaussian."""
STEPS_PER_UNIT = float(1 << 24)
"""Steps in the length of one row: rounding is far below the noise, and sums of millions of rows fit into 64 bits. As a
power of two it makes products with it exact."""
NOISE_MARGIN = 1e-6
"""Relative excess of the noise for round-off of sums and the difference between discrete and continuous noise, which is
below 10⁻¹² at such scales."""


def discrete_gaussian(sigma: Fraction | float, size: int, stream: CipherStream) -> NDArray[np.int64]:
    """Draw int64[size] from the discrete Gaussian: whole numbers x with probability ∝ exp(−x² / 2σ²), exactly.

    Every comparison is of whole numbers, so that no digits of a float reveal the noise. This is algorithm 3 of Canonne,
    Kamath & Steinke (2020): a draw from the discrete Laplace distribution with scale t = ⌊σ⌋ + 1 is accepted with
    probability exp(−(|y| − σ²/t)² / 2σ²). A float σ is taken as its exact fraction.

    Raises:
        UsageError: when σ is not between 0 and 2⁵⁰.
    """
    if not 0 < sigma <= _MAX_SIGMA:
        raise UsageError(f"noise needs a sigma above 0 and up to 2**50, not {sigma}")
    variance = Fraction(sigma) ** 2
    return np.fromiter((_sample_gaussian(variance, int(sigma) + 1, stream) for _ in range(size)), np.int64, size)


def _bernoulli_exp(n: int, d: int, bits: CipherStream) -> bool:
    """Return True with probability exp(−n / d), for n ≥ 0 and d > 0 (algorithm 1)."""
    while n > d:
        if not _bernoulli_exp(1, 1, bits):
            return False
        n -= d
    k = 1
    while bits.randbelow(d * k) < n:  # with probability (n / d) / k
        k += 1
    return k % 2 == 1


def _sample_laplace(t: int, bits: CipherStream) -> int:
    """Draw a whole number y with probability ∝ exp(−|y| / t) (algorithm 2 with s = 1)."""
    while True:
        u = bits.randbelow(t)
        if not _bernoulli_exp(u, t, bits):
            continue
        v = 0
        while _bernoulli_exp(1, 1, bits):
            v += 1
        y, negative = u + t * v, bits.randbelow(2)
        if negative and y == 0:  # else 0 would come twice as often
            continue
        return -y if negative else y


def _sample_gaussian(variance: Fraction, t: int, bits: CipherStream) -> int:
    """Draw a whole number with probability ∝ exp(−y² / 2σ²), given σ² and t = ⌊σ⌋ + 1 (algorithm 3)."""
    a, b = variance.numerator, variance.denominator
    while True:
        y = _sample_laplace(t, bits)
        # (|y| − σ²/t)² / 2σ² with σ² = a / b
        if _bernoulli_exp((abs(y) * t * b - a) ** 2, 2 * a * b * t * t, bits):
            return y


def quantize(vector: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return int64[n], a site's sum float64[n] in whole steps of 1 / `STEPS_PER_UNIT`; halves go to even numbers.

    Raises:
        WsiFlError: when a number is not finite, or too large for 2⁶² steps.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = np.rint(np.asarray(vector, np.float64) * STEPS_PER_UNIT)
    if not (np.abs(nearest) < _MAX_STEPS).all():
        raise WsiFlError(f"a sum is not finite, or too large for whole numbers at {STEPS_PER_UNIT:g} steps per unit")
    return nearest.astype(np.int64)


def quantization_sensitivity(clip: float, n: int) -> float:
    """Return clip · scale + √n, the L2 sensitivity in whole steps of a quantized sum of length n to one unit.

    Proof, for rounding the site's *sum*: neighbouring sums s and s + x with ‖x‖ ≤ clip are scaled exactly, and rounding
    moves each of them by at most 1/2 in each of the n directions. So the rounded sums differ from each other by scale ·
    x and at most 1 more per direction, which is clip · scale + √n in L2 by the triangle inequality.

    No smaller bound holds: where s · scale is 1/2 and x · scale is 1 in every direction, 0 becomes 2. Rounding each
    unit's *contribution* instead would add only √n / 2, but requires sums of whole numbers from the beginning.

    Args:
        clip: L2 sensitivity of the float64 sum; round-off of its additions counts, so a sum of very many rows needs a
            little more than the clipping norm.

    Raises:
        UsageError: when the clip is no positive number, or n below 1.
    """
    if not 0 < clip < inf or n < 1:
        raise UsageError(f"a sensitivity needs a bound above 0 and a length from 1 on: clip={clip:g}, n={n}")
    bound = clip * STEPS_PER_UNIT + sqrt(n)
    if not isfinite(bound):
        raise UsageError(f"clip {clip:g} is too large at {STEPS_PER_UNIT:g} steps per unit")
    return nextafter(nextafter(nextafter(bound, inf), inf), inf)  # product, root and sum: each may be rounded down


def share_sigma(sigma_total: float, n_sites: int, n_lacking: int) -> float:
    """Return the σ of each site's share of noise, such that the honest shares have the variance σ_total² or more.

    Colluding sites subtract their own shares, and the shares of sites that dropped out are not in the sum, so the other
    n_sites − lacking must suffice: σ = σ_total / √(n_sites − lacking), rounded up. All others see noise of variance
    n_sites · σ².

    Args:
        sigma_total: σ of the noise that cannot be subtracted, in steps.
        n_lacking: number of sites that may collude or drop out; 0 for none.

    Raises:
        UsageError: when σ_total is no positive number.
    """
    honest = _count_honest(n_sites, n_lacking)
    if not 0 < sigma_total < inf:
        raise UsageError(f"noise needs a sigma above 0, not {sigma_total:g}")
    total_variance = Fraction(sigma_total) ** 2
    share = sigma_total / sqrt(honest)
    while honest * Fraction(share) ** 2 < total_variance:
        share = nextafter(share, inf)
    return share


def noise_multiplier(share: float, n_sites: int, n_lacking: int, sensitivity: float, n: int) -> float:
    """Return the noise multiplier z for the account: √(n_sites − lacking) · σ_share / sensitivity.

    A sum of h discrete Gaussians is no discrete Gaussian, but its log-probabilities differ from those of one with
    variance h · σ² so little that the sum of vectors is ½ε²-concentrated DP with ε = Δ / (√h σ) + τ √n, τ being the gap
    of the distributions (Kairouz, Liu & Steinke 2021, proposition 14). So its Rényi divergence of every order a is at
    most a ε² / 2, the divergence of the Gaussian mechanism with z = 1 / ε, and `Mechanism(sigma=z, clip=…,
    sample_rate=1, steps=1)` is the whole cost. For Poisson samples the same holds at whole orders, whose bound needs
    these divergences alone; at fractional orders the accountant computes with densities of normal distributions. The
    bound is on the Rényi divergence: δ at a given ε may exceed δ of normal noise by a few parts in σ².

    Args:
        share: σ of each site's noise, in steps.
        n_lacking: number of sites that may collude or drop out.
        sensitivity: L2 sensitivity of the sum of whole numbers to one unit.
        n: length of the vector.

    Raises:
        UsageError: when a share is so small that τ √n is not negligible (σ below about 5), or a number makes no sense.
    """
    honest = _count_honest(n_sites, n_lacking)
    if not (0 < share < inf and 0 < sensitivity < inf) or n < 1:
        raise UsageError(
            f"a noise multiplier needs numbers above 0: share={share:g}, sensitivity={sensitivity:g}, length {n}"
        )
    # 1. τ √n, the distance of a sum of discrete Gaussians from a discrete Gaussian
    gap = _distribution_gap(share, honest) * sqrt(n)
    if gap > _NEGLIGIBLE_GAP:
        raise UsageError(
            f"noise shares of sigma {share:g} steps are too coarse to count as one Gaussian; take a larger scale"
        )
    # 2. ε of concentrated DP, Δ / (√h σ) + τ √n, and z = 1 / ε
    squared = honest * Fraction(share) ** 2 / Fraction(sensitivity) ** 2
    epsilon = 1 / sqrt(squared) + gap
    # 3. rounded down, compared exactly as fractions
    z = nextafter(1 / epsilon, 0.0)
    while Fraction(z) ** 2 > squared:
        z = nextafter(z, 0.0)
    return z


def _distribution_gap(sigma: float, n_shares: int) -> float:
    """Return τ = 10 Σ_{k=1}^{h−1} exp(−2π²σ² k / (k + 1)), the distance of a sum of h shares from a discrete Gaussian.

    τ / 2 bounds the difference of their log-probabilities (Kairouz, Liu & Steinke 2021, theorem 1 and section 3); two
    neighbouring sums may each be off by τ / 2. The bound is proven from σ = 1/2 on.
    """
    if not sigma >= 0.5:
        raise UsageError(f"a share of discrete Gaussian noise needs a sigma of 1/2 or more, not {sigma:g}")
    return 10 * sum(exp(-2 * (pi * sigma) ** 2 * k / (k + 1)) for k in range(1, n_shares))


def _count_honest(n_sites: int, n_lacking: int) -> int:
    if not 0 <= n_lacking < n_sites:
        raise UsageError(f"of {n_sites} sites at most {n_sites - 1} may collude or drop out, not {n_lacking}")
    return n_sites - n_lacking
