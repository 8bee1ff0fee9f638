"""`synthesize sample` of a diffusion model: drawn as it was checked."""

from __future__ import annotations

from typing import Any

from wsi_fl.stages.synthesis.ddpm import trained_denoiser
from wsi_fl.stages.synthesis.gan import check_state
from wsi_fl.stages.synthesis.synthetic import as_pixels, write_synthetic
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.study.folder import Study
from wsi_fl.synthesis.ddpm import Sampling, drawn
from wsi_fl.synthesis.sampling import balanced_labels
from wsi_fl.types import PatchTable


def ddpm_provenance(study: Study, site: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ddpm.json, what the store will say of its generator)."""
    folder, document = trained_denoiser(study, site)
    digest = folder.denoiser_digest()
    state, reasons = check_state(folder, digest)
    check = folder.check() if state != "not run" else None
    provenance = {
        "site": site,
        "kind": "ddpm",
        "sha256": digest,
        "iterations": document["settings"]["steps"],
        "seed": seed,
        "sampling": check["sampling"] if check else None,
        "check": state,
        "reasons": reasons,
        "differential_privacy": False,
    }
    return document, provenance


def write_drawn(
    study: Study, meta: StoreMeta, site: str, n_per_class: int, provenance: dict[str, Any]
) -> PatchTable:
    """Draws the set and writes its store; without a check by DDIM."""
    folder, _ = trained_denoiser(study, site)
    denoiser, shape = folder.load_denoiser(device_of_rank())
    sampling = Sampling(**(provenance["sampling"] or {"steps": min(Sampling().steps, shape.chain)}))
    labels = balanced_labels(shape.n_classes, n_per_class)
    batches = drawn(denoiser, shape, labels, sampling, seed=provenance["seed"])
    return write_synthetic(study.store(meta.site), meta, labels, as_pixels(batches), shape.channels)
