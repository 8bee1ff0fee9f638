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

from wsi_fl.models.encoder import EncodedItem, Encoder, EncoderError, StageSeconds, encode_batches, encode_items
from wsi_fl.models.presets import resolution_warning
from wsi_fl.slides.patching.mosaic import MosaicParams, plan_mosaic
from wsi_fl.slides.patching.scan_copies import Scan, describe_copies, describe_shared, drop_leaks, list_scans
from wsi_fl.slides.patching.slide_survey import digest_mask
from wsi_fl.slides.patching.splits import SEED, assign_splits
from wsi_fl.slides.pictures.qc_thumbnail import draw_mosaic, shrink_patch
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare import slide_lists
from wsi_fl.stages.prepare.slide_lists import BagsDocument, BagsRow, Outcome, Scope, SlideList
from wsi_fl.stages.prepare.tile_plans import build_tissue_params
from wsi_fl.stages.runtime.console import (
    Lines,
    TextLine,
    TextTable,
    Watcher,
    describe_failure,
    describe_unread_patches,
    print_message,
    render_speed_lines,
)
from wsi_fl.stages.runtime.rank_job import RankJob
from wsi_fl.stages.site.encoders import describe_transform, load_encoder
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stores import bag_store as stored
from wsi_fl.stores.bag_store import Bag, BagMeta, BagShard
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import duplicate_marks, site_lock, write_bytes
from wsi_fl.system.prefetch import map_in_order
from wsi_fl.types import DiskFull, ExcludedSlide, GridSpec, SlideRecord, WsiFlError, short_label

_PREFETCH_THREADS = 4
"""Slides planned while another is encoded; each needs some hundred megabytes for its tissue mask."""
_READ_BATCH = 32
"""Patches of a store read at a time."""

_Item = TypeVar("_Item")
_T = TypeVar("_T")


@dataclass(frozen=True)
class _SelectedPatches:
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
    read_pixels: Callable[[], Iterator[NDArray[np.uint8]]]
    unread: dict[int, str] = field(default_factory=dict)
    picture: Callable[[], bytes] | None = None
    cluster: NDArray[np.int64] | None = None
    weight: NDArray[np.float32] | None = None
    mpp_l0: float = float("nan")
    note: str = ""
    damage: set[str] = field(default_factory=set)

    def build_bag(self, features: NDArray[np.float32]) -> Bag:
        """Return the bag of the m readable patches: features float32[m, d], places and groups."""
        if not len(features):
            raise WsiFlError(self.unread[min(self.unread)])
        rows = np.setdiff1d(np.arange(len(self.xy_l0)), list(self.unread))
        groups = (None if values is None else values[rows] for values in (self.cluster, self.weight))
        return Bag(features, self.xy_l0[rows], *groups)


