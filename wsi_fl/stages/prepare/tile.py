"""`wsi-fl tile`: write the patch store of a site.

Slides are planned (tissue, grid, labels) from thumbnails and annotations; patches are selected over the whole site;
only then are pixels read, slide by slide, into shards. A finished shard with the same fingerprint is reused, so a
killed job loses at most the slide in hand.
"""

from __future__ import annotations

import csv
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite, isnan
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.artifacts import KINDS
from wsi_fl.slides.patching.scan_copies import Scan, describe_copies, describe_shared, drop_leaks, list_scans
from wsi_fl.slides.patching.splits import assign_splits
from wsi_fl.stages.prepare import slide_lists
from wsi_fl.stages.prepare.slide_lists import Outcome, PartRow, Scope, SlideList, SlideQuality
from wsi_fl.stages.prepare.tile_plans import Plans, build_grid_spec, plan_slides, select_patches
from wsi_fl.stages.prepare.write_shards import ShardWriter
from wsi_fl.stages.runtime.console import Lines, TextLine, Watcher, print_message
from wsi_fl.stages.runtime.hints import join_commands
from wsi_fl.stages.runtime.rank_job import Part, RankJob
from wsi_fl.stages.runtime.slide_work import SlideWork, join_slide_work
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patch_shards import Counts, link_shards, read_linked_counts
from wsi_fl.study.folder import Study
from wsi_fl.system.files import list_strays, write_csv
from wsi_fl.system.shared_work import SharedWork
from wsi_fl.types import CLASSES, SPLITS, UNLABELLED, ExcludedSlide, SlideRecord, WsiFlError


class _TissueRow(TypedDict):
    """The slides of a method of tissue detection, and their median gain over saturation, if any."""

    slides: int
    gain: float | None


class _TileRow(TypedDict):
    """A site's row in the document of `tile`: numbers of slides, patches (by label and split) and patients.

    `done` counts the slides that this job did of those it shared with others; `closed` is true.
    """

    site: str
    closed: bool
    done: int
    slides: int
    failed: list[dict[str, str]]
    notes: list[dict[str, str]]
    patches: int
    healthy: int
    tumor: int
    train: int
    test: int
    excluded: dict[str, int]
    tissue: dict[str, _TissueRow]
    patients: dict[str, int]
    copies: list[str]
    store: str
    seconds: float
    table: dict[str, dict[str, int]]


class _TileDocument(TypedDict, total=False):
    """The document of `tile`; empty on all ranks but the first."""

    sites: list[_TileRow]
    parts: list[PartRow]
    copies: list[str]
    next: list[str]


def tile_slides(
    study: Study, *, watcher: Watcher | None = None, part: Part | None = None, **scope: Unpack[Scope]
) -> _TileDocument:
    """Tile one site, or every site of the pipeline; return the `--json` document.

    Any number of jobs may do the same at once, and share the slides of each site; so do ranks of mpiexec or srun, of
    which all but the first return {}.

    Args:
        part: write the patches of these slides alone; the store is made when no other part is missing.
    """
    job = RankJob(part)
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
    parts: list[PartRow] = []
    rows = [row for slides in site_lists if (row := _tile_site(slides, job, progress, scans, parts))]
    if not job.is_first:
        return {}
    steps = [] if parts else slide_lists.list_patch_steps(study, site_lists[0].pipeline, **scope)
    return {"sites": rows, "parts": parts, "copies": describe_shared(scans), "next": steps}


def _tile_site(
    slides: SlideList, job: RankJob, watcher: Watcher, scans: list[Scan], parts: list[PartRow]
) -> _TileRow | None:
    """Plan the slides, then write the shards, beside other jobs; and append the scans of stored slides to `scans`.

    Where slides of other parts are missing the store is not made, and the row is appended to `parts`.
    """
    start, name, fraction = time.perf_counter(), slides.site.name, slides.pipeline.slides.test_fraction
    folder = slides.study.store_path(name).parent
    # a table that contradicts itself is refused before slides are opened
    assign_splits(slides.records, test_fraction=fraction)
    settings = slide_lists.describe_settings(slides, "slides", "tile", "tissue", "store")
    with join_slide_work(job, folder, name, "tile", settings) as work:
        plans = Plans(folder / ".plans", slides.records, build_grid_spec(slides.pipeline), work.shared.stage_file)
        writer = ShardWriter(slides, plans, job.threads, work.shared)
        work.retry_items("plans", lambda *_: True)  # they take no time where nothing changed
        plan_outcomes = slide_lists.share_slides(
            work,
            "plans",
            {record.slide: number for number, record in enumerate(slides.records)},
            lambda numbers: plan_slides(numbers, slides, plans, job.threads),
            lambda n_done, n, _: watcher.update(name, n_done / 2, n, "finding tissue"),
        )
        site_scans = job.run_on_ranks(lambda: _split_slides(plans, plan_outcomes, fraction))
        shard_outcomes = _write_shards(slides, plans, plan_outcomes, writer, work, watcher)
        n_done = len(work.job_items)
        if work.n_missing:
            parts.append(slide_lists.build_part_row(name, work, len(shard_outcomes)))
            return None
        row = work.close_work(lambda: _close_store(slides, plans, writer, plan_outcomes, shard_outcomes, work.shared))
    if job.is_first:
        _report_raw(slides, shard_outcomes)
    stored_names = {outcome.slide for outcome in shard_outcomes if outcome.patches}
    site_scans = [scan for scan in site_scans if scan.slide in stored_names]
    scans += site_scans
    row["done"], row["copies"], row["seconds"] = n_done, describe_copies(site_scans), time.perf_counter() - start
    return row


