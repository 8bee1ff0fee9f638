"""Who of many can be found in a released sum: an attack on each of them, without shadow models.

What a unit, a row or a patient, adds to a sum is a vector c that is known exactly, and so is the noise. Whoever knows
all others takes them off what was released and asks whether noise alone or c with noise is left; the likelihood ratio
is ⟨what is left, c⟩, a normal number that c moves by μ = |c| / s standard deviations. Whoever knows only how units vary
has their variation as noise beside it. Averages hide those who can be found; groups and the most exposed do not.

References:
    Dong, Roth and Su, "Gaussian differential privacy", JRSS B 2022: at a false positive rate α a test finds
    Φ(Φ⁻¹(α) + μ). Sankararaman et al., "Genomic privacy and limits of individual detection in a pool", Nature Genetics
    2009, for the likelihood ratio of a sum of unknown others; with their second moment its μ² is h / (1 − h), where h
    is the leverage of c among all units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
RATES = (0.01, 0.001)
"""False positive rates at which is told how many are found."""
DRAWS = 2000
"""How often the noise is drawn again: half of it sets the threshold, half says how many are found."""
WORST = 0.01
"""The share of units that counts as the most exposed."""
_CHANCE = 1e-6
"""That noise as it is promised is called too little by one comparison."""
_AT_ONCE = 4096
"""Units attacked at a time."""


def distances(parts: Values, noise: float, *, others_known: bool = True) -> Values:
    """Return μ float64[n] of each unit: by how many standard deviations it moves the statistic of the best test.

    Args:
        parts: float64[n, k], what each unit adds to the sum.
        noise: standard deviation s of the noise on each number; 0 for none.
        others_known: whether the attacker knows all other units, or only their second moment.

    Example:
        >>> parts = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> distances(parts, 2.0).round(2).tolist(), distances(parts, 2.0, others_known=False).round(2).tolist()
        ([0.5, 0.5, 0.5, 0.5], [0.41, 0.41, 0.41, 0.5])
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


def found(mu: Values | float, rate: float) -> Values:
    """Return the share of times that the best test finds units of these μ, when it is wrong at this rate."""
    from scipy.special import ndtr, ndtri

    return np.asarray(ndtr(ndtri(rate) + np.asarray(mu, np.float64)))


def found_in(parts: Values, drawn: Values, noise: float, rate: float) -> Values:
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


def worst(mu: Values) -> NDArray[np.bool_]:
    """Return which units are the most exposed: 1 % of them, and at least one."""
    order = np.argsort(-mu, kind="stable")[: ceil(WORST * len(mu))]
    return np.isin(np.arange(len(mu)), order)


def tail_of(
    parts: Values, sigma: float, groups: Mapping[str, NDArray[np.bool_]], draw: Callable[[], Values] | None
) -> dict[str, Any]:
    """Return how many units of each group are found in a sum, by one who knows all others and one who knows none.

    Args:
        parts: float64[n, k], what each unit adds, at most 1 long.
        sigma: noise multiplier; 0 for no noise.
        groups: bool[n] by name, in addition to all units and the most exposed.
        draw: returns float64[k], the noise of one release; None for none.

    Returns:
        `sigma`, `draws`, what is `guaranteed` at each rate (None without noise), and by attacker (`others` known, or
        the `population`) its `groups` and a `curve` of (false positive rate, found of all, found of the worst). A group
        has its median and largest μ (None where it is infinite), and by rate what is found: `exact`, and by redraws
        `drawn` with an `interval` of 95 % or more. `beyond` names groups of which more are found than is guaranteed,
        but for a chance of 10⁻⁶ each.
    """
    from scipy.stats import binomtest

    limits = {rate: float(found(1 / sigma, rate)) for rate in RATES} if sigma else {}
    noise = np.stack([draw() for _ in range(DRAWS)]) if draw and sigma else None
    drawn = {rate: found_in(parts, noise, sigma, rate) for rate in RATES} if noise is not None else {}
    attackers, beyond = {}, set()
    for attacker in ("others", "population"):
        mu = distances(parts, sigma, others_known=attacker == "others")
        named = {"all": np.ones(len(mu), bool), "most exposed 1 %": worst(mu)} | dict(groups)
        rows = []
        for name, of in named.items():
            told: dict[str, Any] = {}
            for rate in RATES:
                one = told[f"{rate:g}"] = {"exact": float(found(mu[of], rate).mean())}
                over = rate in limits and one["exact"] > limits[rate] * (1 + 1e-5)
                if drawn and attacker == "others":
                    # each redraw is of all units: a share over units varies no more than that of one would
                    n = DRAWS // 2
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
        "draws": DRAWS if noise is not None else 0,
        "guaranteed": {f"{rate:g}": limit for rate, limit in limits.items()} or None,
        "attackers": attackers,
        "beyond": sorted(beyond),
    }


_CURVE = tuple(float(x) for x in np.geomspace(1e-4, 1 - 1e-9, 25))
