"""The generic layout: slides.csv beside slides/."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path

from wsi_fl.slides.layouts.common import (
    ArchiveSite,
    Sources,
    TableRow,
    apply_splits,
    filter_site,
    group_pairs,
    group_sites,
    list_files,
    name_series,
    parse_label,
    read_mpp,
    read_rows,
    read_site_name,
    read_split,
    require_names,
)
from wsi_fl.slides.reading.formats import slide_name
from wsi_fl.slides.reading.formats.dicom_headers import SERIES_FOLDER
from wsi_fl.system.file_names import compose_text, describe_mismatch, file_name_of, find_file
from wsi_fl.types import ExcludedSlide, SlideRecord, Supervision, UsageError


def describe_generic(archive: Path) -> list[ArchiveSite]:
    table = archive / "slides.csv"
    folder = glob.escape(str(archive))
    pattern = f"{folder}/slides/*" if (archive / "slides").is_dir() else f"{folder}/**/SM_*"
    rows = read_rows(table, ("slide", "patient", "site", "label"))
    return group_sites(((read_site_name(row), pattern) for row in rows), None, str(table))


def read_generic(sources: Sources) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    if sources.labels is None:
        raise UsageError(f"{sources.label}: labels is missing; point it at a slides.csv")
    files, table = list_files(sources), sources.labels
    by_name = group_pairs((compose_text(path.name), path) for path in files)
    by_stem = group_pairs((slide_name(path), path) for path in files)
    slides = name_series(by_stem)
    rows = read_rows(table, ("slide", "patient", "site", *["label"] * sources.has_labels))
    site_rows = filter_site(rows, sources.site)
    labels = [row["label"] for row in site_rows] if sources.has_labels else []

    def read_row(row: TableRow) -> SlideRecord | ExcludedSlide:
        require_names(row, "slide", "patient")
        if sources.has_labels and not row.read_value("label"):
            return ExcludedSlide(row["slide"], f"has no label ({row.where})")
        name = file_name_of(row["slide"])
        matches = by_name.get(row["slide"]) or by_name.get(name) or by_stem.get(name)
        if series := row.read_value("series"):
            matches = by_name.get(f"SM_{series}", matches)
        if matches is None:  # a suffix in another case, ".SVS"
            matches = [
                path for path in by_stem.get(Path(name).stem, ()) if path.suffix.lower() == Path(name).suffix.lower()
            ]
        if len(matches) == 1:
            return _generic_record(sources, row, matches[0], slides[matches[0]], labels)
        names = ", ".join(path.name for path in matches)
        several = f"several files are called so ({names}); write one of these names, with its suffix"
        return ExcludedSlide(row["slide"], f"{several if matches else _describe_missing(name, slides)} ({row.where})")

    row_names = {file_name_of(row["slide"]) for row in rows}
    n_new = sum(
        bool(SERIES_FOLDER.fullmatch(path.name)) and row_names.isdisjoint((slide, path.name))
        for path, slide in slides.items()
    )
    if n_new and sources.tell is not None:
        sources.tell(f"{table.name}: {n_new} of {len(files)} slides have no row, and are left out")
    if not site_rows:
        raise UsageError(f"{sources.label}: {table.name} has no row of site {sources.site}")
    sources.report_rows(table, rows, len(site_rows))
    return apply_splits([read_row(row) for row in site_rows], sources)


def _describe_missing(name: str, slides: Mapping[Path, str]) -> str:
    """Return a line on a row's missing file, with the most similar name."""
    names = [slide if path.is_dir() else compose_text(path.name) for path, slide in slides.items()]
    _, separator, why = describe_mismatch([name], names).rpartition("; ")
    return f"no such slide file; {why}" if separator else "no such slide file"


def _generic_record(sources: Sources, row: TableRow, path: Path, slide: str, labels: Sequence[str]) -> SlideRecord:
    assert sources.labels is not None
    where = row.where
    negative, partial = parse_label(row["label"], where, labels) if sources.has_labels else (False, False)
    annotation = None
    if sources.has_labels and row.read_value("annotation"):
        base, outlines = sources.annotations or sources.labels.parent, row["annotation"]
        annotation = find_file(base / outlines)
        if not annotation.is_file() and "\\" in outlines:
            annotation = find_file(base / file_name_of(outlines))
        if not annotation.is_file():
            raise UsageError(f"{where}: no such annotation ({base / outlines})")
    supervision: Supervision = "negative" if negative else "weak" if sources.has_labels else "unlabelled"
    if annotation is not None and not negative:
        supervision = "partial" if partial else "annotated"
    return SlideRecord(
        path,
        slide,
        row["patient"],
        sources.site,
        supervision,
        sources.has_labels and not negative,
        annotation,
        read_split(row),
        read_mpp(row, sources.mpp_override),
        diagnosis=row.read_value("diagnosis"),
        tumor_type=row.read_value("tumor_type"),
    )
