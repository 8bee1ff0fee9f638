"""Traces of spreadsheets in tables: separators, formulas, errors, shortened numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Sequence

from wsi_fl.types import UsageError

_WIDTHLESS = "\ufeff\u200b\u2060"
"""Characters without width at the ends of texts from spreadsheets and web pages."""
_SEPARATOR = re.compile(r'"?sep=(.)"?[\s,;"]*', re.IGNORECASE)
_FORMULA = re.compile(r'=\s*"([^"]*)"')
_SHORTENED = re.compile(r"\d([.,]\d+)?E\+\d{2,3}", re.IGNORECASE)
_ERROR = re.compile(r"#(REF!|NAME\?|VALUE!|DIV/0!|NUM!|NULL!|SPILL!|CALC!|#+)", re.IGNORECASE)
PATIENT_NAMES = (*("patient", "patient_id", "case_id"), *("case_submitter_id", "cases.submitter_id", "submitter_id"))
"""Possible names of the column of patients; the first present counts."""
NAMING = frozenset({"slide", "slide_id", "site", *PATIENT_NAMES})
"""Columns with the slide, patient or site of a row."""
_OPTIONAL = frozenset({"label", "split", "mpp", "annotation", "diagnosis", "tumor_type"})
_PLURAL = {"annotations": "annotation"}


def find_header(text: str, needed: Collection[str]) -> tuple[int, str, str]:
    """Return (number of lines before the header, the header, its separator if the first line declares one).

    Empty lines and remarks (`#`, as in tables of cBioPortal) may precede the header. A line with `#` is the header
    where it has the needed columns, and the line below all remarks has not.

    Args:
        text: the table.
        needed: required columns.

    Example:
        >>> find_header("#Patient Identifier,Sex" + chr(10) + "PATIENT_ID,SEX", ["SEX"])
        (1, 'PATIENT_ID,SEX', '')
    """
    separator, lines = "", io.StringIO(text, newline=None)
    header_line: tuple[int, str] | None = None
    number = -1
    for number, line in enumerate(lines):
        if number == 0 and (match := _SEPARATOR.fullmatch(line.rstrip("\r\n"))):
            separator = match[1]  # as declared for Excel
            continue
        if not line.strip():
            continue
        if not line.lstrip('"').startswith("#"):
            if header_line is None or _has_columns(line, needed):
                header_line = number, line.rstrip("\n")
            break
        if header_line is None and _has_columns(line, needed):
            header_line = number, line.rstrip("\n")
    n_skipped, header = header_line or (number + 1, "")
    return n_skipped, header, separator


def _has_columns(line: str, needed: Collection[str]) -> bool:
    """Return whether a line has the needed columns, or, if none are needed, two known ones."""
    names = {_normalize_name(read_text(name.strip('#"'))) for name in re.split(r"[,;\t]", line.strip())}
    needed_names = {_normalize_name(name) for name in needed}
    return needed_names <= names if needed_names else len(names & (NAMING | _OPTIONAL)) > 1


def read_text(value: str) -> str:
    """Return a field as typed: stripped, without a formula around leading zeros.

    Example:
        >>> read_text(' ="007" '), read_text("=A1")
        ('007', '=A1')
    """
    plain = value.strip().strip(_WIDTHLESS).strip()
    match = _FORMULA.fullmatch(plain)
    return match[1].strip() if match else plain


def parse_cell_number(text: str) -> float:
    """Return the number of a text; ValueError for other texts, and for Python's 1_000, a name."""
    if "_" in text:
        raise ValueError(f"{text!r} is no number")
    return float(text)


def normalize_columns(header: Sequence[str], needed: Collection[str]) -> list[str]:
    """Return the header's names, those of known columns normalised.

    Case, spaces and hyphens are ignored, so that a `Split` is not lost in silence. A needed column keeps its spelling,
    and so does one beside a column of the normalised name.

    Args:
        needed: required columns.

    Example:
        >>> normalize_columns(["Slide", "Patient ID", "Age"], ()), normalize_columns(["Split", "split"], ())
        (['slide', 'patient_id', 'Age'], ['Split', 'split'])
    """
    known_names = NAMING | _OPTIONAL
    spelling = {_normalize_name(name): name for name in (*(known_names - {"site"}), *needed)}
    names = [name if name in needed else spelling.get(_normalize_name(name), name) for name in header]
    return [old if new != old and names.count(new) > 1 else new for old, new in zip(header, names, strict=True)]


def _normalize_name(name: str) -> str:
    plain = re.sub(r"[\s_-]+", "_", name.strip().lower())
    return _PLURAL.get(plain, plain)


def require_typed_name(column: str, value: str, where: str) -> None:
    """Refuse a name turned by a spreadsheet into a rounded number or an error.

    Raises:
        UsageError: names the column and the remedy.
    """
    if _SHORTENED.fullmatch(value):
        raise UsageError(
            f"{where}: {column} is {value!r}, a number that a spreadsheet has shortened, so that several may look the "
            "same; make the column text there, and export the table anew from where the names are whole"
        )
    if _ERROR.fullmatch(value):
        raise UsageError(f"{where}: {column} is {value!r}, an error of a spreadsheet; mend the cell there")
