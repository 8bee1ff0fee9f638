"""`synthesize train`: one conditional GAN on the training split of a site's patch store, resumable at any moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from wsi_fl.models.lpips import Lpips, embeddings
from wsi_fl.report.grids import grid, png_of
from wsi_fl.stages.site.data import store_digest
from wsi_fl.stages.synthesis.gan import (
    Pictures,
    begin_document,
    folder_of,
    forget,
    gan_shape,
    gan_terms,
    lpips_of,
    open_site,
    pictures_of,
    settings_document,
    shared_phase,
)
from wsi_fl.stages.work.console import Silent, Watcher, say
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.folder import GeneratorFolder
from wsi_fl.synthesis.gan import GanState, Losses, step, to_images
from wsi_fl.synthesis.privacy_loss import Keepaway, margin_of
from wsi_fl.synthesis.sampling import balanced_labels, sampled
from wsi_fl.system.files import write_bytes
from wsi_fl.system.locks import locked
from wsi_fl.types import UsageError, WsiFlError

_LOG_EVERY = 20
_MARGIN_IMAGES = 256
_SHOWN_PER_CLASS = 8
_SHOWN_CLASSES = 10
_LEAST_IMAGES = 2


@dataclass(frozen=True)
class _Job:
    """A training in progress."""

    site: str
    pipeline: Pipeline
    folder: GeneratorFolder
    state: GanState
    pictures: Pictures
    lpips: Lpips | None
    watcher: Watcher

    @property
    def total(self) -> int:
        return self.pipeline.gan.iterations + self.pipeline.gan.privacy_iterations


def train_generator(
    study: Study,
    *,
    site: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    again: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Trains a site's generator, or goes on with it; returns the `--json` document.

    Args:
        again: throws away what there is.

    Raises:
        UsageError: when a generator of other settings, or of another store, is there already.
    """
    began = time.perf_counter()
    pipeline = study.pipeline(study.pipeline_name(pipeline_name), overrides)
    if pipeline.synthesis.generator == "ddpm":
        from wsi_fl.stages.synthesis.train_ddpm import train_denoiser  # diffusers takes seconds to import

        return train_denoiser(study, pipeline, site, again=again, watcher=watcher)
    folder = folder_of(study, site)
    with locked(folder.path, site):
        if again:
            forget(folder.path)
        job = _prepared(study, site, pipeline, folder, watcher or Silent())
        document = folder.document()
        assert document is not None
        if not document["finished"]:
            _train(job)
    return _summary(study, site, folder, time.perf_counter() - began)


def _prepared(study: Study, site: str, pipeline: Pipeline, folder: GeneratorFolder, watcher: Watcher) -> _Job:
    device = device_of_rank()
    gan = pipeline.gan
    with open_site(study, site) as store:
        shape, terms = gan_shape(gan, store), gan_terms(gan)
        if store.meta.generator is not None:
            raise UsageError(
                f"site {site}: its patches are synthetic already; a generator learns from real ones"
            )
        pictures = pictures_of(store, gan.resolution, "train")
        digest, classes = store_digest(store), list(store.meta.classes)
        patch = {"size_px": store.meta.spec.size_px, "mpp": store.meta.spec.mpp}
    if len(pictures) < _LEAST_IMAGES:
        raise WsiFlError(f"site {site}: its store has no training patches to learn from")
    lpips = lpips_of(study, pipeline, site, device) if gan.privacy_iterations else None
    settings = settings_document(pipeline, shape, terms, lpips.label if lpips else None)
    begin_document(
        study,
        site,
        folder,
        settings,
        {"sha256": digest, "n": len(pictures), "classes": classes, **patch},
        _by_phase,
    )
    on_device = pictures.to(device)
    state = GanState(shape, terms, seed=gan.seed, device=device)
    if folder.load_state(state):
        folder.forget_after(state.iteration)
    return _Job(site, pipeline, folder, state, on_device, lpips, watcher)


