"""File openings are traced in a process and its children, for relative and missing paths, too."""

import subprocess
import sys

import pytest
from open_tracing import Opened, by_strace, opening


@pytest.mark.parametrize("strace", [True, False])
def test_files_opened_by_a_process_and_its_children_are_noted_and_others_are_not(tmp_path, strace):
    if strace and not by_strace():
        pytest.skip("strace is not here, or may not look")
    opened = Opened(tmp_path / "notes", strace=strace)
    mine, other, untouched = (tmp_path / name / "file" for name in ("mine", "other", "untouched"))
    for path in (mine, other, untouched):
        path.parent.mkdir()
        path.write_text("a")
    code = f"""
import os, subprocess
open({str(mine)!r}).close()
os.chdir({str(other.parent)!r})
subprocess.run({opening(other.relative_to(other.parent))!r}, check=True)
try:
    open("missing")
except OSError:
    pass
"""
    subprocess.run(opened.watched("A", [sys.executable, "-c", code]), check=True)
    found = opened.below(tmp_path, "A", but=[opened.folder, mine.parent])
    assert [path for path in found if path != other.parent] == [other, other.parent / "missing"]
    assert mine in opened.below(tmp_path, "A", but=[])
    assert not opened.below(tmp_path, "B", but=[])
