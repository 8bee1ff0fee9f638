"""Metrics of survival: concordance, Brier score; Kaplan–Meier curves and log-rank test by statsmodels.

Times and events are float64[n, 2]; see `tasks`. Predictions are float64[n, k], the probability of being without the
event at the end of each of k intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

_RISK_TOLERANCE = 1e-8
"""Tolerance of equal risks."""
_BATCH_EVENTS = 256
"""Patients with the event per step of the comparison with all others."""


def compute_risk(predictions: _Floats, ends: Sequence[float]) -> _Floats:
    """Return the risk float64[n]: minus each patient's expected time without the event, up to the last end."""
    widths = np.diff([0.0, *ends])
    risk: _Floats = -(predictions @ widths)
    return risk


def compute_concordances(risk: _Floats, truth: NDArray[Any], weights: NDArray[np.int32]) -> _Floats:
    """Return Harrell's concordance, float64[b]: the share of comparable pairs whose earlier event had the higher risk.

    NaN where no pair is comparable. Risks closer than 1e-8 are equal and count half, as in scikit-survival.

    Args:
        risk: float64[n].
        weights: int32[b, n], the count of each patient in b resamples.

    Reference: Harrell et al., "Evaluating the yield of medical tests", JAMA 247, 1982.
    """
    time, observed = truth[:, 0], truth[:, 1] > 0.5
    events, concordant, pairs = np.flatnonzero(observed), np.zeros(len(weights)), np.zeros(len(weights))
    floats = weights.T.astype(np.float32)  # exact up to 2^23 patients
    for first in range(0, len(events), _BATCH_EVENTS):
        # 1. comparable pairs: an event, and a patient observed for longer
        batch = events[first : first + _BATCH_EVENTS, None]
        later = (time > time[batch]) | (~observed & (time == time[batch]))
        # 2. concordant pairs count 1, ties of risk 1/2
        differences = risk[batch] - risk
        scores = (
            np.where(np.abs(differences) <= _RISK_TOLERANCE, np.float32(0.5), (differences > 0).astype(np.float32))
            * later
        )
        # 3. sums over pairs, each weighted by the counts of both patients
        weight = weights[:, batch[:, 0]].T.astype(np.float64)
        concordant += (weight * (scores @ floats)).sum(0)
        pairs += (weight * (later.astype(np.float32) @ floats)).sum(0)
    return _divide_or_nan(concordant, pairs)


def compute_integrated_briers(
    predictions: _Floats, truth: NDArray[Any], ends: Sequence[float], weights: NDArray[np.int32]
) -> _Floats:
    """Return the Brier score, float64[b], integrated over the ends within the observed times.

    Patients are weighted by inverse probability of censoring, estimated from the same patients. NaN for fewer than two
    ends, or without any event.

    Args:
        weights: int32[b, n], the count of each patient in b resamples.

    Reference: Graf et al., "Assessment and comparison of prognostic classification schemes", Stat. Med. 18, 1999.
    """
    if not len(truth):
        return np.full(len(weights), np.nan)
    time, observed, widths = truth[:, 0], truth[:, 1] > 0.5, np.diff(np.asarray(ends, np.float64))
    # an event at an end is before it, also for times of single precision, which cannot represent 1.1
    end = np.asarray(ends, time.dtype if time.dtype.kind == "f" else np.float64)
    times, time_index = np.unique(time, return_inverse=True)
    # 1. G, the share not censored after each time: Kaplan–Meier, events at a time come before its censorings
    n_leaving, n_censored = (
        np.stack([np.bincount(time_index, row, len(times)) for row in weights * mask]).astype(np.int64)
        for mask in (np.ones_like(observed), ~observed)
    )
    n_watched = n_leaving[:, ::-1].cumsum(1)[:, ::-1] - (n_leaving - n_censored)
    uncensored = np.cumprod(
        1 - np.divide(n_censored, n_watched, out=np.zeros(n_censored.shape), where=n_censored > 0), axis=1
    )
    uncensored = np.where(uncensored > 0, uncensored, np.inf)  # such times are never observed
    from_start = np.concatenate([np.ones((len(weights), 1)), uncensored], axis=1)
    at_end = from_start[:, np.searchsorted(times, end, "right")]
    # 2. BS(t) = mean of π(t)² [y ≤ t, event] / G(y) + (1 − π(t))² [y > t] / G(t)
    is_later = time[:, None] > end
    failed = (weights / uncensored[:, time_index]) @ (predictions**2 * (~is_later & observed[:, None]))
    brier = (failed + (weights @ ((1 - predictions) ** 2 * is_later)) / at_end) / weights.sum(1, keepdims=True)
    # 3. its mean over the ends within the observed times, by trapezoids
    first, last = (np.where(n_leaving > 0, times, np.inf).min(1), np.where(n_leaving > 0, times, -np.inf).max(1))
    within = (first[:, None] <= end) & (end < last[:, None])
    has_both = within[:, 1:] & within[:, :-1]
    area = np.where(has_both, widths * (brier[:, 1:] + brier[:, :-1]) / 2.0, 0).sum(1)
    scores = _divide_or_nan(area, np.where(has_both, widths, 0).sum(1))
    scores[~(weights * observed).any(1)] = np.nan
    return scores


def _divide_or_nan(a: _Floats, b: _Floats) -> _Floats:
    quotient: _Floats = np.divide(a, b, out=np.full(a.shape, np.nan), where=b > 0)
    return quotient


def kaplan_meier(truth: NDArray[Any]) -> tuple[_Floats, _Floats]:
    """Return (times, share without the event from each on) of some patients, from time 0 to the last observed."""
    from statsmodels.duration.survfunc import SurvfuncRight

    curve = SurvfuncRight(truth[:, 0], truth[:, 1] > 0.5)
    share = np.concatenate([[1.0], curve.surv_prob])
    return np.concatenate([[0.0], curve.surv_times, [truth[:, 0].max()]]), np.concatenate([share, share[-1:]])


def logrank_test(truth: NDArray[Any], group: NDArray[np.bool_]) -> float | None:
    """Return the p-value of the log-rank test between two groups.

    None without patients in a group, without events, and where no event came while both groups were under observation.
    """
    from statsmodels.duration.survfunc import survdiff

    if group.all() or not group.any() or not (truth[:, 1] > 0.5).any():
        return None
    try:
        return float(survdiff(truth[:, 0], truth[:, 1] > 0.5, group)[1])
    except np.linalg.LinAlgError:  # the expected counts do not vary
        return None
