"""Reading patch stores: the columns of every patch of a site, and the pixels from the shard of its slide.

See FORMAT.md. A missing shard raises instead of reading as black.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.checksums import DAMAGE, SHARDS, RowChecksums, check_seal, shard_sum
from wsi_fl.stores.contents import PIXELS, ReadSlide, Rows, SlideUnreadable, rows_of
from wsi_fl.stores.fields import (
    SHARD_FORMAT,
    STORE_FORMAT,
    check_format,
    first_line,
    patients_of,
    read_meta,
    read_table,
    spec_attrs,
    too_large,
)
from wsi_fl.stores.hdf5 import StoreFile, opened
from wsi_fl.system.bulk import BufferPool
from wsi_fl.system.machine import most_open_files, n_cores
from wsi_fl.types import WsiFlError

_OPEN_SHARDS = 128
"""Shards one reader keeps open, fewer where the system allows few files: joint training reads many stores."""
_MOST_THREADS = 8
_MEMORY = BufferPool(most=2)
"""Of batches that are gone."""
_ROWS_PER_TASK = 4


class PatchStore(StoreFile):
    """A patch store, read-only; linked and packed stores read the same, however pixels are stored.

    Args:
        read_slide: reads patches from a slide, for stores without pixels (`store.pixels = none`).

    Attributes:
        meta: site, classes and grid.
        table: the columns of all n patches.
        slides: slide names in row order.
        shard_sums: slide → the checksum that identifies its shard's pixels; 0 where that holds none.
    """

    format = STORE_FORMAT
    command = "tile"

    def __init__(self, path: str | Path, read_slide: ReadSlide | None = None) -> None:
        self._read_slide = read_slide
        super().__init__(path)

    def _load(self, file: h5py.File) -> None:
        self.meta = read_meta(file)
        self.table = read_table(file, len(self.meta.classes))
        names, first, counts = np.unique(self.table.slide, return_index=True, return_counts=True)
        order = np.argsort(first)
        self.slides = [str(name) for name in names[order]]
        self.shard_sums = dict(zip(self.slides, file[SHARDS][:].tolist(), strict=True))
        self._rows = {str(names[k]): slice(int(first[k]), int(first[k] + counts[k])) for k in order}
        self._shards: OrderedDict[str, tuple[h5py.Group, Rows]] = OrderedDict()
        self._sums: dict[str, RowChecksums] = {}
        self._most_open = max(1, min(_OPEN_SHARDS, most_open_files() // 8))
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.table)

    def close(self) -> None:
        """Close the file, its shards and the threads."""
        self.rest()
        super().close()

    def rest(self) -> None:
        """Close the shards, and end the threads, until patches are read again."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._shards.clear()

    @property
    def mend(self) -> str:
        """Return what to do about damage: which command makes the store anew."""
        meta = getattr(self, "meta", None)
        if meta is None:  # nothing says what made it
            return (
                f"put its backup back, or make it anew: `wsi-fl tile --site {self.site}` for slides, "
                "`wsi-fl partition` for images"
            )
        if meta.generator is None and meta.spec.mpp:
            return f"{super().mend}, with the settings of before ({meta.spec.size_px} px at {meta.spec.mpp:g} µm)"
        maker = "partition" if meta.generator is None else "synthesize sample"
        return f"put its backup back, or make it anew with `wsi-fl {maker}`"

    def verify(self, slide: str) -> list[int]:
        """Read all that the store holds of a slide; return the damaged rows.

        Raises:
            WsiFlError: when the shard is missing, damaged outside its patches, or of other patches.
        """
        with self._lock:
            shard, patches = self._shard(slide)
            try:
                check_seal(shard, PIXELS)
            except DAMAGE as error:
                raise WsiFlError(
                    f"{self.path}: the shard of slide {slide} is damaged ({first_line(error)}); {self.mend}"
                ) from None
            first = self._rows[slide].start
            return [first + row for row in damaged_rows(patches)]

    @cached_property
    def channels(self) -> int:
        """Return 3 for RGB, 1 for grey; every shard of a store has as many as the first."""
        return self._rows_of(self.slides[0]).shape[-1] if self.slides else 3

    def shard(self, slide: str) -> Any:
        """Return the HDF5 group of one slide; WsiFlError where its shard is missing, damaged or of other patches."""
        return self._shard(slide)[0]

    def _rows_of(self, slide: str) -> Rows:
        return self._shard(slide)[1]

    def _shard(self, slide: str) -> tuple[h5py.Group, Rows]:
        if slide not in self._shards:
            if len(self._shards) >= self._most_open:
                self._shards.popitem(last=False)
            try:
                group = self._open_shard(slide)
                try:
                    check_format(group, SHARD_FORMAT, self.path.parent / "slides" / f"{slide}.h5")
                except WsiFlError as error:
                    raise WsiFlError(f"{error}; {self.mend}") from None
                rows = rows_of(group, self.meta.spec, self._read_slide, self._sums.get(slide))
                self._check_columns(slide, group, rows)
            except FileNotFoundError:
                raise WsiFlError(f"{self.path}: the shard of slide {slide} is missing; {self.mend}") from None
            except DAMAGE as error:
                raise WsiFlError(
                    f"{self.path}: the shard of slide {slide} is damaged ({first_line(error)}); {self.mend}"
                ) from None
            except MemoryError as error:
                raise WsiFlError(
                    f"{self.path}: the shard of slide {slide} is {too_large(error)}; {self.mend}"
                ) from None
            self._shards[slide] = group, rows
            if rows.sums is not None:
                self._sums[slide] = rows.sums
        self._shards.move_to_end(slide)
        return self._shards[slide]

    def _open_shard(self, slide: str) -> h5py.Group:
        """Open a shard by the link's own path: HDF5 would also look in the current folder, maybe another site's."""
        link = self._file["slides"].get(slide, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            return opened(self.path.parent / link.filename)["/"]
        return self._file["slides"][slide]

    def _check_columns(self, slide: str, group: h5py.Group, patches: Rows) -> None:
        """Refuse a shard of other patches: of a `tile` that was killed, of another slide, or from an old backup.

        Raises:
            WsiFlError: when its columns or attributes are not those of the store.
        """
        table, size = self.table.take(self._rows[slide]), self.meta.spec.size_px
        said = spec_attrs(self.meta.spec) | {"slide": slide}
        same = (
            bool(np.all(table.slide == slide))
            and {key: group.attrs[key] for key in said} == said
            and patches.n == len(table)
            and patches.shape in {(size, size, 1), (size, size, 3)}
            and np.array_equal(group["xy_l0"], table.xy_l0)
            and np.array_equal(group["label"], table.label)
            and np.array_equal(group["tumor_fraction"], table.tumor_fraction, equal_nan=True)
        )
        if known := self.shard_sums[slide]:
            same = same and shard_sum(group) == known
        else:
            patients = patients_of(group, len(table))
            same = same and bool(
                np.all(patients == table.patient) and np.all(group.attrs["split"] == table.split)
            )
        if not same:
            raise WsiFlError(
                f"{self.path}: the shard of slide {slide} holds other patches, or is damaged; {self.mend}"
            )

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return pixels uint8[b, size_px, size_px, channels] of the rows, in the order asked for.

        JPEG streams are decoded in threads, strictly: damage raises WsiFlError.
        """
        size = self.meta.spec.size_px
        with self._lock:
            channels = self._rows_of(str(self.table.slide[rows[0]])).shape[-1] if len(rows) else 3
            out: NDArray[np.uint8] = _MEMORY.empty((len(rows), size, size, channels), np.uint8)
            at_work: list[Future[None]] = []
            try:
                for slide, at in self._by_slide(rows):
                    patches = self._rows_of(slide)
                    step = _ROWS_PER_TASK if patches.threaded else len(at)
                    for part in (at[k : k + step] for k in range(0, len(at), step)):
                        work = (slide, patches, rows[part], out, part)
                        if patches.threaded and len(rows) > 1:
                            at_work.append(self._threads().submit(self._read_part, *work))
                        else:
                            self._read_part(*work)
                for future in at_work:
                    future.result()
            finally:
                for future in at_work:
                    future.cancel()
        return out

    def _by_slide(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield (slide, positions in `rows` of its patches) for each slide."""
        slides, which = np.unique(self.table.slide[rows], return_inverse=True)
        for k, slide in enumerate(slides):
            yield str(slide), np.flatnonzero(which == k)

    def _read_part(
        self,
        slide: str,
        patches: Rows,
        rows: NDArray[np.int64],
        out: NDArray[np.uint8],
        at: NDArray[np.int64],
    ) -> None:
        """Read some rows of one slide.

        Raises:
            SlideUnreadable: when the shard holds no pixels and the slide cannot be read.
            WsiFlError: naming the first patch that is damaged.
        """
        first = self._rows[slide].start
        try:
            patches.read(rows - first, out, at)
        except SlideUnreadable:
            raise
        except (*DAMAGE, WsiFlError) as error:
            row = _first_damaged(patches, rows, first, out, at)
            raise WsiFlError(
                f"{self.path}: patch {row} in the shard of slide {slide} is damaged "
                f"({first_line(error)}); {self.mend}"
            ) from None

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(_MOST_THREADS, n_cores()))
        return self._pool


def damaged_rows(patches: Rows) -> Iterator[int]:
    """Yield which patches of a shard are damaged, after reading each."""
    for row in range(patches.n):
        try:
            patches.verify(row)
        except (*DAMAGE, WsiFlError):
            yield row


def _first_damaged(
    patches: Rows, rows: NDArray[np.int64], first: int, out: NDArray[np.uint8], at: NDArray[np.int64]
) -> int:
    """Return the first of the rows that cannot be read."""
    for k, row in enumerate(rows):
        try:
            patches.read(rows[k : k + 1] - first, out, at[k : k + 1])
        except (*DAMAGE, WsiFlError):
            return int(row)
    return int(rows[0])
