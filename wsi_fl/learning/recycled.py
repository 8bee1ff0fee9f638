"""Memory of large arrays, used again once nobody holds them.

glibc gives arrays beyond a certain size back to the system at once, and the kernel zeroes fresh memory before it is
written: for a batch of 512-px images that takes about as long as normalising them.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GIVEN_BACK_BYTES = 32 << 20
"""glibc's greatest M_MMAP_THRESHOLD; mostly it looks after smaller arrays itself."""
_ROOM = 1.125
"""Batches drawn by Poisson sampling differ in size."""
_MOST = 2
"""Pieces that are kept for the next batches, if need be until the process ends."""


class Recycled:
    """Float32 memory that tensors have left."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.float32]] = []

    def empty(self, shape: tuple[int, ...]) -> tuple[NDArray[np.float32], Tensor]:
        """An uninitialised array and the tensor that shares its memory.

        The memory is free again when the tensor and all that is made of it are gone; the array alone does not hold it.
        """
        n = int(np.prod(shape))
        if n * np.float32().nbytes < _GIVEN_BACK_BYTES:
            out = np.empty(shape, np.float32)
            return out, torch.from_numpy(out)
        room = self._room(n)
        held = room[:n].reshape(shape)
        weakref.finalize(held, self._put_back, room).atexit = False
        return room[:n].reshape(shape), torch.from_numpy(held)

    def _room(self, n: int) -> NDArray[np.float32]:
        """Of at least n values; what is too small, or more than twice as large, is let go."""
        while self._free:
            try:
                room = self._free.pop()
            except IndexError:  # another thread was faster
                break
            if n <= len(room) <= 2 * n:
                return room
        return np.empty(int(n * _ROOM), np.float32)

    def _put_back(self, room: NDArray[np.float32]) -> None:
        if len(self._free) < _MOST:
            self._free.append(room)
