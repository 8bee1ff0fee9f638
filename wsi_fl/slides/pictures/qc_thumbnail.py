"""Quality-control thumbnails of slides: patches by label, and mosaics."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wsi_fl.slides.patching.artifacts import describe_reasons
from wsi_fl.slides.patching.mosaic import MosaicPlan
from wsi_fl.slides.patching.slide_plan import SlidePlan
from wsi_fl.slides.pictures.drawing import (
    INK,
    PAPER,
    distinct_colors,
    draw_scale_bar,
    draw_title,
    encode_png,
    load_font,
    resize_picture,
    shorten_to_fit,
    wrap_rows,
)
from wsi_fl.types import CLASSES, UNLABELLED

_LONG_SIDE_PX, _MIN_WIDTH_PX = 1024, 680
_BAND_PX, _MARGIN_PX = 46, 12
# Okabe and Ito's colours, distinct for every kind of colour vision.
_FILL_COLORS = {"healthy": (0, 114, 178), "tumor": (230, 159, 0)}
_TISSUE_COLOR, _ANNOTATION_COLOR, _EXCLUDED_COLOR = (0, 158, 115), (0, 0, 0), (213, 94, 0)
_FILL_ALPHA = 90

_MOSAIC_LONG_SIDE_PX, _MOSAIC_MIN_WIDTH_PX = 900, 560
_CELL_PX, _MIN_CELL_PX, _GAP_PX, _FRAME_PX = 112, 56, 6, 4
_MAX_SHEET_PATCHES = 96
_LEGEND_ROW_PX = 26
_CANDIDATE_ALPHA = 70
# Okabe and Ito's, then more; `distinct_colors` adds those of further clusters.
_GROUP_COLORS = (
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


def draw_overview(plan: SlidePlan, rows: _Rows) -> bytes:
    """Return a PNG of the thumbnail with tissue, tumour outlines and the chosen patches of a plan by label.

    Args:
        rows: rows of the plan, as indices or as a mask over its patches.
    """
    image = Image.fromarray(plan.thumbnail)
    grey = Image.blend(image, image.convert("L").convert("RGB"), 0.5)
    faded = Image.blend(grey, Image.new("RGB", image.size, PAPER), 0.25)  # so that only annotations stand out
    picture, zoom = resize_picture(faded, _LONG_SIDE_PX)
    picture_scale = zoom / plan.downsample
    _draw_patches(picture, plan, rows, picture_scale)
    _draw_tissue(picture, plan.tissue)
    draw = ImageDraw.Draw(picture)
    for ring in plan.outlines_l0:
        points = [(float(x), float(y)) for x, y in ring * picture_scale]
        draw.line(points, fill=PAPER, width=6, joint="curve")
        draw.line(points, fill=_ANNOTATION_COLOR, width=3, joint="curve")
    page = Image.new("RGB", (max(picture.width, _MIN_WIDTH_PX), picture.height + 2 * _BAND_PX), PAPER)
    page.paste(picture, ((page.width - picture.width) // 2, _BAND_PX))
    classes = UNLABELLED if plan.record.supervision == "unlabelled" else CLASSES
    counts = []
    for k, name in enumerate(classes):
        n, n_all = int((plan.label[rows] == k).sum()), int((plan.label == k).sum())
        counts.append(f"{n} {name}" + (f" (of {n_all})" if n_all != n else ""))
    caption = f"{', '.join(counts)} · {plan.spec.size_px} px at {plan.spec.mpp:g} µm"
    draw_title(ImageDraw.Draw(page), _BAND_PX // 2, plan.record.slide, caption, page.width)
    _draw_legend(page, plan, classes, um_per_px=plan.mpp / picture_scale)
    # 256 colours suffice for a faded thumbnail and a legend: a quarter of the bytes and of the time.
    return encode_png(page.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))


def _draw_patches(picture: Image.Image, plan: SlidePlan, rows: _Rows, scale: float) -> None:
    """Draw patches as translucent boxes, outlined if large enough, and excluded patches as crossed boxes."""
    side = plan.spec.size_px * plan.spec.mpp / plan.mpp * scale
    layer = Image.new("RGBA", picture.size)
    draw = ImageDraw.Draw(layer)
    for corner, label in zip(plan.xy_l0[rows] * scale, plan.label[rows], strict=True):
        color = _FILL_COLORS[CLASSES[label]]
        edge = (*color, 255) if side >= 6 else None
        draw.rectangle(_patch_box(corner, side), fill=(*color, _FILL_ALPHA), outline=edge)
    picture.paste(layer, mask=layer)
    draw = ImageDraw.Draw(picture)
    for corner in plan.aside_xy_l0 * scale:
        draw.rectangle(_patch_box(corner, side), outline=_EXCLUDED_COLOR)
        if side >= 6:
            draw.line(_patch_box(corner, side), fill=_EXCLUDED_COLOR)


def _patch_box(corner: NDArray[np.float64], side: float) -> tuple[float, float, float, float]:
    x, y = (float(v) for v in corner)
    return x, y, x + side - 1, y + side - 1


def _draw_tissue(picture: Image.Image, mask: NDArray[np.bool_]) -> None:
    """Draw the outline of the tissue, two pixels wide: the pixels with a neighbour across it."""
    image = Image.fromarray(mask.astype(np.uint8) * 255).resize(picture.size, Image.Resampling.BILINEAR)
    is_tissue = np.asarray(image) > 127
    edge = np.zeros_like(is_tissue)
    for region, line in ((is_tissue, edge), (is_tissue.T, edge.T)):
        changes = region[1:] != region[:-1]
        line[1:] |= changes
        line[:-1] |= changes
    picture.paste(_TISSUE_COLOR, mask=Image.fromarray(edge))


def _draw_legend(page: Image.Image, plan: SlidePlan, classes: Sequence[str], um_per_px: float) -> None:
    draw = ImageDraw.Draw(page)
    middle = page.height - _BAND_PX // 2
    x = 12.0
    boxes = zip(classes, _FILL_COLORS.values(), strict=False)
    entries = [*((name, color, "box") for name, color in boxes), ("tissue", _TISSUE_COLOR, "line")]
    if len(plan.aside_reason):
        entries.append((f"excluded: {describe_reasons(plan.aside_reason)}", _EXCLUDED_COLOR, "line"))
    if plan.outlines_l0:
        entries.append(("tumor outline", _ANNOTATION_COLOR, "line"))
    for name, color, kind in entries:
        if kind == "box":
            fill = tuple(round(255 + (c - 255) * _FILL_ALPHA / 255) for c in color)
            draw.rectangle((x, middle - 9, x + 18, middle + 9), fill=fill, outline=color, width=2)
        else:
            draw.line((x, middle, x + 22, middle), fill=color, width=3)
        x += 30
        draw.text((x, middle), name, INK, load_font(), anchor="lm")
        x += draw.textlength(name, load_font()) + 22
    draw_scale_bar(draw, (page.width - 12, middle + 9), um_per_px, page.width / 5)


def draw_mosaic(plan: MosaicPlan, patches: _Patches) -> bytes:
    """Return a PNG of the slide with candidates tinted and mosaic framed by colour cluster, and a sheet of the mosaic.

    Args:
        patches: (row of the mosaic, pixels uint8[h, w, 3] of any size) of the readable ones.
    """
    slide, um_per_px = _draw_slide(plan)
    clusters, weights = plan.mosaic_cluster, plan.mosaic.weight
    heaviest = sorted(patches, key=lambda patch: -float(weights[patch[0]]))[:_MAX_SHEET_PATCHES]
    ordered = sorted(heaviest, key=lambda patch: (int(clusters[patch[0]]), patch[0]))
    sheet_patches = [(int(clusters[row]), pixels) for row, pixels in ordered]
    sheet = _draw_sheet(plan, sheet_patches, slide.height)
    width = max(slide.width + _MARGIN_PX + sheet.width, _MOSAIC_MIN_WIDTH_PX)
    legend = _draw_mosaic_legend(plan, width)
    page = Image.new("RGB", (width, _BAND_PX + max(slide.height, sheet.height) + _BAND_PX + legend.height), PAPER)
    page.paste(slide, (0, _BAND_PX))
    page.paste(sheet, (slide.width + _MARGIN_PX, _BAND_PX))
    page.paste(legend, (0, page.height - legend.height))
    draw = ImageDraw.Draw(page)
    n, n_candidates = len(plan.mosaic.rows), len(plan.xy_l0)
    spec = plan.survey.spec
    caption = f"{n} of {n_candidates} patches · {spec.size_px} px at {spec.mpp:g} µm"
    if len(patches) < n:
        caption += f" · {n - len(patches)} unreadable"
    if len(sheet_patches) < len(patches):
        caption += f" · {len(sheet_patches)} shown"
    draw_title(draw, _BAND_PX // 2, plan.survey.record.slide, caption, page.width)
    bar_y = _BAND_PX + slide.height + 32
    draw_scale_bar(draw, (max(slide.width, 160) - _MARGIN_PX, bar_y), um_per_px, max(slide.width / 3, 80))
    return encode_png(page)


def shrink_patch(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a small copy of a patch, to be kept until the picture is drawn."""
    image = Image.fromarray(pixels)
    image = image.reduce(max(1, min(image.size) // (2 * _CELL_PX)))
    return np.array(image.resize((_CELL_PX, _CELL_PX), Image.Resampling.LANCZOS))


def _group_color(cluster: int) -> tuple[int, int, int]:
    return distinct_colors(_GROUP_COLORS, max(cluster + 1, len(_GROUP_COLORS)))[cluster]


def _draw_slide(plan: MosaicPlan) -> tuple[Image.Image, float]:
    """Return the thumbnail with candidates tinted and selected patches framed, and its µm per pixel."""
    image, zoom = resize_picture(Image.fromarray(plan.survey.thumbnail), _MOSAIC_LONG_SIDE_PX)
    scale, spec = zoom / plan.survey.downsample, plan.survey.spec
    side = spec.size_px * spec.mpp / plan.survey.mpp * scale
    layer = Image.new("RGBA", image.size)
    draw = ImageDraw.Draw(layer)
    for row in np.setdiff1d(np.arange(len(plan.xy_l0)), plan.mosaic.rows).tolist():
        color = _group_color(int(plan.mosaic.cluster[row]))
        draw.rectangle(_patch_box(plan.xy_l0[row] * scale, side), fill=(*color, _CANDIDATE_ALPHA))
    image.paste(layer, mask=layer)
    draw = ImageDraw.Draw(image)
    line = max(2, min(5, round(side / 12)))
    for corner, cluster in zip(plan.mosaic_xy_l0 * scale, plan.mosaic_cluster.tolist(), strict=True):
        color = _group_color(cluster)
        x_min, y_min, x_max, y_max = box = _patch_box(corner, max(side, 4))
        draw.rectangle((x_min - 1, y_min - 1, x_max + 1, y_max + 1), outline=PAPER, width=line + 2)
        draw.rectangle(box, outline=color, width=line)
        if side >= 26:
            middle, face = (x_min + side / 2, y_min + side / 2), load_font(14, bold=True)
            draw.text(middle, str(cluster + 1), PAPER, face, "mm", stroke_width=2, stroke_fill=color)
    return image, plan.survey.mpp / scale


def _draw_sheet(plan: MosaicPlan, patches: _Patches, height: int) -> Image.Image:
    """Return the patches in columns as tall as the slide's picture, framed in the colour of their cluster."""

    def count_columns(cell: int) -> int:
        return max(1, ceil(len(patches) / max(1, height // (cell + _GAP_PX))))

    cell = _CELL_PX
    while cell > _MIN_CELL_PX and count_columns(cell) * cell > _MOSAIC_LONG_SIDE_PX:
        cell -= 8
    n_columns = count_columns(cell)
    n_rows = max(1, ceil(len(patches) / n_columns))
    step = cell + _GAP_PX
    sheet = Image.new("RGB", (n_columns * step, n_rows * step), PAPER)
    draw = ImageDraw.Draw(sheet)
    inner = cell - 2 * _FRAME_PX
    for k, (cluster, pixels) in enumerate(patches):
        x, y = k % n_columns * step, k // n_columns * step
        draw.rectangle((x, y, x + cell - 1, y + cell - 1), fill=_group_color(cluster))
        patch = Image.fromarray(pixels).resize((inner, inner), Image.Resampling.LANCZOS)
        sheet.paste(patch, (x + _FRAME_PX, y + _FRAME_PX))
        draw.rectangle((x, y, x + 17, y + 17), fill=_group_color(cluster))
        draw.text((x + 9, y + 9), str(cluster + 1), PAPER, load_font(12, bold=True), anchor="mm")
    return sheet


def _draw_mosaic_legend(plan: MosaicPlan, width: int) -> Image.Image:
    """Return a legend of the colour clusters, with numbers of selected patches and candidates, and the note."""
    text_draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    n_groups = int(plan.mosaic.cluster.max(initial=-1)) + 1
    texts = [
        f"group {k + 1}: {int((plan.mosaic_cluster == k).sum())} of {int((plan.mosaic.cluster == k).sum())}"
        for k in range(n_groups)
    ]
    places = wrap_rows([50 + text_draw.textlength(text, load_font()) for text in texts], [width - _MARGIN_PX])
    n_lines = 1 + max((row for row, _ in places), default=0) + bool(plan.note)
    legend = Image.new("RGB", (width, n_lines * _LEGEND_ROW_PX + _MARGIN_PX), PAPER)
    draw = ImageDraw.Draw(legend)
    for group, ((row, x), text) in enumerate(zip(places, texts, strict=True)):
        x_min, middle = _MARGIN_PX + x, row * _LEGEND_ROW_PX + _LEGEND_ROW_PX // 2
        draw.rectangle((x_min, middle - 9, x_min + 18, middle + 9), fill=_group_color(group))
        draw.text((x_min + 28, middle), text, INK, load_font(), anchor="lm")
    if plan.note:
        note = shorten_to_fit(draw, plan.note, width - 2 * _MARGIN_PX, load_font())
        draw.text((_MARGIN_PX, n_lines * _LEGEND_ROW_PX - _LEGEND_ROW_PX // 2), note, INK, load_font(), anchor="lm")
    return legend
