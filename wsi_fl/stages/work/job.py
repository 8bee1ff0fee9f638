"""Parallel work on slides: one process, or the ranks of mpiexec or srun."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import TypedDict

from wsi_fl.stages.work.console import Silent, Watcher, reason_of, say
from wsi_fl.system.machine import cores, launched_ranks, threads_wanted
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_R = TypeVar("_R")


class _Cores(TypedDict):
    """The machine of a rank, and its usable cores."""

    host: str
    cores: list[int]


class _Outcome(TypedDict, total=False):
    """The outcome of a rank's work: its result (JSON), or its error and whether that is wrong usage."""

    result: Any
    error: str
    usage: bool


class _Alone:
    """Communication of a single process, without torch and MPI."""

    sites = running = (0,)

    def gather(self, documents: Sequence[_T], _: type[_T]) -> list[_T]:
        return list(documents)

    def abort(self, code: int = 1) -> None:
        pass


class Job:
    """This process among those of the job: its `rank`, the number of ranks (`size`) and its cores (`threads`)."""

    def __init__(self) -> None:
        ranks = launched_ranks()
        if ranks is None:
            self._comm: Any = _Alone()
        else:
            from wsi_fl.federation.comm import MpiComm

            self._comm = MpiComm(inf, tuple(range(ranks)))
        self.rank, self.size = int(self._comm.sites[0]), len(self._comm.running)
        mine: _Cores = {"host": socket.gethostname(), "cores": cores()}
        told = [(one["host"], one["cores"]) for one in self._comm.gather([mine], _Cores)]
        self.threads = _share_of_cores((mine["host"], mine["cores"]), told)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def say(self, text: str, style: str = "") -> None:
        """Print a message once for all ranks."""
        if self.first:
            say(text, style)

    def watched(self, watcher: Watcher | None) -> Watcher:
        """Return the watcher on the first rank, and a silent one on others or without a watcher."""
        return watcher if watcher and self.first else Silent()

    def mine(self, items: Sequence[_T]) -> list[_T]:
        """Return this rank's share of a list common to all ranks."""
        return list(items[self.rank :: self.size])

    def each(self, work: Callable[[], _T]) -> _T:
        """Do the work on every rank and return the result of this rank.

        A failure anywhere is printed once, by the first rank, and ends all (SystemExit); finished work stays.
        """
        own: list[_T] = []
        self._together(lambda: own.append(work()))
        return own[0]

    def first_does(self, work: Callable[[], _T]) -> _T | None:
        """Do the work on the first rank while the others wait; return its result there, None elsewhere."""
        return self.each(lambda: work() if self.first else None)

    @contextmanager
    def first_holds(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Hold a context on the first rank; all ranks wait until it is entered."""
        with ExitStack() as stack:
            self.first_does(lambda: stack.enter_context(context))
            yield

    def share(
        self,
        items: Sequence[_T],
        work: Callable[[list[_T]], Iterable[_R]],
        tell: Callable[[float, _T], None] | None = None,
    ) -> list[_R]:
        """Distribute the items over the ranks; return all results in the order of the items.

        Args:
            work: yields a result, plain enough for JSON, for each item of a share, in order.
            progress: called after each item with the estimated number (float) of all finished items, and the item.
        """
        mine = self.mine(items)

        def do() -> list[_R]:
            found: list[_R] = []
            for item, result in zip(mine, work(mine), strict=True):
                found.append(result)
                if tell is not None:
                    tell(len(found) * len(items) / len(mine), item)
            return found

        parts = self._together(do)
        return [parts[k % self.size][k // self.size] for k in range(len(items))]

    def _together(self, work: Callable[[], _T]) -> list[_T]:
        """Do the work on every rank and return all results (JSON) in order of ranks."""
        failure: BaseException | None = None
        outcome: _Outcome = {}
        try:
            outcome["result"] = work()
        except Exception as error:
            failure = error
            place = Path(getattr(error, "filename", None) or "the store")
            outcome = {"error": reason_of(error, place), "usage": isinstance(error, UsageError)}
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


def _share_of_cores(mine: tuple[str, list[int]], ranks: Sequence[tuple[str, list[int]]]) -> int:
    """Return the number of cores of a rank, shared cores divided, given (host, cores) of all ranks."""
    host, cores = mine
    sharing = [sum(core in theirs for name, theirs in ranks if name == host) for core in cores]
    return max(1, int(sum(1 / n for n in sharing) + 1e-9))


def take_threads(share: int) -> None:
    """Set PyTorch's threads to a share of the machine's cores, or fewer if so requested.

    On a rank PyTorch's default is useless: one thread under Open MPI.
    """
    import torch

    most = torch.get_num_threads() if launched_ranks() is None else share
    torch.set_num_threads(min(threads_wanted() or most, share))


def device_of_rank() -> torch.device:
    """Return cuda:(local rank) where there are GPUs, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    local = next((int(os.environ[name]) for name in names if name in os.environ), 0)
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)  # default of calls without a device, in all threads
    torch.backends.cudnn.deterministic = True  # a resumed run equals an uninterrupted one
    return device
