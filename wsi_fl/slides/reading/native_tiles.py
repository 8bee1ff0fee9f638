"""Tiles of a slide, read by offset and decoded strictly: several times faster than OpenSlide's compositing.

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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.formats.dicom_frames import locate_frames
from wsi_fl.slides.reading.formats.dicom_headers import is_dicom, list_volumes
from wsi_fl.slides.reading.tile_codecs import TileCodec, find_codec, find_dicom_codec
from wsi_fl.system import jpeg
from wsi_fl.types import WsiFlError

Box = tuple[int, int, int, int]
"""x, y, width, height in pixels of a level."""

_CACHED_ROWS, _CACHE_BYTES = 6, 192 << 20
"""Limits of the cache of decoded tiles, for resampled patches: 512 px touch four rows of 240-px tiles, and threads may
work in two rows of patches."""
_STRADDLING_ROWS = 3
"""Cached rows of tiles under two rows of patches that do not overlap."""
_MAX_GAP_BYTES, _MAX_READ_BYTES = 4096, 1 << 20
"""Greatest gap between tiles of one read, and size of one read."""
logging.getLogger("tifffile").addHandler(logging.NullHandler())
"""Its warnings do not concern users: OpenSlide judges the file."""


@dataclass(frozen=True)
class TiledImage:
    """One directory of a TIFF, or one DICOM file. Tiles are numbered row by row."""

    path: Path
    size_px: tuple[int, int]
    """(width, height) of the picture; tiles of the last column and row may reach beyond it."""
    tile_px: tuple[int, int]
    """(width, height)"""
    offset: NDArray[np.int64]
    """[n] first byte of each tile in the file."""
    n_bytes: NDArray[np.int64]
    """[n]; 0 for a missing tile."""
    codec: TileCodec

    @cached_property
    def n_columns(self) -> int:
        return -(-self.size_px[0] // self.tile_px[0])

    @cached_property
    def n_rows(self) -> int:
        return -(-self.size_px[1] // self.tile_px[1])


def read_tiled_images(path: Path) -> list[TiledImage]:
    """Return the directories of a TIFF and their SubIFDs, or the files of a DICOM slide, with tiles that `tile_codecs`
    decodes.

    Labels, macros and thumbnails in strips are left out, and so is what cannot be parsed. In DICOM, so are sparse tiles
    and concatenations.
    """
    images = _read_dicom_images(path) if is_dicom(path) else _read_directories(path)
    return [image for image in images if len(image.offset) == image.n_columns * image.n_rows]


def _read_dicom_images(path: Path) -> list[TiledImage]:
    images = []
    for header in list_volumes(path):
        width, height = header.tile_width, header.tile_height
        codec = find_dicom_codec(header.syntax, header.colours)
        if codec is None or header.concatenation or header.organization != "TILED_FULL" or not width * height:
            continue
        is_packed = codec.is_jpeg or codec.is_jpeg2000
        places = locate_frames(header.path, header.frames, width * height * 3, is_packed=is_packed)
        if places is not None:
            images.append(TiledImage(header.path, (header.width, header.height), (width, height), *places, codec))
    return images


def _read_directories(path: Path) -> list[TiledImage]:
    from tifffile import TiffFile, TiffPage

    from wsi_fl.slides.reading.formats.tiff_pages import list_pages

    try:
        with TiffFile(path) as tif:
            return [
                TiledImage(
                    path,
                    (page.imagewidth, page.imagelength),
                    (page.tilewidth, page.tilelength),
                    np.asarray(page.dataoffsets, np.int64),
                    np.asarray(page.databytecounts, np.int64),
                    codec,
                )
                for directory in list_pages(tif)
                for page in (directory, *(directory.pages or ()))
                if isinstance(page, TiffPage) and (codec := find_codec(page)) is not None
            ]
    except Exception:  # a damaged or foreign file: OpenSlide judges it
        return []


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
        self._max_tiles = max(1, _CACHE_BYTES // (height * width * 3))
        self._max_stream_bytes = 4 * height * width * 3 + _MAX_READ_BYTES
        self._cache = _DecodedTileCache()
        self._offset, self._n_bytes = image.offset.tolist(), image.n_bytes.tolist()
        self._scratch = threading.local()
        self.complete = bool(image.n_bytes.all())
        """Whether the file has all tiles."""

    def has_tiles(self, box: Box) -> bool:
        """Return whether the file has all tiles under the box."""
        if self.complete:
            return True
        table = self.image.n_bytes.reshape(self.image.n_rows, self.image.n_columns)
        axes = zip(box[:2], box[2:], self.image.tile_px, strict=True)
        columns, rows = (
            slice(max(0, first) // tile_side, -(-max(0, first + length) // tile_side))
            for first, length, tile_side in axes
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
        if not self._is_within(box):
            out[:] = self.background
        column_parts = split_at_tiles(x, width, tile_width, level_width)
        for row in split_at_tiles(y, height, tile_height, level_height):
            for column in column_parts:
                number = row.number * self.image.n_columns + column.number
                target = out[row.box_slice, column.box_slice]
                if overlapping or not (row.is_whole and column.is_whole):
                    rows = _CACHED_ROWS if overlapping else _STRADDLING_ROWS
                    max_tiles = min(self._max_tiles, rows * self.image.n_columns)
                    target[:] = self._cache.get_or_make(number, self._decode_tile, max_tiles)[
                        row.tile_slice, column.tile_slice
                    ]
                elif target.shape == self.tile_shape and target.flags.c_contiguous:
                    self._decode_tile(number, target)
                else:
                    target[:] = self._decode_tile(number, self.scratch_tile())[row.tile_slice, column.tile_slice]

    def _is_within(self, box: Box) -> bool:
        x, y, width, height = box
        level_width, level_height = self.image.size_px
        return x >= 0 and y >= 0 and x + width <= level_width and y + height <= level_height

    def clear_cache(self) -> None:
        """Empty the cache."""
        self._cache = _DecodedTileCache()

    def read_stream(self, box: Box) -> bytes | None:
        """Return the self-contained JPEG stream of the tile that is the box; None where there is no such tile, or it
        has another codec.

        Raises:
            WsiFlError: when the tile is damaged.
        """
        x, y, width, height = box
        tile_width, tile_height = self.image.tile_px
        is_tile = (width, height) == self.image.tile_px and x % tile_width == 0 and y % tile_height == 0
        if not self.image.codec.is_jpeg or not is_tile or not self._is_within(box) or not self.has_tiles(box):
            return None
        number = y // tile_height * self.image.n_columns + x // tile_width
        try:
            stream = self.image.codec.complete_jpeg(self._read_tile_stream(number))
            jpeg.check_stream(stream)
            if jpeg.read_size(stream) != (height, width):
                raise WsiFlError("its picture has another size")
        except WsiFlError as error:
            raise self._tile_error(number, error) from None
        return bytes(stream)

    def read_streams(self, numbers: NDArray[np.int64]) -> Iterator[jpeg.Stream]:
        """Yield the streams of tiles [n] in that order; an empty one where the file lacks a tile.

        Neighbours in the file are read at once: fewer and longer reads.
        """
        first_bytes = self.image.offset[numbers]
        begins, ends = first_bytes.tolist(), (first_bytes + self.image.n_bytes[numbers]).tolist()
        for run in _group_neighbors(begins, ends):
            yield from self._read_run(begins[run], ends[run])

    def _read_run(self, begins: list[int], ends: list[int]) -> Iterator[jpeg.Stream]:
        start = begins[0]
        try:
            buffer = memoryview(self._read_bytes(start, ends[-1]))
        except WsiFlError:
            if len(begins) == 1:
                yield b""
            else:  # only one of them may be damaged
                for begin, end in zip(begins, ends, strict=True):
                    yield from self._read_run([begin], [end])
            return
        for begin, end in zip(begins, ends, strict=True):
            yield buffer[begin - start : end - start] if end - start <= len(buffer) else b""

    def scratch_tile(self) -> NDArray[np.uint8]:
        """Return memory for one tile, the same for all calls of a thread."""
        tile: NDArray[np.uint8] | None = getattr(self._scratch, "tile", None)
        if tile is None:
            tile = self._scratch.tile = np.empty(self.tile_shape, np.uint8)
        return tile

    def _decode_tile(self, number: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        out = np.empty(self.tile_shape, np.uint8) if out is None else out
        try:
            return self.image.codec.decode_tile(self._read_tile_stream(number), out)
        except WsiFlError as error:
            raise self._tile_error(number, error) from None

    def _read_tile_stream(self, number: int) -> jpeg.Stream:
        begin, n_bytes = self._offset[number], self._n_bytes[number]
        stream = self._read_bytes(begin, begin + n_bytes)
        if len(stream) < n_bytes:
            raise WsiFlError("the file ends within it")
        return stream

    def _read_bytes(self, begin: int, end: int) -> bytes:
        """Read bytes of the file, fewer at its end."""
        if end - begin > self._max_stream_bytes:
            raise WsiFlError(f"it would take {end - begin} bytes")
        try:
            return os.pread(self._file, end - begin, begin)
        except (OSError, OverflowError) as error:
            raise WsiFlError(str(error)) from None

    def _tile_error(self, number: int, error: WsiFlError) -> WsiFlError:
        row, column = divmod(number, self.image.n_columns)
        return WsiFlError(f"native tile in column {column}, row {row} is damaged: {error}")


class _Piece(NamedTuple):
    """The part of a box in one column (or row) of tiles."""

    number: int
    tile_slice: slice
    """Pixels of the tile."""
    box_slice: slice
    """Pixels of the box."""
    is_whole: bool
    """Whether the box has all pixels of the tile within the picture."""


def split_at_tiles(start: int, length: int, tile_side: int, extent: int) -> list[_Piece]:
    """Split one axis of a box from `start` at the tiles of a picture `extent` pixels long.

    Example:
        >>> [(piece.number, piece.tile_slice, piece.box_slice) for piece in split_at_tiles(6, 4, 8, 100)]
        [(0, slice(6, 8, None), slice(0, 2, None)), (1, slice(0, 2, None), slice(2, 4, None))]
    """
    parts = []
    end = min(start + length, extent)
    position = max(start, 0)
    while position < end:
        number, offset = divmod(position, tile_side)
        n = min(tile_side - offset, end - position)
        is_whole = offset == 0 and (n == tile_side or position + n == extent)
        parts.append(_Piece(number, slice(offset, offset + n), slice(position - start, position - start + n), is_whole))
        position += n
    return parts


def _group_neighbors(begins: Sequence[int], ends: Sequence[int]) -> Iterator[slice]:
    """Yield the tiles for each read: neighbours in the file, in order and near each other."""
    first = 0
    for k in range(1, len(begins) + 1):
        is_near = k < len(begins) and ends[k - 1] <= begins[k] <= ends[k - 1] + _MAX_GAP_BYTES
        if not is_near or ends[k] - begins[first] > _MAX_READ_BYTES:
            yield slice(first, k)
            first = k


class _DecodedTileCache:
    """A thread-safe cache of the last results by key; each is made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[int, Future[NDArray[np.uint8]]] = OrderedDict()

    def get_or_make(self, key: int, make: Callable[[int], NDArray[np.uint8]], max_results: int) -> NDArray[np.uint8]:
        """Return the cached result of a key, or make it; errors are cached too, and `max_results` results are kept."""
        with self._lock:
            pending = self._results.get(key)
            result = self._results[key] = pending or Future()
            self._results.move_to_end(key)
            while len(self._results) > max_results:
                self._results.popitem(last=False)
        if pending is None:
            try:
                result.set_result(make(key))
            except BaseException as error:  # other threads must not wait for the result any longer
                result.set_exception(error)
                if not isinstance(error, Exception):
                    raise
        if failure := result.exception():
            raise WsiFlError(str(failure))  # a new one: threads must not share a traceback
        return result.result()
