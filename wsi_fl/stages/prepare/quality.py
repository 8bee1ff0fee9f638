"""Tissue and quality: what the pipeline asks of slides, and what `tile` tells of them."""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Mapping
from math import isfinite, isnan
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.patches import AllSetAside, PlanParams, SlidePlan
from wsi_fl.slides.patching.quality import KINDS, QualityParams, Segmenter
from wsi_fl.slides.patching.tissue import Method, TissueParams
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import ordinary, write_text
from wsi_fl.types import UsageError, WsiFlError


def params_of(study: Study, pipeline: Pipeline) -> PlanParams:
    """Return what makes a patch worth keeping, as the pipeline says."""
    tiling = pipeline.tile
    return PlanParams(
        min_tissue=tiling.min_tissue,
        tissue=tissue_of(study, pipeline),
        groups=tiling.groups,
        quality=QualityParams(
            tuple(tiling.qc),
            **{f"max_{fault}": share for fault, share in tiling.qc.items()},
            segmenter=_digest_of_segmenter(study, pipeline),
        ),
    )


def segmenter_of(study: Study, pipeline: Pipeline) -> Segmenter | None:
    """Return the segmenter that the pipeline names, if it looks for faults at all.

    Raises:
        WsiFlError: when its file is missing or damaged, or does not say what it is.
        UsageError: when it knows none of the faults that are looked for.
    """
    named = pipeline.tile.segmenter
    if not (named and pipeline.tile.qc):
        return None
    from wsi_fl.models.segmenter import load_segmenter

    segmenter = load_segmenter(study.resolve(named))
    if not set(segmenter.classes) & set(pipeline.tile.qc):
        raise UsageError(
            f"tile.segmenter = {named!r} finds {', '.join(segmenter.classes)}, but none of tile.qc = "
            f"{', '.join(pipeline.tile.qc)}"
        )
    return segmenter


def _digest_of_segmenter(study: Study, pipeline: Pipeline) -> str:
    """Return the SHA-256 of the segmenter's file, "" where none is used."""
    named = pipeline.tile.segmenter
    if not (named and pipeline.tile.qc):
        return ""
    try:
        with ordinary(study.resolve(named)).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"tile.segmenter = {named!r}: {error.strerror}") from None


def tissue_of(study: Study, pipeline: Pipeline) -> TissueParams:
    """Return how tissue is told from background, as the pipeline says.

    Raises:
        UsageError: when the folder of masks is not there.
    """
    masks = study.resolve(pipeline.tissue.masks) if pipeline.tissue.masks else None
    if masks is not None and not masks.is_dir():
        raise UsageError(f"tissue.method = {pipeline.tissue.masks!r}: no such folder")
    if masks is not None:
        return TissueParams(masks=str(masks))
    return TissueParams(method=cast(Method, pipeline.tissue.method))


class Quality(TypedDict):
    """Of one slide: patches that are good, patches set aside by fault, how its tissue was found, and its area for each
    of that by saturation."""

    good: int
    aside: dict[str, int]
    tissue_by: str
    tissue_gain: float


def quality_of_plan(plan: SlidePlan) -> Quality:
    """Return what a plan says of its slide's quality."""
    return _quality(len(plan.xy_l0), plan.aside_reason, plan.tissue_by, plan.tissue_gain)


def quality_of_none(error: AllSetAside) -> Quality:
    """Return the quality of a slide without a good patch."""
    return _quality(0, error.reasons, error.tissue_by, error.tissue_gain)


def _quality(good: int, reasons: NDArray[np.str_], tissue_by: str, tissue_gain: float) -> Quality:
    aside = dict(Counter(reasons.tolist()))
    return {"good": good, "aside": aside, "tissue_by": tissue_by, "tissue_gain": tissue_gain}


def quality_row(seen: Mapping[str, Quality]) -> dict[str, Any]:
    """Return what the document of `tile` says of a site.

    It is how many patches were set aside for which fault, and by which method tissue was found on how many slides,
    with the median gain of those on which saturation finds some.

    Args:
        seen: the quality of each slide.
    """
    aside: Counter[str] = Counter()
    gains: dict[str, list[float]] = {}
    for one in seen.values():
        aside.update(one["aside"])
        gains.setdefault(one["tissue_by"], []).append(one["tissue_gain"])
    return {
        "set_aside": dict(sorted(aside.items())),
        "tissue": {
            name: {
                "slides": len(gain),
                "gain": median(found) if (found := list(filter(isfinite, gain))) else None,
            }
            for name, gain in sorted(gains.items())
        },
    }


def write_quality(path: Path, seen: Mapping[str, Quality]) -> None:
    """Write a line per slide; no file where nothing was set aside and all tissue was found by saturation."""
    if not any(one["aside"] or one["tissue_by"] != "saturation" for one in seen.values()):
        path.unlink(missing_ok=True)
        return
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["slide", "good", *KINDS, "tissue_by", "tissue_gain"])
    for slide, one in seen.items():
        counts = [one["aside"].get(kind, 0) for kind in KINDS]
        gain = "" if isnan(one["tissue_gain"]) else f"{one['tissue_gain']:.3g}"
        table.writerow([slide, one["good"], *counts, one["tissue_by"], gain])
    write_text(path, text.getvalue())


def read_set_aside(path: Path) -> dict[str, dict[str, int]]:
    """Return slide → how many patches were set aside for which fault, as `write_quality` wrote it; {} for no file.

    Raises:
        WsiFlError: when it is another table.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {
                line["slide"]: {kind: n for kind in KINDS if (n := int(line[kind]))}
                for line in csv.DictReader(file)
            }
    except (KeyError, TypeError, ValueError):
        raise WsiFlError(f"{path}: not what `wsi-fl tile` writes; tile the site again") from None


def quality_lines(row: Mapping[str, Any]) -> Lines:
    """Say what patches of a site were set aside for, and where tissue was not found by saturation."""
    where = Path(row["store"]).parent / "quality.csv"
    if aside := row["set_aside"]:
        said = ", ".join(f"{n} {kind}" for kind, n in aside.items())
        yield Line(
            f"  {row['site']}: {sum(aside.values())} patches set aside ({said}); by slide: {where}",
            "yellow",
        )
    for name, one in row["tissue"].items():
        if name != "saturation":
            area = "" if name == "masks" else f", its area {_area(one['gain'])}"
            yield Line(
                f"  {row['site']}: tissue of {one['slides']} slides by {name}{area}; by slide: {where}"
            )


def _area(gain: float | None) -> str:
    """Return how large tissue is beside that by saturation, in words."""
    return "where saturation finds none" if gain is None else f"{gain:.2g} × that by saturation"
