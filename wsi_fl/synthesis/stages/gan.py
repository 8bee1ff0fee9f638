"""The kind "gan": a conditional StyleGAN2-ADA, trained in two phases, the second with the privacy loss.

Its check measures how far images are from the nearest of many samples, and from their own latent projections. Every
distance of a *training* image is set beside that of a *held-out* image (split test or val) to the same synthetic set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.stages.work.job import select_device
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.evidence import Comparison, compare_paired, compare_relative, summarize_distances
from wsi_fl.synthesis.folder import GeneratorFolder, Phase
from wsi_fl.synthesis.gan import GanState, describe_terms, draw_samples, project_images, step
from wsi_fl.synthesis.keys import Gan
from wsi_fl.synthesis.lpips import Keepaway, Lpips, compute_margin, embed_images, find_nearest_lpips
from wsi_fl.synthesis.stages.kinds import (
    Case,
    Course,
    Document,
    Evidence,
    GeneratorType,
    Losses,
    Pair,
    Pictures,
    lpips_of,
    picked,
    shape_of,
    shared_phase,
)
from wsi_fl.synthesis.state import balance_labels, normalize_pixels
from wsi_fl.synthesis.stylegan2 import GanShape, Generator

_MARGIN_IMAGES = 256
_SHOWN = 9


class _GanCourse(Course):
    state: GanState

    def __init__(self, study: Study, pipeline: Pipeline, site: str, store: PatchStore) -> None:
        gan = pipeline.find_section(Gan)
        super().__init__(store, gan)
        shape = shape_of(gan, GanShape, store)
        self._gan = gan
        self._lpips = lpips_of(study, pipeline, site) if gan.privacy_iterations else None
        self._keepaway: Keepaway | None = None
        self.phases = {"before": gan.iterations}
        if gan.privacy_iterations:
            self.phases["after"] = gan.iterations + gan.privacy_iterations
        privacy = {name: getattr(gan, f"privacy_{name}") for name in ("weight", "quantile", "images")}
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
            self._keepaway = self._kept_away()
        return step(self.state, self.images, self.labels, self._keepaway)

    def line(self, phase: Phase, told: Sequence[Losses]) -> Document:
        return {"phase": phase, **told[-1], "augmentation": self.state.ada.p}

    def kept(self, document: Document, phase: Phase, digest: str) -> Document:
        state = self.state
        entry = {"sha256": digest, "iterations": state.iteration, "augmentation": state.ada.p}
        return {"phases": document["phases"] | {phase: entry}, "margin": state.margin}

    def show(self, labels: NDArray[np.int64]) -> Tensor:
        return draw_samples(self.state.average, labels, seed=0)

    def _kept_away(self) -> Keepaway:
        """The privacy loss: its margin, how far apart the site's own images are, and the images it always looks at."""
        gan, state, lpips = self._gan, self.state, self._lpips
        assert lpips is not None
        if state.margin is None:
            few = self.pictures.some(_MARGIN_IMAGES, gan.seed)
            state.margin = compute_margin(lpips, normalize_pixels(few.images), gan.privacy_quantile)
        if not gan.privacy_images:
            return Keepaway(lpips, state.margin)
        many = normalize_pixels(self.pictures.some(gan.privacy_images, gan.seed).images)
        return Keepaway(lpips, state.margin, embed_images(lpips, many))


def _load_gan(folder: GeneratorFolder, phase: Phase) -> Generator:
    return folder.load_generator(phase, lambda shape: Generator(GanShape(**shape)), select_device())


@dataclass(frozen=True)
class _Found:
    """What was measured of one generator: its samples, projections of training images, and distances to both."""

    samples: Tensor
    nearest: Pair
    projected: Pair
    projections: Tensor


