"""Membership attacks on trained models and class statistics, on plain arrays, and the lower bounds on ε they imply.

A membership *score* is higher for examples that look more like training examples.

Attacks on a released sum need no shadow models. The contribution of a unit (row or patient) to the sum is a vector c,
known exactly, as is the noise. An attacker with all other units subtracts them and tests noise alone against c plus
noise; the likelihood ratio is ⟨remainder, c⟩, a normal number that c moves by μ = |c| / s standard deviations. At a
false positive rate α the true positive rate is Φ(Φ⁻¹(α) + μ) (Dong, Roth and Su, "Gaussian differential privacy",
JRSS B 2022). For an attacker with the distribution of the units alone, their variation is additional noise: the
likelihood ratio of a sum of unknown others (Sankararaman et al., "Genomic privacy and limits of individual detection in
a pool", Nature Genetics 2009) with their second moment has μ² = h / (1 − h), where h is the leverage of c among all
units. Averages hide exposed units; groups and the most exposed units are reported too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.metrics import RankedScores, fill_patient_names, percentile_interval, resample_clusters, share_interval

_Scores = NDArray[np.float64]

_MIN_NON_MEMBERS = 1000
"""Least number of non-members for a true positive rate at a false positive rate of 1 % or less."""
_MIN_PATIENTS = 4
"""Least number of patients on either side for an interval: three lie above three others by chance in one of 20."""
_GUESS_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the canaries with a guess: fixed beforehand, each tested at a fourth of the allowed error."""
_MAX_EPSILON = 50.0  # an ε above any bound by canaries


def compute_auroc(members: _Scores, others: _Scores) -> float | None:
    """Return the probability of a member to score above a non-member, ties counted half; None without either."""
    (area,) = _rank_scores(members, others).compute_aurocs(np.ones(len(members) + len(others), np.int32))
    return None if np.isnan(area) else float(area)


def _rank_scores(members: _Scores, others: _Scores) -> RankedScores:
    scores = np.concatenate([members, others])[:, None]
    return RankedScores((np.arange(len(scores)) < len(members))[:, None], scores)


def auroc_interval(
    members: _Scores,
    others: _Scores,
    member_patients: NDArray[np.str_],
    other_patients: NDArray[np.str_],
    *,
    repeats: int,
    seed: int = 0,
) -> list[float] | None:
    """Return the AUROC's 95 % bootstrap interval over whole patients; None with fewer than four on either side.

    Where every draw ranks all pairs alike, the interval is the exact binomial one of as many pairs as share no patient:
    four members above four non-members prove little.

    Args:
        member_patients, other_patients: the patient of each row.
    """
    sides = [np.unique(fill_patient_names(names), return_inverse=True) for names in (member_patients, other_patients)]
    n_patients = min(len(names) for names, _ in sides)
    if n_patients < _MIN_PATIENTS or not repeats:
        return None
    ranked, rng = _rank_scores(members, others), np.random.default_rng(seed)
    draws = (
        np.concatenate([resample_clusters(rng, clusters, len(names)) for names, clusters in sides])
        for _ in range(repeats)
    )
    low, high = percentile_interval([ranked.compute_aurocs(weights)[0] for weights in draws], n_patients)
    return [*share_interval(low, n_patients)] if low == high and low in (0, 1) else [low, high]


def tpr_at_fpr(members: _Scores, others: _Scores, fpr: float) -> float | None:
    """Return the true positive rate at a false positive rate of at most `fpr`.

    None with fewer than 1000 non-members (Carlini et al., 2022: low false positive rates matter), or without members.
    """
    if len(others) < _MIN_NON_MEMBERS or not len(members):
        return None
    return _threshold_tpr(members, np.sort(others)[::-1], fpr)


def _threshold_tpr(members: _Scores, descending: _Scores, fpr: float) -> float:
    allowed = int(np.floor(fpr * len(descending) + 1e-9))
    return 1.0 if allowed >= len(descending) else float((members > descending[allowed]).mean())


