"""Intervals of means over patients, seeds and noise against scipy and simulations, with redrawn noise of a head."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from wsi_fl.data.tasks import CLASSES, NumberTask, SurvivalTask
from wsi_fl.evidence.benefit import build_score_table, estimate_benefit
from wsi_fl.evidence.benefit_figure import _VERDICT_WORDS, verdict_words
from wsi_fl.evidence.verdict import (
    Estimate,
    compare_pairs,
    decide_verdict,
    estimate_from_repetitions,
    estimate_mean,
    estimate_ratio,
)
from wsi_fl.oneshot.shared_head import SharedHead


def estimate_values(values, names=None, noise=None, weights=1.0):
    """Return the estimate of values, one per patient."""
    values = np.atleast_2d(values)
    names = np.arange(values.shape[1]) if names is None else names
    return estimate_mean(values, np.full_like(values, weights), names.astype(str), noise)


def test_patients_with_one_example_each_have_the_t_interval():
    values = np.random.default_rng(0).choice([-1.0, 1.0], 400)
    found = estimate_values(values)
    low, high = stats.t.interval(0.95, 399, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=2e-3)
    assert found.patients == pytest.approx(stats.sem(values)) and found.seeds is found.noise is None


def test_examples_of_a_patient_vary_together_and_a_single_patient_has_no_interval():
    values = np.repeat(np.random.default_rng(1).normal(size=20), 10)
    together = estimate_values(values, np.repeat(np.arange(20), 10))
    assert together.patients / estimate_values(values).patients == pytest.approx(10**0.5, rel=0.05)
    assert estimate_values(values, np.full(200, "a")) == Estimate(values.mean(), None, None)


def test_a_mean_dominated_by_one_patient_is_inconclusive():
    found = estimate_values(np.where(np.arange(100) == 0, 5.0, 0.0))
    assert found.low < 0 and decide_verdict(found, None) == "inconclusive"


def test_seeds_and_noise_add_their_variance_and_noise_is_the_least_that_seeds_have():
    same, moves = np.tile(np.random.default_rng(2).normal(size=300), (4, 1)), [-0.3, 0.1, 0.0, 0.2]
    assert estimate_values(same).seeds == pytest.approx(0, abs=1e-12)
    assert estimate_values(same + np.array(moves)[:, None]).seeds == pytest.approx(stats.sem(moves))
    noisy = estimate_values(same, noise=np.full(4, 0.2))
    half = stats.norm.ppf(0.975) * np.hypot(0.1, noisy.patients)
    assert noisy.noise == pytest.approx(0.1) and noisy.high - noisy.mean == pytest.approx(half, rel=5e-3)
    single = estimate_values(same[0], noise=np.array([0.2]))
    assert single.noise == pytest.approx(0.2) and single.seeds is None


def test_a_ratio_is_that_of_the_sums_and_its_interval_that_of_the_bootstrap():
    rng = np.random.default_rng(3)
    whole = 0.3 + rng.normal(size=(1, 500))
    part = 0.5 * whole + 0.2 * rng.normal(size=(1, 500))
    found = estimate_ratio(part, whole, np.arange(500).astype(str))
    drawn = rng.integers(500, size=(4000, 500))
    again = part[0][drawn].sum(1) / whole[0][drawn].sum(1)
    assert found.mean == pytest.approx(part.sum() / whole.sum())
    assert (found.low, found.high) == pytest.approx(np.quantile(again, [0.025, 0.975]), abs=0.02)


def test_repetitions_have_the_t_interval():
    values = np.array([0.02, 0.05, 0.03, 0.01])
    found = estimate_from_repetitions(values.mean(), values.std(ddof=1), 4)
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 3, values.mean(), stats.sem(values)))
    for sd, n in ((None, 1), (0.0, 3)):  # a single one, deterministic ones
        assert estimate_from_repetitions(0.1, sd, n) == Estimate(0.1, None, None)


def test_contributions_of_examples_have_the_score_as_their_mean():
    rng = np.random.default_rng(4)
    said, truth = rng.dirichlet([1, 1], 40), rng.integers(2, size=40)
    assert CLASSES.example_scores(said, truth).mean() == CLASSES.compute_scores(said, truth)["accuracy"]
    numbers, task = rng.normal(5, 2, 60), NumberTask(0, 10)
    guess = (numbers + rng.normal(size=60))[:, None]
    assert task.example_scores(guess, numbers).mean() == pytest.approx(task.compute_scores(guess, numbers)["r2"])
    assert task.example_scores(guess[:1], numbers[:1]) is None
    times = np.stack([rng.exponential(10, 300), rng.random(300) < 0.7], axis=1)
    curves = np.clip(0.3 + times[:, :1] / 40 + 0.2 * rng.random((300, 3)), 0, 1)
    curves, task = np.minimum.accumulate(curves, axis=1), SurvivalTask((5.0, 10.0, 20.0))
    each, risk = task.example_scores(curves, times), -(curves @ np.array([5.0, 5.0, 10.0]))
    metrics = pytest.importorskip("sksurv.metrics", reason="scikit-survival is the judge")
    known = metrics.concordance_index_censored(times[:, 1] > 0.5, times[:, 0], risk)[0]
    assert each.mean() == pytest.approx(known, abs=1e-6)
    draws = rng.integers(300, size=(300, 300))
    again = [task.compute_scores(curves[rows], times[rows])["concordance"] for rows in draws]
    assert each.std(ddof=1) / 300**0.5 == pytest.approx(np.std(again), rel=0.15)


@pytest.mark.parametrize(
    ("task", "truth", "good"),
    [
        (SurvivalTask((2.0, 4.0)), [[1.0, 1.0], [5.0, 0.0], [6.0, 0.0], [7.0, 0.0]], [[0.1] * 2] + [[0.9] * 2] * 3),
        (NumberTask(0, 1), [0.1, 0.9], [[0.2], [0.8]]),
    ],
)
def test_a_score_of_a_single_event_or_of_two_numbers_gives_no_verdict(task, truth, good):
    truth, good = np.array(truth), np.array(good)
    assert task.compute_scores(good, truth)[task.scores[0]] > 0.9
    assert task.example_scores(good, truth) is None


@pytest.mark.parametrize(("n", "verdict"), [(3, "inconclusive"), (6, "inconclusive"), (40, "join")])
def test_a_few_patients_in_order_of_risk_do_not_prove_a_gain(n, verdict):
    task, truth = SurvivalTask((2.0, 4.0)), np.stack([np.linspace(0.5, 3.5, n), np.ones(n)], 1)
    curves = {"local": np.full((n, 2), 0.5), "federated": np.tile(np.linspace(0.1, 0.9, n)[:, None], 2)}
    rows = [f"S\np{k}\n{k}" for k in range(n)]
    tables = {
        kind: build_score_table(
            {0: pd.DataFrame({"value": task.example_scores(said, truth), "weight": 1.0}, rows)}, "concordance", {}
        )
        for kind, said in curves.items()
    }
    found = estimate_benefit(tables)
    assert found["gain"]["mean"] == pytest.approx(0.5) and found["verdict"] == verdict
    assert found["federated"]["low"] < found["federated"]["mean"] == found["federated"]["high"] == 1


def test_redrawn_noise_moves_a_head_as_its_original_noise_did():
    """Heads from fresh class statistics scatter as much as redraws around one of them."""
    rng = np.random.default_rng(5)
    d, sites, sd = 12, 4, 3.0
    y = torch.arange(400) % 2
    z = torch.from_numpy(rng.normal(size=(400, d))) / 8
    z[:, 0] += (2 * y - 1) * 0.15
    heads = [SharedHead(2, 32, projection=d) for _ in range(sites)]

    def exchanged(noise):
        for k, head in enumerate(heads):
            own = slice(k, None, sites)
            head.set_local_statistics(z[own], y[own])
            exact = head.pack_statistics(z[own], y[own])
            head.set_noisy_statistics(exact, exact + noise * torch.from_numpy(rng.normal(size=len(exact))), noise**2)
        SharedHead.combine(heads)
        return heads[0]

    def says(head):
        weights, bias = head.solve_head()
        return (z @ weights + bias).diff(dim=1)[:, 0]

    def scatter(said):
        return float(torch.stack(said).std(0).mean())

    fresh = scatter([says(exchanged(sd)) for _ in range(100)])
    around = [
        scatter([says(exchanged(sd).redraw_noise(rng))] + [says(heads[0].redraw_noise(rng)) for _ in range(25)])
        for _ in range(4)
    ]
    assert np.mean(around) == pytest.approx(fresh, rel=0.2)
    head, again = heads[0], heads[0].redraw_noise(rng)
    assert head.is_noisy and torch.equal(again.sums[-2:], head.sums[-2:])
    assert not torch.equal(again.sums, head.sums) and torch.equal(again.local_sums, head.local_sums)
    exact = exchanged(0.0)
    assert not exact.is_noisy and torch.equal(exact.redraw_noise(rng).sums, exact.sums)


def test_class_counts_add_no_variance_where_classes_weigh_alike():
    n, right = np.array([900, 100]), np.array([0.95, 0.4])
    values = np.concatenate([np.arange(n[k]) < right[k] * n[k] for k in (0, 1)]).astype(float)
    weights = np.repeat(1000 / 2 / n, n)
    found = estimate_values(values, weights=weights)
    known = np.sqrt((right * (1 - right) / n).sum()) / 2
    assert found.mean == pytest.approx(0.675) and found.patients == pytest.approx(known, rel=0.02)
    drawn_too = estimate_ratio((values * weights)[None], weights[None], np.arange(1000).astype(str))
    assert drawn_too.patients > 1.1 * known


def around(mean, half):
    return Estimate(mean, mean - half, mean + half)


@pytest.mark.parametrize(
    ("gain", "pooled_gain", "verdict"),
    [
        (around(0.1, 0.05), around(0.2, 0.1), "join"),
        (around(-0.1, 0.05), around(0.2, 0.1), "local"),
        (around(0.02, 0.03), around(0.1, 0.1), "inconclusive"),
        (around(0.001, 0.03), around(0.005, 0.01), "nothing to gain"),
        (around(0.03, 0.08), around(0.002, 0.15), "inconclusive"),  # nobody knows what there is
        (around(0.004, 0.001), around(0.1, 0.1), "inconclusive"),  # sure, and next to nothing
        (Estimate(0.3, None, None), None, "inconclusive"),  # a single patient
        (None, None, "inconclusive"),
    ],
)
def test_a_verdict_states_only_what_the_intervals_show(gain, pooled_gain, verdict):
    assert decide_verdict(gain, pooled_gain) == verdict and verdict in _VERDICT_WORDS


def test_three_of_three_correct_give_a_wide_interval():
    label = np.repeat([0, 1], [40, 3])
    weights = 43 / 2 / np.array([40, 3])[label]
    found = estimate_values((label == 1).astype(float), weights=weights)
    assert found.mean == pytest.approx(0.5) and 0.2 < found.high - found.low < 1


def test_the_interval_of_an_accuracy_is_clipped_at_one():
    found = estimate_values(np.ones(6), noise=np.array([0.3]))
    assert found.high > 1 and found.clip_interval(0.0, 1.0) == replace(found, high=1.0)
    assert Estimate(0.5, None, None).clip_interval(0.0, 1.0) == Estimate(0.5, None, None)


@pytest.mark.parametrize("n", [2, 5, 30])
@pytest.mark.parametrize("value", [1.0, -1.0, 0.0])
def test_identical_patients_have_the_exact_binomial_interval(n, value):
    """By Clopper and Pearson's interval of none of n that is otherwise."""
    others = stats.binomtest(0, n).proportion_ci(method="exact").high
    found = estimate_values(np.full(n, value)).clip_interval(-1.0, 1.0)
    assert found.low == pytest.approx(value - others * (value + 1))
    assert found.high == pytest.approx(value + others * (1 - value)) and found.mean == value
    assert decide_verdict(found, None) == (
        {1.0: "join", -1.0: "local"}.get(value, "inconclusive") if n > 5 else "inconclusive"
    )
    share = estimate_values(np.ones(n)).clip_interval(0.0, 1.0)
    assert (share.low, share.high) == pytest.approx(stats.binomtest(n, n).proportion_ci(method="exact"))


