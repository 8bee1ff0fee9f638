"""The slides of a site: their files, labels, outcomes in a job, and summaries."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, Required, TypedDict, TypeVar, Unpack

import numpy as np

from wsi_fl.slides.layouts import Sources, read_site
from wsi_fl.slides.layouts.common import (
    TableRow,
    accounted,
    label_of,
    mpp_of,
    of_site,
    require_names,
    rows_of,
    slide_named,
)
from wsi_fl.stages.site.data import patterns_of
from wsi_fl.stages.site.targets import Subtypes, classes_of
from wsi_fl.stages.work.console import Line, Lines, Table, by_site, speed_lines
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.bags import BagMeta
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import remove_strays
from wsi_fl.system.names import describe_mismatch
from wsi_fl.types import SPLITS, UNLABELLED, BagTable, SetAside, SlideRecord, UsageError

_T = TypeVar("_T")
_NAMED = 20
"""Slides of a site listed by name; the others are counted."""


def sources_of(study: Study, site: SiteFile) -> Sources:
    """Return the paths of a site file, resolved against the study."""
    if site.slides is None:
        raise UsageError(
            f"sites/{site.name}.toml: slides is missing; a site made by `wsi-fl partition` has none to tile"
        )

    def path(text: str | None) -> Path | None:
        return study.resolve(text) if text is not None else None

    return Sources(
        site=site.name,
        label=f"sites/{site.name}.toml",
        slides=patterns_of(study, site.slides),
        annotations=path(site.annotations),
        labels=path(site.labels),
        split=path(site.split),
        mpp_override=site.mpp_override,
        manifests=patterns_of(study, site.manifest),
        slide_types=tuple(site.slide_types or ("DX",)),
        labelled=not site.receives,
        columns={str(key): name for key, name in site.columns.items()},
    )


@dataclass(frozen=True)
class Listed:
    """A site and its slides: usable records, and the excluded slides with reasons."""

    study: Study
    site: SiteFile
    pipeline: Pipeline
    records: tuple[SlideRecord, ...]
    aside: tuple[SetAside, ...]


class Which(TypedDict, total=False):
    """The sites and settings of a command.

    Attributes:
        site: None for every site of the pipeline.
        pipeline_name: None for the study's only one.
        overrides: `KEY=VALUE` over the pipeline.
    """

    site: Required[str | None]
    pipeline_name: str | None
    overrides: Sequence[str]


def asked_for(study: Study, **which: Unpack[Which]) -> tuple[Pipeline, list[SiteFile]]:
    """Return the pipeline and the sites of a command."""
    name, site = study.pipeline_name(which.get("pipeline_name")), which["site"]
    pipeline = study.pipeline(name, which.get("overrides", ()))
    return pipeline, study.sites(pipeline) if site is None else [study.site(site)]


def list_slides(study: Study, job: Job | None = None, **which: Unpack[Which]) -> list[Listed]:
    """Return the slides of the selected sites; all paths are checked before any archive is read.

    The first rank of a job prints how many rows of each table belong to the site.
    """
    pipeline, sites = asked_for(study, **which)
    listed = []
    for one, sources in [(one, sources_of(study, one)) for one in sites]:
        said: list[str] = []
        records, aside = read_site(one.layout, replace(sources, tell=said.append))
        listed.append(Listed(study, one, pipeline, tuple(records), tuple(aside)))
        if job is not None:
            for line in said:
                job.say(f"  {one.name}: {line}")
    return listed


class Quality(TypedDict):
    """Of one slide: good patches, excluded patches by artifact, the method of tissue detection, and the tissue area
    relative to detection by saturation."""

    good: int
    aside: dict[str, int]
    tissue_by: str
    tissue_gain: float


@dataclass(frozen=True)
class Done:
    """The outcome of one slide in a job, plain enough for JSON.

    Attributes:
        slide: its name.
        patches: number of patches in its shard; 0 without a shard.
        reason: why the slide, or some of its patches, were excluded.
        note: a remark on its bag.
        encoded: number of encoded patches; 0 where the shard existed.
        spent: seconds by kind of work.
        content: how its shard stores pixels.
        quality: patches by artifact, and the method of tissue detection.
    """

    slide: str
    patches: int = 0
    reason: str | None = None
    note: str = ""
    made: int = 0
    spent: dict[str, float] = field(default_factory=dict)
    content: str = ""
    quality: Quality | None = None


def share_slides(
    job: Job,
    items: Sequence[_T],
    work: Callable[[list[_T]], Iterable[Done]],
    tell: Callable[[float, _T], None],
) -> list[Done]:
    """Distribute a site's slides over the ranks; return all outcomes in order (see `Job.share`)."""
    return [Done(**one) for one in job.share(items, lambda mine: map(asdict, work(mine)), tell)]


