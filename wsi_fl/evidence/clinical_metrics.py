"""Clinical metrics: sensitivity and specificity, predictive values, calibration, net benefit and subgroups.

The unit is the patient. A *case* is a patient of the class of interest, a *score* its predicted probability. Values
come with 95 % intervals; None without patients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, sqrt

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_fl.data.metrics import aggregate_slides, share_interval

_Floats = NDArray[np.float64]
_Names = NDArray[np.str_]
_Flags = NDArray[np.bool_]

MIN_SUBGROUP = 10
"""Minimum number of patients, cases and others of a reported subgroup."""
_Z = 1.959963984540054
"""Standard deviations of a normal distribution within which 95 % of it lie, on either side."""
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class _Interval:
    """A value, its 95 % interval and the number `n` of patients."""

    value: float
    low: float
    high: float
    n: int


def aggregate_patients(
    probabilities: _Floats, truth: NDArray[np.int64], patient: _Names, *, is_mixed: bool = False
) -> tuple[pd.DataFrame, bool]:
    """Aggregate probabilities float64[n, k] and truth int64[n] of examples by patient.

    Where examples of a patient are of different classes, as patches with and without tumour are, a patient of a
    two-class task is positive when any example is, and the score is the mean of the highest tenth. Otherwise a
    patient's probabilities are the means, and the class is the most frequent one.

    Args:
        is_mixed: whether patients of another fold have examples of different classes; all folds have one rule.

    Returns:
        A row for each patient, with the probabilities of the classes (0, 1, …) and the `truth`; whether any example
            counts.
    """
    names, first, patient_index = np.unique(patient, return_index=True, return_inverse=True)
    any_counts = False
    if len(names) < len(patient):
        counts = np.zeros((len(names), probabilities.shape[1]))
        np.add.at(counts, (patient_index, truth), 1)
        is_mixed = is_mixed or bool(((counts > 0).sum(1) > 1).any())
        if is_mixed and (slides := aggregate_slides(probabilities, truth, patient)):
            probabilities, truth, first = slides
            any_counts = True
        else:
            sums = np.stack([np.bincount(patient_index, column, len(names)) for column in probabilities.T], axis=1)
            probabilities, truth = sums / counts.sum(1, keepdims=True), counts.argmax(1)
        patient = patient[first]
    return pd.DataFrame(probabilities, patient).assign(truth=truth), any_counts


def _wilson_interval(k: int, n: int) -> _Interval | None:
    """Return k of n with the interval of Wilson, "Probable inference", J. American Statistical Association 22, 1927."""
    from scipy.stats import binomtest

    if not n:
        return None
    interval = binomtest(int(k), int(n)).proportion_ci(method="wilson")
    return _Interval(k / n, float(interval.low), float(interval.high), n)


def _operating_values(positive: _Flags, case: _Flags) -> dict[str, _Interval | None]:
    """Return sensitivity, specificity and predictive values from masks bool[n] of predicted and true cases."""
    correct = positive == case
    rows_by_measure = {"sensitivity": case, "specificity": ~case, "ppv": positive, "npv": ~positive}
    return {name: _wilson_interval(int(correct[rows].sum()), int(rows.sum())) for name, rows in rows_by_measure.items()}


def _predictive_value(same_kind: _Interval, other_kind: _Interval, odds: float) -> _Interval | None:
    """Return a predictive value from the shares of both kinds predicted correctly, and the odds of this kind.

    Reference: Mercaldo, Lau and Zhou, Statistics in Medicine 26, 2007: the logit intervals, with half a patient added
    where all predictions are correct. None without such predictions.
    """
    if same_kind.value == 0 and other_kind.value == 1:
        return None
    a, b = ((p.value * p.n + 0.5) / (p.n + 1) if p.value in (0, 1) else p.value for p in (same_kind, other_kind))
    spread = sqrt((1 - a) / (a * same_kind.n) + b / ((1 - b) * other_kind.n))
    low, high = (1 / (1 + exp(-(log(a / (1 - b) * odds) + sign * _Z * spread))) for sign in (-1, 1))
    value = same_kind.value * odds / (same_kind.value * odds + (1 - other_kind.value))
    return _Interval(value, min(low, value), max(high, value), same_kind.n + other_kind.n)


def _delong_covariance(scores: _Floats, case: _Flags) -> tuple[_Floats, _Floats]:
    """Return AUROCs float64[m] of m models' scores float64[m, n] of the same patients, and their covariance.

    Reference: DeLong et al., "Comparing the areas under two or more correlated receiver operating characteristic
        curves", Biometrics 44, 1988; by ranks as Sun and Xu, IEEE Signal Processing Letters 21, 2014.
    """
    from scipy.stats import rankdata

    n1, n0 = int(case.sum()), int((~case).sum())
    ranks = rankdata(scores, axis=1)
    of_cases = (ranks[:, case] - rankdata(scores[:, case], axis=1)) / n0
    of_others = 1 - (ranks[:, ~case] - rankdata(scores[:, ~case], axis=1)) / n1
    covariance = np.atleast_2d(np.cov(of_cases)) / n1 + np.atleast_2d(np.cov(of_others)) / n0
    areas: _Floats = of_cases.mean(1)
    return areas, covariance


def _auroc_interval(score: _Floats, case: _Flags) -> _Interval | None:
    """Return the AUROC with DeLong's interval on the scale of log-odds (Pepe, "The Statistical Evaluation of Medical
    Tests", Oxford 2003, section 5.2); None for fewer than two cases or others.

    Where all pairs are ranked alike, DeLong's variance is 0. Then disjoint pairs of patients, as many as there are
    patients of the rarer kind, give Clopper and Pearson's interval, which is wide.
    """
    from scipy.special import expit, logit

    pairs = int(min(case.sum(), (~case).sum()))
    if pairs < 2:
        return None
    areas, covariance = _delong_covariance(score[None], case)
    area = float(areas[0])
    if area in (0, 1):
        return _Interval(area, *share_interval(area, pairs), len(case))
    spread = sqrt(covariance[0, 0]) / (area * (1 - area))
    low, high = (expit(logit(area) + sign * _Z * spread) for sign in (-1, 1))
    return _Interval(area, float(low), float(high), len(case))


@dataclass(frozen=True)
class _AreaDifference(_Interval):
    """Difference of two models' AUROCs; p is two-sided, None where both rank all patients alike."""

    p: float | None


