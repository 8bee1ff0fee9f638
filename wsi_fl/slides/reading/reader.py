"""Slides as arrays. The only module that knows OpenSlide; what OpenSlide does not read, `sources` does.

OpenSlide says what a slide is and is the authority on its pixels. Where a level's own JPEG tiles were found to
decode to the same pixels, they are read by `native` instead, which takes a fraction of the time.
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

from wsi_fl.slides.reading.formats.source import Source, SourceError
from wsi_fl.slides.reading.levels import Levels
from wsi_fl.slides.reading.native import Box, NativeLevel
from wsi_fl.slides.reading.pixels import Failures, resampled, rgb
from wsi_fl.slides.reading.sources import (
    is_czi,
    is_misread_by_openslide,
    is_ome,
    is_zarr,
    open_source,
    properties_of_ome,
)
from wsi_fl.slides.reading.stated import background, stated_mpp
from wsi_fl.slides.reading.trusted import TrustedLevels
from wsi_fl.types import GridSpec, UsageError, WsiFlError, one_line

Reader = Literal["auto", "native", "openslide"]
"""`native` decodes a slide's own tiles, `auto` does so where they give OpenSlide's pixels."""

_STRIP_PX = 1 << 24
"""Most level pixels held at once while a thumbnail is made."""
_GENERIC = "generic-tiff"
"""OpenSlide's name of a TIFF of no known scanner."""


