"""Elements of pictures of slides: type, colours, a scale bar, PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from itertools import product
from math import floor, log10
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Color = tuple[int, int, int]

INK, PAPER = (30, 30, 30), (255, 255, 255)
_LUMINANCE = np.array([0.299, 0.587, 0.114])
_DARKEST, _PALEST = 40, 190
"""Bounds of the luminance of lines, between ink and paper."""


@cache
def distinct_colors(first: tuple[Color, ...], n: int) -> tuple[Color, ...]:
    """Return n colours: the first ones, then each as far as possible from all earlier ones.

    Example:
        >>> distinct_colors(((0, 114, 178),), 3)
        ((0, 114, 178), (255, 0, 0), (102, 255, 0))
    """
    levels = np.array(list(product(range(0, 256, 51), repeat=3)))
    light = levels @ _LUMINANCE
    levels = levels[(light >= _DARKEST) & (light <= _PALEST)]
    chosen = list(first[:n])
    while len(chosen) < n:
        apart = ((levels[:, None] - np.array(chosen)) ** 2 @ np.array([2, 4, 3])).min(1)
        red, green, blue = levels[apart.argmax()].tolist()
        chosen.append((red, green, blue))
    return tuple(chosen)


def wrap_rows(widths: Sequence[float], room: Sequence[float]) -> list[tuple[int, float]]:
    """Return (row, position in it) of items side by side, continued in the next row where they do not fit.

    Args:
        row_widths: pixels of each row; the last value holds for all further rows.

    Example:
        >>> wrap_rows([40, 40, 90, 10], [100, 50])
        [(0, 0.0), (0, 40.0), (1, 0.0), (2, 0.0)]
    """
    places, row, x = [], 0, 0.0
    for width in widths:
        if x > 0 and x + width > room[min(row, len(room) - 1)]:
            row, x = row + 1, 0.0
        places.append((row, x))
        x += width
    return places


@cache
def font(size_px: int = 15, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Load Matplotlib's DejaVu Sans: Pillow's font has no µ."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    from matplotlib import get_data_path

    return ImageFont.truetype(Path(get_data_path(), "fonts/ttf", name), size_px)


def fitted(draw: ImageDraw.ImageDraw, text: str, room: float, face: ImageFont.FreeTypeFont) -> str:
    """Return the text, or as much of its beginning and end as fits into `max_px` pixels."""
    keep = len(text)
    shown = text
    while keep > 4 and draw.textlength(shown, face) > room:
        keep -= 1
        shown = f"{text[: keep - keep // 2]}…{text[len(text) - keep // 2 :]}"
    return shown


def _round_length(most: float) -> float:
    """Return the longest of 1, 2 and 5 times a power of ten up to `max_length`.

    Example:
        >>> _round_length(740), _round_length(2.5)
        (500.0, 2.0)
    """
    power = float(10 ** floor(log10(most)))
    return next(k * power for k in (5, 2, 1) if k * power <= most)


def draw_scale_bar(
    draw: ImageDraw.ImageDraw, end: tuple[float, float], um_per_px: float, most_px: float
) -> float:
    """Draw a bar of a round length of at most `max_px` up to `end`, with its length above it; return its pixels."""
    length_um = _round_length(um_per_px * most_px)
    length_px = length_um / um_per_px
    x, y = end
    draw.line((x - length_px, y, x, y), fill=INK, width=4)
    text = f"{length_um:g} µm" if length_um < 1000 else f"{length_um / 1000:g} mm"
    draw.text((x, y - 7), text, INK, font(), anchor="rb")
    return length_px


def draw_title(draw: ImageDraw.ImageDraw, y: int, slide: str, said: str, width: int) -> None:
    """Draw a title line: the slide's name on the left, shortened to fit, and a caption on the right."""
    draw.text((width - 12, y), said, INK, font(), anchor="rm")
    name = fitted(draw, slide, width - 36 - draw.textlength(said, font()), font())
    draw.text((12, y), name, INK, font(), anchor="lm", stroke_width=0.4)


def enlarged(picture: Image.Image, long_side_px: int) -> tuple[Image.Image, float]:
    """Return the picture enlarged to a longer side of that length, and the zoom."""
    zoom = long_side_px / max(picture.size)
    width, height = (max(1, round(side * zoom)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC), zoom


def png(picture: Image.Image) -> bytes:
    """Return the picture as PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()