class _Gan(GeneratorType):
    name = "gan"
    remedy = "lower gan.lr or raise gan.r1_gamma"

    def course(self, study: Study, pipeline: Pipeline, site: str, store: PatchStore) -> Course:
        return _GanCourse(study, pipeline, site, store)

    def told(self, document: Document) -> Document:
        settings, phase = document["settings"], shared_phase(document)
        return {
            "iterations": settings["iterations"],
            "privacy_iterations": settings["privacy_iterations"],
            "phases": document["phases"],
            "shared": {"phase": phase, "sha256": document["phases"][phase]["sha256"]},
            "margin": document["margin"],
            "lpips": _lpips_label(document),
        }

    def drawn_as(self, document: Document, check: Document | None) -> Document:
        phase = shared_phase(document)
        return {
            "phase": phase,
            "iterations": document["phases"][phase]["iterations"],
            "truncation": check["truncation"] if check else 1.0,
            "lpips": _lpips_label(document),
        }

    def draw(self, folder: GeneratorFolder, provenance: Document, labels: NDArray[np.int64]) -> Iterator[Tensor]:
        generator = _load_gan(folder, provenance["phase"])
        yield draw_samples(generator, labels, seed=provenance["seed"], truncation=provenance["truncation"])

    def evidence(self, case: Case) -> Evidence:
        gan, lpips = case.pipeline.find_section(Gan), case.lpips()
        training, held_out = (one.some(gan.check_images, gan.seed) for one in (case.training, case.held_out))
        real = (training, held_out)
        rows = [picked(len(one), gan.projections, gan.seed + 1) for one in real]
        sought = (training.at(rows[0]), held_out.at(rows[1]))
        phases: list[Phase] = [phase for phase in ("before", "after") if phase in case.document["phases"]]
        for phase in phases:  # so that progress is of the whole from the beginning
            case.watcher.update(f"projections {phase}", 0, len(sought[0]) + len(sought[1]))
        found = {phase: _measured(case, lpips, real, sought, phase) for phase in phases}
        usual = case.usual_lpips(lpips, training, held_out, every=training)
        of_sought = (usual[0][rows[0]], usual[1][rows[1]])
        comparisons = {phase: _comparisons(one, usual, of_sought) for phase, one in found.items()}
        distances = {name: one.projected[0] for name, one in found.items()}
        order = torch.from_numpy(distances["before"].argsort()[:_SHOWN])
        shown = {"real": sought[0].images} | {name: one.projections for name, one in found.items()}
        shifted = asdict(compare_paired(distances["after"], distances["before"])) if "after" in found else None
        spreads = {name: asdict(summarize_distances(values)) for name, values in distances.items()}
        return Evidence(
            training=training,
            held_out=held_out,
            samples={name: one.samples for name, one in found.items()},
            comparisons={name: both for name, both in comparisons.items() if both},
            n_fresh=int((usual[1] > 0).sum()),
            lpips=lpips,
            document={
                "truncation": gan.truncation,
                "projection": {"steps": gan.projection_steps, **spreads, "moved": shifted},
                "nearest": {name: asdict(summarize_distances(one.nearest[0])) for name, one in found.items()},
            },
            notes=[] if "after" in found else ["The generator was trained without the privacy loss."],
            distances={str(name): one for name, one in distances.items()},
            axis="LPIPS between a training image and its projection",
            rows=[(name, images[order]) for name, images in shown.items()],  # Fig. 4
            picture=("projections", "projections.png"),
        )


KIND = _Gan()


def _lpips_label(document: Document) -> str | None:
    return (document["settings"]["privacy"] or {}).get("lpips")


def _measured(
    case: Case, lpips: Lpips, real: tuple[Pictures, Pictures], sought: tuple[Pictures, Pictures], phase: Phase
) -> _Found:
    """Training and held-out images alike, the projections from the same starting points."""
    gan = case.pipeline.find_section(Gan)
    generator = _load_gan(case.folder, phase)
    n_classes = generator.shape.n_classes
    labels = balance_labels(n_classes, -(-gan.check_samples // n_classes))
    samples = draw_samples(generator, labels, seed=gan.seed, truncation=gan.truncation)
    both = torch.cat([one.images for one in real])
    nearest = find_nearest_lpips(lpips, both, samples, memory_bytes=case.memory_bytes)
    images = torch.cat([one.images for one in sought])
    distances, projections = project_images(
        generator,
        lpips,
        images,
        steps=gan.projection_steps,
        candidates=gan.check_samples,
        seed=gan.seed,
        progress=lambda done: case.watcher.update(f"projections {phase}", done, len(images)),
    )
    distance, n, m = distances.double().numpy(), len(real[0]), len(sought[0])
    return _Found(samples, (nearest[:n], nearest[n:]), (distance[:m], distance[m:]), projections[:m])


def _comparisons(found: _Found, usual: Pair, usual_of_sought: Pair) -> dict[str, Comparison]:
    """Empty where copying cannot be told from likeness."""
    if not (by_samples := compare_relative(found.nearest, usual)):
        return {}
    by_projections = compare_relative(found.projected, usual_of_sought, min_held_out=1)
    return {"nearest sample": by_samples} | ({"projection": by_projections} if by_projections else {})
