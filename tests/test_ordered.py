"""Work in threads, in order."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import closing, suppress

import pytest

from wsi_fl.system.ordered import in_order


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


def test_threads_that_cannot_be_started_leave_none_behind(monkeypatch):
    before, start, started = threading.active_count(), threading.Thread.start, []

    def limited(self):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start"):
        next(in_order(lambda k: None, 10, threads=4, ahead=5))
    assert threading.active_count() == before


def test_an_error_does_not_keep_what_the_task_held():
    class Large:
        pass

    large = Large()
    known = weakref.ref(large)

    def task(k, held=large):
        raise ValueError(k)

    numbers = in_order(task, 3, threads=1, ahead=1)
    gc.disable()
    try:
        with suppress(ValueError):
            next(numbers)
        del task, large, numbers
        assert known() is None
    finally:
        gc.enable()
