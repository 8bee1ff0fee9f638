"""A slide's own JPEG tiles, read by offset and decoded strictly: several times faster than OpenSlide's compositing.

OpenSlide stays the authority: `trusted` hands out only levels that were found to give its pixels.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl import jpeg
from wsi_fl.slides.tiff import TiledImage
from wsi_fl.types import WsiFlError

Box = tuple[int, int, int, int]
"""x, y, width, height in pixels of a level."""

_KEPT_ROWS, _KEPT_BYTES = 6, 192 << 20
"""Decoded tiles that are kept for patches to come. A 512-px patch touches four rows of 240-px tiles, and threads may
work in two rows of patches."""
_STRADDLING_ROWS = 3
"""Of these, so many lie under two rows of patches that do not overlap."""
_SCRATCH_BYTES = 400_000
"""Tiles decoded before they are copied; more would not fit the cache of a core."""


class NativeLevel:
    """One level of an open slide file. All methods may be called from several threads.

    Args:
        file: its descriptor, which stays the caller's.
        image: where the tiles lie.
        background: RGB of what lies beyond the edge.
    """

    def __init__(self, file: int, image: TiledImage, background: tuple[int, int, int]) -> None:
        self.image = image
        self._file = file
        self._background = np.array(background, np.uint8)
        width, height = image.tile_px
        self._tile_shape = (height, width, 3)
        self._most = max(1, _KEPT_BYTES // (height * width * 3))
        self._kept = _Recent()
        self._offset, self._n_bytes = image.offset.tolist(), image.n_bytes.tolist()
        self._scratch = threading.local()
        self._complete = bool(image.n_bytes.all())

    def holds(self, box: Box) -> bool:
        """Whether the file has every tile that the box touches."""
        if self._complete:
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
        self.read_row(box, out[None], overlapping=overlapping)

    def read_row(self, box: Box, out: NDArray[np.uint8], *, overlapping: bool = True) -> None:
        """Fill `out` [k, height, width, 3] with k boxes side by side, of which `box` is the first; see `read`.

        A tile is decoded once for all of them, and while it is at hand.
        """
        x, y, width, height = box
        level_width, level_height = self.image.size_px
        if x < 0 or y < 0 or x + width * len(out) > level_width or y + height > level_height:
            out[:] = self._background
        across = _columns(x, width, len(out), self.image.tile_px[0], level_width)
        whole_tiles = not overlapping and self._whole_tiles(x, width, len(out))
        for row in _pieces(y, height, self.image.tile_px[1], level_height):
            first = row.number * self.image.n_columns
            if whole_tiles and row.whole:
                self._read_tiles(first + across[0][0], row, out)
                continue
            for number, all_of_it, parts in across:
                rows = _KEPT_ROWS if overlapping else 0 if all_of_it and row.whole else _STRADDLING_ROWS
                tile = self._tile(first + number, rows)
                for k, column in parts:
                    out[k, row.to, column.to] = tile[row.of, column.of]

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
        level_width, level_height = self.image.size_px
        on_lattice = x >= 0 and y >= 0 and x % tile_width == 0 and y % tile_height == 0
        within = x + width <= level_width and y + height <= level_height
        if (width, height) != self.image.tile_px or not on_lattice or not within or not self.holds(box):
            return None
        number = y // tile_height * self.image.n_columns + x // tile_width
        try:
            stream = self._stream(number)
            jpeg.check(stream)
            if jpeg.size(stream) != (height, width):
                raise WsiFlError("its picture has another size")
        except WsiFlError as error:
            raise self._damaged(number, error) from None
        return stream

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

    def _whole_tiles(self, x: int, width: int, n: int) -> bool:
        """Whether each of n boxes, from x on and so wide, covers whole columns of tiles."""
        tile, level = self.image.tile_px[0], self.image.size_px[0]
        return x >= 0 and x % tile == 0 and width % tile == 0 and x + n * width <= level

    def _read_tiles(self, number: int, row: _Piece, out: NDArray[np.uint8]) -> None:
        """Fill what one row of tiles, from this one on, gives to out [k, height, width, 3] that covers whole ones.

        Neighbours are copied together, a few at a time: memory that is written from front to back takes half the
        time of memory that is written by columns.
        """
        height, width, _ = self._tile_shape
        across = out.shape[2] // width
        together = min(across, max(1, _SCRATCH_BYTES // (height * width * 3)))
        numbers = iter(range(number, number + len(out) * across))
        for patch in out[:, row.to]:
            if patch.shape == self._tile_shape and patch.flags.c_contiguous:
                self._decode(next(numbers), patch)
                continue
            columns = patch.reshape(len(patch), across, width * 3).swapaxes(0, 1)
            for first in range(0, across, together):
                some = columns[first : first + together]
                tiles = self._room(len(some))
                for tile in tiles:
                    self._decode(next(numbers), tile)
                some[:] = tiles[:, row.of].reshape(some.shape)

    def _tile(self, number: int, rows: int) -> NDArray[np.uint8]:
        """uint8 in the tile's shape, kept with so many rows of others; without any good until this thread's next
        call."""
        if rows:
            return self._kept.get(number, self._decode, min(self._most, rows * self.image.n_columns))
        return self._decode(number, self._room(1)[0])

    def _room(self, n: int) -> NDArray[np.uint8]:
        """For n tiles, the same at each of this thread's calls."""
        room: NDArray[np.uint8] | None = getattr(self._scratch, "tiles", None)
        if room is None or len(room) < n:
            room = self._scratch.tiles = np.empty((n, *self._tile_shape), np.uint8)
        return room[:n]

    def _decode(self, number: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        out = np.empty(self._tile_shape, np.uint8) if out is None else out
        try:
            return jpeg.decode(self._stream(number), out)
        except WsiFlError as error:
            raise self._damaged(number, error) from None

    def _stream(self, number: int) -> bytes:
        n_bytes = self._n_bytes[number]
        stream = os.pread(self._file, n_bytes, self._offset[number])
        if len(stream) < n_bytes:
            raise WsiFlError("the file ends within it")
        return jpeg.complete(stream, self.image.tables, rgb=self.image.rgb)

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
    to_end: bool
    """Whether it reaches the end of what the tile has of the picture."""

    @property
    def whole(self) -> bool:
        """Whether the box takes all that the tile has of the picture."""
        return self.of.start == 0 and self.to_end


def _pieces(start: int, length: int, tile: int, whole: int) -> list[_Piece]:
    """Along one axis: a box from `start` over tiles of a picture `whole` pixels long."""
    pieces = []
    end = min(start + length, whole)
    at = max(start, 0)
    while at < end:
        number, within = divmod(at, tile)
        n = min(tile - within, end - at)
        to_end = within + n == tile or at + n == whole
        pieces.append(_Piece(number, slice(within, within + n), slice(at - start, at - start + n), to_end))
        at += n
    return pieces


def _columns(
    start: int, length: int, n: int, tile: int, extent: int
) -> list[tuple[int, bool, list[tuple[int, _Piece]]]]:
    """Along one axis, of n boxes one after the other: (number of a tile, whether they take all of it, what each gets).

    Example:
        >>> [(number, whole, [k for k, _ in parts]) for number, whole, parts in _columns(0, 6, 2, 4, 100)]
        [(0, True, [0]), (1, True, [0, 1]), (2, True, [1])]
    """
    found: dict[int, list[tuple[int, _Piece]]] = {}
    for k in range(n):
        for piece in _pieces(start + k * length, length, tile, extent):
            found.setdefault(piece.number, []).append((k, piece))
    return [
        (number, parts[0][1].of.start == 0 and parts[-1][1].to_end, parts) for number, parts in found.items()
    ]


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
