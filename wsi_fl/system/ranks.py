"""What mpiexec or srun says to the processes that it starts, in their environment."""

from __future__ import annotations

import os
from collections.abc import Iterable

from wsi_fl.system.machine import n_cores

_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_HERE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def launched_ranks() -> int | None:
    """Return how many ranks mpiexec or srun started with this one; None when nobody did.

    A batch script of Slurm is no rank, though Slurm numbers it as one.
    """
    size = _said(_SIZE)
    return size if size is not None and (size > 1 or "OMPI_COMM_WORLD_SIZE" in os.environ) else None


def is_first() -> bool:
    """Return whether this process tells people what all ranks do: the first rank, or a process alone."""
    return launched_ranks() is None or not _said(_RANK)


def share_of_threads() -> int:
    """Return how many threads this rank may take, so that all ranks on this machine take no more than its cores."""
    return max(1, min(n_cores(), (os.cpu_count() or 1) // (_said(_HERE) or 1)))


def _said(names: Iterable[str]) -> int | None:
    """Return the number that the first of these variables holds which holds one."""
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)
