"""`wsi-fl init`: create a study folder, empty or from an archive."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import tomli_w

from wsi_fl.slides.layouts import LAYOUTS, ArchiveSite, Sources, detect_layout, list_site, list_sites, list_test_slides
from wsi_fl.slides.layouts.idc import TABLE, describe_series, lacks_table
from wsi_fl.slides.patching.scan_copies import Scan, describe_copies
from wsi_fl.stages.prepare.init_features import LABEL_TABLE, ArchiveTables, has_features, survey_features
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.study.folder import Study, find_shipped_folder
from wsi_fl.study.pipeline import NO_CHOICE, has_choice
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import dump_toml, toml_value, validate_model
from wsi_fl.system.file_names import drop_companions
from wsi_fl.system.files import duplicate_marks, write_text
from wsi_fl.types import SlideRecord, UsageError, natural_key

_LAYOUT_PIPELINES = {"tcga": "tcga_subtypes"}
"""Layout → default pipeline; elsewhere that of the paper."""
_PAPER, _START, _FEATURES = "camelyon17", "camelyon17_pretrained", "features"
_CENTRES = ("C1", "C2", "C3", "C4")
_INSTITUTIONS = ("tcga-pittsburgh", "tcga-indivumed", "tcga-asterand", "tcga-mskcc")
_STUDY_SITES = {
    **dict.fromkeys((_PAPER, "camelyon17_small"), _CENTRES),
    **dict.fromkeys(("tcga_subtypes", "tcga_small"), _INSTITUTIONS),
}
"""Pipeline of a published study → its sites, which a larger archive is narrowed to. Which four centres of Camelyon17
the paper has, it does not say."""
_BUDGET, _DELTA = 3.0, 1e-5
"""The budget in a new site file of a real hospital, which may change both values before its first run."""


@dataclass(frozen=True)
class _ArchiveContents:
    """The contents of an archive."""

    layout: str
    sites: list[ArchiveSite]
    columns: Mapping[str, str]
    subtypes: Mapping[str, Sequence[str]]
    notes: list[str]
    table: str = ""
    """Text of the study's table of slides, where the archive has none."""


class _InitDocument(TypedDict):
    """The document of `wsi-fl init`; diagnoses by tumour type and notes where an archive gave some."""

    study: str
    layout: str | None
    pipelines: list[str]
    sites: list[dict[str, object]]
    subtypes: NotRequired[Mapping[str, Sequence[str]]]
    notes: NotRequired[list[str]]
    next: NotRequired[str]


def init_study(
    folder: Path,
    *,
    archive: Path | None = None,
    names: Sequence[str] = (),
    layout: str | None = None,
    real: bool = False,
    pipeline: str | None = None,
    tables: ArchiveTables | None = None,
) -> _InitDocument:
    """Write `pipelines/` and, from an archive, `sites/*.toml`; existing files are kept.

    Args:
        archive: folder of slides, or of TCGA's features; its layout is recognised unless `layout` names it.
        names: of sites without an archive, for imported features or site files edited later.
        real: whether the sites are real hospitals, whose patches no other site may read.
        pipeline: the shipped pipeline of the study; by default the one for the archive's layout, or all.
        tables: options of a TCGA archive.
    """
    if layout is not None and layout not in LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    if archive is None and (layout is not None or tables not in (None, ArchiveTables())):
        raise UsageError("--layout and options of archives go with --from ARCHIVE")
    if archive is None and not names and real:
        raise UsageError("--real goes with --from ARCHIVE or --site NAME")
    if archive is not None and names:
        raise UsageError("--from ARCHIVE finds its sites; --site NAME is for those without an archive")
    existing = [name for name in ("sites", "pipelines") if drop_companions((folder / name).glob("*"))]
    if "sites" in existing or (archive is None and existing):
        raise UsageError(f"{folder}: is a study already ({existing[0]}/ exists); choose another folder")
    pipelines = {
        path.stem: path.read_text(encoding="utf-8") for path in find_shipped_folder("pipelines").glob("*.toml")
    }
    contents, tables = None, tables or ArchiveTables()
    from_features = archive is not None and layout in (None, "tcga") and has_features(archive)
    if archive is not None and not from_features:
        layout = layout or detect_layout(archive)
        pipeline = pipeline or _LAYOUT_PIPELINES.get(layout, _PAPER)
    if pipeline is not None and pipeline not in pipelines:
        raise UsageError(f"unknown pipeline {pipeline!r}; shipped: {', '.join(sorted(pipelines))}")
    if archive is not None and from_features:
        return _init_features(folder, archive, tables, pipelines[pipeline or _FEATURES], real=real)
    if tables.targets or tables.min_patients or len(tables.clinical) > 1:
        raise UsageError("--target, --min-patients and several --clinical are for features: TCGA-….h5 in --from")
    if archive is not None and layout is not None and pipeline is not None:
        mosaics = Study(folder).load_pipeline(pipeline).train.data == "mosaics"
        contents = _survey_archive(archive, layout, tables, pipeline if mosaics else None)
        sites = {site.name: _render_site_file(site, contents, real) for site in contents.sites}
        pipelines = {pipeline: _adapt_pipeline(pipeline, pipelines[pipeline], contents)}
    else:
        sites = {name: _render_settings({"name": name, "real": real}, f"--site {name!r}", "import") for name in names}
        pipelines = pipelines if pipeline is None else {pipeline: pipelines[pipeline]}
    _write_study(folder, pipelines, sites, {TABLE: contents.table} if contents and contents.table else {})
    slides = {site.name: site.n_slides for site in contents.sites} if contents else dict.fromkeys(names, 0)
    document: _InitDocument = {
        "study": str(folder),
        "layout": layout,
        "pipelines": [path.stem for path in drop_companions((folder / "pipelines").glob("*.toml"))],
        "sites": [{"site": name, "slides": n} for name, n in slides.items()],
    }
    if contents is not None and (contents.subtypes or contents.notes):
        document |= {"subtypes": contents.subtypes, "notes": contents.notes}
    return document


