"""How archives name their slides, patients, labels and annotations: Camelyon17, Camelyon16, and generic.

`describe` looks at a whole archive and says which sites it holds; `read_site` lists the slides of one site as
SlideRecords. Facts on the archives: camelyon17.grand-challenge.org; centre = patient // 20 in Camelyon17, and
in Camelyon16 the first 100 normal and 70 tumour training slides are Radboud's, the others Utrecht's.
"""

from __future__ import annotations

import csv
import glob
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from wsi_fl.types import SPLITS, SetAside, SlideRecord, Supervision, UsageError, WsiFlError

_C17_SLIDE = re.compile(r"patient_(\d{3})_node_(\d)", re.IGNORECASE)
_C17_FOLDER = re.compile(r"cent(?:er|re)_(\d)", re.IGNORECASE)
_C17_PER_CENTRE = 20
_C17_TRAINING_PATIENTS = 100
_C16_SLIDE = re.compile(r"(normal|tumor)_(\d{3})", re.IGNORECASE)
_C16_RADBOUD = {"normal": 100, "tumor": 70}
_NEGATIVE = {"negative", "normal", "healthy", "benign", "0"}
_POSITIVE = {"positive", "tumor", "tumour", "metastasis", "metastases", "macro", "micro", "1"}
_PARTIAL = {"itc"}


@dataclass(frozen=True)
class ArchiveSite:
    """One site found in an archive: what its site file will say."""

    name: str
    slides: tuple[str, ...]
    annotations: str | None
    labels: str | None
    n_slides: int


@dataclass(frozen=True)
class Sources:
    """Where the slides of one site and what is known about them lie.

    Attributes:
        label: how to name the site file in messages.
        slides: glob patterns.
    """

    site: str
    label: str
    slides: tuple[str, ...]
    annotations: Path | None = None
    labels: Path | None = None
    split: Path | None = None
    mpp_override: float | None = None


def detect(archive: Path) -> str:
    """The layout of an archive: "camelyon17", "camelyon16" or "generic".

    Raises:
        UsageError: when it is none of them, saying what was looked for.
    """
    if not archive.is_dir():
        raise UsageError(f"{archive}: no such folder")
    if (archive / "slides.csv").is_file():
        return "generic"
    names = [path.name for path in _tiffs(archive)]
    if any(_C17_SLIDE.match(name) for name in names):
        return "camelyon17"
    if any(_C16_SLIDE.match(name) for name in names):
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


def _describe_camelyon17(archive: Path) -> list[ArchiveSite]:
    annotations = _first(
        archive, ("annotations", "lesion_annotations", "training/lesion_annotations"), Path.is_dir
    )
    stages = _first(archive, ("stages.csv", "stage_labels.csv", "training/stage_labels.csv"), Path.is_file)
    patterns: dict[int, set[str]] = {}
    counts: dict[int, int] = {}
    for path in _tiffs(archive):
        match = _C17_SLIDE.match(path.name)
        if not match or int(match[1]) >= _C17_TRAINING_PATIENTS or "mask" in path.name:
            continue
        centre = int(match[1]) // _C17_PER_CENTRE
        folder = _C17_FOLDER.fullmatch(path.parent.name)
        stem = "*" if folder else f"patient_{match[1][:2]}?_node_*"
        patterns.setdefault(centre, set()).add(f"{glob.escape(str(path.parent))}/{stem}{path.suffix}")
        counts[centre] = counts.get(centre, 0) + 1
    return [
        ArchiveSite(f"C{centre + 1}", tuple(sorted(patterns[centre])), annotations, stages, counts[centre])
        for centre in sorted(patterns)
    ]


def _read_camelyon17(sources: Sources) -> tuple[list[SlideRecord], list[SetAside]]:
    if sources.labels is None:
        raise UsageError(f"{sources.label}: labels is missing; point it at stages.csv")
    stages = _stages(sources.labels)
    records: list[SlideRecord] = []
    aside: list[SetAside] = []
    for path in _slide_files(sources):
        match = _C17_SLIDE.match(path.name)
        stage = stages.get(path.stem)
        if match is None:
            aside.append(SetAside(path.stem, "not named patient_PPP_node_N"))
        elif stage is None:
            aside.append(SetAside(path.stem, f"no stage in {sources.labels.name}"))
        else:
            _add(_outlined(sources, path, f"patient_{match[1]}", stage), records, aside)
    return _with_splits(records, sources), aside


