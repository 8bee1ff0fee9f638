"""The slides of a site: their files, labels, outcomes in a job, and summaries."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, TypedDict, TypeVar, Unpack

import numpy as np

from wsi_fl.federation.methods import DEFAULT_METHOD, LOCAL_METHOD, METHODS
from wsi_fl.slides.layouts import Sources, list_site, read_site
from wsi_fl.slides.patching.slide_survey import digest_mask
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable, build_site_table, render_speed_lines
from wsi_fl.stages.runtime.hints import join_commands, list_release_commands, next_command, pipeline_method
from wsi_fl.stages.runtime.rank_job import RankJob
from wsi_fl.stages.runtime.slide_work import SlideWork, Watch, describe_parts
from wsi_fl.stages.site.slide_files import resolve_patterns
from wsi_fl.stages.site.target_labels import Subtypes, list_classes
from wsi_fl.stores.bag_store import BagMeta
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import UNLABELLED, BagTable, ExcludedSlide, SlideRecord, UsageError, WsiFlError

_T = TypeVar("_T")
_MAX_NAMED_SLIDES = 20
"""Slides of a site listed by name; the others are counted."""


def resolve_sources(study: Study, site: SiteFile) -> Sources:
    """Return the paths of a site file, resolved against the study."""
    if site.slides is None:
        raise UsageError(
            f"sites/{site.name}.toml: slides is missing; a site made by `wsi-fl partition` has none to tile"
        )

    def resolve_path(text: str | None) -> Path | None:
        return study.resolve(text) if text is not None else None

    return Sources(
        site=site.name,
        label=f"sites/{site.name}.toml",
        slides=resolve_patterns(study, site.slides),
        annotations=resolve_path(site.annotations),
        labels=resolve_path(site.labels),
        split=resolve_path(site.split),
        mpp_override=site.mpp_override,
        manifests=resolve_patterns(study, site.manifest),
        slide_types=tuple(site.slide_types or ("DX",)),
        has_labels=not site.is_receiver,
        columns={str(key): name for key, name in site.columns.items()},
    )


def list_table_slides(study: Study, site: SiteFile) -> list[SlideRecord]:
    """Return the slides of a site as its table has them; [] where its archive or table is not here."""
    try:
        return list_site(site.layout, resolve_sources(study, site))[0]
    except UsageError:
        return []


@dataclass(frozen=True)
class SlideList:
    """A site and its slides: usable records, and the excluded slides with reasons."""

    study: Study
    site: SiteFile
    pipeline: Pipeline
    records: tuple[SlideRecord, ...]
    excluded: tuple[ExcludedSlide, ...]


class Scope(TypedDict, total=False):
    """The sites and settings of a command.

    Attributes:
        site: None for every site of the pipeline.
        pipeline_name: None for the study's only one.
        overrides: `KEY=VALUE` over the pipeline.
    """

    site: Required[str | None]
    pipeline_name: str | None
    overrides: Sequence[str]


def select_sites(study: Study, **scope: Unpack[Scope]) -> tuple[Pipeline, list[SiteFile]]:
    """Return the pipeline and the sites of a command."""
    name, site = study.pipeline_name(scope.get("pipeline_name")), scope["site"]
    pipeline = study.load_pipeline(name, scope.get("overrides", ()))
    return pipeline, study.load_sites(pipeline) if site is None else [study.load_site(site)]


def list_slides(study: Study, job: RankJob | None = None, **scope: Unpack[Scope]) -> list[SlideList]:
    """Return the slides of the selected sites; all paths are checked before any archive is read.

    The first rank of a job prints how many rows of each table belong to the site.
    """
    pipeline, sites = select_sites(study, **scope)
    slide_lists = []
    for site, sources in [(site_file, resolve_sources(study, site_file)) for site_file in sites]:
        lines: list[str] = []
        records, excluded = read_site(site.layout, replace(sources, tell=lines.append))
        slide_lists.append(SlideList(study, site, pipeline, tuple(records), tuple(excluded)))
        if job is not None:
            for line in lines:
                job.print_message(f"  {site.name}: {line}")
    return slide_lists


class SlideQuality(TypedDict):
    """Of one slide: good patches, excluded patches by artifact, the method of tissue detection, and the tissue area
    relative to detection by saturation."""

    good: int
    aside: dict[str, int]
    tissue_by: str
    tissue_gain: float


@dataclass(frozen=True)
class Outcome:
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
    encoded: int = 0
    spent: dict[str, float] = field(default_factory=dict)
    content: str = ""
    quality: SlideQuality | None = None


def describe_settings(slides: SlideList, *sections: str) -> list[object]:
    """Return what the stores of a site depend on (JSON): sections of the pipeline, the site, its slides' files."""
    study, site = slides.study, slides.site
    settings = slides.pipeline.model_dump(mode="json")
    records = [
        asdict(record)
        | {
            "path": describe_slide(study, slides.pipeline, record),
            "annotation": record.annotation and describe_file(study, record.annotation),
        }
        for record in slides.records
    ]
    excluded = [asdict(slide) for slide in slides.excluded]
    return [{name: settings[name] for name in sections}, site.annotations_origin, site.role, records, excluded]


