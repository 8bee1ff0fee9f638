"""Bag stores: the features of some or all patches of every slide of a site. See FORMAT.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.fields import (
    DAMAGE,
    ROWS,
    NameColumn,
    checksum_rows,
    encode_names,
    encode_texts,
    find_runs,
    first_line,
    json_attribute,
    read_checksums,
    read_name_column,
    read_spec,
    read_texts,
    require_sound,
    root_attrs,
    write_seal,
)
from wsi_fl.stores.hdf5 import StoreFile, create_hdf5
from wsi_fl.system.files import atomic_path, refuse_unavailable
from wsi_fl.types import BagTable, GridSpec, PatchTable, WsiFlError

_FORMAT = "wsi-fl bag store"
UNKNOWN_PLACE = -1
"""Both coordinates of a patch at an unknown place."""
CHECKED_ROWS = ("features",)
"""The dataset with row checksums."""
_TEXTS = ("slide", "patient", "split", "tumor_type")
_MAKE_COMMANDS = "`wsi-fl import` where its features were imported, else `wsi-fl mosaic`"
_MIN_MARK_ROWS = 4
"""Fewest rows of a bag whose checksums are a sufficient digest."""
_PATCH_DATASETS = {
    "label": "patch_label",
    "patient": "patch_patient",
    "split": "patch_split",
    "tumor_fraction": "tumor_fraction",
}
"""Column of a table of patches → its dataset, where values differ from their slide's."""

Features = NDArray[np.float32]


@dataclass(frozen=True)
class BagMeta:
    """The metadata of a bag store.

    Attributes:
        classes: names of the label values.
        encoder: name of the encoder and digest of its weights.
        spec: of the encoded patches.
        made_by: the command, "mosaic", "features" or "import".
        tumor_types: tumour type → its possible classes; empty if unknown.
        recipe: settings of the selection of patches, by name; empty if unknown.
        generator: of synthetic patches, see `StoreMeta`; None for patches of slides and images.
        golden: vectors of the golden patches (`wsi_fl.models.golden`); empty if unknown.
    """

    site: str
    classes: tuple[str, ...]
    encoder: str
    spec: GridSpec
    made_by: str = "mosaic"
    tumor_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    generator: str | None = None
    golden: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Bag:
    """The features of m patches of one slide.

    Attributes:
        features: float32[m, d].
        xy_l0: int64[m, 2] top-left corners in level-0 pixels; all −1 if unknown.
        cluster: int64[m] colour group of each patch in a mosaic; None without groups.
        weight: float32[m] share of the slide's tissue represented by each patch; None for single patches.
    """

    features: Features
    xy_l0: NDArray[np.int64]
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None

    @property
    def has_places(self) -> bool:
        """Return whether the places of the patches on the slide are known."""
        return bool((self.xy_l0 != UNKNOWN_PLACE).any())


def hash_rows(features: Features) -> list[bytes]:
    """Return a hash of 8 bytes of each row of features [m, d], the same in float16 and in higher precision."""
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(features, np.float16)
    return [hashlib.blake2b(row, digest_size=8).digest() for row in rows]


def hash_features(features: Features) -> str:
    """Return a digest of the features [m, d] of a slide, independent of their order and precision."""
    return f"features {hashlib.sha256(b''.join(sorted(hash_rows(features)))).hexdigest()}"


def _mark_rows(sums: NDArray[np.uint32], few_rows: Features | None) -> str:
    """Return a digest of checksums of rows, and of the rows themselves where they are few."""
    features_mark = "" if few_rows is None else hash_features(few_rows)
    return f"rows {hashlib.sha256(np.sort(sums).tobytes()).hexdigest()} {features_mark}"


def group_bags(patches: PatchTable) -> tuple[BagTable, NDArray[np.int64]]:
    """Return (the slides of a table of patches as bags, number of patches of each).

    A slide has the highest class of its patches, so that any tumour counts. Its patient is "" where its patches have
    several.

    Args:
        patches: one or more.

    Raises:
        ValueError: when the patches of a slide are not consecutive.
    """
    first = find_runs(patches.slide)
    slides, sizes = patches.slide[first], np.diff([*first, len(patches)])
    if len(set(slides.tolist())) < len(slides):
        raise ValueError("the patches of a slide do not lie together")
    has_one_patient = [len(set(part.tolist())) == 1 for part in np.split(patches.patient, first[1:])]
    patient = np.where(has_one_patient, patches.patient[first], "")
    label = np.maximum.reduceat(patches.label, first)
    return BagTable(label, np.full(len(first), ""), slides, patient, patches.split[first]), sizes


