"""OME-TIFF, read by tifffile."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import normalize
from xml.etree import ElementTree

import numpy as np

from wsi_fl.slides.reading.formats.source import (
    Mpp,
    PixelSource,
    build_array_levels,
    digest_file,
    import_extra,
    is_red_green_blue,
)
from wsi_fl.slides.reading.formats.tiff_pages import TileGaps
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage, TiffPageSeries

_UNIT_UM = {
    **dict.fromkeys(("m", "meter", "metre"), 1e6),
    **dict.fromkeys(("cm", "centimeter", "centimetre"), 1e4),
    **dict.fromkeys(("mm", "millimeter", "millimetre"), 1e3),
    **dict.fromkeys(("\u03bcm", "um", "micrometer", "micrometre", "micron"), 1.0),
    **dict.fromkeys(("nm", "nanometer", "nanometre"), 1e-3),
}
"""µm of units by name in Unicode's compatible form, in which the micro sign is the Greek letter."""
_MAX_CHANNELS = 3
_GRAY = 1
"""Number of the tag PhotometricInterpretation."""


def find_unit_um(unit: str | None) -> float | None:
    """Return the µm of a unit of length by its name; None for other names.

    Example:
        >>> find_unit_um("\u00b5m"), find_unit_um("\u03bcm"), find_unit_um("Micrometers"), find_unit_um("pixel")
        (1.0, 1.0, 1.0, None)
    """
    name = normalize("NFKC", unit or "").strip()
    return _UNIT_UM.get(name) or (_UNIT_UM.get(name.lower().removesuffix("s")) if len(name) > 3 else None)


def open_ome_tiff(path: Path) -> PixelSource:
    """Open the largest series of an OME-TIFF, with its pyramid in SubIFDs.

    Its colours lie in each pixel, or are three channels, a plane each.
    """
    from tifffile import COMPRESSION, PHOTOMETRIC, TiffFile

    with ExitStack() as stack:
        tif = stack.enter_context(TiffFile(path))
        series = _largest_series(tif)
        page = series.keyframe
        is_encoded = page.photometric == PHOTOMETRIC.YCBCR and page.compression != COMPRESSION.JPEG
        is_in_pixels = not is_encoded and all(_is_rgb(level.keyframe) for level in series.levels)
        if not is_in_pixels and not _is_in_planes(tif, series):
            raise WsiFlError(
                f"{path.name}: a slide has red, green and blue of 8 bits in each pixel, or as three channels; this "
                f"OME-TIFF has {page.samplesperpixel} × {page.dtype} ({PHOTOMETRIC(page.photometric).name}), axes "
                f"{series.axes}, shape {series.shape}, channels {', '.join(_read_channels(tif)[0]) or 'without names'}"
            )
        zarr = import_extra("zarr", "formats", path)
        arrays = [zarr.open(series.aszarr(level=k), mode="r") for k in range(len(series.levels))]
        return build_array_levels(
            arrays,
            series.axes.lower().replace("s", "c"),
            vendor="ome-tiff",
            mpp=read_ome_mpp(tif),
            quickhash=digest_file(path),
            lacks=TileGaps([list(level.pages)[: 1 if is_in_pixels else _MAX_CHANNELS] for level in series.levels]),
            close=stack.pop_all().close,
        )


def is_misread(path: Path, tif: TiffFile) -> bool:
    """Return whether a reader of the first directories only, as OpenSlide, misreads an OME-TIFF.

    True if its slide is not the first picture or has no 8-bit colours, or if its pyramid is in SubIFDs and the extra
    for these is installed.
    """
    series = _largest_series(tif)
    if series.keyframe.index != 0 or not _is_rgb(series.keyframe):
        return True
    try:
        return len(series.levels) > 1 and import_extra("zarr", "formats", path) is not None
    except UsageError:
        return False


def read_ome_mpp(tif: TiffFile) -> Mpp:
    """Return the µm per pixel of the largest series by OME-XML."""
    pixels = _find_pixels_element(tif)

    def axis_mpp(axis: str) -> float | None:
        if pixels is None:
            return None
        value, unit = pixels.get(f"PhysicalSize{axis}"), pixels.get(f"PhysicalSize{axis}Unit", "µm")
        um = find_unit_um(unit)
        return float(value) * um if value and um else None

    return axis_mpp("X"), axis_mpp("Y")


def _find_pixels_element(tif: TiffFile) -> ElementTree.Element | None:
    """Return the Pixels element of the largest series in OME-XML."""
    page = _largest_series(tif).keyframe
    size = str(page.imagewidth), str(page.imagelength)
    try:
        root = ElementTree.fromstring(tif.ome_metadata or "")
    except ElementTree.ParseError:
        return None
    elements = (element for element in root.iter() if _tag_name(element) == "Pixels")
    return next((element for element in elements if (element.get("SizeX"), element.get("SizeY")) == size), None)


def _tag_name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _read_channels(tif: TiffFile) -> tuple[list[str], list[str]]:
    """Return (names, colours as hexadecimal digits) of the channels of the largest series; "" where not given."""
    pixels = _find_pixels_element(tif)
    channels = [element for element in pixels if _tag_name(element) == "Channel"] if pixels is not None else []
    colors = [f"{int(channel.get('Color') or -1) & 0xFFFFFFFF:08X}"[:6] for channel in channels]
    return [channel.get("Name") or "" for channel in channels], colors


def _is_in_planes(tif: TiffFile, series: TiffPageSeries) -> bool:
    """Return whether a series has three channels of 8 bits, a plane each, that may be red, green and blue."""
    page, axes = series.keyframe, series.axes
    is_single = page.samplesperpixel == 1 and page.dtype == np.uint8 and page.photometric == _GRAY
    return (
        is_single
        and dict(zip(axes, series.shape, strict=True)).get("C") == 3
        and is_red_green_blue(*_read_channels(tif))
    )


def _largest_series(tif: TiffFile) -> TiffPageSeries:
    """Return the series with the largest picture: others are macros and labels."""
    return max(tif.series, key=lambda series: series.keyframe.imagewidth * series.keyframe.imagelength)


def _is_rgb(page: TiffPage) -> bool:
    from tifffile import PHOTOMETRIC

    is_colored = page.photometric in {PHOTOMETRIC.RGB, PHOTOMETRIC.YCBCR}
    return is_colored and page.samplesperpixel == 3 and page.dtype == np.uint8
