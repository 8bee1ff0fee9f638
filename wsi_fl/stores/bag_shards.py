"""The bag of one slide, by itself: what a killed job need not make again. See FORMAT.md."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from wsi_fl import __version__
from wsi_fl.stores.bags import ROW_SUMMED, Bag
from wsi_fl.stores.checksums import ROWS, check_rows, crc_of_rows, seal, sums_of
from wsi_fl.stores.fields import VERSION, Marked, marked_columns, read_marked, read_spec, spec_attrs
from wsi_fl.stores.hdf5 import StoreFile, created
from wsi_fl.system.files import atomic
from wsi_fl.types import GridSpec, WsiFlError

FORMAT = "wsi-fl bag"


@dataclass(frozen=True)
class BagShard:
    """The bag of one slide, by itself.

    Attributes:
        slide: its name.
        fingerprint: SHA-256 over all that decides the content.
        encoder: name and digest of the weights.
        spec: of the patches.
        bag: features and places of the m patches.
        mpp_l0: µm per level-0 pixel of the slide; NaN where nobody said.
        note: what people should know of it, or "".
        unread: (x, y, reason) of chosen patches that could not be read, level-0 pixels.
    """

    slide: str
    fingerprint: str
    encoder: str
    spec: GridSpec
    bag: Bag
    mpp_l0: float = float("nan")
    note: str = ""
    unread: Marked = ()


def fingerprint(*said: Any) -> str:
    """SHA-256 over plain values (JSON) that decide a shard's content."""
    return hashlib.sha256(json.dumps([1, *said]).encode()).hexdigest()


def write_shard(path: Path, shard: BagShard) -> None:
    """Write a shard atomically."""
    bag = shard.bag
    columns = {name: value for name, value in vars(bag).items() if value is not None}
    columns |= marked_columns("unread", shard.unread)
    n_bytes = sum(value.nbytes for value in columns.values()) + len(bag.features) * 8 + 4096
    with atomic(path) as temporary, created(temporary, n_bytes) as file:
        file.attrs.update(
            spec_attrs(shard.spec)
            | {"format": FORMAT, "version": VERSION, "tool_version": __version__}
            | {name: getattr(shard, name) for name in ("slide", "fingerprint", "encoder", "note", "mpp_l0")}
        )
        for name, value in columns.items():
            file[name] = value
        file[ROWS] = crc_of_rows(np.ascontiguousarray(bag.features))
        seal(file, ROW_SUMMED)


class _Shard(StoreFile):
    format = FORMAT
    rows = ROW_SUMMED

    def __init__(self, path: Path) -> None:
        self.command = "features" if path.parent.name == "features" else "mosaic"
        super().__init__(path)

    @property
    def site(self) -> str:
        return self.path.absolute().parents[1].name

    def _load(self, file: h5py.File) -> None:
        attrs, features = file.attrs, file["features"][:]
        n = len(features)
        check_rows(sums_of(file, n), np.arange(n), features, lambda row: f"row {row} of features")
        others = (file[name][:] if name in file else None for name in ("cluster", "weight"))
        self.content = BagShard(
            **{name: str(attrs[name]) for name in ("slide", "fingerprint", "encoder", "note")},
            spec=read_spec(attrs),
            bag=Bag(features, file["xy_l0"][:], *others),
            mpp_l0=float(attrs["mpp_l0"]),
            unread=read_marked(file, "unread"),
        )


def read_shard(path: Path) -> BagShard:
    """Return a shard as it was written.

    Raises:
        WsiFlError: when it is missing, damaged, of another format or version.
    """
    with _Shard(path) as shard:
        return shard.content


def current_shard(path: Path, wanted: str) -> BagShard | str:
    """Return the shard of a slide where it is whole and has this fingerprint, else why it must be made.

    Returns:
        "" where there is no shard.
    """
    if not path.exists():
        return ""
    try:
        shard = read_shard(path)
    except WsiFlError as error:
        return f"its shard was damaged ({error})"
    return shard if shard.fingerprint == wanted else "settings, encoder or slide changed"
