"""Mosaic shards: the features of one slide's mosaic, whole or absent. See FORMAT.md."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from wsi_fl import __version__
from wsi_fl.stores.checksums import CHANGED, ROWS, seal, sums_of
from wsi_fl.stores.features import BAG, Bag
from wsi_fl.stores.fields import VERSION, Marked, marked_columns, read_marked, read_spec, spec_attrs
from wsi_fl.stores.file import StoreFile
from wsi_fl.stores.hdf5 import created
from wsi_fl.system.files import atomic
from wsi_fl.types import GridSpec, WsiFlError

SHARD_FORMAT = "wsi-fl mosaic shard"


@dataclass(frozen=True)
class MosaicShard:
    """The mosaic of one slide as features.

    Attributes:
        slide: its name.
        quickhash: OpenSlide's, or "".
        fingerprint: SHA-256 over all that decides the content.
        encoder: name and digest of the weights.
        spec: of the patches.
        mpp_l0: µm per level-0 pixel of the slide.
        n_candidates: patches that the mosaic stands for.
        note: what people should know of it, or "".
        bag: features, places, colour groups and weights of the m patches.
        unread: (x, y, reason) of chosen patches that could not be read, level-0 pixels.
    """

    slide: str
    quickhash: str
    fingerprint: str
    encoder: str
    spec: GridSpec
    mpp_l0: float
    n_candidates: int
    note: str
    bag: Bag
    unread: Marked = ()


def fingerprint(*said: Any) -> str:
    """SHA-256 over plain values (JSON) that decide a shard's content."""
    return hashlib.sha256(json.dumps([1, *said]).encode()).hexdigest()


def write_mosaic(path: Path, shard: MosaicShard) -> None:
    """Writes a shard atomically."""
    bag = shard.bag
    assert bag.cluster is not None and bag.weight is not None
    unread = marked_columns("unread", shard.unread)
    n_bytes = bag.features.nbytes + len(bag.features) * 64 + sum(one.nbytes for one in unread.values()) + 4096
    with atomic(path) as temporary, created(temporary, n_bytes) as file:
        file.attrs.update(
            spec_attrs(shard.spec)
            | {"format": SHARD_FORMAT, "version": VERSION, "tool_version": __version__}
            | {name: getattr(shard, name) for name in _ATTRIBUTES}
        )
        file["features"] = bag.features.astype(np.float32, copy=False)
        file["xy_l0"] = bag.xy_l0.astype(np.int64, copy=False)
        file["cluster"] = bag.cluster.astype(np.int64, copy=False)
        file["weight"] = bag.weight.astype(np.float32, copy=False)
        for name, column in unread.items():
            file[name] = column
        file[ROWS] = np.array([bag.crc32], np.uint32)
        seal(file, BAG)


_ATTRIBUTES = ("slide", "quickhash", "fingerprint", "encoder", "mpp_l0", "n_candidates", "note")


def current_mosaic(path: Path, wanted: str) -> bool | None:
    """Whether the shard is whole and has this fingerprint; None when there is no shard."""
    if not path.exists():
        return None
    try:
        return read_mosaic(path).fingerprint == wanted
    except WsiFlError:
        return False


class _Shard(StoreFile):
    format = SHARD_FORMAT
    command = "mosaic"
    rows = BAG

    @property
    def site(self) -> str:
        return self.path.absolute().parents[1].name

    def _load(self, file: h5py.File) -> None:
        attrs = file.attrs
        bag = Bag(file["features"][:], file["xy_l0"][:], file["cluster"][:], file["weight"][:])
        if bag.crc32 != sums_of(file, 1).values[0]:
            raise ValueError(f"features: {CHANGED}")
        self.content = MosaicShard(
            spec=read_spec(attrs),
            mpp_l0=float(attrs["mpp_l0"]),
            n_candidates=int(attrs["n_candidates"]),
            bag=bag,
            unread=read_marked(file, "unread"),
            **{name: str(attrs[name]) for name in ("slide", "quickhash", "fingerprint", "encoder", "note")},
        )


def read_mosaic(path: Path) -> MosaicShard:
    """Return a shard as it was written.

    Raises:
        WsiFlError: when it is missing, damaged, of another format or version.
    """
    with _Shard(path) as shard:
        return shard.content
