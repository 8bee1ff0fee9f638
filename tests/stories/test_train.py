"""`train` and `evaluate` as a user runs them: real MPI ranks, JSON contracts, crashes, one-line errors."""

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
import torch
from conftest import REAL, edited, larger, larger_pair, write_store
from conftest import larger_study as make_study
from safetensors.torch import load_file

from wsi_fl.federation.methods import METHODS
from wsi_fl.privacy.accounting import epsilon, plan
from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.answers.report import report
from wsi_fl.stages.site.account import guarantee_of
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.plan import dry_run
from wsi_fl.stages.training.train import resume, train
from wsi_fl.system.machine import launched_ranks
from wsi_fl.types import UsageError, WsiFlError

study = larger
pair = larger_pair

SEEDED = ["train.rounds=5", "privacy.insecure_seed=3"]
SITES = ["S0", "S1"]
WHOLE = epsilon([plan(36, 8, 5, 1.4, 0.7)], 1e-5)


def local(study, method="proxyfl", *overrides):
    return train(study, method=method, overrides=overrides, backend="local")


def models(path):
    return {f.parent.name + f.name: load_file(f) for f in sorted(path.glob("sites/*/p*.safetensors"))}


def assert_same(a, b):
    assert a.keys() == b.keys() != set()
    for name, tensors in a.items():
        for key, value in tensors.items():
            assert torch.equal(value, b[name][key]), (name, key)


def sets(overrides):
    return [part for override in overrides for part in ("--set", override)]


