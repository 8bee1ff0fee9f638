"""Slides in formats of scanners: CZI by libCZI, iSyntax by libisyntax."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.formats.source import Levels, PixelSource, digest_file, import_extra
from wsi_fl.types import WsiFlError

_DEEP_PIXELS = "Bgr48"
_COLOR_PIXELS = {"Bgr24", _DEEP_PIXELS, "Gray8"}
"""Pixel types of CZI that convert to 8-bit colours."""


def open_czi(path: Path) -> PixelSource:
    """Open a Zeiss CZI, with halves as far as the file has a pyramid; beyond it libCZI would leave pixels out."""
    czi = import_extra("pylibCZIrw.czi", "czi", path)
    with ExitStack() as stack:
        reader = stack.enter_context(czi.open_czi(str(path)))
        bounds = reader.total_bounding_rectangle_no_pyramid
        xml = reader.raw_metadata
        kinds = list(reader.pixel_types.values())
        if len(kinds) != 1 or kinds[0] not in _COLOR_PIXELS:
            raise WsiFlError(
                f"{path.name}: a slide has red, green and blue in each pixel; this CZI has {len(kinds)} "
                f"channel(s) of {', '.join(sorted(set(kinds)))}"
            )
        shift = _count_used_bits(path, xml) - 8 if kinds[0] == _DEEP_PIXELS else 0
        kind = _DEEP_PIXELS if shift else "Bgr24"
        zooms = [1.0]

        def note_zoom(_: int, block: Any) -> bool:
            zooms.append(block.get_zoom())
            return True

        reader.enumerate_subblocks(note_zoom)
        close = stack.pop_all().close
    um: dict[str | None, float] = {}
    for distance in ElementTree.fromstring(xml).iter("Distance"):
        if value := distance.findtext("Value"):
            um.setdefault(distance.get("Id"), float(value) * 1e6)
    mpp = um.get("X"), um.get("Y")
    sizes, lock = [(bounds.w, bounds.h)], threading.Lock()
    while 0.5 ** len(sizes) >= 0.99 * min(zooms):
        sizes.append((max(1, sizes[-1][0] // 2), max(1, sizes[-1][1] // 2)))

    def read_box(level: int, corner: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        step = 2**level
        roi = (bounds.x + corner[0] * step, bounds.y + corner[1] * step, size[0] * step, size[1] * step)
        with lock:
            region = reader.read(roi=roi, zoom=1 / step, pixel_type=kind, background_pixel=(1.0, 1.0, 1.0))
        pixels = region[: size[1], : size[0], ::-1]
        return np.asarray(np.minimum(pixels >> shift, 255) if shift else pixels, np.uint8)

    return Levels(sizes, read_box, vendor="zeiss czi", mpp=mpp, quickhash=digest_file(path), close=close)


def wastes_bits(properties: Mapping[str, str]) -> bool:
    """Return whether OpenSlide, by its properties, keeps the upper 8 of 16 bits of a CZI with fewer bits in use."""
    image = "zeiss.Information.Image."
    return properties.get(f"{image}PixelType") == _DEEP_PIXELS and properties.get(f"{image}ComponentBitCount") != "16"


def _count_used_bits(path: Path, xml: str) -> int:
    """Return the number of used bits of the 16 of a CZI's colours; WsiFlError if it is not stated."""
    counts = {int(element.text or 0) for element in ElementTree.fromstring(xml).iter("ComponentBitCount")}
    if len(counts) != 1 or not 8 < max(counts) <= 16:
        raise WsiFlError(
            f"{path.name}: a slide has 8-bit colours; this CZI has {_DEEP_PIXELS} and does not state how many of its "
            "16 bits count; save it with colours of 8 bits"
        )
    return counts.pop()


def open_isyntax(path: Path) -> PixelSource:
    """Open a Philips iSyntax."""
    slide = import_extra("isyntax", "isyntax", path).ISyntax.open(path)
    lock = threading.Lock()

    def read_box(level: int, corner: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        with lock:
            return np.asarray(slide.read_region(*corner, *size, level))[..., :3]

    return Levels(
        slide.level_dimensions,
        read_box,
        vendor="philips isyntax",
        mpp=(slide.mpp_x, slide.mpp_y),
        quickhash=digest_file(path),
        close=slide.close,
    )
