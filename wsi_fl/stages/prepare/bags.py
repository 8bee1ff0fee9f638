"""`wsi-fl mosaic` and `wsi-fl features`: encode slides to bags, a shard per slide, then one store per site.

A mosaic is a few patches of a slide (Yottixel's), read and encoded; no pixels are stored. Features are those of every
patch of a patch store. A finished shard with the same fingerprint is reused, so a killed job loses at most the slides
in hand. While one slide is encoded, the next are planned and read, and the last is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoded, Encoder, EncoderError, Spent, encode, encode_each
from wsi_fl.models.presets import warning_of
from wsi_fl.slides.patching.copies import Scan, describe_copies, describe_shared, drop_leaks, scans_of
from wsi_fl.slides.patching.mosaic import MosaicParams, plan_mosaic
from wsi_fl.slides.patching.splits import SEED, assign_splits
from wsi_fl.slides.patching.survey import mask_digest
from wsi_fl.slides.pictures.overview import draw_mosaic, small_copy
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.slides.reading.sweep import read_patches
from wsi_fl.stages.prepare import sources
from wsi_fl.stages.prepare.sources import Bags, BagsRow, Done, Listed, Which
from wsi_fl.stages.prepare.tile_plans import tissue_of
from wsi_fl.stages.site.data import open_store
from wsi_fl.stages.site.encoders import encoder_of, transform_of
from wsi_fl.stages.work.console import Line, Lines, Table, Watcher, partly, reason_of, say, speed_lines
from wsi_fl.stages.work.job import Job
from wsi_fl.stores import bags as stored
from wsi_fl.stores.bags import Bag, BagMeta, BagShard
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import locked, marks_of, write_bytes
from wsi_fl.system.ordered import in_order
from wsi_fl.types import DiskFull, GridSpec, SetAside, SlideRecord, WsiFlError, short_label

_LOOKERS = 4
"""Slides planned while another is encoded; each needs some hundred megabytes for its tissue mask."""
_READ = 32
"""Patches of a store read at a time."""

_Item = TypeVar("_Item")
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Chosen:
    """The n patches of a slide to be encoded; their pixels are read once.

    Attributes:
        xy_l0: int64[n, 2].
        read_pixels: yields uint8[b, h, w, 3]; the reasons of missing rows go into the next field.
        picture: draws the selected patches, once their pixels were read; None for none.
        cluster, weight, mpp_l0, note: as in `Bag` and `BagShard`.
        damage: filled while pixels are read: damage of the slide that other data of the slide make up for.
    """

    slide: str
    xy_l0: NDArray[np.int64]
    pixels: Callable[[], Iterator[NDArray[np.uint8]]]
    unread: dict[int, str] = field(default_factory=dict)
    picture: Callable[[], bytes] | None = None
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None
    mpp_l0: float = float("nan")
    note: str = ""
    damage: set[str] = field(default_factory=set)

    def bag(self, features: NDArray[np.float32]) -> Bag:
        """Return the bag of the m readable patches: features float32[m, d], places and groups."""
        if not len(features):
            raise WsiFlError(self.unread[min(self.unread)])
        kept = np.setdiff1d(np.arange(len(self.xy_l0)), list(self.unread))
        some = (None if values is None else values[kept] for values in (self.cluster, self.weight))
        return Bag(features, self.xy_l0[kept], *some)


class Way(Generic[_Item]):
    """Builds the bag store of a site: selects, reads and encodes patches of its slides.

    Attributes:
        data: the folder of its shards, a value of `train.data`.
        sets_aside: whether unreadable slides are excluded; else they end the work.
        items: the site's slides.
        site, path, spec: of the store, and of the patches in it.
        n_ahead: slides planned while another is encoded; 0 for none.
    """

    data: ClassVar[str]
    sets_aside: ClassVar[bool]
    items: Sequence[_Item] = ()

    def __init__(self, site: str, path: Path, spec: GridSpec, encoder: Encoder, ahead: int) -> None:
        self.site, self.path, self.spec, self.encoder, self.ahead = site, path, spec, encoder, ahead

    def name(self, item: _Item) -> str:
        """Return the name of a slide."""
        raise NotImplementedError

    def wanted(self, item: _Item) -> str:
        """Return the fingerprint of all inputs of a slide's bag."""
        raise NotImplementedError

    def choose(self, item: _Item) -> _Chosen:
        """Return the patches of a slide."""
        raise NotImplementedError

    def write(self, made: list[Done]) -> BagsRow:
        """Write the store of all shards; return the site's row of the `--json` document."""
        raise NotImplementedError

    def shard(self, slide: str) -> Path:
        """Return the path of a slide's shard."""
        return self.path.parent / self.data / f"{slide}.h5"

    def has_picture(self, slide: str) -> bool:
        """Return whether the picture of a slide exists, where slides have one."""
        return True

    def make(self, job: Job, watcher: Watcher) -> tuple[BagsRow, dict[str, object]] | None:
        """Make the shards of all slides, each rank its share; the first one holds the lock and writes the store.

        Returns:
            The row of the site, and its speed; None on all ranks but the first.
        """
        began, folder, n = time.perf_counter(), self.path.parent, len(self.items)
        with job.first_holds(locked(folder, self.site)):
            made = sources.share_slides(
                job,
                self.items,
                self._shards,
                lambda done, one: watcher.update(self.site, done, n, self.name(one)),
            )
            row = sources.finish(job, made, self.write, (folder / self.data,))
        if row is None:
            return None
        seconds = time.perf_counter() - began
        return row | {"transform": transform_of(self.encoder), "seconds": seconds}, {
            "site": self.site,
            "slides_per_second": sum(one.made > 0 for one in made) / seconds,
            "patches_per_second": sum(one.made for one in made) / seconds,
            "spent": asdict(sum((Spent(**one.spent) for one in made), Spent())),
        }

    def _shards(self, items: Sequence[_Item]) -> Iterator[Done]:
        n = self.ahead
        with ExitStack() as stack:
            found: Iterable[tuple[str, _Chosen] | Done] = map(self._look, items)
            if n:
                found = stack.enter_context(closing(in_order(self._look, items, threads=n, ahead=n)))
            to_read = ((one, () if isinstance(one, Done) else one[1].pixels()) for one in found)
            encoded = stack.enter_context(closing(encode_each(to_read, self.encoder)))
            yield from stack.enter_context(closing(in_order(self._write, encoded, threads=1, ahead=1)))

    def _look(self, item: _Item) -> tuple[str, _Chosen] | Done:
        """Select the patches of a slide, unless its shard is current."""
        slide = self.name(item)

        def look() -> tuple[str, _Chosen] | Done:
            wanted = self.wanted(item)
            current = stored.current_shard(self.shard(slide), wanted)
            if isinstance(current, BagShard) and self.has_picture(slide):
                return _done(current)
            if isinstance(current, str) and current:
                say(f"  {slide}: {current}; made again")
            return wanted, self.choose(item)

        return self._apart(slide, look)

    def _write(self, encoded: Encoded[tuple[str, _Chosen] | Done]) -> Done:
        """Write picture, then shard: an existing shard means a finished slide."""
        if isinstance(encoded.item, Done):
            return encoded.item
        began = time.perf_counter()
        wanted, chosen = encoded.item
        path = self.shard(chosen.slide)

        def write() -> Done:
            if encoded.error is not None:
                raise encoded.error
            unread = tuple((*chosen.xy_l0[row].tolist(), chosen.unread[row]) for row in sorted(chosen.unread))
            bag = chosen.bag(encoded.features)
            note = "; ".join(filter(None, (chosen.note, *sorted(chosen.damage))))
            shard = BagShard(
                chosen.slide, wanted, self.encoder.label, self.spec, bag, chosen.mpp_l0, note, unread
            )
            if chosen.picture is not None:
                write_bytes(path.with_suffix(".png"), chosen.picture())
            stored.write_bag_shard(path, shard)
            spent = encoded.spent + Spent(write=time.perf_counter() - began)
            return _done(shard, len(encoded.features), asdict(spent))

        return self._apart(chosen.slide, write)

    def _apart(self, slide: str, step: Callable[[], _T]) -> _T | Done:
        """Run a step of one slide; its failure must not end the others."""
        try:
            return step()
        except (DiskFull, EncoderError):
            raise
        except Exception as error:
            if not self.sets_aside:
                raise
            return Done(slide, reason=reason_of(error))


