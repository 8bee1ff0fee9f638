"""What spreadsheets write into tables beside what was typed: separators, formulas, errors, numbers cut short."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Sequence

from wsi_fl.types import UsageError

_WIDTHLESS = "\ufeff\u200b\u2060"
"""Characters without width that spreadsheets and web pages leave at the ends of texts."""
_SEPARATOR = re.compile(r'"?sep=(.)"?[\s,;"]*', re.IGNORECASE)
_FORMULA = re.compile(r'=\s*"([^"]*)"')
_SHORTENED = re.compile(r"\d([.,]\d+)?E\+\d{2,3}", re.IGNORECASE)
_ERROR = re.compile(r"#(REF!|NAME\?|VALUE!|DIV/0!|NUM!|NULL!|SPILL!|CALC!|#+)", re.IGNORECASE)
PATIENT_NAMES = (
    *("patient", "patient_id", "case_id"),
    *("case_submitter_id", "cases.submitter_id", "submitter_id"),
)
"""What a column of patients may be called; the first that is there counts."""
NAMING = frozenset({"slide", "slide_id", "site", *PATIENT_NAMES})
"""Columns that say whose a row is."""
_OPTIONAL = frozenset({"label", "split", "mpp", "annotation", "diagnosis", "tumor_type"})
_PLURAL = {"annotations": "annotation"}


def separator_of(text: str) -> str:
    """Return the separator that the first line of a table declares for Excel; "" where none does.

    Example:
        >>> separator_of("sep=;"), separator_of("slide,patient")
        (';', '')
    """
    found = _SEPARATOR.fullmatch(text.rstrip("\r\n"))
    return found[1] if found else ""


def header_of(text: str, needed: Collection[str]) -> tuple[int, str, str]:
    """Return (how many lines stand before the header, the header, its separator where the first line declares one).

    Before it may stand empty lines and remarks, which begin with `#`, as in the tables of cBioPortal. A line that
    begins so is the header where it has the columns that are looked for, and the line below all remarks has not.

    Args:
        text: the table.
        needed: the columns that must be there.

    Example:
        >>> header_of("#Patient Identifier,Sex" + chr(10) + "PATIENT_ID,SEX", ["SEX"])
        (1, 'PATIENT_ID,SEX', '')
    """
    separator, lines = "", io.StringIO(text, newline=None)
    headed: tuple[int, str] | None = None
    number = -1
    for number, line in enumerate(lines):
        if number == 0 and (separator := separator_of(line)):
            continue
        if not line.strip():
            continue
        if not line.lstrip('"').startswith("#"):
            if headed is None or _has_columns(line, needed):
                headed = number, line.rstrip("\n")
            break
        if headed is None and _has_columns(line, needed):
            headed = number, line.rstrip("\n")
    before, header = headed or (number + 1, "")
    return before, header, separator


def _has_columns(line: str, needed: Collection[str]) -> bool:
    """Return whether a line names the columns that are needed, or else two of those that are known."""
    names = {_folded(text_of(name.strip('#"'))) for name in re.split(r"[,;\t]", line.strip())}
    wanted = {_folded(name) for name in needed}
    return wanted <= names if wanted else len(names & (NAMING | _OPTIONAL)) > 1


def text_of(value: str) -> str:
    """Return a field as somebody typed it: without spaces around, and out of a formula that guards its zeros.

    Example:
        >>> text_of(' ="007" '), text_of("=A1")
        ('007', '=A1')
    """
    plain = value.strip().strip(_WIDTHLESS).strip()
    found = _FORMULA.fullmatch(plain)
    return found[1].strip() if found else plain


def number_of(text: str) -> float:
    """Return a number as people write it; ValueError for others, and for Python's 1_000, which is a name."""
    if "_" in text:
        raise ValueError(f"{text!r} is no number")
    return float(text)


def column_names(header: Sequence[str], needed: Collection[str]) -> list[str]:
    """Return the header's names, those of known columns in the one way that they are looked for.

    Case, spaces and hyphens make no other column: a `Split` that nobody reads would be lost in silence. A column that
    is asked for as it is written stays as it is, and so does one beside a column of the right name.

    Args:
        needed: the columns that are asked for.

    Example:
        >>> column_names(["Slide", "Patient ID", "Age"], ()), column_names(["Split", "split"], ())
        (['slide', 'patient_id', 'Age'], ['Split', 'split'])
    """
    known = NAMING | _OPTIONAL
    spelling = {_folded(name): name for name in (*(known - {"site"}), *needed)}
    names = [name if name in needed else spelling.get(_folded(name), name) for name in header]
    return [
        old if new != old and names.count(new) > 1 else new for old, new in zip(header, names, strict=True)
    ]


def _folded(name: str) -> str:
    plain = re.sub(r"[\s_-]+", "_", name.strip().lower())
    return _PLURAL.get(plain, plain)


def require_typed_name(column: str, value: str, where: str) -> None:
    """Refuse a name that a spreadsheet has made a rounded number or an error, under which many would be one.

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
