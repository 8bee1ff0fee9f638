"""Targets of TCGA's patients from clinical tables: the GDC's clinical.tsv, cBioPortal's data_clinical_patient.txt and
data_clinical_sample.txt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from wsi_fl.slides.layouts.common import TableRow, read_rows
from wsi_fl.types import UsageError

SURVIVAL, SURVIVAL_COLUMNS = "survival", ("months", "dead")
SURVIVAL_INTERVALS = (12.0, 24.0, 36.0, 60.0)
"""Ends of the intervals in months."""
ClinicalRow = tuple[str, TableRow]
"""A patient's barcode, and a row of a clinical table."""
_PATIENT = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}")
_STATUS_COLUMNS = ("OS_STATUS", "vital_status", "demographic.vital_status")
_EVENTS = {"deceased": "1", "dead": "1", "living": "0", "alive": "0"}
_TIME_COLUMNS = {
    "1": ("OS_MONTHS", "days_to_death", "demographic.days_to_death"),
    "0": ("OS_MONTHS", "days_to_last_follow_up", "diagnoses.days_to_last_follow_up", "follow_ups.days_to_follow_up"),
}
"""Columns of the time by the event's value: until death, or until the last follow-up."""
_DAYS_PER_MONTH = 365.25 / 12


def read_clinical(tables: Sequence[Path]) -> list[ClinicalRow]:
    """Return the rows of clinical tables, each with its patient; rows without a patient are left out.

    Raises:
        UsageError: for a table without any barcode such as TCGA-A6-2671.
    """
    rows: list[ClinicalRow] = []
    for table in tables:
        matches = [(next(filter(None, map(_PATIENT.match, row.values())), None), row) for row in read_rows(table, ())]
        if not any(match for match, _ in matches):
            raise UsageError(f"{table}: no row names a patient by a barcode such as TCGA-A6-2671")
        rows += [(match[0], row) for match, row in matches if match]
    return rows


def list_institutions(rows: Sequence[ClinicalRow]) -> dict[str, str]:
    """Return code of a tissue source site → its institution, where a table of cBioPortal has both columns."""
    pairs = ((row.read_value("TISSUE_SOURCE_SITE_CODE"), row.read_value("TISSUE_SOURCE_SITE")) for _, row in rows)
    return {code: name for code, name in pairs if code and name}


def read_target(rows: Sequence[ClinicalRow], text: str) -> tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]:
    """Return the columns of a target, and patient → values; patients whose rows contradict each other are left out.

    Args:
        rows: of `read_clinical`.
        text: `survival`; a column of classes; or COLUMN:LOW:HIGH, a number in two classes, up to LOW and from HIGH on.

    Raises:
        UsageError: for a missing column, a value that is no number, or fewer than two classes.
    """
    if text == SURVIVAL:
        return SURVIVAL_COLUMNS, _read_survival(rows)
    column, *limits = text.split(":")
    if not any(column in row for _, row in rows):
        names = ", ".join(dict.fromkeys(name for _, row in rows for name in row))
        raise UsageError(f"--target {column}: no table of --clinical has this column; they have {names}")
    values: dict[str, set[str]] = {}
    for patient, row in rows:
        if row.read_value(column) and (value := _name_class(row, column, limits)):
            values.setdefault(patient, set()).add(value)
    agreed = {patient: (*names,) for patient, names in values.items() if len(names) == 1}
    if len(classes := sorted({*agreed.values()})) < 2:
        listing = ", ".join(name for (name,) in classes) or "none"
        raise UsageError(f"--target {text}: needs two classes at least; its classes are {listing}")
    return (column,), agreed


def _name_class(row: TableRow, column: str, limits: Sequence[str]) -> str:
    """Return the class of a value; "" for a number between the limits."""
    if not limits:
        return row[column]
    try:
        low, high = map(float, limits)
    except ValueError:
        raise UsageError(f"--target {column}:{':'.join(limits)}: write COLUMN:LOW:HIGH with two numbers") from None
    number = row.read_number(column)
    return f"over {high:g}" if number >= high else f"below {low:g}" if number <= low else ""


def _read_survival(rows: Sequence[ClinicalRow]) -> dict[str, tuple[str, str]]:
    """Return months and 1 for death by patient; of several rows death counts, and the latest time from 0 on."""
    values: dict[str, tuple[str, float]] = {}
    for patient, row in rows:
        status = next(filter(None, map(row.read_value, _STATUS_COLUMNS)), "")
        event = _EVENTS.get(status.lower().rpartition(":")[2], "")
        column = next(filter(row.read_value, _TIME_COLUMNS.get(event, ())), None)
        if column is not None:
            months = row.read_number(column) / (1 if column == "OS_MONTHS" else _DAYS_PER_MONTH)
            if 0 <= months < inf:
                values[patient] = max(values.get(patient, ("", 0.0)), (event, months))
    if not values:
        names = ", ".join(dict.fromkeys((*_STATUS_COLUMNS, *_TIME_COLUMNS["1"], *_TIME_COLUMNS["0"])))
        raise UsageError(f"--target survival: no table of --clinical has times and a status; looked for {names}")
    return {patient: (f"{months:.6g}", event) for patient, (event, months) in values.items()}
