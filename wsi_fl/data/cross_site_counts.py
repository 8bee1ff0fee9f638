"""Counts of a model's predictions on a hospital's test part for cross-site evaluation, free of single predictions.

Counts of several hospitals add up, and scores on all test parts follow from their sums. A class with fewer than 5
examples is not reported; every bin of scores has at least 5 examples, and at least 5 patients where there are as many.
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

from wsi_fl.data.metrics import Labels, Probabilities, compute_auroc, confusion_matrix, fill_patient_names

N_BINS = 100
"""Maximum number of bins of the probability of class 1 for the counts of positives and negatives."""
MIN_EXAMPLES = 5
"""Minimum number of examples in a bin and of a reported class, and of patients in a bin where there are as many."""
_LAST_EDGE = nextafter(1.0, 2.0)
"""Upper end of the last bin, so that a probability of 1 lies in this bin."""
_MAX_COUNT = 1 << 53
_COUNT_DTYPE = np.dtype("<f8")
"""Type of counts, which are exact in it, and of the ends of bins."""

_Flat = NDArray[np.uint8]
_Tally = Annotated[int, Field(ge=0, le=_MAX_COUNT)]


class PredictionCounts(TypedDict):
    """Counts of one model's predictions on one test part.

    Attributes:
        n: number of examples.
        confusion: number of examples [true][predicted].
        positives, negatives: for two classes, the number of examples of class 1 and of class 0 in each bin of the
            probability of class 1; empty for more classes.
        high: the upper ends of these bins, each with about as many examples; unused ones come last. Counts of earlier
            versions have none, and bins of equal width.
        concordant: twice the number of pairs whose positive example has the higher probability; ties count once.
    """

    n: _Tally
    confusion: list[list[_Tally]]
    positives: list[_Tally]
    negatives: list[_Tally]
    high: NotRequired[list[Annotated[float, Field(ge=0, le=_LAST_EDGE)]]]
    concordant: NotRequired[_Tally]


class CrossSiteCounts(TypedDict):
    """Reported counts of all models in a cross-site evaluation, the document `scores.json`.

    Attributes:
        classes: their names, in the order of `confusion`.
        round: the round of the ledgers in which the counts were released.
        models: SHA-256 of each model by name: its site, or "central" or "shared" where all sites have the same model.
        hospitals: the sites with released counts of their test part.
        counts: by model and by hospital.
    """

    classes: list[str]
    round: _Tally
    models: dict[str, str]
    hospitals: list[str]
    counts: dict[str, dict[str, PredictionCounts]]


def count_predictions(
    probabilities: Probabilities, labels: Labels, patient: NDArray[np.str_] | None = None
) -> PredictionCounts:
    """Return the counts of a model's predictions, without classes of too few examples.

    Args:
        probabilities: float64[n, classes].
        labels: int64[n].
        patient: str[n] of each example; None, or "" in it, for a patient with one example.
    """
    names = np.full(len(labels), "") if patient is None else patient
    patient_index = np.unique(fill_patient_names(names), return_inverse=True)[1]
    is_reported = np.isin(labels, np.flatnonzero(np.bincount(labels, minlength=1) >= MIN_EXAMPLES))
    probabilities, labels, patient_index = (probabilities[is_reported], labels[is_reported], patient_index[is_reported])
    counts: PredictionCounts = {
        "n": len(labels),
        "confusion": confusion_matrix(probabilities, labels),
        "positives": [],
        "negatives": [],
    }
    if probabilities.shape[1] == 2:
        score = probabilities[:, 1]
        edges = _bin_edges(score, patient_index)
        counts["high"] = [*edges, *[_LAST_EDGE] * (N_BINS - len(edges))]
        bins = np.searchsorted(edges, score, side="right")
        counts["positives"], counts["negatives"] = (
            np.bincount(bins[labels == c], minlength=N_BINS).tolist() for c in (1, 0)
        )
        pairs = int((labels == 1).sum()) * int((labels == 0).sum())
        counts["concordant"] = round(2 * (compute_auroc(probabilities, labels) or 0.0) * pairs) if pairs else 0
    return counts


def _bin_edges(score: NDArray[np.float64], patient_index: NDArray[np.int64]) -> list[float]:
    """Return the edges between bins, each bin with enough patients and examples."""
    order, min_examples = np.argsort(score, kind="stable"), max(MIN_EXAMPLES, ceil(len(score) / N_BINS))
    patients = min(MIN_EXAMPLES, len(np.unique(patient_index)))
    edges: list[float] = []
    bin_patients: set[int] = set()
    n = 0
    for k, following in pairwise(order):
        bin_patients.add(patient_index[k])
        n += 1
        if n >= min_examples and len(bin_patients) >= patients and score[following] > score[k]:
            middle = (score[k] + score[following]) / 2
            edges.append(float(middle if middle > score[k] else score[following]))
            bin_patients, n = set(), 0
    if edges and (n + 1 < min_examples or len(np.unique(patient_index[score >= edges[-1]])) < patients):
        edges.pop()
    return edges


def empty_counts(n_classes: int) -> PredictionCounts:
    """Return the counts of no predictions, for an empty test part or a missing model."""
    return count_predictions(np.zeros((0, n_classes)), np.zeros(0, np.int64))


def size_in_bytes(n_models: int, n_classes: int) -> int:
    """Return the number of bytes of the packed counts of `n_models` models."""
    values = n_classes**2 + (1 + 3 * N_BINS if n_classes == 2 else 0)
    return n_models * values * _COUNT_DTYPE.itemsize


def pack_counts(counts: Sequence[PredictionCounts]) -> _Flat:
    """Return the counts of several models as uint8[d], little-endian float64, as released by a hospital."""
    rows = []
    for model in counts:
        ends = [model["concordant"], *model["high"]] if "high" in model else []
        rows.append([*np.ravel(model["confusion"]), *model["positives"], *model["negatives"], *ends])
    return np.array(rows, _COUNT_DTYPE).reshape(-1).view(np.uint8)


def unpack_counts(values: _Flat, n_models: int, n_classes: int) -> list[PredictionCounts]:
    """Return the counts in packed bytes.

    Args:
        values: uint8[d] of an agreed length, from an untrusted hospital.

    Raises:
        ValueError: for impossible counts: a number is negative, fractional or too large, bins overlap, or totals
            disagree.
    """
    if len(values) != size_in_bytes(n_models, n_classes):
        raise ValueError(f"they have {len(values)} bytes, agreed on {size_in_bytes(n_models, n_classes)}")
    rows = np.frombuffer(values.tobytes(), _COUNT_DTYPE).reshape(n_models, -1)
    integers = rows[:, : rows.shape[1] - (N_BINS if n_classes == 2 else 0)]
    if not ((integers >= 0) & (integers <= _MAX_COUNT // max(1, rows.size)) & (integers % 1 == 0)).all():
        raise ValueError("they hold a negative or an impossibly large number")
    return [_parse_row(row, n_classes) for row in rows]


def _parse_row(row: NDArray[np.float64], n_classes: int) -> PredictionCounts:
    table = row[: n_classes**2].reshape(n_classes, n_classes).astype(int)
    counts: PredictionCounts = {"n": int(table.sum()), "confusion": table.tolist(), "positives": [], "negatives": []}
    if n_classes == 2:
        bins, high = row[4 : 4 + 2 * N_BINS].reshape(2, N_BINS).astype(int), row[-N_BINS:]
        widths = np.diff(high, prepend=0.0)
        if (bins.sum(1) != table.sum(1)[::-1]).any():
            raise ValueError("their bins and their confusion matrix count different examples")
        if not ((widths >= 0).all() and high[-1] <= _LAST_EDGE and (widths[bins.any(0)] > 0).all()):
            raise ValueError("their bins overlap")
        counts |= {"positives": bins[0].tolist(), "negatives": bins[1].tolist(), "high": high.tolist()}
        counts["concordant"] = int(row[-N_BINS - 1])
        area, uncertainty = _count_pairs(counts, counts)
        if abs(counts["concordant"] / 2 - area) > uncertainty:
            raise ValueError("their bins and their pairs of examples disagree")
    return counts


def sum_confusions(counts: Sequence[PredictionCounts]) -> list[list[int]]:
    """Return the confusion matrix of one model on one test part or more, [true][predicted]."""
    matrix: list[list[int]] = np.sum([part["confusion"] for part in counts], axis=0).tolist()
    return matrix


class CountScores(TypedDict):
    """Scores from one model's counts; `n_classes` have examples, and macro-accuracy is over these."""

    n: int
    n_classes: int
    accuracy: float | None
    macro_accuracy: float | None
    auroc: float | None
    auroc_within: float | None


