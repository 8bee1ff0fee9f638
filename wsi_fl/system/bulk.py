"""Arrays written by the gigabyte, past the page cache where the file system lets them.

Pixels of a whole site do not fit the page cache and would push everything else out of it; on a machine whose memory
has not been touched yet they also cost up to five times the time of reading them.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import NDArray

from wsi_fl.system.files import allocate

ALIGNMENT = 4096
"""What direct writes want of an address in memory, an offset and a length; a multiple of every sector size."""

_PIECE_BYTES, _MOST_PIECES = 8 << 20, 20
"""Of a pile in memory."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned_empty(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An uninitialised uint8 array at an aligned address.

    Example:
        >>> aligned_empty((2, 3)).ctypes.data % ALIGNMENT
        0
    """
    n = int(np.prod(shape))
    room = np.empty(n + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + n].reshape(shape)


class Pile:
    """Bytes whose number is not known yet, in aligned arrays; beyond some of these in a file without a name.

    Use it as a context manager.

    Args:
        folder: where that file would be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: list[NDArray[np.uint8]] = []
        self._file: IO[bytes] | None = None
        self._piece = aligned_empty((_PIECE_BYTES,))
        self._used = 0

    def __enter__(self) -> Pile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, data: bytes) -> None:
        """Puts these on top."""
        array = np.frombuffer(data, np.uint8)
        while len(array):
            room = self._piece[self._used :]
            n = min(len(array), len(room))
            room[:n] = array[:n]
            array, self._used = array[n:], self._used + n
            if n == len(room):
                self._put_by()

    def write(self, bulk: BulkFile, offset: int) -> None:
        """Puts all of it into a file at this offset; the pile is used up."""
        for piece in self._kept:
            bulk.write(piece, offset)
            offset += _PIECE_BYTES
        if self._file is not None:
            self._file.seek(0)
            while self._file.readinto(self._kept[0].data):  # type: ignore[attr-defined]
                bulk.write(self._kept[0], offset)
                offset += _PIECE_BYTES
        bulk.write(self._piece[: self._used], offset)

    def _put_by(self) -> None:
        """The full piece makes room."""
        if len(self._kept) < _MOST_PIECES:
            self._kept.append(self._piece)
            self._piece = aligned_empty((_PIECE_BYTES,))
        else:
            if self._file is None:
                self._file = TemporaryFile(dir=self._folder)  # noqa: SIM115 - `__exit__` closes it
            self._file.write(self._piece.data)
        self._used = 0


class BulkFile:
    """An existing file that arrays are written into; use it as a context manager.

    Args:
        end: the file is made that long at once where that can be done, so that a full disk is found first.

    Raises:
        OSError: ENOSPC or EFBIG when the disk cannot hold it.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                return _write_all(self._direct, data, offset)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                os.close(self._direct)
                self._direct = None
        return _write_all(self._buffered, data, offset)


def _opened_directly(path: Path) -> int | None:
    """None where there is no such thing, as in a file system in memory."""
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno in _REFUSED:
            return None
        raise


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
