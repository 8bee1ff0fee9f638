"""Which patches are kept, and with which label."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wsi_fl.types import CLASSES, Supervision

HEALTHY, TUMOR = CLASSES.index("healthy"), CLASSES.index("tumor")


def label_patches(
    tissue_fraction: NDArray[np.float32],
    tumor_fraction: NDArray[np.float32],
    supervision: Supervision,
    positive: bool,
    *,
    min_tissue: float,
    min_tumor: float,
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """(keep bool[n], label int64[n]).

    With outlines a patch is tumour when at least `min_tumor` of it lies inside, and healthy only when it shares
    no area with tumour *and* the slide is negative or exhaustively outlined; what lies between is dropped.
    Under weak supervision every patch with tissue takes its slide's label.

    Example:
        >>> keep, label = label_patches(np.float32([1, 1, 1, 0]), np.float32([0, 0.3, 0.9, 0]), "annotated", True,
        ...                             min_tissue=0.5, min_tumor=0.5)
        >>> keep.tolist(), label.tolist()
        ([True, False, True, False], [0, 0, 1, 0])
    """
    has_tissue = tissue_fraction >= min_tissue if min_tissue > 0 else np.ones(len(tissue_fraction), bool)
    if supervision in {"weak", "negative", "unlabelled"}:
        label = TUMOR if positive and supervision == "weak" else HEALTHY
        return has_tissue, np.full(len(has_tissue), label, np.int64)
    tumor = tumor_fraction >= min_tumor
    healthy = (tumor_fraction == 0) & (supervision == "annotated")
    return has_tissue & (tumor | healthy), np.where(tumor, TUMOR, HEALTHY).astype(np.int64)