def auroc_difference(scores: _Floats, baseline: _Floats, case: _Flags) -> _AreaDifference | None:
    """Return the difference of two AUROCs by DeLong's test for pairs; None for fewer than two cases or others.

    Its variance is also 0 where all patients agree, as for a perfect and a constant model. Then disjoint pairs of
    patients, as many as there are patients of the rarer kind, are independent and all differ alike: Clopper and
    Pearson's interval of the share that differs, and a sign test, which needs more than six patients for significance.
    """
    from scipy.stats import norm

    if min(case.sum(), (~case).sum()) < 2:
        return None
    areas, covariance = _delong_covariance(np.stack([scores, baseline]), case)
    value = float(areas[0] - areas[1])
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    if variance <= _TOLERANCE**2:
        return _difference_of_pairs(value, scores, baseline, case)
    sd = sqrt(variance)
    p = max(float(2 * norm.sf(abs(value) / sd)), np.finfo(float).tiny)  # no test gives 0
    low, high = max(-1.0, value - _Z * sd), min(1.0, value + _Z * sd)
    return _AreaDifference(value, low, high, len(case), p)


def _difference_of_pairs(value: float, scores: _Floats, baseline: _Floats, case: _Flags) -> _AreaDifference:
    """Return the difference of two AUROCs, the same for all patients, from disjoint pairs of patients.

    A pair contributes at most ∓ the largest difference. The interval is of the share of pairs in favour of the better
    model that gives `value`, with fractions of pairs where some favour the other.
    """
    from scipy.stats import binomtest

    if abs(value) <= _TOLERANCE:
        return _AreaDifference(0.0, 0.0, 0.0, len(case), None)
    side = 1 if value > 0 else -1
    better, worse = (scores, baseline) if value > 0 else (baseline, scores)
    first, second = (np.sign(values[case][:, None] - values[~case]) / 2 for values in (better, worse))
    max_difference, pairs = float((first - second).max()), int(min(case.sum(), (~case).sum()))
    share = (1 + abs(value) / max_difference) / 2
    low, high = ((2 * end - 1) * max_difference for end in share_interval(share, pairs))
    p = float(binomtest(int(share * pairs + _TOLERANCE), pairs).pvalue)
    ends = sorted((side * low, side * high))
    return _AreaDifference(value, min(ends[0], value), max(ends[1], value), len(case), p)


