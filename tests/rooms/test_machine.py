"""What Linux offers, and what stands in for it on macOS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wsi_fl.system import machine
from wsi_fl.system.bulk import BulkFile, aligned_empty
from wsi_fl.system.files import alone
from wsi_fl.types import WsiFlError

HOLDER = """
import sys, time
from pathlib import Path
from wsi_fl.system.files import alone

with alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["here", "elsewhere"])
def where(request, monkeypatch):
    """This system, and one that lacks what Linux has."""
    if request.param == "elsewhere":
        for name in ("sched_getaffinity", "posix_fallocate", "O_DIRECT", "sysconf"):
            monkeypatch.delattr(os, name)
        monkeypatch.setattr(Path, "read_text", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    return request.param


def test_cores_memory_and_files_are_numbers_to_count_on(where):
    assert machine.n_cores() == len(machine.cores()) >= 1
    assert machine.free_bytes() > 1 << 20 and machine.most_open_files() >= 8
    assert machine.peak_bytes() > 1 << 20


def test_a_lock_is_held_by_one_and_goes_with_its_holder_even_when_that_is_killed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"kept")
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(WsiFlError, match="busy"), alone(path, "busy"):
            pass
        holder.kill()
    with alone(path, "busy", patience_s=2), pytest.raises(WsiFlError, match="again"), alone(path, "again"):
        pass
    assert path.read_bytes() == b"kept"


def test_arrays_are_written_where_they_belong(tmp_path, where):
    path = tmp_path / "pixels"
    path.write_bytes(b"")
    first, second = aligned_empty((4096,)), aligned_empty((100,))
    first[:], second[:] = 1, 2
    with BulkFile(path, 8292) as file:
        file.write(second, 8192)
        file.write(first, 4096)
    found = path.read_bytes()
    assert len(found) == 8292 and found[4096:8192] == b"\1" * 4096 and found[8192:] == b"\2" * 100
