"""Which rows of a store a run trains and tests on: those of its own split, or of a fold."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from wsi_fl.learning.examples import IN_MEMORY_BYTES, Examples, in_memory, resized
from wsi_fl.learning.folds import folds_of
from wsi_fl.learning.tasks import CLASSES, Task, strata
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.pipeline import Train
from wsi_fl.types import BagTable, PatchTable, UsageError

AnyTable = TypeVar("AnyTable", bound=PatchTable | BagTable)


def divided(table: AnyTable, train: Train, site: str, task: Task = CLASSES) -> AnyTable:
    """Return a store's table, with the splits of the run's fold in place of its own where the run is one of folds.

    Args:
        task: what the labels of the table are the truth of.

    Raises:
        UsageError: when the site's patients cannot be divided.
    """
    if train.folds is None or train.fold is None:
        return table
    try:
        kind = strata(table.label, task)
        fold = folds_of(table.patient, kind, n_folds=train.folds, seed=train.seed, stratified=train.stratify)
    except UsageError as error:
        raise UsageError(f"site {site}: {error}") from None
    return replace(table, split=np.where(fold == train.fold - 1, "test", "train"))


def examples_of(
    store: PatchStore, split: str, input_px: int | None, in_memory_bytes: int = IN_MEMORY_BYTES
) -> Examples:
    """Return the patches of one split of the store, reduced to input_px, in memory where they fit."""
    return pictures(rows_of(store, store.table, split), input_px, in_memory_bytes)


def pictures(found: Examples, input_px: int | None, in_memory_bytes: int = IN_MEMORY_BYTES) -> Examples:
    """Return the same patches, reduced to input_px, in memory where they fit."""
    return in_memory(resized(found, input_px) if input_px else found, in_memory_bytes)


def rows_of(store: PatchStore, table: PatchTable, split: str) -> Examples:
    """Return the rows of one split of the table, which is the store's or that of a fold."""
    rows = np.flatnonzero(table.split == split)
    some = table.take(rows)
    return Examples(lambda chosen: store.read(rows[chosen]), some.label, some.slide, some.patient)