def _write_shards(
    slides: SlideList,
    plans: Plans,
    plan_outcomes: Sequence[Outcome],
    writer: ShardWriter,
    work: SlideWork,
    watcher: Watcher,
) -> list[Outcome]:
    """Select patches over the whole site and write the shards, beside other jobs; return the outcomes of done ones."""
    name, job = slides.site.name, work.job

    def choose_rows() -> list[tuple[int, NDArray[np.bool_]]]:
        selected = select_patches(plans, plan_outcomes, slides.pipeline)
        if job.is_first:
            counts = {number: int(rows.sum()) for number, rows in selected}
            patches_text = f"{sum(counts.values())} patches of {plans.spec.size_px} px"
            print_message(f"  {name}: {patches_text}, at most {writer.check_space(counts) / 1e9:.2f} GB")
        return selected

    selected = job.run_on_ranks(choose_rows)
    phase = f"shards-{_hash_selection(plans, selected)}"
    work.retry_items(phase, lambda slide, outcome: not outcome["patches"] or not writer.shard_path(slide).exists())
    return slide_lists.share_slides(
        work,
        phase,
        {plans.slide_name(number): (number, rows) for number, rows in selected},
        writer.write_shards,
        lambda n_done, n, note: watcher.update(name, (n + n_done) / 2, n, note),
        in_parts=True,
    )


def _hash_selection(plans: Plans, selected: Sequence[tuple[int, NDArray[np.bool_]]]) -> str:
    """Return a digest of the selected patches and the splits of all slides."""
    digest = hashlib.sha256()
    for number, rows in selected:
        digest.update(f"{plans.slide_name(number)} {plans.records[number].split}".encode() + rows.tobytes())
    return digest.hexdigest()[:16]


def _close_store(
    slides: SlideList,
    plans: Plans,
    writer: ShardWriter,
    plan_outcomes: Sequence[Outcome],
    shard_outcomes: Sequence[Outcome],
    shared: SharedWork,
) -> _TileRow:
    """Write the store that links the shards, and `quality.csv`; return the site's row."""
    failed = [*slides.excluded, *slide_lists.list_excluded((*plan_outcomes, *shard_outcomes))]
    stored_names = [outcome.slide for outcome in shard_outcomes if outcome.patches]
    if not stored_names:
        raise WsiFlError(f"site {slides.site.name}: no slide gave a patch; {slide_lists.first_failure(failed)}")
    paths = [writer.shard_path(slide) for slide in stored_names]
    store = slides.study.store_path(slides.site.name)
    classes = UNLABELLED if slides.site.is_receiver else CLASSES
    meta = StoreMeta(slides.site.name, classes, plans.spec, min_tissue=slides.pipeline.tile.min_tissue)
    counts = read_linked_counts(store, meta, paths)
    if counts is None:
        with shared.stage_file(store) as staged:
            counts = link_shards(staged, meta, paths, folder=store.parent)
    outcomes = (*plan_outcomes, *shard_outcomes)
    quality = {outcome.slide: outcome.quality for outcome in outcomes if outcome.quality}
    _write_quality(store.with_name("quality.csv"), quality, shared)
    strays = list_strays((store.parent / "slides", store.parent / "overview"), set(stored_names))
    # other jobs may still read the plans of listed slides
    for path in (*strays, *list_strays((plans.folder,), {record.slide for record in plans.records})):
        shared.delete_file(path)
    return _build_row(slides, plans.records, outcomes, failed, counts, quality)


def _report_raw(slides: SlideList, shard_outcomes: Sequence[Outcome]) -> None:
    contents = [outcome.content for outcome in shard_outcomes if outcome.patches]
    if raw := sum(content != slides.pipeline.store.pixels for content in contents):
        print_message(
            f"  {slides.site.name}: {raw} of {len(contents)} slides are stored raw: their patches are not whole JPEG "
            "tiles of theirs",
            style="yellow",
        )


