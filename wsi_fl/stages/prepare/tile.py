"""`tile`: the patch store of a site.

Slides are planned (tissue, grid, labels) from thumbnails and annotations alone; patches are chosen over the
whole site; only then are pixels read, slide by slide, into shards. A finished shard whose fingerprint still
fits is not read again, so a killed job loses at most the slide in hand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.choosing.annotations import HOLE_GROUPS, TUMOR_GROUPS
from wsi_fl.slides.choosing.patches import PlanParams, plan_slide
from wsi_fl.slides.choosing.splits import assign_splits
from wsi_fl.slides.layouts import read_site
from wsi_fl.stages.prepare.sources import sources_of, watched
from wsi_fl.stages.prepare.tables import row_of, storage_note, weak_note
from wsi_fl.stages.prepare.tile_plans import Plans, choose, plan_each
from wsi_fl.stages.prepare.tile_shards import (
    Wanted,
    Written,
    check_space,
    remove_strays,
    shard_path,
    write_each,
)
from wsi_fl.stages.work.console import Silent, Watcher, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.columns import Counts, link_shards
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile as SiteConfig
from wsi_fl.system.locks import locked
from wsi_fl.types import CLASSES, GridSpec, SetAside, SlideRecord, WsiFlError


def tile(
    study: Study,
    *,
    site: str | None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Tiles one site, or with `site` None every site of the pipeline; returns the `--json` document.

    Started under mpiexec or srun, the ranks share the slides of each site, and all but the first return {}.
    """
    job = Job()
    listed: list[_Listed] = []

    def prepare() -> None:
        pipeline = study.pipeline(study.pipeline_name(pipeline_name), overrides)
        chosen = study.sites(pipeline) if site is None else [study.site(site)]
        sources = [(one, watched(sources_of(study, one), watcher if job.first else None)) for one in chosen]
        for one, source in sources:
            records, aside = read_site(one.layout, source)
            listed.append(_Listed(study, one, pipeline, tuple(records), tuple(aside)))

    job.together(prepare)
    if job.first:
        for one in listed:
            if note := weak_note(one.records):
                say(f"  {one.records[0].site}: {note}", style="yellow")
    rows = [_tile_site(one, job, watcher if watcher and job.first else Silent()) for one in listed]
    which = "--all" if site is None else f"--site {site}"
    named = "" if pipeline_name is None else f" --pipeline {pipeline_name}"
    return {"sites": rows, "next": next_steps(listed[0].pipeline, which, named)} if job.first else {}


def next_steps(pipeline: Pipeline, which: str, named: str) -> list[str]:
    """The commands between stores and a trained model.

    Example:
        >>> next_steps(Pipeline(stain={"exchange": True}), "--site C1", " --pipeline stained")
        ['wsi-fl stain --site C1 --pipeline stained', 'wsi-fl train --method proxyfl --pipeline stained']
    """
    steps = [f"wsi-fl stain {which}"] if pipeline.stain.exchange else []
    steps += [f"wsi-fl features {which}"] if pipeline.train.data == "features" else []
    return [step + named for step in (*steps, "wsi-fl train --method proxyfl")]


@dataclass(frozen=True)
class _Listed:
    """A site and its slides."""

    study: Study
    site: SiteConfig
    pipeline: Pipeline
    records: tuple[SlideRecord, ...]
    aside: tuple[SetAside, ...]


