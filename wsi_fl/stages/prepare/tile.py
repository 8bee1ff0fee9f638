"""`tile`: the patch store of a site; with `--dry-run`, what tiling would take.

Slides are planned (tissue, grid, labels) from thumbnails and annotations alone; patches are chosen over the
whole site; only then are pixels read, slide by slide, into shards. A finished shard whose fingerprint still
fits is not read again, so a killed job loses at most the slide in hand.
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

from wsi_fl.slides.patching.copies import Scan, describe_copies, describe_shared, drop_leaks, scans_of
from wsi_fl.slides.patching.patches import SlidePlan
from wsi_fl.slides.patching.quality import KINDS
from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.slides.pictures.overview import draw_overview
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.slides.reading.sweep import read_patches
from wsi_fl.stages.prepare import sources
from wsi_fl.stages.prepare.sources import Done, Listed, Quality, Which
from wsi_fl.stages.prepare.tile_plans import Plans, choose, plan_each, quality_of_plan, spec_of
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher, partly, reason_of, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores import shards as stored
from wsi_fl.stores.fields import Marked, StoreMeta
from wsi_fl.stores.patches import SlideSource, quality_of
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system import jpeg
from wsi_fl.system.files import locked, write_bytes, write_csv
from wsi_fl.system.ordered import in_order
from wsi_fl.types import CLASSES, SPLITS, UNLABELLED, DiskFull, GridSpec, PatchTable, SlideRecord, WsiFlError

_TRIED, _READ = 8, 128
"""Slides of a site that a dry run plans, evenly from its list, and patches of each that it reads."""
_STREAMS_PER_TASK = 16
_SPARE_BYTES = 64 << 20
_COLUMNS_BYTES = 64
_SHARE_OF_RAW = {"raw": 1.0, "native": 0.25, "jpeg": 0.3, "none": 0.0}
"""Cautious: JPEG streams of tissue take about a ninth."""
_EDGE_L0 = 0.5
_SLIDES_AT_ONCE = 2

_T = TypeVar("_T")


def tile(study: Study, *, watcher: Watcher | None = None, **which: Unpack[Which]) -> dict[str, Any]:
    """Tile one site, or every site of the pipeline; return the `--json` document.

    Started under mpiexec or srun, the ranks share the slides of each site, and all but the first return {}.
    """
    job = Job()
    told = job.watched(watcher)
    listed = job.each(lambda: sources.list_slides(study, job, **which))
    for one in listed:
        weak = sum(record.supervision == "weak" for record in one.records)
        if weak:
            job.say(
                f"  {one.site.name}: {weak} slides have no annotation: their patches take the slide's label "
                "(weak supervision)",
                style="yellow",
            )
        told.update(one.site.name, 0, len(one.records))
    scans: list[Scan] = []
    rows = [_tile_site(one, job, told, scans) for one in listed]
    site, name = which["site"], which.get("pipeline_name")
    named = "" if name is None else f" --pipeline {name}"
    which_sites, alone = "--all" if site is None else f"--site {site}", len(study.site_names()) == 1
    steps = _next_steps(listed[0].pipeline, which_sites, named, alone=alone)
    if listed[0].site.real and alone:  # a hospital among others
        steps[-1] = "wsi-fl federation approve PLAN --kit KIT"
    return {"sites": rows, "copies": describe_shared(scans), "next": steps} if job.first else {}


def _next_steps(pipeline: Pipeline, which: str, named: str, *, alone: bool = False) -> list[str]:
    """The commands between stores and a trained model.

    Example:
        >>> _next_steps(Pipeline(train={"data": "features"}), "--site C1", " --pipeline deep")
        ['wsi-fl features --site C1 --pipeline deep', 'wsi-fl train --method proxyfl --pipeline deep']
    """
    steps = [f"wsi-fl features {which}"] if pipeline.train.data == "features" else []
    train = "wsi-fl train --method regular" if alone else "wsi-fl train --method proxyfl"
    return [step + named for step in (*steps, train)]


def _tile_site(listed: Listed, job: Job, watcher: Watcher, scans: list[Scan]) -> dict[str, object]:
    """All ranks plan, then all write shards, each its share; the first one holds the lock and writes the columns.

    What marks the slides is added to `scans`.
    """
    began, name, pipeline = time.perf_counter(), listed.site.name, listed.pipeline
    store = listed.study.store(name)
    records: Sequence[SlideRecord] = listed.records
    fraction = pipeline.slides.test_fraction
    # a table that contradicts itself is refused before slides are opened
    assign_splits(records, test_fraction=fraction)
    plans = Plans(store.parent / ".plans", records, spec_of(pipeline))
    shards = _Shards(listed, plans, job.threads)
    failed = list(listed.aside)
    with job.first_holds(locked(store.parent, name)):
        n = len(records)
        planned = sources.share_slides(
            job,
            range(n),
            lambda mine: plan_each(mine, listed, plans, job.threads),
            lambda done, _: watcher.update(name, done / 2, n, "finding tissue"),
        )

        site_scans = job.each(lambda: _divide(plans, planned, fraction))

        def choose_rows() -> list[tuple[int, NDArray[np.bool_]]]:
            chosen = _chosen(plans, planned, pipeline)
            if job.first:
                counts = {number: int(rows.sum()) for number, rows in chosen}
                what = f"{sum(counts.values())} patches of {plans.spec.size_px} px"
                say(f"  {name}: {what}, at most {shards.check_space(counts) / 1e9:.2f} GB")
            return chosen

        chosen = job.each(choose_rows)
        n_planned = len(chosen)
        written = sources.share_slides(
            job,
            chosen,
            shards.write_each,
            lambda done, one: watcher.update(name, (n_planned + done) / 2, n_planned, plans.slide(one[0])),
        )
        failed += sources.set_aside((*planned, *written))

        def write_columns(done: list[Done]) -> stored.Counts:
            paths = [shards.path(one.slide) for one in done if one.patches]
            if not paths:
                raise WsiFlError(f"site {name}: no slide gave a patch; {sources.first_reason(failed)}")
            classes = UNLABELLED if listed.site.receives else CLASSES
            meta = StoreMeta(name, classes, plans.spec, min_tissue=pipeline.tile.min_tissue)
            return stored.linked(store, meta, paths) or stored.link_shards(store, meta, paths)

        folders = (*(store.parent / part for part in ("slides", "overview")), plans.folder)
        counts = sources.finish(job, written, write_columns, folders)
    used = {one.slide for one in written if one.patches}
    site_scans = [scan for scan in site_scans if scan.slide in used]
    scans += site_scans
    if counts is None:
        return {}
    records = plans.records
    contents = [one.content for one in written if one.patches]
    if raw := sum(content != pipeline.store.pixels for content in contents):
        say(
            f"  {name}: {raw} of {len(contents)} slides are stored raw: their patches are not whole JPEG tiles of "
            "theirs",
            style="yellow",
        )
    seen = {one.slide: one.quality for one in (*planned, *written) if one.quality}
    _write_quality(store.with_name("quality.csv"), seen)
    names = CLASSES if len(counts["train"]) > 1 else UNLABELLED
    table = {split: dict(zip(names, counts[split].tolist(), strict=True)) for split in SPLITS}
    return {
        "site": name,
        "slides": n + len(listed.aside),
        "failed": [asdict(aside) for aside in failed],
        "notes": [{"slide": one.slide, "note": one.note} for one in written if one.note],
        "patches": sum(sum(one.values()) for one in table.values()),
        **{label: sum(one.get(label, 0) for one in table.values()) for label in CLASSES},
        **{split: sum(table[split].values()) for split in ("train", "test")},
        **_quality_of(seen.values()),
        "patients": {
            split: len({one.patient for one in records if one.split == split}) for split in ("train", "test")
        },
        "copies": describe_copies(site_scans),
        "store": listed.study.relative(store),
        "seconds": time.perf_counter() - began,
        "table": table,
    }


def _divide(plans: Plans, planned: list[Done], test_fraction: float) -> list[Scan]:
    """Give every slide its split, now that it is known which are one scan; return the scans.

    A slide whose scan a table puts into two splits is set aside in `planned`.
    """
    marks = plans.marks(number for number, done in enumerate(planned) if done.reason is None)
    plans.records = assign_splits(plans.records, test_fraction=test_fraction, marks=marks)
    records, leaks = drop_leaks(plans.records, marks)
    reasons = {leak.slide: leak.reason for leak in leaks}
    planned[:] = [replace(done, reason=done.reason or reasons.get(done.slide)) for done in planned]
    return scans_of(records, marks)


def _quality_of(seen: Iterable[Quality]) -> dict[str, object]:
    """Return how many patches were set aside for which fault, and by which method tissue was found on how many slides,
    with the median gain of those on which saturation finds some.
    """
    aside: Counter[str] = Counter()
    gains: dict[str, list[float]] = {}
    for one in seen:
        aside.update(one["aside"])
        gains.setdefault(one["tissue_by"], []).append(one["tissue_gain"])
    tissue = {}
    for name, gain in sorted(gains.items()):
        found = list(filter(isfinite, gain))
        tissue[name] = {"slides": len(gain), "gain": median(found) if found else None}
    return {"excluded": dict(sorted(aside.items())), "tissue": tissue}


def _chosen(plans: Plans, planned: Sequence[Done], pipeline: Pipeline) -> list[tuple[int, NDArray[np.bool_]]]:
    """Return the numbers of slides that have a plan, and which of their patches are kept."""
    numbers = [number for number, one in enumerate(planned) if one.reason is None]
    settings = pipeline.tile
    keep = choose(plans, numbers, balance=settings.balance, max_per_slide=settings.max_per_slide)
    return list(zip(numbers, keep, strict=True))


_FEW = 5
"""Test patients below which a score says little."""


def tile_lines(document: dict[str, Any]) -> Lines:
    """Yield the table of the paper (Table 1), labels × train and test × sites, and what was set aside."""
    rows = document["sites"]
    lines: list[list[Any] | None] = []
    for split in SPLITS:
        counts = [row["table"][split] for row in rows]
        if any(sum(count.values()) for count in counts):
            names = dict.fromkeys(name for count in counts for name in count)
            lines += [[f"{split} {name}", *(count.get(name, 0) for count in counts)] for name in names]
            lines += [[f"{split} sum", *(sum(count.values()) for count in counts)], None]
    yield sources.summed("patches", rows, lines)
    yield from sources.aside_lines(rows, "patch")
    yield from sources.copies_lines(document)
    for row in rows:
        yield from quality_lines(row)
        missing = [name for name in CLASSES if not row[name]]
        untested = [name for name in CLASSES if not row["table"]["test"].get(name)]
        if UNLABELLED[0] in row["table"]["train"]:
            continue
        if missing:
            yield Line(f"  {row['site']}: has no {missing[0]} patch at all", "bold yellow")
        elif untested and row["train"]:
            what = "test patch" if len(untested) == len(CLASSES) else f"{untested[0]} patch for testing"
            yield Line(
                f"  {row['site']}: has no {what}; test patients are drawn before slides are opened: set split in its "
                "table, or raise slides.test_fraction",
                "bold yellow",
            )
    if few := [
        f"{row['site']} {row['patients']['test']}" for row in rows if 0 < row["patients"]["test"] < _FEW
    ]:
        yield Line(
            f"few patients are for the test ({', '.join(few)}); `wsi-fl train --folds 5` tests each once"
        )
    if idle := [row["site"] for row in rows if not row["train"]]:
        yield Line(f"not ready ({', '.join(idle)}); see what was set aside, then run `wsi-fl tile` again")
        return
    stores = ", ".join(row["store"] for row in rows)
    yield Line(f"stores ready ({stores}); next: {' && '.join(document['next'])}")


def quality_lines(row: Mapping[str, Any]) -> Lines:
    """Say what patches of a site were set aside for, and where tissue was not found by saturation."""
    where = Path(row["store"]).parent / "quality.csv"
    if aside := row["excluded"]:
        said = ", ".join(f"{n} {kind}" for kind, n in aside.items())
        n = sum(aside.values())
        yield Line(f"  {row['site']}: {n} patches set aside ({said}); by slide: {where}", "yellow")
    for name, one in row["tissue"].items():
        if name != "saturation":
            gain = one["gain"]
            beside = "where saturation finds none" if gain is None else f"{gain:.2g} × that by saturation"
            area = "" if name == "masks" else f", its area {beside}"
            yield Line(
                f"  {row['site']}: tissue of {one['slides']} slides by {name}{area}; by slide: {where}"
            )


def _write_quality(path: Path, seen: Mapping[str, Quality]) -> None:
    """Write a line per slide; no file where nothing was set aside and all tissue was found by saturation."""
    if not any(one["aside"] or one["tissue_by"] != "saturation" for one in seen.values()):
        path.unlink(missing_ok=True)
        return
    rows: list[list[object]] = [["slide", "good", *KINDS, "tissue_by", "tissue_gain"]]
    for slide, one in seen.items():
        counts = [one["aside"].get(kind, 0) for kind in KINDS]
        gain = "" if isnan(one["tissue_gain"]) else f"{one['tissue_gain']:.3g}"
        rows.append([slide, one["good"], *counts, one["tissue_by"], gain])
    write_csv(path, rows)


def read_set_aside(path: Path) -> dict[str, dict[str, int]]:
    """Return slide → how many patches were set aside for which fault, as `write_quality` wrote it; {} for no file.

    Raises:
        WsiFlError: when it is another table.
    """
    if not path.is_file():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {
                line["slide"]: {kind: n for kind in KINDS if (n := int(line[kind]))}
                for line in csv.DictReader(file)
            }
    except (KeyError, TypeError, ValueError):
        raise WsiFlError(f"{path}: not what `wsi-fl tile` writes; tile the site again") from None


def estimate(study: Study, *, watcher: Watcher | None = None, **which: Unpack[Which]) -> dict[str, Any]:
    """Return as the `--json` document how many patches, bytes and seconds one site or every site would take.

    A few of its slides are tried; nothing is kept.

    Raises:
        WsiFlError: when none of the slides that were tried gives a patch.
    """
    job, told = Job(), watcher or Silent()
    rows = [_estimate_site(one, job, told) for one in sources.list_slides(study, **which)]
    whole = {key: sum(row[key] for row in rows) for key in ("slides", "patches", "bytes", "seconds")}
    return {"sites": rows, **whole, "free_bytes": shutil.disk_usage(study.root).free}


def _estimate_site(listed: Listed, job: Job, watcher: Watcher) -> dict[str, Any]:
    name, pipeline, n = listed.site.name, listed.pipeline, len(listed.records)
    records = [listed.records[k] for k in np.unique(np.linspace(0, n - 1, min(n, _TRIED)).astype(int))]
    tried = len(records)
    with tempfile.TemporaryDirectory() as folder:
        plans = Plans(Path(folder), records, spec_of(pipeline))
        # 1. tissue, grid and labels of a few slides
        began, planned = time.perf_counter(), []
        for one in plan_each(range(tried), listed, plans, job.threads):
            planned.append(one)
            watcher.update(name, len(planned) / 2, tried, "finding tissue")
        planning, failed = time.perf_counter() - began, sources.set_aside(planned)
        chosen = _chosen(plans, planned, pipeline)
        if not chosen:
            raise WsiFlError(f"site {name}: no slide gave a patch; {sources.first_reason(failed)}")
        counts = {number: int(rows.sum()) for number, rows in chosen}
        # 2. the pixels of some of their patches
        began, read = time.perf_counter(), 0
        for number, rows in chosen:
            corners, how = plans.load(number).xy_l0[rows][:_READ], pipeline.slides.reader
            found = read_patches(
                records[number], corners, plans.spec, threads=job.threads, reader=how, aside={}
            )
            read += sum(len(batch) for _, batch in found)
            watcher.update(name, tried / 2 + number / 2, tried, plans.slide(number))
        reading = time.perf_counter() - began
        needed = bytes_of(counts, plans, plans.spec, pipeline.store.pixels)
    # 3. as many more as there are slides
    times, patches = n / tried, sum(counts.values())
    return {
        "site": name,
        "slides": n,
        "tried": tried,
        "failed": len(failed),
        "patches": round(times * patches),
        "bytes": round(times * needed),
        "seconds": times * (planning + reading * patches / max(read, 1)),
    }


def estimate_lines(document: dict[str, Any]) -> Lines:
    """Yield a row per site, and what all take."""
    rows = [
        [
            row["site"],
            row["slides"],
            f"{row['tried']}, {row['failed']} set aside" if row["failed"] else row["tried"],
            f"{row['patches']:,}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['seconds'] / 60:.1f}",
        ]
        for row in document["sites"]
    ]
    yield Table("estimate", ["site", "slides", "tried", "patches", "GB", "minutes"], rows)
    minutes = document["seconds"] / 60
    yield Line(
        f"about {document['patches']:,} patches, {document['bytes'] / 1e9:.1f} GB "
        f"({document['free_bytes'] / 1e9:.0f} GB are free) and "
        f"{f'{minutes / 60:.1f} h' if minutes > 90 else f'{minutes:.1f} min'} on this machine; "
        "nothing was written"
    )


class _Unreadable(Exception):
    """Some rows, by their position among the corners asked for, cannot be read; what was written without them is not
    to be kept.
    """

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(rows)
        self.rows = rows


class _NoStream(Exception):
    """Some patch is not one whole native tile."""


class _Shards:
    """The shards of a site's slides, as they are written.

    Attributes:
        folder: of the store.
        content: the setting `store.pixels`.
    """

    def __init__(self, listed: Listed, plans: Plans, threads: int) -> None:
        self._plans, self._spec, self._threads = plans, plans.spec, threads
        self.folder, self.content = listed.study.store(listed.site.name).parent, listed.pipeline.store.pixels
        self._reader, self._relative = listed.pipeline.slides.reader, listed.study.relative
        self._notes: dict[str, set[str]] = {}

    def path(self, slide: str) -> Path:
        return self.folder / "slides" / f"{slide}.h5"

    def write_each(self, chosen: Sequence[tuple[int, NDArray[np.bool_]]]) -> Iterator[Done]:
        """Write the shards and pictures of these slides; yield in order what became of each.

        Two at a time: while one opens, ends or is drawn, the other is read.
        """
        n = _SLIDES_AT_ONCE
        with closing(in_order(lambda one: self._write(*one), chosen, threads=n, ahead=n)) as written:
            yield from written

    def _write(self, number: int, keep: NDArray[np.bool_]) -> Done:
        slide, n = self._plans.slide(number), int(keep.sum())
        if not n:
            return Done(slide, reason="none of its patches was drawn into the sample")
        try:
            plan = self._plans.load(number)
            content, unread = self._write_slide(plan, keep)
            picture = self._picture(slide)
            corners = np.array([(x, y) for x, y, _ in unread], np.int64).reshape(-1, 2)
            whole = keep & ~(plan.xy_l0[:, None] == corners[None]).all(-1).any(-1)
            if not picture.exists():
                write_bytes(picture, draw_overview(plan, whole))
        except DiskFull:
            raise
        except Exception as error:  # one slide that a library chokes on must not end the others
            return Done(slide, reason=reason_of(error))
        quality = quality_of_plan(len(plan.xy_l0), plan, plan.aside_reason)
        notes = {*plan.notes, *self._notes.get(slide, ()), *_lost_tumour(plan, whole)}
        note = "; ".join(sorted(notes))
        return Done(slide, n - len(unread), partly(unread, n), note, content=content, quality=quality)

    def _picture(self, slide: str) -> Path:
        return self.folder / "overview" / f"{slide}.png"

    def _write_slide(self, plan: SlidePlan, keep: NDArray[np.bool_]) -> tuple[str, Marked]:
        """One shard, unless it is there and current; what `content_of` says of it."""
        record, shard, n = plan.record, self.path(plan.record.slide), int(keep.sum())
        split = record.split or "train"
        # what else decides a slide's pixels: its size on disk, where it has no quickhash, and a reader by name
        size = record.path.stat().st_size if record.path.is_file() else 0
        source = f"{size} {plan.mpp!r}" + ("" if self._reader == "auto" else f" {self._reader}")
        about = (record.slide, record.patient, split)
        reasons = zip(plan.aside_xy_l0.tolist(), plan.aside_reason.tolist(), strict=True)
        aside = tuple((x, y, why) for (x, y), why in reasons)
        meta = stored.ShardMeta(*about, self._spec, plan.quickhash, source, self.content, aside)
        whole = (np.full(n, text) for text in about)
        table = PatchTable(plan.xy_l0[keep], plan.label[keep], plan.tumor_fraction[keep], *whole)
        stale = stored.why_stale(shard, meta, table)
        if stale:
            say(f"  {record.slide}: {stale}, tiled again")
        if stale is not None:
            self._picture(record.slide).unlink(missing_ok=True)  # it would outlive a kill between the two
            self._write_shard(shard, meta, table, plan)
        return stored.content_of(shard)

    def _write_shard(self, shard: Path, meta: stored.ShardMeta, table: PatchTable, plan: SlidePlan) -> None:
        """The shard of all patches that can be read; each pass over the slide finds those that cannot."""
        content = self.content
        if content == "native":
            # over the slide's edge a tile's own bytes hold what the scanner put there
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
            except _Unreadable as error:
                unread |= {int(rows[k]): reason for k, reason in error.rows.items()}
                if len(unread) == len(table):
                    raise WsiFlError(unread[0]) from None

    def _write_pass(
        self,
        what: tuple[Path, stored.ShardMeta, PatchTable],
        plan: SlidePlan,
        content: str,
        rows: NDArray[np.int64],
        unread: dict[int, str],
    ) -> None:
        """Reads these rows and writes the shard without `unread`."""
        record, corners = plan.record, what[2].xy_l0[rows]
        aside: dict[int, str] = {}
        notes = self._notes.setdefault(record.slide, set())
        how: Any = {"threads": self._threads, "reader": self._reader, "aside": aside, "notes": notes}
        if content == "native":
            streams = _whole(self._native_streams(plan, corners, aside), aside)
            stored.write_streams(*what, streams, unread=unread)
            return
        pixels = _whole((batch for _, batch in read_patches(record, corners, self._spec, **how)), aside)
        if (quality := quality_of(content)) is not None:
            stored.write_streams(*what, self._new_streams(pixels, quality), unread=unread)
        elif content == "none":
            for _ in pixels:
                pass  # a damaged patch is found now, not when training wants it
            path = self._relative(record.path)
            source = SlideSource(record.slide, path, plan.quickhash, record.mpp_override, self._reader)
            stored.write_positions(*what, source, unread=unread)
        else:
            stored.write_shard(*what, pixels, unread=unread)

    def _new_streams(self, pixels: Iterable[NDArray[np.uint8]], quality: int) -> Iterator[bytes]:
        patches, n = (patch for batch in pixels for patch in batch), self._threads
        with closing(
            in_order(lambda patch: jpeg.encode(patch, quality), patches, threads=n, ahead=2 * n)
        ) as streams:
            yield from streams

    def _native_streams(
        self, plan: SlidePlan, xy_l0: NDArray[np.int64], aside: dict[int, str]
    ) -> Iterator[bytes]:
        """Yield the slide's own streams, each read to its end once, so that a damaged tile is found now."""
        with Slide(plan.record.path, plan.record.mpp_override, self._reader) as slide:

            def one(corner: tuple[int, int]) -> bytes | WsiFlError | None:
                try:
                    return slide.native_stream(corner, self._spec.size_px, self._spec.mpp)
                except WsiFlError as error:
                    return error

            def read(first: int) -> list[bytes | WsiFlError | None]:
                return [one((x, y)) for x, y in xy_l0[first : first + _STREAMS_PER_TASK].tolist()]

            starts, n = range(0, len(xy_l0), _STREAMS_PER_TASK), self._threads
            with closing(in_order(read, starts, threads=n, ahead=n)) as parts:
                for row, stream in enumerate(stream for part in parts for stream in part):
                    if stream is None:
                        raise _NoStream
                    if isinstance(stream, WsiFlError):
                        aside[row] = str(stream)
                    else:
                        yield stream

    def check_space(self, counts: Mapping[int, int]) -> int:
        """Refuse to begin what the disk cannot hold, shards that are there aside; return how many bytes it needs.

        Args:
            counts: slide → how many of its patches are kept.
        """
        needed = bytes_of(counts, self._plans, self._spec, self.content)
        present = sum(path.stat().st_size for path in (self.folder / "slides").glob("*.h5"))
        free = shutil.disk_usage(self.folder).free
        if needed - present + _SPARE_BYTES > free:
            advice = "" if self.content in {"native", "none"} else "store.pixels = 'native', "
            raise DiskFull(
                f"{self.folder}: the disk is full: {needed / 1e9:.2f} GB of patches, {free / 1e9:.2f} GB free; "
                f"set {advice}tile.max_per_slide, or free some space"
            )
        return needed


def _lost_tumour(plan: SlidePlan, rows: NDArray[np.bool_]) -> list[str]:
    """A line where a slide has outlined tumour patches, and none is in the store."""
    tumor = plan.label == CLASSES.index("tumor")
    outlined = plan.record.positive and plan.record.supervision in {"annotated", "partial"}
    if not outlined or not tumor.any() or (tumor & rows).any():
        return []
    return [
        f"labelled tumour and outlined, but none of its {tumor.sum()} tumour patches is in the sample of the store"
    ]


def _whole(items: Iterable[_T], aside: dict[int, str]) -> Iterator[_T]:
    """Yield the items; raise `_Unreadable` after the last where some rows are missing from them."""
    yield from items
    if aside:
        raise _Unreadable(aside)


def bytes_of(counts: Mapping[int, int], plans: Plans, spec: GridSpec, content: str) -> int:
    """Return how many bytes so many patches of each slide take at most."""
    share, needed = _SHARE_OF_RAW["jpeg" if quality_of(content) else content], 0
    for number, n in counts.items():
        raw = content == "native" and not plans.in_tiles(number)
        needed += round(n * (spec.size_px**2 * 3 * (1 if raw else share) + _COLUMNS_BYTES))
    return needed
