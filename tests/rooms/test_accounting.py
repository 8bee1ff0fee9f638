"""ε against published values, and as a property of its arguments; plans that spend a budget whole, and never more."""

import json
from math import inf

import numpy as np
import pytest
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from typer.testing import CliRunner

from wsi_fl.cli.main import app
from wsi_fl.privacy import accounting
from wsi_fl.privacy.accounting import Mechanism, detection, epsilon, plan, sigma_for
from wsi_fl.privacy.plan import planned, proposals

DELTA = 1e-5
sigmas = st.floats(0.6, 8)
rates = st.floats(0.005, 1)
steps = st.integers(1, 2000)


def cost(sigma, rate, n, delta=DELTA, orders=None):
    """ε of so many steps with this noise and sampling rate."""
    return epsilon([Mechanism(sigma, 1.0, rate, n)], delta, *([orders] if orders else []))


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
    mu, value = n_steps**0.5 / sigma, cost(sigma, 1.0, n_steps)
    x = np.linspace(-12, 12 + mu, 400_001)
    p, q = norm.pdf(x, mu), norm.pdf(x)
    assert np.maximum(p - np.exp(value) * q, 0).sum() * (x[1] - x[0]) == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(sigmas, rates, steps)
def test_more_noise_costs_less_and_more_steps_or_larger_batches_cost_more(sigma, rate, n):
    base = cost(sigma, rate, n)
    assert 0 <= cost(sigma * 1.2, rate, n) <= base < cost(sigma, rate, n + 50)
    assert cost(sigma, min(1.0, rate * 1.5), n) >= base >= cost(sigma, rate, n, DELTA * 10)


@settings(max_examples=4, deadline=None)
@given(sigmas, rates, steps, steps)
def test_rounds_compose_to_the_whole(sigma, rate, a, b):
    parts = epsilon([Mechanism(sigma, 1.0, rate, a), Mechanism(sigma, 1.0, rate, b)], DELTA)
    assert parts == pytest.approx(cost(sigma, rate, a + b), rel=1e-9) and parts >= cost(sigma, rate, a)


def test_limits(recwarn):
    assert epsilon([], DELTA) == cost(1.0, 0.1, 0) == 0 and cost(0.0, 0.1, 1) == inf
    assert epsilon([Mechanism(1.4, 1.0, 0.1, 9), Mechanism(0.0, 1.0, 0.1, 1)], DELTA) == inf
    assert cost(900.0, 0.001, 1, 0.5) == 0  # never below nothing
    assert not recwarn.list, "opacus speaks of orders to people who asked for ε"


@pytest.mark.parametrize(
    ("action", "words"),
    [
        *(
            (lambda delta=delta: cost(1.0, 0.1, 1, delta), "between 0 and 1")
            for delta in (0.0, 1.0, -1e-5, np.nan)
        ),
        (lambda: plan(0, 32, 1, 1.0, 1.0), "n=0, B=32"),
        (lambda: plan(10, 0, 1, 1.0, 1.0), "n=10, B=0"),
        (lambda: plan(10, 2, -1, 1.0, 1.0), "must be numbers from 0 on"),
        (lambda: plan(10, 2, 1, -1.0, 1.0), "must be numbers from 0 on"),
        *((lambda rate=rate: detection([], rate), "false positive rate") for rate in (0.0, 1.0, -0.1)),
        *(
            (lambda e=e: sigma_for(e, 0.5, 100, DELTA), "no noise level reaches")
            for e in (0.0, -1.0, np.nan, inf)
        ),
        (
            lambda: sigma_for(3.0, 0.1, 10, DELTA, spent=[Mechanism(1.0, 1.0, 1.0, 1)]),
            "no noise level reaches epsilon 3 on top of",
        ),
    ],
)
def test_what_makes_no_sense_or_cannot_be_reached_is_refused(action, words):
    refused(action, words)


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_an_epoch_sees_each_row_once_on_average(n, batch_size):
    per_epoch = accounting.steps_per_epoch(n, batch_size)
    assert (per_epoch - 1) * batch_size < n <= per_epoch * batch_size
    mechanism = plan(n, batch_size, 3, 1.0, 1.0)
    assert mechanism.sample_rate * mechanism.steps == pytest.approx(3)