def describe_slide(study: Study, pipeline: Pipeline, record: SlideRecord) -> list[object]:
    """Return what is decisive for a slide (JSON): path, size and time of its files, and the digest of its mask."""
    path, mask = record.path, ""
    folder = path.with_suffix("") if path.suffix.lower() == ".mrxs" else path
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if pipeline.tissue.mask_folder:
        with suppress(OSError, WsiFlError):  # a slide without a mask is excluded later
            mask = digest_mask(study.resolve(pipeline.tissue.mask_folder), record.slide)
    return [[describe_file(study, file) for file in (path, *files)], mask]


def describe_file(study: Study, path: Path) -> list[object]:
    """Return a file's path in the study, size and time of change; only the path where there is none."""
    try:
        status = path.stat()
    except OSError:
        return [study.relative_path(path)]
    return [study.relative_path(path), status.st_size, status.st_mtime_ns]


def share_slides(
    work: SlideWork,
    phase: str,
    items: Mapping[str, _T],
    do_items: Callable[[Iterator[_T]], Iterable[Outcome]],
    watch: Watch,
    *,
    in_parts: bool = False,
) -> list[Outcome]:
    """Share a site's slides with other jobs; return the outcomes of done ones in order (`SlideWork.share_items`)."""

    def write_documents(free_items: Iterator[_T]) -> Generator[dict[str, Any], None, None]:
        yield from map(asdict, do_items(free_items))

    documents = work.share_items(phase, items, write_documents, watch, in_parts=in_parts)
    return [Outcome(**document) for document in documents.values()]


class PartRow(TypedDict):
    """A site's row in the document of a part of an array that did not close the store, since slides are missing."""

    site: str
    part: str
    closed: bool
    done: int
    slides: int
    missing: int
    missing_parts: list[int]


def build_part_row(site: str, work: SlideWork, n_done: int) -> PartRow:
    """Return the row after a phase of so many done slides, by whomever."""
    return {
        "site": site,
        "part": str(work.job.part),
        "closed": False,
        "done": len(work.job_items),
        "slides": n_done + work.n_missing,
        "missing": work.n_missing,
        "missing_parts": work.missing_parts,
    }


def render_part_lines(parts: Sequence[PartRow], command: str) -> Lines:
    """Yield what is missing for the store of each site."""
    for row in parts:
        yield TextLine(
            f"  {row['site']}: part {row['part']} is done ({row['done']} slides by this job); {row['missing']} of "
            f"{row['slides']} slides are missing ({describe_parts(row['missing_parts'])}), and the part that does the "
            f"last one, or `wsi-fl {command} --site {row['site']}`, makes the store"
        )


def list_excluded(outcomes: Iterable[Outcome]) -> list[ExcludedSlide]:
    """Return the excluded slides with their reasons."""
    return [ExcludedSlide(outcome.slide, outcome.reason) for outcome in outcomes if outcome.reason]


def store_classes(site: SiteFile, subtypes: Subtypes) -> tuple[str, ...]:
    """Return the classes of a site's store: those of the study, or the one for slides without labels."""
    return UNLABELLED if site.is_receiver else list_classes(subtypes)


def select_labelled(
    records: Sequence[SlideRecord], subtypes: Subtypes, site: SiteFile
) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    """Return the slides with a class of the study, and the excluded others; a site without labels keeps all.

    Raises:
        UsageError: when slides have diagnoses and the study names no subtypes.
    """
    slide = next((record for record in records if record.diagnosis), None)
    if slide and not subtypes and not site.is_receiver:
        kind = slide.tumor_type or "tumor"
        diagnoses = sorted({record.diagnosis for record in records if record.tumor_type == slide.tumor_type} - {""})
        diagnoses += ["OTHER"] * (len(diagnoses) == 1)
        quoted_names = ", ".join(json.dumps(name, ensure_ascii=False) for name in diagnoses)
        raise UsageError(
            f"site {slide.site}: its slides have diagnoses ({slide.slide}: {slide.diagnosis}); name in the pipeline "
            f"those that count, for example subtypes = {{ {json.dumps(kind, ensure_ascii=False)} = [{quoted_names}] }}"
        )
    reasons = ["" if site.is_receiver or not subtypes else _explain_unfit(record, subtypes) for record in records]
    pairs = list(zip(records, reasons, strict=True))
    return [record for record, reason in pairs if not reason], [
        ExcludedSlide(record.slide, reason) for record, reason in pairs if reason
    ]


