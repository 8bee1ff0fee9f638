"""`tile`: the patch store of a site; with `--dry-run`, what tiling would take.

Slides are planned (tissue, grid, labels) from thumbnails and annotations alone; patches are chosen over the
whole site; only then are pixels read, slide by slide, into shards. A finished shard whose fingerprint still
fits is not read again, so a killed job loses at most the slide in hand.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.slides.reading.sweep import read_patches
from wsi_fl.stages.prepare.sources import (
    Done,
    Listed,
    Quality,
    finish,
    list_slides,
    set_aside,
    share_slides,
    stored_classes,
)
from wsi_fl.stages.prepare.tables import first_reason, write_quality
from wsi_fl.stages.prepare.tile_plans import Plans, choose, plan_each, spec_of
from wsi_fl.stages.prepare.tile_shards import Shards, bytes_of
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.shards import Counts, link_shards, linked
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import locked
from wsi_fl.types import CLASSES, SPLITS, UNLABELLED, WsiFlError

_TRIED, _READ = 8, 128
"""Slides of a site that a dry run plans, evenly from its list, and patches of each that it reads."""


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
    listed = job.each(lambda: list_slides(study, site, pipeline_name, overrides, job))
    for one in listed:
        weak = sum(record.supervision == "weak" for record in one.records)
        if weak and job.first:
            say(
                f"  {one.site.name}: {weak} slides have no annotation: their patches take the slide's label "
                "(weak supervision)",
                style="yellow",
            )
        told.update(one.site.name, 0, len(one.records))
    rows = [_tile_site(one, job, told) for one in listed]
    which = "--all" if site is None else f"--site {site}"
    named = "" if pipeline_name is None else f" --pipeline {pipeline_name}"
    steps = _next_steps(listed[0].pipeline, which, named)
    if listed[0].site.real and len(study.site_names()) == 1:  # a hospital among others
        steps[-1] = "wsi-fl federation approve PLAN --kit KIT"
    return {"sites": rows, "next": steps} if job.first else {}


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
    began, name, pipeline = time.perf_counter(), listed.site.name, listed.pipeline
    store = listed.study.store(name)
    records = assign_splits(listed.records, test_fraction=pipeline.slides.test_fraction)
    plans = Plans(store.parent / ".plans", records, spec_of(pipeline))
    shards = Shards(listed, plans, job.threads)
    failed = list(listed.aside)
    with job.first_holds(locked(store.parent, name)):
        n = len(records)
        planned = share_slides(
            job,
            range(n),
            lambda mine: plan_each(mine, listed, plans, job.threads),
            lambda done, _: watcher.update(name, done / 2, n, "finding tissue"),
        )

        def choose_rows() -> list[tuple[int, NDArray[np.bool_]]]:
            chosen = _chosen(plans, planned, pipeline)
            if job.first:
                counts = {number: int(rows.sum()) for number, rows in chosen}
                needed = shards.check_space(counts) / 1e9
                say(
                    f"  {name}: {sum(counts.values())} patches of {plans.spec.size_px} px, at most {needed:.2f} GB"
                )
            return chosen

        chosen = job.each(choose_rows)
        n_planned = len(chosen)
        written = share_slides(
            job,
            chosen,
            shards.write_each,
            lambda done, one: watcher.update(name, (n_planned + done) / 2, n_planned, plans.slide(one[0])),
        )
        failed += set_aside((*planned, *written))

        def write_columns(done: list[Done]) -> Counts:
            paths = [shards.path(one.slide) for one in done if one.patches]
            if not paths:
                raise WsiFlError(f"site {name}: no slide gave a patch; {first_reason(failed)}")
            classes = stored_classes(listed.site, {})
            meta = StoreMeta(name, classes, plans.spec, min_tissue=pipeline.tile.min_tissue)
            return linked(store, meta, paths) or link_shards(store, meta, paths)

        folders = (*(store.parent / part for part in ("slides", "overview")), plans.folder)
        counts = finish(job, written, write_columns, folders)
    if counts is None:
        return {}
    contents = [one.content for one in written if one.patches]
    if raw := sum(content != pipeline.store.pixels for content in contents):
        say(
            f"  {name}: {raw} of {len(contents)} slides are stored raw: their patches are not whole JPEG tiles of "
            "theirs",
            style="yellow",
        )
    seen = {one.slide: one.quality for one in (*planned, *written) if one.quality}
    write_quality(store.with_name("quality.csv"), seen)
    names = CLASSES if len(counts["train"]) > 1 else UNLABELLED
    table = {split: dict(zip(names, counts[split].tolist(), strict=True)) for split in SPLITS}
    return {
        "site": name,
        "slides": n + len(listed.aside),
        "failed": [asdict(aside) for aside in failed],
        "patches": sum(sum(one.values()) for one in table.values()),
        **{label: sum(one.get(label, 0) for one in table.values()) for label in CLASSES},
        **{split: sum(table[split].values()) for split in ("train", "test")},
        **_quality_of(seen.values()),
        "store": listed.study.relative(store),
        "seconds": time.perf_counter() - began,
        "table": table,
    }


def _quality_of(seen: Iterable[Quality]) -> dict[str, Any]:
    """Return how many patches were set aside for which fault, and by which method tissue was found on how many slides,
    with the median gain of those on which saturation finds some.
    """
    aside: Counter[str] = Counter()
    gains: dict[str, list[float]] = {}
    for one in seen:
        aside.update(one["aside"])
        gains.setdefault(one["tissue_by"], []).append(one["tissue_gain"])
    tissue = {}
    for name, gain in sorted(gains.items()):
        found = list(filter(isfinite, gain))
        tissue[name] = {"slides": len(gain), "gain": median(found) if found else None}
    return {"set_aside": dict(sorted(aside.items())), "tissue": tissue}


def _chosen(plans: Plans, planned: Sequence[Done], pipeline: Pipeline) -> list[tuple[int, NDArray[np.bool_]]]:
    """Return the numbers of slides that have a plan, and which of their patches are kept."""
    numbers = [number for number, one in enumerate(planned) if one.reason is None]
    settings = pipeline.tile
    keep = choose(plans, numbers, balance=settings.balance, max_per_slide=settings.max_per_slide)
    return list(zip(numbers, keep, strict=True))


def estimate(
    study: Study,
    *,
    site: str | None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Return as the `--json` document how many patches, bytes and seconds one site or every site would take.

    A few of its slides are tried; nothing is kept.

    Raises:
        WsiFlError: when none of the slides that were tried gives a patch.
    """
    job, told = Job(), watcher or Silent()
    rows = [_estimate_site(one, job, told) for one in list_slides(study, site, pipeline_name, overrides)]
    whole = {key: sum(row[key] for row in rows) for key in ("slides", "patches", "bytes", "seconds")}
    return {"sites": rows, **whole, "free_bytes": shutil.disk_usage(study.root).free}


