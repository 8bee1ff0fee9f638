"""Work in threads, in order."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest

from wsi_fl.ordered import in_order


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("ahead", [1, 3, 100])
def test_numbers_come_in_order_and_only_so_far_ahead(threads, ahead):
    begun, ended = [], set()

    def task(k):
        begun.append(k)
        time.sleep(0.002 * (k % 3))
        ended.add(k)

    for place, k in enumerate(in_order(task, 30, threads=threads, ahead=ahead)):
        assert k == place
        assert set(range(k + 1)) <= ended
        assert max(begun) <= k + ahead
    assert sorted(begun) == list(range(30))


def test_tasks_run_at_the_same_time():
    together = threading.Barrier(3, timeout=20)
    assert list(in_order(lambda k: together.wait() and None, 6, threads=3, ahead=5)) == list(range(6))


def test_nothing_to_do_is_nothing():
    assert list(in_order(lambda k: None, 0, threads=3, ahead=2)) == []


def test_an_error_reaches_the_consumer_and_ends_the_threads():
    before = threading.active_count()

    def task(k):
        if k == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        list(in_order(task, 50, threads=2, ahead=4))
    assert threading.active_count() == before


def test_leaving_early_ends_the_threads_before_going_on():
    before, begun = threading.active_count(), []
    with closing(in_order(begun.append, 500, threads=3, ahead=50)) as numbers:
        next(numbers)
    n = len(begun)
    assert threading.active_count() == before
    time.sleep(0.02)
    assert len(begun) == n <= 51
