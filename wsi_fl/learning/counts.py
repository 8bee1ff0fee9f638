"""Counts of a model's answers on a hospital's own test part: what it may tell others, without any patient's answer.

Counts of several hospitals add up, and from their sums follow the scores on all test parts together. Of a class with
fewer than `FEWEST` examples nothing is told, and no bin of scores has fewer, nor fewer patients where there are more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, nextafter
from typing import Annotated, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.learning.metrics import Labels, Probabilities, auroc, confusion, one_each

N_BINS = 100
"""The most bins of the probability of class 1 in which positives and negatives are counted."""
FEWEST = 5
"""Examples in a bin, and of a class that is told, at least; and patients in a bin, of as many or more."""
_TOP = nextafter(1.0, 2.0)
"""The upper end of the last bin, so that a probability of 1 lies in it."""
_MOST = 1 << 53
_KIND = np.dtype("<f8")
"""Of counts, which are exact in it, and of the ends of bins."""

_Flat = NDArray[np.uint8]
_Tally = Annotated[int, Field(ge=0, le=_MOST)]


class Counts(TypedDict):
    """The answers of one model on one test part.

    Attributes:
        n: how many examples there are.
        confusion: [true][predicted], how many there are of each.
        positives, negatives: of two classes, how many examples of class 1 and of class 0 there are in each bin of the
            probability of class 1; empty where there are more classes.
        high: the upper ends of these bins, of which all hold about as many examples; unused ones come last. Counts of
            earlier versions have none, and bins of equal width.
        concordant: twice the number of pairs whose positive example has the higher probability; ties count once.
    """

    n: _Tally
    confusion: list[list[_Tally]]
    positives: list[_Tally]
    negatives: list[_Tally]
    high: NotRequired[list[Annotated[float, Field(ge=0, le=_TOP)]]]
    concordant: NotRequired[_Tally]


class Scores(TypedDict):
    """What the hospitals told of all models that were scored between them, as `scores.json` keeps it.

    Attributes:
        classes: their names, in the order of `confusion`.
        round: the round of the ledgers in which the counts left.
        models: SHA-256 of each model that was scored, by its name: that of the site that released it, or "central" or
            "shared" where all sites hold the same one.
        hospitals: the sites that let counts of their test part leave.
        counts: by model and by hospital.
    """

    classes: list[str]
    round: _Tally
    models: dict[str, str]
    hospitals: list[str]
    counts: dict[str, dict[str, Counts]]


def count(probabilities: Probabilities, labels: Labels, patient: NDArray[np.str_] | None = None) -> Counts:
    """Return the counts of a model's answers, without those to examples of a class with too few.

    Args:
        probabilities: float64[n, classes].
        labels: int64[n].
        patient: str[n], whose each example is; None, or "" in it, for somebody of its own.
    """
    names = np.full(len(labels), "") if patient is None else patient
    who = np.unique(one_each(names), return_inverse=True)[1]
    told = np.isin(labels, np.flatnonzero(np.bincount(labels, minlength=1) >= FEWEST))
    probabilities, labels, who = probabilities[told], labels[told], who[told]
    found: Counts = {
        "n": len(labels),
        "confusion": confusion(probabilities, labels),
        "positives": [],
        "negatives": [],
    }
    if probabilities.shape[1] == 2:
        score = probabilities[:, 1]
        edges = _edges(score, who)
        found["high"] = [*edges, *[_TOP] * (N_BINS - len(edges))]
        bins = np.searchsorted(edges, score, side="right")
        found["positives"], found["negatives"] = (
            np.bincount(bins[labels == c], minlength=N_BINS).tolist() for c in (1, 0)
        )
        pairs = int((labels == 1).sum()) * int((labels == 0).sum())
        found["concordant"] = round(2 * (auroc(probabilities, labels) or 0.0) * pairs) if pairs else 0
    return found


def _edges(score: NDArray[np.float64], who: NDArray[np.int64]) -> list[float]:
    """Return where one bin ends and the next begins, each with enough patients and its part of all examples."""
    order, most = np.argsort(score, kind="stable"), max(FEWEST, ceil(len(score) / N_BINS))
    patients = min(FEWEST, len(np.unique(who)))
    edges: list[float] = []
    seen: set[int] = set()
    n = 0
    for k, following in pairwise(order):
        seen.add(who[k])
        n += 1
        if n >= most and len(seen) >= patients and score[following] > score[k]:
            middle = (score[k] + score[following]) / 2
            edges.append(float(middle if middle > score[k] else score[following]))
            seen, n = set(), 0
    if edges and (n + 1 < most or len(np.unique(who[score >= edges[-1]])) < patients):
        edges.pop()
    return edges


def nothing(n_classes: int) -> Counts:
    """Return the counts of no answers at all, as of a test part that is empty or a model that did not arrive."""
    return count(np.zeros((0, n_classes)), np.zeros(0, np.int64))


def n_bytes(n_models: int, n_classes: int) -> int:
    """Return the length of the `packed` counts of so many models."""
    values = n_classes**2 + (1 + 3 * N_BINS if n_classes == 2 else 0)
    return n_models * values * _KIND.itemsize


def packed(told: Sequence[Counts]) -> _Flat:
    """Return the counts of several models as uint8[d], float64 with the lowest byte first: what leaves a hospital."""
    rows = []
    for one in told:
        ends = [one["concordant"], *one["high"]] if "high" in one else []
        rows.append([*np.ravel(one["confusion"]), *one["positives"], *one["negatives"], *ends])
    return np.array(rows, _KIND).reshape(-1).view(np.uint8)


def unpacked(values: _Flat, n_models: int, n_classes: int) -> list[Counts]:
    """Return the counts that `packed` bytes hold.

    Args:
        values: uint8[d] of an agreed length, from a hospital that is not trusted.

    Raises:
        ValueError: when they cannot be counts: a number is negative, broken or too large, bins overlap, or what they
            count disagrees.
    """
    if len(values) != n_bytes(n_models, n_classes):
        raise ValueError(f"they have {len(values)} bytes, agreed on {n_bytes(n_models, n_classes)}")
    rows = np.frombuffer(values.tobytes(), _KIND).reshape(n_models, -1)
    whole = rows[:, : rows.shape[1] - (N_BINS if n_classes == 2 else 0)]
    if not ((whole >= 0) & (whole <= _MOST // max(1, rows.size)) & (whole % 1 == 0)).all():
        raise ValueError("they hold a negative or an impossibly large number")
    return [_parsed(row, n_classes) for row in rows]


def _parsed(row: NDArray[np.float64], n_classes: int) -> Counts:
    table = row[: n_classes**2].reshape(n_classes, n_classes).astype(int)
    found: Counts = {"n": int(table.sum()), "confusion": table.tolist(), "positives": [], "negatives": []}
    if n_classes == 2:
        bins, high = row[4 : 4 + 2 * N_BINS].reshape(2, N_BINS).astype(int), row[-N_BINS:]
        wide = np.diff(high, prepend=0.0)
        if (bins.sum(1) != table.sum(1)[::-1]).any():
            raise ValueError("their bins and their confusion matrix count different examples")
        if not ((wide >= 0).all() and high[-1] <= _TOP and (wide[bins.any(0)] > 0).all()):
            raise ValueError("their bins overlap")
        found |= {"positives": bins[0].tolist(), "negatives": bins[1].tolist(), "high": high.tolist()}
        found["concordant"] = int(row[-N_BINS - 1])
        area, within = _pairs(found, found)
        if abs(found["concordant"] / 2 - area) > within:
            raise ValueError("their bins and their pairs of examples disagree")
    return found


def confusion_of(told: Sequence[Counts]) -> list[list[int]]:
    """Return the confusion matrix of one model on one test part or more, [true][predicted]."""
    found: list[list[int]] = np.sum([one["confusion"] for one in told], axis=0).tolist()
    return found


class OfCounts(TypedDict):
    """The scores that follow from one model's counts; `n_classes` have examples, and macro-accuracy is over these."""

    n: int
    n_classes: int
    accuracy: float | None
    macro_accuracy: float | None
    auroc: float | None
    auroc_within: float | None


