"""`wsi-fl mosaic` and `wsi-fl features`: encode slides to bags, a shard per slide, then one store per site.

A mosaic is a few patches of a slide (Yottixel's), read and encoded; no pixels are stored. Features are those of every
patch of a patch store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoder, encode_batches, encode_golden
from wsi_fl.models.presets import resolution_warning
from wsi_fl.slides.patching.mosaic import MosaicParams, plan_mosaic
from wsi_fl.slides.patching.scan_copies import Scan, describe_copies, describe_shared, drop_leaks, list_scans
from wsi_fl.slides.patching.slide_survey import digest_mask
from wsi_fl.slides.patching.splits import SEED, assign_splits
from wsi_fl.slides.pictures.qc_thumbnail import draw_mosaic, shrink_patch
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.stages.prepare import slide_lists
from wsi_fl.stages.prepare.bag_builder import BagBuilder, SelectedPatches
from wsi_fl.stages.prepare.slide_lists import BagsDocument, BagsRow, Outcome, PartRow, Scope, SlideList
from wsi_fl.stages.prepare.tile_plans import build_tissue_params
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable, Watcher, print_message, render_speed_lines
from wsi_fl.stages.runtime.hints import join_commands
from wsi_fl.stages.runtime.rank_job import Part, RankJob
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stores.bag_shards import bag_fingerprint, read_bag_shard
from wsi_fl.stores.bag_store import Bag, BagMeta, group_bags, write_bags
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.files import duplicate_marks
from wsi_fl.types import ExcludedSlide, GridSpec, SlideRecord, WsiFlError, short_label

_PREFETCH_THREADS = 4
"""Slides planned while another is encoded; each needs some hundred megabytes for its tissue mask."""
_READ_BATCH = 32
"""Patches of a store read at a time."""
_LINEAR_HEADS = ("model.private=linear_head", "model.proxy=linear_head")
"""What a pipeline for pixels needs, to train on features."""


@dataclass(frozen=True)
class _MosaicSelector:
    """Selects a few patches of a slide."""

    spec: GridSpec
    params: MosaicParams
    reader: Reader
    threads: int

    def compute_fingerprint(self, record: SlideRecord, encoder: Encoder) -> str:
        """Hash the slide (and its size on disk, for formats without quickhash), the parameters and the encoder."""
        check_opens_safely(record.path, record.mpp_override, self.reader)
        with Slide(record.path, record.mpp_override, "openslide") as slide:
            quickhash, mpp = slide.quickhash, slide.mpp
        size = record.path.stat().st_size if record.path.is_file() else 0
        params, masks = self.params, self.params.tissue.masks
        tissue: str = params.tissue.method
        if masks:
            tissue = digest_mask(Path(masks), record.slide) + (params.tissue.origin or "")
        choice = (params.min_tissue, params.clusters, params.fraction, params.seed, tissue)
        patches = (self.reader, self.spec.size_px, self.spec.mpp)
        return bag_fingerprint(record.slide, quickhash, size, mpp, *patches, *choice, short_label(encoder.label))

    def select_patches(self, record: SlideRecord) -> SelectedPatches:
        """Return the mosaic of a slide."""
        plan = plan_mosaic(record, self.spec, self.params, reader=self.reader)
        small: list[tuple[int, NDArray[np.uint8]]] = []
        unread: dict[int, str] = {}
        damage = set(plan.survey.notes)

        def read_pixels() -> Iterator[NDArray[np.uint8]]:
            options: Any = {"threads": self.threads, "reader": self.reader, "excluded": unread, "notes": damage}
            for first, read in read_patches(record, plan.mosaic_xy_l0, self.spec, **options):
                rows = islice((row for row in count(first) if row not in unread), len(read))
                small.extend((row, shrink_patch(patch)) for row, patch in zip(rows, read, strict=True))
                yield read

        return SelectedPatches(
            plan.mosaic_xy_l0,
            read_pixels,
            unread,
            plan.note,
            damage,
            picture=lambda: draw_mosaic(plan, small),
            cluster=plan.mosaic_cluster,
            weight=plan.mosaic.weight,
            mpp_l0=plan.survey.mpp,
        )

    def build_bag(self, record: SlideRecord, encoder: Encoder) -> Bag:
        """Return the mosaic of one slide without storing it.

        Raises:
            WsiFlError: when the slide gives none.
        """
        selected = self.select_patches(record)
        return selected.build_bag(encode_batches(selected.read_pixels(), encoder))


def build_mosaic_selector(study: Study, pipeline: Pipeline, site: SiteFile, threads: int) -> _MosaicSelector:
    """Return the selector for slides of a site, by the pipeline's settings."""
    settings = pipeline.mosaic
    tissue = build_tissue_params(study, pipeline, site.annotations_origin)
    params = MosaicParams(**_mosaic_recipe(pipeline), tissue=tissue)
    spec = GridSpec(settings.size_px, settings.mpp, settings.size_px)
    return _MosaicSelector(spec, params, pipeline.slides.reader, threads)


