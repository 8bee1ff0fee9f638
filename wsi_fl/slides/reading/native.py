"""JPEG tiles of a slide, read by offset and decoded strictly: several times faster than OpenSlide's compositing.

OpenSlide stays the authority: `trusted` gives only levels whose tiles decode to OpenSlide's pixels.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl.system import jpeg
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from tifffile import TiffPage

Box = tuple[int, int, int, int]
"""x, y, width, height in pixels of a level."""

_KEPT_ROWS, _KEPT_BYTES = 6, 192 << 20
"""Limits of the cache of decoded tiles, for resampled patches: 512 px touch four rows of 240-px tiles, and threads may
work in two rows of patches."""
_STRADDLING_ROWS = 3
"""Cached rows of tiles under two rows of patches that do not overlap."""
_GAP_BYTES, _TOGETHER_BYTES = 4096, 1 << 20
"""Greatest gap between tiles of one read, and size of one read."""
_JPEG, _RGB, _YCBCR = 7, 2, 6
"""Numbers of TIFF."""
logging.getLogger("tifffile").addHandler(logging.NullHandler())
"""Its warnings do not concern users: OpenSlide judges the file."""


@dataclass(frozen=True)
class TiledImage:
    """One directory of a TIFF. Tiles are numbered row by row."""

    size_px: tuple[int, int]
    """(width, height) of the picture; tiles of the last column and row may reach beyond it."""
    tile_px: tuple[int, int]
    """(width, height)"""
    offset: NDArray[np.int64]
    """[n] first byte of each tile in the file."""
    n_bytes: NDArray[np.int64]
    """[n]; 0 for a missing tile."""
    tables: bytes
    """JPEG tables of all tiles, or b""."""
    rgb: bool
    """Whether tiles are RGB instead of YCbCr."""

    @cached_property
    def n_columns(self) -> int:
        return -(-self.size_px[0] // self.tile_px[0])

    @cached_property
    def n_rows(self) -> int:
        return -(-self.size_px[1] // self.tile_px[1])


def tiled_images(path: Path) -> list[TiledImage]:
    """Return the directories with tiles of 8-bit colour JPEG, in the file's order; [] for other files.

    Labels, macros and thumbnails in strips are left out, and so are directories that cannot be parsed.
    """
    from tifffile import TiffFile

    from wsi_fl.slides.reading.formats.tiff import pages_of

    try:
        with TiffFile(path) as tif:
            found = [
                TiledImage(
                    (page.imagewidth, page.imagelength),
                    (page.tilewidth, page.tilelength),
                    np.asarray(page.dataoffsets, np.int64),
                    np.asarray(page.databytecounts, np.int64),
                    page.jpegtables or b"",
                    page.photometric == _RGB,
                )
                for page in pages_of(tif)
                if is_readable(page)
            ]
    except Exception:  # a damaged or foreign file: OpenSlide judges it
        return []
    return [image for image in found if len(image.offset) == image.n_columns * image.n_rows]


def is_readable(page: TiffPage) -> bool:
    """Return whether a directory has tiles of 8-bit colour JPEG."""
    return (
        page.is_tiled
        and min(page.imagewidth, page.imagelength, page.tilewidth, page.tilelength) > 0
        and page.compression == _JPEG
        and page.photometric in {_RGB, _YCBCR}
        and page.samplesperpixel == 3
        and page.bitspersample == 8
        and page.planarconfig == 1
        and page.imagedepth == 1
    )


class NativeLevel:
    """One level of an open slide file, with a background colour beyond its edge; thread-safe.

    The caller closes the file.
    """

    def __init__(self, file: int, image: TiledImage, background: tuple[int, int, int]) -> None:
        self.image = image
        self._file = file
        self.background = np.array(background, np.uint8)
        width, height = image.tile_px
        self.tile_shape = (height, width, 3)
        self._most = max(1, _KEPT_BYTES // (height * width * 3))
        self._most_bytes = 4 * height * width * 3 + _TOGETHER_BYTES
        self._kept = _Recent()
        self._offset, self._n_bytes = image.offset.tolist(), image.n_bytes.tolist()
        self._scratch = threading.local()
        self.complete = bool(image.n_bytes.all())
        """Whether the file has all tiles."""

    def holds(self, box: Box) -> bool:
        """Return whether the file has all tiles under the box."""
        if self.complete:
            return True
        table = self.image.n_bytes.reshape(self.image.n_rows, self.image.n_columns)
        axes = zip(box[:2], box[2:], self.image.tile_px, strict=True)
        columns, rows = (
            slice(max(0, start) // tile, -(-max(0, start + length) // tile)) for start, length, tile in axes
        )
        return bool(table[rows, columns].all())

    def read(self, box: Box, out: NDArray[np.uint8], *, overlapping: bool = True) -> None:
        """Fill `out` [height, width, 3] with the box, and with the background beyond the edge.

        Args:
            overlapping: whether other boxes need the same pixels; if not, only tiles across the box's edge are cached.

        Raises:
            WsiFlError: when a tile in the box is damaged.
        """
        x, y, width, height = box
        (level_width, level_height), (tile_width, tile_height) = self.image.size_px, self.image.tile_px
        if not self._within(box):
            out[:] = self.background
        across = pieces(x, width, tile_width, level_width)
        for row in pieces(y, height, tile_height, level_height):
            for column in across:
                number = row.number * self.image.n_columns + column.number
                part = out[row.to, column.to]
                if overlapping or not (row.whole and column.whole):
                    rows = _KEPT_ROWS if overlapping else _STRADDLING_ROWS
                    most = min(self._most, rows * self.image.n_columns)
                    part[:] = self._kept.get(number, self._decode, most)[row.of, column.of]
                elif part.shape == self.tile_shape and part.flags.c_contiguous:
                    self._decode(number, part)
                else:
                    part[:] = self._decode(number, self.room())[row.of, column.of]

    def _within(self, box: Box) -> bool:
        x, y, width, height = box
        level_width, level_height = self.image.size_px
        return x >= 0 and y >= 0 and x + width <= level_width and y + height <= level_height

    def forget(self) -> None:
        """Empty the cache."""
        self._kept = _Recent()

    def stream(self, box: Box) -> bytes | None:
        """Return the self-contained JPEG stream of the tile that is the box; None where there is no such tile.

        Raises:
            WsiFlError: when the tile is damaged.
        """
        x, y, width, height = box
        tile_width, tile_height = self.image.tile_px
        is_tile = (width, height) == self.image.tile_px and x % tile_width == 0 and y % tile_height == 0
        if not is_tile or not self._within(box) or not self.holds(box):
            return None
        number = y // tile_height * self.image.n_columns + x // tile_width
        try:
            stream = self._stream(number)
            jpeg.check(stream)
            if jpeg.size(stream) != (height, width):
                raise WsiFlError("its picture has another size")
        except WsiFlError as error:
            raise self._damaged(number, error) from None
        return bytes(stream)

    def streams(self, numbers: NDArray[np.int64]) -> Iterator[jpeg.Stream]:
        """Yield the self-contained streams of tiles [n] in that order; an empty one where the file lacks a tile.

        Neighbours in the file are read at once: fewer and longer reads.
        """
        begin = self.image.offset[numbers]
        begins, ends = begin.tolist(), (begin + self.image.n_bytes[numbers]).tolist()
        for run in _together(begins, ends):
            yield from self._read_together(begins[run], ends[run])

    def _read_together(self, begins: list[int], ends: list[int]) -> Iterator[jpeg.Stream]:
        start = begins[0]
        try:
            read = memoryview(self._bytes(start, ends[-1]))
        except WsiFlError:
            if len(begins) == 1:
                yield b""
            else:  # only one of them may be damaged
                for begin, end in zip(begins, ends, strict=True):
                    yield from self._read_together([begin], [end])
            return
        complete = not (self.image.tables or self.image.rgb)
        for begin, end in zip(begins, ends, strict=True):
            stream: jpeg.Stream = read[begin - start : end - start] if end - start <= len(read) else b""
            if not complete:
                try:
                    stream = jpeg.complete(stream, self.image.tables, rgb=self.image.rgb)
                except WsiFlError:
                    stream = b""
            yield stream

    def room(self) -> NDArray[np.uint8]:
        """Return memory for one tile, the same for all calls of a thread."""
        room: NDArray[np.uint8] | None = getattr(self._scratch, "tile", None)
        if room is None:
            room = self._scratch.tile = np.empty(self.tile_shape, np.uint8)
        return room

    def _decode(self, number: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        out = np.empty(self.tile_shape, np.uint8) if out is None else out
        try:
            return jpeg.decode(self._stream(number), out)
        except WsiFlError as error:
            raise self._damaged(number, error) from None

    def _stream(self, number: int) -> jpeg.Stream:
        begin, n_bytes = self._offset[number], self._n_bytes[number]
        stream = self._bytes(begin, begin + n_bytes)
        if len(stream) < n_bytes:
            raise WsiFlError("the file ends within it")
        return jpeg.complete(stream, self.image.tables, rgb=self.image.rgb)

    def _bytes(self, begin: int, end: int) -> bytes:
        """Read bytes of the file, fewer at its end."""
        if end - begin > self._most_bytes:
            raise WsiFlError(f"it would take {end - begin} bytes")
        try:
            return os.pread(self._file, end - begin, begin)
        except (OSError, OverflowError) as error:
            raise WsiFlError(str(error)) from None

    def _damaged(self, number: int, error: WsiFlError) -> WsiFlError:
        row, column = divmod(number, self.image.n_columns)
        return WsiFlError(f"native tile in column {column}, row {row} is damaged: {error}")


class _Piece(NamedTuple):
    """The part of a box in one column (or row) of tiles."""

    number: int
    of: slice
    """Pixels of the tile."""
    to: slice
    """Pixels of the box."""
    whole: bool
    """Whether the box has all pixels of the tile within the picture."""


def pieces(start: int, length: int, tile: int, whole: int) -> list[_Piece]:
    """Split one axis of a box from `start` at the tiles of a picture `extent` pixels long.

    Example:
        >>> [(piece.number, piece.tile_slice, piece.box_slice) for piece in split_at_tiles(6, 4, 8, 100)]
        [(0, slice(6, 8, None), slice(0, 2, None)), (1, slice(0, 2, None), slice(2, 4, None))]
    """
    found = []
    end = min(start + length, whole)
    at = max(start, 0)
    while at < end:
        number, within = divmod(at, tile)
        n = min(tile - within, end - at)
        all_of_it = within == 0 and (n == tile or at + n == whole)
        found.append(_Piece(number, slice(within, within + n), slice(at - start, at - start + n), all_of_it))
        at += n
    return found


def _together(begins: Sequence[int], ends: Sequence[int]) -> Iterator[slice]:
    """Yield the tiles for each read: neighbours in the file, in order and near each other."""
    first = 0
    for k in range(1, len(begins) + 1):
        near = k < len(begins) and ends[k - 1] <= begins[k] <= ends[k - 1] + _GAP_BYTES
        if not near or ends[k] - begins[first] > _TOGETHER_BYTES:
            yield slice(first, k)
            first = k


class _Recent:
    """A thread-safe cache of the last results by key; each is made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[int, Future[NDArray[np.uint8]]] = OrderedDict()

    def get(self, key: int, make: Callable[[int], NDArray[np.uint8]], most: int) -> NDArray[np.uint8]:
        """Return the cached result of a key, or make it; errors are cached too, and `max_results` results are kept."""
        with self._lock:
            known = self._results.get(key)
            result = self._results[key] = known or Future()
            self._results.move_to_end(key)
            while len(self._results) > most:
                self._results.popitem(last=False)
        if known is None:
            try:
                result.set_result(make(key))
            except BaseException as error:  # other threads must not wait for the result any longer
                result.set_exception(error)
                if not isinstance(error, Exception):
                    raise
        if failure := result.exception():
            raise WsiFlError(str(failure))  # a new one: threads must not share a traceback
        return result.result()
