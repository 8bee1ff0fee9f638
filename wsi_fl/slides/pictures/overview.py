"""The picture that shows at a glance what was taken from a slide, and why."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wsi_fl.slides.patching.patches import SlidePlan
from wsi_fl.slides.patching.quality import said_of
from wsi_fl.slides.pictures.drawing import INK, PAPER, draw_scale_bar, draw_title, enlarged, font, png
from wsi_fl.types import CLASSES, UNLABELLED

_LONG_SIDE_PX = 1024
_LEAST_WIDTH_PX = 680
_BAND_PX = 46
# Okabe and Ito's colours, told apart with every kind of colour vision.
_FILL = {"healthy": (0, 114, 178), "tumor": (230, 159, 0)}
_TISSUE = (0, 158, 115)
_ANNOTATION = (0, 0, 0)
_ASIDE = (213, 94, 0)
_FILL_ALPHA, _EDGE_ALPHA = 90, 255


def draw_overview(plan: SlidePlan, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> bytes:
    """PNG of the thumbnail with tissue, tumour outlines and the chosen patches of a plan by label.

    Args:
        chosen: rows of the plan, as positions or as a mask over its patches.
    """
    picture, zoom = enlarged(_faded(plan.thumbnail), _LONG_SIDE_PX)
    to_picture = zoom / plan.downsample
    _draw_patches(picture, plan, chosen, to_picture)
    _draw_aside(picture, plan, to_picture)
    _draw_tissue(picture, plan.tissue)
    draw = ImageDraw.Draw(picture)
    for ring in plan.outlines_l0:
        points = [(float(x), float(y)) for x, y in ring * to_picture]
        draw.line(points, fill=PAPER, width=6, joint="curve")
        draw.line(points, fill=_ANNOTATION, width=3, joint="curve")
    page = Image.new("RGB", (max(picture.width, _LEAST_WIDTH_PX), picture.height + 2 * _BAND_PX), PAPER)
    page.paste(picture, ((page.width - picture.width) // 2, _BAND_PX))
    _draw_title(page, plan, chosen)
    _draw_legend(page, plan, um_per_px=plan.mpp / to_picture)
    # 256 colours, which a faded thumbnail and a legend do with: a quarter of the bytes and of the time.
    return png(page.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE))


def _faded(thumbnail: NDArray[np.uint8]) -> Image.Image:
    """Half grey and lighter, so that the colours on top carry the meaning."""
    image = Image.fromarray(thumbnail)
    grey = Image.blend(image, image.convert("L").convert("RGB"), 0.5)
    return Image.blend(grey, Image.new("RGB", image.size, PAPER), 0.25)


def _draw_patches(
    picture: Image.Image,
    plan: SlidePlan,
    chosen: NDArray[np.bool_] | NDArray[np.int64],
    to_picture: float,
) -> None:
    """Translucent boxes, outlined where there is room for it."""
    side = plan.spec.size_px * plan.spec.mpp / plan.mpp * to_picture
    layer = Image.new("RGBA", picture.size)
    draw = ImageDraw.Draw(layer)
    for corner, label in zip(plan.xy_l0[chosen] * to_picture, plan.label[chosen], strict=True):
        colour = _FILL[CLASSES[label]]
        x, y = (float(v) for v in corner)
        edge = (*colour, _EDGE_ALPHA) if side >= 6 else None
        draw.rectangle((x, y, x + side - 1, y + side - 1), fill=(*colour, _FILL_ALPHA), outline=edge)
    picture.paste(layer, mask=layer)


def _draw_aside(picture: Image.Image, plan: SlidePlan, to_picture: float) -> None:
    """Crossed boxes where patches were set aside for their quality."""
    side = plan.spec.size_px * plan.spec.mpp / plan.mpp * to_picture
    draw = ImageDraw.Draw(picture)
    for corner in plan.aside_xy_l0 * to_picture:
        x, y = (float(v) for v in corner)
        box = (x, y, x + side - 1, y + side - 1)
        draw.rectangle(box, outline=_ASIDE)
        if side >= 6:
            draw.line(box, fill=_ASIDE)


def _draw_tissue(picture: Image.Image, mask: NDArray[np.bool_]) -> None:
    """The outline of the tissue, two pixels wide."""
    image = Image.fromarray(mask.astype(np.uint8) * 255).resize(picture.size, Image.Resampling.BILINEAR)
    inside = np.asarray(image) > 127
    edge = np.zeros(inside.shape, bool)
    for these, those in ((edge, inside), (edge.T, inside.T)):
        differs = those[1:] != those[:-1]
        these[1:] |= differs
        these[:-1] |= differs
    picture.paste(_TISSUE, mask=Image.fromarray(edge))


def _draw_title(page: Image.Image, plan: SlidePlan, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> None:
    taken = plan.label[chosen]
    counts = []
    for k, name in enumerate(_classes(plan)):
        n, of = int((taken == k).sum()), int((plan.label == k).sum())
        counts.append(f"{n} {name}" + (f" (of {of})" if of != n else ""))
    said = f"{', '.join(counts)} · {plan.spec.size_px} px at {plan.spec.mpp:g} µm"
    draw_title(ImageDraw.Draw(page), _BAND_PX // 2, plan.record.slide, said, page.width)


def _classes(plan: SlidePlan) -> tuple[str, ...]:
    return UNLABELLED if plan.record.supervision == "unlabelled" else CLASSES


def _draw_legend(page: Image.Image, plan: SlidePlan, um_per_px: float) -> None:
    """What the colours mean, and a scale bar."""
    draw = ImageDraw.Draw(page)
    middle = page.height - _BAND_PX // 2
    x = 12.0
    boxes = zip(_classes(plan), _FILL.values(), strict=False)
    entries = [*((name, colour, "box") for name, colour in boxes), ("tissue", _TISSUE, "line")]
    if len(plan.aside_reason):
        entries.append((f"set aside: {said_of(plan.aside_reason)}", _ASIDE, "line"))
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
