"""`synthesize check`: does a site's generator copy its training images, and what did the privacy loss do?

Every distance of a *training* image to the generator is set beside that of a *held-out* image (split test or val)
to the same synthetic set, once to the nearest of many samples and once to the image's own latent projection.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.models.lpips import Lpips, nearest_lpips, nearest_other_lpips
from wsi_fl.report import synthesis as page
from wsi_fl.report.grids import grid, png_of
from wsi_fl.stages.synthesis.gan import (
    HELD_OUT,
    Pictures,
    lpips_of,
    open_site,
    pictures_of,
    shared_phase,
    trained_folder,
)
from wsi_fl.stages.synthesis.quality import quality_of
from wsi_fl.stages.work.console import Silent, Watcher, say
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.evidence import (
    COPY,
    CRITERIA,
    LEAST_HELD_OUT,
    Comparison,
    can_be_told,
    compared,
    moved,
    over_usual,
    spread,
    verdict,
)
from wsi_fl.synthesis.folder import GeneratorFolder, Phase
from wsi_fl.synthesis.projection import Projections, projected
from wsi_fl.synthesis.sampling import balanced_labels, sampled
from wsi_fl.synthesis.stylegan2 import Generator
from wsi_fl.system.files import write_bytes, write_json, write_text
from wsi_fl.system.locks import locked
from wsi_fl.types import UsageError

_SHOWN = 9


@dataclass(frozen=True)
class _Real:
    """What the generators are compared with: their training images and held-out ones, and the few to be projected."""

    training: Pictures
    held_out: Pictures
    projected_training: Pictures
    projected_held_out: Pictures


@dataclass(frozen=True)
class _Usual:
    """LPIPS of the same images to their nearest training image of another patient: float64[n] each."""

    training: NDArray[np.float64]
    held_out: NDArray[np.float64]
    projected_training: NDArray[np.float64]
    projected_held_out: NDArray[np.float64]


@dataclass(frozen=True)
class _Found:
    """What was measured of one generator."""

    samples: Tensor
    nearest_training: NDArray[np.float64]
    nearest_held_out: NDArray[np.float64]
    projected_training: Projections
    projected_held_out: Projections


@dataclass(frozen=True)
class _Check:
    """One check in progress."""

    pipeline: Pipeline
    folder: GeneratorFolder
    document: dict[str, Any]
    lpips: Lpips
    device: torch.device
    watcher: Watcher

    @property
    def memory_bytes(self) -> int:
        return self.pipeline.lpips.memory_mb << 20


def check(
    study: Study,
    *,
    site: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Writes `check.json` and `check/` beside the generator; returns the verdict, the `--json` document."""
    began = time.perf_counter()
    pipeline = study.pipeline(study.pipeline_name(pipeline_name), overrides)
    if pipeline.synthesis.generator == "ddpm":
        from wsi_fl.stages.synthesis.evidence_ddpm import check_denoiser  # diffusers takes seconds to import

        return check_denoiser(study, pipeline, site, watcher=watcher)
    folder, document = trained_folder(study, site)
    device = device_of_rank()
    lpips = lpips_of(study, pipeline, site, device)
    job = _Check(pipeline, folder, document, lpips, device, watcher or Silent())
    with locked(folder.path, site):
        real = _real(study, site, job)
        phases: list[Phase] = ["before", "after"] if "after" in document["phases"] else ["before"]
        for phase in phases:  # so that progress is of the whole from the beginning
            n_projected = len(real.projected_training) + len(real.projected_held_out)
            job.watcher.update(_part_name(phase), 0, n_projected)
        found = {phase: _measured(job, real, phase) for phase in phases}
        result = _result(study, site, job, real, found)
        result["seconds"] = time.perf_counter() - began
        _write(study, job, real, found, result)
    return result


