"""`score_lesions`: how well the predicted slides of a run find the lesions that pathologists outlined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import pandas as pd
import shapely
from numpy.typing import NDArray

from wsi_fl.evidence.lesion_froc import (
    FALSE_POSITIVE_RATES,
    Lesions,
    SlideDetections,
    compute_sensitivities,
    find_lesions,
    match_detections,
    select_detections,
)
from wsi_fl.report.formatting import format_number
from wsi_fl.slides.layouts import read_site
from wsi_fl.slides.patching.annotations import read_annotations
from wsi_fl.slides.patching.slide_survey import build_slide_geometry
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.slide_lists import resolve_sources
from wsi_fl.stages.prepare.tile_plans import build_tissue_params
from wsi_fl.stages.runtime.console import TextTable
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.files import read_object
from wsi_fl.types import CLASSES, SlideRecord, UsageError, WsiFlError

_Floats = NDArray[np.float64]

_RADIUS_SIDES = 1.5
"""Radius of non-maximum suppression in sides of a patch: the eight neighbours on the grid are within it."""


class LesionScores(TypedDict):
    """The lesions found by a site's models on the slides of its test part.

    `left_out` counts other predicted slides by reason; sensitivities are at FALSE_POSITIVE_RATES, or None.
    """

    site: str
    models: list[str]
    slides: int
    normal_slides: int
    lesions: int
    isolated: int
    left_out: dict[str, int]
    per_slide: list[float] | None
    per_normal_slide: list[float] | None


class _ScoredSlide(NamedTuple):
    """A predicted slide of the test part: its lesions and detections, and whether it is without tumour."""

    model: str
    lesions: Lesions
    detections: SlideDetections
    is_normal: bool


def score_lesions(contexts: Sequence[RunContext]) -> list[LesionScores]:
    """Return the scores of the sites with predicted slides, of a run or of the folds of one together.

    Raises:
        UsageError: for a run that tells no tumour from healthy patches.
        WsiFlError: where no slide was predicted, or a slide or its outlines cannot be read.
    """
    first = contexts[0]
    if first.kind.example != "patch":
        raise UsageError(f"{first.run.name}: lesions are found by models of patches, not of {first.kind.plural}")
    scores = [_score_site(contexts, site) for site in first.members if first.has_store(site.name)]
    if not any(row["slides"] or row["left_out"] for row in scores):
        name = first.run.name
        raise WsiFlError(f"{name} has no predicted slides; run `wsi-fl predict {name} --site SITE --slide SLIDE`")
    return [row for row in scores if row["slides"] or row["left_out"]]


def _score_site(contexts: Sequence[RunContext], site: SiteFile) -> LesionScores:
    slides, left_out = [], Counter[str]()
    for context in contexts:
        if folders := sorted(path.parent for path in context.run.path.glob(f"predictions/{site.name}/*/score.json")):
            scored, reasons = _score_folders(context, site, folders)
            slides += scored
            left_out += Counter(reasons)
    normal_slides = [slide for slide in slides if slide.is_normal]
    return {
        "site": site.name,
        "models": sorted({slide.model for slide in slides}),
        "slides": len(slides),
        "normal_slides": len(normal_slides),
        "lesions": sum(len(slide.detections.lesions) for slide in slides),
        "isolated": sum(int(slide.lesions.isolated.sum()) for slide in slides),
        "left_out": dict(left_out),
        "per_slide": _pool_slides(slides, slides),
        "per_normal_slide": _pool_slides(slides, normal_slides),
    }


def _pool_slides(slides: Sequence[_ScoredSlide], counted: Sequence[_ScoredSlide]) -> list[float] | None:
    """Return the sensitivities for all lesions, with the false positives of the counted slides; None without either."""
    lesions = np.concatenate([np.empty(0), *(slide.detections.lesions for slide in slides)])
    if not len(lesions) or not counted:
        return None
    false_positives = np.concatenate([slide.detections.false_positives for slide in counted])
    return [float(value) for value in compute_sensitivities(lesions, false_positives, len(counted))]


def _score_folders(
    context: RunContext, site: SiteFile, folders: Sequence[Path]
) -> tuple[list[_ScoredSlide], list[str]]:
    """Return the scored slides, and the reasons for which others were left out."""
    data = context.open_data(site.name)
    if data.classes != CLASSES:
        raise UsageError(f"site {site.name}: its patches are not labelled {' and '.join(CLASSES)}")
    records = {record.slide: record for record in read_site(site.layout, resolve_sources(context.study, site))[0]}
    obs = data.cohort.obs
    test_slides = set(obs["slide"][obs["split"] == "test"])
    slides, reasons = [], []
    for folder in folders:
        if (record := records.get(folder.name)) is None:
            reasons.append("not of this site")
        elif record.slide not in test_slides:
            reasons.append("not of the test part")
        elif record.supervision not in ("negative", "annotated"):
            reasons.append("not wholly outlined")
        else:
            slides.append(_score_slide(context, site, record, folder))
    return slides, reasons


def _score_slide(context: RunContext, site: SiteFile, record: SlideRecord, folder: Path) -> _ScoredSlide:
    score = read_object(folder / "score.json", "predict the slide again")
    lesions = _find_slide_lesions(context, site, record, score.get("quickhash"))
    centers, side, probability = _read_patches(folder / "patches.csv")
    rows = select_detections(centers, probability, _RADIUS_SIDES * side)
    detections = match_detections(centers[rows], probability[rows], lesions)
    return _ScoredSlide(str(score.get("model")), lesions, detections, record.supervision == "negative")


def _read_patches(path: Path) -> tuple[_Floats, float, _Floats]:
    """Return the centres [n, 2] and the side of a slide's patches in level-0 pixels, and their probabilities [n]."""
    try:
        columns = pd.read_csv(path)[["x_l0", "y_l0", "size_l0", "p_tumor"]].to_numpy(np.float64)
    except (KeyError, ValueError, OSError):
        columns = np.empty((0, 4))
    if not len(columns) or not np.isfinite(columns).all():
        raise WsiFlError(f"{path}: damaged; predict the slide again")
    side = float(columns[0, 2])
    return columns[:, :2] + side / 2, side, columns[:, 3]


