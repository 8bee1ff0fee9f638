"""Tests of patients as privacy units: clipping, sampling, accounting, and the group ε of a run per row."""

import json
from itertools import product
from math import comb, exp, inf, log, log1p

import numpy as np
import pytest
from conftest import edited, interrupted_after, make_study, planned, refused, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import norm

from wsi_fl.data.privacy_units import patient_units, row_units
from wsi_fl.privacy import accounting
from wsi_fl.privacy.accounting import (
    WHOLE_ORDERS,
    Mechanism,
    _mixture_epsilon,
    _textbook_epsilon,
    epsilon,
    group_epsilon,
    plan_mechanism,
)
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger import PrivacyLedger, PrivacyTerms
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.training.privacy_cost import compute_privacy
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.types import WsiFlError

PATIENT = "privacy.unit=patient"


def test_patients_enter_whole_independently_and_at_their_rate():
    """23 patients of 1 to 23 rows, B = 5: q = 1/5 for each, whatever its number of rows."""
    nobodys = np.array(["a", "", ""])
    refused(lambda: patient_units(nobodys, 4, "S7"), "S7", "2 training rows have no patient")
    names = [f"p{k}" for k in range(23) for _ in range(k + 1)]
    units = patient_units(np.array(names), None, "S")
    sampler = CipherStream.from_seed(0)
    drawn = [units.draw_rows(chosen, sampler) for chosen in planned(units.n, 5, 800).draw_batches(sampler)]
    assert len(drawn) == 800 * 5
    counts = np.zeros((len(drawn), units.n))
    for at, rows in enumerate(drawn):
        which, n = np.unique(units.of_row[rows], return_counts=True)
        assert (n == np.bincount(units.of_row)[which]).all()
        counts[at, which] = 1
    spread = np.sqrt(0.2 * 0.8 / len(drawn))
    assert np.abs(counts.mean(0) - 0.2).max() < 4.5 * spread
    correlation = np.corrcoef(counts.T)[~np.eye(units.n, dtype=bool)]
    assert np.abs(correlation).max() < 6 / np.sqrt(len(drawn))


def test_a_few_of_many_rows_are_drawn_afresh_in_every_step():
    units = patient_units(np.array(["a"] * 50 + ["b"] * 3), 8, "S")
    sampler = CipherStream.from_seed(0)
    drawn = [units.draw_rows(np.array([0, 1]), sampler) for _ in range(200)]
    assert all(len(set(rows.tolist())) == 11 for rows in drawn)
    assert all(set(rows[8:].tolist()) == {50, 51, 52} for rows in drawn)
    times = np.bincount(np.concatenate([rows[:8] for rows in drawn]), minlength=50)
    assert times.min() > 10 and times.max() < 60  # 32 ± 5 each


