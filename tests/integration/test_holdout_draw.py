"""Tests of the held-out draw: its secret, and that disclosed numbers do not depend on it."""

import hashlib
import threading

import numpy as np
import pytest
from conftest import REAL, make_study, refused, write_features
from file_changes import make_real, site_file

from wsi_fl.data.validation import PUBLIC_DRAW, HoldoutDraw, draw_held_out
from wsi_fl.evidence.audit_run import audit_run
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.released_statistics import read_statistics
from wsi_fl.stages.site.holdout_secret import load_holdout_draw, secret_path
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import open_data
from wsi_fl.stages.training.build_sites import build_site, load_training
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.site_preflight import build_preflight
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.types import WsiFlError

NAMES = [f"TCGA-{k:02d}" for k in range(30)]
HEADS = """
[model]
private = "linear_head"
proxy = "linear_head"
projection = 4
[train]
data = "features"
rounds = 2
batch_size = 6
local_baseline = false
[privacy]
sigma = 4.0
"""
PER_PATIENT = "privacy.unit='patient'"


def fill(study, site, names=NAMES, seed=0):
    """Write two rows of each patient, the last fifth for testing."""
    rng = np.random.default_rng(seed)
    patients = np.repeat(names, 2)
    label = np.arange(len(patients)) // 2 % 2
    x = rng.normal(size=(len(patients), 5)) + label[:, None]
    split = np.where(np.arange(len(patients)) < 0.8 * len(patients), "train", "test")
    write_features(study, site, x, label, patients, split, patients)


@pytest.fixture
def study(tmp_path):
    study = make_study(tmp_path / "study", n_sites=0, text=HEADS)
    for k in range(2):
        says = f'{REAL}\nallow = ["patches"]' if k == 0 else "real = false"
        (study.root / "sites" / f"S{k}.toml").write_text(f'name = "S{k}"\n{says}\n')
        fill(study, f"S{k}", seed=k)
    return study


def replies(study, *overrides, method="proxyfl", index=0):
    """Return the preflight replies of a site without the settings, which are common to all."""
    with RunContext.create(study, study.load_pipeline("small", overrides), method) as party:
        return {
            key: value for key, value in build_preflight(build_site(party, index), party).items() if key != "settings"
        }


def part(study, *overrides, site="S0", method="proxyfl"):
    with RunContext.create(study, study.load_pipeline("small", overrides), method) as party:
        return load_training(party, site)


@pytest.mark.parametrize("site", ["S0", "S1"])
@pytest.mark.parametrize("unit", ["privacy.unit='row'", PER_PATIENT])
def test_disclosed_numbers_do_not_depend_on_the_holdout_draw(study, unit, site):
    index = int(site[1])
    usual = replies(study, unit, index=index)
    assert usual["units"] == (48 if "row" in unit else 24)
    for seed, fraction in ((0, 0.3), (1, 0.3), (2, 0.7)):
        given = (unit, f"train.seed={seed}", f"train.val_fraction={fraction}")
        assert replies(study, *given, index=index) == usual
        train_part, validation, units = part(study, *given, site=site)
        assert len(train_part) + len(validation) == 48 and units.n == usual["units"]
        assert 0 < len(np.unique(units.of_row)) < units.n == usual["units"]
    folds = [replies(study, unit, "train.folds=3", f"train.fold={k}", index=index) for k in (1, 2, 3)]
    assert folds[0] == folds[1] == folds[2] and folds[0]["units"] == (60 if "row" in unit else 30)


def test_batches_sample_all_units_and_hold_rows_of_training_units_only(study):
    """A held-out unit is drawn at the same rate and has no row."""
    for unit in ("privacy.unit='row'", PER_PATIENT):
        train_part, validation, units = part(study, unit, "train.val_fraction=0.4")
        rows = np.sort(units.draw_rows(np.arange(units.n), None))
        np.testing.assert_array_equal(rows, np.arange(len(train_part)))
        assert not set(train_part.patient) & set(validation.patient)
        whole = part(study, unit).units
        every = np.repeat(NAMES[:24], 2)
        name_of = dict(zip(whole.of_row.tolist(), every, strict=True))
        assert [name_of[k] for k in units.of_row.tolist()] == train_part.patient.tolist()


def test_released_statistics_and_summaries_count_held_out_patients_too(study):
    run = train(study, method="proxyfl", overrides=["train.val_fraction=0.4"], backend="local")
    rows = {row["site"]: row for row in run["sites"]}
    assert (rows["S0"]["n_train"], rows["S0"]["n_units"]) == (48, 48)
    assert rows["S1"]["n_train"] < rows["S1"]["n_units"] == 48  # simulated: nobody is hidden
    planned = dry_run(study, method="proxyfl", overrides=["train.val_fraction=0.4"], backend="local")
    real, open_ = planned["sites"]
    assert (real["n_train"], real["n_units"], real["n_validation"]) == (48, 48, None)
    assert open_["n_train"] + open_["n_validation"] == 48


@pytest.mark.parametrize(("unit", "n"), [("privacy.unit='row'", 48), (PER_PATIENT, 24)])
def test_class_statistics_count_held_out_patients_and_are_accepted(study, unit, n):
    given = ("train.val_fraction=0.4", unit)
    made = release_statistics(study, site=None, overrides=given)
    assert [row["n"] for row in made["sites"]] == [n, n]
    assert read_statistics(study.release_path("S0"), "").header.n == n
    files = (*given, "train.from_released=true")
    brings = replies(study, *files, method="oneshot")  # digests are told, and compared, whole
    assert [len(one) for one in (brings["projection"], *brings["statistics"].values())] == [64] * 3
    heads = train(study, method="oneshot", overrides=files, backend="local")
    assert [row["n_units"] for row in heads["sites"]] == [n, n]
    assert audit_run(study, heads["run"])["sites"][0]["tail"]["n"] < n  # of whom the letter holds nothing