class BagBuilder(Generic[_Item]):
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

    def __init__(self, site: str, path: Path, spec: GridSpec, encoder: Encoder, n_ahead: int) -> None:
        self.site, self.path, self.spec, self.encoder, self.n_ahead = site, path, spec, encoder, n_ahead

    def slide_name(self, item: _Item) -> str:
        """Return the name of a slide."""
        raise NotImplementedError

    def compute_fingerprint(self, item: _Item) -> str:
        """Return the fingerprint of all inputs of a slide's bag."""
        raise NotImplementedError

    def select_patches(self, item: _Item) -> _SelectedPatches:
        """Return the patches of a slide."""
        raise NotImplementedError

    def write_store(self, outcomes: list[Outcome]) -> BagsRow:
        """Write the store of all shards; return the site's row of the `--json` document."""
        raise NotImplementedError

    def shard_path(self, slide: str) -> Path:
        """Return the path of a slide's shard."""
        return self.path.parent / self.data / f"{slide}.h5"

    def has_picture(self, slide: str) -> bool:
        """Return whether the picture of a slide exists, where slides have one."""
        return True

    def build_store(self, job: RankJob, watcher: Watcher) -> tuple[BagsRow, dict[str, object]] | None:
        """Make the shards of all slides, each rank its share; the first one holds the lock and writes the store.

        Returns:
            The row of the site, and its speed; None on all ranks but the first.
        """
        start, folder, n_slides = time.perf_counter(), self.path.parent, len(self.items)
        with job.hold_on_first(site_lock(folder, self.site)):
            outcomes = slide_lists.share_slides(
                job,
                self.items,
                self._write_shards,
                lambda n_done, item: watcher.update(self.site, n_done, n_slides, self.slide_name(item)),
            )
            row = slide_lists.finish_site(job, outcomes, self.write_store, (folder / self.data,))
        if row is None:
            return None
        seconds = time.perf_counter() - start
        return row | {"transform": describe_transform(self.encoder), "seconds": seconds}, {
            "site": self.site,
            "slides_per_second": sum(outcome.encoded > 0 for outcome in outcomes) / seconds,
            "patches_per_second": sum(outcome.encoded for outcome in outcomes) / seconds,
            "spent": asdict(sum((StageSeconds(**outcome.spent) for outcome in outcomes), StageSeconds())),
        }

    def _write_shards(self, items: Sequence[_Item]) -> Iterator[Outcome]:
        n_ahead = self.n_ahead
        with ExitStack() as stack:
            plans: Iterable[tuple[str, _SelectedPatches] | Outcome] = map(self._plan_slide, items)
            if n_ahead:
                plans = stack.enter_context(
                    closing(map_in_order(self._plan_slide, items, threads=n_ahead, ahead=n_ahead))
                )
            to_read = ((plan, () if isinstance(plan, Outcome) else plan[1].read_pixels()) for plan in plans)
            encoded = stack.enter_context(closing(encode_items(to_read, self.encoder)))
            yield from stack.enter_context(closing(map_in_order(self._write_shard, encoded, threads=1, ahead=1)))

    def _plan_slide(self, item: _Item) -> tuple[str, _SelectedPatches] | Outcome:
        """Select the patches of a slide, unless its shard is current."""
        slide = self.slide_name(item)

        def plan_if_stale() -> tuple[str, _SelectedPatches] | Outcome:
            fingerprint = self.compute_fingerprint(item)
            current = stored.current_shard(self.shard_path(slide), fingerprint)
            if isinstance(current, BagShard) and self.has_picture(slide):
                return _shard_outcome(current)
            if isinstance(current, str) and current:
                print_message(f"  {slide}: {current}; made again")
            return fingerprint, self.select_patches(item)

        return self._exclude_on_error(slide, plan_if_stale)

    def _write_shard(self, encoded: EncodedItem[tuple[str, _SelectedPatches] | Outcome]) -> Outcome:
        """Write picture, then shard: an existing shard means a finished slide."""
        if isinstance(encoded.item, Outcome):
            return encoded.item
        start = time.perf_counter()
        fingerprint, selected = encoded.item
        path = self.shard_path(selected.slide)

        def write_selected() -> Outcome:
            if encoded.error is not None:
                raise encoded.error
            unread = tuple((*selected.xy_l0[row].tolist(), selected.unread[row]) for row in sorted(selected.unread))
            bag = selected.build_bag(encoded.features)
            note = "; ".join(filter(None, (selected.note, *sorted(selected.damage))))
            shard = BagShard(
                selected.slide, fingerprint, self.encoder.label, self.spec, bag, selected.mpp_l0, note, unread
            )
            if selected.picture is not None:
                write_bytes(path.with_suffix(".png"), selected.picture())
            stored.write_bag_shard(path, shard)
            spent = encoded.spent + StageSeconds(write=time.perf_counter() - start)
            return _shard_outcome(shard, len(encoded.features), asdict(spent))

        return self._exclude_on_error(selected.slide, write_selected)

    def _exclude_on_error(self, slide: str, step: Callable[[], _T]) -> _T | Outcome:
        """Run a step of one slide; its failure must not end the others."""
        try:
            return step()
        except (DiskFull, EncoderError):
            raise
        except Exception as error:
            if not self.sets_aside:
                raise
            return Outcome(slide, reason=describe_failure(error))