def _tile_site(listed: _Listed, job: Job, watcher: Watcher) -> dict[str, Any]:
    """All ranks plan, then all write shards, each its share; the first one holds the lock and writes the columns."""
    began = time.perf_counter()
    study, site, pipeline = listed.study, listed.site, listed.pipeline
    folder, spec = study.store(site.name).parent, spec_of(pipeline)
    tiling = pipeline.tile
    records = assign_splits(listed.records, test_fraction=tiling.test_fraction, seed=tiling.seed)
    plans = Plans(folder / ".plans", records, spec)
    with ExitStack() as stack:

        def lock() -> None:
            if job.first:
                stack.enter_context(locked(folder, site.name))
                (folder / "slides").mkdir(exist_ok=True)
                stack.callback(plans.clear)
                plans.clear()

        job.together(lock)
        unplanned = _plan_all(listed, records, plans, job, watcher)
        failed = [*listed.aside, *unplanned.values()]
        numbers = [number for number in range(len(records)) if number not in unplanned]
        written = _write_all(listed, plans, numbers, job, watcher)
        failed += [SetAside(records[one.number].slide, one.reason) for one in written if one.reason]
        shards = [shard_path(folder, records[one.number].slide) for one in written if one.content]
        counts: Counts = {}

        def write_columns() -> None:
            if not shards:
                raise WsiFlError(
                    f"site {site.name}: no slide gave a patch; the first: {_first_reason(failed)}"
                )
            if job.first:
                meta = StoreMeta(site.name, CLASSES, spec, min_tissue=pipeline.tile.min_tissue)
                counts.update(link_shards(study.store(site.name), meta, shards))
                remove_strays(folder, {shard.stem for shard in shards})

        job.together(write_columns)
    if not job.first:
        return {}
    if note := storage_note([one.content for one in written if one.content], pipeline.store.pixels):
        say(f"  {site.name}: {note}", style="yellow")
    n_slides = len(records) + len(listed.aside)
    return row_of(study, site.name, counts, failed, n_slides, time.perf_counter() - began)


def spec_of(pipeline: Pipeline) -> GridSpec:
    size = pipeline.tile.size_px
    return GridSpec(size, pipeline.tile.mpp, pipeline.tile.stride_px or size)


def _plan_all(
    listed: _Listed, records: Sequence[SlideRecord], plans: Plans, job: Job, watcher: Watcher
) -> dict[int, SetAside]:
    """Plans of the slides that work go to `plans`; returns the others by their number, with the reason."""
    settings = listed.pipeline.tile
    params = PlanParams(
        min_tissue=settings.min_tissue,
        min_tumor=settings.min_tumor,
        tumor_groups=settings.tumor_groups or TUMOR_GROUPS,
        hole_groups=settings.hole_groups or HOLE_GROUPS,
        ignored_groups=settings.ignored_groups,
    )
    mine = job.mine(range(len(records)))
    spec, reader = spec_of(listed.pipeline), listed.pipeline.slides.reader

    def work() -> list[tuple[int, str]]:
        found = []
        each = plan_each(
            mine, records, lambda one: plan_slide(one, spec, params, reader=reader), plans, job.threads
        )
        for done, (number, aside) in enumerate(zip(mine, each, strict=True), 1):
            if aside is not None:
                found.append((number, aside.reason))
            watcher.update(listed.site.name, done / 2 * _scale(mine, records), len(records), "finding tissue")
        return found

    reasons = sorted((number, reason) for part in job.together(work) for number, reason in part)
    return {number: SetAside(records[number].slide, reason) for number, reason in reasons}


def _write_all(
    listed: _Listed, plans: Plans, numbers: Sequence[int], job: Job, watcher: Watcher
) -> list[Written]:
    """Shards of all planned slides, each written by one rank; what became of each, in order."""
    study, pipeline = listed.study, listed.pipeline
    folder, spec, settings = study.store(listed.site.name).parent, spec_of(pipeline), pipeline.tile
    wanted = Wanted(folder, spec, pipeline.store.pixels, pipeline.slides.reader, job.threads, study.relative)

    def choose_mine() -> None:
        keep = choose(
            plans,
            numbers,
            balance=settings.balance,
            max_per_slide=settings.max_per_slide,
            seed=settings.seed,
        )
        if job.first:
            check_space(folder, sum(int(rows.sum()) for rows in keep), spec, wanted.content)
        chosen.extend(job.mine(list(zip(numbers, keep, strict=True))))

    def work() -> list[dict[str, Any]]:
        found = []
        for done, one in enumerate(write_each(chosen, plans, wanted), 1):
            found.append(asdict(one))
            progress = (len(chosen) + done) / 2 * _scale(chosen, numbers)
            watcher.update(listed.site.name, progress, len(numbers), plans.slide(one.number))
        return found

    chosen: list[tuple[int, NDArray[np.bool_]]] = []
    job.together(choose_mine)
    written = [Written(**one) for part in job.together(work) for one in part]
    return sorted(written, key=lambda one: one.number)


def _scale(mine: Sequence[Any], everything: Sequence[Any]) -> float:
    """What one slide of this rank's share stands for."""
    return len(everything) / max(1, len(mine))


def _first_reason(failed: Sequence[SetAside]) -> str:
    return f"{failed[0].slide}: {failed[0].reason}" if failed else "it has no slides"
