"""Plans of `tile`: parameters from the pipeline, and a plan per slide.

Plans are stored on disk: a site needs no more memory than a slide, and the next `tile` opens no slide with the same
file, annotation and settings again.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.outline_placement import Origin
from wsi_fl.slides.patching.slide_plan import AllPatchesExcluded, PlanParams, SlidePlan, plan_slide
from wsi_fl.slides.patching.slide_survey import digest_mask
from wsi_fl.slides.patching.splits import SEED, sample_rows
from wsi_fl.slides.patching.tissue import Method, TissueParams
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Reader
from wsi_fl.stages.prepare.slide_lists import Outcome, SlideList, SlideQuality
from wsi_fl.stages.runtime.console import describe_failure
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import StageFile, atomic_path, file_sha256
from wsi_fl.system.prefetch import map_in_order
from wsi_fl.types import GridSpec, SlideRecord, UsageError

_PLAN_VERSION = 6
"""Version of the plans; stored plans of another version are made again."""
_ONE_FILE_SUFFIXES = {".bif", ".ndpi", ".scn", ".svs", ".svslide", ".tif", ".tiff"}
"""Suffixes of slides in one file, identified by its size and time; other slides are planned each time."""
_PLANNING_THREADS = 4
"""Slides planned at once: each needs some hundred megabytes for its tissue mask."""


def build_grid_spec(pipeline: Pipeline) -> GridSpec:
    size = pipeline.tile.size_px
    return GridSpec(size, pipeline.tile.mpp, pipeline.tile.stride_px or size)


def build_plan_params(study: Study, pipeline: Pipeline, origin: Origin = None) -> PlanParams:
    """Return the pipeline's requirements on patches; outlines and masks are relative to an origin."""
    return PlanParams(
        min_tissue=pipeline.tile.min_tissue,
        min_tumor=pipeline.tile.min_tumor,
        tissue=build_tissue_params(study, pipeline, origin),
        groups=pipeline.tile.groups,
        origin=origin,
        max_artifacts=pipeline.tile.qc,
    )


def build_tissue_params(study: Study, pipeline: Pipeline, origin: Origin = None) -> TissueParams:
    """Return the pipeline's settings of tissue detection; masks are relative to an origin."""
    if not pipeline.tissue.mask_folder:
        return TissueParams(method=cast(Method, pipeline.tissue.method))
    masks = study.resolve(pipeline.tissue.mask_folder)
    if not masks.is_dir():
        raise UsageError(f"tissue.method = {pipeline.tissue.mask_folder!r}: no such folder")
    return TissueParams(masks=str(masks), origin=origin)


def plan_quality(good: int, plan: SlidePlan | AllPatchesExcluded, reasons: NDArray[np.str_]) -> SlideQuality:
    """Return the quality of a slide from its number of good patches and the reasons of excluded ones."""
    return SlideQuality(
        good=good, aside=dict(Counter(reasons.tolist())), tissue_by=plan.tissue_by, tissue_gain=plan.tissue_gain
    )


def _hash_plan_inputs(record: SlideRecord, spec: GridSpec, params: PlanParams, reader: Reader) -> str | None:
    """Return a digest of all inputs of a slide's plan; None where the slide must be planned each time.

    A file of equal size and modification time counts as the same.

    Raises:
        OSError: when the slide or its annotation is missing.
    """
    if record.path.suffix.lower() not in _ONE_FILE_SUFFIXES or record.path.is_dir():
        return None
    file, outlines = record.path.stat(), record.annotation
    inputs = [
        _PLAN_VERSION,
        [str(record.path.absolute()), file.st_size, file.st_mtime_ns],
        [record.supervision, record.positive, record.mpp_override],
        [outlines.suffix, file_sha256(outlines)] if outlines else [],
        [asdict(spec), asdict(params), reader],
        digest_mask(Path(params.tissue.masks), record.slide) if params.tissue.masks else "",
    ]
    return hashlib.sha256(json.dumps(inputs, default=sorted).encode()).hexdigest()


