"""Targets of TCGA's patients from clinical tables: the GDC's clinical.tsv, cBioPortal's data_clinical_patient.txt and
data_clinical_sample.txt.

A target is `survival`, a column of classes such as SUBTYPE, or COLUMN:LOW:HIGH, a number in two classes: up to LOW and
from HIGH on, without the patients between, such as MSI_SCORE_MANTIS:0.4:0.6.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from wsi_fl.slides.layouts.common import TableRow, read_rows
from wsi_fl.slides.layouts.spreadsheets import parse_cell_number
from wsi_fl.types import UsageError

SURVIVAL = "survival"
SURVIVAL_COLUMNS = ("months", "dead")
SURVIVAL_INTERVALS = (12.0, 24.0, 36.0, 60.0)
"""Ends of the intervals in months."""
LOW, HIGH = "low", "high"
"""Classes of a number."""
ClinicalRow = tuple[str, TableRow]
"""A patient's barcode, and a row of a clinical table."""
_PATIENT = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}")
_STATUS_COLUMNS = ("OS_STATUS", "vital_status", "demographic.vital_status")
_EVENT_VALUES = {"deceased": "1", "dead": "1", "living": "0", "alive": "0"}
_MONTHS_COLUMN = "OS_MONTHS"
_DAY_COLUMNS = {
    "1": ("days_to_death", "demographic.days_to_death"),
    "0": ("days_to_last_follow_up", "diagnoses.days_to_last_follow_up", "follow_ups.days_to_follow_up"),
}
"""Columns of days by the event's value: until death, or until the last follow-up."""
_DAYS_PER_MONTH = 365.25 / 12


@dataclass(frozen=True)
class PatientTarget:
    """A target: its columns in the label table, and their values by patient.

    Attributes:
        n_contradictions: patients left out, as their rows contradict each other.
    """

    name: str
    columns: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    n_contradictions: int = 0

    @property
    def classes(self) -> list[str]:
        """The classes in order; none for survival."""
        if self.columns == SURVIVAL_COLUMNS:
            return []
        classes = {value for (value,) in self.values.values()}
        return [LOW, HIGH] if classes == {LOW, HIGH} else sorted(classes)


def read_clinical(tables: Sequence[Path]) -> list[ClinicalRow]:
    """Return the rows of clinical tables, each with its patient; rows without a patient are left out.

    Raises:
        UsageError: for a table without any barcode such as TCGA-A6-2671.
    """
    rows: list[ClinicalRow] = []
    for table in tables:
        matches = [(next(filter(None, map(_PATIENT.match, row.values())), None), row) for row in read_rows(table, ())]
        named_rows = [(match[0], row) for match, row in matches if match]
        if not named_rows:
            raise UsageError(f"{table}: no row names a patient by a barcode such as TCGA-A6-2671")
        rows += named_rows
    return rows


def list_institutions(rows: Sequence[ClinicalRow]) -> dict[str, str]:
    """Return code of a tissue source site → its institution, where a table of cBioPortal has both columns."""
    pairs = ((row.read_value("TISSUE_SOURCE_SITE_CODE"), row.read_value("TISSUE_SOURCE_SITE")) for _, row in rows)
    return {code: name for code, name in pairs if code and name}


def read_target(rows: Sequence[ClinicalRow], text: str) -> PatientTarget:
    """Return a target of the patients.

    Args:
        rows: of `read_clinical`.
        text: `survival`, a column, or COLUMN:LOW:HIGH.

    Raises:
        UsageError: for a missing column, a value that is no number, or fewer than two classes.
    """
    if text == SURVIVAL:
        return _read_survival(rows)
    column, *limits = text.split(":")
    if not any(column in row for _, row in rows):
        names = ", ".join(dict.fromkeys(name for _, row in rows for name in row))
        raise UsageError(f"--target {column}: no table of --clinical has this column; they have {names}")
    bounds = _parse_limits(text, limits)
    values: dict[str, set[str]] = {}
    for patient, row in rows:
        value = row.read_value(column)
        if value and bounds:
            value = _name_class(_parse_number(row, column), bounds)
        if value:
            values.setdefault(patient, set()).add(value)
    agreed = {patient: (*names,) for patient, names in values.items() if len(names) == 1}
    target = PatientTarget(column, (column,), agreed, len(values) - len(agreed))
    if len(target.classes) < 2:
        listing = ", ".join(target.classes) or "none"
        raise UsageError(f"--target {text}: needs two classes at least; its classes are {listing}")
    return target


def _parse_limits(text: str, limits: Sequence[str]) -> tuple[float, float] | None:
    try:
        low, high = map(float, limits) if limits else (0.0, 0.0)
        if low > high:
            raise ValueError
    except ValueError:
        raise UsageError(f"--target {text!r}: write a column, or COLUMN:LOW:HIGH with two numbers") from None
    return (low, high) if limits else None


def _name_class(number: float, bounds: tuple[float, float]) -> str:
    """Return the class of a number; "" between the bounds."""
    return HIGH if number >= bounds[1] else LOW if number <= bounds[0] else ""


def _parse_number(row: TableRow, column: str) -> float:
    try:
        return parse_cell_number(row[column])
    except ValueError:
        raise UsageError(f"{row.where}: {column} = {row[column]!r} is no number") from None


def _read_survival(rows: Sequence[ClinicalRow]) -> PatientTarget:
    """Return months and whether the patient died; of several rows death counts, and the latest time.

    A row without a status, or without a time from 0 on, is left out.
    """
    values: dict[str, tuple[str, float]] = {}
    for patient, row in rows:
        status = next(filter(None, map(row.read_value, _STATUS_COLUMNS)), "")
        event = _EVENT_VALUES.get(status.lower().rpartition(":")[2], "")
        columns = [name for name in (_MONTHS_COLUMN, *_DAY_COLUMNS.get(event, ())) if row.read_value(name)]
        if event and columns:
            number = _parse_number(row, columns[0])
            months = number if columns[0] == _MONTHS_COLUMN else number / _DAYS_PER_MONTH
            if 0 <= months < inf:
                values[patient] = max(values.get(patient, ("", 0.0)), (event, months))
    if not values:
        names = ", ".join((_MONTHS_COLUMN, *_STATUS_COLUMNS, *_DAY_COLUMNS["1"], *_DAY_COLUMNS["0"]))
        raise UsageError(f"--target survival: no table of --clinical has times and a status; looked for {names}")
    texts = {patient: (f"{months:.6g}", event) for patient, (event, months) in values.items()}
    return PatientTarget(SURVIVAL, SURVIVAL_COLUMNS, texts)