def _init_features(folder: Path, archive: Path, tables: ArchiveTables, pipeline: str, *, real: bool) -> _InitDocument:
    """Write a study of TCGA's features: a site for each institution, the table of labels, a pipeline per target."""
    if real or tables.columns:
        raise UsageError("--real and --column are for slides; sites of public features are simulated")
    if not tables.clinical or not tables.targets:
        raise UsageError(f"{archive}: has features; name the clinical table with --clinical FILE, and --target COLUMN")
    federation = survey_features(archive, tables, pipeline)
    values = {"real": False, "clinical": LABEL_TABLE}
    command = f"import --format trident --from {archive} --labels {LABEL_TABLE}"
    texts = {site: _render_settings({"name": site, **values}, site, command) for site in federation.sites}
    _write_study(folder, federation.pipelines, texts, {LABEL_TABLE: federation.label_table})
    name = tables.targets[0].partition(":")[0]
    options = shlex.join(["--labels", LABEL_TABLE, "--hospitals", "site", "--target", name])
    return {
        "study": str(folder),
        "layout": "tcga",
        "pipelines": [*federation.pipelines],
        "sites": [{"site": site, "slides": m, "patients": n} for site, (n, m) in federation.sites.items()],
        "notes": federation.notes,
        "next": f"wsi-fl bench {shlex.quote(str(archive.resolve()))} {options}",
    }


def _adapt_pipeline(name: str, text: str, contents: _ArchiveContents) -> str:
    """Return the text of a shipped pipeline with the sites of its study, if the archive has more, and the subtypes."""
    names = [site.name for site in contents.sites]
    study_sites = _select_sites(name, names)
    if left_out_sites := set(names) - set(study_sites):
        text = text.replace("\n[", f"\nsites = {toml_value(list(study_sites))}\n\n[", 1)
        left_out = ", ".join(sorted(left_out_sites, key=natural_key))
        contents.notes.append(
            f"pipelines/{name}.toml: sites has the four of the published study, without {left_out}; delete it for all"
        )
    return text + ("\n" + tomli_w.dumps({"subtypes": contents.subtypes}) if contents.subtypes else "")


def _write_study(
    folder: Path, pipelines: Mapping[str, str], sites: Mapping[str, str], tables: Mapping[str, str]
) -> None:
    unfinished = folder / "sites.unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    texts = {folder / name: text for name, text in tables.items()}
    texts |= {folder / "pipelines" / f"{name}.toml": text for name, text in sorted(pipelines.items())}
    for path, text in texts.items():
        if not path.exists():
            write_text(path, text)
    for name, text in sites.items():
        write_text(unfinished / f"{name}.toml", text)
    unfinished.rename(folder / "sites")  # a folder with sites/ is a whole study


