"""Functions of Linux with substitutes for macOS, and the environment of mpiexec or srun.

No other module depends on the system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import socket
import sys
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from wsi_fl.system.cgroups import bytes_allowed, cores_allowed

_NOT_OFFERED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of `posix_fallocate` on a file system, or C library, without it."""
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Environment variables of a rank: number of ranks, its number, number of ranks on its machine."""
_MANAGERS = ("SLURM_", "PBS_", "LSB_", "SGE_", "PE_HOSTFILE", "COBALT_", "FLUX_", "LOADL_", "PALS_")
"""Prefixes of variables of resource managers, from which mpiexec reads the machines of a job."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables for the number of threads of a process."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_MAX_MMAP_THRESHOLD, _KEPT_BYTES = 32 << 20, 1 << 28
"""The largest threshold that glibc takes, and the free bytes at the end of the heap that it keeps."""
_BOX = re.compile(r"-{20,}")
_MAX_REASON = 200
"""Most characters quoted of a launcher's reason."""


def list_cores() -> list[int]:
    """Return the processor cores available to this process, within the limit of its container or job."""
    limit = cores_allowed()
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[:limit]
    return list(range(os.cpu_count() or 1))[:limit]


class ProcessIdentity(TypedDict):
    """A process among those of all machines; `start` is its time of start, against process numbers that come back."""

    host: str
    machine: str
    pid: int
    start: str


def identify_process() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _identify_machine(), "pid": pid, "start": _read_process(pid)[1]}


def is_running(identity: ProcessIdentity | None) -> bool | None:
    """Return whether a process runs; None where it is on another machine, or unknown."""
    if identity is None or identity["machine"] != _identify_machine():
        return None
    try:
        os.kill(identity["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    state, start = _read_process(identity["pid"])
    return state not in {"Z", "X"} and start in {identity["start"], ""}


def _identify_machine() -> str:
    """Return what processes have in common whose numbers can be compared: machine, start of it, container."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def _read_process(pid: int) -> tuple[str, str]:
    """Return the state of a process and its time of start; "" where the system tells neither."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def n_cores() -> int:
    """Return the number of processor cores available to this process."""
    return len(list_cores())


def free_bytes() -> int:
    """Return the free bytes of memory of the system, within the limit of this process's container or job.

    The total memory where free memory is unknown; 2⁶³ − 1 where both are.
    """
    allowed = bytes_allowed()
    return _system_free_bytes() if allowed is None else min(allowed, _system_free_bytes())


def _system_free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        with suppress(AttributeError, ValueError, OSError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MiB of freed memory for the next allocation; elsewhere nothing happens.

    Otherwise it returns each tensor above 128 KiB to the system, whose pages are then cleared and mapped again in every
    layer of every step. Settings of the environment (`MALLOC_…`, `GLIBC_TUNABLES`) are left as they are.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with suppress(AttributeError, OSError):
        c_library = ctypes.CDLL(None)
        c_library.mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        c_library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def max_open_files() -> int:
    """Return the most files that this process may have open at once."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed < 0 else allowed


def allocate_file(descriptor: int, n_bytes: int) -> None:
    """Make a file at least `count_bytes` long and allocate it on disk, where the file system can do that.

    The descriptor is readable too: glibc reads the file where the file system (NFS) cannot allocate.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, n_bytes)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def count_ranks() -> int | None:
    """Return the number of ranks started by mpiexec or srun; None without them.

    A batch script of Slurm is no rank, though Slurm numbers it as one; nor is a terminal of `srun --pty`.
    """
    size = _read_variable(_SIZE_VARIABLES[:-1] if "SLURM_PTY_PORT" in os.environ else _SIZE_VARIABLES)
    return size if size is not None and (size > 1 or "OMPI_COMM_WORLD_SIZE" in os.environ) else None


def is_first_rank() -> bool:
    """Return whether this process prints for all ranks: the first rank, or a process without ranks."""
    return count_ranks() is None or not _read_variable(_RANK_VARIABLES)


def local_environment() -> dict[str, str]:
    """Return this environment without a resource manager's job, so that mpiexec starts ranks on this machine.

    A container or `salloc` inherits the variables of a job with other machines, or other names of them.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(_MANAGERS)}


def launcher_reason(output: str) -> str:
    """Return mpiexec's reason for starting nothing: its last line before the first box, else the box's text."""
    preamble, *boxes = (part.strip() for part in _BOX.split(output))
    reason = preamble.splitlines()[-1] if preamble else " ".join("".join(boxes[:1]).split())
    return reason[:_MAX_REASON] or "it printed nothing"


def read_thread_setting() -> int | None:
    """Return the number of threads set by a variable such as OMP_NUM_THREADS; None where unset."""
    # numbers after a comma are for nested teams
    settings = (os.environ.get(name, "").partition(",")[0] for name in _THREAD_VARIABLES)
    return next((int(number) for number in settings if number.isdecimal() and int(number)), None)


def threads_per_rank() -> int:
    """Return the number of threads for this rank, such that all ranks on this machine share its cores."""
    machine_cores = min(os.cpu_count() or 1, cores_allowed() or sys.maxsize)
    return max(1, min(n_cores(), machine_cores // (_read_variable(_LOCAL_SIZE_VARIABLES) or 1)))


def _read_variable(names: Iterable[str]) -> int | None:
    """Return the first number in these variables; None without one."""
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)
