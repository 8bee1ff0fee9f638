"""`synthesize train --generator ddpm`: one conditional diffusion model on the training split of a site's store."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from wsi_fl.report.grids import grid, png_of
from wsi_fl.stages.site.data import store_digest
from wsi_fl.stages.synthesis.ddpm import (
    ddpm_shape,
    ddpm_terms,
    denoiser_folder,
    sampling_of,
    settings_document,
    training_steps,
)
from wsi_fl.stages.synthesis.gan import Pictures, begin_document, forget, open_site, pictures_of
from wsi_fl.stages.work.console import Silent, Watcher, say
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.ddpm import DdpmState, Sampling, drawn, step
from wsi_fl.synthesis.denoisers import DenoiserFolder
from wsi_fl.synthesis.sampling import balanced_labels
from wsi_fl.system.files import write_bytes
from wsi_fl.system.locks import locked
from wsi_fl.types import UsageError, WsiFlError

_LOG_EVERY = 20
_SHOWN_PER_CLASS = 8
_SHOWN_CLASSES = 10
_SHOWN_STEPS = 25


@dataclass(frozen=True)
class _Job:
    """A training in progress."""

    site: str
    pipeline: Pipeline
    folder: DenoiserFolder
    state: DdpmState
    pictures: Pictures
    total: int
    watcher: Watcher


def train_denoiser(
    study: Study, pipeline: Pipeline, site: str, *, again: bool = False, watcher: Watcher | None = None
) -> dict[str, Any]:
    """Trains a site's denoiser, or goes on with it; returns the `--json` document.

    Args:
        again: throws away what there is.

    Raises:
        UsageError: when a denoiser of other settings, or of another store, is there already.
    """
    began = time.perf_counter()
    folder = denoiser_folder(study, site)
    with locked(folder.path, site):
        if again:
            forget(folder.path)
        job = _prepared(study, site, pipeline, folder, watcher or Silent())
        document = folder.document()
        assert document is not None
        if not document["finished"]:
            _train(job)
    return _summary(study, site, folder, time.perf_counter() - began)


def _prepared(study: Study, site: str, pipeline: Pipeline, folder: DenoiserFolder, watcher: Watcher) -> _Job:
    ddpm, device = pipeline.ddpm, device_of_rank()
    sampling_of(ddpm)  # a wrong setting shows now, not after hours
    with open_site(study, site) as store:
        if store.meta.generator is not None:
            raise UsageError(
                f"site {site}: its patches are synthetic already; a generator learns from real ones"
            )
        shape, terms = ddpm_shape(ddpm, store), ddpm_terms(ddpm)
        pictures = pictures_of(store, ddpm.resolution, "train")
        facts = {
            "sha256": store_digest(store),
            "n": len(pictures),
            "classes": list(store.meta.classes),
            "size_px": store.meta.spec.size_px,
            "mpp": store.meta.spec.mpp,
        }
    if not len(pictures):
        raise WsiFlError(f"site {site}: its store has no training patches to learn from")
    total = training_steps(ddpm, len(pictures), shape.n_classes)
    begin_document(study, site, folder, settings_document(shape, terms, total, ddpm.seed), facts)
    state = DdpmState(shape, terms, seed=ddpm.seed, device=device)
    if folder.load_state(state):
        folder.forget_after(state.iteration)
    on_device = pictures.to(device)
    return _Job(site, pipeline, folder, state, on_device, total, watcher)


def _train(job: _Job) -> None:
    """From wherever the state is; each checkpoint is whole, and what follows from it is written again."""
    state, began, losses = job.state, time.monotonic(), 0.0
    since = 0
    while state.iteration < job.total:
        losses += step(state, job.pictures.images, job.pictures.labels)
        since += 1
        done = state.iteration
        if not isfinite(losses):
            raise WsiFlError(
                f"site {job.site}: training diverged at step {done}; lower ddpm.lr, and train --again"
            )
        if done % _LOG_EVERY == 0 or done == job.total:
            seconds = time.monotonic() - began
            job.folder.log({"iteration": done, "loss": losses / since, "seconds": seconds})
            losses, since = 0.0, 0
        job.watcher.update(job.site, done, job.total, "denoiser")
        if done % job.pipeline.ddpm.checkpoint_every == 0 or done == job.total:
            write_bytes(job.folder.sample_path(done), _picture(job))
            job.folder.save_state(state)
    digest = job.folder.save_denoiser(state.average)
    document = job.folder.document()
    assert document is not None
    job.folder.write_document(document | {"finished": True, "sha256": digest})


def _picture(job: _Job) -> bytes:
    """A row per class, from the same noise at every checkpoint."""
    shape = job.state.shape
    shown = min(shape.n_classes, _SHOWN_CLASSES)
    labels = balanced_labels(shown, _SHOWN_PER_CLASS)
    how = Sampling("ddim", min(_SHOWN_STEPS, shape.chain))
    images = torch.cat(list(drawn(job.state.average, shape, labels, how, seed=0)))
    pixels = images.permute(0, 2, 3, 1).numpy()
    return png_of(grid([pixels[labels == k] for k in range(shown)]))


def _summary(study: Study, site: str, folder: DenoiserFolder, seconds: float) -> dict[str, Any]:
    document = folder.document()
    assert document is not None
    settings = document["settings"]
    return {
        "site": site,
        "generator": study.relative(folder.path),
        "kind": "ddpm",
        "resolution": settings["shape"]["resolution"],
        "classes": document["store"]["classes"],
        "images": document["store"]["n"],
        "iterations": settings["steps"],
        "epochs": settings["steps"] * settings["terms"]["batch_size"] / document["store"]["n"],
        "sha256": document["sha256"],
        "seconds": seconds,
    }


def print_trained(document: dict[str, Any]) -> None:
    """What there is now, and what to do next."""
    say(
        f"denoiser of site {document['site']}: {document['resolution']} px, {document['iterations']} steps "
        f"({document['epochs']:.0f} epochs); {document['generator']}"
    )
    say(f"next: wsi-fl synthesize check --generator ddpm --site {document['site']}")
