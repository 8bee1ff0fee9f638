"""A slide's own JPEG tiles, read by offset and decoded strictly: several times faster than OpenSlide's compositing.

OpenSlide stays the authority: `trusted` hands out only levels that were found to give its pixels.
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
"""Decoded tiles that are kept for boxes to come, as of resampled patches: 512 px touch four rows of 240-px tiles, and
threads may work in two rows of patches."""
_STRADDLING_ROWS = 3
"""Of these, so many lie under two rows of patches that do not overlap."""
_GAP_BYTES, _TOGETHER_BYTES = 4096, 1 << 20
"""Between tiles that are read from the file together, and of all of them."""
_JPEG, _RGB, _YCBCR = 7, 2, 6
"""Numbers of TIFF."""
logging.getLogger("tifffile").addHandler(logging.NullHandler())
"""What it finds odd in a file is no user's business: OpenSlide judges the file."""


@dataclass(frozen=True)
class TiledImage:
    """One directory of a TIFF. Tiles are numbered row by row."""

    size_px: tuple[int, int]
    """(width, height) of the picture; tiles of the last column and row may hang over."""
    tile_px: tuple[int, int]
    """(width, height)"""
    offset: NDArray[np.int64]
    """[n] where each tile's bytes begin in the file."""
    n_bytes: NDArray[np.int64]
    """[n]; 0 where the file leaves a tile out."""
    tables: bytes
    """JPEG tables that all tiles share, or b""."""
    rgb: bool
    """Whether the tiles' components are red, green and blue instead of YCbCr."""

    @cached_property
    def n_columns(self) -> int:
        return -(-self.size_px[0] // self.tile_px[0])

    @cached_property
    def n_rows(self) -> int:
        return -(-self.size_px[1] // self.tile_px[1])


def tiled_images(path: Path) -> list[TiledImage]:
    """The directories whose tiles are 8-bit colour JPEG, in the file's order; none where the file is no such TIFF.

    Labels, macros and thumbnails in strips are left out, and so is whatever cannot be parsed.
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
    except Exception:  # whatever a parser stumbles over in a damaged or foreign file: OpenSlide judges it
        return []
    return [image for image in found if len(image.offset) == image.n_columns * image.n_rows]


def is_readable(page: TiffPage) -> bool:
    """Return whether a directory's tiles are 8-bit colour JPEG."""
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
    """One level of an open slide file, whose descriptor stays the caller's; `background` lies beyond the edge. All
    methods may be called from several threads."""

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
        """Whether the file has every tile that the box touches."""
        if self.complete:
            return True
        table = self.image.n_bytes.reshape(self.image.n_rows, self.image.n_columns)
        axes = zip(box[:2], box[2:], self.image.tile_px, strict=True)
        columns, rows = (
            slice(max(0, start) // tile, -(-max(0, start + length) // tile)) for start, length, tile in axes
        )
        return bool(table[rows, columns].all())

    def read(self, box: Box, out: NDArray[np.uint8], *, overlapping: bool = True) -> None:
        """Fill `out` [height, width, 3] with the box, the background's colour beyond the edge.

        Args:
            overlapping: whether other boxes will want the same pixels; if not, only tiles that straddle are kept.

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
        """Let go of the tiles that were kept."""
        self._kept = _Recent()

    def stream(self, box: Box) -> bytes | None:
        """The self-contained JPEG stream of the one whole tile that is the box; None where there is no such tile.

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
        """Self-contained streams of tiles [n] in that order; an empty one where the file does not give it.

        Those that lie together in the file are read from it together: fewer and longer reads.
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
            else:  # it may be the fault of one
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
        """Memory for one tile, the same at each of this thread's calls."""
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
        """What the file has there, which may be less."""
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
    """What one column (or row) of tiles gives to a box."""

    number: int
    of: slice
    """Of the tile's pixels."""
    to: slice
    """Of the box's."""
    whole: bool
    """Whether the box takes all that the tile has of the picture."""


def pieces(start: int, length: int, tile: int, whole: int) -> list[_Piece]:
    """Along one axis: a box from `start` over tiles of a picture `whole` pixels long.

    Example:
        >>> [(piece.number, piece.of, piece.to) for piece in pieces(6, 4, 8, 100)]
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
    """Which of the tiles that lie there in the file are read together: neighbours, in order and near each other."""
    first = 0
    for k in range(1, len(begins) + 1):
        near = k < len(begins) and ends[k - 1] <= begins[k] <= ends[k - 1] + _GAP_BYTES
        if not near or ends[k] - begins[first] > _TOGETHER_BYTES:
            yield slice(first, k)
            first = k


class _Recent:
    """The results of the last keys, made once each also when several threads want one at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[int, Future[NDArray[np.uint8]]] = OrderedDict()

    def get(self, key: int, make: Callable[[int], NDArray[np.uint8]], most: int) -> NDArray[np.uint8]:
        """What `make` returned for the key; its error is kept as well, and at most so many results."""
        with self._lock:
            known = self._results.get(key)
            result = self._results[key] = known or Future()
            self._results.move_to_end(key)
            while len(self._results) > most:
                self._results.popitem(last=False)
        if known is None:
            try:
                result.set_result(make(key))
            except BaseException as error:  # whatever it is, nobody waits for the result any longer
                result.set_exception(error)
                if not isinstance(error, Exception):
                    raise
        if failure := result.exception():
            raise WsiFlError(str(failure))  # a new one: threads must not share a traceback
        return result.result()
