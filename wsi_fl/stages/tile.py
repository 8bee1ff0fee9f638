"""`tile`: the patch store of a site.

Slides are planned (tissue, grid, labels) from thumbnails and annotations alone; patches are chosen over the
whole site; only then are pixels read, slide by slide, into shards. A finished shard whose fingerprint still
fits is not read again, so a killed job loses at most the slide in hand.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.config import Pipeline
from wsi_fl.config import Site as SiteConfig
from wsi_fl.files import remove_leftovers, write_bytes
from wsi_fl.slides.annotations import HOLE_GROUPS, TUMOR_GROUPS
from wsi_fl.slides.layouts import Sources, read_site
from wsi_fl.slides.overview import draw_overview
from wsi_fl.slides.planning import PlanParams, SlidePlan, plan_slide, read_patches
from wsi_fl.slides.splits import assign_splits, sample_rows
from wsi_fl.stages.console import Silent, Watcher, say
from wsi_fl.stores.patches import (
    ShardMeta,
    StoreMeta,
    fingerprint,
    shard_is_current,
    write_columns,
    write_shard,
)
from wsi_fl.study import Study
from wsi_fl.types import (
    CLASSES,
    DiskFull,
    GridSpec,
    PatchTable,
    SetAside,
    SlideRecord,
    UsageError,
    WsiFlError,
)

_SPARE_BYTES = 64 << 20
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
    with _lock(store.parent, site.name):
        split = assign_splits(records, test_fraction=pipeline.tile.test_fraction, seed=pipeline.tile.seed)
        failed = list(aside)
        plans = _plan_all(split, pipeline, spec, failed, site.name, watcher)
        chosen = _choose(plans, pipeline)
        shards = _write_all(store.parent, chosen, spec, failed, site.name, watcher)
        if not shards:
            raise WsiFlError(f"site {site.name}: no slide gave a patch; the first: {_first_reason(failed)}")
        table = write_columns(store, StoreMeta(site.name, CLASSES, spec), shards)
        _remove_strays(store.parent, {shard.stem for shard in shards})
    return _row(study, site.name, table, failed, len(records) + len(aside), time.perf_counter() - began)


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
            return plan_slide(record, spec, params)
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


def _write_all(
    folder: Path,
    chosen: Sequence[tuple[SlidePlan, NDArray[np.bool_]]],
    spec: GridSpec,
    failed: list[SetAside],
    site: str,
    watcher: Watcher,
) -> list[Path]:
    """Shards of all slides that could be read, in order."""
    _check_space(folder, chosen, spec)
    shards: list[Path] = []
    for number, (plan, keep) in enumerate(chosen, 1):
        slide = plan.record.slide
        shard = folder / "slides" / f"{slide}.h5"
        if not keep.any():
            failed.append(SetAside(slide, "none of its patches was drawn into the sample"))
        else:
            try:
                _write_slide(shard, plan, keep, spec)
                shards.append(shard)
            except DiskFull:
                raise
            except WsiFlError as error:
                failed.append(SetAside(slide, str(error)))
            except Exception as error:  # as above
                failed.append(SetAside(slide, one_line(error)))
        watcher.update(site, (len(chosen) + number) / 2, len(chosen), slide)
    return shards


def _write_slide(shard: Path, plan: SlidePlan, keep: NDArray[np.bool_], spec: GridSpec) -> None:
    """One shard and its picture, unless both are there and current."""
    record = plan.record
    meta = ShardMeta(
        record.slide, record.patient, record.split or "train", spec, plan.quickhash, _source(plan)
    )
    n = int(keep.sum())
    table = PatchTable(
        plan.xy_l0[keep],
        plan.label[keep],
        plan.tumor_fraction[keep],
        np.full(n, record.slide),
        np.full(n, record.patient),
        np.full(n, meta.split),
    )
    current = shard_is_current(shard, fingerprint(meta, table))
    picture = shard.parent.parent / "overview" / f"{record.slide}.png"
    if current and picture.exists():
        return
    if current is False:
        say(f"  {record.slide}: parameters or slide changed, tiled again")
    if not current:
        picture.unlink(missing_ok=True)  # it would outlive a kill between the two
        pixels = (batch for _, batch in read_patches(record, table.xy_l0, spec, threads=_threads()))
        write_shard(shard, meta, table, pixels)
    write_bytes(picture, draw_overview(plan, keep))


def _source(plan: SlidePlan) -> str:
    """What else decides a slide's pixels: its size on disk where it has no quickhash, and the µm per pixel used."""
    path = plan.record.path
    size = path.stat().st_size if path.is_file() else 0
    return f"{size} {plan.mpp!r}"


