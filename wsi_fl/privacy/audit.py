"""Membership attacks on trained models, on plain arrays, and the lower bounds on ε that they show.

A *score* is higher the more an example looks like one that was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]

ENOUGH = 1000
"""Least number of non-members for which a true positive rate at a false positive rate of 1 % or less is reported."""
SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the canaries that are guessed: fixed beforehand, each at a fourth of the allowed error."""
ADJACENCY = (
    "What is promised concerns one record (a row, or a patient) replaced by nothing while n stays fixed; for one "
    "record replaced by another, ε is that of a group of two."
)
"""Which two data sets are neighbours for ε; a canary's coin decides between two such."""
_MOST = 50.0
"""An ε above anything that canaries can show."""


def auroc(members: Scores, others: Scores) -> float | None:
    """Return the probability that a member scores above another; ties count half. None where either are missing.

    Example:
        >>> auroc(np.array([3.0, 2.0]), np.array([1.0, 2.0]))
        0.875
    """
    return _ranked(members, others).auroc(np.ones(len(members) + len(others), np.int32))


class Ranked:
    """Scores of positive and negative examples, sorted once for AUROCs under any number of weights.

    Args:
        positive: bool[n].
        scores: float64[n]; of equal ones each counts half.
    """

    def __init__(self, positive: NDArray[np.bool_], scores: Scores) -> None:
        self._above, self._below = (
            rows[np.argsort(scores[rows])] for rows in (np.flatnonzero(positive), np.flatnonzero(~positive))
        )
        ordered, own = scores[self._below], scores[self._above]
        self._reached = np.searchsorted(ordered, own), np.searchsorted(ordered, own, side="right")

    def auroc(self, weights: NDArray[np.int32]) -> float | None:
        """Return the share of pairs in which the positive example has the higher score; None without a pair.

        It is the Mann–Whitney statistic, in whole numbers up to the division.

        Args:
            weights: int32[n], how often each example is there.
        """
        # 1. how much weight the first k negative examples have
        total = np.zeros(len(self._below) + 1, np.int32)
        np.cumsum(weights[self._below], out=total[1:])
        # 2. of each positive one twice what lies below it: with and without what is equal
        below, up_to = (total[k] for k in self._reached)
        own = weights[self._above]
        pairs = int(own.sum()) * int(total[-1])
        return float(own.astype(np.float64) @ (below + up_to)) / 2 / pairs if pairs else None


def _ranked(members: Scores, others: Scores) -> Ranked:
    return Ranked(np.arange(len(members) + len(others)) < len(members), np.concatenate([members, others]))


def auroc_interval(
    members: Scores,
    others: Scores,
    member_of: NDArray[np.str_],
    other_of: NDArray[np.str_],
    *,
    repeats: int,
    seed: int = 0,
    level: float = 0.95,
) -> list[float] | None:
    """Return the AUROC's bootstrap interval over whole patients; None with fewer than two on either side.

    Args:
        member_of, other_of: the patient of each row.
    """
    (mine, n_mine), (theirs, n_theirs) = _numbered(member_of), _numbered(other_of)
    if min(n_mine, n_theirs) < 2 or not repeats:
        return None
    ranked = _ranked(members, others)
    rng = np.random.default_rng(seed)
    drawn = [
        ranked.auroc(np.concatenate([redrawn(rng, mine, n_mine), redrawn(rng, theirs, n_theirs)]))
        for _ in range(repeats)
    ]
    found = np.array(drawn, np.float64)
    return [float(q) for q in np.quantile(found, [(1 - level) / 2, (1 + level) / 2])]


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


def tpr_at(members: Scores, others: Scores, fpr: float) -> float | None:
    """Return the largest share of members that a threshold finds with at most `fpr` of the others.

    None with fewer than 1000 others (Carlini et al., 2022: what matters is where false alarms are rare), or without
    members.
    """
    if len(others) < ENOUGH or not len(members):
        return None
    return _found(members, np.sort(others)[::-1], fpr)


def _found(members: Scores, descending: Scores, fpr: float) -> float:
    allowed = int(np.floor(fpr * len(descending) + 1e-9))
    if allowed >= len(descending):
        return 1.0
    return float((members > descending[allowed]).mean())


def roc(members: Scores, others: Scores, n_points: int = 33) -> list[tuple[float, float]]:
    """Return (false, true positive rate) at rates from 1 / n of the others to 1, evenly spaced on a log axis."""
    if not (len(members) and len(others)):
        return []
    descending = np.sort(others)[::-1]
    rates = np.unique(np.geomspace(1 / len(others), 1, n_points))
    return [(float(rate), _found(members, descending, float(rate))) for rate in rates]


@dataclass(frozen=True)
class Bound:
    """What guesses about canaries show.

    Attributes:
        n: canaries.
        guesses: on how many of them a guess was made, half "in" and half "out".
        right: how many guesses were right.
        epsilon: ε is at least so much, with the confidence asked for.
        accuracy: share of all canaries, the better-looking half guessed "in", that are guessed right.
    """

    n: int
    guesses: int
    right: int
    epsilon: float
    accuracy: float


def canary_bound(
    scores: Scores, included: NDArray[np.bool_], delta: float, *, confidence: float = 0.95
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
    error = (1 - confidence) / len(SHARES)
    best: Bound | None = None
    whole = _right(order, included, m // 2)
    for share in SHARES:
        each = int(m * share) // 2
        if not each:
            continue
        right = _right(order, included, each)
        found = Bound(
            m, 2 * each, right, epsilon_lower(m, 2 * each, right, delta, error), whole / max(1, m // 2 * 2)
        )
        best = found if best is None or found.epsilon > best.epsilon else best
    return best or Bound(m, 0, 0, 0.0, 0.0)


def _right(order: NDArray[np.int64], included: NDArray[np.bool_], each: int) -> int:
    """Return how many guesses are right when the highest scores are guessed "in" and the lowest "out"."""
    return int(included[order[:each]].sum() + (~included[order[len(order) - each :]]).sum())


def p_value(m: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
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


def epsilon_lower(m: int, guesses: int, right: int, delta: float, error: float) -> float:
    """Return the ε below which so many right guesses would have a chance of at most `error`; 0 where any ε does.

    Example:
        >>> [round(epsilon_lower(1000, 500, right, 1e-5, 0.05), 2) for right in (250, 400, 500)]
        [0.0, 1.2, 5.09]
    """
    if p_value(m, guesses, right, 0.0, delta) > error:
        return 0.0
    low, high = 0.0, _MOST
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(m, guesses, right, middle, delta) <= error else (low, middle)
    return low


def level_of_each(confidence: float, tests: int) -> float:
    """Return the level of each of several tests at which all together err with at most 1 − confidence.

    Whatever the tests have to do with each other, the chance that any errs is at most the sum (Bonferroni).

    Example:
        >>> level_of_each(0.95, 1), level_of_each(0.95, 8)
        (0.95, 0.99375)
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
