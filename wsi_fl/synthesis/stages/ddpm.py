"""The kind "ddpm": a conditional diffusion model.

Its check uses exactly the images of other sites' draws: `ddpm.samples_per_class` of each class. It has three parts, all
calibrated on held-out real images: the distance of each generated image to a training image, and whether that image
stands out (`evidence.judged`); whether training images are nearer to the generated ones than held-out images, relative
to their distances to other real ones (`evidence.told_apart`); the same by LPIPS, given weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.stages.runtime.console import Watcher
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis import copying_evidence
from wsi_fl.synthesis.ddpm import (
    EMA_DECAY,
    DdpmShape,
    DdpmState,
    Sampling,
    UNet,
    count_training_steps,
    draw_images,
    flatten_parameters,
    step,
)
from wsi_fl.synthesis.folder import Document, GeneratorFolder, Phase
from wsi_fl.synthesis.keys import Ddpm, Gan, LpipsKeys
from wsi_fl.synthesis.lpips import Lpips, find_nearest_lpips
from wsi_fl.synthesis.stages.generator_types import (
    CheckCase,
    CheckEvidence,
    GeneratorTrainer,
    GeneratorType,
    Losses,
    build_shape,
    load_images,
    load_site_lpips,
)
from wsi_fl.synthesis.stages.synthetic_stores import synthetic_meta, transpose_images, write_synthetic
from wsi_fl.synthesis.training_state import balance_labels
from wsi_fl.system.join_work import site_lock
from wsi_fl.types import UsageError

_PREVIEW_STEPS = 25
_PAGE_IMAGES = 9
_SAMPLER_VERSION = 1
"""Version of drawing images from a denoiser."""


class _DdpmTrainer(GeneratorTrainer):
    state: DdpmState

    def __init__(self, pipeline: Pipeline, store: PatchStore) -> None:
        ddpm = pipeline.find_section(Ddpm)
        _read_sampling(ddpm)  # refused before the training
        if ddpm.resolution % 2 ** (len(ddpm.channels) - 1) or any(width % 8 for width in ddpm.channels):
            raise UsageError(
                f"ddpm.channels = {ddpm.channels}: use multiples of 8, and no more of them than "
                f"{ddpm.resolution} px can be halved"
            )
        super().__init__(store, ddpm)
        shape = build_shape(ddpm, DdpmShape, store, widths=ddpm.channels)
        steps = ddpm.steps or count_training_steps(len(self.real_images), shape.n_classes, ddpm.batch_size)
        self.phases = {"denoiser": steps}
        self.settings = {
            "shape": asdict(shape),
            "terms": ddpm.model_dump(include={"batch_size", "lr", "class_dropout"}) | {"ema": EMA_DECAY},
            "steps": steps,
            "seed": ddpm.seed,
        }
        self.state = DdpmState(shape, ddpm, device=self.device)

    def step(self) -> Losses:
        return {"loss": step(self.state, self.images, self.labels)}

    def summarize_losses(self, phase: Phase, losses: Sequence[Losses]) -> Document:
        return {"loss": sum(entry["loss"] or 0.0 for entry in losses) / len(losses)}

    def describe_network(self, document: Document, phase: Phase, digest: str) -> Document:
        return {"sha256": digest}

    def draw_preview(self, labels: NDArray[np.int64]) -> Tensor:
        sampling = Sampling("ddim", min(_PREVIEW_STEPS, self.state.shape.chain))
        return torch.cat(list(draw_images(self.state.average, labels, sampling, seed=0)))


def _read_sampling(settings: Ddpm) -> Sampling:
    """Return the pipeline's parameters of drawing images; UsageError where they fit no denoiser."""
    if settings.guidance != 1.0 and not settings.class_dropout:
        raise UsageError(
            f"ddpm.guidance = {settings.guidance:g} needs a denoiser that was also trained without classes; set "
            "ddpm.class_dropout=0.1"
        )
    if settings.sampling_steps > settings.chain:
        raise UsageError(f"ddpm.sampling_steps = {settings.sampling_steps}: the chain has {settings.chain} steps")
    return Sampling(settings.sampler, settings.sampling_steps, settings.guidance)


def load_denoiser(folder: GeneratorFolder) -> UNet:
    """Return the denoiser of a folder, ready to draw; WsiFlError as `load_generator`."""
    return folder.load_generator("denoiser", lambda shape: UNet(DdpmShape(**shape)), select_device())


