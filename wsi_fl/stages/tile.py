"""`tile`: the patch store of a site.

Slides are planned (tissue, grid, labels) from thumbnails and annotations alone; patches are chosen over the
whole site; only then are pixels read, slide by slide, into shards. A finished shard whose fingerprint still
fits is not read again, so a killed job loses at most the slide in hand.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.config import Pipeline
from wsi_fl.config import Site as SiteConfig
from wsi_fl.slides.annotations import HOLE_GROUPS, TUMOR_GROUPS
from wsi_fl.slides.layouts import Sources, read_site
from wsi_fl.slides.planning import PlanParams, SlidePlan, plan_slide
from wsi_fl.slides.splits import assign_splits, sample_rows
from wsi_fl.stages.console import Silent, Watcher, say
from wsi_fl.stages.tile_shards import locked, n_threads, one_line, remove_strays, write_all
from wsi_fl.stages.tile_table import row_of, weak_note
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.shards import write_columns
from wsi_fl.study import Study
from wsi_fl.types import (
    CLASSES,
    GridSpec,
    SetAside,
    SlideRecord,
    UsageError,
    WsiFlError,
)

_PLANNERS = 4
"""Slides planned at once: each needs some hundred megabytes for its tissue mask."""


def tile(
    study: Study,
    *,
    site: str | None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Tiles one site, or with `site` None every site of the pipeline; returns the `--json` document."""
    pipeline = study.pipeline(study.pipeline_name(pipeline_name), overrides)
    chosen = study.sites(pipeline) if site is None else [study.site(site)]
    sources = [(one, sources_of(study, one)) for one in chosen]
    listed = [(one, *read_site(one.layout, source)) for one, source in sources]
    for _, records, _ in listed:
        if note := weak_note(records):
            say(f"  {records[0].site}: {note}", style="yellow")
    rows = [
        _tile_site(study, one, pipeline, records, aside, watcher or Silent())
        for one, records, aside in listed
    ]
    return {"sites": rows}


def sources_of(study: Study, site: SiteConfig) -> Sources:
    """The paths of a site file, resolved against the study."""
    if site.slides is None:
        raise UsageError(
            f"sites/{site.name}.toml: slides is missing; a site made by `wsi-fl partition` has none to tile"
        )
    patterns = [site.slides] if isinstance(site.slides, str) else site.slides
    escaped = Study(Path(glob.escape(str(study.root))))  # the study's own folder may hold a [ or *

    def path(text: str | None) -> Path | None:
        return study.resolve(text) if text is not None else None

    return Sources(
        site=site.name,
        label=f"sites/{site.name}.toml",
        slides=tuple(str(escaped.resolve(pattern)) for pattern in patterns),
        annotations=path(site.annotations),
        labels=path(site.labels),
        split=path(site.split),
        mpp_override=site.mpp_override,
    )


def _tile_site(
    study: Study,
    site: SiteConfig,
    pipeline: Pipeline,
    records: list[SlideRecord],
    aside: list[SetAside],
    watcher: Watcher,
) -> dict[str, Any]:
    began = time.perf_counter()
    store = study.store(site.name)
    spec = spec_of(pipeline)
    with locked(store.parent, site.name):
        split = assign_splits(records, test_fraction=pipeline.tile.test_fraction, seed=pipeline.tile.seed)
        failed = list(aside)
        plans = _plan_all(split, pipeline, spec, failed, site.name, watcher)
        chosen = _choose(plans, pipeline)
        shards = write_all(
            store.parent, chosen, spec, failed, site.name, watcher, reader=pipeline.slides.reader
        )
        if not shards:
            raise WsiFlError(f"site {site.name}: no slide gave a patch; the first: {_first_reason(failed)}")
        table = write_columns(store, StoreMeta(site.name, CLASSES, spec), shards)
        remove_strays(store.parent, {shard.stem for shard in shards})
    return row_of(study, site.name, table, failed, len(records) + len(aside), time.perf_counter() - began)


def spec_of(pipeline: Pipeline) -> GridSpec:
    size = pipeline.tile.size_px
    return GridSpec(size, pipeline.tile.mpp, pipeline.tile.stride_px or size)


def _plan_all(
    records: Sequence[SlideRecord],
    pipeline: Pipeline,
    spec: GridSpec,
    failed: list[SetAside],
    site: str,
    watcher: Watcher,
) -> list[SlidePlan]:
    """Plans of the slides that work, in order; the others go to `failed` with their reason."""
    settings = pipeline.tile
    params = PlanParams(
        min_tissue=settings.min_tissue,
        min_tumor=settings.min_tumor,
        tumor_groups=settings.tumor_groups or TUMOR_GROUPS,
        hole_groups=settings.hole_groups or HOLE_GROUPS,
        ignored_groups=settings.ignored_groups,
    )
    plans: list[SlidePlan] = []

    def plan(record: SlideRecord) -> SlidePlan | SetAside:
        try:
            return plan_slide(record, spec, params, reader=pipeline.slides.reader)
        except WsiFlError as error:
            return SetAside(record.slide, str(error))
        except Exception as error:  # one slide that a library chokes on must not end the others
            return SetAside(record.slide, one_line(error))

    for number, outcome in enumerate(_in_threads(plan, records), 1):
        if isinstance(outcome, SetAside):
            failed.append(outcome)
        else:
            plans.append(outcome)
        watcher.update(site, number / 2, len(records), "finding tissue")
    return plans


def _choose(plans: Sequence[SlidePlan], pipeline: Pipeline) -> list[tuple[SlidePlan, NDArray[np.bool_]]]:
    """Which of each slide's patches are kept, balanced over the site."""
    if not plans:
        return []
    slide = np.repeat(np.arange(len(plans)), [len(plan.label) for plan in plans])
    keep = sample_rows(
        np.concatenate([plan.label for plan in plans]),
        slide,
        balance=pipeline.tile.balance,
        max_per_slide=pipeline.tile.max_per_slide,
        seed=pipeline.tile.seed,
    )
    ends = np.cumsum([len(plan.label) for plan in plans])[:-1]
    return list(zip(plans, np.split(keep, ends), strict=True))


def _in_threads(
    work: Callable[[SlideRecord], SlidePlan | SetAside], records: Sequence[SlideRecord]
) -> Iterator[SlidePlan | SetAside]:
    """Results in order, a few at work at a time."""
    with ThreadPoolExecutor(min(n_threads(), _PLANNERS)) as pool:
        yield from pool.map(work, records)


def _first_reason(failed: Sequence[SetAside]) -> str:
    return f"{failed[0].slide}: {failed[0].reason}" if failed else "it has no slides"
