"""Writing patch stores: a shard per slide, then the columns that link to them.

Shards are written to a temporary name and renamed, so a crash loses at most the slide in hand.
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
from zlib import crc32

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.stores.checksums import DAMAGE, ROWS, SHARDS, check_seal, crc_of_rows, seal, shard_sum
from wsi_fl.stores.columns import ROW_BYTES, link_shards, table_bytes, write_table
from wsi_fl.stores.contents import PIXELS, SlideSource, quality_of, rows_of, shard_bytes
from wsi_fl.stores.fields import (
    SHARD_FORMAT,
    VERSION,
    Marked,
    StoreMeta,
    check_format,
    encoded_text,
    first_line,
    marked_columns,
    read_marked,
    spec_attrs,
    write_root,
)
from wsi_fl.stores.hdf5 import created, opened
from wsi_fl.stores.patches import PatchStore, damaged_rows
from wsi_fl.system.bulk import BulkFile, pile_in
from wsi_fl.system.files import atomic, remove_abandoned
from wsi_fl.types import GridSpec, PatchTable, WsiFlError


@dataclass(frozen=True)
class ShardMeta:
    """What holds for one slide of a store."""

    slide: str
    patient: str
    split: str
    spec: GridSpec
    quickhash: str
    """OpenSlide's quickhash of the slide, or "" where the format has none."""
    source: str = ""
    """What else decides the pixels; only its digest is stored."""
    wanted: str = "raw"
    """What was asked to be stored for the pixels: raw, native, jpeg:Q or none."""
    aside: Marked = ()
    """Patches that were set aside for their quality, and are no rows."""


Unread = Mapping[int, str]
"""Rows of a planned table that cannot be read, and why."""
_ALL_READ: Unread = MappingProxyType({})


def fingerprint(meta: ShardMeta, table: PatchTable) -> str:
    """Return SHA-256 over what decides a shard's content: slide, grid, split, planned positions, labels, storage."""
    said = [1, meta.slide, meta.patient, meta.split, meta.quickhash, meta.source]
    said += [meta.spec.size_px, meta.spec.mpp, meta.spec.stride_px, meta.wanted, meta.aside]
    digest = hashlib.sha256(json.dumps(said).encode())
    for column in (table.xy_l0, table.label, table.tumor_fraction):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def why_stale(path: Path, meta: ShardMeta, table: PatchTable) -> str | None:
    """Return why the shard of a slide must be written; None where it is whole and as planned.

    All of it is read, since only that detects damage, and tiling again must repair the damage.

    Returns:
        "" where there is no shard.
    """
    if not path.exists():
        return ""
    try:
        with opened(path) as file:
            check_format(file, SHARD_FORMAT, path)
            check_seal(file, PIXELS)
            if file.attrs["fingerprint"] != fingerprint(meta, table):
                return "parameters or slide changed"
            patches = rows_of(file["/"], meta.spec, None)
            whole = patches.n == len(file["label"]) and patches.shape[:2] == (meta.spec.size_px,) * 2
            if not whole or next(damaged_rows(patches), None) is not None:
                return "its shard was damaged (patches are not as they were written)"
    except (*DAMAGE, MemoryError, WsiFlError) as error:
        return f"its shard was damaged ({first_line(error)})"
    return None


def content_of(path: Path) -> tuple[str, Marked]:
    """Return how a shard stores pixels, and (x, y, reason) of the patches that could not be read, in level-0 pixels."""
    with opened(path) as file:
        return str(file.attrs["content"]), read_marked(file, "unread")


def write_shard(
    path: Path,
    meta: ShardMeta,
    table: PatchTable,
    pixels: Iterable[NDArray[np.uint8]],
    *,
    channels: int = 3,
    unread: Unread = _ALL_READ,
) -> None:
    """Write one slide's patches atomically, as they are.

    Args:
        table: as planned; it decides the fingerprint.
        pixels: batches uint8[b, size_px, size_px, channels] in the table's order, n rows in all, without `unread`.
        channels: 3 for RGB, 1 for grey images.
        unread: rows of the table that are left out.

    Raises:
        WsiFlError: when the pixels are not n ≥ 1 patches of the right shape, or the disk is full.
    """
    n, size = len(table) - len(unread), meta.spec.size_px
    room = n * size * size * channels
    with atomic(path) as temporary, _filled(temporary, meta, table, unread, room) as file:
        file.attrs["content"] = "raw"
        seal(file)
        at = _allocated(file, ROWS, (n,), h5py.h5t.STD_U32LE)
        offset = _allocated(file, "pixels", (n, size, size, channels))
        sums = np.empty(n, "<u4")
        row = 0
        with BulkFile(temporary, offset + room) as bulk:
            for batch in pixels:
                if batch.shape[1:] != (size, size, channels) or batch.dtype != np.uint8:
                    raise WsiFlError(
                        f"{path}: got patches {batch.dtype}{batch.shape}, expected uint8 of {size} px"
                    )
                if row + len(batch) > n:
                    raise WsiFlError(f"{path}: got more than the {n} patches expected")
                whole = np.ascontiguousarray(batch)
                sums[row : row + len(whole)] = crc_of_rows(whole)
                bulk.write(whole, offset + row * size * size * channels)
                row += len(whole)
            bulk.write(sums.view(np.uint8), at)
        _check_count(path, row, n)