def write_bags(
    path: Path,
    meta: BagMeta,
    table: BagTable,
    bags: Iterable[Bag],
    mpp_l0: NDArray[np.float64] | None = None,
    *,
    sizes: Sequence[int] | NDArray[np.int64] | None = None,
    patches: PatchTable | None = None,
) -> None:
    """Write a bag store atomically, holding one bag at a time.

    Args:
        bags: in the table's order; groups and weights are written if all bags have them.
        mpp_l0: [s] µm per level-0 pixel of each slide, if known.
        sizes: [s] patches of each bag; required if `bags` is no sequence.
        patches: labels, patients and splits of all patches, if they differ from their slide's.

    Raises:
        WsiFlError: when the number, length or width of bags is wrong.
    """
    if sizes is None:
        bags = list(bags)
        sizes = [len(bag.features) for bag in bags]
    bag_iterator = iter(bags)
    first = next(bag_iterator, None)
    if len(sizes) != len(table) or first is None:
        raise WsiFlError(f"{path}: got {len(sizes)} bags, expected {len(table)}, at least one")
    start = np.cumsum([0, *sizes], dtype=np.int64)
    attrs = {
        "site": meta.site,
        "made_by": meta.made_by,
        "classes": json.dumps(meta.classes),
        "tumor_types": json.dumps(dict(meta.tumor_types)),
        "encoder": meta.encoder,
        "recipe": json.dumps(dict(meta.recipe)),
    } | ({} if meta.generator is None else {"generator": meta.generator})
    if meta.golden:
        attrs["golden"] = json.dumps(meta.golden)
    n, d = int(start[-1]), first.features.shape[1]
    with atomic_path(path) as temporary, create_hdf5(temporary, n * (d * 4 + 96) + len(table) * 1024) as file:
        file.attrs.update(root_attrs(_FORMAT, meta.spec) | attrs)
        _write_patches(file, chain((first,), bag_iterator), start, d)
        file["start"] = start
        file["label"] = table.label
        for name in _TEXTS:
            file[name] = encode_texts(getattr(table, name))
        if mpp_l0 is not None:
            file["mpp_l0"] = mpp_l0.astype(np.float64, copy=False)
        for name, dataset in _PATCH_DATASETS.items() if patches is not None else ():
            values = getattr(patches, name)
            file[dataset] = encode_texts(values) if values.dtype.kind == "U" else values
        write_seal(file, CHECKED_ROWS)


def _write_patches(file: h5py.File, bags: Iterable[Bag], start: NDArray[np.int64], d: int) -> None:
    # bag by bag; a column missing in some bag is dropped
    n = int(start[-1])
    sums = file.create_dataset(ROWS, (n,), np.uint32)
    columns = {
        "features": file.create_dataset("features", (n, d), np.float32),
        "xy_l0": file.create_dataset("xy_l0", (n, 2), np.int64),
        "cluster": file.create_dataset("cluster", (n,), np.int64),
        "weight": file.create_dataset("weight", (n,), np.float32),
    }
    n_written = 0
    for bag, first, last in zip(bags, start, start[1:], strict=False):
        if bag.features.shape != (last - first, d):
            raise WsiFlError(
                f"{file.filename}: bag {n_written} is {bag.features.shape}, expected {(int(last - first), d)}"
            )
        for name in [name for name in columns if getattr(bag, name) is None]:
            del columns[name], file[name]
        for name, column in columns.items():
            column[first:last] = getattr(bag, name)
        sums[first:last] = checksum_rows(np.ascontiguousarray(bag.features, np.float32))
        n_written += 1
    if n_written < len(start) - 1:
        raise WsiFlError(f"{file.filename}: got {n_written} bags, expected {len(start) - 1}")


