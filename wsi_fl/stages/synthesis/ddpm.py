"""From configuration and stores to diffusion models: shapes, terms, how images are drawn, whose folder is whose."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.generating import Ddpm as DdpmSection
from wsi_fl.synthesis.ddpm import DdpmShape, DdpmTerms, Sampling, steps_by_rule
from wsi_fl.synthesis.denoisers import DenoiserFolder
from wsi_fl.types import UsageError, WsiFlError


def ddpm_shape(settings: DdpmSection, store: PatchStore) -> DdpmShape:
    """The denoiser's shape for the patches of a store.

    Raises:
        UsageError: when the stored patches are smaller than what is to be generated, or cannot be halved so often.
    """
    if store.meta.spec.size_px < settings.resolution:
        raise UsageError(
            f"ddpm.resolution = {settings.resolution}: site {store.meta.site} stores patches of "
            f"{store.meta.spec.size_px} px; generate no larger ones"
        )
    halvings = len(settings.channels) - 1
    if settings.resolution % 2**halvings or any(width % 8 for width in settings.channels):
        raise UsageError(
            f"ddpm.channels = {settings.channels}: use multiples of 8, and no more of them than "
            f"{settings.resolution} px can be halved"
        )
    return DdpmShape(
        resolution=settings.resolution,
        channels=store.channels,
        n_classes=len(store.meta.classes),
        widths=tuple(settings.channels),
        layers=settings.layers,
        chain=settings.chain,
        schedule=settings.schedule,
    )


def ddpm_terms(settings: DdpmSection) -> DdpmTerms:
    return DdpmTerms(settings.batch_size, settings.lr, settings.ema, settings.class_dropout)


def training_steps(settings: DdpmSection, n_images: int, n_classes: int) -> int:
    """As configured, or by the rule for epochs."""
    return settings.steps or steps_by_rule(n_images, n_classes, settings.batch_size)


def sampling_of(settings: DdpmSection) -> Sampling:
    """How images are drawn.

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


def denoiser_folder(study: Study, site: str) -> DenoiserFolder:
    return DenoiserFolder(study.denoiser(study.site(site).name))


def trained_denoiser(study: Study, site: str) -> tuple[DenoiserFolder, dict[str, Any]]:
    """The folder of a denoiser whose training has finished, and its ddpm.json."""
    folder = denoiser_folder(study, site)
    document = folder.document()
    where, command = study.relative(folder.path), f"`wsi-fl synthesize train --generator ddpm --site {site}`"
    if document is None:
        raise WsiFlError(f"{where}: no denoiser yet; run {command}")
    if not document["finished"]:
        raise WsiFlError(f"{where}: its training has not finished; {command} goes on with it")
    return folder, document


def settings_document(shape: DdpmShape, terms: DdpmTerms, steps: int, seed: int) -> dict[str, Any]:
    """All that decides a training, as ddpm.json keeps it; a resumed one must agree."""
    plain = {**asdict(shape), "widths": list(shape.widths)}
    return {"shape": plain, "terms": asdict(terms), "steps": steps, "seed": seed}
