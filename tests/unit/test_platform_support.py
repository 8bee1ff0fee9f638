"""Functions of Linux and their replacements on macOS."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wsi_fl.system import cgroups, files, machine
from wsi_fl.system.direct_io import BulkFile, empty_aligned
from wsi_fl.system.files import file_lock
from wsi_fl.types import WsiFlError

HOLDER = """
import sys, time
from pathlib import Path
from wsi_fl.system.files import file_lock

with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["here", "elsewhere"])
def platform(request, monkeypatch):
    """Use this system, and one without the functions of Linux."""
    if request.param == "elsewhere":
        for name in ("sched_getaffinity", "posix_fallocate", "O_DIRECT", "sysconf"):
            monkeypatch.delattr(os, name)
        monkeypatch.setattr(Path, "read_text", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    return request.param


def test_cores_memory_and_files_are_numbers_to_count_on(platform):
    assert machine.n_cores() == len(machine.list_cores()) >= 1
    assert machine.free_bytes() > 1 << 20 and machine.max_open_files() >= 8
    assert machine.peak_bytes() > 1 << 20


def test_a_lock_is_held_by_one_and_goes_with_its_holder_even_when_that_is_killed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"kept")
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(WsiFlError, match="busy"), file_lock(path, "busy"):
            pass
        holder.kill()
    with file_lock(path, "busy", patience_s=2), pytest.raises(WsiFlError, match="again"), file_lock(path, "again"):
        pass
    assert path.read_bytes() == b"kept"


def test_arrays_are_written_at_their_offset(tmp_path, platform):
    path = tmp_path / "pixels"
    path.write_bytes(b"")
    first, second = empty_aligned((4096,)), empty_aligned((100,))
    first[:], second[:] = 1, 2
    with BulkFile(path, 8292) as file:
        file.write(second, 8192)
        file.write(first, 4096)
    found = path.read_bytes()
    assert len(found) == 8292 and found[4096:8192] == b"\1" * 4096 and found[8192:] == b"\2" * 100


GIB = 1 << 30
GROUPS = {
    "a container of version 2": (
        "0::/\n",
        {"cpu.max": "250000 100000", "memory.max": f"{8 * GIB}", "memory.current": f"{3 * GIB}"},
        3,
        5 * GIB,
    ),
    "a job of Slurm, whose step has no limit of its own": (
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user\n",
        {
            "system.slice/slurmstepd.scope/job_7/memory.max": f"{4 * GIB}",
            "system.slice/slurmstepd.scope/job_7/memory.current": f"{GIB}",
            "system.slice/slurmstepd.scope/job_7/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
            "system.slice/slurmstepd.scope/job_7/step_0/memory.max": "max",
            "system.slice/slurmstepd.scope/job_7/step_0/memory.current": f"{GIB}",
            "system.slice/slurmstepd.scope/job_7/cpu.max": "max 100000",
            "system.slice/cpu.max": "400000 100000",
        },
        4,
        3 * GIB + GIB // 2,
    ),
    "a container of version 1": (
        "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/\n",
        {
            "cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/docker/ab/memory.limit_in_bytes": f"{2 * GIB}",
            "memory/docker/ab/memory.usage_in_bytes": f"{GIB}",
            "memory/docker/ab/memory.stat": "total_inactive_file 4096\n",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": f"{9 * GIB}",
        },
        1,
        GIB + 4096,
    ),
    "a path that cannot be seen from inside": (
        "4:memory:/docker/ab\n1:cpu:/docker/ab\n",
        {
            "cpu/cpu.cfs_quota_us": "150000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": f"{GIB}",
            "memory/memory.usage_in_bytes": f"{2 * GIB}",
        },
        2,
        0,
    ),
    "no limit": ("0::/user.slice\n", {"user.slice/cpu.max": "max 100000", "user.slice/memory.max": "max"}, None, None),
    "no groups": ("", {}, None, None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_limits_of_a_container_or_job_replace_those_of_the_machine(tmp_path, monkeypatch, name):
    membership, limits, cores, room = GROUPS[name]
    (tmp_path / "membership").write_text(membership)
    for file, text in limits.items():
        path = tmp_path / "groups" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "_system_free_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "groups")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert machine.n_cores() == (64 if cores is None else cores)
    assert machine.threads_per_rank() == max(1, (64 if cores is None else cores) // 2)
    assert machine.free_bytes() == (100 * GIB if room is None else room)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, 512, 524])
@pytest.mark.parametrize("busy", [None, "busy"])
def test_a_disk_without_locks_is_reported_in_one_line(tmp_path, monkeypatch, number, busy):
    def none(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", none)
    with pytest.raises(WsiFlError, match=r"locks no files \([^\n]*another disk$"), file_lock(tmp_path / "x", busy):
        pass


FAULTS = """
import resource, sys
import numpy as np
from wsi_fl.system.machine import keep_freed_memory

if sys.argv[1:]:
    keep_freed_memory()
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(1 << 20) for _ in range(8)]
    del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="a setting of glibc")
def test_freed_memory_is_reused_and_not_returned_to_the_system(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)

    def count_faults(*arguments):
        command = [sys.executable, "-c", FAULTS, *arguments]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    kept = count_faults("keep")  # for 64 MiB: 16384 pages, or 32 huge ones
    assert kept < 16 < count_faults()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")
    assert count_faults("keep") > kept  # a setting of the user stays


@pytest.mark.parametrize(
    ("load", "given", "policy"), [(0.5, None, None), (64.0, None, "passive"), (64.0, "active", "active")]
)
def test_threads_sleep_on_a_busy_machine_unless_told_otherwise(monkeypatch, load, given, policy):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_WAIT_POLICY": given})
    machine.let_threads_sleep()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
