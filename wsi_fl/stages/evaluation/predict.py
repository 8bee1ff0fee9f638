"""`predict`: a site's predictions of new slides: heatmaps, tables of patches, scores, outlines for QuPath.

It opens the run, the given slides and, if present, the site's store.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wsi_fl.report.formatting import Json
from wsi_fl.slides.patching.grid import patch_side_l0
from wsi_fl.slides.pictures import heatmap
from wsi_fl.slides.pictures.drawing import Color, distinct_colors
from wsi_fl.slides.pictures.heatmap import TOP_K, Caption, PatchPredictions
from wsi_fl.slides.reading.formats import slide_name
from wsi_fl.stages.evaluation.slide_predictor import Predictor, SlideImage, SlidePatches, load_predictor
from wsi_fl.stages.prepare.slide_lists import describe_file, describe_slide, list_table_slides
from wsi_fl.stages.runtime.console import Lines, NestedProgress, TextLine, TextTable, Watcher, describe_failure
from wsi_fl.stages.runtime.rank_job import Part, RankJob, take_threads
from wsi_fl.stages.runtime.slide_work import SlideWork, describe_parts, join_slide_work
from wsi_fl.study.folder import Study
from wsi_fl.system.file_names import stem_of
from wsi_fl.system.files import atomic_path, read_object, write_bytes, write_csv, write_json
from wsi_fl.system.shared_work import SharedWork, WorkEnded
from wsi_fl.types import DiskFull, SlideRecord, UsageError

_OTHER_COLOR, _ATTENTION_COLOR = (150, 150, 150), (200, 0, 0)
_COLORS: tuple[Color, ...] = ((150, 200, 150), (200, 0, 0))
"""Healthy, and QuPath's red for Tumor."""
_MORE_COLORS: tuple[Color, ...] = (
    *((0, 114, 178), (213, 94, 0), (0, 158, 115)),
    *((204, 121, 167), (230, 159, 0), (86, 180, 233)),
)
"""Okabe and Ito's colours, for more than two classes; `distinct_colors` adds those after the sixth."""
_HEATMAP, _TABLE, _SCORE, _OUTLINES = "heatmap.png", "patches.csv", "score.json", "tumor.geojson"
_ALL_SLIDES = "slides.csv"
_ENSEMBLE_WORDS = {"mean": "mean of both models", "local": "local model", "ensemble": "ensemble"}


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
    part: Part | None = None,
) -> Json:
    """Predict slides one by one; return the `--json` document, with failures in `failed`.

    Jobs share the slides that they have in common; so do ranks of mpiexec or srun, of which all but the first return
    {}.

    Args:
        out: folder for one folder per slide; default RUN/predictions/SITE.
        tumor_type: of all slides, for runs on mosaics; default: from the site's store.
        mpp: µm per level-0 pixel of these slides; default: that of the site's table, else the site file's, else the
            slides' metadata.
        overrides: `predict.KEY=VALUE` over the run's configuration.
        part: of the slides; others are left to other jobs, and are `missing`.
    """
    start_time, job = time.perf_counter(), RankJob(part)
    progress = job.select_watcher(watcher)
    take_threads(job.threads)
    names = [slide_name(path) if path.exists() else stem_of(path.name) for path in slides]  # as in a store
    if duplicates := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"two slides have the name {duplicates[0]}; predict them one after the other with --out")
    predictor = job.run_on_ranks(lambda: load_predictor(study, run_name, site, tumor_type, overrides))
    folder = out.resolve() if out is not None else predictor.run.path / "predictions" / site
    resolutions = {} if mpp else _read_resolutions(predictor)
    scales = [mpp or resolutions.get(path.resolve(), predictor.site.mpp_override) for path in slides]
    records = [
        SlideRecord(path, name, "", site, "negative", False, mpp_override=scale)
        for path, name, scale in zip(slides, names, scales, strict=True)
    ]

    with join_slide_work(job, folder, site, "predict", _list_settings(predictor)) as work:
        outcomes = _share_slides(predictor, records, folder, work, progress)
        table = job.run_on_first(lambda: _write_slide_table(folder, work.shared))
    if not job.is_first:
        return {}
    return {
        "run": study.relative_path(predictor.run.path),
        "site": site,
        "model": predictor.models.ensemble,
        "slides": [outcome["row"] for outcome in outcomes if "row" in outcome],
        "failed": [outcome["failed"] for outcome in outcomes if "failed" in outcome],
        "done": len(work.job_items),
        "missing": work.n_missing,
        "missing_parts": work.missing_parts,
        "table": study.relative_path(table) if table else None,
        "seconds": time.perf_counter() - start_time,
    }


