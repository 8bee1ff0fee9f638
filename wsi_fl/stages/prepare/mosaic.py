"""`mosaic`: slides straight to features; no pixels are stored.

Of every slide a few patches are chosen (Yottixel's mosaic), read and encoded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoder, encode
from wsi_fl.models.presets import warning_of
from wsi_fl.slides.patching.mosaic import MosaicParams, plan_mosaic
from wsi_fl.slides.patching.splits import SEED, assign_splits
from wsi_fl.slides.patching.survey import mask_digest
from wsi_fl.slides.pictures.overview import draw_mosaic, small_copy
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.slides.reading.sweep import read_patches
from wsi_fl.stages.prepare.bag_labels import Labelled, labelled, stored_classes, table_of
from wsi_fl.stages.prepare.bags import Chosen, Done, Way, quiet, speed_of_all
from wsi_fl.stages.prepare.quality import tissue_of
from wsi_fl.stages.prepare.sources import Listed, list_slides
from wsi_fl.stages.prepare.tables import first_reason, mosaic_row, say_tables
from wsi_fl.stages.site.encoders import encoder_of, transform_of
from wsi_fl.stages.work.console import Watcher, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.bag_shards import fingerprint, read_shard
from wsi_fl.stores.bags import Bag, BagMeta, write_bags
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Mosaic, Pipeline
from wsi_fl.types import BagTable, GridSpec, SetAside, SlideRecord, WsiFlError

_LOOKERS = 4
"""Slides looked at while another is encoded: each needs some hundred megabytes for its tissue mask."""


class OfSlides(Way[SlideRecord]):
    """A few patches of every slide, read from it.

    Attributes:
        params: how they are chosen, as the pipeline says.
    """

    data, sets_aside = "mosaics", True

    def __init__(self, study: Study, pipeline: Pipeline, site: str, encoder: Encoder, threads: int) -> None:
        settings = pipeline.mosaic
        spec = GridSpec(settings.size_px, settings.mpp, settings.size_px)
        super().__init__(site, study.mosaic(site), spec, encoder, min(threads, _LOOKERS))
        self.params = MosaicParams(**_recipe(settings), tissue=tissue_of(study, pipeline))
        self.reader, self.threads = pipeline.slides.reader, threads

    def name(self, item: SlideRecord) -> str:
        return item.slide

    def has_picture(self, slide: str) -> bool:
        return self.shard(slide).with_suffix(".png").exists()

    def wanted(self, item: SlideRecord) -> str:
        """Over the slide (its size on disk too, for formats without quickhash), the parameters and the encoder."""
        check_opens_safely(item.path, item.mpp_override, self.reader)
        with Slide(item.path, item.mpp_override, "openslide") as slide:
            quickhash, mpp = slide.quickhash, slide.mpp
        size = item.path.stat().st_size if item.path.is_file() else 0
        params, masks = self.params, self.params.tissue.masks
        tissue = mask_digest(Path(masks), item.slide) if masks else params.tissue.method
        how = (params.min_tissue, params.clusters, params.fraction, params.seed, tissue)
        patches = (self.reader, self.spec.size_px, self.spec.mpp)
        return fingerprint(item.slide, quickhash, size, mpp, *patches, *how, self.encoder.label)

    def choose(self, item: SlideRecord) -> Chosen:
        plan = plan_mosaic(item, self.spec, self.params, reader=self.reader)
        small: list[tuple[int, NDArray[np.uint8]]] = []
        unread: dict[int, str] = {}

        def pixels() -> Iterator[NDArray[np.uint8]]:
            how: Any = {"threads": self.threads, "reader": self.reader, "aside": unread}
            for first, read in read_patches(plan.record, plan.kept_l0, self.spec, **how):
                rows = islice((row for row in count(first) if row not in unread), len(read))
                small.extend((row, small_copy(patch)) for row, patch in zip(rows, read, strict=True))
                yield read

        return Chosen(
            item.slide,
            plan.kept_l0,
            pixels,
            unread,
            lambda: draw_mosaic(plan, small),
            plan.kept_cluster,
            plan.mosaic.weight,
            plan.mpp,
            plan.note,
        )

    def bag(self, record: SlideRecord) -> Bag:
        """Return the mosaic of one slide, which is kept nowhere.

        Raises:
            WsiFlError: when the slide gives none.
        """
        chosen = self.choose(record)
        return chosen.bag(encode(chosen.pixels(), self.encoder))


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
        known = [(one, labelled(one.records, one.pipeline.subtypes, one.site)) for one in listed]
        settings = listed[0].pipeline.mosaic
        for one in listed if job.first else ():
            say_tables(one.site.name, one.said)
        if job.first and (unusual := warning_of(settings.encoder, settings.size_px, settings.mpp)):
            say(f"  {unusual}", "yellow")
        return known, encoder_of(
            study, settings, job.threads, tell=say if job.first else quiet, gpu=listed[0].pipeline.gpu
        )

    known, encoder = job.each(prepare)
    for listed, labels in known:
        told.update(listed.site.name, 0, len(labels.records))
    made = [_make_site(*one, encoder, job, told) for one in known]
    return {"sites": [row for row, _ in made], "speed": [speed for _, speed in made]} if job.first else {}


def _make_site(
    listed: Listed, known: Labelled, encoder: Encoder, job: Job, watcher: Watcher
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the mosaics of one site.

    Returns:
        What the site has, and how fast it was made; both empty on all ranks but the first.
    """
    began = time.perf_counter()
    study, name = listed.study, listed.site.name
    way = OfSlides(study, listed.pipeline, name, encoder, job.threads)
    records = assign_splits(known.records, test_fraction=listed.pipeline.slides.test_fraction)
    aside = [*listed.aside, *known.aside]

    def write(done: list[Done]) -> BagTable:
        kept = [record for record, one in zip(records, done, strict=True) if one.patches]
        if not kept:
            failed = [*aside, *(SetAside(one.slide, one.reason) for one in done if one.reason)]
            raise WsiFlError(f"site {name}: no slide gave a mosaic; {first_reason(failed)}")
        return _write_store(way, listed, known, kept)

    made, table = way.make(records, write, job, watcher)
    if table is None:
        return {}, {}
    row = mosaic_row(
        study,
        name,
        table,
        n_patches=sum(one.patches for one in made),
        encoder=encoder.label,
        classes=stored_classes(listed.site, listed.pipeline.subtypes),
        failed=[*aside, *(SetAside(one.slide, one.reason) for one in made if one.reason)],
        notes=[{"slide": one.slide, "note": one.note} for one in made if one.patches and one.note],
        n_slides=len(records) + len(aside),
        seconds=time.perf_counter() - began,
    )
    return row | {"transform": transform_of(encoder)}, speed_of_all(name, made, began)


def _recipe(settings: Mosaic) -> dict[str, Any]:
    """The settings by which patches are chosen, named as in `MosaicParams`."""
    return {name: getattr(settings, name) for name in ("min_tissue", "clusters", "fraction")} | {"seed": SEED}


def _write_store(way: OfSlides, listed: Listed, known: Labelled, kept: Sequence[SlideRecord]) -> BagTable:
    """Write `mosaic.h5` of all shards, in the order of the slides; return its table."""
    shards = [read_shard(way.shard(record.slide)) for record in kept]
    table = table_of(kept, known)
    subtypes = {one: tuple(names) for one, names in listed.pipeline.subtypes.items()}
    recipe = _recipe(listed.pipeline.mosaic)
    classes = stored_classes(listed.site, subtypes)
    meta = BagMeta(way.site, classes, way.encoder.label, way.spec, "mosaic", subtypes, recipe)
    mpp_l0 = np.array([shard.mpp_l0 for shard in shards])
    write_bags(way.path, meta, table, [shard.bag for shard in shards], mpp_l0)
    return table
