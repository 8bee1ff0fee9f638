"""Tests of class statistics released as files: ledger, crashes, damaged files, and heads solved from the files."""

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from conftest import interrupted_after, model, nightly, refused, same, write_features
from file_changes import edit, make_real, site_file
from safetensors import safe_open
from test_oneshot import HEADS, D, compute_statistics, head_of, make_hospitals, rows_of
from training_runs import dying

from wsi_fl.evidence.audit_run import audit_run
from wsi_fl.federation.preflight import compare_sites
from wsi_fl.models import create_model
from wsi_fl.oneshot import class_statistics as sums
from wsi_fl.oneshot import release_statistics as stage
from wsi_fl.oneshot.hooks import OneshotHooks
from wsi_fl.oneshot.projection import ProjectionOrigin, ProjectionSource, fit_projection, write_projection
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.oneshot.released_statistics import read_statistics
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.accounting import Mechanism, _gaussian_epsilon, epsilon
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import digest_values
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.study.folder import Study
from wsi_fl.system.files import JOBS_FOLDER, read_lines
from wsi_fl.system.shared_work import WorkEnded
from wsi_fl.system.tensors import load_tensors, save_tensors
from wsi_fl.types import UsageError, Vectors, WsiFlError

SIGMA = 2.0
ONCE = Mechanism(SIGMA, 1.0, 1.0, 1)
NOISE = [*HEADS, f"privacy.sigma={SIGMA}"]
FILES = [*NOISE, "train.from_released=true", "train.min_sites=1"]
START = [*HEADS, "train.init_from=oneshot", "train.rounds=1"]


@pytest.fixture
def study(tmp_path):
    return make_hospitals(tmp_path / "study")


def released(study, site="S0", *more, **options):
    return release_statistics(study, site=site, overrides=[*NOISE, *more], **options)["sites"][0]


def refuse_release(study, site, *words, error=WsiFlError, overrides=(), **options):
    refused(lambda: released(study, site, *overrides, **options), *words, error=error)


def joined(study, *overrides):
    return train(study, method="oneshot", backend="local", overrides=[*FILES, *overrides])


def refuse_training(study, *words, error=WsiFlError, overrides=()):
    refused(lambda: joined(study, *overrides), *words, error=error)


def train_warm_start(study, *overrides, method="proxyfl"):
    return train(study, method=method, overrides=[*START, *overrides], backend="local")


def all_released(study, *overrides):
    return release_statistics(study, site=None, overrides=overrides or NOISE)["sites"]


def sums_at(path):
    return read_statistics(path, path.name)


def lines_of(study, site="S0"):
    return read_lines(study.ledger_path(site))


def rewritten(path, tensors=None, **document):
    """Write other tensors or another document into a file."""
    known, said = load_tensors(path, "release")
    save_tensors(path, known | (tensors or {}), said | document)


def replace_vector(path, vector):
    """Write another vector with a matching digest into a class statistics file."""
    rewritten(path, {"sums": torch.from_numpy(vector)}, digest=digest_values(vector))


def test_statistics_are_released_once_and_cost_the_epsilon_of_their_ledger(study):
    row = released(study)
    assert row["spent"] and row["n"] == 60 and row["unit"] == "row" and row["guarantee"] == "guaranteed"
    assert row["file"] == "statistics/S0.safetensors" and row["sigma"] == SIGMA
    assert row["epsilon"] == pytest.approx(epsilon([ONCE], 1e-5))
    line, sent = lines_of(study)
    assert line["run"] == "oneshot" and line["released"] == f"model {row['digest']}" and sent["sending"]
    assert line["mechanism"] == {"sigma": SIGMA, "clip": 1.0, "sample_rate": 1.0, "steps": 1}
    again = released(study, "S0", "privacy.sigma=9.0")
    assert not again["spent"] and len(lines_of(study)) == 2 and again["digest"] == row["digest"]
    more = released(study, repeat=True)
    assert more["spent"] and more["digest"] != row["digest"]
    assert more["epsilon"] == pytest.approx(epsilon([ONCE, ONCE], 1e-5))


def compute_exact_statistics():
    """Compute the class statistics of the training rows of S0 without noise."""
    return compute_statistics(SharedHead(2, D), *rows_of(60, 0, 0.0)).numpy()


