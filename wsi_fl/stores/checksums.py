"""What a store's file remembers of its own bytes: CRC-32 tells damage, and no forgery. See FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any
from zlib import crc32

import h5py
import numpy as np
from numpy.typing import NDArray

ROWS, HEAD = "crc32", "head_crc32"
"""The dataset of the rows' checksums, and the attribute of the checksum of everything else."""
CHANGED = "not the bytes that were written"
DAMAGE = (KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What reading a damaged HDF5 file raises."""
_AT_ONCE = 1 << 16

Sums = NDArray[np.uint32]


def crc_of(*arrays: NDArray[Any]) -> int:
    """Return the CRC-32 of the bytes of some arrays, one after the other.

    Example:
        >>> crc_of(np.array([1, 2], np.uint8), np.array([3], np.uint8)) == crc_of(np.array([1, 2, 3], np.uint8))
        True
    """
    value = 0
    for array in arrays:
        value = crc32(np.ascontiguousarray(array).data, value)
    return value


def crc_of_rows(rows: Iterable[Any]) -> Sums:
    """Return uint32[n], the CRC-32 of each row: of bytes, or of a contiguous array."""
    return np.fromiter((crc32(row) for row in rows), np.uint32)


def check_rows(
    sums: Sums | None, rows: NDArray[np.int64], values: Iterable[Any], name: Callable[[int], str]
) -> None:
    """Compare values that were read with what is remembered of them.

    Args:
        sums: of all rows, uint32[n]; None where nothing is remembered, as in files of early versions.
        rows: int64[b], which rows the values are.
        values: b contiguous arrays or bytes.
        name: what a row is called.

    Raises:
        ValueError: naming the first row that differs.
    """
    if sums is None:
        return
    same = np.fromiter(map(crc32, values), np.uint32, len(rows)) == sums[rows]
    if not same.all():
        raise ValueError(f"{name(int(rows[same.argmin()]))}: {CHANGED}")


def sums_of(node: Any, n: int, name: str = ROWS) -> Sums | None:
    """Return the checksums of a file's n rows; None where it has none.

    Raises:
        KeyError, ValueError: when they were lost or cut.
    """
    if HEAD not in node.attrs and name not in node:
        return None
    sums: Sums = node[name][:]
    if sums.shape != (n,):
        raise ValueError("not a checksum for every row")
    return sums


def seal(node: Any, rows: Collection[str] = ()) -> None:
    """Remember all attributes and datasets of a file as they are now, but for the datasets `rows`."""
    node.attrs[HEAD] = np.uint32(_head(node, rows))


def check_seal(node: Any, rows: Collection[str] = ()) -> None:
    """Compare a file with what `seal` remembered; one of an early version remembers nothing.

    Raises:
        ValueError: when they differ.
    """
    if HEAD in node.attrs and int(node.attrs[HEAD]) != _head(node, rows):
        raise ValueError(f"columns or attributes: {CHANGED}")


def _head(node: Any, rows: Collection[str]) -> int:
    value = 0
    for name in sorted(set(node.attrs) - {HEAD}):
        said = node.attrs[name]
        data = said.encode(errors="surrogateescape") if isinstance(said, str) else np.asarray(said).tobytes()
        value = crc32(data, crc32(name.encode() + b"\0", value))
    for name in sorted(set(node) - {ROWS, *rows}):
        if not isinstance(data := node[name], h5py.Dataset):
            continue
        if data.id.get_storage_size() < data.nbytes:
            raise ValueError(f"{name} holds less than it says")
        value = crc32(name.encode() + b"\0", value)
        for first in range(0, len(data), _AT_ONCE):
            value = crc32(data[first : first + _AT_ONCE].tobytes(), value)
    return value
