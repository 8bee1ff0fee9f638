"""Tests of the budget of a real hospital against edited settings, moved folders, backups and renamed runs."""

import os
import shutil
from dataclasses import fields, replace
from hashlib import sha256
from math import isclose
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import interrupted_after, planned, refused
from conftest import larger_study as make_study
from training_runs import dying, trained

from wsi_fl.federation import loop, participant
from wsi_fl.learning.local_training import DPSettings
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.ledger import PrivacyLedger, PrivacyTerms
from wsi_fl.privacy.privacy_plan import PrivacyPlan, plan_of_round, require_plan
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.site import privacy_account as site_account
from wsi_fl.stages.site.privacy_account import count_affordable
from wsi_fl.stages.training.train import resume_run
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_json, write_sealed
from wsi_fl.types import WsiFlError

ROUND = Mechanism(sigma=1.4, clip=0.7, sample_rate=0.1, steps=10)
pytestmark = pytest.mark.usefixtures("lone_exchange")
HOSPITAL = "real = true\nmax_epsilon = 3.0\ndelta = 1e-5"


@pytest.fixture
def hospital(tmp_path):
    return make_study(tmp_path / "hospital", n_sites=1, site_extra=HOSPITAL)


@pytest.fixture(scope="module")
def kept_hospital(tmp_path_factory):
    """A hospital after one run, with its user state, and a copy of both."""
    place = tmp_path_factory.mktemp("kept") / "place"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(place / "state"))
        patch.setattr("wsi_fl.stages.training.checks._require_partner", lambda context: None)
        run(make_study(place / "hospital", n_sites=1, site_extra=HOSPITAL))
    return place, shutil.copytree(place, place.with_name("copy"))


@pytest.fixture
def spent(kept_hospital, monkeypatch):
    """A hospital in the same place after the same run."""
    place, copy = kept_hospital
    shutil.rmtree(place)
    shutil.copytree(copy, place)
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    return Study(place / "hospital")


def run(study, *overrides, method="proxyfl"):
    return trained(study, method, "train.rounds=2", "privacy.sigma=4", *overrides)


def interrupt_run(study, rounds, *overrides, **given):
    """Interrupt a run in a round and return its folder."""
    with interrupted_after(rounds):
        run(study, *overrides, **given)
    return next(study.runs_path.glob("0*"))


def resume_path(study, path):
    return resume_run(study, path.name, backend="local")


def row(summary):
    return summary["sites"][0]


def rewrite(study, before, after, site="S0"):
    path = study.root / "sites" / f"{site}.toml"
    path.write_text(path.read_text().replace(before, after))


LATER = "ledger has later rounds"


def test_a_larger_delta_does_not_make_past_releases_cheaper(spent):
    again = row(run(spent, "privacy.delta=0.01"))
    assert again["delta"] == 1e-5  # the hospital's own
    assert again["lifetime_epsilon"] > again["epsilon"]
    rewrite(spent, "1e-5", "0.01")
    refused(lambda: run(spent), "δ is part of the budget", "delta = 1e-05 or less", error=WsiFlError)


def test_a_real_hospital_refuses_a_delta_that_allows_publishing_a_row(hospital):
    rewrite(hospital, "1e-5", "0.03")
    refused(lambda: run(hospital), "site S0: delta = 0.03 would allow publishing one of 36 rows", "below 0.028")