def _read_resolutions(predictor: Predictor) -> dict[Path, float | None]:
    """Return slide's file → µm per level-0 pixel by the site's table, or None, as in `tile`."""
    records = list_table_slides(predictor.study, predictor.site)
    return {record.path.resolve(): record.mpp_override for record in records}


def _list_settings(predictor: Predictor) -> list[object]:
    """Return what predictions depend on (JSON) beside the slides."""
    study, site = predictor.study, predictor.site
    files = sorted(predictor.run.site_folder(site.name).path.glob("*.safetensors"))
    facts = [site.annotations_origin, predictor.tumor_type, predictor.models.ensemble]
    return [predictor.pipeline.model_dump(mode="json"), *facts, [describe_file(study, path) for path in files]]


def _share_slides(
    predictor: Predictor, records: Sequence[SlideRecord], folder: Path, work: SlideWork, watcher: Watcher
) -> list[Json]:
    """Predict the slides that no other job predicts; return the outcomes of all that are done."""
    items = {f"{record.slide}-{_hash_slide(predictor, record)}": record for record in records}
    n_before = 0

    def predict_items(free_items: Iterator[SlideRecord]) -> Generator[Json, None, None]:
        for record in free_items:
            slide_watcher = NestedProgress(watcher, n_before, len(items))
            yield _predict_or_report(predictor, record, folder / record.slide, work.shared, slide_watcher)

    def update_progress(n_done: int, n: int, note: str) -> None:
        nonlocal n_before
        n_before = n_done
        watcher.update(predictor.site.name, n_done, n, note)

    def is_missing(_: str, outcome: Json) -> bool:
        return "row" not in outcome or not (folder / outcome["row"]["slide"] / _SCORE).exists()

    work.retry_items("slides", is_missing)
    outcomes = work.share_items("slides", items, predict_items, update_progress, in_parts=True)
    work.shared.is_complete = not work.n_missing
    return list(outcomes.values())


def _hash_slide(predictor: Predictor, record: SlideRecord) -> str:
    """Return a short digest of a slide's files, mask and resolution: another file of that name is another slide."""
    facts = json.dumps([describe_slide(predictor.study, predictor.pipeline, record), record.mpp_override])
    return hashlib.sha256(facts.encode()).hexdigest()[:12]


def _predict_or_report(
    predictor: Predictor, record: SlideRecord, folder: Path, shared: SharedWork, watcher: Watcher
) -> Json:
    """Predict a slide, with files in a folder; return its row, or the reason of the failure."""
    try:
        return {"row": _predict_slide(predictor, record, folder, shared, watcher)}
    except (DiskFull, UsageError, WorkEnded):
        raise
    except Exception as error:  # one slide that a library chokes on must not end the others
        reason = describe_failure(error)
    watcher.print_message(f"  {record.slide} failed: {reason}")
    return {"failed": {"slide": record.slide, "reason": reason}}


def _predict_slide(
    predictor: Predictor, record: SlideRecord, folder: Path, shared: SharedWork, watcher: Watcher
) -> Json:
    """Write all files of one slide and return its row; without a slide or coordinates there is no heatmap."""
    watcher.update(record.site, 0, 1, record.slide)
    study, patches = predictor.study, predictor.load_patches(record, watcher)
    origin = {
        "run": study.relative_path(predictor.run.path),
        "site": record.site,
        "path": study.relative_path(patches.base.path.resolve()) if patches.base else None,
        "model": predictor.models.ensemble,
    }
    spec, files = predictor.meta.spec, {"heatmap": _HEATMAP, "csv": _TABLE, "json": _SCORE}
    with shared.stage_folder(folder) as staged:
        if patches.probabilities is not None:
            row, details = _write_patch_results(predictor, record, staged, patches)
            files["geojson"] = _OUTLINES
        else:
            row, details = _write_slide_results(predictor, record, staged, patches)
        write_json(staged / _SCORE, origin | row | details | {"size_px": spec.size_px, "mpp": spec.mpp})
    watcher.update(record.site, 1, 1, record.slide)
    paths = {key: study.relative_path(folder / file) for key, file in files.items()}
    return row | paths | ({} if patches.base else {"heatmap": None})


