"""Plain pictures as slides: PNG, JPEG, and TIFF without a pyramid. They are held in memory whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wsi_fl.slides.reading.formats.source import Levels, Mpp, Source, digest, needed
from wsi_fl.types import WsiFlError

MOST_PLAIN_PX = 1 << 27
"""Pixels of a plain picture, which is held in memory whole: 0.5 GB with its sub-resolutions."""
_LEAST_PX = 512
_UM_OF_UNIT = {2: 25_400.0, 3: 10_000.0}
"""TIFF's inches and centimetres."""
_PLAIN = {1, 8, 32946}
"""Compressions of TIFF that need no codec of their own: none and deflate."""


def of_picture(path: Path) -> Source:
    """PNG or JPEG."""
    with Image.open(path) as picture:
        _require_fitting(path, *picture.size)
        x, y = (float(v) for v in picture.info.get("dpi", (0, 0)))
        mpp = (25_400 / x if x > 0 else None, 25_400 / y if y > 0 else None)
        return _in_memory(np.asarray(picture.convert("RGB")), mpp, digest(path))


def of_tiff(path: Path) -> Source:
    """The first picture of a TIFF that is no slide: in strips, or without a pyramid."""
    from tifffile import COMPRESSION, TiffFile

    with TiffFile(path) as tif:
        page = tif.pages.first
        _require_fitting(path, page.imagewidth, page.imagelength)
        if page.compression not in _PLAIN:
            needed("imagecodecs", "formats", path)
        pixels = page.asarray()
        unit = _UM_OF_UNIT.get(int(page.resolutionunit or 0))
        mpp = tuple(unit / per_unit if unit and per_unit else None for per_unit in page.resolution)
        said = f"{COMPRESSION(page.compression).name}, {pixels.dtype}{pixels.shape}"
    if (
        pixels.dtype != np.uint8
        or pixels.ndim not in {2, 3}
        or (pixels.ndim == 3 and pixels.shape[2] not in {3, 4})
    ):
        raise WsiFlError(f"{path.name}: a slide has 8-bit colours; this TIFF is {said}")
    rgb = pixels[..., None].repeat(3, 2) if pixels.ndim == 2 else pixels[..., :3]
    return _in_memory(np.ascontiguousarray(rgb), (mpp[0], mpp[1]), digest(path))


def _require_fitting(path: Path, width: int, height: int) -> None:
    if width * height > MOST_PLAIN_PX:
        raise WsiFlError(
            f"{path.name}: a plain picture of {width} × {height} pixels; up to {MOST_PLAIN_PX >> 20} million are read, "
            "so make it a tiled pyramid (vips tiffsave --tile --pyramid)"
        )


def _in_memory(pixels: NDArray[np.uint8], mpp: Mpp, quickhash: str) -> Source:
    """A plain picture, with sub-resolutions by halves."""
    levels = [pixels]
    while max(levels[-1].shape) > _LEAST_PX:
        levels.append(np.asarray(Image.fromarray(levels[-1]).reduce(2)))

    def read(level: int, at: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        return levels[level][at[1] : at[1] + size[1], at[0] : at[0] + size[0]]

    sizes = [(one.shape[1], one.shape[0]) for one in levels]
    return Levels(sizes, read, vendor="plain picture", mpp=mpp, quickhash=quickhash)
