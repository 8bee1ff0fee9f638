"""The verdict whether a hospital benefits from taking part, and the intervals of its estimates.

An estimate is a mean over test examples and runs. Its variance is the sum of three sources: the sample of test
*patients*, the *seeds* of training, and the *noise* of released statistics. The noise of a linear head has a known
variance and can be redrawn around one run; for other models only seeds reveal it. The sample of training patients is
not among the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

_SMALLEST_DIFFERENCE = 0.01
"""Threshold of a negligible difference in a score."""
_EQUIVALENCE_MARGIN = 0.03
"""Equivalence margin: an interval of the pooled gain that ends below it shows that there is nothing to gain."""
_CONFIDENCE_LEVEL = 0.95
"""Confidence level of all intervals."""
_SHRINKAGE_PATIENTS = 4
"""Pseudo-patients for shrinkage of a stratum's ratio towards that of all."""
_ROUNDING = 1e-12
_MIN_P = float(np.finfo(float).tiny)
"""Minimum of p-values: no test gives 0."""


class IntervalDocument(TypedDict):
    """The JSON document of an estimate."""

    mean: float
    low: float | None
    high: float | None
    n_patients: int | None
    sources: dict[str, float | None]


@dataclass(frozen=True)
class Estimate:
    """A mean, its 95 % interval, and its standard error by source, None where unknown.

    Attributes:
        low, high: None for fewer than two test patients.
        patients, seeds, noise: the standard error by source.
        n_patients: number of test patients.
    """

    mean: float
    low: float | None
    high: float | None
    patients: float | None = None
    seeds: float | None = None
    noise: float | None = None
    n_patients: int | None = None

    def clip_interval(self, minimum: float, maximum: float) -> Estimate:
        """Return the estimate with its interval clipped to possible values.

        Where n patients all agree the variance is 0, but a share of up to 1 − 0.025^(1/n) of all patients may differ
        (Clopper and Pearson, 1934), by the maximum that is possible.
        """
        if self.low is None or self.high is None:
            return self
        low, high = self.low, self.high
        if self.patients == 0 and self.n_patients:
            unseen = 1 - ((1 - _CONFIDENCE_LEVEL) / 2) ** (1 / self.n_patients)
            low = min(low, self.mean - unseen * (self.mean - minimum))
            high = max(high, self.mean + unseen * (maximum - self.mean))
        return replace(self, low=max(low, minimum), high=min(high, maximum))

    def build_document(self) -> IntervalDocument:
        """Return the estimate as in ``--json``: mean, low, high, the number of test patients, and the sources."""
        sources = {"patients": self.patients, "seeds": self.seeds, "noise": self.noise}
        return {
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "n_patients": self.n_patients,
            "sources": sources,
        }


def estimate_mean(
    values: _Floats, weights: _Floats, patient: NDArray[np.str_], noise: _Floats | None = None
) -> Estimate:
    """Return the weighted mean of values, with its interval.

    Args:
        values, weights: float64[r, n] of n test examples in each of r runs. Examples of one weight are a stratum, as
            those of one class are where all classes count alike.
        patient: str[n].
        noise: float64[r], the standard deviation by the noise of released statistics, where known.
    """
    return estimate_ratio(values * weights, weights, patient, noise, weights[0])


def estimate_ratio(
    numerator: _Floats,
    denominator: _Floats,
    patient: NDArray[np.str_],
    noise: _Floats | None = None,
    stratum: _Floats | None = None,
) -> Estimate:
    """Return Σ part / Σ whole, with the interval of Student's t around it.

    With e_p the sum of part − ratio · whole over a patient p's examples, over the sum of whole, patients have the
    variance K/(K − 1) Σ e_p² and (Σ e_p²)² / Σ e_p⁴ degrees of freedom, the effective number of patients (Carter,
    Schnepel and Steigerwald, Review of Economics and Statistics 99, 2017). Runs add their variance, at least that of
    the noise. Degrees of freedom add up by Satterthwaite, Biometrics 2, 1946.

    Where weights make up for the number of examples in a stratum, this number is not random, so e_p is relative to the
    stratum's ratio. The ratio is shrunk towards that of all by four pseudo-patients, as in Agresti and Coull (The
    American Statistician 52, 1998): three correct of three prove little.

    Args:
        numerator, denominator: float64[r, n] of n test examples in each of r runs.
        patient: str[n] of each example.
        noise: float64[r], the standard deviation of each run's ratio by the noise of released statistics, where known.
        stratum: float64[n], equal for examples whose share in the sums is fixed; None for a single stratum.
    """
    mean = float(numerator.sum() / denominator.sum())
    residuals = numerator - mean * denominator
    names, patient_index = np.unique(patient[denominator.any(0)], return_inverse=True)
    if len(names) < 2:
        return Estimate(mean, None, None)
    strata = np.zeros(denominator.shape[1]) if stratum is None else stratum
    for label in np.unique(strata):
        rows = strata == label
        n = len(np.unique(patient[rows]))
        stratum_ratio = residuals[:, rows].sum() / (denominator[:, rows].sum() or 1.0)
        residuals[:, rows] -= n / (n + _SHRINKAGE_PATIENTS) * stratum_ratio * denominator[:, rows]
    squares = (np.bincount(patient_index, residuals.sum(0)[denominator.any(0)], len(names)) / denominator.sum()) ** 2
    squares[squares < _ROUNDING**2] = 0
    patient_variance = len(names) / (len(names) - 1) * float(squares.sum())
    effective_patients = float(squares.sum()) ** 2 / max(float((squares**2).sum()), 1e-300)
    degrees = min(effective_patients, len(names) - len(np.unique(strata)))
    sources = [(patient_variance, max(1.0, degrees))]
    n_runs = len(numerator)
    seed_variance = float((residuals.sum(1) / denominator.sum(1)).var(ddof=1)) / n_runs if n_runs > 1 else None
    noise_variance = None if noise is None else float((noise**2).sum()) / n_runs**2
    if noise_variance is not None and noise_variance > (seed_variance or 0):
        sources.append((noise_variance, inf))
    elif seed_variance is not None:
        sources.append((seed_variance, n_runs - 1))
    half_width = _half_width(sources)
    patients, seeds, noises = (
        None if variance is None else sqrt(variance) for variance in (patient_variance, seed_variance, noise_variance)
    )
    return Estimate(mean, mean - half_width, mean + half_width, patients, seeds, noises, len(names))


