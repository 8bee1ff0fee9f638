"""The generic layout: slides.csv beside slides/."""

from __future__ import annotations

import glob
from pathlib import Path

from wsi_fl.slides.layouts.common import (
    ArchiveSite,
    Sources,
    TableRow,
    divided,
    label_of,
    mpp_of,
    of_site,
    rows_of,
    site_named,
    sites_of,
    slide_files,
)
from wsi_fl.slides.reading.formats import slide_name
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

    def judged(row: TableRow) -> SlideRecord | SetAside:
        for key in ("slide", "patient"):
            if not row[key]:
                raise UsageError(f"{row.where}: {key} is empty")
        if sources.labelled and not row["label"]:
            return SetAside(row["slide"], f"has no label ({row.where})")
        name = Path(row["slide"]).name
        named = [p for p in files if p.name == name] or [p for p in files if p.stem == name]
        if len(named) == 1:
            return _generic_record(sources, row, named[0])
        several = f"several files are called so ({', '.join(path.name for path in named)}); add the suffix"
        return SetAside(row["slide"], f"{several if named else 'no such slide file'} ({row.where})")

    rows = rows_of(table, ("slide", "patient", "site", *["label"] * sources.labelled))
    mine = of_site(rows, sources.site)
    if not mine:
        raise UsageError(f"{sources.label}: {table.name} has no row of site {sources.site}")
    sources.account(table, rows, len(mine))
    return divided([judged(row) for row in mine], sources)


def _generic_record(sources: Sources, row: TableRow, path: Path) -> SlideRecord:
    assert sources.labels is not None
    where = row.where
    negative, partial = label_of(row["label"], where) if sources.labelled else (False, False)
    annotation = None
    if sources.labelled and row.get("annotation"):
        base = sources.annotations or sources.labels.parent
        annotation = base / row["annotation"]
        if not annotation.is_file():
            raise UsageError(f"{where}: no such annotation ({annotation})")
    split = row.get("split") or None
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
        diagnosis=row.get("diagnosis", ""),
        tumor_type=row.get("tumor_type", ""),
    )
