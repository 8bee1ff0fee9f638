"""`predict`: what a site's models say of new slides: heatmaps, tables of patches, scores, outlines for QuPath.

Only the run, the slides given and, where it is there, the site's own store are opened.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.patching.grid import size_in_l0
from wsi_fl.slides.pictures import heatmap
from wsi_fl.slides.pictures.drawing import Color, distinct_colors
from wsi_fl.slides.pictures.heatmap import TOP_K, Caption, Heat
from wsi_fl.slides.reading.formats import slide_name
from wsi_fl.stages.answers.predictor import Base, Predictor, Seen, load_predictor
from wsi_fl.stages.work.console import Line, Lines, OneOf, Table, Watcher, reason_of
from wsi_fl.stages.work.job import Job, take_threads
from wsi_fl.study.folder import Study
from wsi_fl.system.files import read_object, write_bytes, write_csv, write_json
from wsi_fl.types import DiskFull, SlideRecord, UsageError

_OTHERWISE, _ATTENTION = (150, 150, 150), (200, 0, 0)
_COLORS: tuple[Color, ...] = ((150, 200, 150), (200, 0, 0))
"""Healthy, and QuPath's own red for Tumor."""
_MORE_COLORS: tuple[Color, ...] = (
    *((0, 114, 178), (213, 94, 0), (0, 158, 115)),
    *((204, 121, 167), (230, 159, 0), (86, 180, 233)),
)
"""Okabe and Ito's, for more than two classes; `distinct_colors` has those of the seventh and further ones."""
_HEATMAP, _TABLE, _SCORE, _OUTLINES = "heatmap.png", "patches.csv", "score.json", "tumor.geojson"
_ALL = "slides.csv"
_WHOSE = {"mean": "mean of both models", "local": "lone model", "ensemble": "mixture"}


