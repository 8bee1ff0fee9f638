"""Pictures for pages, as JPEG in data URIs, and grids of patches as PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from wsi_fl.system import jpeg
from wsi_fl.types import WsiFlError

_PATCH_SIDE_PX = 144
"""Largest side of a patch picture: twice its size on a page."""
_OVERVIEWS_BYTES = 4_000_000
"""Largest number of JPEG bytes of all overview pictures of a page (a third more in base64)."""
_SIDES_PX = (1200, 900, 640, 480, 360, 260, 180, 120)

_GAP_PX = 2
_SIDE_PX = 96
"""Smallest side of a patch in a grid; smaller patches are enlarged by a whole factor."""


def encode_patch(pixels: NDArray[np.uint8], side_px: int = _PATCH_SIDE_PX) -> str:
    """Return a patch, uint8[h, w, 3] or grey uint8[h, w, 1], as a data URI of at most `side_px` pixels a side."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((side_px, side_px), Image.Resampling.LANCZOS)
    return _jpeg_uri(jpeg.encode(np.asarray(image.convert("RGB")), 88))


def encode_overviews(overviews: Mapping[str, Sequence[tuple[str, bytes]]]) -> dict[str, list[tuple[str, str]]]:
    """Return (slide, data URI) per site, with pictures shrunk to a common limit of bytes.

    Raises:
        WsiFlError: for bytes that are no picture.
    """
    n_pictures = sum(len(pictures) for pictures in overviews.values())
    max_bytes = _OVERVIEWS_BYTES // max(n_pictures, 1)
    return {
        site: [
            (slide, _jpeg_uri(_encode_within(_decode_picture(data, slide, site), max_bytes)))
            for slide, data in pictures
        ]
        for site, pictures in overviews.items()
    }


def _decode_picture(data: bytes, slide: str, site: str) -> Image.Image:
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        image.load()
    except (UnidentifiedImageError, OSError) as error:
        raise WsiFlError(
            f"overview of slide {slide} of site {site}: not a readable picture ({error}); "
            "delete it and tile the site again"
        ) from error
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        flat = Image.new("RGBA", image.size, "white")
        flat.alpha_composite(image.convert("RGBA"))
        image = flat
    return image.convert("RGB")


def _encode_within(image: Image.Image, n_bytes: int) -> bytes:
    """Return the largest JPEG of at most ``n_bytes``; the smallest side is always accepted."""
    encoded = b""
    for side in _SIDES_PX:
        if encoded and side >= max(image.size):
            continue
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        encoded = jpeg.encode(np.asarray(image), 80)
        if len(encoded) <= n_bytes:
            break
    return encoded


def _jpeg_uri(picture: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(picture).decode("ascii")


def enlarge_patch(patch: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a patch uint8[h, w, c] with repeated pixels if it is small."""
    factor = max(1, _SIDE_PX // patch.shape[0])
    return patch.repeat(factor, 0).repeat(factor, 1)


def render_grid(rows: Sequence[NDArray[np.uint8]]) -> bytes:
    """Return rows of patches uint8[n, h, w, c] as one PNG on white; rows may differ in length."""
    side = len(enlarge_patch(rows[0][0]))
    step = side + _GAP_PX
    width = max(len(row) for row in rows)
    picture = np.full((len(rows) * step + _GAP_PX, width * step + _GAP_PX, 3), 255, np.uint8)
    for r, row in enumerate(rows):
        for k, patch in enumerate(row):
            y, x = r * step + _GAP_PX, k * step + _GAP_PX
            picture[y : y + side, x : x + side] = enlarge_patch(patch)
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()
