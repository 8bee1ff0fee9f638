"""The part of `tile` that writes: shards and pictures of the slides of one site, under a lock.

A patch that cannot be read does not end the slide: at the end of the pass `_Unreadable` names all such rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.patches import SlidePlan
from wsi_fl.slides.pictures.overview import draw_overview
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.slides.reading.sweep import read_patches
from wsi_fl.stages.prepare.sources import Done, Listed
from wsi_fl.stages.prepare.tile_plans import Plans, quality_of_plan
from wsi_fl.stages.work.console import partly, reason_of, say
from wsi_fl.stores.fields import Marked
from wsi_fl.stores.patches import SlideSource, quality_of
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
from wsi_fl.types import DiskFull, GridSpec, PatchTable, WsiFlError

_STREAMS_PER_TASK = 16
_SPARE_BYTES = 64 << 20
_COLUMNS_BYTES = 64
_SHARE_OF_RAW = {"raw": 1.0, "native": 0.25, "jpeg": 0.3, "none": 0.0}
"""Cautious: JPEG streams of tissue take about a ninth."""
_EDGE_L0 = 0.5
_SLIDES_AT_ONCE = 2

_T = TypeVar("_T")


class _Unreadable(Exception):
    """Some rows, by their position among the corners asked for, cannot be read; what was written without them is not
    to be kept.
    """

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(rows)
        self.rows = rows


class _NoStream(Exception):
    """Some patch is not one whole native tile."""


class Shards:
    """The shards of a site's slides, as they are written.

    Attributes:
        folder: of the store.
        content: the setting `store.pixels`.
    """

    def __init__(self, listed: Listed, plans: Plans, threads: int) -> None:
        self._plans, self._spec, self._threads = plans, plans.spec, threads
        self.folder, self.content = listed.study.store(listed.site.name).parent, listed.pipeline.store.pixels
        self._reader, self._relative = listed.pipeline.slides.reader, listed.study.relative

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
            if not picture.exists():
                corners = np.array([(x, y) for x, y, _ in unread], np.int64).reshape(-1, 2)
                lost = (plan.xy_l0[:, None] == corners[None]).all(-1).any(-1)
                write_bytes(picture, draw_overview(plan, keep & ~lost))
        except DiskFull:
            raise
        except Exception as error:  # one slide that a library chokes on must not end the others
            return Done(slide, reason=reason_of(error))
        quality = quality_of_plan(len(plan.xy_l0), plan, plan.aside_reason)
        return Done(slide, n - len(unread), partly(unread, n), content=content, quality=quality)

    def _picture(self, slide: str) -> Path:
        return self.folder / "overview" / f"{slide}.png"

    def _write_slide(self, plan: SlidePlan, keep: NDArray[np.bool_]) -> tuple[str, Marked]:
        """One shard, unless it is there and current; what `content_of` says of it."""
        record, shard, n = plan.record, self.path(plan.record.slide), int(keep.sum())
        split, reasons = record.split or "train", plan.aside_reason.tolist()
        # what else decides a slide's pixels: its size on disk, where it has no quickhash, and a reader by name
        size = record.path.stat().st_size if record.path.is_file() else 0
        source = f"{size} {plan.mpp!r}" + ("" if self._reader == "auto" else f" {self._reader}")
        meta = ShardMeta(
            record.slide,
            record.patient,
            split,
            self._spec,
            plan.quickhash,
            source,
            self.content,
            tuple((x, y, why) for (x, y), why in zip(plan.aside_xy_l0.tolist(), reasons, strict=True)),
        )
        whole = (np.full(n, text) for text in (record.slide, record.patient, split))
        table = PatchTable(plan.xy_l0[keep], plan.label[keep], plan.tumor_fraction[keep], *whole)
        stale = why_stale(shard, meta, table)
        if stale:
            say(f"  {record.slide}: {stale}, tiled again")
        if stale is not None:
            self._picture(record.slide).unlink(missing_ok=True)  # it would outlive a kill between the two
            self._write_shard(shard, meta, table, plan)
        return content_of(shard)

    def _write_shard(self, shard: Path, meta: ShardMeta, table: PatchTable, plan: SlidePlan) -> None:
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
        what: tuple[Path, ShardMeta, PatchTable],
        plan: SlidePlan,
        content: str,
        rows: NDArray[np.int64],
        unread: dict[int, str],
    ) -> None:
        """Reads these rows and writes the shard without `unread`."""
        record, corners = plan.record, what[2].xy_l0[rows]
        aside: dict[int, str] = {}
        how: Any = {"threads": self._threads, "reader": self._reader, "aside": aside}
        if content == "native":
            write_streams(*what, _whole(self._native_streams(plan, corners, aside), aside), unread=unread)
            return
        pixels = _whole((batch for _, batch in read_patches(record, corners, self._spec, **how)), aside)
        if (quality := quality_of(content)) is not None:
            write_streams(*what, self._new_streams(pixels, quality), unread=unread)
        elif content == "none":
            for _ in pixels:
                pass  # a damaged patch is found now, not when training wants it
            path = self._relative(record.path)
            source = SlideSource(record.slide, path, plan.quickhash, record.mpp_override, self._reader)
            write_positions(*what, source, unread=unread)
        else:
            write_shard(*what, pixels, unread=unread)

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
