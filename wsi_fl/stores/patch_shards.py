"""Writers of patch stores: a shard per slide, then `patches.h5` with the columns of all shards and a link to each.

Files are written to a temporary name and renamed, so a crash loses at most the slide in hand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import h5py
import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from wsi_fl.stores.fields import (
    DAMAGE,
    ROWS,
    SHARD_FORMAT,
    SHARDS,
    STORE_FORMAT,
    Marked,
    StoreMeta,
    check_format,
    check_seal,
    checksum_rows,
    encode_texts,
    first_line,
    mark_columns,
    read_marked,
    read_meta,
    read_spec,
    root_attrs,
    shard_checksum,
    write_root,
    write_seal,
)
from wsi_fl.stores.hdf5 import SLIDE_BYTES, create_hdf5, open_hdf5
from wsi_fl.stores.patch_store import PIXEL_DATASETS, PatchStore, SlideSource, open_shard_patches, parse_quality
from wsi_fl.system.direct_io import BulkFile, open_pile
from wsi_fl.system.files import atomic_path, refuse_unavailable, remove_abandoned
from wsi_fl.types import SPLITS, GridSpec, PatchTable, WsiFlError

_ROW_BYTES = 256
"""Bytes of a patch's columns and its place in the index of chunks."""
_NUMBERS, _TEXTS = ("xy_l0", "label", "tumor_fraction"), ("slide", "patient", "split")

Counts = dict[str, NDArray[np.int64]]
"""Split → patches of each class."""


@dataclass(frozen=True)
class ShardMeta:
    """The metadata of a shard, and inputs of its fingerprint."""

    slide: str
    patient: str
    split: str
    spec: GridSpec
    quickhash: str
    """OpenSlide's quickhash of the slide, or "" for formats without."""
    source: str = ""
    """Other inputs of the pixels; only their digest is stored."""
    content: str = "raw"
    """The requested storage of pixels: raw, native, jpeg:Q or none."""
    excluded: Marked = ()
    """Patches excluded for artifacts, which are no rows."""


_UnreadRows = Mapping[int, str]
"""Unreadable row of a planned table → reason."""
_NONE_UNREAD: _UnreadRows = MappingProxyType({})


def _hash_shard(meta: ShardMeta, table: PatchTable) -> str:
    """Return the SHA-256 over a shard's inputs: slide, grid, split, planned positions, labels, storage."""
    values = [1, meta.slide, meta.patient, meta.split, meta.quickhash, meta.source]
    values += [meta.spec.size_px, meta.spec.mpp, meta.spec.stride_px, meta.content, meta.excluded]
    digest = hashlib.sha256(json.dumps(values).encode())
    for column in (table.xy_l0, table.label, table.tumor_fraction):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def explain_stale(path: Path, meta: ShardMeta, table: PatchTable) -> str | None:
    """Return why the shard of a slide must be written; None if it is intact and as planned.

    All of it is read to detect damage, since tiling again must repair it.

    Returns:
        "" without a shard.
    """
    if not path.exists():
        return ""
    try:
        with open_hdf5(path) as file:
            check_format(file, SHARD_FORMAT, path)
            check_seal(file, PIXEL_DATASETS)
            if file.attrs["fingerprint"] != _hash_shard(meta, table):
                return "parameters or slide changed"
            patches = open_shard_patches(file["/"], meta.spec, None)
            is_whole = patches.n_patches == len(file["label"]) and patches.shape[:2] == (meta.spec.size_px,) * 2
            if not is_whole or next(patches.iterate_damaged(), None) is not None:
                return "its shard was damaged (patches are not as they were written)"
    except (*DAMAGE, MemoryError, WsiFlError) as error:
        refuse_unavailable(error, path)
        return f"its shard was damaged ({first_line(error)})"
    return None


def read_shard_content(path: Path) -> tuple[str, Marked]:
    """Return a shard's storage of pixels, and (x, y, reason) of unreadable patches in level-0 pixels."""
    with open_hdf5(path) as file:
        return str(file.attrs["content"]), read_marked(file, "unread")


