"""Labels of slides or patients from a site's table, for the `[target]` of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl import types
from wsi_fl.data.cohort import Cohort, tabulate_truth
from wsi_fl.data.tasks import CLASSES, POSSIBLE_CLASSES, NumberTask, SurvivalTask, Task
from wsi_fl.slides.layouts.common import TableRow, filter_site, read_rows, suggest_decimal_point
from wsi_fl.slides.layouts.spreadsheets import PATIENT_NAMES, normalize_columns, parse_cell_number, require_typed_name
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, TargetSettings
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.file_names import compose_text, describe_mismatch, is_missing, stem_of
from wsi_fl.types import UsageError

Subtypes = Mapping[str, Sequence[str]]
_EVENT_VALUES = {"1": 1.0, "1.0": 1.0, "true": 1.0, "yes": 1.0, "dead": 1.0, "deceased": 1.0}
_CENSORED_VALUES = {"0": 0.0, "0.0": 0.0, "false": 0.0, "no": 0.0, "alive": 0.0, "living": 0.0, "censored": 0.0}
_STATUS_VALUES = _EVENT_VALUES | _CENSORED_VALUES
_CENSORED_COLUMN = re.compile(r"(?<!un)(?<!not )(?<!not_)censor|cnsr|(?<![a-z])cens(?![a-z])", re.IGNORECASE)
"""Names of censoring columns: `CNSR` of CDISC is 0 where the event was observed."""
_AMBIGUOUS_VALUES = {"0", "0.0", "1", "1.0", "true", "false", "yes", "no"}
"""Values with opposite meanings in columns of events and of censoring."""
_SLIDE_COLUMNS = ("slide", "slide_id")


def build_task(target: TargetSettings) -> Task:
    """Return the task of a target, classes by default; UsageError names missing keys."""
    if not target.is_set:
        return CLASSES
    if target.time or target.event or target.intervals:
        if not (target.time and target.event and target.intervals) or target.column:
            raise UsageError("[target]: survival needs time, event and intervals, and no column")
        ends = [0.0, *target.intervals]
        if any(a >= b for a, b in pairwise(ends)):
            raise UsageError(f"target.intervals = {target.intervals}: the ends must rise, and lie above 0")
        return SurvivalTask(tuple(target.intervals))
    if not target.column or (target.classes is None) == (target.range is None):
        raise UsageError(
            '[target]: say column with classes = ["a", "b"] or with range = [0, 100], or time, event and intervals'
        )
    if target.range is not None:
        if target.range[0] >= target.range[1]:
            raise UsageError(f"target.range = {target.range}: the smallest number comes first")
        return NumberTask(*target.range)
    assert target.classes is not None
    if len(set(target.classes)) < len(target.classes) or set(target.classes) & set(target.ignore):
        raise UsageError(f"target.classes = {target.classes}: a value is named twice, or stands in target.ignore too")
    return CLASSES


def find_task(pipeline: Pipeline) -> Task:
    """Return the task of a pipeline: of its target, or the classes of its stores, of which a slide may have some."""
    has_types = pipeline.train.data == "mosaics" or pipeline.example_level == "slide"
    return POSSIBLE_CLASSES if has_types and not pipeline.target.is_set else build_task(pipeline.target)


def list_classes(subtypes: Subtypes) -> tuple[str, ...]:
    """Return the classes of a study, the same at all sites: its diagnoses, or healthy and tumour."""
    return tuple(sorted({name for names in subtypes.values() for name in names})) or types.CLASSES


def name_outputs(target: TargetSettings) -> tuple[str, ...]:
    """Return the names of a model's outputs: the classes, the column, or the ends of the intervals."""
    if target.classes:
        return tuple(target.classes)
    return tuple(map(_shortest_text, target.intervals)) if target.intervals else (str(target.column),)


def _shortest_text(value: float) -> str:
    """Return a number's shortest text that parses to the same number."""
    return text if float(text := f"{value:g}") == value else repr(value)


def describe_target(target: TargetSettings) -> str:
    """Describe the prediction target."""
    if not target.is_set:
        return "the labels of the stores"
    whose = "of the hospital's table"
    if target.intervals:
        return f"time until '{target.event}', by column '{target.time}' {whose}, per {target.example_level}"
    within = "" if target.range is None else f", a number from {target.range[0]:g} to {target.range[1]:g}"
    return f"column '{target.column}' {whose}{within}, per {target.example_level}"


