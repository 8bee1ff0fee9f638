"""Privacy accounting against published values and its properties, and plans that spend a budget without excess."""

import json
from math import inf

import numpy as np
import pytest
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from typer.testing import CliRunner

from wsi_fl import __main__
from wsi_fl.cli.main import app
from wsi_fl.privacy import accounting, loss_distribution
from wsi_fl.privacy.accounting import Mechanism, epsilon, find_sigma, max_tpr, plan_mechanism
from wsi_fl.privacy.privacy_plan import propose_plan
from wsi_fl.privacy.renyi import compute_step_rdp

DELTA = 1e-5
sigmas = st.floats(0.6, 8)
rates = st.floats(0.005, 1)
steps = st.integers(1, 2000)


def cost(sigma, rate, n, delta=DELTA):
    """Compute ε of a number of steps with this noise and sampling rate."""
    return epsilon([Mechanism(sigma, 1.0, rate, n)], delta)


@pytest.mark.parametrize(("n", "published"), [(2338, 2.36), (2726, 2.17), (2937, 2.08), (2841, 2.12), (10842, 1.00)])
def test_table_2_of_proxyfl(n, published):
    assert round(epsilon([plan_mechanism(n, 32, 30, 1.4, 0.7)], DELTA), 2) == published


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


def test_epsilon_is_zero_or_infinite_at_its_limits(recwarn):
    assert epsilon([], DELTA) == cost(1.0, 0.1, 0) == 0 and cost(0.0, 0.1, 1) == inf
    assert epsilon([Mechanism(1.4, 1.0, 0.1, 9), Mechanism(0.0, 1.0, 0.1, 1)], DELTA) == inf
    assert cost(900.0, 0.001, 1, 0.5) == 0  # never below nothing
    assert not recwarn.list, "opacus speaks of orders to people who asked for ε"


@pytest.mark.parametrize(
    ("action", "words"),
    [
        *((lambda delta=delta: cost(1.0, 0.1, 1, delta), "between 0 and 1") for delta in (0.0, 1.0, -1e-5, np.nan)),
        (lambda: plan_mechanism(0, 32, 1, 1.0, 1.0), "n=0, B=32"),
        (lambda: plan_mechanism(10, 0, 1, 1.0, 1.0), "n=10, B=0"),
        (lambda: plan_mechanism(10, 2, -1, 1.0, 1.0), "must be numbers from 0 on"),
        (lambda: plan_mechanism(10, 2, 1, -1.0, 1.0), "must be numbers from 0 on"),
        *((lambda rate=rate: max_tpr([], rate), "false positive rate") for rate in (0.0, 1.0, -0.1)),
        *((lambda e=e: find_sigma(e, 0.5, 100, DELTA), "no noise level reaches") for e in (0.0, -1.0, np.nan, inf)),
        (
            lambda: find_sigma(3.0, 0.1, 10, DELTA, spent=[Mechanism(1.0, 1.0, 1.0, 1)]),
            "no noise level reaches epsilon 3 on top of",
        ),
    ],
)
def test_invalid_or_unreachable_targets_are_refused(action, words):
    refused(action, words)


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_an_epoch_sees_each_row_once_on_average(n, batch_size):
    per_epoch = accounting.steps_per_epoch(n, batch_size)
    assert (per_epoch - 1) * batch_size < n <= per_epoch * batch_size
    mechanism = plan_mechanism(n, batch_size, 3, 1.0, 1.0)
    assert mechanism.sample_rate * mechanism.steps == pytest.approx(3)


@pytest.mark.parametrize(
    ("events", "above"), [([(1.0, 3.0, 1), (1.0, 5.0, 1), (1.0, 8.0, 1)], 1.01), ([(0.1, 2.0, 60), (1.0, 9.0, 2)], 1.4)]
)
def test_the_bound_on_membership_attacks_holds_and_is_nearly_tight(events, above):
    """The trade-off curve by another accountant: of all (ε, δ) that hold, the least e^ε α + δ."""
    dp = pytest.importorskip("dp_accounting")
    judge = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for q, sigma, n in events:
        judge.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), n)
    other = min(np.exp(value) * 0.01 + judge.get_delta(value) for value in np.linspace(0, 8, 401))
    ours = max_tpr([Mechanism(sigma, 1.0, q, n) for q, sigma, n in events])
    assert 0.999 * other <= ours <= above * other


