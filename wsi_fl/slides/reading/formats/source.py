"""The interface of readers for `Slide`, and sources from the levels of a library."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.system.extras import explain_missing
from wsi_fl.types import UsageError, WsiFlError, single_line

_HEAD_BYTES = 1 << 16

Mpp = tuple[float | None, float | None]
"""µm per level-0 pixel (x, y); None where unknown."""
_ReadLevel = Callable[[int, tuple[int, int], tuple[int, int]], NDArray[np.uint8]]
"""(level, (x, y) in its pixels, (width, height)) → uint8[height, width, 3], within the level."""
_FindGaps = Callable[[int, tuple[int, int], tuple[int, int]], NDArray[np.bool_]]
"""As `_ReadLevel` → bool[height, width]."""
Rgb = tuple[int, int, int]
_PRIMARIES = ("FF0000", "00FF00", "0000FF")
_UNSET_COLORS = ("", "FFFFFF")
"""White is a channel's colour in OME-XML by default, and in Zarrs of large_image."""
_PRIMARY_NAMES = (("red", "green", "blue"), ("r", "g", "b"))


class SourceError(WsiFlError):
    """A region of a source is unreadable."""


class PixelSource(Protocol):
    """The interface of readers for `Slide`, that of OpenSlide's handle."""

    dimensions: tuple[int, int]
    level_dimensions: tuple[tuple[int, int], ...]
    level_downsamples: tuple[float, ...]
    properties: Mapping[str, str]

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """Return RGBA pixels from a level-0 corner on, transparent beyond the slide."""
        ...

    def close(self) -> None: ...


class Levels:
    """A source with a function that reads boxes of its levels.

    Args:
        sizes: (width, height) of each level, the largest first.
        read: reads a box of a level; several threads may call it.
        vendor, quickhash: name of the format, and a digest of the content.
        close: closes the file.
        fill: the colour of pixels that are not in the file; None if they are transparent.
        lacks: returns where the file has no pixels.
        tiles_px: (width, height) of the tiles of each level, if it has any.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        read: _ReadLevel,
        *,
        vendor: str,
        mpp: Mpp,
        quickhash: str,
        close: Callable[[], None] = lambda: None,
        fill: Rgb | None = None,
        lacks: _FindGaps | None = None,
        tiles_px: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.level_dimensions = tuple((int(w), int(h)) for w, h in sizes)
        self.dimensions = self.level_dimensions[0]
        width, height = self.dimensions
        self.level_downsamples = tuple((width / w + height / h) / 2 for w, h in self.level_dimensions)
        properties = {"openslide.vendor": vendor, "openslide.quickhash-1": quickhash}
        self.properties: Mapping[str, str] = properties | name_mpp_properties(mpp)
        self._read_box, self.close, self.fill, self._find_gaps = read, close, fill, lacks
        self.tiles_px = tuple(tiles_px)

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """See `PixelSource`.

        Raises:
            SourceError: when the file is damaged there.
        """
        corner = [round(v / self.level_downsamples[level]) for v in location]
        x, y = (max(0, v) for v in corner)
        ends = zip(corner, size, self.level_dimensions[level], strict=True)
        x_max, y_max = (min(v + s, limit) for v, s, limit in ends)
        region = Image.new("RGBA", size)
        if x < x_max and y < y_max:
            try:
                pixels = self._read_box(level, (x, y), (x_max - x, y_max - y))
            except MemoryError:
                raise
            except Exception as error:  # each library has its own
                raise SourceError(single_line(error)) from None
            part = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGBA")
            if self._find_gaps is not None:
                gaps = self._find_gaps(level, (x, y), (x_max - x, y_max - y))
                part.paste((0, 0, 0, 0), mask=Image.fromarray(gaps))
            region.paste(part, (x - corner[0], y - corner[1]))
        return region


def build_array_levels(arrays: Sequence[Any], axes: str, **facts: Any) -> Levels:
    """Return a source of arrays, as Zarr's, one for each level.

    Args:
        axes: their axes, a letter each: x, y and c are read, of others the first item; without c they are grey.
        facts: as for `Levels`.
    """
    is_gray = "c" not in axes

    def read_box(level: int, corner: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        slices = {
            "x": slice(corner[0], corner[0] + size[0]),
            "y": slice(corner[1], corner[1] + size[1]),
            "c": slice(0, 3),
        }
        pixels = np.asarray(arrays[level][tuple(slices.get(axis, 0) for axis in axes)])
        order = [axis for axis in axes if axis in slices]
        if is_gray:
            return np.repeat(pixels if order == ["y", "x"] else pixels.T, 3).reshape(size[1], size[0], 3)
        return np.moveaxis(pixels, [order.index(axis) for axis in "yxc"], [0, 1, 2])

    def picture_size(sides: Sequence[int]) -> tuple[int, int]:
        return int(sides[axes.index("x")]), int(sides[axes.index("y")])

    tiles = [picture_size(getattr(array, "chunks", array.shape)) for array in arrays]
    return Levels([picture_size(array.shape) for array in arrays], read_box, tiles_px=tiles, **facts)


def is_red_green_blue(names: Sequence[str], colors: Sequence[str]) -> bool:
    """Return whether three channels may be red, green and blue, by their names and colours; "" for unknown.

    Args:
        names: such as "Red" or "DAPI"; names that differ only by a number are neutral.
        colors: six hexadecimal digits each; white is unknown.

    Example:
        >>> is_red_green_blue(["Channel 0", "Channel 1", "Channel 2"], ["", "", ""])
        True
        >>> is_red_green_blue(["DAPI", "FITC", "TRITC"], ["FF0000", "00FF00", "0000FF"])
        False
    """
    plain = tuple(name.strip().lower() for name in names)
    is_neutral = len({name.strip("0123456789 _:-#") for name in plain}) <= 1
    is_colored = all(color in (*_UNSET_COLORS, primary) for color, primary in zip(colors, _PRIMARIES, strict=False))
    return is_colored and (is_neutral or plain in _PRIMARY_NAMES)


def blend_rgb(region: Image.Image, background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return an RGBA region as writable uint8[h, w, 3] over the background; opaque ones are not blended."""
    pixels = np.frombuffer(region.tobytes(), "<u4")  # alpha is the highest byte
    if pixels.size and int(pixels.min()) < 0xFF000000:
        region = Image.alpha_composite(Image.new("RGBA", region.size, (*background, 255)), region)
    packed = bytearray(region.tobytes("raw", "RGB"))
    return np.frombuffer(packed, np.uint8).reshape(region.height, region.width, 3)


def name_mpp_properties(mpp: Mpp) -> dict[str, str]:
    """Return µm per pixel as properties of OpenSlide."""
    return {f"openslide.mpp-{axis}": repr(value) for axis, value in zip("xy", mpp, strict=True) if value}


def import_extra(module: str, extra: str, path: Path) -> Any:
    """Import a library of an extra; UsageError names the extra if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise
        raise UsageError(f"{path.name}: {explain_missing(extra)}") from None


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's size, first and last bytes, a fast identifier of a slide."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(_HEAD_BYTES)
        file.seek(max(0, size - _HEAD_BYTES))
        return hashlib.sha256(str(size).encode() + head + file.read(_HEAD_BYTES)).hexdigest()