def _real(study: Study, site: str, job: _Check) -> _Real:
    gan, resolution = job.pipeline.gan, job.document["settings"]["shape"]["resolution"]
    with open_site(study, site) as store:
        training = pictures_of(store, resolution, "train")
        held_out = pictures_of(store, resolution, *HELD_OUT)
    if len(training) != job.document["store"]["n"]:
        raise UsageError(
            f"site {site}: its store was made anew since the generator was trained; train --again"
        )
    if len(held_out) < LEAST_HELD_OUT:
        job.watcher.say(
            f"  site {site} holds out {len(held_out)} images; {LEAST_HELD_OUT} are the least for a verdict"
        )
    some_training = training.some(gan.check_images, gan.seed)
    some_held_out = held_out.some(gan.check_images, gan.seed)
    return _Real(
        some_training,
        some_held_out,
        some_training.some(gan.projections, gan.seed + 1),
        some_held_out.some(gan.projections, gan.seed + 1),
    )


def _measured(job: _Check, real: _Real, phase: Phase) -> _Found:
    gan = job.pipeline.gan
    generator = job.folder.load_generator(phase, job.device)
    n_classes = generator.shape.n_classes
    labels = balanced_labels(n_classes, -(-gan.check_samples // n_classes))
    samples = sampled(generator, labels, seed=gan.seed, truncation=gan.truncation)
    both = torch.cat([real.training.images, real.held_out.images])
    nearest = _distances(job, both, samples)
    n = len(real.training)
    projections = _projections(job, generator, real, phase)
    m = len(real.projected_training)
    return _Found(
        samples, nearest[:n], nearest[n:], _part(projections, slice(m)), _part(projections, slice(m, None))
    )


def _distances(job: _Check, images: Tensor, others: Tensor) -> NDArray[np.float64]:
    """LPIPS of each image to its nearest among the others; uint8 in."""
    return nearest_lpips(job.lpips, images, others, memory_bytes=job.memory_bytes)


def _usual(job: _Check, real: _Real) -> _Usual:
    every = real.training

    def among(some: Pictures) -> NDArray[np.float64]:
        return nearest_other_lpips(
            job.lpips, some.images, some.patient, every.images, every.patient, memory_bytes=job.memory_bytes
        )

    return _Usual(
        among(real.training),
        _distances(job, real.held_out.images, every.images),
        among(real.projected_training),
        _distances(job, real.projected_held_out.images, every.images),
    )


def _projections(job: _Check, generator: Generator, real: _Real, phase: Phase) -> Projections:
    """Of training and held-out images alike, from the same starting points."""
    gan = job.pipeline.gan
    images = torch.cat([real.projected_training.images, real.projected_held_out.images])
    return projected(
        generator,
        job.lpips,
        images,
        steps=gan.projection_steps,
        candidates=gan.check_samples,
        seed=gan.seed,
        told=lambda done: job.watcher.update(_part_name(phase), done, len(images)),
    )


def _part_name(phase: Phase) -> str:
    return f"projections {phase}"


def _part(found: Projections, rows: slice) -> Projections:
    return Projections(found.distance[rows], found.images[rows])


def _result(study: Study, site: str, job: _Check, real: _Real, found: dict[Phase, _Found]) -> dict[str, Any]:
    """The document: what is known of each generator, and the verdict on the one that may be shared."""
    phase = shared_phase(job.document)
    comparisons: dict[Phase, dict[str, Comparison]] = {}
    usual = _usual(job, real)
    n_fresh = int((usual.held_out > 0).sum())
    if n_fresh >= LEAST_HELD_OUT:
        comparisons = {name: both for name, one in found.items() if (both := _comparisons(one, usual))}
    judged = verdict(list(comparisons.get(phase, {}).items()), n_fresh)
    sets = {name: one.samples for name, one in found.items()} | {"training": real.training.images}
    quality, note = quality_of(study, job.pipeline, real.held_out.images, sets)
    return {
        "site": site,
        **judged,
        "criteria": CRITERIA,
        "generator": {"phase": phase, "sha256": job.folder.digest(phase)},
        "lpips": job.lpips.label,
        "truncation": job.pipeline.gan.truncation,
        "n_training": len(real.training),
        "n_held_out": len(real.held_out),
        "n_samples": len(found[phase].samples),
        "copy_below": COPY if comparisons else None,
        "copying": {
            name: {what: asdict(one) for what, one in both.items()} for name, both in comparisons.items()
        },
        "projection": _projection_document(job, found),
        "nearest": {name: asdict(spread(one.nearest_training)) for name, one in found.items()},
        "quality": quality,
        "notes": [*([note] if note else []), *_cautions(job)],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _comparisons(found: _Found, usual: _Usual) -> dict[str, Comparison]:
    pairs = {
        "nearest sample": (
            over_usual(found.nearest_training, usual.training),
            over_usual(found.nearest_held_out, usual.held_out),
        ),
        "projection": (
            over_usual(found.projected_training.distance.double().numpy(), usual.projected_training),
            over_usual(found.projected_held_out.distance.double().numpy(), usual.projected_held_out),
        ),
    }
    if not can_be_told(*pairs["nearest sample"]):
        return {}
    return {what: compared(a, b) for what, (a, b) in pairs.items() if len(a) and len(b)}


def _projection_document(job: _Check, found: dict[Phase, _Found]) -> dict[str, Any]:
    """Fig. 3 in numbers: projected distances of training images without and with the privacy loss, paired."""
    distances = {name: one.projected_training.distance.double().numpy() for name, one in found.items()}
    paired = None
    if len(distances) == 2:
        paired = asdict(moved(distances["after"], distances["before"]))
    return {
        "steps": job.pipeline.gan.projection_steps,
        **{name: asdict(spread(values)) for name, values in distances.items()},
        "moved": paired,
    }


def _cautions(job: _Check) -> list[str]:
    notes = ["A passed check is evidence against copying, not differential privacy: it bounds nothing."]
    if not job.lpips.trained:
        notes.append(f"LPIPS ran on an {job.lpips.label}; its distances are not the paper's.")
    if "after" not in job.document["phases"]:
        notes.append("The generator was trained without the privacy loss.")
    return notes


def _write(
    study: Study, job: _Check, real: _Real, found: dict[Phase, _Found], result: dict[str, Any]
) -> None:
    """Pictures first, the verdict last: whoever finds it finds them too."""
    folder = job.folder.path / "check"
    distances: dict[str, NDArray[np.float64]] = {
        name: one.projected_training.distance.double().numpy() for name, one in found.items()
    }
    rows = _shown(real, found)
    names = {"page": "index.html", "histograms": "histograms.png", "projections": "projections.png"}
    result["files"] = {key: study.relative(folder / name) for key, name in names.items()}
    write_bytes(folder / names["histograms"], page.histogram_png(distances))
    write_bytes(folder / names["projections"], png_of(grid([images for _, images in rows])))
    samples = [(name, _pixels(one.samples[:_SHOWN])) for name, one in found.items()]
    write_text(folder / names["page"], page.render(result, distances, rows, samples))
    write_json(job.folder.check_path, result)


def _shown(real: _Real, found: dict[Phase, _Found]) -> list[tuple[str, NDArray[np.uint8]]]:
    """Fig. 4: the training images that are met most closely without the privacy loss, and their projections."""
    order = found["before"].projected_training.distance.argsort()[:_SHOWN]
    rows = [("real", _pixels(real.projected_training.images[order]))]
    return rows + [(name, _pixels(one.projected_training.images[order])) for name, one in found.items()]


def _pixels(images: Tensor) -> NDArray[np.uint8]:
    """uint8[n, c, h, w] → uint8[n, h, w, 3]."""
    pixels: NDArray[np.uint8] = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    return pixels


def print_check(document: dict[str, Any]) -> None:
    """The verdict, its reasons, and where the pictures are."""
    passed = document["passed"]
    say(
        f"site {document['site']}: the check is {'passed' if passed else 'NOT passed'}",
        "green" if passed else "red",
    )
    for reason in document["reasons"]:
        say(f"  {reason}", "red")
    for name in ("before", "after", "denoiser"):
        if one := (document["projection"] or {}).get(name):
            say(
                f"  projections {name}: median LPIPS {one['median']:.4f}, "
                f"5 % quantile {one['q05']:.4f} (n = {one['n']})"
            )
        if one := document["quality"].get(name):
            say(f"  quality {name}: FID {one['fid']:.1f}, KID {one['kid']:.4f}")
    if z := document.get("memorization"):
        say(
            f"  nearest training image: least {z['least']:.4f}, median {z['median']:.4f} (held-out images "
            f"{z['held_out_least']:.4f}, {z['held_out_median']:.4f}); "
            f"below 0.1: {z['below_paper']} of {z['n_generated']}"
        )
    for note in document["notes"]:
        say(f"  {note}", "yellow")
    say(f"  {document['files']['page']}")
