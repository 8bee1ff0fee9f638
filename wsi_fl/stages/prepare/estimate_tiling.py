"""`wsi-fl tile --dry-run`: estimate patches, bytes and time of tiling from a few slides of each site."""

from __future__ import annotations

import shutil
import tempfile
import time
from math import inf
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.stages.prepare import slide_lists
from wsi_fl.stages.prepare.slide_lists import Scope, SlideList
from wsi_fl.stages.prepare.tile_plans import Plans, build_grid_spec, plan_slides, select_patches
from wsi_fl.stages.prepare.write_shards import estimate_bytes
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.stages.runtime.rank_job import RankJob
from wsi_fl.study.folder import Study
from wsi_fl.types import WsiFlError

_SAMPLE_SLIDES, _SAMPLE_PATCHES = 8, 128
"""Slides per site in a dry run, evenly from its list, and patches read of each."""


_SiteEstimate = TypedDict(  # noqa: UP013 names of keys are no names of the code
    "_SiteEstimate",
    {"site": str, "slides": int, "tried": int, "failed": int, "patches": int, "bytes": int, "seconds": float},
)
"""What tiling a site will take; `tried` slides were planned."""


class _TilingEstimate(TypedDict):
    """The document of `tile --dry-run`."""

    sites: list[_SiteEstimate]
    slides: int
    patches: int
    bytes: int
    seconds: float
    free_bytes: int


def estimate_tiling(study: Study, *, watcher: Watcher | None = None, **scope: Unpack[Scope]) -> _TilingEstimate:
    """Estimate patches, bytes and seconds of one site or every site; return the `--json` document.

    A few slides are planned and partly read; nothing is stored.

    Raises:
        WsiFlError: when none of these slides gives a patch.
    """
    job, progress = RankJob(), watcher or SilentProgress()
    rows = [_estimate_site(slides, job, progress) for slides in slide_lists.list_slides(study, **scope)]
    return {
        "sites": rows,
        "slides": sum(row["slides"] for row in rows),
        "patches": sum(row["patches"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
        "free_bytes": shutil.disk_usage(study.root).free,
    }


def _estimate_site(slides: SlideList, job: RankJob, watcher: Watcher) -> _SiteEstimate:
    name, pipeline, n_slides = slides.site.name, slides.pipeline, len(slides.records)
    records = [
        slides.records[k] for k in np.unique(np.linspace(0, n_slides - 1, min(n_slides, _SAMPLE_SLIDES)).astype(int))
    ]
    n_sampled = len(records)
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans(Path(folder), records, build_grid_spec(pipeline))
        # 1. tissue, grid and labels of a few slides
        start, outcomes = time.perf_counter(), []
        for outcome in plan_slides(range(n_sampled), slides, plans, job.threads):
            outcomes.append(outcome)
            watcher.update(name, len(outcomes) / 2, n_sampled, "finding tissue")
        planning, failed = time.perf_counter() - start, slide_lists.list_excluded(outcomes)
        selected = select_patches(plans, outcomes, pipeline)
        if not selected:
            raise WsiFlError(f"site {name}: no slide gave a patch; {slide_lists.first_failure(failed)}")
        counts = {number: int(rows.sum()) for number, rows in selected}
        # 2. the pixels of some of their patches
        start, n_read = time.perf_counter(), 0
        for number, rows in selected:
            corners, reader = plans.load_plan(number).xy_l0[rows][:_SAMPLE_PATCHES], pipeline.slides.reader
            batches = read_patches(
                records[number], corners, plans.spec, threads=job.threads, reader=reader, excluded={}
            )
            n_read += sum(len(batch) for _, batch in batches)
            watcher.update(name, n_sampled / 2 + number / 2, n_sampled, plans.slide_name(number))
        reading = time.perf_counter() - start
        needed = estimate_bytes(counts, plans, plans.spec, pipeline.store.pixels)
    # 3. scaled to all slides
    times, patches = n_slides / n_sampled, sum(counts.values())
    n_patches = min(times * patches, pipeline.tile.max_per_site or inf)
    return {
        "site": name,
        "slides": n_slides,
        "tried": n_sampled,
        "failed": len(failed),
        "patches": round(n_patches),
        "bytes": round(n_patches * needed / max(patches, 1)),
        "seconds": times * planning + n_patches * reading / max(n_read, 1),
    }


def render_estimate_lines(document: _TilingEstimate) -> Lines:
    """Yield a table with a row per site, and the totals."""
    rows = [
        [
            row["site"],
            row["slides"],
            f"{row['tried']}, {row['failed']} excluded" if row["failed"] else row["tried"],
            f"{row['patches']:,}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['seconds'] / 60:.1f}",
        ]
        for row in document["sites"]
    ]
    yield TextTable("estimate", ["site", "slides", "tried", "patches", "GB", "minutes"], rows)
    minutes = document["seconds"] / 60
    yield TextLine(
        f"about {document['patches']:,} patches, {document['bytes'] / 1e9:.1f} GB ({document['free_bytes'] / 1e9:.0f} "
        f"GB are free) and {f'{minutes / 60:.1f} h' if minutes > 90 else f'{minutes:.1f} min'} on this machine; "
        "nothing was written"
    )