def _select_sites(pipeline: str, names: Sequence[str]) -> Sequence[str]:
    """Return the sites of a published study where an archive has more, else all."""
    study_sites = _STUDY_SITES.get(pipeline, ())
    return study_sites if study_sites and set(study_sites) < set(names) else names


def _survey_archive(archive: Path, layout: str, tables: ArchiveTables, pipeline: str | None) -> _ArchiveContents:
    """Return the sites of an archive.

    For a pipeline that needs labels of whole slides these are only the sites with diagnoses, and there are the
    diagnoses of those that the pipeline selects.
    """
    if tables == ArchiveTables() and lacks_table(archive, layout):
        return _survey_series(archive.resolve(), pipeline)
    clinical = next(iter(tables.clinical), None)
    archive_sites = list_sites(archive, layout, group_by=tables.group_by, clinical=clinical, codes=tables.codes)
    notes = []
    if unknown := sorted(code for site in archive_sites for code in site.unknown_codes):
        notes.append(
            f"not in the built-in table of source sites: {', '.join(unknown)}; each is a site of its own, named by its "
            "code; the GDC's tissueSourceSite.tsv in the archive, or as --codes FILE, merges them by institution"
        )
    if layout.startswith("camelyon") and (tests := list_test_slides(archive)):
        slides = "1 test slide" if len(tests) == 1 else f"{len(tests)} test slides"
        names = tests[0] if len(tests) == 1 else f"{tests[0]} to {tests[-1]}"
        notes.append(f"{slides} ({names}) in no site: their labels or centres are not public")
    columns = _parse_columns(tables.columns)
    sources = {site.name: _build_sources(site, columns) for site in archive_sites}
    notes += _describe_copies(layout, sources.values())
    if pipeline is None:
        return _ArchiveContents(layout, archive_sites, columns, {}, notes)
    labelled_sites: list[ArchiveSite] = []
    site_records: dict[str, list[SlideRecord]] = {}
    for site in archive_sites:
        usable, excluded = list_site(layout, sources[site.name])
        usable = [record for record in usable if record.diagnosis]
        if usable:
            labelled_sites.append(site)
            site_records[site.name] = usable
        else:
            first_reason = f"; the first: {excluded[0].slide}: {excluded[0].reason}" if excluded else ""
            notes.append(f"{site.name} is left out: none of its slides has a diagnosis{first_reason}")
    if not labelled_sites:
        raise UsageError(f"{archive}: {notes[-1]}")
    records = [record for name in _select_sites(pipeline, [*site_records]) for record in site_records[name]]
    # sorted, so that all sites agree on classes
    pairs = sorted({(record.tumor_type, record.diagnosis) for record in records})
    subtypes = {kind: [diagnosis for other, diagnosis in pairs if other == kind] for kind, _ in pairs}
    if not has_choice(subtypes):
        kinds = "; ".join(f"{kind or 'tumour type unknown'}: {names[0]}" for kind, names in subtypes.items())
        raise UsageError(f"{archive}: {NO_CHOICE} ({kinds}); other types are a column: --column tumor_type=NAME")
    notes += _describe_unscored(records, subtypes)
    return _ArchiveContents(layout, labelled_sites, columns, subtypes, notes)


def _survey_series(archive: Path, pipeline: str | None) -> _ArchiveContents:
    """Return the sites of series without a table of slides, and that table without labels."""
    if pipeline is not None:
        raise UsageError(
            f"{archive}: {pipeline} needs diagnoses; make a study with --pipeline worth_joining, copy its slides.csv "
            f"to {archive}, fill in the columns label and diagnosis there, and repeat this command"
        )
    sites, table, notes = describe_series(archive)
    notes.append("slides.csv: made from the headers of their files; fill in its column label before the next command")
    return _ArchiveContents("generic", sites, {}, {}, notes, table)


