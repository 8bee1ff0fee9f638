"""Work in threads whose results are wanted in order."""

from __future__ import annotations

from collections.abc import Callable, Generator
from queue import SimpleQueue
from threading import Event, Thread, current_thread


def in_order(task: Callable[[int], None], n: int, *, threads: int, ahead: int) -> Generator[int, None, None]:
    """Calls task(0) to task(n − 1) in threads and yields each number once its call and all before it have returned.

    They are handed out in order. Queues instead of futures: what a future costs, decoding threads wait for, as it holds
    the interpreter's lock.

    Args:
        task, n: what to call.
        threads: how many call it. They are gone when the iterator is closed or used up.
        ahead: calls that may begin before the consumer is done with what was yielded last.

    Raises:
        Exception: what a call raised.

    Example:
        >>> squares = [0] * 5
        >>> def square(k):
        ...     squares[k] = k * k
        >>> [squares[k] for k in in_order(square, 5, threads=2, ahead=2)]
        [0, 1, 4, 9, 16]
    """
    to_do: SimpleQueue[int | None] = SimpleQueue()
    done: SimpleQueue[int | BaseException] = SimpleQueue()
    stopped = Event()

    def work() -> None:
        while (k := to_do.get()) is not None and not stopped.is_set():
            try:
                task(k)
            except BaseException as error:  # handed to the consumer, who raises it
                done.put(error)
            else:
                done.put(k)

    for k in range(min(n, ahead + 1)):
        to_do.put(k)
    workers: list[Thread] = []
    early: set[int] = set()
    try:
        for _ in range(min(threads, n)):
            worker = Thread(target=work, daemon=True)
            worker.start()
            workers.append(worker)
        for k in range(n):
            while k not in early:
                finished = done.get()
                if isinstance(finished, BaseException):
                    try:
                        raise finished
                    finally:
                        del finished  # its traceback holds this frame
                early.add(finished)
            early.remove(k)
            yield k
            if k + ahead + 1 < n:
                to_do.put(k + ahead + 1)
    finally:
        stopped.set()
        for _ in workers:
            to_do.put(None)
        for worker in workers:
            if worker is not current_thread():  # which may be collecting garbage
                worker.join()
        while not done.empty():  # errors hold frames that hold the queue
            done.get()
