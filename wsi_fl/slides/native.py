"""A slide's own JPEG tiles, read by offset and decoded strictly: several times faster than OpenSlide's compositing.

OpenSlide stays the authority: `trusted` hands out only levels that were found to give its pixels.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl import jpeg
from wsi_fl.slides.tiff import TiledImage
from wsi_fl.types import WsiFlError

Box = tuple[int, int, int, int]
"""x, y, width, height in pixels of a level."""

_KEPT_ROWS, _KEPT_BYTES = 6, 192 << 20
"""Decoded tiles that are kept for boxes to come, as of resampled patches: 512 px touch four rows of 240-px tiles, and
threads may work in two rows of patches."""
_STRADDLING_ROWS = 3
"""Of these, so many lie under two rows of patches that do not overlap."""
_GAP_BYTES, _TOGETHER_BYTES = 4096, 1 << 20
"""Between tiles that are read from the file together, and of all of them."""


class NativeLevel:
    """One level of an open slide file. All methods may be called from several threads.

    Args:
        file: its descriptor, which stays the caller's.
        image: where the tiles lie.
        background: RGB of what lies beyond the edge.

    Attributes:
        complete: whether the file has all tiles.
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

    def holds(self, box: Box) -> bool:
        """Whether the file has every tile that the box touches."""
        if self.complete:
            return True
        columns, rows = self._span(box)
        table = self.image.n_bytes.reshape(self.image.n_rows, self.image.n_columns)
        return bool(table[rows.start : rows.stop, columns.start : columns.stop].all())

    def read(self, box: Box, out: NDArray[np.uint8], *, overlapping: bool = True) -> None:
        """Fill `out` [height, width, 3] with the box, the background's colour beyond the edge.

        Args:
            box: may reach over the edges.
            overlapping: whether other boxes will want the same pixels; if not, only tiles that straddle are kept.

        Raises:
            WsiFlError: when a tile in the box is damaged.
        """
        x, y, width, height = box
        level_width, level_height = self.image.size_px
        if not self.within(box):
            out[:] = self.background
        across = pieces(x, width, self.image.tile_px[0], level_width)
        for row in pieces(y, height, self.image.tile_px[1], level_height):
            for column in across:
                number = row.number * self.image.n_columns + column.number
                part = out[row.to, column.to]
                if overlapping:
                    part[:] = self._kept_tile(number, _KEPT_ROWS)[row.of, column.of]
                elif not (row.whole and column.whole):
                    part[:] = self._kept_tile(number, _STRADDLING_ROWS)[row.of, column.of]
                elif part.shape == self.tile_shape and part.flags.c_contiguous:
                    self._decode(number, part)
                else:
                    part[:] = self._decode(number, self._room())[row.of, column.of]

    def within(self, box: Box) -> bool:
        """Whether no part of the box lies beyond the edge."""
        x, y, width, height = box
        level_width, level_height = self.image.size_px
        return x >= 0 and y >= 0 and x + width <= level_width and y + height <= level_height

    def forget(self) -> None:
        """Lets go of the tiles that were kept."""
        self._kept = _Recent()

    def stream(self, box: Box) -> bytes | None:
        """The self-contained JPEG stream of the one whole tile that is the box; None where there is no such tile.

        Raises:
            WsiFlError: when the tile is damaged.
        """
        x, y, width, height = box
        tile_width, tile_height = self.image.tile_px
        is_tile = (width, height) == self.image.tile_px and x % tile_width == 0 and y % tile_height == 0
        if not is_tile or not self.within(box) or not self.holds(box):
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

    def _span(self, box: Box) -> tuple[range, range]:
        """The columns and rows of tiles that a box touches."""
        columns, rows = (
            range(
                max(0, start) // tile, -(-max(0, min(start + length, whole)) // tile) if start < whole else 0
            )
            for start, length, whole, tile in zip(
                box[:2], box[2:], self.image.size_px, self.image.tile_px, strict=True
            )
        )
        return columns, rows

    def _kept_tile(self, number: int, rows: int) -> NDArray[np.uint8]:
        """uint8 in the tile's shape, kept with so many rows of others."""
        return self._kept.get(number, self._decode, min(self._most, rows * self.image.n_columns))

    def _room(self) -> NDArray[np.uint8]:
        """For one tile; the same at each of this thread's calls."""
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
        begin, end = self._place(number)
        return self._whole_stream(self._bytes(begin, end), end - begin)

    def _place(self, number: int) -> tuple[int, int]:
        """Where a tile's bytes begin and end in the file."""
        begin = self._offset[number]
        return begin, begin + self._n_bytes[number]

    def _bytes(self, begin: int, end: int) -> bytes:
        """What the file has there; it may be less.

        Raises:
            WsiFlError: when it cannot be read, or is more than any tile takes.
        """
        if end - begin > self._most_bytes:
            raise WsiFlError(f"it would take {end - begin} bytes")
        try:
            return os.pread(self._file, end - begin, begin)
        except (OSError, OverflowError) as error:
            raise WsiFlError(str(error)) from None

    def _whole_stream(self, stream: jpeg.Stream, n_bytes: int) -> jpeg.Stream:
        """The self-contained stream of a tile from what the file has of it."""
        if len(stream) < n_bytes:
            raise WsiFlError("the file ends within it")
        return jpeg.complete(stream, self.image.tables, rgb=self.image.rgb)

    def _damaged(self, number: int, error: WsiFlError) -> WsiFlError:
        row, column = divmod(number, self.image.n_columns)
        return WsiFlError(f"native tile in column {column}, row {row} is damaged: {error}")


