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

from wsi_fl.slides.reading.formats.dicom_headers import is_dicom, is_dicom_folder, read_container, read_header
from wsi_fl.slides.reading.formats.level_selection import find_padded_levels, select_levels
from wsi_fl.slides.reading.formats.ngff import open_zarr
from wsi_fl.slides.reading.formats.ome import is_misread, open_ome_tiff, read_ome_mpp
from wsi_fl.slides.reading.formats.plain_pictures import open_picture
from wsi_fl.slides.reading.formats.scanners import open_czi, open_isyntax
from wsi_fl.slides.reading.formats.source import PixelSource, name_mpp_properties
from wsi_fl.slides.reading.formats.tiff_pages import (
    TIFF_MAGIC,
    find_foreign_levels,
    main_picture,
    open_tiled_tiff,
    query_tiff,
    require_colors,
    require_slide,
)
from wsi_fl.system.file_names import compose_text, slide_of
from wsi_fl.system.files import require_regular_file
from wsi_fl.types import WsiFlError, single_line

if TYPE_CHECKING:
    from tifffile import TiffFile

_HEAD_BYTES = 1 << 16
_CZI_MAGIC = b"ZISRAWFILE"
_Value = TypeVar("_Value")


def open_source(path: Path) -> PixelSource | None:
    """Open a slide of a format that OpenSlide does not know; None for an unknown format.

    Readers of other packages, the entry points `wsi_fl.readers`, come first: functions of the path and its first
    64 KiB that return None for other formats.
    """
    from wsi_fl.plugins import load_entries

    if is_zarr(path):
        return _open_guarded(path, open_zarr)
    if not path.is_file():
        return None
    if is_dicom(path) and read_header(path) is None:  # it may begin like a TIFF
        raise WsiFlError(f"{path.name}: a DICOM file, but no whole-slide image, or its header is damaged")
    with require_regular_file(path).open("rb") as file:
        head = file.read(_HEAD_BYTES)
    for open_plugin in load_entries("wsi_fl.readers").values():
        source: PixelSource | None = _open_guarded(path, partial(open_plugin, head=head))
        if source is not None:
            return source
    kinds: tuple[tuple[bool, Callable[[Path], PixelSource]], ...] = (
        (head.startswith(_CZI_MAGIC), open_czi),
        (b'<DataObject ObjectType="DPUfsImport"' in head, open_isyntax),
        (is_ome(path), open_ome_tiff),
        (head.startswith(TIFF_MAGIC), _open_tiff),
        (head.startswith(b"\x89PNG"), partial(open_picture, kind=PngImageFile)),
        (head.startswith(b"\xff\xd8\xff"), partial(open_picture, kind=JpegImageFile)),
    )
    return next((_open_guarded(path, open_format) for fits, open_format in kinds if fits), None)


def _open_tiff(path: Path) -> PixelSource:
    """Open a plain TIFF by its tiles, or as a picture."""
    is_tiled = query_tiff(path, lambda tif: bool(main_picture(tif).is_tiled), False)
    return open_tiled_tiff(path) if is_tiled else open_picture(path, TiffImageFile)


def is_slide_folder(path: Path) -> bool:
    """Return whether a folder is one slide: an OME-Zarr, or the files of a DICOM slide."""
    return is_zarr(path) or is_dicom_folder(path)


def slide_name(path: Path) -> str:
    """Return the name of a slide: that of its folder of DICOM files, else that of its file or Zarr without suffix.

    A series folder of the Imaging Data Commons has the name of the glass slide.

    Example:
        >>> slide_name(Path("slides/a.svs"))
        'a'
    """
    if is_dicom_folder(path) and not is_zarr(path):
        return compose_text(read_container(path) or path.name)
    return slide_of(path)


def is_zarr(path: Path) -> bool:
    """Return whether a folder is a Zarr group or array."""
    return path.is_dir() and any((path / name).is_file() for name in (".zattrs", ".zgroup", "zarr.json"))


def is_ome(path: Path) -> bool:
    """Return whether a TIFF has OME-XML."""
    return query_tiff(path, lambda tif: bool(tif.is_ome), False)


def is_misread_by_openslide(path: Path) -> bool:
    """Return whether OpenSlide reads another picture of a scanner-less TIFF than the main one, or less of it."""

    def is_other_picture(tif: TiffFile) -> bool:
        if tif.is_ome:
            return is_misread(path, tif)
        main, first = main_picture(tif), tif.pages[0]
        return bool(main.imagewidth * main.imagelength > first.imagewidth * first.imagelength)

    return query_tiff(path, is_other_picture, False)


def select_openslide_levels(path: Path, source: PixelSource, *, is_generic: bool) -> list[int]:
    """Return the numbers of the levels of a slide among those that OpenSlide, the source, lists.

    Args:
        is_generic: whether the file is a TIFF of an unknown scanner.

    Raises:
        WsiFlError: for a TIFF of several pictures or without 8-bit colours, which OpenSlide does not refuse.
    """

    sizes_px = source.level_dimensions

    def find_foreign(tif: TiffFile) -> set[int]:
        if not is_generic:
            require_colors(path, tif, sizes_px[0])
        elif not tif.is_ome:
            require_slide(path, tif)
        return find_foreign_levels(tif, sizes_px) if is_generic else set()

    no_levels: set[int] = set()
    return select_levels(sizes_px, query_tiff(path, find_foreign, no_levels) | find_padded_levels(source))


def read_ome_properties(path: Path) -> dict[str, str]:
    """Return the µm per pixel of an OME-TIFF, which OpenSlide does not find, as properties of OpenSlide."""
    return query_tiff(path, lambda tif: name_mpp_properties(read_ome_mpp(tif)) if tif.is_ome else {}, {})


def is_czi(path: Path) -> bool:
    """Return whether a file is a CZI."""
    with require_regular_file(path).open("rb") as file:
        return file.read(len(_CZI_MAGIC)) == _CZI_MAGIC


def _open_guarded(path: Path, open_format: Callable[[Path], _Value]) -> _Value:
    """Open a source; errors of its library become one line, except MemoryError."""
    try:
        return open_format(path)
    except (WsiFlError, MemoryError):
        raise
    except Exception as error:
        hint = "it lacks " if isinstance(error, KeyError) else ""
        raise WsiFlError(f"{path.name}: cannot be opened: {hint}{single_line(error)}") from None