def test_the_file_holds_noisy_statistics_and_exact_ones_are_readable_by_their_owner_only(study):
    before = os.umask(0o022)
    try:
        row = released(study)
    finally:
        os.umask(before)
    assert not study.local_release_path("S0").stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    assert study.release_path("S0").stat().st_size < 2048  # of two classes
    with safe_open(study.release_path("S0"), "np") as file:
        assert list(file.keys()) == ["sums"]
        document = json.loads(file.metadata()["document"])
    facts = {"site": "S0", "encoder": "tiny sha256:0", "data": "features", "example": "patch"}
    facts |= {"n_features": D, "dimensions": D, "classes": ["healthy", "tumor"]}
    assert facts.items() <= document.items()
    assert document.keys() - {"tensors_sha256"} == row.keys() - {"spent", "file", "lifetime_epsilon", "max_epsilon"}
    home, file = sums_at(study.local_release_path("S0")), sums_at(study.release_path("S0"))
    assert np.array_equal(home.vector, file.vector) and len(file.vector) == 2 * (D + 2)
    variances = file.vector[-2:]
    weights = np.sqrt(variances / SIGMA**2)[:, None]
    noise = file.vector[:-2].reshape(2, -1) / weights - compute_exact_statistics().reshape(2, -1)
    assert 0.7 < noise.std() / SIGMA < 1.4 and variances.max() == SIGMA**2


def test_every_release_meets_its_target_epsilon_exactly_and_noise_has_no_fixed_seed(study):
    asked = ["privacy.target_epsilon=2", "privacy.insecure_seed=1"]
    first, other = (released(study, "S0", *asked, repeat=again) for again in (False, True))
    assert first["epsilon"] == pytest.approx(2, abs=1e-3) and other["sigma"] == first["sigma"]
    assert first["digest"] != other["digest"] and other["guarantee"] == "guaranteed"


def test_patients_are_privacy_units_where_the_settings_ask_for_it(study):
    row = released(study, "S0", "privacy.unit=patient")
    assert (row["n"], row["unit"]) == (20, "patient")
    summary = joined(study, "privacy.unit=patient")
    assert summary["sites"][0]["epsilon"] == pytest.approx(epsilon([ONCE], 1e-5))
    refuse_release(study, "S0", "per patient", "per row")
    refuse_training(study, "per patient", "per row")


def test_without_privacy_statistics_are_exact_and_a_real_hospital_must_allow_them(study):
    bare = ["privacy.enabled=false"]
    assert released(study, "S0", *bare)["epsilon"] is None
    vector = sums_at(study.release_path("S0")).vector
    np.testing.assert_allclose(vector[:-2], compute_exact_statistics(), rtol=1e-5, atol=1e-5)
    make_real(study)
    refuse_release(study, "S1", 'allow = ["model"]', overrides=bare)
    assert not study.release_path("S1").exists()


@pytest.mark.parametrize(
    ("place", "again"),
    [
        *(("ledger", False), ("copy", True), ("sending", False), ("file", True)),
        *nightly(("ledger", True), ("copy", False), ("sending", True), ("file", False)),
    ],
)
def test_no_crash_makes_a_site_release_two_noisy_versions(study, place, again):
    before = released(study)["digest"] if again else None
    moments = {
        "ledger": (PrivacyLedger, "record", 1),
        "copy": (stage, "write_statistics", 1),
        "sending": (PrivacyLedger, "record_transmission", 1),
        "file": (stage, "write_statistics", 2),
    }
    with dying(*moments[place]):
        released(study, repeat=again)
    left = sums_at(study.release_path("S0")).digest if study.release_path("S0").exists() else None
    assert left == before  # whatever was on its way has not left
    lost = place in ("ledger", "copy")
    row = released(study, repeat=again and lost)
    assert row["spent"] == lost  # then the new release takes the place of the lost one
    assert row["epsilon"] == pytest.approx(epsilon([ONCE] * (1 + again), 1e-5))
    digests = [line["released"] for line in lines_of(study) if line.get("released")]
    assert digests[-1] == f"model {row['digest']}" == f"model {sums_at(study.release_path('S0')).digest}"
    n = len(lines_of(study))
    assert lines_of(study)[-1]["sending"]
    assert released(study)["digest"] == row["digest"] and len(lines_of(study)) == n


