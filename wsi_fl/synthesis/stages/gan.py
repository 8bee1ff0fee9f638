"""The kind "gan": a conditional StyleGAN2-ADA, trained in two phases, the second with the privacy loss.

Its check measures how far images are from the nearest of many samples, and from their own latent projections. Every
distance of a *training* image is compared with that of a *held-out* image (split test or val) to the same set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.copying_evidence import Comparison, compare_paired, compare_relative, summarize_distances
from wsi_fl.synthesis.folder import Document, GeneratorFolder, Phase
from wsi_fl.synthesis.gan_training import GanState, describe_terms, draw_samples, project_images, step
from wsi_fl.synthesis.keys import Gan
from wsi_fl.synthesis.lpips import Keepaway, Lpips, compute_margin, embed_images, find_nearest_lpips
from wsi_fl.synthesis.stages.generator_types import (
    CheckCase,
    CheckEvidence,
    DistancePair,
    GeneratorTrainer,
    GeneratorType,
    Losses,
    RealImages,
    build_shape,
    draw_indices,
    load_site_lpips,
    select_shared_phase,
)
from wsi_fl.synthesis.stylegan2 import GanShape, Generator
from wsi_fl.synthesis.training_state import balance_labels, normalize_pixels

_MARGIN_IMAGES = 256
_PAGE_IMAGES = 9


class _GanTrainer(GeneratorTrainer):
    state: GanState

    def __init__(self, study: Study, pipeline: Pipeline, site: str, store: PatchStore) -> None:
        gan = pipeline.find_section(Gan)
        super().__init__(store, gan)
        shape = build_shape(gan, GanShape, store)
        self._gan = gan
        self._lpips = load_site_lpips(study, pipeline, site) if gan.privacy_iterations else None
        self._keepaway: Keepaway | None = None
        self.phases = {"before": gan.iterations}
        if gan.privacy_iterations:
            self.phases["after"] = gan.iterations + gan.privacy_iterations
        names = ("weight", "quantile", "images") if gan.privacy_loss == "hinge" else ("weight", "images", "loss")
        privacy = {name: getattr(gan, f"privacy_{name}") for name in names}
        self.settings = {
            "shape": asdict(shape),
            "terms": describe_terms(gan),
            "iterations": gan.iterations,
            "privacy_iterations": gan.privacy_iterations,
            "privacy": privacy | {"lpips": self._lpips.label} if self._lpips else None,
            "seed": gan.seed,
        }
        self.state = GanState(shape, gan, device=self.device)

    def step(self) -> Losses:
        if self.state.iteration >= self.phases["before"] and self._keepaway is None:
            self._keepaway = self._build_keepaway()
        return step(self.state, self.images, self.labels, self._keepaway)

    def summarize_losses(self, phase: Phase, losses: Sequence[Losses]) -> Document:
        return {"phase": phase, **losses[-1], "augmentation": self.state.ada.p}

    def describe_network(self, document: Document, phase: Phase, digest: str) -> Document:
        state = self.state
        entry = {"sha256": digest, "iterations": state.iteration, "augmentation": state.ada.p}
        return {"phases": document["phases"] | {phase: entry}, "margin": state.margin}

    def draw_preview(self, labels: NDArray[np.int64]) -> Tensor:
        return draw_samples(self.state.average, labels, seed=0)

    def _build_keepaway(self) -> Keepaway:
        """Return the privacy loss, a hinge with a margin from distances between the site's images, and references."""
        gan, state, lpips = self._gan, self.state, self._lpips
        assert lpips is not None
        if state.margin is None and gan.privacy_loss == "hinge":
            margin_images = self.real_images.sample_rows(_MARGIN_IMAGES, gan.seed)
            state.margin = compute_margin(lpips, normalize_pixels(margin_images.images), gan.privacy_quantile)
        if not gan.privacy_images:
            return Keepaway(lpips, state.margin)
        references = normalize_pixels(self.real_images.sample_rows(gan.privacy_images, gan.seed).images)
        return Keepaway(lpips, state.margin, embed_images(lpips, references))


def _load_gan(folder: GeneratorFolder, phase: Phase) -> Generator:
    return folder.load_generator(phase, lambda shape: Generator(GanShape(**shape)), select_device())


@dataclass(frozen=True)
class _Measurement:
    """Measurements of one generator: samples, projections of training images, and distances to both."""

    samples: Tensor
    nearest_distances: DistancePair
    projection_distances: DistancePair
    projections: Tensor


