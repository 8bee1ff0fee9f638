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

from wsi_fl.slides.patching.patches import AllSetAside, PlanParams, SlidePlan, plan_slide
from wsi_fl.slides.patching.placing import Origin
from wsi_fl.slides.patching.quality import QualityParams, Segmenter
from wsi_fl.slides.patching.splits import SEED, sample_rows
from wsi_fl.slides.patching.survey import mask_digest
from wsi_fl.slides.patching.tissue import Method, TissueParams
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Reader
from wsi_fl.stages.prepare.sources import Done, Listed, Quality
from wsi_fl.stages.work.console import reason_of
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import atomic, sha256_of
from wsi_fl.system.ordered import in_order
from wsi_fl.types import GridSpec, SlideRecord, UsageError

_MADE = 5
"""Version of the plans; stored plans of another version are made again."""
_ONE_FILE = {".bif", ".ndpi", ".scn", ".svs", ".svslide", ".tif", ".tiff"}
"""Suffixes of slides in one file, identified by its size and time; other slides are planned each time."""
_PLANNERS = 4
"""Slides planned at once: each needs some hundred megabytes for its tissue mask."""


def spec_of(pipeline: Pipeline) -> GridSpec:
    size = pipeline.tile.size_px
    return GridSpec(size, pipeline.tile.mpp, pipeline.tile.stride_px or size)


def params_of(study: Study, pipeline: Pipeline, origin: Origin = None) -> PlanParams:
    """Return the pipeline's requirements on patches; outlines and masks are relative to an origin."""
    tiling, digest = pipeline.tile, ""
    if tiling.segmenter and tiling.qc:
        try:
            digest = sha256_of(study.resolve(tiling.segmenter))
        except OSError as error:
            raise UsageError(f"tile.segmenter = {tiling.segmenter!r}: {error.strerror}") from None
    most = {f"max_{fault}": share for fault, share in tiling.qc.items()}
    return PlanParams(
        min_tissue=tiling.min_tissue,
        tissue=tissue_of(study, pipeline, origin),
        groups=tiling.groups,
        origin=origin,
        quality=QualityParams(tuple(tiling.qc), **most, segmenter=digest),
    )


def segmenter_of(study: Study, pipeline: Pipeline) -> Segmenter | None:
    """Return the pipeline's artifact segmenter, if it is used; UsageError where its classes are none of `tile.qc`."""
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


def tissue_of(study: Study, pipeline: Pipeline, origin: Origin = None) -> TissueParams:
    """Return the pipeline's settings of tissue detection; masks are relative to an origin."""
    if not pipeline.tissue.masks:
        return TissueParams(method=cast(Method, pipeline.tissue.method))
    masks = study.resolve(pipeline.tissue.masks)
    if not masks.is_dir():
        raise UsageError(f"tissue.method = {pipeline.tissue.masks!r}: no such folder")
    return TissueParams(masks=str(masks), origin=origin)


def quality_of_plan(good: int, found: SlidePlan | AllSetAside, reasons: NDArray[np.str_]) -> Quality:
    """Return the quality of a slide from its number of good patches and the reasons of excluded ones."""
    return Quality(
        good=good,
        aside=dict(Counter(reasons.tolist())),
        tissue_by=found.tissue_by,
        tissue_gain=found.tissue_gain,
    )


def made_of(record: SlideRecord, spec: GridSpec, params: PlanParams, reader: Reader) -> str | None:
    """Return a digest of all inputs of a slide's plan; None where the slide must be planned each time.

    A file of equal size and modification time counts as the same.

    Raises:
        OSError: when the slide or its annotation is missing.
    """
    if record.path.suffix.lower() not in _ONE_FILE or record.path.is_dir():
        return None
    file, outlines = record.path.stat(), record.annotation
    said = [
        _MADE,
        [str(record.path.absolute()), file.st_size, file.st_mtime_ns],
        [record.supervision, record.positive, record.mpp_override],
        [outlines.suffix, sha256_of(outlines)] if outlines else [],
        [asdict(spec), asdict(params), reader],
        mask_digest(Path(params.tissue.masks), record.slide) if params.tissue.masks else "",
    ]
    return hashlib.sha256(json.dumps(said, default=sorted).encode()).hexdigest()


