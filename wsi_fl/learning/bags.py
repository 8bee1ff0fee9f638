"""Slides as examples: bags of unequal size, packed into one tensor with a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples
from wsi_fl.learning.tasks import CLASSES, Task
from wsi_fl.types import BagTable

Features = NDArray[np.float32]


def packed(bags: Sequence[Features]) -> Features:
    """Bags float32[m_i, d] as one float32[b, max m_i, d + 1]; the last column is 1 for a patch, 0 for padding.

    Example:
        >>> packed([np.float32([[5], [6]]), np.float32([[7]])]).tolist()
        [[[5.0, 1.0], [6.0, 1.0]], [[7.0, 1.0], [0.0, 0.0]]]
    """
    out = np.zeros((len(bags), max(map(len, bags)), bags[0].shape[1] + 1), np.float32)
    for row, bag in zip(out, bags, strict=True):
        row[: len(bag), :-1] = bag
        row[: len(bag), -1] = 1
    return out


def bag_examples(
    read: Callable[[int], Features],
    table: BagTable,
    allowed: NDArray[np.bool_] | None,
    *,
    n_features: int,
    in_memory: bool,
) -> Examples:
    """The slides of a table as examples.

    Args:
        read: position in the table → features float32[m, n_features].
        allowed: bool[n, classes], the classes that each slide may have; None for all.
        in_memory: whether all bags are read now, and held.
    """
    get = [read(k) for k in range(len(table))].__getitem__ if in_memory else read

    def packed_rows(rows: NDArray[np.int64]) -> Features:
        if not len(rows):
            return np.zeros((0, 1, n_features + 1), np.float32)
        return packed([get(int(k)) for k in rows])

    return Examples(packed_rows, table.label, table.slide, table.patient, allowed)


def unlabelled_bags(bags: Sequence[Features], allowed: NDArray[np.bool_], task: Task = CLASSES) -> Examples:
    """Bags of which nothing is known but what is asked, and the classes that all of them may have, bool[classes]."""
    unknown = np.full(len(bags), "")
    possible = np.broadcast_to(allowed, (len(bags), len(allowed))) if task.kind == "classes" else None
    return Examples(
        lambda rows: packed([bags[k] for k in rows]),
        np.zeros(len(bags), np.int64),
        unknown,
        unknown,
        possible,
        task=task,
    )


def allowed_classes(
    tumor_type: NDArray[np.str_], classes: Sequence[str], tumor_types: Mapping[str, Sequence[str]]
) -> NDArray[np.bool_]:
    """bool[n, classes]: what each slide may be, given its tumour type; all classes where that says nothing.

    Example:
        >>> allowed_classes(np.array(["lung", ""]), ("LUAD", "LUSC", "GBM"), {"lung": ("LUAD", "LUSC")}).tolist()
        [[True, True, False], [True, True, True]]
    """
    everything = tuple(classes)
    rows = [[name in tumor_types.get(kind, everything) for name in classes] for kind in tumor_type.tolist()]
    return np.array(rows, bool).reshape(len(tumor_type), len(everything))
