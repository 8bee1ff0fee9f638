"""Clinical metrics: sensitivity and specificity, predictive values, calibration, net benefit and subgroups.

The unit is the patient. A *case* is a patient of the class of interest, a *score* its predicted probability. Values
come with 95 % intervals; None without patients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.metrics import slide_level
from wsi_fl.privacy.audit import share_interval

_Floats = NDArray[np.float64]
Names = NDArray[np.str_]
_Flags = NDArray[np.bool_]

LEAST = 10
"""Minimum number of patients, cases and others of a reported subgroup."""
Z = 1.959963984540054
"""Standard deviations of a normal distribution within which 95 % of it lie, on either side."""
_NARROW = 1e-12


@dataclass(frozen=True)
class _Interval:
    """A value, its 95 % interval and the number `n` of patients."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Patients:
    """Predictions of a model for m patients.

    Attributes:
        probabilities: float64[m, k], probabilities of the classes.
        truth: int64[m], and `name` str[m].
        any_counts: whether a patient is positive when any example is, with the mean score of the highest tenth.
    """

    said: _Floats
    truth: NDArray[np.int64]
    name: Names
    any_counts: bool = False


def together(parts: Sequence[Patients]) -> Patients:
    """Return the patients of several disjoint test sets."""
    return Patients(
        np.concatenate([one.said for one in parts]),
        np.concatenate([one.truth for one in parts]),
        np.concatenate([one.name for one in parts]),
        any_counts=any(one.any_counts for one in parts),
    )


def by_patient(said: _Floats, truth: NDArray[np.int64], patient: Names) -> Patients:
    """Aggregate probabilities float64[n, k] and truth int64[n] of examples by patient.

    Where examples of a patient are of different classes, as patches with and without tumour are, a patient of a
    two-class task is positive when any example is, and the score is the mean of the highest tenth. Otherwise a
    patient's probabilities are the means, and the class is the most frequent one.
    """
    names, first, which = np.unique(patient, return_index=True, return_inverse=True)
    if len(names) == len(patient):
        return Patients(said, truth, patient)
    counts = np.zeros((len(names), said.shape[1]))
    np.add.at(counts, (which, truth), 1)
    if ((counts > 0).sum(1) > 1).any() and (found := slide_level(said, truth, patient)):
        return Patients(found[0], found[1], patient[found[2]], any_counts=True)
    sums = np.stack([np.bincount(which, column, len(names)) for column in said.T], axis=1)
    return Patients(sums / counts.sum(1, keepdims=True), counts.argmax(1), patient[first])


def _proportion(k: int, n: int) -> _Interval | None:
    """Return k of n with the interval of Wilson, "Probable inference", J. American Statistical Association 22, 1927."""
    from scipy.stats import binomtest

    if not n:
        return None
    around = binomtest(int(k), int(n)).proportion_ci(method="wilson")
    return _Interval(k / n, float(around.low), float(around.high), n)


def _at_point(positive: _Flags, case: _Flags) -> dict[str, _Interval | None]:
    """Return sensitivity, specificity and predictive values from masks bool[n] of predicted and true cases."""
    right = positive == case
    return {
        "sensitivity": _proportion(int(right[case].sum()), int(case.sum())),
        "specificity": _proportion(int(right[~case].sum()), int((~case).sum())),
        "ppv": _proportion(int(right[positive].sum()), int(positive.sum())),
        "npv": _proportion(int(right[~positive].sum()), int((~positive).sum())),
    }


def _at_prevalence(
    sensitivity: _Interval, specificity: _Interval, prevalence: float
) -> tuple[_Interval | None, _Interval | None]:
    """Return (PPV, NPV) at a prevalence; None without positive or without negative predictions.

    Reference: Mercaldo, Lau and Zhou, Statistics in Medicine 26, 2007: the logit intervals, with half a patient added
    where all predictions are correct.
    """
    odds = prevalence / (1 - prevalence)
    return _predictive(sensitivity, specificity, odds), _predictive(specificity, sensitivity, 1 / odds)


def _predictive(own: _Interval, other: _Interval, odds: float) -> _Interval | None:
    """Return a predictive value from the shares of both kinds predicted correctly, and the odds of this kind."""
    if own.value == 0 and other.value == 1:
        return None
    a, b = ((p.value * p.n + 0.5) / (p.n + 1) if p.value in (0, 1) else p.value for p in (own, other))
    spread = sqrt((1 - a) / (a * own.n) + b / ((1 - b) * other.n))
    low, high = (1 / (1 + exp(-(log(a / (1 - b) * odds) + sign * Z * spread))) for sign in (-1, 1))
    value = own.value * odds / (own.value * odds + (1 - other.value))
    return _Interval(value, min(low, value), max(high, value), own.n + other.n)