def test_equivalence_needs_more_than_a_few_patients_without_a_difference():
    same = {"gain": estimate_values(np.zeros(20)).clip_interval(-1.0, 1.0).build_document(), "verdict": "inconclusive"}
    assert verdict_words(same, "C1") == "its local model makes the same predictions, on 20 test patients"
    gain = estimate_values(np.array([0.1, -0.1] * 30))
    few, many = (estimate_values(np.zeros(n)).clip_interval(-1.0, 1.0) for n in (20, 200))
    assert (decide_verdict(gain, few), decide_verdict(gain, many)) == ("inconclusive", "nothing to gain")


@pytest.mark.parametrize("n", [2, 8, 40])
def test_pairs_with_one_constant_difference_differ_significantly(n):
    found = compare_pairs([1.0] * n, [0.0] * n)
    assert found["p"] == pytest.approx(stats.binomtest(n, n).pvalue) and found["difference"] == 1
    assert compare_pairs([0.3] * n, [0.3] * n)["p"] is None
    assert compare_pairs([0.1 + 0.2] * n, [0.3] * n)["p"] is None  # alike but for rounding


def test_p_values_are_never_zero_and_match_scipy():
    assert 0 < compare_pairs([1.0] * 4000, [0.0] * 3999 + [1.0])["p"] < 1e-300
    assert 0 < compare_pairs([1.0] * 5000, [0.0] * 5000)["p"] < 1e-300
    a, b = np.random.default_rng(0).normal(size=(2, 30))
    assert compare_pairs([*a], [*b])["p"] == stats.ttest_rel(a, b).pvalue
