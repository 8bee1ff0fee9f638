"""Tables of features with labels and patients: `.npz` with x [n, d], y [n] and patient [n], or `.csv`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.layouts.common import read_rows
from wsi_fl.stores.images import UNREADABLE, read_npz
from wsi_fl.system.files import refuse_unavailable, require_regular_file
from wsi_fl.types import UsageError, single_line

TABLE_SUFFIXES = (".npz", ".csv")
_NON_FEATURE_COLUMNS = ("label", "patient")
"""Columns of a table without features."""
_IDENTIFIERS = ("slide", "patient", "case")
"""First words of names of arrays that name slides or patients."""

FeatureColumns = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""Features [n, d], labels [n] and patients [n]; "" where unknown."""


def read_columns(path: Path, *, needs_labels: bool = True) -> FeatureColumns:
    """Read a table: `.npz` with x, y and perhaps patient; or `.csv` with label, perhaps patient, and numbers.

    Args:
        needs_labels: whether a table without labels is refused.

    Raises:
        UsageError: for another file, or features that are no finite numbers.
    """
    read = _read_arrays if path.suffix == ".npz" else _read_csv
    x, y, patient = read(path, needs_labels)
    require_columns(path, x, y, patient)
    return x, y, patient


def names_slides(path: Path) -> bool:
    """Return whether an `.npz` names slides, cases or patients in arrays that `read_columns` does not read."""
    if path.suffix != ".npz":
        return False
    with np.load(path, allow_pickle=False) as loaded:
        return any(name.lower().startswith(_IDENTIFIERS) and name != "patient" for name in loaded.files)


def require_columns(path: Path, x: NDArray[Any], y: NDArray[Any], patient: NDArray[Any]) -> None:
    """Refuse features that are no finite numbers, and labels and patients of another length."""
    if x.ndim != 2 or x.shape[:1] != y.shape or patient.shape != y.shape:
        raise UsageError(
            f"{path}: x is {list(x.shape)}, y {list(y.shape)}, patient {list(patient.shape)}; wanted are [n, d], [n] "
            "and [n]"
        )
    if x.dtype.kind not in "biuf" or not x.size:
        raise UsageError(f"{path}: x is {x.dtype}{list(x.shape)}, not features that are numbers")
    if not (finite := np.isfinite(x).all(1)).all():
        rows = np.flatnonzero(~finite)
        raise UsageError(
            f"{path}: features of {len(rows)} rows are not finite numbers, of row {rows[0]} first; leave them out"
        )
    for name, values in (("y", y), ("patient", patient)):
        if values.dtype.kind not in "biufUS":
            raise UsageError(f"{path}: {name} is {values.dtype}, not numbers or texts")


def _read_arrays(path: Path, needs_labels: bool) -> FeatureColumns:
    try:
        arrays = read_npz(require_regular_file(path), ("x", "y", "patient"))
    except UNREADABLE as error:
        refuse_unavailable(error, path)
        objects = "it holds objects of Python; save numbers and texts as arrays"
        why = objects if "pickle" in str(error) else single_line(error)
        raise UsageError(f"{path}: not a file of NumPy with x and y ({why})") from None
    needed = ("x", "y") if needs_labels else ("x",)
    if missing := [name for name in needed if name not in arrays]:
        raise UsageError(f"{path}: not a file of NumPy with {' and '.join(needed)} (its {missing[0]} is missing)")
    y = arrays["y"] if needs_labels else np.full(arrays["x"].shape[:1], "")
    patient = arrays.get("patient", np.full(y.shape, ""))
    y, patient = (
        np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values for values in (y, patient)
    )
    return arrays["x"], y, patient


def _read_csv(path: Path, needs_labels: bool) -> FeatureColumns:
    rows = read_rows(path, ["label"] if needs_labels else [])
    remedy = ", as all columns but label and patient must be; leave that column out, or the row"
    x = np.array([[row.read_number(name, remedy) for name in row if name not in _NON_FEATURE_COLUMNS] for row in rows])
    return x, np.array([row.get("label", "") for row in rows]), np.array([row.read_value("patient") for row in rows])
