"""A target ε: every site's own batch size and noise, an account that ends at the target, and what counts towards it."""

import json

import pytest
from conftest import interrupted_after, make_study, nightly, refused, write_store

from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.compare_runs import Run
from wsi_fl.stages.answers.report import report
from wsi_fl.stages.site import account
from wsi_fl.stages.site.account import planned_round, terms_of
from wsi_fl.stages.training.plan import dry_run
from wsi_fl.stages.training.train import resume, train

TARGET = "privacy.target_epsilon=3"
ROUNDS = "train.rounds=4"


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Three sites of unlike size, one with a δ of its own."""
    study = make_study(tmp_path_factory.mktemp("target") / "study", n_sites=3)
    write_store(study, "S1", n_per_slide=60)
    file = study.root / "sites" / "S2.toml"
    file.write_text(file.read_text() + "delta = 1e-3\n")
    return study


def run(study, *overrides, method="proxyfl"):
    return train(study, method=method, overrides=[TARGET, ROUNDS, *overrides], backend="local")


def ledger(study, path, site):
    return json.loads((study.root / path / "sites" / site / "ledger.json").read_text())


@pytest.mark.story
@pytest.mark.parametrize("method", ["proxyfl", *nightly("regular", "joint")])
def test_every_site_ends_at_the_target_and_never_above(uneven, method):
    summary = run(uneven, method=method)
    plans = {row["site"]: row for row in dry_run(uneven, method=method, overrides=[TARGET, ROUNDS])["sites"]}
    rows = {row["site"]: row for row in summary["sites"]}
    for site, row in rows.items():
        assert 2.95 < row["epsilon"] <= 3.0
        lines = [json.loads(line) for line in uneven.ledger(site).read_text().splitlines()]
        mechanisms = [
            Mechanism(**line["mechanism"])
            for line in lines
            if line["run"].split()[0] in summary["run"] and line.get("mechanism")
        ]
        assert len(mechanisms) == 4
        assert row["epsilon"] == epsilon(mechanisms, row["delta"])
        rate, steps = mechanisms[0].sample_rate, mechanisms[0].steps
        assert (1 / rate, steps) == (-(-row["n_train"] // row["batch_size"]),) * 2
        assert {one.sigma for one in mechanisms} == {row["sigma"]}
        assert (plans[site]["sigma"], plans[site]["batch_size"]) == (row["sigma"], row["batch_size"])
        assert plans[site]["epsilon"] == pytest.approx(row["epsilon"])
        assert ledger(uneven, summary["run"], site)["epsilon"] == row["epsilon"]
    assert rows["S2"]["sigma"] < rows["S0"]["sigma"]  # its δ asks for less
    assert (rows["S0"]["batch_size"] == rows["S1"]["batch_size"]) is (method == "joint")
    assert all(f"<td>{row['batch_size']}</td>" in _page(uneven, summary) for row in rows.values())


def _page(study, summary):
    return report(study, summary["run"]).read_text()


def test_sites_learn_with_the_noise_that_is_accounted_for(uneven, monkeypatch):
    made = {}
    from wsi_fl.stages.training import workshop

    learner = workshop.Learner

    def noted(model, *, dp, **kwargs):
        if dp is not None:
            made[len(made)] = (dp.sigma, dp.batch_size)
        return learner(model, dp=dp, **kwargs)

    monkeypatch.setattr(workshop, "Learner", noted)
    rows = dry_run(uneven, method="proxyfl", overrides=[TARGET, ROUNDS])["sites"]
    assert list(made.values()) == [(row["sigma"], row["batch_size"]) for row in rows]


def test_the_plan_is_made_once_and_survives_a_restart(study, monkeypatch):
    with interrupted_after(6):
        run(study)
    monkeypatch.setattr(account, "planned_round", lambda *_, **__: pytest.fail("planned again"))
    broken = sorted(path.name for path in study.runs.glob("0*"))[-1]
    for row in resume(study, broken, backend="local")["sites"]:
        assert 2.95 < row["epsilon"] <= 3.0
        kept = json.loads((study.runs / broken / "sites" / row["site"] / "plan.json").read_text())
        assert (kept["batch_size"], kept["sigma"]) == (row["batch_size"], row["sigma"])


def site_of(study, **changes):
    return study.site("S0").model_copy(update=changes)


def test_the_smaller_of_target_and_max_epsilon_binds(study):
    pipeline = study.pipeline("small", [TARGET, ROUNDS])

    def total(site, **before):
        plan = planned_round(site, pipeline, 36, **before)
        return [plan] * 4, plan

    whole, _ = total(site_of(study))
    assert 2.95 < epsilon(whole, 1e-5) <= 3.0
    less, _ = total(site_of(study, max_epsilon=1.0))
    assert 0.95 < epsilon(less, 1e-5) <= 1.0
    assert total(site_of(study, max_epsilon=9.0))[1] == total(site_of(study))[1]


@pytest.mark.slow
def test_what_was_spent_before_counts_and_a_real_site_has_one_life(study):
    pipeline = study.pipeline("small", [TARGET, ROUNDS])
    sums, runs = [Mechanism(8.0, 1.0, 1.0, 1)], [Mechanism(1.4, 0.7, 0.2, 60)]
    after = [planned_round(site_of(study), pipeline, 36, spent=sums)] * 4
    assert 2.95 < epsilon([*sums, *after], 1e-5) <= 3.0
    real = site_of(study, real=True, max_epsilon=7.5)
    spending = planned_round(real, pipeline, 36, spent=sums, past=[*sums, *runs])
    assert 7.45 < epsilon([*sums, *runs, *[spending] * 4], 1e-5) <= 7.5
    assert epsilon([*sums, *[spending] * 4], 1e-5) < 3.0
    refused(
        lambda: planned_round(site_of(study, real=True, max_epsilon=2.0), pipeline, 36, past=runs),
        "site S0: no noise level reaches epsilon 2 on top of",
        "max_epsilon",
    )


def test_a_real_site_spends_the_rest_of_its_life_and_no_more(tmp_path):
    study = make_study(
        tmp_path / "study", n_sites=1, site_extra="real = true\nmax_epsilon = 4.0\ndelta = 1e-5"
    )
    first = run(study)["sites"][0]
    second = run(study)["sites"][0]
    assert first["epsilon"] > 2.95 > second["epsilon"]
    assert 3.95 < second["lifetime_epsilon"] <= 4.0
    assert second["rounds"] == 4
    refused(lambda: run(study), "site S0: no noise level reaches epsilon 4")


def test_terms_say_what_a_site_file_and_a_pipeline_say(study):
    pipeline = study.pipeline("small", ["privacy.delta=1e-6"])
    terms = terms_of(site_of(study, max_epsilon=2.0), pipeline, "guaranteed")
    found = (terms.delta, terms.max_epsilon, terms.lifetime, terms.guarantee)
    assert found == (1e-6, 2.0, False, "guaranteed")
    assert terms_of(site_of(study, delta=1e-4, real=True), pipeline, "none").delta == 1e-4
    assert terms_of(site_of(study, real=True), pipeline, "none").lifetime


def test_compare_names_the_target_and_not_what_it_replaces(study):
    runs = [Run.of(study.root / run(study, "privacy.sigma=0")["run"])]
    assert runs[0].dp
    assert runs[0].settings["privacy.target_epsilon"] == 3.0
    assert not {"privacy.sigma", "train.batch_size"} & runs[0].settings.keys()


def test_the_plan_is_kept_without_a_target_too(study):
    summary = train(study, method="proxyfl", overrides=["train.rounds=1"], backend="local")
    kept = RunFolder(study.root / summary["run"]).site("S0").kept("plan")
    assert (kept["n"], kept["batch_size"], kept["sigma"], kept["steps"]) == (36, 18, 1.4, 2)
    assert {(row["batch_size"], row["sigma"]) for row in summary["sites"]} == {(18, 1.4)}