def build_bag_table(records: Sequence[SlideRecord], subtypes: Subtypes, site: SiteFile) -> BagTable:
    """Return the columns of a store of these slides, in order."""
    classes, has_types = list_classes(subtypes), subtypes or site.is_receiver
    names = [record.diagnosis if subtypes else "tumor" if record.positive else "healthy" for record in records]
    return BagTable(
        np.array([0 if site.is_receiver else classes.index(name) for name in names], np.int64),
        np.array(
            [_find_tumor_type(record, subtypes) if has_types else record.tumor_type for record in records], np.str_
        ),
        np.array([record.slide for record in records], np.str_),
        np.array([record.patient for record in records], np.str_),
        np.array([record.split or "train" for record in records], np.str_),
    )


def _explain_unfit(record: SlideRecord, subtypes: Subtypes) -> str:
    """Return why a slide does not fit into the study; "" when it does."""
    class_names = ", ".join(list_classes(subtypes))
    if not record.diagnosis:
        return f"it has no diagnosis; the study's are {class_names}"
    if record.diagnosis not in list_classes(subtypes):
        hints = {name.casefold(): f"; did you mean {name}?" for name in list_classes(subtypes)}
        hint = hints.get(record.diagnosis.casefold(), "")
        return f"its diagnosis {record.diagnosis} is none of the study's ({class_names}){hint}"
    if record.tumor_type in subtypes and record.diagnosis not in subtypes[record.tumor_type]:
        return f"its diagnosis {record.diagnosis} is none that {record.tumor_type} may have"
    return ""


def _find_tumor_type(record: SlideRecord, subtypes: Subtypes) -> str:
    """Return the archive's tumour type if the study has it, else the only type with the diagnosis, or ""."""
    if record.tumor_type in subtypes:
        return record.tumor_type
    possible = [name for name, diagnoses in subtypes.items() if record.diagnosis in diagnoses]
    return possible[0] if len(possible) == 1 else ""


class BagsRow(TypedDict):
    """A site's row in the document of `features`, `mosaic` and `import`."""

    site: str
    slides: int
    closed: NotRequired[bool]
    done: NotRequired[int]
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


class BagsDocument(TypedDict, total=False):
    """The document of these commands; empty on all ranks but the first."""

    sites: list[BagsRow]
    parts: list[PartRow]
    copies: list[str]
    speed: list[dict[str, object]]
    next: list[str]


def build_mosaic_row(
    study: Study,
    meta: BagMeta,
    table: BagTable,
    *,
    n_patches: int,
    failed: Sequence[ExcludedSlide],
    notes: Mapping[str, str],
    copies: list[str],
    n_slides: int,
) -> BagsRow:
    """Return a site's row of the document of `mosaic` and `import`; empty notes are dropped."""
    counts = np.bincount(table.label, minlength=len(meta.classes))
    return {
        "site": meta.site,
        "slides": n_slides,
        "failed": [asdict(slide) for slide in failed],
        "notes": [{"slide": slide, "note": note} for slide, note in notes.items() if note],
        "copies": copies,
        "bags": len(table),
        "patients": len(set(table.patient.tolist())),
        "patches": n_patches,
        "classes": dict(zip(meta.classes, counts.tolist(), strict=True)),
        "train": int((table.split == "train").sum()),
        "test": int((table.split == "test").sum()),
        "encoder": meta.encoder,
        "store": study.relative_path(study.mosaic_path(meta.site)),
    }


def name_scope(scope: Scope) -> str:
    """Return the option that selects the sites of a scope."""
    return "--all" if scope["site"] is None else f"--site {scope['site']}"


