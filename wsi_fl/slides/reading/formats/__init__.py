"""Slides that OpenSlide does not read: which format a file has, and who opens it.

What a file is, its content says and not its name. A source looks like an OpenSlide handle, so `Slide` reads all alike.
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
_Answer = TypeVar("_Answer")


def open_source(path: Path) -> Source | None:
    """Open a slide that OpenSlide does not know; None where nobody knows it.

    Readers of other packages, the entry points `wsi_fl.readers`, are asked before these: functions of the path and
    its first 64 KiB that return None for what is not theirs.
    """
    from wsi_fl.plugins import entries

    if is_zarr(path):
        return _guarded(path, of_zarr)
    if not path.is_file():
        return None
    if is_dicom(path) and header_of(path) is None:  # which may begin as a TIFF too
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
    """Open a plain TIFF, by its tiles or as a picture."""
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
    """Return whether a TIFF says by OME-XML what it is."""
    return _asked(path, lambda tif: bool(tif.is_ome), False)


def is_misread_by_openslide(path: Path) -> bool:
    """Return whether OpenSlide reads a TIFF of no scanner, but reads another picture or less than there is."""

    def misread(tif: TiffFile) -> bool:
        if tif.is_ome:
            return is_misread(path, tif)
        main, first = main_picture(tif), tif.pages[0]
        return bool(main.imagewidth * main.imagelength > first.imagewidth * first.imagelength)

    return _asked(path, misread, False)


def levels_of_openslide(path: Path, source: Source, *, generic: bool) -> list[int]:
    """Return the numbers of a slide's own levels among those that OpenSlide, the source, lists.

    Args:
        generic: whether the file is a TIFF of no known scanner.

    Raises:
        WsiFlError: when it is a TIFF of several pictures, or without colours of 8 bits, which OpenSlide does not
            refuse.
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
    """Return the µm per pixel of an OME-TIFF as OpenSlide's properties, which OpenSlide does not find."""
    return _asked(path, lambda tif: mpp_properties(mpp_of_ome(tif)) if tif.is_ome else {}, {})


def _asked(path: Path, question: Callable[[TiffFile], _Answer], otherwise: _Answer) -> _Answer:
    """Answer a question about a TIFF; what is none, or is damaged, gets the other answer."""
    with ordinary(path).open("rb") as file:
        if not file.read(4).startswith(_TIFF):
            return otherwise
    from tifffile import TiffFile

    try:
        with TiffFile(path) as tif:
            return question(tif)
    except (MemoryError, WsiFlError):
        raise
    except Exception:  # whatever a parser stumbles over in a damaged file
        return otherwise


def is_czi(path: Path) -> bool:
    """Return whether a file is a CZI."""
    with ordinary(path).open("rb") as file:
        return file.read(len(_CZI)) == _CZI


def _guarded(path: Path, opened: Callable[[Path], _Answer]) -> _Answer:
    """Open a source; what its library raises becomes one line, except a want of memory."""
    try:
        return opened(path)
    except (WsiFlError, MemoryError):
        raise
    except Exception as error:
        lacking = "it lacks " if isinstance(error, KeyError) else ""
        raise WsiFlError(f"{path.name}: cannot be opened: {lacking}{one_line(error)}") from None
