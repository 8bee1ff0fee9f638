"""Tables of features with labels for `bench`, from the files of several tools."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl.data.cohort import Cohort
from wsi_fl.data.tasks import SurvivalTask
from wsi_fl.slides.layouts.common import TableRow, match_slide_name, read_rows
from wsi_fl.slides.layouts.tcga_targets import SURVIVAL, SURVIVAL_COLUMNS, SURVIVAL_INTERVALS
from wsi_fl.stages.prepare.feature_columns import TABLE_SUFFIXES, FeatureColumns, read_columns, require_columns
from wsi_fl.stages.runtime.console import SilentProgress, Watcher
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.system.file_names import compose_text, describe_mismatch, is_missing
from wsi_fl.types import ExcludedSlide, UsageError, WsiFlError

_SITE_COLUMNS = ("site", "split")
_SURVIVAL_TASK = SurvivalTask(SURVIVAL_INTERVALS)
_NUMBER_PATTERN = re.compile(r"[+-]?(inf|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE)
_MAX_NAMED_SLIDES = 5
"""Largest number of excluded slides named in a message; the others are counted."""


class FeatureTable(NamedTuple):
    """Rows of features with labels, indices of `classes`, or times of survival; patients are "" where unknown.

    `rows.obs` has the columns `site` and `split` of a table that has them.
    """

    rows: Cohort
    classes: tuple[str, ...]
    excluded: tuple[ExcludedSlide, ...] = ()


def read_table(
    path: Path, labels: Path | None = None, target: str | None = None, watcher: Watcher | None = None
) -> FeatureTable:
    """Read features with labels.

    Args:
        path: `.npz` with x [n, d], y [n] and perhaps patient [n]; `.csv` with the columns label, perhaps patient, and
            numbers; a feature store (`.h5`), with a row for each labelled patch, else for the mean of each slide; or
            TRIDENT's folder, with a row for the mean of each slide.
        labels: CSV with the columns slide, label and perhaps patient, for such a folder.
        target: its column of labels, by default `label` or `diagnosis`; `survival` for the columns months and dead.

    Raises:
        UsageError: for anything else, fewer than two classes, classes that differ in case only, or invalid numbers.
    """
    if path.is_dir():
        return _read_folder(path, labels, target, watcher or SilentProgress())
    if target is not None:
        raise UsageError(f"--target {target}: is a column of --labels, for a folder of features")
    if path.suffix in TABLE_SUFFIXES:
        x, y, patient = read_columns(path)
    elif path.suffix == ".h5":
        x, y, patient = _read_store(path)
    else:
        raise UsageError(f"{path}: features are read from .npz, .csv, .h5, or a folder of TRIDENT's")
    return _build_table(path, x, y, patient)


def _build_table(
    path: Path, x: NDArray[Any], y: NDArray[Any], patient: NDArray[Any], excluded: Sequence[ExcludedSlide] = ()
) -> FeatureTable:
    """Return the table of features with classes; rows without a class are excluded."""
    require_columns(path, x, y, patient)
    unknown = np.array([is_missing(str(name)) for name in y.tolist()], bool)
    if unknown.any():
        excluded = [*excluded, *(ExcludedSlide(f"row {k}", "has no label") for k in np.flatnonzero(unknown).tolist())]
        x, y, patient = (values[~unknown] for values in (x, y, patient))
    patient = np.array(["" if is_missing(name) else compose_text(name) for name in map(str, patient.tolist())])
    classes, numbers = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise UsageError(
            f"{path}: needs two classes at least; its labels are {', '.join(map(str, classes))}; a folder's labels may "
            "be another column: --target NAME"
        )
    names = tuple(str(name) for name in classes)
    if broken := _find_fraction(names):
        raise UsageError(f"{path}: a label is {broken}; labels are classes, so write names or whole numbers")
    counts = Counter(name.casefold() for name in names)
    if duplicates := [name for name in names if counts[name.casefold()] > 1]:
        raise UsageError(f"{path}: labels {', '.join(duplicates)} differ in case only; write them alike")
    return FeatureTable(Cohort.from_arrays(x.astype(np.float32), numbers, patient.tolist()), names, tuple(excluded))


def _find_fraction(names: Sequence[str]) -> str:
    """Return the first fractional label where all labels are numbers; "" else."""
    numbers = [name.replace(",", ".") for name in names]
    if not all(map(_NUMBER_PATTERN.fullmatch, numbers)):
        return ""
    return next((name for name, number in zip(names, numbers, strict=True) if float(number) % 1), "")


def _read_store(path: Path) -> FeatureColumns:
    with BagStore(path) as store:
        classes = np.array(store.meta.classes)
        if store.has_patch_labels:
            patches = store.patch_table
            return store.read(np.arange(len(patches))), classes[patches.label], np.array(patches.patient)
        means = [store.read_bag(k).features.mean(0) for k in range(len(store))]
        return np.stack(means), classes[store.table.label], np.array(store.table.patient)


def _read_folder(path: Path, labels: Path | None, target: str | None, progress: Watcher) -> FeatureTable:
    """Return a row for each slide with a label and complete features; the others are excluded."""
    if labels is None:
        raise UsageError(f"{path}: --labels names a CSV with the columns slide, label and perhaps patient")
    layout, rows = LAYOUTS["trident"], read_rows(labels, ["slide"])
    columns = _find_label_columns(labels, rows, target)
    files, entries, slides, excluded = layout.find(path), [], set(), list[ExcludedSlide]()
    for number, row in enumerate(rows):
        slide = match_slide_name(row["slide"], files)
        progress.update("slides", number / len(rows), 1, slide)
        if slide in slides:
            raise UsageError(f"{row.where}: slide {slide} has a row already")
        slides.add(slide)
        try:
            if not all(map(row.read_value, columns)):
                raise WsiFlError(f"has no label ({row.where})")
            if slide not in files:
                raise WsiFlError(f"has a label ({row.where}) and no features")
            entries.append((layout.read(files[slide]).features.mean(0), row))
        except WsiFlError as error:
            excluded.append(ExcludedSlide(slide, str(error)))
    excluded += [ExcludedSlide(name, f"has no label in {labels.name}") for name in files if name not in slides]
    if not entries:
        why = "" if slides & set(files) else f"{describe_mismatch(slides, files)}; "
        raise UsageError(
            f"{labels}: none of its slides has a label and features in {path}; {why}{describe_skipped_slides(excluded)}"
        )
    means, entry_rows = zip(*entries, strict=True)
    if len({len(mean) for mean in means}) > 1:
        raise UsageError(f"{path}: features of its slides are not equally wide; keep those of one encoder")
    x, patient = np.stack(means), np.array([row.read_value("patient") for row in entry_rows])
    if target == SURVIVAL:
        cohort = Cohort.from_arrays(x, None, patient.tolist())
        cohort = cohort.set_truth(_parse_survival(labels, entry_rows), _SURVIVAL_TASK)
        table = FeatureTable(cohort, (), tuple(excluded))
    else:
        table = _build_table(labels, x, np.array([row[columns[0]] for row in entry_rows]), patient, excluded)
    named = {name: [row[name] for row in entry_rows] for name in _SITE_COLUMNS if name in entry_rows[0]}
    return table._replace(rows=table.rows.assign_columns(**named))


def _find_label_columns(labels: Path, rows: Sequence[TableRow], target: str | None) -> tuple[str, ...]:
    """Return the columns of a target in a table of labels."""
    choices = {None: (("label",), ("diagnosis",)), SURVIVAL: (SURVIVAL_COLUMNS,)}.get(target, ((str(target),),))
    columns = next((names for names in choices if rows and rows[0].keys() >= {*names}), None)
    if columns is None:
        names = " or ".join(repr(name) for columns in choices for name in columns)
        raise UsageError(f"{labels}: column {names} is missing")
    return columns


def _parse_survival(labels: Path, rows: Sequence[TableRow]) -> NDArray[np.float64]:
    """Return months, and 1 for dead, float64[n, 2]."""
    truth = np.array([[row.read_number(column) for column in SURVIVAL_COLUMNS] for row in rows])
    if not _SURVIVAL_TASK.find_valid(truth, len(SURVIVAL_INTERVALS)).all():
        raise UsageError(f"{labels}: {' and '.join(SURVIVAL_COLUMNS)} must be months from 0 on, and 1 or 0")
    return truth


def describe_skipped_slides(excluded: Sequence[ExcludedSlide]) -> str:
    """Return a message on excluded slides, the first by name."""
    hint = "; --json names all" if len(excluded) > _MAX_NAMED_SLIDES else ""
    reasons = "; ".join(f"{slide.slide}: {slide.reason}" for slide in excluded[:_MAX_NAMED_SLIDES])
    return f"slides excluded: {len(excluded)} ({reasons}{hint})"
