"""What the slides of a bag store are labelled with, by archives or by a table beside features that exist."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wsi_fl.slides.layouts.common import accounted, label_of, mpp_of, of_site, rows_of
from wsi_fl.stages.site.targets import Subtypes, classes_of
from wsi_fl.study.site import SiteFile
from wsi_fl.types import SPLITS, UNLABELLED, BagTable, SetAside, SlideRecord, UsageError


@dataclass(frozen=True)
class Labelled:
    """The slides that have a class, with its position and their tumour type."""

    records: tuple[SlideRecord, ...]
    label: dict[str, int]
    """Slide → position in the classes."""
    tumor_type: dict[str, str]
    aside: tuple[SetAside, ...]


def stored_classes(site: SiteFile, subtypes: Subtypes) -> tuple[str, ...]:
    """The classes of a site's store: those of the study, or the one that says that nobody has labelled anything."""
    return UNLABELLED if site.receives else classes_of(subtypes)


def labelled(records: Sequence[SlideRecord], subtypes: Subtypes, site: SiteFile) -> Labelled:
    """The slides by class; those whose diagnosis is none of the study's are set aside. Of a receiver none has a class.

    Raises:
        UsageError: when slides have diagnoses and the study does not say which ones it is about.
    """
    classes = classes_of(subtypes)
    if site.receives:
        types = {record.slide: _type_of(record, subtypes) for record in records}
        return Labelled(tuple(records), dict.fromkeys(types, 0), types, ())
    if not subtypes:
        if one := next((record for record in records if record.diagnosis), None):
            raise UsageError(
                f"site {one.site}: its slides have diagnoses ({one.slide}: {one.diagnosis}); say in the pipeline which "
                f'ones count, for example subtypes = {{ {one.tumor_type or "tumor"} = ["{one.diagnosis}", …] }}'
            )
        label = {record.slide: classes.index("tumor" if record.positive else "healthy") for record in records}
        return Labelled(tuple(records), label, {record.slide: record.tumor_type for record in records}, ())
    kept, aside = [], []
    label, types = {}, {}
    for record in records:
        reason = _unfit(record, subtypes)
        if reason:
            aside.append(SetAside(record.slide, reason))
            continue
        kept.append(record)
        label[record.slide] = classes.index(record.diagnosis)
        types[record.slide] = _type_of(record, subtypes)
    return Labelled(tuple(kept), label, types, tuple(aside))


def table_of(kept: Sequence[SlideRecord], known: Labelled) -> BagTable:
    """Return the columns of a store of these slides, in order."""
    return BagTable(
        np.array([known.label[record.slide] for record in kept], np.int64),
        np.array([known.tumor_type[record.slide] for record in kept], np.str_),
        np.array([record.slide for record in kept], np.str_),
        np.array([record.patient for record in kept], np.str_),
        np.array([record.split or "train" for record in kept], np.str_),
    )


def _unfit(record: SlideRecord, subtypes: Subtypes) -> str:
    """Why a slide has no place in the study; "" when it has."""
    known = ", ".join(classes_of(subtypes))
    if not record.diagnosis:
        return f"it has no diagnosis; the study's are {known}"
    if record.diagnosis not in classes_of(subtypes):
        return f"its diagnosis {record.diagnosis} is none of the study's ({known})"
    if record.tumor_type in subtypes and record.diagnosis not in subtypes[record.tumor_type]:
        return f"its diagnosis {record.diagnosis} is none that {record.tumor_type} may have"
    return ""


def _type_of(record: SlideRecord, subtypes: Subtypes) -> str:
    """The archive's tumour type where the study knows it, else the one its diagnosis belongs to alone."""
    if record.tumor_type in subtypes:
        return record.tumor_type
    possible = [name for name, diagnoses in subtypes.items() if record.diagnosis in diagnoses]
    return possible[0] if len(possible) == 1 else ""


_NAMES = {
    "slide": ("slide", "slide_id"),
    "patient": ("patient", "case_id"),
    "label": ("label", "diagnosis"),
}
"""What a column may be called; the first that is there counts."""


@dataclass(frozen=True)
class Matched:
    """The slides that have both a file and a row, and those that lack one.

    Attributes:
        said: what became of all rows of the table.
    """

    records: tuple[SlideRecord, ...]
    aside: tuple[SetAside, ...]
    said: str


def matched(table: Path, files: Mapping[str, Path], site: SiteFile, *, diagnoses: bool) -> Matched:
    """Match the rows of a table with the files of slides.

    Where the table has a column `site`, rows of other sites are passed over.

    Args:
        site: whose; of a receiver no labels are needed or read.
        diagnoses: whether labels are the study's diagnoses; healthy or tumour otherwise.

    Raises:
        UsageError: when a column is missing, a slide has two rows, or a row cannot be read; names the line.
    """
    records: dict[str, SlideRecord] = {}
    aside = []
    rows, said = _rows(table, site.name, _needed(site))
    for where, row in rows:
        record = _record(row, where, files, site, diagnoses=diagnoses)
        if record.slide in records:
            raise UsageError(f"{where}: slide {record.slide} has a row already")
        records[record.slide] = record
        if record.slide not in files:
            aside.append(SetAside(record.slide, f"has a label ({where}) and no features"))
    aside += [SetAside(name, f"has no label in {table.name}") for name in files if name not in records]
    return Matched(tuple(one for name, one in records.items() if name in files), tuple(aside), said)


def _needed(site: SiteFile) -> tuple[str, ...]:
    return ("slide", "patient") if site.receives else ("slide", "patient", "label")


def _rows(table: Path, site: str, needed: Sequence[str]) -> tuple[list[tuple[str, dict[str, str]]], str]:
    """(where, columns by our names) of each row of the site, and what became of all rows."""
    rows = rows_of(table, ())
    if not rows:
        raise UsageError(f"{table}: has no rows")
    called = {ours: next((name for name in _NAMES[ours] if name in rows[0]), None) for ours in needed}
    if missing := next((ours for ours, name in called.items() if name is None), None):
        raise UsageError(f"{table}: no column {' or '.join(_NAMES[missing])}; it has {', '.join(rows[0])}")
    mine = [
        (row.where, row | {ours: row[name] for ours, name in called.items() if name})
        for row in of_site(rows, site)
    ]
    if not mine:
        raise UsageError(f"{table}: has no row of site {site}")
    return mine, accounted(table.name, rows, len(mine), site)


def _record(
    row: Mapping[str, str], where: str, files: Collection[str], site: SiteFile, *, diagnoses: bool
) -> SlideRecord:
    for key in _needed(site):
        if not row[key]:
            raise UsageError(f"{where}: {key} is empty")
    split = row.get("split") or None
    if split is not None and split not in SPLITS:
        raise UsageError(f"{where}: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
    name = Path(row["slide"]).name
    slide = name if name in files else Path(name).stem if Path(name).stem in files else name
    label = "" if site.receives else row["label"]
    negative = site.receives or (not diagnoses and label_of(label, where)[0])
    return SlideRecord(
        Path(row["slide"]),
        slide,
        row["patient"],
        site.name,
        "negative" if negative else "weak",
        not negative,
        split=split,
        mpp_override=mpp_of(row["mpp"], where) if row.get("mpp") else site.mpp_override,
        diagnosis=label if diagnoses else "",
        tumor_type=row.get("tumor_type", ""),
    )