def _compute_key(denoiser: UNet, *others: Any) -> str:
    """Return a digest of everything the drawn images depend on, the name of their folder."""
    digest = hashlib.sha256(json.dumps([_SAMPLER_VERSION, *others], sort_keys=True).encode())
    digest.update(np.ascontiguousarray(flatten_parameters(denoiser), "<f4").tobytes())
    return digest.hexdigest()[:24]


def ensure_images(
    study: Study,
    pipeline: Pipeline,
    store: PatchStore,
    denoiser: UNet,
    *,
    site: str,
    watcher: Watcher,
    progress_name: str,
) -> tuple[str, Path]:
    """Return (key, store) of the pipeline's images of a denoiser, drawn unless they exist.

    A receiving site draws the same images as `check`. Processes of a machine wait for each other's.

    Args:
        store: of real patches of the same kind.
        site: the denoiser's site; `progress_name`: the name in progress reports.
    """
    ddpm, shape = pipeline.find_section(Ddpm), denoiser.shape
    sampling = _read_sampling(ddpm)
    labels = balance_labels(shape.n_classes, ddpm.samples_per_class)
    key = _compute_key(denoiser, shape.schema, asdict(sampling), ddpm.samples_per_class, ddpm.seed)
    path = study.synthetic_path(key)
    with site_lock(path.parent, site, wait=True) as work:
        if not path.exists():
            batches = draw_images(
                denoiser,
                labels,
                sampling,
                seed=ddpm.seed,
                progress=lambda done: watcher.update(progress_name, done, len(labels), "images"),
            )
            grid = (store.meta.spec.size_px, store.meta.spec.mpp)
            meta = synthetic_meta(site, store.meta.classes, grid, shape.resolution, {"kind": "ddpm", "site": site})
            images = transpose_images(work.guard_items(batches))
            write_synthetic(path, meta, labels, images, shape.channels)
    return key, path


class _DdpmType(GeneratorType):
    name = "ddpm"
    remedy = "lower ddpm.lr"

    def build_trainer(self, study: Study, pipeline: Pipeline, site: str, store: PatchStore) -> GeneratorTrainer:
        return _DdpmTrainer(pipeline, store)

    def summarize_training(self, document: Document) -> Document:
        settings = document["settings"]
        return {
            "kind": "ddpm",
            "iterations": settings["steps"],
            "epochs": settings["steps"] * settings["terms"]["batch_size"] / document["store"]["n"],
            "sha256": document["sha256"],
        }

    def describe_sampling(self, document: Document, check: Document | None) -> Document:
        steps, sampling = document["settings"]["steps"], check["sampling"] if check else None
        return {"kind": "ddpm", "iterations": steps, "sampling": sampling}

    def refuse_other_sampling(self, pipeline: Pipeline, provenance: Document) -> None:
        sampling = asdict(_read_sampling(pipeline.find_section(Ddpm)))
        checked: Document = provenance["sampling"] or sampling
        if differing := [key for key, value in checked.items() if sampling[key] != value]:
            raise UsageError(
                f"site {provenance['site']}: its check drew images with another {', '.join(differing)} than this "
                "pipeline; leave out --pipeline and --set, or run `wsi-fl synthesize check` with them first"
            )

    def draw_images(self, folder: GeneratorFolder, provenance: Document, labels: NDArray[np.int64]) -> Iterator[Tensor]:
        """Yield batches of images; of an unchecked denoiser by DDIM."""
        denoiser = load_denoiser(folder)
        sampling = provenance["sampling"] or {"steps": min(Sampling().steps, denoiser.shape.chain)}
        return draw_images(denoiser, labels, Sampling(**sampling), seed=provenance["seed"])

    def collect_evidence(self, case: CheckCase) -> CheckEvidence:
        """Return the measurements of a site's denoiser on the images of other sites' draws."""
        training, held_out, memory = case.training, case.held_out, case.memory_bytes
        ddpm = case.pipeline.find_section(Ddpm)
        key, generated = _load_generated(case)
        references = training.images.numpy()
        generated_nearest, held_out_nearest = (
            copying_evidence.find_nearest(images.numpy(), references, memory_bytes=memory)
            for images in (generated, held_out.images)
        )
        n_duplicates = copying_evidence.count_duplicates(references)
        memorization = copying_evidence.judge_copies(generated_nearest, held_out_nearest, n_duplicates)
        comparisons, lpips = _compare_distances(case, generated, held_out_nearest)
        distances = {"denoiser": generated_nearest.distance}
        if len(held_out):
            distances["held_out"] = held_out_nearest.distance
        order = torch.from_numpy(generated_nearest.relative.argsort(kind="stable")[:_PAGE_IMAGES])
        twins = torch.from_numpy(generated_nearest.row)[order]
        return CheckEvidence(
            training=training,
            held_out=held_out,
            samples={"denoiser": generated},
            comparisons={"denoiser": comparisons} if comparisons else {},
            n_fresh=int((held_out_nearest.distance > 0).sum()),
            lpips=lpips,
            document={
                "kind": "ddpm",
                "sampling": asdict(_read_sampling(ddpm)),
                "seed": ddpm.seed,
                "memorization": asdict(memorization),
                "projection": None,
                "images": {"key": key, "per_class": ddpm.samples_per_class},
            },
            notes=_list_cautions(memorization, held_out_nearest, lpips),
            distances=distances,
            axis="Euclidean distance to the nearest training image",
            image_rows=[("denoiser", generated[order]), ("real", training.images[twins])],
            picture=("pairs", "closest_pairs.png"),
            reasons=memorization.reasons,
        )


