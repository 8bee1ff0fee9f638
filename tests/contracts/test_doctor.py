"""`doctor`: every check has a row, and what is missing is said with its remedy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from wsi_fl.stages import doctor as stage
from wsi_fl.types import WsiFlError


def test_it_tries_what_the_work_needs(wsi_fl, tmp_path):
    document = json.loads(wsi_fl("doctor", "--json", cwd=tmp_path).stdout)
    names = [row["name"] for row in document["checks"]]
    assert names == ["Python", "OpenSlide", "PyTorch", "MPI", "GPU", "disk"]
    assert all(row["said"] for row in document["checks"])
    assert document["ok"] == all(row["ok"] for row in document["checks"])
    assert all(row["ok"] for row in document["checks"] if row["name"] != "disk"), document


@pytest.mark.parametrize(
    "problem", [WsiFlError("no slide can be read"), ImportError("no module\nof that name")]
)
def test_what_fails_is_one_line_and_the_rest_is_checked(monkeypatch, problem):
    def broken():
        raise problem

    monkeypatch.setattr(stage, "_openslide", broken)
    document = stage.doctor()
    failed = [row for row in document["checks"] if not row["ok"] and row["name"] != "disk"]
    assert not document["ok"] and [row["name"] for row in failed] == ["OpenSlide"]
    assert failed[0]["said"].startswith(" ".join(str(problem).split()))
    assert "\n" not in failed[0]["said"]


def test_imports_wait_until_they_are_needed():
    modules = "stages.training.train stages.prepare.tile"
    left_out = "torch opacus scipy skimage sklearn tifffile"
    imports = "; ".join(f"import wsi_fl.{module}" for module in modules.split())
    code = f"import sys; {imports}; print(*{{*{left_out.split()}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