class BagStore(StoreFile):
    """A bag store, read-only.

    Attributes:
        meta: of its bags.
        table: the columns of its s bags.
        n_features: d.
        mpp_l0: float64[s] µm per level-0 pixel of each slide; None if unknown.
    """

    format = _FORMAT
    rows = CHECKED_ROWS

    def __init__(self, path: Path) -> None:
        self.command = "features" if path.name == "features.h5" else ""
        # shards of mosaics, made by no other command
        if not self.command and (path.parent / "mosaics").is_dir():
            self.command = "mosaic"
        super().__init__(path)

    @property
    def make_advice(self) -> str:
        """Return a hint at the command for a missing store; existing features are imported."""
        return super().make_advice if self.command else f"make it with {_MAKE_COMMANDS}"

    @property
    def repair_advice(self) -> str:
        """Return the remedy for damage; an import needs the same options again."""
        if not self.command:  # made by an unknown command
            return f"put its backup back, or make it anew with {_MAKE_COMMANDS}"
        return f"{super().repair_advice}, as before" if self.command == "import" else super().repair_advice

    def _load(self, file: h5py.File) -> None:
        attrs = file.attrs
        self.command = str(attrs["made_by"])
        tumor_types = json_attribute(attrs, "tumor_types", dict)
        self.meta = BagMeta(
            str(attrs["site"]),
            tuple(json_attribute(attrs, "classes", list)),
            str(attrs["encoder"]),
            read_spec(attrs),
            self.command,
            {name: tuple(classes) for name, classes in tumor_types.items()},
            json_attribute(attrs, "recipe", dict),
            str(attrs["generator"]) if "generator" in attrs else None,
            tuple(json_attribute(attrs, "golden", list)) if "golden" in attrs else (),
        )
        self.table = BagTable(
            file["label"][:], **{name: read_texts(file, name) for name in ("tumor_type", *_TEXTS[:3])}
        )
        self._start: NDArray[np.int64] = file["start"][:]
        n, self.n_features = file["features"].shape
        self._sums = read_checksums(file, n)
        is_whole = len(self._start) == len(self.table) + 1 and self._start[0] == 0 and self._start[-1] == n
        if not is_whole or (np.diff(self._start) < 1).any() or file["xy_l0"].shape != (n, 2):
            raise ValueError("start does not divide the features into bags")
        if any(name in file and file[name].shape != (n,) for name in ("cluster", "weight", *_PATCH_DATASETS.values())):
            raise ValueError("not one value for every patch")
        self.has_patch_labels = "patch_label" in file
        table, n_classes = self.table, len(self.meta.classes)
        patient = encode_names(table.slide if self.has_patch_labels else table.patient)
        require_sound(table.label, patient, encode_names(table.split), n_classes)
        if self.has_patch_labels:
            require_sound(self.patch_label, self.patch_names["patient"], self.patch_names["split"], n_classes)
        self.mpp_l0: NDArray[np.float64] | None = file["mpp_l0"][:] if "mpp_l0" in file else None

    def __len__(self) -> int:
        return len(self.table)

    @property
    def bag_sizes(self) -> NDArray[np.int64]:
        """Return the number of patches of each slide, int64[s]."""
        return np.diff(self._start)

    def _read_patch_names(self, name: str) -> NameColumn:
        """Return the names of all n patches: their own, or those of their slides."""
        if name in _PATCH_DATASETS and self.has_patch_labels:
            return read_name_column(self._file, _PATCH_DATASETS[name])
        return encode_names(getattr(self.table, name)).repeat_rows(self.bag_sizes)

    @cached_property
    def patch_names(self) -> dict[str, NameColumn]:
        """Return slide, patient, split and tumour type of all n patches."""
        return {name: self._read_patch_names(name) for name in _TEXTS}

    @cached_property
    def patch_label(self) -> NDArray[np.int64]:
        """Return the labels int64[n] of all patches: their own, or those of their slides."""
        labels: NDArray[np.int64] = self._file["patch_label"][:] if self.has_patch_labels else self.table.label
        return labels if self.has_patch_labels else np.repeat(labels, self.bag_sizes)

    @property
    def xy_l0(self) -> NDArray[np.int64]:
        """Return the corners (x, y) int64[n, 2] of all patches."""
        corners: NDArray[np.int64] = self._file["xy_l0"][:]
        return corners

    @cached_property
    def patch_table(self) -> PatchTable:
        """Return the columns of all n patches, with labels, patients and splits of slides where patches have none."""
        n, names = len(self.patch_label), {name: self.patch_names[name].expand_names() for name in _TEXTS[:3]}
        tumor = self._file["tumor_fraction"][:] if self.has_patch_labels else np.full(n, np.nan, np.float32)
        return PatchTable(self.xy_l0, self.patch_label, tumor, **names)

    def compute_marks(self) -> dict[str, frozenset[str]]:
        """Return slide → digest of its features, independent of their order.

        It is computed from row checksums; only bags of very few rows are read.
        """
        marks_by_slide: dict[str, frozenset[str]] = {}
        for k, slide in enumerate(self.table.slide.tolist()):
            sums = self._sums.values[self.bag_rows(k)]
            with suppress(WsiFlError):
                few_rows = self.read_bag(k).features if len(sums) < _MIN_MARK_ROWS else None
                marks_by_slide[slide] = frozenset({_mark_rows(sums, few_rows)})
        return marks_by_slide

    def bag_rows(self, k: int) -> slice:
        """Return the rows of the k-th bag."""
        return slice(int(self._start[k]), int(self._start[k + 1]))

    def read_bag(self, k: int) -> Bag:
        """Return the features of the k-th slide.

        Raises:
            WsiFlError: when they are damaged.
        """
        rows = self.bag_rows(k)
        columns = (self._file[name][rows] if name in self._file else None for name in ("cluster", "weight"))
        return Bag(self.read(np.arange(rows.start, rows.stop)), self._file["xy_l0"][rows], *columns)

    def read(self, rows: NDArray[np.int64]) -> Features:
        """Return the features float32[b, d] of these patches, in their order.

        Raises:
            WsiFlError: with the first damaged patch.
        """
        if not len(rows):
            return np.empty((0, self.n_features), np.float32)
        unique_rows, place = np.unique(rows, return_inverse=True)
        is_scattered = unique_rows[-1] - unique_rows[0] + 1 > len(unique_rows)  # slow in HDF5
        try:
            features: Features = self._file["features"][
                unique_rows if is_scattered else slice(int(unique_rows[0]), int(unique_rows[-1]) + 1)
            ]
            self._sums.check_rows(unique_rows, features, self._name_patch)
        except DAMAGE as error:
            refuse_unavailable(error, self.path)
            raise WsiFlError(f"{self.path}: damaged ({first_line(error)}); {self.repair_advice}") from None
        return features if len(features) == len(rows) and (np.diff(rows) > 0).all() else features[place]

    def _name_patch(self, row: int) -> str:
        bag = int(np.searchsorted(self._start, row, side="right")) - 1
        return f"the features of patch {row}, of slide {self.table.slide[bag]},"
