"""Slides as arrays. The only module that imports OpenSlide; `formats` reads other formats.

OpenSlide is the authority on a slide's format and pixels. Where the tiles of a level decode to the same pixels,
`native` reads them instead, in a fraction of the time.
"""

from __future__ import annotations

import threading
from contextlib import closing
from functools import cached_property
from math import ceil, floor, isfinite
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import openslide
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.slides.reading.damage import LevelRegion, find_holes, has_lost_pixels
from wsi_fl.slides.reading.formats import (
    is_czi,
    is_misread_by_openslide,
    is_ome,
    is_zarr,
    open_source,
    read_ome_properties,
    select_openslide_levels,
)
from wsi_fl.slides.reading.formats.dicom_headers import find_member, require_one_slide
from wsi_fl.slides.reading.formats.level_selection import SelectedLevels, find_padded_levels, select_levels
from wsi_fl.slides.reading.formats.scanners import wastes_bits
from wsi_fl.slides.reading.formats.source import PixelSource, SourceError, blend_rgb
from wsi_fl.slides.reading.native_levels import TrustedLevels
from wsi_fl.slides.reading.native_tiles import Box, NativeLevel
from wsi_fl.slides.reading.picture_parts import Area, fill_from_surroundings, paint_areas, resample_box
from wsi_fl.slides.reading.slide_properties import read_background, read_bounds, read_mpp
from wsi_fl.types import GridSpec, UsageError, WsiFlError, single_line

Reader = Literal["auto", "native", "openslide"]
"""`native` decodes the tiles of a slide itself, `auto` does so where the result equals OpenSlide's pixels."""

_STRIP_PX = 1 << 24
"""Most level pixels in memory while a thumbnail is made."""
_MAX_AREA_PX = 1 << 26
"""Most level pixels in memory while another area is made."""
_GENERIC_VENDOR = "generic-tiff"
"""OpenSlide's name for a TIFF of an unknown scanner."""
_UNSUPPORTED_REASONS = ("Unsupported TIFF compression", "Cannot get required TIFF tag: 258")
"""OpenSlide's errors for codecs that it lacks, and for masks and pictures of one bit."""
_SCALE_TOLERANCE = 0.01
_MAX_DRIFT_PX = 0.5
"""Drift of a patch's far edge below which it is not resampled."""
_PIXEL_TOLERANCE = 1e-6


