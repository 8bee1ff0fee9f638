"""Slides that jobs share: any number of the same command, on one machine or on many, with or without MPI.

Each takes slides that nobody works on. When all are done, one of the jobs writes what follows of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from wsi_fl import __version__
from wsi_fl.stages.runtime.rank_job import Part, RankJob
from wsi_fl.system.join_work import join_work
from wsi_fl.system.shared_work import SharedWork, WorkKey
from wsi_fl.types import DiskFull, WsiFlError

_T = TypeVar("_T")
_D = TypeVar("_D")
_Work = Callable[[Iterator[_T]], Generator[Any, None, None]]
Watch = Callable[[int, int, str], None]
_LOOK_S = 1.0
"""Seconds between looks at what others have done."""
_MIN_WAIT_S, _MAX_WAIT_S = 0.02, 5.0
_CLOSING = "closing"
_MAX_NAMED_WORKERS, _MAX_NAMED_PARTS = 4, 20


class _Phase(Generic[_T]):
    """Items of one kind, and which of them are done or claimed, as seen in the last second."""

    def __init__(self, shared: SharedWork, name: str, items: Mapping[str, _T]) -> None:
        self._shared, self._name, self.items = shared, name, items
        self._look_time, self._n_done = float("-inf"), 0

    def _refresh_lists(self) -> None:
        if time.monotonic() - self._look_time > _LOOK_S:
            self._done, self._claimed = self._shared.list_items(self._name)
            self._n_done = len(self._done & self.items.keys())
            self._look_time = time.monotonic()

    def list_missing(self) -> list[str]:
        """Return the items that are not done."""
        done, _ = self._shared.list_items(self._name)
        return [name for name in self.items if name not in done]

    def claim_items(self) -> Iterator[str]:
        """Yield items that are free, each claimed: those that nobody took, then those of ended jobs."""
        for name in self.items:
            self._refresh_lists()
            if name not in self._claimed and self._shared.claim_item(self._name, name):
                yield name
        for name in self.items:
            self._refresh_lists()
            if name not in self._done and self._shared.claim_item(self._name, name):
                yield name

    def record_outcome(self, name: str, document: Any) -> int:
        """Record the outcome of an item; return the number of done items, those of others included."""
        self._shared.record_outcome(self._name, name, document)
        self._n_done += 1
        self._refresh_lists()
        return self._n_done


class SlideWork:
    """The work of a command on the slides of a site; made by `join_slide_work`.

    Attributes:
        job: the job of this process.
        shared: the folder of the work, in which files are written before they are moved to their places.
        job_items: the items of the last phase that this job did, its ranks together.
        n_missing: how many of them are not done, which are those of other parts.
        missing_parts: the numbers of these parts, of as many as this job's.
    """

    def __init__(self, job: RankJob, shared: SharedWork, site: str) -> None:
        self.shared, self.job, self._site = shared, job, site
        self.job_items: set[str] = set()
        self.n_missing = 0
        self.missing_parts: list[int] = []
        self._wait_text = ""

    def retry_items(self, phase: str, is_wrong: Callable[[str, Any], bool]) -> None:
        """Let items with wrong outcomes be done again, where this job alone continues unfinished work.

        Parts leave the outcomes of other parts as they are.
        """

        def forget_outcomes() -> None:
            others = [worker for worker in self.shared.list_workers() if worker.group != self.shared.group]
            if self.shared.is_resumed and self.job.part is None and not others:  # some may have joined since
                self.shared.forget_outcomes(phase, is_wrong)

        self.job.run_on_first(forget_outcomes)

    def share_items(
        self, phase: str, items: Mapping[str, _T], work: _Work[_T], watch: Watch, *, in_parts: bool = False
    ) -> dict[str, Any]:
        """Do the items that nobody else does, on all ranks, until all are done.

        Args:
            phase: a name for these items alone.
            items: name → item.
            work: yields the outcome (JSON) of each item that it draws, in order.
            watch: called with the number of done items, those of others included, of all, and a note.
            in_parts: whether a job with a part does that alone, without waiting for others.

        Returns:
            name → outcome of the done items, in the order of `items`.
        """
        part = self.job.part if in_parts else None
        names = list(items) if part is None else part.select_items(list(items))
        if part is not None:
            self._keep_parts(part)
        n_taken_before = self.shared.n_taken_over
        todo = _Phase(self.shared, phase, {name: items[name] for name in names})
        self.job.run_on_ranks(lambda: self._work_until_done(todo, work, watch, waits=part is None))
        # ranks look one after the other: an item is missing for all if it is for one
        missing = set(chain(*self.job.collect_on_ranks(_Phase(self.shared, phase, items).list_missing)))
        outcomes = self.job.run_on_ranks(
            lambda: {name: self.shared.read_outcome(phase, name) for name in items if name not in missing}
        )
        self.n_missing = len(missing)
        if part is not None:
            numbers = {number % part.n_parts + 1 for number, name in enumerate(items) if name in missing}
            self.missing_parts = sorted(numbers)
        n_taken = sum(self.job.collect_on_ranks(lambda: self.shared.n_taken_over - n_taken_before))
        if n_taken and phase != _CLOSING:
            self.job.print_message(f"  {self._site}: took over {n_taken} of the slides from jobs that died")
        self.job_items = {name for name, (group, _) in outcomes.items() if group == self.shared.group}
        return {name: document for name, (_, document) in outcomes.items()}

    def _keep_parts(self, part: Part) -> None:
        """Keep finished parts until the last one, whatever is started in between; say where other numbers are mixed."""
        earlier = self.shared.keep_unfinished(str(part.n_parts))
        if earlier not in ("", str(part.n_parts)):
            self.job.print_message(
                f"  {self._site}: --part {part} beside earlier parts of {earlier}: some slides may be in none of the "
                "parts, and wait for a job without --part",
                "yellow",
            )

    def close_work(self, write: Callable[[], _D]) -> _D:
        """Write what follows of all items, by one job for all; return its document (JSON)."""

        def write_once(items: Iterator[None]) -> Generator[dict[str, Any], None, None]:
            for _ in items:
                try:
                    yield {"document": write()}
                except DiskFull:
                    raise
                except WsiFlError as error:  # told by all who wait
                    yield {"error": str(error)}

        outcome = self.share_items(_CLOSING, {"store": None}, write_once, lambda *_: None)["store"]
        self.shared.finish_work()
        if "error" in outcome:
            raise WsiFlError(outcome["error"])
        document: _D = outcome["document"]
        return document

    def _work_until_done(self, phase: _Phase[_T], work: _Work[_T], watch: Watch, *, waits: bool) -> None:
        wait_start: float | None = None
        while True:
            n_done = self._do_free_items(phase, work, watch)
            missing = phase.list_missing()
            if not missing or (not waits and not n_done):
                return
            wait_start = time.monotonic() if n_done or wait_start is None else wait_start
            self._describe_wait(len(missing))
            watch(len(phase.items) - len(missing), len(phase.items), "waiting for other jobs")
            time.sleep(min(max(_MIN_WAIT_S, (time.monotonic() - wait_start) / 10), _MAX_WAIT_S))

    def _do_free_items(self, phase: _Phase[_T], work: _Work[_T], watch: Watch) -> int:
        """Do all items that are free, one after the other; return their number."""
        names: list[str] = []

        def draw_items() -> Iterator[_T]:
            for name in phase.claim_items():
                names.append(name)
                yield phase.items[name]

        n_done = 0
        try:
            with closing(work(draw_items())) as documents:
                for document in documents:
                    name = names[n_done]
                    watch(phase.record_outcome(name, document), len(phase.items), name)
                    n_done += 1
        finally:
            self.shared.release_claims()
        return n_done

    def _describe_wait(self, n_missing: int) -> None:
        """Print for which jobs this one waits, if it has not been printed yet."""
        workers = [worker for worker in self.shared.list_workers() if worker.group != self.shared.group]
        names = ", ".join(map(str, workers[:_MAX_NAMED_WORKERS]))
        if len(workers) > _MAX_NAMED_WORKERS:
            names += f" and {len(workers) - _MAX_NAMED_WORKERS} more"
        if names not in {"", self._wait_text}:
            have = f"which have {n_missing} of the slides"
            self.job.print_message(f"  {self._site}: waiting for other jobs, {have}: {names}")
            self._wait_text = names


def describe_parts(numbers: Sequence[int]) -> str:
    """Return the parts with these numbers in words, the first ones where there are many."""
    named = ", ".join(map(str, numbers[:_MAX_NAMED_PARTS])) + (", …" if len(numbers) > _MAX_NAMED_PARTS else "")
    return f"part {named}" if len(numbers) == 1 else f"parts {named}"


@contextmanager
def join_slide_work(job: RankJob, folder: Path, site: str, command: str, settings: Any) -> Iterator[SlideWork]:
    """Take part in a command's work on a site's slides, whose results are in a folder.

    Args:
        settings: all on which the results depend (JSON, paths as text); jobs with others are refused.
    """
    text = json.dumps([__version__, command, settings], sort_keys=True, default=str)
    key = WorkKey(command, hashlib.sha256(text.encode()).hexdigest())
    with job.enter_on_ranks(join_work(folder, key, f"site {site}", group=job.group)) as shared:
        yield SlideWork(job, shared, site)