def _write_patch_results(
    predictor: Predictor, record: SlideRecord, folder: Path, patches: SlidePatches
) -> tuple[dict[str, object], dict[str, object]]:
    """Write the predictions of each patch; return (the row, further entries of the score file)."""
    heat, base = predictor.build_heatmap(record.slide, patches), patches.base
    assert base is not None and patches.mpp_l0 is not None
    kind, colors = heatmap.find_leading_class(heat), choose_colors(heat.classes)
    scores = heatmap.score_class(heat, kind)
    captions = (
        f"{heat.classes[kind]} {scores['top_k_mean']:.2f}",
        f"mean of the {min(TOP_K, len(patches.xy_l0))} highest; highest {scores['max']:.2f}; "
        f"{_format_percent(scores['fraction'])} of patches at {heat.threshold:g} or more",
    )
    write_bytes(folder / _HEATMAP, _draw_heatmap(predictor, record, base, heat, colors, *captions))
    identity = f"{predictor.run.name}/{record.site}/{record.slide}"
    corner = (0, 0) if predictor.site.annotations_origin == "slide" else base.bounds_l0[:2]
    heatmap.write_geojson(folder / _OUTLINES, heat, colors, identity, corner)
    columns = {f"p_{name}": heat.probabilities[:, k] for k, name in enumerate(heat.classes)}
    write_patch_table(folder / _TABLE, patches.xy_l0, patch_side_l0(predictor.meta.spec, patches.mpp_l0), columns)
    row = {"slide": record.slide, "patches": len(patches.xy_l0), "excluded": patches.n_excluded, "score": scores}
    return row, {
        "class": heat.classes[kind],
        "classes": {heat.classes[k]: heatmap.score_class(heat, k) for k in heat.region_classes},
        "regions": len(heat.regions),
        "threshold": heat.threshold,
        "top_k": TOP_K,
        "stride_px": predictor.meta.spec.stride_px,
        "slide_mpp": base.mpp,
        "quickhash": base.quickhash,
    }


def _write_slide_results(
    predictor: Predictor, record: SlideRecord, folder: Path, patches: SlidePatches
) -> tuple[dict[str, object], dict[str, object]]:
    """Write the prediction of the slide; return (the row, further entries of the score file)."""
    assert patches.bag is not None
    meta, base, tumor_type = predictor.meta, patches.base, predictor.find_tumor_type(record)
    prediction = predictor.predict_slide(patches.bag, tumor_type)
    side = None
    if base is not None and patches.mpp_l0 is not None:
        side = patch_side_l0(meta.spec, patches.mpp_l0)
        boxes = heatmap.patch_boxes(patches.xy_l0, meta.spec, patches.mpp_l0, base.size_l0)
        label, legend = prediction.legend
        heat = PatchPredictions(
            boxes, ("other", label), np.stack([1 - prediction.heat_values, prediction.heat_values], axis=1)
        )
        picture = _draw_heatmap(
            predictor, record, base, heat, [_OTHER_COLOR, _ATTENTION_COLOR], *prediction.caption_texts, legend
        )
        write_bytes(folder / _HEATMAP, picture)
    write_patch_table(folder / _TABLE, patches.xy_l0, side, prediction.columns)
    row = {"slide": record.slide, "patches": len(patches.xy_l0), "tumor_type": tumor_type, **prediction.document_fields}
    return row, {"encoder": meta.encoder}


def _draw_heatmap(
    predictor: Predictor,
    record: SlideRecord,
    base: SlideImage,
    heat: PatchPredictions,
    colors: list[Color],
    *captions: str,
) -> bytes:
    spec, source = predictor.meta.spec, "mosaic of " if predictor.kind.data == "mosaics" else ""
    origin = f"{predictor.run.name} · {predictor.site.name} · {source}{len(heat.boxes_l0)} patches"
    caption = Caption(record.slide, f"{origin} of {spec.size_px} px at {spec.mpp:g} µm", *captions)
    return heatmap.draw_heatmap(base.thumbnail, base.downsample, base.mpp, heat, colors, caption)


