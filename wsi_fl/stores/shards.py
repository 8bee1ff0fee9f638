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

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.stores.columns import ROW_BYTES, created, link_shards, table_bytes, write_table
from wsi_fl.stores.contents import SlideSource, quality_of, shard_bytes
from wsi_fl.stores.fields import SHARD_FORMAT, StoreMeta, encoded_text, read_unread, spec_attrs, write_root
from wsi_fl.stores.patches import PatchStore
from wsi_fl.system.bulk import BulkFile, pile_in
from wsi_fl.system.files import atomic
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


Unread = Mapping[int, str]
"""Rows of a planned table that cannot be read, and why."""
_ALL_READ: Unread = MappingProxyType({})


def fingerprint(meta: ShardMeta, table: PatchTable) -> str:
    """SHA-256 over all that decides a shard's content: slide, grid, split, planned positions and labels, storage."""
    said = [1, meta.slide, meta.patient, meta.split, meta.quickhash, meta.source]
    said += [meta.spec.size_px, meta.spec.mpp, meta.spec.stride_px]
    if meta.wanted != "raw":  # said nothing in version 1, whose shards stay current
        said.append(meta.wanted)
    digest = hashlib.sha256(json.dumps(said).encode())
    for column in (table.xy_l0, table.label, table.tumor_fraction):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def content_of(path: Path) -> tuple[str, list[tuple[int, int, str]]]:
    """What a shard holds for pixels, and (x, y, reason) of the patches that could not be read, level-0 pixels."""
    with h5py.File(path, "r") as file:
        return str(file.attrs.get("content", "raw")), read_unread(file)


def write_shard(
    path: Path,
    meta: ShardMeta,
    table: PatchTable,
    pixels: Iterable[NDArray[np.uint8]],
    *,
    channels: int = 3,
    unread: Unread = _ALL_READ,
) -> None:
    """Writes one slide's patches atomically, as they are.

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
        offsets = _allocated(file, "pixels", (n, size, size, channels))
        end = offsets[-1] + size * size * channels
        row = 0
        with BulkFile(temporary, end) as bulk:
            for batch in pixels:
                if batch.shape[1:] != (size, size, channels) or batch.dtype != np.uint8:
                    raise WsiFlError(
                        f"{path}: got patches {batch.dtype}{batch.shape}, expected uint8 of {size} px"
                    )
                if row + len(batch) > n:
                    raise WsiFlError(f"{path}: got more than the {n} patches expected")
                for patch in batch:
                    bulk.write(np.ascontiguousarray(patch), offsets[row])
                    row += 1
        _check_count(path, row, n)


def _allocated(file: h5py.File, name: str, shape: tuple[int, ...]) -> list[int]:
    """A data set of bytes with its place on disk: one piece for a row of bytes, a chunk per patch for patches.

    What is written there bypasses HDF5, which lets in one thread at a time and fails badly on a full disk.

    Returns:
        The offset of each piece in the file.
    """
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)  # the same content is the same bytes
    if len(shape) > 1:
        layout.set_chunk((1, *shape[1:]))
    kind, space = h5py.h5t.STD_U8LE, h5py.h5s.create_simple(shape)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, layout)
    file.flush()
    if len(shape) == 1:
        return [int(dataset.get_offset())]
    corners = ((row, *[0] * (len(shape) - 1)) for row in range(shape[0]))
    return [int(dataset.get_chunk_info_by_coord(corner).byte_offset) for corner in corners]


def write_streams(
    path: Path,
    meta: ShardMeta,
    table: PatchTable,
    streams: Iterable[bytes],
    *,
    unread: Unread = _ALL_READ,
) -> None:
    """Writes one slide's patches atomically as JPEG streams in the table's order: `meta.wanted` says whose.

    How many bytes there are is known only at the end, so all of them wait.
    """
    quality = quality_of(meta.wanted)
    with atomic(path) as final, pile_in(path.parent) as pile:
        start = [0]
        for stream in streams:
            pile.write(stream)
            start.append(start[-1] + len(stream))
        _check_count(path, len(start) - 1, len(table) - len(unread))
        with _filled(final, meta, table, unread, start[-1], version=2) as file:
            file.attrs.update({"content": meta.wanted, "lossy": quality is not None})
            file["start"] = np.array(start, np.uint64)
            (offset,) = _allocated(file, "bytes", (start[-1],))
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
    """Writes one slide's columns atomically, and where the slide is instead of pixels."""
    with atomic(path) as temporary, _filled(temporary, meta, table, unread, 0, version=2) as file:
        file.attrs.update(
            {
                "content": "none",
                "path": source.path,
                "mpp_override": math.nan if source.mpp_override is None else source.mpp_override,
                "reader": source.reader,
            }
        )


@contextmanager
def _filled(
    path: Path, meta: ShardMeta, planned: PatchTable, unread: Unread, n_bytes: int, *, version: int = 1
) -> Iterator[h5py.File]:
    """A new shard with everything but its pixels."""
    left_out = sorted(unread)
    table = planned.take(~np.isin(np.arange(len(planned)), left_out)) if left_out else planned
    if not len(table):
        raise WsiFlError(f"{meta.slide}: a shard holds at least one patch")
    with created(path, n_bytes + len(planned) * ROW_BYTES) as file:
        file.attrs.update(
            spec_attrs(meta.spec)
            | {
                "format": SHARD_FORMAT,
                "version": version,
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
        if left_out:
            file["unread_xy_l0"] = planned.xy_l0[left_out]
            file["unread_reason"] = encoded_text(unread[row] for row in left_out)
        yield file


def _check_count(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise WsiFlError(f"{path}: got {found} patches, expected {expected}")


def write_columns(path: Path, meta: StoreMeta, shards: Sequence[Path]) -> PatchTable:
    """Writes `patches.h5` as `link_shards` does and returns all its columns."""
    link_shards(path, meta, shards)
    with PatchStore(path) as store:
        return store.table


def pack(source: Path, target: Path) -> None:
    """Copies a linked store into one self-contained file that reads the same."""
    with PatchStore(source) as store, atomic(target) as temporary:
        room = sum(shard_bytes(store.shard(name)) for name in store.slides)
        with created(temporary, room + len(store) * ROW_BYTES + table_bytes(store.table)) as file:
            _copy_into(file, store)


def _copy_into(file: h5py.File, store: PatchStore) -> None:
    write_root(file, store.meta, store.version)
    write_table(file, store.table)
    slides = file.create_group("slides", track_order=True)
    for name in store.slides:
        group = slides.create_group(name)
        shard = store.shard(name)
        group.attrs.update(shard.attrs)
        for key in shard:
            shard.copy(key, group)
