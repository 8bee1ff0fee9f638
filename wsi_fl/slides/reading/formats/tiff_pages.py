"""Pictures of a TIFF by tifffile, and tiles that OpenSlide does not decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.formats.level_selection import select_levels
from wsi_fl.slides.reading.formats.source import Mpp, PixelSource, build_array_levels, digest_file, import_extra
from wsi_fl.system.files import require_regular_file
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffFrame, TiffPage

TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_REDUCED, _MASK = 1, 4
"""Bits of the tag NewSubfileType."""
_WHITE_IS_ZERO, _GRAY, _RGB, _PALETTE, _TRANSPARENCY, _CMYK, _YCBCR = 0, 1, 2, 3, 4, 5, 6
"""Numbers of the tag PhotometricInterpretation."""
_N_SAMPLES = {_WHITE_IS_ZERO: 1, _GRAY: 1, _RGB: 3, _PALETTE: 1, _CMYK: 4, _YCBCR: 3}
_COLOR_NAMES = {_WHITE_IS_ZERO: "grey", _GRAY: "grey", _PALETTE: "colours of a palette"}
_ALPHA_SAMPLES = {1, 2}
"""Extra samples for transparency, premultiplied or not; others are further channels."""
_SAMPLE_FORMATS = {2: "signed numbers", 3: "floating point", 5: "complex numbers", 6: "complex numbers"}
"""Sample formats without colours."""
_JPEG = {6, 7}
_UNIT_UM = {2: 25_400.0, 3: 1e4}
_Value = TypeVar("_Value")


def query_tiff(path: Path, query: Callable[[TiffFile], _Value], default: _Value) -> _Value:
    """Return the result of a query of a TIFF; the default for other and for damaged files."""
    with require_regular_file(path).open("rb") as file:
        if not file.read(4).startswith(TIFF_MAGIC):
            return default
    from tifffile import TiffFile

    try:
        with TiffFile(path) as tif:
            tif.pages.cache = True  # a directory is parsed once, however often a query looks at all
            return query(tif)
    except (MemoryError, WsiFlError):
        raise
    except Exception:  # a damaged file
        return default


def main_picture(tif: TiffFile) -> TiffPage:
    """Return the largest picture of a TIFF except masks and reduced copies, of equals the first."""
    pages = _list_pictures(tif)
    return max([page for page in pages if not _is_reduced(page)] or pages, key=_page_area)


def _count_pictures(tif: TiffFile) -> int:
    """Return the number of pictures of the main picture's size in a TIFF: channels, focal planes or times."""
    main = main_picture(tif)
    pictures = [page for page in _list_pictures(tif) if _page_size(page) == _page_size(main) and not _is_reduced(page)]
    n_images = int((tif.imagej_metadata or {}).get("images", 1)) if tif.is_imagej else 1
    return max(len(pictures), n_images)


def _describe_pixels(page: TiffPage) -> str:
    """Return a description of a picture's pixels; "" if they are colours of 8 bits."""
    bits = page.bitspersample if isinstance(page.bitspersample, int) else max(page.bitspersample)
    kind = _color_name(page)
    if page.sampleformat in _SAMPLE_FORMATS:
        return _SAMPLE_FORMATS[page.sampleformat]
    if bits == 1 and page.photometric != _PALETTE:
        return "black and white alone"
    is_few_bits = page.photometric in {_WHITE_IS_ZERO, _GRAY, _PALETTE} and bits in {1, 2, 4}
    if bits != 8 and not is_few_bits:
        return f"{bits}-bit {kind}"
    n_usual = _N_SAMPLES.get(int(page.photometric))
    if n_usual is None:
        return kind
    n_extra = page.samplesperpixel - n_usual
    is_transparent = n_extra == 1 and page.photometric == _RGB and {*map(int, page.extrasamples)} <= _ALPHA_SAMPLES
    if n_extra and not (is_transparent and page.extrasamples):
        return f"{kind} of {page.samplesperpixel} channels"
    return ""