class TileReader:
    """Decodes tiles of a level in the order in which they are named; one thread's.

    Those that lie together in the file are read from it together: fewer and longer reads.

    Args:
        level: of an open slide.
        numbers: of the tiles, in that order.
    """

    def __init__(self, level: NativeLevel, numbers: Sequence[int]) -> None:
        self._level = level
        self._numbers = numbers
        self._next = 0
        self._start = self._end = 0
        self._bytes = memoryview(b"")

    def decode(self, out: NDArray[np.uint8]) -> None:
        """The next tile, into a contiguous array of the tiles' shape.

        Raises:
            WsiFlError: when it is damaged; the one after it can be had all the same.
        """
        level, number = self._level, self._numbers[self._next]
        begin, end = level._place(number)
        try:
            if begin < self._start or end > self._end:
                self._read_ahead(begin, end)
            stream = self._bytes[begin - self._start : end - self._start]
            jpeg.decode(level._whole_stream(stream, end - begin), out)
        except WsiFlError as error:
            raise level._damaged(number, error) from None
        finally:
            self._next += 1

    def _read_ahead(self, begin: int, first_end: int) -> None:
        """The bytes of the next tile, which lie there, and of those that follow it closely in the file."""
        end = first_end
        for number in self._numbers[self._next + 1 :]:
            start, stop = self._level._place(number)
            if not end <= start <= end + _GAP_BYTES or stop - begin > _TOGETHER_BYTES:
                break
            end = stop
        try:
            self._bytes = memoryview(self._level._bytes(begin, end))
        except WsiFlError:  # which may be another's fault
            end = first_end
            self._bytes = memoryview(self._level._bytes(begin, end))
        self._start, self._end = begin, end


class Piece(NamedTuple):
    """What one column (or row) of tiles gives to a box."""

    number: int
    of: slice
    """Of the tile's pixels."""
    to: slice
    """Of the box's."""
    to_end: bool
    """Whether it reaches the end of what the tile has of the picture."""

    @property
    def whole(self) -> bool:
        """Whether the box takes all that the tile has of the picture."""
        return self.of.start == 0 and self.to_end


def pieces(start: int, length: int, tile: int, whole: int) -> list[Piece]:
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
        to_end = within + n == tile or at + n == whole
        found.append(Piece(number, slice(within, within + n), slice(at - start, at - start + n), to_end))
        at += n
    return found


class _Made:
    """One result; whoever makes it holds the lock."""

    __slots__ = ("lock", "value")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: NDArray[np.uint8] | Exception | None = None


class _Recent:
    """The results of the last keys, made once each also when several threads want one at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[int, _Made] = OrderedDict()

    def get(self, key: int, make: Callable[[int], NDArray[np.uint8]], most: int) -> NDArray[np.uint8]:
        """What `make` returned for the key; its error is kept as well, and at most so many results."""
        known = self._results.get(key)
        if known is not None and isinstance(known.value, np.ndarray):  # most are: no lock for them
            return known.value
        with self._lock:
            result = self._results.get(key)
            if result is None:
                mine = self._results[key] = _Made()
                mine.lock.acquire()
                while len(self._results) > most:
                    self._results.popitem(last=False)
            else:
                self._results.move_to_end(key)
        if result is None:
            result = mine
            try:
                result.value = make(key)
            except Exception as error:
                result.value = error
            finally:
                result.lock.release()
        elif result.value is None:
            with result.lock:
                pass
        if isinstance(result.value, np.ndarray):
            return result.value
        raise WsiFlError(str(result.value))  # a new one: threads must not share a traceback