def test_the_holdout_secret_is_created_once_and_readable_by_its_owner_only(study):
    path, found = secret_path(study, "S0"), []
    assert not path.exists() and load_holdout_draw(study, "S1") is PUBLIC_DRAW and not secret_path(study, "S1").exists()
    threads = [threading.Thread(target=lambda: found.append(load_holdout_draw(study, "S0"))) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(found)) == 1 and len(found) == 8 and len(found[0].secret) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("00")
    refused(lambda: load_holdout_draw(study, "S0"), "ledgers/S0.lots: damaged", "put its backup back", error=WsiFlError)


def test_names_and_seed_do_not_determine_the_holdout_draw(study):
    patient = np.array(NAMES)
    secrets = [HoldoutDraw(bytes([k] * 32)) for k in range(200)]
    held = np.array([draw_held_out(patient, 0.5, 7, lots) for lots in secrets])
    assert abs(held.mean(0) - 0.5).max() < 0.18  # each name in half of all hospitals: 5 deviations
    given = ("train.val_fraction=0.5", "train.seed=7")
    by_name = sorted(
        name for name in NAMES[:24] if int(hashlib.sha256(f"7 {name}".encode()).hexdigest()[:12], 16) < 2**47
    )
    assert sorted(set(part(study, *given, site="S1").validation.patient)) == by_name
    assert sorted(set(part(study, *given).validation.patient)) != by_name  # with a chance of 2⁻²⁴


def test_studies_that_share_a_ledger_and_copies_draw_the_same_holdout(study, tmp_path):
    other = make_study(tmp_path / "other", n_sites=0, text=HEADS)
    site_file(other, "S0").write_text(f'name = "S0"\n{REAL}\nledger = "{study.ledger_path("S0")}"\n')
    fill(other, "S0")
    given = ("train.val_fraction=0.5",)
    assert set(part(study, *given).validation.patient) == set(part(other, *given).validation.patient)


def test_folds_of_a_real_site_are_disjoint_and_repeat(study):
    def tested(fold, seed=0):
        pipeline = study.load_pipeline("small", ["train.folds=4", f"train.fold={fold}", f"train.seed={seed}"])
        with open_data(study, "S0", pipeline) as data:
            return set(data.test_examples.patient)

    parts = [tested(fold) for fold in (1, 2, 3, 4)]
    assert sorted(name for one in parts for name in one) == NAMES and parts == [tested(k) for k in (1, 2, 3, 4)]
    assert parts != [tested(k, 1) for k in (1, 2, 3, 4)]


def test_more_folds_than_patients_do_not_disclose_the_number_of_a_real_site(study):
    few = ("train.folds=40", "train.fold=40")
    refused(lambda: replies(study, *few), "site S1: 30 patients cannot be divided into 40 folds")
    make_real(study, "S1", says=f'{REAL}\nallow = ["patches"]')
    assert replies(study, *few)["units"] == replies(study, *few, index=1)["units"] == 60


def test_a_run_is_refused_after_its_holdout_secret_has_changed(study):
    given = ["train.val_fraction=0.4", "train.rounds=2"]
    run = train(study, method="proxyfl", overrides=given, backend="local")["run"]
    (study.root / run / "summary.json").unlink()
    kept = secret_path(study, "S0").read_text()
    secret_path(study, "S0").unlink()
    again = lambda: resume_run(study, run, backend="local")  # noqa: E731
    refused(again, "site S0: its store", "or the secret of its held-out draw was", "put its backup back")
    secret_path(study, "S0").write_text(kept)
    assert again()["run"] == run


def test_the_digest_of_a_store_without_a_holdout_does_not_depend_on_the_draw(study):
    def digest(*overrides, site="S0"):
        with open_data(study, site, study.load_pipeline("small", overrides)) as data:
            return data.digest()

    plain = digest()
    drawn = digest("train.val_fraction=0.2")
    assert plain == digest("train.seed=4") != drawn == digest("train.val_fraction=0.3")
    assert digest(site="S1") == digest("train.val_fraction=0.2", site="S1")


def test_a_site_made_real_draws_its_holdout_with_a_secret(study):
    given = ("train.val_fraction=0.5",)
    before = set(part(study, *given, site="S1").validation.patient)
    make_real(study, "S1")
    assert set(part(study, *given, site="S1").validation.patient) != before


@pytest.mark.parametrize(
    ("ledger", "secret"),
    [
        ("books/S0.jsonl", "S0.lots"),
        ("books/S0", "S0.lots"),
        ("books/S0.v1", "S0.v1.lots"),
        ("books/S0.v2", "S0.v2.lots"),
        ("books/S0.lots", "S0.lots.lots"),
    ],
)
def test_each_ledger_has_a_separate_holdout_secret(study, ledger, secret):
    """Ledgers whose names differ after a dot are of other patients, and a secret never replaces a ledger."""
    site_file(study, "S0").write_text(f'name = "S0"\n{REAL}\nledger = "{ledger}"\n')
    assert load_holdout_draw(study, "S0").secret
    assert sorted(path.name for path in (study.root / "books").glob("[!.]*")) == [secret]
    part(study, "train.val_fraction=0.3")
    replies(study, "train.val_fraction=0.3")
