"""Pictures of a TIFF by tifffile, and tiles that OpenSlide does not decode."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.formats.levels import own_levels
from wsi_fl.slides.reading.formats.source import Mpp, Source, digest, levels_of_arrays, needed
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffFrame, TiffPage

_REDUCED, _MASK = 1, 4
"""Bits of the tag NewSubfileType."""
_WHITE_IS_ZERO, _GREY, _RGB, _PALETTE, _TRANSPARENCY, _CMYK, _YCBCR = 0, 1, 2, 3, 4, 5, 6
"""Numbers of the tag PhotometricInterpretation."""
_SAMPLES = {_WHITE_IS_ZERO: 1, _GREY: 1, _RGB: 3, _PALETTE: 1, _CMYK: 4, _YCBCR: 3}
_NAMES = {_WHITE_IS_ZERO: "grey", _GREY: "grey", _PALETTE: "colours of a palette"}
_ALPHA = {1, 2}
"""Extra samples for transparency, premultiplied or not; others are further channels."""
_NUMBERS = {2: "signed numbers", 3: "floating point", 5: "complex numbers", 6: "complex numbers"}
"""Sample formats without colours."""
_JPEG = {6, 7}
_UNIT_UM = {2: 25_400.0, 3: 1e4}


def main_picture(tif: TiffFile) -> TiffPage:
    """Return the largest picture of a TIFF except masks and reduced copies, of equals the first."""
    pages = _pictures(tif)
    return max([page for page in pages if not _is_reduced(page)] or pages, key=_area)


def n_pictures(tif: TiffFile) -> int:
    """Return the number of pictures of the main picture's size in a TIFF: channels, focal planes or times."""
    main = main_picture(tif)
    same = [page for page in _pictures(tif) if _size(page) == _size(main) and not _is_reduced(page)]
    in_one = int((tif.imagej_metadata or {}).get("images", 1)) if tif.is_imagej else 1
    return max(len(same), in_one)


def what_else(page: TiffPage) -> str:
    """Return a description of a picture's pixels; "" if they are colours of 8 bits."""
    bits = page.bitspersample if isinstance(page.bitspersample, int) else max(page.bitspersample)
    kind = _name(page)
    if page.sampleformat in _NUMBERS:
        return _NUMBERS[page.sampleformat]
    if bits == 1 and page.photometric != _PALETTE:
        return "black and white alone"
    few = page.photometric in {_WHITE_IS_ZERO, _GREY, _PALETTE} and bits in {1, 2, 4}
    if bits != 8 and not few:
        return f"{bits}-bit {kind}"
    usual = _SAMPLES.get(int(page.photometric))
    if usual is None:
        return kind
    extra = page.samplesperpixel - usual
    transparent = extra == 1 and page.photometric == _RGB and {*map(int, page.extrasamples)} <= _ALPHA
    if extra and not (transparent and page.extrasamples):
        return f"{kind} of {page.samplesperpixel} channels"
    return ""


def require_a_slide(path: Path, tif: TiffFile) -> None:
    """Refuse a TIFF whose main picture has no colours of 8 bits, or is one of several.

    Raises:
        WsiFlError: with the content of the file and the way out.
    """
    _require_colours(path, main_picture(tif))
    require_single(path, tif)


def require_single(path: Path, tif: TiffFile) -> None:
    """Refuse a TIFF of several pictures of one size."""
    if (n := n_pictures(tif)) > 1:
        raise WsiFlError(
            f"{path.name}: a slide has one picture; this file holds {n} of one size (channels, focal planes or times); "
            "save the one that is meant as a file of its own"
        )


def require_colours(path: Path, tif: TiffFile, size_px: tuple[int, int]) -> None:
    """Refuse a TIFF whose pictures of this size have no colours of 8 bits."""
    for page in pages_of(tif):
        if _size(page) == size_px:
            _require_colours(path, page)


def _require_colours(path: Path, page: TiffPage) -> None:
    if what := what_else(page):
        raise WsiFlError(
            f"{path.name}: a slide has 8-bit colours; this picture is {what}; save it as red, green and blue "
            "of 8 bits"
        )


def foreign_levels(tif: TiffFile, sizes_px: tuple[tuple[int, int], ...]) -> set[int]:
    """Return the numbers of OpenSlide's levels of a TIFF, of these sizes, that are masks or have other channels.

    OpenSlide lists tiled directories, the first and those marked as reduced, by width.
    """
    pages = [page for page in pages_of(tif) if page.is_tiled and (page.index == 0 or _is_reduced(page))]
    pages.sort(key=lambda page: -page.imagewidth)
    if tuple(map(_size, pages)) != sizes_px:
        return set()
    kind = _kind(pages[0])
    return {k for k, page in enumerate(pages) if _is_mask(page) or _kind(page) != kind}


def _name(page: TiffPage) -> str:
    """Return a picture's name for its colours."""
    return _NAMES.get(int(page.photometric)) or str(getattr(page.photometric, "name", page.photometric))


def codec_of(page: TiffPage) -> str:
    """Return the name of the codec of a picture's tiles."""
    return str(getattr(page.compression, "name", page.compression)).replace("_", " ")