def _describe_camelyon16(archive: Path) -> list[ArchiveSite]:
    folders = ("training/lesion_annotations", "lesion_annotations", "annotations", "training/annotations")
    annotations = _first(archive, folders, Path.is_dir)
    patterns: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for path in _tiffs(archive):
        match = _C16_SLIDE.fullmatch(path.stem)
        if not match:
            continue
        kind, number = match[1].lower(), int(match[2])
        site = "RUMC" if number <= _C16_RADBOUD[kind] else "UMCU"
        patterns.setdefault(site, set()).add(glob.escape(str(path)))
        counts[site] = counts.get(site, 0) + 1
    return [
        ArchiveSite(site, tuple(sorted(patterns[site])), annotations, None, counts[site])
        for site in sorted(patterns)
    ]


def _read_camelyon16(sources: Sources) -> tuple[list[SlideRecord], list[SetAside]]:
    records: list[SlideRecord] = []
    aside: list[SetAside] = []
    for path in _slide_files(sources):
        match = _C16_SLIDE.fullmatch(path.stem)
        if match is None:
            aside.append(SetAside(path.stem, "not named normal_NNN or tumor_NNN"))
            continue
        _add(_outlined(sources, path, path.stem, match[1].lower()), records, aside)
    return _with_splits(records, sources), aside


def _describe_generic(archive: Path) -> list[ArchiveSite]:
    table = archive / "slides.csv"
    names: dict[str, int] = {}
    for row in _rows(table, ("slide", "patient", "site", "label")):
        names[row["site"]] = names.get(row["site"], 0) + 1
    return [
        ArchiveSite(name, (f"{glob.escape(str(archive / 'slides'))}/*",), None, str(table), count)
        for name, count in sorted(names.items())
    ]


def _read_generic(sources: Sources) -> tuple[list[SlideRecord], list[SetAside]]:
    if sources.labels is None:
        raise UsageError(f"{sources.label}: labels is missing; point it at a slides.csv")
    files = _slide_files(sources)
    records: list[SlideRecord] = []
    aside: list[SetAside] = []
    for number, row in enumerate(_rows(sources.labels, ("slide", "patient", "site", "label")), 2):
        if row["site"] != sources.site:
            continue
        where = f"{sources.labels.name} line {number}"
        if not row["patient"]:
            raise UsageError(f"{where}: patient is empty")
        named = _files_named(Path(row["slide"]).name, files)
        if len(named) == 1:
            records.append(_generic_record(sources, row, named[0], where))
        elif named:
            several = ", ".join(path.name for path in named)
            aside.append(
                SetAside(row["slide"], f"several files are called so ({several}); add the suffix ({where})")
            )
        else:
            aside.append(SetAside(row["slide"], f"no such slide file ({where})"))
    if not records and not aside:
        raise UsageError(f"{sources.label}: {sources.labels.name} has no row of site {sources.site}")
    return _with_splits(records, sources), aside


def _files_named(name: str, files: Iterable[Path]) -> list[Path]:
    """The file of this very name, else those of this name without their suffix."""
    return [p for p in files if p.name == name] or [p for p in files if p.stem == name]


def _generic_record(sources: Sources, row: dict[str, str], path: Path, where: str) -> SlideRecord:
    assert sources.labels is not None
    negative, partial = _label(row["label"], where)
    annotation = None
    if row.get("annotation"):
        base = sources.annotations or sources.labels.parent
        annotation = base / row["annotation"]
        if not annotation.is_file():
            raise UsageError(f"{where}: no such annotation ({annotation})")
    split = row.get("split") or None
    if split is not None and split not in SPLITS:
        raise UsageError(f"{where}: unknown split {split!r}; allowed: {', '.join(SPLITS)}")
    mpp = _mpp(row["mpp"], where) if row.get("mpp") else sources.mpp_override
    supervision: Supervision = "negative" if negative else "weak"
    if annotation is not None and not negative:
        supervision = "partial" if partial else "annotated"
    return SlideRecord(
        path, path.stem, row["patient"], sources.site, supervision, not negative, annotation, split, mpp
    )


