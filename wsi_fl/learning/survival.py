"""How good predictions of survival are, by scikit-survival: concordance, Brier score, Kaplan–Meier curves.

Times and events are float[n, 2]; see `tasks`. What is predicted is float64[n, k], the probability of being without the
event at the end of each of k intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.types import UsageError

Floats = NDArray[np.float64]


def require_extra() -> None:
    """Refuse survival where scikit-survival is not installed.

    Raises:
        UsageError: says how to install it.
    """
    if find_spec("sksurv") is None:
        raise UsageError("survival is measured with scikit-survival; pip install 'wsi-fl[survival]'")


def risk(said: Floats, ends: Sequence[float]) -> Floats:
    """Return float64[n], minus the time that each patient is expected to be without the event up to the last end.

    Example:
        >>> risk(np.array([[1.0, 1.0], [0.5, 0.0]]), (10.0, 20.0)).tolist()
        [-20.0, -5.0]
    """
    widths = np.diff([0.0, *ends])
    found: Floats = -(said @ widths)
    return found


def concordance(risk: Floats, truth: NDArray[Any]) -> float | None:
    """Return Harrell's concordance: of pairs whose order is known, the share in which the earlier had the higher risk.

    None where no pair's order is known.
    """
    from sksurv.metrics import concordance_index_censored

    time, seen = truth[:, 0], truth[:, 1] > 0.5
    first = time[seen].min(initial=np.inf)
    if not ((time > first) | (~seen & (time == first))).any():
        return None
    return float(concordance_index_censored(seen, time, risk)[0])


def integrated_brier(said: Floats, truth: NDArray[Any], ends: Sequence[float]) -> float | None:
    """Return the Brier score, integrated over the ends that lie within what was observed (Graf et al., 1999).

    Patients who left are weighed by the censoring of these same patients. None where fewer than two ends are left.
    """
    from sksurv.metrics import integrated_brier_score

    if len(truth) < 2:
        return None
    time = truth[:, 0]
    within = [k for k, end in enumerate(ends) if time.min() <= end < time.max()]
    if len(within) < 2:
        return None
    known = _structured(truth)
    try:
        return float(integrated_brier_score(known, known, said[:, within], np.array(ends)[within]))
    except ValueError:  # everybody who is left has been censored
        return None


def kaplan_meier(truth: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return (times, share without the event from each on) of some patients, from time 0."""
    from sksurv.nonparametric import kaplan_meier_estimator

    time, share = kaplan_meier_estimator(truth[:, 1] > 0.5, truth[:, 0])
    return np.concatenate([[0.0], time]), np.concatenate([[1.0], share])


def logrank(truth: NDArray[Any], group: NDArray[np.bool_]) -> float | None:
    """Return the p-value of the log-rank test between two groups.

    None where a group or all events are missing, and where no event came while both groups were still watched.
    """
    from sksurv.compare import compare_survival

    if group.all() or not group.any() or not (truth[:, 1] > 0.5).any():
        return None
    try:
        return float(compare_survival(_structured(truth), group)[1])
    except np.linalg.LinAlgError:  # the expected counts do not vary
        return None


def _structured(truth: NDArray[Any]) -> NDArray[Any]:
    out = np.empty(len(truth), [("event", bool), ("time", float)])
    out["event"], out["time"] = truth[:, 1] > 0.5, truth[:, 0]
    return out
