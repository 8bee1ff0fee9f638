"""The kind "ddpm": a conditional diffusion model.

Its check looks at exactly the images that other sites would draw: `ddpm.samples_per_class` of each class. It asks three
questions, all calibrated on held-out real images. How near is each generated image to a training image, and does that
one stand out (`evidence.judged`)? Are training images nearer to the generated ones than held-out images are, for
how near they are to other real ones (`evidence.told_apart`)? And is that so by LPIPS too, where there are weights?
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

from wsi_fl.stages.site.data import open_store
from wsi_fl.stages.work.console import Watcher
from wsi_fl.stages.work.job import select_device
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis import evidence
from wsi_fl.synthesis.ddpm import (
    DdpmShape,
    DdpmState,
    Sampling,
    UNet,
    count_training_steps,
    draw_images,
    flatten_parameters,
    step,
)
from wsi_fl.synthesis.folder import GeneratorFolder, Phase
from wsi_fl.synthesis.keys import Ddpm, Gan, LpipsKeys
from wsi_fl.synthesis.lpips import Lpips, find_nearest_lpips
from wsi_fl.synthesis.stages.kinds import Case, Course, Document, Evidence, GeneratorType, Losses, pictures_of, shape_of
from wsi_fl.synthesis.stages.sample import as_pixels, synthetic_meta, write_synthetic
from wsi_fl.synthesis.state import balance_labels
from wsi_fl.system.files import site_lock
from wsi_fl.types import UsageError

_SHOWN_STEPS = 25
_SHOWN = 9
_DRAWING = 1
"""Version of how samplers turn a denoiser into images."""


class _DdpmCourse(Course):
    state: DdpmState

    def __init__(self, pipeline: Pipeline, store: PatchStore) -> None:
        ddpm = pipeline.find_section(Ddpm)
        _sampling_of(ddpm)  # it is refused now, not after hours
        if ddpm.resolution % 2 ** (len(ddpm.channels) - 1) or any(width % 8 for width in ddpm.channels):
            raise UsageError(
                f"ddpm.channels = {ddpm.channels}: use multiples of 8, and no more of them than "
                f"{ddpm.resolution} px can be halved"
            )
        super().__init__(store, ddpm)
        shape = shape_of(ddpm, DdpmShape, store, widths=ddpm.channels)
        steps = ddpm.steps or count_training_steps(len(self.pictures), shape.n_classes, ddpm.batch_size)
        self.phases = {"denoiser": steps}
        self.settings = {
            "shape": asdict(shape),
            "terms": ddpm.model_dump(include={"batch_size", "lr", "ema", "class_dropout"}),
            "steps": steps,
            "seed": ddpm.seed,
        }
        self.state = DdpmState(shape, ddpm, device=self.device)

    def step(self) -> Losses:
        return {"loss": step(self.state, self.images, self.labels)}

    def line(self, phase: Phase, told: Sequence[Losses]) -> Document:
        return {"loss": sum(losses["loss"] or 0.0 for losses in told) / len(told)}

    def kept(self, document: Document, phase: Phase, digest: str) -> Document:
        return {"sha256": digest}

    def show(self, labels: NDArray[np.int64]) -> Tensor:
        how = Sampling("ddim", min(_SHOWN_STEPS, self.state.shape.chain))
        return torch.cat(list(draw_images(self.state.average, labels, how, seed=0)))


def _sampling_of(settings: Ddpm) -> Sampling:
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
        raise UsageError(f"ddpm.sampling_steps = {settings.sampling_steps}: the chain has {settings.chain} steps")
    return Sampling(settings.sampler, settings.sampling_steps, settings.guidance, settings.sampling_batch)


def load_denoiser(folder: GeneratorFolder) -> UNet:
    """Return the denoiser that a folder keeps, ready to draw; WsiFlError as `load_generator`."""
    return folder.load_generator("denoiser", lambda shape: UNet(DdpmShape(**shape)), select_device())


def _key_of(denoiser: UNet, *others: Any) -> str:
    """A digest of all that decides the images that are drawn: the name of their folder."""
    digest = hashlib.sha256(json.dumps([_DRAWING, *others], sort_keys=True).encode())
    digest.update(np.ascontiguousarray(flatten_parameters(denoiser), "<f4").tobytes())
    return digest.hexdigest()[:24]


def images_of(
    study: Study, pipeline: Pipeline, store: PatchStore, denoiser: UNet, *, site: str, watcher: Watcher, part: str
) -> tuple[str, Path]:
    """Return (key, store) of the images that the pipeline draws from a denoiser; draw them where they are not there.

    What `check` looks at is what a site draws that receives the denoiser. While another process of this machine draws
    the same images, this one waits for it.

    Args:
        store: of real patches of the same kind.
        site: whose denoiser it is, and `part` whose progress the watcher is told of.
    """
    ddpm, sampling, shape = (pipeline.find_section(Ddpm), _sampling_of(pipeline.find_section(Ddpm)), denoiser.shape)
    labels = balance_labels(shape.n_classes, ddpm.samples_per_class)
    key = _key_of(denoiser, shape.schema, asdict(sampling), ddpm.samples_per_class, ddpm.seed)
    path = study.synthetic_path(key)

    def told(done: int) -> None:
        watcher.update(part, done, len(labels), "images")

    with site_lock(path.parent, site, wait=True):
        if not path.exists():
            batches = draw_images(denoiser, labels, sampling, seed=ddpm.seed, progress=told)
            real = store.meta
            grid = (real.spec.size_px, real.spec.mpp)
            meta = synthetic_meta(site, real.classes, grid, shape.resolution, {"kind": "ddpm", "site": site})
            write_synthetic(path, meta, labels, as_pixels(batches), shape.channels)
    return key, path


class _Ddpm(GeneratorType):
    name = "ddpm"
    remedy = "lower ddpm.lr"

    def course(self, study: Study, pipeline: Pipeline, site: str, store: PatchStore) -> Course:
        return _DdpmCourse(pipeline, store)

    def told(self, document: Document) -> Document:
        settings = document["settings"]
        return {
            "kind": "ddpm",
            "iterations": settings["steps"],
            "epochs": settings["steps"] * settings["terms"]["batch_size"] / document["store"]["n"],
            "sha256": document["sha256"],
        }

    def drawn_as(self, document: Document, check: Document | None) -> Document:
        steps, sampling = document["settings"]["steps"], check["sampling"] if check else None
        return {"kind": "ddpm", "iterations": steps, "sampling": sampling}

    def draw(self, folder: GeneratorFolder, provenance: Document, labels: NDArray[np.int64]) -> Iterator[Tensor]:
        """Yield batches of images, without a check by DDIM."""
        denoiser = load_denoiser(folder)
        known = provenance["sampling"] or {"steps": min(Sampling().steps, denoiser.shape.chain)}
        return draw_images(denoiser, labels, Sampling(**known), seed=provenance["seed"])

    def evidence(self, case: Case) -> Evidence:
        """Return what is known of a site's denoiser by the images that others would draw from it."""
        training, held_out, memory = case.training, case.held_out, case.memory_bytes
        ddpm = case.pipeline.find_section(Ddpm)
        key, generated = _images(case)
        to_training = evidence.find_nearest(generated.numpy(), training.images.numpy(), memory_bytes=memory)
        held = evidence.find_nearest(held_out.images.numpy(), training.images.numpy(), memory_bytes=memory)
        found = evidence.judge_copies(to_training, held, len(evidence.find_duplicates(training.images.numpy())))
        comparisons, lpips = _compared(case, generated, held)
        distances = {"denoiser": to_training.distance}
        if len(held_out):
            distances["held_out"] = held.distance
        order = torch.from_numpy(to_training.relative.argsort(kind="stable")[:_SHOWN])
        twins = torch.from_numpy(to_training.row)[order]
        return Evidence(
            training=training,
            held_out=held_out,
            samples={"denoiser": generated},
            comparisons={"denoiser": comparisons} if comparisons else {},
            n_fresh=int((held.distance > 0).sum()),
            lpips=lpips,
            document={
                "kind": "ddpm",
                "sampling": asdict(_sampling_of(ddpm)),
                "seed": ddpm.seed,
                "memorization": asdict(found),
                "projection": None,
                "images": {"key": key, "per_class": ddpm.samples_per_class},
            },
            notes=_cautions(found, held, lpips),
            distances=distances,
            axis="Euclidean distance to the nearest training image",
            rows=[("denoiser", generated[order]), ("real", training.images[twins])],
            picture=("pairs", "closest_pairs.png"),
            reasons=found.reasons,
        )