def _mpp(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{where}: mpp is {text!r}, not a positive number")
    return value


def _outlined(sources: Sources, path: Path, patient: str, label: str) -> SlideRecord | SetAside:
    """A slide of an archive whose tumour is outlined: a positive one without its outline cannot be used."""
    negative, partial = _label(label, f"{sources.labels.name if sources.labels else path.name}: {path.name}")
    annotation = None
    supervision: Supervision = "negative"
    if not negative and sources.annotations is None:
        supervision = "weak"
    elif not negative and sources.annotations is not None:
        annotation = sources.annotations / f"{path.stem}.xml"
        if not annotation.is_file():
            return SetAside(path.stem, f"{label}, but its tumour is not outlined (no {annotation.name})")
        supervision = "partial" if partial else "annotated"
    return SlideRecord(
        path,
        path.stem,
        patient,
        sources.site,
        supervision,
        not negative,
        annotation,
        None,
        sources.mpp_override,
    )


def _add(found: SlideRecord | SetAside, records: list[SlideRecord], aside: list[SetAside]) -> None:
    if isinstance(found, SlideRecord):
        records.append(found)
    else:
        aside.append(found)


def _label(text: str, where: str) -> tuple[bool, bool]:
    """(negative, partially outlined) of a slide label."""
    label = text.strip().lower()
    if label in _NEGATIVE | _POSITIVE | _PARTIAL:
        return label in _NEGATIVE, label in _PARTIAL
    known = ", ".join(sorted(_NEGATIVE | _POSITIVE | _PARTIAL))
    raise UsageError(f"{where}: unknown label {text!r}; known: {known}")


def _with_splits(records: list[SlideRecord], sources: Sources) -> list[SlideRecord]:
    """The records with the splits of the site's split table, which names patients or slides."""
    if sources.split is None:
        return records
    rows = _rows(sources.split, ("split",))
    given: dict[str, str] = {}
    for number, row in enumerate(rows, 2):
        key = row.get("slide") or row.get("patient")
        if not key or row["split"] not in SPLITS:
            raise UsageError(
                f"{sources.split.name} line {number}: needs patient or slide, and split ({', '.join(SPLITS)})"
            )
        if given.setdefault(key, row["split"]) != row["split"]:
            raise UsageError(
                f"{sources.split.name}: {key} is in two splits ({given[key]} and {row['split']})"
            )
    found = [given.get(r.slide) or given.get(r.path.name) or given.get(r.patient) for r in records]
    if records and not any(found):
        raise UsageError(f"{sources.label}: split: {sources.split.name} names none of its slides or patients")
    return [replace(r, split=name or r.split) for r, name in zip(records, found, strict=True)]


def _stages(path: Path) -> dict[str, str]:
    """Rows `patient_000_node_0.tif,negative`; patient rows (`patient_000.zip,pN0`) are passed over."""
    return {
        Path(row["patient"]).stem: row["stage"]
        for row in _rows(path, ("patient", "stage"))
        if _C17_SLIDE.match(row["patient"])
    }


def _rows(path: Path, needed: Iterable[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle)
            missing = [name for name in needed if name not in (reader.fieldnames or [])]
            if missing:
                raise UsageError(
                    f"{path}: column {missing[0]!r} is missing; has {', '.join(reader.fieldnames or [])}"
                )
            return [{k: (v or "").strip() for k, v in row.items() if k} for row in reader]
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise WsiFlError(f"{path}: not a readable CSV ({error})") from None


def _slide_files(sources: Sources) -> list[Path]:
    files = sorted(
        {
            Path(name)
            for pattern in sources.slides
            for name in glob.glob(pattern)  # noqa: PTH207 absolute patterns
            if Path(name).is_file()
        }
    )
    if not files:
        raise UsageError(f"{sources.label}: slides matched no file ({', '.join(sources.slides)})")
    return files


def _check_unique(records: list[SlideRecord], sources: Sources) -> None:
    seen: dict[str, Path] = {}
    for record in records:
        if record.slide in seen:
            raise UsageError(
                f"{sources.label}: two slides are called {record.slide}: {seen[record.slide]}, {record.path}"
            )
        seen[record.slide] = record.path


def _tiffs(archive: Path) -> list[Path]:
    return sorted(p for suffix in ("tif", "tiff") for p in archive.rglob(f"*.{suffix}") if p.is_file())


def _first(archive: Path, names: Iterable[str], test: Callable[[Path], bool]) -> str | None:
    return next((str(archive / name) for name in names if test(archive / name)), None)


_DESCRIBE: dict[str, Callable[[Path], list[ArchiveSite]]] = {
    "camelyon17": _describe_camelyon17,
    "camelyon16": _describe_camelyon16,
    "generic": _describe_generic,
}
_READ: dict[str, Callable[[Sources], tuple[list[SlideRecord], list[SetAside]]]] = {
    "camelyon17": _read_camelyon17,
    "camelyon16": _read_camelyon16,
    "generic": _read_generic,
}
LAYOUTS = tuple(_READ)
