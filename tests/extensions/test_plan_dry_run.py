"""The dry run of a plan at one hospital: it reports time and cost, and leaves no trace in the account."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import REAL, refused
from conftest import larger_study as larger_of
from hospitals import one_installation  # noqa: F401
from safetensors.torch import load_file, save_file
from test_dossier import spend
from test_federation_plan import hospital, made
from typer.testing import CliRunner

from wsi_fl.cli.main import app
from wsi_fl.hospitals.plans import dry_run
from wsi_fl.hospitals.plans.dry_run import dry_run_lines, dry_run_plan
from wsi_fl.hospitals.plans.review import review_plan
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import print_lines


@pytest.fixture(scope="module")
def asked(tmp_path_factory, federation):
    """(study of S0 with releases on its ledger, a plan of three sites, the folder of S0's startup kit)."""
    root = tmp_path_factory.mktemp("rehearse")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        coordinator = larger_of(root / "coordinator", n_sites=3, site_extra=REAL)
        plan, study = made(coordinator, root, "proxyfl", "train.rounds=1"), hospital(root, "S0")
        spend(study, plan)
        review_plan(study, plan, "S0")  # which makes the folder that remembers ledgers
        yield study, plan, federation.kit(root / "kit", "S0")


def files(*folders):
    """All files in the folders, byte for byte."""
    found = [path for folder in folders for path in Path(folder).rglob("*")]
    return {path: path.read_bytes() if path.is_file() else b"" for path in found}


@pytest.fixture(scope="module")
def dry_run_result(asked, tmp_path_factory):
    """(files of the study and of the user's state before, the same after, the output, the kept run)."""
    study, plan, _ = asked
    places = (study.root, os.environ["XDG_STATE_HOME"])
    before, keep = files(*places), tmp_path_factory.mktemp("kept") / "run"
    said = dry_run_plan(study, plan, "S0", keep=keep)
    return before, files(*places), said, keep


def test_a_dry_run_of_a_plan_changes_no_byte_of_the_study_its_ledger_and_its_heads(asked, dry_run_result):
    before, after, _, keep = dry_run_result
    assert before == after and asked[0].ledger_path("S0") in before, "there is a ledger"
    assert sorted(path.name for path in (keep / "sites").iterdir()) == ["S0", "S1", "S2"]
    assert json.loads((keep / "sites" / "S1" / "ledger.json").read_text())["epsilon"] > 0


def test_a_dry_run_of_a_plan_reports_time_and_cost_of_the_real_run(asked, dry_run_result, capsys):
    study, plan, _ = asked
    said = dry_run_result[2]
    cost = review_plan(study, plan, "S0").cost
    assert said["cost"]["epsilon"] == cost.epsilon > 0 and said["cost"]["lifetime_epsilon"] > cost.epsilon
    assert (said["rounds"], said["not_finite"]) == (1, [])
    assert said["seconds_per_round"] > 0 and said["peak_bytes"] > 1e7
    assert said["sent_bytes"] >= plan.document["leaves"][0]["bytes"]
    assert said["all_bytes"] == 3 * said["sent_bytes"]
    print_lines(dry_run_lines(said))
    words = capsys.readouterr().err
    assert "all models are finite" in words and f"all rounds cost ε = {cost.epsilon:.2f}" in words
    print_lines(dry_run_lines(said | {"not_finite": ["S1/proxy"]}))
    assert "not finite: S1/proxy; do not sign this" in capsys.readouterr().err


def test_a_dry_run_of_a_plan_notices_nan_weights(dry_run_result, tmp_path):
    run = shutil.copytree(dry_run_result[3], tmp_path / "run")
    file = run / "sites" / "S1" / "proxy.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, file)
    assert dry_run._list_non_finite(RunFolder(run)) == ["S1/proxy"]


def test_a_failed_dry_run_of_a_plan_leaves_nothing_behind(asked, monkeypatch):
    study, plan, _ = asked
    before = files(study.root)
    (study.root / ".rehearsal-killed" / "runs").mkdir(parents=True)  # by SIGKILL, the last time
    monkeypatch.setattr("wsi_fl.stages.training.train.train", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dry_run_plan(study, plan, "S0")
    assert files(study.root) == before


def test_an_impossible_dry_run_of_a_plan_is_refused(asked, tmp_path, monkeypatch):
    study, plan, kit = asked
    refused(lambda: dry_run_plan(study, plan, "S0", keep=tmp_path), "it is there already")
    refused(lambda: dry_run_plan(study, plan, "S7"), "S7 is not in this plan")
    store = study.store_path("S0").parent
    store.rename(store.with_name("away"))
    try:
        refused(lambda: dry_run_plan(study, plan, "S0"), "rehearse where it is")
    finally:
        store.with_name("away").rename(store)
    said = {"site": "S0", "rounds": 1}
    monkeypatch.setattr(dry_run, "dry_run_plan", lambda study, plan, site, **_: said | {"asked": site})
    file = tmp_path / "plan.json"
    file.write_text(plan.text)
    given = ["rehearse", str(file), "--kit", str(kit), "--study", str(study.root), "--json"]
    done = CliRunner().invoke(app, ["federation", *given])
    assert json.loads(done.stdout) == said | {"asked": "S0"}, done.output
