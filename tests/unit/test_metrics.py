"""Metrics against slow implementations of their definitions."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import slow_intervals
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom, binomtest, rankdata
from sklearn.metrics import balanced_accuracy_score, brier_score_loss, roc_auc_score

from wsi_fl.data.metrics import (
    aggregate_slides,
    choose_classes,
    compute_calibration,
    confusion_matrix,
    find_operating_point,
    mean_and_sd,
    percentile_interval,
    share_interval,
)
from wsi_fl.data.prediction_table import score_voting_rules
from wsi_fl.data.tasks import CLASSES, POSSIBLE_CLASSES, score_intervals, score_predictions
from wsi_fl.slides.pictures.heatmap import PatchPredictions


@st.composite
def predictions(draw):
    k, n = draw(st.integers(2, 4)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    p = rng.integers(1, 5, (n, k)).astype(float)  # few values: many ties
    return p / p.sum(1, keepdims=True), rng.integers(0, k, n)


def choose_classes_slowly(p):
    """Return the classes of rows one by one: of two the second from one half on, else the first of the largest."""
    return np.array([int(row[1] >= 0.5) if len(row) == 2 else row.tolist().index(max(row)) for row in p], int)


@settings(deadline=None, max_examples=40)
@given(predictions(), st.integers(1, 12))
def test_confusion_and_calibration_match_counting(case, n_bins):
    p, y = case
    guess, k = choose_classes_slowly(p), range(p.shape[1])
    counted = [[sum(a == t and b == g for a, b in zip(y, guess, strict=True)) for g in k] for t in k]
    assert np.array_equal(confusion_matrix(p, y), counted)
    ece = 0.0
    for b in range(n_bins):
        mine = [i for i in range(len(y)) if min(int(p[i].max() * n_bins), n_bins - 1) == b]
        if mine:
            right = np.mean([guess[i] == y[i] for i in mine])
            ece += len(mine) / len(y) * abs(right - np.mean([p[i].max() for i in mine]))
    found = compute_calibration(p, y, n_bins)
    assert found["ece"] == pytest.approx(ece) and sum(b["n"] for b in found["bins"]) == len(y)
    assert found["brier"] == pytest.approx(brier_score_loss(y, p if len(k) > 2 else p[:, 1], labels=[*k]))


UNKNOWN = dict.fromkeys(("accuracy", "macro_accuracy", "auroc"))


def test_undefined_metrics_are_none():
    nothing = np.empty((0, 2)), np.empty(0, np.int64)
    assert score_predictions(*nothing) == {"n": 0, **UNKNOWN} and compute_calibration(*nothing)["ece"] is None
    one_class = score_predictions(np.array([[0.2, 0.8]] * 3), np.ones(3, np.int64))
    assert one_class["auroc"] is None and one_class["accuracy"] == 1
    assert mean_and_sd([]) == mean_and_sd([0.5, None]) == {"mean": None, "sd": None}
    assert mean_and_sd([0.2, 0.4]) == {"mean": pytest.approx(0.3), "sd": pytest.approx(0.1)}


def test_classes_that_an_example_cannot_have_do_not_help_its_auroc():
    rng = np.random.default_rng(3)
    types = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]], bool)  # the last has no choice
    possible = types[rng.integers(0, 3, 400)]
    logits = torch.from_numpy(rng.normal(size=(400, 5))).masked_fill(torch.from_numpy(~possible), -torch.inf)
    logits[0, np.flatnonzero(possible[0])[0]] += 5000  # a probability below the smallest number is not impossible
    labels = np.array([rng.choice(np.flatnonzero(row)) for row in possible])
    p = POSSIBLE_CLASSES.predict(logits).numpy()
    np.testing.assert_allclose(p, CLASSES.predict(logits).numpy(), atol=1e-30)
    assert ((p > 0) == possible).all()
    expected = [roc_auc_score(labels[may] == c, p[may, c]) for c, may in enumerate(possible.T[:4])]
    found = score_predictions(p, labels, POSSIBLE_CLASSES)
    assert found["auroc"] == pytest.approx(np.mean(expected)) and abs(found["auroc"] - 0.5) < 0.15
    plain = score_predictions(p, labels)
    assert plain["auroc"] > 0.8 and plain["accuracy"] == found["accuracy"], "random answers, told apart by type"
    exact = np.zeros((84, 4))  # two types of two diagnoses, 40 and 2 patients of each, all told apart
    rows = np.repeat(np.arange(4), (40, 2, 40, 2))
    exact[np.arange(84), rows ^ 1], exact[np.arange(84), rows] = 0.1, 0.9
    for task, pairs in ((POSSIBLE_CLASSES, (2, 2, 2, 2)), (CLASSES, (40, 2, 40, 2))):
        low, _ = score_intervals(exact, rows, np.arange(84).astype(str), task, repeats=9)["auroc"]
        assert low == pytest.approx(np.mean([share_interval(1.0, n)[0] for n in pairs]))
    everything = POSSIBLE_CLASSES.predict(torch.from_numpy(rng.normal(size=(400, 5)))).numpy()
    assert score_predictions(everything, labels, POSSIBLE_CLASSES) == score_predictions(everything, labels)


def noisy_case(*, by_patient):
    """Return predictions right in 70 %, for whole patients or single patches of twenty patients with ten patches."""
    rng, y = np.random.default_rng(0), np.tile([0, 1], 100)
    right = np.repeat(rng.permutation(20) < 14, 10) if by_patient else rng.permutation(200) < 140
    score = np.where(right, y, 1 - y) * 0.6 + 0.2 + rng.uniform(-0.05, 0.05, 200)
    return np.stack([1 - score, score], 1), y, np.repeat([f"p{k}" for k in range(20)], 10)


def test_intervals_contain_the_estimate_and_are_wide_where_patients_differ():
    width = {}
    for by_patient in (True, False):
        p, y, cluster = noisy_case(by_patient=by_patient)
        found, points = score_intervals(p, y, cluster, repeats=300), score_predictions(p, y)
        assert all(found[name][0] <= points[name] <= found[name][1] for name in UNKNOWN)
        width[by_patient] = np.ptp(found["accuracy"])
        assert points["accuracy"] == pytest.approx(0.7)
    assert width[True] == pytest.approx(2 * 1.96 * (0.7 * 0.3 / 20) ** 0.5, rel=0.25)
    assert width[True] > 2 * width[False]


def test_intervals_of_twelve_patients_hold_the_truth_nineteen_times_in_twenty():
    rng, n_repeats, n = np.random.default_rng(0), 1000, 12
    n_covered = 0
    for _ in range(n_repeats):
        is_right, n_drawn = rng.random(n) < 0.7, rng.multinomial(n, [1 / n] * n, size=300)
        low, high = percentile_interval(n_drawn @ is_right / n, n)
        n_covered += low <= 0.7 <= high
    assert n_covered >= binom.ppf(1e-3, n_repeats, 0.95)


def test_intervals_repeat_with_their_seed_and_need_two_patients():
    p, y, cluster = noisy_case(by_patient=False)
    assert score_intervals(p, y, cluster, repeats=40) == score_intervals(p, y, cluster, repeats=40)
    assert score_intervals(p, y, np.full(len(y), "p"), repeats=40) == UNKNOWN
    one_class = score_intervals(p, np.zeros_like(y), cluster, repeats=40)
    assert one_class["auroc"] is None and one_class["accuracy"] is not None


def slowly_scored(p, y, classes=()):
    """Score rows repeated as in the resample and sorted anew; no mean over fewer classes."""
    if not len(y):
        return UNKNOWN
    right, present = choose_classes_slowly(p) == y, np.unique(y)
    if set(classes) > set(present):
        return UNKNOWN | {"accuracy": right.mean()}
    areas = []
    for c in [1] if p.shape[1] == 2 else present:
        n = int((y == c).sum())
        above = rankdata(p[:, c])[y == c].sum() - n * (n + 1) / 2
        areas.append(above / (n * (len(y) - n)) if 0 < n < len(y) else np.nan)
    return {
        "accuracy": right.mean(),
        "macro_accuracy": np.mean([right[y == c].mean() for c in present]),
        "auroc": float(np.mean(areas)) if len(present) > 1 else None,
    }


def clopper(share, n):
    """Return the interval of a share by definition: tails of a binomial, or of a beta where n · share is not whole."""
    if (k := share * n) == round(k):
        return list(binomtest(round(k), n).proportion_ci(method="exact"))
    return [beta.ppf(0.025, k, n - k + 1), beta.ppf(0.975, k + 1, n - k)]


@settings(deadline=None, max_examples=40)
@given(predictions(), st.integers(1, 12), st.sampled_from([7, 10**6]))
def test_intervals_are_those_of_sorting_every_resample(case, n_patients, at_once):
    """The result is the same for any number of resamples in memory."""
    p, y = case
    cluster = np.random.default_rng(len(y)).integers(0, n_patients, len(y)).astype(str)
    right = choose_classes_slowly(p) == y

    def exact(name, value):
        n_of = {c: len(set(cluster[y == c])) for c in set(y.tolist())}
        n_rest = {c: len(set(cluster[y != c])) for c in n_of}
        if name == "auroc":
            low, high = np.mean([clopper(value, min(n_of[c], n_rest[c])) for c in n_of], axis=0)
            return [value, value] if 0 < value < 1 else [low, high]
        shares = [(right[y == c].mean(), n) for c, n in n_of.items()]
        shares = shares if name == "macro_accuracy" else [(value, len(set(cluster)))]
        return np.mean([clopper(*one) for one in shares], axis=0).tolist()

    slow = slow_intervals(lambda rows: slowly_scored(p[rows], y[rows], y), cluster, exact, repeats=30)
    with patch("wsi_fl.data.metrics._MAX_WEIGHTS", at_once * len(y)):
        found = score_intervals(p, y, cluster, repeats=30)
    for name, ends in slow.items():
        assert found[name] == (ends and pytest.approx(ends, abs=1e-12))
    assert {name: value for name, value in score_predictions(p, y).items() if name != "n"} == slowly_scored(p, y)


def test_a_slide_is_positive_with_one_patch_and_scored_by_its_most_probable_tenth():
    slide = np.repeat(["a", "b"], 20)
    y = np.zeros(40, np.int64)
    y[5] = 1
    positive = np.linspace(0, 0.5, 40)
    positive[5] = 0.9
    predicted, truth, row = aggregate_slides(np.stack([1 - positive, positive], 1), y, slide)
    found = score_predictions(predicted, truth)
    assert slide[row].tolist() == sorted(set(slide))
    # a: mean of 0.9 and the next best, above one half; b: its two best, just below
    assert found == {"n": 2, "accuracy": 1.0, "macro_accuracy": 1.0, "auroc": 1.0}
    three = np.full((40, 3), 1 / 3)
    assert aggregate_slides(three, y, slide) is None
    assert aggregate_slides(np.full((2, 2), 0.5), y[:2], np.array(["a", "b"])) is None


@pytest.mark.parametrize("n_rare", [1, 2, 3])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_resamples_without_a_class_do_not_count_as_correct_for_it(n_rare, n_classes):
    labels = np.concatenate([np.arange(18) % (n_classes - 1), np.full(n_rare, n_classes - 1)])
    p = np.eye(n_classes)[np.where(labels == n_classes - 1, 0, labels)]  # the last class is always missed
    found = score_intervals(p, labels, np.arange(len(labels)).astype(str), repeats=200)["macro_accuracy"]
    high = binomtest(0, n_rare).proportion_ci(method="exact").high
    assert found[1] == pytest.approx((n_classes - 1 + high) / n_classes) and found[1] < 1
    assert found[0] <= score_predictions(p, labels)["macro_accuracy"] == pytest.approx(1 - 1 / n_classes)


def test_macro_metrics_are_none_where_most_resamples_lack_a_class():
    labels, rng = np.repeat([0, 1, 2, 3], [30, 1, 1, 1]), np.random.default_rng(0)
    found = score_intervals(rng.dirichlet(np.ones(4), 33), labels, np.arange(33).astype(str), repeats=200)
    assert found["macro_accuracy"] is None and found["auroc"] is None and found["accuracy"] is not None


def test_two_correct_patients_of_a_class_have_a_wide_interval():
    labels = np.repeat([0, 1], [20, 2])
    found = score_intervals(np.eye(2)[labels], labels, np.arange(22).astype(str), repeats=50)
    ends = [binomtest(n, n).proportion_ci(method="exact").low for n in (20, 2)]
    assert found["macro_accuracy"] == pytest.approx([np.mean(ends), 1.0])
    assert found["auroc"] == pytest.approx([ends[1], 1.0])
    same = score_intervals(np.full((22, 2), 0.5), labels, np.arange(22).astype(str), repeats=50)
    assert same["auroc"] == [0.5, 0.5]  # of scores that are all the same


@pytest.mark.parametrize(
    "score",
    [
        [1e-9, 2e-9, 3e-9, 4e-9, 5e-9, 6e-9],
        [1e-200, 2e-200, 3e-200, 4e-200, 5e-200, 1.0],
        [1 - 9e-8, 1 - 8e-8, 1 - 7e-8, 1 - 3e-8, 1 - 2e-8, 1.0],
        [0.0, 0.0, np.nextafter(1, 0), 1.0, 1.0, 1.0],
        [0.4999999, 0.49999995, 0.5, 0.50000001, 0.50000002, 0.7],
    ],
)
def test_the_chosen_operating_point_separates_the_slides(score):
    score, truth = np.array(score), np.array([0, 0, 0, 1, 1, 1])
    point = find_operating_point(score, truth)
    assert ((score >= point) == truth).all()
    said = np.repeat(np.stack([1 - score, score], 1), 2, axis=0)
    found = aggregate_slides(said, truth.repeat(2), np.repeat([*"abcdef"], 2), point)
    assert score_predictions(found[0], found[1])["accuracy"] == 1.0


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.floats(-30, 30), st.floats(0.01, 8))
def test_no_other_score_separates_slides_better_than_the_operating_point(seed, middle, width):
    """Saturated models are among the cases."""
    rng, truth = np.random.default_rng(seed), np.arange(16) % 2
    score = 1 / (1 + np.exp(-middle - width * rng.normal(truth, 1)))
    best = max(balanced_accuracy_score(truth, score >= one) for one in score)
    point = find_operating_point(score, truth)
    if point is not None:  # None where all say the same
        assert 0 < point <= 1
        assert balanced_accuracy_score(truth, score >= point) >= best - 1e-9 or best == 0.5


@pytest.mark.parametrize("truth", [0, 1])
@pytest.mark.parametrize("half", [0.5, np.nextafter(0.5, 0), np.nextafter(0.5, 1)])
def test_a_probability_of_one_half_is_a_case_in_every_metric(truth, half):
    p, y = np.array([[1 - half, half]] * 3), np.full(3, truth)
    case = half >= 0.5
    assert choose_classes(p).tolist() == [case] * 3
    assert confusion_matrix(p, y)[truth][int(case)] == 3 and score_predictions(p, y)["accuracy"] == float(case == truth)
    assert CLASSES.example_scores(p, y).tolist() == [float(case == truth)] * 3
    assert compute_calibration(p, y)["bins"][0]["accuracy"] == float(case == truth)
    assert PatchPredictions(np.zeros((3, 4), np.int64), ("a", "b"), p).is_above.tolist() == [case] * 3
    rules = score_voting_rules([p, p], y, [1.0, 1.0])
    assert {scores["accuracy"] for scores in rules.values()} == {float(case == truth)}
