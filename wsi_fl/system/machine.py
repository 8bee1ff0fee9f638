"""Functions of Linux with substitutes for macOS, and the environment of mpiexec or srun.

No other module depends on the system.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from wsi_fl.system.cgroups import bytes_allowed, cores_allowed

_NOT_OFFERED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Errors of `posix_fallocate` on a file system, or C library, without it."""
_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_HERE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Environment variables of a rank: number of ranks, its number, number of ranks on its machine."""
_MANAGERS = ("SLURM_", "PBS_", "LSB_", "SGE_", "PE_HOSTFILE", "COBALT_", "FLUX_", "LOADL_", "PALS_")
"""Prefixes of variables of resource managers, from which mpiexec reads the machines of a job."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables for the number of threads of a process."""
_BOX = re.compile(r"-{20,}")
_LONGEST = 200
"""Most characters quoted of a launcher's reason."""


def cores() -> list[int]:
    """Return the processor cores available to this process, within the limit of its container or job."""
    most = cores_allowed()
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[:most]
    return list(range(os.cpu_count() or 1))[:most]


def n_cores() -> int:
    """Return the number of processor cores available to this process."""
    return len(cores())


def free_bytes() -> int:
    """Return the free bytes of memory of the system, within the limit of this process's container or job.

    The total memory where free memory is unknown; 2⁶³ − 1 where both are.
    """
    allowed = bytes_allowed()
    return _free_of_system() if allowed is None else min(allowed, _free_of_system())


def _free_of_system() -> int:
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


def most_open_files() -> int:
    """Return the most files that this process may have open at once."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed < 0 else allowed


def allocate(descriptor: int, n_bytes: int) -> None:
    """Make a file at least `n_bytes` long and allocate it on disk, where the file system can do that.

    The descriptor is readable too: glibc reads the file where the file system (NFS) cannot allocate.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, n_bytes)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def launched_ranks() -> int | None:
    """Return the number of ranks started by mpiexec or srun; None without them.

    A batch script of Slurm is no rank, though Slurm numbers it as one; nor is a terminal of `srun --pty`.
    """
    size = _said(_SIZE[:-1] if "SLURM_PTY_PORT" in os.environ else _SIZE)
    return size if size is not None and (size > 1 or "OMPI_COMM_WORLD_SIZE" in os.environ) else None


def is_first() -> bool:
    """Return whether this process prints for all ranks: the first rank, or a process without ranks."""
    return launched_ranks() is None or not _said(_RANK)


def local_environment() -> dict[str, str]:
    """Return this environment without a resource manager's job, so that mpiexec starts ranks on this machine.

    A container or `salloc` inherits the variables of a job with other machines, or other names of them.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(_MANAGERS)}


def launcher_reason(said: str) -> str:
    """Return mpiexec's reason for starting nothing: its last line before the first box, else the box's text."""
    before, *boxes = (part.strip() for part in _BOX.split(said))
    reason = before.splitlines()[-1] if before else " ".join("".join(boxes[:1]).split())
    return reason[:_LONGEST] or "it printed nothing"


def threads_wanted() -> int | None:
    """Return the number of threads set by a variable such as OMP_NUM_THREADS; None where unset."""
    # numbers after a comma are for nested teams
    asked = (os.environ.get(name, "").partition(",")[0] for name in _THREADS)
    return next((int(number) for number in asked if number.isdecimal() and int(number)), None)


def share_of_threads() -> int:
    """Return the number of threads for this rank, such that all ranks on this machine share its cores."""
    everybody = min(os.cpu_count() or 1, cores_allowed() or sys.maxsize)
    return max(1, min(n_cores(), everybody // (_said(_HERE) or 1)))


def _said(names: Iterable[str]) -> int | None:
    """Return the first number in these variables; None without one."""
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)
