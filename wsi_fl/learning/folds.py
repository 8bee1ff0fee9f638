"""Cross-validation: the patients of a site divided into folds, each of which is the test part of one run."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from wsi_fl.types import UsageError


def folds_of(
    patient: NDArray[np.str_], label: NDArray[np.int64], *, n_folds: int, seed: int, stratified: bool
) -> NDArray[np.int64]:
    """Return int64[rows] in [0, n_folds): the fold of each row, the same for all rows of a patient.

    Not stratified, a patient's fold follows from `seed` and the patient's name alone, whoever else there is, as ε asks
    for: with one patient more or less, all others stay where they are.

    Stratified, a patient's class is the highest label of its rows, as a patient with tumour on one slide has a tumour.
    The patients of a class, in an order drawn from `seed` and their names, go round the folds, and the next class
    begins where the last one ended. So folds differ by at most one patient, in every class and in all. The order of
    rows does not matter.

    Raises:
        UsageError: for rows without a patient, and for fewer patients than folds.

    Example:
        >>> label = np.array([0, 1, 0, 1])
        >>> folds_of(np.array(["a", "a", "b", "c"]), label, n_folds=2, seed=0, stratified=True).tolist()
        [0, 0, 0, 1]
    """
    if n := int((patient == "").sum()):
        raise UsageError(
            f"{n} rows have no patient, but folds divide patients; name them in the table of slides"
        )
    names, which = np.unique(patient, return_inverse=True)
    if len(names) < n_folds:
        raise UsageError(
            f"{len(names)} patients cannot be divided into {n_folds} folds; set train.folds to {len(names)} or less"
        )
    lots = [hashlib.sha256(f"fold {seed} {name}".encode()).digest() for name in names.tolist()]
    if not stratified:
        return np.array([int.from_bytes(lot[:8], "big") % n_folds for lot in lots], np.int64)[which]
    kind = _kinds(which, label, len(names))
    order = sorted(range(len(names)), key=lambda k: (kind[k], lots[k]))
    fold = np.empty(len(names), np.int64)
    fold[order] = np.arange(len(names)) % n_folds
    return fold[which]


def rare_classes(patient: NDArray[np.str_], label: NDArray[np.int64], *, n_folds: int) -> dict[int, int]:
    """Return {class: patients} of the classes that have fewer patients than there are folds, so that some test none.

    Example:
        >>> rare_classes(np.array(["a", "b", "c", "c"]), np.array([0, 0, 0, 1]), n_folds=2)
        {1: 1}
    """
    names, which = np.unique(patient, return_inverse=True)
    counts = np.bincount(_kinds(which, label, len(names)))
    return {int(k): int(counts[k]) for k in np.flatnonzero((counts > 0) & (counts < n_folds))}


def _kinds(which: NDArray[np.int64], label: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return int64[n], the highest label of each of n patients."""
    kind = np.zeros(n, np.int64)
    np.maximum.at(kind, which, label)
    return kind
