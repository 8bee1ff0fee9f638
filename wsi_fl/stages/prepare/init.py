"""`wsi-fl init`: create a study folder, empty or from an archive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import tomli_w

from wsi_fl.slides.layouts import LAYOUTS, ArchiveSite, Sources, describe, detect, list_site
from wsi_fl.slides.patching.copies import Scan, describe_copies
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.folder import Study, shipped
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import dump_toml, validated
from wsi_fl.system.files import marks_of, write_text
from wsi_fl.system.names import drop_companions
from wsi_fl.types import SlideRecord, UsageError

_PIPELINES = {"tcga": "tcga_subtypes"}
"""Layout → default pipeline; elsewhere that of the paper."""
_PAPER, _START = "camelyon17", "camelyon17_pretrained"
_BUDGET, _DELTA = 3.0, 1e-5
"""The budget in a new site file of a real hospital, which may change both values before its first run."""


@dataclass(frozen=True)
class Tables:
    """Options of a TCGA archive: the meaning of a site, and tables from outside the archive.

    Attributes:
        group_by: "institution" or "tss".
        clinical: the table of diagnoses.
        codes: the table of source sites.
        columns: how the clinical table's columns are called, as KEY=NAME.
    """

    group_by: str | None = None
    clinical: Path | None = None
    codes: Path | None = None
    columns: Sequence[str] = ()


@dataclass(frozen=True)
class _Found:
    """The contents of an archive."""

    layout: str
    sites: list[ArchiveSite]
    columns: Mapping[str, str]
    subtypes: Mapping[str, Sequence[str]]
    notes: list[str]


class _Begun(TypedDict):
    """The document of `wsi-fl init`; diagnoses by tumour type and notes where an archive gave some."""

    study: str
    layout: str | None
    pipelines: list[str]
    sites: list[dict[str, object]]
    subtypes: NotRequired[Mapping[str, Sequence[str]]]
    notes: NotRequired[list[str]]


def init(
    folder: Path,
    *,
    archive: Path | None = None,
    names: Sequence[str] = (),
    layout: str | None = None,
    real: bool = False,
    pipeline: str | None = None,
    tables: Tables | None = None,
) -> _Begun:
    """Write `pipelines/` and, from an archive, `sites/*.toml`; existing files are kept.

    Args:
        archive: folder of slides; its layout is recognised unless `layout` names it.
        names: of sites without an archive, for imported features or site files edited later.
        real: whether the sites are real hospitals, whose patches no other site may read.
        pipeline: the shipped pipeline of the study; by default the one for the archive's layout, or all.
        tables: options of a TCGA archive.
    """
    if layout is not None and layout not in LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    if archive is None and (layout is not None or tables not in (None, Tables())):
        raise UsageError("--layout and options of archives go with --from ARCHIVE")
    if archive is None and not names and real:
        raise UsageError("--real goes with --from ARCHIVE or --site NAME")
    if archive is not None and names:
        raise UsageError("--from ARCHIVE finds its sites; --site NAME is for those without an archive")
    written = [name for name in ("sites", "pipelines") if drop_companions((folder / name).glob("*"))]
    if "sites" in written or (archive is None and written):
        raise UsageError(f"{folder}: is a study already ({written[0]}/ exists); choose another folder")
    pipelines = {path.stem: path.read_text(encoding="utf-8") for path in shipped("pipelines").glob("*.toml")}
    found = None
    if archive is not None:
        layout = layout or detect(archive)
        pipeline = pipeline or _PIPELINES.get(layout, _PAPER)
    if pipeline is not None and pipeline not in pipelines:
        raise UsageError(f"unknown pipeline {pipeline!r}; shipped: {', '.join(sorted(pipelines))}")
    if archive is not None and layout is not None and pipeline is not None:
        mosaics = Study(folder).pipeline(pipeline).train.data == "mosaics"
        found = _find(archive, layout, tables or Tables(), labelled=mosaics)
        sites = {site.name: _site_file(site, found, real) for site in found.sites}
        subtypes = "\n" + tomli_w.dumps({"subtypes": found.subtypes}) if found.subtypes else ""
        pipelines = {pipeline: pipelines[pipeline] + subtypes}
    else:
        sites = {name: _text_of({"name": name, "real": real}, f"--site {name!r}", "import") for name in names}
        pipelines = pipelines if pipeline is None else {pipeline: pipelines[pipeline]}
    _write(folder, pipelines, sites)
    slides = {site.name: site.n_slides for site in found.sites} if found else dict.fromkeys(names, 0)
    document: _Begun = {
        "study": str(folder),
        "layout": layout,
        "pipelines": [path.stem for path in drop_companions((folder / "pipelines").glob("*.toml"))],
        "sites": [{"site": name, "slides": n} for name, n in slides.items()],
    }
    if found is not None and (found.subtypes or found.notes):
        document |= {"subtypes": found.subtypes, "notes": found.notes}
    return document


def _write(folder: Path, pipelines: Mapping[str, str], sites: Mapping[str, str]) -> None:
    unfinished = folder / "sites.unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    for name, text in sorted(pipelines.items()):
        target = folder / "pipelines" / f"{name}.toml"
        if not target.exists():
            write_text(target, text)
    for name, text in sites.items():
        write_text(unfinished / f"{name}.toml", text)
    unfinished.rename(folder / "sites")  # a folder with sites/ is a whole study


def _find(archive: Path, layout: str, tables: Tables, *, labelled: bool) -> _Found:
    """Return the sites of an archive; with labels of whole slides only the sites with diagnoses, and these."""
    found = describe(archive, layout, group_by=tables.group_by, clinical=tables.clinical, codes=tables.codes)
    notes = []
    if unknown := sorted(code for site in found for code in site.unknown_codes):
        notes.append(
            f"not in the built-in table of source sites: {', '.join(unknown)}; each is a site of its own, named by its "
            "code; the GDC's tissueSourceSite.tsv in the archive, or as --codes FILE, merges them by institution"
        )
    columns = _columns(tables.columns)
    sources = {site.name: _sources_of(site, columns) for site in found}
    notes += _copies(layout, sources.values())
    if not labelled:
        return _Found(layout, found, columns, {}, notes)
    kept: list[ArchiveSite] = []
    records: list[SlideRecord] = []
    for site in found:
        usable, aside = list_site(layout, sources[site.name])
        usable = [record for record in usable if record.diagnosis]
        records += usable
        if usable:
            kept.append(site)
        else:
            why = f"; the first: {aside[0].slide}: {aside[0].reason}" if aside else ""
            notes.append(f"{site.name} is left out: none of its slides has a diagnosis{why}")
    if not kept:
        raise UsageError(f"{archive}: {notes[-1]}")
    # sorted, so that all sites agree on classes
    pairs = sorted({(record.tumor_type, record.diagnosis) for record in records})
    subtypes = {kind: [diagnosis for other, diagnosis in pairs if other == kind] for kind, _ in pairs}
    return _Found(layout, kept, columns, subtypes, notes)


def _sources_of(site: ArchiveSite, columns: Mapping[str, str]) -> Sources:
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


def _copies(layout: str, sources: Iterable[Sources]) -> list[str]:
    """Return a line for each slide file present several times; sites with invalid tables are skipped."""
    records: list[SlideRecord] = []
    for one in sources:
        with suppress(UsageError):
            records += list_site(layout, one)[0]
    marks = marks_of(record.path for record in records)
    return describe_copies(
        Scan(one.site, one.slide, one.patient, one.split or "", frozenset({marks[one.path]}))
        for one in records
        if one.path in marks
    )


def _columns(pairs: Sequence[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for pair in pairs:
        key, equals, name = (part.strip() for part in pair.partition("="))
        if not (key and equals and name):
            raise UsageError(
                f"--column {pair!r}: write it as KEY=NAME, for example diagnosis=primary_diagnosis"
            )
        columns[key] = name
    checked = validated(SiteFile, {"name": "site", "columns": columns}, "--column").columns
    return {str(key): name for key, name in checked.items()}


def _site_file(found: ArchiveSite, archive: _Found, real: bool) -> str:
    """Return the text of a site file, validated by its own model."""
    values = {
        "name": found.name,
        "real": real,
        "layout": archive.layout,
        "slides": _plain(found.slides),
        "annotations": found.annotations,
        "labels": found.labels,
        "columns": dict(archive.columns),
    }
    if archive.layout == "tcga":
        values |= {"manifest": _plain(found.manifests) or None, "slide_types": ["DX"]}
    return _text_of(values, f"site {found.name!r} of the archive", _next(archive.subtypes))


def _text_of(values: dict[str, object], what: str, command: str) -> str:
    note = "simulated: other sites' evaluation may read its test patches"
    if values["real"]:
        values |= {"max_epsilon": _BUDGET, "delta": _DELTA}
        note = "a real hospital: max_epsilon and delta are its budget, for good"
    site = validated(SiteFile, values, what)
    first = f"# wsi-fl {command} --site {site.name}    ({note})"
    return dump_toml(site.model_copy(update={"allow": None}), first)


def _plain(patterns: Sequence[str]) -> str | list[str]:
    return patterns[0] if len(patterns) == 1 else list(patterns)


def _next(subtypes: Mapping[str, Sequence[str]]) -> str:
    """Return the command after `wsi-fl init`."""
    return "mosaic" if subtypes else "tile"


def init_lines(document: _Begun) -> Lines:
    for row in document["sites"]:
        yield Line(
            f"  sites/{row['site']}.toml" + (f": {row['slides']} slides" if document["layout"] else "")
        )
    for kind, diagnoses in document.get("subtypes", {}).items():
        yield Line(f"  {kind or 'tumour type unknown'}: {'; '.join(diagnoses)}")
    for note in document.get("notes", []):
        yield Line(f"  {note}", "yellow")
    yield Line(f"  pipelines/: {', '.join(document['pipelines'])}")
    if document["pipelines"] == [_PAPER]:
        yield Line(
            f"  {_PAPER} repeats the paper, from random weights; --pipeline {_START} starts from published weights "
            "and guarantees ε: a hospital should begin with it"
        )
    if document["sites"] and document["layout"] is None:
        yield Line(
            f"study ready; next: cd {document['study']} && wsi-fl import --site {document['sites'][0]['site']} …"
        )
    elif document["sites"]:
        command = _next(document.get("subtypes", {}))
        yield Line(f"study ready; next: cd {document['study']} && wsi-fl {command} --all")
    else:
        yield Line(
            f"study ready; write a site file for each hospital in {document['study']}/sites, then wsi-fl tile --all; "
            "labelled images are divided by wsi-fl partition"
        )