def next_commands(
    study: Study,
    data: Literal["patches", "features", "mosaics"],
    settings: Sequence[str] = (),
    *,
    form: str = "",
    **scope: Unpack[Scope],
) -> list[str]:
    """Return the commands between the stores of a scope and a trained model; none where no site has labels.

    A real hospital releases class statistics where the pipeline's method does, and approves a plan otherwise: a run of
    its own would spend its budget and send nothing.

    Args:
        data: what the stores hold.
        settings: what a pipeline for other data needs, to train on these.
        form: another tool's features, as of `import --format`.
    """
    pipeline, sites = select_sites(study, **scope)
    if all(site.is_receiver for site in sites):
        return []
    pipeline_name, overrides = scope.get("pipeline_name"), scope.get("overrides", ())
    is_made_for = pipeline.train.data == data
    required = [] if is_made_for else [f"train.data={data}", *settings]
    method = pipeline_method(study, pipeline_name) if is_made_for else DEFAULT_METHOD
    real_sites = [site for site in sites if site.real and not site.is_receiver]
    is_only_site = len(study.site_names()) == 1
    if real_sites and method in METHODS and METHODS[method].payload.is_single_release:
        needs_projection = isinstance(pipeline.model.projection, int)
        return list_release_commands(
            name_scope(scope), pipeline_name, overrides, form=form, needs_projection=needs_projection
        )
    if real_sites and is_only_site:  # one site of a federation
        return ["wsi-fl federation approve PLAN --kit KIT"]
    method = LOCAL_METHOD if is_only_site else method
    return [next_command(f"train --method {method}", pipeline_name, overrides, required)]


def list_patch_steps(study: Study, pipeline: Pipeline, **scope: Unpack[Scope]) -> list[str]:
    """Return the commands between stores of patches and a trained model, with the options of this command."""
    options: tuple[str | None, Sequence[str]] = scope.get("pipeline_name"), scope.get("overrides", ())
    features = next_command(f"features {name_scope(scope)}", *options)
    steps = [features] if pipeline.train.data == "features" else []
    return [*steps, *next_commands(study, pipeline.train.data, **scope)]


def first_failure(failed: Sequence[ExcludedSlide]) -> str:
    """Return the first failure of a site without results."""
    return f"the first: {failed[0].slide}: {failed[0].reason}" if failed else "the first: it has no slides"


def render_mosaic_lines(document: BagsDocument) -> Lines:
    """Yield bags by class and split of every site, excluded slides, and the next command."""
    yield from render_part_lines(document.get("parts", ()), "mosaic")
    rows: Sequence[Mapping[str, Any]] = document["sites"]
    if not rows:
        return
    names = dict.fromkeys(name for row in rows for name in row["classes"])
    classes = [[name, *(row["classes"].get(name, 0) for row in rows)] for name in names]
    splits = [[f"{key} slides", *(row[key] for row in rows)] for key in ("train", "test")]
    sums = [[key, *(row[key] for row in rows)] for key in ("patients", "patches")]
    yield build_sum_table("slides by class", rows, [*classes, None, *splits, None, *sums])
    yield from render_excluded_lines(rows, "slide")
    yield from render_copy_lines(document)
    yield from render_speed_lines(document.get("speed", ()))
    stores = ", ".join(row["store"] for row in rows)
    slides, patients = (sum(row[key] for row in rows) for key in ("bags", "patients"))
    ready = f"{slides} slides of {patients} patients ready ({stores}; {rows[0]['encoder']})"
    yield TextLine("; next: ".join(filter(None, (ready, join_commands(document["next"])))))


def build_sum_table(title: str, rows: Sequence[Any], lines: Iterable[list[Any] | None]) -> TextTable:
    """Return a table of lines of a name and a number for each site, with a column of sums."""
    sum_lines = [line and [*line, sum(line[1:])] for line in lines]
    return build_site_table(title, "", [*(row["site"] for row in rows), "sum"], sum_lines)


def render_copy_lines(document: Mapping[str, Any]) -> Lines:
    """Yield a line for each scan present several times, within a site and across sites."""
    for row in document["sites"]:
        yield from (TextLine(f"  {row['site']}: {line}", "bold yellow") for line in row.get("copies", ()))
    yield from (TextLine(f"  {line}", "bold yellow") for line in document.get("copies", ()))


def render_excluded_lines(rows: Sequence[Any], unit: str) -> Lines:
    """Yield excluded slides, notes on others, and sites without training data."""
    for row in rows:
        excluded = [
            f"{slide['slide']}{'' if ' patches excluded' in slide['reason'] else ' excluded'}: {slide['reason']}"
            for slide in row["failed"]
        ]
        notes = [f"{slide['slide']}: {slide['note']}" for slide in row.get("notes", ())]
        for lines, more in ((excluded, "excluded; --json names all"), (notes, "such notes; --json has all")):
            remainder = [f"and {len(lines) - _MAX_NAMED_SLIDES} more {more}"] if len(lines) > _MAX_NAMED_SLIDES else []
            yield from (
                TextLine(f"  {row['site']}: {line}", "yellow") for line in [*lines[:_MAX_NAMED_SLIDES], *remainder]
            )
        if not row["train"]:
            nothing = f"has no training {unit}, so nothing can be trained on it"
            yield TextLine(f"  {row['site']}: {nothing}", "bold yellow")
