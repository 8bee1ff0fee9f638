"""Counts of a model's answers on a hospital's own test part: what it may tell others, without any patient's answer.

Counts of several hospitals add up, and from their sums follow the scores on all test parts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from wsi_fl.learning.metrics import SCORES, Labels, Probabilities, confusion

N_BINS = 100
"""Equal bins of the probability of class 1, in which positives and negatives are counted."""
_MOST = 1 << 53
_KIND = np.dtype("<i8")

Flat = NDArray[np.uint8]


Tally = Annotated[int, Field(ge=0, le=_MOST)]


class Counts(TypedDict):
    """The answers of one model on one test part.

    Attributes:
        n: how many examples there are.
        confusion: [true][predicted], how many there are of each.
        positives, negatives: of two classes, how many examples of class 1 and of class 0 there are in each bin of the
            probability of class 1; empty where there are more classes.
    """

    n: Tally
    confusion: list[list[Tally]]
    positives: list[Tally]
    negatives: list[Tally]


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
    round: Tally
    models: dict[str, str]
    hospitals: list[str]
    counts: dict[str, dict[str, Counts]]


def count(probabilities: Probabilities, labels: Labels) -> Counts:
    """Return the counts of a model's answers.

    Args:
        probabilities: float64[n, classes].
        labels: int64[n].

    Example:
        >>> p = np.array([[0.9, 0.1], [0.4, 0.6]])
        >>> told = count(p, np.array([0, 1]))
        >>> told["confusion"], told["negatives"].index(1), told["positives"].index(1)
        ([[1, 0], [0, 1]], 10, 60)
    """
    found: Counts = {
        "n": len(labels),
        "confusion": confusion(probabilities, labels),
        "positives": [],
        "negatives": [],
    }
    if probabilities.shape[1] == 2:
        found["positives"] = _binned(probabilities[labels == 1, 1])
        found["negatives"] = _binned(probabilities[labels == 0, 1])
    return found


def nothing(n_classes: int) -> Counts:
    """Return the counts of no answers at all, as of a test part that is empty or a model that did not arrive."""
    return count(np.zeros((0, n_classes)), np.zeros(0, np.int64))


def _binned(score: NDArray[np.float64]) -> list[int]:
    which = np.clip((score * N_BINS).astype(np.int64), 0, N_BINS - 1)
    return [int(n) for n in np.bincount(which, minlength=N_BINS)]


def n_bytes(n_models: int, n_classes: int) -> int:
    """Return the length of the `packed` counts of so many models."""
    return n_models * _n_values(n_classes) * _KIND.itemsize


def _n_values(n_classes: int) -> int:
    return n_classes**2 + (2 * N_BINS if n_classes == 2 else 0)


def packed(told: Sequence[Counts]) -> Flat:
    """Return the counts of several models as uint8[d], int64 with the lowest byte first: what leaves a hospital."""
    rows = [[*np.ravel(one["confusion"]), *one["positives"], *one["negatives"]] for one in told]
    return np.ascontiguousarray(np.array(rows, _KIND).reshape(-1)).view(np.uint8)


def unpacked(values: Flat, n_models: int, n_classes: int) -> list[Counts]:
    """Return the counts that `packed` bytes hold.

    Args:
        values: uint8[d] of an agreed length, from a hospital that is not trusted.

    Raises:
        ValueError: when they cannot be counts: a number is negative or too large, or bins and confusion disagree.
    """
    if len(values) != n_bytes(n_models, n_classes):
        raise ValueError(f"they have {len(values)} bytes, agreed on {n_bytes(n_models, n_classes)}")
    rows = np.frombuffer(values.tobytes(), _KIND).reshape(n_models, -1)
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) <= _MOST // rows.size:
        raise ValueError("they hold a negative or an impossibly large number")
    return [_parsed(row.astype(np.int64), n_classes) for row in rows]


def _parsed(row: NDArray[np.int64], n_classes: int) -> Counts:
    table, bins = row[: n_classes**2].reshape(n_classes, n_classes), row[n_classes**2 :].reshape(-1, N_BINS)
    if len(bins) and [int(bins[0].sum()), int(bins[1].sum())] != [int(table[1].sum()), int(table[0].sum())]:
        raise ValueError("their bins and their confusion matrix count different examples")
    return {
        "n": int(table.sum()),
        "confusion": table.tolist(),
        "positives": bins[0].tolist() if len(bins) else [],
        "negatives": bins[1].tolist() if len(bins) else [],
    }


def merged(told: Sequence[Counts]) -> Counts:
    """Return the sum of the counts of one model on one test part or more."""
    return {
        "n": sum(one["n"] for one in told),
        "confusion": np.sum([one["confusion"] for one in told], axis=0).tolist(),
        "positives": np.sum([one["positives"] for one in told], axis=0).astype(int).tolist(),
        "negatives": np.sum([one["negatives"] for one in told], axis=0).astype(int).tolist(),
    }


def scores_of(told: Counts) -> dict[str, Any]:
    """Return n and the three scores that follow from counts, as `metrics.scores` returns them from probabilities.

    Accuracies are exact. AUROC counts pairs within one bin as half, so the exact one lies at most `auroc_within` away:
    half the share of pairs that share a bin. Both are None for more than two classes. All are None without examples.
    """
    if not told["n"]:
        return {"n": 0, **dict.fromkeys(SCORES), "auroc_within": None}
    table = np.array(told["confusion"], np.int64)
    present = table.sum(1) > 0
    per_class = table.diagonal()[present] / table.sum(1)[present]
    area, within = _auroc(np.array(told["positives"], float), np.array(told["negatives"], float))
    return {
        "n": told["n"],
        "accuracy": float(table.trace() / told["n"]),
        "macro_accuracy": float(per_class.mean()),
        "auroc": area,
        "auroc_within": within,
    }


def _auroc(
    positives: NDArray[np.float64], negatives: NDArray[np.float64]
) -> tuple[float, float] | tuple[None, None]:
    """Return the area under the ROC curve, pairs in one bin counting half, and how far the exact one may lie away."""
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return None, None
    below = np.cumsum(negatives) - negatives / 2
    return float((positives * below).sum() / pairs), float((positives * negatives).sum() / 2 / pairs)


def results(document: Scores) -> dict[str, Any]:
    """Return the scores that follow from the counts between hospitals, as `evaluate --json` prints under `between`.

    Returns:
        `hospitals`, the names of those that told counts, and `models`: by name, the scores on each hospital's test
        part (`hospitals`) and on all of these together (`merged`). `constant` is the class that most of all test
        examples have, and the accuracy of always saying it; None without examples.
    """
    models, truth = {}, np.zeros(len(document["classes"]), np.int64)
    for model in document["models"]:
        told = document["counts"][model]
        parts = {name: scores_of(told[name]) for name in document["hospitals"]}
        whole = merged(list(told.values()))
        models[model] = {"hospitals": parts, "merged": scores_of(whole)}
        truth = np.maximum(
            truth, np.sum(whole["confusion"], axis=1)
        )  # of a model that did not arrive it is 0
    most = int(truth.argmax())
    constant = {"class": document["classes"][most], "accuracy": float(truth[most] / truth.sum())}
    return {
        "hospitals": list(document["hospitals"]),
        "models": models,
        "constant": constant if truth.sum() else None,
    }
