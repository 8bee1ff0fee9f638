"""What a table says of slides whose features exist: patient, label, and where known split and resolution."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from wsi_fl.slides.layouts.common import label_of, mpp_of
from wsi_fl.slides.layouts.rows import accounted, of_site, rows_of
from wsi_fl.study.site import SiteFile
from wsi_fl.types import SPLITS, SetAside, SlideRecord, UsageError

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
        diagnoses: whether labels are the study's diagnoses; healthy or tumour otherwise.

    Raises:
        UsageError: when a column is missing, a slide has two rows, or a row cannot be read; names the line.
    """
    records: dict[str, SlideRecord] = {}
    aside = []
    rows, said = _rows(table, site.name)
    for where, row in rows:
        record = _record(row, where, files, site, diagnoses=diagnoses)
        if record.slide in records:
            raise UsageError(f"{where}: slide {record.slide} has a row already")
        records[record.slide] = record
        if record.slide not in files:
            aside.append(SetAside(record.slide, f"has a label ({where}) and no features"))
    aside += [SetAside(name, f"has no label in {table.name}") for name in files if name not in records]
    return Matched(tuple(one for name, one in records.items() if name in files), tuple(aside), said)


def _rows(table: Path, site: str) -> tuple[list[tuple[str, dict[str, str]]], str]:
    """(where, columns by our names) of each row of the site, and what became of all rows."""
    rows = rows_of(table, ())
    if not rows:
        raise UsageError(f"{table}: has no rows")
    called = {ours: next((name for name in names if name in rows[0]), None) for ours, names in _NAMES.items()}
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
    for key in ("slide", "patient", "label"):
        if not row[key]:
            raise UsageError(f"{where}: {key} is empty")
    split = row.get("split") or None
    if split is not None and split not in SPLITS:
        raise UsageError(f"{where}: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
    name = Path(row["slide"]).name
    slide = name if name in files else Path(name).stem if Path(name).stem in files else name
    negative = not diagnoses and label_of(row["label"], where)[0]
    return SlideRecord(
        Path(row["slide"]),
        slide,
        row["patient"],
        site.name,
        "negative" if negative else "weak",
        not negative,
        split=split,
        mpp_override=mpp_of(row["mpp"], where) if row.get("mpp") else site.mpp_override,
        diagnosis=row["label"] if diagnoses else "",
        tumor_type=row.get("tumor_type", ""),
    )
