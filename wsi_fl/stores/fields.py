"""Attributes, columns and checksums of store files, as in FORMAT.md.

CRC-32 detects damage, but no forgery.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import h5py
import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray
from typing_extensions import Buffer

from wsi_fl import __version__
from wsi_fl.system.machine import free_bytes
from wsi_fl.types import SPLITS, GridSpec, UsageError, WsiFlError

_T = TypeVar("_T")
STORE_FORMAT, SHARD_FORMAT = "wsi-fl patch store", "wsi-fl patch shard"
_VERSION = 1
"""The version of all formats here; a file of another version is refused."""
ROWS, HEAD, SHARDS = "crc32", "head_crc32", "shard_crc32"
"""The dataset of row checksums, the attribute with the checksum of everything else, the dataset of shard checksums."""
_CHANGED = "not the bytes that were written"
DAMAGE = (ArithmeticError, AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError)
"""Errors from reading a damaged HDF5 file."""
_CHUNK_ROWS = 1 << 16
Marked = tuple[tuple[int, int, str], ...]
"""(x, y, reason) of patches that are no rows, in level-0 pixels."""


@dataclass(frozen=True)
class StoreMeta:
    """The metadata of a store."""

    site: str
    classes: tuple[str, ...]
    spec: GridSpec
    generator: str | None = None
    """Of synthetic patches: their origin, a JSON object; None for patches of slides and images."""
    min_tissue: float | None = None
    """Of slides: the least share of tissue in a patch; None if unknown."""


def root_attrs(file_format: str, spec: GridSpec) -> dict[str, object]:
    """Return the root attributes common to all formats."""
    return asdict(spec) | {"format": file_format, "version": _VERSION, "tool_version": __version__}


def read_spec(attrs: Any) -> GridSpec:
    """Return the grid from root attributes."""
    return GridSpec(int(attrs["size_px"]), float(attrs["mpp"]), int(attrs["stride_px"]))


def write_root(file: h5py.File, meta: StoreMeta) -> None:
    """Write the root attributes of `patches.h5`."""
    attrs = root_attrs(STORE_FORMAT, meta.spec) | {"site": meta.site, "classes": json.dumps(meta.classes)}
    if meta.generator is not None:
        attrs |= {"synthetic": True, "generator": meta.generator}
    file.attrs.update(attrs | ({} if meta.min_tissue is None else {"min_tissue": meta.min_tissue}))


def read_meta(file: h5py.File) -> StoreMeta:
    """Return the metadata of a store from its root attributes."""
    attrs = file.attrs
    return StoreMeta(
        str(attrs["site"]),
        tuple(json_attribute(attrs, "classes", list)),
        read_spec(attrs),
        str(attrs["generator"]) if "generator" in attrs else None,
        float(attrs["min_tissue"]) if "min_tissue" in attrs else None,
    )


def encode_texts(texts: Iterable[str]) -> NDArray[Any]:
    """Return texts as fixed-length UTF-8."""
    encoded = [str(text).encode() for text in texts]
    width = max((len(text) for text in encoded), default=0) or 1
    return np.array(encoded, h5py.string_dtype("utf-8", width))


class NameColumn(NamedTuple):
    """A column of names, such as those of patches' slides, in four bytes per row whatever their length.

    Attributes:
        codes: int32[n], of each row its name.
        names: str[k] different names, in alphabetical order.
    """

    codes: NDArray[np.int32]
    names: NDArray[np.str_]

    def expand_names(self, rows: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.str_]:
        """Return the names str[n] of the rows: four bytes for each character."""
        return np.asarray(self.names[self.codes[rows]], np.str_)

    def find_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (the first row of each name, its number of rows), int64[k] each."""
        starts = find_runs(self.codes)
        first = np.zeros(len(self.names), np.int64)
        first[self.codes[starts[::-1]]] = starts[::-1]
        return first, np.bincount(self.codes, minlength=len(self.names))

    def repeat_rows(self, counts: NDArray[np.int64]) -> NameColumn:
        """Return the column with each row so many times."""
        return self._replace(codes=np.repeat(self.codes, counts))