def _done(shard: BagShard, made: int = 0, spent: dict[str, float] | None = None) -> Done:
    n = len(shard.bag.features)
    return Done(shard.slide, n, partly(shard.unread, n + len(shard.unread)), shard.note, made, spent or {})


class OfSlides(Way[SlideRecord]):
    """Builds mosaics: a few patches of every slide.

    Attributes:
        params: the selection by the pipeline's settings.
    """

    data, sets_aside = "mosaics", True

    def __init__(self, study: Study, pipeline: Pipeline, site: str, encoder: Encoder, threads: int) -> None:
        settings = pipeline.mosaic
        spec = GridSpec(settings.size_px, settings.mpp, settings.size_px)
        super().__init__(site, study.mosaic(site), spec, encoder, min(threads, _LOOKERS))
        self.params = MosaicParams(
            **_recipe(pipeline), tissue=tissue_of(study, pipeline, study.site(site).annotations_origin)
        )
        self.reader, self.threads = pipeline.slides.reader, threads

    def name(self, item: SlideRecord) -> str:
        return item.slide

    def has_picture(self, slide: str) -> bool:
        return self.shard(slide).with_suffix(".png").exists()

    def wanted(self, item: SlideRecord) -> str:
        """Hash the slide (and its size on disk, for formats without quickhash), the parameters and the encoder."""
        check_opens_safely(item.path, item.mpp_override, self.reader)
        with Slide(item.path, item.mpp_override, "openslide") as slide:
            quickhash, mpp = slide.quickhash, slide.mpp
        size = item.path.stat().st_size if item.path.is_file() else 0
        params, masks = self.params, self.params.tissue.masks
        tissue = (
            mask_digest(Path(masks), item.slide) + (params.tissue.origin or "")
            if masks
            else params.tissue.method
        )
        how = (params.min_tissue, params.clusters, params.fraction, params.seed, tissue)
        patches = (self.reader, self.spec.size_px, self.spec.mpp)
        return stored.bag_fingerprint(
            item.slide, quickhash, size, mpp, *patches, *how, short_label(self.encoder.label)
        )

    def choose(self, item: SlideRecord) -> _Chosen:
        plan = plan_mosaic(item, self.spec, self.params, reader=self.reader)
        small: list[tuple[int, NDArray[np.uint8]]] = []
        unread: dict[int, str] = {}
        damage = set(plan.seen.notes)

        def pixels() -> Iterator[NDArray[np.uint8]]:
            how: Any = {"threads": self.threads, "reader": self.reader, "aside": unread, "notes": damage}
            for first, read in read_patches(item, plan.kept_l0, self.spec, **how):
                rows = islice((row for row in count(first) if row not in unread), len(read))
                small.extend((row, small_copy(patch)) for row, patch in zip(rows, read, strict=True))
                yield read

        return _Chosen(
            item.slide,
            plan.kept_l0,
            pixels,
            unread,
            lambda: draw_mosaic(plan, small),
            plan.kept_cluster,
            plan.mosaic.weight,
            plan.seen.mpp,
            plan.note,
            damage,
        )

    def bag(self, record: SlideRecord) -> Bag:
        """Return the mosaic of one slide without storing it.

        Raises:
            WsiFlError: when the slide gives none.
        """
        chosen = self.choose(record)
        return chosen.bag(encode(chosen.pixels(), self.encoder))