class Plans:
    """The plans of a site's slides in a folder; every rank reads all of them."""

    def __init__(self, folder: Path, records: Sequence[SlideRecord], spec: GridSpec) -> None:
        self.folder, self.records, self.spec = folder, records, spec

    def holds(self, number: int, made: str) -> bool:
        """Return whether the slide with this number has an intact plan from the same inputs."""
        try:
            with zipfile.ZipFile(path := self._path(number)) as archive:
                whole = archive.testzip() is None
            with np.load(path) as file:
                return whole and str(file["made"]) == made
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            return False

    def save(self, number: int, plan: SlidePlan, made: str | None) -> None:
        """Store the plan of the slide with this number, and the digest of its inputs."""
        arrays: dict[str, NDArray[Any]] = {"made": np.array(made or "")}
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
        with atomic(self._path(number)) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for allow_pickle

    def load(self, number: int) -> SlidePlan:
        """Return a stored plan."""
        values: dict[str, Any] = {}
        with np.load(self._path(number)) as file:
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

    def slide(self, number: int) -> str:
        return self.records[number].slide

    def labels(self, number: int) -> NDArray[np.int8]:
        """Return only the labels of a slide's patches."""
        with np.load(self._path(number)) as file:
            return np.asarray(file["label"], np.int8)

    def marks(self, numbers: Iterable[int]) -> dict[str, frozenset[str]]:
        """Return slide → digest of its content, for slides with a quickhash."""
        found = {}
        for number in numbers:
            with np.load(self._path(number)) as file:
                if quickhash := json.loads(str(file["plain"]))["quickhash"]:
                    found[self.slide(number)] = frozenset({f"slide {quickhash}"})
        return found

    def in_tiles(self, number: int) -> bool:
        """Return whether a slide's patches are whole native tiles."""
        with np.load(self._path(number)) as file:
            return bool(json.loads(str(file["plain"]))["in_tiles"])

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.slide(number)}.npz"


def plan_each(numbers: Sequence[int], listed: Listed, plans: Plans, threads: int) -> Iterator[Done]:
    """Plan and store the slides with these numbers, a few at a time; current plans are reused.

    Yields:
        The outcomes in order, with a reason for excluded slides.
    """
    params = params_of(listed.study, listed.pipeline, listed.site.annotations_origin)
    segmenter = segmenter_of(listed.study, listed.pipeline)
    spec, reader = plans.spec, listed.pipeline.slides.reader

    def one(number: int) -> Done:
        record = plans.records[number]
        try:
            of = made_of(record, spec, params, reader)
            if of is not None and plans.holds(number, of):
                return Done(record.slide)
            check_opens_safely(record.path, record.mpp_override, reader)
            found = plan_slide(record, spec, params, reader=reader, segmenter=segmenter)
        except Exception as error:  # the failure of one slide must not end the others
            faults = quality_of_plan(0, error, error.reasons) if isinstance(error, AllSetAside) else None
            return Done(record.slide, reason=reason_of(error), quality=faults)
        plans.save(number, found, of)
        return Done(record.slide, note="; ".join(found.notes))

    n_threads = min(threads, _PLANNERS)
    yield from in_order(one, numbers, threads=n_threads, ahead=2 * n_threads)


def choose(
    plans: Plans, numbers: Sequence[int], *, balance: bool, max_per_slide: int | None, seed: int = SEED
) -> list[NDArray[np.bool_]]:
    """Return masks of the sampled patches of each slide, the same on every rank.

    With `balance` classes are balanced over the site; without it no slide's sample depends on other slides
    (`sample_rows`).
    """
    if not numbers:
        return []
    labels = [plans.labels(number) for number in numbers]
    sizes = [len(label) for label in labels]
    keep = sample_rows(
        np.concatenate(labels).astype(np.int64),
        np.repeat(np.arange(len(sizes)), sizes),
        [plans.slide(number) for number in numbers],
        balance=balance,
        max_per_slide=max_per_slide,
        seed=seed,
    )
    return np.split(keep, np.cumsum(sizes)[:-1])
