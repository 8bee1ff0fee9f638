"""Labels of slides or patients from a site's table, for the `[target]` of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl import types
from wsi_fl.learning.survival import require_extra
from wsi_fl.learning.tasks import CLASSES, Number, Survival, Task
from wsi_fl.slides.layouts.common import TableRow, decimal_point, of_site, rows_of
from wsi_fl.slides.layouts.spreadsheets import PATIENT_NAMES, column_names, number_of, require_typed_name
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Target
from wsi_fl.study.site import SiteFile
from wsi_fl.system.names import compose_text, describe_mismatch, is_missing, stem_of
from wsi_fl.types import BagTable, UsageError

Subtypes = Mapping[str, Sequence[str]]
_SEEN = {"1": 1.0, "1.0": 1.0, "true": 1.0, "yes": 1.0, "dead": 1.0, "deceased": 1.0}
_NOT_SEEN = {"0": 0.0, "0.0": 0.0, "false": 0.0, "no": 0.0, "alive": 0.0, "living": 0.0, "censored": 0.0}
_EVENT = _SEEN | _NOT_SEEN
_OF_CENSORED = re.compile(r"(?<!un)(?<!not )(?<!not_)censor|cnsr|(?<![a-z])cens(?![a-z])", re.IGNORECASE)
"""Names of censoring columns: `CNSR` of CDISC is 0 where the event was observed."""
_UNCLEAR = {"0", "0.0", "1", "1.0", "true", "false", "yes", "no"}
"""Values with opposite meanings in columns of events and of censoring."""
_SLIDE = ("slide", "slide_id")


def task_of(target: Target) -> Task:
    """Return the task of a target, classes by default; UsageError names missing keys."""
    if not target.asked:
        return CLASSES
    if target.time or target.event or target.intervals:
        if not (target.time and target.event and target.intervals) or target.column:
            raise UsageError("[target]: survival needs time, event and intervals, and no column")
        ends = [0.0, *target.intervals]
        if any(a >= b for a, b in pairwise(ends)):
            raise UsageError(f"target.intervals = {target.intervals}: the ends must rise, and lie above 0")
        require_extra()
        return Survival(tuple(target.intervals))
    if not target.column or (target.classes is None) == (target.range is None):
        raise UsageError(
            '[target]: say column with classes = ["a", "b"] or with range = [0, 100], or time, event and intervals'
        )
    if target.range is not None:
        if target.range[0] >= target.range[1]:
            raise UsageError(f"target.range = {target.range}: the smallest number comes first")
        return Number(*target.range)
    assert target.classes is not None
    if len(set(target.classes)) < len(target.classes) or set(target.classes) & set(target.ignore):
        raise UsageError(
            f"target.classes = {target.classes}: a value is named twice, or stands in target.ignore too"
        )
    return CLASSES


def classes_of(subtypes: Subtypes) -> tuple[str, ...]:
    """Return the classes of a study, the same at all sites: its diagnoses, or healthy and tumour."""
    return tuple(sorted({name for names in subtypes.values() for name in names})) or types.CLASSES


def outputs_of(target: Target) -> tuple[str, ...]:
    """Return the names of a model's outputs: the classes, the column, or the ends of the intervals."""
    if target.classes:
        return tuple(target.classes)
    return tuple(map(_shortest, target.intervals)) if target.intervals else (str(target.column),)


def _shortest(value: float) -> str:
    """Return a number's shortest text that parses to the same number."""
    return text if float(text := f"{value:g}") == value else repr(value)


def question(target: Target) -> str:
    """Describe the prediction target."""
    if not target.asked:
        return "the labels of the stores"
    whose = "of the hospital's table"
    if target.intervals:
        return f"time until '{target.event}', by column '{target.time}' {whose}, per {target.of}"
    within = "" if target.range is None else f", a number from {target.range[0]:g} to {target.range[1]:g}"
    return f"column '{target.column}' {whose}{within}, per {target.of}"


@dataclass(frozen=True)
class _TargetLabels:
    """Labels of the slides of a store, from a table.

    Attributes:
        table: a row per example, a slide or a patient, with its true label.
        bags: the rows of the store of each example.
        excluded: excluded slides, without a valid value in the table, by name.
        source: the table's name.
        problems: the problem of each invalid value.
    """

    table: BagTable
    bags: tuple[NDArray[np.int64], ...]
    aside: tuple[str, ...]
    source: str
    strange: tuple[str, ...] = ()


