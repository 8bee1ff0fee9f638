"""The processes that tile a site together: one, or the ranks that mpiexec or srun started."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol, TypeVar

from typing_extensions import TypedDict

from wsi_fl.system.files import raise_if_full
from wsi_fl.types import UsageError, WsiFlError

T = TypeVar("T")


class _Cores(TypedDict):
    """The machine of a rank, and the cores that the rank may use."""

    host: str
    cores: list[int]


class _Outcome(TypedDict, total=False):
    """What became of a rank's work: its result (JSON), or its error and whether that is wrong usage."""

    result: Any
    error: str
    usage: bool


class _Ranks(Protocol):
    """What is needed of `federation.comm`."""

    sites: tuple[int, ...]
    running: tuple[int, ...]

    def gather(self, documents: Sequence[T], kind: type[T]) -> list[T]: ...


class _Alone:
    """One process, for which torch and MPI need not be loaded."""

    sites = running = (0,)

    def gather(self, documents: Sequence[T], kind: type[T]) -> list[T]:
        del kind
        return list(documents)

    def abort(self, code: int = 1) -> None:
        pass


class Job:
    """This process among those of the job.

    Attributes:
        rank, size: which one of how many.
        threads: how many cores are this rank's share of its machine.
    """

    def __init__(self) -> None:
        ranks = launched_ranks()
        if ranks is None:
            self._comm: Any = _Alone()
        else:
            from wsi_fl.federation.comm import MpiComm

            self._comm = MpiComm(inf, tuple(range(ranks)))
        comm: _Ranks = self._comm
        self.rank, self.size = comm.sites[0], len(comm.running)
        mine: _Cores = {"host": socket.gethostname(), "cores": sorted(os.sched_getaffinity(0))}
        told = [(one["host"], one["cores"]) for one in comm.gather([mine], _Cores)]
        self.threads = share_of_cores((mine["host"], mine["cores"]), told)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """This rank's share of a list that all ranks have alike."""
        return list(items[self.rank :: self.size])

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Does the work on every rank and gives all of them all results (JSON), in order of ranks.

        A failure anywhere is told once, by the first rank, and ends all; what others had finished stays.

        Raises:
            WsiFlError, UsageError: the failure, in the first rank.
            SystemExit: in the others.
        """
        failure: BaseException | None = None
        outcome: _Outcome = {}
        try:
            outcome["result"] = work()
        except Exception as error:
            failure = error
            outcome = {"error": _told(error), "usage": isinstance(error, UsageError)}
        except BaseException:  # Ctrl-C: the others would wait in vain
            self._comm.abort(1)
            raise
        if failure is not None and self.size == 1:
            raise failure
        outcomes: list[_Outcome] = self._comm.gather([outcome], _Outcome)
        for one in outcomes:
            if "error" in one:
                if not self.first:
                    raise SystemExit(2 if one["usage"] else 1)
                raise (UsageError if one["usage"] else WsiFlError)(one["error"])
        return [one["result"] for one in outcomes]


def share_of_cores(mine: tuple[str, list[int]], ranks: Sequence[tuple[str, list[int]]]) -> int:
    """How many of its cores a rank may count as its own, given (host, cores) of all ranks.

    Example:
        >>> share_of_cores(("a", [0, 1]), [("a", [0, 1]), ("a", [0, 1]), ("b", [0, 1])])
        1
    """
    host, cores = mine
    sharing = [sum(core in theirs for name, theirs in ranks if name == host) for core in cores]
    return max(1, int(sum(1 / n for n in sharing) + 1e-9))


def _told(error: Exception) -> str:
    """In one line."""
    if isinstance(error, WsiFlError):
        return str(error)
    try:
        raise_if_full(error, path_of(error))
    except WsiFlError as full:
        return str(full)
    return " ".join(f"{type(error).__name__}: {error}".split())


def path_of(error: Exception) -> Any:
    """What the error is about, as far as it says."""
    return getattr(error, "filename", None) or "the store"


_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


def launched_ranks() -> int | None:
    """How many ranks mpiexec or srun started with this one; None when nobody did."""
    for name in _SIZE_VARIABLES:
        if os.environ.get(name, "").isdigit():
            size = int(os.environ[name])
            return size if size > 1 or name.startswith("OMPI") else None
    return None
