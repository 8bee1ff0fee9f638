"""Quality-control thumbnails of slides: patches by label, and mosaics."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wsi_fl.slides.patching.mosaic import MosaicPlan
from wsi_fl.slides.patching.patches import SlidePlan
from wsi_fl.slides.patching.quality import said_of
from wsi_fl.slides.pictures.drawing import (
    INK,
    PAPER,
    distinct_colors,
    draw_scale_bar,
    draw_title,
    enlarged,
    fitted,
    font,
    png,
    wrap_rows,
)
from wsi_fl.types import CLASSES, UNLABELLED

_LONG_SIDE_PX, _LEAST_WIDTH_PX = 1024, 680
_BAND_PX, _MARGIN_PX = 46, 12
# Okabe and Ito's colours, distinct for every kind of colour vision.
_FILL = {"healthy": (0, 114, 178), "tumor": (230, 159, 0)}
_TISSUE, _ANNOTATION, _ASIDE = (0, 158, 115), (0, 0, 0), (213, 94, 0)
_FILL_ALPHA = 90

_MOSAIC_LONG_SIDE_PX, _MOSAIC_LEAST_WIDTH_PX = 900, 560
_CELL_PX, _LEAST_CELL_PX, _GAP_PX, _FRAME_PX = 112, 56, 6, 4
_MOST_SHOWN = 96
_LEGEND_ROW_PX = 26
_CANDIDATE_ALPHA = 70
# Okabe and Ito's, then more; `distinct_colors` adds those of further clusters.
_GROUPS = (
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
_Rows = NDArray[np.bool_] | NDArray[np.int64]
_Patches = Sequence[tuple[int, NDArray[np.uint8]]]


def draw_overview(plan: SlidePlan, chosen: _Rows) -> bytes:
    """Return a PNG of the thumbnail with tissue, tumour outlines and the chosen patches of a plan by label.

    Args:
        rows: rows of the plan, as indices or as a mask over its patches.
    """
    image = Image.fromarray(plan.thumbnail)
    grey = Image.blend(image, image.convert("L").convert("RGB"), 0.5)
    faded = Image.blend(grey, Image.new("RGB", image.size, PAPER), 0.25)  # so that only annotations stand out
    picture, zoom = enlarged(faded, _LONG_SIDE_PX)
    to_picture = zoom / plan.downsample
    _draw_patches(picture, plan, chosen, to_picture)
    _draw_tissue(picture, plan.tissue)
    draw = ImageDraw.Draw(picture)
    for ring in plan.outlines_l0:
        points = [(float(x), float(y)) for x, y in ring * to_picture]
        draw.line(points, fill=PAPER, width=6, joint="curve")
        draw.line(points, fill=_ANNOTATION, width=3, joint="curve")
    page = Image.new("RGB", (max(picture.width, _LEAST_WIDTH_PX), picture.height + 2 * _BAND_PX), PAPER)
    page.paste(picture, ((page.width - picture.width) // 2, _BAND_PX))
    classes = UNLABELLED if plan.record.supervision == "unlabelled" else CLASSES
    counts = []
    for k, name in enumerate(classes):
        n, of = int((plan.label[chosen] == k).sum()), int((plan.label == k).sum())
        counts.append(f"{n} {name}" + (f" (of {of})" if of != n else ""))
    said = f"{', '.join(counts)} · {plan.spec.size_px} px at {plan.spec.mpp:g} µm"
    draw_title(ImageDraw.Draw(page), _BAND_PX // 2, plan.record.slide, said, page.width)
    _draw_legend(page, plan, classes, um_per_px=plan.mpp / to_picture)
    # 256 colours suffice for a faded thumbnail and a legend: a quarter of the bytes and of the time.
    return png(page.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))


def _draw_patches(picture: Image.Image, plan: SlidePlan, chosen: _Rows, scale: float) -> None:
    """Draw patches as translucent boxes, outlined if large enough, and excluded patches as crossed boxes."""
    side = plan.spec.size_px * plan.spec.mpp / plan.mpp * scale
    layer = Image.new("RGBA", picture.size)
    draw = ImageDraw.Draw(layer)
    for corner, label in zip(plan.xy_l0[chosen] * scale, plan.label[chosen], strict=True):
        colour = _FILL[CLASSES[label]]
        edge = (*colour, 255) if side >= 6 else None
        draw.rectangle(_box(corner, side), fill=(*colour, _FILL_ALPHA), outline=edge)
    picture.paste(layer, mask=layer)
    draw = ImageDraw.Draw(picture)
    for corner in plan.aside_xy_l0 * scale:
        draw.rectangle(_box(corner, side), outline=_ASIDE)
        if side >= 6:
            draw.line(_box(corner, side), fill=_ASIDE)


def _box(corner: NDArray[np.float64], side: float) -> tuple[float, float, float, float]:
    x, y = (float(v) for v in corner)
    return x, y, x + side - 1, y + side - 1


def _draw_tissue(picture: Image.Image, mask: NDArray[np.bool_]) -> None:
    """Draw the outline of the tissue, two pixels wide."""
    image = Image.fromarray(mask.astype(np.uint8) * 255).resize(picture.size, Image.Resampling.BILINEAR)
    inside = np.asarray(image) > 127
    edge = np.zeros(inside.shape, bool)
    for these, those in ((edge, inside), (edge.T, inside.T)):
        differs = those[1:] != those[:-1]
        these[1:] |= differs
        these[:-1] |= differs
    picture.paste(_TISSUE, mask=Image.fromarray(edge))


def _draw_legend(page: Image.Image, plan: SlidePlan, classes: Sequence[str], um_per_px: float) -> None:
    draw = ImageDraw.Draw(page)
    middle = page.height - _BAND_PX // 2
    x = 12.0
    boxes = zip(classes, _FILL.values(), strict=False)
    entries = [*((name, colour, "box") for name, colour in boxes), ("tissue", _TISSUE, "line")]
    if len(plan.aside_reason):
        entries.append((f"excluded: {said_of(plan.aside_reason)}", _ASIDE, "line"))
    if plan.outlines_l0:
        entries.append(("tumor outline", _ANNOTATION, "line"))
    for name, colour, kind in entries:
        if kind == "box":
            fill = tuple(round(255 + (c - 255) * _FILL_ALPHA / 255) for c in colour)
            draw.rectangle((x, middle - 9, x + 18, middle + 9), fill=fill, outline=colour, width=2)
        else:
            draw.line((x, middle, x + 22, middle), fill=colour, width=3)
        x += 30
        draw.text((x, middle), name, INK, font(), anchor="lm")
        x += draw.textlength(name, font()) + 22
    draw_scale_bar(draw, (page.width - 12, middle + 9), um_per_px, page.width / 5)


def draw_mosaic(plan: MosaicPlan, patches: _Patches) -> bytes:
    """Return a PNG of the slide with candidates tinted and mosaic framed by colour cluster, and a sheet of the mosaic.

    Args:
        patches: (row of the mosaic, pixels uint8[h, w, 3] of any size) of the readable ones.
    """
    slide, um_per_px = _slide(plan)
    group, weight = plan.kept_cluster, plan.mosaic.weight
    most = sorted(patches, key=lambda one: -float(weight[one[0]]))[:_MOST_SHOWN]
    rows = sorted(most, key=lambda one: (int(group[one[0]]), one[0]))
    shown = [(int(group[row]), pixels) for row, pixels in rows]
    sheet = _sheet(plan, shown, slide.height)
    width = max(slide.width + _MARGIN_PX + sheet.width, _MOSAIC_LEAST_WIDTH_PX)
    legend = _mosaic_legend(plan, width)
    page = Image.new(
        "RGB", (width, _BAND_PX + max(slide.height, sheet.height) + _BAND_PX + legend.height), PAPER
    )
    page.paste(slide, (0, _BAND_PX))
    page.paste(sheet, (slide.width + _MARGIN_PX, _BAND_PX))
    page.paste(legend, (0, page.height - legend.height))
    draw = ImageDraw.Draw(page)
    n, of = len(plan.mosaic.rows), len(plan.xy_l0)
    spec = plan.seen.spec
    said = f"{n} of {of} patches · {spec.size_px} px at {spec.mpp:g} µm"
    if len(patches) < n:
        said += f" · {n - len(patches)} unreadable"
    if len(shown) < len(patches):
        said += f" · {len(shown)} shown"
    draw_title(draw, _BAND_PX // 2, plan.seen.record.slide, said, page.width)
    bar_y = _BAND_PX + slide.height + 32
    draw_scale_bar(draw, (max(slide.width, 160) - _MARGIN_PX, bar_y), um_per_px, max(slide.width / 3, 80))
    return png(page)


def small_copy(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a small copy of a patch, to be kept until the picture is drawn."""
    image = Image.fromarray(pixels)
    image = image.reduce(max(1, min(image.size) // (2 * _CELL_PX)))
    return np.array(image.resize((_CELL_PX, _CELL_PX), Image.Resampling.LANCZOS))


def _group_colour(cluster: int) -> tuple[int, int, int]:
    return distinct_colors(_GROUPS, max(cluster + 1, len(_GROUPS)))[cluster]


def _slide(plan: MosaicPlan) -> tuple[Image.Image, float]:
    """Return the thumbnail with candidates tinted and selected patches framed, and its µm per pixel."""
    image, zoom = enlarged(Image.fromarray(plan.seen.thumbnail), _MOSAIC_LONG_SIDE_PX)
    scale, spec = zoom / plan.seen.downsample, plan.seen.spec
    side = spec.size_px * spec.mpp / plan.seen.mpp * scale
    layer = Image.new("RGBA", image.size)
    draw = ImageDraw.Draw(layer)
    for row in np.setdiff1d(np.arange(len(plan.xy_l0)), plan.mosaic.rows).tolist():
        colour = _group_colour(int(plan.mosaic.cluster[row]))
        draw.rectangle(_box(plan.xy_l0[row] * scale, side), fill=(*colour, _CANDIDATE_ALPHA))
    image.paste(layer, mask=layer)
    draw = ImageDraw.Draw(image)
    line = max(2, min(5, round(side / 12)))
    for corner, cluster in zip(plan.kept_l0 * scale, plan.kept_cluster.tolist(), strict=True):
        colour = _group_colour(cluster)
        left, top, right, bottom = box = _box(corner, max(side, 4))
        draw.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=PAPER, width=line + 2)
        draw.rectangle(box, outline=colour, width=line)
        if side >= 26:
            middle, face = (left + side / 2, top + side / 2), font(14, bold=True)
            draw.text(middle, str(cluster + 1), PAPER, face, "mm", stroke_width=2, stroke_fill=colour)
    return image, plan.seen.mpp / scale


def _sheet(plan: MosaicPlan, shown: _Patches, height: int) -> Image.Image:
    """Return the patches in columns as tall as the slide's picture, framed in the colour of their cluster."""

    def columns(cell: int) -> int:
        return max(1, ceil(len(shown) / max(1, height // (cell + _GAP_PX))))

    cell = _CELL_PX
    while cell > _LEAST_CELL_PX and columns(cell) * cell > _MOSAIC_LONG_SIDE_PX:
        cell -= 8
    n_columns = columns(cell)
    n_rows = max(1, ceil(len(shown) / n_columns))
    step = cell + _GAP_PX
    sheet = Image.new("RGB", (n_columns * step, n_rows * step), PAPER)
    draw = ImageDraw.Draw(sheet)
    inner = cell - 2 * _FRAME_PX
    for k, (cluster, pixels) in enumerate(shown):
        x, y = k % n_columns * step, k // n_columns * step
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), fill=_group_colour(cluster))
        patch = Image.fromarray(pixels).resize((inner, inner), Image.Resampling.LANCZOS)
        sheet.paste(patch, (x + _FRAME_PX, y + _FRAME_PX))
        draw.rectangle((x, y, x + 17, y + 17), fill=_group_colour(cluster))
        draw.text((x + 9, y + 9), str(cluster + 1), PAPER, font(12, bold=True), anchor="mm")
    return sheet


def _mosaic_legend(plan: MosaicPlan, width: int) -> Image.Image:
    """Return a legend of the colour clusters, with numbers of selected patches and candidates, and the note."""
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    n_groups = int(plan.mosaic.cluster.max(initial=-1)) + 1
    texts = [
        f"group {k + 1}: {int((plan.kept_cluster == k).sum())} of {int((plan.mosaic.cluster == k).sum())}"
        for k in range(n_groups)
    ]
    places = wrap_rows([50 + measure.textlength(text, font()) for text in texts], [width - _MARGIN_PX])
    n_lines = 1 + max((row for row, _ in places), default=0) + bool(plan.note)
    legend = Image.new("RGB", (width, n_lines * _LEGEND_ROW_PX + _MARGIN_PX), PAPER)
    draw = ImageDraw.Draw(legend)
    for group, ((row, x), text) in enumerate(zip(places, texts, strict=True)):
        left, middle = _MARGIN_PX + x, row * _LEGEND_ROW_PX + _LEGEND_ROW_PX // 2
        draw.rectangle((left, middle - 9, left + 18, middle + 9), fill=_group_colour(group))
        draw.text((left + 28, middle), text, INK, font(), anchor="lm")
    if plan.note:
        note = fitted(draw, plan.note, width - 2 * _MARGIN_PX, font())
        draw.text(
            (_MARGIN_PX, n_lines * _LEGEND_ROW_PX - _LEGEND_ROW_PX // 2), note, INK, font(), anchor="lm"
        )
    return legend