def write_shard(
    path: Path,
    meta: ShardMeta,
    table: PatchTable,
    pixels: Iterable[NDArray[np.uint8]],
    *,
    channels: int = 3,
    unread: _UnreadRows = _NONE_UNREAD,
) -> None:
    """Write one slide's patches atomically as raw pixels.

    Args:
        table: as planned, for the fingerprint.
        pixels: batches uint8[b, size_px, size_px, channels] in the table's order, n rows in all, without `unread`.
        channels: 3 for RGB, 1 for grey images.
        unread: skipped rows of the table.

    Raises:
        WsiFlError: when the pixels are not n ≥ 1 patches of the right shape, or the disk is full.
    """
    n, size = len(table) - len(unread), meta.spec.size_px
    n_bytes = n * size * size * channels
    with atomic_path(path) as temporary, _create_shard(temporary, meta, table, unread, n_bytes) as file:
        file.attrs["content"] = "raw"
        write_seal(file)
        checksum_offset = _allocate_dataset(file, ROWS, (n,), h5py.h5t.STD_U32LE)
        offset = _allocate_dataset(file, "pixels", (n, size, size, channels))
        sums = np.empty(n, "<u4")
        row = 0
        with BulkFile(temporary, offset + n_bytes) as bulk:
            for batch in pixels:
                if batch.shape[1:] != (size, size, channels) or batch.dtype != np.uint8:
                    raise WsiFlError(f"{path}: got patches {batch.dtype}{batch.shape}, expected uint8 of {size} px")
                if row + len(batch) > n:
                    raise WsiFlError(f"{path}: got more than the {n} patches expected")
                contiguous = np.ascontiguousarray(batch)
                sums[row : row + len(contiguous)] = checksum_rows(contiguous)
                bulk.write(contiguous, offset + row * size * size * channels)
                row += len(contiguous)
            bulk.write(sums.view(np.uint8), checksum_offset)
        _check_count(path, row, n)


def _allocate_dataset(
    file: h5py.File, name: str, shape: tuple[int, ...], kind: h5py.h5t.TypeID = h5py.h5t.STD_U8LE
) -> int:
    # Returns the offset of a new dataset with one chunk per patch, in order. Writes there bypass HDF5, which admits one
    # thread at a time and fails badly on a full disk.
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)  # the same content is the same bytes
    if len(shape) > 1:
        layout.set_chunk((1, *shape[1:]))
    dataset = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), layout)
    file.flush()
    if len(shape) == 1:
        return int(dataset.get_offset())
    corners = ((row, *[0] * (len(shape) - 1)) for row in (0, shape[0] - 1))
    first, last = (int(dataset.get_chunk_info_by_coord(corner).byte_offset) for corner in corners)
    if last - first != math.prod(shape[1:]) * (shape[0] - 1):  # the index of such chunks is "implicit"
        raise WsiFlError(f"{name}: this HDF5 library does not keep its chunks in one piece")
    return first


def write_streams(
    path: Path, meta: ShardMeta, table: PatchTable, streams: Iterable[bytes], *, unread: _UnreadRows = _NONE_UNREAD
) -> None:
    """Write one slide's patches atomically as native or new JPEG streams in the table's order.

    Streams are collected first, since their size is known only at the end.
    """
    quality = parse_quality(meta.content)
    with atomic_path(path) as final, open_pile(path.parent) as pile:
        start, sums = [0], []
        for stream in streams:
            pile.write(stream)
            sums.append(crc32(stream))
            start.append(start[-1] + len(stream))
        _check_count(path, len(start) - 1, len(table) - len(unread))
        with _create_shard(final, meta, table, unread, start[-1]) as file:
            file.attrs.update({"content": meta.content, "lossy": quality is not None})
            file["start"] = np.array(start, np.uint64)
            file[ROWS] = np.array(sums, np.uint32)
            write_seal(file)
            offset = _allocate_dataset(file, "bytes", (start[-1],))
            with BulkFile(final, offset + start[-1]) as bulk:
                bulk.write_pile(pile, offset)


