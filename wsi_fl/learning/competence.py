"""What a proxy is worth to its site: by what it knows, and by what the site itself cannot teach."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.metrics import Labels, Probabilities, macro_accuracy
from wsi_fl.learning.validation import Answer

_ONE_SIDED = 1.645
"""Standard errors that chance exceeds in one case of twenty."""
_LEAST_KNOWN = 0.1
"""Part of the way from chance to perfect that a proxy must have gone, however many rows measure it."""
_ALIKE, _SPECIAL = 0.2, 0.6
"""Skew of a site's labels up to which it lacks nothing, and from which on it lacks most of the other classes."""


@dataclass(frozen=True)
class Measured:
    """What was found out about a site's proxy.

    Attributes:
        score: its macro-accuracy, or None where rows of one class alone cannot tell.
        chance: what chance would reach on these rows.
        known: 0 for a proxy that chance may explain, 1 for one as far again above it.
        lacking: 0 where the private model needs no help, 1 where it does.
    """

    score: float | None
    chance: float | None
    known: float
    lacking: float


def measured(
    proxy: Probabilities,
    labels: Labels,
    *,
    allowed: NDArray[np.bool_] | None,
    training_labels: Labels,
    duel: tuple[Probabilities, Probabilities, Labels] | None = None,
) -> Measured:
    """Return what a proxy knows, and what the private model beside it lacks.

    A proxy knows something when its balanced accuracy is above what chance can produce on so many rows of each class.
    Where rows that neither model has learned from show one of them to be better, that decides what the private model
    lacks. They are often too few to show it, and then the site's labels decide: a hospital that sees mostly one class
    lacks the others.

    Args:
        proxy: float64[n, classes], probabilities of rows that the proxy did not memorise.
        labels: int64[n], of the same rows.
        allowed: bool[n, classes], the possible classes of each row; None for all.
        training_labels: int64[m], of what the private model learns from.
        duel: probabilities of proxy and private model on validation rows, and their labels.
    """
    classes = np.unique(labels)
    lacking = _lacking(training_labels, proxy.shape[1])
    if duel is not None:
        lead = _lead(*duel)
        lacking = 1.0 if lead > _ONE_SIDED else 0.0 if lead < -_ONE_SIDED else lacking
    if len(classes) < 2:
        return Measured(None, None, 0.0, lacking)
    score = macro_accuracy(proxy, labels) or 0.0
    chance = _chance(labels, allowed, proxy.shape[1])
    spread = sqrt(chance * (1 - chance) * sum(1 / (labels == c).sum() for c in classes)) / len(classes)
    margin = max(_ONE_SIDED * spread, _LEAST_KNOWN * (1 - chance))
    known = min(1.0, max(0.0, (score - chance) / margin - 1)) if margin else 0.0
    return Measured(score, chance, known, lacking)


def fitting_answer(found: Measured) -> Answer:
    """Return whose probabilities a site should answer with, where no rows are left to choose by.

    A model that saw one class alone can say nothing else, whatever its proxy is worth. One that saw mostly one class
    spoils a mean. Sites that see all alike do best with the mean of two models that err in different ways, unless
    chance may explain one of them (docs/WORTH.md has the numbers).
    """
    if found.score is None:
        return "proxy"
    if not found.known:
        return "private"
    return "proxy" if found.lacking >= 1 else "mean"


def _chance(labels: Labels, allowed: NDArray[np.bool_] | None, n_classes: int) -> float:
    """The macro-accuracy of a guess, or of always the same answer if that is higher."""
    classes = np.unique(labels)
    guess = np.full(len(labels), 1 / n_classes) if allowed is None else 1 / allowed.sum(1)
    return float(max(1 / len(classes), np.mean([guess[labels == c].mean() for c in classes])))


def _lacking(labels: Labels, n_classes: int) -> float:
    """From the skew of labels: their distance from equal shares, as a part of the largest there is.

    Example:
        >>> [round(_lacking(np.repeat([0, 1], n), 2), 2) for n in ([50, 50], [70, 30], [90, 10])]
        [0.0, 0.5, 1.0]
    """
    shares = np.bincount(labels, minlength=n_classes) / len(labels)
    skew = np.maximum(0, 1 / n_classes - shares).sum() / (1 - 1 / n_classes)
    return float(np.clip((skew - _ALIKE) / (_SPECIAL - _ALIKE), 0, 1))


def _lead(proxy: Probabilities, private: Probabilities, labels: Labels) -> float:
    """How many standard errors the proxy's macro-accuracy lies above the private model's, on the same rows.

    A class of few rows is given the spread of one disagreement more, so that it never looks certain.
    """
    ahead = (proxy.argmax(1) == labels).astype(int) - (private.argmax(1) == labels)
    classes = np.unique(labels)
    if len(classes) < 2:
        return 0.0
    parts = [ahead[labels == c] for c in classes]
    variance = sum((float((part**2).sum()) + 1) / (len(part) + 1) / len(part) for part in parts)
    return float(np.sum([part.mean() for part in parts]) / sqrt(variance))