def _shard_outcome(shard: BagShard, encoded: int = 0, spent: dict[str, float] | None = None) -> Outcome:
    n = len(shard.bag.features)
    return Outcome(
        shard.slide, n, describe_unread_patches(shard.unread, n + len(shard.unread)), shard.note, encoded, spent or {}
    )


class MosaicBuilder(BagBuilder[SlideRecord]):
    """Builds mosaics: a few patches of every slide.

    Attributes:
        params: the selection by the pipeline's settings.
    """

    data, sets_aside = "mosaics", True

    def __init__(self, study: Study, pipeline: Pipeline, site: str, encoder: Encoder, threads: int) -> None:
        settings = pipeline.mosaic
        spec = GridSpec(settings.size_px, settings.mpp, settings.size_px)
        super().__init__(site, study.mosaic_path(site), spec, encoder, min(threads, _PREFETCH_THREADS))
        self.params = MosaicParams(
            **_mosaic_recipe(pipeline),
            tissue=build_tissue_params(study, pipeline, study.load_site(site).annotations_origin),
        )
        self.reader, self.threads = pipeline.slides.reader, threads

    def slide_name(self, item: SlideRecord) -> str:
        return item.slide

    def has_picture(self, slide: str) -> bool:
        return self.shard_path(slide).with_suffix(".png").exists()

    def compute_fingerprint(self, item: SlideRecord) -> str:
        """Hash the slide (and its size on disk, for formats without quickhash), the parameters and the encoder."""
        check_opens_safely(item.path, item.mpp_override, self.reader)
        with Slide(item.path, item.mpp_override, "openslide") as slide:
            quickhash, mpp = slide.quickhash, slide.mpp
        size = item.path.stat().st_size if item.path.is_file() else 0
        params, masks = self.params, self.params.tissue.masks
        tissue = digest_mask(Path(masks), item.slide) + (params.tissue.origin or "") if masks else params.tissue.method
        choice = (params.min_tissue, params.clusters, params.fraction, params.seed, tissue)
        patches = (self.reader, self.spec.size_px, self.spec.mpp)
        return stored.bag_fingerprint(
            item.slide, quickhash, size, mpp, *patches, *choice, short_label(self.encoder.label)
        )

    def select_patches(self, item: SlideRecord) -> _SelectedPatches:
        plan = plan_mosaic(item, self.spec, self.params, reader=self.reader)
        small: list[tuple[int, NDArray[np.uint8]]] = []
        unread: dict[int, str] = {}
        damage = set(plan.survey.notes)

        def read_pixels() -> Iterator[NDArray[np.uint8]]:
            options: Any = {"threads": self.threads, "reader": self.reader, "excluded": unread, "notes": damage}
            for first, read in read_patches(item, plan.mosaic_xy_l0, self.spec, **options):
                rows = islice((row for row in count(first) if row not in unread), len(read))
                small.extend((row, shrink_patch(patch)) for row, patch in zip(rows, read, strict=True))
                yield read

        return _SelectedPatches(
            item.slide,
            plan.mosaic_xy_l0,
            read_pixels,
            unread,
            lambda: draw_mosaic(plan, small),
            plan.mosaic_cluster,
            plan.mosaic.weight,
            plan.survey.mpp,
            plan.note,
            damage,
        )

    def build_bag(self, record: SlideRecord) -> Bag:
        """Return the mosaic of one slide without storing it.

        Raises:
            WsiFlError: when the slide gives none.
        """
        selected = self.select_patches(record)
        return selected.build_bag(encode_batches(selected.read_pixels(), self.encoder))