def test_a_gaussian_at_epsilon_1_hides_all_but_two_of_a_hundred():
    low, high = 0.2, 0.4
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if accounting._gaussian_epsilon(middle, DELTA) < 1 else (low, middle)
    assert round(low, 3) == 0.268
    assert detection([Mechanism(1 / low, 1.0, 1.0, 1)]) == pytest.approx(0.0198, abs=5e-5)


@pytest.mark.parametrize(
    ("events", "above"),
    [([(1.0, 3.0, 1), (1.0, 5.0, 1), (1.0, 8.0, 1)], 1.01), ([(0.1, 2.0, 60), (1.0, 9.0, 2)], 1.4)],
)
def test_what_an_attack_can_find_is_bounded_and_nearly_so(events, above):
    """The trade-off curve by another accountant: of all (ε, δ) that hold, the least e^ε α + δ."""
    dp = pytest.importorskip("dp_accounting")
    judge = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for q, sigma, n in events:
        judge.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), n)
    other = min(np.exp(value) * 0.01 + judge.get_delta(value) for value in np.linspace(0, 8, 401))
    ours = detection([Mechanism(sigma, 1.0, q, n) for q, sigma, n in events])
    assert 0.999 * other <= ours <= above * other


@given(sigma=sigmas, q=rates, n=steps, rate=st.floats(1e-4, 0.5))
@settings(max_examples=4)
def test_detection_lies_between_guessing_and_epsilon_and_falls_with_noise(sigma, q, n, rate):
    found = detection([Mechanism(sigma, 1.0, q, n)], rate)
    assert rate <= found <= 1 and found <= np.exp(min(cost(sigma, q, n), 50.0)) * rate + DELTA + 1e-9
    assert detection([Mechanism(2 * sigma, 1.0, q, n)], rate) <= found + 1e-12
    assert detection([Mechanism(0.0, 1.0, 1.0, 1)], rate) == 1.0 and detection([], rate) == pytest.approx(
        rate
    )


@pytest.mark.parametrize(("n", "target"), [(1, 8.0), (200, 1.0)])
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
    ways, chosen = proposals(100, 40, 3.0, 1e-5), planned(100, 40, 3.0, 1e-5)
    best = max(way.signal_to_noise for way in ways)
    assert chosen.signal_to_noise >= 0.95 * best
    beyond = [way for way in ways if way.mechanism.steps > chosen.mechanism.steps]
    assert beyond and all(way.signal_to_noise < 0.95 * best for way in beyond)


def test_fewer_orders_only_ever_bound_from_above():
    for sigma, rate, n in ((1.4, 0.02, 500), (4.0, 0.5, 40)):
        exact, quick = cost(sigma, rate, n), cost(sigma, rate, n, orders=accounting.WHOLE_ORDERS)
        assert exact <= quick <= exact * 1.02


@pytest.mark.parametrize(("target", "rate", "steps"), [(0.3, 1.0, 40), (2.4, 0.02, 900), (20.0, 1.0, 40)])
def test_sigma_is_the_least_of_three_decimals(target, rate, steps):
    sigma = sigma_for(target, rate, steps, 1e-5)
    assert cost(sigma, rate, steps) <= target < cost(sigma - 0.001, rate, steps)


def test_privacy_proposes_a_batch_size_and_shows_the_others_or_keeps_the_one_that_is_given():
    arguments = ["privacy", "--json", "--target-epsilon"]
    told = CliRunner().invoke(app, [*arguments, "3", "--n", "100", "--rounds", "20"])
    document = json.loads(told.stdout)
    assert document["epsilon"] <= 3.0 and document["steps"] == 20 * -(-100 // document["batch_size"])
    assert {way["batch_size"] for way in document["ways"]} > {document["batch_size"], 100}
    told = CliRunner().invoke(app, [*arguments, "2.4", "--n", "2338", "--batch-size", "32"])
    document = json.loads(told.stdout)
    assert document["batch_size"] == 32 and document["ways"] == [] and 1.3 < document["sigma"] < 1.4
