"""Attacks on trained models and released sums, on plain arrays, and the lower bounds on ε that they show.

A *score* is higher the more an example looks like one that was trained on.

Who of many can be found in a released sum is asked of each, without shadow models. What a unit, a row or a patient,
adds to a sum is a vector c that is known exactly, and so is the noise. Whoever knows all others takes them off what was
released and asks whether noise alone or c with noise is left; the likelihood ratio is ⟨what is left, c⟩, a normal
number that c moves by μ = |c| / s standard deviations. At a false positive rate α a test finds Φ(Φ⁻¹(α) + μ) (Dong,
Roth and Su, "Gaussian differential privacy", JRSS B 2022). Whoever knows only how units vary has their variation as
noise beside it: the likelihood ratio of a sum of unknown others (Sankararaman et al., "Genomic privacy and limits of
individual detection in a pool", Nature Genetics 2009) with their second moment has μ² = h / (1 − h), where h is the
leverage of c among all units. Averages hide those who can be found; groups and the most exposed do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Scores = NDArray[np.float64]

_ENOUGH = 1000
"""Least number of non-members for which a true positive rate at a false positive rate of 1 % or less is reported."""
_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the canaries that are guessed: fixed beforehand, each at a fourth of the allowed error."""
ADJACENCY = (
    "What is promised concerns one record (a row, or a patient) replaced by nothing while n stays fixed; for one "
    "record replaced by another, ε is that of a group of two."
)
"""Which two data sets are neighbours for ε; a canary's coin decides between two such."""
TAILS = [(1 - 0.95) / 2, (1 + 0.95) / 2]
"""Outside a 95 % interval lie the quantiles below and above these."""
_MOST = 50.0  # an ε above anything that canaries can show


def auroc(members: _Scores, others: _Scores) -> float | None:
    """Return the probability that a member scores above another; ties count half. None where either are missing."""
    (area,) = _ranked(members, others).aurocs(np.ones(len(members) + len(others), np.int32))
    return None if np.isnan(area) else float(area)


