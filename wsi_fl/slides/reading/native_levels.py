"""The levels of a slide whose tiles decode to the pixels of its reader, and so may be read natively."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.native_tiles import Box, NativeLevel, TiledImage, read_tiled_images
from wsi_fl.types import WsiFlError

_VENDORS = {"aperio", "dicom", "generic-tiff", "philips", "ome-tiff", "tiled tiff"}
"""Vendors with tiles side by side; those of others overlap or belong to several scans. The last two are read by
`formats`, not by OpenSlide."""
_WINDOW_PX = 128
_MAX_DIFFERENCE, _MAX_MEAN_DIFFERENCE = 2, 0.1
"""Grey levels; decoders differ in rounding."""
_UNREAD_TILES = "Invalid tile byte count"
"""In OpenSlide's error for uncompressed tiles whose bytes are no multiple of 1024 (findings/uncompressed_tiles.sh)."""

_Pixels = NDArray[np.uint8]


class TrustedLevels:
    """The levels of one slide; each is compared at its first use with its reader, OpenSlide or one of `formats`.

    Sizes and properties are as the reader lists them. `reference` returns its pixels of a box of a level, None for a
    box that is not on its pixels. A level that differs is None, or a WsiFlError where it is `required`.
    """

    def __init__(
        self,
        path: Path,
        level_sizes_px: tuple[tuple[int, int], ...],
        properties: Mapping[str, str],
        background: tuple[int, int, int],
        reference: Callable[[int, Box], _Pixels | None],
        *,
        required: bool,
    ) -> None:
        self._path, self._background = path, background
        self._reference, self._required = reference, required
        images = read_tiled_images(path) if properties.get("openslide.vendor") in _VENDORS else []
        self._images = [_find_image(images, k, size, properties) for k, size in enumerate(level_sizes_px)]
        self._levels: dict[int, NativeLevel | None] = {}
        self._lock = threading.Lock()
        self._files = {image.path: image.path.open("rb", buffering=0) for image in filter(None, self._images)}
        try:
            self.find_level(0)
        except WsiFlError:
            self.close()
            raise

    def find_level(self, number: int) -> NativeLevel | None:
        """Return a level; None if the reader has to read it."""
        if number not in self._levels:
            with self._lock:
                if number not in self._levels:
                    self._levels[number] = self._check_level(number)
        return self._levels[number]

    def close(self) -> None:
        """Close the files and empty the caches of decoded tiles, which references to the slide would keep alive."""
        for file in self._files.values():
            file.close()
        for level in self._levels.values():
            if level is not None:
                level.clear_cache()

    def _check_level(self, number: int) -> NativeLevel | None:
        image = self._images[number]
        if image is None:
            reason: str | None = "it is not made of one layer of colour tiles with a codec that is decoded here"
        else:
            level = NativeLevel(self._files[image.path].fileno(), image, self._background)
            reason = _describe_difference(level, lambda box: self._reference(number, box))
            if reason is None:
                return level
        if self._required:
            raise WsiFlError(
                f"{self._path.name}: reader = native cannot read level {number}: {reason}; use auto or openslide"
            )
        return None


def _find_image(
    images: Sequence[TiledImage], level: int, size_px: tuple[int, int], properties: Mapping[str, str]
) -> TiledImage | None:
    """Return the only directory with a level's size and, where the reader states it, its tiling, or None."""
    keys = [f"openslide.level[{level}].tile-{side}" for side in ("width", "height")]
    matches = [
        image
        for image in images
        if image.size_px == size_px
        and all(properties.get(key, str(side)) == str(side) for key, side in zip(keys, image.tile_px, strict=True))
    ]
    return matches[0] if len(matches) == 1 else None


def _describe_difference(level: NativeLevel, reference: Callable[[Box], _Pixels | None]) -> str | None:
    """Return why a level must not be read natively, or None.

    Compares windows at the first, the middle and the last tile, the latter across the edge. A window that either side
    cannot decode (the tile may be damaged) is replaced by another.
    """
    n_compared = 0
    for boxes in _comparison_windows(level.image):
        for box in boxes:
            if not level.has_tiles(box):
                continue
            window = np.empty((box[3], box[2], 3), np.uint8)
            is_plain, expected = False, None
            try:
                expected = reference(box)
            except WsiFlError as error:
                is_plain = level.image.codec.is_uncompressed and _UNREAD_TILES in str(error)
            try:
                level.read(box, window, overlapping=False)
            except WsiFlError:
                continue
            if is_plain:  # these bytes are the pixels
                n_compared += 1
                break
            if expected is None:
                continue
            difference = np.abs(window.astype(np.int16) - expected)
            if difference.max() > _MAX_DIFFERENCE or difference.mean() >= _MAX_MEAN_DIFFERENCE:
                return f"its tiles decode to other pixels than the reader's (by up to {difference.max()} grey levels)"
            n_compared += 1
            break
    return None if n_compared else "no tile could be compared with the reader's"


def _comparison_windows(image: TiledImage) -> Iterator[list[Box]]:
    """Yield three windows to compare, each with substitutes."""
    (width, height), (tile_width, tile_height) = image.size_px, image.tile_px
    side = min(_WINDOW_PX, tile_width, tile_height)
    n_columns, n = image.n_columns, image.n_columns * image.n_rows
    middle = image.n_rows // 2 * n_columns + n_columns // 2
    numbers = (range(3), range(middle, middle + 3), range(n - 1, n - 4, -1))
    edge_corner = (max(0, width - side // 2), max(0, height - side // 2))
    for k, tile_numbers in enumerate(numbers):
        tiles = [divmod(number, n_columns) for number in tile_numbers if 0 <= number < n]
        corners = [(column * tile_width, row * tile_height) for row, column in tiles]
        yield [(*corner, side, side) for corner in ([edge_corner, *corners] if k == 2 else corners)]
