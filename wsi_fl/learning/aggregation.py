"""Many sites' predictions as one (MPCPA, section 3.2): means of probabilities, and majority votes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.metrics import Labels, Probabilities, counted_once, measure_of_classes

_MEANS = ("mean", "weighted_mean")
_VOTES = ("absolute", "relative", "weighted")
RULES = (*_MEANS, *_VOTES)
REJECTED = -1
"""The decision of an absolute majority vote where no class has more than half of the votes."""


def averaged(said: Sequence[Probabilities], weights: Sequence[float] | None = None) -> Probabilities:
    """Return Σ wᵢ pᵢ / Σ wᵢ of probabilities [n, classes] each; equal weights where none are given.

    Example:
        >>> a, b = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
        >>> averaged([a, b]).tolist(), averaged([a, b], [3, 1]).tolist()
        ([[0.5, 0.5]], [[0.75, 0.25]])
    """
    mean: Probabilities = np.average(np.stack(said), axis=0, weights=weights)
    return mean


def _tallied(said: Sequence[Probabilities], weights: Sequence[float] | None = None) -> Probabilities:
    """Return shares of the votes [n, classes]: each site gives its weight to its most probable class."""
    n, n_classes = said[0].shape
    w = np.ones(len(said)) if weights is None else np.asarray(weights, np.float64)
    votes = np.zeros((n, n_classes))
    for p, weight in zip(said, w, strict=True):
        votes[np.arange(n), p.argmax(1)] += weight
    shares: Probabilities = votes / w.sum()
    return shares


def decided(
    said: Sequence[Probabilities], rule: str, weights: Sequence[float] | None = None
) -> NDArray[np.int64]:
    """Return int64[n], the class of each example under one of `RULES`.

    Absolute majority: the class with more than half of the votes, else `REJECTED`. Relative: the class with most
    votes. Weighted: the class with most weight. Votes that tie are settled by the mean of the probabilities, since
    drawing lots would give other answers every time.

    Args:
        weights: of the sites, for "weighted_mean" and "weighted"; the other rules take no notice.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
    own = weights if rule.startswith("weighted") else None
    if rule in _MEANS:
        return _largest(averaged(said, own))
    shares, mean = _tallied(said, own), averaged(said, own)
    if rule == "absolute":
        return np.where(shares.max(1) > 0.5, shares.argmax(1), REJECTED)
    most = shares >= shares.max(1, keepdims=True) - 1e-12
    return _largest(np.where(most, mean, -1.0))


def _largest(values: Probabilities) -> NDArray[np.int64]:
    found: NDArray[np.int64] = values.argmax(axis=1)
    return found


def aggregated_scores(
    said: Sequence[Probabilities], labels: Labels, weights: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """Return by rule: n, accuracy, macro-accuracy, AUROC of shares or means, and how many were rejected (all wrong)."""
    found = {}
    for rule in RULES:
        decision = decided(said, rule, weights)
        right = decision == labels
        own = weights if rule.startswith("weighted") else None
        score = averaged(said, own) if rule in _MEANS else _tallied(said, own)
        found[rule] = {
            "n": len(labels),
            **counted_once(measure_of_classes(right, score, labels), len(labels)),
            "rejected": int((decision == REJECTED).sum()),
        }
    return found
