"""`train` and `evaluate` from the command line: real MPI ranks, JSON contracts, crashes, one-line errors."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import edited, larger, larger_pair, metrics, model, refused, same, write_store
from conftest import larger_study as make_study
from file_changes import edit, make_real, site_file
from training_runs import trained

from wsi_fl.federation.methods import METHODS
from wsi_fl.privacy.accounting import epsilon, plan_mechanism
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.site.privacy_account import find_guarantee
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.system.extras import describe_install
from wsi_fl.types import WsiFlError

study = larger
pair = larger_pair

SEEDED = ["train.rounds=5", "privacy.insecure_seed=3"]
WSI_FL = [sys.executable, "-m", "wsi_fl", "train", *(part for one in SEEDED for part in ("--set", one))]
SITES = ["S0", "S1"]
WHOLE = epsilon([plan_mechanism(36, 8, 5, 1.4, 0.7)], 1e-5)


def run_alone(study):
    return trained(study, "regular", "train.rounds=1")["run"]


def assert_same(study, run, other):
    """The models of two runs are equal, bit for bit."""
    for site in SITES:
        for role in ("private", "proxy"):
            assert same(*(model(study.root / one, site, role) for one in (run, other))), (site, role)


@pytest.mark.slow
def test_ranks_of_mpiexec_train_the_models_of_one_process(uninterrupted):
    study, summary = uninterrupted
    command = [launch.find_mpiexec(), "-n", "2", "--oversubscribe", "--bind-to", "none", *WSI_FL, "--json"]
    how = {"cwd": study.root, "env": launch.rank_environment(2), "capture_output": True, "timeout": 120}
    done = subprocess.run(command, check=True, **how)
    joined = json.loads(done.stdout)  # one document: the other rank has nothing to say
    for one in (joined, summary):
        assert_contract(one, study.root / one["run"])
    assert_same(study, joined["run"], summary["run"])
    assert joined["communication"]["bytes"] == summary["communication"]["bytes"]
    for site in SITES:
        stores = [study.root / one["run"] / "sites" / site / "store.json" for one in (joined, summary)]
        assert stores[0].read_text() == stores[1].read_text()


@pytest.mark.slow
def test_killed_ranks_of_mpiexec_started_again_go_on_with_their_run(uninterrupted):
    study, summary = uninterrupted
    command = [launch.find_mpiexec(), "-n", "2", "--oversubscribe", "--bind-to", "none", *WSI_FL, "--json"]
    how = {"cwd": study.root, "env": launch.rank_environment(2), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    checkpoints = "*-proxyfl-*/sites/*/state/round_*.safetensors"
    known = set(study.runs_path.glob(checkpoints))
    with subprocess.Popen(command, start_new_session=True, **how) as job:
        path = wait_for_file(study.runs_path, checkpoints, known).parents[3]
        for pid in processes_of(job.pid):
            os.kill(pid, signal.SIGKILL)
    done = subprocess.run(command, check=True, timeout=120, **how)
    assert f"goes on with {path.name}, round ".encode() in done.stderr
    assert study.root / json.loads(done.stdout)["run"] == path
    assert_contract(json.loads(done.stdout), path)
    assert_same(study, path, summary["run"])


def assert_contract(summary, path):
    assert summary["method"] == "proxyfl" and summary["lost"] == [] and summary["seconds"] > 0
    assert [row["site"] for row in summary["sites"]] == SITES
    for row in summary["sites"]:
        assert row["epsilon"] == pytest.approx(WHOLE) and row["delta"] == 1e-5
        assert row["guarantee"] == "none"  # its noise was seeded
        assert (row["unit"], row["rounds"], row["rejected"]) == ("row", 5, 0)
    assert set(summary["communication"]) == {"messages", "bytes", "seconds"}
    assert summary["communication"]["messages"] == 5 * len(SITES)
    for site in SITES:
        assert [line["round"] for line in metrics(path, site)] == [1, 2, 3, 4, 5]
        assert json.loads((path / "sites" / site / "ledger.json").read_text())["steps"] == 25


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A study and an uninterrupted run of it in one process."""
    study = make_study(tmp_path_factory.mktemp("train") / "study", n_sites=2)
    return study, trained(study, "proxyfl", *SEEDED)