class Plans:
    """The plans of a site's slides in a folder; every job reads all of them.

    Args:
        stage_file: writes them, as `atomic_path` does.
    """

    def __init__(
        self, folder: Path, records: Sequence[SlideRecord], spec: GridSpec, stage_file: StageFile = atomic_path
    ) -> None:
        self.folder, self.records, self.spec, self._stage_file = folder, records, spec, stage_file

    def has_plan(self, number: int, digest: str) -> bool:
        """Return whether the slide with this number has an intact plan from the same inputs."""
        try:
            with zipfile.ZipFile(path := self._plan_path(number)) as archive:
                is_intact = archive.testzip() is None
            with np.load(path) as file:
                return is_intact and str(file["made"]) == digest
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            return False

    def save_plan(self, number: int, plan: SlidePlan, digest: str | None) -> None:
        """Store the plan of the slide with this number, and the digest of its inputs."""
        arrays: dict[str, NDArray[Any]] = {"made": np.array(digest or "")}
        plain: dict[str, object] = {}
        for field in fields(SlidePlan):
            value = getattr(plan, field.name)
            if field.name in {"record", "spec"}:
                continue
            if isinstance(value, np.ndarray):
                arrays[field.name] = value
            elif isinstance(value, bytes):
                arrays[f"bytes {field.name}"] = np.frombuffer(value, np.uint8)
            elif isinstance(value, list):
                arrays[f"cuts {field.name}"] = np.cumsum([len(part) for part in value], dtype=np.int64)
                arrays[f"list {field.name}"] = np.concatenate(value) if value else np.empty((0, 2))
            else:
                plain[field.name] = list(value) if isinstance(value, tuple) else value
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays["plain"] = np.array(json.dumps(plain))
        with self._stage_file(self._plan_path(number)) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for allow_pickle

    def load_plan(self, number: int) -> SlidePlan:
        """Return a stored plan."""
        values: dict[str, Any] = {}
        with np.load(self._plan_path(number)) as file:
            for key in file.files:
                kind, _, name = key.rpartition(" ")
                if kind == "bytes":
                    values[name] = file[key].tobytes()
                elif kind == "list":
                    values[name] = np.split(file[key], file[f"cuts {name}"])[:-1]
                elif not kind and key not in {"plain", "made"}:
                    values[name] = file[key]
            for name, value in json.loads(str(file["plain"])).items():
                values[name] = tuple(value) if isinstance(value, list) else value
        return SlidePlan(record=self.records[number], spec=self.spec, **values)

    def slide_name(self, number: int) -> str:
        return self.records[number].slide

    def load_labels(self, number: int) -> NDArray[np.int8]:
        """Return only the labels of a slide's patches."""
        with np.load(self._plan_path(number)) as file:
            return np.asarray(file["label"], np.int8)

    def load_marks(self, numbers: Iterable[int]) -> dict[str, frozenset[str]]:
        """Return slide → digest of its content, for slides with a quickhash."""
        marks = {}
        for number in numbers:
            with np.load(self._plan_path(number)) as file:
                if quickhash := json.loads(str(file["plain"]))["quickhash"]:
                    marks[self.slide_name(number)] = frozenset({f"slide {quickhash}"})
        return marks

    def is_native_tiled(self, number: int) -> bool:
        """Return whether a slide's patches are whole native tiles."""
        with np.load(self._plan_path(number)) as file:
            return bool(json.loads(str(file["plain"]))["in_tiles"])

    def _plan_path(self, number: int) -> Path:
        return self.folder / f"{self.slide_name(number)}.npz"


def plan_slides(numbers: Iterable[int], slides: SlideList, plans: Plans, threads: int) -> Iterator[Outcome]:
    """Plan and store the slides with these numbers, a few at a time; current plans are reused.

    Yields:
        The outcomes in order, with a reason for excluded slides.
    """
    params = build_plan_params(slides.study, slides.pipeline, slides.site.annotations_origin)
    spec, reader = plans.spec, slides.pipeline.slides.reader

    def plan_number(number: int) -> Outcome:
        record = plans.records[number]
        try:
            digest = _hash_plan_inputs(record, spec, params, reader)
            if digest is not None and plans.has_plan(number, digest):
                return Outcome(record.slide)
            check_opens_safely(record.path, record.mpp_override, reader)
            plan = plan_slide(record, spec, params, reader=reader)
        except Exception as error:  # the failure of one slide must not end the others
            faults = plan_quality(0, error, error.reasons) if isinstance(error, AllPatchesExcluded) else None
            return Outcome(record.slide, reason=describe_failure(error), quality=faults)
        plans.save_plan(number, plan, digest)
        return Outcome(record.slide, note="; ".join(plan.notes))

    n_threads = min(threads, _PLANNING_THREADS)
    yield from map_in_order(plan_number, numbers, threads=n_threads, ahead=2 * n_threads)


def sample_patches(
    plans: Plans,
    numbers: Sequence[int],
    *,
    balance: bool,
    max_per_slide: int | None,
    max_per_site: int = 0,
    seed: int = SEED,
) -> list[NDArray[np.bool_]]:
    """Return masks of the sampled patches of each slide, the same on every rank.

    With `balance` classes are balanced over the site; without it no slide's sample depends on other slides
    (`sample_rows`).
    """
    if not numbers:
        return []
    labels = [plans.load_labels(number) for number in numbers]
    sizes = [len(label) for label in labels]
    keep = sample_rows(
        np.concatenate(labels).astype(np.int64),
        np.repeat(np.arange(len(sizes)), sizes),
        [plans.slide_name(number) for number in numbers],
        balance=balance,
        max_per_slide=max_per_slide,
        seed=seed,
        max_per_site=max_per_site,
        patients=[plans.records[number].patient for number in numbers] if max_per_site else (),
    )
    return np.split(keep, np.cumsum(sizes)[:-1])


def select_patches(
    plans: Plans, outcomes: Sequence[Outcome], pipeline: Pipeline
) -> list[tuple[int, NDArray[np.bool_]]]:
    """Return (number of a planned slide, mask of its selected patches) of each."""
    numbers = [number for number, outcome in enumerate(outcomes) if outcome.reason is None]
    settings = pipeline.tile
    keep = sample_patches(
        plans,
        numbers,
        balance=settings.balance,
        max_per_slide=settings.max_per_slide,
        max_per_site=settings.max_per_site,
    )
    return list(zip(numbers, keep, strict=True))
