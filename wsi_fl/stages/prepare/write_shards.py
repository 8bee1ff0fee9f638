"""Shards of `tile`: read the selected patches of each slide and write them, without those that cannot be read."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.slide_plan import SlidePlan
from wsi_fl.slides.pictures.qc_thumbnail import draw_overview
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare.slide_lists import Outcome, SlideList
from wsi_fl.stages.prepare.tile_plans import Plans, plan_quality
from wsi_fl.stages.runtime.console import describe_failure, describe_unread_patches, print_message
from wsi_fl.stores import patch_shards as stored
from wsi_fl.stores.fields import Marked
from wsi_fl.stores.patch_store import SlideSource, parse_quality
from wsi_fl.system import jpeg
from wsi_fl.system.prefetch import map_in_order
from wsi_fl.system.shared_work import SharedWork, WorkEnded
from wsi_fl.types import CLASSES, DiskFull, GridSpec, PatchTable, WsiFlError

_STREAMS_PER_TASK = 16
_SPARE_BYTES = 64 << 20
_COLUMNS_BYTES = 64
_SHARE_OF_RAW = {"raw": 1.0, "native": 0.25, "jpeg": 0.3, "none": 0.0}
"""Cautious: JPEG streams of tissue take about a ninth."""
_EDGE_L0 = 0.5
_PARALLEL_SLIDES = 2

_T = TypeVar("_T")


class _UnreadableRows(Exception):
    """Unreadable rows, by position among the requested corners; a shard without them must be written again."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(rows)
        self.rows = rows


class _NoStream(Exception):
    """A patch is not one whole native tile."""


class ShardWriter:
    """Writes the shards of a site's slides.

    Attributes:
        folder: of the store.
        content: the setting `store.pixels`.
    """

    def __init__(self, slides: SlideList, plans: Plans, threads: int, shared: SharedWork) -> None:
        self._plans, self._spec, self._threads, self._shared = plans, plans.spec, threads, shared
        self.folder, self.content = (slides.study.store_path(slides.site.name).parent, slides.pipeline.store.pixels)
        self._reader, self._relative = slides.pipeline.slides.reader, slides.study.relative_path
        self._notes: dict[str, set[str]] = {}

    def shard_path(self, slide: str) -> Path:
        return self.folder / "slides" / f"{slide}.h5"

    def write_shards(self, selected: Iterable[tuple[int, NDArray[np.bool_]]]) -> Iterator[Outcome]:
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
                with self._shared.stage_file(picture) as staged:
                    staged.write_bytes(draw_overview(plan, is_stored))
        except (DiskFull, WorkEnded):
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
            self._shared.delete_file(self._picture_path(record.slide))  # must not outlive a kill here
            with self._shared.stage_file(shard) as staged:
                self._write_shard(staged, meta, table, plan)
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
