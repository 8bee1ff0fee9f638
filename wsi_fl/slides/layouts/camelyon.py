"""Camelyon17 and Camelyon16: folders of TIFFs, ASAP XML beside them.

Facts on the archives: camelyon17.grand-challenge.org; centre = patient // 20 in Camelyon17, and in Camelyon16 the
first 100 normal and 70 tumour training slides are Radboud's, the others Utrecht's.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from wsi_fl.slides.layouts.common import (
    ArchiveSite,
    Sources,
    apply_splits,
    group_sites,
    list_files,
    list_tiffs,
    parse_label,
    read_rows,
)
from wsi_fl.system.file_names import find_file, slide_of, stem_of
from wsi_fl.types import ExcludedSlide, SlideRecord, Supervision, UsageError

C17_SLIDE = re.compile(r"patient_(\d{3})_node_(\d)", re.IGNORECASE)
_C17_FOLDER = re.compile(r"cent(?:er|re)_(\d)", re.IGNORECASE)
_C17_PER_CENTRE, _C17_TRAINING_PATIENTS = 20, 100
C16_SLIDE = re.compile(r"(normal|tumor)_(\d{3})", re.IGNORECASE)
_C16_TEST_SLIDE = re.compile(r"test_\d{3}", re.IGNORECASE)
_C16_RADBOUD = {"normal": 100, "tumor": 70}


def describe_camelyon17(archive: Path) -> list[ArchiveSite]:
    annotations = _find_first(
        archive, ("annotations", "lesion_annotations", "training/lesion_annotations"), Path.is_dir
    )
    stages = _find_first(
        archive, ("stages.csv", "stage_labels.csv", "training/stage_labels.csv", "training/stages.csv"), Path.is_file
    )
    pairs = []
    for path in list_tiffs(archive):
        match = C17_SLIDE.match(path.name)
        if not match or int(match[1]) >= _C17_TRAINING_PATIENTS or "mask" in path.name:
            continue
        folder = _C17_FOLDER.fullmatch(path.parent.name)
        stem = "*" if folder else f"patient_{match[1][:2]}?_node_*"
        site = f"C{int(match[1]) // _C17_PER_CENTRE + 1}"
        pairs.append((site, f"{glob.escape(str(path.parent))}/{stem}{path.suffix}"))
    return group_sites(pairs, annotations, stages)


def read_camelyon17(sources: Sources) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    if sources.labels is None:
        raise UsageError(f"{sources.label}: labels is missing; point it at stages.csv")
    table = read_rows(sources.labels, ("patient", "stage"))
    # patient_000_node_0.tif,negative; rows of patients (patient_000.zip,pN0) are skipped
    rows = [row for row in table if C17_SLIDE.match(stem_of(row["patient"]))]
    stages: dict[str, str] = {}
    for row in rows:
        slide, stage = stem_of(row["patient"]), row["stage"]
        if stages.setdefault(slide, stage) != stage:
            raise UsageError(f"{row.where}: {slide} is {stage}, and {stages[slide]} in a line above")
    name = sources.labels.name

    def read_slide(path: Path) -> SlideRecord | ExcludedSlide:
        match = C17_SLIDE.match(path.name)
        if match is None:
            return ExcludedSlide(slide_of(path), "not named patient_PPP_node_N")
        if slide_of(path) not in stages:
            return ExcludedSlide(slide_of(path), f"no stage in {name}")
        return _build_record(sources, path, f"patient_{match[1]}", stages[slide_of(path)])

    files = list_files(sources)
    slide_names = {slide_of(path) for path in files}
    sources.report_rows(sources.labels, rows, sum(stem_of(row["patient"]) in slide_names for row in rows))
    return apply_splits(map(read_slide, files), sources)


def list_test_slides(archive: Path) -> list[str]:
    """Return the names of test slides of a challenge, which are in no site: labels or centres are not public."""
    slides = [slide_of(path) for path in list_tiffs(archive) if "mask" not in path.name]
    return sorted(
        slide
        for slide in slides
        if _C16_TEST_SLIDE.fullmatch(slide)
        or ((match := C17_SLIDE.fullmatch(slide)) and int(match[1]) >= _C17_TRAINING_PATIENTS)
    )


def describe_camelyon16(archive: Path) -> list[ArchiveSite]:
    folders = ("training/lesion_annotations", "lesion_annotations", "annotations", "training/annotations")
    annotations = _find_first(archive, folders, Path.is_dir)
    pairs = []
    for path in list_tiffs(archive):
        if match := C16_SLIDE.fullmatch(slide_of(path)):
            site = "RUMC" if int(match[2]) <= _C16_RADBOUD[match[1].lower()] else "UMCU"
            pairs.append((site, glob.escape(str(path))))
    return group_sites(pairs, annotations, None)


def read_camelyon16(sources: Sources) -> tuple[list[SlideRecord], list[ExcludedSlide]]:
    def read_slide(path: Path) -> SlideRecord | ExcludedSlide:
        match = C16_SLIDE.fullmatch(slide_of(path))
        if match is None:
            return ExcludedSlide(slide_of(path), "not named normal_NNN or tumor_NNN")
        return _build_record(sources, path, slide_of(path), match[1].lower())

    return apply_splits(map(read_slide, list_files(sources)), sources)


def _build_record(sources: Sources, path: Path, patient: str, label: str) -> SlideRecord | ExcludedSlide:
    """Return the record of a slide of an outlined archive; a positive slide without outline is excluded."""
    table = sources.labels.name if sources.labels else path.name
    negative, partial = parse_label(label, f"{table}: {path.name}")
    supervision: Supervision = "negative" if negative else "weak"
    annotation = None
    outline_path = None if sources.annotations is None else find_file(sources.annotations / f"{slide_of(path)}.xml")
    if not negative and outline_path is not None:
        annotation = outline_path
        if not annotation.is_file():
            return ExcludedSlide(slide_of(path), f"{label}, but its tumour is not outlined (no {annotation.name})")
        supervision = "partial" if partial else "annotated"
    elif outline_path is not None and outline_path.is_file():
        annotation = outline_path  # of tumour, it contradicts the label
    mpp, site = sources.mpp_override, sources.site
    return SlideRecord(path, slide_of(path), patient, site, supervision, not negative, annotation, None, mpp)


def _find_first(archive: Path, names: Iterable[str], test: Callable[[Path], bool]) -> str | None:
    return next((str(archive / name) for name in names if test(archive / name)), None)
