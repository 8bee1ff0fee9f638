"""Patient-disjoint splits and balanced samples, both seeded and independent of file order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.scan_copies import find_persons
from wsi_fl.types import SlideRecord, UsageError

SEED = 0
"""Seed of random choices among slides and patches. Other test patients are named in a table, or come with folds."""


def assign_splits(
    records: Sequence[SlideRecord],
    *,
    test_fraction: float,
    seed: int = SEED,
    marks: Mapping[str, frozenset[str]] | None = None,
) -> list[SlideRecord]:
    """Return the records with a split each, one for all slides of a patient and for patients who share a scan.

    Splits prescribed by the archive must cover every slide. Otherwise about `test_fraction` of the patients,
    stratified by whether they have a positive slide, are held out: at least one of two.

    Args:
        marks: slide → digests of its content, see `copies`.

    Raises:
        UsageError: for a patient in two splits, or a slide without one while others have it.
    """
    prescribed: dict[str, str] = {}
    for record in records:
        if record.split and prescribed.setdefault(record.patient, record.split) != record.split:
            raise UsageError(
                f"site {record.site}: patient {record.patient} is in two splits "
                f"({prescribed[record.patient]} and {record.split}); a patient belongs to one"
            )
    if prescribed:
        for record in records:
            if record.patient not in prescribed:
                raise UsageError(f"site {record.site}: patient {record.patient} has no split, others have one")
        return [replace(record, split=prescribed[record.patient]) for record in records]
    person = find_persons(records, marks or {})
    is_positive = {person[r.patient]: False for r in records}
    is_positive |= {person[r.patient]: True for r in records if r.positive}
    test_patients = _choose_test_patients(is_positive, test_fraction, np.random.default_rng(seed))
    return [replace(r, split="test" if person[r.patient] in test_patients else "train") for r in records]


def count_test_patients(n: int, fraction: float) -> int:
    """Return the number of n patients that are held out: at least one of two, and never all."""
    return min(max(round(fraction * n), 1), n - 1) if fraction > 0 else 0


def _choose_test_patients(is_positive: dict[str, bool], fraction: float, rng: np.random.Generator) -> set[str]:
    """Choose the patients of the test split: each stratum's share, with rounding carried on to the next."""
    n_test = count_test_patients(len(is_positive), fraction)
    chosen: set[str] = set()
    n_passed = 0
    for stratum in (True, False):
        patients = sorted(patient for patient, value in is_positive.items() if value is stratum)
        n_passed += len(patients)
        share = round(n_test * n_passed / len(is_positive)) - len(chosen) if patients else 0
        chosen |= {patients[k] for k in rng.permutation(len(patients))[:share]}
    return chosen


def sample_rows(
    label: NDArray[np.int64],
    slide: NDArray[np.int64],
    names: Sequence[str],
    *,
    balance: bool,
    max_per_slide: int | None,
    seed: int,
    max_per_site: int = 0,
    patients: Sequence[str] = (),
) -> NDArray[np.bool_]:
    """Choose the patches bool[n] to keep: at most `max_per_slide` of each slide, then equally many of each label.

    At most `max_per_site` are kept in all, 0 for no limit: as equally many as there are of each patient, and of each
    slide of a patient.

    Each slide has its own random draw, from the seed and its name. So without `balance` no slide's patches depend on
    another slide, and the guarantee of ε holds from the slides on. Balancing drops patches of the larger labels,
    uniformly over the site: a slide more or less then changes the selection in others, and the guarantee of ε holds
    from the finished store on, not from the slides. So does a limit of the site. With only one label all are kept.

    Args:
        label, slide: int64[n], the label of each patch, and the index of its slide in `names`.
        patients: of each slide in `names`; needed with `max_per_site`.
    """
    keep = np.ones(len(label), bool)
    if max_per_slide is not None:
        order = np.argsort(slide, kind="stable")
        for rows in np.split(order, np.searchsorted(slide[order], np.arange(1, len(names)))):
            if len(rows) > max_per_slide:
                seed_text = f"{seed} {names[slide[rows[0]]]}".encode()
                slide_rng = np.random.default_rng(int.from_bytes(hashlib.sha256(seed_text).digest(), "big"))
                keep[rows[slide_rng.permutation(len(rows))[max_per_slide:]]] = False
    if not balance and not max_per_site:
        return keep
    rng = np.random.default_rng(seed)
    groups = [keep & (label == c) for c in np.unique(label[keep])] if balance else [keep.copy()]
    fewest = min((int(group.sum()) for group in groups), default=0)
    limit = max(1, max_per_site // len(groups)) if max_per_site and groups else fewest
    for group in groups:
        rows = rng.permutation(np.flatnonzero(group))
        if limit < fewest:
            rows = _order_evenly(rows, slide, np.unique(patients, return_inverse=True)[1])
        keep[rows[min(limit, fewest) :]] = False
    return keep


def _order_evenly(
    rows: NDArray[np.int64], slide: NDArray[np.int64], patient_of_slide: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return rows int64[m] in an order whose beginnings have as equally many of each patient, and of its slides, as
    there are; equal ones stay as they are.
    """
    for group in (slide, patient_of_slide[slide]):
        rows = rows[np.argsort(_rank_in_group(group[rows]), kind="stable")]
    return rows


def _rank_in_group(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64[m], how many of the same group stand before each.

    Example:
        >>> _rank_in_group(np.array([3, 5, 3, 3, 5])).tolist()
        [0, 0, 1, 2, 1]
    """
    order = np.argsort(group, kind="stable")
    _, first, size = np.unique(group[order], return_index=True, return_counts=True)
    rank = np.empty(len(group), np.int64)
    rank[order] = np.arange(len(group)) - np.repeat(first, size)
    return rank
