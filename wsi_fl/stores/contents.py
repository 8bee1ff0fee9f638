"""Read a shard's patches from what it holds: pixels, JPEG streams, or only a reference to the slide."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from wsi_fl.stores.checksums import RowChecksums, sums_of
from wsi_fl.system import jpeg
from wsi_fl.types import GridSpec, UsageError, WsiFlError

_QUALITIES = range(1, 101)
PIXELS = ("pixels", "bytes")
"""The datasets of a shard that hold pixels."""


@dataclass(frozen=True)
class SlideSource:
    """Where the pixels of a shard without pixels are."""

    slide: str
    path: str
    """Of the slide: relative to the study, or absolute."""
    quickhash: str
    mpp_override: float | None
    reader: str
    """The setting `slides.reader` at the time."""


class SlideUnreadable(WsiFlError):
    """The slide that a shard without pixels refers to is missing, another one, or damaged."""


ReadSlide = Callable[[SlideSource, NDArray[np.int64], GridSpec], NDArray[np.uint8]]
"""(source, xy_l0 int64[b, 2], spec) → uint8[b, size_px, size_px, 3]; SlideUnreadable where that fails."""


def quality_of(content: str) -> int | None:
    """Return the quality of `jpeg:Q`, or None for `raw`, `native` and `none`.

    Raises:
        UsageError: when it is none of these.

    Example:
        >>> quality_of("jpeg:90"), quality_of("raw")
        (90, None)
    """
    if content in {"raw", "native", "none"}:
        return None
    name, _, number = content.partition(":")
    if name == "jpeg" and number.isascii() and number.isdigit() and int(number) in _QUALITIES:
        return int(number)
    raise UsageError(
        f"pixels are stored as raw, native, none or jpeg:Q with Q from 1 to 100, not {content!r}"
    )


class Rows(Protocol):
    """The patches of one shard.

    Attributes:
        n: how many there are.
        shape: (height, width, channels) of each.
        threaded: whether several threads gain anything.
        sums: their checksums; None where the shard holds no pixels.
    """

    n: int
    shape: tuple[int, int, int]
    threaded: bool

    @property
    def sums(self) -> RowChecksums | None:
        """Return the checksums of the patches."""
        ...

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8], at: NDArray[np.int64]) -> None:
        """Put the patches `rows` of the shard at the positions `at` of `out`; any thread may call it.

        Raises:
            ValueError, WsiFlError, RuntimeError, OSError: when one is damaged.
        """
        ...

    def verify(self, row: int) -> None:
        """Compare one patch of the shard with its checksum, without decoding it; raises as `read` does."""
        ...


def rows_of(
    shard: h5py.Group, spec: GridSpec, read_slide: ReadSlide | None, sums: RowChecksums | None = None
) -> Rows:
    """Return the reader of a shard's patches.

    Args:
        sums: its checksums, where it was open before.

    Raises:
        WsiFlError, KeyError, ValueError: when it lacks something.
    """
    content = str(shard.attrs["content"])
    if content == "raw":
        pixels = shard["pixels"]
        return _RawRows(pixels, sums_of(shard, len(pixels)) if sums is None else sums)
    if content == "none":
        return _SlideRows(_source_of(shard), spec, shard["xy_l0"][:], read_slide)
    start = shard["start"][:]
    sums = sums_of(shard, len(start) - 1) if sums is None else sums
    return _StreamRows(shard["bytes"], start, spec.size_px, sums)


def _source_of(shard: h5py.Group) -> SlideSource:
    """Return the slide of a shard without pixels, from its attributes."""
    attrs = shard.attrs
    override = float(attrs["mpp_override"])
    return SlideSource(
        str(attrs["slide"]),
        str(attrs["path"]),
        str(attrs["quickhash"]),
        None if math.isnan(override) else override,
        str(attrs["reader"]),
    )


class _RawRows:
    threaded = False  # HDF5 lets in one thread at a time

    def __init__(self, pixels: h5py.Dataset, sums: RowChecksums) -> None:
        self._pixels, self.sums = pixels, sums
        self.n, *shape = pixels.shape
        self.shape: tuple[int, int, int] = tuple(shape)

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8], at: NDArray[np.int64]) -> None:
        for row, position in zip(rows, at, strict=True):
            out[position] = np.frombuffer(self._chunk(int(row)), np.uint8).reshape(self.shape)

    def verify(self, row: int) -> None:
        self._chunk(row)

    def _chunk(self, row: int) -> bytes:
        chunk: bytes = self._pixels.id.read_direct_chunk((row, 0, 0, 0))[1]
        self.sums.check(row, chunk)
        return chunk


class _StreamRows:
    threaded = True

    def __init__(
        self, data: h5py.Dataset, start: NDArray[np.uint64], size_px: int, sums: RowChecksums
    ) -> None:
        self.n, self.shape = len(start) - 1, (size_px, size_px, 3)
        whole = start.ndim == 1 and len(start) and start[0] == 0 and start[-1] == data.size
        if data.ndim != 1 or not whole or (start[1:] < start[:-1]).any():
            raise ValueError("start does not divide bytes into streams")
        self._data, self._start, self.sums = data, start.astype(np.int64), sums
        self._offset = data.id.get_offset()  # None unless contiguous
        self._descriptor = int(data.file.id.get_vfd_handle()) if self._offset is not None else -1

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8], at: NDArray[np.int64]) -> None:
        for row, position in zip(rows, at, strict=True):
            jpeg.decode(self._stream(int(row)), out[position])

    def verify(self, row: int) -> None:
        self._stream(row)

    def _stream(self, row: int) -> bytes:
        """Return one JPEG stream; where the bytes are contiguous, without HDF5, so that threads read in parallel."""
        first, last = int(self._start[row]), int(self._start[row + 1])
        if self._offset is None:
            stream = bytes(self._data[first:last])
        else:
            stream = os.pread(self._descriptor, last - first, self._offset + first)
        self.sums.check(row, stream)
        return stream


class _SlideRows:
    threaded = False  # whoever reads slides has threads of his own
    sums = None

    def __init__(
        self, source: SlideSource, spec: GridSpec, xy_l0: NDArray[np.int64], read_slide: ReadSlide | None
    ) -> None:
        self.n, self.shape = len(xy_l0), (spec.size_px, spec.size_px, 3)
        self._source, self._spec, self._xy_l0, self._read_slide = source, spec, xy_l0, read_slide

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8], at: NDArray[np.int64]) -> None:
        if self._read_slide is None:
            raise SlideUnreadable(
                f"the store holds no pixels of slide {self._source.slide} (store.pixels = none), "
                "and slides cannot be read here"
            )
        out[at] = self._read_slide(self._source, self._xy_l0[rows], self._spec)

    def verify(self, row: int) -> None:
        pass  # the shard holds no pixels


def shard_bytes(shard: Any) -> int:
    """Return the bytes of all datasets of a shard."""
    return sum(int(node.size) * int(node.dtype.itemsize) for node in shard.values())