def test_the_cost_of_an_interrupted_second_release_is_reported(study):
    first = released(study)
    with dying(stage, "write_statistics", 1):
        released(study, repeat=True)
    row = released(study)
    assert row["digest"] == first["digest"] and not row["spent"]
    assert row["epsilon"] == pytest.approx(epsilon([ONCE, ONCE], 1e-5))  # as the ledger counts it


def test_a_target_leaves_out_the_release_that_was_lost(study):
    make_real(study)
    edit(site_file(study, "S0"), "50.0", "1.0")
    target = "privacy.target_epsilon=5"  # the budget is less
    with dying(stage, "write_statistics", 1):
        released(study, "S0", target)
    assert released(study, "S0", target)["epsilon"] == pytest.approx(1, abs=1e-3)
    refused(lambda: released(study, "S0", target, repeat=True), "no noise level reaches")  # nothing is left


def test_two_studies_on_one_ledger_never_release_two_noises_for_one_charge(study, tmp_path):
    edit(site_file(study, "S0"), more=f'ledger = "{tmp_path / "one.jsonl"}"\n')
    other = Study(shutil.copytree(study.root, tmp_path / "other"))
    for name in ("record_transmission", "release_again"):
        with dying(PrivacyLedger, name, 1):
            released(study)
    assert released(other)["epsilon"] == pytest.approx(epsilon([ONCE], 1e-5))  # in the place of the first
    refuse_release(study, "S0", "or has a newer one")
    assert not study.release_path("S0").exists()
    study.release_path("S0").parent.mkdir()
    shutil.copy(other.release_path("S0"), study.release_path("S0"))  # the other study's release is this site's too
    assert not released(study)["spent"]
    assert released(study, repeat=True)["epsilon"] == pytest.approx(epsilon([ONCE] * 2, 1e-5))


def test_a_lost_file_is_restored_and_numbers_missing_from_the_ledger_are_refused(study):
    digest, content = released(study)["digest"], study.release_path("S0").read_bytes()
    for lost in (study.release_path("S0"), study.local_release_path("S0")):
        lost.unlink()
        assert released(study)["digest"] == digest and study.release_path("S0").read_bytes() == content
    assert study.local_release_path("S0").read_bytes() == content
    study.ledger_path("S0").unlink()
    refuse_release(study, "S0", "ledgers/S0.jsonl lacks its release")
    refuse_training(study, "ledgers/S0.jsonl lacks its release")


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_byte(path):
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 255
    path.write_bytes(whole)


def lost_both(study):
    for path in (study.release_path("S0"), study.local_release_path("S0")):
        path.unlink()


def store_anew(study):
    """Rebuild the store of a hospital without its earlier releases, as after the loss of its machine."""
    shutil.rmtree(study.root / "statistics")
    study.local_release_path("S0").unlink()


@pytest.mark.parametrize("real", [False, *nightly(True)])
@pytest.mark.parametrize("lose", [lost_both, store_anew])
def test_statistics_on_the_ledger_are_released_a_second_time_only_on_request(study, lose, real):
    if real:
        make_real(study)
    first, kept = released(study), study.release_path("S0").read_bytes()
    lose(study)
    n = len(lines_of(study))
    refuse_release(study, "S0", "put statistics/S0.safetensors back", "`wsi-fl statistics --site S0 --again`")
    assert len(lines_of(study)) == n and not study.release_path("S0").exists()
    study.release_path("S0").parent.mkdir(exist_ok=True)  # both ways that it names are open
    study.release_path("S0").write_bytes(kept)
    assert not released(study)["spent"] and released(study)["epsilon"] == first["epsilon"]
    lost_both(study)
    assert released(study, repeat=True)["epsilon"] == pytest.approx(epsilon([ONCE, ONCE], 1e-5))


