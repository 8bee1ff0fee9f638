"""The part of `tile` that writes: shards and pictures of the slides of one site, under a lock.

A patch that cannot be read does not end the slide: at the end of the pass `Unreadable` names all such rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.patches import SlidePlan
from wsi_fl.slides.pictures.overview import draw_overview
from wsi_fl.slides.reading.reader import Reader, Slide
from wsi_fl.slides.reading.sweep import read_patches
from wsi_fl.stages.prepare.quality import Quality, quality_of_plan
from wsi_fl.stages.prepare.tile_plans import Plans
from wsi_fl.stages.work.console import partly, reason_of, say
from wsi_fl.stores.contents import SlideSource, quality_of
from wsi_fl.stores.fields import Marked
from wsi_fl.stores.shards import (
    ShardMeta,
    content_of,
    why_stale,
    write_positions,
    write_shard,
    write_streams,
)
from wsi_fl.system import jpeg
from wsi_fl.system.files import write_bytes
from wsi_fl.system.ordered import in_order
from wsi_fl.types import DiskFull, GridSpec, PatchTable, SlideRecord, WsiFlError

_STREAMS_PER_TASK = 16


class Unreadable(Exception):
    """Some rows cannot be read; what was written without them is not to be kept."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(rows)
        self.rows = rows
        """Position among the corners asked for → one-line reason."""


class _NoStream(Exception):
    """Some patch is not one whole native tile."""


def pixel_batches(
    record: SlideRecord, xy_l0: NDArray[np.int64], spec: GridSpec, *, threads: int, reader: Reader
) -> Iterator[NDArray[np.uint8]]:
    """Yield the pixels in batches uint8[b, size_px, size_px, 3], in order.

    Raises:
        Unreadable: after the last batch, when some rows are missing from them.
    """
    aside: dict[int, str] = {}
    for _, batch in read_patches(record, xy_l0, spec, threads=threads, reader=reader, aside=aside):
        yield batch
    if aside:
        raise Unreadable(aside)


def _new_streams(
    record: SlideRecord,
    xy_l0: NDArray[np.int64],
    spec: GridSpec,
    quality: int,
    *,
    threads: int,
    reader: Reader,
) -> Iterator[bytes]:
    """Yield the patches encoded anew; raises as `pixel_batches` does."""
    batches = pixel_batches(record, xy_l0, spec, threads=threads, reader=reader)
    patches = (patch for batch in batches for patch in batch)
    with closing(
        in_order(lambda patch: jpeg.encode(patch, quality), patches, threads=threads, ahead=2 * threads)
    ) as streams:
        yield from streams


def _native_streams(
    record: SlideRecord, xy_l0: NDArray[np.int64], spec: GridSpec, *, threads: int, reader: Reader
) -> Iterator[bytes]:
    """Yield the slide's own streams, each read to its end once, so that a damaged tile is found now.

    Raises:
        NoStream: when a patch has none.
        Unreadable: after the last, when some rows are missing.
    """
    unread: dict[int, str] = {}
    with Slide(record.path, record.mpp_override, reader) as slide:

        def read(first: int) -> list[bytes | WsiFlError | None]:
            corners = xy_l0[first : first + _STREAMS_PER_TASK].tolist()
            return [_checked(slide, (x, y), spec) for x, y in corners]

        starts = range(0, len(xy_l0), _STREAMS_PER_TASK)
        with closing(in_order(read, starts, threads=threads, ahead=threads)) as parts:
            for row, stream in enumerate(stream for part in parts for stream in part):
                if stream is None:
                    raise _NoStream
                if isinstance(stream, WsiFlError):
                    unread[row] = str(stream)
                else:
                    yield stream
    if unread:
        raise Unreadable(unread)


def _checked(slide: Slide, corner: tuple[int, int], spec: GridSpec) -> bytes | WsiFlError | None:
    try:
        return slide.native_stream(corner, spec.size_px, spec.mpp)
    except WsiFlError as error:
        return error