class _OfSite(OfSlides):
    """Builds the mosaics of a site's labelled slides; `files` holds digests of possible copies."""

    def __init__(
        self,
        listed: Listed,
        records: Sequence[SlideRecord],
        aside: list[SetAside],
        encoder: Encoder,
        threads: int,
        files: Mapping[Path, str],
    ) -> None:
        super().__init__(listed.study, listed.pipeline, listed.site.name, encoder, threads)
        self.listed, self.aside = listed, [*listed.aside, *aside]
        self.marks = {one.slide: frozenset({files[one.path]}) for one in records if one.path in files}
        fraction = listed.pipeline.slides.test_fraction
        with_split = assign_splits(records, test_fraction=fraction, marks=self.marks)
        self.items, leaks = drop_leaks(with_split, self.marks)
        self.aside += leaks

    def write(self, made: list[Done]) -> BagsRow:
        listed, pipeline = self.listed, self.listed.pipeline
        failed = [*self.aside, *sources.set_aside(made)]
        kept = [record for record, one in zip(self.items, made, strict=True) if one.patches]
        if not kept:
            raise WsiFlError(f"site {self.site}: no slide gave a mosaic; {sources.first_reason(failed)}")
        shards = [stored.read_bag_shard(self.shard(record.slide)) for record in kept]
        table = sources.table_of(kept, pipeline.subtypes, listed.site)
        subtypes = {one: tuple(names) for one, names in pipeline.subtypes.items()}
        classes = sources.stored_classes(listed.site, subtypes)
        meta = BagMeta(
            self.site, classes, self.encoder.label, self.spec, "mosaic", subtypes, _recipe(pipeline)
        )
        mpp_l0 = np.array([shard.mpp_l0 for shard in shards])
        stored.write_bags(self.path, meta, table, [shard.bag for shard in shards], mpp_l0)
        return sources.mosaic_row(
            listed.study,
            meta,
            table,
            n_patches=sum(one.patches for one in made),
            failed=failed,
            notes={one.slide: one.note for one in made if one.patches},
            copies=describe_copies(scans_of(kept, self.marks)),
            n_slides=len(self.items) + len(self.aside),
        )


