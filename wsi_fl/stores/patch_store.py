"""Readers of patch stores: the columns of every patch of a site, and pixels from the shard of its slide.

A shard holds pixels, JPEG streams, or only a reference to the slide, see FORMAT.md. A missing shard raises instead of
reading as black.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.fields import (
    DAMAGE,
    SHARD_FORMAT,
    SHARDS,
    STORE_FORMAT,
    RowChecksums,
    check_format,
    check_seal,
    first_line,
    memory_message,
    read_checksums,
    read_meta,
    read_name_column,
    read_texts,
    require_sound,
    shard_checksum,
)
from wsi_fl.stores.hdf5 import StoreFile, open_hdf5
from wsi_fl.system import jpeg
from wsi_fl.system.direct_io import BufferPool
from wsi_fl.system.files import FileUnavailable, explain_unavailable, refuse_unavailable
from wsi_fl.system.machine import max_open_files, n_cores
from wsi_fl.types import GridSpec, PatchTable, UsageError, WsiFlError

_QUALITIES = range(1, 101)
PIXEL_DATASETS = ("pixels", "bytes")
"""The datasets of a shard with pixels."""
_MAX_OPEN_SHARDS = 128
"""Most open shards of a reader, fewer where the system limits files: joint training reads many stores."""
_MAX_THREADS = 8
_BATCH_BUFFERS = BufferPool(capacity=2)
"""Memory of released batches."""
_ROWS_PER_TASK = 4


@dataclass(frozen=True)
class SlideSource:
    """The slide of a shard without pixels."""

    slide: str
    path: str
    """Of the slide: relative to the study, or absolute."""
    quickhash: str
    mpp_override: float | None
    reader: str
    """The setting `slides.reader` at the time."""


class SlideUnreadable(WsiFlError):
    """The slide of a shard without pixels is missing, another one, or damaged."""


_ReadSlide = Callable[[SlideSource, NDArray[np.int64], GridSpec], NDArray[np.uint8]]
"""(source, xy_l0 int64[b, 2], spec) → uint8[b, size_px, size_px, 3]; SlideUnreadable where that fails."""


def parse_quality(content: str) -> int | None:
    """Return the quality of `jpeg:Q`, or None for `raw`, `native` and `none`.

    Raises:
        UsageError: for other values.
    """
    if content in {"raw", "native", "none"}:
        return None
    name, _, number = content.partition(":")
    if name == "jpeg" and number.isascii() and number.isdigit() and int(number) in _QUALITIES:
        return int(number)
    raise UsageError(f"pixels are stored as raw, native, none or jpeg:Q with Q from 1 to 100, not {content!r}")


class _ShardPatches:
    """The patches of one shard; a damaged one raises an error of `DAMAGE` or a WsiFlError.

    Attributes:
        n_patches: their number.
        shape: (height, width, channels) of each.
        sums: their checksums; None without pixels.
        is_threaded: whether threads gain speed: HDF5 admits one at a time.
    """

    is_threaded = False

    def __init__(self, n_patches: int, shape: tuple[int, int, int], sums: RowChecksums | None) -> None:
        self.n_patches, self.shape, self.sums = n_patches, shape, sums

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8], positions: NDArray[np.int64]) -> None:
        """Read patches of the shard into `out` at the given positions; any thread may call it."""
        for row, position in zip(rows, positions, strict=True):
            self._decode_patch(self._read_checked(int(row)), out[position])

    def iterate_damaged(self) -> Iterator[int]:
        """Yield the rows of damaged patches, read without decoding.

        Raises:
            WsiFlError: or OSError, when a patch is unreadable for reasons outside the file.
        """
        for row in range(self.n_patches) if self.sums is not None else ():
            try:
                self._read_checked(row)
            except (*DAMAGE, WsiFlError) as error:
                if explain_unavailable(error):
                    raise
                yield row

    def detach_patches(self, path: Path) -> _DetachedPatches | None:
        """Return the same patches, read from the file at `path` without HDF5; None where their bytes are not known."""
        return None

    def _read_checked(self, row: int) -> bytes:
        encoded = self._read_stored(row)
        if self.sums is not None:
            self.sums.check_row(row, encoded)
        return encoded

    def _read_stored(self, row: int) -> bytes:
        raise NotImplementedError

    def _decode_patch(self, encoded: bytes, out: NDArray[np.uint8]) -> None:
        raise NotImplementedError


class _RawPatches(_ShardPatches):
    def __init__(self, pixels: h5py.Dataset, sums: RowChecksums) -> None:
        n, *shape = pixels.shape
        super().__init__(n, tuple(shape), sums)
        self._pixels = pixels

    def _read_stored(self, row: int) -> bytes:
        chunk: bytes = self._pixels.id.read_direct_chunk((row, 0, 0, 0))[1]
        return chunk

    def _decode_patch(self, encoded: bytes, out: NDArray[np.uint8]) -> None:
        _copy_pixels(encoded, out)

    def detach_patches(self, path: Path) -> _DetachedPatches | None:
        n_bytes, chunks = math.prod(self.shape), list[tuple[int, int]]()
        self._pixels.id.chunk_iter(lambda chunk: chunks.append((chunk.byte_offset, chunk.size)))
        start = range(first := min(chunks)[0], first + n_bytes * len(chunks) + 1, n_bytes)
        is_regular = chunks == [(offset, n_bytes) for offset in start[:-1]]
        return _DetachedPatches(self, path, start, _copy_pixels) if is_regular else None


class _StreamPatches(_ShardPatches):
    is_threaded = True

    def __init__(self, data: h5py.Dataset, start: NDArray[np.uint64], size_px: int, sums: RowChecksums) -> None:
        super().__init__(len(start) - 1, (size_px, size_px, 3), sums)
        is_whole = start.ndim == 1 and len(start) and start[0] == 0 and start[-1] == data.size
        if data.ndim != 1 or not is_whole or (start[1:] < start[:-1]).any():
            raise ValueError("start does not divide bytes into streams")
        self._data, self._start = data, start.astype(np.int64)
        self._offset = data.id.get_offset()  # None unless contiguous
        self._descriptor = int(data.file.id.get_vfd_handle()) if self._offset is not None else -1

    def _read_stored(self, row: int) -> bytes:
        """Return one JPEG stream; contiguous bytes are read without HDF5, by threads in parallel."""
        first, last = int(self._start[row]), int(self._start[row + 1])
        if self._offset is None:
            return bytes(self._data[first:last])
        return os.pread(self._descriptor, last - first, self._offset + first)

    def _decode_patch(self, encoded: bytes, out: NDArray[np.uint8]) -> None:
        jpeg.decode(encoded, out)

    def detach_patches(self, path: Path) -> _DetachedPatches | None:
        start = (self._offset or 0) + self._start
        return None if self._offset is None else _DetachedPatches(self, path, start, jpeg.decode)


def _copy_pixels(encoded: bytes, out: NDArray[np.uint8]) -> None:
    out[:] = np.frombuffer(encoded, np.uint8).reshape(out.shape)


class _DetachedPatches(_ShardPatches):
    """The patches of a shard that was checked when it was open; its file is opened for each read, in microseconds.

    Args:
        start: n + 1 positions in the file, at which patches begin.
        decode: of one patch.
    """

    def __init__(
        self,
        patches: _ShardPatches,
        path: Path,
        start: range | NDArray[np.int64],
        decode: Callable[[bytes, NDArray[np.uint8]], object],
    ) -> None:
        super().__init__(patches.n_patches, patches.shape, patches.sums)
        self.is_threaded, self._path, self._start, self._decode = patches.is_threaded, path, start, decode

    def _read_checked(self, row: int) -> bytes:
        first, last = int(self._start[row]), int(self._start[row + 1])
        with self._path.open("rb", buffering=0) as file:
            encoded = os.pread(file.fileno(), last - first, first)
        if self.sums is not None:  # each time: the file may be another one by now
            self.sums.verify_row(row, encoded)
        return encoded

    def _decode_patch(self, encoded: bytes, out: NDArray[np.uint8]) -> None:
        self._decode(encoded, out)


class _ReferencePatches(_ShardPatches):
    """Patches read from the slide, by a reader with its own threads."""

    def __init__(
        self, source: SlideSource, spec: GridSpec, xy_l0: NDArray[np.int64], read_slide: _ReadSlide | None
    ) -> None:
        super().__init__(len(xy_l0), (spec.size_px, spec.size_px, 3), None)
        self._source, self._spec, self._xy_l0, self._read_slide = source, spec, xy_l0, read_slide

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8], positions: NDArray[np.int64]) -> None:
        if self._read_slide is None:
            raise SlideUnreadable(
                f"the store holds no pixels of slide {self._source.slide} (store.pixels = none), "
                "and slides cannot be read here"
            )
        out[positions] = self._read_slide(self._source, self._xy_l0[rows], self._spec)


def open_shard_patches(
    shard: h5py.Group, spec: GridSpec, read_slide: _ReadSlide | None, sums: RowChecksums | None = None
) -> _ShardPatches:
    """Return the patches of a shard.

    Args:
        sums: its checksums, if read before.
    """
    attrs, content = shard.attrs, str(shard.attrs["content"])
    if content == "raw":
        pixels = shard["pixels"]
        return _RawPatches(pixels, read_checksums(shard, len(pixels)) if sums is None else sums)
    if content == "none":
        override = float(attrs["mpp_override"])
        slide, path, quickhash, reader = (str(attrs[key]) for key in ("slide", "path", "quickhash", "reader"))
        source = SlideSource(slide, path, quickhash, None if math.isnan(override) else override, reader)
        return _ReferencePatches(source, spec, shard["xy_l0"][:], read_slide)
    start = shard["start"][:]
    sums = read_checksums(shard, len(start) - 1) if sums is None else sums
    return _StreamPatches(shard["bytes"], start, spec.size_px, sums)


class PatchStore(StoreFile):
    """A patch store, read-only; linked and packed stores read the same, however pixels are stored.

    Args:
        read_slide: reads patches from a slide, for stores without pixels (`store.pixels = none`).

    Attributes:
        meta: site, classes and grid.
        xy_l0, label, tumor_fraction: the columns of all n patches, as in `PatchTable`.
        names: those of slide, patient and split.
        slides: slide names in row order.
        shard_sums: slide → checksum of its shard's pixels; 0 without pixels.
    """

    format = STORE_FORMAT
    command = "tile"

    def __init__(self, path: str | Path, read_slide: _ReadSlide | None = None) -> None:
        self._read_slide = read_slide
        super().__init__(path)

    def _load(self, file: h5py.File) -> None:
        self.meta = read_meta(file)
        self.xy_l0, self.label, self.tumor_fraction = (file[name][:] for name in ("xy_l0", "label", "tumor_fraction"))
        self.names = {name: read_name_column(file, name) for name in ("slide", "patient", "split")}
        require_sound(self.label, self.names["patient"], self.names["split"], len(self.meta.classes))
        first, counts = self.names["slide"].find_rows()
        names = self.names["slide"].names.tolist()
        self._rows = {names[k]: slice(int(first[k]), int(first[k] + counts[k])) for k in np.argsort(first)}
        self.slides = [*self._rows]
        self.shard_sums = dict(zip(self.slides, file[SHARDS][:].tolist(), strict=True))
        self._shards: OrderedDict[str, tuple[h5py.Group, _ShardPatches]] = OrderedDict()
        self._detached: dict[str, _DetachedPatches] = {}
        self._sums: dict[str, RowChecksums] = {}
        self._most_open = max(1, min(_MAX_OPEN_SHARDS, max_open_files() // 8))
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.label)

    @cached_property
    def table(self) -> PatchTable:
        """Return the columns of all n patches, with names as str[n]: four bytes for each character of each row."""
        return self.take_table(slice(None))

    def take_table(self, rows: slice) -> PatchTable:
        """Return the columns of some rows."""
        names = {name: column.expand_names(rows) for name, column in self.names.items()}
        return PatchTable(self.xy_l0[rows], self.label[rows], self.tumor_fraction[rows], **names)

    def close(self) -> None:
        """Close the file, its shards and the threads."""
        self.close_shards()
        super().close()

    def close_shards(self) -> None:
        """Close the shards and end the threads until the next read."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._shards.clear()

    @property
    def repair_advice(self) -> str:
        """Return the remedy for damage: the command to make the store again."""
        meta = getattr(self, "meta", None)
        if meta is None:  # made by an unknown command
            return (
                f"put its backup back, or make it anew: `wsi-fl tile --site {self.site}` for slides, "
                "`wsi-fl partition` for images"
            )
        if meta.generator is None and meta.spec.mpp:
            settings = f"{meta.spec.size_px} px at {meta.spec.mpp:g} µm"
            return f"{super().repair_advice}, with the settings of before ({settings})"
        maker = "partition" if meta.generator is None else "synthesize sample"
        return f"put its backup back, or make it anew with `wsi-fl {maker}`"

    def verify(self, slide: str) -> list[int]:
        """Read all patches of a slide; return the damaged rows.

        Raises:
            WsiFlError: when the shard is missing, damaged outside its patches, or of other patches.
        """
        with self._lock:
            shard, patches = self._load_shard(slide)
            try:
                check_seal(shard, PIXEL_DATASETS)
                damaged = list(patches.iterate_damaged())
            except DAMAGE as error:
                refuse_unavailable(error, self._shard_path(slide))
                raise self._build_error(slide, f"is damaged ({first_line(error)})") from None
            return [self._rows[slide].start + row for row in damaged]

    def compute_marks(self) -> dict[str, frozenset[str]]:
        """Return slide → digests of its content: the quickhash of the slide if stored, and a digest of its patches.

        Unreadable shards have only the digest of their patches.
        """
        marks_by_slide = {}
        for slide in self.slides:
            corners, checksum = self.xy_l0[self._rows[slide]], self.shard_sums[slide]
            marks = {f"patches {checksum} {hashlib.sha256(corners.tobytes()).hexdigest()}"} if checksum else set()
            with suppress(*DAMAGE, WsiFlError):
                if quickhash := str(self._open_shard_group(slide).attrs.get("quickhash", "")):
                    marks.add(f"slide {quickhash}")
            marks_by_slide[slide] = frozenset(marks)
        return marks_by_slide

    @cached_property
    def n_channels(self) -> int:
        """Return 3 for RGB, 1 for grey; equal in all shards of a store."""
        return self._load_shard(self.slides[0])[1].shape[-1] if self.slides else 3

    def open_shard(self, slide: str) -> Any:
        """Return the HDF5 group of one slide; WsiFlError where its shard is missing, damaged or of other patches."""
        return self._load_shard(slide)[0]

    def _shard_path(self, slide: str) -> Path:
        return self.path.parent / "slides" / f"{slide}.h5"

    def _build_error(self, slide: str, problem: str) -> WsiFlError:
        return WsiFlError(f"{self.path}: the shard of slide {slide} {problem}; {self.repair_advice}")

    def _load_shard(self, slide: str) -> tuple[h5py.Group, _ShardPatches]:
        if slide not in self._shards:
            if len(self._shards) >= self._most_open:
                self._close_oldest_shard()
            try:
                group = self._open_shard_group(slide)
                try:
                    check_format(group, SHARD_FORMAT, self._shard_path(slide))
                except WsiFlError as error:
                    raise WsiFlError(f"{error}; {self.repair_advice}") from None
                rows = open_shard_patches(group, self.meta.spec, self._read_slide, self._sums.get(slide))
                self._check_columns(slide, group, rows)
            except FileNotFoundError:
                raise self._build_error(slide, "is missing") from None
            except DAMAGE as error:
                refuse_unavailable(error, self._shard_path(slide))
                raise self._build_error(slide, f"is damaged ({first_line(error)})") from None
            except MemoryError as error:
                raise self._build_error(slide, f"is {memory_message(error)}") from None
            self._shards[slide] = group, rows
            if rows.sums is not None:
                self._sums[slide] = rows.sums
        self._shards.move_to_end(slide)
        return self._shards[slide]

    def _close_oldest_shard(self) -> None:
        slide, (group, patches) = self._shards.popitem(last=False)
        with suppress(*DAMAGE):  # such a shard is opened again, which says what is wrong
            if slide not in self._detached and (detached := patches.detach_patches(Path(group.file.filename))):
                self._detached[slide] = detached

    def _find_patches(self, slide: str) -> _ShardPatches:
        """Return the patches of a slide, of a checked shard without opening it again: to open costs a hundred reads."""
        if slide in self._detached and slide not in self._shards:
            return self._detached[slide]
        return self._load_shard(slide)[1]

    def _open_shard_group(self, slide: str) -> h5py.Group:
        """Open a shard by the link's own path: HDF5 also searches the current folder, maybe another site's."""
        link = self._file["slides"].get(slide, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            return open_hdf5(self.path.parent / link.filename)["/"]
        return self._file["slides"][slide]

    def _check_columns(self, slide: str, group: h5py.Group, patches: _ShardPatches) -> None:
        # it may be of a `tile` that was killed, of another slide, or from an old backup
        table, size = self.take_table(self._rows[slide]), self.meta.spec.size_px
        attrs = asdict(self.meta.spec) | {"slide": slide}
        is_same = (
            bool(np.all(table.slide == slide))
            and {key: group.attrs[key] for key in attrs} == attrs
            and patches.n_patches == len(table)
            and patches.shape in {(size, size, 1), (size, size, 3)}
            and np.array_equal(group["xy_l0"], table.xy_l0)
            and np.array_equal(group["label"], table.label)
            and np.array_equal(group["tumor_fraction"], table.tumor_fraction, equal_nan=True)
        )
        if checksum := self.shard_sums[slide]:
            is_same = is_same and shard_checksum(group) == checksum
        else:
            patients = read_texts(group, "patient") if "patient" in group else str(group.attrs["patient"])
            is_same = is_same and bool(
                np.all(patients == table.patient) and np.all(group.attrs["split"] == table.split)
            )
        if not is_same:
            raise self._build_error(slide, "holds other patches, or is damaged")

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return pixels uint8[b, size_px, size_px, channels] of the rows, in their order.

        JPEG streams are decoded in threads, strictly: damage raises WsiFlError.
        """
        size, (codes, names) = self.meta.spec.size_px, self.names["slide"]
        with self._lock:
            channels = self._find_patches(str(names[codes[rows[0]]])).shape[-1] if len(rows) else 3
            out: NDArray[np.uint8] = _BATCH_BUFFERS.empty((len(rows), size, size, channels), np.uint8)
            futures: list[Future[None]] = []
            try:
                slides, slide_index = np.unique(codes[rows], return_inverse=True)
                for number, slide in enumerate(names[slides].tolist()):
                    positions, patches = np.flatnonzero(slide_index == number), self._find_patches(slide)
                    step = _ROWS_PER_TASK if patches.is_threaded else len(positions)
                    for part in (positions[k : k + step] for k in range(0, len(positions), step)):
                        work = (slide, patches, rows[part], out, part)
                        if patches.is_threaded and len(rows) > 1:
                            futures.append(self._get_threads().submit(self._read_part, *work))
                        else:
                            self._read_part(*work)
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()
        return out

    def _read_part(
        self,
        slide: str,
        patches: _ShardPatches,
        rows: NDArray[np.int64],
        out: NDArray[np.uint8],
        positions: NDArray[np.int64],
    ) -> None:
        first = self._rows[slide].start
        try:
            patches.read(rows - first, out, positions)
        except (SlideUnreadable, FileUnavailable):
            raise
        except (*DAMAGE, WsiFlError) as error:
            refuse_unavailable(error, self._shard_path(slide))
            row = int(rows[0])
            for k, number in enumerate(rows):
                try:
                    patches.read(rows[k : k + 1] - first, out, positions[k : k + 1])
                except (*DAMAGE, WsiFlError):
                    row = int(number)
                    break
            raise WsiFlError(
                f"{self.path}: patch {row} in the shard of slide {slide} is damaged "
                f"({first_line(error)}); {self.repair_advice}"
            ) from None

    def _get_threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(_MAX_THREADS, n_cores()))
        return self._pool
