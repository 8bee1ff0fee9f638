"""The processes that prepare or predict slides together: one, or the ranks that mpiexec or srun started."""

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
    """The machine of a rank, and the cores that the rank may use."""

    host: str
    cores: list[int]


class _Outcome(TypedDict, total=False):
    """What became of a rank's work: its result (JSON), or its error and whether that is wrong usage."""

    result: Any
    error: str
    usage: bool


class _Alone:
    """One process, for which torch and MPI need not be loaded."""

    sites = running = (0,)

    def gather(self, documents: Sequence[_T], _: type[_T]) -> list[_T]:
        return list(documents)

    def abort(self, code: int = 1) -> None:
        pass


class Job:
    """This process among those of the job: which (`rank`) of how many (`size`), with how many cores (`threads`)."""

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
        """Tell people something, once for all ranks."""
        if self.first:
            say(text, style)

    def watched(self, watcher: Watcher | None) -> Watcher:
        """Return the watcher in the first rank and a silent one in the others, or where there is none."""
        return watcher if watcher and self.first else Silent()

    def mine(self, items: Sequence[_T]) -> list[_T]:
        """Return this rank's share of a list that all ranks have alike."""
        return list(items[self.rank :: self.size])

    def each(self, work: Callable[[], _T]) -> _T:
        """Do the work on every rank and return this rank's own result.

        A failure anywhere is told once, by the first rank, and ends all (SystemExit); what others had finished stays.
        """
        own: list[_T] = []
        self._together(lambda: own.append(work()))
        return own[0]

    def first_does(self, work: Callable[[], _T]) -> _T | None:
        """Do the work on the first rank while the others wait; return its result there and None elsewhere."""
        return self.each(lambda: work() if self.first else None)

    @contextmanager
    def first_holds(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Have the first rank enter a context, and all ranks go on once it has; it is left at the end."""
        with ExitStack() as stack:
            self.first_does(lambda: stack.enter_context(context))
            yield

    def share(
        self,
        items: Sequence[_T],
        work: Callable[[list[_T]], Iterable[_R]],
        tell: Callable[[float, _T], None] | None = None,
    ) -> list[_R]:
        """Give every rank its share of the items, and return the results of all ranks in the order of the items.

        Args:
            work: gives a result, plain enough for JSON, for each item of a share, in order.
            tell: told after each item how many of all items (float, an estimate) are done, and which was the last.
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
    """How many of its cores a rank may count as its own, given (host, cores) of all ranks."""
    host, cores = mine
    sharing = [sum(core in theirs for name, theirs in ranks if name == host) for core in cores]
    return max(1, int(sum(1 / n for n in sharing) + 1e-9))


def take_threads(share: int) -> None:
    """Have PyTorch take a share of the machine's cores, or fewer threads where people ask for fewer.

    In a rank PyTorch's own number is no guide: under Open MPI its mathematics begins with one thread.
    """
    import torch

    most = torch.get_num_threads() if launched_ranks() is None else share
    torch.set_num_threads(min(threads_wanted() or most, share))


def device_of_rank() -> torch.device:
    """cuda:(local rank) where there are GPUs, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    local = next((int(os.environ[name]) for name in names if name in os.environ), 0)
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)  # for every call that names no device, other threads' too
    torch.backends.cudnn.deterministic = True  # a run that goes on reaches what it would have
    return device
