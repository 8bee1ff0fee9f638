"""Slides as arrays. The only module that imports OpenSlide; `formats` reads other formats.

OpenSlide is the authority on a slide's format and pixels. Where the JPEG tiles of a level decode to the same pixels,
`native` reads them instead, in a fraction of the time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from functools import cached_property
from math import ceil, floor, isfinite
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import openslide
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.slides.reading.formats import (
    is_czi,
    is_misread_by_openslide,
    is_ome,
    is_zarr,
    levels_of_openslide,
    open_source,
    properties_of_ome,
)
from wsi_fl.slides.reading.formats.dicom import member_of, require_one_slide
from wsi_fl.slides.reading.formats.levels import OwnLevels, own_levels, padded_levels
from wsi_fl.slides.reading.formats.scanners import wastes_bits
from wsi_fl.slides.reading.formats.source import Source, SourceError, rgb
from wsi_fl.slides.reading.holes import Place, holes_in, is_lost
from wsi_fl.slides.reading.native import Box, NativeLevel
from wsi_fl.slides.reading.painting import Area, continue_surroundings, paint, resample
from wsi_fl.slides.reading.trusted import TrustedLevels
from wsi_fl.types import GridSpec, UsageError, WsiFlError, one_line

Reader = Literal["auto", "native", "openslide"]
"""`native` decodes the tiles of a slide itself, `auto` does so where the result equals OpenSlide's pixels."""