def threshold_accuracy(
    members: _Scores,
    others: _Scores,
    member_patients: NDArray[np.str_],
    other_patients: NDArray[np.str_],
    *,
    seed: int = 0,
) -> float | None:
    """Return the accuracy of telling members from others by one threshold on the score, 0.5 by chance.

    The threshold is the best for a random half of the patients of both and judged on the other halves, then the other
    way round; the mean of both counts. Whole patients are divided, since a patient's losses are alike. Members and
    others weigh the same, as in the game of Yeom et al. (2018), so that their numbers do not matter. It can be below
    0.5. None with fewer than two patients of either.

    Args:
        member_patients, other_patients: the patient of each row.
    """
    rng, halves = np.random.default_rng(seed), []
    for scores, patients in ((members, member_patients), (others, other_patients)):
        names, patient = np.unique(fill_patient_names(patients), return_inverse=True)
        if len(names) < 2:
            return None
        is_first = (rng.permutation(len(names)) < (len(names) + 1) // 2)[patient]
        halves.append((scores[is_first], scores[~is_first]))
    accuracies = []
    for fitted, judged in ((0, 1), (1, 0)):
        threshold = _best_threshold(*(half[fitted] for half in halves))
        judged_members, judged_others = (half[judged] for half in halves)
        accuracies.append(((judged_members >= threshold).mean() + (judged_others < threshold).mean()) / 2)
    return float(np.mean(accuracies))


def _best_threshold(members: _Scores, others: _Scores) -> float:
    """Return the least score of a member for the largest true minus false positive rate, midway between two scores."""
    values = np.unique(np.concatenate([members, others]))
    candidates = np.concatenate([[-np.inf], (values[1:] + values[:-1]) / 2, [np.inf]])
    missed, rejected = (np.searchsorted(np.sort(scores), candidates) for scores in (members, others))
    return float(candidates[np.argmax(rejected * len(members) - missed * len(others))])


def roc_points(members: _Scores, others: _Scores, n_points: int = 33) -> list[tuple[float, float]]:
    """Return (false, true positive rate) at rates from 1 / n of the others to 1, evenly spaced on a log axis."""
    if not (len(members) and len(others)):
        return []
    descending = np.sort(others)[::-1]
    rates = np.unique(np.geomspace(1 / len(others), 1, n_points))
    return [(float(rate), _threshold_tpr(members, descending, float(rate))) for rate in rates]


@dataclass(frozen=True)
class CanaryBound:
    """A lower bound on ε from guesses about canaries."""

    n: int  # canaries
    guesses: int  # number of guesses, half "in" and half "out"
    n_correct: int  # number of correct guesses
    epsilon: float  # lower bound on ε at the requested confidence
    accuracy: float  # share of correct guesses over all canaries, the upper half guessed "in"


def canary_bound(
    scores: _Scores, included: NDArray[np.bool_], delta: float, *, confidence: float = 0.95
) -> CanaryBound:
    """Return a lower bound on ε from one run with canaries included by fair coins.

    The highest scores are guessed "in", as many of the lowest "out" (Steinke, Nasr and Jagielski, 2023). Each of four
    fixed shares of guesses is tested at a fourth of the error (Bonferroni), and the best bound holds.

    Args:
        scores: float64[m], computed without the coins.
        included: bool[m], the coins.
        delta: δ of the tested guarantee.
    """
    m = len(scores)
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
    error = (1 - confidence) / len(_GUESS_SHARES)
    halves = [half for share in _GUESS_SHARES if (half := int(m * share) // 2)]
    if not halves:
        return CanaryBound(m, 0, 0, 0.0, 0.0)
    n_correct = [int(included[order[:half]].sum() + (~included[order[m - half :]]).sum()) for half in halves]
    bounds = [_lower_epsilon(m, 2 * half, n, delta, error) for half, n in zip(halves, n_correct, strict=True)]
    best = int(np.argmax(bounds))
    return CanaryBound(m, 2 * halves[best], n_correct[best], bounds[best], n_correct[0] / (2 * halves[0]))


def _p_value(m: int, guesses: int, n_correct: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of so many correct guesses under (ε, δ) (Steinke et al., 2023, theorem 5.2).

    With f(v) = P[Binomial(r, e^ε / (e^ε + 1)) ≥ v] it is f(v) + 2mδ max_i (f(v − i) − f(v)) / i.
    """
    from scipy.stats import binom

    q = 1 / (1 + np.exp(-epsilon))
    tail = float(binom.sf(n_correct - 1, guesses, q))
    if not n_correct:
        return 1.0
    near = np.cumsum(binom.pmf(np.arange(n_correct - 1, -1, -1), guesses, q)) / np.arange(1, n_correct + 1)
    return min(1.0, tail + 2 * m * delta * float(near.max()))


def _lower_epsilon(m: int, guesses: int, n_correct: int, delta: float, error: float) -> float:
    """Return the largest ε at which so many correct guesses have a probability of at most `error`; 0 for none."""
    if _p_value(m, guesses, n_correct, 0.0, delta) > error:
        return 0.0
    low, high = 0.0, _MAX_EPSILON
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _p_value(m, guesses, n_correct, middle, delta) <= error else (low, middle)
    return low


def bonferroni_level(confidence: float, tests: int) -> float:
    """Return the confidence of each of several tests for a joint error of at most 1 − confidence.

    The probability of any error is at most the sum of the errors, however the tests depend (Bonferroni).
    """
    return 1 - (1 - confidence) / tests if tests > 1 else confidence


def describe_tests(tests: int, confidence: float) -> str:
    """Return the sentence on the number of tested models and the confidence of each test."""
    level, error = f"{bonferroni_level(confidence, tests):.4%}", f"{1 - confidence:.4%}"
    level_text, error_text = (text.rstrip("%").rstrip("0").rstrip(".") + " %" for text in (level, error))
    joint_text = f", so that all tests together err with a chance of at most {error_text}"
    models = "1 model" if tests == 1 else f"{tests} models"
    return (
        f"The ε of {models} of this run is tested against canaries; it counts as refuted where the lower bound at a "
        f"confidence of {level_text} is above it{joint_text if tests > 1 else ''}."
    )


_FALSE_POSITIVE_RATES = (0.01, 0.001)  # false positive rates at which true positive rates are reported
_NOISE_DRAWS = 2000
"""Draws of the noise: one half sets the threshold, the other measures the true positive rate."""
_EXPOSED_SHARE = 0.01  # the share of units that counts as the most exposed
_FALSE_ALARM_RATE = 1e-6  # false alarm rate of one comparison with the stated noise
_BATCH_UNITS = 4096  # units attacked at a time


def compute_mu(parts: _Scores, noise: float, *, others_known: bool = True) -> _Scores:
    """Return μ float64[n] of each unit, its shift of the best test's statistic in standard deviations.

    Args:
        parts: float64[n, k], the contribution of each unit to the sum.
        noise: standard deviation s of the noise on each number; 0 for none.
        others_known: whether the attacker has all other units, or only their second moment.
    """
    if others_known:
        length = np.linalg.norm(parts, axis=1)
        return length / noise if noise else np.where(length > 0, np.inf, 0.0)
    moments, axes = np.linalg.eigh(parts.T @ parts)
    moments = moments.clip(min=0) + noise**2
    is_spanned = moments > 1e-12 * max(moments.max(initial=0), 1e-300)
    leverage = np.square(parts @ axes[:, is_spanned]) @ (1 / moments[is_spanned])
    is_unique = leverage > 1 - 1e-9  # no other unit has a part in this direction
    return np.where(is_unique, np.inf, np.sqrt(leverage / np.where(is_unique, 1.0, 1 - leverage)))


def best_test_tpr(mu: _Scores | float, rate: float) -> _Scores:
    """Return the true positive rate of the best test for units of these μ at a false positive rate."""
    from scipy.special import ndtr, ndtri

    return np.asarray(ndtr(ndtri(rate) + np.asarray(mu, np.float64)))


def _empirical_tpr(parts: _Scores, noise_draws: _Scores, noise: float, rate: float) -> _Scores:
    """Return float64[n], each unit's true positive rate over redraws float64[r, k] of the noise, given all other units.

    One threshold holds for all, since noise is alike in all directions. The first half of the redraws sets it, so noise
    below its stated deviation is detected.
    """
    mu = compute_mu(parts, noise)
    directions = parts / np.maximum(np.linalg.norm(parts, axis=1, keepdims=True), 1e-300)
    first, second = np.array_split(noise_draws / noise, 2)
    threshold = np.quantile(first, 1 - rate)
    shares = [
        (second @ directions[k : k + _BATCH_UNITS].T + mu[k : k + _BATCH_UNITS] > threshold).mean(0)
        for k in range(0, len(directions), _BATCH_UNITS)
    ]
    return np.concatenate(shares)


def _find_most_exposed(mu: _Scores) -> NDArray[np.bool_]:
    """Return bool[n], whether a unit is among the most exposed, at least one."""
    order = np.argsort(-mu, kind="stable")[: ceil(_EXPOSED_SHARE * len(mu))]
    return np.isin(np.arange(len(mu)), order)


def measure_exposure(
    parts: _Scores, sigma: float, groups: Mapping[str, NDArray[np.bool_]], draw: Callable[[], _Scores] | None
) -> dict[str, object]:
    """Return true positive rates for units of each group in a sum, of attackers with all other units and with none.

    Args:
        parts: float64[n, k], the contribution of each unit, at most 1 long.
        sigma: noise multiplier; 0 for no noise.
        groups: bool[n] by name, in addition to all units and the most exposed.
        draw: returns float64[k], the noise of one release; None for none.

    Returns:
        `sigma`, `draws`, the bound `guaranteed` at each rate (None without noise), and by attacker (`others` known, or
            the `population`) its `groups` and a `curve` of (false positive rate, true positive rate of all, of the most
            exposed). A group has its median and largest μ (None where infinite), and by rate the true positive rate
            `exact`, and `empirical_tpr` by redraws with an `interval` of 95 % or more. `beyond` names groups above the
            guarantee, with a false alarm rate of 10⁻⁶ each.
    """
    limits = {rate: float(best_test_tpr(1 / sigma, rate)) for rate in _FALSE_POSITIVE_RATES} if sigma else {}
    noise = np.stack([draw() for _ in range(_NOISE_DRAWS)]) if draw and sigma else None
    empirical_tpr = {}
    if noise is not None:
        empirical_tpr = {rate: _empirical_tpr(parts, noise, sigma, rate) for rate in _FALSE_POSITIVE_RATES}
    attackers, beyond = {}, set()
    for attacker in ("others", "population"):
        mu = compute_mu(parts, sigma, others_known=attacker == "others")
        masks = {"all": np.ones(len(mu), bool), "most exposed 1 %": _find_most_exposed(mu)} | dict(groups)
        rows = []
        for name, mask in masks.items():
            redrawn = {rate: float(tpr[mask].mean()) for rate, tpr in empirical_tpr.items() if attacker == "others"}
            rates, is_beyond = _describe_rates(mu[mask], limits, redrawn)
            beyond |= {name} if is_beyond else set()
            median, largest = (float(m) if np.isfinite(m) else None for m in (np.median(mu[mask]), mu[mask].max()))
            rows.append({"group": name, "n": int(mask.sum()), "median": median, "most": largest, "found": rates})
        plotted_mu = [mu[mask] for mask in list(masks.values())[:2]]
        curve = [[x, *(float(best_test_tpr(group_mu, x).mean()) for group_mu in plotted_mu)] for x in _CURVE_RATES]
        attackers[attacker] = {"groups": rows, "curve": curve}
    return {
        "sigma": sigma,
        "draws": _NOISE_DRAWS if noise is not None else 0,
        "guaranteed": {f"{rate:g}": limit for rate, limit in limits.items()} or None,
        "attackers": attackers,
        "beyond": sorted(beyond),
    }


def _describe_rates(
    mu: _Scores, limits: Mapping[float, float], redrawn: Mapping[float, float]
) -> tuple[dict[str, dict[str, object]], bool]:
    """Return the true positive rates of a group by false positive rate, and whether one is above its limit."""
    from scipy.stats import binomtest

    rates: dict[str, dict[str, object]] = {}
    is_beyond = False
    for rate in _FALSE_POSITIVE_RATES:
        exact = float(best_test_tpr(mu, rate).mean())
        rates[f"{rate:g}"] = {"exact": exact}
        is_beyond |= rate in limits and exact > limits[rate] * (1 + 1e-5)
        if rate in redrawn:  # each redraw is of all units: a share over units varies no more than that of a single unit
            n = _NOISE_DRAWS // 2
            test = binomtest(round(n * redrawn[rate]), n, limits[rate], alternative="greater")
            interval = binomtest(test.k, n).proportion_ci()
            ends = [float(interval.low), float(interval.high)]
            rates[f"{rate:g}"] = {"exact": exact, "drawn": test.k / n, "interval": ends}
            is_beyond |= test.pvalue < _FALSE_ALARM_RATE
    return rates, bool(is_beyond)


_CURVE_RATES = tuple(float(x) for x in np.geomspace(1e-4, 1 - 1e-9, 25))