def _check_space(folder: Path, chosen: Sequence[tuple[SlidePlan, NDArray[np.bool_]]], spec: GridSpec) -> None:
    """Refuses to begin what the disk cannot hold; shards that are there already count as free."""
    needed = sum(int(keep.sum()) for _, keep in chosen) * spec.size_px**2 * 3
    present = sum(path.stat().st_size for path in (folder / "slides").glob("*.h5"))
    free = shutil.disk_usage(folder).free
    if needed - present + _SPARE_BYTES > free:
        raise DiskFull(
            f"{folder}: the disk is full: {needed / 1e9:.2f} GB of patches, {free / 1e9:.2f} GB free; "
            "set tile.max_per_slide, or free some space"
        )


def _in_threads(
    work: Callable[[SlideRecord], SlidePlan | SetAside], records: Sequence[SlideRecord]
) -> Iterator[SlidePlan | SetAside]:
    """Results in order, a few at work at a time."""
    with ThreadPoolExecutor(min(_threads(), _PLANNERS)) as pool:
        yield from pool.map(work, records)


def _threads() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def one_line(error: BaseException) -> str:
    """Any exception as a reason."""
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def _lock(folder: Path, site: str) -> Iterator[None]:
    """One `tile` at a time per store; what a killed one left behind is removed."""
    (folder / "slides").mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise WsiFlError(f"site {site}: another wsi-fl tile is writing {folder}; wait for it") from None
        for place in (folder, folder / "slides", folder / "overview"):
            remove_leftovers(place)
        yield


def _remove_strays(folder: Path, kept: set[str]) -> None:
    """Shards of slides that no longer belong to the store would only mislead."""
    for path in [*(folder / "slides").glob("*.h5"), *(folder / "overview").glob("*.png")]:
        if path.stem not in kept:
            path.unlink()


def _row(
    study: Study, site: str, table: PatchTable, failed: Sequence[SetAside], n_slides: int, seconds: float
) -> dict[str, Any]:
    counts = {
        split: {
            name: int(((table.label == k) & (table.split == split)).sum()) for k, name in enumerate(CLASSES)
        }
        for split in ("train", "val", "test")
    }
    return {
        "site": site,
        "slides": n_slides,
        "failed": [{"slide": aside.slide, "reason": aside.reason} for aside in failed],
        "patches": len(table),
        "healthy": sum(c["healthy"] for c in counts.values()),
        "tumor": sum(c["tumor"] for c in counts.values()),
        "train": sum(counts["train"].values()),
        "test": sum(counts["test"].values()),
        "store": study.relative(study.store(site)),
        "seconds": seconds,
        "table": counts,
    }


def _first_reason(failed: Sequence[SetAside]) -> str:
    return f"{failed[0].slide}: {failed[0].reason}" if failed else "it has no slides"


def weak_note(records: Sequence[SlideRecord]) -> str:
    """Says how many slides lend their label to all their patches."""
    n = sum(record.supervision == "weak" for record in records)
    return (
        f"{n} slides have no annotation: their patches take the slide's label (weak supervision)" if n else ""
    )


def print_tile(document: dict[str, Any]) -> None:
    """The table of the paper (Table 1): labels × train/test × sites, and what was set aside."""
    from rich.table import Table

    from wsi_fl.stages.console import stderr

    rows = document["sites"]
    table = Table(title="patches", title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row["site"], justify="right")
    table.add_column("sum", justify="right")
    for split in ("train", "val", "test"):
        if not any(sum(row["table"][split].values()) for row in rows):
            continue
        for name in CLASSES:
            values = [row["table"][split][name] for row in rows]
            table.add_row(f"{split} {name}", *map(str, values), str(sum(values)))
        totals = [sum(row["table"][split].values()) for row in rows]
        table.add_row(f"{split} sum", *map(str, totals), str(sum(totals)), style="bold", end_section=True)
    stderr.print(table)
    for row in rows:
        for aside in row["failed"]:
            say(f"  {row['site']}: {aside['slide']} set aside: {aside['reason']}", style="yellow")
        if not row["train"]:
            say(
                f"  {row['site']}: has no training patch, so nothing can be trained on it",
                style="bold yellow",
            )
        missing = [name for name in CLASSES if not row[name]]
        if missing:
            say(f"  {row['site']}: has no {missing[0]} patch at all", style="bold yellow")
    say(f"stores ready ({', '.join(row['store'] for row in rows)}); next: wsi-fl train --method proxyfl")
