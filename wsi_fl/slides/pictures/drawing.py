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
_MIN_LUMINANCE, _MAX_LUMINANCE = 40, 190
"""Bounds of the luminance of lines, between ink and paper."""


@cache
def distinct_colors(first_colors: tuple[Color, ...], n: int) -> tuple[Color, ...]:
    """Return n colours: the first ones, then each as far as possible from all earlier ones.

    Example:
        >>> distinct_colors(((0, 114, 178),), 3)
        ((0, 114, 178), (255, 0, 0), (102, 255, 0))
    """
    levels = np.array(list(product(range(0, 256, 51), repeat=3)))
    luminance = levels @ _LUMINANCE
    levels = levels[(luminance >= _MIN_LUMINANCE) & (luminance <= _MAX_LUMINANCE)]
    colors = list(first_colors[:n])
    while len(colors) < n:
        distances = ((levels[:, None] - np.array(colors)) ** 2 @ np.array([2, 4, 3])).min(1)
        red, green, blue = levels[distances.argmax()].tolist()
        colors.append((red, green, blue))
    return tuple(colors)


def wrap_rows(widths: Sequence[float], row_widths: Sequence[float]) -> list[tuple[int, float]]:
    """Return (row, position in it) of items side by side, continued in the next row where they do not fit.

    Args:
        row_widths: pixels of each row; the last value holds for all further rows.

    Example:
        >>> wrap_rows([40, 40, 90, 10], [100, 50])
        [(0, 0.0), (0, 40.0), (1, 0.0), (2, 0.0)]
    """
    places, row, x = [], 0, 0.0
    for width in widths:
        if x > 0 and x + width > row_widths[min(row, len(row_widths) - 1)]:
            row, x = row + 1, 0.0
        places.append((row, x))
        x += width
    return places


@cache
def load_font(size_px: int = 15, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Load Matplotlib's DejaVu Sans: Pillow's font has no µ."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    from matplotlib import get_data_path

    return ImageFont.truetype(Path(get_data_path(), "fonts/ttf", name), size_px)


def shorten_to_fit(draw: ImageDraw.ImageDraw, text: str, max_px: float, face: ImageFont.FreeTypeFont) -> str:
    """Return the text, or as much of its beginning and end as fits into `max_px` pixels."""
    n_chars = len(text)
    shortened = text
    while n_chars > 4 and draw.textlength(shortened, face) > max_px:
        n_chars -= 1
        shortened = f"{text[: n_chars - n_chars // 2]}…{text[len(text) - n_chars // 2 :]}"
    return shortened


def _round_length(max_length: float) -> float:
    """Return the longest of 1, 2 and 5 times a power of ten up to `max_length`.

    Example:
        >>> _round_length(740), _round_length(2.5)
        (500.0, 2.0)
    """
    power = float(10 ** floor(log10(max_length)))
    return next(k * power for k in (5, 2, 1) if k * power <= max_length)


def draw_scale_bar(draw: ImageDraw.ImageDraw, end: tuple[float, float], um_per_px: float, max_px: float) -> float:
    """Draw a bar of a round length of at most `max_px` up to `end`, with its length above it; return its pixels."""
    length_um = _round_length(um_per_px * max_px)
    length_px = length_um / um_per_px
    x, y = end
    draw.line((x - length_px, y, x, y), fill=INK, width=4)
    text = f"{length_um:g} µm" if length_um < 1000 else f"{length_um / 1000:g} mm"
    draw.text((x, y - 7), text, INK, load_font(), anchor="rb")
    return length_px


def draw_title(draw: ImageDraw.ImageDraw, y: int, slide: str, caption: str, width: int) -> None:
    """Draw a title line: the slide's name on the left, shortened to fit, and a caption on the right."""
    draw.text((width - 12, y), caption, INK, load_font(), anchor="rm")
    name = shorten_to_fit(draw, slide, width - 36 - draw.textlength(caption, load_font()), load_font())
    draw.text((12, y), name, INK, load_font(), anchor="lm", stroke_width=0.4)


def resize_picture(picture: Image.Image, long_side_px: int) -> tuple[Image.Image, float]:
    """Return the picture scaled to a longer side of that length, and the zoom."""
    zoom = long_side_px / max(picture.size)
    width, height = (max(1, round(side * zoom)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.BICUBIC), zoom


def encode_png(picture: Image.Image) -> bytes:
    """Return the picture as PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()