def _recipe(pipeline: Pipeline) -> dict[str, Any]:
    """Return the settings of the selection, named as in `MosaicParams`."""
    settings = pipeline.mosaic
    return {name: getattr(settings, name) for name in ("min_tissue", "clusters", "fraction")} | {"seed": SEED}


class _OfStore(Way[str]):
    """Builds the features of all patches of a patch store."""

    data, sets_aside = "features", False

    def __init__(self, study: Study, store: PatchStore, encoder: Encoder) -> None:
        super().__init__(store.meta.site, study.features(store.meta.site), store.meta.spec, encoder, 0)
        self.study, self.store, self.items = study, store, store.slides
        if not store.slides:
            raise WsiFlError(f"site {self.site}: its store has no patches")
        if unusual := warning_of(encoder.name, self.spec.size_px, self.spec.mpp):
            say(f"  {self.site}: {unusual}", "yellow")

    def name(self, item: str) -> str:
        return item

    def wanted(self, item: str) -> str:
        patches = str(self.store.shard(item).attrs["fingerprint"])
        return stored.bag_fingerprint(item, patches, len(self._rows(item)), short_label(self.encoder.label))

    def choose(self, item: str) -> _Chosen:
        rows = self._rows(item)

        def pixels() -> Iterator[NDArray[np.uint8]]:
            for first in range(0, len(rows), _READ):
                read = self.store.read(rows[first : first + _READ])
                yield read if read.shape[-1] == 3 else np.repeat(read, 3, axis=-1)

        return _Chosen(item, self.store.table.xy_l0[rows], pixels)

    def _rows(self, slide: str) -> NDArray[np.int64]:
        return np.flatnonzero(self.store.table.slide == slide)

    def write(self, made: list[Done]) -> BagsRow:
        """Write the store from all shards, one slide in memory at a time."""
        store, patches = self.store.meta, self.store.table
        recipe = {} if store.min_tissue is None else {"min_tissue": store.min_tissue}
        meta = BagMeta(
            self.site, store.classes, self.encoder.label, self.spec, "features", {}, recipe, store.generator
        )
        table, sizes = stored.bags_of(patches)
        bags = (stored.read_bag_shard(self.shard(str(slide))).bag for slide in table.slide)
        stored.write_bags(self.path, meta, table, bags, sizes=sizes, patches=patches)
        return {
            "site": self.site,
            "slides": len(self.items),
            "made": sum(one.made > 0 for one in made),
            "patches": len(patches),
            "n_features": self.encoder.n_features,
            "train": int((patches.split == "train").sum()),
            "test": int((patches.split == "test").sum()),
            "encoder": self.encoder.label,
            "store": self.study.relative(self.path),
        }