@pytest.mark.parametrize("real", [False, *nightly(True)])
@pytest.mark.parametrize("damage", [cut_in_half, other_byte, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("copy", [Study.release_path, Study.local_release_path])
def test_a_damaged_copy_of_class_statistics_is_replaced_by_the_intact_one(study, copy, damage, real):
    if real:
        make_real(study)
    row, whole = released(study), study.release_path("S0").read_bytes()
    damage(copy(study, "S0"))
    again = released(study)
    assert not again["spent"] and again["digest"] == row["digest"] and again["epsilon"] == row["epsilon"]
    assert study.release_path("S0").read_bytes() == study.local_release_path("S0").read_bytes() == whole


EDITS = [
    {"tensors": {"sums": torch.zeros(2 * (D + 2))}},
    {"tensors": {"sums": torch.zeros(7)}},
    {"digest": "0" * 64},
    {"sigma": 1.0},
    {"sigma": "2"},
    {"classes": ["a", "b", "c"]},
    {"n": -1},
    {"n_features": 8},
    {"guarantee": "sure"},
]
OF_OTHERS = [
    {"encoder": "large sha256:1"},
    {"projection": "0" * 64},
    {"unit": "patient"},
    {"data": "mosaics"},
    {"classes": ["benign", "tumor"]},
    {"task": '{"column":"grade"}'},
]
DAMAGE = (b"", b"nothing", b"\x08\0\0\0\0\0\0\0{}      ", b"\xff" * 64)


def test_a_damaged_edited_or_foreign_file_is_refused_and_the_local_copy_restores_it(study):
    for name in ("S0", "S1"):
        released(study, name)
    file = study.release_path("S1")
    whole = file.read_bytes()
    for change in OF_OTHERS:
        file.write_bytes(whole)
        rewritten(file, **change)
        refuse_training(study, "statistics/S1.safetensors", f"{next(iter(change))} = ", error=UsageError)
    shutil.copy(study.release_path("S0"), file)
    refuse_training(study, "these are the statistics of site S0")
    home = study.local_release_path("S1")
    for content in DAMAGE:
        file.write_bytes(content)
        refuse_training(study, "statistics/S1.safetensors", "damaged release", "copy the file from its site again")
        home.write_bytes(content)  # where no copy is whole
        refuse_release(study, "S1", "damaged release", "copy the file from its site again")
        home.write_bytes(whole)
    for change in EDITS:
        file.write_bytes(whole)
        rewritten(file, **change)
        refuse_training(study, "statistics/S1.safetensors", "edited")
        if "digest" in change:
            file.unlink()
        released(study, "S1")
        assert file.read_bytes() == whole
    assert joined(study)["sites"]
    released(study, "S1", "model.projection=12", repeat=True)
    refuse_training(study, "statistics/S1.safetensors", "dimensions = 12", error=UsageError)


def test_released_statistics_are_refused_for_other_features(study):
    released(study)
    x, labels = rows_of(60, 0)
    write_features(study, "S0", x[:, :12], labels, [f"p{i}" for i in range(60)], ["train"] * 60)
    refused(lambda: released(study), "S0 has released", "n_features = 24, but here it is 12", "--again")


def write_public(study, name, seed, encoder="tiny sha256:0"):
    origin = ProjectionOrigin(encoder=encoder, sources=[ProjectionSource(name="cmu.svs", rows=200, sha256="0" * 64)])
    x = np.random.default_rng(seed).normal(size=(200, D)).astype(np.float32)
    found = fit_projection(x, origin, 8)
    write_projection(study.root / name, found)
    return found


ALONG = ["model.projection=d.safetensors"]


def test_a_public_projection_shortens_class_statistics_and_must_be_the_same_everywhere(study):
    found = write_public(study, "d.safetensors", 0)
    for row in all_released(study, *NOISE, *ALONG):
        assert (row["dimensions"], row["projection"]) == (8, found.digest)
        assert len(sums_at(study.release_path(row["site"])).vector) == 2 * 10
    head = model(study.root / joined(study, *ALONG)["run"], "S0", "shared")
    assert np.array_equal(head["components"], found.components) and int(head["n_sites"]) == 3
    write_public(study, "d.safetensors", 1)  # another file under the same name
    words = ("statistics/S0.safetensors", f"projection = {found.digest}"[:40])
    refuse_training(study, *words, overrides=ALONG, error=UsageError)
    refuse_release(study, "S0", "projection", "--again", overrides=ALONG, error=UsageError)


def test_a_projection_that_is_missing_damaged_or_of_another_encoder_is_refused_in_one_line(study):
    refuse_release(study, "S0", "no such file", "wsi-fl projection", overrides=ALONG)
    (study.root / "d.safetensors").write_bytes(b"nothing")
    refuse_release(study, "S0", "d.safetensors", "damaged", overrides=ALONG)
    write_public(study, "d.safetensors", 0, encoder="large sha256:1")
    words = ("projection for large sha256:1", "are of tiny sha256:0")
    refuse_release(study, "S0", *words, overrides=ALONG, error=UsageError)
    assert not study.ledger_path("S0").exists()


@pytest.mark.parametrize(
    ("key", "agreed", "other", "words"),
    [
        ("projection", "a", "b", "S2 has b as the projection of its class statistics (model.projection)"),
        ("statistics", {"S0": "a"}, {"S0": "b"}, "as the released class statistics in use"),
        ("buffer", ["replay", 9, 16, 3, 2], ["replay", 8, 16, 3, 2], "as the buffer"),
        ("inference_sites", ["S3"], [], "S2 has [] as the list of receivers"),
    ],
)
def test_sites_with_different_statistics_files_buffers_or_roles_do_not_begin(key, agreed, other, words):
    brought = [{"site": f"S{k}", key: agreed} for k in range(2)] + [{"site": "S2", key: other}]
    refused(lambda: compare_sites(brought), "S2 has", words)


def test_a_real_hospital_needs_a_budget_and_stays_within_it(study):
    make_real(study, "S0", says="real = true")
    refuse_release(study, "S0", "write max_epsilon and delta there", error=UsageError)
    make_real(study, "S1", "S2")
    edit(site_file(study, "S0"), more="max_epsilon = 2.5\ndelta = 1e-5\n")
    row = released(study)
    assert row["epsilon"] == pytest.approx(_gaussian_epsilon(1 / SIGMA, 1e-5)) and row["epsilon"] < 2.5
    refuse_release(study, "S0", "above its 2.5", repeat=True)
    assert not released(study)["spent"]


def test_a_real_hospitals_ledger_must_list_every_release_of_its_study(study):
    make_real(study)
    released(study)
    kept = study.ledger_path("S0").read_text()
    study.ledger_path("S0").unlink()
    refuse_release(study, "S0", "ledgers/S0.jsonl is missing", error=UsageError)
    study.ledger_path("S0").write_text(kept)
    rewritten(study.release_path("S0"), digest="0" * 64)
    refuse_release(study, "S0", "lacks the release of statistics/S0.safetensors", error=UsageError)


@pytest.mark.parametrize(
    ("lose", "again"), [(lambda path: path.write_text(""), False), (lambda path: path.unlink(), True)]
)
def test_statistics_whose_ledger_and_ledger_heads_are_lost_are_not_released_again(study, lose, again):
    make_real(study)
    released(study)
    before = study.release_path("S0").read_bytes()
    for place in (study.root, Path(os.environ["XDG_STATE_HOME"])):
        for head in place.rglob("*.head.json"):
            head.unlink()
    lose(study.ledger_path("S0"))
    with pytest.raises(UsageError) as caught:
        released(study, repeat=again)
    assert "restore" in str(caught.value) and "--again" not in str(caught.value)
    assert study.release_path("S0").read_bytes() == before


def test_a_real_hospital_solves_its_head_from_copied_files_and_opens_no_other_store(study, tmp_path, monkeypatch):
    make_real(study)
    all_released(study)
    alone = Study(shutil.copytree(study.root, tmp_path / "alone"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("S1", "S2"):
        shutil.rmtree(alone.store_path(name).parent)
        alone.ledger_path(name).unlink()
    for head in alone.root.rglob("ledger.head.json"):
        edit(head, str(study.root), str(alone.root))
    summary = joined(alone)
    (row,) = summary["sites"]
    assert row["epsilon"] == pytest.approx(epsilon([ONCE], 1e-5)) and row["rounds"] == 1
    assert row["site"] == "S0" and row["lifetime_epsilon"] == row["epsilon"]
    assert int(model(alone.root / summary["run"], "S0", "shared")["n_sites"]) == 3
    assert [one["site"] for one in evaluate(alone, summary["run"])["sites"]] == ["S0"]
    assert write_report(alone, summary["run"]).exists()
    assert resume_run(alone, summary["run"], backend="local") == summary
    refuse_training(study, "whose store no other site's process may open", error=UsageError)


def test_released_files_give_the_same_head_as_a_run_over_the_network(study, monkeypatch):
    real = sums.discrete_gaussian
    monkeypatch.setattr(sums, "discrete_gaussian", lambda sigma, n, _: real(sigma, n, CipherStream.from_seed(5)))
    over_network = train(study, method="oneshot", overrides=NOISE, backend="local")
    all_released(study)
    by_files = joined(study)
    runs = [study.root / run["run"] for run in (over_network, by_files)]
    x = torch.from_numpy(rows_of(20, 9)[0])
    for name in ("S0", "S1", "S2"):
        one, other = (head_of(run, name) for run in runs)
        assert torch.equal(one.released, other.released) and torch.equal(one.local_sums, other.local_sums)
        torch.testing.assert_close(one.sums, other.sums, rtol=1e-6, atol=1e-5)
        assert int(other.n_sites) == 3 and same(*(model(run, name) for run in runs))
        torch.testing.assert_close(one(x), other(x), rtol=1e-3, atol=1e-3)
    for row in by_files["sites"]:
        assert row["epsilon"] == pytest.approx(epsilon([ONCE], 1e-5)) and row["guarantee"] == "guaranteed"
        assert row["sigma"] is None
    assert by_files["communication"]["messages"] == 0
    told = [evaluate(study, run.name)["merged"]["accuracy"]["mean"] for run in runs]
    assert told[0] == pytest.approx(told[1], abs=0.02)


def test_an_audit_of_files_uses_their_noise_and_a_forged_file_is_refused(study, monkeypatch):
    monkeypatch.setattr("wsi_fl.evidence.attacks._NOISE_DRAWS", 60)
    all_released(study)
    shutil.rmtree(study.store_path("S1").parent)
    document = audit_run(study, joined(study)["run"])
    assert [site["site"] for site in document["sites"]] == ["S0", "S2"]
    tails = [site["tail"] for site in document["sites"]]
    assert all(tail["sigma"] == ONCE.sigma and not tail["beyond"] for tail in tails)
    assert [(row["site"], row["n"]) for row in document["influence"]] == [("S0", 60), ("S1", 60), ("S2", 60)]
    vector = sums_at(study.release_path("S1")).vector.copy()
    vector[:-2] *= -1000
    replace_vector(study.release_path("S1"), vector)
    refuse_training(study, "statistics/S1.safetensors", "60 rows", "ask its site")


@pytest.mark.parametrize("spoilt", [False, True])
def test_harmful_class_statistics_get_no_weight(study, spoilt):
    """S2 has both classes and detects the swapped classes on rows held out from its local model."""
    all_released(study, *HEADS, "privacy.sigma=0.5")
    for name in ("S0", "S1"):
        if spoilt:
            vector = sums_at(study.release_path(name)).vector
            swapped = [vector[:-2].reshape(2, -1)[::-1].ravel(), vector[-2:][::-1]]
            replace_vector(study.release_path(name), np.concatenate(swapped))
        shutil.rmtree(study.store_path(name).parent)  # it takes part by its letter alone
    run = joined(study)
    chosen = json.loads((study.root / run["run"] / "sites/S2/prediction_model.json").read_text())
    assert (chosen["ensemble"]["weight"] == 0) is spoilt


def test_a_hospital_that_lacks_one_of_three_classes_predicts_it(study, monkeypatch):
    monkeypatch.setattr(conftest, "CLASSES", ("a", "b", "c"))
    rng = np.random.default_rng(0)
    for name, n_classes in (("S0", 3), ("S1", 3), ("S2", 2)):
        labels = np.concatenate([np.arange(60) % n_classes, np.arange(60) % 3])
        x = (rng.normal(size=(120, D)) + 4 * np.eye(D)[labels]).astype(np.float32)
        patients = [f"p{k}" for k in range(120)]
        write_features(study, name, x, labels, patients, ["train"] * 60 + ["test"] * 60)
    release_statistics(study, site=None, overrides=[*HEADS, "privacy.sigma=0.5"])
    run = joined(study)["run"]
    document = evaluate(study, run)
    (lacking,) = (row for row in document["sites"] if row["site"] == "S2")
    assert lacking["accuracy"] > 0.85  # two of three, had it never said the third


def test_heads_of_released_files_spend_no_budget_and_add_no_ledger_line(study):
    all_released(study)
    before = {name: study.ledger_path(name).read_text() for name in ("S0", "S1", "S2")}
    costs = dry_run(study, method="oneshot", overrides=FILES, backend="local")["sites"]
    assert [row["epsilon"] for row in costs] == pytest.approx([epsilon([ONCE], 1e-5)] * 3)
    with interrupted_after(2):
        joined(study)
    summary = resume_run(study, "1", backend="local")
    assert [row["rounds"] for row in summary["sites"]] == [1, 1, 1]
    assert {name: study.ledger_path(name).read_text() for name in before} == before
    assert (study.root / summary["run"] / "sites/S0/statistics.json").exists()


def test_a_site_without_a_file_is_excluded_and_one_without_a_store_takes_part_by_its_file(study, capfd):
    released(study, "S0")
    released(study, "S1")
    shutil.rmtree(study.store_path("S1").parent)
    summary = joined(study)
    assert "not included, as there is no file in statistics/: S2" in capfd.readouterr().err
    assert [row["site"] for row in summary["sites"]] == ["S0", "S2"]
    heads = [model(study.root / summary["run"], name, "shared") for name in ("S0", "S2")]
    assert [int(head["n_sites"]) for head in heads] == [2, 2]
    both = [sums_at(study.release_path(name)).vector.astype(np.float64) for name in ("S0", "S1")]
    np.testing.assert_allclose(heads[1]["sums"], np.mean(both, 0), rtol=1e-6)
    assert heads[1]["local_sums"].any() and not heads[1]["released"].any()  # its own rows count at home
    assert summary["sites"][1]["epsilon"] is None  # it has released nothing
    assert [row["site"] for row in evaluate(study, summary["run"])["sites"]] == ["S0", "S2"]


def test_a_run_of_released_files_names_the_missing_ones(study):
    same = "with the --pipeline and --set of this command"
    refuse_training(study, "no statistics of site S0 yet", f"`wsi-fl statistics --site S0` {same}")
    released(study)
    other = ["model.projection=5"]
    refuse_training(study, "S0 --again)", same, overrides=other, error=UsageError)
    refuse_training(study, "audit.canaries", overrides=["audit.canaries=4"], error=UsageError)
    for name in ("S0", "S1", "S2"):
        shutil.rmtree(study.store_path(name).parent)
    refuse_training(study, "no site of this run has its store here")


def solve_start(study):
    """Solve the linear layer of the files by the definition of the head."""
    head = SharedHead(2, D)
    vectors = [sums_at(study.release_path(f"S{k}")).vector for k in range(3)]
    with torch.no_grad():
        head.sums.copy_(torch.from_numpy(np.mean(vectors, 0)))
    head.n_sites.fill_(3)
    return head


@pytest.mark.parametrize(("method", "role"), [("proxyfl", "proxy"), ("fedavg", "private")])
def test_sent_models_start_from_the_released_files_alone(study, monkeypatch, method, role):
    all_released(study)
    for k in range(3):
        study.local_release_path(f"S{k}").unlink()  # exact sums are not needed
    real, starts = OneshotHooks.use_releases, []

    def use_releases(hooks, method, data, site, releases):
        real(hooks, method, data, site, releases)
        starts.append({key: value.clone() for key, value in site.learners[role].model.state_dict().items()})

    monkeypatch.setattr(OneshotHooks, "use_releases", use_releases)
    summary = train_warm_start(study, method=method)
    assert len(starts) == 3 and same(starts[0], starts[1]) and same(starts[0], starts[2])
    linear = create_model("linear_head", n_classes=2, shape=Vectors(D), seed=0)
    linear.load_state_dict(starts[0])
    head, (x, _) = solve_start(study), rows_of(50, 7)
    weights, bias = head.solve_head()
    rows = torch.nn.functional.layer_norm(torch.from_numpy(x), (D,)) - head.mean
    z = rows.double() @ head.components.double()  # never shortened
    torch.testing.assert_close(linear(torch.from_numpy(x)).double(), z @ weights + bias, rtol=1e-4, atol=1e-4)
    assert all(row["guarantee"] == "guaranteed" for row in summary["sites"])


def test_both_releases_are_on_the_account_and_within_the_target(study):
    all_released(study)
    alone = dry_run(study, method="proxyfl", overrides=[*HEADS, "train.rounds=1"])
    for both, without in zip(train_warm_start(study)["sites"], alone["sites"], strict=True):
        assert both["epsilon"] > max(without["epsilon"], epsilon([ONCE], 1e-5))
    reached = train_warm_start(study, "privacy.target_epsilon=4.0")
    assert all(3.5 < row["epsilon"] <= 4 for row in reached["sites"])
    refused(lambda: train_warm_start(study, "privacy.target_epsilon=1.0"), "on top of", "target_epsilon")


def test_a_run_resumes_only_with_the_released_files_it_started_from(study):
    all_released(study)
    with interrupted_after(2):
        train_warm_start(study)
    released(study, "S1", repeat=True)
    refused(lambda: resume_run(study, "1", backend="local"), "class statistics of S1", "statistics/")


@pytest.mark.slow
def test_mpi_ranks_read_the_same_files_as_a_single_process(study, wsi_fl):
    for name in ("S0", "S1", "S2"):
        released(study, name)
    shutil.rmtree(study.store_path("S1").parent)
    settings = [word for override in FILES for word in ("--set", override)]
    done = wsi_fl("train", "--method", "oneshot", "--json", *settings, cwd=study.root)
    assert done.returncode == 0, done.stderr[-2000:]
    by_ranks, by_one = json.loads(done.stdout), joined(study)
    assert [row["site"] for row in by_ranks["sites"]] == ["S0", "S2"]
    for name in ("S0", "S2"):
        assert same(*(model(study.root / run["run"], name, "shared") for run in (by_ranks, by_one)))


def test_ranks_share_the_sites_and_the_command_reports_the_spent_epsilon(study, wsi_fl, as_ranks):
    document, nothing = as_ranks(2, lambda: release_statistics(study, site=None, overrides=NOISE))
    assert not nothing  # said once
    assert [row["site"] for row in document["sites"]] == ["S0", "S1", "S2"]
    assert all(row["spent"] for row in document["sites"])
    settings = [word for override in NOISE for word in ("--set", override)]
    told = wsi_fl("statistics", "--all", *settings, cwd=study.root)
    assert told.returncode == 0 and told.stderr.count("nothing spent") == 3
    told = wsi_fl("statistics", "--site", "S1", "--again", "--json", *settings, cwd=study.root)
    assert json.loads(told.stdout)["sites"][0]["spent"]
    assert wsi_fl("statistics", cwd=study.root).returncode == 2


@pytest.mark.parametrize("step", ["_sum_examples", "write_statistics"])
def test_who_was_taken_for_dead_neither_spends_nor_writes(study, monkeypatch, step):
    """Others end its work, on a file system without locks, while it is suspended after a step."""
    real, folder = getattr(stage, step), study.local_release_path("S0").parent

    def end_work(*arguments):
        result = real(*arguments)
        shutil.rmtree(folder / JOBS_FOLDER)
        return result

    monkeypatch.setattr(stage, step, end_work)
    refuse_release(study, "S0", "start it again", error=WorkEnded)
    assert not study.release_path("S0").exists() and len(lines_of(study)) == 2 * (step == "write_statistics")


def test_statistics_print_the_digest_and_what_the_budget_holds(study):
    make_real(study, "S0")
    row = released(study)
    assert row["lifetime_epsilon"] == pytest.approx(row["epsilon"]) and row["max_epsilon"] == 50
    (line, _) = stage.release_lines({"sites": [row], "next": ["wsi-fl train"]})
    assert f"ever spent {row['epsilon']:.2f} of 50" in line.text and f"digest {row['digest'][:8]}" in line.text


def test_released_files_need_no_mpi_and_one_without_its_site_file_is_reported(study, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("S0", "S1", "S2"):
        released(study, name)
    site_file(study, "S2").unlink()
    summary = train(study, method="oneshot", overrides=FILES)
    assert summary["statistics"].keys() == {"S0", "S1"} and not (study.root / summary["run"] / "mpi.log").exists()
    said = " ".join(capsys.readouterr().err.split())
    assert "statistics/S2.safetensors is here, but sites/S2.toml is not: S2 is left out; copy its site file" in said
