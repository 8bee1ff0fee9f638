"""Tables of features with labels for `bench`, from the files of several tools."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort
from wsi_fl.slides.layouts.common import TableRow, match_slide_name, read_rows, suggest_decimal_point
from wsi_fl.slides.layouts.spreadsheets import parse_cell_number
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.system.file_names import compose_text, describe_mismatch, is_missing
from wsi_fl.system.files import refuse_unavailable, require_regular_file
from wsi_fl.types import ExcludedSlide, UsageError, WsiFlError, single_line

_NON_FEATURE_COLUMNS = ("label", "patient")
"""Columns of a table without features."""
_NUMBER_PATTERN = re.compile(r"[+-]?(inf|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE)
_MAX_NAMED_SLIDES = 5
"""Largest number of excluded slides named in a message; the others are counted."""


class FeatureTable(NamedTuple):
    """Rows of features with labels, indices of `classes`; patients are "" where unknown."""

    rows: Cohort
    classes: tuple[str, ...]
    excluded: tuple[ExcludedSlide, ...] = ()


def read_table(path: Path, labels: Path | None = None) -> FeatureTable:
    """Read features with labels.

    Args:
        path: `.npz` with x [n, d], y [n] and perhaps patient [n]; `.csv` with the columns label, perhaps patient, and
            numbers; a feature store (`.h5`), with a row for each labelled patch, else for the mean of each slide; or
            TRIDENT's folder, with a row for the mean of each slide.
        labels: CSV with the columns slide, label and perhaps patient, for such a folder.

    Raises:
        UsageError: for anything else, fewer than two classes, classes that differ in case only, or invalid numbers.
    """
    readers = {".npz": _read_arrays, ".csv": _read_csv, ".h5": _read_store}
    excluded: list[ExcludedSlide] = []
    if path.is_dir():
        x, y, patient = _read_folder(path, labels, excluded)
    elif path.suffix in readers:
        x, y, patient = readers[path.suffix](path)
    else:
        raise UsageError(f"{path}: features are read from .npz, .csv, .h5, or a folder of TRIDENT's")
    _require_columns(path, x, y, patient)
    unknown = np.array([is_missing(str(name)) for name in y.tolist()], bool)
    if unknown.any():
        excluded += [ExcludedSlide(f"row {row}", "has no label") for row in np.flatnonzero(unknown).tolist()]
        x, y, patient = (values[~unknown] for values in (x, y, patient))
    patient = np.array(["" if is_missing(name) else compose_text(name) for name in map(str, patient.tolist())])
    classes, numbers = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(f"{path}: needs two classes at least; its labels are {', '.join(map(str, classes))}")
    names = tuple(str(name) for name in classes)
    if broken := _find_fraction(names):
        raise UsageError(f"{labels or path}: a label is {broken}; labels are classes, so write names or whole numbers")
    counts = Counter(name.casefold() for name in names)
    if duplicates := [name for name in names if counts[name.casefold()] > 1]:
        raise UsageError(f"{labels or path}: labels {', '.join(duplicates)} differ in case only; write them alike")
    return FeatureTable(Cohort.from_arrays(x.astype(np.float32), numbers, patient.tolist()), names, tuple(excluded))


_TableColumns = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _require_columns(path: Path, x: NDArray[Any], y: NDArray[Any], patient: NDArray[Any]) -> None:
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


def _find_fraction(names: Sequence[str]) -> str:
    """Return the first fractional label where all labels are numbers; "" else."""
    numbers = [name.replace(",", ".") for name in names]
    if not all(map(_NUMBER_PATTERN.fullmatch, numbers)):
        return ""
    return next((name for name, number in zip(names, numbers, strict=True) if float(number) % 1), "")


def _read_arrays(path: Path) -> _TableColumns:
    try:
        loaded = np.load(require_regular_file(path), allow_pickle=False)
        arrays = {name: loaded[name] for name in ("x", "y", "patient") if name in loaded.files}
    except (AttributeError, EOFError, KeyError, OSError, ValueError, BadZipFile, ZlibError) as error:
        refuse_unavailable(error, path)
        objects = "it holds objects of Python; save numbers and texts as arrays"
        why = objects if "pickle" in str(error) else single_line(error)
        raise UsageError(f"{path}: not a file of NumPy with x and y ({why})") from None
    if missing := [name for name in ("x", "y") if not isinstance(arrays.get(name), np.ndarray)]:
        raise UsageError(f"{path}: not a file of NumPy with x and y (its {missing[0]} is no array, or missing)")
    y = arrays["y"]
    patient = arrays.get("patient", np.full(y.shape, ""))
    if not isinstance(patient, np.ndarray):
        raise UsageError(f"{path}: its patient is no array of NumPy")
    y, patient = (
        np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values for values in (y, patient)
    )
    return arrays["x"], y, patient


def _read_csv(path: Path) -> _TableColumns:
    def parse_number(row: TableRow, name: str) -> float:
        try:
            return parse_cell_number(row[name])
        except ValueError:
            remedy = suggest_decimal_point(row[name]) or "; leave that column out, or the row"
            raise UsageError(
                f"{row.where}: {name} is {row[name]!r}, and all columns but label and patient are numbers{remedy}"
            ) from None

    rows = read_rows(path, ["label"])
    x = np.array([[parse_number(row, name) for name in row if name not in _NON_FEATURE_COLUMNS] for row in rows])
    return x, np.array([row["label"] for row in rows]), np.array([row.read_value("patient") for row in rows])


def _read_store(path: Path) -> _TableColumns:
    with BagStore(path) as store:
        classes = np.array(store.meta.classes)
        if store.has_patch_labels:
            patches = store.patch_table
            return store.read(np.arange(len(patches))), classes[patches.label], np.array(patches.patient)
        means = [store.read_bag(k).features.mean(0) for k in range(len(store))]
        return np.stack(means), classes[store.table.label], np.array(store.table.patient)


def _read_folder(path: Path, labels: Path | None, excluded: list[ExcludedSlide]) -> _TableColumns:
    """Return a row for each slide with a label and complete features; the others are excluded."""
    if labels is None:
        raise UsageError(f"{path}: --labels names a CSV with the columns slide, label and perhaps patient")
    layout, rows = LAYOUTS["trident"], read_rows(labels, ["slide"])
    label_column = next((column for column in ("label", "diagnosis") if rows and column in rows[0]), None)
    if label_column is None:
        raise UsageError(f"{labels}: column 'label' or 'diagnosis' is missing")
    files, entries, slides = layout.find(path), [], set()
    for row in rows:
        slide = match_slide_name(row["slide"], files)
        if slide in slides:
            raise UsageError(f"{row.where}: slide {slide} has a row already")
        slides.add(slide)
        try:
            if not row.read_value(label_column):
                raise WsiFlError(f"has no label ({row.where})")
            if slide not in files:
                raise WsiFlError(f"has a label ({row.where}) and no features")
            entries.append((layout.read(files[slide]).features.mean(0), row[label_column], row.read_value("patient")))
        except WsiFlError as error:
            excluded.append(ExcludedSlide(slide, str(error)))
    excluded += [ExcludedSlide(name, f"has no label in {labels.name}") for name in files if name not in slides]
    if not entries:
        why = "" if slides & set(files) else f"{describe_mismatch(slides, files)}; "
        raise UsageError(
            f"{labels}: none of its slides has a label and features in {path}; {why}{describe_skipped_slides(excluded)}"
        )
    means, label, patient = zip(*entries, strict=True)
    if len({len(mean) for mean in means}) > 1:
        raise UsageError(f"{path}: features of its slides are not equally wide; keep those of one encoder")
    return np.stack(means), np.array(label), np.array(patient)


def describe_skipped_slides(excluded: Sequence[ExcludedSlide]) -> str:
    """Return a message on excluded slides, the first by name."""
    hint = "; --json names all" if len(excluded) > _MAX_NAMED_SLIDES else ""
    reasons = "; ".join(f"{slide.slide}: {slide.reason}" for slide in excluded[:_MAX_NAMED_SLIDES])
    return f"slides excluded: {len(excluded)} ({reasons}{hint})"
