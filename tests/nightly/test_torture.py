"""A minute of `benchmarks/torture.py` with a fixed seed, and whether its judge can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def attacks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_a_minute_of_torture_loses_nothing(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "torture.py"), "--turns", "2", "--seed", "3"]
    given = {"capture_output": True, "text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    done = subprocess.run([*command, "--out", str(tmp_path)], check=False, **given)
    told = json.loads(done.stdout)
    assert told["failures"] == [] and done.returncode == 0, done.stderr
    assert told["attempts"] == {"kill": 2, "flip": 8, "malformed": 28} and told["kills"] >= 1
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
def test_the_judge_of_torture_detects_forbidden_effects_of_commands(attacks, ended, fault):
    from attacks.running import Ended

    calm = {"code": 0, "said": "", "told": "", "seconds": 1.0, "n_bytes": 10, "killed": False}
    wrong = Ended(**(calm | ended)).wrong()
    assert wrong.startswith(fault) and bool(wrong) == bool(fault)
