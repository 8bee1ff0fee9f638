"""`wsi-fl tile`: write the patch store of a site; with `--dry-run`, estimate patches, bytes and time.

Slides are planned (tissue, grid, labels) from thumbnails and annotations; patches are selected over the whole site;
only then are pixels read, slide by slide, into shards. A finished shard with the same fingerprint is reused, so a
killed job loses at most the slide in hand.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from math import isfinite, isnan
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.artifacts import KINDS
from wsi_fl.slides.patching.scan_copies import Scan, describe_copies, describe_shared, drop_leaks, list_scans
from wsi_fl.slides.patching.slide_plan import SlidePlan
from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.slides.pictures.qc_thumbnail import draw_overview
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare import slide_lists
from wsi_fl.stages.prepare.slide_lists import Outcome, Scope, SlideList, SlideQuality
from wsi_fl.stages.prepare.tile_plans import Plans, build_grid_spec, plan_quality, plan_slides, sample_patches
from wsi_fl.stages.runtime.console import (
    Lines,
    SilentProgress,
    TextLine,
    TextTable,
    Watcher,
    describe_failure,
    describe_unread_patches,
    print_message,
)
from wsi_fl.stages.runtime.rank_job import RankJob
from wsi_fl.stores import patch_shards as stored
from wsi_fl.stores.fields import Marked, StoreMeta
from wsi_fl.stores.patch_store import SlideSource, parse_quality
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system import jpeg
from wsi_fl.system.files import site_lock, write_bytes, write_csv
from wsi_fl.system.prefetch import map_in_order
from wsi_fl.types import CLASSES, SPLITS, UNLABELLED, DiskFull, GridSpec, PatchTable, SlideRecord, WsiFlError

_SAMPLE_SLIDES, _SAMPLE_PATCHES = 8, 128
"""Slides per site in a dry run, evenly from its list, and patches read of each."""
_STREAMS_PER_TASK = 16
_SPARE_BYTES = 64 << 20
_COLUMNS_BYTES = 64
_SHARE_OF_RAW = {"raw": 1.0, "native": 0.25, "jpeg": 0.3, "none": 0.0}
"""Cautious: JPEG streams of tissue take about a ninth."""
_EDGE_L0 = 0.5
_PARALLEL_SLIDES = 2

_T = TypeVar("_T")


def tile_slides(study: Study, *, watcher: Watcher | None = None, **scope: Unpack[Scope]) -> dict[str, Any]:
    """Tile one site, or every site of the pipeline; return the `--json` document.

    Under mpiexec or srun the ranks share the slides of each site; all but the first return {}.
    """
    job = RankJob()
    progress = job.select_watcher(watcher)
    site_lists = job.run_on_ranks(lambda: slide_lists.list_slides(study, job, **scope))
    for slides in site_lists:
        weak = sum(record.supervision == "weak" for record in slides.records)
        if weak:
            job.print_message(
                f"  {slides.site.name}: {weak} slides have no annotation: their patches take the slide's label "
                "(weak supervision)",
                style="yellow",
            )
        progress.update(slides.site.name, 0, len(slides.records))
    scans: list[Scan] = []
    rows = [_tile_site(slides, job, progress, scans) for slides in site_lists]
    site, name = scope["site"], scope.get("pipeline_name")
    pipeline_option = "" if name is None else f" --pipeline {name}"
    sites_option, is_only_site = "--all" if site is None else f"--site {site}", len(study.site_names()) == 1
    steps = _next_steps(site_lists[0].pipeline, sites_option, pipeline_option, is_only_site=is_only_site)
    if site_lists[0].site.real and is_only_site:  # one site of a federation
        steps[-1] = "wsi-fl federation approve PLAN --kit KIT"
    return {"sites": rows, "copies": describe_shared(scans), "next": steps} if job.is_first else {}


def _next_steps(
    pipeline: Pipeline, sites_option: str, pipeline_option: str, *, is_only_site: bool = False
) -> list[str]:
    """Return the commands between stores and a trained model.

    Example:
        >>> _next_steps(Pipeline(train={"data": "features"}), "--site C1", " --pipeline deep")
        ['wsi-fl features --site C1 --pipeline deep', 'wsi-fl train --method proxyfl --pipeline deep']
    """
    steps = [f"wsi-fl features {sites_option}"] if pipeline.train.data == "features" else []
    train = "wsi-fl train --method regular" if is_only_site else "wsi-fl train --method proxyfl"
    return [step + pipeline_option for step in (*steps, train)]


def _tile_site(slides: SlideList, job: RankJob, watcher: Watcher, scans: list[Scan]) -> dict[str, object]:
    """Plan the slides, then write the shards, on all ranks; the first rank holds the lock and writes the columns.

    The scans of stored slides are appended to `scans`.
    """
    start, name, pipeline = time.perf_counter(), slides.site.name, slides.pipeline
    store = slides.study.store_path(name)
    records: Sequence[SlideRecord] = slides.records
    fraction = pipeline.slides.test_fraction
    # a table that contradicts itself is refused before slides are opened
    assign_splits(records, test_fraction=fraction)
    plans = Plans(store.parent / ".plans", records, build_grid_spec(pipeline))
    shards = _Shards(slides, plans, job.threads)
    failed = list(slides.excluded)
    with job.hold_on_first(site_lock(store.parent, name)):
        n_slides = len(records)
        plan_outcomes = slide_lists.share_slides(
            job,
            range(n_slides),
            lambda share: plan_slides(share, slides, plans, job.threads),
            lambda n_done, _: watcher.update(name, n_done / 2, n_slides, "finding tissue"),
        )

        site_scans = job.run_on_ranks(lambda: _split_slides(plans, plan_outcomes, fraction))

        def choose_rows() -> list[tuple[int, NDArray[np.bool_]]]:
            selected = _select_patches(plans, plan_outcomes, pipeline)
            if job.is_first:
                counts = {number: int(rows.sum()) for number, rows in selected}
                patches_text = f"{sum(counts.values())} patches of {plans.spec.size_px} px"
                print_message(f"  {name}: {patches_text}, at most {shards.check_space(counts) / 1e9:.2f} GB")
            return selected

        selected = job.run_on_ranks(choose_rows)
        n_planned = len(selected)
        shard_outcomes = slide_lists.share_slides(
            job,
            selected,
            shards.write_shards,
            lambda n_done, item: watcher.update(name, (n_planned + n_done) / 2, n_planned, plans.slide_name(item[0])),
        )
        failed += slide_lists.list_excluded((*plan_outcomes, *shard_outcomes))

        def write_columns(outcomes: list[Outcome]) -> stored.Counts:
            paths = [shards.shard_path(outcome.slide) for outcome in outcomes if outcome.patches]
            if not paths:
                raise WsiFlError(f"site {name}: no slide gave a patch; {slide_lists.first_failure(failed)}")
            classes = UNLABELLED if slides.site.is_receiver else CLASSES
            meta = StoreMeta(name, classes, plans.spec, min_tissue=pipeline.tile.min_tissue)
            return stored.read_linked_counts(store, meta, paths) or stored.link_shards(store, meta, paths)

        folders = (*(store.parent / part for part in ("slides", "overview")), plans.folder)
        counts = slide_lists.finish_site(job, shard_outcomes, write_columns, folders)
    stored_names = {outcome.slide for outcome in shard_outcomes if outcome.patches}
    site_scans = [scan for scan in site_scans if scan.slide in stored_names]
    scans += site_scans
    if counts is None:
        return {}
    records = plans.records
    contents = [outcome.content for outcome in shard_outcomes if outcome.patches]
    if raw := sum(content != pipeline.store.pixels for content in contents):
        print_message(
            f"  {name}: {raw} of {len(contents)} slides are stored raw: their patches are not whole JPEG tiles of "
            "theirs",
            style="yellow",
        )
    quality = {outcome.slide: outcome.quality for outcome in (*plan_outcomes, *shard_outcomes) if outcome.quality}
    _write_quality(store.with_name("quality.csv"), quality)
    classes = CLASSES if len(counts["train"]) > 1 else UNLABELLED
    table = {split: dict(zip(classes, counts[split].tolist(), strict=True)) for split in SPLITS}
    return {
        "site": name,
        "slides": n_slides + len(slides.excluded),
        "failed": [asdict(slide) for slide in failed],
        "notes": [{"slide": outcome.slide, "note": outcome.note} for outcome in shard_outcomes if outcome.note],
        "patches": sum(sum(counts_by_label.values()) for counts_by_label in table.values()),
        **{label: sum(counts_by_label.get(label, 0) for counts_by_label in table.values()) for label in CLASSES},
        **{split: sum(table[split].values()) for split in ("train", "test")},
        **_summarize_quality(quality.values()),
        "patients": {
            split: len({record.patient for record in records if record.split == split}) for split in ("train", "test")
        },
        "copies": describe_copies(site_scans),
        "store": slides.study.relative_path(store),
        "seconds": time.perf_counter() - start,
        "table": table,
    }


def _split_slides(plans: Plans, outcomes: list[Outcome], test_fraction: float) -> list[Scan]:
    """Assign splits, the same to all copies of a scan; return the scans.

    A slide is excluded where a table puts its scan into two splits.
    """
    marks = plans.load_marks(number for number, outcome in enumerate(outcomes) if outcome.reason is None)
    plans.records = assign_splits(plans.records, test_fraction=test_fraction, marks=marks)
    records, leaks = drop_leaks(plans.records, marks)
    reasons = {leak.slide: leak.reason for leak in leaks}
    outcomes[:] = [replace(outcome, reason=outcome.reason or reasons.get(outcome.slide)) for outcome in outcomes]
    return list_scans(records, marks)


def _summarize_quality(slide_qualities: Iterable[SlideQuality]) -> dict[str, object]:
    """Return the excluded patches by artifact, and the slides by method of tissue detection with their median gain over
    saturation.
    """
    excluded: Counter[str] = Counter()
    gains: dict[str, list[float]] = {}
    for quality in slide_qualities:
        excluded.update(quality["aside"])
        gains.setdefault(quality["tissue_by"], []).append(quality["tissue_gain"])
    tissue = {}
    for name, gain in sorted(gains.items()):
        finite_gains = list(filter(isfinite, gain))
        tissue[name] = {"slides": len(gain), "gain": median(finite_gains) if finite_gains else None}
    return {"excluded": dict(sorted(excluded.items())), "tissue": tissue}


def _select_patches(
    plans: Plans, outcomes: Sequence[Outcome], pipeline: Pipeline
) -> list[tuple[int, NDArray[np.bool_]]]:
    """Return (number of a planned slide, mask of its selected patches) of each."""
    numbers = [number for number, outcome in enumerate(outcomes) if outcome.reason is None]
    settings = pipeline.tile
    keep = sample_patches(plans, numbers, balance=settings.balance, max_per_slide=settings.max_per_slide)
    return list(zip(numbers, keep, strict=True))


_FEW_TEST_PATIENTS = 5
"""Fewer test patients give an unreliable score."""


def render_tile_lines(document: dict[str, Any]) -> Lines:
    """Yield the table of the paper (Table 1), labels × train and test × sites, excluded slides, next commands."""
    rows = document["sites"]
    lines: list[list[Any] | None] = []
    for split in SPLITS:
        counts = [row["table"][split] for row in rows]
        if any(sum(count.values()) for count in counts):
            names = dict.fromkeys(name for count in counts for name in count)
            lines += [[f"{split} {name}", *(count.get(name, 0) for count in counts)] for name in names]
            lines += [[f"{split} sum", *(sum(count.values()) for count in counts)], None]
    yield slide_lists.build_sum_table("patches", rows, lines)
    yield from slide_lists.render_excluded_lines(rows, "patch")
    yield from slide_lists.render_copy_lines(document)
    for row in rows:
        yield from render_quality_lines(row)
        missing = [name for name in CLASSES if not row[name]]
        untested = [name for name in CLASSES if not row["table"]["test"].get(name)]
        if UNLABELLED[0] in row["table"]["train"]:
            continue
        if missing:
            yield TextLine(f"  {row['site']}: has no {missing[0]} patch at all", "bold yellow")
        elif untested and row["train"]:
            lacking = "test patch" if len(untested) == len(CLASSES) else f"{untested[0]} patch for testing"
            yield TextLine(
                f"  {row['site']}: has no {lacking}; test patients are drawn before slides are opened: set split in "
                "its table, or raise slides.test_fraction",
                "bold yellow",
            )
    if small_tests := [
        f"{row['site']} {row['patients']['test']}" for row in rows if 0 < row["patients"]["test"] < _FEW_TEST_PATIENTS
    ]:
        yield TextLine(
            f"few patients are for the test ({', '.join(small_tests)}); `wsi-fl train --folds 5` tests each once"
        )
    if unready := [row["site"] for row in rows if not row["train"]]:
        yield TextLine(f"not ready ({', '.join(unready)}); see the excluded slides, then run `wsi-fl tile` again")
        return
    stores = ", ".join(row["store"] for row in rows)
    yield TextLine(f"stores ready ({stores}); next: {' && '.join(document['next'])}")


def render_quality_lines(row: Mapping[str, Any]) -> Lines:
    """Yield excluded patches of a site by artifact, and methods of tissue detection other than saturation."""
    table = Path(row["store"]).parent / "quality.csv"
    if excluded := row["excluded"]:
        counts_text = ", ".join(f"{n} {kind}" for kind, n in excluded.items())
        n_excluded = sum(excluded.values())
        yield TextLine(f"  {row['site']}: {n_excluded} patches excluded ({counts_text}); by slide: {table}", "yellow")
    for name, tissue in row["tissue"].items():
        if name != "saturation":
            gain = tissue["gain"]
            area_text = "where saturation finds none" if gain is None else f"{gain:.2g} × that by saturation"
            area = "" if name == "masks" else f", its area {area_text}"
            yield TextLine(f"  {row['site']}: tissue of {tissue['slides']} slides by {name}{area}; by slide: {table}")


def _write_quality(path: Path, qualities: Mapping[str, SlideQuality]) -> None:
    """Write a line per slide; no file without excluded patches and with saturation as only method."""
    if not any(quality["aside"] or quality["tissue_by"] != "saturation" for quality in qualities.values()):
        path.unlink(missing_ok=True)
        return
    rows: list[list[object]] = [["slide", "good", *KINDS, "tissue_by", "tissue_gain"]]
    for slide, quality in qualities.items():
        counts = [quality["aside"].get(kind, 0) for kind in KINDS]
        gain = "" if isnan(quality["tissue_gain"]) else f"{quality['tissue_gain']:.3g}"
        rows.append([slide, quality["good"], *counts, quality["tissue_by"], gain])
    write_csv(path, rows)


def read_excluded(path: Path) -> dict[str, dict[str, int]]:
    """Return slide → artifact → number of excluded patches, from `quality.csv`; {} for no file.

    Raises:
        WsiFlError: when it is another table.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {
                line["slide"]: {kind: n for kind in KINDS if (n := int(line[kind]))} for line in csv.DictReader(file)
            }
    except (KeyError, TypeError, ValueError):
        raise WsiFlError(f"{path}: not what `wsi-fl tile` writes; tile the site again") from None


