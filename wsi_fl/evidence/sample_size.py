"""Sample size of a test set for confidence intervals of a given width."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import asinh, ceil, log, sqrt

import numpy as np
from numpy.typing import NDArray

from wsi_fl.evidence.clinical_metrics import Z

_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class IntervalWidths:
    """Widths of 95 % intervals, from end to end; `expected` is of observed over expected cases."""

    auroc: float = 0.1
    slope: float = 0.4
    expected: float = 0.4
    sensitivity: float = 0.1
    specificity: float = 0.1


def compute_sample_size(
    prevalence: float,
    area: float,
    widths: IntervalWidths,
    *,
    sensitivity: float | None = None,
    specificity: float | None = None,
) -> dict[str, int]:
    """Return the number of test patients for each interval to be as narrow as given.

    The model is assumed to be calibrated, its log-odds to be normal among cases and among others, with a spread that
    follows from `area`.

    Args:
        prevalence: the share of cases.
        area: the expected AUROC.
        sensitivity, specificity: expected values; None leaves them out.

    Reference: Riley et al., "Minimum sample size for external validation of a clinical prediction model with a binary
        outcome", Statistics in Medicine 40, 2021.
    """
    sizes = {"auroc": _sample_size_for_area(prevalence, area, widths.auroc / 2 / Z)}
    # a ratio around 1: exp(zs) − exp(−zs) is the width
    log_error = asinh(widths.expected / 2) / Z
    sizes["expected"] = ceil((1 - prevalence) / prevalence / log_error**2)
    sizes["slope"] = _sample_size_for_slope(*_model_log_odds(prevalence, area), widths.slope / 2 / Z)
    for name, value, share, width in (
        ("sensitivity", sensitivity, prevalence, widths.sensitivity),
        ("specificity", specificity, 1 - prevalence, widths.specificity),
    ):
        if value is not None:
            sizes[name] = ceil(value * (1 - value) / (width / 2 / Z) ** 2 / share)
    return sizes


def _sample_size_for_area(prevalence: float, area: float, error: float) -> int:
    """Return the least n with Newcombe's standard error of an AUROC; it falls as n rises."""

    def standard_error(n: int) -> float:
        half = n / 2 - 1
        spread = 1 + half * (1 - area) / (2 - area) + half * area / (1 + area)
        return sqrt(area * (1 - area) * spread / (n**2 * prevalence * (1 - prevalence)))

    return 3 + bisect_left(range(3, 1 << 62), True, key=lambda n: standard_error(n) <= error)


def _model_log_odds(prevalence: float, area: float) -> tuple[_Floats, _Floats]:
    """Return log-odds and weights of a calibrated model: normal in both groups, d² apart and d wide."""
    from scipy.stats import norm

    d = sqrt(2) * float(norm.ppf(area))
    z = np.linspace(-8, 8, 2001)
    density = norm.pdf(z) / norm.pdf(z).sum()
    odds = log(prevalence / (1 - prevalence))
    lp = np.concatenate([odds + d * d / 2 + d * z, odds - d * d / 2 + d * z])
    return lp, np.concatenate([prevalence * density, (1 - prevalence) * density])


def _sample_size_for_slope(lp: _Floats, weight: _Floats, error: float) -> int:
    """Return the number of patients for this standard error of the calibration slope.

    Args:
        lp, weight: float64[m], log-odds of the model and their frequencies, 1 in sum.
    """
    from scipy.special import expit

    information = weight * expit(lp) * expit(-lp)
    a, ab, b = information.sum(), (information * lp).sum(), (information * lp**2).sum()
    spread = float(a * b - ab**2)
    return ceil(float(a) / spread / error**2)