def _build_row(
    slides: SlideList,
    records: Sequence[SlideRecord],
    outcomes: Sequence[Outcome],
    failed: Sequence[ExcludedSlide],
    counts: Counts,
    quality: Mapping[str, SlideQuality],
) -> _TileRow:
    """Return the site's row of the `--json` document, without what is of this job, copies and time."""
    classes = CLASSES if len(counts["train"]) > 1 else UNLABELLED
    table = {split: dict(zip(classes, counts[split].tolist(), strict=True)) for split in SPLITS}
    sums = {split: sum(table[split].values()) for split in SPLITS}
    excluded, tissue = _summarize_quality(quality.values())
    return {
        "site": slides.site.name,
        "closed": True,
        "done": 0,
        "slides": len(records) + len(slides.excluded),
        "failed": [asdict(slide) for slide in failed],
        "notes": [
            {"slide": outcome.slide, "note": outcome.note} for outcome in outcomes if outcome.note and outcome.patches
        ],
        "patches": sum(sums.values()),
        "healthy": sum(counts_by_label.get("healthy", 0) for counts_by_label in table.values()),
        "tumor": sum(counts_by_label.get("tumor", 0) for counts_by_label in table.values()),
        "train": sums["train"],
        "test": sums["test"],
        "excluded": excluded,
        "tissue": tissue,
        "patients": {
            split: len({record.patient for record in records if record.split == split}) for split in ("train", "test")
        },
        "copies": [],
        "seconds": 0.0,
        "store": slides.study.relative_path(slides.study.store_path(slides.site.name)),
        "table": table,
    }


def _split_slides(plans: Plans, outcomes: list[Outcome], test_fraction: float) -> list[Scan]:
    """Assign splits, the same to all copies of a scan, and exclude leaks between splits; return the scans."""
    marks = plans.load_marks(number for number, outcome in enumerate(outcomes) if outcome.reason is None)
    plans.records = assign_splits(plans.records, test_fraction=test_fraction, marks=marks)
    records, leaks = drop_leaks(plans.records, marks)
    reasons = {leak.slide: leak.reason for leak in leaks}
    outcomes[:] = [replace(outcome, reason=outcome.reason or reasons.get(outcome.slide)) for outcome in outcomes]
    return list_scans(records, marks)


def _summarize_quality(slide_qualities: Iterable[SlideQuality]) -> tuple[dict[str, int], dict[str, _TissueRow]]:
    """Return the excluded patches by artifact, and the slides by method of tissue detection with their median gain."""
    excluded: Counter[str] = Counter()
    gains: dict[str, list[float]] = {}
    for quality in slide_qualities:
        excluded.update(quality["aside"])
        gains.setdefault(quality["tissue_by"], []).append(quality["tissue_gain"])
    tissue: dict[str, _TissueRow] = {}
    for name, gain in sorted(gains.items()):
        finite_gains = list(filter(isfinite, gain))
        tissue[name] = {"slides": len(gain), "gain": median(finite_gains) if finite_gains else None}
    return dict(sorted(excluded.items())), tissue


_FEW_TEST_PATIENTS = 5
"""Fewer test patients give an unreliable score."""


def render_tile_lines(document: _TileDocument) -> Lines:
    """Yield the table of the paper (Table 1), labels × train and test × sites, excluded slides, next commands."""
    yield from slide_lists.render_part_lines(document.get("parts", ()), "tile")
    if not (rows := document["sites"]):
        return
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
        missing = [name for name, n in (("healthy", row["healthy"]), ("tumor", row["tumor"])) if not n]
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
    yield TextLine("; next: ".join(filter(None, (f"stores ready ({stores})", join_commands(document["next"])))))


def render_quality_lines(row: _TileRow) -> Lines:
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


def _write_quality(path: Path, qualities: Mapping[str, SlideQuality], shared: SharedWork) -> None:
    """Write a line per slide; no file without excluded patches and with saturation as only method."""
    if not any(quality["aside"] or quality["tissue_by"] != "saturation" for quality in qualities.values()):
        shared.delete_file(path)
        return
    rows: list[list[object]] = [["slide", "good", *KINDS, "tissue_by", "tissue_gain"]]
    for slide, quality in qualities.items():
        counts = [quality["aside"].get(kind, 0) for kind in KINDS]
        gain = "" if isnan(quality["tissue_gain"]) else f"{quality['tissue_gain']:.3g}"
        rows.append([slide, quality["good"], *counts, quality["tissue_by"], gain])
    with shared.stage_file(path) as staged:
        write_csv(staged, rows)


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
