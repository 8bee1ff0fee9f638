"""Checksums inside a store's file: CRC-32 detects damage, but no forgery. See FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import h5py
import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

ROWS, HEAD, SHARDS = "crc32", "head_crc32", "shard_crc32"
"""The dataset of the rows' checksums, the attribute of the checksum of everything else, and the dataset that knows the
shards."""
_CHANGED = "not the bytes that were written"
DAMAGE = (ArithmeticError, AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What reading a damaged HDF5 file raises."""
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class RowChecksums:
    """The checksums of a file's n rows.

    A row is compared the first time it is read, and then believed until the store is opened anew: later epochs cost
    nothing. What changes on the disk meanwhile is noticed by the next command.

    Attributes:
        values: uint32[n].
        seen: bool[n], whether a row was compared.
    """

    values: NDArray[np.uint32]
    seen: NDArray[np.bool_]

    def check(self, row: int, data: Buffer) -> None:
        """Compare one row.

        Raises:
            ValueError: when it differs.
        """
        if not self.seen[row]:
            if crc32(data) != self.values[row]:
                raise ValueError(_CHANGED)
            self.seen[row] = True


def _crc_of(*arrays: NDArray[Any]) -> int:
    """Return the CRC-32 of the bytes of some arrays, one after the other.

    Example:
        >>> _crc_of(np.array([1, 2], np.uint8), np.array([3], np.uint8)) == _crc_of(np.array([1, 2, 3], np.uint8))
        True
    """
    value = 0
    for array in arrays:
        value = crc32(np.ascontiguousarray(array).data, value)
    return value


def crc_of_rows(rows: Iterable[Any]) -> NDArray[np.uint32]:
    """Return uint32[n], the CRC-32 of each row: of bytes, or of a contiguous array."""
    return np.fromiter((crc32(row) for row in rows), np.uint32)


def check_rows(
    sums: RowChecksums, rows: NDArray[np.int64], values: NDArray[Any], name: Callable[[int], str]
) -> None:
    """Compare values that were read with their checksums.

    Args:
        sums: of all rows.
        rows: int64[b], which rows the values are.
        values: [b, ...], contiguous.
        name: what a row is called.

    Raises:
        ValueError: naming the first row that differs.
    """
    for k in np.flatnonzero(~sums.seen[rows]):
        row = int(rows[k])
        try:
            sums.check(row, values[k])
        except ValueError as error:
            raise ValueError(f"{name(row)}: {error}") from None


def sums_of(node: Any, n: int) -> RowChecksums:
    """Return the checksums of a file's n rows.

    Raises:
        KeyError: when they were lost.
        ValueError: when they were cut.
    """
    values = node[ROWS][:]
    if values.shape != (n,):
        raise ValueError("not a checksum for every row")
    return RowChecksums(values, np.zeros(n, np.bool_))


def shard_sum(shard: Any) -> int:
    """Return the checksum of the checksums of a shard's patches, which identifies its pixels; 0 where it holds none."""
    return _crc_of(shard[ROWS][:]) if ROWS in shard else 0


def seal(node: Any, rows: Collection[str] = ()) -> None:
    """Remember all attributes and datasets of a file as they are now, but for the datasets `rows`."""
    node.attrs[HEAD] = np.uint32(_head(node, rows))


def check_seal(node: Any, rows: Collection[str] = ()) -> None:
    """Compare a file with what `seal` remembered.

    Raises:
        KeyError: when that was lost.
        ValueError: when it differs.
    """
    if int(node.attrs[HEAD]) != _head(node, rows):
        raise ValueError(f"columns or attributes: {_CHANGED}")


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
