"""`features`: the deep features of every patch of a patch store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoder
from wsi_fl.models.presets import warning_of
from wsi_fl.stages.prepare.bags import Chosen, Done, Way, quiet, speed_of_all
from wsi_fl.stages.prepare.sources import asked_for
from wsi_fl.stages.site.data import open_store
from wsi_fl.stages.site.encoders import encoder_of, transform_of
from wsi_fl.stages.work.console import Line, Lines, Table, Watcher, say, speed_lines
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.bag_shards import fingerprint, read_shard
from wsi_fl.stores.bags import BagMeta, bags_of, write_bags
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.types import WsiFlError

_READ = 32
"""Patches read at a time."""


class OfStore(Way[str]):
    """All patches of a patch store."""

    data, sets_aside = "features", False

    def __init__(self, study: Study, store: PatchStore, encoder: Encoder) -> None:
        super().__init__(store.meta.site, study.features(store.meta.site), store.meta.spec, encoder, 0)
        self.store = store

    def name(self, item: str) -> str:
        return item

    def wanted(self, item: str) -> str:
        patches = str(self.store.shard(item).attrs["fingerprint"])
        return fingerprint(item, patches, len(self._rows(item)), self.encoder.label)

    def choose(self, item: str) -> Chosen:
        rows = self._rows(item)

        def pixels() -> Iterator[NDArray[np.uint8]]:
            for first in range(0, len(rows), _READ):
                read = self.store.read(rows[first : first + _READ])
                yield read if read.shape[-1] == 3 else np.repeat(read, 3, axis=-1)

        return Chosen(item, self.store.table.xy_l0[rows], pixels)

    def _rows(self, slide: str) -> NDArray[np.int64]:
        return np.flatnonzero(self.store.table.slide == slide)

    def write(self, _: list[Done]) -> bool:
        """Write `features.h5` from all shards; holds one slide's at a time."""
        made, patches = self.store.meta, self.store.table
        recipe = {} if made.min_tissue is None else {"min_tissue": made.min_tissue}
        meta = BagMeta(
            self.site, made.classes, self.encoder.label, self.spec, "features", {}, recipe, made.generator
        )
        table, sizes = bags_of(patches)
        bags = (read_shard(self.shard(str(slide))).bag for slide in table.slide)
        write_bags(self.path, meta, table, bags, sizes=sizes, patches=patches)
        return True


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

    def prepare() -> list[OfStore]:
        pipeline, sites = asked_for(study, site, pipeline_name, overrides)
        stores = [open_store(study, one.name) for one in sites]
        encoder = encoder_of(
            study, pipeline.encoding, job.threads, "features", say if job.first else quiet, gpu=pipeline.gpu
        )
        return [_prepare(study, store, encoder) for store in stores]

    ways = job.each(prepare)
    for way in ways:
        told.update(way.site, 0, len(way.store.slides))
    made = [_make_site(study, way, job, told) for way in ways]
    return {"sites": [row for row, _ in made], "speed": [speed for _, speed in made]} if job.first else {}


def _prepare(study: Study, store: PatchStore, encoder: Encoder) -> OfStore:
    name, spec = store.meta.site, store.meta.spec
    if not store.slides:
        raise WsiFlError(f"site {name}: its store has no patches")
    if unusual := warning_of(encoder.name, spec.size_px, spec.mpp):
        say(f"  {name}: {unusual}", "yellow")
    return OfStore(study, store, encoder)


def _make_site(
    study: Study, way: OfStore, job: Job, watcher: Watcher
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the features of one site.

    Returns:
        What the site has, and how fast it was made.
    """
    began, store = time.perf_counter(), way.store
    made, _ = way.make(store.slides, way.write, job, watcher)
    split = store.table.split
    row = {
        "site": way.site,
        "slides": len(store.slides),
        "made": sum(one.made > 0 for one in made),
        "patches": len(store),
        "n_features": way.encoder.n_features,
        "train": int((split == "train").sum()),
        "test": int((split == "test").sum()),
        "encoder": way.encoder.label,
        "transform": transform_of(way.encoder),
        "store": study.relative(way.path),
        "seconds": time.perf_counter() - began,
    }
    return row, speed_of_all(way.site, made, began)


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
