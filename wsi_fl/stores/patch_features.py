"""Features of every patch of a patch store. See FORMAT.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.stores.checksums import (
    DAMAGE,
    ROWS,
    Sums,
    check_rows,
    check_seal,
    crc_of_rows,
    seal,
    sums_of,
)
from wsi_fl.stores.columns import table_bytes, write_table
from wsi_fl.stores.fields import (
    VERSION,
    StoreMeta,
    check_format,
    first_line,
    origin_attrs,
    read_meta,
    read_table,
    spec_attrs,
)
from wsi_fl.stores.file import StoreFile
from wsi_fl.stores.hdf5 import created, opened
from wsi_fl.system.files import atomic
from wsi_fl.types import PatchTable, WsiFlError

FORMAT, SHARD_FORMAT = "wsi-fl patch features", "wsi-fl patch feature shard"
_FEATURES = ("features",)
"""The dataset whose rows have checksums."""

Features = NDArray[np.float32]


@dataclass(frozen=True)
class FeaturesMeta:
    """What holds for all features of a site.

    Attributes:
        store: of the patches: site, classes, grid.
        encoder: name and digest of the weights.
    """

    store: StoreMeta
    encoder: str


def write_shard(path: Path, fingerprint: str, features: Features) -> None:
    """Writes the features float32[n, d] of one slide atomically.

    Args:
        fingerprint: SHA-256 over all that decides the content.
    """
    with atomic(path) as temporary, created(temporary, features.nbytes) as file:
        file.attrs.update({"format": SHARD_FORMAT, "version": VERSION, "tool_version": __version__})
        file.attrs["fingerprint"] = fingerprint
        file["features"] = features
        file[ROWS] = crc_of_rows(features)
        seal(file, _FEATURES)


def check_shard(path: Path, advice: str) -> None:
    """Read the shard of a slide.

    Raises:
        WsiFlError: when it is damaged; says what to do.
    """
    try:
        _read_whole(path)
    except (*DAMAGE, MemoryError) as error:
        raise WsiFlError(f"{path}: damaged ({first_line(error)}); {advice}") from None


def why_stale(path: Path, fingerprint: str) -> str | None:
    """Return why the shard of a slide must be made; None where it is whole and has this fingerprint.

    Returns:
        "" where there is no shard.
    """
    if not path.exists():
        return ""
    try:
        known = _read_whole(path)
    except (*DAMAGE, MemoryError, WsiFlError) as error:
        return f"its shard was damaged ({first_line(error)})"
    return None if known == fingerprint else "patches or encoder changed"


def write_patch_features(path: Path, meta: FeaturesMeta, table: PatchTable, shards: Sequence[Path]) -> None:
    """Writes `features.h5` from the shards of all slides, in the table's order; holds one slide's at a time."""
    n = len(table)
    with opened(shards[0]) as first:
        d = int(first["features"].shape[1])
    with atomic(path) as temporary, created(temporary, n * d * 4 + table_bytes(table)) as file:
        file.attrs.update(spec_attrs(meta.store.spec) | {"format": FORMAT, "version": VERSION})
        file.attrs.update({"tool_version": __version__, "site": meta.store.site, "encoder": meta.encoder})
        file.attrs.update({"classes": json.dumps(meta.store.classes)} | origin_attrs(meta.store))
        write_table(file, table)
        seal(file)
        whole = file.create_dataset("features", (n, d), np.float32)
        sums = file.create_dataset(ROWS, (n,), np.uint32)
        row = 0
        for features in _read_shards(shards):
            whole[row : row + len(features)] = features
            sums[row : row + len(features)] = crc_of_rows(features)
            row += len(features)
        if row != n:
            raise WsiFlError(f"{path}: {row} features of {n} patches; run `wsi-fl features` again")


def _read_whole(path: Path) -> str:
    """A shard's fingerprint, after all of it was read."""
    with opened(path) as file:
        check_format(file, SHARD_FORMAT, path)
        check_seal(file, _FEATURES)
        _read_shard(file)
        return str(file.attrs["fingerprint"])


def _read_shards(shards: Sequence[Path]) -> Iterator[Features]:
    for path in shards:
        try:
            with opened(path) as file:
                yield _read_shard(file)
        except DAMAGE as error:
            site = path.absolute().parents[1].name
            raise WsiFlError(
                f"{path}: damaged ({first_line(error)}); run `wsi-fl features --site {site}` again"
            ) from None


def _read_shard(file: h5py.File) -> Features:
    """The features of a slide; raises what tells damage."""
    values: Features = file["features"][:]
    rows = np.arange(len(values))
    check_rows(sums_of(file, len(values)), rows, values, lambda row: f"row {row} of features")
    return values


class PatchFeatures(StoreFile):
    """The features of a site's patches, read-only.

    Attributes:
        meta: site, classes and grid of the patches.
        encoder: see `FeaturesMeta`.
        table: the columns of all n patches, as in the patch store.
        n_features: d.
    """

    format = FORMAT
    command = "features"
    rows = _FEATURES

    @property
    def mend(self) -> str:
        return f"run `wsi-fl features --site {self.site}` again"

    def _load(self, file: h5py.File) -> None:
        attrs = file.attrs
        self.meta = read_meta(file)
        self.table = read_table(file, len(self.meta.classes))
        self.encoder = str(attrs["encoder"])
        n, self.n_features = file["features"].shape
        if n != len(self.table):
            raise ValueError("not a vector for every patch")
        self._sums = sums_of(file, n)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: NDArray[np.int64]) -> Features:
        """float32[b, d] of the rows, in the order asked for; WsiFlError names the first that is damaged."""
        try:
            return _rows(self._file["features"], self._sums, rows, self._named)
        except DAMAGE as error:
            raise WsiFlError(f"{self.path}: damaged ({first_line(error)}); {self.mend}") from None

    def _named(self, row: int) -> str:
        return f"the features of patch {row}, of slide {self.table.slide[row]},"


def _rows(data: Any, sums: Sums, rows: NDArray[np.int64], name: Callable[[int], str]) -> Features:
    if not len(rows):
        return np.empty((0, data.shape[1]), np.float32)
    wanted, place = np.unique(rows, return_inverse=True)
    if wanted[-1] - wanted[0] + 1 == len(wanted):  # HDF5 takes its time over scattered rows
        found: Features = data[int(wanted[0]) : int(wanted[-1]) + 1]
    else:
        found = data[wanted]
    check_rows(sums, wanted, found, name)
    return found[place]
