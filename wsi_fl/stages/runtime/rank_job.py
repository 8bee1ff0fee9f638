"""Parallel work on slides: one process, or the ranks of mpiexec or srun."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from typing_extensions import TypedDict

from wsi_fl.stages.runtime.console import SilentProgress, Watcher, describe_failure, print_message
from wsi_fl.system.machine import count_ranks, keep_freed_memory, list_cores, read_thread_setting
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_R = TypeVar("_R")


class Part(NamedTuple):
    """A fixed share of all slides, such as that of a job of an array."""

    number: int
    n_parts: int

    def __str__(self) -> str:
        return f"{self.number}/{self.n_parts}"

    def select_items(self, items: Sequence[_T]) -> list[_T]:
        """Return the items of this part."""
        return list(items[self.number - 1 :: self.n_parts])


def parse_part(text: str | None) -> Part | None:
    """Return the part "3/64"; None for None.

    Raises:
        UsageError: for another text, or a part that does not exist.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--part {text}: write the number of the part and of all parts, from 1/8 to 8/8")
    return Part(int(match[1]), int(match[2]))


class _RankCores(TypedDict):
    """The machine of a rank, its usable cores, and a name drawn by it."""

    host: str
    cores: list[int]
    name: str


class _RankOutcome(TypedDict, total=False):
    """The outcome of a rank's work: its result (JSON), or its error and whether that is wrong usage."""

    result: Any
    error: str
    usage: bool


class RankJob:
    """This process among those of the job.

    Attributes:
        rank: its number, and `size` that of all ranks.
        threads: its share of the machine's cores.
        group: a name that all ranks of the job share.
        part: the part of the slides that the job was given; None for whatever is free.
    """

    def __init__(self, part: Part | None = None) -> None:
        self.rank, self.size, self.part = 0, count_ranks() or 1, part
        rank_cores: _RankCores = {"host": socket.gethostname(), "cores": list_cores(), "name": secrets.token_hex(6)}
        cores_by_rank = [rank_cores]
        if count_ranks() is not None:
            from wsi_fl.federation.comm import MpiComm

            self._comm = MpiComm(inf, tuple(range(self.size)))
            self.rank = int(self._comm.sites[0])
            cores_by_rank = self._comm.gather([rank_cores], _RankCores)
        self.threads, self.group = _count_cores(rank_cores, cores_by_rank), cores_by_rank[0]["name"]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def print_message(self, text: str, style: str = "") -> None:
        """Print a message once for all ranks."""
        if self.is_first:
            print_message(text, style)

    def select_watcher(self, watcher: Watcher | None) -> Watcher:
        """Return the watcher on the first rank, and a silent one on others or without a watcher."""
        return watcher if watcher and self.is_first else SilentProgress()

    def local_share(self, items: Sequence[_T]) -> list[_T]:
        """Return this rank's share of a list common to all ranks."""
        return list(items[self.rank :: self.size])

    def run_on_ranks(self, work: Callable[[], _T]) -> _T:
        """Do the work on every rank and return the result of this rank.

        A failure anywhere is printed once, by the first rank, and ends all (SystemExit); finished work stays.
        """
        results: list[_T] = []
        self.collect_on_ranks(lambda: results.append(work()))
        return results[0]

    def run_on_first(self, work: Callable[[], _T]) -> _T | None:
        """Do the work on the first rank while the others wait; return its result there, None elsewhere."""
        return self.run_on_ranks(lambda: work() if self.is_first else None)

    @contextmanager
    def enter_on_ranks(self, context: AbstractContextManager[_T]) -> Iterator[_T]:
        """Enter a context on each rank; all wait until it is entered."""
        with ExitStack() as stack:
            yield self.run_on_ranks(lambda: stack.enter_context(context))

    def share_items(self, items: Sequence[_T], work: Callable[[list[_T]], Iterable[_R]]) -> list[_R]:
        """Distribute the items over the ranks; return all results in the order of the items.

        Args:
            work: yields a result, plain enough for JSON, for each item of a share, in order.
        """
        parts = self.collect_on_ranks(lambda: list(work(self.local_share(items))))
        return [parts[k % self.size][k // self.size] for k in range(len(items))]

    def collect_on_ranks(self, work: Callable[[], _T]) -> list[_T]:
        """Do the work on every rank and return all results (JSON) in order of ranks."""
        if self.size == 1:
            return [work()]
        outcome: _RankOutcome = {}
        try:
            outcome["result"] = work()
        except Exception as error:
            place = Path(getattr(error, "filename", None) or "the store")
            outcome = {"error": describe_failure(error, place), "usage": isinstance(error, UsageError)}
        except BaseException:  # Ctrl-C: the others would wait in vain
            self._comm.abort(1)
            raise
        outcomes: list[_RankOutcome] = self._comm.gather([outcome], _RankOutcome)
        for rank_outcome in outcomes:
            if "error" in rank_outcome:
                if not self.is_first:
                    raise SystemExit(2 if rank_outcome["usage"] else 1)
                raise (UsageError if rank_outcome["usage"] else WsiFlError)(rank_outcome["error"])
        return [rank_outcome["result"] for rank_outcome in outcomes]


def _count_cores(own: _RankCores, ranks: Sequence[_RankCores]) -> int:
    """Return the number of cores of a rank, shared cores divided, given those of all ranks."""
    n_sharing = [sum(core in rank["cores"] for rank in ranks if rank["host"] == own["host"]) for core in own["cores"]]
    return max(1, int(sum(1 / n for n in n_sharing) + 1e-9))


def take_threads(share: int) -> None:
    """Set PyTorch's threads to a share of the machine's cores, or fewer if so requested, and let it reuse memory.

    On a rank PyTorch's default is useless: one thread under Open MPI.
    """
    import torch

    keep_freed_memory()
    n_threads = torch.get_num_threads() if count_ranks() is None else share
    torch.set_num_threads(min(read_thread_setting() or n_threads, share))


def select_device() -> torch.device:
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
