"""Arrays by the gigabyte: written past the page cache where the file system lets them, in memory that is used again.

Pixels of a whole site do not fit the page cache and would push everything else out of it. glibc gives memory back
sooner than batches come and go, and the kernel zeroes fresh pages before they are written: for a batch of 512-px images
that takes about as long as normalising them.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from wsi_fl.system.machine import allocate
from wsi_fl.types import WsiFlError

ALIGNMENT = 4096
"""What direct writes want of an address in memory, an offset and a length; a multiple of every sector size."""

_PIECE_BYTES, _MEMORY_BYTES = 8 << 20, 160 << 20
_T = TypeVar("_T")
_LARGE_BYTES = 1 << 20
_ROOM = 1.125
"""Batches drawn by Poisson sampling differ in size."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An uninitialised uint8 array at an aligned address."""
    n = int(np.prod(shape))
    room = np.empty(n + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + n].reshape(shape)


def pile_in(folder: Path) -> SpooledTemporaryFile[bytes]:
    """Return a file for bytes whose number is not known yet: in memory, and on disk, without a name, beyond some."""
    return SpooledTemporaryFile(_MEMORY_BYTES, dir=str(folder))


class BulkFile:
    """An existing file that arrays are written into; a context manager.

    It is made as long as `end` at once where that can be done, so that a full disk (OSError) is found first.
    """

    def __init__(self, path: Path, end: int) -> None:
        self._buffered = os.open(path, os.O_RDWR)
        self._direct: int | None = None
        try:
            allocate(self._buffered, end)
            self._direct = _opened_directly(path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BulkFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in (self._buffered, self._direct):
            if descriptor is not None:
                os.close(descriptor)

    def write(self, array: NDArray[np.uint8], offset: int) -> None:
        """Puts a contiguous array at this offset; other threads may run meanwhile."""
        data = array.reshape(-1).data
        if self._direct is not None and not (array.ctypes.data | offset | len(data)) % ALIGNMENT:
            try:
                return _write_at(self._direct, data, offset)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                os.close(self._direct)
                self._direct = None
        return _write_at(self._buffered, data, offset)

    def write_pile(self, pile: SpooledTemporaryFile[bytes], offset: int) -> None:
        """Put all of a pile at this offset."""
        pile.seek(0)
        piece = aligned_empty((_PIECE_BYTES,))
        while n := pile.readinto(piece.data):
            self.write(piece[:n], offset)
            offset += n


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _opened_directly(path: Path) -> int | None:
    """None where there is no such thing, as in a file system in memory."""
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno in _REFUSED:
            return None
        raise


def few(n_rows: int, shape: Sequence[int], *, gpu: bool) -> int:
    """Return how many of these rows go through a model at once: on a CPU so few images [channels, h, w] that most of
    what layers say of them stays in its cache, and all rows elsewhere.
    """
    if gpu or len(shape) != 3:
        return n_rows
    parts = max(1, ceil(n_rows * shape[1] * shape[2] / _PIXELS))
    return max(1, ceil(n_rows / parts))


_PIXELS = 1 << 18


class Portion:
    """How many rows go through a model at once: all, until a device's memory does not hold them."""

    def __init__(self) -> None:
        self._most: int | None = None

    def tried(self, n: int, work: Callable[[int], _T]) -> _T:
        """Return what work gives that takes so many of n rows at once: as many as fit, half of them at each try."""
        import torch

        at_once = min(n, self._most or n)
        while True:
            with suppress(torch.OutOfMemoryError):
                return work(at_once)
            if at_once <= 1:  # what the attempt held is free by now
                raise WsiFlError("the GPU's memory does not hold one example; lower train.input_px")
            at_once = self._most = at_once // 2


class BufferPool:
    """Memory that arrays have left, at most so many pieces of it, for arrays to come."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: list[NDArray[np.uint8]] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised array; its memory is free again when it and all that shares it (views, tensors) are gone.

        Large ones lie at an aligned address.
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
