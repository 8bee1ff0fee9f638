"""Shards of bag stores: the bag of one slide in a file, reused after a killed job. See FORMAT.md."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from wsi_fl.stores.bag_store import CHECKED_ROWS, Bag
from wsi_fl.stores.fields import (
    ROWS,
    Marked,
    checksum_rows,
    mark_columns,
    read_checksums,
    read_marked,
    read_spec,
    root_attrs,
    write_seal,
)
from wsi_fl.stores.hdf5 import StoreFile, create_hdf5
from wsi_fl.system.files import FileUnavailable, atomic_path
from wsi_fl.types import GridSpec, WsiFlError

_FORMAT = "wsi-fl bag"


@dataclass(frozen=True)
class BagShard:
    """The bag of one slide in a file.

    Attributes:
        slide: its name.
        fingerprint: SHA-256 over all inputs.
        encoder: name and digest of the weights.
        spec: of the patches.
        bag: features and places of the m patches.
        mpp_l0: µm per level-0 pixel of the slide; NaN if unknown.
        note: a remark, or "".
        unread: (x, y, reason) of unreadable selected patches, level-0 pixels.
    """

    slide: str
    fingerprint: str
    encoder: str
    spec: GridSpec
    bag: Bag
    mpp_l0: float = float("nan")
    note: str = ""
    unread: Marked = ()


def bag_fingerprint(*values: object) -> str:
    """Return the SHA-256 over a shard's inputs, plain values (JSON)."""
    return hashlib.sha256(json.dumps([1, *values]).encode()).hexdigest()


def write_bag_shard(path: Path, shard: BagShard) -> None:
    """Write a shard atomically."""
    bag = shard.bag
    columns = {name: value for name, value in vars(bag).items() if value is not None}
    columns |= mark_columns("unread", shard.unread)
    n_bytes = sum(value.nbytes for value in columns.values()) + len(bag.features) * 8 + 4096
    with atomic_path(path) as temporary, create_hdf5(temporary, n_bytes) as file:
        file.attrs.update(
            root_attrs(_FORMAT, shard.spec)
            | {name: getattr(shard, name) for name in ("slide", "fingerprint", "encoder", "note", "mpp_l0")}
        )
        for name, value in columns.items():
            file[name] = value
        file[ROWS] = checksum_rows(np.ascontiguousarray(bag.features))
        write_seal(file, CHECKED_ROWS)


class _BagShardFile(StoreFile):
    format = _FORMAT
    rows = CHECKED_ROWS

    def __init__(self, path: Path) -> None:
        self.command = "features" if path.parent.name == "features" else "mosaic"
        super().__init__(path)

    @property
    def site(self) -> str:
        return self.path.absolute().parents[1].name

    def _load(self, file: h5py.File) -> None:
        attrs, features = file.attrs, file["features"][:]
        n = len(features)
        read_checksums(file, n).check_rows(np.arange(n), features, lambda row: f"row {row} of features")
        others = (file[name][:] if name in file else None for name in ("cluster", "weight"))
        self.content = BagShard(
            **{name: str(attrs[name]) for name in ("slide", "fingerprint", "encoder", "note")},
            spec=read_spec(attrs),
            bag=Bag(features, file["xy_l0"][:], *others),
            mpp_l0=float(attrs["mpp_l0"]),
            unread=read_marked(file, "unread"),
        )


def read_bag_shard(path: Path) -> BagShard:
    """Return the content of a shard; raises as `StoreFile`."""
    with _BagShardFile(path) as shard:
        return shard.content


def current_shard(path: Path, fingerprint: str) -> BagShard | str:
    """Return the shard of a slide if it is intact and has this fingerprint, else why it must be written.

    Returns:
        "" without a shard.

    Raises:
        FileUnavailable: when it exists and cannot be read now.
    """
    if not path.exists():
        return ""
    try:
        shard = read_bag_shard(path)
    except FileUnavailable:
        raise
    except WsiFlError as error:
        return f"its shard was damaged ({error})"
    return shard if shard.fingerprint == fingerprint else "settings, encoder or slide changed"