def under_mpiexec(study, n, *arguments):
    command = [launch.find_mpiexec(), "-n", str(n), "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, "-m", "wsi_fl", *arguments]
    environment = launch.rank_environment(n)
    return subprocess.run(
        command, cwd=study.root, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def assert_contract(summary, path):
    assert summary["method"] == "proxyfl"
    assert summary["lost"] == []
    assert summary["seconds"] > 0
    assert [row["site"] for row in summary["sites"]] == SITES
    for row in summary["sites"]:
        assert row["epsilon"] == pytest.approx(WHOLE)
        assert row["delta"] == 1e-5
        assert row["guarantee"] == "none"  # its noise was seeded
        assert (row["unit"], row["rounds"]) == ("row", 5)
    assert set(summary["communication"]) == {"messages", "bytes", "seconds"}
    assert summary["communication"]["messages"] == 5 * len(SITES)
    for site in SITES:
        folder = path / "sites" / site
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
        assert json.loads((folder / "ledger.json").read_text())["steps"] == 25


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A study and an uninterrupted run of it in one process."""
    study = make_study(tmp_path_factory.mktemp("train") / "study", n_sites=2)
    summary = local(study, "proxyfl", *SEEDED)
    return study, summary


@pytest.mark.slow
def test_ranks_of_mpiexec_join_and_learn_what_one_process_does(whole):
    study, summary = whole
    done = under_mpiexec(study, 2, "train", "--json", *sets(SEEDED))
    assert done.returncode == 0, done.stderr[-2000:]
    joined = json.loads(done.stdout)  # one document: the other rank has nothing to say
    path = study.root / joined["run"]
    assert_contract(joined, path)
    assert_contract(summary, study.root / summary["run"])
    assert_same(models(path), models(study.root / summary["run"]))
    assert joined["communication"]["bytes"] == summary["communication"]["bytes"]
    inputs = [
        {site: json.loads((p / "sites" / site / "store.json").read_text()) for site in SITES}
        for p in (path, study.root / summary["run"])
    ]
    assert inputs[0] == inputs[1]
    assert set(inputs[0]) == set(SITES)


def test_a_killed_job_resumes_to_the_same_models_and_the_same_account(whole, wsi_fl):
    study, summary = whole
    known = set(study.runs.glob("*-proxyfl-*"))
    command = [sys.executable, "-m", "wsi_fl", "train", "--set", "train.rounds=5", "--set", SEEDED[1]]
    with subprocess.Popen(
        command, cwd=study.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as job:
        path = _killed_within(study, known, job)
    assert not (path / "summary.json").exists()
    done = wsi_fl("train", "--resume", path.name, "--json", cwd=study.root)
    assert done.returncode == 0, done.stderr
    assert_contract(json.loads(done.stdout), path)
    assert_same(models(path), models(study.root / summary["run"]))
    files = [f for f in path.rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".toml", ".json", ".jsonl", ".safetensors", ".txt", ".log", ""}
    assert not [f for f in files if f.read_bytes()[:1] == b"\x80"], "a pickle begins so"


def _killed_within(study, known, job):
    """SIGKILLs the launcher, mpiexec and the ranks once a round is checkpointed; returns the run."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        fresh = set(study.runs.glob("*-proxyfl-*")) - known
        if fresh and list(next(iter(fresh)).glob("sites/*/state/round_*.safetensors")):
            break
        time.sleep(0.005)
    (path,) = set(study.runs.glob("*-proxyfl-*")) - known
    killed = _processes_of(job.pid)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    job.wait(10)
    while any(map(_lives, killed)):  # and holds its locks
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _processes_of(pid):
    """The process and everything below it."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*")
        for child in (task / "children").read_text().split()
    ]
    return [pid, *(p for child in children for p in _processes_of(child))]


def test_evaluate_says_what_the_contract_says(whole, wsi_fl):
    study, summary = whole
    done = wsi_fl("evaluate", "1", "--json", cwd=study.root)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["run"] == summary["run"] == "runs/00001-proxyfl-small"
    rows = document["sites"]
    for name in ("accuracy", "macro_accuracy", "auroc"):
        values = [row[name] for row in rows]
        assert document["merged"][name]["mean"] == pytest.approx(np.mean(values))
        assert document["merged"][name]["sd"] == pytest.approx(np.std(values))
    last = [
        json.loads((study.root / summary["run"] / "sites" / s / "metrics.jsonl").read_text().splitlines()[-1])
        for s in SITES
    ]
    for row, line in zip(rows, last, strict=True):
        assert (row["n"], row["own"]["n"]) == (24, 12)
        assert row["accuracy"] == pytest.approx(line["merged"]["accuracy"])
        assert row["own"]["auroc"] == pytest.approx(line["own"]["auroc"])
        assert np.sum(row["confusion"]) == 24
        low, high = row["intervals"]["accuracy"]
        assert low <= row["accuracy"] <= high
        assert set(row["parts"]) == set(SITES)
        assert row["slides"]["n"] == 2
        predictions = study.root / summary["run"] / "sites" / row["site"] / "predictions.csv"
        assert len(predictions.read_text().splitlines()) == 1 + 5 * 24


def test_same_names_at_two_sites_are_two_patients(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    for k in range(2):
        with edited(study.store(f"S{k}")) as file:
            file["patient"][:] = [name.decode()[1:].encode()[1:] for name in file["patient"][:]]
    run = local(study, "regular", "train.rounds=1")["run"]
    row = evaluate(study, run)["sites"][0]
    assert row["intervals"]["accuracy"] is not None  # one test patient each, clustered by patient
    assert row["own"]["intervals"]["accuracy"] is None


def test_real_sites_are_evaluated_on_their_own_patients_unless_both_allow_more(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    run = local(study, "regular", "train.rounds=1")["run"]
    for file in (study.root / "sites").glob("*.toml"):
        file.write_text(file.read_text().replace("real = false", REAL))
    document = evaluate(study, run)
    assert document["merged"] is None
    for row in document["sites"]:
        assert row["n"] == row["own"]["n"] == 12
        assert set(row["parts"]) == {row["site"]}
    for name in ("S0", "S1"):
        assert evaluate(study, run)["merged"] is None
        file = study.root / "sites" / f"{name}.toml"
        file.write_text(file.read_text() + 'allow = ["patches"]\n')
    assert evaluate(study, run)["merged"]["accuracy"]["mean"] is not None
    shutil.rmtree(study.root / "stores" / "S1")
    file.write_text(file.read_text().replace("patches", "model"))
    assert [row["site"] for row in evaluate(study, run)["sites"]] == ["S0"]  # at hospital S0 there is no S1


def test_the_report_of_real_sites_shows_no_hospital_to_another(tmp_path):
    study = make_study(tmp_path / "study", n_sites=3)
    run = local(study, "regular", "train.rounds=1")["run"]
    for file in (study.root / "sites").glob("*.toml"):
        file.write_text(file.read_text().replace("real = false", REAL))
    evaluate(study, run)
    assert "data:image" not in report(study, run).read_text()
    for name in ("S1", "S2"):
        shutil.rmtree(study.root / "stores" / name)
    assert "data:image" not in report(study, run).read_text()
    assert "data:image" in report(study, run, pictures=True).read_text()  # at hospital S0, its own patches


def test_a_store_made_anew_is_noticed(study):
    run = local(study, "regular", "train.rounds=1")["run"]
    shutil.rmtree(study.store("S1").parent)
    write_store(study, "S1", n_per_slide=14)
    with pytest.raises(UsageError, match="site S1: its store was made anew since this run began"):
        evaluate(study, run)


def test_a_dry_run_costs_the_plan_and_writes_nothing(pair):
    study = pair
    before = sorted(study.root.rglob("*"))
    document = dry_run(study, method="proxyfl")
    assert sorted(study.root.rglob("*")) == before
    assert document["rounds"] == 3
    assert document["seconds"] > 0
    assert document["memory_bytes"] > 10**7
    for row in document["sites"]:
        assert row["epsilon"] == pytest.approx(epsilon([plan(36, 8, 3, 1.4, 0.7)], 1e-5))
        assert (
            row["guarantee"] == "guaranteed" and row["expected"] is None
        )  # the study is of heads on features
    paper = dry_run(study, method="proxyfl", overrides=["privacy.mode=paper"])
    assert {row["guarantee"] for row in paper["sites"]} == {"nominal"}
    for override in ("privacy.enabled=false", "privacy.sigma=0"):
        rows = dry_run(study, method="proxyfl", overrides=[override])["sites"]
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
def test_what_epsilon_is_worth(study, mode, method, beta, guarantee):
    pipeline = study.pipeline("small", [f"privacy.mode={mode}", f"train.beta={beta}"])
    assert guarantee_of(METHODS[method], pipeline) == guarantee


def test_a_failing_rank_ends_the_job_with_one_line(tmp_path, wsi_fl):
    study = make_study(tmp_path / "study", n_sites=3)
    shutil.rmtree(study.store("S2").parent)
    write_store(study, "S2", mpp=0.5)
    done = wsi_fl("train", "--json", cwd=study.root)
    assert done.returncode == 2
    assert done.stdout == ""
    assert not list(study.runs.glob("0*"))
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("wsi-fl: error:")]
    assert line == "wsi-fl: error: sites disagree: S2 brings 0.5 as the resolution (µm/px), the others 1.0"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("resumed", [False, True])
def test_a_wrong_number_of_ranks_is_refused_before_mpi_starts(study, monkeypatch, resumed):
    run = local(study, "regular", "train.rounds=1")["run"] if resumed else None
    if run:
        (study.root / run / "summary.json").unlink()
    before = sorted(study.root.rglob("*"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="4 sites need 4 ranks, but 3 were started"):
        resume(study, run) if run else train(study, method="proxyfl")
    assert sorted(study.root.rglob("*")) == before


def test_two_jobs_on_one_run_are_refused(study):
    path = study.root / local(study, "proxyfl", "train.rounds=1")["run"]
    (path / "summary.json").unlink()
    with (path / "sites" / "S1" / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(WsiFlError, match="another job still works on this run; wait for it, or end it"):
            resume(study, path.name, backend="local")


def test_without_mpi_the_error_says_how_to_get_it(study, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WsiFlError, match=r"mpiexec was not found; install .*wsi-fl\[mpi\].*--backend local"):
        train(study, method="proxyfl")
    assert not study.runs.exists()
    beside = tmp_path / "mpiexec"
    beside.touch()
    assert launch.find_mpiexec() == str(beside)


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),  # an interactive shell under srun
        ({"PMI_SIZE": "3"}, 3),
    ],
)
def test_ranks_that_somebody_else_started_are_noticed(monkeypatch, variables, ranks):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_ranks() == ranks
