"""Features of every patch of a patch store, and of training patches in other sites' stains. See FORMAT.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.stores.columns import created, table_bytes, write_table
from wsi_fl.stores.fields import StoreMeta, origin_attrs, read_meta, read_table, spec_attrs
from wsi_fl.stores.file import StoreFile
from wsi_fl.system.files import atomic
from wsi_fl.types import PatchTable, WsiFlError, encoder_head

FORMAT, SHARD_FORMAT = "wsi-fl patch features", "wsi-fl patch feature shard"
FEATURES_VERSION = 1

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
        for site, values in variants.items():
            file[f"variants/{site}"] = values


def write_patch_features(path: Path, meta: FeaturesMeta, table: PatchTable, shards: Sequence[Path]) -> None:
    """Writes `features.h5` from the shards of all slides, in the table's order; holds one slide's at a time."""
    others = sorted(set(meta.stains) - {meta.store.site})
    n, n_train = len(table), int((table.split == "train").sum())
    with h5py.File(shards[0], "r") as first:
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
        whole = file.create_dataset("features", (n, d), np.float32)
        variants = {one: file.create_dataset(f"variants/{one}", (n_train, d), np.float32) for one in others}
        row = train_row = 0
        for features, of_site in _read_shards(shards):
            whole[row : row + len(features)] = features
            row += len(features)
            for one, values in of_site.items():
                variants[one][train_row : train_row + len(values)] = values
            train_row += len(features) if of_site else 0
    if row != n or (others and train_row != n_train):
        path.unlink()
        raise WsiFlError(f"{path}: {row} features of {n} patches; run `wsi-fl features` again")


def _read_shards(shards: Sequence[Path]) -> Iterator[tuple[Features, dict[str, Features]]]:
    for path in shards:
        with h5py.File(path, "r") as file:
            group = file.get("variants", {})
            yield file["features"][:], {str(site): group[site][:] for site in group}


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

    def _load(self, file: h5py.File) -> None:
        attrs = file.attrs
        self.meta, self.table = read_meta(file), read_table(file)
        self.encoder = str(attrs["encoder"])
        self.encoder_head = encoder_head(self.encoder)
        self.stains = {str(site): str(digest) for site, digest in json.loads(attrs["stains"]).items()}
        n, self.n_features = file["features"].shape
        n_train = int((self.table.split == "train").sum())
        if n != len(self.table):
            raise ValueError("not a vector for every patch")
        if any(self._variant(one).shape != (n_train, self.n_features) for one in self.others):
            raise ValueError("not a variant of every training patch")

    @property
    def others(self) -> list[str]:
        """The sites in whose stains there are variants."""
        return sorted(set(self.stains) - {self.meta.site})

    def _variant(self, site: str) -> Any:
        return self._file["variants"][site]

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: NDArray[np.int64]) -> Features:
        """float32[b, d] of the rows, in the order asked for."""
        return _rows(self._file["features"], rows)

    def variant(self, site: str, rows: NDArray[np.int64]) -> Features:
        """float32[b, d] of training rows in another site's stain; rows count from 0 among training rows alone."""
        return _rows(self._variant(site), rows)


def _rows(data: Any, rows: NDArray[np.int64]) -> Features:
    if not len(rows):
        return np.empty((0, data.shape[1]), np.float32)
    wanted, place = np.unique(rows, return_inverse=True)
    if wanted[-1] - wanted[0] + 1 == len(wanted):  # HDF5 takes its time over scattered rows
        found: Features = data[int(wanted[0]) : int(wanted[-1]) + 1][place]
        return found
    picked: Features = data[wanted][place]
    return picked
