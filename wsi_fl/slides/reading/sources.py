"""Slides that OpenSlide does not read: which format a file has, and who opens it.

What a file is, its content says and not its name. A source looks like an OpenSlide handle, so `Slide` reads all alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wsi_fl.slides.reading.formats.ome import of_ome_tiff, of_zarr
from wsi_fl.slides.reading.formats.pictures import of_picture, of_tiff
from wsi_fl.slides.reading.formats.scanners import of_czi, of_isyntax
from wsi_fl.slides.reading.formats.source import Source
from wsi_fl.types import WsiFlError, one_line

_HEAD = 1 << 16
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_CZI = b"ZISRAWFILE"


def open_source(path: Path) -> Source | None:
    """Open a slide that OpenSlide does not know; None where nobody knows it.

    Raises:
        WsiFlError: when it is known and damaged, too large, or needs an extra that is not installed.
    """
    if is_zarr(path):
        return _guarded(path, of_zarr)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head[128:132] == b"DICM" and b"\x20\x00\x62\x91" in head:
        raise WsiFlError(
            f"{path.name}: a part of a DICOM concatenation, which OpenSlide does not read; join its parts into one file"
        )
    kinds: tuple[tuple[bool, Callable[[Path], Source]], ...] = (
        (head.startswith(_CZI), of_czi),
        (b'<DataObject ObjectType="DPUfsImport"' in head, of_isyntax),
        (is_ome(path, head), of_ome_tiff),
        (head.startswith(_TIFF), of_tiff),
        (head.startswith((b"\x89PNG", b"\xff\xd8\xff")), of_picture),
    )
    return next((_guarded(path, opened) for fits, opened in kinds if fits), None)


def is_zarr(path: Path) -> bool:
    """Return whether a folder is a Zarr group or array."""
    return path.is_dir() and any((path / name).is_file() for name in (".zattrs", ".zgroup", "zarr.json"))


def is_ome(path: Path, head: bytes | None = None) -> bool:
    """Return whether a TIFF says by OME-XML what it is."""
    if head is None:
        with path.open("rb") as file:
            head = file.read(4)
    if not head.startswith(_TIFF):
        return False
    from tifffile import TiffFile

    try:
        with TiffFile(path) as tif:
            return bool(tif.is_ome)
    except Exception:  # whatever a parser stumbles over in a damaged file
        return False


def is_czi(path: Path) -> bool:
    """Return whether a file is a CZI."""
    with path.open("rb") as file:
        return file.read(len(_CZI)) == _CZI


def _guarded(path: Path, opened: Callable[[Path], Source]) -> Source:
    """Open a source; what its library raises becomes one line."""
    try:
        return opened(path)
    except WsiFlError:
        raise
    except Exception as error:
        raise WsiFlError(f"{path.name}: cannot be opened: {one_line(error)}") from None
