"""Arrays written by the gigabyte, past the page cache where the file system lets them.

Pixels of a whole site do not fit the page cache and would push everything else out of it; on a machine whose memory
has not been touched yet they also cost up to five times the time of reading them.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np
from numpy.typing import NDArray

from wsi_fl.system.machine import allocate, write_at

ALIGNMENT = 4096
"""What direct writes want of an address in memory, an offset and a length; a multiple of every sector size."""

_PIECE_BYTES, _MEMORY_BYTES = 8 << 20, 160 << 20
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


def pile_in(folder: Path) -> SpooledTemporaryFile[bytes]:
    """Return a file for bytes whose number is not known yet: in memory, and on disk, without a name, beyond some."""
    return SpooledTemporaryFile(_MEMORY_BYTES, dir=str(folder))


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
                return write_at(self._direct, data, offset)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                os.close(self._direct)
                self._direct = None
        return write_at(self._buffered, data, offset)

    def write_pile(self, pile: SpooledTemporaryFile[bytes], offset: int) -> None:
        """Put all of a pile at this offset."""
        pile.seek(0)
        piece = aligned_empty((_PIECE_BYTES,))
        while n := pile.readinto(piece.data):
            self.write(piece[:n], offset)
            offset += n


def _opened_directly(path: Path) -> int | None:
    """None where there is no such thing, as in a file system in memory."""
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno in _REFUSED:
            return None
        raise