def _score_counts(counts: Sequence[PredictionCounts]) -> CountScores:
    """Return n and three scores from one model's counts on one test part or more.

    Accuracies are exact, and so is the AUROC of one test part. For several, cross-site pairs whose bins overlap count
    as half, so the exact AUROC lies at most `auroc_within` away. Both are None unless there are two classes. All are
    None without examples.
    """
    n = sum(part["n"] for part in counts)
    if not n:
        return CountScores(n=0, n_classes=0, accuracy=None, macro_accuracy=None, auroc=None, auroc_within=None)
    table = np.array(sum_confusions(counts), np.int64)
    present = table.sum(1) > 0
    per_class = table.diagonal()[present] / table.sum(1)[present]
    area, uncertainty = _total_auroc(counts)
    return {
        "n": n,
        "n_classes": int(present.sum()),
        "accuracy": float(table.trace() / n),
        "macro_accuracy": float(per_class.mean()),
        "auroc": area,
        "auroc_within": uncertainty,
    }


def _total_auroc(counts: Sequence[PredictionCounts]) -> tuple[float, float] | tuple[None, None]:
    """Return the area under the ROC curve, uncertain pairs counting half, and its maximum error; else (None, None)."""
    if any(len(site["confusion"]) != 2 for site in counts):
        return None, None
    area = uncertainty = 0.0
    for site in counts:
        for other_site in counts:
            exact = site is other_site and "concordant" in site  # all pairs of one hospital are certain
            ordered, uncertain = (site["concordant"] / 2, 0.0) if exact else _count_pairs(site, other_site)
            area, uncertainty = area + ordered, uncertainty + uncertain
    positives, negatives = (sum(sum(site[name]) for site in counts) for name in ("positives", "negatives"))
    pairs = positives * negatives
    return (area / pairs, uncertainty / pairs) if pairs else (None, None)


