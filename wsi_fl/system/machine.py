"""What Linux offers and macOS may not, with a substitute for each, and what mpiexec or srun says.

Nothing else asks which system it is on.
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
"""What `posix_fallocate` says of a file system, or C library, without it."""
_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_HERE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables in the environment of a rank: how many there are, which it is, how many are on its machine."""
_MANAGERS = ("SLURM_", "PBS_", "LSB_", "SGE_", "PE_HOSTFILE", "COBALT_", "FLUX_", "LOADL_", "PALS_")
"""How variables begin by which resource managers name the machines of a job, and mpiexec believes them."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which people say how many threads a process takes."""
_BOX = re.compile(r"-{20,}")
_LONGEST = 200
"""Characters of a launcher's reason that are quoted."""


def cores() -> list[int]:
    """Return the processor cores that this process may use: no more than its container or job may keep busy."""
    most = cores_allowed()
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))[:most]
    return list(range(os.cpu_count() or 1))[:most]


def n_cores() -> int:
    """Return how many processor cores this process may use."""
    return len(cores())


def free_bytes() -> int:
    """Return how much memory the system, and the container or job of this process, has left.

    All there is where the system does not say; 2⁶³ − 1 where it says nothing.
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
    """Return how much memory this process has held at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def most_open_files() -> int:
    """Return how many files this process may have open at once."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed < 0 else allowed


def allocate(descriptor: int, n_bytes: int) -> None:
    """Make a file at least that long and give it its place on disk, where the file system can do that.

    It is open for reading too: glibc looks at what is there where the file system (NFS) leaves it the work.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, n_bytes)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def launched_ranks() -> int | None:
    """Return how many ranks mpiexec or srun started with this one; None when nobody did.

    A batch script of Slurm is no rank, though Slurm numbers it as one; nor is the terminal that `srun --pty` opens.
    """
    size = _said(_SIZE[:-1] if "SLURM_PTY_PORT" in os.environ else _SIZE)
    return size if size is not None and (size > 1 or "OMPI_COMM_WORLD_SIZE" in os.environ) else None


def is_first() -> bool:
    """Return whether this process tells people what all ranks do: the first rank, or a process alone."""
    return launched_ranks() is None or not _said(_RANK)


def local_environment() -> dict[str, str]:
    """Return this environment without a resource manager's job: mpiexec then starts ranks on this machine.

    A container or `salloc` hands on the variables of a job whose machines may go by other names, or be other ones.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(_MANAGERS)}


def launcher_reason(said: str) -> str:
    """Return the line in which mpiexec says why it started nothing: the last before its first box, else the box's."""
    before, *boxes = (part.strip() for part in _BOX.split(said))
    reason = before.splitlines()[-1] if before else " ".join("".join(boxes[:1]).split())
    return reason[:_LONGEST] or "it said nothing"


def threads_wanted() -> int | None:
    """Return how many threads people ask for by a variable such as OMP_NUM_THREADS; None where they ask for none."""
    # what follows a comma is for nested teams
    asked = (os.environ.get(name, "").partition(",")[0] for name in _THREADS)
    return next((int(number) for number in asked if number.isdecimal() and int(number)), None)


def share_of_threads() -> int:
    """Return how many threads this rank may take, so that all ranks on this machine take no more than its cores."""
    everybody = min(os.cpu_count() or 1, cores_allowed() or sys.maxsize)
    return max(1, min(n_cores(), everybody // (_said(_HERE) or 1)))


def _said(names: Iterable[str]) -> int | None:
    """Return the number that the first of these variables holds which holds one."""
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)
