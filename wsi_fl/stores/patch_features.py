"""Features of every patch of a patch store, and of training patches in other sites' stains. See FORMAT.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.stores.checksums import (
    DAMAGE,
    HEAD,
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
    StoreMeta,
    check_format,
    first_line,
    json_attribute,
    origin_attrs,
    read_meta,
    read_table,
    spec_attrs,
)
from wsi_fl.stores.file import StoreFile
from wsi_fl.stores.hdf5 import created, opened
from wsi_fl.system.files import atomic
from wsi_fl.types import PatchTable, WsiFlError, encoder_head

FORMAT, SHARD_FORMAT = "wsi-fl patch features", "wsi-fl patch feature shard"
FEATURES_VERSION = 1
_FEATURES = ("features",)
"""The dataset whose rows have checksums."""
_VARIANTS = f"variants_{ROWS}"

Features = NDArray[np.float32]


@dataclass(frozen=True)
class FeaturesMeta:
    """What holds for all features of a site.

    Attributes:
        store: of the patches: site, classes, grid.
        encoder: name and digest of the weights.
        stains: site → digest of the released stain, its own and those of the variants; empty without variants.
    """

    store: StoreMeta
    encoder: str
    stains: Mapping[str, str]


def write_shard(path: Path, fingerprint: str, features: Features, variants: Mapping[str, Features]) -> None:
    """Writes the features float32[n, d] of one slide atomically.

    Args:
        fingerprint: SHA-256 over all that decides the content.
        variants: other site → the same patches in its stain; empty for slides that are not for training.
    """
    n_bytes = (len(variants) + 1) * features.nbytes
    with atomic(path) as temporary, created(temporary, n_bytes) as file:
        file.attrs.update({"format": SHARD_FORMAT, "version": FEATURES_VERSION, "tool_version": __version__})
        file.attrs["fingerprint"] = fingerprint
        file["features"] = features
        file[ROWS] = crc_of_rows(features)
        _variant_groups(file, variants)
        for site, values in variants.items():
            file[f"variants/{site}"] = values
            file[f"{_VARIANTS}/{site}"] = crc_of_rows(values)
        seal(file, _FEATURES)


def check_shard(path: Path, advice: str) -> bool:
    """Read the shard of a slide; return whether it has checksums.

    Raises:
        WsiFlError: when it is damaged; says what to do.
    """
    try:
        return _read_whole(path)[1]
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
        known = _read_whole(path)[0]
    except (*DAMAGE, MemoryError, WsiFlError) as error:
        return f"its shard was damaged ({first_line(error)})"
    return None if known == fingerprint else "patches, encoder or stains changed"


def write_patch_features(path: Path, meta: FeaturesMeta, table: PatchTable, shards: Sequence[Path]) -> None:
    """Writes `features.h5` from the shards of all slides, in the table's order; holds one slide's at a time."""
    others = sorted(set(meta.stains) - {meta.store.site})
    n, n_train = len(table), int((table.split == "train").sum())
    with opened(shards[0]) as first:
        d = int(first["features"].shape[1])
    n_bytes = (n + n_train * len(others)) * d * 4 + table_bytes(table)
    with atomic(path) as temporary, created(temporary, n_bytes) as file:
        file.attrs.update(spec_attrs(meta.store.spec) | {"format": FORMAT, "version": FEATURES_VERSION})
        file.attrs.update({"tool_version": __version__, "site": meta.store.site, "encoder": meta.encoder})
        file.attrs.update(
            {
                "classes": json.dumps(meta.store.classes),
                "stains": json.dumps(dict(meta.stains), sort_keys=True),
            }
        )
        file.attrs.update(origin_attrs(meta.store))
        write_table(file, table)
        seal(file)
        whole = _column(file, "features", ROWS, n, d)
        _variant_groups(file, others)
        variants = {one: _column(file, f"variants/{one}", f"{_VARIANTS}/{one}", n_train, d) for one in others}
        row = train_row = 0
        for features, of_site in _read_shards(shards):
            whole.put(row, features)
            row += len(features)
            for one, values in of_site.items():
                variants[one].put(train_row, values)
            train_row += len(features) if of_site else 0
        if row != n or (others and train_row != n_train):
            raise WsiFlError(f"{path}: {row} features of {n} patches; run `wsi-fl features` again")


def _read_whole(path: Path) -> tuple[str, bool]:
    """A shard's fingerprint, and whether it has checksums, after all of it was read."""
    with opened(path) as file:
        check_format(file, SHARD_FORMAT, path, FEATURES_VERSION)
        check_seal(file, _FEATURES)
        _read_shard(file)
        return str(file.attrs["fingerprint"]), HEAD in file.attrs


@dataclass(frozen=True)
class _Column:
    """Features that are being written, and their checksums."""

    features: Any
    sums: Any

    def put(self, first: int, values: Features) -> None:
        self.features[first : first + len(values)] = values
        self.sums[first : first + len(values)] = crc_of_rows(values)


