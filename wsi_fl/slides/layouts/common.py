"""Shared parts of all layouts: strict reading of tables, sources of a site, labels and splits."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from wsi_fl.slides.layouts.spreadsheets import (
    NAMING,
    find_header,
    normalize_columns,
    parse_cell_number,
    read_text,
    require_typed_name,
)
from wsi_fl.slides.reading.formats import is_slide_folder
from wsi_fl.slides.reading.formats.dicom_headers import SERIES_FOLDER
from wsi_fl.system.file_names import (
    compose_text,
    describe_mismatch,
    drop_companions,
    file_name_of,
    glob_paths,
    is_missing,
    stem_of,
)
from wsi_fl.system.files import require_regular_file
from wsi_fl.types import MPP_BOUNDS, SPLITS, ExcludedSlide, SlideRecord, UsageError, find_control_character, natural_key

_K = TypeVar("_K")
_T = TypeVar("_T")
_DELIMITERS = (",", ";", "\t")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MAX_NAMED_SITES = 5
"""Other sites named in a line; the rest is counted."""
_NEGATIVE = {"negative", "normal", "healthy", "benign", "0"}
_POSITIVE = {"positive", "tumor", "tumour", "metastasis", "metastases", "macro", "micro", "1"}
_PARTIAL = {"itc"}
_MAX_HINT_CLASSES = 12
"""Labels of a table listed in a hint."""
_COMMA = re.compile(r"[+-]?\d+,\d+")


class TableRow(dict[str, str]):
    """A row by column, values stripped; `where` is the table's name and the line."""

    def __init__(self, where: str, **values: str) -> None:
        super().__init__(values)
        self.where = where

    def read_value(self, column: str) -> str:
        """Return the value of a column; "" without such a column, and for `NA`, `nan`, `null` or the like."""
        text = self.get(column, "")
        return "" if is_missing(text) else text

    def read_number(self, column: str, remedy: str = "") -> float:
        """Return the number of a column; UsageError names the line, and the remedy, or that for a decimal comma."""
        try:
            return parse_cell_number(self[column])
        except ValueError:
            remedy = suggest_decimal_point(self[column]) or remedy
            raise UsageError(f"{self.where}: {column} = {self[column]!r} is no number{remedy}") from None


def read_rows(path: Path, needed: Iterable[str]) -> list[TableRow]:
    """Read a table with columns separated by commas, semicolons or tabs, or as in its first line (`sep=`).

    Empty lines, and remarks before the header, are skipped. Names of known columns are normalised. Texts are in
    Unicode's composed form, so that equal-looking names are equal.

    Args:
        needed: required columns.

    Raises:
        UsageError: when a column is missing, or a row has too few or too many fields, an open quote, a field over
            several lines, a control character, or a name that a spreadsheet has damaged. It names the line.
    """
    try:
        data = require_regular_file(path).read_bytes()
        text = data.decode("utf-16" if data.startswith(_UTF16) else "utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a readable CSV (it is not UTF-8); save it as UTF-8") from None
    text = compose_text(text)
    needed = tuple(needed)
    n_skipped, header, separator = find_header(text, needed)
    delimiter = separator or max(
        _DELIMITERS, key=lambda delimiter_choice: len(next(csv.reader([header], delimiter=delimiter_choice), []))
    )
    records = _read_records(path, text, delimiter, n_skipped)
    _, names = next(records, (0, []))
    names = normalize_columns([read_text(name) for name in names], needed)
    if not any(names):
        raise UsageError(f"{path}: the table is empty; its first line must name the columns")
    if missing := [name for name in needed if name not in names]:
        advice = "; its columns must be separated by commas, semicolons or tabs" if len(names) == 1 else ""
        raise UsageError(f"{path}: column {missing[0]!r} is missing; has {', '.join(filter(None, names))}{advice}")
    nonempty = (record for record in records if any(value.strip() for value in record[1]))
    return [_build_row(names, fields, f"{path.name} line {line}") for line, fields in nonempty]


def require_names(row: TableRow, *columns: str) -> None:
    """Refuse a row without the names in these columns.

    Raises:
        UsageError: when one of the columns is empty, `NA`, `nan` or the like.
    """
    for column in columns:
        if not row.read_value(column):
            remark = f" ({row[column]!r} means unknown)" if row[column] else ""
            raise UsageError(f"{row.where}: {column} is empty{remark}; name it, or delete the row")