def finish(
    job: Job, done: list[Done], write: Callable[[list[Done]], _T], folders: Iterable[Path]
) -> _T | None:
    """Write the store of a site on the first rank, then remove files of other slides from the folders."""

    def write_and_clear() -> _T:
        written = write(done)
        remove_strays(folders, {one.slide for one in done if one.patches})
        return written

    return job.first_does(write_and_clear)


def set_aside(done: Iterable[Done]) -> list[SetAside]:
    """Return the excluded slides with their reasons."""
    return [SetAside(one.slide, one.reason) for one in done if one.reason]


def stored_classes(site: SiteFile, subtypes: Subtypes) -> tuple[str, ...]:
    """Return the classes of a site's store: those of the study, or the one for slides without labels."""
    return UNLABELLED if site.receives else classes_of(subtypes)


def labelled(
    records: Sequence[SlideRecord], subtypes: Subtypes, site: SiteFile
) -> tuple[list[SlideRecord], list[SetAside]]:
    """Return the slides with a class of the study, and the excluded others; a site without labels keeps all.

    Raises:
        UsageError: when slides have diagnoses and the study names no subtypes.
    """
    one = next((record for record in records if record.diagnosis), None)
    if one and not subtypes and not site.receives:
        kind = one.tumor_type or "tumor"
        some = sorted({record.diagnosis for record in records if record.tumor_type == one.tumor_type} - {""})
        named = ", ".join(json.dumps(name, ensure_ascii=False) for name in some)
        raise UsageError(
            f"site {one.site}: its slides have diagnoses ({one.slide}: {one.diagnosis}); name in the pipeline "
            f"those that count, for example subtypes = {{ {json.dumps(kind, ensure_ascii=False)} = [{named}] }}"
        )
    reasons = ["" if site.receives or not subtypes else _unfit(record, subtypes) for record in records]
    both = list(zip(records, reasons, strict=True))
    return [one for one, why in both if not why], [SetAside(one.slide, why) for one, why in both if why]


def table_of(records: Sequence[SlideRecord], subtypes: Subtypes, site: SiteFile) -> BagTable:
    """Return the columns of a store of these slides, in order."""
    classes, typed = classes_of(subtypes), subtypes or site.receives
    names = [one.diagnosis if subtypes else "tumor" if one.positive else "healthy" for one in records]
    return BagTable(
        np.array([0 if site.receives else classes.index(name) for name in names], np.int64),
        np.array([_type_of(one, subtypes) if typed else one.tumor_type for one in records], np.str_),
        np.array([one.slide for one in records], np.str_),
        np.array([one.patient for one in records], np.str_),
        np.array([one.split or "train" for one in records], np.str_),
    )


def _unfit(record: SlideRecord, subtypes: Subtypes) -> str:
    """Return why a slide does not fit into the study; "" when it does."""
    known = ", ".join(classes_of(subtypes))
    if not record.diagnosis:
        return f"it has no diagnosis; the study's are {known}"
    if record.diagnosis not in classes_of(subtypes):
        hints = {one.casefold(): f"; did you mean {one}?" for one in classes_of(subtypes)}
        hint = hints.get(record.diagnosis.casefold(), "")
        return f"its diagnosis {record.diagnosis} is none of the study's ({known}){hint}"
    if record.tumor_type in subtypes and record.diagnosis not in subtypes[record.tumor_type]:
        return f"its diagnosis {record.diagnosis} is none that {record.tumor_type} may have"
    return ""


def _type_of(record: SlideRecord, subtypes: Subtypes) -> str:
    """Return the archive's tumour type if the study has it, else the only type with the diagnosis, or ""."""
    if record.tumor_type in subtypes:
        return record.tumor_type
    possible = [name for name, diagnoses in subtypes.items() if record.diagnosis in diagnoses]
    return possible[0] if len(possible) == 1 else ""


_NAMES = {
    "slide": ("slide", "slide_id", "FILENAME"),
    "patient": ("patient", "case_id", "PATIENT"),
    "label": ("label", "diagnosis"),
}
"""Possible names of each column; the first present counts."""


@dataclass(frozen=True)
class TableMatch:
    """The rows of a table and the files of slides.

    Attributes:
        records: slides with a file and a label.
        excluded: slides that lack one, excluded.
        account: a line on the rows of the table, by site.
        mismatch: why no row has a file, with names of both; "" where some have one.
    """

    records: list[SlideRecord]
    aside: list[SetAside]
    account: str
    mismatch: str