class _SiteMosaicBuilder(MosaicBuilder):
    """Builds the mosaics of a site's labelled slides; `files` holds digests of possible copies."""

    def __init__(
        self,
        listed: SlideList,
        records: Sequence[SlideRecord],
        excluded: list[ExcludedSlide],
        encoder: Encoder,
        threads: int,
        files: Mapping[Path, str],
    ) -> None:
        super().__init__(listed.study, listed.pipeline, listed.site.name, encoder, threads)
        self.listed, self.excluded = listed, [*listed.excluded, *excluded]
        self.marks = {record.slide: frozenset({files[record.path]}) for record in records if record.path in files}
        fraction = listed.pipeline.slides.test_fraction
        with_split = assign_splits(records, test_fraction=fraction, marks=self.marks)
        self.items, leaks = drop_leaks(with_split, self.marks)
        self.excluded += leaks

    def write_store(self, outcomes: list[Outcome]) -> BagsRow:
        listed, pipeline = self.listed, self.listed.pipeline
        failed = [*self.excluded, *slide_lists.list_excluded(outcomes)]
        records = [record for record, outcome in zip(self.items, outcomes, strict=True) if outcome.patches]
        if not records:
            raise WsiFlError(f"site {self.site}: no slide gave a mosaic; {slide_lists.first_failure(failed)}")
        shards = [stored.read_bag_shard(self.shard_path(record.slide)) for record in records]
        table = slide_lists.build_bag_table(records, pipeline.subtypes, listed.site)
        subtypes = {tumor_type: tuple(names) for tumor_type, names in pipeline.subtypes.items()}
        classes = slide_lists.store_classes(listed.site, subtypes)
        meta = BagMeta(self.site, classes, self.encoder.label, self.spec, "mosaic", subtypes, _mosaic_recipe(pipeline))
        mpp_l0 = np.array([shard.mpp_l0 for shard in shards])
        stored.write_bags(self.path, meta, table, [shard.bag for shard in shards], mpp_l0)
        return slide_lists.build_mosaic_row(
            listed.study,
            meta,
            table,
            n_patches=sum(outcome.patches for outcome in outcomes),
            failed=failed,
            notes={outcome.slide: outcome.note for outcome in outcomes if outcome.patches},
            copies=describe_copies(list_scans(records, self.marks)),
            n_slides=len(self.items) + len(self.excluded),
        )


def _mosaic_recipe(pipeline: Pipeline) -> dict[str, Any]:
    """Return the settings of the selection, named as in `MosaicParams`."""
    settings = pipeline.mosaic
    return {name: getattr(settings, name) for name in ("min_tissue", "clusters", "fraction")} | {"seed": SEED}


class _FeatureBuilder(BagBuilder[str]):
    """Builds the features of all patches of a patch store."""

    data, sets_aside = "features", False

    def __init__(self, study: Study, store: PatchStore, encoder: Encoder) -> None:
        super().__init__(store.meta.site, study.features_path(store.meta.site), store.meta.spec, encoder, 0)
        self.study, self.store, self.items = study, store, store.slides
        if not store.slides:
            raise WsiFlError(f"site {self.site}: its store has no patches")
        if unusual := resolution_warning(encoder.name, self.spec.size_px, self.spec.mpp):
            print_message(f"  {self.site}: {unusual}", "yellow")

    def slide_name(self, item: str) -> str:
        return item

    def compute_fingerprint(self, item: str) -> str:
        patches = str(self.store.open_shard(item).attrs["fingerprint"])
        return stored.bag_fingerprint(item, patches, len(self._slide_rows(item)), short_label(self.encoder.label))

    def select_patches(self, item: str) -> _SelectedPatches:
        rows = self._slide_rows(item)

        def read_pixels() -> Iterator[NDArray[np.uint8]]:
            for first in range(0, len(rows), _READ_BATCH):
                read = self.store.read(rows[first : first + _READ_BATCH])
                yield read if read.shape[-1] == 3 else np.repeat(read, 3, axis=-1)

        return _SelectedPatches(item, self.store.table.xy_l0[rows], read_pixels)

    def _slide_rows(self, slide: str) -> NDArray[np.int64]:
        return np.flatnonzero(self.store.table.slide == slide)

    def write_store(self, outcomes: list[Outcome]) -> BagsRow:
        """Write the store from all shards, one slide in memory at a time."""
        store, patches = self.store.meta, self.store.table
        recipe = {} if store.min_tissue is None else {"min_tissue": store.min_tissue}
        meta = BagMeta(self.site, store.classes, self.encoder.label, self.spec, "features", {}, recipe, store.generator)
        table, sizes = stored.group_bags(patches)
        bags = (stored.read_bag_shard(self.shard_path(str(slide))).bag for slide in table.slide)
        stored.write_bags(self.path, meta, table, bags, sizes=sizes, patches=patches)
        return {
            "site": self.site,
            "slides": len(self.items),
            "made": sum(outcome.encoded > 0 for outcome in outcomes),
            "patches": len(patches),
            "n_features": self.encoder.n_features,
            "train": int((patches.split == "train").sum()),
            "test": int((patches.split == "test").sum()),
            "encoder": self.encoder.label,
            "store": self.study.relative_path(self.path),
        }


