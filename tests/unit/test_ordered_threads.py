"""Work in threads returns its results in order."""

import threading
import time
from contextlib import closing
from itertools import count

import pytest
from conftest import refused

from wsi_fl.system.prefetch import map_in_order, prefetch_items
from wsi_fl.types import WsiFlError


@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (2, 3), (5, 1), (5, 100)])
def test_results_come_in_order_and_prefetching_is_bounded(threads, ahead):
    begun, ended = [], set()

    def task(k):
        begun.append(k)
        time.sleep(0.002 * (k % 3))
        ended.add(k)
        return k

    for place, k in enumerate(map_in_order(task, range(30), threads=threads, ahead=ahead)):
        assert k == place and set(range(k + 1)) <= ended and max(begun) <= k + ahead
    assert sorted(begun) == list(range(30))


def test_tasks_run_at_the_same_time():
    together = threading.Barrier(3, timeout=20)
    assert list(map_in_order(lambda k: (together.wait(), k)[1], range(6), threads=3, ahead=5)) == list(range(6))


def test_an_error_reaches_the_consumer_and_ends_the_threads():
    before = threading.active_count()

    def task(k):
        if k == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        list(map_in_order(task, count(), threads=2, ahead=4))
    assert threading.active_count() == before


def test_leaving_early_ends_the_threads_before_going_on():
    before, begun = threading.active_count(), []
    with closing(map_in_order(begun.append, range(500), threads=3, ahead=50)) as numbers:
        next(numbers)
    assert threading.active_count() == before and len(begun) <= 51


def test_prefetched_items_come_in_order_raise_errors_and_stop():
    closed = []

    def endless():
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    made = prefetch_items(endless(), 1)
    assert [next(made) for _ in range(3)] == [0, 1, 2]
    made.close()
    assert closed == [True]

    def broken():
        yield 1
        raise WsiFlError("damaged")

    made = prefetch_items(broken(), 2)
    assert next(made) == 1
    refused(lambda: next(made), "damaged", error=WsiFlError)
