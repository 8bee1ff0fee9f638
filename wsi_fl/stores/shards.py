"""Writing patch stores: a shard per slide, then the columns that link to them.

Shards are written to a temporary name and renamed, so a crash loses at most the slide in hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.files import atomic, reserve
from wsi_fl.stores.fields import (
    SHARD_FORMAT,
    VERSION,
    StoreMeta,
    check_format,
    encoded_text,
    spec_attrs,
    write_root,
)
from wsi_fl.stores.patches import PatchStore
from wsi_fl.types import GridSpec, PatchTable, WsiFlError

_SLIDE_BYTES = 1 << 14
"""Room for a slide's attributes, link and group."""
_ROW_BYTES = 256
"""Room for a patch's columns and its place in the index of chunks."""


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


def fingerprint(meta: ShardMeta, table: PatchTable) -> str:
    """SHA-256 over all that decides a shard's content: format, slide, grid, split, positions and labels."""
    said = [VERSION, meta.slide, meta.patient, meta.split, meta.quickhash, meta.source]
    said += [meta.spec.size_px, meta.spec.mpp, meta.spec.stride_px]
    digest = hashlib.sha256(json.dumps(said).encode())
    for column in (table.xy_l0, table.label, table.tumor_fraction):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def shard_is_current(path: Path, wanted: str) -> bool | None:
    """Whether the shard has this fingerprint; None when there is no shard."""
    if not path.exists():
        return None
    try:
        with h5py.File(path, "r") as file:
            return bool(file.attrs.get("fingerprint") == wanted)
    except OSError:
        return False


def write_shard(
    path: Path, meta: ShardMeta, table: PatchTable, pixels: Iterable[NDArray[np.uint8]], *, channels: int = 3
) -> None:
    """Writes one slide's patches atomically.

    Args:
        pixels: batches uint8[b, size_px, size_px, channels] in the table's order, n rows in all.
        channels: 3 for RGB, 1 for grey images.

    Raises:
        WsiFlError: when the pixels are not n ≥ 1 patches of the right shape, or the disk is full.
    """
    n, size = len(table), meta.spec.size_px
    if n == 0:
        raise WsiFlError(f"{path}: a shard holds at least one patch")
    with atomic(path) as temporary, _created(temporary, n * (size * size * channels + _ROW_BYTES)) as file:
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
                "fingerprint": fingerprint(meta, table),
            }
        )
        for name in ("xy_l0", "label", "tumor_fraction"):
            file[name] = getattr(table, name)
        if (table.patient != meta.patient).any():  # images of many patients in one shard
            file["patient"] = encoded_text(table.patient)
        dataset = file.create_dataset(
            "pixels", (n, size, size, channels), np.uint8, chunks=(1, size, size, channels), fillvalue=0
        )
        file.flush()  # from here on only whole patches are written, which fail cleanly
        row = 0
        for batch in pixels:
            if batch.shape[1:] != (size, size, channels) or batch.dtype != np.uint8:
                raise WsiFlError(
                    f"{path}: got patches {batch.dtype}{batch.shape}, expected uint8 of {size} px"
                )
            if row + len(batch) > n:
                raise WsiFlError(f"{path}: got more than the {n} patches expected")
            for patch in batch:
                dataset.id.write_direct_chunk((row, 0, 0, 0), np.ascontiguousarray(patch).tobytes())
                row += 1
        if row != n:
            raise WsiFlError(f"{path}: got {row} patches, expected {n}")


def write_columns(path: Path, meta: StoreMeta, shards: list[Path]) -> PatchTable:
    """Writes `patches.h5`: the columns of all shards, in the order given, and a link to each of them.

    Shards lie below the folder of `path`. Returns the columns written.
    """
    tables = [_shard_table(shard, meta.spec) for shard in shards]
    table = PatchTable.concat(tables) if tables else _empty_table()
    with atomic(path) as temporary, _created(temporary, _columns_bytes(table)) as file:
        write_root(file, meta, table)
        links = file.create_group("slides", track_order=True)
        for shard, part in zip(shards, tables, strict=True):
            links[str(part.slide[0])] = h5py.ExternalLink(shard.relative_to(path.parent).as_posix(), "/")
    return table


def pack(source: Path, target: Path) -> None:
    """Copies a linked store into one self-contained file that reads the same."""
    with PatchStore(source) as store, atomic(target) as temporary:
        needed = len(store) * (store.meta.spec.size_px**2 * 3 + _ROW_BYTES) + _columns_bytes(store.table)
        with _created(temporary, needed) as file:
            _copy_into(file, store)


def _copy_into(file: h5py.File, store: PatchStore) -> None:
    write_root(file, store.meta, store.table)
    slides = file.create_group("slides", track_order=True)
    for name in store.slides:
        group = slides.create_group(name)
        shard = store.shard(name)
        group.attrs.update(shard.attrs)
        for key in shard:
            shard.copy(key, group)


def _columns_bytes(table: PatchTable) -> int:
    text = sum(column.dtype.itemsize for column in (table.slide, table.patient, table.split))
    return len(table) * (text + _ROW_BYTES) + len(np.unique(table.slide)) * _SLIDE_BYTES


def _created(path: Path, n_bytes: int) -> h5py.File:
    """A new HDF5 file on a disk that can hold it."""
    reserve(path, n_bytes + _SLIDE_BYTES)
    return h5py.File(path, "w")


def _shard_table(path: Path, spec: GridSpec) -> PatchTable:
    with h5py.File(path, "r") as file:
        check_format(file, SHARD_FORMAT, path)
        if spec_attrs(spec) != {key: file.attrs[key] for key in spec_attrs(spec)}:
            raise WsiFlError(f"{path}: tiled on another grid than its store; run `wsi-fl tile` again")
        n = len(file["label"])
        slide, patient, split = (np.full(n, str(file.attrs[key])) for key in ("slide", "patient", "split"))
        if "patient" in file:
            patient = np.asarray(file["patient"].asstr()[:], np.str_)
        return PatchTable(
            file["xy_l0"][:], file["label"][:], file["tumor_fraction"][:], slide, patient, split
        )


def _empty_table() -> PatchTable:
    text = np.empty(0, np.str_)
    return PatchTable(
        np.empty((0, 2), np.int64), np.empty(0, np.int64), np.empty(0, np.float32), text, text, text
    )
