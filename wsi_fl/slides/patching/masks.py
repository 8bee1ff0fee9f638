"""Tissue that others outlined: a mask as GeoJSON or PNG per slide, as QuPath, TRIDENT and people make them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngImageFile

from wsi_fl.slides.patching.outlines import outlines_of
from wsi_fl.types import WsiFlError, one_line

SUFFIXES = (".geojson", ".json", ".png")
_MOST_PX = 1 << 26


def mask_file(folder: Path, slide: str) -> Path:
    """Return the file with the mask of a slide.

    Raises:
        WsiFlError: when the folder has none.
    """
    for suffix in SUFFIXES:
        if (path := folder / f"{slide}{suffix}").is_file():
            return path
    raise WsiFlError(
        f"{folder}: no mask of {slide} ({slide}.geojson or {slide}.png); tissue.method names the folder"
    )


def mask_digest(folder: Path, slide: str) -> str:
    """Return the SHA-256 of the mask of a slide.

    Raises:
        WsiFlError: when there is none.
    """
    return hashlib.sha256(mask_file(folder, slide).read_bytes()).hexdigest()


def read_mask(path: Path, shape: tuple[int, int], downsample: float) -> NDArray[np.bool_]:
    """Return a mask bool[h, w] over a slide's thumbnail.

    Outlines of a GeoJSON file, of whatever class, are in level-0 pixels. A PNG covers the whole slide at any scale.
    Opaque pixels are tissue; without an alpha channel, pixels brighter than half the maximum.

    Args:
        shape: height and width of the thumbnail.
        downsample: level-0 pixels per thumbnail pixel.

    Raises:
        WsiFlError: when the file is damaged, too large, or holds no tissue.
    """
    mask = _of_png(path, shape) if path.suffix == ".png" else _of_outlines(path, shape, downsample)
    if not mask.any():
        raise WsiFlError(f"{path}: holds no tissue on the slide")
    return mask


def _of_outlines(path: Path, shape: tuple[int, int], downsample: float) -> NDArray[np.bool_]:
    drawn = Image.new("1", (shape[1], shape[0]))
    draw = ImageDraw.Draw(drawn)
    polygons = shapely.get_parts(shapely.unary_union([polygon for _, polygon in outlines_of(path)]))
    polygons = polygons[shapely.get_type_id(polygons) == shapely.GeometryType.POLYGON]
    # The largest ring first: a hole is drawn before the island that lies in it.
    for one in sorted(polygons, key=lambda one: shapely.Polygon(one.exterior).area, reverse=True):
        for ring, fill in [(one.exterior, 1), *((hole, 0) for hole in one.interiors)]:
            draw.polygon([(x, y) for x, y in shapely.get_coordinates(ring) / downsample], fill=fill)
    return np.array(drawn, bool)


def _of_png(path: Path, shape: tuple[int, int]) -> NDArray[np.bool_]:
    try:
        with PngImageFile(path) as image:
            width, height = image.size
            if width * height > _MOST_PX:
                raise WsiFlError(
                    f"{path}: {width} × {height} pixels are more than a mask needs; make it smaller"
                )
            if abs(width / height * shape[0] / shape[1] - 1) > 0.05:
                raise WsiFlError(
                    f"{path}: {width} × {height} pixels are not of the slide's shape ({shape[1]} × {shape[0]} in its "
                    "thumbnail)"
                )
            grey = np.asarray(_brightness(image).resize((shape[1], shape[0])), np.uint8)
            return np.asarray(grey > grey.max() / 2)
    except (OSError, ValueError, SyntaxError) as error:
        raise WsiFlError(f"{path}: not a readable PNG ({one_line(error)})") from None


def _brightness(image: Image.Image) -> Image.Image:
    """How bright a picture is, or how opaque where some of it is transparent."""
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        if np.asarray(alpha).min() < 255:
            return alpha
    return image.convert("L")