def estimate_tiling(study: Study, *, watcher: Watcher | None = None, **scope: Unpack[Scope]) -> dict[str, Any]:
    """Estimate patches, bytes and seconds of one site or every site; return the `--json` document.

    A few slides are planned and partly read; nothing is stored.

    Raises:
        WsiFlError: when none of these slides gives a patch.
    """
    job, progress = RankJob(), watcher or SilentProgress()
    rows = [_estimate_site(slides, job, progress) for slides in slide_lists.list_slides(study, **scope)]
    totals = {key: sum(row[key] for row in rows) for key in ("slides", "patches", "bytes", "seconds")}
    return {"sites": rows, **totals, "free_bytes": shutil.disk_usage(study.root).free}


def _estimate_site(slides: SlideList, job: RankJob, watcher: Watcher) -> dict[str, Any]:
    name, pipeline, n_slides = slides.site.name, slides.pipeline, len(slides.records)
    records = [
        slides.records[k] for k in np.unique(np.linspace(0, n_slides - 1, min(n_slides, _SAMPLE_SLIDES)).astype(int))
    ]
    n_sampled = len(records)
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans(Path(folder), records, build_grid_spec(pipeline))
        # 1. tissue, grid and labels of a few slides
        start, outcomes = time.perf_counter(), []
        for outcome in plan_slides(range(n_sampled), slides, plans, job.threads):
            outcomes.append(outcome)
            watcher.update(name, len(outcomes) / 2, n_sampled, "finding tissue")
        planning, failed = time.perf_counter() - start, slide_lists.list_excluded(outcomes)
        selected = _select_patches(plans, outcomes, pipeline)
        if not selected:
            raise WsiFlError(f"site {name}: no slide gave a patch; {slide_lists.first_failure(failed)}")
        counts = {number: int(rows.sum()) for number, rows in selected}
        # 2. the pixels of some of their patches
        start, n_read = time.perf_counter(), 0
        for number, rows in selected:
            corners, reader = plans.load_plan(number).xy_l0[rows][:_SAMPLE_PATCHES], pipeline.slides.reader
            batches = read_patches(
                records[number], corners, plans.spec, threads=job.threads, reader=reader, excluded={}
            )
            n_read += sum(len(batch) for _, batch in batches)
            watcher.update(name, n_sampled / 2 + number / 2, n_sampled, plans.slide_name(number))
        reading = time.perf_counter() - start
        needed = estimate_bytes(counts, plans, plans.spec, pipeline.store.pixels)
    # 3. scaled to all slides
    times, patches = n_slides / n_sampled, sum(counts.values())
    return {
        "site": name,
        "slides": n_slides,
        "tried": n_sampled,
        "failed": len(failed),
        "patches": round(times * patches),
        "bytes": round(times * needed),
        "seconds": times * (planning + reading * patches / max(n_read, 1)),
    }


