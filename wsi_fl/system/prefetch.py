"""Work in threads with results in order, used for all prefetching."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from itertools import count, islice, takewhile
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def map_in_order(
    task: Callable[[_T], _R], items: Iterable[_T], *, threads: int, ahead: int
) -> Generator[_R, None, None]:
    """Call a task for each item in threads and yield the results in the order of the items.

    Items are drawn by the consumer's thread, each when its call may begin. Queues are used instead of futures, whose
    overhead holds the interpreter's lock and delays decoding threads. An error of a call, or of drawing an item, is
    raised here.

    Args:
        items: any number of them, even infinite.
        threads: number of threads, which end when the iterator is closed or exhausted.
        ahead: calls that may begin before the consumer is done with the last result.
    """
    to_do: SimpleQueue[tuple[int, _T] | None] = SimpleQueue()
    done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
    stopped = Event()
    numbered = enumerate(items)
    workers: list[Thread] = []
    results: dict[int, _R] = {}

    def run_job(job: tuple[int, _T] | None) -> bool:
        if job is None or stopped.is_set():
            return False
        try:
            done.put((job[0], task(job[1]), None))
        except BaseException as error:  # handed to the consumer, who raises it
            done.put((job[0], None, error))
        return True

    def run_jobs() -> None:
        while run_job(to_do.get()):  # no variable holds the last item
            pass

    def start_jobs(n: int) -> int:
        n_begun = 0
        for job in islice(numbered, n):
            to_do.put(job)
            n_begun += 1
            if len(workers) < threads:
                worker = Thread(target=run_jobs, daemon=True)
                worker.start()
                workers.append(worker)
        return n_begun

    try:
        n_begun, k = start_jobs(ahead + 1), 0
        while k < n_begun:
            while k not in results:
                number, result, error = done.get()
                if error is not None:
                    try:
                        raise error
                    finally:
                        del error  # its traceback holds this frame
                results[number] = result
                del result
            yield results.pop(k)
            k += 1
            n_begun += start_jobs(1)
    finally:
        stopped.set()
        for _ in workers:
            to_do.put(None)
        for worker in workers:
            if worker is not current_thread():  # which may be collecting garbage
                worker.join()
        while not done.empty():  # errors hold frames that hold the queue
            done.get()


def prefetch_items(items: Iterable[_T], n: int) -> Generator[_T, None, None]:
    """Yield the items, computed by a thread up to n ahead of the consumer, and close their generator at the end."""
    iterator, end = iter(items), object()
    with closing(map_in_order(lambda _: next(iterator, end), count(), threads=1, ahead=n)) as prefetched:
        try:
            yield from takewhile(lambda item: item is not end, prefetched)
        finally:
            prefetched.close()
            if isinstance(iterator, Generator):
                iterator.close()
