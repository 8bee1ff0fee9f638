"""Images drawn from a denoiser once, and kept as a patch store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wsi_fl.stages.synthesis.synthetic import as_pixels, synthetic_meta, write_synthetic
from wsi_fl.stages.work.console import Watcher
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Ddpm as DdpmSection
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.ddpm import (
    DdpmShape,
    Denoiser,
    Sampling,
    build_denoiser,
    drawn,
    schema_of,
    shape_from,
    vector_of,
)
from wsi_fl.synthesis.folder import GeneratorFolder
from wsi_fl.synthesis.sampling import balanced_labels
from wsi_fl.system.locks import locked
from wsi_fl.types import UsageError

_DRAWING = 2
"""Version of how samplers turn a denoiser into images; 2: DPM-Solver++ clips clean images."""


def sampling_of(settings: DdpmSection) -> Sampling:
    """Return how the pipeline draws images.

    Raises:
        UsageError: when a training without class dropout is to be guided, or there are more steps than the chain has.
    """
    if settings.guidance != 1.0 and not settings.class_dropout:
        raise UsageError(
            f"ddpm.guidance = {settings.guidance:g} needs a denoiser that was also trained without classes; set "
            "ddpm.class_dropout=0.1"
        )
    if settings.sampling_steps > settings.chain:
        raise UsageError(
            f"ddpm.sampling_steps = {settings.sampling_steps}: the chain has {settings.chain} steps"
        )
    return Sampling(settings.sampler, settings.sampling_steps, settings.guidance, settings.sampling_batch)


def load_denoiser(folder: GeneratorFolder, device: torch.device) -> tuple[Denoiser, DdpmShape]:
    """Return the denoiser that a folder keeps, ready to draw, and its shape.

    Raises:
        WsiFlError: when it is missing, damaged, or of another shape than ddpm.json says.
    """
    denoiser = folder.load_generator("denoiser", lambda shape: build_denoiser(shape_from(shape)), device)
    document = folder.document()
    assert document is not None
    return denoiser, shape_from(document["settings"]["shape"])


def _key_of(denoiser: Denoiser, *others: Any) -> str:
    """A digest of all that decides the images that are drawn: the name of their folder."""
    digest = hashlib.sha256(json.dumps([_DRAWING, *others], sort_keys=True).encode())
    digest.update(np.ascontiguousarray(vector_of(denoiser), "<f4").tobytes())
    return digest.hexdigest()[:24]


def images_of(
    study: Study,
    pipeline: Pipeline,
    store: PatchStore,
    denoiser: Denoiser,
    shape: DdpmShape,
    *,
    site: str,
    watcher: Watcher,
    part: str,
) -> tuple[str, Path]:
    """Return (key, store) of the images that the pipeline draws from a denoiser; draw them where they are not there.

    What `check` looks at is what a site draws that receives the denoiser. While another process of this machine draws
    the same images, this one waits for it.

    Args:
        store: of real patches of the same kind.
        site: whose denoiser it is.
        part: whose progress the watcher is told of.
    """
    ddpm, sampling = pipeline.ddpm, sampling_of(pipeline.ddpm)
    labels = balanced_labels(shape.n_classes, ddpm.samples_per_class)
    drawn_as = (schema_of(shape), asdict(sampling), ddpm.samples_per_class, ddpm.seed)
    key = _key_of(denoiser, *drawn_as)
    path = study.generated(key)

    def told(done: int) -> None:
        watcher.update(part, done, len(labels), "images")

    with locked(path.parent, site, wait=True):
        if not path.exists():
            batches = drawn(denoiser, shape, labels, sampling, seed=ddpm.seed, told=told)
            real = store.meta
            grid = (real.spec.size_px, real.spec.mpp)
            meta = synthetic_meta(site, real.classes, grid, shape.resolution, {"kind": "ddpm", "site": site})
            write_synthetic(path, meta, labels, as_pixels(batches), shape.channels)
    return key, path