def matched(
    table: Path, files: Mapping[str, Path], site: SiteFile, *, diagnoses: Collection[str]
) -> TableMatch:
    """Match the rows of a table with the files of slides, or of patients where the table names no slide.

    Where the table has a column `site`, rows of other sites are ignored.

    Args:
        site: of a site without labels none are needed or read.
        diagnoses: the study's, as values of the label; none where labels are healthy or tumour.

    Raises:
        UsageError: when a column is missing, a slide has two rows, or a row cannot be read; names the line.
    """
    records, aside, seen = [], [], dict[str, str]()
    needed = ("slide", "patient") if site.receives else ("slide", "patient", "label")
    rows, account = _rows(table, site.name, needed)
    labels = [row.get("label", "") for row in rows]
    for row in _of_files(rows, files):
        require_names(row, "slide", "patient")
        slide, where = slide_named(row["slide"], files), row.where
        if slide in seen:
            raise UsageError(f"{where}: slide {slide} has a row already ({seen[slide]}); keep one of them")
        seen[slide] = where
        if not site.receives and not (row["label"] in diagnoses or row.value("label")):
            aside.append(SetAside(slide, f"has no label ({where})"))
            continue
        record = _record(row, slide, site, labels, diagnoses=bool(diagnoses))
        if slide in files:
            records.append(record)
        else:
            aside.append(SetAside(slide, f"has a label ({where}) and no features"))
    aside += [SetAside(name, f"has no label in {table.name}") for name in files if name not in seen]
    return TableMatch(
        records, aside, account, "" if set(seen) & set(files) else describe_mismatch(seen, files)
    )


def _of_files(rows: Sequence[TableRow], files: Collection[str]) -> list[TableRow]:
    """Return the rows, or one per patient where files are named by patients.

    Raises:
        UsageError: when rows of such a patient have different labels.
    """
    if any(slide_named(row["slide"], files) in files for row in rows) or not any(
        row["patient"] in files for row in rows
    ):
        return list(rows)
    found: dict[str, TableRow] = {}
    for row in rows:
        first = found.setdefault(row["patient"], row)
        if first.get("label") != row.get("label"):
            raise UsageError(f"{row.where}: patient {row['patient']} has another label than in {first.where}")
        row["slide"] = row["patient"]
    return list(found.values())


def _rows(table: Path, site: str, needed: Sequence[str]) -> tuple[list[TableRow], str]:
    """Return the rows of the site, with our column names added, and a line on the rows of all sites."""
    rows = rows_of(table, ())
    if not rows:
        raise UsageError(f"{table}: has no rows")
    called = {ours: next((name for name in _NAMES[ours] if name in rows[0]), None) for ours in needed}
    if called["slide"] is None:  # features of whole patients are in files named by patient
        called["slide"] = called["patient"]
    if missing := next((ours for ours, name in called.items() if name is None), None):
        stamp = "; join STAMP's two tables by PATIENT" if missing == "label" and "FILENAME" in rows[0] else ""
        raise UsageError(
            f"{table}: no column {' or '.join(_NAMES[missing])}; it has {', '.join(rows[0])}{stamp}"
        )
    mine = of_site(rows, site)
    for row in mine:
        row.update({ours: row[name] for ours, name in called.items() if name})
    if not mine:
        raise UsageError(f"{table}: has no row of site {site}")
    return mine, accounted(table.name, rows, len(mine), site)