def choose_colors(classes: Sequence[str]) -> list[Color]:
    """Return a colour for each class."""
    if len(classes) == 2:
        return list(_COLORS)
    return list(distinct_colors(_MORE_COLORS, len(classes)))


def _format_percent(share: float) -> str:
    """Return whole per cent, with "under 1 %" and "over 99 %" next to the ends."""
    if 0 < share < 0.01 or 0.99 < share < 1:
        return "under 1 %" if share < 0.5 else "over 99 %"
    return f"{share:.0%}".replace("%", " %")


def write_patch_table(
    path: Path, xy_l0: NDArray[np.int64], size_l0: float | None, columns: Mapping[str, NDArray[np.float64]]
) -> None:
    """Write patches.csv: a row per patch with corner and side in level-0 pixels and its predictions.

    Args:
        size_l0: None where the coordinates are unknown.
        columns: heading → float64[m].
    """
    side = "" if size_l0 is None else f"{size_l0:.3f}".rstrip("0").rstrip(".")
    table = pd.DataFrame({"x_l0": xy_l0[:, 0], "y_l0": xy_l0[:, 1], "size_l0": side, **columns})
    with atomic_path(path) as temporary:
        table.to_csv(temporary, index=False, lineterminator="\n")  # with all digits, for thresholds between them


def _write_slide_table(folder: Path, shared: SharedWork) -> Path | None:
    """Write slides.csv, a row for every slide of a folder from its score.json; return its path, None without slides.

    Jobs do it one after the other, so none overwrites rows of another.
    """
    with shared.hold_item("table", "slides"):
        scores = [read_object(path, "predict the slide again") for path in sorted(folder.glob(f"*/{_SCORE}"))]
        if not scores:
            return None
        with shared.stage_file(folder / _ALL_SLIDES) as staged:
            write_csv(staged, _build_table(scores))
    return folder / _ALL_SLIDES


def _build_table(scores: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Return headings and a row per slide; without the scores by class."""
    for score in scores:
        score.pop("classes", None)
        if "score" in score:  # the class of the score, which is no prediction for the slide
            score["score_of"] = score.pop("class", None)
    rows = [dict(_flatten_cells(score)) for score in scores]
    headings = list(dict.fromkeys(chain(("slide",), *rows)))
    return [[*headings], *([row.get(name) for name in headings] for row in rows)]


def _flatten_cells(score: Json, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in score.items():
        if isinstance(value, dict):
            yield from _flatten_cells(value, f"{prefix}{key}_")
        else:
            yield prefix + key, value


def render_prediction_lines(document: Json) -> Lines:
    """Yield a row per slide, then the pictures' paths on stdout."""
    if document["slides"]:
        of_bags = "score" not in document["slides"][0]
        headings = ("answer", "value") if of_bags else ("max", "top k", "over threshold")
        model_words = _ENSEMBLE_WORDS.get(document["model"], f"{document['model']} model")
        rows = [[row["slide"], row["patches"], *_format_cells(row)] for row in document["slides"]]
        yield TextTable(f"{model_words} of {document['site']}", ["slide", "patches", *headings], rows)
        yield TextLine(f"all slides, a row each: {document['table']}")
    if document["missing"]:
        yield TextLine(f"{document['missing']} slides are left to {describe_parts(document['missing_parts'])}")
    for row in document["slides"]:
        yield row["heatmap"] or row["csv"]


def _format_cells(row: Json) -> tuple[str, ...]:
    if scores := row.get("score"):
        return f"{scores['max']:.3f}", f"{scores['top_k_mean']:.3f}", _format_percent(scores["fraction"])
    if "value" in row:
        return row["target"], f"{row['value']:.3g}"
    if "risk" in row:
        end, probability = list(row["without_event"].items())[-1]
        return f"without the event at {end}", f"{probability:.3f}"
    return row["class"], f"{row['probability']:.3f}"
