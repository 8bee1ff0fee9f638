"""`tile`: the patch store of a site.

Slides are planned (tissue, grid, labels) from thumbnails and annotations alone; patches are chosen over the
whole site; only then are pixels read, slide by slide, into shards. A finished shard whose fingerprint still
fits is not read again, so a killed job loses at most the slide in hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.patches import AllSetAside, SlidePlan, plan_slide
from wsi_fl.slides.patching.splits import SEED, assign_splits
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.stages.prepare.bag_labels import stored_classes
from wsi_fl.stages.prepare.quality import Quality, params_of, quality_of_none, segmenter_of, write_quality
from wsi_fl.stages.prepare.sources import Listed, list_slides
from wsi_fl.stages.prepare.tables import first_reason, say_tables, storage_note, tile_row, weak_note
from wsi_fl.stages.prepare.tile_plans import Plans, choose, made_of, plan_each
from wsi_fl.stages.prepare.tile_shards import Wanted, Written, check_space, shard_path, write_each
from wsi_fl.stages.work.console import Watcher, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.columns import Counts, link_shards, linked
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import locked, remove_strays
from wsi_fl.types import GridSpec, SetAside, SlideRecord, WsiFlError


def tile(
    study: Study,
    *,
    site: str | None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Tile one site, or with `site` None every site of the pipeline; return the `--json` document.

    Started under mpiexec or srun, the ranks share the slides of each site, and all but the first return {}.
    """
    job = Job()
    told = job.watched(watcher)
    listed = job.each(lambda: list_slides(study, site, pipeline_name, overrides))
    if job.first:
        for one in listed:
            say_tables(one.site.name, one.said)
            if note := weak_note(one.records):
                say(f"  {one.records[0].site}: {note}", style="yellow")
    for one in listed:
        told.update(one.site.name, 0, len(one.records))
    rows = [_tile_site(one, job, told) for one in listed]
    which = "--all" if site is None else f"--site {site}"
    named = "" if pipeline_name is None else f" --pipeline {pipeline_name}"
    return {"sites": rows, "next": _next_steps(listed[0].pipeline, which, named)} if job.first else {}


def _next_steps(pipeline: Pipeline, which: str, named: str) -> list[str]:
    """The commands between stores and a trained model.

    Example:
        >>> _next_steps(Pipeline(train={"data": "features"}), "--site C1", " --pipeline deep")
        ['wsi-fl features --site C1 --pipeline deep', 'wsi-fl train --method proxyfl --pipeline deep']
    """
    steps = [f"wsi-fl features {which}"] if pipeline.train.data == "features" else []
    return [step + named for step in (*steps, "wsi-fl train --method proxyfl")]


def _tile_site(listed: Listed, job: Job, watcher: Watcher) -> dict[str, Any]:
    """All ranks plan, then all write shards, each its share; the first one holds the lock and writes the columns."""
    began = time.perf_counter()
    study, name, pipeline = listed.study, listed.site.name, listed.pipeline
    folder, spec, tiling = study.store(name).parent, spec_of(pipeline), pipeline.tile
    records = assign_splits(listed.records, test_fraction=pipeline.slides.test_fraction)
    plans = Plans(folder / ".plans", records, spec)
    failed = list(listed.aside)
    with job.first_holds(_locked(folder, name)):
        numbers, seen = _plan_all(listed, records, plans, job, watcher, failed)
        written = _write_all(listed, plans, numbers, job, watcher)
        failed += [SetAside(records[one.number].slide, one.reason) for one in written if one.reason]
        shards = [shard_path(folder, records[one.number].slide) for one in written if one.content]

        def write_columns() -> Counts:
            if not shards:
                raise WsiFlError(f"site {name}: no slide gave a patch; {first_reason(failed)}")
            meta = StoreMeta(name, stored_classes(listed.site, {}), spec, min_tissue=tiling.min_tissue)
            store = study.store(name)
            counts = linked(store, meta, shards) or link_shards(store, meta, shards)
            kept = {shard.stem for shard in shards}
            remove_strays((folder / "slides", folder / "overview", plans.folder), kept)
            return counts

        counts = job.first_does(write_columns)
    if counts is None:
        return {}
    if note := storage_note([one.content for one in written if one.content], pipeline.store.pixels):
        say(f"  {name}: {note}", style="yellow")
    n_slides = len(records) + len(listed.aside)
    seen |= {records[one.number].slide: one.quality for one in written if one.quality}
    write_quality(folder / "quality.csv", seen)
    return tile_row(study, name, counts, failed, seen, n_slides=n_slides, seconds=time.perf_counter() - began)


