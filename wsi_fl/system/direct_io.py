"""Large arrays: direct writes past the page cache where the file system permits, and pools of reused memory.

Pixels of a whole site do not fit the page cache and would push everything else out of it. glibc returns memory between
batches, and the kernel zeroes fresh pages before they are written: for a batch of 512-px images that takes about as
long as normalising them.
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

from wsi_fl.system.machine import allocate_file
from wsi_fl.types import WsiFlError

ALIGNMENT = 4096
"""Required alignment of address, offset and length in direct writes; a multiple of every sector size."""

_PIECE_BYTES, _MEMORY_BYTES = 8 << 20, 160 << 20
_T = TypeVar("_T")
_LARGE_BYTES = 1 << 20
_SIZE_MARGIN = 1.125
"""Allowance for the sizes of batches drawn by Poisson sampling."""
_REFUSED_ERRORS = (errno.EINVAL, errno.EOPNOTSUPP)


def empty_aligned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return an uninitialised uint8 array at an aligned address."""
    n = int(np.prod(shape))
    memory = np.empty(n + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + n].reshape(shape)


def open_pile(folder: Path) -> SpooledTemporaryFile[bytes]:
    """Return a nameless file for an unknown number of bytes: in memory, and on disk beyond 160 MiB."""
    return SpooledTemporaryFile(_MEMORY_BYTES, dir=str(folder))


class BulkFile:
    """An existing file for arrays, as a context manager.

    Its length becomes `end` at once where the file system can do that, so that a full disk (OSError) is found first.
    """

    def __init__(self, path: Path, end: int) -> None:
        self._buffered = os.open(path, os.O_RDWR)
        self._direct: int | None = None
        try:
            allocate_file(self._buffered, end)
            self._direct = _open_direct(path)
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
        """Write a contiguous array at this offset; other threads may run meanwhile."""
        data = array.reshape(-1).data
        if self._direct is not None and not (array.ctypes.data | offset | len(data)) % ALIGNMENT:
            try:
                return _write_at(self._direct, data, offset)
            except OSError as error:
                if error.errno not in _REFUSED_ERRORS:
                    raise
                os.close(self._direct)
                self._direct = None
        return _write_at(self._buffered, data, offset)

    def write_pile(self, pile: SpooledTemporaryFile[bytes], offset: int) -> None:
        """Write all of a pile at this offset."""
        pile.seek(0)
        piece = empty_aligned((_PIECE_BYTES,))
        while n := pile.readinto(piece.data):
            self.write(piece[:n], offset)
            offset += n


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def _open_direct(path: Path) -> int | None:
    """Return a descriptor for direct writes; None where the file system has none, such as one in memory."""
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno in _REFUSED_ERRORS:
            return None
        raise


def rows_at_once(n_rows: int, shape: Sequence[int], *, gpu: bool) -> int:
    """Return the number of rows per forward pass: images [channels, h, w] that fit a CPU's cache, and all rows else."""
    if gpu or len(shape) != 3:
        return n_rows
    parts = max(1, ceil(n_rows * shape[1] * shape[2] / _PIXELS_AT_ONCE))
    return max(1, ceil(n_rows / parts))


_PIXELS_AT_ONCE = 1 << 18


class BatchSizeFinder:
    """The number of rows per forward pass: all, until they exceed a device's memory."""

    def __init__(self) -> None:
        self._max_rows: int | None = None

    def run_with_fitting_batch(self, n: int, work: Callable[[int], _T]) -> _T:
        """Return the result of work with as many of n rows at once as fit, halved at each failure."""
        import torch

        at_once = min(n, self._max_rows or n)
        while True:
            with suppress(torch.OutOfMemoryError):
                return work(at_once)
            if at_once <= 1:  # memory of the failed attempt is free by now
                raise WsiFlError("the GPU's memory does not hold one example; lower train.input_px")
            at_once = self._max_rows = at_once // 2


class BufferPool:
    """A pool of memory of past arrays for new ones, with a maximum number of pieces."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free: list[NDArray[np.uint8]] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialised array; its memory is free again when it, its views and its tensors are gone.

        Large ones lie at an aligned address.
        """
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if n_bytes < _LARGE_BYTES:
            return np.empty(shape, dtype)
        memory = self._take_memory(n_bytes)
        array = _PooledArray(memory, shape, np.dtype(dtype))
        weakref.finalize(array, self._return_memory, memory).atexit = False
        return np.asarray(array)

    def _take_memory(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return memory of at least so many bytes; a pooled piece too small, or more than twice as large, is freed."""
        try:
            memory = self._free.pop()
        except IndexError:
            pass
        else:
            if n_bytes <= len(memory) <= 2 * n_bytes:
                return memory
            del memory
        return empty_aligned((int(n_bytes * _SIZE_MARGIN),))

    def _return_memory(self, memory: NDArray[np.uint8]) -> None:
        if len(self._free) < self._capacity:
            self._free.append(memory)


class _PooledArray:
    """The memory behind an array; no array itself, since views of views hold the first array."""

    __slots__ = ("__array_interface__", "__weakref__", "_room")

    def __init__(self, memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._room = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (memory.ctypes.data, False),
        }
