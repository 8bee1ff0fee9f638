"""Discrete noise in shares against exact probabilities, and its cost against the Gaussian mechanism."""

from fractions import Fraction
from functools import reduce
from math import exp, fsum, log, nextafter, pi, sqrt

import numpy as np
import pytest
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest, norm

from wsi_fl.oneshot.discrete_noise import (
    STEPS_PER_UNIT,
    _distribution_gap,
    discrete_gaussian,
    noise_multiplier,
    quantization_sensitivity,
    quantize,
    share_sigma,
)
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import WsiFlError

SURE = 1e-4
"""p-values below it fail; seeds are fixed where a test could fail by chance."""


def pmf(sigma, most):
    """Return the probabilities of −most, …, most under the discrete Gaussian."""
    weights = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * float(sigma) ** 2))
    return weights / weights.sum()


def compare(draws, expected):
    """Return the p-value of counts of −m, …, m; rare neighbors are pooled."""
    m = len(expected) // 2
    counts = np.bincount(np.clip(draws, -m, m) + m, minlength=2 * m + 1)
    bins = np.cumsum(expected) * len(draws) // 20
    starts = np.unique(bins, return_index=True)[1]
    found = np.add.reduceat(counts, starts)
    wanted = np.add.reduceat(expected, starts) * len(draws)
    return chisquare(found, wanted * found.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize("sigma", [0.3, Fraction(7, 3), 20.5])
def test_draws_have_the_probabilities_of_the_discrete_gaussian(sigma):
    n, most = 12_000, int(12 * sigma) + 3
    draws, x = discrete_gaussian(sigma, n, CipherStream.from_seed(1)), np.arange(-most, most + 1)
    p = pmf(sigma, most)
    assert draws.dtype == np.int64 and draws.shape == (n,) and abs(draws).max() <= most
    assert compare(draws, p) > SURE
    variance, fourth = float(p @ x**2), float(p @ x**4)
    assert abs(draws.mean()) < 4 * sqrt(variance / n)
    assert draws.var() == pytest.approx(variance, abs=4 * sqrt((fourth - variance**2) / n))
    for far in (2, 3):
        tail = float(p[abs(x) > far * sigma].sum())
        assert (abs(draws) > far * sigma).mean() == pytest.approx(tail, abs=4 * sqrt(tail / n))
    assert abs((draws > 0).sum() - (draws < 0).sum()) < 4 * sqrt(n)


@pytest.mark.parametrize("sigma", [2.0**20, 2.0**28 + 0.123])
def test_large_noise_is_normal_and_has_no_grid(sigma):
    n = 10_000
    draws = discrete_gaussian(sigma, n, CipherStream.from_seed(3))
    assert abs(draws.mean()) < 4 * sigma / sqrt(n)
    assert draws.std() == pytest.approx(sigma, rel=4 / sqrt(2 * n))
    assert kstest(draws / sigma, "norm").pvalue > SURE
    assert chisquare(np.bincount(draws & 255, minlength=256)).pvalue > SURE


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf"), 2.0**51])
def test_an_invalid_sigma_is_refused(sigma):
    refused(lambda: discrete_gaussian(sigma, 1, CipherStream.from_seed(0)), "sigma above 0")


def test_sums_become_the_nearest_whole_numbers():
    found = quantize(np.array([0.0, 1.2, -1.2, 0.49, 0.5, 1.5, -4e9]) / STEPS_PER_UNIT)
    assert found.dtype == np.int64 and found.tolist() == [0, 1, -1, 0, 0, 2, -4_000_000_000]


def test_values_that_cannot_be_quantized_are_refused():
    for bad in (float("nan"), float("inf"), -(2.0**38), 1e300):
        refused(lambda bad=bad: quantize(np.array([0, bad])), "too large", error=WsiFlError)
    for clip, n in ((0.0, 1), (float("inf"), 1), (1.0, 0)):
        refused(lambda clip=clip, n=n: quantization_sensitivity(clip, n), "bound above 0")
    refused(lambda: quantization_sensitivity(1e305, 1), "too large")


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.floats(1e-4, 2000), st.sampled_from(["anywhere", "near halves"]), st.integers(0, 2**32))
def test_rounded_sums_of_neighbours_are_never_further_apart_than_the_sensitivity(n, clip, where, seed):
    """All numbers are in steps, as rounding matters for rows of few."""
    rng = np.random.default_rng(seed)
    total = rng.normal(size=n) * 50
    if where == "near halves":
        total = np.floor(total) + 0.5 + rng.choice([-(2.0**-20), 0, 2.0**-20], n)
    row = np.abs(rng.normal(size=n)) + 0.1 if where == "near halves" else rng.normal(size=n)
    row *= clip / np.linalg.norm(row)
    moved = quantize((total + row) / STEPS_PER_UNIT) - quantize(total / STEPS_PER_UNIT)
    # the sum's own round-off belongs to the clip
    assert np.linalg.norm(moved) <= quantization_sensitivity((clip * (1 + 1e-9) + 1e-9) / STEPS_PER_UNIT, n)


