"""Memory of large arrays, used again once nobody holds them.

glibc gives memory back to the system sooner than batches come and go, and the kernel zeroes fresh pages before they are
written: for a batch of 512-px images that takes about as long as normalising them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from wsi_fl.system.bulk import aligned_empty
from wsi_fl.types import WsiFlError

T = TypeVar("T")

_LARGE_BYTES = 1 << 20
_ROOM = 1.125
"""Batches drawn by Poisson sampling differ in size."""


class Portion:
    """How many rows go through a model at once: all, until a device's memory does not hold them."""

    def __init__(self) -> None:
        self._most: int | None = None

    def tried(self, n: int, work: Callable[[int], T]) -> T:
        """Return what work gives that takes so many of n rows at once: as many as fit, half of them at each try.

        Raises:
            WsiFlError: when the memory does not hold one.
        """
        import torch

        at_once = min(n, self._most or n)
        while True:
            with suppress(torch.OutOfMemoryError):
                return work(at_once)
            if at_once <= 1:  # what the attempt held is free by now
                raise WsiFlError("the GPU's memory does not hold one example; lower train.input_px")
            at_once = self._most = at_once // 2


class BufferPool:
    """Memory that arrays have left.

    Args:
        most: pieces that are kept for arrays to come, if need be until the process ends.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: list[NDArray[np.uint8]] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised array; its memory is free again when it and all that shares it (views, tensors) are gone.

        Large ones lie at an aligned address, see `bulk`.

        Example:
            >>> memory = BufferPool(most=2)
            >>> first = memory.empty((1000, 1000), np.float32)
            >>> address, part = first.ctypes.data, first[5]
            >>> del first
            >>> memory.empty((1000, 1000), np.float32).ctypes.data == address
            False
            >>> del part
            >>> memory.empty((1000, 1000), np.float32).ctypes.data == address
            True
        """
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if n_bytes < _LARGE_BYTES:
            return np.empty(shape, dtype)
        room = self._room(n_bytes)
        lent = _Lent(room, shape, np.dtype(dtype))
        weakref.finalize(lent, self._put_back, room).atexit = False
        return np.asarray(lent)

    def _room(self, n_bytes: int) -> NDArray[np.uint8]:
        """Of at least so many bytes; one that is too small, or more than twice as large, is let go."""
        try:
            room = self._free.pop()
        except IndexError:
            pass
        else:
            if n_bytes <= len(room) <= 2 * n_bytes:
                return room
            del room
        return aligned_empty((int(n_bytes * _ROOM),))

    def _put_back(self, room: NDArray[np.uint8]) -> None:
        if len(self._free) < self._most:
            self._free.append(room)


class _Lent:
    """What an array is made of; no array itself, as views hold the first array instead of what that is a view of."""

    __slots__ = ("__array_interface__", "__weakref__", "_room")

    def __init__(self, room: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._room = room
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (room.ctypes.data, False),
        }