def test_a_run_killed_before_sending_and_restored_to_an_earlier_state_cannot_resume(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    with dying(PrivacyLedger, "record_transmission", 3):  # of round 2, after its checkpoint
        run(study, "train.rounds=4")
    path = next(study.runs_path.glob("0*"))
    kept = path / "sites" / "S0" / "state"
    shutil.copytree(kept, tmp_path / "backup")
    with interrupted_after(3):  # round 2 has been sent again
        resume_path(study, path)
    shutil.rmtree(kept)
    shutil.copytree(tmp_path / "backup", kept)
    (kept / "round_00002.safetensors").unlink()
    refused(lambda: resume_path(study, path), LATER, error=WsiFlError)


def test_a_run_with_edited_settings_plan_or_site_file_does_not_resume(hospital):
    path = interrupt_run(hospital, 2, "privacy.target_epsilon=2", "train.rounds=4")
    config, site, kept = path / "config.toml", path / "sites" / "S0" / "site.toml", path / "sites" / "S0" / "plan.json"
    before, said, plan, manifest = config.read_text(), site.read_text(), *map(read_json, (kept, path / "manifest.json"))
    changed = "privacy plan of this run was changed"
    for old, new, words in (
        ("epochs_per_round = 1", "epochs_per_round = 10", "steps was"),
        ("canaries = 0", "canaries = 30", "n was"),
    ):
        config.write_text(before.replace(old, new))
        refused(lambda: resume_path(hospital, path), "changed since the run began")
        digest = sha256(config.read_bytes()).hexdigest()
        write_sealed(path / "manifest.json", manifest | {"config_sha256": digest})
        refused(lambda: resume_path(hospital, path), changed, words)
        write_sealed(path / "manifest.json", manifest)
    config.write_text(before)
    site.write_text(said.replace("max_epsilon = 3.0", "max_epsilon = 2.9"))
    refused(lambda: resume_path(hospital, path), "is not the one it began with", "site.toml", error=WsiFlError)
    site.write_text(said)
    write_sealed(kept, plan | {"sigma": plan["sigma"] / 2})  # whoever edits it on purpose
    refused(lambda: resume_path(hospital, path), changed, "sigma was", error=WsiFlError)
    kept.unlink()
    assert row(resume_path(hospital, path))["epsilon"] <= 2.0  # with the plan that the ledger knows
    assert read_json(kept) == plan


OTHER = {
    **{"sigma": 1.3, "clip": 0.8, "sample_rate": 0.25, "steps": 10, "unit": "patient", "n": 37},
    **{"batch_size": 9, "delta": 1e-7, "mode": "paper", "accountant": "pld"},
}


@pytest.mark.parametrize("field", [f.name for f in fields(PrivacyPlan)])
def test_a_round_that_differs_from_its_plan_in_one_field_is_refused(field):
    plan = planned(36, 8, sigma=1.4, clip=0.7)
    given = {"n": 36, "steps": plan.steps, "delta": plan.delta, "mode": "strict"}
    trainer = SimpleNamespace(sigma=1.4, clip=0.7, batch_size=8, unit=plan.unit)
    require_plan(plan, trainer, **given)
    with pytest.raises(WsiFlError) as caught:
        require_plan(replace(plan, **{field: OTHER[field]}), trainer, **given)
    assert field in str(caught.value) or "privacy plan" in str(caught.value)


@pytest.mark.parametrize("what", ["sigma", "clip", "batch_size"])
def test_a_modified_trainer_takes_no_step(hospital, monkeypatch, what):
    def changed(*values):
        settings = DPSettings(*values)
        return replace(settings, **{what: 7 if what == "batch_size" else 9.0})

    monkeypatch.setattr(participant, "DPSettings", changed)
    refused(lambda: run(hospital), "differs from its privacy plan", what, error=WsiFlError)
    assert not hospital.ledger_path("S0").exists()


@pytest.mark.parametrize("missing", ["max_epsilon = 3.0", "delta = 1e-5"])
def test_a_real_hospital_without_a_budget_spends_nothing(hospital, missing):
    rewrite(hospital, missing, "")
    refused(lambda: run(hospital), "sites/S0.toml", missing.split()[0])
    assert not hospital.ledger_path("S0").exists()


def rewritten(change):
    def do(path):
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return do


DAMAGE = {
    "emptied": rewritten(lambda lines: []),
    "deleted": lambda path: path.unlink(),
    "shortened": rewritten(lambda lines: lines[:1]),
    "without a line": rewritten(lambda lines: lines[1:]),
    "edited": rewritten(lambda lines: [one.replace('"sigma": 4.0', '"sigma": 9.4') for one in lines]),
    "last sending gone": rewritten(lambda lines: lines[:-1]),
}


def test_an_outdated_ledger_is_refused_by_runs_and_by_ledger_heads_on_their_own(spent):
    path = spent.ledger_path("S0")
    whole = path.read_text()
    for words in (("ledgers/S0.jsonl", "it is the site's budget"), ("S0.jsonl",)):
        for damage in DAMAGE.values():
            damage(path)
            refused(lambda: run(spent), *words, error=WsiFlError)
            path.write_text(whole)
        if spent.runs_path.exists():
            shutil.rmtree(spent.runs_path)
    run(spent)


def test_runs_prove_the_spent_budget_where_ledger_heads_are_lost(spent):
    for place in (spent.root, Path(os.environ["XDG_STATE_HOME"])):
        for head in place.rglob("*.head.json"):
            head.unlink()
    DAMAGE["shortened"](spent.ledger_path("S0"))
    refused(lambda: run(spent), "lacks rounds of runs/00001-proxyfl-small, which reached round 2")


def test_two_studies_that_name_one_ledger_share_one_budget(tmp_path):
    where = f'{HOSPITAL}\nledger = "{tmp_path}/budget/S0.jsonl"'
    a, b = (make_study(tmp_path / name, n_sites=1, site_extra=where) for name in "ab")
    first, second = row(run(a)), row(run(b))
    assert second["epsilon"] == first["epsilon"]
    both = [Mechanism(4.0, 0.7, 0.2, 10)] * 2
    assert isclose(second["lifetime_epsilon"], epsilon(both, 1e-5))
    refused(lambda: run(a, "train.rounds=30", "privacy.sigma=0.5"), "max_epsilon = 3 is enough for 0 of 30")


def test_a_ledger_named_later_must_be_the_existing_one(spent, tmp_path):
    rewrite(spent, HOSPITAL, f'{HOSPITAL}\nledger = "{tmp_path}/elsewhere.jsonl"')
    refused(lambda: run(spent), "elsewhere.jsonl is missing")
    second = make_study(tmp_path / "second", n_sites=1, site_extra=HOSPITAL)
    words = ("ledgers/S0.jsonl: this is not", "was at ", "name that file as `ledger`", "another name")
    refused(lambda: run(second), *words, error=WsiFlError)
    shutil.copy(spent.root / "ledgers" / "S0.jsonl", tmp_path / "elsewhere.jsonl")
    assert row(run(spent))["lifetime_epsilon"] > 1


@pytest.mark.parametrize("lost", [False, True])
def test_a_real_hospital_does_not_become_a_simulated_one_nor_without_its_ledger(spent, lost):
    if lost:
        spent.ledger_path("S0").unlink()
    rewrite(spent, "real = true", "real = false")
    refused(lambda: run(spent), "belongs to a real hospital's ledger", "real = true", error=WsiFlError)


@pytest.mark.slow
def test_a_simulated_pilot_binds_no_hospital_to_its_privacy_unit(hospital):
    rewrite(hospital, "real = true", "real = false")
    per_row = row(run(hospital))["epsilon"]
    rewrite(hospital, "real = false", "real = true")
    first = row(run(hospital, "privacy.unit='patient'", "privacy.target_epsilon=1.5"))
    assert first["unit"] == "patient" and first["lifetime_epsilon"] == first["epsilon"] > 1
    refused(lambda: run(hospital), "counts ε per patient, this run per row", error=WsiFlError)
    assert 0 < per_row < first["epsilon"]


def test_releases_of_a_site_before_it_was_real_count_for_the_same_privacy_unit(hospital):
    rewrite(hospital, "real = true", "real = false")
    pilot = row(run(hospital, "privacy.sigma=8"))["epsilon"]
    rewrite(hospital, "real = false", "real = true")
    now = row(run(hospital, "privacy.sigma=8"))
    assert now["lifetime_epsilon"] > now["epsilon"] == pytest.approx(pilot)


def test_an_outdated_copy_of_a_study_spends_nothing_in_its_place_or_elsewhere(hospital, tmp_path):
    for name in ("backup", "elsewhere"):
        shutil.copytree(hospital.root, tmp_path / name)
    run(hospital)
    refused(lambda: run(Study(tmp_path / "elsewhere")), "was at ", "S0.jsonl", error=WsiFlError)
    shutil.rmtree(hospital.root)
    shutil.copytree(tmp_path / "backup", hospital.root)
    refused(lambda: run(hospital), "ledgers/S0.jsonl: this is not the ledger that", error=WsiFlError)


def test_a_renamed_run_stays_the_same_run(hospital):
    path = interrupt_run(hospital, 2, "train.rounds=3")
    renamed = path.rename(path.with_name("00009-my-best-run"))
    done = row(resume_path(hospital, renamed))
    assert isclose(done["epsilon"], epsilon([Mechanism(4.0, 0.7, 0.2, 15)], 1e-5))
    assert done["epsilon"] == done["lifetime_epsilon"]
    assert write_report(hospital, renamed.name).exists()


def test_the_report_of_a_real_site_shows_what_all_its_runs_spent_of_the_budget(spent):
    summary = run(spent)
    site = row(summary)
    assert site["lifetime_epsilon"] > site["epsilon"] + 0.1
    page = write_report(spent, summary["run"]).read_text()
    assert f"<td>{site['lifetime_epsilon']:.2f}</td><td>{site['max_epsilon']:.2f}</td>" in page
    assert "budget" not in page.partition("ε spent (")[2].partition("Privacy spent by each site")[0].lower()


def test_two_sites_that_name_one_ledger_are_both_charged(tmp_path):
    where = f'{HOSPITAL}\nallow = ["patches"]\nledger = "{tmp_path}/budget.jsonl"'
    rows = run(make_study(tmp_path / "study", n_sites=2, site_extra=where))["sites"]
    both = [Mechanism(4.0, 0.7, 0.2, 10)] * 2
    assert [isclose(r["lifetime_epsilon"], epsilon(both, 1e-5)) for r in rows] == [True, True]
    assert [isclose(r["epsilon"], epsilon(both[:1], 1e-5)) for r in rows] == [True, True]


def test_a_model_that_stays_at_the_site_is_not_retrained_for_free(hospital):
    path = interrupt_run(hospital, 2, "train.rounds=3", method="regular")
    (path / "sites" / "S0" / "state" / "round_00002.safetensors").unlink()
    refused(lambda: resume_path(hospital, path), LATER, error=WsiFlError)


def test_only_one_of_two_models_that_stay_at_the_site_is_kept(hospital):
    """A copy of the run from before the last checkpoint was finished in between."""
    path = interrupt_run(hospital, 1, method="regular")
    copy = Path(shutil.copytree(path, path.with_name("00002-copy")))
    with dying(PrivacyLedger, "record_transmission", 1):  # round 2 is recorded and has its checkpoint
        resume_path(hospital, path)
    resume_path(hospital, copy)
    refused(lambda: resume_path(hospital, path), "released others since", error=WsiFlError)


def test_a_round_killed_before_it_was_final_is_final_once_the_run_resumes(hospital):
    with dying(PrivacyLedger, "record_transmission", 2):
        run(hospital, "train.rounds=3", method="regular")
    path = next(hospital.runs_path.glob("0*"))
    with dying(loop, "_train_round", 1):
        resume_path(hospital, path)
    (path / "sites" / "S0" / "state" / "round_00002.safetensors").unlink()
    refused(lambda: resume_path(hospital, path), LATER, error=WsiFlError)


def test_a_round_that_a_smaller_budget_forbids_is_abandoned_and_not_repeated(hospital):
    """The round was recorded and killed before its checkpoint; the hospital has lowered max_epsilon since."""
    with dying(loop, "write_checkpoint", 2):
        run(hospital)
    once = epsilon([Mechanism(4.0, 0.7, 0.2, 5)], 1e-5) + 1e-9
    rewrite(hospital, "max_epsilon = 3.0", f"max_epsilon = {once}")
    path = next(hospital.runs_path.glob("0*"))
    assert row(resume_path(hospital, path))["rounds"] == 1
    assert "left, as its max_epsilon" in (path / "sites" / "S0" / "log.txt").read_text()


def test_a_ledger_is_found_through_its_run_once_the_site_file_is_deleted(tmp_path):
    where = f'{HOSPITAL}\nledger = "{tmp_path}/budget/S0.jsonl"'
    study = make_study(tmp_path / "study", n_sites=1, site_extra=where)
    path = study.root / run(study)["run"]
    (study.root / "sites" / "S0.toml").unlink()
    assert study.pin_run(path).ledger_path("S0") == tmp_path / "budget" / "S0.jsonl"


def account_of(plan, limit, past=(), done=0, delta=1e-5):
    """Make the account of a site for pricing plans."""
    ledger = SimpleNamespace(
        terms=PrivacyTerms(delta, max_epsilon=limit, lifetime=True),
        count_rounds=lambda: done,
        list_mechanisms=lambda **_: list(past),
    )
    return SimpleNamespace(ledger=ledger, plan=plan)


def count_affordable_rounds(account, rounds):
    """Count the rounds a budget allows, each priced together with all earlier ones as a separate mechanism."""
    found, spent = account.ledger.count_rounds(), account.ledger.list_mechanisms()
    limit, delta = account.ledger.terms.max_epsilon, account.ledger.terms.delta
    while found < rounds and epsilon([*spent, account.plan], delta) <= limit:
        found, spent = found + 1, [*spent, account.plan]
    return found


@pytest.mark.parametrize(
    ("given", "limit", "past", "done", "rounds"),
    [
        ({"n": 100, "batch_size": 10, "sigma": 1.4}, 3.0, (), 0, 60),
        ({"n": 100, "batch_size": 100, "sigma": 4.0}, 3.0, (), 0, 60),
        ({"n": 100, "batch_size": 10, "sigma": 1.4}, 3.0, (ROUND, ROUND), 2, 60),
        ({"n": 40, "batch_size": 8, "sigma": 2.0, "unit": "patient"}, 5.0, (ROUND,), 0, 7),
        ({"n": 100, "batch_size": 10, "sigma": 0.5}, 0.1, (), 0, 60),
        ({"n": 100, "batch_size": 10, "sigma": 50.0}, 2.0, (), 3, 3),
        ({"n": 100, "batch_size": 10, "sigma": 50.0}, 2.0, (), 5, 3),
    ],
)
def test_affordable_rounds_equal_those_of_pricing_round_by_round(given, limit, past, done, rounds):
    plan = plan_of_round(**{"epochs": 1, "clip": 1.0, "delta": 1e-5} | given)
    account = account_of(plan, limit, past, done)
    assert count_affordable(account, rounds) == min(count_affordable_rounds(account, rounds), max(rounds, done))


@pytest.mark.parametrize("sigma", [0.3, 1.4, 30.0, 1e6])
@pytest.mark.parametrize("epochs", [1, 10**6])
def test_a_million_rounds_are_priced_a_few_times(sigma, epochs, monkeypatch):
    priced = []

    def count_calls(mechanisms, delta):
        priced.append(len(mechanisms))
        return epsilon(mechanisms, delta)

    monkeypatch.setattr(site_account, "epsilon", count_calls)
    plan = plan_of_round(n=1000, batch_size=10, epochs=epochs, sigma=sigma, clip=1.0, delta=1e-5)
    assert 0 <= count_affordable(account_of(plan, 3.0, [ROUND]), 10**6) <= 10**6
    assert len(priced) <= 21 and max(priced) == 2