def _scores_of(told: Sequence[Counts]) -> OfCounts:
    """Return n and the three scores that follow from one model's counts on one test part or more.

    Accuracies are exact, and so is the AUROC of one test part. Of several, pairs between hospitals whose bins overlap
    count as half, so the exact one lies at most `auroc_within` away. Both are None unless there are two classes. All
    are None without examples.
    """
    n = sum(one["n"] for one in told)
    if not n:
        unknown: OfCounts = {
            "n": 0,
            "n_classes": 0,
            "accuracy": None,
            "macro_accuracy": None,
            "auroc": None,
            "auroc_within": None,
        }
        return unknown
    table = np.array(confusion_of(told), np.int64)
    present = table.sum(1) > 0
    per_class = table.diagonal()[present] / table.sum(1)[present]
    area, within = _auroc(told)
    return {
        "n": n,
        "n_classes": int(present.sum()),
        "accuracy": float(table.trace() / n),
        "macro_accuracy": float(per_class.mean()),
        "auroc": area,
        "auroc_within": within,
    }


def _auroc(told: Sequence[Counts]) -> tuple[float, float] | tuple[None, None]:
    """Return the area under the ROC curve, uncertain pairs counting half, and how far the exact one may lie away.

    Both are None unless there are two classes: others have no bins.
    """
    if any(len(part["confusion"]) != 2 for part in told):
        return None, None
    area = within = 0.0
    for one in told:
        for other in told:
            exact = one is other and "concordant" in one  # nothing is uncertain within a hospital
            ordered, unsure = (one["concordant"] / 2, 0.0) if exact else _pairs(one, other)
            area, within = area + ordered, within + unsure
    positives, negatives = (sum(sum(one[name]) for one in told) for name in ("positives", "negatives"))
    pairs = positives * negatives
    return (area / pairs, within / pairs) if pairs else (None, None)