_STRIP_PX = 1 << 24
"""Most level pixels in memory while a thumbnail is made."""
_MOST_AT_ONCE_PX = 1 << 26
"""Most level pixels in memory while another area is made."""
_GENERIC = "generic-tiff"
"""OpenSlide's name for a TIFF of an unknown scanner."""
_LEFT_TO_OTHERS = ("Unsupported TIFF compression", "Cannot get required TIFF tag: 258")
"""OpenSlide's errors for codecs that it lacks, and for masks and pictures of one bit."""
_TOLERANCE = 0.01
_MAX_DRIFT_PX = 0.5
"""Drift of a patch's far edge below which it is not resampled."""
_WHOLE = 1e-6
_PLAUSIBLE_MPP = (0.05, 20.0)
"""Values outside count as missing: a default of 72 dpi reads as 353 µm."""
_MAX_ANISOTROPY = 0.05
_UNIT_UM = {"centimeter": 1e4, "inch": 25_400.0}


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
            raise UsageError(
                f"{path.name}: mpp_override = {mpp_override:g} must be a positive number of µm per pixel"
            )
        if reader not in get_args(Reader):
            raise UsageError(f"reader = {reader!r} must be one of {', '.join(get_args(Reader))}")
        self.path = path
        self._override = mpp_override
        self._lock = threading.Lock()
        self._damaged: set[int] = set()
        self._file = member_of(path) if path.is_dir() and not is_zarr(path) else path
        self._handle = _open(self._file)
        self.size_l0: tuple[int, int] = self._handle.dimensions
        self.level_downsamples: tuple[float, ...] = self._handle.level_downsamples
        self._properties: dict[str, str] = dict(self._handle.properties)
        self.vendor = _vendor(self._handle)
        if self.vendor == _GENERIC:
            self._properties |= properties_of_ome(self._file)
        self.quickhash = self._properties.get(openslide.PROPERTY_NAME_QUICKHASH1, "")
        self._background = _background(self._properties)
        foreign = not isinstance(self._handle.source, openslide.OpenSlide)
        if foreign and reader == "native":
            self._handle.close()
            raise WsiFlError(
                f"{path.name}: {self.vendor} has no tiles that are read natively; set reader = auto"
            )
        self._native: TrustedLevels | None = None
        if not foreign and reader != "openslide":
            self._native = TrustedLevels(
                self._file,
                self._handle.level_dimensions,
                self._properties,
                self._background,
                self._reference,
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
        return "native" if self._native is not None and self._native.level(0) is not None else "openslide"

    def read_no_tiles(self) -> None:
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
        return _stated_mpp(self._properties, self.path.name) if self._override is None else self._override

    @property
    def bounds_l0(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the scanned area in level-0 pixels: the whole slide where it states none."""
        keys = (f"openslide.bounds-{key}" for key in ("x", "y", "width", "height"))
        stated = [_number(self._properties, key) for key in keys]
        left, top, width, height = (-1 if value is None else int(value) for value in stated)
        right, bottom = min(left + width, self.size_l0[0]), min(top + height, self.size_l0[1])
        inside = 0 <= left < right and 0 <= top < bottom and min(width, height) > 0
        return (left, top, right, bottom) if inside else (0, 0, *self.size_l0)

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
        for level in range(self._coarsest_for(downsample), -1, -1):

            def paint_by_level(area: Area, level: int = level) -> None:
                corner = (area[1].start * downsample, area[0].start * downsample)
                self._area(level, corner, downsample, out[area], overlapping=False)

            level_scale = downsample / self.level_downsamples[level]
            step = max(1, int(_STRIP_PX / (columns * level_scale**2)))
            unpainted = paint((rows, columns), areas, paint_by_level, step)
            if not (areas := unpainted.areas):
                break
            if level:
                self._note_damage(level)
            elif unpainted.hopeless and unpainted.error is not None:
                raise unpainted.error
        return continue_surroundings(out, areas), downsample

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
        self.area((float(xy_l0[0]), float(xy_l0[1])), mpp / self.mpp, out, overlapping=overlapping)
        return out

    def native_positions(
        self, xy_l0: NDArray[np.int64], size_px: int, mpp: float
    ) -> tuple[NativeLevel, NDArray[np.int64], NDArray[np.bool_]] | None:
        """Return (the level that gives patches unchanged, their corners (x, y) [n, 2] in its pixels, whether tiles give
        them [n]: not where the file lacks a tile or patches lie between pixels).

        None where the slide's tiles are not read natively, or patches are resampled.
        """
        level = self._native_level(size_px, mpp)
        if level is None:
            return None
        number, native = level
        corner, of = np.unique(xy_l0, return_inverse=True)  # both axes have the same scale
        found = [self._position(number, self._nearest_corner(number, (v, v))) for v in corner.tolist()]
        at = np.array([(-1 if xy is None else xy[0]) for xy in found], np.int64)[of].reshape(-1, 2)
        tiled = np.asarray(np.array([xy is not None for xy in found])[of].reshape(-1, 2).all(axis=1), bool)
        if not native.complete:
            tiled &= np.array([native.holds((x, y, size_px, size_px)) for x, y in at.tolist()], bool)
        return native, at, tiled

    def native_stream(self, xy_l0: tuple[int, int], size_px: int, mpp: float) -> bytes | None:
        """Return the self-contained JPEG stream of a patch; None where it is not one whole native tile.

        Raises:
            WsiFlError: when the tile is damaged and no finer level replaces it.
        """
        level = self._native_level(size_px, mpp)
        if level is None:
            return None
        number, native = level
        corner = self._nearest_corner(number, xy_l0)
        at = self._position(number, corner)
        try:
            return None if at is None else native.stream((*at, size_px, size_px))
        except WsiFlError as error:
            if number:  # a finer level makes up for it
                self._note_damage(number)
                return None
            raise self._unreadable(corner, error) from None

    def has_tiles_of(self, spec: GridSpec) -> bool:
        """Return whether patches of a grid are whole native tiles, except those over the edge."""
        level = self._native_level(spec.size_px, spec.mpp)
        on_tiles = spec.stride_px % spec.size_px == 0
        return on_tiles and level is not None and level[1].image.tile_px == (spec.size_px, spec.size_px)

    def area(
        self, xy_l0: tuple[float, float], scale: float, out: NDArray[np.uint8], *, overlapping: bool
    ) -> None:
        """Fill out [height, width, 3] with the area at xy_l0, with `scale` level-0 pixels per output pixel.

        Averaged by area, without need of µm; `overlapping` and errors as in `read`. Damaged areas of a level are made
        from a finer one.
        """
        level = self._coarsest_for(scale)
        while True:
            try:
                self._area(level, xy_l0, scale, out, overlapping=overlapping)
                return
            except WsiFlError:
                if level == 0:
                    raise
            self._note_damage(level)
            level -= 1

    def _area(
        self,
        level: int,
        xy_l0: tuple[float, float],
        scale: float,
        out: NDArray[np.uint8],
        *,
        overlapping: bool,
    ) -> None:
        """Fill out from this level alone, in parts where that takes many of its pixels."""
        size = (out.shape[1], out.shape[0])
        downsample = self.level_downsamples[level]
        if self._is_unchanged(level, scale, max(size)):
            self._pixels(self._nearest_corner(level, xy_l0), level, out, overlapping=overlapping)
            return
        reduction = scale / downsample
        if reduction > 1 and abs(round(reduction) - reduction) * max(size) < _MAX_DRIFT_PX:
            reduction = float(round(reduction))
        longer, middle = int(np.argmax(size)), max(size) // 2
        if size[0] * size[1] * reduction**2 > _MOST_AT_ONCE_PX and middle:
            parts = (out[:, :middle], out[:, middle:]) if longer == 0 else (out[:middle], out[middle:])
            second = tuple(v + (k == longer) * middle * downsample * reduction for k, v in enumerate(xy_l0))
            for start, part in zip((xy_l0, (second[0], second[1])), parts, strict=True):
                self._area(level, start, scale, part, overlapping=overlapping)
            return
        # Whole level pixels around the box, whose edges may be fractional.
        corner = tuple(floor(floor(v / downsample + 1e-9) * downsample) for v in xy_l0)
        left, top = (max(0.0, (v - c) / downsample) for v, c in zip(xy_l0, corner, strict=True))
        box = (left, top, left + size[0] * reduction, top + size[1] * reduction)
        region = np.empty((ceil(box[3] - 1e-6), ceil(box[2] - 1e-6), 3), np.uint8)
        self._pixels((corner[0], corner[1]), level, region, overlapping=overlapping)
        box = (*box[:2], min(box[2], region.shape[1]), min(box[3], region.shape[0]))
        out[:] = np.asarray(resample(Image.fromarray(region), size, reduction, box))

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each damaged level that finer levels replace."""
        return tuple(
            f"its level {level} is damaged or lacks tiles; the affected areas are made from finer levels"
            for level in sorted(self._damaged)
        )

    def _note_damage(self, level: int) -> None:
        self._damaged.add(level)

    def _coarsest_for(self, scale: float) -> int:
        """Return the coarsest level without loss of resolution at so many level-0 pixels per output pixel."""
        fine_enough = [k for k, d in enumerate(self.level_downsamples) if d <= scale * (1 + _TOLERANCE)]
        return fine_enough[-1] if fine_enough else 0

    def _is_unchanged(self, level: int, scale: float, size_px: int) -> bool:
        """Return whether a side of that length takes the level's pixels without resampling."""
        return abs(scale / self.level_downsamples[level] - 1) * size_px < _MAX_DRIFT_PX

    def _nearest_corner(self, level: int, xy_l0: tuple[float, float]) -> tuple[int, int]:
        """Return the nearest level-0 corner on a pixel of the level: between pixels OpenSlide would blend."""
        downsample = self.level_downsamples[level]
        x, y = (round(round(v / downsample) * downsample) for v in xy_l0)
        return x, y

    def _position(self, level: int, corner: tuple[int, int]) -> tuple[int, int] | None:
        """Return a level-0 corner in pixels of the level; None where it falls between them."""
        x, y = (v / self.level_downsamples[level] for v in corner)
        column, row = round(x), round(y)
        return (column, row) if max(abs(x - column), abs(y - row)) < _WHOLE else None

    def _native_level(self, size_px: int, mpp: float) -> tuple[int, NativeLevel] | None:
        """Return the level that gives patches unchanged, and its tiles; None if there is none or OpenSlide reads it."""
        scale = mpp / self.mpp
        number = self._coarsest_for(scale)
        if self._native is None or not self._is_unchanged(number, scale, size_px):
            return None
        native = self._native.level(number)
        return None if native is None else (number, native)

    def _pixels(
        self, corner: tuple[int, int], level: int, out: NDArray[np.uint8], *, overlapping: bool
    ) -> None:
        """Fill out [height, width, 3] with the level's pixels at a level-0 corner, natively or by OpenSlide."""
        native = None if self._native is None else self._native.level(level)
        at = self._position(level, corner)
        if native is not None and at is not None:
            box = (*at, out.shape[1], out.shape[0])
            if native.holds(box):
                try:
                    native.read(box, out, overlapping=overlapping)
                except WsiFlError as error:
                    raise self._unreadable(corner, error) from None
                return
        out[:] = self._composed(corner, level, (out.shape[1], out.shape[0]))

    def _reference(self, level: int, box: Box) -> NDArray[np.uint8] | None:
        """Return OpenSlide's pixels of a box of a level; None where the box does not lie on its pixels."""
        downsample = self.level_downsamples[level]
        corner = (round(box[0] * downsample), round(box[1] * downsample))
        return self._composed(corner, level, box[2:]) if self._position(level, corner) == box[:2] else None

    def _composed(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Return OpenSlide's pixels [height, width, 3] at a level-0 corner, over the background.

        Pixels that are not in the file have its colour; where other levels show something, they are damage.
        """
        region = self._region(corner, level, size)
        if len(self.level_downsamples) > 1 and self._lacks_pixels(region, corner, level):
            lost = WsiFlError("the file lacks pixels there, which other levels of it show")
            raise self._unreadable(corner, lost)
        return rgb(region, self._background)

    def _lacks_pixels(self, region: Image.Image, corner: tuple[int, int], level: int) -> bool:
        """Return whether a region of a level has holes in which other levels show something."""
        left, top = (round(v / self.level_downsamples[level]) for v in corner)
        width, height = self._handle.level_dimensions[level]
        fill = self._handle.fill
        holes = holes_in(region, fill, (-left, -top, width - left, height - top))
        place = Place(corner, level, self.level_downsamples, fill or self._background, fill is not None)
        return holes is not None and is_lost(holes, place, self._region)

    def _region(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """Return the handle's RGBA pixels at a level-0 corner; after an OpenSlide error the handle is replaced."""
        handle = self._handle
        try:
            return handle.read_region(corner, level, size)
        except SourceError as error:
            raise self._unreadable(corner, error) from None
        except openslide.OpenSlideError:
            # Another thread's region may have killed the handle: a fresh one judges this region.
            with self._lock, closing(self._reopened()) as own:
                try:
                    return own.read_region(corner, level, size)
                except openslide.OpenSlideError as error:
                    raise self._unreadable(corner, error) from None
                finally:
                    # The dead handle is not closed: other threads may use it, and it is freed with the last of them.
                    if self._handle is handle:
                        self._handle = self._reopened()

    def _reopened(self) -> OwnLevels:
        """Open another handle of the same levels."""
        try:
            return OwnLevels(openslide.OpenSlide(str(self._file)), self._handle.numbers)
        except openslide.OpenSlideError as error:
            raise WsiFlError(f"{self.path.name}: cannot be opened: {one_line(error)}") from None

    def _unreadable(self, corner: tuple[int, int], error: Exception) -> WsiFlError:
        where = f"{self.path.name}: cannot be read at level-0 pixel ({corner[0]}, {corner[1]})"
        return WsiFlError(f"{where}: {one_line(error)}")


def _open(path: Path) -> OwnLevels:
    """Open a slide by OpenSlide, or by `formats` where OpenSlide does not read or misreads it."""
    if not path.exists():
        raise WsiFlError(f"{path}: no such slide")
    if not (path.is_file() or path.is_dir()):
        raise WsiFlError(f"{path.name}: neither a file nor a folder")
    if path.is_file():
        require_one_slide(path)
    source: Source | None = None
    try:
        if not path.is_dir():
            source = openslide.OpenSlide(str(path))
    except openslide.OpenSlideUnsupportedFormatError:
        pass
    except openslide.OpenSlideError as error:
        _require_another_reader(path, error)
    if source is not None:
        generic = _vendor(source) == _GENERIC
        misread = is_misread_by_openslide(path) if generic else wastes_bits(source.properties)
        if not misread:
            try:
                return OwnLevels(source, levels_of_openslide(path, source, generic=generic))
            except WsiFlError:
                source.close()
                raise
        source.close()
    if (source := open_source(path)) is None:
        raise WsiFlError(f"{path.name}: not a slide format that is known here")
    return OwnLevels(source, own_levels(source.level_dimensions, padded_levels(source)))


def _require_another_reader(path: Path, error: openslide.OpenSlideError) -> None:
    """Raise OpenSlide's error, unless the slide is of a format that OpenSlide does not support and others may."""
    reason = str(error)
    if "only one SOP instance in concatenation" in reason:
        raise WsiFlError(
            f"{path.name}: a part of a DICOM concatenation whose other parts are missing; put all of them into "
            "one folder"
        )
    if not (any(words in reason for words in _LEFT_TO_OTHERS) or is_czi(path) or is_ome(path)):
        raise WsiFlError(f"{path.name}: cannot be opened: {one_line(error)}")


def _vendor(source: Source) -> str:
    return source.properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")


def _stated_mpp(properties: Mapping[str, str], name: str) -> float:
    """Return the µm per level-0 pixel of a slide: OpenSlide's, else that of the TIFF resolution tags."""
    low, high = _PLAUSIBLE_MPP

    def stated(axis: str) -> float | None:
        per_unit = _number(properties, f"tiff.{axis.upper()}Resolution")
        unit_um = _UNIT_UM.get(properties.get("tiff.ResolutionUnit", "").lower())
        from_tags = unit_um / per_unit if unit_um and per_unit else None
        candidates = (_number(properties, f"openslide.mpp-{axis}"), from_tags)
        return next((v for v in candidates if v is not None and low <= v <= high), None)

    x, y = stated("x"), stated("y")
    x, y = x or y, y or x
    if x is None or y is None:
        value = _number(properties, "openslide.mpp-x")
        said = "" if value is None else f" plausibly ({value:g}, not within {low:g} to {high:g})"
        raise WsiFlError(
            f"{name}: the slide does not state its µm per pixel{said}; "
            f"give it in the column mpp of the site's table, or for all its slides with mpp_override = 0.5 in "
            f"sites/<site>.toml"
        )
    if abs(x - y) > _MAX_ANISOTROPY * max(x, y):
        raise WsiFlError(
            f"{name}: pixels are not square ({x:g} by {y:g} µm); "
            f"if that is wrong, give mpp_override = {x:g} in sites/<site>.toml"
        )
    return (x + y) / 2


def _number(properties: Mapping[str, str], key: str) -> float | None:
    try:
        value = float(properties[key])
    except (KeyError, ValueError):
        return None
    return value if isfinite(value) else None


def _background(properties: Mapping[str, str]) -> tuple[int, int, int]:
    try:
        red, green, blue = bytes.fromhex(properties.get("openslide.background-color", "FFFFFF"))
    except ValueError:
        return 255, 255, 255
    return red, green, blue
