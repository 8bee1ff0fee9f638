"""Metrics of classification: accuracy, macro-accuracy, AUROC, calibration, and intervals clustered by patient.

Functions take probabilities float64[n, classes] and labels int64[n]. A metric that cannot be computed (no
examples, a class missing) is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]
Labels = NDArray[np.int64]

SCORES = ("accuracy", "macro_accuracy", "auroc")


Weights = NDArray[np.int32]
"""Counts int32[b, n] of n examples in b resamples."""
Measure = Callable[[Weights], Mapping[str, NDArray[np.float64]]]
"""Weights → every score by name, float64[b]; NaN where it cannot be computed."""

INTERVAL_QUANTILES = [(1 - 0.95) / 2, (1 + 0.95) / 2]
"""The quantiles at the ends of a 95 % interval."""
_TOP_SHARE = 0.1
"""Share of a slide's patches, the highest, averaged for its score."""
_MAX_WEIGHTS = 1 << 20
"""Weights held at a time while intervals are computed."""


class RankedScores:
    """Scores of n examples, sorted once for the AUROCs of q targets under any weights; ties count half.

    Args:
        positive: bool[n, q], whether an example is positive for each target.
        scores: float64[n, q], higher for more probable positives.
        negative: bool[n, q], what positives are compared with; by default all others.
    """

    def __init__(
        self, positive: NDArray[np.bool_], scores: Probabilities, negative: NDArray[np.bool_] | None = None
    ) -> None:
        negative = ~positive if negative is None else negative
        # arrays of all targets lie one after the other, so that one call looks up all weights
        n_above = positive.sum(0)
        self._target_of_positive = np.repeat(np.arange(len(n_above)), n_above)
        self._targets, self._target_starts = np.unique(self._target_of_positive, return_index=True)
        self._negative_starts = np.concatenate([[0], np.cumsum(negative.sum(0))])
        above, below, positions = [], [], []
        columns = zip(positive.T, negative.T, scores.T, self._negative_starts[:-1], strict=True)
        for is_positive, is_negative, score, first in columns:
            positive_rows, negative_rows = (
                rows[np.argsort(score[rows])] for rows in (np.flatnonzero(is_positive), np.flatnonzero(is_negative))
            )
            above.append(positive_rows)
            below.append(negative_rows)
            positions.append(
                [
                    first + np.searchsorted(score[negative_rows], score[positive_rows], side)
                    for side in ("left", "right")
                ]
            )
        self._above, self._below = (np.concatenate(arrays).astype(np.int32) for arrays in (above, below))
        self._positions = np.concatenate(positions, axis=1)

    def compute_aurocs(self, weights: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the AUROC of each target, the share of pairs with the positive example above; NaN without a pair.

        It is the Mann–Whitney statistic, in whole numbers up to the division. `weights`, int32[n], is the multiplicity
        of each example.
        """
        # 1. how much weight the first k negative examples have
        total = np.zeros(len(self._below) + 1, np.int32)
        np.cumsum(np.take(weights, self._below), out=total[1:])
        ends = total[self._negative_starts]
        # 2. for each positive example twice the weight below it: with and without ties
        below, up_to = np.take(total, self._positions)
        twice = below + up_to - 2 * ends[self._target_of_positive]
        positive_weights = np.take(weights, self._above).astype(np.float64)
        # 3. sums by target
        twice_wins, n_positive = (self._sum_by_target(positive_weights * twice), self._sum_by_target(positive_weights))
        pairs = n_positive * np.diff(ends)
        areas = np.full(len(pairs), np.nan)
        np.divide(twice_wins / 2, pairs, out=areas, where=pairs > 0)
        return areas

    def _sum_by_target(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = np.zeros(len(self._negative_starts) - 1)
        sums[self._targets] = np.add.reduceat(values, self._target_starts)
        return sums


def build_class_measure(
    correct: NDArray[np.bool_], score: Probabilities, labels: Labels, possible: NDArray[np.bool_] | None = None
) -> Measure:
    """Return a function of weights for accuracy, macro-accuracy and AUROC; scores are sorted once, here.

    Macro-accuracy is the mean over the classes that occur (ProxyFL, appendix B.1). So is the AUROC of more than two
    classes, each against the rest. Under weights without one of these classes neither can be computed: a mean over
    fewer classes is another score.

    Args:
        correct: bool[n], whether each prediction is correct.
        score: float64[n, classes], higher for more probable classes.
        possible: bool[n, classes], the classes that each example may have. The AUROC of a class is then that among the
            examples that may have it, and classes without a pair among them do not count. None for all.
    """
    if not len(labels):
        return lambda weights: {name: np.full(len(weights), np.nan) for name in SCORES}
    classes = np.unique(labels)
    against_rest = np.ones(1, int) if score.shape[1] == 2 else classes
    negative = labels[:, None] != against_rest
    if possible is not None:
        negative &= possible[:, against_rest]
        if (has_pair := negative.any(0)).any():
            against_rest, negative = against_rest[has_pair], negative[:, has_pair]
    ranked = RankedScores(labels[:, None] == against_rest, score[:, against_rest], negative)
    member = (labels[:, None] == classes).astype(np.float64)
    columns = np.hstack([member, member * correct[:, None]])

    def compute_scores(weights: Weights) -> dict[str, NDArray[np.float64]]:
        n, n_correct = np.hsplit(weights @ columns, 2)
        return {
            "accuracy": n_correct.sum(1) / n.sum(1),
            "macro_accuracy": np.where(n.all(1), (n_correct / np.maximum(n, 1)).mean(1), np.nan),
            "auroc": np.stack([ranked.compute_aurocs(row) for row in weights]).mean(1),
        }

    return compute_scores


def mean_of_available(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    available = [value for value in values if value is not None]
    return float(np.mean(available)) if available else None


def score_unweighted(measure: Measure, n: int) -> dict[str, float | None]:
    """Return every score of n examples of equal weight; None where it cannot be computed."""
    scores = measure(np.ones((1, n), np.int32))
    return {name: None if np.isnan(value) else float(value) for name, (value,) in scores.items()}


def mean_over_classes(values: NDArray[Any], labels: Labels) -> Any:
    """Return the mean of values[n, …] within each class that occurs, then over these classes."""
    return np.mean([values[labels == c].mean(0) for c in np.unique(labels)], axis=0)


def fill_patient_names(patient: NDArray[np.str_]) -> NDArray[np.str_]:
    """Return patient names str[n]; an example without one gets a unique name."""
    return np.array([name or f"row {row}" for row, name in enumerate(patient.tolist())], np.str_)


def choose_classes(probabilities: Probabilities) -> Labels:
    """Return the most probable class int64[n] of each example.

    Of two classes it is the second from 1/2 on, as a score at a threshold is positive; of more the first of equals.

    Example:
        >>> choose_classes(np.array([[0.5, 0.5], [0.6, 0.4]]))
        array([1, 0])
    """
    if probabilities.shape[1] == 2:
        return np.asarray(probabilities[:, 1] >= 0.5, np.int64)
    return np.asarray(probabilities.argmax(1), np.int64)


def compute_auroc(probabilities: Probabilities, labels: Labels) -> float | None:
    """Return the area under the ROC curve; for more than two classes the mean of one versus rest."""
    correct = choose_classes(probabilities) == labels
    return score_unweighted(build_class_measure(correct, probabilities, labels), len(labels))["auroc"]


def confusion_matrix(probabilities: Probabilities, labels: Labels) -> list[list[int]]:
    """Return the number of examples of each true and predicted class, [true][predicted]."""
    k = probabilities.shape[1]
    flat = np.bincount(labels * k + choose_classes(probabilities), minlength=k * k)
    return [[int(value) for value in row] for row in flat.reshape(k, k)]


def compute_calibration(probabilities: Probabilities, labels: Labels, n_bins: int = 10) -> dict[str, object]:
    """Return the expected calibration error over bins of equal width (Guo et al., 2017), and the Brier score.

    For two classes the Brier score is the mean squared error of the second one's probability, from 0 to 1, as in
    clinical papers; for more, squared errors are summed over the classes, from 0 to 2 (Brier, 1950).
    """
    if not len(labels):
        return {"ece": None, "brier": None, "bins": []}
    confidence = probabilities.max(1)
    correct = choose_classes(probabilities) == labels
    bin_index = np.minimum((confidence * n_bins).astype(int), n_bins - 1)
    bins = [
        {
            "confidence": float(confidence[bin_index == b].mean()),
            "accuracy": float(correct[bin_index == b].mean()),
            "n": int((bin_index == b).sum()),
        }
        for b in np.unique(bin_index)
    ]
    ece = sum(b["n"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / len(labels)
    one_hot = np.eye(probabilities.shape[1])[labels]
    squared_errors = ((probabilities - one_hot) ** 2).sum(1)
    brier = (squared_errors / 2 if probabilities.shape[1] == 2 else squared_errors).mean()
    return {"ece": float(ece), "brier": float(brier), "bins": bins}


def share_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of n independent trials (Clopper and Pearson, 1934), n · share whole or not.

    Example:
        >>> [round(end, 3) for end in share_interval(1.0, 6)]
        [0.541, 1.0]
    """
    from scipy.stats import beta

    k = share * n
    low = float(beta.ppf(INTERVAL_QUANTILES[0], k, n - k + 1)) if k > 0 else 0.0
    return low, float(beta.ppf(INTERVAL_QUANTILES[1], k + 1, n - k)) if k < n else 1.0


def resample_clusters(rng: np.random.Generator, clusters: NDArray[np.int64], n: int) -> NDArray[np.int32]:
    """Return int32[rows], the multiplicity of each row in a sample of n clusters with replacement.

    Args:
        clusters: int64[rows], the number of each row's cluster.
    """
    return np.bincount(rng.integers(n, size=n), minlength=n).astype(np.int32)[clusters]


def percentile_interval(draws: Sequence[float] | NDArray[np.float64], n: int) -> tuple[float, float]:
    """Return the 95 % interval of bootstrap draws from n clusters, with percentiles further out where these are few.

    Draws from n clusters vary too little, by √((n − 1) / n), and the normal distribution is too narrow where that is
    estimated: the quantiles are those of Student's t in units of it (Hesterberg, "What teachers should know about the
    bootstrap", American Statistician 2015, section 5.3).

    Args:
        n: number of clusters, 2 or more; of several samples that of the smallest.

    Example:
        >>> tuple(round(end) for end in percentile_interval(range(1001), n=10_000))
        (25, 975)
        >>> tuple(round(end) for end in percentile_interval(range(1001), n=8))
        (6, 994)
    """
    from scipy.special import ndtr, stdtrit

    tail = float(ndtr(stdtrit(n - 1, INTERVAL_QUANTILES[0]) * (n / (n - 1)) ** 0.5))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


_ExactInterval = Callable[[str, float], list[float] | None]
"""Name of a score and its value, the same in every resample → the exact interval; None without one."""


def bootstrap_intervals(
    measure: Measure, scores: Sequence[str], cluster: NDArray[np.str_], exact: _ExactInterval, *, repeats: int
) -> dict[str, list[float] | None]:
    """Return 95 % intervals of scores from a bootstrap over clusters (patients), as `percentile_interval` does.

    None for fewer than two clusters, or where most resamples have no score, as when a class is missing. Where every
    resample has the same score, the interval is the exact one: six of six correct do not prove a perfect model.

    Args:
        measure: weights of the n examples → scores.
        scores: their names.
        cluster: str[n], the cluster of each example.
        exact: the interval of a score that no resample changes.
    """
    names, cluster_index = np.unique(cluster, return_inverse=True)
    if len(names) < 2:
        return dict.fromkeys(scores)
    rng = np.random.default_rng(0)
    samples = {name: np.full(repeats, np.nan) for name in scores}
    step = max(1, _MAX_WEIGHTS // len(cluster))
    for start in range(0, repeats, step):
        rows = slice(start, min(start + step, repeats))
        weights = [resample_clusters(rng, cluster_index, len(names)) for _ in range(repeats)[rows]]
        for name, values in measure(np.stack(weights)).items():
            samples[name][rows] = values
    intervals: dict[str, list[float] | None] = {}
    for name, sample in samples.items():
        values = sample[~np.isnan(sample)]
        if len(values) <= repeats / 2:
            intervals[name] = None
            continue
        low, high = percentile_interval(values, len(names))
        intervals[name] = exact(name, low) if low == high else [low, high]
    return intervals


def build_exact_interval(
    measure: Measure, labels: Labels, cluster: NDArray[np.str_], possible: NDArray[np.bool_] | None = None
) -> _ExactInterval:
    """Return a function for the exact intervals of classification scores that no resample changes.

    An accuracy is a share of the clusters. Macro-accuracy is the mean of such shares over the clusters of each class:
    two correct patients of a class prove little. An AUROC of 0 or 1 rests on pairs of which no two share a cluster; any
    other constant AUROC comes from equal scores, which rank no pair. `possible` is that of `build_class_measure`.
    """

    def count_clusters(rows: NDArray[np.bool_]) -> int:
        return len(np.unique(cluster[rows]))

    def compute_interval(name: str, value: float) -> list[float] | None:
        names = np.unique(labels)
        classes = [labels == c for c in names]
        if name == "macro_accuracy":
            shares = measure(np.stack(classes).astype(np.int32))["accuracy"]
            ends = [share_interval(s, count_clusters(rows)) for s, rows in zip(shares, classes, strict=True)]
        elif name == "auroc" and value not in (0, 1):
            ends = [(value, value)]
        elif name == "auroc":
            pairs = [(labels == c, labels != c if possible is None else possible[:, c] & (labels != c)) for c in names]
            counts = [min(map(count_clusters, pair)) for pair in pairs]
            ends = [share_interval(value, n) for n in counts if n] or [share_interval(value, 0)]
        else:
            ends = [share_interval(value, len(np.unique(cluster)))]
        return [float(end) for end in np.mean(ends, axis=0)]

    return compute_interval


def aggregate_slides(
    probabilities: Probabilities, labels: Labels, slide: NDArray[np.str_], threshold: float | None = None
) -> tuple[Probabilities, Labels, NDArray[np.int64]] | None:
    """Return (probabilities, labels, an example index) of the slides in a two-class task.

    None for more classes, or when no slide has two patches. A slide is positive when any of its patches is; its
    probability is the mean of its most probable patches (a tenth, at least one), rescaled so that `threshold`
    lies at 1/2.
    """
    names, row, slide_index = np.unique(slide, return_index=True, return_inverse=True)
    if probabilities.shape[1] != 2 or len(names) == len(slide):
        return None
    positive = probabilities[:, 1]
    truth, score = np.empty(len(names), np.int64), np.empty(len(names))
    ends = np.cumsum(np.bincount(slide_index))[:-1]
    for k, rows in enumerate(np.split(np.argsort(slide_index, kind="stable"), ends)):
        truth[k] = labels[rows].max()
        highest = np.sort(positive[rows])[::-1]
        score[k] = highest[: max(1, round(_TOP_SHARE * len(highest)))].mean()
    if threshold is not None:
        score = _center_scores(score, threshold)
    return np.stack([1 - score, score], axis=1), truth, row


def find_operating_point(score: NDArray[np.float64], truth: Labels) -> float | None:
    """Return the threshold on scores float64[n] in [0, 1] with the best balanced accuracy, the middle one of equals.

    It lies between two scores, or at the upper one where no number lies between them, and is never rounded: scores of
    an overconfident model may differ by less than any number of decimals. None where truth int64[n], 0 or 1, has only
    one class.
    """
    if len(np.unique(truth)) < 2:
        return None
    ordered = np.unique(score)
    middle = (ordered[1:] + ordered[:-1]) / 2
    thresholds = np.where(middle > ordered[:-1], middle, ordered[1:])
    accuracies = [mean_over_classes((score >= threshold) == (truth == 1), truth) for threshold in thresholds]
    if not accuracies:
        return None
    best = np.flatnonzero(np.isclose(accuracies, max(accuracies)))
    return float(thresholds[best[len(best) // 2]])


def _center_scores(score: NDArray[np.float64], threshold: float) -> NDArray[np.float64]:
    """Return scores float64[n] in [0, 1], rescaled in both halves so that the threshold lies at 1/2.

    Order is kept. Scores from the threshold on lie above 1/2, by at least one unit in the last place, others below.
    """
    if not 0 < threshold <= 1:  # rounded by an earlier version: it separates nothing
        return score
    below, above = np.nextafter(0.5, [0.0, 1.0])
    low = np.minimum(0.5 * (score / threshold), below)
    high = 0.5 + 0.5 * ((score - threshold) / max(1 - threshold, np.finfo(float).eps))
    centered: NDArray[np.float64] = np.where(score >= threshold, np.maximum(high, above), low)
    return centered


def mean_and_sd(values: list[float | None]) -> dict[str, float | None]:
    """Return the mean and population standard deviation over sites, as the paper reports; None when any is missing.

    Equal values have 0 exactly, without rounding errors.
    """
    if not values or any(value is None for value in values):
        return {"mean": None, "sd": None}
    numbers = np.array(values, float)
    return {"mean": float(numbers.mean()), "sd": float(numbers.std()) if np.ptp(numbers) else 0.0}