def estimate_from_repetitions(mean: float, sd: float | None, n: int) -> Estimate:
    """Return the mean of n repetitions with different seeds, with the interval of Student's t.

    Args:
        sd: their standard deviation, with n − 1 in the divisor; None for a single one. At 0, as for deterministic
            training, there is no interval.
    """
    if not sd:
        return Estimate(mean, None, None)
    half_width = _half_width([(sd**2 / n, n - 1)])
    return Estimate(mean, mean - half_width, mean + half_width, seeds=sd / sqrt(n))


def _half_width(sources: list[tuple[float, float]]) -> float:
    """Return half the width of an interval from variances to add and the degrees of freedom of each."""
    from scipy.stats import norm, t

    variance = sum(variance_part for variance_part, _ in sources)
    if variance <= 0:
        return 0.0
    uncertainty = sum(variance_part**2 / degrees for variance_part, degrees in sources)
    tail = (1 + _CONFIDENCE_LEVEL) / 2
    return float(t.ppf(tail, variance**2 / uncertainty) if uncertainty > 0 else norm.ppf(tail)) * sqrt(variance)


def decide_verdict(gain: Estimate | None, pooled_gain: Estimate | None) -> str:
    """Return the verdict for a hospital: "join", "local", "nothing to gain", or "inconclusive".

    Args:
        gain: of the federated over the local model.
        pooled_gain: the pooled gain, of a model of all data over the local one; None without such a model.
    """
    if gain is None or gain.low is None or gain.high is None:
        return "inconclusive"
    if gain.low > 0 and gain.mean >= _SMALLEST_DIFFERENCE:
        return "join"
    if gain.high < 0 and gain.mean <= -_SMALLEST_DIFFERENCE:
        return "local"
    if pooled_gain is None or pooled_gain.high is None:
        return "inconclusive"
    is_negligible = pooled_gain.mean < _SMALLEST_DIFFERENCE and pooled_gain.high < _EQUIVALENCE_MARGIN
    return "nothing to gain" if is_negligible else "inconclusive"


# ---- methods against each other


class PairedTest(TypedDict):
    """The mean of n differences a − b, their standard deviation (n − 1 in the divisor), and the p-value of their test.

    `sd` is None for a single pair. `p` is two-sided; None for fewer than two pairs, or without any difference.
    """

    difference: float
    sd: float | None
    n: int
    p: float | None


def compare_pairs(a: Sequence[float] | _Floats, b: Sequence[float] | _Floats) -> PairedTest:
    """Return Student's paired t-test of n values each; a[k] and b[k] were measured under the same conditions.

    Where all differences are equal, their variance is 0, and p that of a sign test: 2^(1 − n). No p is 0.

    Raises:
        ValueError: without pairs, or for a value without a partner.
    """
    if not len(a) or len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} values make no pairs")
    differences = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    n, mean = len(differences), float(differences.mean())
    if n < 2:
        return {"difference": mean, "sd": None, "n": n, "p": None}
    if float(np.ptp(differences)) <= _ROUNDING:
        sign_test = max(0.5 ** (n - 1), _MIN_P) if abs(mean) > _ROUNDING else None
        return {"difference": mean, "sd": 0.0, "n": n, "p": sign_test}
    from scipy.stats import ttest_rel

    p = float(ttest_rel(a, b).pvalue)
    sd = float(differences.std(ddof=1))
    return {"difference": mean, "sd": sd, "n": n, "p": max(p, _MIN_P) if isfinite(p) else None}


def holm_adjust(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values of one family of tests, adjusted by Holm's method (1979).

    None, a missing test, stays None and does not count.
    """
    from statsmodels.stats.multitest import multipletests

    available = [p for p in p_values if p is not None]
    adjusted = iter(multipletests(available, method="holm")[1].tolist() if available else [])
    return [None if p is None else next(adjusted) for p in p_values]
