"""One scan under several names: found by what marks its content, kept in one split, and told.

Archives hold such copies, also after another export. Where they are of several patients, a model is tested on what it
was trained on, and privacy per patient counts one person several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from wsi_fl.types import SetAside, SlideRecord, natural

_NAMED = 6
"""Slides of one scan that a line names; it counts the rest."""


@dataclass(frozen=True)
class Scan:
    """A slide of a site, and digests of its content: slides that share a mark are one scan.

    Attributes:
        marks: none where nothing is known of the content.
    """

    site: str
    slide: str
    patient: str
    split: str
    marks: frozenset[str]


def copies_of(scans: Iterable[Scan]) -> list[list[Scan]]:
    """Return the slides that are one scan, in groups of two or more, in order.

    Example:
        >>> a, b, c = (Scan("S", name, name, "train", frozenset({mark})) for name, mark in ("ax", "by", "cx"))
        >>> [[scan.slide for scan in group] for group in copies_of([a, b, c])]
        [['a', 'c']]
    """
    listed = list(scans)
    root = _roots((scan.marks for scan in listed), len(listed))
    groups: dict[int, list[Scan]] = {}
    for number, scan in enumerate(listed):
        groups.setdefault(root[number], []).append(scan)
    return [group for group in groups.values() if len(group) > 1]


def _roots(keys: Iterable[Iterable[str]], n: int) -> list[int]:
    """Return for each of n things the first of those that it hangs together with by a key."""
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
    """Return patient → the first, by name, of the patients that share a scan with them; most are their own."""
    patients = sorted({record.patient for record in records})
    keys: dict[str, set[str]] = {patient: set() for patient in patients}
    for record in records:
        keys[record.patient] |= marks.get(record.slide, frozenset())
    root = _roots((keys[patient] for patient in patients), len(patients))
    return {patient: patients[first] for patient, first in zip(patients, root, strict=True)}


def drop_leaks(
    records: Sequence[SlideRecord], marks: Mapping[str, frozenset[str]]
) -> tuple[list[SlideRecord], list[SetAside]]:
    """Return the records with a split each, and those that a table puts beside the same scan in another split.

    Of a scan in several splits, what is trained on stays, else what comes first.
    """
    leaks: dict[str, str] = {}
    for group in copies_of(scans_of(records, marks)):
        source = next((scan for scan in group if scan.split == "train"), group[0])
        why = f"it is the same scan as {source.slide} of patient {source.patient}, which is in {source.split}"
        leaks |= {scan.slide: why for scan in group if scan.split != source.split}
    aside = [SetAside(slide, why) for slide, why in leaks.items()]
    return [record for record in records if record.slide not in leaks], aside


def scans_of(records: Sequence[SlideRecord], marks: Mapping[str, frozenset[str]]) -> list[Scan]:
    """Return the slides of a site with the marks that are known, by slide."""
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
    """Return a line for each scan that is there several times: its names, and what follows."""
    return [_line(group) for group in copies_of(scans)]


def describe_shared(scans: Iterable[Scan]) -> list[str]:
    """Return a line for each scan that several sites have."""
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
