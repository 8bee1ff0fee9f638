"""Tests of `train --seeds`: a series of runs, completed by resuming any of them."""

import json
import re

import pytest
from conftest import interrupted_after

from wsi_fl.stages.training import train as training
from wsi_fl.stages.training.train import resume_series, train_series
from wsi_fl.study.folder import load_run_pipeline


def series(study, seeds, *overrides):
    return train_series(study, seeds=seeds, method="regular", overrides=overrides, backend="local")


def seeds_of(study):
    return [load_run_pipeline(path).train.seed for path in sorted(study.runs_path.glob("0*/config.toml"))]


def test_an_interrupted_series_is_completed_by_resuming_one_of_its_runs(pair):
    with interrupted_after(5):  # in the second run
        series(pair, 3, "train.rounds=2")
    assert seeds_of(pair) == [0, 1]
    document = resume_series(pair, "1", backend="local")
    assert document["seeds"] == [0, 1, 2] == seeds_of(pair)
    assert [row["rounds"] for run in document["runs"] for row in run["sites"]] == [2] * 6
    assert resume_series(pair, "3", backend="local") == document


@pytest.mark.slow
def test_ctrl_c_between_two_runs_of_a_series_names_the_command_that_resumes(pair, monkeypatch):
    real = training.train_pipeline

    def begin(study, pipeline, *args, **kwargs):
        if pipeline.train.seed == 1:  # before its run has a name
            raise KeyboardInterrupt
        return real(study, pipeline, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(training, "train_pipeline", begin)
        series(pair, 2)
    (run,) = re.findall(r"`wsi-fl train --resume (\S+)`", str(stopped.value))
    resume_series(pair, run, backend="local")
    assert seeds_of(pair) == [0, 1]


def test_a_series_is_one_run_per_seed_and_warnings_about_stores_appear_once(pair, wsi_fl):
    def ran(*arguments):
        return wsi_fl("train", *arguments, "--backend", "local", "--json", cwd=pair.root)

    sets = ("train.seed=4", "train.rounds=1", "tile.size_px=99")
    done = ran("--method", "regular", "--seeds", 2, *(word for one in sets for word in ("--set", one)))
    document = json.loads(done.stdout)
    assert document["method"] == "regular" and document["seeds"] == [4, 5] == seeds_of(pair)
    assert [run["run"] for run in document["runs"]] == [f"runs/0000{k}-regular-small" for k in (1, 2)]
    assert done.stderr.count("this pipeline would cut 99 px") == 1
    assert json.loads(ran("--resume", 1).stdout) == document
    for arguments, words in (
        (("--seeds", 0), "--seeds must be at least 1"),
        (("--without", "S1"), "--without belongs to --resume"),
        (("--resume", 1, "--seeds", 2), "leave out --set, --pipeline, --seeds"),
    ):
        done = ran(*arguments)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
