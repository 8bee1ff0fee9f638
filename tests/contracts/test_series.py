"""`train --seeds`: a series of runs, completed by resuming any of them."""

import json
import re

import pytest
from conftest import interrupted_after, make_study

from wsi_fl.stages.training import train as training
from wsi_fl.stages.training.train import resume_series, train_series
from wsi_fl.study.folder import load_pipeline


@pytest.fixture
def study(tmp_path):
    return make_study(tmp_path / "study", n_sites=2)


def seeds_of(study):
    return [load_pipeline(path).train.seed for path in sorted(study.runs.glob("0*/config.toml"))]


def test_a_series_is_one_run_per_seed(study):
    given = ["train.seed=4", "train.rounds=1"]
    document = train_series(study, seeds=3, method="regular", overrides=given, backend="local")
    assert document["method"] == "regular"
    assert document["seeds"] == [4, 5, 6] == seeds_of(study)
    assert [run["run"] for run in document["runs"]] == [f"runs/0000{k}-regular-small" for k in (1, 2, 3)]


def test_an_interrupted_series_is_completed_by_resuming_one_of_its_runs(study):
    with interrupted_after(5):  # in the second run
        train_series(study, seeds=3, method="regular", overrides=["train.rounds=2"], backend="local")
    assert seeds_of(study) == [0, 1]
    document = resume_series(study, "1", backend="local")
    assert document["seeds"] == [0, 1, 2] == seeds_of(study)
    assert [row["rounds"] for run in document["runs"] for row in run["sites"]] == [2] * 6
    assert resume_series(study, "3", backend="local") == document


def test_what_is_unusual_of_the_stores_is_said_once_for_a_series(study, capsys):
    train_series(
        study, seeds=3, method="regular", overrides=["train.rounds=1", "tile.size_px=99"], backend="local"
    )
    assert capsys.readouterr().err.count("this pipeline would cut 99 px") == 1


@pytest.mark.slow
def test_ctrl_c_between_two_runs_of_a_series_names_the_way_on(study, monkeypatch):
    real = training.begin

    def begin(study, pipeline, *args, **kwargs):
        if pipeline.train.seed == 1:  # before its run has a name
            raise KeyboardInterrupt
        return real(study, pipeline, *args, **kwargs)

    monkeypatch.setattr(training, "begin", begin)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train_series(study, seeds=2, method="regular", backend="local")
    monkeypatch.undo()
    (run,) = re.findall(r"`wsi-fl train --resume (\S+)`", str(stopped.value))
    resume_series(study, run, backend="local")
    assert seeds_of(study) == [0, 1]


def test_the_command_line(study, wsi_fl):
    done = wsi_fl(
        "train", "--method", "regular", "--seeds", 2, "--backend", "local", "--json", cwd=study.root
    )
    assert len(json.loads(done.stdout)["runs"]) == 2
    done = wsi_fl("train", "--resume", 1, "--backend", "local", "--json", cwd=study.root)
    assert [run["run"][-13:] for run in json.loads(done.stdout)["runs"]] == ["regular-small"] * 2
    for arguments, words in (
        (("--seeds", 0), "--seeds must be at least 1"),
        (("--without", "S1"), "--without belongs to --resume"),
        (("--resume", 1, "--seeds", 2), "leave out --set, --pipeline, --seeds"),
    ):
        done = wsi_fl("train", *arguments, cwd=study.root)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