def _fit_calibration(score: _Floats, case: _Flags) -> dict[str, _Interval] | None:
    """Return the slope and the intercept ("in the large") of probabilities' calibration, by logistic regression.

    With a slope below 1 probabilities are too extreme. The intercept, with slope 1, is by how much they are too low on
    average, in log-odds. None where all patients are of one kind or have the same score, or where a score separates
    both kinds, so that no finite slope is best.

    Reference: Van Calster et al., "Calibration: the Achilles heel of predictive analytics", BMC Medicine 17, 2019.
    """
    from scipy.special import logit
    from statsmodels.genmod.families import Binomial
    from statsmodels.genmod.generalized_linear_model import GLM

    if case.all() or not case.any() or score.min() == score.max():
        return None
    lp = logit(np.clip(score, 1e-9, 1 - 1e-9))
    if lp[case].min() >= lp[~case].max() or lp[case].max() <= lp[~case].min():
        return None
    ones, family = np.ones(len(lp)), Binomial()
    fits = {
        "slope": GLM(case.astype(float), np.stack([ones, lp], axis=1), family=family).fit(tol=1e-12),
        "intercept": GLM(case.astype(float), ones, family=family, offset=lp).fit(tol=1e-12),
    }
    intervals = {}
    for name, fit in fits.items():
        low, high = (float(end) for end in fit.conf_int()[-1])
        intervals[name] = _Interval(float(fit.params[-1]), low, high, len(case))
    return intervals


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
    points = np.asarray(thresholds, float)
    odds = points / (1 - points)
    share = float(case.mean()) if prevalence is None else prevalence
    everybody: list[float] = (share - (1 - share) * odds).tolist()
    if prevalence is not None and not 0 < case.mean() < 1:
        return {"model": [None] * len(points), "everybody": everybody}
    is_treated = score[None] >= points[:, None]
    true_rate, false_rate = ((is_treated & members).sum(1) / max(1, members.sum()) for members in (case, ~case))
    model_benefit = share * true_rate - (1 - share) * false_rate * odds
    return {"model": model_benefit.tolist(), "everybody": everybody}


def describe_class(
    score: _Floats, positive: _Flags, case: _Flags, prevalence: float | None = None
) -> dict[str, object]:
    """Return the metrics of one class as JSON: support, values at the operating point, ranking, calibration.

    Args:
        score: float64[n], the probability of the class.
        positive, case: bool[n], predicted and true cases.
        prevalence: of additional predictive values; None for none.
    """
    from sklearn.metrics import average_precision_score

    at_point = _operating_values(positive, case)
    description: dict[str, object] = {"n": len(case), "cases": int(case.sum()), **at_point}
    sensitivity, specificity = at_point["sensitivity"], at_point["specificity"]
    if prevalence is not None and sensitivity and specificity:
        odds = prevalence / (1 - prevalence)
        ppv = _predictive_value(sensitivity, specificity, odds)
        npv = _predictive_value(specificity, sensitivity, 1 / odds)
        description["at_prevalence"] = {"prevalence": prevalence, **_dump_intervals({"ppv": ppv, "npv": npv})}
    description["auroc"] = _auroc_interval(score, case)
    has_both = case.any() and not case.all()  # for cases only it is always 1
    description["auprc"] = float(average_precision_score(case, score)) if has_both else None
    calibration = _fit_calibration(score, case)
    description["calibration"] = calibration and _dump_intervals(calibration)
    return _dump_intervals(description)


def describe_subgroups(
    groups: _Names, positive: _Flags, case: _Flags, score: _Floats, min_patients: int = MIN_SUBGROUP
) -> dict[str, dict[str, object] | None]:
    """Return sensitivity, specificity and AUROC by group, in order; None for a group of fewer than `min_patients`
    patients.

    Values with fewer than `min_patients` cases or others are None too. "" is the group of patients without one.
    """
    descriptions: dict[str, dict[str, object] | None] = {}
    for name in sorted(set(groups.tolist())):
        rows = groups == name
        n, cases = int(rows.sum()), int(case[rows].sum())
        if n < min_patients:
            descriptions[name] = None
            continue
        values = _operating_values(positive[rows], case[rows])
        enough = {"sensitivity": cases >= min_patients, "specificity": n - cases >= min_patients}
        reported = {name: values[name] if is_enough else None for name, is_enough in enough.items()}
        all_enough = all(enough.values())
        reported["auroc"] = _auroc_interval(score[rows], case[rows]) if all_enough else None
        descriptions[name] = {"n": n, "cases": cases if all_enough else None} | _dump_intervals(reported)
    return descriptions


def _dump_intervals(values: Mapping[str, object]) -> dict[str, object]:
    return {name: asdict(value) if isinstance(value, _Interval) else value for name, value in values.items()}