def _find_slide_lesions(context: RunContext, site: SiteFile, record: SlideRecord, quickhash: object) -> Lesions:
    """Return the lesions of a slide by its outlines, placed as `tile` places them."""
    pipeline = context.pipeline
    check_opens_safely(record.path, record.mpp_override, pipeline.slides.reader)
    with Slide(record.path, record.mpp_override, pipeline.slides.reader) as slide:
        if slide.quickhash != quickhash:
            raise WsiFlError(f"{record.path}: not the slide that was predicted; run `wsi-fl predict` again")
        if record.annotation is None:
            return find_lesions(shapely.MultiPolygon(), slide.mpp)
        tissue = replace(build_tissue_params(context.study, pipeline, site.annotations_origin), masks="")
        geometry = build_slide_geometry(slide, tissue)
        annotations = read_annotations(record.annotation, pipeline.tile.groups, geometry, site.annotations_origin)
        return find_lesions(annotations.tumor, slide.mpp)


def tabulate_lesions(scores: Sequence[LesionScores]) -> TextTable:
    """Return a row per site and rule of counting."""
    rates = [f"{rate:g}" for rate in FALSE_POSITIVE_RATES]
    rows = []
    for row in scores:
        for label, values in (("per slide", row["per_slide"]), ("per normal slide", row["per_normal_slide"])):
            cells = [nan] * (1 + len(rates)) if values is None else [sum(values) / len(values), *values]
            counts = f"{row['slides']} ({row['normal_slides']})", f"{row['lesions']} ({row['isolated']})"
            rows.append([row["site"], *counts, label, *(format_number(cell, 2) for cell in cells)])
    headings = ["", "slides (normal)", "lesions (isolated cells)", "false positives", "FROC", *rates]
    return TextTable("Lesions found in predicted test slides, by Camelyon16's rules", headings, rows)


def explain_left_out(scores: Sequence[LesionScores]) -> list[str]:
    """Return a sentence for each site with predicted slides that were left out."""
    return [
        f"{row['site']}: left out {', '.join(f'{n} {reason}' for reason, n in row['left_out'].items())}"
        for row in scores
        if row["left_out"]
    ]