@pytest.mark.parametrize("seed", range(3))
def test_canary_coins_change_neither_rate_nor_number_of_steps(seed):
    coins = np.random.default_rng(seed).random(9) < 0.5
    for units in (row_units(20), patient_units(np.array(["a", "b"] * 10), 3, "S")):
        planted = units.add_canaries(coins)
        assert planted.n == units.n + 9
        rows = planted.draw_rows(np.arange(planted.n), CipherStream.from_entropy())
        assert sorted(r for r in rows.tolist() if r >= 20) == list(range(20, 20 + coins.sum()))
        drawn = list(planned(planted.n, 4).draw_batches(CipherStream.from_entropy()))
        assert len(drawn) == -(-planted.n // 4)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """Two sites of 6 and 9 training patients."""
    study = make_study(tmp_path_factory.mktemp("patients") / "study", n_sites=2, n_patients=7)
    write_store(study, "S1", n_patients=10, n_per_slide=6)
    overrides = [PATIENT, "train.rounds=3", "train.batch_size=2", "privacy.max_rows=5", "privacy.clip=1.0"]
    return study, overrides, train(study, method="proxyfl", overrides=overrides, backend="local")


def hand_written_epsilon(sigma, q, steps, delta):
    """Compute the least ε over whole orders α (Canonne, Kamath and Steinke 2020, proposition 12) of the divergences by
    Mironov, Talwar and Zhang 2019: log Σ_k C(α,k)(1−q)^(α−k) q^k e^{(k²−k)/2σ²} / (α−1)."""

    def rdp(order):
        k = np.arange(order + 1)
        powers = (order - k) * log1p(-q) + k * log(q) + (k * k - k) / (2 * sigma**2)
        return logsumexp(np.log([float(comb(order, one)) for one in k]) + powers) / (order - 1)

    return min(steps * rdp(a) + log1p(-1 / a) - log(delta * a) / (a - 1) for a in range(2, 65))


def test_epsilon_of_patients_agrees_with_independent_calculations(trained_run):
    study, _, summary = trained_run
    for row, n_patients in zip(summary["sites"], (6, 9), strict=True):
        assert (row["unit"], row["n_units"]) == ("patient", n_patients)
        steps = -(-n_patients // 2)
        assert row["epsilon"] == pytest.approx(epsilon([Mechanism(1.4, 1.0, 1 / steps, 3 * steps)], 1e-5), rel=1e-9)
        lines = map(json.loads, study.ledger_path(row["site"]).read_text().splitlines())
        spent = [line for line in lines if line.get("mechanism")]
        assert [line["unit"] for line in spent] == ["patient"] * 3
        assert spent[0]["mechanism"]["sample_rate"] == 1 / steps
        whole = epsilon([Mechanism(**line["mechanism"]) for line in spent], 1e-5, WHOLE_ORDERS)
        by_hand = hand_written_epsilon(1.4, 1 / steps, 3 * steps, 1e-5)
        assert whole == pytest.approx(by_hand, rel=1e-9)
        assert row["epsilon"] <= by_hand * (1 + 1e-9)
    page = write_report(study, summary["run"]).read_text()
    assert "one patient" in page and "largest patient" not in page


def test_a_dry_run_and_a_target_count_patients(trained_run):
    study, overrides, summary = trained_run
    rows = dry_run(study, method="proxyfl", overrides=overrides)["sites"]
    for row, done in zip(rows, summary["sites"], strict=True):
        assert all(row[key] == done[key] for key in ("unit", "n_units", "n_train"))
        assert row["epsilon"] == pytest.approx(done["epsilon"])
    rows = dry_run(study, method="proxyfl", overrides=[*overrides, "privacy.target_epsilon=6"])["sites"]
    for row in rows:
        assert 5.8 < row["epsilon"] <= 6 and 1 <= row["batch_size"] <= row["n_units"] < row["n_train"]


def test_patients_of_two_sites_with_the_same_name_are_distinct(pair):
    for site in ("S0", "S1"):
        with edited(pair.store_path(site)) as file:
            file["patient"][:] = [name[2:] for name in file["patient"][:]]
    rows = dry_run(pair, method="joint", overrides=[PATIENT])["sites"]
    assert [row["n_units"] for row in rows] == [6, 6]


def test_a_killed_run_resumes_with_the_same_patients_and_canaries(pair):
    settings = [PATIENT, "train.rounds=3", "train.batch_size=2", "audit.canaries=12", "privacy.max_rows=4"]
    with interrupted_after(4):
        train(pair, method="proxyfl", overrides=settings, backend="local")
    planted = {file: file.read_text() for file in pair.runs_path.glob("0*/sites/*/canaries.json")}
    assert len(planted) == 2
    summary = resume_run(pair, "1", backend="local")
    assert planted == {file: file.read_text() for file in planted}
    for row in summary["sites"]:
        assert (row["n_units"], row["canaries"], row["rounds"]) == (15, 12, 3)
        assert row["epsilon"] == pytest.approx(epsilon([plan_mechanism(15, 2, 3, 1.4, 0.7)], 1e-5))


def test_a_ledger_never_mixes_privacy_units(tmp_path):
    def account(unit, **terms):
        known = {"site": "C1", "run": f"run {unit}", "terms": PrivacyTerms(1e-5, unit=unit, **terms)}
        return PrivacyLedger(tmp_path / "C1.jsonl", **known)

    one, real = plan_mechanism(100, 10, 1, 1.4, 1.0), {"max_epsilon": 5.0, "lifetime": True}
    account("row").record(1, one)
    simulated = account("patient", max_epsilon=5.0)
    simulated.record(1, one)
    assert simulated.epsilon() == epsilon([one], 1e-5) and simulated.epsilon(lifetime=True) is None
    assert account("patient", **real).epsilon(lifetime=True) is not None  # simulated lines bind no hospital
    account("row", **real).record(1, one)
    refused(lambda: account("patient", **real), "per row, this run per patient", error=WsiFlError)


def test_a_group_of_one_costs_what_a_row_costs():
    for mechanism in (plan_mechanism(600, 32, 20, 1.0, 1.0), Mechanism(2.0, 1.0, 1.0, 30)):
        own = epsilon([mechanism], 1e-5)
        assert own <= _mixture_epsilon([mechanism], 1e-5, 1) <= 1.1 * own  # by Rényi divergences, never less
        assert group_epsilon([mechanism], 1e-5, 1) == own


def test_group_epsilon_of_full_batches_is_that_of_a_longer_vector():
    """Without sampling k rows move the sum by k·C: the Gaussian mechanism with σ / k."""
    group, longer = [Mechanism(8.0, 1.0, 1.0, 5)], [Mechanism(2.0, 1.0, 1.0, 5)]
    assert group_epsilon(group, 1e-5, 4) == epsilon(longer, 1e-5)
    assert epsilon(longer, 1e-5) <= _mixture_epsilon(group, 1e-5, 4) <= 1.1 * epsilon(longer, 1e-5)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.8, 5.0), st.floats(0.01, 0.6), st.integers(2, 6), st.floats(1e-6, 1e-3), st.integers(0, 99))
