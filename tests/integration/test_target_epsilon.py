"""Tests of a target ε: batch size and noise of each site, the account at the end, and past releases."""

import json

import pytest
from conftest import REAL, interrupted_after, make_study, nightly, refused, write_store
from file_changes import edit, site_file

from wsi_fl.federation import participant
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.site import privacy_account
from wsi_fl.stages.site.privacy_account import build_terms, plan_round
from wsi_fl.stages.training.finished_runs import FinishedRun
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run, train

TARGET = "privacy.target_epsilon=3"
ROUNDS = "train.rounds=4"


@pytest.fixture(scope="module")
def uneven_sites(tmp_path_factory):
    """Three sites of unequal size, one with a separate δ."""
    study = make_study(tmp_path_factory.mktemp("target") / "study", n_sites=3)
    write_store(study, "S1", n_per_slide=60)
    edit(site_file(study, "S2"), more="delta = 1e-3\n")
    return study


@pytest.fixture
def settings(pair):
    """(pipeline, function that makes a site file with changes) of a study."""
    pipeline = pair.load_pipeline("small", [TARGET, ROUNDS, "privacy.delta=1e-5"])
    return pipeline, lambda **changes: pair.load_site("S0").model_copy(update=changes)


def run(study, *overrides, method="proxyfl"):
    return train(study, method=method, overrides=[TARGET, ROUNDS, *overrides], backend="local")


@pytest.mark.end_to_end
@pytest.mark.parametrize("method", ["proxyfl", *nightly("regular", "joint")])
def test_every_site_ends_at_the_target_and_never_above(uneven_sites, method):
    summary = run(uneven_sites, method=method)
    plans = {row["site"]: row for row in dry_run(uneven_sites, method=method, overrides=[TARGET, ROUNDS])["sites"]}
    rows = {row["site"]: row for row in summary["sites"]}
    page = write_report(uneven_sites, summary["run"]).read_text()
    for site, row in rows.items():
        assert 2.95 < row["epsilon"] <= 3.0
        lines = map(json.loads, uneven_sites.ledger_path(site).read_text().splitlines())
        of_run = [line for line in lines if line["run"].split()[0] in summary["run"] and line.get("mechanism")]
        mechanisms = [Mechanism(**line["mechanism"]) for line in of_run]
        assert len(mechanisms) == 4 and row["epsilon"] == epsilon(mechanisms, row["delta"])
        rate, steps = mechanisms[0].sample_rate, mechanisms[0].steps
        assert (1 / rate, steps) == (-(-row["n_train"] // row["batch_size"]),) * 2
        assert {one.sigma for one in mechanisms} == {row["sigma"]}
        assert all(plans[site][key] == row[key] for key in ("sigma", "batch_size"))
        assert plans[site]["epsilon"] == pytest.approx(row["epsilon"])
        kept = uneven_sites.root / summary["run"] / "sites" / site / "ledger.json"
        assert json.loads(kept.read_text())["epsilon"] == row["epsilon"]
        assert f"<td>{row['batch_size']}</td>" in page
    assert rows["S2"]["sigma"] < rows["S0"]["sigma"]  # its δ asks for less
    assert (rows["S0"]["batch_size"] == rows["S1"]["batch_size"]) is (method == "joint")
    found = FinishedRun.load(uneven_sites.root / summary["run"])  # `compare` names the target and not what it replaces
    assert found.dp and found.settings["privacy.target_epsilon"] == 3.0
    assert not {"privacy.sigma", "train.batch_size"} & found.settings.keys()


def test_sites_learn_with_the_noise_that_is_accounted_for(uneven_sites, monkeypatch):
    made, learner = [], participant.build_learner

    def noted(*args, dp, **kwargs):
        if dp is not None:
            made.append((dp.sigma, dp.batch_size))
        return learner(*args, dp=dp, **kwargs)

    monkeypatch.setattr(participant, "build_learner", noted)
    rows = dry_run(uneven_sites, method="proxyfl", overrides=[TARGET, ROUNDS])["sites"]
    assert made == [(row["sigma"], row["batch_size"]) for row in rows]


def test_the_privacy_plan_is_made_once_and_survives_a_restart(pair, monkeypatch):
    with interrupted_after(4):
        run(pair)
    monkeypatch.setattr(privacy_account, "plan_round", lambda *_, **__: pytest.fail("planned again"))
    for row in resume_run(pair, "1", backend="local")["sites"]:
        kept = RunFolder(pair.find_run("1")).site_folder(row["site"]).read_document("plan")
        assert 2.95 < row["epsilon"] <= 3.0
        assert (kept["batch_size"], kept["sigma"]) == (row["batch_size"], row["sigma"])


def test_the_smaller_of_target_and_max_epsilon_binds(settings):
    pipeline, site = settings
    whole, less, more = (plan_round(site(max_epsilon=most), pipeline, 36) for most in (None, 1.0, 9.0))
    assert 2.95 < epsilon([whole] * 4, 1e-5) <= 3.0 and more == whole
    assert 0.95 < epsilon([less] * 4, 1e-5) <= 1.0


@pytest.mark.slow
def test_past_releases_count_and_a_real_site_has_one_lifetime_budget(settings):
    pipeline, site = settings
    sums, runs = [Mechanism(8.0, 1.0, 1.0, 1)], [Mechanism(1.4, 0.7, 0.2, 60)]
    after = [plan_round(site(), pipeline, 36, spent=sums)] * 4
    assert 2.95 < epsilon([*sums, *after], 1e-5) <= 3.0
    real = site(real=True, max_epsilon=7.5)
    spending = [plan_round(real, pipeline, 36, spent=sums, past=[*sums, *runs])] * 4
    assert 7.45 < epsilon([*sums, *runs, *spending], 1e-5) <= 7.5 and epsilon([*sums, *spending], 1e-5) < 3.0
    over = site(real=True, max_epsilon=2.0)
    words = "site S0: no noise level reaches epsilon 2 on top of"
    refused(lambda: plan_round(over, pipeline, 36, past=runs), words, "max_epsilon")


def test_a_real_site_spends_at_most_the_rest_of_its_lifetime_budget(tmp_path, lone_exchange):
    study = make_study(tmp_path / "study", n_sites=1, site_extra=REAL.replace("50.0", "4.0"))
    first, second = (run(study)["sites"][0] for _ in range(2))
    assert first["epsilon"] > 2.95 > second["epsilon"]
    assert 3.95 < second["lifetime_epsilon"] <= 4.0 and second["rounds"] == 4
    refused(lambda: run(study), "site S0: no noise level reaches epsilon 4")


def test_privacy_terms_follow_the_site_file_and_the_pipeline(settings):
    pipeline, site = settings
    terms = build_terms(site(max_epsilon=2.0), pipeline, "guaranteed")
    found = (terms.delta, terms.max_epsilon, terms.lifetime, terms.guarantee)
    assert found == (1e-5, 2.0, False, "guaranteed")
    assert build_terms(site(delta=1e-4, real=True), pipeline, "none").delta == 1e-4
    assert build_terms(site(real=True), pipeline, "none").lifetime


def test_the_privacy_plan_is_kept_without_a_target_too(pair):
    summary = train(pair, method="proxyfl", overrides=["train.rounds=1"], backend="local")
    kept = RunFolder(pair.root / summary["run"]).site_folder("S0").read_document("plan")
    assert (kept["n"], kept["batch_size"], kept["sigma"], kept["steps"]) == (36, 18, 1.4, 2)
    assert {(row["batch_size"], row["sigma"]) for row in summary["sites"]} == {(18, 1.4)}