def _delong(scores: _Floats, case: _Flags) -> tuple[_Floats, _Floats]:
    """Return AUROCs float64[m] of m models on the same patients, and their covariance float64[m, m].

    Args:
        scores: float64[m, n].
        case: bool[n], with at least two of both.

    Reference: DeLong et al., "Comparing the areas under two or more correlated receiver operating characteristic
        curves", Biometrics 44, 1988; by ranks as Sun and Xu, IEEE Signal Processing Letters 21, 2014.
    """
    from scipy.stats import rankdata

    n1, n0 = int(case.sum()), int((~case).sum())
    whole = rankdata(scores, axis=1)
    of_cases = (whole[:, case] - rankdata(scores[:, case], axis=1)) / n0
    of_others = 1 - (whole[:, ~case] - rankdata(scores[:, ~case], axis=1)) / n1
    covariance = np.atleast_2d(np.cov(of_cases)) / n1 + np.atleast_2d(np.cov(of_others)) / n0
    areas: _Floats = of_cases.mean(1)
    return areas, covariance


def _auroc(score: _Floats, case: _Flags) -> _Interval | None:
    """Return the AUROC with DeLong's interval on the scale of log-odds (Pepe, "The Statistical Evaluation of Medical
    Tests", Oxford 2003, section 5.2); None for fewer than two cases or others.

    Where all pairs are ranked alike, DeLong's variance is 0. Then disjoint pairs of patients, as many as there are
    patients of the rarer kind, give Clopper and Pearson's interval, which is wide.
    """
    from scipy.special import expit, logit

    if min(case.sum(), (~case).sum()) < 2:
        return None
    areas, covariance = _delong(score[None], case)
    area = float(areas[0])
    if area in (0, 1):
        return _Interval(area, *share_interval(area, _disjoint_pairs(case)), len(case))
    spread = sqrt(covariance[0, 0]) / (area * (1 - area))
    low, high = (expit(logit(area) + sign * Z * spread) for sign in (-1, 1))
    return _Interval(area, float(low), float(high), len(case))


def _disjoint_pairs(case: _Flags) -> int:
    """Return the number of disjoint pairs of a case and another patient."""
    return int(min(case.sum(), (~case).sum()))


@dataclass(frozen=True)
class _AreaDifference:
    """Difference of two models' AUROCs; p is two-sided, None where both rank all patients alike."""

    value: float
    low: float
    high: float
    p: float | None
    n: int


def auroc_difference(ours: _Floats, theirs: _Floats, case: _Flags) -> _AreaDifference | None:
    """Return the difference of two AUROCs by DeLong's test for pairs; None for fewer than two cases or others.

    Its variance is also 0 where all patients agree, as for a perfect and a constant model. Then disjoint pairs of
    patients, as many as there are patients of the rarer kind, are independent and all differ alike: Clopper and
    Pearson's interval of the share that differs, and a sign test, which needs more than six patients for significance.
    """
    from scipy.stats import norm

    if min(case.sum(), (~case).sum()) < 2:
        return None
    areas, covariance = _delong(np.stack([ours, theirs]), case)
    value = float(areas[0] - areas[1])
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    if variance <= _NARROW**2:
        return _difference_of_pairs(value, ours, theirs, case)
    sd = sqrt(variance)
    p = max(float(2 * norm.sf(abs(value) / sd)), np.finfo(float).tiny)  # no test gives 0
    low, high = max(-1.0, value - Z * sd), min(1.0, value + Z * sd)
    return _AreaDifference(value, low, high, p, len(case))


def _difference_of_pairs(value: float, ours: _Floats, theirs: _Floats, case: _Flags) -> _AreaDifference:
    """Return the difference of two AUROCs, the same for all patients, from disjoint pairs of patients.

    A pair contributes at most ∓ the largest difference. The interval is of the share of pairs in favour of the better
    model that gives `value`, with fractions of pairs where some favour the other.
    """
    from scipy.stats import binomtest

    if abs(value) <= _NARROW:
        return _AreaDifference(0.0, 0.0, 0.0, None, len(case))
    side = 1 if value > 0 else -1
    better, worse = (ours, theirs) if value > 0 else (theirs, ours)
    first, second = (np.sign(one[case][:, None] - one[~case]) / 2 for one in (better, worse))
    most, pairs = float((first - second).max()), _disjoint_pairs(case)
    share = (1 + abs(value) / most) / 2
    low, high = ((2 * end - 1) * most for end in share_interval(share, pairs))
    p = float(binomtest(int(share * pairs + _NARROW), pairs).pvalue)
    ends = sorted((side * low, side * high))
    return _AreaDifference(value, min(ends[0], value), max(ends[1], value), p, len(case))


