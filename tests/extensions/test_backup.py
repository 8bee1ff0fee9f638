"""Backups of a hospital's key, certificates, approvals, plan and ledger; a restore never replaces a newer ledger."""

import io
import shutil
import tarfile
from pathlib import Path

import pytest
from conftest import REAL, make_study, refused

from wsi_fl.hospitals.plans.build_plan import make_plan
from wsi_fl.hospitals.plans.signed_plan import load_approved_plan, record_approval
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.trust.provisioning import provision_federation
from wsi_fl.hospitals.work.backup import restore_backup, restore_lines, write_backup
from wsi_fl.privacy.accounting import Mechanism, epsilon
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.stages.site.holdout_secret import load_holdout_draw, secret_path
from wsi_fl.stages.site.privacy_account import list_heads
from wsi_fl.study.folder import Study
from wsi_fl.types import WsiFlError


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Startup kits of two hospitals, and the study of one that has signed a plan."""
    root = tmp_path_factory.mktemp("bed") / "all"
    provision_federation(root / "kits", federation="one", server="localhost:1", sites=["S0", "S1"])
    study, kit = make_study(root / "study", 2, site_extra=REAL), Kit.open(root / "kits" / "S0")
    record_approval(study, make_plan(study, method="fedavg", out=root / "plan.json"), kit.load_identity())
    return root


@pytest.fixture
def bed(template, tmp_path, monkeypatch):
    """A hospital with a startup kit, a signed plan and two charges on its ledger."""
    root = Path(shutil.copytree(template, tmp_path / "all"))
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    study = Study(root / "study")
    spend(study, 1, 2)
    return root, study, Kit.open(root / "kits" / "S0")


def ledger_of(study):
    return LedgerFile(study.ledger_path("S0"), list_heads(study, "S0"))


def spend(study, *rounds):
    study.ledger_path("S0").parent.mkdir(exist_ok=True)
    with (ledger := ledger_of(study)).hold_lock():
        for number in rounds:
            ledger.append({"run": "00001 a", "site": "S0", "round": number, "real": True})


def test_a_hospital_restored_from_a_backup_continues(bed):
    root, study, kit = bed
    digest, lots = load_approved_plan(study, kit.load_identity()).digest, load_holdout_draw(study, "S0")
    made = write_backup(kit, study, root / "S0.tar")
    assert (made["name"], made["lines"]) == ("S0", 2)
    assert (root / "S0.tar").stat().st_mode & 0o777 == 0o600
    for folder in (kit.path, study.root, root / "state"):
        shutil.rmtree(folder)
    said = restore_backup(root / "S0.tar", kit.path, Study(root / "study"))
    assert (said["kept"], len(said["restored"])) == (0, made["files"])
    assert (kit.path / "startup" / "client.key").stat().st_mode & 0o777 == 0o600
    assert load_approved_plan(study, Kit.open(kit.path).load_identity()).digest == digest
    spend(study, 3)
    assert [entry.round for entry in ledger_of(study).entries] == [1, 2, 3]
    assert load_holdout_draw(study, "S0") == lots and len(lots.secret) == 32  # so the same patients are held out
    assert secret_path(study, "S0").stat().st_mode & 0o777 == 0o600


def test_restore_reports_the_charges_of_the_restored_ledger(bed):
    root, study, kit = bed
    line = {"run": "00002 b", "site": "S0", "real": True, "unit": "patient", "delta": 1e-5, "round": 1}
    line |= {"mechanism": {"sigma": 4.0, "clip": 1.0, "sample_rate": 0.1, "steps": 5}}
    line |= {"plan": {"n": 80, "batch_size": 8, "mode": "strict"}, "guarantee": "guaranteed"}
    line |= {"time": "2026-07-01T09:30:00+00:00"}
    with (ledger := ledger_of(study)).hold_lock():
        ledger.append(line)
    write_backup(kit, study, root / "S0.tar")
    study.ledger_path("S0").unlink()
    said = restore_backup(root / "S0.tar", kit.path, study)
    spent = epsilon([Mechanism(4.0, 1.0, 0.1, 5)], 1e-5)
    assert said["ledger"] == {"runs": 2, "last": line["time"], "epsilon": pytest.approx(spent), "delta": 1e-5}
    shown = [one.text for one in restore_lines(said)]
    assert f"runs in its ledger: 2, the last of 2026-07-01; ε = {spent:.2f} at δ = 1e-05" in shown[1]


def test_an_older_ledger_is_refused_and_a_newer_one_stays(bed):
    root, study, kit = bed
    write_backup(kit, study, root / "old.tar")
    spend(study, 3)
    shutil.rmtree(kit.path)
    said = restore_backup(root / "old.tar", kit.path, study)  # the key was lost alone
    assert str(kit.path / "startup" / "client.key") in said["restored"]
    assert len(ledger_of(study).entries) == 3
    study.ledger_path("S0").unlink()
    again = lambda: restore_backup(root / "old.tar", kit.path, study)  # noqa: E731
    refused(again, "this is not the ledger that", "had 3 lines or more", error=WsiFlError)
    assert not study.ledger_path("S0").exists()


def test_a_foreign_ledger_or_key_is_not_replaced(bed):
    root, study, kit = bed
    write_backup(kit, study, root / "S0.tar")
    file = study.ledger_path("S0")
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    refused(lambda: restore_backup(root / "S0.tar", kit.path, study), "move it away first", error=WsiFlError)
    refused(lambda: restore_backup(root / "S0.tar", root / "kits" / "S1", study), "another key is here")
    refused(lambda: restore_backup(root / "S0.tar", kit.path, None), "give --study DIR")


def test_a_startup_kit_without_a_study_can_be_backed_up(bed):
    root, _, _ = bed
    server = Kit.open(root / "kits" / "server")
    assert write_backup(server, None, root / "server.tar")["lines"] is None
    shutil.rmtree(server.path)
    assert restore_backup(root / "server.tar", server.path, None)["ledger"] is None
    assert Kit.open(server.path).load_identity().name == "server"


def test_an_archive_with_paths_outside_its_folder_is_no_backup(bed):
    root, _, kit = bed
    for name in ("kit/../../up", "/kit/x", "kit//etc/../x"):
        write_backup(kit, None, root / "bent.tar")
        with tarfile.open(root / "bent.tar", "a") as tar:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        refused(lambda: restore_backup(root / "bent.tar", root / "new", None), "this is no backup")
    (root / "none.tar").write_text("x")
    refused(lambda: restore_backup(root / "none.tar", root / "new", None), "this is no backup")
    assert not (root / "new").exists()


def rewrite(path, change):
    """Write a backup again after a change of its files, name → bytes."""
    with tarfile.open(path) as tar:
        files = {one.name: tar.extractfile(one).read() for one in tar}
    change(files)
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


DOCUMENTS = [
    b"[]",
    b"{}",
    b'{"name": "S0"}',
    b'{"name": 3, "role": "hospital"}',
    b'{"name": "", "role": "hospital"}',
    b'{"name": "../S0", "role": "hospital"}',
    b'{"name": "S0", "role": ["hospital"]}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"9" * 10_000,
]
DAMAGES = [
    *(lambda files, text=text: files.update({"kit/federation.json": text}) for text in DOCUMENTS),
    *(lambda files, name=name: files.update({name: b"x"}) for name in (".", "kit", "study", "other", "kit/\0")),
    lambda files: files.update({"ledger.jsonl": b""}),
    lambda files: files.update({"ledger.jsonl": b'{"run": "half'}),
    lambda files: files.update({"ledger.jsonl": b"\xff\n"}),
    lambda files: files.update({"study/sites/S0.toml": b"name = "}),
    lambda files: files.update({"study/sites/S0.toml": b"\xff"}),
    lambda files: files.pop("study/sites/S0.toml"),
    lambda files: files.update({"kit/startup": b"x"}),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_backup_ends_in_one_line_and_leaves_no_ledger(bed, damage):
    root, study, kit = bed
    write_backup(kit, study, root / "S0.tar")
    rewrite(root / "S0.tar", damage)
    for folder in (kit.path, study.root, root / "state"):
        shutil.rmtree(folder)
    refused(lambda: restore_backup(root / "S0.tar", kit.path, Study(root / "study")), "", error=WsiFlError)
    assert not (root / "study" / "ledgers" / "S0.jsonl").exists()


def test_class_statistics_are_backed_up_with_the_ledger_that_charged_them(bed):
    root, study, kit = bed
    for path in (study.release_path("S0"), study.local_release_path("S0")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a letter")
    write_backup(kit, study, root / "S0.tar")
    for folder in (kit.path, study.root, root / "state"):
        shutil.rmtree(folder)
    restore_backup(root / "S0.tar", kit.path, study)
    assert study.release_path("S0").read_bytes() == study.local_release_path("S0").read_bytes() == b"a letter"
