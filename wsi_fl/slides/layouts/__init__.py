"""Layouts of archives, with names of slides, patients, labels and annotations: Camelyon17, Camelyon16, TCGA, generic.

One function lists the sites of an archive, another the slides of a site as SlideRecords.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wsi_fl.slides.layouts.camelyon import (
    C16_SLIDE,
    C17_SLIDE,
    describe_camelyon16,
    describe_camelyon17,
    list_test_slides,
    read_camelyon16,
    read_camelyon17,
)
from wsi_fl.slides.layouts.common import ArchiveSite, Sources, list_tiffs
from wsi_fl.slides.layouts.generic import describe_generic, read_generic
from wsi_fl.slides.layouts.idc import lacks_table
from wsi_fl.slides.layouts.tcga import GROUPINGS, describe_tcga, list_slides, read_tcga
from wsi_fl.types import ExcludedSlide, SlideRecord, UsageError

__all__ = [
    "LAYOUTS",
    "ArchiveSite",
    "Sources",
    "detect_layout",
    "list_site",
    "list_sites",
    "list_test_slides",
    "read_site",
]


def detect_layout(archive: Path) -> str:
    """Return the layout of an archive: "camelyon17", "camelyon16", "tcga" or "generic".

    Raises:
        UsageError: when it is none of them; lists the expected files.
    """
    if not archive.is_dir():
        raise UsageError(f"{archive}: no such folder")
    if (archive / "slides.csv").is_file():
        return "generic"
    names = [path.name for path in list_tiffs(archive)]
    if any(C17_SLIDE.match(name) for name in names):
        return "camelyon17"
    if any(C16_SLIDE.match(name) for name in names):
        return "camelyon16"
    if next(list_slides(archive.resolve()), None) is not None:
        return "tcga"
    if lacks_table(archive, "generic"):
        return "generic"
    raise UsageError(
        f"{archive}: no archive recognised; looked for slides.csv (generic), patient_PPP_node_N.tif (Camelyon17), "
        "normal_NNN.tif or tumor_NNN.tif (Camelyon16), TCGA-TSS-PPPP-01Z-00-DX1.*.svs (TCGA) and "
        "COLLECTION/PATIENT/STUDY/SM_SERIES (Imaging Data Commons)"
    )


def list_sites(
    archive: Path, layout: str, *, group_by: str | None = None, clinical: Path | None = None, codes: Path | None = None
) -> list[ArchiveSite]:
    """Return the sites of an archive, in order.

    In TCGA a site is an "institution" (default) or a source site, "tss"; tables of diagnoses and of source sites are
    given where the archive lacks them.
    """
    for option, path in (("--clinical", clinical), ("--codes", codes)):
        if path is not None and not path.is_file():
            raise UsageError(f"{option}: no such file ({path})")
    if layout == "tcga":
        sites = describe_tcga(archive.resolve(), group_by or GROUPINGS[0], codes, clinical)
    elif group_by is not None or clinical is not None or codes is not None:
        raise UsageError(f"--group-by, --clinical and --codes go with layout tcga; this archive is {layout}")
    else:
        sites = _DESCRIBERS[layout](archive.resolve())
    if not sites:
        raise UsageError(f"{archive}: no slide of a {layout} archive in it")
    return sites


def read_site(layout: str, sources: Sources) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    """Return the slides of one site in name order, and the excluded ones with reasons.

    Raises:
        UsageError: when a file or folder of the site file is missing, or no slide is usable.
    """
    records, excluded = list_site(layout, sources)
    if not records:
        why = f"; the first: {excluded[0].slide}: {excluded[0].reason}" if excluded else ""
        raise UsageError(f"{sources.label}: none of its slides can be used{why}")
    return records, excluded


def list_site(layout: str, sources: Sources) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    """Return the same as `read_site`, also for a site without usable slides."""
    if layout != "tcga" and (sources.manifests or sources.columns):
        key = "manifest" if sources.manifests else "columns"
        raise UsageError(f"{sources.label}: {key} is for layout tcga; this site's is {layout}")
    for key, path in (("labels", sources.labels), ("split", sources.split)):
        if path is not None and not path.is_file():
            raise UsageError(f"{sources.label}: {key}: no such file ({path})")
    if sources.annotations is not None and not sources.annotations.is_dir():
        raise UsageError(f"{sources.label}: annotations: no such folder ({sources.annotations})")
    records, excluded = _READERS[layout](sources)
    slide_paths: dict[str, Path] = {}
    for record in records:
        if record.slide in slide_paths:
            raise UsageError(
                f"{sources.label}: two slides are called {record.slide}: {slide_paths[record.slide]}, {record.path}"
            )
        slide_paths[record.slide] = record.path
    return records, excluded


_DESCRIBERS: dict[str, Callable[[Path], list[ArchiveSite]]] = {
    "camelyon17": describe_camelyon17,
    "camelyon16": describe_camelyon16,
    "generic": describe_generic,
}
_READERS: dict[str, Callable[[Sources], tuple[list[SlideRecord], list[ExcludedSlide]]]] = {
    "camelyon17": read_camelyon17,
    "camelyon16": read_camelyon16,
    "tcga": read_tcga,
    "generic": read_generic,
}
LAYOUTS = tuple(_READERS)