@contextmanager
def _locked(folder: Path, site: str) -> Iterator[None]:
    """Hold the site's folder."""
    with locked(folder, site):
        (folder / "slides").mkdir(exist_ok=True)
        yield


def spec_of(pipeline: Pipeline) -> GridSpec:
    size = pipeline.tile.size_px
    return GridSpec(size, pipeline.tile.mpp, pipeline.tile.stride_px or size)


def _plan_all(
    listed: Listed,
    records: Sequence[SlideRecord],
    plans: Plans,
    job: Job,
    watcher: Watcher,
    failed: list[SetAside],
) -> tuple[list[int], dict[str, Quality]]:
    """Plan every slide; plans go to `plans`, slides without one to `failed`.

    Return the numbers of the others, and what is wrong with slides of faults alone.
    """
    n, name = len(records), listed.site.name
    found = job.share(
        range(n),
        planner(listed, records, plans, job),
        lambda done, _: watcher.update(name, done / 2, n, "finding tissue"),
    )
    for record, (reason, _) in zip(records, found, strict=True):
        if reason:
            failed.append(SetAside(record.slide, reason))
    faulty = {record.slide: quality for record, (_, quality) in zip(records, found, strict=True) if quality}
    return [number for number, (reason, _) in enumerate(found) if reason is None], faulty


def planner(
    listed: Listed, records: Sequence[SlideRecord], plans: Plans, job: Job
) -> Callable[[Sequence[int]], Iterator[tuple[str | None, Quality | None]]]:
    """Return what plans slides: it yields why one cannot be used, and its quality where faults are the reason."""
    params = params_of(listed.study, listed.pipeline)
    segmenter = segmenter_of(listed.study, listed.pipeline)
    spec, reader = spec_of(listed.pipeline), listed.pipeline.slides.reader
    faulty: dict[str, Quality] = {}

    def plan(record: SlideRecord) -> SlidePlan:
        check_opens_safely(record.path, record.mpp_override, reader)
        try:
            return plan_slide(record, spec, params, reader=reader, segmenter=segmenter)
        except AllSetAside as error:
            faulty[record.slide] = quality_of_none(error)
            raise

    made = partial(made_of, spec=spec, params=params, reader=reader)

    def plan_mine(mine: Sequence[int]) -> Iterator[tuple[str | None, Quality | None]]:
        reasons = plan_each(mine, records, plan, made, plans, job.threads)
        for number, reason in zip(mine, reasons, strict=True):
            yield reason, faulty.get(records[number].slide)

    return plan_mine


def _write_all(
    listed: Listed, plans: Plans, numbers: Sequence[int], job: Job, watcher: Watcher
) -> list[Written]:
    """Write the shards of all planned slides, each by one rank; return what became of each, in order."""
    study, pipeline, name = listed.study, listed.pipeline, listed.site.name
    folder, spec, settings = study.store(name).parent, spec_of(pipeline), pipeline.tile
    wanted = Wanted(folder, spec, pipeline.store.pixels, pipeline.slides.reader, job.threads, study.relative)

    def choose_rows() -> list[tuple[int, NDArray[np.bool_]]]:
        most = settings.max_per_slide
        keep = choose(plans, numbers, balance=settings.balance, max_per_slide=most, seed=SEED)
        if job.first:
            counts = {number: int(rows.sum()) for number, rows in zip(numbers, keep, strict=True)}
            needed = check_space(folder, counts, plans, spec, wanted.content)
            say(
                f"  {name}: {sum(counts.values())} patches of {spec.size_px} px, at most {needed / 1e9:.2f} GB"
            )
        return list(zip(numbers, keep, strict=True))

    n = len(numbers)
    written = job.share(
        job.each(choose_rows),
        lambda mine: map(asdict, write_each(mine, plans, wanted)),
        lambda done, one: watcher.update(name, (n + done) / 2, n, plans.slide(one[0])),
    )
    return [Written(**one) for one in written]