def label_slides(study: Study, site: SiteFile, target: TargetSettings, slides: Cohort) -> tuple[Cohort, str]:
    """Return the slides with a label in the site's table, their position in `row`, and a remark on the others.

    At a site without labels all are labelled 0. A real site excludes slides with an invalid value, as a failure would
    disclose to others that it occurs.

    UsageError names the line of the table: an invalid value of a simulated site, or a patient's contradicting slides.
    """
    path = Path(f"sites/{site.name}.toml") if site.is_receiver else _table_path(study, site)
    columns = [str(name) for name in ([target.column] if target.column else [target.time, target.event])]
    _refuse_names(columns, site)
    values_by_name, problems = {}, list[str]()

    def read_value(row: Mapping[str, str], where: str) -> Any:
        try:
            return _parse_truth(row, target, where)
        except UsageError as error:
            if not site.real:
                raise
            problems.append(str(error))
            return None

    if site.is_receiver:
        values: list[Any] = [(0.0, 0.0) if target.intervals else 0] * len(slides)
    else:
        values_by_name = _read_by_name(path, site, columns, read_value)
        names = zip(slides.slide.tolist(), slides.patient.tolist(), strict=True)
        keys = ((("slide", compose_text(slide)), ("patient", compose_text(patient))) for slide, patient in names)
        values = [values_by_name.get(slide, values_by_name.get(patient)) for slide, patient in keys]
    rows = np.array([row for row, value in enumerate(values) if value is not None], np.int64)
    if not len(rows):
        why = _explain_no_match(values_by_name, slides)
        raise UsageError(
            f"{path}: has a label for [target] for none of the {len(slides)} slides of site {site.name}: {why}"
        )
    truth = np.array([values[row] for row in rows], np.int64 if target.classes else np.float64)
    labelled = slides[rows].set_truth(truth, build_task(target)).assign_columns(tumor_type="", row=rows)
    if target.example_level == "patient":
        _require_one_truth(labelled, path)
    return labelled, _describe_excluded(site, slides, rows, path.name, problems)


def _explain_no_match(values_by_name: Mapping[tuple[str, str], Any], slides: Cohort) -> str:
    if not values_by_name:
        return "none of its lines has a value"
    kind = "patient" if any(kind == "patient" for kind, _ in values_by_name) else "slide"
    names_here = {compose_text(name) for name in getattr(slides, kind).tolist()} - {""}
    return describe_mismatch({name for _, name in values_by_name}, names_here)


def _describe_excluded(
    site: SiteFile, slides: Cohort, rows: NDArray[np.int64], source: str, problems: Sequence[str]
) -> str:
    """Describe the slides without a label; empty for none."""
    excluded = np.delete(slides.slide, rows).tolist()
    if not excluded:
        return ""
    listed = ", ".join(excluded[:3]) + (", …" if len(excluded) > 3 else "")
    values_note = f"; {len(problems)} values were not agreed on, such as {problems[0]}" if problems else ""
    where = f"site {site.name}: {len(excluded)} of {len(slides)} slides have no label"
    return f"{where} in {source} and are left out: {listed}{values_note}"


def _normalize_heading(heading: str) -> str:
    """Return the letters and digits of a heading, in lower case."""
    return "".join(character for character in heading.casefold() if character.isalnum())


def _refuse_names(columns: Sequence[str], site: SiteFile) -> None:
    """Refuse identifying columns as targets: a match of a name would disclose that its bearer is there."""
    names = {
        _normalize_heading(heading) for heading in (*_SLIDE_COLUMNS, *PATIENT_NAMES, site.columns.get("patient", ""))
    } - {""}
    if refused := [heading for heading in columns if _normalize_heading(heading) in names]:
        raise UsageError(
            f"[target]: column {refused[0]!r} identifies slides or patients, and is no target; name another column"
        )


def _require_one_truth(slides: Cohort, path: Path) -> None:
    """Refuse slides without a patient, and patients whose slides have different labels."""
    if unnamed := slides.slide[slides.patient == ""].tolist():
        raise UsageError(f"{path}: slide {unnamed[0]} has no patient, and [target] is per patient")
    columns = [*tabulate_truth(slides.label)]
    first = slides.obs.groupby(slides.patient)[columns].transform("first")
    for name in slides.patient[(slides.obs[columns] != first).any(axis=1)][:1]:
        raise UsageError(f"{path}: the slides of patient {name} have different labels, and [target] is per patient")


def _table_path(study: Study, site: SiteFile) -> Path:
    named = site.clinical or site.labels
    if named is None:
        raise UsageError(
            f"sites/{site.name}.toml: the target is a column of the site's table; name the table with "
            "clinical = 'FILE.csv'"
        )
    return study.resolve(named)


