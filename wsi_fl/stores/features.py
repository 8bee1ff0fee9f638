"""Feature stores: a bag of feature vectors per slide, all of a site in one HDF5 file. See FORMAT.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl import __version__
from wsi_fl.stores.checksums import CHANGED, DAMAGE, ROWS, crc_of, seal, sums_of
from wsi_fl.stores.fields import (
    VERSION,
    encoded_text,
    first_line,
    json_attribute,
    read_spec,
    require_sound,
    spec_attrs,
)
from wsi_fl.stores.file import StoreFile
from wsi_fl.stores.hdf5 import created
from wsi_fl.system.files import atomic
from wsi_fl.types import BagTable, GridSpec, WsiFlError

FEATURE_FORMAT = "wsi-fl feature store"
UNPLACED = -1
"""In the place of both coordinates of a patch where nobody knows them."""
BAG = ("features", "xy_l0")
"""The datasets whose rows each bag has a checksum of."""
_TEXTS = ("slide", "patient", "split", "tumor_type")


@dataclass(frozen=True)
class FeatureMeta:
    """What holds for a whole feature store.

    Attributes:
        classes: what `label` holds positions in.
        tumor_types: tumour type → the classes it may have; empty where nothing is known beforehand.
        encoder: name and digest of the weights of what made the features.
        spec: of the patches under the features.
        recipe: the settings by which patches were chosen, by name; empty where the store does not say.
    """

    site: str
    classes: tuple[str, ...]
    tumor_types: Mapping[str, tuple[str, ...]]
    encoder: str
    spec: GridSpec
    recipe: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bag:
    """The m patches of one slide.

    Attributes:
        features: float32[m, d].
        xy_l0: int64[m, 2] top-left corners in level-0 pixels; all −1 where nobody knows them.
        cluster: int64[m] colour group of each patch in a mosaic; None where there are no groups.
        weight: float32[m] share of the slide's tissue that each patch stands for; None where each stands for itself.
    """

    features: NDArray[np.float32]
    xy_l0: NDArray[np.int64]
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None

    @property
    def crc32(self) -> int:
        """The checksum of the features and the places of the patches, as they are stored."""
        return crc_of(self.features.astype(np.float32, copy=False), self.xy_l0.astype(np.int64, copy=False))

    @property
    def placed(self) -> bool:
        """Whether it is known where on the slide the patches lie."""
        return bool((self.xy_l0 != UNPLACED).any())


def write_features(
    path: Path,
    meta: FeatureMeta,
    table: BagTable,
    bags: Iterable[Bag],
    mpp_l0: NDArray[np.float64] | None = None,
    *,
    sizes: Sequence[int] | None = None,
) -> None:
    """Writes a feature store atomically, and holds one bag at a time.

    Args:
        bags: in the table's order; groups and weights are written where all bags have them.
        mpp_l0: [s] µm per level-0 pixel of each slide, where it is known.
        sizes: [s] patches of each bag; needed where `bags` is no sequence.

    Raises:
        WsiFlError: when the bags are not as many, as long or as wide as they should be.
    """
    if sizes is None:
        bags = list(bags)
        sizes = [len(bag.features) for bag in bags]
    waiting = iter(bags)
    first = next(waiting, None)
    if len(sizes) != len(table) or first is None:
        raise WsiFlError(f"{path}: got {len(sizes)} bags, expected {len(table)}, at least one")
    start = np.cumsum([0, *sizes], dtype=np.int64)
    n, d = int(start[-1]), first.features.shape[1]
    with atomic(path) as temporary, created(temporary, n * (d * 4 + 64) + len(table) * 1024) as file:
        file.attrs.update(_root_attrs(meta))
        file[ROWS] = _write_bags(file, chain((first,), waiting), start, d)
        file["start"] = start
        file["label"] = table.label
        for name in _TEXTS:
            file[name] = encoded_text(getattr(table, name))
        if mpp_l0 is not None:
            file["mpp_l0"] = mpp_l0.astype(np.float64, copy=False)
        seal(file, BAG)


def _root_attrs(meta: FeatureMeta) -> dict[str, Any]:
    said = {
        "format": FEATURE_FORMAT,
        "version": VERSION,
        "tool_version": __version__,
        "site": meta.site,
        "classes": json.dumps(meta.classes),
        "tumor_types": json.dumps(dict(meta.tumor_types)),
        "encoder": meta.encoder,
    }
    recipe = {"recipe": json.dumps(dict(meta.recipe))} if meta.recipe else {}
    return spec_attrs(meta.spec) | said | recipe


def _write_bags(file: h5py.File, bags: Iterable[Bag], start: NDArray[np.int64], d: int) -> NDArray[np.uint32]:
    """The columns of the patches, one bag after another; one that some bag lacks is left out.

    Returns:
        The checksum of each bag.
    """
    n = int(start[-1])
    written = {
        "features": file.create_dataset("features", (n, d), np.float32),
        "xy_l0": file.create_dataset("xy_l0", (n, 2), np.int64),
        "cluster": file.create_dataset("cluster", (n,), np.int64),
        "weight": file.create_dataset("weight", (n,), np.float32),
    }
    sums: list[int] = []
    for bag, first, last in zip(bags, start, start[1:], strict=False):
        if bag.features.shape != (last - first, d):
            raise WsiFlError(
                f"{file.filename}: bag {len(sums)} is {bag.features.shape}, expected {(int(last - first), d)}"
            )
        for name in [name for name in written if getattr(bag, name) is None]:
            del written[name], file[name]
        for name, column in written.items():
            column[first:last] = getattr(bag, name)
        sums.append(bag.crc32)
    if len(sums) < len(start) - 1:
        raise WsiFlError(f"{file.filename}: got {len(sums)} bags, expected {len(start) - 1}")
    return np.array(sums, np.uint32)


class FeatureStore(StoreFile):
    """A feature store, read-only.

    Attributes:
        meta, table: of its bags.
        n_features: d.
        mpp_l0: float64[s] µm per level-0 pixel of each slide; None where the store does not say.
    """

    format = FEATURE_FORMAT
    command = "mosaic"
    rows = BAG

    @property
    def mend(self) -> str:
        imported = getattr(self, "meta", None) is not None and not self.meta.recipe and not self._grouped
        return f"run `wsi-fl import --site {self.site}` again, as before" if imported else super().mend

    def _load(self, file: h5py.File) -> None:
        attrs, self._grouped = file.attrs, "cluster" in file
        spec = read_spec(attrs)
        known = json_attribute(attrs, "tumor_types", dict)
        types = {name: tuple(classes) for name, classes in known.items()}
        classes = tuple(json_attribute(attrs, "classes", list))
        recipe = json_attribute(attrs, "recipe", dict) if "recipe" in attrs else {}
        self.meta = FeatureMeta(str(attrs["site"]), classes, types, str(attrs["encoder"]), spec, recipe)
        text = {name: np.asarray(file[name].asstr()[:], np.str_) for name in _TEXTS}
        self.table = BagTable(file["label"][:], **text)
        require_sound(self.table.label, self.table.patient, self.table.split, len(classes))
        self._start: NDArray[np.int64] = file["start"][:]
        self._sums = sums_of(file, len(self.table))
        n, self.n_features = file["features"].shape
        whole = len(self._start) == len(self.table) + 1 and self._start[0] == 0 and self._start[-1] == n
        if not whole or (np.diff(self._start) < 1).any() or file["xy_l0"].shape != (n, 2):
            raise ValueError("start does not divide the features into bags")
        if any(name in file and file[name].shape != (n,) for name in ("cluster", "weight")):
            raise ValueError("not one group and weight for every patch")
        self.mpp_l0: NDArray[np.float64] | None = file["mpp_l0"][:] if "mpp_l0" in file else None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[s] patches of each slide."""
        return np.diff(self._start)

    def bag(self, k: int) -> Bag:
        """The features of the k-th slide.

        Raises:
            WsiFlError: when they are damaged.
        """
        rows = slice(int(self._start[k]), int(self._start[k + 1]))
        file = self._file
        try:
            cluster, weight = (file[name][rows] if name in file else None for name in ("cluster", "weight"))
            bag = Bag(file["features"][rows], file["xy_l0"][rows], cluster, weight)
            if bag.crc32 != self._sums.values[k]:
                raise ValueError(CHANGED)
        except DAMAGE as error:
            raise WsiFlError(
                f"{self.path}: the features of slide {self.table.slide[k]} are damaged ({first_line(error)}); "
                f"{self.mend}"
            ) from None
        return bag