KIND = _DdpmType()


def is_current_check(check: Document | None, pipeline: Pipeline) -> bool:
    """Return whether a check used this pipeline's images."""
    ddpm = pipeline.find_section(Ddpm)
    return (
        check is not None
        and check["sampling"] == asdict(_read_sampling(ddpm))
        and check["images"]["per_class"] == ddpm.samples_per_class
        and check["seed"] == ddpm.seed
    )


def _load_generated(case: CheckCase) -> tuple[str, Tensor]:
    """Return (key of the generated store, its images)."""
    denoiser, site = load_denoiser(case.folder), case.site
    with open_store(case.study, site) as store:
        key, path = ensure_images(
            case.study, case.pipeline, store, denoiser, site=site, watcher=case.watcher, progress_name=site
        )
    with PatchStore(path) as store:
        return key, load_images(store, denoiser.shape.resolution, "train").images


def _compare_distances(
    case: CheckCase, generated: Tensor, held_out_nearest: copying_evidence.Nearest
) -> tuple[dict[str, copying_evidence.Comparison], Lpips | None]:
    """Compare training with held-out images by their nearest generated one, in L2 and LPIPS; return LPIPS too."""
    memory = case.memory_bytes
    distances = [
        copying_evidence.find_nearest(real_set.images.numpy(), generated.numpy(), memory_bytes=memory).distance
        for real_set in (case.training, case.held_out)
    ]
    usual_distances = copying_evidence.find_nearest_other(
        case.training.images.numpy(), case.training.patient, memory_bytes=memory
    )
    if not (by_pixels := copying_evidence.compare_relative(distances, (usual_distances, held_out_nearest.distance))):
        return {}, None
    comparisons = {"nearest sample": by_pixels}
    if case.pipeline.find_section(LpipsKeys).weights is None:
        return comparisons, None
    lpips, gan = load_site_lpips(case.study, case.pipeline, case.site), case.pipeline.find_section(Gan)
    seed = case.pipeline.find_section(Ddpm).seed
    training, held_out = (real_set.sample_rows(gan.check_images, seed) for real_set in (case.training, case.held_out))
    distances = [
        find_nearest_lpips(lpips, real_set.images, generated[: gan.check_samples], memory_bytes=memory)
        for real_set in (training, held_out)
    ]
    if by_lpips := copying_evidence.compare_relative(
        distances, case.compute_usual_lpips(lpips, training, held_out, case.training)
    ):
        comparisons["nearest sample, LPIPS"] = by_lpips
    return comparisons, lpips


def _list_cautions(
    memorization: copying_evidence.Memorization, held_out_nearest: copying_evidence.Nearest, lpips: Lpips | None
) -> list[str]:
    notes = []
    if memorization.below_paper and memorization.held_out_below_paper:
        notes.append(
            f"{memorization.below_paper} of {memorization.n_generated} generated images are nearer than the paper's "
            f"0.1 to a training image, and so are {memorization.held_out_below_paper} of {memorization.n_held_out} "
            "held-out real images: the threshold means nothing at this resolution."
        )
    if memorization.duplicates:
        notes.append(f"{memorization.duplicates} training images are exact duplicates; those are copied first.")
    if n_duplicates := int((held_out_nearest.distance == 0).sum()):
        notes.append(
            f"{n_duplicates} held-out images are exact duplicates of training images; left out of the comparison."
        )
    if lpips is None:
        notes.append("LPIPS was not computed: lpips.weights is not set.")
    return notes
