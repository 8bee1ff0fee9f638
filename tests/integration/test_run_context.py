"""Tests that a stage reads each site file once, opens each store once and closes it at its end."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import make_study, write_features
from open_tracing import Opened

from wsi_fl.federation import loop
from wsi_fl.federation.comm import LocalComm
from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.slide_predictor import load_predictor
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.runtime.console import SilentProgress
from wsi_fl.stages.site import site_data
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.ranks import work_as_rank
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run, train

ROUND = ["train.rounds=1"]


@pytest.fixture
def stores(monkeypatch):
    """The patch stores that were opened."""
    found, open_store = [], site_data.open_store
    monkeypatch.setattr(site_data, "open_store", lambda *given: found.append(open_store(*given)) or found[-1])
    return found


@pytest.mark.parametrize("method", ["proxyfl", "joint"])
def test_a_rank_and_evaluate_open_each_store_that_they_may_read_once_and_close_it(pair, stores, method):
    summary = train(pair, method=method, overrides=["train.rounds=1"], backend="local")
    run = RunFolder(pair.root / summary["run"])
    for work in (lambda: work_as_rank(pair, run, LocalComm(2), SilentProgress()), lambda: evaluate(pair, run.name)):
        stores.clear()
        work()
        assert Counter(store.meta.site for store in stores) == Counter(["S0", "S1"])
        assert not any(store._file for store in stores)


def test_a_process_opens_no_store_of_another_site_where_all_keep_their_patches(tmp_path, stores):
    study = make_study(tmp_path / "study", site_extra="real = true\nmax_epsilon = 9.0\ndelta = 1e-5")
    party = RunContext.create(study, study.load_pipeline("small"), "proxyfl")
    with party:
        assert not party.may_merge and not stores
        party.open_data("S2")
        assert [store.meta.site for store in stores] == ["S2"]
    assert not stores[0]._file


def list_site_files(opened):
    """Return how often this process opened each site file, by its name in the study."""
    found = ["/".join(Path(path).parts[-2:]) for path in opened]
    return Counter(path for path in found if re.fullmatch(r"sites/S[01].toml|S[01]/site.toml", path))


@pytest.fixture(scope="module")
def opened():
    """The paths that this process opens for reading."""
    paths = []

    def note(event, arguments):
        if event == "open" and isinstance(arguments[0], (str, Path)) and "w" not in (arguments[1] or "r"):
            paths.append(str(arguments[0]))

    sys.addaudithook(note)  # it cannot be removed
    return paths


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two sites with a finished run."""
    study = make_study(tmp_path_factory.mktemp("finished") / "study", n_sites=2)
    return study, train(study, **ONE_ROUND)["run"]


ONE_ROUND = {"method": "proxyfl", "overrides": ROUND, "backend": "local"}
COMMANDS = {
    "train": lambda study, _: train(study, **ONE_ROUND),
    "dry run": lambda study, _: dry_run(study, **ONE_ROUND),
    "resume": lambda study, run: resume_run(study, run, backend="local"),
    "evaluate": evaluate,
    "predict": lambda study, run: load_predictor(study, run, "S0"),
    "report": write_report,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_reads_each_site_file_once(finished, opened, command):
    study, run = finished
    opened.clear()
    COMMANDS[command](study, run)
    counts = list_site_files(opened)
    pinned = [] if command == "dry run" else ["S0/site.toml", "S1/site.toml"]
    assert counts == Counter(["sites/S0.toml", "sites/S1.toml", *pinned])


def test_statistics_reads_each_site_file_once(pair, opened):
    rng, splits = np.random.default_rng(0), ["train"] * 16 + ["test"] * 8
    for site in ("S0", "S1"):
        x = rng.normal(size=(24, 8)).astype(np.float32)
        write_features(pair, site, x, np.arange(24) % 2, [f"p{k // 4}" for k in range(24)], splits)
    opened.clear()
    heads = ["train.data=features", "model.private=linear_head", "model.proxy=linear_head"]
    release_statistics(pair, site=None, overrides=heads)
    assert list_site_files(opened) == {"sites/S0.toml": 1, "sites/S1.toml": 1}


@pytest.mark.end_to_end
def test_each_rank_reads_each_site_file_once(pair, tmp_path):
    records = Opened(tmp_path / "opened", strace=False)
    command = [sys.executable, "-m", "wsi_fl", "train", "--set", *ROUND]
    subprocess.run(records.watched("train", command), check=True, cwd=pair.root, capture_output=True)
    counts = list_site_files((tmp_path / "opened" / "train.1.txt").read_text().splitlines())
    # the launcher and two ranks read the files, and the ranks the run's copies
    assert counts == {"sites/S0.toml": 3, "sites/S1.toml": 3, "S0/site.toml": 2, "S1/site.toml": 2}


def test_a_site_file_edited_in_a_run_does_not_change_it(pair, monkeypatch):
    file, loop_run = pair.root / "sites" / "S1.toml", loop.run

    def edit_first(sites, *given):
        file.write_text("no longer TOML")
        return loop_run(sites, *given)

    monkeypatch.setattr(loop, "run", edit_first)
    before = file.read_text()
    summary = train(pair, method="proxyfl", overrides=ROUND, backend="local")
    assert [row["site"] for row in summary["sites"]] == ["S0", "S1"]
    file.write_text(before)
    assert pair.pin_run(pair.root / summary["run"]).find_changed_settings("S1") == []