def test_no_gradients_of_a_group_exceed_the_bound(sigma, rate, k, delta, seed):
    """One step on a grid in the plane: the exact hockey-stick divergence of k vectors stays below δ at the bound."""
    bound = _mixture_epsilon([Mechanism(sigma, 1.0, rate, 1)], delta, k)
    rng = np.random.default_rng(seed)
    angles = rng.uniform(0, 2 * np.pi * rng.choice([0, 0.1, 1]), k)
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    side = np.linspace(-6 * sigma - k, 6 * sigma + k, 241)
    bell = norm.pdf(side, 0, sigma)
    other = np.outer(bell, bell)
    one = np.zeros_like(other)
    for inside in map(np.array, product([False, True], repeat=k)):
        x, y = (norm.pdf(side, at, sigma) for at in vectors[inside].sum(0))
        one += rate ** inside.sum() * (1 - rate) ** (k - inside.sum()) * np.outer(y, x)
    cell = (side[1] - side[0]) ** 2
    for p, q in ((one, other), (other, one)):
        assert np.maximum(p - exp(bound) * q, 0).sum() * cell <= delta * (1 + 1e-3)


@pytest.mark.slow
def test_group_epsilon_grows_with_the_group_and_is_none_without_a_useful_bound(monkeypatch):
    mechanism = plan_mechanism(2338, 32, 30, 1.4, 0.7)
    values = [group_epsilon([mechanism], 1e-5, k) for k in (1, 2, 5, 20, 60)]
    assert values == sorted(values) and values[1] < _textbook_epsilon([mechanism], 1e-5, 2) < inf
    assert group_epsilon([Mechanism(0.0, 1.0, 0.1, 3)], 1e-5, 2) is None
    refused(lambda: group_epsilon([mechanism], 1e-5, 0), "at least one row")
    asked, original = [], accounting._group_divergences
    monkeypatch.setattr(accounting, "_group_divergences", lambda *of: asked.append(of[2]) or original(*of))
    assert group_epsilon([mechanism], 1e-5, 20_000) is None and max(asked) < 5000


def test_textbook_bound_keeps_delta():
    """At half and at twice the size of a step of the search: k·ε(δ') with δ' grown to no more than δ."""
    mechanism, delta, k = Mechanism(4.0, 1.0, 0.05, 50), 1e-4, 3
    value = _textbook_epsilon([mechanism], delta, k)
    steps = (delta * 10 ** (-power / 4) for power in range(200))
    smaller = next(one for one in steps if value == pytest.approx(k * epsilon([mechanism], one)))
    e = value / k
    assert smaller * (exp(k * e) - 1) / (exp(e) - 1) <= delta
    assert value > k * epsilon([mechanism], delta)


def test_a_run_per_row_reports_the_guarantee_of_its_largest_patient(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    settings = ["privacy.sigma=3.0", "train.rounds=3", "train.batch_size=8"]
    summary = train(study, method="regular", overrides=settings, backend="local")
    (row,) = summary["sites"]
    found = row["group"]
    assert found["rows"] == 12 and found["delta"] == row["delta"]
    assert found["epsilon"] == group_epsilon([plan_mechanism(36, 8, 3, 3.0, 0.7)], 1e-5, 12) > row["epsilon"]
    kept = json.loads((study.root / summary["run"] / "sites" / "S0" / "ledger.json").read_text())
    assert kept["group"] == found
    assert "the 12 rows of its largest patient" in write_report(study, summary["run"]).read_text()
    plans = {"n": 36, "batch_size": 8, "epochs": 3, "delta": 1e-5, "sigma": 3.0, "target_epsilon": None}
    assert compute_privacy(**plans, group=12)["group"] == {"rows": 12, "epsilon": pytest.approx(found["epsilon"])}
    assert compute_privacy(**plans)["group"] is None