def of_tiles(path: Path) -> Source:
    """Open a TIFF whose main picture is tiled.

    Raises:
        WsiFlError: for other pixels than red, green and blue, or grey, of 8 bits.
        UsageError: when the extra for its codec is not installed.
    """
    from tifffile import TiffFile

    with ExitStack() as stack:
        tif = stack.enter_context(TiffFile(path))
        main = main_picture(tif)
        require_a_slide(path, tif)
        codec = codec_of(main)
        plain = main.samplesperpixel == 3 and main.photometric == _RGB
        jpeg = main.photometric == _YCBCR and main.compression in _JPEG
        if not (plain or jpeg or (main.samplesperpixel == 1 and main.photometric == _GREY)):
            raise WsiFlError(
                f"{path.name}: OpenSlide does not read its {codec}, and no other reader {_name(main)} of "
                f"{main.samplesperpixel} channels in it; save it as red, green and blue in tiles of JPEG"
            )
        try:
            needed("imagecodecs", "formats", path)
            zarr = needed("zarr", "formats", path)
        except UsageError as error:
            raise UsageError(f"{error}; OpenSlide does not read it (its tiles are {codec})") from None
        _require_decoder(path, main)
        pages = _levels(tif, main)
        return levels_of_arrays(
            [zarr.open(page.aszarr(), mode="r") for page in pages],
            "yx" if main.samplesperpixel == 1 else "cyx" if main.planarconfig == 2 else "yxc",
            vendor="tiled tiff",
            mpp=_mpp(main),
            quickhash=digest(path),
            lacks=Gaps([[page] for page in pages]),
            close=stack.pop_all().close,
        )


def _require_decoder(path: Path, page: TiffPage) -> None:
    """Refuse tiles of a codec that no installed library decodes."""
    from tifffile import TIFF

    try:
        is_read = TIFF.DECOMPRESSORS[page.compression] is not None or page.compression == 1
    except (KeyError, ValueError, ImportError):
        is_read = False
    if not is_read:
        raise WsiFlError(
            f"{path.name}: its tiles are packed by codec {codec_of(page)}, which no library here reads; save it as "
            "red, green and blue in tiles of JPEG"
        )


class Gaps:
    """The missing tiles of levels, by the pages of each (a page, or one for each channel); callable for `Levels`."""

    def __init__(self, levels: Sequence[Sequence[TiffPage | TiffFrame | None]]) -> None:
        first = [next(page for page in pages if page is not None).keyframe for pages in levels]
        self._tiles = [(page.tilewidth, page.tilelength) for page in first]
        self._tables = [
            self._table(page, pages) if page.is_tiled else None
            for page, pages in zip(first, levels, strict=True)
        ]

    @staticmethod
    def _table(first: TiffPage, pages: Sequence[TiffPage | TiffFrame | None]) -> NDArray[np.bool_] | None:
        """Return bool[rows, columns] of tiles without some channel; None if all are complete."""
        across, down = -(-first.imagewidth // first.tilewidth), -(-first.imagelength // first.tilelength)
        missing = np.zeros((down, across), bool)
        for page in pages:
            absent = np.ones(missing.size, bool)
            if page is not None:
                absent = np.array(
                    [not (at and n) for at, n in zip(page.dataoffsets, page.databytecounts, strict=True)]
                )
            missing |= absent[: absent.size // missing.size * missing.size].reshape(-1, down, across).any(0)
        return missing if missing.any() else None

    def __call__(self, level: int, at: tuple[int, int], size: tuple[int, int]) -> NDArray[np.bool_]:
        """Return bool[height, width] of the pixels that the file lacks."""
        table = self._tables[level]
        if table is None:
            return np.zeros((size[1], size[0]), bool)
        columns, rows = (
            np.arange(start, start + length) // tile
            for start, length, tile in zip(at, size, self._tiles[level], strict=True)
        )
        return table[np.ix_(rows, columns)]


def _levels(tif: TiffFile, main: TiffPage) -> list[TiffPage]:
    """Return the main picture and its reduced copies, finest first."""
    copies = [
        page for page in _pictures(tif) if _is_reduced(page) and page.is_tiled and _kind(page) == _kind(main)
    ]
    pages = [main, *(page for page in copies if _area(page) < _area(main))]
    return [pages[k] for k in own_levels([_size(page) for page in pages])]


def _mpp(page: TiffPage) -> Mpp:
    """Return the µm per pixel by the tags of the resolution."""
    unit = page.tags.get("ResolutionUnit")
    um = _UNIT_UM.get(int(unit.value) if unit is not None else 0)

    def stated(name: str) -> float | None:
        tag: Any = page.tags.get(name)
        if um is None or tag is None or not all(tag.value):
            return None
        return um * float(tag.value[1]) / float(tag.value[0])

    return stated("XResolution"), stated("YResolution")


def pages_of(tif: TiffFile) -> list[TiffPage]:
    """Return the directories of a TIFF; WsiFlError if their list is damaged."""
    from tifffile import TiffPage

    pages: list[TiffPage] = []
    offsets: set[int] = set()
    for page in tif.pages:
        if page.offset in offsets:
            raise WsiFlError(f"{tif.filename}: its list of directories is damaged")
        offsets.add(page.offset)
        if isinstance(page, TiffPage):
            pages.append(page)
    return pages


def _pictures(tif: TiffFile) -> list[TiffPage]:
    """Return the directories except masks."""
    return [page for page in pages_of(tif) if not _is_mask(page)]


def _is_mask(page: TiffPage) -> bool:
    return bool(page.subfiletype & _MASK) or page.photometric == _TRANSPARENCY


def _is_reduced(page: TiffPage) -> bool:
    return bool(page.subfiletype & _REDUCED)


def _size(page: TiffPage) -> tuple[int, int]:
    return page.imagewidth, page.imagelength


def _area(page: TiffPage) -> int:
    return int(page.imagewidth * page.imagelength)


def _kind(page: TiffPage) -> tuple[Any, ...]:
    return page.samplesperpixel, page.bitspersample, page.sampleformat
