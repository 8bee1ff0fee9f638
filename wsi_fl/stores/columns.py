"""Writing `patches.h5`: the columns of all shards, one after another, and a link to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.checksums import DAMAGE, SHARDS, check_seal, seal, shard_sum
from wsi_fl.stores.contents import PIXELS
from wsi_fl.stores.fields import (
    SHARD_FORMAT,
    STORE_FORMAT,
    StoreMeta,
    check_format,
    encoded_text,
    first_line,
    read_meta,
    spec_attrs,
    write_root,
)
from wsi_fl.stores.hdf5 import SLIDE_BYTES, created, opened
from wsi_fl.system.files import atomic
from wsi_fl.types import SPLITS, GridSpec, PatchTable, WsiFlError

ROW_BYTES = 256
"""Room for a patch's columns and its place in the index of chunks."""
_NUMBERS = ("xy_l0", "label", "tumor_fraction")
_TEXTS = ("slide", "patient", "split")

Counts = dict[str, NDArray[np.int64]]
"""Split → patches of each class."""


@dataclass(frozen=True)
class _Head:
    """What is known of a shard before its columns are copied."""

    path: Path
    n: int
    widths: tuple[int, ...]
    """Bytes of its longest slide, patient and split."""


def link_shards(path: Path, meta: StoreMeta, shards: Sequence[Path]) -> Counts:
    """Write `patches.h5`, the rows of all shards in the order given; hold those of one shard at a time.

    Shards lie below the folder of `path`.

    Raises:
        WsiFlError: when a shard is damaged or of another grid or format, or the disk is full.
    """
    heads = [_head(shard, meta.spec) for shard in shards]
    n = sum(head.n for head in heads)
    widths = [max((head.widths[k] for head in heads), default=1) for k in range(len(_TEXTS))]
    counts = {split: np.zeros(len(meta.classes), np.int64) for split in SPLITS}
    n_bytes = n * (sum(widths) + ROW_BYTES) + len(heads) * SLIDE_BYTES
    with atomic(path) as temporary, created(temporary, n_bytes) as file:
        write_root(file, meta)
        file.create_dataset("xy_l0", (n, 2), np.int64)
        file.create_dataset("label", (n,), np.int64)
        file.create_dataset("tumor_fraction", (n,), np.float32)
        for name, width in zip(_TEXTS, widths, strict=True):
            file.create_dataset(name, (n,), h5py.string_dtype("utf-8", width))
        links = file.create_group("slides", track_order=True)
        row, sums = 0, []
        for head in heads:
            slide, known = _copy_columns(file, slice(row, row + head.n), head.path, counts)
            links[slide] = h5py.ExternalLink(head.path.relative_to(path.parent).as_posix(), "/")
            sums.append(known)
            row += head.n
        file[SHARDS] = np.array(sums, np.uint32)
        seal(file)
    return counts


def linked(path: Path, meta: StoreMeta, shards: Sequence[Path]) -> Counts | None:
    """Return how many patches a `patches.h5` has, where it is whole and links these shards in this order; else None.

    A shard counts as the one that was linked where it is not newer than the file and its patches have the checksums
    that were linked.
    """
    try:
        with opened(path) as file:
            check_format(file, STORE_FORMAT, path)
            check_seal(file)
            labels, split, known = file["label"][:], file["split"][:], file[SHARDS][:]
            same = read_meta(file) == meta and list(file["slides"]) == [shard.stem for shard in shards]
        written = path.stat().st_mtime_ns
        for shard, value in zip(shards, known, strict=same):
            with opened(shard) as source:
                same = same and shard_sum(source) == value and shard.stat().st_mtime_ns <= written
    except (*DAMAGE, WsiFlError):
        return None
    n_classes = len(meta.classes)
    return (
        {name: np.bincount(labels[split == name.encode()], minlength=n_classes) for name in SPLITS}
        if same
        else None
    )


def write_table(file: h5py.File, table: PatchTable) -> None:
    """Write the columns of a table."""
    for name in _NUMBERS:
        file[name] = getattr(table, name)
    for name in _TEXTS:
        file[name] = encoded_text(getattr(table, name))


def table_bytes(table: PatchTable) -> int:
    """Return the bytes that a table's columns and the links to its slides need."""
    text: int = sum(getattr(table, name).dtype.itemsize for name in _TEXTS)
    return len(table) * (text + ROW_BYTES) + len(np.unique(table.slide)) * SLIDE_BYTES


def _head(path: Path, spec: GridSpec) -> _Head:
    with _opened(path) as file:
        check_format(file, SHARD_FORMAT, path)
        if spec_attrs(spec) != {key: file.attrs[key] for key in spec_attrs(spec)}:
            raise WsiFlError(f"{path}: tiled on another grid than its store; tile the site again")
        widths = [len(str(file.attrs[name]).encode()) or 1 for name in _TEXTS]
        if "patient" in file:  # stands for the attribute
            widths[1] = file["patient"].dtype.itemsize
        return _Head(path, len(file["label"]), tuple(widths))


def _copy_columns(file: h5py.File, rows: slice, shard: Path, counts: Counts) -> tuple[str, int]:
    """Copy one shard's rows; return its slide, and the checksum that identifies its pixels."""
    with _opened(shard) as source:
        check_seal(source, PIXELS)
        columns = {name: source[name][:] for name in _NUMBERS}
        for name in _TEXTS:
            columns[name] = source[name][:] if name in source else str(source.attrs[name]).encode()
        slide, split, known = str(source.attrs["slide"]), str(source.attrs["split"]), shard_sum(source)
    for name, values in columns.items():
        file[name][rows] = values
    counts[split] += np.bincount(columns["label"], minlength=len(counts[split]))
    return slide, known


@contextmanager
def _opened(shard: Path) -> Iterator[h5py.File]:
    """Open a shard.

    Raises:
        WsiFlError: when it is damaged.
    """
    try:
        with opened(shard) as file:
            yield file
    except DAMAGE as error:
        raise WsiFlError(f"{shard}: damaged ({first_line(error)}); run the command again") from None