def test_the_command_of_a_killed_job_goes_on_to_the_same_models_and_the_same_account(uninterrupted, wsi_fl):
    study, summary = uninterrupted
    checkpoints = "*-proxyfl-*/sites/*/state/round_*.safetensors"
    known, quiet = set(study.runs_path.glob(checkpoints)), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(WSI_FL, cwd=study.root, start_new_session=True, **quiet) as job:
        path = wait_for_file(study.runs_path, checkpoints, known).parents[3]
        killed = processes_of(job.pid)  # the launcher, mpiexec and the ranks
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        job.wait(10)
        while any(map(_lives, killed)):  # and holds its locks
            time.sleep(0.01)
    assert not (path / "summary.json").exists()
    done = wsi_fl(*WSI_FL[3:], "--backend", "local", "--json", cwd=study.root)
    assert done.returncode == 0, done.stderr
    assert f"goes on with {path.name}, round " in done.stderr
    assert_contract(json.loads(done.stdout), path)
    assert_same(study, path, summary["run"])
    files = [f for f in path.rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".toml", ".json", ".jsonl", ".safetensors", ".txt", ".log", ""}
    assert not [f for f in files if f.read_bytes()[:1] == b"\x80"], "a pickle begins so"


def wait_for_file(folder, pattern, known=()):
    """Return a new file of a pattern in a folder, once there is one."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if fresh := set(folder.glob(pattern)) - set(known):
            return fresh.pop()
        time.sleep(0.002)
    raise AssertionError(f"{pattern} never came")


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(pid):
    """The process and all its descendants."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in (task / "children").read_text().split()
    ]
    return [pid, *(p for child in children for p in processes_of(child))]


def test_the_output_of_evaluate_follows_the_contract(uninterrupted, wsi_fl):
    study, summary = uninterrupted
    done = wsi_fl("evaluate", "1", "--json", cwd=study.root)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["run"] == summary["run"] == "runs/00001-proxyfl-small"
    rows = document["sites"]
    for name in ("accuracy", "macro_accuracy", "auroc"):
        values = [row[name] for row in rows]
        assert document["merged"][name]["mean"] == pytest.approx(np.mean(values))
        assert document["merged"][name]["sd"] == pytest.approx(np.std(values))
    run = study.root / summary["run"]
    for row in rows:
        line = metrics(run, row["site"])[-1]
        assert (row["n"], row["own"]["n"], row["slides"]["n"]) == (24, 12, 2)
        assert row["accuracy"] == pytest.approx(line["merged"]["accuracy"])
        assert row["own"]["auroc"] == pytest.approx(line["own"]["auroc"])
        assert np.sum(row["confusion"]) == 24 and set(row["parts"]) == set(SITES)
        low, high = row["intervals"]["accuracy"]
        assert low <= row["accuracy"] <= high
        predictions = run / "sites" / row["site"] / "predictions.csv"
        assert len(predictions.read_text().splitlines()) == 1 + 5 * 24


def test_same_names_at_two_sites_are_two_patients(pair):
    for k in range(2):
        with edited(pair.store_path(f"S{k}")) as file:
            file["patient"][:] = [name[2:] for name in file["patient"][:]]
    row = evaluate(pair, run_alone(pair))["sites"][0]
    assert row["intervals"]["accuracy"] is not None  # one test patient each, clustered by patient
    assert row["own"]["intervals"]["accuracy"] is None


def test_real_sites_are_evaluated_on_local_patients_unless_both_allow_more(pair):
    run = run_alone(pair)
    make_real(pair)
    document = evaluate(pair, run)
    assert document["merged"] is None
    for row in document["sites"]:
        assert row["n"] == row["own"]["n"] == 12 and set(row["parts"]) == {row["site"]}
    for name in SITES:
        assert evaluate(pair, run)["merged"] is None
        edit(site_file(pair, name), more='allow = ["patches"]\n')
    assert evaluate(pair, run)["merged"]["accuracy"]["mean"] is not None
    shutil.rmtree(pair.root / "stores" / "S1")
    edit(site_file(pair, "S1"), "patches", "model")
    assert [row["site"] for row in evaluate(pair, run)["sites"]] == ["S0"]  # at hospital S0 there is no S1