def _record(
    row: TableRow, slide: str, site: SiteFile, labels: Sequence[str], *, diagnoses: bool
) -> SlideRecord:
    split, where = row.value("split") or None, row.where
    if split is not None and split not in SPLITS:
        raise UsageError(f"{where}: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
    label = "" if site.receives else row["label"]
    negative = site.receives or (not diagnoses and label_of(label, where, labels)[0])
    return SlideRecord(
        Path(row["slide"]),
        slide,
        row["patient"],
        site.name,
        "negative" if negative else "weak",
        not negative,
        split=split,
        mpp_override=mpp_of(row["mpp"], where) if row.get("mpp") else site.mpp_override,
        diagnosis=label if diagnoses else "",
        tumor_type=row.value("tumor_type"),
    )


class BagsRow(TypedDict):
    """A site's row in the document of `features`, `mosaic` and `import`."""

    site: str
    slides: int
    made: NotRequired[int]
    failed: NotRequired[list[dict[str, object]]]
    notes: NotRequired[list[dict[str, str]]]
    copies: NotRequired[list[str]]
    bags: NotRequired[int]
    patches: int
    n_features: NotRequired[int]
    patients: NotRequired[int]
    classes: NotRequired[dict[str, int]]
    train: int
    test: int
    encoder: str
    store: str
    transform: NotRequired[dict[str, object]]
    seconds: NotRequired[float]


class Bags(TypedDict, total=False):
    """The document of these commands; empty on all ranks but the first."""

    sites: list[BagsRow]
    copies: list[str]
    speed: list[dict[str, object]]
    next: list[str]


def mosaic_row(
    study: Study,
    meta: BagMeta,
    table: BagTable,
    *,
    n_patches: int,
    failed: Sequence[SetAside],
    notes: Mapping[str, str],
    copies: list[str],
    n_slides: int,
) -> BagsRow:
    """Return a site's row of the document of `mosaic` and `import`; empty notes are dropped."""
    counts = np.bincount(table.label, minlength=len(meta.classes))
    return {
        "site": meta.site,
        "slides": n_slides,
        "failed": [asdict(aside) for aside in failed],
        "notes": [{"slide": slide, "note": note} for slide, note in notes.items() if note],
        "copies": copies,
        "bags": len(table),
        "patients": len(set(table.patient.tolist())),
        "patches": n_patches,
        "classes": dict(zip(meta.classes, counts.tolist(), strict=True)),
        "train": int((table.split == "train").sum()),
        "test": int((table.split == "test").sum()),
        "encoder": meta.encoder,
        "store": study.relative(study.mosaic(meta.site)),
    }


def after_mosaics(study: Study, **which: Unpack[Which]) -> list[str]:
    """Return the training command for mosaics; none where no site has labels."""
    pipeline, sites = asked_for(study, **which)
    only_here = any(one.startswith("train.data=") for one in which.get("overrides", ()))
    told = "" if pipeline.train.data == "mosaics" and not only_here else " --set train.data=mosaics"
    named = f" --pipeline {name}" if (name := which.get("pipeline_name")) else ""
    return [] if all(one.receives for one in sites) else [f"wsi-fl train{told}{named}"]


def first_reason(failed: Sequence[SetAside]) -> str:
    """Return the first failure of a site without results."""
    return f"the first: {failed[0].slide}: {failed[0].reason}" if failed else "the first: it has no slides"


def mosaic_lines(document: Bags) -> Lines:
    """Yield bags by class and split of every site, excluded slides, and the next command."""
    rows: Sequence[Mapping[str, Any]] = document["sites"]
    names = dict.fromkeys(name for row in rows for name in row["classes"])
    classes = [[name, *(row["classes"].get(name, 0) for row in rows)] for name in names]
    splits = [[key, *(row[key] for row in rows)] for key in ("train", "test", "patches")]
    yield summed("mosaics", rows, [*classes, None, *splits])
    yield from aside_lines(rows, "slide")
    yield from copies_lines(document)
    yield from speed_lines(document.get("speed", ()))
    stores = ", ".join(row["store"] for row in rows)
    slides, patients = (sum(row[key] for row in rows) for key in ("bags", "patients"))
    ready = f"mosaics ready: {slides} slides of {patients} patients ({stores}; {rows[0]['encoder']})"
    yield Line("; next: ".join([ready, *document["next"]]))


def summed(title: str, rows: Sequence[Any], lines: Iterable[list[Any] | None]) -> Table:
    """Return a table of lines of a name and a number for each site, with a column of sums."""
    summed = [line and [*line, sum(line[1:])] for line in lines]
    return by_site(title, "", [*(row["site"] for row in rows), "sum"], summed)


def copies_lines(document: Mapping[str, Any]) -> Lines:
    """Yield a line for each scan present several times, within a site and across sites."""
    for row in document["sites"]:
        yield from (Line(f"  {row['site']}: {line}", "bold yellow") for line in row.get("copies", ()))
    yield from (Line(f"  {line}", "bold yellow") for line in document.get("copies", ()))


def aside_lines(rows: Sequence[Any], unit: str) -> Lines:
    """Yield excluded slides, notes on others, and sites without training data."""
    for row in rows:
        aside = [
            f"{one['slide']}{'' if ' patches excluded' in one['reason'] else ' excluded'}: {one['reason']}"
            for one in row["failed"]
        ]
        notes = [f"{one['slide']}: {one['note']}" for one in row.get("notes", ())]
        for said, more in ((aside, "excluded; --json names all"), (notes, "such notes; --json has all")):
            rest = [f"and {len(said) - _NAMED} more {more}"] if len(said) > _NAMED else []
            yield from (Line(f"  {row['site']}: {line}", "yellow") for line in [*said[:_NAMED], *rest])
        if not row["train"]:
            nothing = f"has no training {unit}, so nothing can be trained on it"
            yield Line(f"  {row['site']}: {nothing}", "bold yellow")
