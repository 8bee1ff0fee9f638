"""The plan of a slide's patches, made from its thumbnail; only artifacts may need its pixels."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import ceil

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.slides.patching.annotations import Annotations, OutlineRole, read_annotations, share_inside
from wsi_fl.slides.patching.artifacts import ArtifactKind, describe_reasons, find_artifacts
from wsi_fl.slides.patching.outline_placement import Origin
from wsi_fl.slides.patching.slide_survey import PICTURE_PX, SlideFacts, SlideSurvey, survey_slide
from wsi_fl.slides.patching.tissue import TissueParams
from wsi_fl.slides.reading.reader import Reader
from wsi_fl.system import jpeg
from wsi_fl.types import CLASSES, GridSpec, SlideRecord, Supervision, WsiFlError

_PATCH_IN_THUMBNAIL_PX = 8
_PICTURE_QUALITY = 90
_HEALTHY, _TUMOR = CLASSES.index("healthy"), CLASSES.index("tumor")


@dataclass(frozen=True)
class PlanParams:
    """Criteria of patches; shares are of a patch's area."""

    min_tissue: float = 0.2
    min_tumor: float = 0.5
    tissue: TissueParams = field(default_factory=TissueParams)
    groups: Mapping[str, OutlineRole] = field(default_factory=dict)
    origin: Origin = None
    """The corner of the slide from which outlines count."""
    max_artifacts: Mapping[ArtifactKind, float] = field(default_factory=dict)
    """Artifacts for which patches are excluded, each with the largest share that is tolerated."""