@pytest.mark.parametrize("n", [1, 4, 100])
def test_the_sensitivity_is_reached(n):
    """A smaller bound would be wrong."""
    total, row = np.full(n, 0.5 / STEPS_PER_UNIT), np.full(n, 1 / STEPS_PER_UNIT)
    moved = np.linalg.norm(quantize(total + row) - quantize(total))
    assert moved == pytest.approx(quantization_sensitivity(float(np.linalg.norm(row)), n), rel=1e-12)


@pytest.mark.parametrize(("n_sites", "colluding"), [(2, 0), (4, 1), (7, 3), (5, 4), (1, 0)])
@pytest.mark.parametrize("sigma", [1.0, 12.345, 2.0**27 / 3])
def test_noise_shares_of_honest_sites_have_the_full_variance_and_hardly_more(n_sites, colluding, sigma):
    share = share_sigma(sigma, n_sites, colluding)
    assert (n_sites - colluding) * Fraction(share) ** 2 >= Fraction(sigma) ** 2
    assert share == pytest.approx(sigma / sqrt(n_sites - colluding), rel=1e-15)


def test_at_least_one_site_must_be_honest():
    for n_sites, colluding in ((3, 3), (3, -1), (0, 0)):
        refused(lambda k=n_sites, t=colluding: share_sigma(1.0, k, t), "may collude")
        refused(lambda k=n_sites, t=colluding: noise_multiplier(99.0, k, t, 1.0, 1), "may collude")
    refused(lambda: share_sigma(0.0, 3, 1), "sigma above 0")


@pytest.mark.parametrize(("n_sites", "colluding"), [(2, 0), (4, 1), (9, 8)])
def test_the_noise_multiplier_is_the_wanted_one_and_never_above_the_true_one(n_sites, colluding):
    moved, n = quantization_sensitivity(0.7, 10_000), 10_000
    share = share_sigma(1.4 * moved, n_sites, colluding)
    z = noise_multiplier(share, n_sites, colluding, moved, n)
    assert z == pytest.approx(1.4, rel=1e-12) and z < nextafter(nextafter(1.4, 2), 2)
    assert Fraction(z) ** 2 <= (n_sites - colluding) * Fraction(share) ** 2 / Fraction(moved) ** 2


def convolve_draws(one, n):
    """Return the distribution of the sum of n draws."""
    return reduce(np.convolve, [one] * n)


def test_shares_too_coarse_for_one_gaussian_are_refused():
    refused(lambda: noise_multiplier(4.0, 4, 1, 1.0, 1), "too coarse", "larger scale")
    refused(lambda: noise_multiplier(0.4, 4, 1, 1.0, 1), "sigma of 1/2 or more")
    refused(lambda: noise_multiplier(4.82, 4, 1, 1.0, 10**6), "too coarse")
    for share, moved, n in ((0.0, 1.0, 1), (9.0, 0.0, 1), (9.0, 1.0, 0), (float("nan"), 1.0, 1)):
        refused(lambda a=(share, 4, 1, moved, n): noise_multiplier(*a), "numbers above 0")
    assert noise_multiplier(5.0, 4, 1, 1.0, 10**4) == pytest.approx(5 * sqrt(3))
    assert noise_multiplier(4.0, 4, 3, 1.0, 1) == pytest.approx(4.0)  # a single share is a discrete Gaussian
    assert _distribution_gap(2.0**20, 100) == 0 == _distribution_gap(1.0, 1)
    assert 0 < _distribution_gap(4.9, 100) < 1e-100