def answers(study: Study, site: SiteFile, target: Target, slides: BagTable) -> _TargetLabels:
    """Look up the labels of a store's slides in the site's table; all are 0 at a site without labels.

    A real site excludes slides with an invalid value, as a failure would disclose to others that it occurs.

    UsageError names the line of the table: an invalid value of a simulated site, or a patient's contradicting slides.
    """
    path = Path(f"sites/{site.name}.toml") if site.receives else _table_path(study, site)
    columns = [str(name) for name in ([target.column] if target.column else [target.time, target.event])]
    _refuse_names(columns, site)
    said, strange = {}, list[str]()

    def read(row: Mapping[str, str], where: str) -> Any:
        try:
            return _truth(row, target, where)
        except UsageError as error:
            if not site.real:
                raise
            strange.append(str(error))
            return None

    if not site.receives:
        said = _by_name(path, site, columns, read)
    known, aside, nothing = [], [], (0.0, 0.0) if target.intervals else 0
    for row, (slide, patient) in enumerate(zip(slides.slide.tolist(), slides.patient.tolist(), strict=True)):
        keys = ("slide", compose_text(slide)), ("patient", compose_text(patient))
        value = nothing if site.receives else said.get(keys[0], said.get(keys[1]))
        if value is None:
            aside.append(slide)
        else:
            known.append((row, value))
    if not known:
        kind = "patient" if any(kind == "patient" for kind, _ in said) else "slide"
        there = {compose_text(name) for name in getattr(slides, kind).tolist()} - {""}
        why = (
            describe_mismatch({name for _, name in said}, there) if said else "none of its lines has a value"
        )
        raise UsageError(
            f"{path}: has a label for [target] for none of the {len(slides)} slides of site {site.name}: {why}"
        )
    rows = np.array([row for row, _ in known])
    truth = np.array([value for _, value in known], np.int64 if target.classes else np.float64)
    kept = replace(slides.take(rows), label=truth, tumor_type=np.full(len(rows), ""))
    table, bags = (kept, tuple(rows[:, None])) if target.of == "slide" else _by_patient(kept, rows, path)
    return _TargetLabels(table, bags, tuple(aside), path.name, tuple(strange))


def _letters(heading: str) -> str:
    """Return the letters and digits of a heading, in lower case."""
    return "".join(one for one in heading.casefold() if one.isalnum())


def _refuse_names(columns: Sequence[str], site: SiteFile) -> None:
    """Refuse identifying columns as targets: a match of a name would disclose that its bearer is there."""
    names = {_letters(one) for one in (*_SLIDE, *PATIENT_NAMES, site.columns.get("patient", ""))} - {""}
    if asked := [one for one in columns if _letters(one) in names]:
        raise UsageError(
            f"[target]: column {asked[0]!r} identifies slides or patients, and is no target; name another column"
        )


def _by_patient(
    slides: BagTable, rows: NDArray[np.int64], path: Path
) -> tuple[BagTable, tuple[NDArray[np.int64], ...]]:
    """Return a table with a row per patient, in the order of the store, and the rows of each patient's slides."""
    if unnamed := [str(name) for name in slides.slide[slides.patient == ""]]:
        raise UsageError(f"{path}: slide {unnamed[0]} has no patient, and [target] is per patient")
    _, first, of = np.unique(slides.patient, return_index=True, return_inverse=True)
    unlike = (slides.label != slides.label[first][of]).reshape(len(slides), -1).any(1)
    for name in slides.patient[unlike][:1]:
        raise UsageError(
            f"{path}: the slides of patient {name} have different labels, and [target] is per patient"
        )
    order = np.sort(first)
    bags = tuple(rows[slides.patient == slides.patient[k]] for k in order)
    table = slides.take(order)
    return replace(table, slide=table.patient), bags


def _table_path(study: Study, site: SiteFile) -> Path:
    named = site.clinical or site.labels
    if named is None:
        raise UsageError(
            f"sites/{site.name}.toml: the target is a column of the site's table; name the table with "
            "clinical = 'FILE.csv'"
        )
    return study.resolve(named)


def column_of(study: Study, site: SiteFile, column: str) -> dict[tuple[str, str], str]:
    """Return ("slide" or "patient", name) → value in a column of the site's table, where all lines of it agree."""
    said: dict[tuple[str, str], set[str]] = {}
    for row, slide, patient in _named_rows(_table_path(study, site), site, [column]):
        if row[column] and not slide and not patient:
            raise UsageError(f"{row.where} of site {site.name}: names no slide or patient")
        for key in (("slide", slide), ("stem", stem_of(slide)), ("patient", patient)):  # stores know stems
            said.setdefault(key, set()).update({row[column]} - {""})
    agreed = {key: values.pop() for key, values in said.items() if key[1] and len(values) == 1}
    return {("slide", name): value for (kind, name), value in agreed.items() if kind == "stem"} | agreed


