"""Work in threads with results in order, used for all prefetching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count, islice, takewhile
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def map_in_order(
    task: Callable[[_T], _R], items: Iterable[_T], *, threads: int, ahead: int
) -> Generator[_R, None, None]:
    """Call a task for each item in threads and yield the results in the order of the items.

    Items are drawn by the consumer's thread, each when its call may begin. An error of a call, or of drawing an item,
    is raised here.

    Args:
        items: any number of them, even infinite.
        threads: number of threads, which end when the iterator is closed or exhausted.
        ahead: calls that may begin before the consumer is done with the last result.
    """
    remaining = iter(items)
    pool = ThreadPoolExecutor(threads)
    try:
        calls = deque(pool.submit(task, item) for item in islice(remaining, ahead + 1))
        while calls:
            yield calls.popleft().result()
            calls.extend(pool.submit(task, item) for item in islice(remaining, 1))
    finally:
        with suppress(RuntimeError):  # a thread of the pool that collects this garbage cannot join itself
            pool.shutdown(cancel_futures=True)


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