class Slide:
    """A whole-slide image; use it as a context manager. Reads may come from several threads.

    `path` is a slide file, or a folder: an OME-Zarr, or the files of one DICOM slide.

    Attributes:
        path: as given.
        size_l0: (width, height) in level-0 pixels.
        level_downsamples: level-0 pixels per pixel of each level, finest first.
        vendor: OpenSlide's name of the format.
        quickhash: OpenSlide's quickhash-1, a digest by `formats` where OpenSlide does not read the slide, or "".

    Raises:
        WsiFlError: when the file is missing, unreadable or of an unknown format.
    """

    def __init__(self, path: str | Path, mpp_override: float | None = None, reader: Reader = "auto") -> None:
        path = Path(path)
        if mpp_override is not None and not (isfinite(mpp_override) and mpp_override > 0):
            raise UsageError(f"{path.name}: mpp_override = {mpp_override:g} must be a positive number of µm per pixel")
        if reader not in get_args(Reader):
            raise UsageError(f"reader = {reader!r} must be one of {', '.join(get_args(Reader))}")
        self.path = path
        self._mpp_override = mpp_override
        self._lock = threading.Lock()
        self._damaged_levels: set[int] = set()
        self._file = find_member(path) if path.is_dir() and not is_zarr(path) else path
        self._handle = _open_slide(self._file)
        self.size_l0: tuple[int, int] = self._handle.dimensions
        self.level_downsamples: tuple[float, ...] = self._handle.level_downsamples
        self._properties: dict[str, str] = dict(self._handle.properties)
        self.vendor = _vendor_name(self._handle)
        if self.vendor == _GENERIC_VENDOR:
            self._properties |= read_ome_properties(self._file)
        self.quickhash = self._properties.get(openslide.PROPERTY_NAME_QUICKHASH1, "")
        self._background = read_background(self._properties)
        self._native: TrustedLevels | None = None
        if reader != "openslide":
            self._native = TrustedLevels(
                self._file,
                self._handle.level_dimensions,
                self._properties,
                self._background,
                self._reference_pixels,
                required=reader == "native",
            )

    def __enter__(self) -> Slide:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._handle.close()
        if self._native is not None:
            self._native.close()

    @property
    def reader(self) -> Literal["native", "openslide"]:
        """The reader of level 0; beside "native", OpenSlide reads areas that tiles do not give."""
        return "native" if self._native is not None and self._native.find_level(0) is not None else "openslide"

    def disable_native_tiles(self) -> None:
        """Read everything by OpenSlide, or its substitute in `formats`, from now on."""
        if self._native is not None:
            self._native.close()
            self._native = None

    @cached_property
    def mpp(self) -> float:
        """Micrometres per level-0 pixel: the override, else the slide's own value.

        Raises:
            WsiFlError: when it is missing, or differs between x and y by more than 5 %.
        """
        return read_mpp(self._properties, self.path.name) if self._mpp_override is None else self._mpp_override

    @property
    def bounds_l0(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the scanned area in level-0 pixels: the whole slide where it states none."""
        return read_bounds(self._properties, self.size_l0)

    def thumbnail(self, max_px: int = 1024) -> tuple[NDArray[np.uint8], float]:
        """Return (uint8[h, w, 3] with the longer side at most max_px, level-0 pixels per thumbnail pixel).

        Averaged by area from the coarsest level that is fine enough, strip by strip. Damaged tiles are filled from
        their surroundings, so that patches there are read and their damage is reported.

        Raises:
            WsiFlError: when much of it cannot be decoded.
        """
        width, height = self.size_l0
        downsample = max(1.0, max(width, height) / max_px)
        columns, rows = (ceil(extent / downsample - 1e-6) for extent in self.size_l0)
        out = np.empty((rows, columns, 3), np.uint8)
        areas: list[Area] = [(slice(0, rows), slice(0, columns))]
        for level in range(self._coarsest_level(downsample), -1, -1):

            def paint_by_level(area: Area, level: int = level) -> None:
                corner = (area[1].start * downsample, area[0].start * downsample)
                self._read_area(level, corner, downsample, out[area], overlapping=False)

            level_scale = downsample / self.level_downsamples[level]
            step = max(1, int(_STRIP_PX / (columns * level_scale**2)))
            unpainted = paint_areas((rows, columns), areas, paint_by_level, step)
            if not (areas := unpainted.areas):
                break
            if level:
                self._damaged_levels.add(level)
            elif unpainted.is_hopeless and unpainted.error is not None:
                raise unpainted.error
        return fill_from_surroundings(out, areas), downsample

    def read(
        self,
        xy_l0: tuple[int, int],
        size_px: int,
        mpp: float,
        out: NDArray[np.uint8] | None = None,
        overlapping: bool = True,
    ) -> NDArray[np.uint8]:
        """Return the patch uint8[size_px, size_px, 3] at `mpp` with its top-left corner at xy_l0.

        From the coarsest level that is fine enough: reduced by area averaging where scales differ, unchanged pixels
        where they agree. Unscanned areas, and those beyond the edge, have the slide's background colour.

        Args:
            out: array for the patch, instead of a new one.
            overlapping: False if no other patch needs the same pixels, which saves memory.

        Raises:
            WsiFlError: when the region cannot be decoded; other regions can still be read.
        """
        out = np.empty((size_px, size_px, 3), np.uint8) if out is None else out
        self.read_area((float(xy_l0[0]), float(xy_l0[1])), mpp / self.mpp, out, overlapping=overlapping)
        return out

    def find_native_positions(
        self, xy_l0: NDArray[np.int64], size_px: int, mpp: float
    ) -> tuple[NativeLevel, NDArray[np.int64], NDArray[np.bool_]] | None:
        """Return (the level that gives patches unchanged, their corners (x, y) [n, 2] in its pixels, whether tiles give
        them [n]: not where the file lacks a tile or patches lie between pixels).

        None where the slide's tiles are not read natively, or patches are resampled.
        """
        native_level = self._native_level(size_px, mpp)
        if native_level is None:
            return None
        number, native = native_level
        corner, inverse = np.unique(xy_l0, return_inverse=True)  # both axes have the same scale
        positions = [self._level_position(number, self._snap_corner(number, (v, v))) for v in corner.tolist()]
        corners = np.array([(-1 if xy is None else xy[0]) for xy in positions], np.int64)[inverse].reshape(-1, 2)
        is_tiled = np.asarray(np.array([xy is not None for xy in positions])[inverse].reshape(-1, 2).all(axis=1), bool)
        if not native.complete:
            is_tiled &= np.array([native.has_tiles((x, y, size_px, size_px)) for x, y in corners.tolist()], bool)
        return native, corners, is_tiled

    def read_native_stream(self, xy_l0: tuple[int, int], size_px: int, mpp: float) -> bytes | None:
        """Return the self-contained JPEG stream of a patch; None where it is not one whole native tile.

        Raises:
            WsiFlError: when the tile is damaged and no finer level replaces it.
        """
        native_level = self._native_level(size_px, mpp)
        if native_level is None:
            return None
        number, native = native_level
        corner = self._snap_corner(number, xy_l0)
        position = self._level_position(number, corner)
        try:
            return None if position is None else native.read_stream((*position, size_px, size_px))
        except WsiFlError as error:
            if number:  # a finer level makes up for it
                self._damaged_levels.add(number)
                return None
            raise self._read_error(corner, error) from None

    def has_whole_tiles(self, spec: GridSpec) -> bool:
        """Return whether patches of a grid are whole native tiles of JPEG, except those over the edge."""
        native_level = self._native_level(spec.size_px, spec.mpp)
        if native_level is None or spec.stride_px % spec.size_px:
            return False
        image = native_level[1].image
        return image.codec.is_jpeg and image.tile_px == (spec.size_px, spec.size_px)

    def read_area(self, xy_l0: tuple[float, float], scale: float, out: NDArray[np.uint8], *, overlapping: bool) -> None:
        """Fill out [height, width, 3] with the area at xy_l0, with `scale` level-0 pixels per output pixel.

        Averaged by area, without need of µm; `overlapping` and errors as in `read`. Damaged areas of a level are made
        from a finer one.
        """
        level = self._coarsest_level(scale)
        while True:
            try:
                self._read_area(level, xy_l0, scale, out, overlapping=overlapping)
                return
            except WsiFlError:
                if level == 0:
                    raise
            self._damaged_levels.add(level)
            level -= 1

    def _read_area(
        self, level: int, xy_l0: tuple[float, float], scale: float, out: NDArray[np.uint8], *, overlapping: bool
    ) -> None:
        """Fill out from this level alone, in parts where that takes many of its pixels."""
        size = (out.shape[1], out.shape[0])
        downsample = self.level_downsamples[level]
        if self._is_unchanged(level, scale, max(size)):
            self._read_pixels(self._snap_corner(level, xy_l0), level, out, overlapping=overlapping)
            return
        reduction = scale / downsample
        if reduction > 1 and abs(round(reduction) - reduction) * max(size) < _MAX_DRIFT_PX:
            reduction = float(round(reduction))
        longer_axis, middle = int(np.argmax(size)), max(size) // 2
        if size[0] * size[1] * reduction**2 > _MAX_AREA_PX and middle:
            halves = (out[:, :middle], out[:, middle:]) if longer_axis == 0 else (out[:middle], out[middle:])
            second_start = tuple(v + (k == longer_axis) * middle * downsample * reduction for k, v in enumerate(xy_l0))
            for start, half in zip((xy_l0, (second_start[0], second_start[1])), halves, strict=True):
                self._read_area(level, start, scale, half, overlapping=overlapping)
            return
        # Whole level pixels around the box, whose edges may be fractional.
        corner = tuple(floor(floor(v / downsample + 1e-9) * downsample) for v in xy_l0)
        x_min, y_min = (max(0.0, (v - c) / downsample) for v, c in zip(xy_l0, corner, strict=True))
        box = (x_min, y_min, x_min + size[0] * reduction, y_min + size[1] * reduction)
        region = np.empty((ceil(box[3] - 1e-6), ceil(box[2] - 1e-6), 3), np.uint8)
        self._read_pixels((corner[0], corner[1]), level, region, overlapping=overlapping)
        box = (*box[:2], min(box[2], region.shape[1]), min(box[3], region.shape[0]))
        out[:] = np.asarray(resample_box(Image.fromarray(region), size, reduction, box))

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each damaged level that finer levels replace."""
        return tuple(
            f"its level {level} is damaged or lacks tiles; the affected areas are made from finer levels"
            for level in sorted(self._damaged_levels)
        )

    def _coarsest_level(self, scale: float) -> int:
        """Return the coarsest level without loss of resolution at so many level-0 pixels per output pixel."""
        fine_enough = [k for k, d in enumerate(self.level_downsamples) if d <= scale * (1 + _SCALE_TOLERANCE)]
        return fine_enough[-1] if fine_enough else 0

    def _is_unchanged(self, level: int, scale: float, size_px: int) -> bool:
        """Return whether a side of that length takes the level's pixels without resampling."""
        return abs(scale / self.level_downsamples[level] - 1) * size_px < _MAX_DRIFT_PX

    def _snap_corner(self, level: int, xy_l0: tuple[float, float]) -> tuple[int, int]:
        """Return the nearest level-0 corner on a pixel of the level: between pixels OpenSlide would blend."""
        downsample = self.level_downsamples[level]
        x, y = (round(round(v / downsample) * downsample) for v in xy_l0)
        return x, y

    def _level_position(self, level: int, corner: tuple[int, int]) -> tuple[int, int] | None:
        """Return a level-0 corner in pixels of the level; None where it falls between them."""
        x, y = (v / self.level_downsamples[level] for v in corner)
        column, row = round(x), round(y)
        return (column, row) if max(abs(x - column), abs(y - row)) < _PIXEL_TOLERANCE else None

    def _native_level(self, size_px: int, mpp: float) -> tuple[int, NativeLevel] | None:
        """Return the level that gives patches unchanged, and its tiles; None if there is none or OpenSlide reads it."""
        scale = mpp / self.mpp
        number = self._coarsest_level(scale)
        if self._native is None or not self._is_unchanged(number, scale, size_px):
            return None
        native = self._native.find_level(number)
        return None if native is None else (number, native)

    def _read_pixels(self, corner: tuple[int, int], level: int, out: NDArray[np.uint8], *, overlapping: bool) -> None:
        """Fill out [height, width, 3] with the level's pixels at a level-0 corner, natively or by OpenSlide."""
        native = None if self._native is None else self._native.find_level(level)
        position = self._level_position(level, corner)
        if native is not None and position is not None:
            box = (*position, out.shape[1], out.shape[0])
            if native.has_tiles(box):
                try:
                    native.read(box, out, overlapping=overlapping)
                except WsiFlError as error:
                    raise self._read_error(corner, error) from None
                return
        out[:] = self._compose_pixels(corner, level, (out.shape[1], out.shape[0]))

    def _reference_pixels(self, level: int, box: Box) -> NDArray[np.uint8] | None:
        """Return OpenSlide's pixels of a box of a level; None where the box does not lie on its pixels."""
        downsample = self.level_downsamples[level]
        corner = (round(box[0] * downsample), round(box[1] * downsample))
        return self._compose_pixels(corner, level, box[2:]) if self._level_position(level, corner) == box[:2] else None

    def _compose_pixels(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Return OpenSlide's pixels [height, width, 3] at a level-0 corner, over the background.

        Pixels that are not in the file have its colour; where other levels show something, they are damage.
        """
        region = self._read_region(corner, level, size)
        if len(self.level_downsamples) > 1 and self._has_lost_pixels(region, corner, level):
            error = WsiFlError("the file lacks pixels there, which other levels of it show")
            raise self._read_error(corner, error)
        return blend_rgb(region, self._background)

    def _has_lost_pixels(self, region: Image.Image, corner: tuple[int, int], level: int) -> bool:
        """Return whether a region of a level has holes in which other levels show something."""
        x, y = (round(v / self.level_downsamples[level]) for v in corner)
        width, height = self._handle.level_dimensions[level]
        fill_color = self._handle.fill
        holes = find_holes(region, fill_color, (-x, -y, width - x, height - y))
        level_region = LevelRegion(
            corner, level, self.level_downsamples, fill_color or self._background, fill_color is not None
        )
        return holes is not None and has_lost_pixels(holes, level_region, self._read_region)

    def _read_region(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """Return the handle's RGBA pixels at a level-0 corner; after an OpenSlide error the handle is replaced."""
        handle = self._handle
        try:
            return handle.read_region(corner, level, size)
        except SourceError as error:
            raise self._read_error(corner, error) from None
        except openslide.OpenSlideError:
            # Another thread's region may have killed the handle: a fresh one judges this region.
            with self._lock, closing(self._reopen_handle()) as fresh_handle:
                try:
                    return fresh_handle.read_region(corner, level, size)
                except openslide.OpenSlideError as error:
                    raise self._read_error(corner, error) from None
                finally:
                    # The dead handle is not closed: other threads may use it, and it is freed with the last of them.
                    if self._handle is handle:
                        self._handle = self._reopen_handle()

    def _reopen_handle(self) -> SelectedLevels:
        """Open another handle of the same levels."""
        try:
            return SelectedLevels(openslide.OpenSlide(str(self._file)), self._handle.numbers)
        except openslide.OpenSlideError as error:
            raise WsiFlError(f"{self.path.name}: cannot be opened: {single_line(error)}") from None

    def _read_error(self, corner: tuple[int, int], error: Exception) -> WsiFlError:
        prefix = f"{self.path.name}: cannot be read at level-0 pixel ({corner[0]}, {corner[1]})"
        return WsiFlError(f"{prefix}: {single_line(error)}")


def _open_slide(path: Path) -> SelectedLevels:
    """Open a slide by OpenSlide, or by `formats` where OpenSlide does not read or misreads it."""
    if not path.exists():
        raise WsiFlError(f"{path}: no such slide")
    if not (path.is_file() or path.is_dir()):
        raise WsiFlError(f"{path.name}: neither a file nor a folder")
    if path.is_file():
        require_one_slide(path)
    source: PixelSource | None = None
    try:
        if not path.is_dir():
            source = openslide.OpenSlide(str(path))
    except openslide.OpenSlideUnsupportedFormatError:
        pass
    except openslide.OpenSlideError as error:
        _require_another_reader(path, error)
    if source is not None:
        is_generic = _vendor_name(source) == _GENERIC_VENDOR
        is_misread = is_misread_by_openslide(path) if is_generic else wastes_bits(source.properties)
        if not is_misread:
            try:
                return SelectedLevels(source, select_openslide_levels(path, source, is_generic=is_generic))
            except WsiFlError:
                source.close()
                raise
        source.close()
    if (source := open_source(path)) is None:
        raise WsiFlError(f"{path.name}: not a slide format that is known here")
    return SelectedLevels(source, select_levels(source.level_dimensions, find_padded_levels(source)))


def _require_another_reader(path: Path, error: openslide.OpenSlideError) -> None:
    """Raise OpenSlide's error, unless the slide is of a format that OpenSlide does not support and others may."""
    reason = str(error)
    if "only one SOP instance in concatenation" in reason:
        raise WsiFlError(
            f"{path.name}: the only file of a DICOM concatenation; put all its files into one folder, or, if it is "
            "whole, remove its ConcatenationUID"
        )
    if not (any(phrase in reason for phrase in _UNSUPPORTED_REASONS) or is_czi(path) or is_ome(path)):
        raise WsiFlError(f"{path.name}: cannot be opened: {single_line(error)}")


def _vendor_name(source: PixelSource) -> str:
    return source.properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")