def _allocated(
    file: h5py.File, name: str, shape: tuple[int, ...], kind: h5py.h5t.TypeID = h5py.h5t.STD_U8LE
) -> int:
    """Create a dataset with its place on disk: one chunk per patch for patches, one after another.

    What is written there bypasses HDF5, which lets in one thread at a time and fails badly on a full disk.

    Returns:
        The offset of its first byte in the file.

    Raises:
        WsiFlError: when HDF5 did not put the chunks one after another.
    """
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
    if last - first != math.prod(shape) // shape[0] * (
        shape[0] - 1
    ):  # the index of such chunks is "implicit"
        raise WsiFlError(f"{name}: this HDF5 library does not keep its chunks in one piece")
    return first


def write_streams(
    path: Path,
    meta: ShardMeta,
    table: PatchTable,
    streams: Iterable[bytes],
    *,
    unread: Unread = _ALL_READ,
) -> None:
    """Write one slide's patches atomically as JPEG streams in the table's order: `meta.wanted` says whose.

    How many bytes there are is known only at the end, so all of them wait.
    """
    quality = quality_of(meta.wanted)
    with atomic(path) as final, pile_in(path.parent) as pile:
        start, sums = [0], []
        for stream in streams:
            pile.write(stream)
            sums.append(crc32(stream))
            start.append(start[-1] + len(stream))
        _check_count(path, len(start) - 1, len(table) - len(unread))
        with _filled(final, meta, table, unread, start[-1]) as file:
            file.attrs.update({"content": meta.wanted, "lossy": quality is not None})
            file["start"] = np.array(start, np.uint64)
            file[ROWS] = np.array(sums, np.uint32)
            seal(file)
            offset = _allocated(file, "bytes", (start[-1],))
            with BulkFile(final, offset + start[-1]) as bulk:
                bulk.write_pile(pile, offset)


def write_positions(
    path: Path,
    meta: ShardMeta,
    table: PatchTable,
    source: SlideSource,
    *,
    unread: Unread = _ALL_READ,
) -> None:
    """Write one slide's columns atomically, with a reference to the slide instead of pixels."""
    with atomic(path) as temporary, _filled(temporary, meta, table, unread, 0) as file:
        file.attrs.update(
            {
                "content": "none",
                "path": source.path,
                "mpp_override": math.nan if source.mpp_override is None else source.mpp_override,
                "reader": source.reader,
            }
        )
        seal(file)


@contextmanager
def _filled(
    path: Path, meta: ShardMeta, planned: PatchTable, unread: Unread, n_bytes: int
) -> Iterator[h5py.File]:
    """Yield a new shard with everything but its pixels.

    Raises:
        WsiFlError: when no patch is left.
    """
    left_out = sorted(unread)
    table = planned.take(~np.isin(np.arange(len(planned)), left_out)) if left_out else planned
    if not len(table):
        raise WsiFlError(f"{meta.slide}: a shard holds at least one patch")
    with created(path, n_bytes + (len(planned) + len(meta.aside)) * ROW_BYTES) as file:
        file.attrs.update(
            spec_attrs(meta.spec)
            | {
                "format": SHARD_FORMAT,
                "version": VERSION,
                "tool_version": __version__,
                "slide": meta.slide,
                "patient": meta.patient,
                "split": meta.split,
                "quickhash": meta.quickhash,
                "fingerprint": fingerprint(meta, planned),
            }
        )
        for name in ("xy_l0", "label", "tumor_fraction"):
            file[name] = getattr(table, name)
        if (table.patient != meta.patient).any():  # images of many patients in one shard
            file["patient"] = encoded_text(table.patient)
        lost = tuple((x, y, unread[row]) for row in left_out for x, y in [planned.xy_l0[row].tolist()])
        for column, values in (marked_columns("unread", lost) | marked_columns("aside", meta.aside)).items():
            file[column] = values
        yield file


def _check_count(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise WsiFlError(f"{path}: got {found} patches, expected {expected}")


def write_columns(path: Path, meta: StoreMeta, shards: Sequence[Path]) -> PatchTable:
    """Write `patches.h5` as `link_shards` does, and return all its columns."""
    link_shards(path, meta, shards)
    with PatchStore(path) as store:
        return store.table


def pack(source: Path, target: Path) -> None:
    """Copy a linked store into one self-contained file that reads the same."""
    remove_abandoned(target)
    with PatchStore(source) as store, atomic(target) as temporary:
        room = sum(shard_bytes(store.shard(name)) for name in store.slides)
        with created(temporary, room + len(store) * ROW_BYTES + table_bytes(store.table)) as file:
            _copy_into(file, store)


def _copy_into(file: h5py.File, store: PatchStore) -> None:
    write_root(file, store.meta)
    write_table(file, store.table)
    slides = file.create_group("slides", track_order=True)
    for name in store.slides:
        group = slides.create_group(name)
        shard = store.shard(name)
        group.attrs.update(shard.attrs)
        for key in shard:
            shard.copy(key, group)
    file[SHARDS] = np.array([shard_sum(group) for group in slides.values()], np.uint32)
    seal(file)