def _mosaic_recipe(pipeline: Pipeline) -> dict[str, Any]:
    """Return the settings of the selection, named as in `MosaicParams`."""
    settings = pipeline.mosaic
    return {name: getattr(settings, name) for name in ("min_tissue", "clusters", "fraction")} | {"seed": SEED}


class _MosaicBuilder(BagBuilder):
    """Builds the mosaics of a site's labelled slides; `files` holds digests of possible copies."""

    data, has_pictures, sets_aside = "mosaics", True, True

    def __init__(
        self,
        listed: SlideList,
        labelled: tuple[list[SlideRecord], list[ExcludedSlide]],
        encoder: Encoder,
        threads: int,
        files: Mapping[Path, str],
    ) -> None:
        study, pipeline, (records, unfit) = listed.study, listed.pipeline, labelled
        self.selector = build_mosaic_selector(study, pipeline, listed.site, threads)
        name = listed.site.name
        super().__init__(name, study.mosaic_path(name), self.selector.spec, encoder)
        self.listed, self.n_ahead = listed, min(threads, _PREFETCH_THREADS)
        self.marks = {record.slide: frozenset({files[record.path]}) for record in records if record.path in files}
        with_split = assign_splits(records, test_fraction=pipeline.slides.test_fraction, marks=self.marks)
        records, leaks = drop_leaks(with_split, self.marks)
        self.excluded = [*listed.excluded, *unfit, *leaks]
        self.records = {record.slide: record for record in records}
        self.slides = list(self.records)

    def compute_fingerprint(self, slide: str) -> str:
        return self.selector.compute_fingerprint(self.records[slide], self.encoder)

    def select_patches(self, slide: str) -> SelectedPatches:
        return self.selector.select_patches(self.records[slide])

    def list_settings(self) -> list[object]:
        splits = {record.slide: record.split for record in self.records.values()}
        sections = slide_lists.describe_settings(self.listed, "slides", "mosaic", "tissue", "subtypes")
        return [sections, splits, [asdict(slide) for slide in self.excluded]]

    def write_store(self, path: Path, outcomes: list[Outcome]) -> BagsRow:
        listed, pipeline = self.listed, self.listed.pipeline
        failed = [*self.excluded, *slide_lists.list_excluded(outcomes)]
        records = [self.records[outcome.slide] for outcome in outcomes if outcome.patches]
        if not records:
            raise WsiFlError(f"site {self.site}: no slide gave a mosaic; {slide_lists.first_failure(failed)}")
        shards = [read_bag_shard(self.shard_path(record.slide)) for record in records]
        table = slide_lists.build_bag_table(records, pipeline.subtypes, listed.site)
        subtypes = {tumor_type: tuple(names) for tumor_type, names in pipeline.subtypes.items()}
        classes = slide_lists.store_classes(listed.site, subtypes)
        recipe, golden = _mosaic_recipe(pipeline), encode_golden(self.encoder, self.spec)
        meta = BagMeta(self.site, classes, self.encoder.label, self.spec, "mosaic", subtypes, recipe, golden=golden)
        mpp_l0 = np.array([shard.mpp_l0 for shard in shards])
        write_bags(path, meta, table, [shard.bag for shard in shards], mpp_l0)
        return slide_lists.build_mosaic_row(
            listed.study,
            meta,
            table,
            n_patches=sum(outcome.patches for outcome in outcomes),
            failed=failed,
            notes={outcome.slide: outcome.note for outcome in outcomes if outcome.patches},
            copies=describe_copies(list_scans(records, self.marks)),
            n_slides=len(self.slides) + len(self.excluded),
        )


class _FeatureBuilder(BagBuilder):
    """Builds the features of all patches of a patch store."""

    data = "features"

    def __init__(self, study: Study, store: PatchStore, encoder: Encoder) -> None:
        super().__init__(store.meta.site, study.features_path(store.meta.site), store.meta.spec, encoder)
        self.study, self.store, self.slides = study, store, store.slides
        if not store.slides:
            raise WsiFlError(f"site {self.site}: its store has no patches")
        if unusual := resolution_warning(encoder.name, self.spec.size_px, self.spec.mpp):
            print_message(f"  {self.site}: {unusual}", "yellow")

    def compute_fingerprint(self, slide: str) -> str:
        patches = str(self.store.open_shard(slide).attrs["fingerprint"])
        return bag_fingerprint(slide, patches, len(self._slide_rows(slide)), short_label(self.encoder.label))

    def select_patches(self, slide: str) -> SelectedPatches:
        rows = self._slide_rows(slide)

        def read_pixels() -> Iterator[NDArray[np.uint8]]:
            for first in range(0, len(rows), _READ_BATCH):
                read = self.store.read(rows[first : first + _READ_BATCH])
                yield read if read.shape[-1] == 3 else np.repeat(read, 3, axis=-1)

        return SelectedPatches(self.store.table.xy_l0[rows], read_pixels)

    def _slide_rows(self, slide: str) -> NDArray[np.int64]:
        return np.flatnonzero(self.store.table.slide == slide)

    def list_settings(self) -> list[object]:
        return slide_lists.describe_file(self.study, self.study.store_path(self.site))

    def write_store(self, path: Path, outcomes: list[Outcome]) -> BagsRow:
        """Write the store from all shards, one slide in memory at a time."""
        store, patches = self.store.meta, self.store.table
        recipe = {} if store.min_tissue is None else {"min_tissue": store.min_tissue}
        label, golden = self.encoder.label, encode_golden(self.encoder, self.spec)
        meta = BagMeta(self.site, store.classes, label, self.spec, "features", {}, recipe, store.generator, golden)
        table, sizes = group_bags(patches)
        bags = (read_bag_shard(self.shard_path(str(slide))).bag for slide in table.slide)
        write_bags(path, meta, table, bags, sizes=sizes, patches=patches)
        return {
            "site": self.site,
            "slides": len(self.slides),
            "made": sum(outcome.encoded > 0 for outcome in outcomes),
            "patches": len(patches),
            "n_features": self.encoder.n_features,
            "train": int((patches.split == "train").sum()),
            "test": int((patches.split == "test").sum()),
            "encoder": self.encoder.label,
            "store": self.study.relative_path(self.path),
        }


