"""What all layouts share: where things lie, tables, labels, splits."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wsi_fl.slides.layouts.rows import TableRow, accounted, rows_of
from wsi_fl.slides.reading.sources import is_zarr
from wsi_fl.types import MPP_BOUNDS, SPLITS, SetAside, SlideRecord, UsageError

_NEGATIVE = {"negative", "normal", "healthy", "benign", "0"}

_POSITIVE = {"positive", "tumor", "tumour", "metastasis", "metastases", "macro", "micro", "1"}

_PARTIAL = {"itc"}


@dataclass(frozen=True)
class ArchiveSite:
    """One site found in an archive: what its site file will say.

    Attributes:
        manifests: glob patterns of lists of what the archive should hold.
        unknown_codes: tissue source site codes in slide names that no table maps to an institution.
    """

    name: str
    slides: tuple[str, ...]
    annotations: str | None
    labels: str | None
    n_slides: int
    manifests: tuple[str, ...] = ()
    unknown_codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sources:
    """Where the slides of one site and what is known about them lie.

    Attributes:
        label: how to name the site file in messages.
        slides: glob patterns.
        manifests: glob patterns of lists of what there should be.
        slide_types: kinds of slides that are taken, where an archive has several.
        labelled: whether labels and annotations are read; else every slide is unlabelled.
        columns: how columns of `labels` are called where not as usual.
        tell: told what became of the rows of each table.
    """

    site: str
    label: str
    slides: tuple[str, ...]
    annotations: Path | None = None
    labels: Path | None = None
    split: Path | None = None
    mpp_override: float | None = None
    manifests: tuple[str, ...] = ()
    slide_types: tuple[str, ...] = ("DX",)
    columns: Mapping[str, str] = field(default_factory=dict)
    tell: Callable[[str], None] | None = None
    labelled: bool = True

    def account(self, table: Path, rows: Sequence[TableRow], own: int) -> None:
        """Tell how many rows of a table are of this site, and how many of others."""
        if self.tell is not None:
            self.tell(accounted(table.name, rows, own, self.site))


def label_of(text: str, where: str) -> tuple[bool, bool]:
    """(negative, partially outlined) of a slide label."""
    label = text.strip().lower()
    if label in _NEGATIVE | _POSITIVE | _PARTIAL:
        return label in _NEGATIVE, label in _PARTIAL
    known = ", ".join(sorted(_NEGATIVE | _POSITIVE | _PARTIAL))
    hint = (
        f'; classes of your own go into [subtypes] of the pipeline: any = ["{label}", "OTHER"]'
        if label
        else ""
    )
    raise UsageError(f"{where}: unknown label {text!r}; known: {known}{hint}")


def mpp_of(text: str, where: str) -> float:
    """Return µm per pixel as a table has it; UsageError where that is no plausible number."""
    least, most = MPP_BOUNDS
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not least <= value <= most:
        raise UsageError(f"{where}: mpp is {text!r}, not a number from {least} to {most}")
    return value


def slide_files(sources: Sources) -> list[Path]:
    files = sorted(
        {
            Path(name)
            for pattern in sources.slides
            for name in glob.glob(pattern, recursive=True)  # noqa: PTH207 absolute patterns
            if Path(name).is_file() or is_zarr(Path(name))
        }
    )
    if not files:
        raise UsageError(f"{sources.label}: slides matched no file ({', '.join(sources.slides)})")
    return files


def _with_splits(records: list[SlideRecord], sources: Sources) -> list[SlideRecord]:
    """The records with the splits of the site's split table, which names patients or slides."""
    if sources.split is None:
        return records
    rows = rows_of(sources.split, ("split",))
    given: dict[str, str] = {}
    for row in rows:
        key = _split_key(row)
        if not key or row["split"] not in SPLITS:
            raise UsageError(f"{row.where}: needs patient or slide, and split ({', '.join(SPLITS)})")
        if given.setdefault(key, row["split"]) != row["split"]:
            raise UsageError(
                f"{sources.split.name}: {key} is in two splits ({given[key]} and {row['split']})"
            )
    found = [given.get(r.slide) or given.get(r.path.name) or given.get(r.patient) for r in records]
    here = {name for r in records for name in (r.slide, r.path.name, r.patient)}
    sources.account(sources.split, rows, sum(_split_key(row) in here for row in rows))
    if records and not any(found):
        raise UsageError(f"{sources.label}: split: {sources.split.name} names none of its slides or patients")
    return [replace(r, split=name or r.split) for r, name in zip(records, found, strict=True)]


def _split_key(row: TableRow) -> str:
    return row.get("slide") or row.get("patient") or ""


def divided(
    found: Iterable[SlideRecord | SetAside], sources: Sources
) -> tuple[list[SlideRecord], list[SetAside]]:
    """The slides that can be used, with their splits, and those that cannot."""
    every = list(found)
    records = [one for one in every if isinstance(one, SlideRecord)]
    return _with_splits(records, sources), [one for one in every if isinstance(one, SetAside)]


def sites_of(
    found: Iterable[tuple[str, str]], annotations: str | None, labels: str | None
) -> list[ArchiveSite]:
    """The sites of an archive in order, of the (site, glob pattern) of each of its slides."""
    patterns: dict[str, list[str]] = {}
    for site, pattern in found:
        patterns.setdefault(site, []).append(pattern)
    return [
        ArchiveSite(site, tuple(sorted(set(some))), annotations, labels, len(some))
        for site, some in sorted(patterns.items())
    ]


def tiffs(archive: Path) -> list[Path]:
    return sorted(p for suffix in ("tif", "tiff") for p in archive.rglob(f"*.{suffix}") if p.is_file())


def first_existing(archive: Path, names: Iterable[str], test: Callable[[Path], bool]) -> str | None:
    return next((str(archive / name) for name in names if test(archive / name)), None)
