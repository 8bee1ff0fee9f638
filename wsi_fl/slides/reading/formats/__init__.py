"""Slides that OpenSlide does not read: detection of their format by content, and opening.

A source has the interface of an OpenSlide handle, so `Slide` reads all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from wsi_fl.slides.reading.formats.dicom import header_of, is_dicom, is_dicom_folder
from wsi_fl.slides.reading.formats.levels import own_levels, padded_levels
from wsi_fl.slides.reading.formats.ngff import of_zarr
from wsi_fl.slides.reading.formats.ome import is_misread, mpp_of_ome, of_ome_tiff
from wsi_fl.slides.reading.formats.pictures import of_picture
from wsi_fl.slides.reading.formats.scanners import of_czi, of_isyntax
from wsi_fl.slides.reading.formats.source import Source, mpp_properties
from wsi_fl.slides.reading.formats.tiff import (
    foreign_levels,
    main_picture,
    of_tiles,
    require_a_slide,
    require_colours,
)
from wsi_fl.system.files import ordinary
from wsi_fl.system.names import compose_text, slide_of
from wsi_fl.types import WsiFlError, one_line

if TYPE_CHECKING:
    from tifffile import TiffFile

_HEAD = 1 << 16
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_CZI = b"ZISRAWFILE"
_Value = TypeVar("_Value")


def open_source(path: Path) -> Source | None:
    """Open a slide of a format that OpenSlide does not know; None for an unknown format.

    Readers of other packages, the entry points `wsi_fl.readers`, come first: functions of the path and its first
    64 KiB that return None for other formats.
    """
    from wsi_fl.plugins import entries

    if is_zarr(path):
        return _guarded(path, of_zarr)
    if not path.is_file():
        return None
    if is_dicom(path) and header_of(path) is None:  # it may begin like a TIFF
        raise WsiFlError(f"{path.name}: a DICOM file, but no whole-slide image, or its header is damaged")
    with ordinary(path).open("rb") as file:
        head = file.read(_HEAD)
    for read in entries("wsi_fl.readers").values():
        found: Source | None = _guarded(path, partial(read, head=head))
        if found is not None:
            return found
    kinds: tuple[tuple[bool, Callable[[Path], Source]], ...] = (
        (head.startswith(_CZI), of_czi),
        (b'<DataObject ObjectType="DPUfsImport"' in head, of_isyntax),
        (is_ome(path), of_ome_tiff),
        (head.startswith(_TIFF), _of_tiff),
        (head.startswith(b"\x89PNG"), partial(of_picture, kind=PngImageFile)),
        (head.startswith(b"\xff\xd8\xff"), partial(of_picture, kind=JpegImageFile)),
    )
    return next((_guarded(path, opened) for fits, opened in kinds if fits), None)


def _of_tiff(path: Path) -> Source:
    """Open a plain TIFF by its tiles, or as a picture."""
    tiled = _asked(path, lambda tif: bool(main_picture(tif).is_tiled), False)
    return of_tiles(path) if tiled else of_picture(path, TiffImageFile)


def is_slide_folder(path: Path) -> bool:
    """Return whether a folder is one slide: an OME-Zarr, or the files of a DICOM slide."""
    return is_zarr(path) or is_dicom_folder(path)


def slide_name(path: Path) -> str:
    """Return the name of a slide: that of its folder of DICOM files, else that of its file or Zarr without suffix.

    Example:
        >>> slide_name(Path("slides/a.svs"))
        'a'
    """
    return compose_text(path.name) if is_dicom_folder(path) and not is_zarr(path) else slide_of(path)


def is_zarr(path: Path) -> bool:
    """Return whether a folder is a Zarr group or array."""
    return path.is_dir() and any((path / name).is_file() for name in (".zattrs", ".zgroup", "zarr.json"))


def is_ome(path: Path) -> bool:
    """Return whether a TIFF has OME-XML."""
    return _asked(path, lambda tif: bool(tif.is_ome), False)


def is_misread_by_openslide(path: Path) -> bool:
    """Return whether OpenSlide reads another picture of a scanner-less TIFF than the main one, or less of it."""

    def misread(tif: TiffFile) -> bool:
        if tif.is_ome:
            return is_misread(path, tif)
        main, first = main_picture(tif), tif.pages[0]
        return bool(main.imagewidth * main.imagelength > first.imagewidth * first.imagelength)

    return _asked(path, misread, False)


def levels_of_openslide(path: Path, source: Source, *, generic: bool) -> list[int]:
    """Return the numbers of the levels of a slide among those that OpenSlide, the source, lists.

    Args:
        is_generic: whether the file is a TIFF of an unknown scanner.

    Raises:
        WsiFlError: for a TIFF of several pictures or without 8-bit colours, which OpenSlide does not refuse.
    """

    sizes_px = source.level_dimensions

    def foreign(tif: TiffFile) -> set[int]:
        if not generic:
            require_colours(path, tif, sizes_px[0])
        elif not tif.is_ome:
            require_a_slide(path, tif)
        return foreign_levels(tif, sizes_px) if generic else set()

    none: set[int] = set()
    return own_levels(sizes_px, _asked(path, foreign, none) | padded_levels(source))


def properties_of_ome(path: Path) -> dict[str, str]:
    """Return the µm per pixel of an OME-TIFF, which OpenSlide does not find, as properties of OpenSlide."""
    return _asked(path, lambda tif: mpp_properties(mpp_of_ome(tif)) if tif.is_ome else {}, {})


def _asked(path: Path, question: Callable[[TiffFile], _Value], otherwise: _Value) -> _Value:
    """Return the result of a query of a TIFF; the default for other and for damaged files."""
    with ordinary(path).open("rb") as file:
        if not file.read(4).startswith(_TIFF):
            return otherwise
    from tifffile import TiffFile

    try:
        with TiffFile(path) as tif:
            return question(tif)
    except (MemoryError, WsiFlError):
        raise
    except Exception:  # a damaged file
        return otherwise


def is_czi(path: Path) -> bool:
    """Return whether a file is a CZI."""
    with ordinary(path).open("rb") as file:
        return file.read(len(_CZI)) == _CZI


def _guarded(path: Path, opened: Callable[[Path], _Value]) -> _Value:
    """Open a source; errors of its library become one line, except MemoryError."""
    try:
        return opened(path)
    except (WsiFlError, MemoryError):
        raise
    except Exception as error:
        lacking = "it lacks " if isinstance(error, KeyError) else ""
        raise WsiFlError(f"{path.name}: cannot be opened: {lacking}{one_line(error)}") from None