class Slide:
    """A whole-slide image; use it as a context manager. Reads may come from several threads.

    `path` is a slide file, or a folder: an OME-Zarr, or the files of one DICOM slide.

    Attributes:
        path: as given.
        size_l0: (width, height) in level-0 pixels.
        level_downsamples: level-0 pixels per pixel of each level.
        vendor: OpenSlide's name of the format.
        quickhash: OpenSlide's quickhash-1, a digest by `sources` where OpenSlide does not read the slide, or "".

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
        self._file = _dicom_member(path) if path.is_dir() and not is_zarr(path) else path
        self._handle = _open(self._file)
        self.size_l0: tuple[int, int] = self._handle.dimensions
        self.level_downsamples: tuple[float, ...] = self._handle.level_downsamples
        self._levels = Levels(self.level_downsamples)
        self._properties: dict[str, str] = dict(self._handle.properties)
        self.vendor = _vendor(self._handle)
        if self.vendor == _GENERIC:
            self._properties |= properties_of_ome(self._file)
        self.quickhash = self._properties.get(openslide.PROPERTY_NAME_QUICKHASH1, "")
        self._background = background(self._properties)
        foreign = not isinstance(self._handle, openslide.OpenSlide)
        if foreign and reader == "native":
            self._handle.close()
            raise WsiFlError(
                f"{path.name}: {self.vendor} has no tiles that are read natively; set reader = auto"
            )
        self._native = (
            None if foreign or reader == "openslide" else self._trusted(required=reader == "native")
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
        """What reads level 0; beside "native", OpenSlide reads what cannot be had from tiles alone."""
        return "native" if self._native is not None and self._native.level(0) is not None else "openslide"

    def read_no_tiles(self) -> None:
        """From now on, have all read by OpenSlide, or by what stands in for it."""
        if self._native is not None:
            self._native.close()
            self._native = None

    @cached_property
    def mpp(self) -> float:
        """Micrometres per level-0 pixel: the override, else what the slide states.

        Raises:
            WsiFlError: when it is missing, or differs between x and y by more than 5 %.
        """
        return stated_mpp(self._properties, self.path.name) if self._override is None else self._override

    def thumbnail(self, max_px: int = 1024) -> tuple[NDArray[np.uint8], float]:
        """(uint8[h, w, 3] with the longer side at most max_px, level-0 pixels per thumbnail pixel).

        Averaged by area from the coarsest level that is fine enough, strip by strip. Where a tile is damaged, the
        surroundings are continued, so that patches there are looked at and their damage is named.

        Raises:
            WsiFlError: when much of it cannot be decoded.
        """
        width, height = self.size_l0
        downsample = max(1.0, max(width, height) / max_px)
        columns, rows = (ceil(extent / downsample - 1e-6) for extent in self.size_l0)
        level_scale = downsample / self.level_downsamples[self._levels.coarsest_for(downsample)]
        step = max(1, int(_STRIP_PX / (columns * level_scale**2)))
        out = np.empty((rows, columns, 3), np.uint8)
        failures = Failures(rows, columns)

        def paint(area: tuple[slice, slice]) -> None:
            corner = (area[1].start * downsample, area[0].start * downsample)
            self.area(corner, downsample, out[area], overlapping=False)

        for top in range(0, rows, step):
            failures.paint(paint, (slice(top, min(top + step, rows)), slice(0, columns)))
        return failures.mended(out), downsample

    def read(
        self,
        xy_l0: tuple[int, int],
        size_px: int,
        mpp: float,
        out: NDArray[np.uint8] | None = None,
        overlapping: bool = True,
    ) -> NDArray[np.uint8]:
        """The patch uint8[size_px, size_px, 3] at `mpp` whose top-left corner is xy_l0.

        From the coarsest level that is fine enough, reduced by area averaging where scales differ, the slide's own
        pixels where they agree. What was not scanned or lies beyond the edge has the slide's background colour.

        Args:
            xy_l0, size_px, mpp: which patch.
            out: where to write it, instead of into an array of its own.
            overlapping: False promises that no other patch will want the same pixels, which saves memory.

        Raises:
            WsiFlError: when the region cannot be decoded; reads of good regions work before and after all the same.
        """
        out = np.empty((size_px, size_px, 3), np.uint8) if out is None else out
        self.area((float(xy_l0[0]), float(xy_l0[1])), mpp / self.mpp, out, overlapping=overlapping)
        return out

    def native_positions(
        self, xy_l0: NDArray[np.int64], size_px: int, mpp: float
    ) -> tuple[NativeLevel, NDArray[np.int64], NDArray[np.bool_]] | None:
        """(the level whose own pixels patches are; where in it their corners [n, 2] lie: (x, y) [n, 2] in its pixels;
        [n] whether that is so: not where the file leaves a tile out or patches lie between pixels).

        None where the slide's tiles are not read, or patches are resampled from them.
        """
        level = self._native_level(size_px, mpp)
        if level is None:
            return None
        number, native = level
        corner, of = np.unique(xy_l0, return_inverse=True)  # both axes have the same scale
        found = [
            self._levels.position(number, self._levels.nearest_corner(number, (v, v)))
            for v in corner.tolist()
        ]
        at = np.array([(-1 if xy is None else xy[0]) for xy in found], np.int64)[of].reshape(-1, 2)
        tiled = np.asarray(np.array([xy is not None for xy in found])[of].reshape(-1, 2).all(axis=1), bool)
        if not native.complete:
            tiled &= np.array([native.holds((x, y, size_px, size_px)) for x, y in at.tolist()], bool)
        return native, at, tiled

    def native_stream(self, xy_l0: tuple[int, int], size_px: int, mpp: float) -> bytes | None:
        """The slide's own JPEG bytes of a patch, self-contained; None where it is not one whole native tile.

        Raises:
            WsiFlError: when the tile is damaged.
        """
        level = self._native_level(size_px, mpp)
        if level is None:
            return None
        number, native = level
        corner = self._levels.nearest_corner(number, xy_l0)
        at = self._levels.position(number, corner)
        try:
            return None if at is None else native.stream((*at, size_px, size_px))
        except WsiFlError as error:
            raise self._unreadable(corner, error) from None

    def has_tiles_of(self, spec: GridSpec) -> bool:
        """Whether patches of a grid are whole native tiles, but for those over the edge."""
        level = self._native_level(spec.size_px, spec.mpp)
        on_tiles = spec.stride_px % spec.size_px == 0
        return on_tiles and level is not None and level[1].image.tile_px == (spec.size_px, spec.size_px)

    def _native_level(self, size_px: int, mpp: float) -> tuple[int, NativeLevel] | None:
        """The level that gives patches unchanged, and its tiles; None where there is none or OpenSlide reads it."""
        scale = mpp / self.mpp
        number = self._levels.coarsest_for(scale)
        if self._native is None or not self._levels.unchanged(number, scale, size_px):
            return None
        native = self._native.level(number)
        return None if native is None else (number, native)

    def area(
        self, xy_l0: tuple[float, float], scale: float, out: NDArray[np.uint8], *, overlapping: bool
    ) -> None:
        """Fill out [height, width, 3] with the area at xy_l0, with `scale` level-0 pixels per output pixel.

        Averaged by area, for which no µm need be known; `overlapping` as in `read`, whose errors it raises.
        """
        size = (out.shape[1], out.shape[0])
        level = self._levels.coarsest_for(scale)
        downsample = self.level_downsamples[level]
        if self._levels.unchanged(level, scale, max(size)):
            self._pixels(self._levels.nearest_corner(level, xy_l0), level, out, overlapping=overlapping)
            return
        reduction = self._levels.reduction(level, scale, max(size))
        # Whole level pixels around the wanted box, whose edges may be fractional.
        corner = tuple(floor(floor(v / downsample + 1e-9) * downsample) for v in xy_l0)
        left, top = (max(0.0, (v - c) / downsample) for v, c in zip(xy_l0, corner, strict=True))
        box = (left, top, left + size[0] * reduction, top + size[1] * reduction)
        region = np.empty((ceil(box[3] - 1e-6), ceil(box[2] - 1e-6), 3), np.uint8)
        self._pixels((corner[0], corner[1]), level, region, overlapping=overlapping)
        box = (*box[:2], min(box[2], region.shape[1]), min(box[3], region.shape[0]))
        out[:] = np.asarray(resampled(Image.fromarray(region), size, reduction, box))

    def _pixels(
        self, corner: tuple[int, int], level: int, out: NDArray[np.uint8], *, overlapping: bool
    ) -> None:
        """Fill out [height, width, 3] with the level's pixels at a level-0 corner, by the reader that can."""
        native = None if self._native is None else self._native.level(level)
        at = self._levels.position(level, corner)
        if native is not None and at is not None:
            box = (*at, out.shape[1], out.shape[0])
            if native.holds(box):
                try:
                    native.read(box, out, overlapping=overlapping)
                except WsiFlError as error:
                    raise self._unreadable(corner, error) from None
                return
        out[:] = self._composed(corner, level, (out.shape[1], out.shape[0]))

    def _composed(self, corner: tuple[int, int], level: int, size: tuple[int, int]) -> NDArray[np.uint8]:
        """OpenSlide's pixels [height, width, 3] over the background."""
        return rgb(self._region(corner, level, size), self._background)

    def _trusted(self, *, required: bool) -> TrustedLevels:
        def reference(level: int, box: Box) -> NDArray[np.uint8] | None:
            downsample = self.level_downsamples[level]
            corner = (round(box[0] * downsample), round(box[1] * downsample))
            at = self._levels.position(level, corner)
            return self._composed(corner, level, box[2:]) if at == box[:2] else None

        return TrustedLevels(
            self._file,
            self._handle.level_dimensions,
            self.vendor,
            self._properties,
            self._background,
            reference,
            required=required,
        )

    def _region(self, corner: tuple[int, ...], level: int, size: tuple[int, int]) -> Image.Image:
        """OpenSlide's RGBA region at a level-0 corner; an error kills the handle, not the slide."""
        handle = self._handle
        region: Image.Image
        try:
            region = handle.read_region((corner[0], corner[1]), level, size)
        except SourceError as error:
            raise self._unreadable(corner, error) from None
        except openslide.OpenSlideError:
            # The handle may have died of another thread's region: a handle of its own judges this one.
            with self._lock, closing(_open(self._file)) as own:
                try:
                    region = own.read_region((corner[0], corner[1]), level, size)
                except openslide.OpenSlideError as error:
                    raise self._unreadable(corner, error) from None
                finally:
                    # Nobody closes the dead handle: others may be in it, and it goes with its last user.
                    if self._handle is handle:
                        self._handle = _open(self._file)
        return region

    def _unreadable(self, corner: tuple[int, ...], error: Exception) -> WsiFlError:
        where = f"{self.path.name}: cannot be read at level-0 pixel ({corner[0]}, {corner[1]})"
        return WsiFlError(f"{where}: {one_line(error)}")