def _describe_unscored(records: Sequence[SlideRecord], subtypes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line on the slides whose tumour type has one diagnosis; none without such slides."""
    kinds = [kind for kind, diagnoses in subtypes.items() if len(diagnoses) == 1]
    n = sum(record.tumor_type in kinds for record in records)
    if not n:
        return []
    names = ", ".join(f"{kind or 'tumour type unknown'} ({subtypes[kind][0]})" for kind in kinds)
    return [f"{n} of {len(records)} slides are trained on and not scored: one diagnosis for {names}, nothing to choose"]


def _build_sources(site: ArchiveSite, columns: Mapping[str, str]) -> Sources:
    """Return the sources of a site as its site file will have them."""
    return Sources(
        site=site.name,
        label=site.name,
        slides=site.slides,
        annotations=Path(site.annotations) if site.annotations else None,
        labels=Path(site.labels) if site.labels else None,
        manifests=site.manifests,
        columns=columns,
    )


def _describe_copies(layout: str, sources: Iterable[Sources]) -> list[str]:
    """Return a line for each slide file present several times; sites with invalid tables are skipped."""
    records: list[SlideRecord] = []
    for site_sources in sources:
        with suppress(UsageError):
            records += list_site(layout, site_sources)[0]
    marks = duplicate_marks(record.path for record in records)
    return describe_copies(
        Scan(record.site, record.slide, record.patient, record.split or "", frozenset({marks[record.path]}))
        for record in records
        if record.path in marks
    )


def _parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for pair in pairs:
        key, equals, name = (part.strip() for part in pair.partition("="))
        if not (key and equals and name):
            raise UsageError(f"--column {pair!r}: write it as KEY=NAME, for example diagnosis=primary_diagnosis")
        columns[key] = name
    checked = validate_model(SiteFile, {"name": "site", "columns": columns}, "--column").columns
    return {str(key): name for key, name in checked.items()}


def _render_site_file(site: ArchiveSite, contents: _ArchiveContents, real: bool) -> str:
    """Return the text of a site file, validated by its own model."""
    values = {
        "name": site.name,
        "real": real,
        "layout": contents.layout,
        "slides": _unwrap_single(site.slides),
        "annotations": site.annotations,
        "labels": site.labels,
        "columns": dict(contents.columns),
    }
    if contents.layout == "tcga":
        values |= {"manifest": _unwrap_single(site.manifests) or None, "slide_types": ["DX"]}
    return _render_settings(values, f"site {site.name!r} of the archive", _next_command(contents.subtypes))


def _render_settings(values: dict[str, object], subject: str, command: str) -> str:
    note = "simulated: other sites' evaluation may read its test patches"
    if values["real"]:
        values |= {"max_epsilon": _BUDGET, "delta": _DELTA}
        note = "a real hospital: max_epsilon and delta are its budget, for good"
    site = validate_model(SiteFile, values, subject)
    first = f"# wsi-fl {command} --site {site.name}    ({note})"
    return dump_toml(site.model_copy(update={"allow": None}), first)


def _unwrap_single(patterns: Sequence[str]) -> str | list[str]:
    return patterns[0] if len(patterns) == 1 else list(patterns)


def _next_command(subtypes: Mapping[str, Sequence[str]]) -> str:
    """Return the command after `wsi-fl init`."""
    return "mosaic" if subtypes else "tile"


def render_init_lines(document: _InitDocument) -> Lines:
    for row in document["sites"]:
        yield TextLine(f"  sites/{row['site']}.toml" + (f": {row['slides']} slides" if document["layout"] else ""))
    for kind, diagnoses in document.get("subtypes", {}).items():
        yield TextLine(f"  {kind or 'tumour type unknown'}: {'; '.join(diagnoses)}")
    for note in document.get("notes", []):
        yield TextLine(f"  {note}", "yellow")
    yield TextLine(f"  pipelines/: {', '.join(document['pipelines'])}")
    if document["pipelines"] == [_PAPER]:
        yield TextLine(
            f"  {_PAPER} repeats the paper, from random weights; --pipeline {_START} starts from published weights "
            "and guarantees ε: a hospital should begin with it"
        )
    enter = f"study ready; next: cd {shlex.quote(document['study'])} && "
    if "next" in document:
        yield TextLine(f"{enter}{document['next']}")
    elif document["sites"] and document["layout"] is None:
        yield TextLine(f"{enter}wsi-fl import --site {document['sites'][0]['site']} …")
    elif document["sites"]:
        command = _next_command(document.get("subtypes", {}))
        yield TextLine(f"{enter}wsi-fl {command} --all")
    else:
        yield TextLine(
            f"study ready; write a site file for each hospital in {document['study']}/sites, then wsi-fl tile --all; "
            "labelled images are divided by wsi-fl partition"
        )