class _GanType(GeneratorType):
    name = "gan"
    remedy = "lower gan.lr or raise gan.r1_gamma"

    def build_trainer(self, study: Study, pipeline: Pipeline, site: str, store: PatchStore) -> GeneratorTrainer:
        return _GanTrainer(study, pipeline, site, store)

    def summarize_training(self, document: Document) -> Document:
        settings, phase = document["settings"], select_shared_phase(document)
        return {
            "iterations": settings["iterations"],
            "privacy_iterations": settings["privacy_iterations"],
            "phases": document["phases"],
            "shared": {"phase": phase, "sha256": document["phases"][phase]["sha256"]},
            "margin": document["margin"],
            "lpips": _lpips_label(document),
        }

    def describe_sampling(self, document: Document, check: Document | None) -> Document:
        phase = select_shared_phase(document)
        return {
            "phase": phase,
            "iterations": document["phases"][phase]["iterations"],
            "truncation": 1.0,
            "lpips": _lpips_label(document),
        }

    def refuse_other_sampling(self, pipeline: Pipeline, provenance: Document) -> None:
        """A GAN draws in one way."""

    def draw_images(self, folder: GeneratorFolder, provenance: Document, labels: NDArray[np.int64]) -> Iterator[Tensor]:
        generator = _load_gan(folder, provenance["phase"])
        yield draw_samples(generator, labels, seed=provenance["seed"])

    def collect_evidence(self, case: CheckCase) -> CheckEvidence:
        gan, lpips = case.pipeline.find_section(Gan), load_site_lpips(case.study, case.pipeline, case.site)
        training = case.training.sample_rows(gan.check_images, gan.seed)
        held_out = case.held_out.sample_rows(gan.check_images, gan.seed)
        real_sets = (training, held_out)
        rows = [draw_indices(len(real_set), gan.projections, gan.seed + 1) for real_set in real_sets]
        targets = (training.select_rows(rows[0]), held_out.select_rows(rows[1]))
        phases: list[Phase] = [phase for phase in ("before", "after") if phase in case.document["phases"]]
        for phase in phases:  # progress counts all phases from the start
            case.watcher.update(f"projections {phase}", 0, len(targets[0]) + len(targets[1]))
        measurements = {phase: _measure_generator(case, lpips, real_sets, targets, phase) for phase in phases}
        usual_distances = case.compute_usual_lpips(lpips, training, held_out, references=training)
        target_distances = (usual_distances[0][rows[0]], usual_distances[1][rows[1]])
        comparisons = {
            phase: _compare_distances(measurement, usual_distances, target_distances)
            for phase, measurement in measurements.items()
        }
        distances = {name: measurement.projection_distances[0] for name, measurement in measurements.items()}
        order = torch.from_numpy(distances["before"].argsort()[:_PAGE_IMAGES])
        page_images = {"real": targets[0].images} | {
            name: measurement.projections for name, measurement in measurements.items()
        }
        shift = asdict(compare_paired(distances["after"], distances["before"])) if "after" in measurements else None
        spreads = {name: asdict(summarize_distances(values)) for name, values in distances.items()}
        return CheckEvidence(
            training=training,
            held_out=held_out,
            samples={name: measurement.samples for name, measurement in measurements.items()},
            comparisons={name: by_distance for name, by_distance in comparisons.items() if by_distance},
            n_fresh=int((usual_distances[1] > 0).sum()),
            lpips=lpips,
            document={
                "truncation": 1.0,
                "projection": {"steps": gan.projection_steps, **spreads, "moved": shift},
                "nearest": {
                    name: asdict(summarize_distances(measurement.nearest_distances[0]))
                    for name, measurement in measurements.items()
                },
            },
            notes=[] if "after" in measurements else ["The generator was trained without the privacy loss."],
            distances={str(name): values for name, values in distances.items()},
            axis="LPIPS between a training image and its projection",
            image_rows=[(name, images[order]) for name, images in page_images.items()],  # Fig. 4
            picture=("projections", "projections.png"),
        )


KIND = _GanType()


def _lpips_label(document: Document) -> str | None:
    return (document["settings"]["privacy"] or {}).get("lpips")


def _measure_generator(
    case: CheckCase,
    lpips: Lpips,
    real_sets: tuple[RealImages, RealImages],
    targets: tuple[RealImages, RealImages],
    phase: Phase,
) -> _Measurement:
    """Measure training and held-out images alike, with the same starting points of projections."""
    gan = case.pipeline.find_section(Gan)
    generator = _load_gan(case.folder, phase)
    n_classes = generator.shape.n_classes
    labels = balance_labels(n_classes, -(-gan.check_samples // n_classes))
    samples = draw_samples(generator, labels, seed=gan.seed)
    all_images = torch.cat([real_set.images for real_set in real_sets])
    nearest = find_nearest_lpips(lpips, all_images, samples, memory_bytes=case.memory_bytes)
    images = torch.cat([real_set.images for real_set in targets])
    distances, projections = project_images(
        generator,
        lpips,
        images,
        steps=gan.projection_steps,
        candidates=gan.check_samples,
        seed=gan.seed,
        progress=lambda done: case.watcher.update(f"projections {phase}", done, len(images)),
    )
    distance, n_training, n_targets = distances.double().numpy(), len(real_sets[0]), len(targets[0])
    return _Measurement(
        samples,
        (nearest[:n_training], nearest[n_training:]),
        (distance[:n_targets], distance[n_targets:]),
        projections[:n_targets],
    )


def _compare_distances(
    measurement: _Measurement, usual_distances: DistancePair, target_distances: DistancePair
) -> dict[str, Comparison]:
    """Return the comparisons, empty where copying cannot be separated from likeness."""
    if not (by_samples := compare_relative(measurement.nearest_distances, usual_distances)):
        return {}
    by_projections = compare_relative(measurement.projection_distances, target_distances, min_held_out=1)
    return {"nearest sample": by_samples} | ({"projection": by_projections} if by_projections else {})
