"""The planner spends a budget whole, never more, and says what it gives up."""

import json

import pytest
from typer.testing import CliRunner

from wsi_fl.cli.main import app
from wsi_fl.privacy.accounting import WHOLE_ORDERS, Mechanism, epsilon, sigma_for
from wsi_fl.privacy.plan import planned, proposals
from wsi_fl.types import UsageError


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
