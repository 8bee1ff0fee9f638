"""Metrics as files of trackers: what they hold is what the run's own files hold, and nothing else."""

import json
import math
import subprocess
import sys

import pytest
from conftest import make_study, metrics, refused

from wsi_fl.report import trackers
from wsi_fl.report.trackers import curves_of, write_mlflow
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.training.tracking import track
from wsi_fl.stages.training.train import train
from wsi_fl.stages.work.console import Silent

QUICK = ["train.rounds=2", "privacy.enabled=false"]


def test_tensorboard_reads_every_number_of_every_round(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    study = make_study(tmp_path / "study", n_sites=2)
    sets = [*QUICK, 'report.trackers=["tensorboard"]']
    run = study.root / train(study, method="proxyfl", overrides=sets, backend="local")["run"]
    for again in range(2):
        for site in ("S0", "S1"):
            found = EventAccumulator(str(run / "tracking" / "tensorboard" / site)).Reload()
            lines = metrics(run, site)
            assert set(found.Tags()["scalars"]) == set().union(*(values for _, values in curves_of(lines)))
            said = [(event.step, event.value) for event in found.Scalars("loss/proxy")]
            assert [step for step, _ in said] == [1, 2]
            for (_, value), line in zip(said, lines, strict=True):
                assert math.isclose(value, line["loss"]["proxy"], rel_tol=1e-6)
        if not again:
            track(RunFolder(run), ["tensorboard"], Silent())  # written anew, and not twice
    written = b"".join(path.read_bytes() for path in (run / "tracking").rglob("*") if path.is_file())
    assert b"_patient_" not in written and b"_slide_" not in written


def test_mlflow_reads_the_same(tmp_path):
    pytest.importorskip(
        "mlflow", reason="needs the extra `mlflow`, whose requirements do not fit constraints.txt"
    )
    from mlflow import MlflowClient

    curves = {"S0": [(1, {"loss/proxy": 0.5}), (2, {"loss/proxy": 0.25, "own/auroc": 1.0})]}
    write_mlflow(tmp_path / "mlflow", "00001-x", curves)
    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("00001-x")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "S0"
    history = client.get_metric_history(found.info.run_id, "loss/proxy")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.25)]


def test_a_missing_extra_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    study = make_study(tmp_path / "study", n_sites=1)
    sets = [*QUICK, 'report.trackers=["mlflow"]']
    refused(lambda: train(study, method="regular", overrides=sets, backend="local"), "wsi-fl[mlflow]")
    assert not study.runs.exists()


def test_a_tracker_that_fails_ends_nothing(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no room")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", ("json", fail))
    study = make_study(tmp_path / "study", n_sites=1)
    sets = [*QUICK, 'report.trackers=["tensorboard"]']
    run = study.root / train(study, method="regular", overrides=sets, backend="local")["run"]
    assert json.loads((run / "summary.json").read_text())["sites"] and "no room" in capsys.readouterr().err


def test_trackers_are_not_loaded_where_nobody_asks():
    code = "import sys, wsi_fl.stages.training.ranks; sys.exit(bool({'tensorboard', 'mlflow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
