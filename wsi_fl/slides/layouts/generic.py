"""The generic layout: slides.csv beside slides/."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from wsi_fl.slides.layouts.common import (
    ArchiveSite,
    Sources,
    TableRow,
    divided,
    group_pairs,
    label_of,
    mpp_of,
    of_site,
    require_names,
    rows_of,
    site_named,
    sites_of,
    slide_files,
)
from wsi_fl.slides.reading.formats import slide_name
from wsi_fl.system.names import compose_text, describe_mismatch, file_name_of, find_file
from wsi_fl.types import SPLITS, SetAside, SlideRecord, Supervision, UsageError


def describe_generic(archive: Path) -> list[ArchiveSite]:
    table = archive / "slides.csv"
    pattern = f"{glob.escape(str(archive / 'slides'))}/*"
    rows = rows_of(table, ("slide", "patient", "site", "label"))
    return sites_of(((site_named(row), pattern) for row in rows), None, str(table))


def read_generic(sources: Sources) -> tuple[list[SlideRecord], list[SetAside]]:
    if sources.labels is None:
        raise UsageError(f"{sources.label}: labels is missing; point it at a slides.csv")
    files, table = slide_files(sources), sources.labels
    by_name = group_pairs((compose_text(path.name), path) for path in files)
    by_stem = group_pairs((slide_name(path), path) for path in files)
    rows = rows_of(table, ("slide", "patient", "site", *["label"] * sources.labelled))
    mine = of_site(rows, sources.site)
    labels = [row["label"] for row in mine] if sources.labelled else []

    def judged(row: TableRow) -> SlideRecord | SetAside:
        require_names(row, "slide", "patient")
        if sources.labelled and not row.value("label"):
            return SetAside(row["slide"], f"has no label ({row.where})")
        name = file_name_of(row["slide"])
        named = by_name.get(row["slide"]) or by_name.get(name) or by_stem.get(name)
        if named is None:  # a suffix in another case, ".SVS"
            named = [path for path in by_stem.get(Path(name).stem, ()) if _same_suffix(path, name)]
        if len(named) == 1:
            return _generic_record(sources, row, named[0], labels)
        several = f"several files are called so ({', '.join(path.name for path in named)}); add the suffix"
        return SetAside(row["slide"], f"{several if named else _missing(name, files)} ({row.where})")

    if not mine:
        raise UsageError(f"{sources.label}: {table.name} has no row of site {sources.site}")
    sources.account(table, rows, len(mine))
    return divided([judged(row) for row in mine], sources)


def _same_suffix(path: Path, name: str) -> bool:
    return path.suffix.lower() == Path(name).suffix.lower()


def _missing(name: str, files: Sequence[Path]) -> str:
    """Return a line on a row's missing file, with the most similar name."""
    _, differ, why = describe_mismatch([name], [compose_text(path.name) for path in files]).rpartition("; ")
    return f"no such slide file; {why}" if differ else "no such slide file"


def _generic_record(sources: Sources, row: TableRow, path: Path, labels: Sequence[str]) -> SlideRecord:
    assert sources.labels is not None
    where = row.where
    negative, partial = label_of(row["label"], where, labels) if sources.labelled else (False, False)
    annotation = None
    if sources.labelled and row.value("annotation"):
        base, outlines = sources.annotations or sources.labels.parent, row["annotation"]
        annotation = find_file(base / outlines)
        if not annotation.is_file() and "\\" in outlines:
            annotation = find_file(base / file_name_of(outlines))
        if not annotation.is_file():
            raise UsageError(f"{where}: no such annotation ({base / outlines})")
    split = row.value("split") or None
    if split is not None and split not in SPLITS:
        raise UsageError(f"{where}: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
    mpp = mpp_of(row["mpp"], where) if row.get("mpp") else sources.mpp_override
    supervision: Supervision = "negative" if negative else "weak" if sources.labelled else "unlabelled"
    if annotation is not None and not negative:
        supervision = "partial" if partial else "annotated"
    return SlideRecord(
        path,
        slide_name(path),
        row["patient"],
        sources.site,
        supervision,
        sources.labelled and not negative,
        annotation,
        split,
        mpp,
        diagnosis=row.value("diagnosis"),
        tumor_type=row.value("tumor_type"),
    )