def require_slide(path: Path, tif: TiffFile) -> None:
    """Refuse a TIFF whose main picture has no colours of 8 bits, or is one of several.

    Raises:
        WsiFlError: with the content of the file and the way out.
    """
    _require_page_colors(path, main_picture(tif))
    require_single(path, tif)


def require_single(path: Path, tif: TiffFile) -> None:
    """Refuse a TIFF of several pictures of one size."""
    if (n := _count_pictures(tif)) > 1:
        raise WsiFlError(
            f"{path.name}: a slide has one picture; this file holds {n} of one size (channels, focal planes or times); "
            "save the one that is meant as a file of its own"
        )


def require_colors(path: Path, tif: TiffFile, size_px: tuple[int, int]) -> None:
    """Refuse a TIFF whose pictures of this size have no colours of 8 bits."""
    for page in list_pages(tif):
        if _page_size(page) == size_px:
            _require_page_colors(path, page)


def _require_page_colors(path: Path, page: TiffPage) -> None:
    if reason := _describe_pixels(page):
        raise WsiFlError(
            f"{path.name}: a slide has 8-bit colours; this picture is {reason}; save it as red, green and blue "
            "of 8 bits"
        )


def find_foreign_levels(tif: TiffFile, sizes_px: tuple[tuple[int, int], ...]) -> set[int]:
    """Return the numbers of OpenSlide's levels of a TIFF, of these sizes, that are masks or have other channels.

    OpenSlide lists tiled directories, the first and those marked as reduced, by width.
    """
    pages = [page for page in list_pages(tif) if page.is_tiled and (page.index == 0 or _is_reduced(page))]
    pages.sort(key=lambda page: -page.imagewidth)
    if tuple(map(_page_size, pages)) != sizes_px:
        return set()
    kind = _page_kind(pages[0])
    return {k for k, page in enumerate(pages) if _is_mask(page) or _page_kind(page) != kind}


def _color_name(page: TiffPage) -> str:
    """Return a picture's name for its colours."""
    return _COLOR_NAMES.get(int(page.photometric)) or str(getattr(page.photometric, "name", page.photometric))


def _codec_name(page: TiffPage) -> str:
    """Return the name of the codec of a picture's tiles."""
    return str(getattr(page.compression, "name", page.compression)).replace("_", " ")


def open_tiled_tiff(path: Path) -> PixelSource:
    """Open a TIFF whose main picture is tiled.

    Raises:
        WsiFlError: for other pixels than red, green and blue, or grey, of 8 bits.
        UsageError: when the extra that reads its tiles is not installed.
    """
    from tifffile import TiffFile

    with ExitStack() as stack:
        tif = stack.enter_context(TiffFile(path))
        main = main_picture(tif)
        require_slide(path, tif)
        codec = _codec_name(main)
        is_rgb = main.samplesperpixel == 3 and main.photometric == _RGB
        is_jpeg = main.photometric == _YCBCR and main.compression in _JPEG
        if not (is_rgb or is_jpeg or (main.samplesperpixel == 1 and main.photometric == _GRAY)):
            raise WsiFlError(
                f"{path.name}: OpenSlide does not read its {codec}, and no other reader {_color_name(main)} of "
                f"{main.samplesperpixel} channels in it; save it as red, green and blue in tiles of JPEG"
            )
        try:
            zarr = import_extra("zarr", "formats", path)
        except UsageError as error:
            raise UsageError(f"{error}; OpenSlide does not read it (its tiles are {codec})") from None
        _require_decoder(path, main)
        pages = _list_levels(tif, main)
        return build_array_levels(
            [zarr.open(page.aszarr(), mode="r") for page in pages],
            "yx" if main.samplesperpixel == 1 else "cyx" if main.planarconfig == 2 else "yxc",
            vendor="tiled tiff",
            mpp=_read_mpp(main),
            quickhash=digest_file(path),
            lacks=TileGaps([[page] for page in pages]),
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
            f"{path.name}: its tiles are packed by codec {_codec_name(page)}, which no library here reads; save it as "
            "red, green and blue in tiles of JPEG"
        )