def _count_pairs(positive: PredictionCounts, negative: PredictionCounts) -> tuple[float, float]:
    """Return the number of pairs in order by their bins, uncertain ones counting half, and half of the uncertain."""
    highs = [np.asarray(counts.get("high") or np.linspace(0, 1, N_BINS + 1)[1:]) for counts in (positive, negative)]
    low, low_negative = (np.concatenate([[0.0], high])[:-1] for high in highs)
    is_ordered = low[:, None] >= highs[1]
    uncertain = ~is_ordered & (highs[0][:, None] > low_negative)
    ordered, half = (
        np.asarray(positive["positives"]) @ mask @ np.asarray(negative["negatives"]) for mask in (is_ordered, uncertain)
    )
    return float(ordered + half / 2), float(half / 2)


class ModelScores(TypedDict):
    """Scores of one model on each hospital's test part, and on all of these."""

    hospitals: dict[str, CountScores]
    merged: CountScores


Constant = TypedDict("Constant", {"class": str, "accuracy": float})
"""The most frequent class of the test examples, and the accuracy of predicting it always."""


class CrossSiteScores(TypedDict):
    """Scores of a cross-site evaluation."""

    hospitals: list[str]
    n_classes: int
    models: dict[str, ModelScores]
    constant: Constant | None


def score_cross_site(document: CrossSiteCounts) -> CrossSiteScores:
    """Return the scores of a cross-site evaluation from its counts, as `evaluate --json` prints under `cross_site`.

    Returns:
        `hospitals`, the names of those with counts, the number of classes (`n_classes`), and `models`: by name, the
        scores on each hospital's test part (`hospitals`) and on all of these (`merged`). `constant` is the most
        frequent class of the test examples and the accuracy of predicting it always; None without examples.
    """
    models: dict[str, ModelScores] = {}
    truth = np.zeros(len(document["classes"]), np.int64)
    for model in document["models"]:
        counts = document["counts"][model]
        parts = {name: _score_counts([counts[name]]) for name in document["hospitals"]}
        all_counts = list(counts.values())
        models[model] = {"hospitals": parts, "merged": _score_counts(all_counts)}
        truth = np.maximum(truth, np.sum(sum_confusions(all_counts), axis=1))  # 0 for a missing model
    class_index, n = int(truth.argmax()), int(truth.sum())
    constant: Constant | None = None
    if n:
        constant = {"class": document["classes"][class_index], "accuracy": float(truth[class_index] / n)}
    hospitals, n_classes = list(document["hospitals"]), len(document["classes"])
    return {"hospitals": hospitals, "n_classes": n_classes, "models": models, "constant": constant}