def write_positions(
    path: Path, meta: ShardMeta, table: PatchTable, source: SlideSource, *, unread: _UnreadRows = _NONE_UNREAD
) -> None:
    """Write one slide's columns atomically, with a reference to the slide instead of pixels."""
    with atomic_path(path) as temporary, _create_shard(temporary, meta, table, unread, 0) as file:
        file.attrs.update(
            {
                "content": "none",
                "path": source.path,
                "mpp_override": math.nan if source.mpp_override is None else source.mpp_override,
                "reader": source.reader,
            }
        )
        write_seal(file)


@contextmanager
def _create_shard(
    path: Path, meta: ShardMeta, planned: PatchTable, unread: _UnreadRows, n_bytes: int
) -> Iterator[h5py.File]:
    # a new shard without pixels
    unread_rows = sorted(unread)
    table = planned.take(~np.isin(np.arange(len(planned)), unread_rows)) if unread_rows else planned
    if not len(table):
        raise WsiFlError(f"{meta.slide}: a shard holds at least one patch")
    with create_hdf5(path, n_bytes + (len(planned) + len(meta.excluded)) * _ROW_BYTES) as file:
        attrs = {name: getattr(meta, name) for name in ("slide", "patient", "split", "quickhash")}
        file.attrs.update(root_attrs(SHARD_FORMAT, meta.spec) | attrs | {"fingerprint": _hash_shard(meta, planned)})
        for name in _NUMBERS:
            file[name] = getattr(table, name)
        if (table.patient != meta.patient).any():  # images of many patients in one shard
            file["patient"] = encode_texts(table.patient)
        unread_places = tuple((x, y, unread[row]) for row in unread_rows for x, y in [planned.xy_l0[row].tolist()])
        for column, values in (mark_columns("unread", unread_places) | mark_columns("aside", meta.excluded)).items():
            file[column] = values
        yield file


def _check_count(path: Path, count: int, expected: int) -> None:
    if count != expected:
        raise WsiFlError(f"{path}: got {count} patches, expected {expected}")


def link_shards(path: Path, meta: StoreMeta, shards: Sequence[Path], folder: Path | None = None) -> Counts:
    """Write `patches.h5`, the rows of all shards in this order, one shard in memory at a time.

    Shards are below the folder of the store: that of `path`, unless another is given.

    Raises:
        WsiFlError: when a shard is damaged or of another grid or format, or the disk is full.
    """
    heads = [_read_shard_size(shard, meta.spec) for shard in shards]
    n = sum(rows for rows, _ in heads)
    widths = [max((text_widths[k] for _, text_widths in heads), default=1) for k in range(len(_TEXTS))]
    counts = {split: np.zeros(len(meta.classes), np.int64) for split in SPLITS}
    n_bytes = n * (sum(widths) + _ROW_BYTES) + len(heads) * SLIDE_BYTES
    with atomic_path(path) as temporary, create_hdf5(temporary, n_bytes) as file:
        write_root(file, meta)
        file.create_dataset("xy_l0", (n, 2), np.int64)
        file.create_dataset("label", (n,), np.int64)
        file.create_dataset("tumor_fraction", (n,), np.float32)
        for name, width in zip(_TEXTS, widths, strict=True):
            file.create_dataset(name, (n,), h5py.string_dtype("utf-8", width))
        links = file.create_group("slides", track_order=True)
        row, sums = 0, []
        for shard, (rows, _) in zip(shards, heads, strict=True):
            slide, checksum = _copy_columns(file, slice(row, row + rows), shard, counts)
            links[slide] = h5py.ExternalLink(shard.relative_to(folder or path.parent).as_posix(), "/")
            sums.append(checksum)
            row += rows
        file[SHARDS] = np.array(sums, np.uint32)
        write_seal(file)
    return counts


