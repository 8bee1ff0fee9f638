"""Tables of archives and hospitals, read strictly: a row that is not understood is refused with its line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from wsi_fl.system.files import ordinary
from wsi_fl.types import UsageError, natural, strange_character

_DELIMITERS = (",", ";", "\t")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_NAMED = 5
"""Other sites that a line names; it counts the rest."""


class TableRow(dict[str, str]):
    """A row by the names of its columns, without spaces around.

    Attributes:
        where: the table's name and the line, for messages.
    """

    def __init__(self, values: Iterable[tuple[str, str]], where: str) -> None:
        super().__init__(values)
        self.where = where


def rows_of(path: Path, needed: Iterable[str]) -> list[TableRow]:
    """Read a table whose columns are separated by commas, semicolons or tabs; empty lines are passed over.

    Args:
        needed: the columns that must be there.

    Raises:
        UsageError: when a column is missing, or a row has too few or too many fields, an open quote, a field over
            several lines or a control character. It names the line.
    """
    text = _text(path)
    header = text.partition("\n")[0].partition("\r")[0]
    records = _records(path, text, max(_DELIMITERS, key=lambda one: len(_fields(header, one))))
    _, names = next(records, (0, []))
    names = [name.strip() for name in names]
    if not any(names):
        raise UsageError(f"{path}: the table is empty; its first line must name the columns")
    if missing := [name for name in needed if name not in names]:
        raise UsageError(f"{path}: column {missing[0]!r} is missing; has {', '.join(filter(None, names))}")
    return [_row(names, fields, f"{path.name} line {line}") for line, fields in records if _filled(fields)]


def of_site(rows: Sequence[TableRow], site: str) -> list[TableRow]:
    """Return the rows of a site; all of them where the table has no column `site`.

    Raises:
        UsageError: when a row names no site.
    """
    return [row for row in rows if site_named(row, site) == site]


def site_named(row: TableRow, default: str = "") -> str:
    """Return the site of a row, or the default where the table has no such column.

    Raises:
        UsageError: when the column is empty.
    """
    if not row.get("site", "a site"):
        raise UsageError(f"{row.where}: site is empty")
    return row.get("site", default)


def accounted(name: str, rows: Sequence[TableRow], own: int, site: str) -> str:
    """Say what became of every row of a table.

    Args:
        name: of the table.
        own: how many of its rows are of the site.

    Example:
        >>> rows = [TableRow([("site", site)], "") for site in "AAB"]
        >>> accounted("slides.csv", rows, 2, "A")
        'slides.csv: 3 rows, 2 of this site, 1 of others (B)'
        >>> accounted("slides.csv", rows[:2], 2, "A")
        'slides.csv: 2 rows, all of this site'
    """
    if own == len(rows):
        return f"{name}: {own} rows, all of this site"
    sites = sorted({row["site"] for row in rows if row.get("site", site) != site}, key=natural)
    more = f" and {len(sites) - _NAMED} more" if len(sites) > _NAMED else ""
    named = f" ({', '.join(sites[:_NAMED])}{more})" if sites else ""
    return f"{name}: {len(rows)} rows, {own} of this site, {len(rows) - own} of others{named}"


def _text(path: Path) -> str:
    try:
        data = ordinary(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    try:
        return data.decode("utf-16" if data.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a readable CSV (it is not UTF-8); save it as UTF-8") from None


def _fields(header: str, delimiter: str) -> list[str]:
    return next(csv.reader([header], delimiter=delimiter), [])


def _filled(fields: Sequence[str]) -> bool:
    return any(field.strip() for field in fields)


def _records(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of every record, the header first."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            what = "a quote is opened and never closed" if "end of data" in str(error) else str(error)
            raise UsageError(f"{path}: line {line} is not a readable CSV: {what}") from None
        for field in fields:
            if "\n" in field or "\r" in field:
                raise UsageError(
                    f"{path}: line {line}: a quoted field goes on over several lines; is a quote left open?"
                )
            if (found := strange_character(field.replace("\t", " "))) is not None:
                raise UsageError(f"{path}: line {line}: a field holds the character {found}")
        yield line, fields


def _row(names: Sequence[str], fields: Sequence[str], where: str) -> TableRow:
    """The fields by column; spreadsheets add empty ones at the end, or columns without a name."""
    given = [field.strip() for field in fields]
    if len(given) < len(names) or any(given[len(names) :]):
        raise UsageError(f"{where}: has {len(given)} fields, but the header has {len(names)}")
    row = TableRow(((name, value) for name, value in zip(names, given, strict=False) if name), where)
    for name, value in zip(names, given, strict=False):
        if row.get(name, value) != value:
            raise UsageError(f"{where}: column {name!r} is there twice, and says {value!r} and {row[name]!r}")
    return row