def find_runs(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the rows at which a value differs from the one before, the first row among them."""
    return np.flatnonzero(np.r_[True, values[1:] != values[:-1]][: len(values)])


def encode_names(values: NDArray[Any]) -> NameColumn:
    """Return a column of names str[n], or UTF-8; fast where equal ones lie together, as those of a slide's patches.

    Example:
        >>> encode_names(np.array(["slide b", "slide b", "slide a"])).codes
        array([1, 1, 0], dtype=int32)
    """
    starts = find_runs(values)
    names, codes = np.unique(values[starts], return_inverse=True)
    texts = [name.decode() if isinstance(name, bytes) else str(name) for name in names.tolist()]
    runs = np.diff(starts, append=len(values))
    return NameColumn(np.repeat(codes.astype(np.int32), runs), np.asarray(np.array(texts, object), np.str_))


def read_name_column(node: Any, name: str) -> NameColumn:
    """Return a dataset of names that repeat."""
    return encode_names(node[name][:] if h5py.check_string_dtype(node[name].dtype).length else read_texts(node, name))


def read_texts(node: Any, name: str) -> NDArray[np.str_]:
    """Return a dataset of texts."""
    return np.asarray(node[name].asstr()[:], np.str_)


def read_marked(node: Any, kind: Literal["unread", "aside"]) -> Marked:
    """Return the unreadable patches of a shard, or those excluded for artifacts."""
    if f"{kind}_xy_l0" not in node:
        return ()
    corners, reasons = node[f"{kind}_xy_l0"][:].tolist(), read_texts(node, f"{kind}_reason").tolist()
    return tuple((x, y, why) for (x, y), why in zip(corners, reasons, strict=True))


def mark_columns(kind: Literal["unread", "aside"], marked: Marked) -> dict[str, NDArray[Any]]:
    """Return the datasets of unreadable or excluded patches; none without such patches."""
    if not marked:
        return {}
    corners = np.array([(x, y) for x, y, _ in marked], np.int64)
    return {f"{kind}_xy_l0": corners, f"{kind}_reason": encode_texts(why for _, _, why in marked)}


def check_format(node: Any, expected: str, path: Path) -> None:
    """Check the format of a file.

    Raises:
        WsiFlError: for another format or version.
    """
    file_format, version = node.attrs.get("format"), node.attrs.get("version")
    if file_format != expected:
        raise WsiFlError(f"{path}: not a {expected} (format {file_format!r})")
    if version != _VERSION:
        raise WsiFlError(
            f"{path}: {expected} version {version}, this wsi-fl reads version {_VERSION}; "
            "update wsi-fl, or make it again"
        )


def json_attribute(attrs: Any, name: str, kind: type[_T]) -> _T:
    """Return the JSON document of an attribute.

    Raises:
        KeyError: when there is no such attribute.
        ValueError: when it is no JSON, or not of that kind.
    """
    try:
        value = json.loads(attrs[name])
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"attribute {name} is not JSON") from None
    if not isinstance(value, kind):
        raise ValueError(f"attribute {name} is no JSON {'object' if kind is dict else 'list'}")
    return value


def require_sound(label: NDArray[Any], patient: NameColumn, split: NameColumn, n_classes: int) -> None:
    """Check columns [n] of a store.

    Raises:
        ValueError: when labels are not one column or lie beyond the classes, a split is unknown, or a patient is in two
            splits.

    Example:
        >>> patients, splits = map(encode_names, (np.array(["p", "q", "p"]), np.array(["train", "train", "test"])))
        >>> require_sound(np.array([0, 1, 0]), patients, splits, 2)
        Traceback (most recent call last):
        ValueError: patient p is in two splits (train and test)
    """
    if unknown := {*split.names.tolist()} - {*SPLITS}:
        raise ValueError(f"unknown split {min(unknown)!r}, allowed: {', '.join(SPLITS)}")
    if label.ndim != 1:
        raise ValueError(f"column label has {label.ndim} dimensions instead of one")
    if len(label) and not 0 <= label.min() <= label.max() < n_classes:
        bad_label = label.min() if label.min() < 0 else label.max()
        raise ValueError(f"label {bad_label} of {n_classes} classes, which are numbered from 0")
    patients_by_split = {
        name: {*patient.names[np.flatnonzero(np.bincount(patient.codes[split.codes == code]))].tolist()}
        for code, name in enumerate(split.names.tolist())
    }
    for first_split, second_split in combinations(SPLITS, 2):
        if shared_patients := {*patients_by_split.get(first_split, ())} & {*patients_by_split.get(second_split, ())}:
            raise ValueError(f"patient {min(shared_patients)} is in two splits ({first_split} and {second_split})")


def memory_message(error: MemoryError) -> str:
    """Return the message for data larger than the memory, by damage or not."""
    return f"damaged, or it holds more than fits into memory ({first_line(error) or 'out of memory'})"


def refuse_too_large(where: object, n_bytes: int) -> None:
    """Check the free memory before an allocation.

    Raises:
        UsageError: when more bytes are needed than are free.
    """
    if n_bytes > (n_free := free_bytes()):
        needed = f"{n_bytes / 1e9:.3g} GB; {n_free / 1e9:.3g} GB are free"
        raise UsageError(f"{where}: {memory_message(MemoryError(needed))}")


def first_line(error: BaseException) -> str:
    """Return an error's message in one line, without errno and path."""
    if isinstance(error, ArithmeticError | AttributeError | TypeError):
        return "a group, dataset or attribute is not what it should be"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().split("\n")[0]


@dataclass(frozen=True)
class RowChecksums:
    """The checksums of a file's n rows.

    A row is checked at its first read, until the store is opened again: later epochs cost nothing, and later changes
    on the disk are found by the next command.

    Attributes:
        values: uint32[n].
        is_checked: bool[n], whether a row was checked.
    """

    values: NDArray[np.uint32]
    is_checked: NDArray[np.bool_]

    def check_row(self, row: int, data: Buffer) -> None:
        """Check one row.

        Raises:
            ValueError: when its bytes differ from the checksum.
        """
        if not self.is_checked[row]:
            self.verify_row(row, data)
            self.is_checked[row] = True

    def verify_row(self, row: int, data: Buffer) -> None:
        """Check one row, also if it was checked before.

        Raises:
            ValueError: as for `check_row`.
        """
        if crc32(data) != self.values[row]:
            raise ValueError(_CHANGED)

    def check_rows(self, rows: NDArray[np.int64], values: NDArray[Any], name: Callable[[int], str]) -> None:
        """Check the values [b, ...] of some rows.

        Raises:
            ValueError: with the name of the first row that differs.
        """
        for k in np.flatnonzero(~self.is_checked[rows]):
            try:
                self.check_row(int(rows[k]), values[k])
            except ValueError as error:
                raise ValueError(f"{name(int(rows[k]))}: {error}") from None


def checksum_rows(rows: Iterable[Any]) -> NDArray[np.uint32]:
    """Return the CRC-32 of each row (bytes or contiguous array), uint32[n]."""
    return np.fromiter((crc32(row) for row in rows), np.uint32)


def read_checksums(node: Any, n: int) -> RowChecksums:
    """Return the checksums of a file's n rows.

    Raises:
        KeyError: when they are missing.
        ValueError: when their number differs.
    """
    values = node[ROWS][:]
    if values.shape != (n,):
        raise ValueError("not a checksum for every row")
    return RowChecksums(values, np.zeros(n, np.bool_))


def shard_checksum(shard: Any) -> int:
    """Return the checksum of a shard's row checksums, an identifier of its pixels; 0 without pixels."""
    return crc32(shard[ROWS][:].tobytes()) if ROWS in shard else 0


def write_seal(node: Any, rows: Collection[str] = ()) -> None:
    """Store the checksum of all attributes and datasets of a file except the datasets `rows`."""
    node.attrs[HEAD] = np.uint32(_compute_checksum(node, rows))


def check_seal(node: Any, rows: Collection[str] = ()) -> None:
    """Compare a file with its stored checksum.

    Raises:
        KeyError: when the checksum is missing.
        ValueError: when it differs.
    """
    if int(node.attrs[HEAD]) != _compute_checksum(node, rows):
        raise ValueError(f"columns or attributes: {_CHANGED}")


def _compute_checksum(node: Any, rows: Collection[str]) -> int:
    value = 0
    for name in sorted(set(node.attrs) - {HEAD}):
        attr = node.attrs[name]
        data = attr.encode(errors="surrogateescape") if isinstance(attr, str) else np.asarray(attr).tobytes()
        value = crc32(data, crc32(name.encode() + b"\0", value))
    for name in sorted(set(node) - {ROWS, *rows}):
        if not isinstance(data := node[name], h5py.Dataset):
            continue
        if data.id.get_storage_size() < data.nbytes:
            raise ValueError(f"{name} holds less than it says")
        value = crc32(name.encode() + b"\0", value)
        for first in range(0, len(data), _CHUNK_ROWS):
            value = crc32(data[first : first + _CHUNK_ROWS].tobytes(), value)
    return value
