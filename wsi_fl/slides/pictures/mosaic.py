"""A mosaic on its slide, and beside it the patches it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wsi_fl.slides.patching.mosaic import MosaicPlan
from wsi_fl.slides.pictures.drawing import INK, PAPER, draw_scale_bar, draw_title, enlarged, fitted, font, png

_LONG_SIDE_PX = 900
_LEAST_WIDTH_PX = 560
_BAND_PX, _MARGIN_PX = 46, 12
_CELL_PX, _LEAST_CELL_PX, _GAP_PX, _FRAME_PX = 112, 56, 6, 4
_MOST_SHOWN = 96
_LEGEND_ROW_PX = 26
_FILL_ALPHA = 70
# Okabe and Ito's, then two more; beyond eleven groups they repeat, and their numbers tell them apart.
_COLOURS = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 60, 120),
    (86, 180, 233),
    (213, 94, 0),
    (200, 185, 0),
    (110, 60, 160),
    (90, 90, 90),
    (120, 200, 90),
    (150, 100, 50),
)

Patches = Sequence[tuple[int, NDArray[np.uint8]]]


def draw_mosaic(plan: MosaicPlan, patches: Patches) -> bytes:
    """PNG of the slide with its candidates tinted and its mosaic framed by colour group, and a sheet of the mosaic.

    Args:
        patches: (row of the mosaic, pixels uint8[h, w, 3] of any size) of those that could be read.
    """
    slide, um_per_px = _slide(plan)
    shown = _shown(plan, patches)
    sheet = _sheet(plan, shown, slide.height)
    width = max(slide.width + _MARGIN_PX + sheet.width, _LEAST_WIDTH_PX)
    legend = _legend(plan, width)
    page = Image.new(
        "RGB", (width, _BAND_PX + max(slide.height, sheet.height) + _BAND_PX + legend.height), PAPER
    )
    page.paste(slide, (0, _BAND_PX))
    page.paste(sheet, (slide.width + _MARGIN_PX, _BAND_PX))
    page.paste(legend, (0, page.height - legend.height))
    draw = ImageDraw.Draw(page)
    _title(draw, plan, len(shown), len(patches), page.width)
    bar_y = _BAND_PX + slide.height + 32
    draw_scale_bar(draw, (max(slide.width, 160) - _MARGIN_PX, bar_y), um_per_px, max(slide.width / 3, 80))
    return png(page)


def small_copy(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A patch small enough to be kept until the picture is drawn."""
    image = Image.fromarray(pixels)
    image = image.reduce(max(1, min(image.size) // (2 * _CELL_PX)))
    return np.array(image.resize((_CELL_PX, _CELL_PX), Image.Resampling.LANCZOS))


def _colour(cluster: int) -> tuple[int, int, int]:
    return _COLOURS[cluster % len(_COLOURS)]


def _slide(plan: MosaicPlan) -> tuple[Image.Image, float]:
    """The thumbnail with the candidates tinted and the kept patches framed as they are, and its µm per pixel."""
    image, zoom = enlarged(Image.fromarray(plan.thumbnail), _LONG_SIDE_PX)
    scale = zoom / plan.downsample
    side = plan.spec.size_px * plan.spec.mpp / plan.mpp * scale
    layer = Image.new("RGBA", image.size)
    draw = ImageDraw.Draw(layer)
    others = np.setdiff1d(np.arange(len(plan.xy_l0)), plan.mosaic.rows)
    for row in others.tolist():
        x, y = (float(v) for v in plan.xy_l0[row] * scale)
        cluster = int(plan.mosaic.cluster[row])
        draw.rectangle((x, y, x + side - 1, y + side - 1), fill=(*_colour(cluster), _FILL_ALPHA))
    image.paste(layer, mask=layer)
    _frame_kept(ImageDraw.Draw(image), plan, scale, side)
    return image, plan.mpp / scale


def _frame_kept(draw: ImageDraw.ImageDraw, plan: MosaicPlan, scale: float, side: float) -> None:
    """A frame in the group's colour, edged with white, and the group's number where there is room."""
    line = max(2, min(5, round(side / 12)))
    for corner, cluster in zip(plan.kept_l0 * scale, plan.kept_cluster.tolist(), strict=True):
        x, y = (float(v) for v in corner)
        box = (x, y, x + max(side, 4) - 1, y + max(side, 4) - 1)
        draw.rectangle((box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1), outline=PAPER, width=line + 2)
        draw.rectangle(box, outline=_colour(cluster), width=line)
        if side >= 26:
            middle = (x + side / 2, y + side / 2)
            draw.text(
                middle,
                str(cluster + 1),
                PAPER,
                font(14, bold=True),
                "mm",
                stroke_width=2,
                stroke_fill=_colour(cluster),
            )


def _shown(plan: MosaicPlan, patches: Patches) -> list[tuple[int, NDArray[np.uint8]]]:
    """(group, pixels) for the sheet, group by group; of many, those that stand for most."""
    weight = plan.mosaic.weight
    most = sorted(patches, key=lambda one: -float(weight[one[0]]))[:_MOST_SHOWN]
    rows = sorted(most, key=lambda one: (int(plan.kept_cluster[one[0]]), one[0]))
    return [(int(plan.kept_cluster[row]), pixels) for row, pixels in rows]


def _sheet(plan: MosaicPlan, shown: list[tuple[int, NDArray[np.uint8]]], height: int) -> Image.Image:
    """The patches in columns as tall as the slide's picture, each framed by its group's colour."""
    cell = _CELL_PX
    while (
        cell > _LEAST_CELL_PX and ceil(len(shown) / max(1, height // (cell + _GAP_PX))) * cell > _LONG_SIDE_PX
    ):
        cell -= 8
    n_columns = max(1, ceil(len(shown) / max(1, height // (cell + _GAP_PX))))
    n_rows = max(1, ceil(len(shown) / n_columns))
    step = cell + _GAP_PX
    sheet = Image.new("RGB", (n_columns * step, n_rows * step), PAPER)
    draw = ImageDraw.Draw(sheet)
    inner = cell - 2 * _FRAME_PX
    for k, (cluster, pixels) in enumerate(shown):
        x, y = k % n_columns * step, k // n_columns * step
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), fill=_colour(cluster))
        patch = Image.fromarray(pixels).resize((inner, inner), Image.Resampling.LANCZOS)
        sheet.paste(patch, (x + _FRAME_PX, y + _FRAME_PX))
        draw.rectangle((x, y, x + 17, y + 17), fill=_colour(cluster))
        draw.text((x + 9, y + 9), str(cluster + 1), PAPER, font(12, bold=True), anchor="mm")
    return sheet


def _title(draw: ImageDraw.ImageDraw, plan: MosaicPlan, n_shown: int, n_read: int, width: int) -> None:
    n, of = len(plan.mosaic.rows), len(plan.xy_l0)
    right = f"{n} of {of} patches · {plan.spec.size_px} px at {plan.spec.mpp:g} µm"
    if n_read < n:
        right += f" · {n - n_read} unreadable"
    if n_shown < n_read:
        right += f" · {n_shown} shown"
    draw_title(draw, _BAND_PX // 2, plan.record.slide, right, width)


def _legend(plan: MosaicPlan, width: int) -> Image.Image:
    """Every colour group with how many of its candidates are kept, in as many lines as it takes; then the note."""
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    n_groups = int(plan.mosaic.cluster.max(initial=-1)) + 1
    places: list[tuple[float, int, str]] = []
    x, line = float(_MARGIN_PX), 0
    for group in range(n_groups):
        of = int((plan.mosaic.cluster == group).sum())
        text = f"group {group + 1}: {int((plan.kept_cluster == group).sum())} of {of}"
        advance = 28 + measure.textlength(text, font()) + 22
        if x + advance > width and x > _MARGIN_PX:
            x, line = float(_MARGIN_PX), line + 1
        places.append((x, line, text))
        x += advance
    n_lines = line + 1 + bool(plan.note)
    legend = Image.new("RGB", (width, n_lines * _LEGEND_ROW_PX + _MARGIN_PX), PAPER)
    draw = ImageDraw.Draw(legend)
    for group, (left, row, text) in enumerate(places):
        middle = row * _LEGEND_ROW_PX + _LEGEND_ROW_PX // 2
        draw.rectangle((left, middle - 9, left + 18, middle + 9), fill=_colour(group))
        draw.text((left + 28, middle), text, INK, font(), anchor="lm")
    if plan.note:
        note = fitted(draw, plan.note, width - 2 * _MARGIN_PX, font())
        draw.text(
            (_MARGIN_PX, n_lines * _LEGEND_ROW_PX - _LEGEND_ROW_PX // 2), note, INK, font(), anchor="lm"
        )
    return legend