@given(sigma=sigmas, q=rates, n=steps, rate=st.floats(1e-4, 0.5))
@settings(max_examples=4)
def test_detection_lies_between_guessing_and_epsilon_and_falls_with_noise(sigma, q, n, rate):
    found = max_tpr([Mechanism(sigma, 1.0, q, n)], rate)
    assert rate <= found <= 1 and found <= np.exp(min(cost(sigma, q, n), 50.0)) * rate + DELTA + 1e-9
    assert max_tpr([Mechanism(2 * sigma, 1.0, q, n)], rate) <= found + 1e-12
    assert max_tpr([Mechanism(0.0, 1.0, 1.0, 1)], rate) == 1.0 and max_tpr([], rate) == pytest.approx(rate)


@pytest.mark.parametrize(("n", "epochs", "target"), [(1, 20, 8.0), (200, 20, 1.0), (500, 10, 0.1)])
def test_a_plan_spends_the_budget_and_never_more(n, epochs, target):
    way = propose_plan(n, epochs, target, 1e-5, clip=0.7)
    mechanism = way.mechanism
    assert target * 0.98 < epsilon([mechanism], 1e-5) <= target
    assert mechanism.clip == 0.7 and mechanism.sample_rate == 1 / -(-n // way.batch_size)
    assert mechanism.steps == epochs * -(-n // way.batch_size)


@pytest.mark.slow
def test_epsilon_spent_before_counts_in_a_plan():
    sums = Mechanism(sigma=10.0, clip=1.0, sample_rate=1.0, steps=1)
    alone, after = propose_plan(300, 10, 3.0, 1e-5), propose_plan(300, 10, 3.0, 1e-5, spent=[sums])
    assert epsilon([sums, after.mechanism], 1e-5) <= 3.0 < epsilon([sums, alone.mechanism], 1e-5)


@pytest.mark.parametrize(("target", "rate", "steps"), [(0.3, 1.0, 40), (2.4, 0.02, 900), (20.0, 1.0, 40)])
def test_sigma_is_the_least_of_three_decimals(target, rate, steps):
    sigma = find_sigma(target, rate, steps, 1e-5)
    assert cost(sigma, rate, steps) <= target < cost(sigma - 0.001, rate, steps)


@pytest.mark.parametrize(
    ("n", "epochs", "target", "delta", "chosen"),
    [
        (1973, 34, 3.0, 5e-5, 329),
        (153, 20, 1.414, 1e-5, 10),
        (68, 5, 0.4083, 1e-5, 5),
        (6, 20, 1.242, 1e-5, 1),
        (12, 1, 0.693, 1e-5, 12),
    ],
)
def test_the_proposal_is_that_of_an_exact_accountant(n, epochs, target, delta, chosen):
    """`chosen` has the most steps within 5 % of the best signal to noise by dp-accounting's loss distributions."""
    assert propose_plan(n, epochs, target, delta).batch_size == chosen


@pytest.mark.parametrize(
    ("mechanism", "name"),
    [
        (Mechanism(1.4, 1.0, 0.01, 100), "rdp"),
        (Mechanism(1.4, 1.0, 1.0, 100), "exact"),
        (Mechanism(0.0, 1.0, 0.1, 1), "exact"),
        (Mechanism(500.0, 1.0, 0.9, 1), "unsampled"),
    ],
)
def test_the_accountant_in_use_is_named(mechanism, name):
    assert accounting.pricing_method([mechanism], DELTA) == name


@pytest.mark.parametrize(("sigma", "q"), [(20.0, 0.5), (45.0, 0.03), (300.0, 0.9), (1000.0, 0.5), (1e6, 0.5)])
def test_large_noise_is_priced_as_its_integral_and_never_below(sigma, q):
    """Against the series in numbers of 60 digits, at whole orders, where it is finite."""
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 60
    found = dict(zip(accounting._ORDERS, compute_step_rdp(sigma, q, accounting._ORDERS), strict=True))
    for order in (2, 7, 32, 63):
        terms = (
            mpmath.binomial(order, k)
            * mpmath.mpf(q) ** k
            * (1 - mpmath.mpf(q)) ** (order - k)
            * mpmath.exp(mpmath.mpf(k * k - k) / (2 * mpmath.mpf(sigma) ** 2))
            for k in range(order + 1)
        )
        right = float(mpmath.log(sum(terms)) / (order - 1))
        assert right <= found[order] <= right * (1 + 1e-6)


GROUPS = [  # noise, rate, steps, rows, δ, ε by dp-accounting's mixtures of Gaussians (0.6.0, cells of 1e-3 or less)
    (2.0, 1e-4, 1000, 50, 1e-5, 0.29239),
    (1.0, 0.02, 50, 3, 1e-5, 3.72621),
    (3.0, 0.1, 20, 8, 1e-6, 7.30982),
    (2.0, 0.3, 5, 2, 1e-5, 3.89968),
    (6.0, 0.01, 300, 20, 1e-7, 3.00953),
    (5.0, 0.5, 10, 3, 1e-3, 3.10002),
    (1.4, 0.01, 1000, 4, 1e-5, 4.83375),
    (4.0, 0.1, 100, 10, 1e-5, 14.21618),
]


@pytest.mark.parametrize(("sigma", "q", "n", "k", "delta", "exact"), GROUPS)
def test_the_guarantee_of_a_patient_with_many_rows_is_valid_and_nearly_tight(sigma, q, n, k, delta, exact):
    step = Mechanism(sigma, 1.0, q, n)
    found = accounting.group_epsilon([step], delta, k)
    assert exact * 0.9999 <= found <= exact * 1.002
    halves = [Mechanism(sigma, 1.0, q, n // 2), Mechanism(sigma, 0.3, q, n - n // 2)]
    assert accounting.group_epsilon(halves, delta, k) == pytest.approx(found, rel=1e-9)


@given(st.floats(1, 8), st.floats(1e-5, 0.1), st.integers(1, 100), st.integers(2, 20), st.floats(1e-8, 1e-3))
@settings(max_examples=4, deadline=None)
def test_more_rows_have_a_weaker_guarantee_than_a_single_row(sigma, q, n, k, delta):
    step = [Mechanism(sigma, 1.0, q, n)]
    found = [accounting.group_epsilon(step, delta, rows) or inf for rows in (1, k, 2 * k)]
    assert found == sorted(found) and found[0] == epsilon(step, delta)


def random_plans(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        batches = int(rng.integers(1, 200))
        steps = batches * int(rng.integers(1, 40))
        yield (Mechanism(round(float(rng.uniform(0.7, 4)), 2), 1.0, 1 / batches, steps), 10 ** -rng.uniform(3, 7))


@pytest.mark.parametrize(("mechanism", "delta"), list(random_plans(10)))
def test_random_plans_against_another_accountant(mechanism, delta):
    """Never below the distribution of the privacy loss, and at most a seventh above, which is what RDP gives away."""
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    judge = from_gaussian_mechanism(
        mechanism.sigma, sampling_prob=mechanism.sample_rate, value_discretization_interval=3e-4
    )
    exact = judge.self_compose(mechanism.steps).get_epsilon_for_delta(delta)
    found = epsilon([mechanism], delta)
    assert 0.999 * exact <= found <= 1.15 * exact + 0.02
    assert exact * 0.98 <= loss_distribution.epsilon_by_loss([mechanism], delta, 1, 1000.0) <= exact * 1.002


@pytest.mark.parametrize(
    ("mechanism", "k"),
    [
        (Mechanism(1.4, 1.0, 3.2e-8, 10**13), 10**9),
        (Mechanism(1e6, 1.0, 0.01, 100), 10**8),
        (Mechanism(0.01, 1.0, 0.01, 100), 50),
        (Mechanism(1.0, 1.0, 1e-6, 10**6), 20),
    ],
)
def test_extreme_plans_are_priced_without_warning_and_not_below_a_single_row(mechanism, k, recwarn):
    found = accounting.group_epsilon([mechanism], DELTA, k)
    assert (found is None or found >= epsilon([mechanism], DELTA)) and not recwarn.list


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--sigma", "nan"), "'--sigma': nan is no number"),
        (("--sigma=NaN",), "'--sigma': nan is no number"),
        (("--target-epsilon", "1e-9"), "1e-06"),
        (("--sigma", "1", "--delta", "0"), "--delta 0: give a probability"),
        (("--sigma", "1", "--delta", "nan"), "--delta nan: give a probability"),
        (("--sigma", "1", "--delta", "1e-320"), "give a probability from 1e-300"),
        (("--target-epsilon", "1", "--delta", "1"), "--delta 1: give a probability"),
    ],
)
def test_an_invalid_number_is_refused_in_one_short_line(given, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["wsi-fl", "privacy", "--n", "100", *given])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and words in said and len(said) < 160 and said.count("\n") == 1


def test_privacy_proposes_a_batch_size_and_shows_the_others_or_keeps_the_one_that_is_given():
    arguments = ["privacy", "--json", "--target-epsilon"]
    told = CliRunner().invoke(app, [*arguments, "3", "--n", "100", "--rounds", "20"])
    document = json.loads(told.stdout)
    assert document["epsilon"] <= 3.0 and document["steps"] == 20 * -(-100 // document["batch_size"])
    assert {way["batch_size"] for way in document["ways"]} > {document["batch_size"], 100}
    told = CliRunner().invoke(app, [*arguments, "2.4", "--n", "2338", "--batch-size", "32"])
    document = json.loads(told.stdout)
    assert document["batch_size"] == 32 and document["ways"] == [] and 1.3 < document["sigma"] < 1.4