_SPARE_BYTES = 64 << 20
_COLUMNS_BYTES = 64
_SHARE_OF_RAW = {"raw": 1.0, "native": 0.25, "jpeg": 0.3, "none": 0.0}
"""Cautious: JPEG streams of tissue take about a ninth."""
_EDGE_L0 = 0.5
_SLIDES_AT_ONCE = 2


@dataclass(frozen=True)
class Wanted:
    """How the shards of a site are written."""

    folder: Path
    """Of the store."""
    spec: GridSpec
    content: str
    """The setting `store.pixels`."""
    reader: Reader
    threads: int
    relative: Callable[[Path], str]
    """A slide's path as it is written down."""


@dataclass(frozen=True)
class Written:
    """What became of one slide; plain enough for JSON.

    Attributes:
        number: of the slide in the site's plan.
        content: what its shard holds for pixels; None when it has none.
        reason: why it, or some of its patches, were set aside.
        quality: how many patches have which fault, and how tissue was found.
    """

    number: int
    content: str | None = None
    reason: str | None = None
    quality: Quality | None = None


def write_each(
    chosen: Sequence[tuple[int, NDArray[np.bool_]]], plans: Plans, wanted: Wanted
) -> Iterator[Written]:
    """Write the shards and pictures of these slides; yield in order what became of each.

    Two at a time: while one opens, ends or is drawn, the other is read.
    """
    with closing(
        in_order(
            lambda one: _write(*one, plans, wanted), chosen, threads=_SLIDES_AT_ONCE, ahead=_SLIDES_AT_ONCE
        )
    ) as written:
        yield from written


def _write(number: int, keep: NDArray[np.bool_], plans: Plans, wanted: Wanted) -> Written:
    if not keep.any():
        return Written(number, None, "none of its patches was drawn into the sample")
    try:
        plan = plans.load(number)
        content, unread = _write_slide(plan, keep, wanted)
        _draw(plan, keep, [(x, y) for x, y, _ in unread], _picture(wanted, plan))
    except DiskFull:
        raise
    except Exception as error:  # one slide that a library chokes on must not end the others
        return Written(number, None, reason_of(error))
    return Written(number, content, partly(unread, int(keep.sum())), quality_of_plan(plan))


def shard_path(folder: Path, slide: str) -> Path:
    return folder / "slides" / f"{slide}.h5"


def _write_slide(plan: SlidePlan, keep: NDArray[np.bool_], wanted: Wanted) -> tuple[str, Marked]:
    """One shard, unless it is there and current; what `content_of` says of it."""
    record = plan.record
    shard = shard_path(wanted.folder, record.slide)
    split = record.split or "train"
    meta = ShardMeta(
        record.slide,
        record.patient,
        split,
        wanted.spec,
        plan.quickhash,
        _source(plan, wanted.reader),
        wanted.content,
        tuple(
            (x, y, str(why)) for (x, y), why in zip(plan.aside_xy_l0.tolist(), plan.aside_reason, strict=True)
        ),
    )
    n = int(keep.sum())
    table = PatchTable(
        plan.xy_l0[keep],
        plan.label[keep],
        plan.tumor_fraction[keep],
        np.full(n, record.slide),
        np.full(n, record.patient),
        np.full(n, split),
    )
    stale = why_stale(shard, meta, table)
    if stale:
        say(f"  {record.slide}: {stale}, tiled again")
    if stale is not None:
        _picture(wanted, plan).unlink(missing_ok=True)  # it would outlive a kill between the two
        _write_shard(_Task(shard, meta, table, plan), wanted)
    return content_of(shard)


def _picture(wanted: Wanted, plan: SlidePlan) -> Path:
    return wanted.folder / "overview" / f"{plan.record.slide}.png"


def _draw(plan: SlidePlan, keep: NDArray[np.bool_], unread: Sequence[tuple[int, int]], picture: Path) -> None:
    """The picture of what was kept, unless it is there."""
    if not picture.exists():
        corners = np.array(unread, np.int64).reshape(-1, 2)
        lost = (plan.xy_l0[:, None] == corners[None]).all(-1).any(-1)
        write_bytes(picture, draw_overview(plan, keep & ~lost))


