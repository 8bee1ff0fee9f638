"""ε against published values, and as a property of its arguments; plans that spend a budget whole, and never more."""

import json
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from typer.testing import CliRunner

from wsi_fl.cli.main import app
from wsi_fl.privacy import accounting
from wsi_fl.privacy.accounting import (
    WHOLE_ORDERS,
    Mechanism,
    detection,
    epsilon,
    plan,
    sigma_for,
    steps_per_epoch,
)
from wsi_fl.privacy.plan import planned, proposals
from wsi_fl.types import UsageError

DELTA = 1e-5
sigmas = st.floats(0.6, 8)
rates = st.floats(0.005, 1)
steps = st.integers(1, 2000)


@pytest.mark.parametrize(
    ("n", "published"), [(2338, 2.36), (2726, 2.17), (2937, 2.08), (2841, 2.12), (10842, 1.00)]
)
def test_table_2_of_proxyfl(n, published):
    assert round(epsilon([plan(n, 32, 30, 1.4, 0.7)], DELTA), 2) == published


def test_default_mnist_run_of_the_reference_code():
    assert epsilon([plan(1000, 250, 300, 1.0, 1.0)], 1e-3) == pytest.approx(86.8, abs=0.05)


def test_full_batches_cost_what_the_gaussian_mechanism_costs():
    """q = 1: all steps are one Gaussian mechanism with less noise, whose δ(ε) is written down and integrated here."""
    sigma, n_steps = 4.0, 10
    mu = n_steps**0.5 / sigma
    value = epsilon([Mechanism(sigma, 1.0, 1.0, n_steps)], DELTA)
    x = np.linspace(-12, 12 + mu, 400_001)
    p, q = norm.pdf(x, mu), norm.pdf(x)
    assert np.maximum(p - np.exp(value) * q, 0).sum() * (x[1] - x[0]) == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(sigmas, rates, steps)
def test_more_noise_costs_less_and_more_steps_or_larger_batches_cost_more(sigma, rate, n):
    base = epsilon([Mechanism(sigma, 1.0, rate, n)], DELTA)
    assert 0 <= epsilon([Mechanism(sigma * 1.2, 1.0, rate, n)], DELTA) <= base
    assert epsilon([Mechanism(sigma, 1.0, rate, n + 50)], DELTA) > base
    assert epsilon([Mechanism(sigma, 1.0, min(1.0, rate * 1.5), n)], DELTA) >= base
    assert epsilon([Mechanism(sigma, 1.0, rate, n)], DELTA * 10) <= base


@settings(max_examples=4, deadline=None)
@given(sigmas, rates, steps, steps)
def test_rounds_compose_to_the_whole(sigma, rate, a, b):
    parts = epsilon([Mechanism(sigma, 1.0, rate, a), Mechanism(sigma, 1.0, rate, b)], DELTA)
    assert parts == pytest.approx(epsilon([Mechanism(sigma, 1.0, rate, a + b)], DELTA), rel=1e-9)
    assert parts >= epsilon([Mechanism(sigma, 1.0, rate, a)], DELTA)


def test_limits(recwarn):
    assert epsilon([], DELTA) == 0
    assert epsilon([Mechanism(1.0, 1.0, 0.1, 0)], DELTA) == 0
    assert epsilon([Mechanism(0.0, 1.0, 0.1, 1)], DELTA) == inf
    assert epsilon([Mechanism(1.4, 1.0, 0.1, 9), Mechanism(0.0, 1.0, 0.1, 1)], DELTA) == inf
    assert epsilon([Mechanism(900.0, 1.0, 0.001, 1)], 0.5) == 0  # never below nothing
    assert not recwarn.list, "opacus speaks of orders to people who asked for ε"


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(UsageError, match="delta must lie between 0 and 1"):
        epsilon([Mechanism(1.0, 1.0, 0.1, 1)], delta)


def test_plans_that_make_no_sense_are_refused():
    for n, batch in ((0, 32), (10, 0)):
        with pytest.raises(UsageError, match=f"n={n}, B={batch}"):
            plan(n, batch, 1, 1.0, 1.0)
    with pytest.raises(UsageError, match="must be numbers from 0 on"):
        plan(10, 2, -1, 1.0, 1.0)
    with pytest.raises(UsageError, match="must be numbers from 0 on"):
        plan(10, 2, 1, -1.0, 1.0)


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_an_epoch_sees_each_row_once_on_average(n, batch_size):
    per_epoch = steps_per_epoch(n, batch_size)
    assert (per_epoch - 1) * batch_size < n <= per_epoch * batch_size
    mechanism = plan(n, batch_size, 3, 1.0, 1.0)
    assert mechanism.sample_rate * mechanism.steps == pytest.approx(3)


@pytest.mark.parametrize("target", [0.0, -1.0, pytest.param(1e-9, marks=pytest.mark.slow), float("nan"), inf])
def test_unreachable_targets_are_refused(target):
    with pytest.raises(UsageError, match="no noise level reaches"):
        sigma_for(target, 0.5, 100, DELTA)


def test_the_orders_are_those_of_opacus():
    from opacus.accountants import RDPAccountant

    assert list(accounting._ORDERS) == RDPAccountant.DEFAULT_ALPHAS


def found_by(events, rate):
    """The trade-off curve by another accountant: of all (ε, δ) that hold, the least e^ε α + δ."""
    dp = pytest.importorskip("dp_accounting")
    judge = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for q, sigma, n in events:
        judge.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), n)
    values = np.linspace(0, 8, 401)
    return min(np.exp(value) * rate + judge.get_delta(value) for value in values)


