"""Plain pictures as slides, read into memory: PNG, JPEG, and TIFF without a pyramid."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from wsi_fl.slides.reading.formats.source import Levels, Mpp, PixelSource, blend_rgb, digest_file
from wsi_fl.slides.reading.formats.tiff_pages import main_picture, query_tiff, require_single
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from tifffile import TiffFile

_MAX_PX = 1 << 25
"""Largest plain picture: 134 MB with its sub-resolutions, and twice as much while it is opened."""
_MIN_LEVEL_PX = 512
_STRIP_PX = 1 << 22
"""Pixels of one conversion."""
_WHITE = (255, 255, 255)
_COLOR_MODES = {"RGB", "RGBA", "RGBX", "YCbCr", "CMYK", "P", "PA", "L", "LA"}
_MODE_NAMES = {"1": "black and white alone", "I": "grey of more than 8 bits", "F": "floating point"}
"""Meaning of Pillow's other modes, by their first letter."""
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")
"""Its warnings do not concern users: unreadable pixels are an error."""


def _decode_picture(path: Path, kind: type[ImageFile]) -> tuple[NDArray[np.uint8], Mpp]:
    """Return a picture as uint8[h, w, 3], oriented upright and white where transparent, and its µm per pixel."""
    try:
        picture = kind(path)
    except SyntaxError as error:  # Pillow's, for unknown files
        raise WsiFlError(
            f"{path.name}: a picture that Pillow does not read ({error}); save it as PNG or as a tiled pyramid"
        ) from None
    with picture:
        if kind is TiffImageFile:
            picture.seek(_find_main_frame(path))
        width, height = picture.size
        if width * height > _MAX_PX:
            raise WsiFlError(
                f"{path.name}: a plain picture of {width} × {height} pixels; up to {_MAX_PX // 10**6} million are "
                "read, so make it a tiled pyramid (vips tiffsave --tile --pyramid)"
            )
        is_deep = ";16" in str(picture.tile)  # Pillow would keep the upper half of the bits
        if is_deep or picture.mode not in _COLOR_MODES:
            description = _MODE_NAMES.get(picture.mode[0], f"{'16-bit ' * is_deep}{picture.mode}")
            raise WsiFlError(f"{path.name}: a slide has 8-bit colours; this picture is {description}")
        x, y = (float(v) for v in picture.info.get("dpi", (0, 0)))
        ImageOps.exif_transpose(picture, in_place=True)
        out = np.empty((picture.height, picture.width, 3), np.uint8)
        step = max(1, _STRIP_PX // picture.width)
        for top in range(0, picture.height, step):
            strip = picture.crop((0, top, picture.width, min(top + step, picture.height)))
            out[top : top + step] = blend_rgb(strip.convert("RGBA"), _WHITE)
    return out, (25_400 / x if x > 0 else None, 25_400 / y if y > 0 else None)


def _find_main_frame(path: Path) -> int:
    """Return the number of the largest picture of a TIFF; WsiFlError if several have its size."""

    def find_frame(tif: TiffFile) -> int:
        require_single(path, tif)
        return int(main_picture(tif).index)

    return query_tiff(path, find_frame, 0)  # of a damaged file Pillow raises the error


def open_picture(path: Path, kind: type[ImageFile]) -> PixelSource:
    """Open a picture by Pillow's class of its format, with sub-resolutions by halves.

    `Image.open` would limit the size.
    """
    pixels, mpp = _decode_picture(path, kind)
    levels = [pixels]
    while max(levels[-1].shape) > _MIN_LEVEL_PX:
        levels.append(np.asarray(Image.fromarray(levels[-1]).reduce(2)))

    def read_box(level: int, corner: tuple[int, int], size: tuple[int, int]) -> NDArray[np.uint8]:
        return levels[level][corner[1] : corner[1] + size[1], corner[0] : corner[0] + size[0]]

    sizes = [(array.shape[1], array.shape[0]) for array in levels]
    return Levels(sizes, read_box, vendor="plain picture", mpp=mpp, quickhash=digest_file(path))