class TileGaps:
    """The missing tiles of levels, by the pages of each (a page, or one for each channel); callable for `Levels`."""

    def __init__(self, levels: Sequence[Sequence[TiffPage | TiffFrame | None]]) -> None:
        first = [next(page for page in pages if page is not None).keyframe for pages in levels]
        self._tiles = [(page.tilewidth, page.tilelength) for page in first]
        self._tables = [
            self._find_missing_tiles(page, pages) if page.is_tiled else None
            for page, pages in zip(first, levels, strict=True)
        ]

    @staticmethod
    def _find_missing_tiles(first: TiffPage, pages: Sequence[TiffPage | TiffFrame | None]) -> NDArray[np.bool_] | None:
        """Return bool[rows, columns] of tiles without some channel; None if all are complete."""
        n_columns, n_rows = -(-first.imagewidth // first.tilewidth), -(-first.imagelength // first.tilelength)
        missing = np.zeros((n_rows, n_columns), bool)
        for page in pages:
            is_absent = np.ones(missing.size, bool)
            if page is not None:
                is_absent = np.array(
                    [
                        not (offset and n_bytes)
                        for offset, n_bytes in zip(page.dataoffsets, page.databytecounts, strict=True)
                    ]
                )
            missing |= is_absent[: is_absent.size // missing.size * missing.size].reshape(-1, n_rows, n_columns).any(0)
        return missing if missing.any() else None

    def __call__(self, level: int, corner: tuple[int, int], size: tuple[int, int]) -> NDArray[np.bool_]:
        """Return bool[height, width] of the pixels that the file lacks."""
        table = self._tables[level]
        if table is None:
            return np.zeros((size[1], size[0]), bool)
        columns, rows = (
            np.arange(start, start + length) // tile_side
            for start, length, tile_side in zip(corner, size, self._tiles[level], strict=True)
        )
        return table[np.ix_(rows, columns)]


def _list_levels(tif: TiffFile, main: TiffPage) -> list[TiffPage]:
    """Return the main picture and its reduced copies, finest first."""
    copies = [
        page
        for page in _list_pictures(tif)
        if _is_reduced(page) and page.is_tiled and _page_kind(page) == _page_kind(main)
    ]
    pages = [main, *(page for page in copies if _page_area(page) < _page_area(main))]
    return [pages[k] for k in select_levels([_page_size(page) for page in pages])]


def _read_mpp(page: TiffPage) -> Mpp:
    """Return the µm per pixel by the tags of the resolution."""
    unit = page.tags.get("ResolutionUnit")
    um = _UNIT_UM.get(int(unit.value) if unit is not None else 0)

    def axis_mpp(name: str) -> float | None:
        tag: Any = page.tags.get(name)
        if um is None or tag is None or not all(tag.value):
            return None
        return um * float(tag.value[1]) / float(tag.value[0])

    return axis_mpp("XResolution"), axis_mpp("YResolution")


def list_pages(tif: TiffFile) -> list[TiffPage]:
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


def _list_pictures(tif: TiffFile) -> list[TiffPage]:
    """Return the directories except masks."""
    return [page for page in list_pages(tif) if not _is_mask(page)]


def _is_mask(page: TiffPage) -> bool:
    return bool(page.subfiletype & _MASK) or page.photometric == _TRANSPARENCY


def _is_reduced(page: TiffPage) -> bool:
    return bool(page.subfiletype & _REDUCED)


def _page_size(page: TiffPage) -> tuple[int, int]:
    return page.imagewidth, page.imagelength


def _page_area(page: TiffPage) -> int:
    return int(page.imagewidth * page.imagelength)


def _page_kind(page: TiffPage) -> tuple[Any, ...]:
    return page.samplesperpixel, page.bitspersample, page.sampleformat