def _by_phase(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What decides the first phase, and what the second alone."""
    terms = dict(settings["terms"])
    later = {key: settings[key] for key in ("privacy", "privacy_iterations")}
    later["weight"] = terms.pop("privacy_weight")
    return {**settings, "terms": terms, "privacy": None, "privacy_iterations": None}, later


def _train(job: _Job) -> None:
    """Both phases from wherever the state is; each checkpoint is whole, and what follows from it is written again."""
    gan, state = job.pipeline.gan, job.state
    began, keepaway = time.monotonic(), None
    while state.iteration < job.total:
        second = state.iteration >= gan.iterations
        if second and keepaway is None:
            keepaway = _keepaway(job)
        losses = step(state, job.pictures.images, job.pictures.labels, keepaway)
        done = state.iteration
        if not (isfinite(losses.generator) and isfinite(losses.discriminator)):
            raise WsiFlError(
                f"site {job.site}: training diverged at iteration {done}; lower gan.lr or raise gan.r1_gamma, "
                "and train --again"
            )
        if done % _LOG_EVERY == 0 or done == job.total:
            job.folder.log(_line(job, losses, time.monotonic() - began))
            job.watcher.update(job.site, done, job.total, "with privacy loss" if second else "")
        if done == gan.iterations:
            _keep(job, "before")
        if done % gan.checkpoint_every == 0 or done in {gan.iterations, job.total}:
            write_bytes(job.folder.sample_path(done), _picture(job))
            job.folder.save_state(state)
    _finish(job)


def _finish(job: _Job) -> None:
    if job.pipeline.gan.privacy_iterations:
        _keep(job, "after")
    document = job.folder.document()
    assert document is not None
    job.folder.write_document(document | {"finished": True, "margin": job.state.margin})


def _keep(job: _Job, phase: Any) -> None:
    """Writes a phase's generator and its digest."""
    digest = job.folder.save_generator(phase, job.state.average)
    document = job.folder.document()
    assert document is not None
    entry = {"sha256": digest, "iterations": job.state.iteration, "augmentation": job.state.ada.p}
    job.folder.write_document(document | {"phases": document["phases"] | {phase: entry}})


def _keepaway(job: _Job) -> Keepaway:
    """The privacy loss: its margin, how far apart the site's own images are, and the images it always looks at."""
    gan, state = job.pipeline.gan, job.state
    assert job.lpips is not None
    all_images = job.pictures.to("cpu")
    if state.margin is None:
        few = all_images.some(_MARGIN_IMAGES, gan.seed)
        state.margin = margin_of(job.lpips, to_images(few.images), gan.privacy_quantile)
    if not gan.privacy_images:
        return Keepaway(job.lpips, state.margin)
    many = to_images(all_images.some(gan.privacy_images, gan.seed).images)
    return Keepaway(job.lpips, state.margin, embeddings(job.lpips, many))


def _line(job: _Job, losses: Losses, seconds: float) -> dict[str, Any]:
    state = job.state
    phase = "after" if state.iteration > job.pipeline.gan.iterations else "before"
    ada = {"augmentation": state.ada.p}
    return {"iteration": state.iteration, "phase": phase, **asdict(losses), **ada, "seconds": seconds}


def _picture(job: _Job) -> bytes:
    """A row per class, the same latents at every checkpoint."""
    shape = job.state.shape
    shown = min(shape.n_classes, _SHOWN_CLASSES)
    labels = balanced_labels(shown, _SHOWN_PER_CLASS)
    images = sampled(job.state.average, labels, seed=0).permute(0, 2, 3, 1).numpy()
    return png_of(grid([images[labels == k] for k in range(shown)]))


def _summary(study: Study, site: str, folder: GeneratorFolder, seconds: float) -> dict[str, Any]:
    document = folder.document()
    assert document is not None
    settings = document["settings"]
    phase = shared_phase(document)
    return {
        "site": site,
        "generator": study.relative(folder.path),
        "resolution": settings["shape"]["resolution"],
        "classes": document["store"]["classes"],
        "images": document["store"]["n"],
        "iterations": settings["iterations"],
        "privacy_iterations": settings["privacy_iterations"],
        "phases": document["phases"],
        "shared": {"phase": phase, "sha256": document["phases"][phase]["sha256"]},
        "margin": document["margin"],
        "lpips": (settings["privacy"] or {}).get("lpips"),
        "seconds": seconds,
    }


def print_trained(document: dict[str, Any]) -> None:
    """What there is now, and what to do next."""
    if document.get("kind") == "ddpm":
        from wsi_fl.stages.synthesis import train_ddpm as synthesize_ddpm

        synthesize_ddpm.print_trained(document)
        return
    say(
        f"generator of site {document['site']}: {document['resolution']} px, {document['iterations']} iterations, then "
        f"{document['privacy_iterations']} with the privacy loss; {document['generator']}"
    )
    if (document["lpips"] or "").startswith("UNTRAINED"):
        say(f"  {document['lpips']}", "yellow")
    say(f"next: wsi-fl synthesize check --site {document['site']}")
