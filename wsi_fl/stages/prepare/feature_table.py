"""A table of features with labels, from an array file, a CSV, a store, or a folder of another tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.layouts.common import rows_of
from wsi_fl.stores.bags import BagStore
from wsi_fl.stores.exchange import LAYOUTS
from wsi_fl.system.files import ordinary
from wsi_fl.types import UsageError

_NAMES = ("label", "patient")


@dataclass(frozen=True)
class FeatureTable:
    """Rows of features with labels.

    Attributes:
        x: float32[n, d].
        y: int64[n], numbers of `classes`.
        patient: str[n]; "" where it is not known.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    patient: NDArray[np.str_]
    classes: tuple[str, ...]

    def taken(self, rows: NDArray[np.int64]) -> FeatureTable:
        """Return some rows."""
        return FeatureTable(self.x[rows], self.y[rows], self.patient[rows], self.classes)


def together(parts: Sequence[FeatureTable]) -> FeatureTable:
    """Return the rows of several tables of the same classes."""
    x, y, patient = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y", "patient")
    )
    return FeatureTable(x, y, patient, parts[0].classes)


def read_table(path: Path, labels: Path | None = None) -> FeatureTable:
    """Read features with labels.

    Args:
        path: `.npz` with x [n, d], y [n] and perhaps patient [n]; `.csv` with the columns label, perhaps patient, and
            numbers; a store of features (`.h5`) of this program, with a row for each patch where patches have labels of
            their own and else for each slide, the mean; or a folder as TRIDENT writes it, whose slides count with
            their mean.
        labels: CSV with the columns slide, label and perhaps patient, for such a folder.

    Raises:
        UsageError: for anything else, fewer than two classes, or numbers that are none.
    """
    if path.is_dir():
        x, y, patient = _of_folder(path, labels)
    elif path.suffix == ".npz":
        x, y, patient = _of_arrays(path)
    elif path.suffix == ".csv":
        x, y, patient = _of_csv(path)
    elif path.suffix == ".h5":
        x, y, patient = _of_store(path)
    else:
        raise UsageError(f"{path}: features are read from .npz, .csv, .h5, or a folder of TRIDENT's")
    classes, numbers = np.unique(y, return_inverse=True)
    if x.ndim != 2 or len(x) != len(y) or len(patient) != len(y):
        raise UsageError(f"{path}: x is {list(x.shape)}, y {list(y.shape)}; wanted are [n, d] and [n]")
    if len(classes) < 2 or not np.isfinite(x).all():
        raise UsageError(f"{path}: needs two classes at least, and features that are finite numbers")
    names = tuple(str(name) for name in classes)
    return FeatureTable(x.astype(np.float32), numbers.astype(np.int64), patient.astype(np.str_), names)


_Columns = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _of_arrays(path: Path) -> _Columns:
    try:
        with np.load(ordinary(path), allow_pickle=False) as file:
            x, y = file["x"], file["y"]
            return x, y, file["patient"] if "patient" in file else np.full(len(y), "")
    except (KeyError, OSError, ValueError, BadZipFile) as error:
        raise UsageError(f"{path}: not a file of NumPy with x and y ({error})") from None


def _of_csv(path: Path) -> _Columns:
    rows = rows_of(path, ["label"])
    try:
        x = np.array([[float(row[name]) for name in row if name not in _NAMES] for row in rows])
    except ValueError as error:
        raise UsageError(f"{path}: all columns but label and patient are numbers ({error})") from None
    return x, np.array([row["label"] for row in rows]), np.array([row.get("patient", "") for row in rows])


def _of_store(path: Path) -> _Columns:
    with BagStore(path) as store:
        if store.own_labels:
            patches = store.patches
            names = np.array(store.meta.classes)[patches.label]
            return store.read(np.arange(len(patches.label))), names, np.array(patches.patient)
        columns, bags = store.table, [store.bag(k).features for k in range(len(store))]
        names = np.array(store.meta.classes)[columns.label]
        return np.stack([bag.mean(0) for bag in bags]), names, np.array(columns.patient)


def _of_folder(path: Path, labels: Path | None) -> _Columns:
    if labels is None:
        raise UsageError(f"{path}: --labels names a CSV with the columns slide, label and perhaps patient")
    layout, rows = LAYOUTS["trident"], rows_of(labels, ["slide"])
    named = next((one for one in ("label", "diagnosis") if rows and one in rows[0]), None)
    if named is None:
        raise UsageError(f"{labels}: column 'label' or 'diagnosis' is missing")
    files = layout.find(path)
    known = [row for row in rows if row["slide"] in files and row[named]]
    if not known:
        raise UsageError(f"{labels}: none of its slides has a label and features in {path}")
    x = np.stack([layout.read(files[row["slide"]]).features.mean(0) for row in known])
    return x, np.array([row[named] for row in known]), np.array([row.get("patient", "") for row in known])
