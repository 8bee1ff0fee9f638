"""`features`: the deep features of every patch of a patch store, and of training patches in other sites' stains.

A shard per slide, then one file per site. A finished shard whose fingerprint still fits is not made again, so a
killed job loses at most the slide in hand; one slide's features are in memory at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoder, encode
from wsi_fl.slides.stains.methods import AnyStain, restained
from wsi_fl.stages.prepare.sources import asked_for
from wsi_fl.stages.site.data import open_store
from wsi_fl.stages.site.encoders import encoder_of
from wsi_fl.stages.site.stains import stains_of
from wsi_fl.stages.work.console import Watcher, print_table, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.mosaics import fingerprint
from wsi_fl.stores.patch_features import FeaturesMeta, shard_is_current, write_patch_features, write_shard
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import remove_strays
from wsi_fl.system.locks import locked
from wsi_fl.types import UsageError, WsiFlError

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

    With `stain.exchange` also those of the training patches in the stain of every other site of the pipeline. Started
    under mpiexec or srun, the ranks share the slides of each site, and all but the first return {}.
    """
    job = Job()

    def prepare() -> list[_Site]:
        pipeline, sites = asked_for(study, site, pipeline_name, overrides)
        stores = [open_store(study, one.name) for one in sites]
        encoder = encoder_of(study, pipeline.encoding, job.threads, "features")
        return [_prepare(study, pipeline, store, encoder) for store in stores]

    told = job.watched(watcher)
    rows = [_make_site(study, one, job, told) for one in job.each(prepare)]
    return {"sites": rows} if job.first else {}


@dataclass(frozen=True)
class _Site:
    """A site's patches and what is made of them.

    Attributes:
        own: the site's released stain; None where there is no exchange.
        others: the other sites' by name.
    """

    store: PatchStore
    meta: FeaturesMeta
    encoder: Encoder
    own: AnyStain | None
    others: Mapping[str, AnyStain]

    @property
    def name(self) -> str:
        return self.meta.store.site


def _prepare(study: Study, pipeline: Pipeline, store: PatchStore, encoder: Encoder) -> _Site:
    name = store.meta.site
    if not store.slides:
        raise WsiFlError(f"site {name}: its store has no patches")
    stains = stains_of(study, pipeline, name) if pipeline.stain.exchange else {}
    if stains and store.channels != 3:
        raise UsageError(f"site {name}: its store holds grey images, which have no stain")
    own = stains[name].stain if stains else None
    others = {one: released.stain for one, released in sorted(stains.items()) if one != name}
    digests = {one: released.digest for one, released in stains.items()}
    return _Site(store, FeaturesMeta(store.meta, encoder.label, digests), encoder, own, others)


def _make_site(study: Study, site: _Site, job: Job, watcher: Watcher) -> dict[str, Any]:
    """All ranks make shards, each its share; the first one holds the lock and writes the file."""
    began = time.perf_counter()
    path, store = study.features(site.name), site.store
    folder, n = path.parent / "features", len(store.slides)

    def shard_of(slide: str) -> Path:
        return folder / f"{slide}.h5"

    def write() -> None:
        write_patch_features(path, site.meta, store.table, [shard_of(slide) for slide in store.slides])
        remove_strays((folder,), store.slides)

    with job.first_holds(locked(path.parent, site.name)):
        made = job.share(
            store.slides,
            lambda mine: (_make_slide(site, slide, shard_of(slide)) for slide in mine),
            lambda done, slide: watcher.update(site.name, done, n, slide),
        )
        job.first_does(write)
    split = store.table.split
    return {
        "site": site.name,
        "slides": n,
        "made": sum(made),
        "patches": len(store),
        "n_features": site.encoder.n_features,
        "train": int((split == "train").sum()),
        "test": int((split == "test").sum()),
        "variants": list(site.others),
        "encoder": site.encoder.label,
        "store": study.relative(path),
        "seconds": time.perf_counter() - began,
    }


def _make_slide(site: _Site, slide: str, shard: Path) -> bool:
    """Make the shard of one slide unless it is current; return whether it had to be made."""
    store = site.store
    rows = np.flatnonzero(store.table.slide == slide)
    others = site.others if store.table.split[rows[0]] == "train" else {}
    made_with = site.meta.stains if others else {}
    patches = str(store.shard(slide).attrs["fingerprint"])
    wanted = fingerprint(slide, patches, len(rows), site.encoder.label, dict(sorted(made_with.items())))
    current = shard_is_current(shard, wanted)
    if current:
        return False
    if current is False:
        say(f"  {slide}: patches, encoder or stains changed, made again")

    def batches(other: AnyStain | None = None) -> Iterator[NDArray[np.uint8]]:
        for first in range(0, len(rows), _READ):
            pixels = store.read(rows[first : first + _READ])
            if other is not None and site.own is not None:
                pixels = restained(pixels, site.own, other)
            yield pixels if pixels.shape[-1] == 3 else np.repeat(pixels, 3, axis=-1)

    variants = {name: encode(batches(other), site.encoder) for name, other in others.items()}
    write_shard(shard, wanted, encode(batches(), site.encoder), variants)
    return True


def print_features(document: dict[str, Any]) -> None:
    """Print a row per site."""
    headings = ("slides", "patches", "train", "test")
    rows = [
        [row["site"], *(str(row[key]) for key in headings), str(len(row["variants"]) + 1)]
        for row in document["sites"]
    ]
    print_table("features", ["site", *headings, "stains"], rows)
    first = document["sites"][0]
    say(f"{first['n_features']} features of every patch ready ({first['encoder']})")
    say(
        "next: wsi-fl train --set train.data=features --set model.private=linear_head --set model.proxy=linear_head"
    )
