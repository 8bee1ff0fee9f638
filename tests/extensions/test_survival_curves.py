"""Kaplan–Meier curves from released counts: scikit-survival without noise, coverage with it, one charge of ε."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import refused
from test_prediction_targets import GRADE, OPEN, SURVIVAL, make, sksurv
from test_released_statistics import rewritten
from training_runs import dying

from wsi_fl.data.survival import kaplan_meier
from wsi_fl.data.tasks import SurvivalTask, target_columns
from wsi_fl.oneshot import release_statistics as stage
from wsi_fl.oneshot.class_statistics import NoisyStatistics, explain_invalid_statistics
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.oneshot.survival_curves import draw_survival, estimate_curve, render_survival_lines
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.types import WsiFlError

ENDS = (6.0, 12.0, 24.0, 36.0)
COUNTS = [*SURVIVAL, "model.projection=0"]


def draw_patients(n, seed):
    """Return times with a hazard of 1/30 a month, censored between 10 and 60 months."""
    rng = np.random.default_rng(seed)
    time, left = rng.exponential(30, n), rng.uniform(10, 60, n)
    return np.stack([np.minimum(time, left), time < left], axis=1)


def count(truth, ends=ENDS):
    columns = target_columns(SurvivalTask(ends), torch.from_numpy(truth))
    return torch.bincount(columns, minlength=2 * len(ends) + 1).double().numpy()


def share_at_ends(truth):
    times, share = kaplan_meier(truth)
    return share[np.searchsorted(times, ENDS, "right") - 1]


def test_without_noise_a_curve_is_scikit_survivals_where_times_are_ends_of_intervals():
    from sksurv.nonparametric import kaplan_meier_estimator

    truth = draw_patients(200, 0)
    truth[:, 0] = np.array(ENDS)[np.searchsorted(ENDS, truth[:, 0]).clip(max=3)]
    found = estimate_curve(count(truth), 0.0)
    _, share, (low, _) = kaplan_meier_estimator(truth[:, 1] > 0.5, truth[:, 0], conf_type="log-log")
    np.testing.assert_allclose(found.share, share)
    assert not found.noise_sd.any() and found.at_risk[0] == 200
    deviation = np.log(np.log(low) / np.log(share)) / 1.959964 * np.abs(np.log(share)) * share  # by Greenwood's formula
    np.testing.assert_allclose(found.high - found.share, 1.96 * deviation, rtol=1e-4)


def test_without_noise_a_curve_is_near_scikit_survivals_for_any_times():
    truth = draw_patients(3000, 1)
    np.testing.assert_allclose(estimate_curve(count(truth), 0.0).share, share_at_ends(truth), atol=0.015)


def test_the_interval_covers_chance_and_noise_and_its_noise_is_what_noise_adds():
    rng, true_share, found = np.random.default_rng(0), np.exp(-np.array(ENDS) / 30), []
    for seed in range(300):
        counts = count(draw_patients(400, seed))
        noisy = estimate_curve(counts + rng.normal(0, 3.73, len(counts)), 3.73**2)
        found.append([noisy.share - estimate_curve(counts, 0.0).share, noisy.noise_sd, noisy.low, noisy.high])
    added, noise_sd, low, high = np.array(found).transpose(1, 0, 2)
    covered = ((low <= true_share) & (true_share <= high)).mean(0)
    assert (covered > 0.91).all() and (covered < 0.99).all(), covered
    np.testing.assert_allclose(added.std(0), noise_sd.mean(0), rtol=0.15)


def test_a_curve_ends_where_noise_hides_who_is_at_risk():
    counts = np.array([4.0, 2, 1, 1, 0, 8, 10, 10, 10])
    exact, noisy = estimate_curve(counts, 0.0), estimate_curve(counts, 7.0**2)
    assert exact.share.notna().all() and noisy.share.notna().tolist() == [True, True, False, False]
    assert estimate_curve(counts - 50, 4.0).share.isna().all()
    falling = estimate_curve(np.array([-3.0, 9, -2, 4, 0, 0, 0, 0, 60]), 2.0)
    assert (np.diff(falling.share) <= 0).all() and falling.share[0] == 1
    for noise_variance in (0.0, 2.0):
        nobody_left = estimate_curve(np.array([20.0, 20, 0, 0, 0]), noise_variance)
        assert nobody_left.share[0] == 0.5 and np.isnan(nobody_left.share[1]) and np.isnan(nobody_left.at_risk[1])


def test_a_curve_ends_where_follow_up_ends_before_the_middle_of_an_interval():
    rng, ends = np.random.default_rng(0), (12.0, 36.0, 60.0)
    time, left = rng.exponential(60, 400), rng.uniform(6, 48, 400)
    truth = np.stack([np.minimum(time, left), time < left], axis=1)
    for noise_sd in (0.0, 3.73):
        curve = estimate_curve(count(truth, ends) + rng.normal(0, noise_sd, 7), noise_sd**2)
        assert curve.share.notna().tolist() == [True, True, False]
        np.testing.assert_allclose(curve.share[:2], np.exp(-np.array(ends[:2]) / 60), atol=0.1)


@pytest.mark.parametrize(("ends", "expected"), [((24.0, 48.0), 0.77), ((12.0, 24.0, 36.0), 0.95)])
def test_heavy_censoring_within_an_interval_costs_the_coverage_that_the_guide_states(ends, expected):
    rng, n_covered, n_draws = np.random.default_rng(0), 0, 200
    for _ in range(n_draws):
        time, left = rng.exponential(60, 2000), rng.uniform(0, 40, 2000)
        last = estimate_curve(count(np.stack([np.minimum(time, left), time < left], axis=1), ends), 0.0).iloc[-1]
        n_covered += last.low <= np.exp(-ends[-1] / 60) <= last.high
    assert n_covered / n_draws == pytest.approx(expected, abs=0.07)


def test_a_patient_adds_one_to_one_count_and_forged_counts_are_refused():
    head, dp = SharedHead(4, 8, projection=0, kind="survival"), NoisyStatistics(1.0, 1.0, 40, "patient")
    columns, x = target_columns(SurvivalTask(ENDS), torch.from_numpy(draw_patients(40, 2))), torch.randn(40, 8)
    columns[20:30] = columns[20]
    patient = torch.arange(40)
    patient[20:30] = 20  # ten slides of one
    packed = dp.clip_statistics(head, head.embed_rows(x), columns, patient)
    counts = head.unpack_statistics(packed)[1]
    torch.testing.assert_close(counts, torch.bincount(columns[np.r_[:21, 30:40]], minlength=9).double())
    assert head.layout.count_scale == 1 and float(packed.norm()) <= 31
    forged = torch.cat([packed * 9, torch.zeros(9)])
    assert "units" in explain_invalid_statistics(head.layout, forged, 31, 0.0)
    assert not explain_invalid_statistics(head.layout, torch.cat([packed, torch.zeros(9)]), 31, 0.0)


@pytest.fixture
def study(tmp_path):
    return make(tmp_path / "study", n_sites=3)


def release(study, *overrides, site=None, **options):
    return release_statistics(study, site=site, overrides=overrides, **options)["sites"]


def test_every_hospital_and_all_have_a_curve_of_their_training_patients(study):
    assert {row["n"] for row in release(study, *COUNTS, OPEN)} == {16}
    document = draw_survival(study, study.root / "curves.png")
    tables = [pd.read_csv(study.root / f"S{k}.csv") for k in range(3)]
    truths = [np.stack([t.months, t.dead == "yes"], 1)[np.arange(24) % 3 > 0].astype(float) for t in tables]
    for row, truth in zip(document["curves"], [*truths, np.concatenate(truths)], strict=True):
        expected = estimate_curve(count(truth), 0.0).share
        assert row["n"] == len(truth) and row["count_noise_sd"] == 0 and row["epsilon"] is None
        np.testing.assert_allclose(np.array(row["share"], float), expected, atol=1e-5)
    assert [row["site"] for row in document["curves"]] == ["S0", "S1", "S2", "all"]
    assert (study.root / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_count_validation_patients_or_tell_how_many_they_count(study):
    release(study, *COUNTS, OPEN, "train.val_fraction=0.4", site="S0")
    release(study, *SURVIVAL, "model.projection=8", OPEN, "train.val_fraction=0.4", site="S1")
    document = draw_survival(study, study.root / "curves.png")
    curves = {row["site"]: (row["counted"], row["n"]) for row in document["curves"]}
    assert curves["S0"] == (16, 16) and curves["S1"][0] < 12 and curves["S1"][1] == 16
    table, _ = render_survival_lines(document)
    assert [row[1] for row in table.rows] == [f"{counted} of {n}" for counted, n in curves.values()]


def test_the_command_shows_epsilon_per_patient_and_its_noise(study, wsi_fl):
    release(study, *COUNTS, "privacy.target_epsilon=1")
    done = wsi_fl("survival", "--json", cwd=study.root)
    document = json.loads(done.stdout)
    assert [row["epsilon"] for row in document["curves"]] == [*[pytest.approx(1, abs=1e-3)] * 3, None]
    for row, n_sites in zip(document["curves"], (1, 1, 1, 3), strict=True):
        assert row["count_noise_sd"] == pytest.approx(3.73 * n_sites**0.5, rel=0.01)
    shown = wsi_fl("survival", cwd=study.root).stderr
    assert "ε = 1.00, counts ±3.7" in shown and "counts ±6.5" in shown and "survival.png" in shown


def test_counts_of_statistics_with_features_are_noisier_at_the_same_cost(study):
    release(study, *SURVIVAL, "model.projection=8", "privacy.target_epsilon=1")
    row = draw_survival(study, study.root / "curves.png")["curves"][0]
    assert row["epsilon"] == pytest.approx(1, abs=1e-3) and row["count_noise_sd"] == pytest.approx(13.0, rel=0.01)


@pytest.mark.parametrize(("place", "nth"), [("ledger", 1), ("copy", 1), ("sending", 1), ("file", 2)], ids=str)
def test_a_kill_at_any_moment_costs_epsilon_once(study, place, nth):
    module = {"ledger": (PrivacyLedger, "release"), "sending": (PrivacyLedger, "record_transmission")}
    with dying(*module.get(place, (stage, "write_statistics")), nth):
        release(study, *COUNTS, "privacy.sigma=4", site="S0")
    (row,) = release(study, *COUNTS, "privacy.sigma=4", site="S0")
    once = epsilon([Mechanism(4.0, 1.0, 1.0, 1)], 1e-5)
    assert row["epsilon"] == pytest.approx(once)
    (again,) = release(study, *COUNTS, "privacy.sigma=4", site="S0")
    assert not again["spent"] and again["epsilon"] == pytest.approx(once) and again["digest"] == row["digest"]
    draw_survival(study, study.root / "curves.png")  # spends nothing
    assert release(study, *COUNTS, "privacy.sigma=4", site="S0")[0]["epsilon"] == pytest.approx(once)


def test_curves_of_other_targets_or_without_statistics_are_refused(study):
    png = study.root / "curves.png"
    refused(lambda: draw_survival(study, png), "wsi-fl statistics", error=WsiFlError)
    release(study, *GRADE, OPEN, site="S0")
    refused(lambda: draw_survival(study, png), "statistics of S0: curves need one target of all, with time")
    release(study, *COUNTS, OPEN, site="S1")
    refused(lambda: draw_survival(study, png), "statistics of S0, S1: curves need one target of all")
    study.release_path("S0").unlink()
    rewritten(study.release_path("S1"), n=3)
    refused(lambda: draw_survival(study, png), "statistics of site S1: no statistics of 3 patients", error=WsiFlError)
    assert not png.exists()


@pytest.mark.parametrize(
    "forged",
    [{"n_features": 10**13}, {"task": '{"time": "months", "event": "dead", "intervals": [1, 2]}'}, {"n": 10**400}],
    ids=str,
)
def test_forged_statistics_end_in_a_line(study, forged):
    release(study, *COUNTS, OPEN, site="S0")
    rewritten(study.release_path("S0"), **forged)
    if "n_features" in forged:  # which counts do not depend on
        assert draw_survival(study, study.root / "curves.png")["curves"]
        return
    with pytest.raises(WsiFlError, match=r"^[^\n]*statistics[^\n]*$"):
        draw_survival(study, study.root / "curves.png")


def test_counts_of_rows_of_which_no_curve_can_be_drawn_are_refused_before_they_cost(study):
    words = "model.projection = 0 counts patients", "privacy.unit = 'patient'"
    refused(lambda: release(study, *COUNTS, "privacy.unit=row", "privacy.target_epsilon=1", site="S0"), *words)
    assert not list((study.root / "ledgers").glob("*")) and not study.release_path("S0").exists()


def test_counts_without_features_give_no_model_and_are_of_survival(study):
    refused(lambda: dry_run(study, method="oneshot", overrides=COUNTS), "model.projection = 0", "gives no model")
    assert release_statistics(study, site="S0", overrides=[*COUNTS, OPEN])["next"] == ["wsi-fl survival"]
    refused(lambda: release(study, *GRADE, "model.projection=0"), "model.projection = 0 is for survival curves")


assert sksurv
