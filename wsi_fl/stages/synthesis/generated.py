"""Images drawn from a denoiser once, and kept as a patch store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from wsi_fl.stages.synthesis.ddpm import sampling_of
from wsi_fl.stages.synthesis.synthetic import as_pixels, reduced_spec, write_synthetic
from wsi_fl.stages.work.console import Watcher
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.ddpm import DdpmShape, Denoiser, Sampling, drawn, schema_of, vector_of
from wsi_fl.synthesis.sampling import balanced_labels
from wsi_fl.system.files import remove_leftovers
from wsi_fl.system.locks import alone

_DRAWING = 2
"""Version of how samplers turn a denoiser into images; 2: DPM-Solver++ clips clean images."""


def key_of(denoiser: Denoiser, shape: DdpmShape, sampling: Sampling, n_per_class: int, seed: int) -> str:
    """What decides the images that are drawn, as the name of their folder."""
    said = [_DRAWING, schema_of(shape), asdict(sampling), n_per_class, seed]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(vector_of(denoiser), "<f4").tobytes())
    return digest.hexdigest()[:24]


def drawn_once(
    study: Study,
    denoiser: Denoiser,
    shape: DdpmShape,
    sampling: Sampling,
    *,
    n_per_class: int,
    seed: int,
    meta: StoreMeta,
    watcher: Watcher,
    part: str,
) -> tuple[str, Path]:
    """(key, store) of so many images of each class; drawn now where they are not there yet.

    Who comes while another process of this machine draws the same waits for it.
    """
    key = key_of(denoiser, shape, sampling, n_per_class, seed)
    path = study.generated(key)
    with alone(path.parent / ".lock"):
        for place in (path.parent, path.parent / "slides"):
            remove_leftovers(place)
        if not path.exists():
            labels = balanced_labels(shape.n_classes, n_per_class)
            batches = drawn(
                denoiser,
                shape,
                labels,
                sampling,
                seed=seed,
                told=lambda done: watcher.update(part, done, len(labels), "images"),
            )
            write_synthetic(path, meta, labels, as_pixels(batches), shape.channels)
    return key, path


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
    """`drawn_once` as the pipeline says: what `check` looks at is what a site draws that receives the denoiser.

    Args:
        store: of real patches of the same kind.
        site: whose denoiser it is.
        part: what progress is told of.
    """
    ddpm = pipeline.ddpm
    return drawn_once(
        study,
        denoiser,
        shape,
        sampling_of(ddpm),
        n_per_class=ddpm.samples_per_class,
        seed=ddpm.seed,
        meta=synthetic_meta(site, store, shape.resolution, {"kind": "ddpm", "site": site}),
        watcher=watcher,
        part=part,
    )


def synthetic_meta(site: str, store: PatchStore, resolution: int, provenance: dict[str, Any]) -> StoreMeta:
    """Of images like those of a real store."""
    real = store.meta
    spec = reduced_spec(real.spec.size_px, real.spec.mpp, resolution)
    return StoreMeta(site, real.classes, spec, json.dumps(provenance, sort_keys=True))
