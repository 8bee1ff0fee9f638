"""`synthesize check --generator ddpm`: does a denoiser copy its training images?

Looks at exactly the images that other sites would draw: `ddpm.samples_per_class` of each class. Three questions, all
calibrated on held-out real images: how near each generated image is to a training image and whether that one stands
out (`privacy.memorization`); whether training images are nearer to the generated ones than held-out images are, for
how near they are to other real ones (`synthesis.evidence`); and the latter once more by LPIPS, where there are weights.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.models.lpips import Lpips, nearest_lpips, nearest_other_lpips
from wsi_fl.privacy.memorization import Memorization, Nearest, duplicates, judged, nearest, nearest_other
from wsi_fl.report import synthesis as page
from wsi_fl.report.grids import grid, png_of
from wsi_fl.stages.site.data import store_digest
from wsi_fl.stages.synthesis.ddpm import sampling_of, trained_denoiser
from wsi_fl.stages.synthesis.gan import HELD_OUT, Pictures, lpips_of, open_site, pictures_of
from wsi_fl.stages.synthesis.generated import images_of
from wsi_fl.stages.synthesis.quality import quality_of
from wsi_fl.stages.work.console import Silent, Watcher
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.denoisers import DenoiserFolder
from wsi_fl.synthesis.evidence import (
    COPY,
    CRITERIA,
    LEAST_HELD_OUT,
    Comparison,
    can_be_told,
    compared,
    over_usual,
    verdict,
)
from wsi_fl.system.files import write_bytes, write_json, write_text
from wsi_fl.system.locks import locked
from wsi_fl.types import UsageError

_SHOWN = 9
NAME = "denoiser"


@dataclass(frozen=True)
class _Seen:
    """The images of a check, and how near they are to each other.

    Attributes:
        generated: uint8[n, c, h, h].
        to_training: of generated images to training images.
        held_out_to_training: of held-out images to them.
    """

    training: Pictures
    held_out: Pictures
    generated: Tensor
    to_training: Nearest
    held_out_to_training: Nearest
    found: Memorization


def check_denoiser(
    study: Study, pipeline: Pipeline, site: str, *, watcher: Watcher | None = None
) -> dict[str, Any]:
    """Writes `check.json` and `check/` beside the denoiser; returns the verdict, the `--json` document."""
    began = time.perf_counter()
    watcher = watcher or Silent()
    folder, document = trained_denoiser(study, site)
    with locked(folder.path, site):
        key, training, held_out, generated = _images(study, pipeline, site, folder, document, watcher)
        memory = pipeline.lpips.memory_mb << 20
        to_training = nearest(_rows(generated), _rows(training.images), memory_bytes=memory)
        held = nearest(_rows(held_out.images), _rows(training.images), memory_bytes=memory)
        found = judged(to_training, held, len(duplicates(_rows(training.images))))
        seen = _Seen(training, held_out, generated, to_training, held, found)
        result = _result(study, pipeline, site, folder, seen)
        result["images"] = {"key": key, "per_class": pipeline.ddpm.samples_per_class}
        result["seconds"] = time.perf_counter() - began
        _write(study, folder, seen, result)
    return result


def checked_as(check: dict[str, Any] | None, pipeline: Pipeline) -> bool:
    """Whether a check looked at the images that this pipeline would draw."""
    return (
        check is not None
        and check["sampling"] == asdict(sampling_of(pipeline.ddpm))
        and check["images"]["per_class"] == pipeline.ddpm.samples_per_class
        and check["seed"] == pipeline.ddpm.seed
    )


def _images(
    study: Study,
    pipeline: Pipeline,
    site: str,
    folder: DenoiserFolder,
    document: dict[str, Any],
    watcher: Watcher,
) -> tuple[str, Pictures, Pictures, Tensor]:
    """(key of the generated store, training images, held-out images, generated images)."""
    denoiser, shape = folder.load_denoiser(device_of_rank())
    with open_site(study, site) as store:
        if store_digest(store) != document["store"]["sha256"]:
            raise UsageError(
                f"site {site}: its store was made anew since the denoiser was trained; train --again"
            )
        training = pictures_of(store, shape.resolution, "train")
        held_out = pictures_of(store, shape.resolution, *HELD_OUT)
        key, path = images_of(study, pipeline, store, denoiser, shape, site=site, watcher=watcher, part=site)
    if len(held_out) < LEAST_HELD_OUT:
        watcher.say(
            f"  site {site} holds out {len(held_out)} images; {LEAST_HELD_OUT} are the least for a verdict"
        )
    return key, training, held_out, _all_images(path)


def _all_images(path: Path) -> Tensor:
    with PatchStore(path) as store:
        pixels = store.read(np.arange(len(store)))
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))


def _rows(images: Tensor) -> NDArray[np.uint8]:
    rows: NDArray[np.uint8] = images.numpy()
    return rows


def _result(
    study: Study, pipeline: Pipeline, site: str, folder: DenoiserFolder, seen: _Seen
) -> dict[str, Any]:
    """The document: distances, comparisons, and the verdict."""
    comparisons, lpips = _compared(study, pipeline, site, seen)
    n_fresh = int((seen.held_out_to_training.distance > 0).sum())
    by_sets = verdict(list(comparisons.items()), n_fresh)
    reasons = list(dict.fromkeys([*seen.found.reasons, *by_sets["reasons"]]))
    sets = {NAME: seen.generated, "training": seen.training.images}
    quality, note = quality_of(study, pipeline, seen.held_out.images, sets)
    return {
        "site": site,
        "kind": "ddpm",
        "passed": not reasons,
        "reasons": reasons,
        "criteria": CRITERIA,
        "generator": {"phase": NAME, "sha256": folder.denoiser_digest()},
        "sampling": asdict(sampling_of(pipeline.ddpm)),
        "seed": pipeline.ddpm.seed,
        "lpips": lpips.label if lpips else None,
        "n_training": len(seen.training),
        "n_held_out": len(seen.held_out),
        "n_samples": len(seen.generated),
        "memorization": asdict(seen.found),
        "copy_below": COPY if comparisons else None,
        "copying": {NAME: {what: asdict(one) for what, one in comparisons.items()}} if comparisons else {},
        "projection": None,
        "quality": quality,
        "notes": [*([note] if note else []), *_cautions(seen, lpips)],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _compared(
    study: Study, pipeline: Pipeline, site: str, seen: _Seen
) -> tuple[dict[str, Comparison], Lpips | None]:
    """Training against held-out images by their nearest generated one, in L2 and LPIPS; LPIPS."""
    memory = pipeline.lpips.memory_mb << 20
    reached = [
        nearest(_rows(one.images), _rows(seen.generated), memory_bytes=memory).distance
        for one in (seen.training, seen.held_out)
    ]
    among = nearest_other(_rows(seen.training.images), seen.training.patient, memory_bytes=memory)
    training = over_usual(reached[0], among)
    held_out = over_usual(reached[1], seen.held_out_to_training.distance)
    if not can_be_told(training, held_out):
        return {}, None
    found = {"nearest sample": compared(training, held_out)}
    if pipeline.lpips.weights is None:
        return found, None
    lpips = lpips_of(study, pipeline, site, device_of_rank())
    if (by_lpips := _compared_by_lpips(pipeline, lpips, seen)) is not None:
        found["nearest sample, LPIPS"] = by_lpips
    return found, lpips


def _compared_by_lpips(pipeline: Pipeline, lpips: Lpips, seen: _Seen) -> Comparison | None:
    """Of some images; None where too few are left."""
    few, seed = pipeline.gan.check_images, pipeline.ddpm.seed
    some, held_out = seen.training.some(few, seed), seen.held_out.some(few, seed)
    every, samples = seen.training, seen.generated[: pipeline.gan.check_samples]
    memory = pipeline.lpips.memory_mb << 20
    usual = [
        nearest_other_lpips(
            lpips, some.images, some.patient, every.images, every.patient, memory_bytes=memory
        ),
        nearest_lpips(lpips, held_out.images, every.images, memory_bytes=memory),
    ]
    quotients = [
        over_usual(nearest_lpips(lpips, one.images, samples, memory_bytes=memory), known)
        for one, known in zip((some, held_out), usual, strict=True)
    ]
    return compared(quotients[0], quotients[1]) if can_be_told(*quotients) else None


def _cautions(seen: _Seen, lpips: Lpips | None) -> list[str]:
    notes = ["A passed check is evidence against copying, not differential privacy: it bounds nothing."]
    z = seen.found
    if z.below_paper and z.held_out_below_paper:
        notes.append(
            f"{z.below_paper} of {z.n_generated} generated images are nearer than the paper's 0.1 to a training image, "
            f"and so are {z.held_out_below_paper} of {z.n_held_out} real images nobody trained on: the threshold means "
            "nothing at this resolution."
        )
    if z.duplicates:
        notes.append(f"{z.duplicates} training images are exact duplicates; those are copied first.")
    if twins := int((seen.held_out_to_training.distance == 0).sum()):
        notes.append(
            f"{twins} held-out images are exact duplicates of training images; left out of the comparison."
        )
    if lpips is None:
        notes.append("LPIPS was not computed: lpips.weights is not set.")
    elif not lpips.trained:
        notes.append(f"LPIPS ran on an {lpips.label}.")
    return notes


def _write(study: Study, folder: DenoiserFolder, seen: _Seen, result: dict[str, Any]) -> None:
    """Pictures first, the verdict last: whoever finds it finds them too."""
    place = folder.path / "check"
    distances: dict[str, NDArray[np.float64]] = {NAME: seen.to_training.distance}
    if len(seen.held_out):
        distances["held_out"] = seen.held_out_to_training.distance
    order = seen.to_training.relative.argsort(kind="stable")[:_SHOWN]
    twins = torch.from_numpy(seen.to_training.row[order])
    rows = [
        (NAME, _pixels(seen.generated[torch.from_numpy(order)])),
        ("real", _pixels(seen.training.images[twins])),
    ]
    names = {"page": "index.html", "histograms": "histograms.png", "pairs": "closest_pairs.png"}
    result["files"] = {key: study.relative(place / name) for key, name in names.items()}
    write_bytes(place / names["histograms"], page.histogram_png(distances, page.NEAREST))
    write_bytes(place / names["pairs"], png_of(grid([images for _, images in rows])))
    samples = [(NAME, _pixels(seen.generated[:_SHOWN]))]
    write_text(place / names["page"], page.render(result, distances, rows, samples, axis=page.NEAREST))
    write_json(folder.check_path, result)


def _pixels(images: Tensor) -> NDArray[np.uint8]:
    """uint8[n, c, h, w] → uint8[n, h, w, 3]."""
    pixels: NDArray[np.uint8] = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    return pixels
