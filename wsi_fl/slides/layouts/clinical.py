"""Clinical tables of the GDC: the diagnosis and the type of tumour of each patient."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wsi_fl.slides.layouts.rows import rows_of
from wsi_fl.types import UsageError

_NAMES = {
    "patient": ("bcr_patient_barcode", "case_submitter_id", "cases.submitter_id"),
    "diagnosis": ("primary_diagnosis", "diagnoses.primary_diagnosis"),
    "tumor_type": ("tumor_type",),
    "project": ("project", "project_id", "project.project_id"),
}
"""What columns are called where the site file does not say."""

_NEEDED = ("patient", "diagnosis")

_NOTHING = {"", "'--", "--", "na", "n/a", "not reported", "not available", "[not available]", "unknown"}

_BARCODE_LENGTH = len("TCGA-BH-A0B3")


@dataclass
class Case:
    """What the rows of one patient say, in order, each once."""

    diagnoses: list[str] = field(default_factory=list)
    tumor_types: list[str] = field(default_factory=list)


class Clinical:
    """The patients of a clinical table.

    Args:
        path: a table as `rows_of` reads it; several rows of a patient must agree.
        columns: how columns are called (patient, diagnosis, tumor_type, project) where not as usual.
    """

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self.path = path
        self._cases: dict[str, Case] = {}
        self.rows = rows = rows_of(path, columns.values())
        if not rows:
            raise UsageError(f"{path}: has no patient")
        named = {key: _named(path, key, list(rows[0]), columns) for key in _NAMES}
        for row in rows:
            value = {key: _value(row, name) for key, name in named.items()}
            case = self._cases.setdefault(_barcode(value["patient"]), Case())
            _add(case.diagnoses, value["diagnosis"])
            _add(case.tumor_types, value["tumor_type"] or value["project"])

        self._patients = [_barcode(_value(row, named["patient"])) for row in rows]

    def n_rows(self, patients: Collection[str]) -> int:
        """Return how many rows are of these patients."""
        return sum(patient in patients for patient in self._patients)

    def reason(self, patient: str) -> str | None:
        """Why a patient's slides cannot be labelled, or None."""
        if patient not in self._cases:
            return f"patient {patient} is not in {self.path.name}"
        if not self._cases[patient].diagnoses:
            return f"patient {patient} has no diagnosis in {self.path.name}"
        return None

    def labels(self, patient: str) -> tuple[str, str]:
        """Diagnosis and tumour type of a patient who has a diagnosis; the latter may be empty."""
        case = self._cases[patient]
        for found in (case.diagnoses, case.tumor_types):
            if len(found) > 1:
                raise UsageError(
                    f"{self.path.name}: rows of patient {patient} contradict each other "
                    f"({found[0]!r} and {found[1]!r}); keep the right one"
                )
        return case.diagnoses[0], case.tumor_types[0] if case.tumor_types else ""


def _barcode(patient: str) -> str:
    return patient.upper()[:_BARCODE_LENGTH]


def _named(path: Path, key: str, there: list[str], columns: Mapping[str, str]) -> str | None:
    """The column of this key; None where there is none and none is needed."""
    names = (columns[key],) if key in columns else _NAMES[key]
    found = next((name for name in names if name in there), None)
    if found is None and key in _NEEDED:
        raise UsageError(
            f"{path}: column {names[0]!r} is missing; has {', '.join(there)}; "
            f"name another with --column {key}=NAME, or {key} in the site file's [columns]"
        )
    return found


def _value(row: Mapping[str, str], name: str | None) -> str:
    text = row.get(name, "") if name is not None else ""
    return "" if text.lower() in _NOTHING else text


def _add(values: list[str], value: str) -> None:
    if value and value not in values:
        values.append(value)