@pytest.mark.parametrize("sigma", [0.5, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("n_shares", [2, 3, 5])
def test_a_sum_of_shares_is_within_the_bound_of_one_discrete_gaussian(sigma, n_shares):
    """Log-probabilities out to 5 σ, where sums of float64 are exact enough; its last term alone is too little."""
    total = convolve_draws(pmf(sigma, 40), n_shares)
    m, reach = len(total) // 2, int(5 * sigma * sqrt(n_shares))
    centre = slice(m - reach, m + reach + 1)
    apart = abs(np.log(total[centre] / pmf(sigma * sqrt(n_shares), m)[centre])).max()
    assert apart <= _distribution_gap(sigma, n_shares) / 2 + 1e-12
    assert apart >= exp(-2 * (pi * sigma) ** 2 * (n_shares - 1) / n_shares)


def delta_discrete(sigma, eps, shift=1):
    """Compute δ of the discrete Gaussian mechanism by its definition: Σ max(0, P(x) − e^ε P(x − shift))."""
    x = np.arange(-shift - int(14 * sigma), int(14 * sigma) + 2 * shift)
    weight = np.exp(-(x.astype(float) ** 2) / (2 * sigma**2))
    shifted = np.exp(-((x + shift).astype(float) ** 2) / (2 * sigma**2))
    return fsum(np.maximum(0, weight - exp(eps) * shifted)) / fsum(weight)


def delta_normal(sigma, eps, shift=1):
    """Compute δ of the Gaussian mechanism (Balle & Wang, 2018, theorem 8)."""
    z = shift / sigma
    return norm.cdf(z / 2 - eps / z) - exp(eps) * norm.cdf(-z / 2 - eps / z)


@pytest.mark.parametrize("z", [0.7, 1.4, 5.0])
def test_discrete_and_normal_noise_have_the_same_delta(z):
    """But for 3/σ² of it, either way: thresholds between whole numbers do not exist. At 2²⁰ that is 10⁻¹²."""
    for sigma in (10, 100, 1000, 10_000):
        shift = round(sigma / z)
        for eps in (0.1, 0.5, 1.0, 2.0):
            normal = delta_normal(sigma, eps, shift)
            if normal > 1e-9:  # below it, float64 ends
                assert delta_discrete(sigma, eps, shift) == pytest.approx(normal, rel=3 / sigma**2)


@pytest.mark.parametrize(("n_sites", "colluding"), [(1, 0), (3, 0), (4, 1)])
@pytest.mark.parametrize("order", [1.5, 2, 8, 40])
def test_no_renyi_divergence_of_the_sum_is_above_that_on_the_account(n_sites, colluding, order):
    """D_a(sum ‖ shifted sum) by its definition, against a / (2 z²)."""
    share, shift, honest = 6.0, 5, n_sites - colluding
    total = np.maximum(convolve_draws(pmf(share, 200), honest), 1e-300)
    x = np.arange(len(total)) - len(total) // 2
    near = abs(x) < 5 * share * sqrt(honest) + order * shift
    p, q = np.log(total[shift:][near[shift:]]), np.log(total[:-shift][near[shift:]])
    found = log(fsum(np.exp(order * p + (1 - order) * q))) / (order - 1)
    z = noise_multiplier(share, n_sites, colluding, shift, 1)
    assert found <= order / (2 * z**2) * (1 + 1e-9)
    assert order > 8 or found == pytest.approx(order / (2 * z**2), rel=1e-4)


def test_the_account_of_the_sum_is_above_its_true_epsilon():
    """ε by the accountant against the ε at which δ by definition is as given.

    Discrete noise of σ steps may have a δ that is 3/σ² larger: here visible, below 10⁻¹² where sums are masked.
    """
    share, delta = share_sigma(50.0, 4, 1), 1e-5
    z = noise_multiplier(share, 4, 1, 20.0, 1)
    account = epsilon([Mechanism(z, 1.0, 1.0, 1)], delta)
    assert delta_discrete(50.0, account, 20) <= delta * (1 + 3 / 50**2)
    assert delta_discrete(50.0, 0.6 * account, 20) > delta