@dataclass(frozen=True)
class _Task:
    """One shard to write."""

    shard: Path
    meta: ShardMeta
    table: PatchTable
    plan: SlidePlan


def _write_shard(task: _Task, wanted: Wanted) -> None:
    """The shard of all patches that can be read; each pass over the slide finds those that cannot."""
    content = wanted.content
    if content == "native" and (not task.plan.in_tiles or _beyond_edge(task.plan, task.table)):
        content = "raw"
    unread: dict[int, str] = {}
    while True:
        rows = np.setdiff1d(np.arange(len(task.table)), list(unread))
        try:
            return _write_pass(task, wanted, content, rows, unread)
        except _NoStream:
            content = "raw"
        except Unreadable as error:
            unread |= {int(rows[k]): reason for k, reason in error.rows.items()}
            if len(unread) == len(task.table):
                raise WsiFlError(unread[0]) from None


def _write_pass(
    task: _Task, wanted: Wanted, content: str, rows: NDArray[np.int64], unread: dict[int, str]
) -> None:
    """Reads these rows and writes the shard without `unread`."""
    record, corners, spec = task.plan.record, task.table.xy_l0[rows], wanted.spec
    shard, meta, table = task.shard, task.meta, task.table
    how: dict[str, Any] = {"threads": wanted.threads, "reader": wanted.reader}
    if content == "native":
        write_streams(shard, meta, table, _native_streams(record, corners, spec, **how), unread=unread)
    elif (quality := quality_of(content)) is not None:
        write_streams(shard, meta, table, _new_streams(record, corners, spec, quality, **how), unread=unread)
    elif content == "none":
        for _ in pixel_batches(record, corners, spec, **how):
            pass  # a damaged patch is found now, not when training wants it
        path = wanted.relative(record.path)
        source = SlideSource(record.slide, path, task.plan.quickhash, record.mpp_override, wanted.reader)
        write_positions(shard, meta, table, source, unread=unread)
    else:
        write_shard(shard, meta, table, pixel_batches(record, corners, spec, **how), unread=unread)


def _beyond_edge(plan: SlidePlan, table: PatchTable) -> bool:
    """Whether a patch reaches over the slide's edge, where a tile's own bytes hold what the scanner put there."""
    reach = table.xy_l0 + plan.spec.size_px * plan.spec.mpp / plan.mpp
    return bool((reach > np.array(plan.size_l0) + _EDGE_L0).any())


def _source(plan: SlidePlan, reader: Reader) -> str:
    """What else decides a slide's pixels: its size on disk where it has no quickhash, the µm per pixel used, and a
    reader that was asked for by name."""
    path = plan.record.path
    size = path.stat().st_size if path.is_file() else 0
    return f"{size} {plan.mpp!r}" + ("" if reader == "auto" else f" {reader}")


def check_space(folder: Path, counts: Mapping[int, int], plans: Plans, spec: GridSpec, content: str) -> int:
    """Refuse to begin what the disk cannot hold, shards that are there aside; return how many bytes it needs.

    Args:
        counts: slide → how many of its patches are kept.
    """
    needed = bytes_of(counts, plans, spec, content)
    present = sum(path.stat().st_size for path in (folder / "slides").glob("*.h5"))
    free = shutil.disk_usage(folder).free
    if needed - present + _SPARE_BYTES > free:
        advice = "" if content in {"native", "none"} else "store.pixels = 'native', "
        raise DiskFull(
            f"{folder}: the disk is full: {needed / 1e9:.2f} GB of patches, {free / 1e9:.2f} GB free; "
            f"set {advice}tile.max_per_slide, or free some space"
        )
    return needed


def bytes_of(counts: Mapping[int, int], plans: Plans, spec: GridSpec, content: str) -> int:
    """Return how many bytes so many patches of each slide take at most."""
    share, needed = _SHARE_OF_RAW["jpeg" if quality_of(content) else content], 0
    for number, n in counts.items():
        raw = content == "native" and not plans.in_tiles(number)
        needed += round(n * (spec.size_px**2 * 3 * (1 if raw else share) + _COLUMNS_BYTES))
    return needed