KIND = _Ddpm()


def checked_as(check: dict[str, Any] | None, pipeline: Pipeline) -> bool:
    """Return whether a check looked at the images that this pipeline would draw."""
    return (
        check is not None
        and check["sampling"] == asdict(_sampling_of(pipeline.find_section(Ddpm)))
        and check["images"]["per_class"] == pipeline.find_section(Ddpm).samples_per_class
        and check["seed"] == pipeline.find_section(Ddpm).seed
    )


def _images(case: Case) -> tuple[str, Tensor]:
    """(key of the generated store, its images)."""
    denoiser, site = load_denoiser(case.folder), case.site
    with open_store(case.study, site) as store:
        key, path = images_of(case.study, case.pipeline, store, denoiser, site=site, watcher=case.watcher, part=site)
    with PatchStore(path) as store:
        return key, pictures_of(store, denoiser.shape.resolution, "train").images


def _compared(
    case: Case, generated: Tensor, held: evidence.Nearest
) -> tuple[dict[str, evidence.Comparison], Lpips | None]:
    """Training against held-out images by their nearest generated one, in L2 and LPIPS; LPIPS."""
    memory = case.memory_bytes
    reached = [
        evidence.find_nearest(one.images.numpy(), generated.numpy(), memory_bytes=memory).distance
        for one in (case.training, case.held_out)
    ]
    among = evidence.find_nearest_other(case.training.images.numpy(), case.training.patient, memory_bytes=memory)
    if not (by_pixels := evidence.compare_relative(reached, (among, held.distance))):
        return {}, None
    found = {"nearest sample": by_pixels}
    if case.pipeline.find_section(LpipsKeys).weights is None:
        return found, None
    lpips, gan, seed = case.lpips(), case.pipeline.find_section(Gan), case.pipeline.find_section(Ddpm).seed
    some, held_out = (one.some(gan.check_images, seed) for one in (case.training, case.held_out))
    reached = [
        find_nearest_lpips(lpips, one.images, generated[: gan.check_samples], memory_bytes=memory)
        for one in (some, held_out)
    ]
    if by_lpips := evidence.compare_relative(reached, case.usual_lpips(lpips, some, held_out, case.training)):
        found["nearest sample, LPIPS"] = by_lpips
    return found, lpips


def _cautions(z: evidence.Memorization, held: evidence.Nearest, lpips: Lpips | None) -> list[str]:
    notes = []
    if z.below_paper and z.held_out_below_paper:
        notes.append(
            f"{z.below_paper} of {z.n_generated} generated images are nearer than the paper's 0.1 to a training image, "
            f"and so are {z.held_out_below_paper} of {z.n_held_out} real images nobody trained on: the threshold means "
            "nothing at this resolution."
        )
    if z.duplicates:
        notes.append(f"{z.duplicates} training images are exact duplicates; those are copied first.")
    if twins := int((held.distance == 0).sum()):
        notes.append(f"{twins} held-out images are exact duplicates of training images; left out of the comparison.")
    if lpips is None:
        notes.append("LPIPS was not computed: lpips.weights is not set.")
    return notes