def read_linked_counts(path: Path, meta: StoreMeta, shards: Sequence[Path]) -> Counts | None:
    """Return the counts of an intact `patches.h5` with links to these shards in this order; else None.

    A shard counts as linked if it is not newer than the file and its patches have the linked checksums.
    """
    try:
        with open_hdf5(path) as file:
            check_format(file, STORE_FORMAT, path)
            check_seal(file)
            labels, split, checksums = file["label"][:], file["split"][:], file[SHARDS][:]
            is_same = read_meta(file) == meta and list(file["slides"]) == [shard.stem for shard in shards]
        write_time = path.stat().st_mtime_ns
        for shard, value in zip(shards, checksums, strict=is_same):
            with open_hdf5(shard) as source:
                is_same = is_same and shard_checksum(source) == value and shard.stat().st_mtime_ns <= write_time
    except (*DAMAGE, WsiFlError) as error:
        refuse_unavailable(error, path)
        return None
    if not is_same:
        return None
    return {name: np.bincount(labels[split == name.encode()], minlength=len(meta.classes)) for name in SPLITS}


def _read_shard_size(path: Path, spec: GridSpec) -> tuple[int, list[int]]:
    # the number of a shard's rows, and the bytes of its longest slide, patient and split
    with _open_shard(path) as file:
        check_format(file, SHARD_FORMAT, path)
        if spec != read_spec(file.attrs):
            raise WsiFlError(f"{path}: tiled on another grid than its store; tile the site again")
        widths = [len(str(file.attrs[name]).encode()) or 1 for name in _TEXTS]
        if "patient" in file:  # stands for the attribute
            widths[1] = file["patient"].dtype.itemsize
        return len(file["label"]), widths


def _copy_columns(file: h5py.File, rows: slice, shard: Path, counts: Counts) -> tuple[str, int]:
    """Copy one shard's rows; return its slide, and the checksum of its pixels."""
    with _open_shard(shard) as source:
        check_seal(source, PIXEL_DATASETS)
        columns = {name: source[name][:] for name in _NUMBERS}
        for name in _TEXTS:
            columns[name] = source[name][:] if name in source else str(source.attrs[name]).encode()
        slide, split, checksum = (str(source.attrs["slide"]), str(source.attrs["split"]), shard_checksum(source))
    for name, values in columns.items():
        file[name][rows] = values
    counts[split] += np.bincount(columns["label"], minlength=len(counts[split]))
    return slide, checksum


@contextmanager
def _open_shard(shard: Path) -> Iterator[h5py.File]:
    try:
        with open_hdf5(shard) as file:
            yield file
    except DAMAGE as error:
        refuse_unavailable(error, shard)
        raise WsiFlError(f"{shard}: damaged ({first_line(error)}); run the command again") from None


def write_columns(path: Path, meta: StoreMeta, shards: Sequence[Path]) -> PatchTable:
    """Write `patches.h5` like `link_shards`; return all its columns."""
    link_shards(path, meta, shards)
    with PatchStore(path) as store:
        return store.table


def pack_store(source: Path, target: Path) -> None:
    """Copy a linked store into one self-contained file."""
    remove_abandoned(target)
    with PatchStore(source) as store, atomic_path(target) as temporary:
        table = store.table
        row_bytes = _ROW_BYTES * 2 + sum(getattr(table, name).dtype.itemsize for name in _TEXTS)
        node_bytes = (node.nbytes for slide in store.slides for node in store.open_shard(slide).values())
        n_bytes = sum(node_bytes) + len(table) * row_bytes + len(store.slides) * SLIDE_BYTES
        with create_hdf5(temporary, n_bytes) as file:
            write_root(file, store.meta)
            for name in _NUMBERS:
                file[name] = getattr(table, name)
            for name in _TEXTS:
                file[name] = encode_texts(getattr(table, name))
            slides = file.create_group("slides", track_order=True)
            for slide in store.slides:
                group, shard = slides.create_group(slide), store.open_shard(slide)
                group.attrs.update(shard.attrs)
                for key in shard:
                    shard.copy(key, group)
            file[SHARDS] = np.array([shard_checksum(group) for group in slides.values()], np.uint32)
            write_seal(file)