def _open(path: Path) -> Source:
    """Open a slide by OpenSlide, or by what reads it where OpenSlide does not, or misreads it."""
    if not path.exists():
        raise WsiFlError(f"{path}: no such slide")
    if not (path.is_file() or path.is_dir()):
        raise WsiFlError(f"{path.name}: neither a file nor a folder")
    found: Source | None = None
    try:
        if not path.is_dir():
            found = openslide.OpenSlide(str(path))
    except openslide.OpenSlideUnsupportedFormatError:
        found = None
    except openslide.OpenSlideError as error:
        if "only one SOP instance in concatenation" in str(error):
            raise WsiFlError(
                f"{path.name}: a part of a DICOM concatenation whose other parts are missing; put all of them into "
                "one folder"
            ) from None
        if not (is_czi(path) or is_ome(path)):  # OpenSlide reads some, and knows that it does not read others
            raise WsiFlError(f"{path.name}: cannot be opened: {one_line(error)}") from None
    if found is not None and not (_vendor(found) == _GENERIC and is_misread_by_openslide(path)):
        return found
    if found is not None:
        found.close()
    if (found := open_source(path)) is None:
        raise WsiFlError(f"{path.name}: not a slide format that is known here")
    return found


def _vendor(source: Source) -> str:
    return source.properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")


def _dicom_member(folder: Path) -> Path:
    """One file of a DICOM slide; OpenSlide finds the others of its series beside it."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and openslide.OpenSlide.detect_format(str(path)) == "dicom":
            return path
    raise WsiFlError(f"{folder}: a folder without DICOM slide files")
