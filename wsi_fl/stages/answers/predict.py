"""`predict`: what a site's models say of new slides: pictures, tables, scores.

Only the run, the slides given and, where it is there, the site's own store are opened.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.answers.predict_slide import percent, predict_slide
from wsi_fl.stages.answers.predictor import Predictor, load_predictor
from wsi_fl.stages.answers.trained import answers_with, trained_site
from wsi_fl.stages.work.console import Lines, Table, Watcher, reason_of
from wsi_fl.stages.work.job import Job
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.types import DiskFull, SlideRecord, UsageError


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
    began = time.perf_counter()
    job = Job()
    told = job.watched(watcher)
    names = _names(slides)

    def prepare() -> tuple[RunFolder, Pipeline, SiteFile, Predictor]:
        run, pipeline, where = trained_site(study, run_name, site, overrides)
        return run, pipeline, where, load_predictor(study, run, pipeline, where, tumor_type)

    run, pipeline, where, predictor = job.each(prepare)
    folder = out.resolve() if out is not None else run.path / "predictions" / site
    records = [
        SlideRecord(path, name, "", site, "negative", False, mpp_override=mpp or where.mpp_override)
        for path, name in zip(slides, names, strict=True)
    ]
    outcomes = job.share(records, lambda mine: (_outcome(predictor, record, folder, told) for record in mine))
    if not job.first:
        return {}
    return {
        "run": study.relative(run.path),
        "site": site,
        "with": answers_with(run, pipeline, site),
        "slides": [one["row"] for one in outcomes if "row" in one],
        "failed": [one["failed"] for one in outcomes if "failed" in one],
        "seconds": time.perf_counter() - began,
    }


def _outcome(predictor: Predictor, record: SlideRecord, folder: Path, watcher: Watcher) -> dict[str, Any]:
    """Predict a slide; return its row, or why there is none."""
    try:
        return {"row": predict_slide(predictor, record, folder / record.slide, watcher)}
    except (DiskFull, UsageError):
        raise
    except Exception as error:  # one slide that a library chokes on must not end the others
        reason = reason_of(error)
    watcher.say(f"  {record.slide} failed: {reason}")
    return {"failed": {"slide": record.slide, "reason": reason}}


def _names(slides: Sequence[Path]) -> list[str]:
    """The slides' names: file names without suffix, as in a store."""
    names = [path.name if path.is_dir() else path.stem for path in slides]
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise UsageError(f"two slides are called {twice[0]}; predict them one after the other with --out")
    return names


def predictions_lines(document: dict[str, Any]) -> Lines:
    """Yield a row per slide, then the pictures' paths on stdout."""
    if document["slides"]:
        of_bags = "score" not in document["slides"][0]
        headings = (
            ("patches", "answer", "value") if of_bags else ("patches", "max", "top k", "over threshold")
        )
        whose = _WHOSE.get(document["with"], f"{document['with']} model")
        cells = _of_slide if of_bags else _of_patches
        rows = [[row["slide"], str(row["patches"]), *cells(row)] for row in document["slides"]]
        yield Table(f"{whose} of {document['site']}", ["slide", *headings], rows)
    for row in document["slides"]:
        yield row["heatmap"] or row["csv"]


_WHOSE = {"mean": "mean of both models", "alone": "lone model", "stack": "mixture"}


def _of_patches(row: dict[str, Any]) -> tuple[str, ...]:
    found = row["score"]
    return f"{found['max']:.3f}", f"{found['top_k_mean']:.3f}", percent(found["fraction"])


def _of_slide(row: dict[str, Any]) -> tuple[str, ...]:
    if "value" in row:
        return row["target"], f"{row['value']:.3g}"
    if "risk" in row:
        end, said = list(row["without_event"].items())[-1]
        return f"without the event at {end}", f"{said:.3f}"
    return row["class"], f"{row['probability']:.3f}"
