"""`tile --dry-run`: what tiling a site would take, from a few of its slides; nothing is kept."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from wsi_fl.slides.patching.splits import SEED
from wsi_fl.stages.prepare.sources import Listed, list_slides
from wsi_fl.stages.prepare.tables import first_reason
from wsi_fl.stages.prepare.tile import planner, spec_of
from wsi_fl.stages.prepare.tile_plans import Plans, choose
from wsi_fl.stages.prepare.tile_shards import Unreadable, bytes_of, pixel_batches
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.stages.work.job import Job
from wsi_fl.study.folder import Study
from wsi_fl.types import SetAside, WsiFlError

_SLIDES, _PATCHES = 8, 128
"""Slides of a site that are planned, evenly from its list, and patches of each that are read."""


def estimate(
    study: Study,
    *,
    site: str | None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Return as the `--json` document how many patches, bytes and seconds one site or every site would take.

    Raises:
        WsiFlError: when none of the slides that were tried gives a patch.
    """
    job, told = Job(), watcher or Silent()
    rows = [_of_site(one, job, told) for one in list_slides(study, site, pipeline_name, overrides)]
    whole = {key: sum(row[key] for row in rows) for key in ("slides", "patches", "bytes", "seconds")}
    return {"sites": rows, **whole, "free_bytes": shutil.disk_usage(study.root).free}


def _of_site(listed: Listed, job: Job, watcher: Watcher) -> dict[str, Any]:
    name, pipeline, n = listed.site.name, listed.pipeline, len(listed.records)
    records = [listed.records[k] for k in np.unique(np.linspace(0, n - 1, min(n, _SLIDES)).astype(int))]
    spec, settings, content = spec_of(pipeline), pipeline.tile, pipeline.store.pixels
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans(Path(folder), records, spec)
        # 1. tissue, grid and labels of a few slides
        began = time.perf_counter()
        reasons = []
        for reason, _ in planner(listed, records, plans, job)(range(len(records))):
            reasons.append(reason)
            watcher.update(name, len(reasons) / 2, len(records), "finding tissue")
        planning = time.perf_counter() - began
        numbers = [k for k, reason in enumerate(reasons) if reason is None]
        if not numbers:
            aside = [SetAside(one.slide, str(why)) for one, why in zip(records, reasons, strict=True)]
            raise WsiFlError(f"site {name}: no slide gave a patch; {first_reason(aside)}")
        keep = choose(
            plans, numbers, balance=settings.balance, max_per_slide=settings.max_per_slide, seed=SEED
        )
        counts = {number: int(rows.sum()) for number, rows in zip(numbers, keep, strict=True)}
        # 2. the pixels of some of their patches
        began, read = time.perf_counter(), 0
        for number, rows in zip(numbers, keep, strict=True):
            corners = plans.load(number).xy_l0[rows][:_PATCHES]
            with suppress(Unreadable):
                for batch in pixel_batches(
                    records[number], corners, spec, threads=job.threads, reader=pipeline.slides.reader
                ):
                    read += len(batch)
            watcher.update(name, len(records) / 2 + number / 2, len(records), records[number].slide)
        reading = time.perf_counter() - began
        needed = bytes_of(counts, plans, spec, content)
    # 3. as many more as there are slides
    times, patches = n / len(records), sum(counts.values())
    return {
        "site": name,
        "slides": n,
        "tried": len(records),
        "failed": sum(reason is not None for reason in reasons),
        "patches": round(times * patches),
        "bytes": round(times * needed),
        "seconds": times * (planning + reading * patches / max(read, 1)),
    }


def estimate_lines(document: dict[str, Any]) -> Lines:
    """Yield a row per site, and what all take."""
    rows = [
        [
            row["site"],
            str(row["slides"]),
            f"{row['tried']}, {row['failed']} set aside" if row["failed"] else str(row["tried"]),
            f"{row['patches']:,}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['seconds'] / 60:.1f}",
        ]
        for row in document["sites"]
    ]
    yield Table("estimate", ["site", "slides", "tried", "patches", "GB", "minutes"], rows)
    minutes = document["seconds"] / 60
    yield Line(
        f"about {document['patches']:,} patches, {document['bytes'] / 1e9:.1f} GB "
        f"({document['free_bytes'] / 1e9:.0f} GB are free) and "
        f"{f'{minutes / 60:.1f} h' if minutes > 90 else f'{minutes:.1f} min'} on this machine; "
        "nothing was written"
    )
