"""A minute of `benchmarks/torture.py`: what the hour does, with a seed that stays. And whether its judge can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_study

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def attacks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_a_minute_of_torture_loses_nothing(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "torture.py"), "--turns", "2", "--seed", "3"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    told = json.loads(done.stdout)
    assert told["failures"] == [], done.stderr
    assert done.returncode == 0
    assert told["attempts"] == {"kill": 2, "flip": 8, "malformed": 28}
    assert told["kills"] >= 1
    assert told["ends"]["flip"].get("refused", 0) >= 1  # a flip that nobody notices proves nothing
    assert told["ends"]["malformed"].get("refused", 0) >= 10


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        ({"told": "wsi-fl: error: no such site\n", "code": 2}, ""),
        ({}, ""),
        ({"killed": True}, "hang"),
        ({"n_bytes": 3 << 30}, "memory"),
        ({"code": -11}, "crash"),
        ({"told": "Traceback (most recent call last)\nwsi-fl: error: x\n", "code": 1}, "traceback"),
        ({"told": "wsi-fl: error: unexpected KeyError\n", "code": 1}, "unexpected"),
        ({"code": 1}, "lines"),
        ({"told": "wsi-fl: error: a\nwsi-fl: error: b\n", "code": 1}, "lines"),
    ],
)
def test_the_judge_of_torture_sees_what_no_command_may_do(attacks, ended, fault):
    from attacks.running import Ended

    calm = {"code": 0, "said": "", "told": "", "seconds": 1.0, "n_bytes": 10, "killed": False}
    wrong = Ended(**(calm | ended)).wrong()
    assert wrong.startswith(fault)
    assert bool(wrong) == bool(fault)


def test_the_judge_of_torture_sees_a_different_result(attacks, tmp_path):
    from attacks.kills import comparable, different
    from attacks.studies import outcome

    study = make_study(tmp_path / "study", n_sites=2)
    other = tmp_path / "other"
    shutil.copytree(study.root, other)
    assert outcome(study.root)
    assert different(outcome(study.root), outcome(other)) == []
    store = next((other / "stores").rglob("*.h5"))
    _change_one_value(store)
    assert different(outcome(study.root), outcome(other)) == [store.relative_to(other).as_posix()]
    store.unlink()
    assert different(outcome(study.root), outcome(other)) == [store.relative_to(other).as_posix()]
    # a run that died before it was known what it is leaves its number behind, and nothing else may differ
    made = {"runs/00001-fml-p/sites/S0/metrics.jsonl": "[]"}
    again = {"runs/00002-fml-p/sites/S0/metrics.jsonl": "[]"}
    assert comparable("train openly", made) == comparable("train openly", again)
    assert comparable("train openly", made) != comparable("train openly", made | again | {"runs/x": ""})


@pytest.mark.parametrize(
    ("hears", "fault"),
    [
        ({}, "check --all: finds no damage"),
        ({"check": 1, "train": 1}, "tile --all: silently different: "),
        ({"check": 1, "train": 1, "tile": 1}, "tile --all: does not mend it"),
        ({"check": 1}, "tile --all: silently different: "),
    ],
)
def test_the_judge_of_flips_sees_damage_that_nobody_finds_or_mends(
    attacks, tmp_path, monkeypatch, hears, fault
):
    from attacks import flips
    from attacks.running import Ended

    study = make_study(tmp_path / "study", n_sites=2)
    store = next((study.root / "stores").rglob("*.h5")).relative_to(study.root).as_posix()

    def nothing_done(command, _):
        code = hears.get(command[0], 0)
        told = "wsi-fl: error: damaged\n" * bool(code)
        return Ended(code, "", told, 1.0, 10, killed=False, finds=command[0] == "check")

    monkeypatch.setattr(flips, "prepared", lambda *_: study.root)
    monkeypatch.setattr(flips, "_drawn", lambda *_: store)
    monkeypatch.setattr(flips, "hurt", lambda path, _: _change_one_value(path) or "a value")
    monkeypatch.setattr(flips, "run", nothing_done)
    monkeypatch.setattr(flips, "result_of", lambda _, command: flips.made_by(command, study.root))
    result = flips.attack(1, tmp_path)
    assert result.end == "failed" and result.told.startswith(fault)


def _change_one_value(path):
    import h5py

    with h5py.File(path, "r+") as file:
        values = file["y"] if "y" in file else file["label"]
        values[0] = 1 - values[0]
