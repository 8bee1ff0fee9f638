"""`features`: the deep features of every patch of a patch store.

A shard per slide, then one file per site. A finished shard whose fingerprint still fits is not made again, so a
killed job loses at most the slides in hand; while one is encoded the next is read and the last one written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoded, Encoder, Spent, encode_each
from wsi_fl.models.presets import warning_of
from wsi_fl.stages.prepare.sources import asked_for
from wsi_fl.stages.site.data import open_store
from wsi_fl.stages.site.encoders import encoder_of, transform_of
from wsi_fl.stages.site.rates import speed_lines, speed_of
from wsi_fl.stages.work.console import Line, Lines, Table, Watcher, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.mosaics import fingerprint
from wsi_fl.stores.patch_features import FeaturesMeta, why_stale, write_patch_features, write_shard
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.system.files import remove_strays
from wsi_fl.system.locks import locked
from wsi_fl.system.ordered import in_order
from wsi_fl.types import WsiFlError

_READ = 32
"""Patches read at a time."""


def features(
    study: Study,
    *,
    site: str | None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Make the features of one site, or with `site` None of every site of the pipeline; return the `--json` document.

    Started under mpiexec or srun, the ranks share the slides of each site, and all but the first return {}.
    """
    job = Job()
    told = job.watched(watcher)

    def prepare() -> list[_Site]:
        pipeline, sites = asked_for(study, site, pipeline_name, overrides)
        stores = [open_store(study, one.name) for one in sites]
        encoder = encoder_of(study, pipeline.encoding, job.threads, "features", say if job.first else _quiet)
        return [_prepare(store, encoder) for store in stores]

    made = [_make_site(study, one, job, told) for one in job.each(prepare)]
    return {"sites": [row for row, _ in made], "speed": [speed for _, speed in made]} if job.first else {}


@dataclass(frozen=True)
class _Site:
    """A site's patches and what is made of them."""

    store: PatchStore
    meta: FeaturesMeta
    encoder: Encoder

    @property
    def name(self) -> str:
        return self.meta.store.site


def _prepare(store: PatchStore, encoder: Encoder) -> _Site:
    name = store.meta.site
    if not store.slides:
        raise WsiFlError(f"site {name}: its store has no patches")
    spec = store.meta.spec
    if unusual := warning_of(encoder.name, spec.size_px, spec.mpp):
        say(f"  {name}: {unusual}", "yellow")
    return _Site(store, FeaturesMeta(store.meta, encoder.label), encoder)


def _make_site(
    study: Study, site: _Site, job: Job, watcher: Watcher
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All ranks make shards, each its share; the first one holds the lock and writes the file.

    Returns:
        What the site has, and how fast it was made.
    """
    began = time.perf_counter()
    path, store = study.features(site.name), site.store
    folder, n = path.parent / "features", len(store.slides)

    def shard_of(slide: str) -> Path:
        return folder / f"{slide}.h5"

    def write() -> None:
        write_patch_features(path, site.meta, store.table, [shard_of(slide) for slide in store.slides])
        remove_strays((folder,), store.slides)

    with job.first_holds(locked(path.parent, site.name)):
        done = job.share(
            store.slides,
            lambda mine: map(asdict, _make_slides(site, mine, shard_of)),
            lambda done, one: watcher.update(site.name, done, n, one),
        )
        job.first_does(write)
    made = [_Made(**{**one, "spent": Spent(**one["spent"])}) for one in done]
    split, seconds = store.table.split, time.perf_counter() - began
    spent = sum((one.spent for one in made), Spent())
    slides, patches = sum(one.patches > 0 for one in made), sum(one.patches for one in made)
    row = {
        "site": site.name,
        "slides": n,
        "made": slides,
        "patches": len(store),
        "n_features": site.encoder.n_features,
        "train": int((split == "train").sum()),
        "test": int((split == "test").sum()),
        "encoder": site.encoder.label,
        "transform": transform_of(site.encoder),
        "store": study.relative(path),
        "seconds": seconds,
    }
    return row, speed_of(site.name, spent, slides, patches, seconds)


@dataclass(frozen=True)
class _Made:
    """What it took to make the shard of a slide; no patches where it was there already."""

    patches: int
    spent: Spent


@dataclass(frozen=True)
class _Task:
    """A slide whose patches are to be read.

    Attributes:
        rows: of the store; empty where the shard is current.
        wanted: the fingerprint of the shard.
    """

    slide: str
    rows: NDArray[np.int64]
    wanted: str


def _make_slides(site: _Site, slides: Sequence[str], shard_of: Callable[[str], Path]) -> Iterator[_Made]:
    """Make the shards of these slides unless they are current, and yield in order what it took."""
    tasks = (_task(site, slide, shard_of(slide)) for slide in slides)
    read = ((task, _patches(site, task)) for task in tasks)
    with (
        closing(encode_each(read, site.encoder)) as encoded,
        closing(in_order(lambda one: _write(one, shard_of), encoded, threads=1, ahead=1)) as written,
    ):
        yield from written


def _task(site: _Site, slide: str, shard: Path) -> _Task:
    """Return what is to be read of a slide."""
    store = site.store
    rows = np.flatnonzero(store.table.slide == slide)
    patches = str(store.shard(slide).attrs["fingerprint"])
    wanted = fingerprint(slide, patches, len(rows), site.encoder.label)
    stale = why_stale(shard, wanted)
    if stale:
        say(f"  {slide}: {stale}, made again")
    return _Task(slide, rows[:0] if stale is None else rows, wanted)


def _patches(site: _Site, task: _Task) -> Iterator[NDArray[np.uint8]]:
    """Yield the patches that a task reads, uint8[b, h, w, 3]."""
    for first in range(0, len(task.rows), _READ):
        pixels = site.store.read(task.rows[first : first + _READ])
        yield pixels if pixels.shape[-1] == 3 else np.repeat(pixels, 3, axis=-1)


def _write(one: Encoded[_Task], shard_of: Callable[[str], Path]) -> _Made:
    """Write the shard of a slide, unless it is there."""
    if one.error is not None:
        raise one.error
    if len(one.item.rows):
        began = time.perf_counter()
        write_shard(shard_of(one.item.slide), one.item.wanted, one.features)
        one.spent.write += time.perf_counter() - began
    return _Made(len(one.features), one.spent)


def _quiet(_: str) -> None:
    """Tell nobody: the first rank tells for all."""


def features_lines(document: dict[str, Any]) -> Lines:
    """Yield a row per site."""
    headings = ("slides", "patches", "train", "test")
    rows = [[row["site"], *(str(row[key]) for key in headings)] for row in document["sites"]]
    yield Table("features", ["site", *headings], rows)
    yield from speed_lines(document["speed"])
    first = document["sites"][0]
    yield Line(f"{first['n_features']} features of every patch ready ({first['encoder']})")
    yield Line(
        "next: wsi-fl train --set train.data=features --set model.private=linear_head --set model.proxy=linear_head"
    )