def _pairs(positive: Counts, negative: Counts) -> tuple[float, float]:
    """Return how many pairs are in order by their bins, uncertain ones counting half, and half of the uncertain."""
    highs = [np.asarray(one.get("high") or np.linspace(0, 1, N_BINS + 1)[1:]) for one in (positive, negative)]
    low, under = (np.concatenate([[0.0], high])[:-1] for high in highs)
    above = low[:, None] >= highs[1]
    unsure = ~above & (highs[0][:, None] > under)
    ordered, half = (
        np.asarray(positive["positives"]) @ one @ np.asarray(negative["negatives"]) for one in (above, unsure)
    )
    return float(ordered + half / 2), float(half / 2)


class OfModel(TypedDict):
    """The scores of one model on each hospital's test part, and on all of these together."""

    hospitals: dict[str, OfCounts]
    merged: OfCounts


Constant = TypedDict("Constant", {"class": str, "accuracy": float})
"""The class that most test examples have, and the accuracy of always saying it."""


class Between(TypedDict):
    """The document of `results`."""

    hospitals: list[str]
    n_classes: int
    models: dict[str, OfModel]
    constant: Constant | None


def results(document: Scores) -> Between:
    """Return the scores that follow from the counts between hospitals, as `evaluate --json` prints under `cross_site`.

    Returns:
        `hospitals`, the names of those that told counts, how many classes are asked for (`n_classes`), and `models`: by
        name, the scores on each hospital's test part (`hospitals`) and on all of these together (`merged`). `constant`
        is the class that most of all test examples have, and the accuracy of always saying it; None without examples.
    """
    models: dict[str, OfModel] = {}
    truth = np.zeros(len(document["classes"]), np.int64)
    for model in document["models"]:
        told = document["counts"][model]
        parts = {name: _scores_of([told[name]]) for name in document["hospitals"]}
        whole = list(told.values())
        models[model] = {"hospitals": parts, "merged": _scores_of(whole)}
        truth = np.maximum(truth, np.sum(confusion_of(whole), axis=1))  # 0 of a model that did not arrive
    most, n = int(truth.argmax()), int(truth.sum())
    constant: Constant | None = None
    if n:
        constant = {"class": document["classes"][most], "accuracy": float(truth[most] / n)}
    hospitals, n_classes = list(document["hospitals"]), len(document["classes"])
    return {"hospitals": hospitals, "n_classes": n_classes, "models": models, "constant": constant}
