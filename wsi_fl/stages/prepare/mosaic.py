"""`mosaic`: slides straight to features; no pixels are stored.

Of every slide a few patches are chosen (Yottixel's mosaic), read and encoded; a shard per slide, then one feature
store per site. A finished shard whose fingerprint still fits is not made again, so a killed job loses at most the
slide in hand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from wsi_fl.models.encoder import Encoder, Spent
from wsi_fl.models.presets import warning_of
from wsi_fl.slides.choosing.mosaic import MosaicParams
from wsi_fl.slides.choosing.splits import SEED, assign_splits
from wsi_fl.stages.prepare.mosaic_labels import Labelled, classes_of, labelled, table_of
from wsi_fl.stages.prepare.mosaic_slides import Done, Work, mosaic_path, write_mosaics
from wsi_fl.stages.prepare.quality import tissue_of
from wsi_fl.stages.prepare.sources import Listed, list_slides
from wsi_fl.stages.prepare.tables import first_reason, mosaic_row, say_tables
from wsi_fl.stages.site.encoders import encoder_of, transform_of
from wsi_fl.stages.site.rates import speed_of
from wsi_fl.stages.work.console import Watcher, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.features import FeatureMeta, write_features
from wsi_fl.stores.mosaics import read_mosaic
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.preparing import Mosaic
from wsi_fl.system.files import remove_strays
from wsi_fl.system.locks import locked
from wsi_fl.types import BagTable, GridSpec, SetAside, SlideRecord, WsiFlError


def mosaic(
    study: Study,
    *,
    site: str | None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Make the mosaics of one site, or with `site` None of every site of the pipeline; return the `--json` document.

    Started under mpiexec or srun, the ranks share the slides of each site, and all but the first return {}.
    """
    job = Job()
    told = job.watched(watcher)

    def prepare() -> tuple[list[tuple[Listed, Labelled]], Encoder]:
        listed = list_slides(study, site, pipeline_name, overrides)
        known = [(one, labelled(one.records, one.pipeline.subtypes)) for one in listed]
        settings = listed[0].pipeline.mosaic
        for one in listed if job.first else ():
            say_tables(one.site.name, one.said)
        if job.first and (unusual := warning_of(settings.encoder, settings.size_px, settings.mpp)):
            say(f"  {unusual}", "yellow")
        return known, encoder_of(study, settings, job.threads, tell=say if job.first else _quiet)

    known, encoder = job.each(prepare)
    made = [_make_site(*one, encoder, job, told) for one in known]
    return {"sites": [row for row, _ in made], "speed": [speed for _, speed in made]} if job.first else {}


def _make_site(
    listed: Listed, known: Labelled, encoder: Encoder, job: Job, watcher: Watcher
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All ranks make mosaics, each its share; the first one holds the lock and writes the store.

    Returns:
        What the site has, and how fast it was made.
    """
    began = time.perf_counter()
    study, name = listed.study, listed.site.name
    folder = study.mosaic(name).parent
    records = assign_splits(known.records, test_fraction=listed.pipeline.slides.test_fraction)
    work = work_of(study, listed.pipeline, name, encoder, job.threads)
    n, failed = len(records), [*listed.aside, *known.aside]
    with job.first_holds(locked(folder, name)):
        done = job.share(
            records,
            lambda mine: map(asdict, write_mosaics(mine, work)),
            lambda done, one: watcher.update(name, done, n, one.slide),
        )
        made = [Done(**{**one, "spent": Spent(**one["spent"])}) for one in done]
        failed += [SetAside(one.slide, one.reason) for one in made if one.reason]
        kept = [record for record, one in zip(records, made, strict=True) if one.whole]

        def write() -> tuple[BagTable, int]:
            if not kept:
                raise WsiFlError(f"site {name}: no slide gave a mosaic; {first_reason(failed)}")
            written = _write_store(listed, known, kept, encoder.label)
            remove_strays((folder / "mosaics",), {record.slide for record in kept})
            return written

        written = job.first_does(write)
    if written is None:
        return {}, {}
    table, n_patches = written
    seconds = time.perf_counter() - began
    spent = sum((one.spent for one in made), Spent())
    row = mosaic_row(
        study,
        name,
        table,
        n_patches=n_patches,
        encoder=encoder.label,
        classes=classes_of(listed.pipeline.subtypes),
        failed=failed,
        notes=[{"slide": one.slide, "note": one.note} for one in made if one.whole and one.note],
        n_slides=n + len(listed.aside) + len(known.aside),
        seconds=seconds,
    )
    n_made, patches = sum(one.made > 0 for one in made), sum(one.made for one in made)
    return row | {"transform": transform_of(encoder)}, speed_of(name, spent, n_made, patches, seconds)


def _quiet(_: str) -> None:
    """Tell nobody: the first rank tells for all."""


def spec_of(pipeline: Pipeline) -> GridSpec:
    return GridSpec(pipeline.mosaic.size_px, pipeline.mosaic.mpp, pipeline.mosaic.size_px)


def _recipe(settings: Mosaic) -> dict[str, Any]:
    """The settings by which patches are chosen, named as in `MosaicParams`."""
    return {name: getattr(settings, name) for name in ("min_tissue", "clusters", "fraction")} | {"seed": SEED}


def work_of(study: Study, pipeline: Pipeline, site: str, encoder: Encoder, threads: int) -> Work:
    """How mosaics are made, as the pipeline says."""
    params = MosaicParams(**_recipe(pipeline.mosaic), tissue=tissue_of(study, pipeline))
    folder = study.mosaic(site).parent
    return Work(folder, spec_of(pipeline), params, pipeline.slides.reader, threads, encoder)


def _write_store(
    listed: Listed, known: Labelled, kept: Sequence[SlideRecord], label: str
) -> tuple[BagTable, int]:
    """Write `mosaic.h5` of all shards, in the order of the slides; return its table and how many patches it holds."""
    study, name = listed.study, listed.site.name
    folder = study.mosaic(name).parent
    shards = [read_mosaic(mosaic_path(folder, record.slide)) for record in kept]
    table = table_of(kept, known)
    subtypes = {one: tuple(names) for one, names in listed.pipeline.subtypes.items()}
    recipe = _recipe(listed.pipeline.mosaic)
    meta = FeatureMeta(name, classes_of(subtypes), subtypes, label, spec_of(listed.pipeline), recipe)
    mpp_l0 = np.array([shard.mpp_l0 for shard in shards])
    write_features(study.mosaic(name), meta, table, [shard.bag for shard in shards], mpp_l0)
    return table, sum(len(shard.bag.features) for shard in shards)