def render_estimate_lines(document: dict[str, Any]) -> Lines:
    """Yield a table with a row per site, and the totals."""
    rows = [
        [
            row["site"],
            row["slides"],
            f"{row['tried']}, {row['failed']} excluded" if row["failed"] else row["tried"],
            f"{row['patches']:,}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['seconds'] / 60:.1f}",
        ]
        for row in document["sites"]
    ]
    yield TextTable("estimate", ["site", "slides", "tried", "patches", "GB", "minutes"], rows)
    minutes = document["seconds"] / 60
    yield TextLine(
        f"about {document['patches']:,} patches, {document['bytes'] / 1e9:.1f} GB ({document['free_bytes'] / 1e9:.0f} "
        f"GB are free) and {f'{minutes / 60:.1f} h' if minutes > 90 else f'{minutes:.1f} min'} on this machine; "
        "nothing was written"
    )


class _UnreadableRows(Exception):
    """Unreadable rows, by position among the requested corners; a shard without them must be written again."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(rows)
        self.rows = rows


class _NoStream(Exception):
    """A patch is not one whole native tile."""


class _Shards:
    """Writes the shards of a site's slides.

    Attributes:
        folder: of the store.
        content: the setting `store.pixels`.
    """

    def __init__(self, slides: SlideList, plans: Plans, threads: int) -> None:
        self._plans, self._spec, self._threads = plans, plans.spec, threads
        self.folder, self.content = (slides.study.store_path(slides.site.name).parent, slides.pipeline.store.pixels)
        self._reader, self._relative = slides.pipeline.slides.reader, slides.study.relative_path
        self._notes: dict[str, set[str]] = {}

    def shard_path(self, slide: str) -> Path:
        return self.folder / "slides" / f"{slide}.h5"

    def write_shards(self, selected: Sequence[tuple[int, NDArray[np.bool_]]]) -> Iterator[Outcome]:
        """Write the shards and pictures of these slides; yield the outcomes in order.

        Two at a time: while one is opened, closed or drawn, the other is read.
        """
        n_ahead = _PARALLEL_SLIDES
        with closing(
            map_in_order(lambda item: self._write_outcome(*item), selected, threads=n_ahead, ahead=n_ahead)
        ) as outcomes:
            yield from outcomes

    def _write_outcome(self, number: int, keep: NDArray[np.bool_]) -> Outcome:
        slide, n_patches = self._plans.slide_name(number), int(keep.sum())
        if not n_patches:
            return Outcome(slide, reason="none of its patches was drawn into the sample")
        try:
            plan = self._plans.load_plan(number)
            content, unread = self._write_slide(plan, keep)
            picture = self._picture_path(slide)
            corners = np.array([(x, y) for x, y, _ in unread], np.int64).reshape(-1, 2)
            is_stored = keep & ~(plan.xy_l0[:, None] == corners[None]).all(-1).any(-1)
            if not picture.exists():
                write_bytes(picture, draw_overview(plan, is_stored))
        except DiskFull:
            raise
        except Exception as error:  # the failure of one slide must not end the others
            return Outcome(slide, reason=describe_failure(error))
        quality = plan_quality(len(plan.xy_l0), plan, plan.aside_reason)
        notes = {*plan.notes, *self._notes.get(slide, ()), *_describe_lost_tumor(plan, is_stored)}
        note = "; ".join(sorted(notes))
        return Outcome(
            slide,
            n_patches - len(unread),
            describe_unread_patches(unread, n_patches),
            note,
            content=content,
            quality=quality,
        )

    def _picture_path(self, slide: str) -> Path:
        return self.folder / "overview" / f"{slide}.png"

    def _write_slide(self, plan: SlidePlan, keep: NDArray[np.bool_]) -> tuple[str, Marked]:
        """Write a slide's shard unless it is current; return its content and unreadable patches."""
        record, shard, n_patches = plan.record, self.shard_path(plan.record.slide), int(keep.sum())
        split = record.split or "train"
        # also decisive for pixels: the slide's size on disk, where it has no quickhash, and a reader by name
        size = record.path.stat().st_size if record.path.is_file() else 0
        source = f"{size} {plan.mpp!r}" + ("" if self._reader == "auto" else f" {self._reader}")
        slide_facts = (record.slide, record.patient, split)
        reasons = zip(plan.aside_xy_l0.tolist(), plan.aside_reason.tolist(), strict=True)
        excluded = tuple((x, y, why) for (x, y), why in reasons)
        meta = stored.ShardMeta(*slide_facts, self._spec, plan.quickhash, source, self.content, excluded)
        columns = (np.full(n_patches, text) for text in slide_facts)
        table = PatchTable(plan.xy_l0[keep], plan.label[keep], plan.tumor_fraction[keep], *columns)
        stale = stored.explain_stale(shard, meta, table)
        if stale:
            print_message(f"  {record.slide}: {stale}, tiled again")
        if stale is not None:
            self._picture_path(record.slide).unlink(missing_ok=True)  # must not outlive a kill here
            self._write_shard(shard, meta, table, plan)
        return stored.read_shard_content(shard)

    def _write_shard(self, shard: Path, meta: stored.ShardMeta, table: PatchTable, plan: SlidePlan) -> None:
        """Write the shard of all readable patches; each pass over the slide finds unreadable ones."""
        content = self.content
        if content == "native":
            # beyond the slide's edge a tile's bytes hold the scanner's padding
            reach = table.xy_l0 + plan.spec.size_px * plan.spec.mpp / plan.mpp
            if not plan.in_tiles or (reach > np.array(plan.size_l0) + _EDGE_L0).any():
                content = "raw"
        unread: dict[int, str] = {}
        while True:
            rows = np.setdiff1d(np.arange(len(table)), list(unread))
            try:
                return self._write_pass((shard, meta, table), plan, content, rows, unread)
            except _NoStream:
                content = "raw"
            except _UnreadableRows as error:
                unread |= {int(rows[k]): reason for k, reason in error.rows.items()}
                if len(unread) == len(table):
                    raise WsiFlError(unread[0]) from None

    def _write_pass(
        self,
        contents: tuple[Path, stored.ShardMeta, PatchTable],
        plan: SlidePlan,
        content: str,
        rows: NDArray[np.int64],
        unread: dict[int, str],
    ) -> None:
        """Read these rows and write the shard without the unreadable ones."""
        record, corners = plan.record, contents[2].xy_l0[rows]
        unreadable: dict[int, str] = {}
        notes = self._notes.setdefault(record.slide, set())
        options: Any = {"threads": self._threads, "reader": self._reader, "excluded": unreadable, "notes": notes}
        if content == "native":
            streams = _require_readable(self._native_streams(plan, corners, unreadable), unreadable)
            stored.write_streams(*contents, streams, unread=unread)
            return
        pixels = _require_readable(
            (batch for _, batch in read_patches(record, corners, self._spec, **options)), unreadable
        )
        if (quality := parse_quality(content)) is not None:
            stored.write_streams(*contents, self._new_streams(pixels, quality), unread=unread)
        elif content == "none":
            for _ in pixels:
                pass  # finds damaged patches now, not in training
            path = self._relative(record.path)
            source = SlideSource(record.slide, path, plan.quickhash, record.mpp_override, self._reader)
            stored.write_positions(*contents, source, unread=unread)
        else:
            stored.write_shard(*contents, pixels, unread=unread)

    def _new_streams(self, pixels: Iterable[NDArray[np.uint8]], quality: int) -> Iterator[bytes]:
        patches, n = (patch for batch in pixels for patch in batch), self._threads
        with closing(
            map_in_order(lambda patch: jpeg.encode(patch, quality), patches, threads=n, ahead=2 * n)
        ) as streams:
            yield from streams

    def _native_streams(self, plan: SlidePlan, xy_l0: NDArray[np.int64], unreadable: dict[int, str]) -> Iterator[bytes]:
        """Yield the slide's own JPEG streams, each decoded once to find damaged tiles."""
        with Slide(plan.record.path, plan.record.mpp_override, self._reader) as slide:

            def read_stream(corner: tuple[int, int]) -> bytes | WsiFlError | None:
                try:
                    return slide.read_native_stream(corner, self._spec.size_px, self._spec.mpp)
                except WsiFlError as error:
                    return error

            def read_batch(first: int) -> list[bytes | WsiFlError | None]:
                return [read_stream((x, y)) for x, y in xy_l0[first : first + _STREAMS_PER_TASK].tolist()]

            starts, n = range(0, len(xy_l0), _STREAMS_PER_TASK), self._threads
            with closing(map_in_order(read_batch, starts, threads=n, ahead=n)) as parts:
                for row, stream in enumerate(stream for part in parts for stream in part):
                    if stream is None:
                        raise _NoStream
                    if isinstance(stream, WsiFlError):
                        unreadable[row] = str(stream)
                    else:
                        yield stream

    def check_space(self, counts: Mapping[int, int]) -> int:
        """Refuse shards larger than the free disk space, existing shards not counted; return the bytes needed.

        Args:
            counts: slide → number of selected patches.
        """
        needed = estimate_bytes(counts, self._plans, self._spec, self.content)
        present = sum(path.stat().st_size for path in (self.folder / "slides").glob("*.h5"))
        free = shutil.disk_usage(self.folder).free
        if needed - present + _SPARE_BYTES > free:
            advice = "" if self.content in {"native", "none"} else "store.pixels = 'native', "
            raise DiskFull(
                f"{self.folder}: the disk is full: {needed / 1e9:.2f} GB of patches, {free / 1e9:.2f} GB free; "
                f"set {advice}tile.max_per_slide, or free some space"
            )
        return needed


def _describe_lost_tumor(plan: SlidePlan, rows: NDArray[np.bool_]) -> list[str]:
    """Return a line for a slide with outlined tumour patches, none of them in the store."""
    tumor = plan.label == CLASSES.index("tumor")
    outlined = plan.record.positive and plan.record.supervision in {"annotated", "partial"}
    if not outlined or not tumor.any() or (tumor & rows).any():
        return []
    return [f"labelled tumour and outlined, but none of its {tumor.sum()} tumour patches is in the sample of the store"]


def _require_readable(items: Iterable[_T], unreadable: dict[int, str]) -> Iterator[_T]:
    """Yield the items; raise `_UnreadableRows` after the last where rows are missing."""
    yield from items
    if unreadable:
        raise _UnreadableRows(unreadable)


def estimate_bytes(counts: Mapping[int, int], plans: Plans, spec: GridSpec, content: str) -> int:
    """Return an upper bound of the bytes of all selected patches."""
    share, needed = _SHARE_OF_RAW["jpeg" if parse_quality(content) else content], 0
    for number, n in counts.items():
        raw = content == "native" and not plans.is_native_tiled(number)
        needed += round(n * (spec.size_px**2 * 3 * (1 if raw else share) + _COLUMNS_BYTES))
    return needed