def _label_patches(
    tissue_fraction: NDArray[np.float32],
    tumor_fraction: NDArray[np.float32],
    supervision: Supervision,
    is_positive: bool,
    params: PlanParams,
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return (keep bool[n], label int64[n]).

    With outlines a patch is tumour when some of it, and at least `min_tumor`, lies inside, and healthy only when it
    shares no area with tumour *and* the slide is negative or exhaustively outlined; others are dropped.
    Under weak supervision every patch with tissue takes its slide's label.
    """
    has_tissue = tissue_fraction >= params.min_tissue
    if supervision in {"weak", "negative", "unlabelled"}:
        label = _TUMOR if is_positive and supervision == "weak" else _HEALTHY
        return has_tissue, np.full(len(has_tissue), label, np.int64)
    is_tumor = (tumor_fraction > 0) & (tumor_fraction >= params.min_tumor)
    is_healthy = (tumor_fraction == 0) & (supervision == "annotated")
    return has_tissue & (is_tumor | is_healthy), np.where(is_tumor, _TUMOR, _HEALTHY).astype(np.int64)


@dataclass(frozen=True)
class SlidePlan(SlideFacts):
    """The n patches of one slide and its thumbnail."""

    xy_l0: NDArray[np.int64]
    """[n, 2] top-left corners (x, y), row by row."""
    label: NDArray[np.int64]
    tumor_fraction: NDArray[np.float32]
    """[n], NaN on weakly labelled slides."""
    picture: bytes
    """The thumbnail as JPEG: all plans of a site are in memory."""
    tissue_bits: NDArray[np.uint8]
    tissue_shape: tuple[int, int]
    outlines_l0: list[NDArray[np.float64]]
    """Rings [m, 2] of the tumour's polygons."""
    aside_xy_l0: NDArray[np.int64]
    """[k, 2] corners of the patches excluded for their quality."""
    aside_reason: NDArray[np.str_]
    """[k] artifacts."""
    tissue_by: str
    """Method of tissue segmentation."""
    tissue_gain: float
    """Area of tissue over that by saturation."""

    @property
    def thumbnail(self) -> NDArray[np.uint8]:
        """uint8[h, w, 3]"""
        return np.asarray(Image.open(io.BytesIO(self.picture)))

    @property
    def tissue(self) -> NDArray[np.bool_]:
        """bool[h, w] over the thumbnail."""
        height, width = self.tissue_shape
        return np.unpackbits(self.tissue_bits, count=height * width).reshape(height, width).astype(bool)


class AllPatchesExcluded(WsiFlError):
    """All k patches of a slide have artifacts: the reasons [k], and method and gain as in `SlidePlan`."""

    def __init__(self, slide: str, reasons: NDArray[np.str_], tissue_by: str, tissue_gain: float) -> None:
        summary = f"all {len(reasons)} are excluded ({describe_reasons(reasons)})"
        super().__init__(f"{slide}: no patch to keep: {summary}; see tile.qc")
        self.reasons, self.tissue_by, self.tissue_gain = reasons, tissue_by, tissue_gain


def plan_slide(
    record: SlideRecord, spec: GridSpec, params: PlanParams | None = None, *, reader: Reader = "auto"
) -> SlidePlan:
    """Find tissue, lay the grid and label it, from a thumbnail and the annotation; some artifacts need patches too.

    Raises:
        WsiFlError: when the slide cannot be used: unreadable, without mpp, coarser than `spec` by over 10 %,
            without tissue, contradicting its annotation, or without a patch to keep.
        AllPatchesExcluded: when all patches have artifacts.
    """
    params = params or PlanParams()
    survey = survey_slide(record, spec, params.tissue, patch_px=_PATCH_IN_THUMBNAIL_PX, section="tile", reader=reader)
    annotations = _read_slide_annotations(survey, params)
    notes = [*survey.notes, *(annotations.notes if annotations is not None else ())]
    tumor, unsure = _measure_outlined(survey, annotations, params)
    keep, label = _label_patches(survey.tissue, tumor, record.supervision, record.positive, params)
    keep &= (unsure == 0) | (label == _TUMOR)
    if not keep.any():
        reason = "; ".join([_explain_no_patch(survey, params, tumor, unsure), *notes])
        raise WsiFlError(f"{record.path.name}: no patch to keep: {reason}")
    excluded = np.flatnonzero(keep)
    artifacts = find_artifacts(survey, excluded, params.max_artifacts)
    excluded, artifacts = excluded[artifacts != ""], artifacts[artifacts != ""]
    keep[excluded] = False
    if not keep.any():
        raise AllPatchesExcluded(record.path.name, artifacts, survey.segmentation.method, survey.segmentation.gain)
    if annotations is not None and record.positive and not (label[keep] == _TUMOR).any():
        notes.append(_explain_no_tumor(keep.sum(), tumor, artifacts[label[excluded] == _TUMOR], params))
    picture, mask = survey.thumbnail, survey.segmentation.mask
    if (factor := ceil(max(mask.shape) / PICTURE_PX)) > 1:  # all plans of a site are in memory
        picture = np.array(Image.fromarray(picture).reduce(factor))
        mask = np.asarray(Image.fromarray(mask.astype(np.uint8) * 255).reduce(factor)) > 127
    rings = shapely.get_rings(shapely.get_parts(annotations.tumor)) if annotations is not None else []
    return SlidePlan(
        **{field.name: getattr(survey, field.name) for field in fields(SlideFacts)}
        | {"downsample": survey.downsample * factor, "notes": tuple(notes)},
        xy_l0=survey.xy_l0[keep],
        label=label[keep],
        tumor_fraction=tumor[keep],
        picture=jpeg.encode(picture, _PICTURE_QUALITY),
        tissue_bits=np.packbits(mask),
        tissue_shape=mask.shape,
        outlines_l0=[shapely.get_coordinates(ring) for ring in rings],
        aside_xy_l0=survey.xy_l0[excluded],
        aside_reason=artifacts,
        tissue_by=survey.segmentation.method,
        tissue_gain=survey.segmentation.gain,
    )


def _measure_outlined(
    survey: SlideSurvey, annotations: Annotations | None, params: PlanParams
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the shares [n] of each patch that are outlined as tumour, NaN under weak supervision, and as unsure."""
    tumor, unsure = np.zeros((2, len(survey.tissue)), np.float32)
    if annotations is not None:
        rows = survey.tissue >= params.min_tissue
        tumor[rows] = share_inside(annotations.tumor, survey.xy_l0[rows], survey.side_l0)
        unsure[rows] = share_inside(annotations.unsure, survey.xy_l0[rows], survey.side_l0)
    if survey.record.supervision in {"weak", "unlabelled"}:
        tumor[:] = np.nan
    return tumor, unsure


def _read_slide_annotations(survey: SlideSurvey, params: PlanParams) -> Annotations | None:
    """Return the slide's outlines, checked against its label; None if labels are weak or there are no outlines."""
    record = survey.record
    if record.annotation is None and record.supervision in {"annotated", "partial"}:
        raise WsiFlError(f"{record.path.name}: its supervision is {record.supervision} but it has no annotation")
    if record.annotation is None or record.supervision == "weak":
        return None
    annotations = read_annotations(record.annotation, params.groups, survey.slide_geometry, params.origin)
    is_on_slide = shapely.intersects(annotations.tumor, shapely.box(0, 0, *survey.size_l0))
    if record.positive and not is_on_slide:
        problem = "none of its tumour outlines is on" if annotations.tumor.area else "no tumour is outlined on"
        reason = f"{record.annotation}: {problem} the slide {record.slide}, which is labelled tumour"
        raise WsiFlError("; ".join([reason, *annotations.notes]))
    if record.supervision == "negative" and is_on_slide:
        raise WsiFlError(f"{record.annotation}: outlines tumour on {record.slide}, which is labelled negative")
    return annotations


def _explain_no_tumor(n: int, tumor: NDArray[np.float32], artifacts: NDArray[np.str_], params: PlanParams) -> str:
    """Explain why none of the n patches of a slide with outlined tumour is tumour."""
    needed = f"{params.min_tumor:.0%} is needed" if params.min_tumor else "some is needed"
    reason = f"its outlines cover at most {tumor.max():.0%} of a patch with tissue, and {needed}"
    if len(artifacts):
        reason = f"{len(artifacts)} that are tumour were excluded ({describe_reasons(artifacts)})"
    return f"labelled tumour and outlined, but none of its {n} patches is tumour: {reason}"


def _explain_no_patch(
    survey: SlideSurvey, params: PlanParams, tumor: NDArray[np.float32], unsure: NDArray[np.float32]
) -> str:
    tissue = survey.tissue
    rows = tissue >= params.min_tissue
    if not rows.any():
        return (
            f"of {len(tissue)} grid positions none holds {100 * params.min_tissue:.4g}% tissue (most "
            f"{100 * tissue.max():.4g}%); lower tile.min_tissue or tile.size_px"
        )
    touches_tumor = rows & (tumor > 0)
    share = f"are less than {100 * params.min_tumor:.4g}% tumour" if params.min_tumor else "touch tumour"
    return (
        f"{rows.sum()} of {len(tissue)} grid positions hold {100 * params.min_tissue:.4g}% tissue, of these "
        f"{touches_tumor.sum()} {share}, {(rows & (unsure > 0)).sum()} "
        f"touch outlines without a group and {(rows & (tumor == 0)).sum()} lie outside on a slide whose supervision is "
        f"{survey.record.supervision}; lower tile.size_px"
    )
