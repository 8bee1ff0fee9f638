"""Tables of slides, patients and labels, matched with the files of features."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wsi_fl.slides.layouts.common import (
    TableRow,
    describe_account,
    filter_site,
    match_slide_name,
    parse_label,
    read_mpp,
    read_rows,
    read_site_name,
    read_split,
    require_names,
)
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.file_names import describe_mismatch
from wsi_fl.types import ExcludedSlide, SlideRecord, UsageError

_COLUMN_NAMES = {
    "slide": ("slide", "slide_id", "FILENAME"),
    "patient": ("patient", "case_id", "PATIENT"),
    "label": ("label", "diagnosis"),
}
"""Possible names of each column; the first present counts."""


@dataclass(frozen=True)
class _TableMatch:
    """The rows of a table and the files of slides.

    Attributes:
        records: slides with a file and a label.
        excluded: slides that lack one, excluded.
        account: a line on the rows of the table, by site.
        mismatch: why no row has a file, with names of both; "" where some have one.
    """

    records: list[SlideRecord]
    excluded: list[ExcludedSlide]
    account: str
    mismatch: str


def match_table(table: Path, files: Mapping[str, Path], site: SiteFile, *, diagnoses: Collection[str]) -> _TableMatch:
    """Match the rows of a table with the files of slides, or of patients where the table names no slide.

    Where the table has a column `site`, rows of other sites are ignored.

    Args:
        site: of a site without labels none are needed or read.
        diagnoses: the study's, as values of the label; none where labels are healthy or tumour.

    Raises:
        UsageError: when a column is missing, a slide has two rows, or a row cannot be read; names the line.
    """
    records, excluded, row_places = [], [], dict[str, str]()
    needed = ("slide", "patient") if site.is_receiver else ("slide", "patient", "label")
    rows, account, others = _read_site_rows(table, site.name, needed)
    labels = [row.get("label", "") for row in rows]
    for row in _match_patient_files(rows, files):
        require_names(row, "slide", "patient")
        slide, where = match_slide_name(row["slide"], files), row.where
        if slide in row_places:
            raise UsageError(f"{where}: slide {slide} has a row already ({row_places[slide]}); keep one of them")
        row_places[slide] = where
        if not site.is_receiver and not (row["label"] in diagnoses or row.read_value("label")):
            excluded.append(ExcludedSlide(slide, f"has no label ({where})"))
            continue
        record = _build_record(row, slide, site, labels, diagnoses=bool(diagnoses))
        if slide in files:
            records.append(record)
        else:
            excluded.append(ExcludedSlide(slide, f"has a label ({where}) and no features"))
    missing = files.keys() - row_places.keys() - {match_slide_name(name, files) for name in others}
    excluded += [ExcludedSlide(name, f"has no label in {table.name}") for name in files if name in missing]
    return _TableMatch(
        records, excluded, account, "" if set(row_places) & set(files) else describe_mismatch(row_places, files)
    )


def _match_patient_files(rows: Sequence[TableRow], files: Collection[str]) -> list[TableRow]:
    """Return the rows, or one per patient where files are named by patients."""
    if any(match_slide_name(row["slide"], files) in files for row in rows) or not any(
        row["patient"] in files for row in rows
    ):
        return list(rows)
    patient_rows: dict[str, TableRow] = {}
    for row in rows:
        first = patient_rows.setdefault(row["patient"], row)
        if first.get("label") != row.get("label"):
            raise UsageError(f"{row.where}: patient {row['patient']} has another label than in {first.where}")
        row["slide"] = row["patient"]
    return list(patient_rows.values())


def _read_site_rows(table: Path, site: str, needed: Sequence[str]) -> tuple[list[TableRow], str, list[str]]:
    """Return the rows of the site, with our column names added, a line on the rows of all sites, and the slides and
    patients of the others."""
    rows = read_rows(table, ())
    if not rows:
        raise UsageError(f"{table}: has no rows")
    column_names = {key: next((name for name in _COLUMN_NAMES[key] if name in rows[0]), None) for key in needed}
    if column_names["slide"] is None:  # features of whole patients are in files named by patient
        column_names["slide"] = column_names["patient"]
    if missing := next((key for key, name in column_names.items() if name is None), None):
        stamp = "; join STAMP's two tables by PATIENT" if missing == "label" and "FILENAME" in rows[0] else ""
        raise UsageError(
            f"{table}: no column {' or '.join(_COLUMN_NAMES[missing])}; it has {', '.join(rows[0])}{stamp}"
        )
    site_rows = filter_site(rows, site)
    for row in site_rows:
        row.update({key: row[name] for key, name in column_names.items() if name})
    if not site_rows:
        raise UsageError(f"{table}: has no row of site {site}")
    foreign_rows = [row for row in rows if read_site_name(row, site) != site]
    names = [row[str(column_names[key])] for row in foreign_rows for key in ("slide", "patient")]
    return site_rows, describe_account(table.name, rows, len(site_rows), site), names


def _build_record(row: TableRow, slide: str, site: SiteFile, labels: Sequence[str], *, diagnoses: bool) -> SlideRecord:
    label = "" if site.is_receiver else row["label"]
    negative = site.is_receiver or (not diagnoses and parse_label(label, row.where, labels)[0])
    return SlideRecord(
        Path(row["slide"]),
        slide,
        row["patient"],
        site.name,
        "negative" if negative else "weak",
        not negative,
        split=read_split(row),
        mpp_override=read_mpp(row, site.mpp_override),
        diagnosis=label if diagnoses else "",
        tumor_type=row.read_value("tumor_type"),
    )