def make_mosaics(
    study: Study, *, watcher: Watcher | None = None, part: Part | None = None, **scope: Unpack[Scope]
) -> BagsDocument:
    """Make the mosaics of one site, or of every site of the pipeline; return the `--json` document.

    Jobs share the slides of each site as those of `tile_slides` do; of ranks all but the first return {}.
    """

    def list_builders(job: RankJob) -> Iterator[BagBuilder]:
        listed = slide_lists.list_slides(study, job, **scope)
        records_by_site = [
            slide_lists.select_labelled(slides.records, slides.pipeline.subtypes, slides.site) for slides in listed
        ]
        pipeline, settings = listed[0].pipeline, listed[0].pipeline.mosaic
        if unusual := resolution_warning(settings.encoder, settings.size_px, settings.mpp):
            job.print_message(f"  {unusual}", "yellow")
        encoder = load_encoder(study, pipeline, "mosaic", job.threads, job.print_message)
        files = duplicate_marks(record.path for records, _ in records_by_site for record in records)
        for slides, labelled in zip(listed, records_by_site, strict=True):
            yield (builder := _MosaicBuilder(slides, labelled, encoder, job.threads, files))
            scans.extend(list_scans(builder.records.values(), builder.marks))

    scans: list[Scan] = []
    document = _build_all_stores(list_builders, watcher, part)
    if document:
        document["copies"] = describe_shared(scans)
        document["next"] = [] if document["parts"] else slide_lists.next_commands(study, "mosaics", **scope)
    return document


def make_features(
    study: Study, *, watcher: Watcher | None = None, part: Part | None = None, **scope: Unpack[Scope]
) -> BagsDocument:
    """Make the features of one site, or of every site of the pipeline; return the `--json` document.

    Jobs share the slides of each site as those of `tile_slides` do; of ranks all but the first return {}.
    """

    def list_builders(job: RankJob) -> Iterator[BagBuilder]:
        pipeline, sites = slide_lists.select_sites(study, **scope)
        stores = [open_store(study, site.name) for site in sites]
        encoder = load_encoder(study, pipeline, "features", job.threads, job.print_message)
        for store in stores:
            yield _FeatureBuilder(study, store, encoder)

    document = _build_all_stores(list_builders, watcher, part)
    if document:
        document["next"] = (
            [] if document["parts"] else slide_lists.next_commands(study, "features", _LINEAR_HEADS, **scope)
        )
    return document


def _build_all_stores(
    list_builders: Callable[[RankJob], Iterable[BagBuilder]], watcher: Watcher | None, part: Part | None
) -> BagsDocument:
    """Build the bags of each site; return the `--json` document."""
    job = RankJob(part)
    progress = job.select_watcher(watcher)
    builders = job.run_on_ranks(lambda: list(list_builders(job)))
    for builder in builders:
        progress.update(builder.site, 0, len(builder.slides))
    parts: list[PartRow] = []
    results = [result for builder in builders if (result := builder.build_store(job, progress, parts))]
    if not job.is_first:
        return {}
    return {"sites": [row for row, _ in results], "parts": parts, "speed": [speed for _, speed in results]}


def render_feature_lines(document: BagsDocument) -> Lines:
    """Yield a table with a row per site, speeds, and the next command."""
    yield from slide_lists.render_part_lines(document.get("parts", ()), "features")
    if not document["sites"]:
        return
    headings = ("slides", "patches", "train", "test")
    sites: Sequence[Mapping[str, Any]] = document["sites"]
    rows = [[row[key] for key in ("site", *headings)] for row in sites]
    yield TextTable("features", ["site", *headings], rows)
    yield from render_speed_lines(document["speed"])
    first = document["sites"][0]
    yield TextLine(f"{first['n_features']} features of every patch ready ({first['encoder']})")
    if document.get("next"):
        yield TextLine(f"next: {join_commands(document['next'])}")
