"""Slides as examples: bags of unequal size, packed into one tensor with a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, packed
from wsi_fl.learning.tasks import CLASSES, Task
from wsi_fl.types import BagTable

Features = NDArray[np.float32]

_AT_ONCE = 1 << 24
"""Values of bags that are read at a time where all are predicted: 64 MB."""


def bag_examples(
    read: Callable[[int], Features],
    table: BagTable,
    allowed: NDArray[np.bool_] | None,
    *,
    n_features: int,
    in_memory: bool,
    at_once: int | None = None,
) -> Examples:
    """Return the slides of a table as examples.

    Args:
        read: position in the table → features float32[m, n_features].
        allowed: bool[n, classes], the classes that each slide may have; None for all.
        in_memory: whether all bags are read now, and held.
        at_once: the most bags that are read at a time where all are predicted; None for any number.
    """
    get = [read(k) for k in range(len(table))].__getitem__ if in_memory else read

    def packed_rows(rows: NDArray[np.int64]) -> Features:
        if not len(rows):
            return np.zeros((0, 1, n_features + 1), np.float32)
        return packed([get(int(k)) for k in rows])

    return Examples(packed_rows, table.label, table.slide, table.patient, allowed, at_once=at_once)


def bags_at_once(longest: int, n_features: int) -> int:
    """Return how many bags of at most `longest` patches are read at a time where all are predicted.

    Example:
        >>> bags_at_once(10_000, 1024), bags_at_once(50, 1024)
        (1, 327)
    """
    return max(1, _AT_ONCE // max(1, longest * (n_features + 1)))


def with_drawn_patches(examples: Examples, most: int) -> Examples:
    """Return the same bags, of which training sees at most `most` patches, drawn anew each time.

    `batches` draws the number that stands for a choice, and the choice follows from that number and the bag's own
    length alone. So no bag has a part in what is seen of another, and what ε promises holds.
    """

    def show(rows: NDArray[np.int64], which: NDArray[np.int64]) -> Features:
        bags = [examples.read(rows[k : k + 1])[0] for k in range(len(rows))]
        if not bags:
            return np.asarray(examples.read(rows), np.float32)
        found = [_some(bag[:, :-1], most, int(seed)) for bag, seed in zip(bags, which, strict=True)]
        return packed(found)

    return replace(examples, show=show)


def _some(bag: Features, most: int, seed: int) -> Features:
    """Return at most `most` patches of a bag, in their order."""
    if len(bag) <= most:
        return bag
    chosen = np.random.default_rng(seed).choice(len(bag), most, replace=False)
    return bag[np.sort(chosen)]


def unlabelled_bags(bags: Sequence[Features], allowed: NDArray[np.bool_], task: Task = CLASSES) -> Examples:
    """Return unlabelled bags as examples to predict, with the classes bool[classes] that they may have."""
    unknown = np.full(len(bags), "")
    possible = np.broadcast_to(allowed, (len(bags), len(allowed))) if task.kind == "classes" else None
    return Examples(
        lambda rows: packed([bags[k] for k in rows]),
        np.zeros(len(bags), np.int64),
        unknown,
        unknown,
        possible,
        at_once=bags_at_once(max(map(len, bags)), bags[0].shape[1]),
        task=task,
    )


def allowed_classes(
    tumor_type: NDArray[np.str_], classes: Sequence[str], tumor_types: Mapping[str, Sequence[str]]
) -> NDArray[np.bool_]:
    """Return bool[n, classes], the classes that each slide's tumour type allows; all where it is not known.

    Example:
        >>> allowed_classes(np.array(["lung", ""]), ("LUAD", "LUSC", "GBM"), {"lung": ("LUAD", "LUSC")}).tolist()
        [[True, True, False], [True, True, True]]
    """
    everything = tuple(classes)
    rows = [[name in tumor_types.get(kind, everything) for name in classes] for kind in tumor_type.tolist()]
    return np.array(rows, bool).reshape(len(tumor_type), len(everything))