def predict(
    study: Study,
    run_name: str,
    *,
    site: str,
    slides: Sequence[Path],
    out: Path | None = None,
    tumor_type: str | None = None,
    mpp: float | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Predict slides one by one; return the `--json` document, whose `failed` names those that could not be.

    Started under mpiexec or srun, the ranks share the slides, and all but the first return {}.

    Args:
        out: folder for one folder per slide; default RUN/predictions/SITE.
        tumor_type: what is known of the slides, for runs on mosaics; default: what the site's store says.
        mpp: µm per level-0 pixel of these slides, whatever they say; default: the site file's, else theirs.
        overrides: `predict.KEY=VALUE` over the run's configuration.
    """
    began, job = time.perf_counter(), Job()
    told = job.watched(watcher)
    take_threads(job.threads)
    names = [slide_name(path) for path in slides]  # as in a store
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"two slides are called {twice[0]}; predict them one after the other with --out")
    predictor = job.each(lambda: load_predictor(study, run_name, site, tumor_type, overrides))
    folder = out.resolve() if out is not None else predictor.run.path / "predictions" / site
    scale = mpp or predictor.site.mpp_override
    records = [
        SlideRecord(path, name, "", site, "negative", False, mpp_override=scale)
        for path, name in zip(slides, names, strict=True)
    ]

    def each(mine: list[SlideRecord]) -> Iterator[dict[str, Any]]:
        for k, record in enumerate(mine):
            yield _outcome(predictor, record, folder, OneOf(told, k, len(mine)))

    outcomes = job.share(records, each)
    if not job.first:
        return {}
    table = write_slides(folder)
    return {
        "run": study.relative(predictor.run.path),
        "site": site,
        "model": predictor.models.answer,
        "slides": [one["row"] for one in outcomes if "row" in one],
        "failed": [one["failed"] for one in outcomes if "failed" in one],
        "table": study.relative(table) if table else None,
        "seconds": time.perf_counter() - began,
    }


def _outcome(predictor: Predictor, record: SlideRecord, folder: Path, watcher: Watcher) -> dict[str, Any]:
    """Predict a slide; return its row, or why there is none."""
    try:
        return {"row": _predict_slide(predictor, record, folder / record.slide, watcher)}
    except (DiskFull, UsageError):
        raise
    except Exception as error:  # one slide that a library chokes on must not end the others
        reason = reason_of(error)
    watcher.say(f"  {record.slide} failed: {reason}")
    return {"failed": {"slide": record.slide, "reason": reason}}


def _predict_slide(
    predictor: Predictor, record: SlideRecord, folder: Path, watcher: Watcher
) -> dict[str, Any]:
    """Write all files of one slide; return its row of the document. There is no heatmap without slide or places."""
    watcher.update(record.site, 0, 1, record.slide)
    study, seen = predictor.study, predictor.seen(record, watcher)
    origin = {
        "run": study.relative(predictor.run.path),
        "site": record.site,
        "path": study.relative(seen.base.path.resolve()) if seen.base else None,
        "model": predictor.models.answer,
    }
    spec, files = predictor.meta.spec, {"heatmap": _HEATMAP, "csv": _TABLE, "json": _SCORE}
    if seen.said is not None:
        row, more = _of_patches(predictor, record, folder, seen)
        files["geojson"] = _OUTLINES
    else:
        row, more = _of_slide(predictor, record, folder, seen)
    write_json(folder / _SCORE, origin | row | more | {"size_px": spec.size_px, "mpp": spec.mpp})
    watcher.update(record.site, 1, 1, record.slide)
    made = {key: study.relative(folder / file) for key, file in files.items()}
    return row | made | ({} if seen.base else {"heatmap": None})


def _of_patches(
    predictor: Predictor, record: SlideRecord, folder: Path, seen: Seen
) -> tuple[dict[str, object], dict[str, object]]:
    """Draw and write what is said of each patch; return (the row, what else the score file says)."""
    heat, base = predictor.heat(record.slide, seen), seen.base
    assert base is not None
    kind, colors = heatmap.leading(heat), colors_of(heat.classes)
    found = heatmap.score(heat, kind)
    said = (
        f"{heat.classes[kind]} {found['top_k_mean']:.2f}",
        f"mean of the {min(TOP_K, len(seen.xy_l0))} highest; highest {found['max']:.2f}; "
        f"{_percent(found['fraction'])} of patches at {heat.threshold:g} or more",
    )
    write_bytes(folder / _HEATMAP, _drawn(predictor, record, base, heat, colors, *said))
    identity = f"{predictor.run.name}/{record.site}/{record.slide}"
    corner = (0, 0) if predictor.site.annotations_origin == "slide" else base.bounds_l0[:2]
    heatmap.write_geojson(folder / _OUTLINES, heat, colors, identity, corner)
    columns = {f"p_{name}": heat.probabilities[:, k] for k, name in enumerate(heat.classes)}
    write_patches(folder / _TABLE, seen.xy_l0, size_in_l0(predictor.meta.spec, base.mpp), columns)
    row = {"slide": record.slide, "patches": len(seen.xy_l0), "excluded": seen.n_aside, "score": found}
    return row, {
        "class": heat.classes[kind],
        "classes": {heat.classes[k]: heatmap.score(heat, k) for k in heat.shown},
        "regions": len(heat.regions),
        "threshold": heat.threshold,
        "top_k": TOP_K,
        "stride_px": predictor.meta.spec.stride_px,
        "slide_mpp": base.mpp,
        "quickhash": base.quickhash,
    }


def _of_slide(
    predictor: Predictor, record: SlideRecord, folder: Path, seen: Seen
) -> tuple[dict[str, object], dict[str, object]]:
    """Draw and write what is said of the whole slide; return (the row, what else the score file says)."""
    assert seen.bag is not None
    meta, base, kind = predictor.meta, seen.base, predictor.tumor_type_of(record)
    answer = predictor.answer(seen.bag, kind)
    side = None
    if base is not None:
        side = size_in_l0(meta.spec, base.mpp)
        boxes = heatmap.patch_boxes(seen.xy_l0, meta.spec, base.mpp, base.size_l0)
        shown, legend = answer.legend
        heat = Heat(boxes, ("other", shown), np.stack([1 - answer.heat, answer.heat], axis=1))
        picture = _drawn(predictor, record, base, heat, [_OTHERWISE, _ATTENTION], *answer.words, legend)
        write_bytes(folder / _HEATMAP, picture)
    write_patches(folder / _TABLE, seen.xy_l0, side, answer.columns)
    row = {"slide": record.slide, "patches": len(seen.xy_l0), "tumor_type": kind, **answer.facts}
    return row, {"encoder": meta.encoder}


def _drawn(
    predictor: Predictor, record: SlideRecord, base: Base, heat: Heat, colors: list[Color], *said: str
) -> bytes:
    spec, of = predictor.meta.spec, "mosaic of " if predictor.kind.data == "mosaics" else ""
    where = f"{predictor.run.name} · {predictor.site.name} · {of}{len(heat.boxes_l0)} patches"
    caption = Caption(record.slide, f"{where} of {spec.size_px} px at {spec.mpp:g} µm", *said)
    return heatmap.draw_heatmap(base.thumbnail, base.downsample, base.mpp, heat, colors, caption)


def colors_of(classes: Sequence[str]) -> list[Color]:
    """Return a colour for each class."""
    if len(classes) == 2:
        return list(_COLORS)
    return list(distinct_colors(_MORE_COLORS, len(classes)))


def _percent(share: float) -> str:
    """Whole per cent, but never 0 % of something, or 100 % of less than all."""
    if 0 < share < 0.01 or 0.99 < share < 1:
        return "under 1 %" if share < 0.5 else "over 99 %"
    return f"{share:.0%}".replace("%", " %")


def write_patches(
    path: Path, xy_l0: NDArray[np.int64], size_l0: float | None, columns: Mapping[str, NDArray[np.float64]]
) -> None:
    """Write patches.csv: a row per patch, its corner and side in level-0 pixels, and what is said of it alone.

    Args:
        size_l0: None where nobody knows where the patches lie.
        columns: heading → float64[m].
    """
    side = "" if size_l0 is None else f"{size_l0:.3f}".rstrip("0").rstrip(".")
    said = np.stack(list(columns.values()), axis=1).tolist()
    patches = zip(xy_l0.tolist(), said, strict=True)
    # all digits, since people set thresholds between them
    rows = ([x, y, side, *map(repr, values)] for (x, y), values in patches)
    write_csv(path, chain([["x_l0", "y_l0", "size_l0", *columns]], rows))


def write_slides(folder: Path) -> Path | None:
    """Write slides.csv: a row for every slide that was ever predicted into a folder, as its score.json says.

    Returns:
        The table, or None where there is no such slide.
    """
    found = sorted(folder.glob(f"*/{_SCORE}"))
    scores = [read_object(path, "predict the slide again") for path in found]
    if not scores:
        return None
    for one in scores:
        one.pop("classes", None)
        if "score" in one:  # the class whose score it is, and no answer for the slide
            one["score_of"] = one.pop("class", None)
    rows = [dict(_cells_of(one)) for one in scores]
    headings = list(dict.fromkeys(chain(("slide",), *rows)))
    write_csv(folder / _ALL, [headings, *([row.get(name) for name in headings] for row in rows)])
    return folder / _ALL


def _cells_of(score: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in score.items():
        if isinstance(value, dict):
            yield from _cells_of(value, f"{before}{key}_")
        else:
            yield before + key, value


def predictions_lines(document: dict[str, Any]) -> Lines:
    """Yield a row per slide, then the pictures' paths on stdout."""
    if document["slides"]:
        of_bags = "score" not in document["slides"][0]
        headings = ("answer", "value") if of_bags else ("max", "top k", "over threshold")
        whose = _WHOSE.get(document["model"], f"{document['model']} model")
        rows = [[row["slide"], row["patches"], *_cells(row)] for row in document["slides"]]
        yield Table(f"{whose} of {document['site']}", ["slide", "patches", *headings], rows)
        yield Line(f"all slides, a row each: {document['table']}")
    for row in document["slides"]:
        yield row["heatmap"] or row["csv"]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if found := row.get("score"):
        return f"{found['max']:.3f}", f"{found['top_k_mean']:.3f}", _percent(found["fraction"])
    if "value" in row:
        return row["target"], f"{row['value']:.3g}"
    if "risk" in row:
        end, said = list(row["without_event"].items())[-1]
        return f"without the event at {end}", f"{said:.3f}"
    return row["class"], f"{row['probability']:.3f}"
