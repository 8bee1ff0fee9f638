"""All files of one predicted slide: heatmap, table of patches and score; of models of patches outlines for QuPath."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.grid import size_in_l0
from wsi_fl.slides.pictures.heatmap import (
    TOP_K,
    Caption,
    Color,
    Heat,
    draw_heatmap,
    leading,
    patch_boxes,
    score,
    write_geojson,
)
from wsi_fl.stages.answers.predictor import Base, Predictor, Seen
from wsi_fl.stages.work.console import Watcher
from wsi_fl.system.files import atomic, write_bytes, write_json
from wsi_fl.types import SlideRecord

_OTHERWISE, _ATTENTION = (150, 150, 150), (200, 0, 0)
_COLORS: tuple[Color, ...] = ((150, 200, 150), (200, 0, 0))
"""Healthy, and QuPath's own red for Tumor."""
_MORE_COLORS: tuple[Color, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
)
"""Okabe and Ito's, for more than two classes."""
_HEATMAP, _TABLE, _SCORE, _OUTLINES = "heatmap.png", "patches.csv", "score.json", "tumor.geojson"


def predict_slide(
    predictor: Predictor, record: SlideRecord, folder: Path, watcher: Watcher
) -> dict[str, Any]:
    """Write all files of one slide; return its row of the document. There is no heatmap without slide or places."""
    watcher.update(record.slide, 0, 1)
    study, seen = predictor.study, predictor.seen(record, watcher)
    origin = {
        "run": study.relative(predictor.run.path),
        "site": record.site,
        "path": study.relative(seen.base.path.resolve()) if seen.base else None,
        "with": predictor.models.answer,
    }
    spec, files = predictor.meta.spec, {"heatmap": _HEATMAP, "csv": _TABLE, "json": _SCORE}
    if seen.said is not None:
        row, more = _of_patches(predictor, record, folder, seen)
        files["geojson"] = _OUTLINES
    else:
        row, more = _of_slide(predictor, record, folder, seen)
    write_json(folder / _SCORE, origin | row | more | {"size_px": spec.size_px, "mpp": spec.mpp})
    watcher.update(record.slide, 1, 1)
    made = {key: study.relative(folder / file) for key, file in files.items()}
    return row | made | ({} if seen.base else {"heatmap": None})


def _of_patches(
    predictor: Predictor, record: SlideRecord, folder: Path, seen: Seen
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw and write what is said of each patch; return (the row, what else the score file says)."""
    heat, base = predictor.heat(record.slide, seen), seen.base
    assert base is not None
    kind, colors = leading(heat), colors_of(heat.classes)
    found = score(heat, kind)
    said = (
        f"{heat.classes[kind]} {found['top_k_mean']:.2f}",
        f"mean of the {min(TOP_K, len(seen.xy_l0))} highest; highest {found['max']:.2f}; "
        f"{percent(found['fraction'])} of patches at {heat.threshold:g} or more",
    )
    write_bytes(folder / _HEATMAP, _drawn(predictor, record, base, heat, colors, *said))
    write_geojson(folder / _OUTLINES, heat, colors, f"{predictor.run.name}/{record.site}/{record.slide}")
    columns = {f"p_{name}": heat.probabilities[:, k] for k, name in enumerate(heat.classes)}
    write_patches(folder / _TABLE, seen.xy_l0, size_in_l0(predictor.meta.spec, base.mpp), columns)
    row = {"slide": record.slide, "patches": len(seen.xy_l0), "set_aside": seen.n_aside, "score": found}
    return row, {
        "class": heat.classes[kind],
        "classes": {heat.classes[k]: score(heat, k) for k in heat.shown},
        "regions": len(heat.regions),
        "threshold": heat.threshold,
        "top_k": TOP_K,
        "stride_px": predictor.meta.spec.stride_px,
        "slide_mpp": base.mpp,
        "quickhash": base.quickhash,
    }


def _of_slide(
    predictor: Predictor, record: SlideRecord, folder: Path, seen: Seen
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw and write what is said of the whole slide; return (the row, what else the score file says)."""
    assert seen.bag is not None
    meta, base, kind = predictor.meta, seen.base, predictor.tumor_type_of(record)
    answer = predictor.answer(seen.bag, kind)
    side = None
    if base is not None:
        side = size_in_l0(meta.spec, base.mpp)
        boxes = patch_boxes(seen.xy_l0, meta.spec, base.mpp, base.size_l0)
        shown, legend = answer.legend
        values = np.stack([1 - answer.heat, answer.heat], axis=1)
        heat = Heat(boxes, ("other", shown), values)
        colors: list[Color] = [_OTHERWISE, _ATTENTION]
        picture = _drawn(predictor, record, base, heat, colors, *answer.words, legend)
        write_bytes(folder / _HEATMAP, picture)
    write_patches(folder / _TABLE, seen.xy_l0, side, answer.columns)
    row = {"slide": record.slide, "patches": len(seen.xy_l0), "tumor_type": kind, **answer.facts}
    return row, {"encoder": meta.encoder}


def _drawn(
    predictor: Predictor,
    record: SlideRecord,
    base: Base,
    heat: Heat,
    colors: list[Color],
    *said: str,
) -> bytes:
    """Return the heatmap over the slide's thumbnail."""
    spec, of = predictor.meta.spec, "mosaic of " if predictor.kind.data == "mosaics" else ""
    where = f"{predictor.run.name} · {predictor.site.name} · {of}{len(heat.boxes_l0)} patches"
    caption = Caption(record.slide, f"{where} of {spec.size_px} px at {spec.mpp:g} µm", *said)
    return draw_heatmap(base.thumbnail, base.downsample, base.mpp, heat, colors, caption)


def colors_of(classes: Sequence[str]) -> list[Color]:
    """Return a colour for each class."""
    if len(classes) == 2:
        return list(_COLORS)
    return [_MORE_COLORS[k % len(_MORE_COLORS)] for k in range(len(classes))]


def percent(share: float) -> str:
    """Return whole per cent, but never 0 % of something."""
    return "under 1 %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")


def write_patches(
    path: Path,
    xy_l0: NDArray[np.int64],
    size_l0: float | None,
    columns: Mapping[str, NDArray[np.float64]],
) -> None:
    """Write patches.csv: a row per patch, its corner and side in level-0 pixels, and what is said of it alone.

    Args:
        size_l0: None where nobody knows where the patches lie.
        columns: heading → float64[m].
    """
    side = "" if size_l0 is None else f"{size_l0:.3f}".rstrip("0").rstrip(".")
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["x_l0", "y_l0", "size_l0", *columns])
        for (x, y), *said in zip(
            xy_l0.tolist(), *(values.tolist() for values in columns.values()), strict=True
        ):
            writer.writerow([x, y, side, *(f"{value:.6f}" for value in said)])