def _calibration(score: _Floats, case: _Flags) -> dict[str, _Interval] | None:
    """Return the slope and the intercept ("in the large") of probabilities' calibration, by logistic regression.

    With a slope below 1 probabilities are too extreme. The intercept, with slope 1, is by how much they are too low on
    average, in log-odds. None where all patients are of one kind or have the same score, or where a score separates
    both kinds, so that no finite slope is best.

    Reference: Van Calster et al., "Calibration: the Achilles heel of predictive analytics", BMC Medicine 17, 2019.
    """
    from scipy.optimize import brentq
    from scipy.special import expit, logit
    from sklearn.linear_model import LogisticRegression

    if case.all() or not case.any() or score.min() == score.max():
        return None
    lp = logit(np.clip(score, 1e-9, 1 - 1e-9))
    if lp[case].min() >= lp[~case].max() or lp[case].max() <= lp[~case].min():
        return None
    shift = float(brentq(lambda a: expit(lp + a).sum() - case.sum(), -50, 50))
    fitted = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-10, max_iter=1000).fit(
        lp[:, None], case
    )
    slope, constant = float(fitted.coef_[0, 0]), float(fitted.intercept_[0])
    of_shift, of_slope = (expit(one) * expit(-one) for one in (lp + shift, constant + slope * lp))
    centre = np.average(lp, weights=of_slope)
    found = {
        "slope": (slope, 1 / sqrt(float(of_slope @ (lp - centre) ** 2))),
        "intercept": (shift, 1 / sqrt(float(of_shift.sum()))),
    }
    return {name: _Interval(v, v - Z * se, v + Z * se, len(case)) for name, (v, se) in found.items()}


def net_benefit(
    score: _Floats, case: _Flags, thresholds: Sequence[float], prevalence: float | None = None
) -> dict[str, list[float] | list[None]]:
    """Return the net benefit of treating scores from each threshold on ("model"), and of treating "everybody".

    It is the share of true positives less that of false ones weighted by the odds of the threshold: a threshold of 0.1
    accepts nine unnecessary treatments for one that is needed. Treating nobody has net benefit 0.

    Args:
        prevalence: of cases where the model is used; None for that of these patients. For another prevalence the
            model's net benefit is None where all patients are of one kind: its accuracy on the other is unknown.

    Reference: Vickers and Elkin, "Decision curve analysis", Medical Decision Making 26, 2006.
    """
    at = np.asarray(thresholds, float)
    odds = at / (1 - at)
    share = float(case.mean()) if prevalence is None else prevalence
    everybody: list[float] = (share - (1 - share) * odds).tolist()
    if prevalence is not None and not 0 < case.mean() < 1:
        return {"model": [None] * len(at), "everybody": everybody}
    acts = score[None] >= at[:, None]
    right, wrong = ((acts & those).sum(1) / max(1, those.sum()) for those in (case, ~case))
    of_model = share * right - (1 - share) * wrong * odds
    return {"model": of_model.tolist(), "everybody": everybody}


def described(
    score: _Floats, positive: _Flags, case: _Flags, prevalence: float | None = None
) -> dict[str, object]:
    """Return the metrics of one class as JSON: support, values at the operating point, ranking, calibration.

    Args:
        score: float64[n], the probability of the class.
        positive, case: bool[n], predicted and true cases.
        prevalence: of additional predictive values; None for none.
    """
    from sklearn.metrics import average_precision_score

    at_point = _at_point(positive, case)
    found: dict[str, object] = {"n": len(case), "cases": int(case.sum()), **at_point}
    sensitivity, specificity = at_point["sensitivity"], at_point["specificity"]
    if prevalence is not None and sensitivity and specificity:
        at = dict(zip(("ppv", "npv"), _at_prevalence(sensitivity, specificity, prevalence), strict=True))
        found["at_prevalence"] = {"prevalence": prevalence} | _told(at)
    found["auroc"] = _auroc(score, case)
    of_both = case.any() and not case.all()  # for cases only it is always 1
    found["auprc"] = float(average_precision_score(case, score)) if of_both else None
    found["calibration"] = _told(told) if (told := _calibration(score, case)) else None
    return _told(found)


def subgroups(
    groups: Names, positive: _Flags, case: _Flags, score: _Floats, least: int = LEAST
) -> dict[str, dict[str, object] | None]:
    """Return sensitivity, specificity and AUROC by group, in order; None for a group of fewer than `min_patients` patients.

    Values with fewer than `min_patients` cases or others are None too. "" is the group of patients without one.
    """
    found: dict[str, dict[str, object] | None] = {}
    for name in sorted(set(groups.tolist())):
        mine = groups == name
        n, cases = int(mine.sum()), int(case[mine].sum())
        if n < least:
            found[name] = None
            continue
        values = _at_point(positive[mine], case[mine])
        enough = {"sensitivity": cases >= least, "specificity": n - cases >= least}
        told = {name: values[name] if there else None for name, there in enough.items()}
        every = all(enough.values())
        told["auroc"] = _auroc(score[mine], case[mine]) if every else None
        found[name] = {"n": n, "cases": cases if every else None} | _told(told)
    return found


def _told(values: Mapping[str, object]) -> dict[str, object]:
    return {name: asdict(one) if isinstance(one, _Interval) else one for name, one in values.items()}
