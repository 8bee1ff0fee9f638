"""Slides as arrays. The only module that knows OpenSlide."""

from __future__ import annotations

import threading
from math import ceil, sqrt
from pathlib import Path
from types import TracebackType

import numpy as np
import openslide
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.types import WsiFlError

_PLAUSIBLE_MPP = (0.05, 20.0)
_ANISOTROPY = 0.05
_LEVEL_TOLERANCE = 0.01
_UNIT_UM = {"centimeter": 1e4, "inch": 25_400.0}
_STRIP_PX = 1 << 24
"""Most pixels held at once while a thumbnail is made of a level without smaller neighbours."""


class Slide:
    """A whole-slide image; use it as a context manager. Reads may come from several threads.

    Attributes:
        path: the file.
        size_l0: (width, height) in level-0 pixels.
        vendor: OpenSlide's name of the format.
        quickhash: OpenSlide's quickhash-1, or "".

    Raises:
        WsiFlError: when the file is missing, unreadable or of an unknown format.
    """

    def __init__(self, path: Path, mpp_override: float | None = None) -> None:
        self.path = path
        self._override = mpp_override
        self._lock = threading.Lock()
        self._handle = _open(path)
        self.size_l0: tuple[int, int] = self._handle.dimensions
        self.level_downsamples: tuple[float, ...] = self._handle.level_downsamples
        self._properties = dict(self._handle.properties)
        self.vendor = self._properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")
        self.quickhash = self._properties.get(openslide.PROPERTY_NAME_QUICKHASH1, "")

    def __enter__(self) -> Slide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._handle.close()

    @property
    def mpp(self) -> float:
        """Micrometres per level-0 pixel: the override, else what the file says.

        Raises:
            WsiFlError: when it is not to be found, implausible, or differs between x and y by over 5 %.
        """
        if self._override is not None:
            return self._override
        x, y = _stated_mpp(self._properties)
        low, high = _PLAUSIBLE_MPP
        if x is None or y is None or not (low <= x <= high and low <= y <= high):
            said = "" if x is None else f" (it says {x:g})"
            raise WsiFlError(
                f"{self.path.name}: no µm per pixel in the file{said}; give it as mpp_override in the site's file"
            )
        if abs(x - y) > _ANISOTROPY * max(x, y):
            raise WsiFlError(
                f"{self.path.name}: {x:g} µm per pixel across but {y:g} down; pixels must be square"
            )
        return sqrt(x * y)

    def thumbnail(self, max_px: int = 1024) -> tuple[NDArray[np.uint8], float]:
        """(uint8[h, w, 3] with the longer side at most max_px, level-0 pixels per thumbnail pixel)."""
        width, height = self.size_l0
        downsample = max(width, height) / max_px if max(width, height) > max_px else 1.0
        size = (max(1, round(width / downsample)), max(1, round(height / downsample)))
        level = self._level_for(downsample)
        level_width, level_height = self._handle.level_dimensions[level]
        scale = self.level_downsamples[level]
        rows_out = max(1, min(size[1], int(_STRIP_PX / level_width / (downsample / scale))))
        out = np.empty((size[1], size[0], 3), np.uint8)
        for top in range(0, size[1], rows_out):
            bottom = min(top + rows_out, size[1])
            first = int(top * level_height / size[1])
            last = min(ceil(bottom * level_height / size[1]), level_height)
            strip = self._region((0, round(first * scale)), level, (level_width, last - first))
            box = (
                0.0,
                top * level_height / size[1] - first,
                float(level_width),
                min(bottom * level_height / size[1] - first, float(last - first)),
            )
            out[top:bottom] = _resampled(strip, (size[0], bottom - top), box)
        return out, downsample

    def read(self, xy_l0: tuple[int, int], size_px: int, mpp: float) -> NDArray[np.uint8]:
        """The patch uint8[size_px, size_px, 3] whose top-left corner is xy_l0, at `mpp`.

        Read from the coarsest level that is still fine enough and reduced by area averaging. What lies beyond
        the slide's edge is white.

        Raises:
            WsiFlError: when the region cannot be decoded; later reads of good regions work all the same.
        """
        scale = mpp / self.mpp
        level = self._level_for(scale)
        reduction = scale / self.level_downsamples[level]
        if abs(reduction - 1) < 1e-3:
            return self._region(xy_l0, level, (size_px, size_px))
        extent = size_px * reduction
        side = max(1, ceil(extent - 1e-6))
        region = self._region(xy_l0, level, (side, side))
        return _resampled(region, (size_px, size_px), (0.0, 0.0, min(extent, side), min(extent, side)))

    def _level_for(self, downsample: float) -> int:
        """The coarsest level that does not lose resolution."""
        fits = [k for k, d in enumerate(self.level_downsamples) if d <= downsample * (1 + _LEVEL_TOLERANCE)]
        return fits[-1] if fits else 0

    def _region(self, xy_l0: tuple[int, int], level: int, size: tuple[int, int]) -> NDArray[np.uint8]:
        handle = self._handle
        try:
            image = handle.read_region((int(xy_l0[0]), int(xy_l0[1])), level, size)
        except openslide.OpenSlideError as error:
            with self._lock:  # an error kills the handle for good regions too
                if self._handle is handle:
                    self._handle = _open(self.path)
            raise WsiFlError(
                f"{self.path.name}: cannot be read at ({xy_l0[0]}, {xy_l0[1]}): {_reason(error)}"
            ) from None
        return _on_white(np.asarray(image))


def _open(path: Path) -> openslide.OpenSlide:
    if not path.is_file():
        raise WsiFlError(f"{path}: no such slide file")
    try:
        return openslide.OpenSlide(str(path))
    except openslide.OpenSlideUnsupportedFormatError:
        raise WsiFlError(f"{path.name}: not a whole-slide format that OpenSlide knows") from None
    except openslide.OpenSlideError as error:
        raise WsiFlError(f"{path.name}: cannot be opened: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _stated_mpp(properties: dict[str, str]) -> tuple[float | None, float | None]:
    """What the properties say of (x, y): OpenSlide's own, else TIFF resolution tags."""

    def number(key: str) -> float | None:
        try:
            return float(properties[key])
        except (KeyError, ValueError):
            return None

    x, y = number(openslide.PROPERTY_NAME_MPP_X), number(openslide.PROPERTY_NAME_MPP_Y)
    if x is not None and y is not None:
        return x, y
    unit = _UNIT_UM.get(properties.get("tiff.ResolutionUnit", "").lower())
    per_unit = number("tiff.XResolution"), number("tiff.YResolution")
    if unit is None or not per_unit[0] or not per_unit[1]:
        return None, None
    return unit / per_unit[0], unit / per_unit[1]


def _on_white(rgba: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGBA over white: OpenSlide leaves what was not scanned transparent."""
    alpha = rgba[..., 3]
    if alpha.min() == 255:
        return np.ascontiguousarray(rgba[..., :3])
    weight = alpha[..., None].astype(np.uint16)
    mixed = (rgba[..., :3] * weight + 255 * (255 - weight) + 127) // 255
    return mixed.astype(np.uint8)


def _resampled(
    pixels: NDArray[np.uint8], size: tuple[int, int], box: tuple[float, float, float, float]
) -> NDArray[np.uint8]:
    """The box (left, top, right, bottom) of the pixels, averaged by area to size (width, height)."""
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BOX, box=box))