def _estimate_site(listed: Listed, job: Job, watcher: Watcher) -> dict[str, Any]:
    name, pipeline, n = listed.site.name, listed.pipeline, len(listed.records)
    records = [listed.records[k] for k in np.unique(np.linspace(0, n - 1, min(n, _TRIED)).astype(int))]
    tried = len(records)
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans(Path(folder), records, spec_of(pipeline))
        # 1. tissue, grid and labels of a few slides
        began, planned = time.perf_counter(), []
        for one in plan_each(range(tried), listed, plans, job.threads):
            planned.append(one)
            watcher.update(name, len(planned) / 2, tried, "finding tissue")
        planning, failed = time.perf_counter() - began, set_aside(planned)
        chosen = _chosen(plans, planned, pipeline)
        if not chosen:
            raise WsiFlError(f"site {name}: no slide gave a patch; {first_reason(failed)}")
        counts = {number: int(rows.sum()) for number, rows in chosen}
        # 2. the pixels of some of their patches
        began, read = time.perf_counter(), 0
        for number, rows in chosen:
            corners, how = plans.load(number).xy_l0[rows][:_READ], pipeline.slides.reader
            found = read_patches(
                records[number], corners, plans.spec, threads=job.threads, reader=how, aside={}
            )
            read += sum(len(batch) for _, batch in found)
            watcher.update(name, tried / 2 + number / 2, tried, plans.slide(number))
        reading = time.perf_counter() - began
        needed = bytes_of(counts, plans, plans.spec, pipeline.store.pixels)
    # 3. as many more as there are slides
    times, patches = n / tried, sum(counts.values())
    return {
        "site": name,
        "slides": n,
        "tried": tried,
        "failed": len(failed),
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
