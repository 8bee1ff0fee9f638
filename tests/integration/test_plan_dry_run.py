"""Tests of `train --dry-run --plan`: it reports time and cost, and leaves no trace in the account."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import REAL, larger_study, refused
from safetensors.torch import load_file, save_file
from training_runs import trained

from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.training import plan_dry_run
from wsi_fl.stages.training.plan_dry_run import PlannedRun, dry_run_plan, list_nonfinite_models
from wsi_fl.study.toml import dump_toml

COST = {"epsilon": 1.5}


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    """The study of S0, which has paid for a run, and a plan of it and two other hospitals."""
    study = larger_study(tmp_path_factory.mktemp("plan") / "study", n_sites=1, site_extra=REAL)
    trained(study, "regular", "train.rounds=1")
    settings = study.load_pipeline("small", ["train.rounds=2"])
    roles = dict.fromkeys(("S0", "S1", "S2"), "member")
    return study, PlannedRun("S0", "ab" * 32, "proxyfl", dump_toml(settings), roles, COST, "it costs ε = 1.5")


def read_files(folder):
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def finished(hospital, tmp_path_factory):
    """(files of the study before, and after a dry run, its document, and its run)."""
    study, planned = hospital
    (study.root / ".dry-run-killed" / "runs").mkdir(parents=True)
    before, keep = read_files(study.root), tmp_path_factory.mktemp("kept") / "run"
    document = dry_run_plan(study, planned, overrides=["train.rounds=1"], keep=keep)
    return before, read_files(study.root), document, keep


def test_a_dry_run_of_a_plan_changes_no_byte_and_removes_what_a_killed_one_left(hospital, finished):
    before, after, _, keep = finished
    assert hospital[0].ledger_path("S0") in before
    assert {path: content for path, content in before.items() if ".dry-run-killed" not in str(path)} == after
    assert sorted(path.name for path in (keep / "sites").iterdir()) == ["S0", "S1", "S2"]
    assert json.loads((keep / "sites" / "S1" / "ledger.json").read_text())["epsilon"] > 0


def test_a_dry_run_of_a_plan_reports_resources_and_the_cost_of_the_real_run(finished):
    document = finished[2]
    assert (document["site"], document["plan"], document["rounds"]) == ("S0", "ab" * 32, 1)
    assert document["cost"] == COST and document["not_finite"] == []
    assert document["seconds_per_round"] > 0 and document["peak_bytes"] > 1e7
    assert document["all_bytes"] == 3 * document["sent_bytes"] > 0


def test_a_dry_run_of_a_plan_notices_weights_that_are_not_finite(finished):
    file = finished[3] / "sites" / "S1" / "proxy.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, file)
    assert list_nonfinite_models(RunFolder(finished[3])) == ["S1/proxy"]


def test_a_failed_dry_run_of_a_plan_leaves_nothing(hospital, monkeypatch):
    study, planned = hospital
    before = read_files(study.root)
    monkeypatch.setattr(plan_dry_run, "train", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dry_run_plan(study, planned)
    assert {path for path in read_files(study.root) if ".dry-run-" in str(path)} == {
        path for path in before if ".dry-run-" in str(path)
    }


def test_an_impossible_dry_run_of_a_plan_is_refused(hospital, tmp_path):
    study, planned = hospital
    refused(lambda: dry_run_plan(study, planned, keep=tmp_path), "it is there already")
    refused(lambda: dry_run_plan(study, planned, overrides=["privacy.sigma=0"]), "only train.rounds may be lower")
    refused(lambda: dry_run_plan(study, replace(planned, site="S7")), "unknown site 'S7'")


def test_the_command_asks_the_extension_that_reads_plans(hospital, tmp_path, monkeypatch, wsi_fl):
    study, planned = hospital
    file = tmp_path / "plan.json"
    monkeypatch.setattr(plan_dry_run, "load_entries", lambda group: {})
    options = ("train", "--dry-run", "--plan", file, "--set", "train.rounds=1", "--json")
    done = wsi_fl(*options, cwd=study.root)
    assert done.returncode == 2 and "no installed package reads plans" in done.stderr
    asked = []
    reader = lambda *given: asked.append(given[1:]) or planned  # noqa: E731
    monkeypatch.setattr(plan_dry_run, "load_entries", lambda group: {"federation": reader})
    done = wsi_fl(*options, "--site", "S0", cwd=study.root)
    assert json.loads(done.stdout)["cost"] == COST and asked == [(file, "S0")]
    done = wsi_fl("train", "--plan", file, cwd=study.root)
    assert done.returncode == 2 and "--plan belongs to --dry-run" in done.stderr