def mosaic(study: Study, *, watcher: Watcher | None = None, **which: Unpack[Which]) -> Bags:
    """Make the mosaics of one site, or of every site of the pipeline; return the `--json` document.

    Under mpiexec or srun the ranks share the slides of each site; all but the first return {}.
    """

    def prepare(job: Job) -> Iterator[Way[SlideRecord]]:
        listed = sources.list_slides(study, job, **which)
        known = [sources.labelled(one.records, one.pipeline.subtypes, one.site) for one in listed]
        pipeline, settings = listed[0].pipeline, listed[0].pipeline.mosaic
        if unusual := warning_of(settings.encoder, settings.size_px, settings.mpp):
            job.say(f"  {unusual}", "yellow")
        encoder = encoder_of(study, pipeline, "mosaic", job.threads, job.say)
        files = marks_of(record.path for records, _ in known for record in records)
        for one, labels in zip(listed, known, strict=True):
            yield (way := _OfSite(one, *labels, encoder, job.threads, files))
            scans.extend(scans_of(way.items, way.marks))

    scans: list[Scan] = []
    made = _make(prepare, watcher)
    if made:
        made["copies"] = describe_shared(scans)
        made["next"] = sources.after_mosaics(study, **which)
    return made


def features(study: Study, *, watcher: Watcher | None = None, **which: Unpack[Which]) -> Bags:
    """Make the features of one site, or of every site of the pipeline; return the `--json` document.

    Under mpiexec or srun the ranks share the slides of each site; all but the first return {}.
    """

    def prepare(job: Job) -> Iterator[Way[str]]:
        pipeline, sites = sources.asked_for(study, **which)
        stores = [open_store(study, one.name) for one in sites]
        encoder = encoder_of(study, pipeline, "features", job.threads, job.say)
        for store in stores:
            yield _OfStore(study, store, encoder)

    return _make(prepare, watcher)


def _make(prepare: Callable[[Job], Iterable[Way[Any]]], watcher: Watcher | None) -> Bags:
    """Build the bags of each site; return the `--json` document."""
    job = Job()
    told = job.watched(watcher)
    ways = job.each(lambda: list(prepare(job)))
    for way in ways:
        told.update(way.site, 0, len(way.items))
    made = [one for way in ways if (one := way.make(job, told))]
    return {"sites": [row for row, _ in made], "speed": [speed for _, speed in made]} if job.first else {}


def features_lines(document: Bags) -> Lines:
    """Yield a table with a row per site, speeds, and the next command."""
    headings = ("slides", "patches", "train", "test")
    sites: Sequence[Mapping[str, Any]] = document["sites"]
    rows = [[row[key] for key in ("site", *headings)] for row in sites]
    yield Table("features", ["site", *headings], rows)
    yield from speed_lines(document["speed"])
    first = document["sites"][0]
    yield Line(f"{first['n_features']} features of every patch ready ({first['encoder']})")
    yield Line(
        "next: wsi-fl train --set train.data=features --set model.private=linear_head --set model.proxy=linear_head"
    )