def make_mosaics(study: Study, *, watcher: Watcher | None = None, **scope: Unpack[Scope]) -> BagsDocument:
    """Make the mosaics of one site, or of every site of the pipeline; return the `--json` document.

    Under mpiexec or srun the ranks share the slides of each site; all but the first return {}.
    """

    def list_builders(job: RankJob) -> Iterator[BagBuilder[SlideRecord]]:
        listed = slide_lists.list_slides(study, job, **scope)
        records_by_site = [
            slide_lists.select_labelled(slides.records, slides.pipeline.subtypes, slides.site) for slides in listed
        ]
        pipeline, settings = listed[0].pipeline, listed[0].pipeline.mosaic
        if unusual := resolution_warning(settings.encoder, settings.size_px, settings.mpp):
            job.print_message(f"  {unusual}", "yellow")
        encoder = load_encoder(study, pipeline, "mosaic", job.threads, job.print_message)
        files = duplicate_marks(record.path for records, _ in records_by_site for record in records)
        for slides, labels in zip(listed, records_by_site, strict=True):
            yield (builder := _SiteMosaicBuilder(slides, *labels, encoder, job.threads, files))
            scans.extend(list_scans(builder.items, builder.marks))

    scans: list[Scan] = []
    document = _build_all_stores(list_builders, watcher)
    if document:
        document["copies"] = describe_shared(scans)
        document["next"] = slide_lists.next_commands(study, **scope)
    return document


def make_features(study: Study, *, watcher: Watcher | None = None, **scope: Unpack[Scope]) -> BagsDocument:
    """Make the features of one site, or of every site of the pipeline; return the `--json` document.

    Under mpiexec or srun the ranks share the slides of each site; all but the first return {}.
    """

    def list_builders(job: RankJob) -> Iterator[BagBuilder[str]]:
        pipeline, sites = slide_lists.select_sites(study, **scope)
        stores = [open_store(study, site.name) for site in sites]
        encoder = load_encoder(study, pipeline, "features", job.threads, job.print_message)
        for store in stores:
            yield _FeatureBuilder(study, store, encoder)

    return _build_all_stores(list_builders, watcher)


def _build_all_stores(
    list_builders: Callable[[RankJob], Iterable[BagBuilder[Any]]], watcher: Watcher | None
) -> BagsDocument:
    """Build the bags of each site; return the `--json` document."""
    job = RankJob()
    progress = job.select_watcher(watcher)
    builders = job.run_on_ranks(lambda: list(list_builders(job)))
    for builder in builders:
        progress.update(builder.site, 0, len(builder.items))
    results = [result for builder in builders if (result := builder.build_store(job, progress))]
    return {"sites": [row for row, _ in results], "speed": [speed for _, speed in results]} if job.is_first else {}


def render_feature_lines(document: BagsDocument) -> Lines:
    """Yield a table with a row per site, speeds, and the next command."""
    headings = ("slides", "patches", "train", "test")
    sites: Sequence[Mapping[str, Any]] = document["sites"]
    rows = [[row[key] for key in ("site", *headings)] for row in sites]
    yield TextTable("features", ["site", *headings], rows)
    yield from render_speed_lines(document["speed"])
    first = document["sites"][0]
    yield TextLine(f"{first['n_features']} features of every patch ready ({first['encoder']})")
    yield TextLine(
        "next: wsi-fl train --set train.data=features --set model.private=linear_head --set model.proxy=linear_head"
    )
