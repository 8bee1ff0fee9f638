"""The demo of hospitals: its processes end with it, foreign folders stay unchanged, and it writes a score matrix."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import refused
from federation_fixtures import needs_flare
from open_tracing import Opened

from wsi_fl.hospitals.demo import DemoMachine, child_processes, run_federation_demo
from wsi_fl.types import WsiFlError

pytestmark = pytest.mark.end_to_end

WAITS = """
import os, pathlib, sys, time
pathlib.Path("pid").write_text(str(os.getpid()))
if sys.argv[1] == "fails":
    while not pathlib.Path("../A/pid").exists():
        time.sleep(0.02)
    sys.exit("wsi-fl: error: so it is")
print("Ctrl-C ends it", flush=True)
time.sleep(60)
"""


def make_place(root, name):
    """Return a folder in which `wsi-fl` is a program that waits or fails."""
    (root / name / "wsi_fl").mkdir(parents=True)
    (root / name / "wsi_fl" / "__main__.py").write_text(WAITS)
    (root / name / "wsi_fl" / "__init__.py").touch()
    return DemoMachine(name, root / name, root / name)


def has_ended(place):
    """Return whether the process of a folder has ended."""
    try:
        os.kill(int((place.working_folder / "pid").read_text()), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("by", [KeyboardInterrupt, WsiFlError])
def test_all_processes_end_with_the_demo(tmp_path, by):
    place = make_place(tmp_path, "A")
    with pytest.raises(by), child_processes() as crew:
        crew.start_server(place, "waits")
        assert not has_ended(place)
        if by is WsiFlError:
            crew.run(make_place(tmp_path, "B"), "fails")
        raise KeyboardInterrupt
    assert has_ended(place)


def test_one_failure_ends_the_other_processes_at_once_and_is_reported_in_one_line(tmp_path):
    places = [make_place(tmp_path, name) for name in "AB"]
    began = time.monotonic()
    with child_processes() as crew:
        work = lambda place: crew.run(place, "fails" if place.name == "B" else "waits")  # noqa: E731
        refused(lambda: crew.run_parallel(work, places), "B: wsi-fl fails: so it is", error=WsiFlError)
    assert all(has_ended(place) for place in places) and time.monotonic() - began < 30


@needs_flare
def test_a_foreign_folder_and_a_finished_demo_are_left_unchanged(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    refused(lambda: run_federation_demo(tmp_path), "is not empty and no finished demo")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    (tmp_path / "demo.json").write_text(json.dumps({"report": "there"}))
    assert run_federation_demo(tmp_path) == {"report": "there"}


@needs_flare
@pytest.mark.slow
def test_four_hospitals_get_a_score_matrix_and_open_no_file_of_another(tmp_path, monkeypatch):
    opened = Opened(tmp_path / "opened")
    python = tmp_path / "python"
    words = " ".join(opened.watched("$(basename $(dirname $XDG_STATE_HOME)).$$", [sys.executable]))
    python.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    python.chmod(0o700)
    root = tmp_path / "demo"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        document = run_federation_demo(root)
    names = {"C1", "C2", "C3", "C4"}
    assert set(document["scores"]["models"]) == set(document["scores"]["hospitals"]) == names
    assert all(row["epsilon"] <= row["max_epsilon"] for row in document["sites"])
    for page in (document["report"], *document["reports"].values()):
        assert "<html" in Path(page).read_text()
    for name in (*names, "coordinator", "server"):
        assert opened.below(root, name, but=[]) and not opened.below(root, name, but=[root / name])
    page = Path(document["report"]).read_text()
    assert "patient_0" not in page and str(tmp_path) not in page
    assert not subprocess.run(["pgrep", "-f", str(root)], check=False, capture_output=True).stdout