def column_by_patient(study: Study, site: SiteFile, column: str) -> dict[str, set[str]]:
    """Return the values of each patient in a column of the site's table, empty ones left out."""
    path, found = _table_path(study, site), dict[str, set[str]]()
    rows = rows_of(path, [column])
    patient = _patient_column(rows, site)
    for row in of_site(rows, site.name):
        if patient is None or not row.value(patient):
            raise UsageError(f"{row.where}: names no patient; name one in each line, as patients are counted")
        said = {row.value(column)} - {""}
        found.setdefault(row[patient], set()).update(said)
    return found


def _by_name(
    path: Path, site: SiteFile, columns: Sequence[str], read: Callable[[Mapping[str, str], str], Any]
) -> dict[tuple[str, str], Any]:
    """Return ("slide" or "patient", name) → value read from each line, None left out."""
    found: dict[tuple[str, str], Any] = {}
    for row, slide, patient in _named_rows(path, site, columns):
        where, name = f"{row.where} of site {site.name}", ("slide", slide) if slide else ("patient", patient)
        value = read(row, where)
        if value is None:
            continue
        if not name[1]:
            raise UsageError(f"{where}: names no slide or patient")
        if found.setdefault(name, value) != value:
            raise UsageError(f"{where}: {' '.join(name)} has another value than in a line above")
    stems: dict[tuple[str, str], Any] = {}  # stores know slides by their files' names without suffix
    for (kind, named), value in found.items():
        stem = stem_of(named)
        if kind == "slide" and stems.setdefault((kind, stem), value) != value:
            raise UsageError(f"{path}: has different values for slides with the same name {stem}")
    return stems | found


def _named_rows(path: Path, site: SiteFile, columns: Sequence[str]) -> Iterator[tuple[TableRow, str, str]]:
    """Yield the site's lines, each with its slide and its patient, "" for none."""
    rows = rows_of(path, columns)
    slide = _first(rows, _SLIDE)
    patient = _patient_column(rows, site)
    if rows and slide is None and patient is None:
        raise UsageError(
            f"{path}: has no column of slides ({', '.join(_SLIDE)}) or patients ({', '.join(PATIENT_NAMES)})"
        )
    for row in of_site(rows, site.name):
        yield row, row.value(slide) if slide else "", row.value(patient) if patient else ""


def _truth(row: Mapping[str, str], target: Target, where: str) -> Any:
    """Return the label of a line; None for an empty value; UsageError for an invalid one."""
    if target.intervals:
        time, event = row[str(target.time)], row[str(target.event)].lower()
        if is_missing(time) or is_missing(event):
            return None
        if event not in _EVENT:
            raise UsageError(f"{where}: {target.event} = {event!r} is none of {', '.join(_EVENT)}")
        if _OF_CENSORED.search(str(target.event)) and event in _UNCLEAR:
            raise UsageError(
                f"{where}: {target.event} = {event!r}: some tables mean the event by it, others that it was not seen; "
                "write dead or censored instead, or give the column a name that says which"
            )
        return _number(time, f"{where}: {target.time}", 0.0, float("inf")), _EVENT[event]
    text = row[str(target.column)]
    if text in target.ignore:
        return None
    if target.range is not None:
        return None if is_missing(text) else _number(text, f"{where}: {target.column}", *target.range)
    assert target.classes is not None
    if text in target.classes:
        return target.classes.index(text)
    if is_missing(text):
        return None
    raise UsageError(
        f"{where}: {target.column} = {text!r} is none of target.classes ({', '.join(target.classes)}); "
        "add it there, or to target.ignore"
    )


def _number(text: str, what: str, low: float, high: float) -> float:
    try:
        value = number_of(text)
    except ValueError:
        raise UsageError(f"{what} = {text!r} is no number{decimal_point(text)}") from None
    if not low <= value <= high or value == float("inf"):
        allowed = "0 or more" if high == float("inf") else f"{low:g} to {high:g} (target.range)"
        raise UsageError(f"{what} = {value:g}; it must be {allowed}")
    return value


def _patient_column(rows: Sequence[TableRow], site: SiteFile) -> str | None:
    """Return the column of patients: as named in the site file, or a usual one; None for none.

    Raises:
        UsageError: for a name in it that a spreadsheet has damaged.
    """
    named = [site.columns["patient"]] if "patient" in site.columns else []
    column = _first(rows, (*named, *column_names(named, ()), *PATIENT_NAMES))
    for row in rows if column else ():
        require_typed_name(str(column), row[str(column)], row.where)
    return column


def _first(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> str | None:
    return next((name for name in names if rows and name in rows[0]), None)
