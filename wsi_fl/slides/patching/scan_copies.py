"""Copies of a scan under several names: detection by digests of the content, one split for all, and reports.

Archives hold copies, also from other exports. With copies under several patients, a model is tested on its training
set, and privacy per patient counts one person several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wsi_fl.types import ExcludedSlide, SlideRecord, natural_key

_MAX_NAMED_SLIDES = 6
"""Slides of one scan that a line names; others are counted."""


@dataclass(frozen=True)
class Scan:
    """A slide of a site, and digests of its content: slides with a common mark are one scan.

    Attributes:
        marks: empty where the content is unknown.
    """

    site: str
    slide: str
    patient: str
    split: str
    marks: frozenset[str]


def find_copies(scans: Iterable[Scan]) -> list[list[Scan]]:
    """Return the groups of two or more slides of one scan, in order.

    Example:
        >>> a, b, c = (Scan("S", name, name, "train", frozenset({mark})) for name, mark in ("ax", "by", "cx"))
        >>> [[scan.slide for scan in group] for group in find_copies([a, b, c])]
        [['a', 'c']]
    """
    scan_list = list(scans)
    groups: dict[int, list[Scan]] = {}
    for label, scan in zip(_label_components([scan.marks for scan in scan_list]), scan_list, strict=True):
        groups.setdefault(label, []).append(scan)
    return [group for group in groups.values() if len(group) > 1]


def _label_components(keys: Sequence[Iterable[str]]) -> list[int]:
    """Return for each item the number of its component; items with a common key are connected."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    first_numbers: dict[str, int] = {}
    pairs = [(first_numbers.setdefault(key, k), k) for k, item_keys in enumerate(keys) for key in item_keys]
    edges = tuple(np.array(pairs, np.int64).reshape(-1, 2).T)
    _, labels = connected_components(coo_array((np.ones(len(pairs)), edges), (len(keys), len(keys))), directed=False)
    return list(map(int, labels))


def find_persons(records: Sequence[SlideRecord], marks: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Return patient → the first, by name, of the patients who share a scan with them."""
    patients = sorted({record.patient for record in records})
    keys: dict[str, set[str]] = {patient: set() for patient in patients}
    for record in records:
        keys[record.patient] |= marks.get(record.slide, frozenset())
    labels, first = _label_components(list(keys.values())), dict[int, str]()
    return {patient: first.setdefault(label, patient) for patient, label in zip(patients, labels, strict=True)}


def drop_leaks(
    records: Sequence[SlideRecord], marks: Mapping[str, frozenset[str]]
) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    """Return the records without leaks, and the leaks: copies of a scan in other splits.

    Of a scan in several splits, the training split stays, else the first.
    """
    leaks: dict[str, str] = {}
    for group in find_copies(list_scans(records, marks)):
        source = next((scan for scan in group if scan.split == "train"), group[0])
        reason = f"it is the same scan as {source.slide} of patient {source.patient}, which is in {source.split}"
        leaks |= {scan.slide: reason for scan in group if scan.split != source.split}
    excluded = [ExcludedSlide(slide, reason) for slide, reason in leaks.items()]
    return [record for record in records if record.slide not in leaks], excluded


def list_scans(records: Iterable[SlideRecord], marks: Mapping[str, frozenset[str]]) -> list[Scan]:
    """Return the slides of a site with their known marks."""
    return [
        Scan(record.site, record.slide, record.patient, record.split or "train", marks.get(record.slide, frozenset()))
        for record in records
    ]


def describe_copies(scans: Iterable[Scan]) -> list[str]:
    """Return a line for each scan with copies: its names, and the consequence."""
    return [_describe_group(group) for group in find_copies(scans)]


def describe_shared(scans: Iterable[Scan]) -> list[str]:
    """Return a line for each scan at several sites."""
    return [_describe_group(group) for group in find_copies(scans) if len({scan.site for scan in group}) > 1]


def _describe_group(group: Sequence[Scan]) -> str:
    sites = sorted({scan.site for scan in group}, key=natural_key)
    patients = {(scan.site, scan.patient) for scan in group}
    is_shared = len(sites) > 1
    names = [f"{scan.slide} ({f'site {scan.site}, ' if is_shared else ''}patient {scan.patient})" for scan in group]
    more = [f"{len(names) - _MAX_NAMED_SLIDES} more"] if len(names) > _MAX_NAMED_SLIDES else []
    *first_names, last_name = [*names[:_MAX_NAMED_SLIDES], *more]
    text = f"{', '.join(first_names)} and {last_name} are one scan"
    if is_shared:
        return f"{text}: what one site trains on, another may test; leave it at one site"
    if len(patients) == 1:
        return f"{text}, which counts {len(group)} times"
    splits = sorted({scan.split for scan in group})
    leak = f"it is in {' and in '.join(splits)}, so scores are too good" if len(splits) > 1 else ""
    splits_text = leak or (f"all are in {splits[0]}" if splits[0] else "tile puts all of them into one split")
    return (
        f"{text}: {splits_text}, and privacy per patient counts {len(patients)}; if they are one person, give them one "
        "name in the table, else delete the wrong rows"
    )