def test_a_rebuilt_store_is_noticed(pair):
    run = run_alone(pair)
    shutil.rmtree(pair.store_path("S1").parent)
    write_store(pair, "S1", n_per_slide=14)
    refused(lambda: evaluate(pair, run), "site S1: its store was made anew since this run began")


def test_a_dry_run_computes_the_cost_of_a_run_and_writes_nothing(pair):
    def planned(*overrides):
        return dry_run(pair, method="proxyfl", overrides=overrides)

    before = sorted(pair.root.rglob("*"))
    document = planned()
    assert sorted(pair.root.rglob("*")) == before
    assert document["rounds"] == 3 and document["seconds"] > 0 and document["memory_bytes"] > 10**7
    for row in document["sites"]:
        assert row["epsilon"] == pytest.approx(epsilon([plan_mechanism(36, 8, 3, 1.4, 0.7)], 1e-5))
        assert row["guarantee"] == "guaranteed"
        assert row["expected"] is None  # the study is of heads on features
    assert {row["guarantee"] for row in planned("privacy.mode=paper")["sites"]} == {"nominal"}
    for override in ("privacy.enabled=false", "privacy.sigma=0"):
        rows = planned(override)["sites"]
        assert {(row["epsilon"], row["guarantee"]) for row in rows} == {(None, "none")}


@pytest.mark.parametrize(
    ("mode", "method", "beta", "guarantee"),
    [
        ("strict", "proxyfl", 0.3, "guaranteed"),
        ("paper", "proxyfl", 0.3, "nominal"),
        ("paper", "proxyfl", 0.0, "guaranteed"),
        ("paper", "regular", 0.3, "guaranteed"),
    ],
)
def test_the_guarantee_level_of_epsilon_depends_on_mode_method_and_beta(study, mode, method, beta, guarantee):
    pipeline = study.load_pipeline("small", [f"privacy.mode={mode}", f"train.beta={beta}"])
    assert find_guarantee(METHODS[method], pipeline) == guarantee


def test_a_failing_rank_ends_the_job_with_one_line(pair, wsi_fl):
    shutil.rmtree(pair.store_path("S1").parent)
    write_store(pair, "S1", mpp=0.5)
    done = wsi_fl("train", "--json", cwd=pair.root)
    assert done.returncode == 2 and done.stdout == ""
    assert not list(pair.runs_path.glob("0*"))
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("wsi-fl: error:")]
    assert line == "wsi-fl: error: sites disagree: S1 has 0.5 as the resolution (µm/px), S0 1.0"
    assert "Traceback" not in done.stderr


def test_a_second_job_and_a_wrong_number_of_ranks_are_refused_before_mpi_starts(pair, monkeypatch):
    path = pair.root / run_alone(pair)
    (path / "summary.json").unlink()
    words = "another job still works on this run; wait for it, or end it"
    with (path / "sites" / "S1" / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        refused(lambda: resume_run(pair, path.name, backend="local"), words, error=WsiFlError)
    before = sorted(pair.root.rglob("*"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    for begun in (lambda: train(pair, method="proxyfl"), lambda: resume_run(pair, path.name)):
        refused(begun, "2 sites need 2 ranks, but 3 were started")
    assert sorted(pair.root.rglob("*")) == before


def test_without_mpi_the_error_names_its_installation(study, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("mpiexec was not found; ", describe_install("mpi"), "--backend local")
    refused(lambda: train(study, method="proxyfl"), *words, error=WsiFlError)
    assert not study.runs_path.exists()
    beside = tmp_path / "mpiexec"
    beside.touch()
    assert launch.find_mpiexec() == str(beside)