class Ranked:
    """Scores of n examples, sorted once for the AUROCs of q questions under any number of weights; equal ones count
    half.

    Args:
        positive: bool[n, q], of which examples the answer to each question is yes.
        scores: float64[n, q], higher where that is more probable.
    """

    def __init__(self, positive: NDArray[np.bool_], scores: _Scores) -> None:
        # what is known of each question lies behind that of the one before, so that one call looks up all weights
        n_above = positive.sum(0)
        self._question = np.repeat(np.arange(len(n_above)), n_above)
        self._asked, self._first = np.unique(self._question, return_index=True)
        self._ends = np.concatenate([[0], np.cumsum(len(positive) - n_above)])
        above, below, reached = [], [], []
        for yes, score, first in zip(positive.T, scores.T, self._ends[:-1], strict=True):
            own, rest = (
                rows[np.argsort(score[rows])] for rows in (np.flatnonzero(yes), np.flatnonzero(~yes))
            )
            above.append(own)
            below.append(rest)
            reached.append(
                [first + np.searchsorted(score[rest], score[own], side) for side in ("left", "right")]
            )
        self._above, self._below = (np.concatenate(each).astype(np.int32) for each in (above, below))
        self._reached = np.concatenate(reached, axis=1)

    def aurocs(self, weights: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return by question the share of pairs in which the positive example has the higher score; NaN without a pair.

        It is the Mann–Whitney statistic, in whole numbers up to the division. `weights`, int32[n], says how often each
        example is there.
        """
        # 1. how much weight the first k negative examples have
        total = np.zeros(len(self._below) + 1, np.int32)
        np.cumsum(np.take(weights, self._below), out=total[1:])
        ends = total[self._ends]
        # 2. of each positive one twice what lies below it: with and without what is equal
        below, up_to = np.take(total, self._reached)
        twice = below + up_to - 2 * ends[self._question]
        own = np.take(weights, self._above).astype(np.float64)
        # 3. sums by question
        found, n_own = self._by_question(own * twice), self._by_question(own)
        pairs = n_own * np.diff(ends)
        areas = np.full(len(pairs), np.nan)
        np.divide(found / 2, pairs, out=areas, where=pairs > 0)
        return areas

    def _by_question(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.zeros(len(self._ends) - 1)
        found[self._asked] = np.add.reduceat(values, self._first)
        return found


def _ranked(members: _Scores, others: _Scores) -> Ranked:
    scores = np.concatenate([members, others])[:, None]
    return Ranked((np.arange(len(scores)) < len(members))[:, None], scores)


def auroc_interval(
    members: _Scores,
    others: _Scores,
    member_of: NDArray[np.str_],
    other_of: NDArray[np.str_],
    *,
    repeats: int,
    seed: int = 0,
) -> list[float] | None:
    """Return the AUROC's 95 % bootstrap interval over whole patients; None with fewer than two on either side.

    Where every draw ranks all pairs alike it is the exact one, of as many pairs as share no patient: three patients who
    all look more trained-on than three others prove little.

    Args:
        member_of, other_of: the patient of each row.
    """
    (mine, n_mine), (theirs, n_theirs) = _numbered(member_of), _numbered(other_of)
    if min(n_mine, n_theirs) < 2 or not repeats:
        return None
    ranked = _ranked(members, others)
    rng = np.random.default_rng(seed)
    drawn = [
        ranked.aurocs(np.concatenate([redrawn(rng, mine, n_mine), redrawn(rng, theirs, n_theirs)]))[0]
        for _ in range(repeats)
    ]
    low, high = (float(q) for q in np.quantile(np.array(drawn), TAILS))
    return [*share_interval(low, min(n_mine, n_theirs))] if low == high and low in (0, 1) else [low, high]


def share_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of n independent trials (Clopper and Pearson, 1934), n · share whole or not.

    Example:
        >>> [round(end, 3) for end in share_interval(1.0, 6)]
        [0.541, 1.0]
    """
    from scipy.stats import beta

    k = share * n
    low = float(beta.ppf(TAILS[0], k, n - k + 1)) if k > 0 else 0.0
    return low, float(beta.ppf(TAILS[1], k + 1, n - k)) if k < n else 1.0


def _numbered(names: NDArray[np.str_]) -> tuple[NDArray[np.int64], int]:
    """Return clusters by number; a row without a patient is one of its own."""
    alone = [name or f"row {k}" for k, name in enumerate(names.tolist())]
    found, which = np.unique(alone, return_inverse=True)
    return which, len(found)


def redrawn(rng: np.random.Generator, which: NDArray[np.int64], n: int) -> NDArray[np.int32]:
    """Return int32[rows], how often each row is in a sample of n clusters with replacement.

    Args:
        which: int64[rows], the number of each row's cluster.
    """
    return np.bincount(rng.integers(n, size=n), minlength=n).astype(np.int32)[which]


def tpr_at(members: _Scores, others: _Scores, fpr: float) -> float | None:
    """Return the largest share of members that a threshold finds with at most `fpr` of the others.

    None with fewer than 1000 others (Carlini et al., 2022: what matters is where false alarms are rare), or without
    members.
    """
    if len(others) < _ENOUGH or not len(members):
        return None
    return _found(members, np.sort(others)[::-1], fpr)


def _found(members: _Scores, descending: _Scores, fpr: float) -> float:
    allowed = int(np.floor(fpr * len(descending) + 1e-9))
    if allowed >= len(descending):
        return 1.0
    return float((members > descending[allowed]).mean())


def roc(members: _Scores, others: _Scores, n_points: int = 33) -> list[tuple[float, float]]:
    """Return (false, true positive rate) at rates from 1 / n of the others to 1, evenly spaced on a log axis."""
    if not (len(members) and len(others)):
        return []
    descending = np.sort(others)[::-1]
    rates = np.unique(np.geomspace(1 / len(others), 1, n_points))
    return [(float(rate), _found(members, descending, float(rate))) for rate in rates]


@dataclass(frozen=True)
class Bound:
    """What guesses about canaries show."""

    n: int  # canaries
    guesses: int  # on how many of them a guess was made, half "in" and half "out"
    right: int  # how many guesses were right
    epsilon: float  # ε is at least so much, with the confidence asked for
    accuracy: float  # share of all canaries, the better-looking half guessed "in", that are guessed right


def canary_bound(
    scores: _Scores, included: NDArray[np.bool_], delta: float, *, confidence: float = 0.95
) -> Bound:
    """Return a lower bound on ε from one run in which each canary was in or out by a fair coin.

    The highest scores are guessed "in", as many of the lowest "out" (Steinke, Nasr and Jagielski, 2023). How many is
    one of four fixed shares; each is tested at a fourth of the error (Bonferroni), and the best bound holds.

    Args:
        scores: float64[m], computed without a look at the coins.
        included: bool[m], the coins.
        delta: of the guarantee that is tested.
    """
    m = len(scores)
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
    error = (1 - confidence) / len(_SHARES)
    best: Bound | None = None
    whole = _right(order, included, m // 2)
    for share in _SHARES:
        each = int(m * share) // 2
        if not each:
            continue
        right = _right(order, included, each)
        found = Bound(
            m, 2 * each, right, _epsilon_lower(m, 2 * each, right, delta, error), whole / max(1, m // 2 * 2)
        )
        best = found if best is None or found.epsilon > best.epsilon else best
    return best or Bound(m, 0, 0, 0.0, 0.0)


def _right(order: NDArray[np.int64], included: NDArray[np.bool_], each: int) -> int:
    """Return how many guesses are right when the highest scores are guessed "in" and the lowest "out"."""
    return int(included[order[:each]].sum() + (~included[order[len(order) - each :]]).sum())


def _p_value(m: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the largest chance of so many right guesses under (ε, δ) (Steinke et al., 2023, theorem 5.2).

    With f(v) = P[Binomial(r, e^ε / (e^ε + 1)) ≥ v] it is f(v) + 2mδ max_i (f(v − i) − f(v)) / i.
    """
    from scipy.stats import binom

    q = 1 / (1 + np.exp(-epsilon))
    beyond = float(binom.sf(right - 1, guesses, q))
    if not right:
        return 1.0
    near = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q)) / np.arange(1, right + 1)
    return min(1.0, beyond + 2 * m * delta * float(near.max()))


def _epsilon_lower(m: int, guesses: int, right: int, delta: float, error: float) -> float:
    """Return the ε below which so many right guesses would have a chance of at most `error`; 0 where any ε does."""
    if _p_value(m, guesses, right, 0.0, delta) > error:
        return 0.0
    low, high = 0.0, _MOST
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _p_value(m, guesses, right, middle, delta) <= error else (low, middle)
    return low


def level_of_each(confidence: float, tests: int) -> float:
    """Return the level of each of several tests at which all together err with at most 1 − confidence.

    Whatever the tests have to do with each other, the chance that any errs is at most the sum (Bonferroni).
    """
    return 1 - (1 - confidence) / tests if tests > 1 else confidence


def said_of_tests(tests: int, confidence: float) -> str:
    """Return the sentence on how many models are tested, and at which level."""
    level, error = f"{level_of_each(confidence, tests):.4%}", f"{1 - confidence:.4%}"
    shown, allowed = (text.rstrip("%").rstrip("0").rstrip(".") + " %" for text in (level, error))
    together = f", so that all tests together err with a chance of at most {allowed}"
    models = "1 model" if tests == 1 else f"{tests} models"
    return (
        f"The ε of {models} of this run is tested against canaries; it counts as refuted where the lower bound at a "
        f"confidence of {shown} is above it{together if tests > 1 else ''}."
    )


def alarming(interval: Sequence[float] | None) -> bool | None:
    """Return whether members are told from others better than by chance; None where the interval is not known."""
    return None if interval is None else interval[0] > 0.5


_RATES = (0.01, 0.001)  # false positive rates at which is told how many are found
_DRAWS = 2000
"""How often the noise is drawn again: half of it sets the threshold, half says how many are found."""
_WORST = 0.01  # the share of units that counts as the most exposed
_CHANCE = 1e-6  # that noise as it is promised is called too little by one comparison
_AT_ONCE = 4096  # units attacked at a time


def distances(parts: _Scores, noise: float, *, others_known: bool = True) -> _Scores:
    """Return μ float64[n] of each unit: by how many standard deviations it moves the statistic of the best test.

    Args:
        parts: float64[n, k], what each unit adds to the sum.
        noise: standard deviation s of the noise on each number; 0 for none.
        others_known: whether the attacker knows all other units, or only their second moment.
    """
    if others_known:
        length = np.linalg.norm(parts, axis=1)
        return length / noise if noise else np.where(length > 0, np.inf, 0.0)
    moments, axes = np.linalg.eigh(parts.T @ parts)
    moments = moments.clip(min=0) + noise**2
    seen = moments > 1e-12 * max(moments.max(initial=0), 1e-300)
    leverage = np.square(parts @ axes[:, seen]) @ (1 / moments[seen])
    alone = leverage > 1 - 1e-9  # nobody else is where this one is
    return np.where(alone, np.inf, np.sqrt(leverage / np.where(alone, 1.0, 1 - leverage)))


def found(mu: _Scores | float, rate: float) -> _Scores:
    """Return the share of times that the best test finds units of these μ, when it is wrong at this rate."""
    from scipy.special import ndtr, ndtri

    return np.asarray(ndtr(ndtri(rate) + np.asarray(mu, np.float64)))


def _found_in(parts: _Scores, drawn: _Scores, noise: float, rate: float) -> _Scores:
    """Return float64[n], the share of redraws of the noise in which each unit is found by one who knows all others.

    One threshold holds for all, since noise is alike in all directions. The first half of the redraws sets it, so noise
    that is less than `noise` says shows.

    Args:
        parts: float64[n, k], what each unit adds.
        drawn: float64[r, k], noise as the mechanism draws it.
        noise: its standard deviation, as promised.
    """
    mu = distances(parts, noise)
    along = parts / np.maximum(np.linalg.norm(parts, axis=1, keepdims=True), 1e-300)
    first, second = np.array_split(drawn / noise, 2)
    threshold = np.quantile(first, 1 - rate)
    shares = [
        (second @ along[k : k + _AT_ONCE].T + mu[k : k + _AT_ONCE] > threshold).mean(0)
        for k in range(0, len(along), _AT_ONCE)
    ]
    return np.concatenate(shares)


def _worst(mu: _Scores) -> NDArray[np.bool_]:
    """Return which units are the most exposed: 1 % of them, and at least one."""
    order = np.argsort(-mu, kind="stable")[: ceil(_WORST * len(mu))]
    return np.isin(np.arange(len(mu)), order)


def tail_of(
    parts: _Scores, sigma: float, groups: Mapping[str, NDArray[np.bool_]], draw: Callable[[], _Scores] | None
) -> dict[str, Any]:
    """Return how many units of each group are found in a sum, by one who knows all others and one who knows none.

    Args:
        parts: float64[n, k], what each unit adds, at most 1 long.
        sigma: noise multiplier; 0 for no noise.
        groups: bool[n] by name, in addition to all units and the most exposed.
        draw: returns float64[k], the noise of one release; None for none.

    Returns:
        `sigma`, `draws`, what is `guaranteed` at each rate (None without noise), and by attacker (`others` known, or
            the `population`) its `groups` and a `curve` of (false positive rate, found of all, found of the worst). A
            group has its median and largest μ (None where it is infinite), and by rate what is found: `exact`, and by
            redraws `drawn` with an `interval` of 95 % or more. `beyond` names groups of which more are found than is
            guaranteed, but for a chance of 10⁻⁶ each.
    """
    from scipy.stats import binomtest

    limits = {rate: float(found(1 / sigma, rate)) for rate in _RATES} if sigma else {}
    noise = np.stack([draw() for _ in range(_DRAWS)]) if draw and sigma else None
    drawn = {rate: _found_in(parts, noise, sigma, rate) for rate in _RATES} if noise is not None else {}
    attackers, beyond = {}, set()
    for attacker in ("others", "population"):
        mu = distances(parts, sigma, others_known=attacker == "others")
        named = {"all": np.ones(len(mu), bool), "most exposed 1 %": _worst(mu)} | dict(groups)
        rows = []
        for name, of in named.items():
            told: dict[str, Any] = {}
            for rate in _RATES:
                one = told[f"{rate:g}"] = {"exact": float(found(mu[of], rate).mean())}
                over = rate in limits and one["exact"] > limits[rate] * (1 + 1e-5)
                if drawn and attacker == "others":
                    # each redraw is of all units: a share over units varies no more than that of one would
                    n = _DRAWS // 2
                    test = binomtest(
                        round(n * drawn[rate][of].mean()), n, limits[rate], alternative="greater"
                    )
                    interval = binomtest(test.k, n).proportion_ci()
                    one |= {"drawn": test.k / n, "interval": [float(interval.low), float(interval.high)]}
                    over = over or test.pvalue < _CHANCE
                if over:
                    beyond.add(name)
            middle, most = (float(m) if np.isfinite(m) else None for m in (np.median(mu[of]), mu[of].max()))
            rows.append({"group": name, "n": int(of.sum()), "median": middle, "most": most, "found": told})
        curve = [[x, *(float(found(mu[named[g]], x).mean()) for g in list(named)[:2])] for x in _CURVE]
        attackers[attacker] = {"groups": rows, "curve": curve}
    return {
        "sigma": sigma,
        "draws": _DRAWS if noise is not None else 0,
        "guaranteed": {f"{rate:g}": limit for rate, limit in limits.items()} or None,
        "attackers": attackers,
        "beyond": sorted(beyond),
    }


_CURVE = tuple(float(x) for x in np.geomspace(1e-4, 1 - 1e-9, 25))
