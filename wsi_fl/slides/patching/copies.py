"""Copies of a scan under several names: detection by digests of the content, one split for all, and reports.

Archives hold copies, also from other exports. With copies under several patients, a model is tested on its training
set, and privacy per patient counts one person several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from wsi_fl.types import SetAside, SlideRecord, natural

_NAMED = 6
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


def copies_of(scans: Iterable[Scan]) -> list[list[Scan]]:
    """Return the groups of two or more slides of one scan, in order.

    Example:
        >>> a, b, c = (Scan("S", name, name, "train", frozenset({mark})) for name, mark in ("ax", "by", "cx"))
        >>> [[scan.slide for scan in group] for group in find_copies([a, b, c])]
        [['a', 'c']]
    """
    listed = list(scans)
    root = _roots((scan.marks for scan in listed), len(listed))
    groups: dict[int, list[Scan]] = {}
    for number, scan in enumerate(listed):
        groups.setdefault(root[number], []).append(scan)
    return [group for group in groups.values() if len(group) > 1]


def _roots(keys: Iterable[Iterable[str]], n: int) -> list[int]:
    """Return for each of n items the first item of its component; items with a common key are connected."""
    root, first = list(range(n)), dict[str, int]()

    def find(number: int) -> int:
        while root[number] != number:
            number = root[number]
        return number

    for number, names in enumerate(keys):
        for name in names:
            a, b = sorted((find(first.setdefault(name, number)), find(number)))
            root[b] = a
    return [find(number) for number in range(n)]


def persons_of(records: Sequence[SlideRecord], marks: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Return patient → the first, by name, of the patients who share a scan with them."""
    patients = sorted({record.patient for record in records})
    keys: dict[str, set[str]] = {patient: set() for patient in patients}
    for record in records:
        keys[record.patient] |= marks.get(record.slide, frozenset())
    root = _roots((keys[patient] for patient in patients), len(patients))
    return {patient: patients[first] for patient, first in zip(patients, root, strict=True)}


def drop_leaks(
    records: Sequence[SlideRecord], marks: Mapping[str, frozenset[str]]
) -> tuple[list[SlideRecord], list[SetAside]]:
    """Return the records without leaks, and the leaks: copies of a scan in other splits.

    Of a scan in several splits, the training split stays, else the first.
    """
    leaks: dict[str, str] = {}
    for group in copies_of(scans_of(records, marks)):
        source = next((scan for scan in group if scan.split == "train"), group[0])
        why = f"it is the same scan as {source.slide} of patient {source.patient}, which is in {source.split}"
        leaks |= {scan.slide: why for scan in group if scan.split != source.split}
    aside = [SetAside(slide, why) for slide, why in leaks.items()]
    return [record for record in records if record.slide not in leaks], aside


def scans_of(records: Sequence[SlideRecord], marks: Mapping[str, frozenset[str]]) -> list[Scan]:
    """Return the slides of a site with their known marks."""
    return [
        Scan(
            record.site,
            record.slide,
            record.patient,
            record.split or "train",
            marks.get(record.slide, frozenset()),
        )
        for record in records
    ]


def describe_copies(scans: Iterable[Scan]) -> list[str]:
    """Return a line for each scan with copies: its names, and the consequence."""
    return [_line(group) for group in copies_of(scans)]


def describe_shared(scans: Iterable[Scan]) -> list[str]:
    """Return a line for each scan at several sites."""
    groups = copies_of(scans)
    return [_line(group) for group in groups if len({scan.site for scan in group}) > 1]


def _line(group: Sequence[Scan]) -> str:
    sites = sorted({scan.site for scan in group}, key=natural)
    patients = {(scan.site, scan.patient) for scan in group}
    shared = len(sites) > 1
    names = [
        f"{scan.slide} ({f'site {scan.site}, ' if shared else ''}patient {scan.patient})" for scan in group
    ]
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    *others, last = [*names[:_NAMED], *more]
    text = f"{', '.join(others)} and {last} are one scan"
    if shared:
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
