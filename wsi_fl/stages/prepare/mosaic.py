"""`mosaic`: slides straight to features; no pixels are stored.

Of every slide a few patches are chosen (Yottixel's mosaic), read and encoded; a shard per slide, then one feature
store per site. A finished shard whose fingerprint still fits is not made again, so a killed job loses at most the
slide in hand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wsi_fl.models.encoder import Encoder
from wsi_fl.slides.choosing.mosaic import MosaicParams
from wsi_fl.slides.choosing.splits import assign_splits
from wsi_fl.slides.layouts import read_site
from wsi_fl.stages.prepare.mosaic_labels import Labelled, classes_of, labelled
from wsi_fl.stages.prepare.mosaic_slides import Done, Work, mosaic_path, write_mosaics
from wsi_fl.stages.prepare.mosaic_table import row_of
from wsi_fl.stages.prepare.sources import sources_of
from wsi_fl.stages.site.encoders import encoder_of
from wsi_fl.stages.work.console import Silent, Watcher
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.features import FeatureMeta, write_features
from wsi_fl.stores.mosaics import read_mosaic
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.preparing import Mosaic
from wsi_fl.study.site import SiteFile as SiteConfig
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
    """Mosaics of one site, or with `site` None of every site of the pipeline; returns the `--json` document.

    Started under mpiexec or srun, the ranks share the slides of each site, and all but the first return {}.
    """
    job = Job()
    listed: list[_Listed] = []
    encoder: list[Encoder] = []

    def prepare() -> None:
        pipeline = study.pipeline(study.pipeline_name(pipeline_name), overrides)
        chosen = study.sites(pipeline) if site is None else [study.site(site)]
        sources = [(one, sources_of(study, one)) for one in chosen]
        for one, source in sources:
            records, aside = read_site(one.layout, source)
            listed.append(_Listed(study, one, pipeline, tuple(aside), labelled(records, pipeline.subtypes)))
        encoder.append(encoder_of(study, pipeline.mosaic, job.threads))

    job.together(prepare)
    told = watcher if watcher and job.first else Silent()
    rows = [_make_site(one, encoder[0], job, told) for one in listed]
    return {"sites": rows} if job.first else {}


@dataclass(frozen=True)
class _Listed:
    """A site and its slides."""

    study: Study
    site: SiteConfig
    pipeline: Pipeline
    aside: tuple[SetAside, ...]
    labelled: Labelled


def _make_site(listed: _Listed, encoder: Encoder, job: Job, watcher: Watcher) -> dict[str, Any]:
    """All ranks make mosaics, each its share; the first one holds the lock and writes the store."""
    began = time.perf_counter()
    name, settings = listed.site.name, listed.pipeline.mosaic
    folder = listed.study.mosaic(name).parent
    records = assign_splits(listed.labelled.records, test_fraction=settings.test_fraction, seed=settings.seed)
    failed = [*listed.aside, *listed.labelled.aside]
    with ExitStack() as stack:

        def lock() -> None:
            if job.first:
                stack.enter_context(locked(folder, name))

        job.together(lock)
        done = _make_slides(listed, records, encoder, job, watcher)
        failed += [SetAside(one.slide, one.reason) for one in done if one.reason]
        kept = [record for record, one in zip(records, done, strict=True) if one.whole]
        tables: list[BagTable] = []

        def write() -> None:
            if not kept:
                first = f"{failed[0].slide}: {failed[0].reason}" if failed else "it has no slides"
                raise WsiFlError(f"site {name}: no slide gave a mosaic; the first: {first}")
            if job.first:
                tables.append(_write_store(listed, kept, encoder.label))
                _remove_strays(folder / "mosaics", {record.slide for record in kept})

        job.together(write)
    if not job.first:
        return {}
    notes = [{"slide": one.slide, "note": one.note} for one in done if one.whole and one.note]
    n_slides = len(records) + len(listed.aside) + len(listed.labelled.aside)
    return row_of(
        listed.study,
        name,
        tables[0],
        classes=classes_of(listed.pipeline.subtypes),
        failed=failed,
        notes=notes,
        n_slides=n_slides,
        seconds=time.perf_counter() - began,
    )


def spec_of(pipeline: Pipeline) -> GridSpec:
    return GridSpec(pipeline.mosaic.size_px, pipeline.mosaic.mpp, pipeline.mosaic.size_px)


def _recipe(settings: Mosaic) -> dict[str, Any]:
    """The settings by which patches are chosen, named as in `MosaicParams`."""
    return {name: getattr(settings, name) for name in ("min_tissue", "clusters", "fraction", "seed")}


def work_of(study: Study, pipeline: Pipeline, site: str, encoder: Encoder, threads: int) -> Work:
    """How mosaics are made, as the pipeline says."""
    params = MosaicParams(**_recipe(pipeline.mosaic))
    folder = study.mosaic(site).parent
    return Work(folder, spec_of(pipeline), params, pipeline.slides.reader, threads, encoder)


def _make_slides(
    listed: _Listed, records: Sequence[SlideRecord], encoder: Encoder, job: Job, watcher: Watcher
) -> list[Done]:
    """What became of every slide, in order."""
    name = listed.site.name
    work = work_of(listed.study, listed.pipeline, name, encoder, job.threads)
    numbers = job.mine(range(len(records)))

    def make() -> list[dict[str, Any]]:
        found = []
        mine = [records[number] for number in numbers]
        for number, one in zip(numbers, write_mosaics(mine, work), strict=True):
            found.append(asdict(one) | {"number": number})
            watcher.update(name, len(found) * len(records) / len(mine), len(records), one.slide)
        return found

    parts = [one for part in job.together(make) for one in part]
    ordered = sorted(parts, key=lambda one: int(one["number"]))
    return [Done(**{key: value for key, value in one.items() if key != "number"}) for one in ordered]


def _write_store(listed: _Listed, kept: Sequence[SlideRecord], label: str) -> BagTable:
    """`mosaic.h5` of all shards, in the order of the slides."""
    study, name = listed.study, listed.site.name
    folder = study.mosaic(name).parent
    shards = [read_mosaic(mosaic_path(folder, record.slide)) for record in kept]
    known = listed.labelled
    table = BagTable(
        np.array([known.label[record.slide] for record in kept], np.int64),
        np.array([known.tumor_type[record.slide] for record in kept], np.str_),
        np.array([record.slide for record in kept], np.str_),
        np.array([record.patient for record in kept], np.str_),
        np.array([record.split or "train" for record in kept], np.str_),
    )
    subtypes = {one: tuple(names) for one, names in listed.pipeline.subtypes.items()}
    recipe = _recipe(listed.pipeline.mosaic)
    meta = FeatureMeta(name, classes_of(subtypes), subtypes, label, spec_of(listed.pipeline), recipe)
    mpp_l0 = np.array([shard.mpp_l0 for shard in shards])
    write_features(study.mosaic(name), meta, table, [shard.bag for shard in shards], mpp_l0)
    return table


def _remove_strays(folder: Path, kept: set[str]) -> None:
    """Mosaics of slides that no longer belong to the store would only mislead."""
    for path in [*folder.glob("*.h5"), *folder.glob("*.png")]:
        if path.stem not in kept:
            path.unlink()
