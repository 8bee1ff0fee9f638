"""Values that are costly to make, the latest of which are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bytes, NDArray[np.uint8])


class Recent(Generic[T]):
    """The values that were asked for last; all methods may be called from several threads.

    Args:
        most_bytes: of all that are kept; the latest is kept whatever its size.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._making: dict[Hashable, Lock] = {}
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; whoever asks while it is made waits for it, and nobody else does.

        Args:
            make: makes the value where it is not kept. What it raises is raised, and the next who asks tries again.
        """
        with self._lock:
            making = self._making.setdefault(key, Lock())
        with making:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key]
            value = make()
            with self._lock:
                self._values[key] = value
                self._drop()
        return value

    def _drop(self) -> None:
        while len(self._values) > 1 and sum(map(_n_bytes, self._values.values())) > self._most_bytes:
            self._values.popitem(last=False)


def _n_bytes(value: bytes | NDArray[np.uint8]) -> int:
    return len(value) if isinstance(value, bytes) else value.nbytes