def read_column(study: Study, site: SiteFile, column: str) -> dict[tuple[str, str], str]:
    """Return ("slide" or "patient", name) → value in a column of the site's table, where all lines of it agree."""
    values_by_name: dict[tuple[str, str], set[str]] = {}
    for row, slide, patient in _list_rows(_table_path(study, site), site, [column]):
        if row[column] and not slide and not patient:
            raise UsageError(f"{row.where} of site {site.name}: names no slide or patient")
        for key in (("slide", slide), ("stem", stem_of(slide)), ("patient", patient)):  # stores know stems
            values_by_name.setdefault(key, set()).update({row[column]} - {""})
    agreed = {key: values.pop() for key, values in values_by_name.items() if key[1] and len(values) == 1}
    return {("slide", name): value for (kind, name), value in agreed.items() if kind == "stem"} | agreed


def _read_by_name(
    path: Path, site: SiteFile, columns: Sequence[str], read: Callable[[Mapping[str, str], str], Any]
) -> dict[tuple[str, str], Any]:
    """Return ("slide" or "patient", name) → value read from each line, None left out."""
    values_by_name: dict[tuple[str, str], Any] = {}
    for row, slide, patient in _list_rows(path, site, columns):
        where, name = f"{row.where} of site {site.name}", ("slide", slide) if slide else ("patient", patient)
        value = read(row, where)
        if value is None:
            continue
        if not name[1]:
            raise UsageError(f"{where}: names no slide or patient")
        if values_by_name.setdefault(name, value) != value:
            raise UsageError(f"{where}: {' '.join(name)} has another value than in a line above")
    stems: dict[tuple[str, str], Any] = {}  # stores know slides by their files' names without suffix
    for (kind, named), value in values_by_name.items():
        stem = stem_of(named)
        if kind == "slide" and stems.setdefault((kind, stem), value) != value:
            raise UsageError(f"{path}: has different values for slides with the same name {stem}")
    return stems | values_by_name


def _list_rows(path: Path, site: SiteFile, columns: Sequence[str]) -> Iterator[tuple[TableRow, str, str]]:
    """Yield the site's lines, each with its slide and its patient, "" for none."""
    rows = read_rows(path, columns)
    slide = _find_column(rows, _SLIDE_COLUMNS)
    patient = _find_patient_column(rows, site)
    if rows and slide is None and patient is None:
        raise UsageError(
            f"{path}: has no column of slides ({', '.join(_SLIDE_COLUMNS)}) or patients ({', '.join(PATIENT_NAMES)})"
        )
    for row in filter_site(rows, site.name):
        yield row, row.read_value(slide) if slide else "", row.read_value(patient) if patient else ""


def _parse_truth(row: Mapping[str, str], target: TargetSettings, where: str) -> Any:
    """Return the label of a line; None for an empty value; UsageError for an invalid one."""
    if target.intervals:
        time, event = row[str(target.time)], row[str(target.event)].lower()
        if is_missing(time) or is_missing(event):
            return None
        if event not in _STATUS_VALUES:
            raise UsageError(f"{where}: {target.event} = {event!r} is none of {', '.join(_STATUS_VALUES)}")
        if _CENSORED_COLUMN.search(str(target.event)) and event in _AMBIGUOUS_VALUES:
            raise UsageError(
                f"{where}: {target.event} = {event!r}: some tables mean the event by it, others that it was not seen; "
                "write dead or censored instead, or give the column a name that says which"
            )
        return _parse_number(time, f"{where}: {target.time}", 0.0, float("inf")), _STATUS_VALUES[event]
    text = row[str(target.column)]
    if text in target.ignore:
        return None
    if target.range is not None:
        return None if is_missing(text) else _parse_number(text, f"{where}: {target.column}", *target.range)
    assert target.classes is not None
    if text in target.classes:
        return target.classes.index(text)
    if is_missing(text):
        return None
    raise UsageError(
        f"{where}: {target.column} = {text!r} is none of target.classes ({', '.join(target.classes)}); "
        "add it there, or to target.ignore"
    )


def _parse_number(text: str, label: str, low: float, high: float) -> float:
    try:
        value = parse_cell_number(text)
    except ValueError:
        raise UsageError(f"{label} = {text!r} is no number{suggest_decimal_point(text)}") from None
    if not low <= value <= high or value == float("inf"):
        allowed = "0 or more" if high == float("inf") else f"{low:g} to {high:g} (target.range)"
        raise UsageError(f"{label} = {value:g}; it must be {allowed}")
    return value


def _find_patient_column(rows: Sequence[TableRow], site: SiteFile) -> str | None:
    """Return the column of patients, as named in the site file or a usual one; None for none."""
    named = [site.columns["patient"]] if "patient" in site.columns else []
    column = _find_column(rows, (*named, *normalize_columns(named, ()), *PATIENT_NAMES))
    for row in rows if column else ():
        require_typed_name(str(column), row[str(column)], row.where)
    return column


def _find_column(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> str | None:
    return next((name for name in names if rows and name in rows[0]), None)