def _column(file: h5py.File, name: str, sums: str, n: int, d: int) -> _Column:
    return _Column(file.create_dataset(name, (n, d), np.float32), file.create_dataset(sums, (n,), np.uint32))


def _variant_groups(file: h5py.File, others: Collection[str]) -> None:
    """Make the groups of the variants by name: those that HDF5 makes by itself hold the time, and differ each time."""
    for name in ("variants", _VARIANTS) if others else ():
        file.create_group(name)


def _read_shards(shards: Sequence[Path]) -> Iterator[tuple[Features, dict[str, Features]]]:
    for path in shards:
        try:
            with opened(path) as file:
                yield _read_shard(file)
        except DAMAGE as error:
            site = path.absolute().parents[1].name
            raise WsiFlError(
                f"{path}: damaged ({first_line(error)}); run `wsi-fl features --site {site}` again"
            ) from None


def _read_shard(file: h5py.File) -> tuple[Features, dict[str, Features]]:
    """The features of a slide and its variants; raises what tells damage."""
    variants = {
        str(site): _whole(file, f"variants/{site}", f"{_VARIANTS}/{site}")
        for site in file.get("variants", ())
    }
    return _whole(file, "features", ROWS), variants


def _whole(file: h5py.File, name: str, sums: str) -> Features:
    values: Features = file[name][:]
    rows = np.arange(len(values))
    check_rows(sums_of(file, len(values), sums), rows, values, lambda row: f"row {row} of {name}")
    return values


class PatchFeatures(StoreFile):
    """The features of a site's patches, read-only.

    Attributes:
        meta: site, classes and grid of the patches.
        encoder, stains: see `FeaturesMeta`.
        encoder_head: what of the encoder stores of all times tell.
        table: the columns of all n patches, as in the patch store.
        n_features: d.
    """

    format = FORMAT, FEATURES_VERSION
    command = "features"
    rows = _FEATURES

    @property
    def mend(self) -> str:
        variants = " --set stain.exchange=true" if getattr(self, "stains", None) else ""
        return f"run `wsi-fl features --site {self.site}{variants}` again"

    def _load(self, file: h5py.File) -> None:
        attrs = file.attrs
        self.meta = read_meta(file)
        self.table = read_table(file, len(self.meta.classes))
        self.encoder = str(attrs["encoder"])
        self.encoder_head = encoder_head(self.encoder)
        self.stains = {
            str(site): str(digest) for site, digest in json_attribute(attrs, "stains", dict).items()
        }
        n, self.n_features = file["features"].shape
        n_train = int((self.table.split == "train").sum())
        if n != len(self.table):
            raise ValueError("not a vector for every patch")
        if any(self._variant(one).shape != (n_train, self.n_features) for one in self.others):
            raise ValueError("not a variant of every training patch")
        self._train = np.flatnonzero(self.table.split == "train")
        self._sums = sums_of(file, n)
        self._variant_sums = {one: sums_of(file, n_train, f"{_VARIANTS}/{one}") for one in self.others}

    @property
    def others(self) -> list[str]:
        """The sites in whose stains there are variants."""
        return sorted(set(self.stains) - {self.meta.site})

    def _variant(self, site: str) -> Any:
        return self._file["variants"][site]

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: NDArray[np.int64]) -> Features:
        """float32[b, d] of the rows, in the order asked for; WsiFlError names the first that is damaged."""
        return self._read(self._file["features"], self._sums, rows, self._named)

    def variant(self, site: str, rows: NDArray[np.int64]) -> Features:
        """float32[b, d] of training rows in another site's stain; rows count from 0 among training rows alone."""

        def named(row: int) -> str:
            return f"{self._named(int(self._train[row]))} in the stain of {site}"

        return self._read(self._variant(site), self._variant_sums[site], rows, named)

    def _named(self, row: int) -> str:
        return f"the features of patch {row}, of slide {self.table.slide[row]},"

    def _read(
        self, data: Any, sums: Sums | None, rows: NDArray[np.int64], name: Callable[[int], str]
    ) -> Features:
        try:
            return _rows(data, sums, rows, name)
        except DAMAGE as error:
            raise WsiFlError(f"{self.path}: damaged ({first_line(error)}); {self.mend}") from None


def _rows(data: Any, sums: Sums | None, rows: NDArray[np.int64], name: Callable[[int], str]) -> Features:
    if not len(rows):
        return np.empty((0, data.shape[1]), np.float32)
    wanted, place = np.unique(rows, return_inverse=True)
    if wanted[-1] - wanted[0] + 1 == len(wanted):  # HDF5 takes its time over scattered rows
        found: Features = data[int(wanted[0]) : int(wanted[-1]) + 1]
    else:
        found = data[wanted]
    check_rows(sums, wanted, found, name)
    return found[place]
