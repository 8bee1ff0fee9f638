"""How archives name their slides, patients, labels and annotations: Camelyon17, Camelyon16, and generic.

`describe` looks at a whole archive and says which sites it holds; `read_site` lists the slides of one site as
SlideRecords.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wsi_fl.slides.layouts.camelyon import (
    C16_SLIDE,
    C17_SLIDE,
    describe_camelyon16,
    describe_camelyon17,
    read_camelyon16,
    read_camelyon17,
)
from wsi_fl.slides.layouts.common import ArchiveSite, Sources, tiffs
from wsi_fl.slides.layouts.generic import describe_generic, read_generic
from wsi_fl.types import SetAside, SlideRecord, UsageError

__all__ = ["LAYOUTS", "ArchiveSite", "Sources", "describe", "detect", "read_site"]


def detect(archive: Path) -> str:
    """The layout of an archive: "camelyon17", "camelyon16" or "generic".

    Raises:
        UsageError: when it is none of them, saying what was looked for.
    """
    if not archive.is_dir():
        raise UsageError(f"{archive}: no such folder")
    if (archive / "slides.csv").is_file():
        return "generic"
    names = [path.name for path in tiffs(archive)]
    if any(C17_SLIDE.match(name) for name in names):
        return "camelyon17"
    if any(C16_SLIDE.match(name) for name in names):
        return "camelyon16"
    raise UsageError(
        f"{archive}: no archive recognised; looked for slides.csv (generic), patient_PPP_node_N.tif (Camelyon17) "
        "and normal_NNN.tif or tumor_NNN.tif (Camelyon16)"
    )


def describe(archive: Path, layout: str) -> list[ArchiveSite]:
    """The sites of an archive, in order."""
    found = _DESCRIBE[layout](archive.resolve())
    if not found:
        raise UsageError(f"{archive}: no slide of a {layout} archive in it")
    return found


def read_site(layout: str, sources: Sources) -> tuple[list[SlideRecord], list[SetAside]]:
    """The slides of one site in name order, and those set aside with the reason.

    Raises:
        UsageError: when a file or folder the site file names is missing, or the site has no slide at all.
    """
    for key, path in (("labels", sources.labels), ("split", sources.split)):
        if path is not None and not path.is_file():
            raise UsageError(f"{sources.label}: {key}: no such file ({path})")
    if sources.annotations is not None and not sources.annotations.is_dir():
        raise UsageError(f"{sources.label}: annotations: no such folder ({sources.annotations})")
    records, aside = _READ[layout](sources)
    if not records:
        why = f"; the first: {aside[0].slide}: {aside[0].reason}" if aside else ""
        raise UsageError(f"{sources.label}: none of its slides can be used{why}")
    _check_unique(records, sources)
    return records, aside


def _check_unique(records: list[SlideRecord], sources: Sources) -> None:
    seen: dict[str, Path] = {}
    for record in records:
        if record.slide in seen:
            raise UsageError(
                f"{sources.label}: two slides are called {record.slide}: {seen[record.slide]}, {record.path}"
            )
        seen[record.slide] = record.path


_DESCRIBE: dict[str, Callable[[Path], list[ArchiveSite]]] = {
    "camelyon17": describe_camelyon17,
    "camelyon16": describe_camelyon16,
    "generic": describe_generic,
}

_READ: dict[str, Callable[[Sources], tuple[list[SlideRecord], list[SetAside]]]] = {
    "camelyon17": read_camelyon17,
    "camelyon16": read_camelyon16,
    "generic": read_generic,
}

LAYOUTS = tuple(_READ)