def group_pairs(pairs: Iterable[tuple[_K, _T]]) -> dict[_K, list[_T]]:
    """Return key → its values in order."""
    groups: dict[_K, list[_T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def name_series(by_name: Mapping[str, Sequence[Path]]) -> dict[Path, str]:
    """Return the slide of each path by the paths of each name; series of one glass slide are named by their folders."""
    return {
        path: compose_text(path.name) if len(paths) > 1 and SERIES_FOLDER.fullmatch(path.name) else name
        for name, paths in by_name.items()
        for path in paths
    }


def filter_site(rows: Sequence[TableRow], site: str) -> list[TableRow]:
    """Return the rows of a site; all rows where the table has no column `site`."""
    return [row for row in rows if read_site_name(row, site) == site]


def read_site_name(row: TableRow, default: str = "") -> str:
    """Return the site of a row; the default where the table has no column `site`."""
    if not row.get("site", "a site"):
        raise UsageError(f"{row.where}: site is empty")
    return row.get("site", default)


def describe_account(name: str, rows: Sequence[TableRow], n_own: int, site: str) -> str:
    """Return a line on the numbers of a table's rows of this site and of others."""
    if n_own == len(rows):
        return f"{name}: {n_own} rows, all of this site"
    sites = sorted({row["site"] for row in rows if row.get("site", site) != site}, key=natural_key)
    more = f" and {len(sites) - _MAX_NAMED_SITES} more" if len(sites) > _MAX_NAMED_SITES else ""
    others = f" ({', '.join(sites[:_MAX_NAMED_SITES])}{more})" if sites else ""
    return f"{name}: {len(rows)} rows, {n_own} of this site, {len(rows) - n_own} of others{others}"


def _read_records(path: Path, text: str, delimiter: str, n_skipped: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, fields) of every record, the header first, after skipping the lines before it."""
    lines = islice(io.StringIO(text, newline=""), n_skipped, None)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = n_skipped + reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = "a quote is opened and never closed" if "end of data" in str(error) else str(error)
            raise UsageError(f"{path}: line {line} is not a readable CSV: {problem}") from None
        for value in fields:
            if "\n" in value or "\r" in value:
                raise UsageError(
                    f"{path}: line {line}: a quoted field goes on over several lines; is a quote left open?"
                )
            if (character := find_control_character(value.replace("\t", " "))) is not None:
                raise UsageError(f"{path}: line {line}: a field holds the character {character}")
        yield line, fields


def _build_row(names: Sequence[str], fields: Sequence[str], where: str) -> TableRow:
    """Return the fields by column; empty fields at the end, and columns without a name, are from spreadsheets."""
    values = [read_text(field) for field in fields]
    if len(values) < len(names) or any(values[len(names) :]):
        raise UsageError(f"{where}: has {len(values)} fields, but the header has {len(names)}")
    row = TableRow(where)
    for name, value in zip(names, values, strict=False):
        if name and row.setdefault(name, value) != value:
            raise UsageError(f"{where}: column {name!r} is there twice, and says {row[name]!r} and {value!r}")
        if name in NAMING:
            require_typed_name(name, value, where)
    return row


@dataclass(frozen=True)
class ArchiveSite:
    """One site of an archive: the values of its site file."""

    name: str
    slides: tuple[str, ...]
    annotations: str | None
    labels: str | None
    n_slides: int
    manifests: tuple[str, ...] = ()
    """Glob patterns of lists of the archive's files."""
    unknown_codes: tuple[str, ...] = ()
    """Tissue source site codes without an institution in any table."""


@dataclass(frozen=True)
class Sources:
    """The paths of one site's slides, annotations and tables."""

    site: str
    label: str
    """Name of the site file in messages."""
    slides: tuple[str, ...]
    """Glob patterns."""
    annotations: Path | None = None
    labels: Path | None = None
    split: Path | None = None
    mpp_override: float | None = None
    manifests: tuple[str, ...] = ()
    """Glob patterns of lists of expected files."""
    slide_types: tuple[str, ...] = ("DX",)
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column → its unusual name in the table of labels."""
    tell: Callable[[str], None] | None = None
    """Receives a line on the rows of each table."""
    has_labels: bool = True
    """Whether labels and annotations are read; else every slide is unlabelled."""

    def report_rows(self, table: Path, rows: Sequence[TableRow], n_own: int) -> None:
        """Report how many rows of a table are of this site, and how many of others."""
        if self.tell is not None:
            self.tell(describe_account(table.name, rows, n_own, self.site))


def parse_label(text: str, where: str, others: Iterable[str] = ()) -> tuple[bool, bool]:
    """Return (negative, partially outlined) of a slide label.

    Args:
        others: all labels of the table, proposed as classes by an error.
    """
    label, known_labels = text.strip().lower(), _NEGATIVE | _POSITIVE | _PARTIAL
    label = {"0.0": "0", "1.0": "1"}.get(label, label)  # as tables with gaps write whole numbers
    if label in known_labels:
        return label in _NEGATIVE, label in _PARTIAL
    classes = sorted(
        {label_text.strip() for label_text in (text, *others) if not is_missing(label_text)}, key=natural_key
    )
    class_names = classes if 1 < len(classes) <= _MAX_HINT_CLASSES else [text.strip(), "OTHER"]
    names_text = ", ".join(json.dumps(name, ensure_ascii=False) for name in class_names)
    hint = f"; classes of your own go into [subtypes] of the pipeline: any = [{names_text}]" if classes else ""
    raise UsageError(f"{where}: unknown label {text!r}; known: {', '.join(sorted(known_labels))}{hint}")


def match_slide_name(text: str, slide_names: Collection[str]) -> str:
    """Return the slide of a file name in a table, with or without folder (of any system) and suffix."""
    name = text if text in slide_names else file_name_of(text)
    return stem_of(name) if name not in slide_names and stem_of(name) in slide_names else name


def read_split(row: TableRow) -> str | None:
    """Return the split of a row, or None; UsageError for an unknown one."""
    split = row.read_value("split") or None
    if split is not None and split not in SPLITS:
        raise UsageError(f"{row.where}: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
    return split


def read_mpp(row: TableRow, default: float | None) -> float | None:
    """Return the µm per pixel of a row, or the default; UsageError for an implausible number."""
    if not (text := row.get("mpp")):
        return default
    lowest, highest = MPP_BOUNDS
    try:
        value = parse_cell_number(text)
    except ValueError:
        value = 0.0
    if not lowest <= value <= highest:
        hint = suggest_decimal_point(text)
        raise UsageError(f"{row.where}: mpp is {text!r}, not a number from {lowest} to {highest}{hint}")
    return value


def suggest_decimal_point(text: str) -> str:
    """Return the remedy for a number with a decimal comma; "" for anything else.

    Example:
        >>> suggest_decimal_point("0,25"), suggest_decimal_point("1,024.5")
        ('; write 0.25', '')
    """
    return f"; write {text.strip().replace(',', '.')}" if _COMMA.fullmatch(text.strip()) else ""


def list_files(sources: Sources) -> list[Path]:
    files = sorted(
        {path for pattern in sources.slides for path in glob_paths(pattern) if path.is_file() or is_slide_folder(path)}
    )
    if not files:
        raise UsageError(f"{sources.label}: slides matched no file ({', '.join(sources.slides)})")
    return files


def apply_splits(
    results: Iterable[SlideRecord | ExcludedSlide], sources: Sources
) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    """Return the usable slides, with the splits of the site's split table, and the excluded ones."""
    results_list = list(results)
    records = [result for result in results_list if isinstance(result, SlideRecord)]
    excluded = [result for result in results_list if isinstance(result, ExcludedSlide)]
    if sources.split is None:
        return records, excluded
    rows = read_rows(sources.split, ("split",))
    keys = [row.read_value("slide") or row.read_value("patient") for row in rows]
    split_of: dict[str, str] = {}
    for key, row in zip(keys, rows, strict=True):
        if not key or row["split"] not in SPLITS:
            raise UsageError(f"{row.where}: needs patient or slide, and split ({', '.join(SPLITS)})")
        if split_of.setdefault(key, row["split"]) != row["split"]:
            raise UsageError(f"{sources.split.name}: {key} is in two splits ({split_of[key]} and {row['split']})")
    name_sets = [(r.slide, compose_text(r.path.name), r.patient) for r in records]
    split_of |= {name: split for key, split in split_of.items() if (name := file_name_of(key)) not in split_of}
    splits = [next((split_of[name] for name in names if name in split_of), None) for names in name_sets]
    site_names = {name for names in name_sets for name in names}
    sources.report_rows(sources.split, rows, sum(bool({key, file_name_of(key)} & site_names) for key in keys))
    if records and not any(splits):
        why = describe_mismatch(split_of, site_names)
        raise UsageError(f"{sources.label}: split: {sources.split.name} names none of its slides or patients: {why}")
    return [replace(r, split=name or r.split) for r, name in zip(records, splits, strict=True)], excluded


def group_sites(pairs: Iterable[tuple[str, str]], annotations: str | None, labels: str | None) -> list[ArchiveSite]:
    """Return the sites of an archive in order, from (site, glob pattern) of each slide."""
    return [
        ArchiveSite(site, tuple(sorted(set(site_patterns))), annotations, labels, len(site_patterns))
        for site, site_patterns in sorted(group_pairs(pairs).items())
    ]


def list_tiffs(archive: Path) -> list[Path]:
    paths = (path for path in archive.rglob("*") if path.suffix.lower() in {".tif", ".tiff"})
    return drop_companions((path for path in paths if path.is_file()), archive)