def test_a_gaussian_at_epsilon_1_hides_all_but_two_of_a_hundred():
    low, high = 0.2, 0.4
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if accounting._gaussian_epsilon(middle, DELTA) < 1 else (low, middle)
    assert round(low, 3) == 0.268
    assert detection([Mechanism(1 / low, 1.0, 1.0, 1)]) == pytest.approx(0.0198, abs=5e-5)


@pytest.mark.parametrize(
    ("events", "above"),
    [
        ([(1.0, 3.0, 1), (1.0, 5.0, 1), (1.0, 8.0, 1)], 1.01),
        ([(0.0137, 1.4, 2190)], 1.4),
        ([(0.1, 2.0, 300), (1.0, 9.0, 2)], 1.4),
    ],
)
def test_what_an_attack_can_find_is_bounded_and_nearly_so(events, above):
    ours = detection([Mechanism(sigma, 1.0, q, n) for q, sigma, n in events])
    other = found_by(events, 0.01)
    assert 0.999 * other <= ours <= above * other


@given(sigma=sigmas, q=rates, n=steps, rate=st.floats(1e-4, 0.5))
@settings(max_examples=8)
def test_detection_lies_between_guessing_and_epsilon_and_falls_with_noise(sigma, q, n, rate):
    mechanism, value = Mechanism(sigma, 1.0, q, n), epsilon([Mechanism(sigma, 1.0, q, n)], DELTA)
    found = detection([mechanism], rate)
    assert rate <= found <= 1
    assert found <= np.exp(min(value, 50.0)) * rate + DELTA + 1e-9
    assert detection([Mechanism(2 * sigma, 1.0, q, n)], rate) <= found + 1e-12


def test_without_noise_everybody_is_found_and_rates_are_rates():
    assert detection([Mechanism(0.0, 1.0, 1.0, 1)]) == 1.0 and detection([]) == pytest.approx(0.01)
    for rate in (0.0, 1.0, -0.1):
        with pytest.raises(UsageError, match="false positive rate"):
            detection([], rate)


# plans


@pytest.mark.parametrize("n", [1, 600])
@pytest.mark.parametrize("target", [1.0, 8.0])
def test_a_plan_spends_the_budget_and_never_more(n, target):
    way = planned(n, 20, target, 1e-5, clip=0.7)
    mechanism = way.mechanism
    assert target * 0.99 < epsilon([mechanism], 1e-5) <= target
    assert mechanism.clip == 0.7 and mechanism.sample_rate == 1 / -(-n // way.batch_size)
    assert mechanism.steps == 20 * -(-n // way.batch_size)


@pytest.mark.slow
def test_what_was_spent_before_counts():
    sums = Mechanism(sigma=10.0, clip=1.0, sample_rate=1.0, steps=1)
    alone, after = planned(300, 10, 3.0, 1e-5), planned(300, 10, 3.0, 1e-5, spent=[sums])
    assert epsilon([sums, after.mechanism], 1e-5) <= 3.0 < epsilon([sums, alone.mechanism], 1e-5)


def test_the_choice_has_the_most_steps_near_the_best_signal():
    ways = proposals(300, 40, 3.0, 1e-5)
    best = max(way.signal_to_noise for way in ways)
    chosen = planned(300, 40, 3.0, 1e-5)
    assert chosen.signal_to_noise >= 0.95 * best
    beyond = [way for way in ways if way.mechanism.steps > chosen.mechanism.steps]
    assert beyond and all(way.signal_to_noise < 0.95 * best for way in beyond)


def test_fewer_orders_only_ever_bound_from_above():
    for mechanism in (Mechanism(1.4, 1.0, 0.02, 500), Mechanism(4.0, 1.0, 0.5, 40)):
        exact, quick = epsilon([mechanism], 1e-5), epsilon([mechanism], 1e-5, WHOLE_ORDERS)
        assert exact <= quick <= exact * 1.02


@pytest.mark.parametrize("target", [0.3, 2.4, 20.0])
@pytest.mark.parametrize(("rate", "steps"), [(1.0, 40), (0.02, 900)])
def test_sigma_is_the_least_of_three_decimals(target, rate, steps):
    sigma = sigma_for(target, rate, steps, 1e-5)
    assert epsilon([Mechanism(sigma, 1.0, rate, steps)], 1e-5) <= target
    assert epsilon([Mechanism(sigma - 0.001, 1.0, rate, steps)], 1e-5) > target


def test_a_budget_that_is_gone_says_so():
    spent = [Mechanism(1.0, 1.0, 1.0, 1)]
    with pytest.raises(UsageError, match="no noise level reaches epsilon 3 on top of"):
        sigma_for(3.0, 0.1, 10, 1e-5, spent=spent)


def test_privacy_proposes_a_batch_size_and_shows_the_others():
    outcome = CliRunner().invoke(
        app, ["privacy", "--target-epsilon", "3", "--n", "300", "--rounds", "20", "--json"]
    )
    document = json.loads(outcome.stdout)
    assert document["epsilon"] <= 3.0 and document["steps"] == 20 * -(-300 // document["batch_size"])
    assert {way["batch_size"] for way in document["ways"]} > {document["batch_size"], 300}


def test_a_batch_size_that_is_given_is_kept():
    arguments = ["privacy", "--target-epsilon", "2.4", "--n", "2338", "--batch-size", "32", "--json"]
    document = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert document["batch_size"] == 32 and document["ways"] == [] and 1.3 < document["sigma"] < 1.4
