"""The common interface of GANs and diffusion models for training, check and sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.stages.runtime.console import Watcher
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.site_data import load_patches
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.copying_evidence import CRITERIA, Comparison
from wsi_fl.synthesis.folder import KINDS, Document, GeneratorFolder, Phase
from wsi_fl.synthesis.keys import Ddpm, Gan, LpipsKeys
from wsi_fl.synthesis.lpips import RANDOM, Lpips, find_nearest_lpips, load_lpips
from wsi_fl.synthesis.training_state import TrainingState
from wsi_fl.types import UsageError, WsiFlError

HELD_OUT = ("test", "val")
"""Splits outside of every generator's training set."""
_MIN_IMAGES = 2

_Shape = TypeVar("_Shape")
DistancePair = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Distances of training and of held-out images."""
Losses = dict[str, float | None]
"""Losses of one step; None where not computed."""


@dataclass(frozen=True)
class RealImages:
    """Real images at the generator's resolution: uint8[n, c, h, h], their labels int64[n] and patients str[n]."""

    images: Tensor
    labels: Tensor
    patient: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.labels)

    def select_rows(self, rows: NDArray[np.intp]) -> RealImages:
        """Return the images of the given rows."""
        return RealImages(self.images[rows], self.labels[rows], self.patient[rows])

    def sample_rows(self, n: int, seed: int) -> RealImages:
        """Return at most n random images, in order."""
        return self.select_rows(draw_indices(len(self), n, seed))


def draw_indices(n_rows: int, n: int, seed: int) -> NDArray[np.intp]:
    """Draw at most n row numbers, in order."""
    return np.sort(np.random.default_rng(seed).permutation(n_rows)[:n])


class GeneratorTrainer(ABC):
    """A training in progress.

    Attributes:
        settings: everything the training depends on, as in the folder's document; the same when resumed.
        phases: the last iteration of each saved network, in order.
        real_images: the training set, on the CPU; `images` and `labels` are the same on the `device`.
    """

    settings: Document
    state: TrainingState
    phases: dict[Phase, int]

    def __init__(self, store: PatchStore, section: Gan | Ddpm) -> None:
        """Read the training patches of a store.

        Raises:
            UsageError: for stored patches smaller than generated ones.
            WsiFlError: for a store without training patches.
        """
        site, size_px = store.meta.site, store.meta.spec.size_px
        if size_px < section.resolution:
            name = type(section).__name__.lower()
            raise UsageError(
                f"{name}.resolution = {section.resolution}: site {site} stores patches of {size_px} px; "
                "generate no larger ones"
            )
        self.real_images = load_images(store, section.resolution, "train")
        if len(self.real_images) < _MIN_IMAGES:
            raise WsiFlError(f"site {site}: its store has no training patches")
        self.device, self.checkpoint_every = select_device(), section.checkpoint_every
        self.images = self.real_images.images.to(self.device)
        self.labels = self.real_images.labels.to(self.device)

    @abstractmethod
    def step(self) -> Losses:
        """Take one step."""

    @abstractmethod
    def summarize_losses(self, phase: Phase, losses: Sequence[Losses]) -> Document:
        """Return the logged values of the steps since the last line."""

    @abstractmethod
    def describe_network(self, document: Document, phase: Phase, digest: str) -> Document:
        """Return the changes of the document for a saved network."""

    @abstractmethod
    def draw_preview(self, labels: NDArray[np.int64]) -> Tensor:
        """Return an image uint8[c, h, h] per label by the moving average, with the same seed at every checkpoint."""


@dataclass(frozen=True)
class CheckCase:
    """A generator and real images for the check of copying."""

    study: Study
    pipeline: Pipeline
    site: str
    folder: GeneratorFolder
    document: Document
    training: RealImages
    held_out: RealImages
    watcher: Watcher

    @property
    def memory_bytes(self) -> int:
        """The largest memory for comparing two sets of images."""
        return self.pipeline.find_section(LpipsKeys).memory_mb << 20

    def compute_usual_lpips(
        self, lpips: Lpips, training: RealImages, held_out: RealImages, references: RealImages
    ) -> DistancePair:
        """Return LPIPS of training and held-out images to the nearest training image of another patient."""
        patients, memory = (training.patient, references.patient), self.memory_bytes
        return (
            find_nearest_lpips(lpips, training.images, references.images, patients, memory_bytes=memory),
            find_nearest_lpips(lpips, held_out.images, references.images, memory_bytes=memory),
        )


@dataclass(frozen=True)
class CheckEvidence:
    """The measurements of a check.

    Attributes:
        training, held_out: the compared real images.
        samples: the generated images uint8[n, c, h, h] of each network.
        comparisons: of training with held-out images, by network, where copying can be separated from likeness.
        n_fresh: number of held-out images outside of the training set.
        lpips: None for Euclidean distances only.
        document, notes: entries of the verdict for this kind, and cautions.
        distances, axis: for the histogram.
        image_rows, picture: images uint8[n, c, h, h] for display side by side; key and name of their file.
        reasons: of a failed check, besides those of the comparisons.
    """

    training: RealImages
    held_out: RealImages
    samples: Mapping[str, Tensor]
    comparisons: Mapping[str, Mapping[str, Comparison]]
    n_fresh: int
    lpips: Lpips | None
    document: Document
    notes: Sequence[str]
    distances: Mapping[str, NDArray[np.float64]]
    axis: str
    image_rows: Sequence[tuple[str, Tensor]]
    picture: tuple[str, str]
    reasons: Sequence[str] = ()


class GeneratorType(ABC):
    """The particulars of a kind of generator.

    Attributes:
        name: of its settings and document, a value of `synthesis.generator`.
        remedy: for a diverging training.
    """

    name: ClassVar[str]
    remedy: ClassVar[str]

    @abstractmethod
    def build_trainer(self, study: Study, pipeline: Pipeline, site: str, store: PatchStore) -> GeneratorTrainer:
        """Return a new training on the patches of a site's open store."""

    @abstractmethod
    def summarize_training(self, document: Document) -> Document:
        """Return the entries of `synthesize train --json` for this kind."""

    @abstractmethod
    def describe_sampling(self, document: Document, check: Document | None) -> Document:
        """Return the sampling parameters of a generator, for a store's provenance."""

    @abstractmethod
    def refuse_other_sampling(self, pipeline: Pipeline, provenance: Document) -> None:
        """Refuse (UsageError) a pipeline by which images would be drawn otherwise than in the generator's check."""

    @abstractmethod
    def draw_images(self, folder: GeneratorFolder, provenance: Document, labels: NDArray[np.int64]) -> Iterator[Tensor]:
        """Yield batches uint8[b, c, h, h] on the CPU, an image for each label int64[n]."""

    @abstractmethod
    def collect_evidence(self, case: CheckCase) -> CheckEvidence:
        """Return the measurements of a check."""

    def find_folder(self, study: Study, site: str) -> GeneratorFolder:
        """Return the folder of a site's generator, existing or not."""
        return GeneratorFolder.find_folder(study, study.load_site(site).name, self.name)

    def require_trained(self, study: Study, site: str) -> tuple[GeneratorFolder, Document]:
        """Return folder and document of a generator with a finished training.

        Raises:
            WsiFlError: for a missing generator or an unfinished training.
        """
        folder = self.find_folder(study, site)
        document = folder.read_document()
        location = study.relative_path(folder.path)
        command = f"`wsi-fl synthesize train --site {site} --generator {self.name}`"
        if document is None:
            raise WsiFlError(f"{location}: no generator yet; run {command}")
        if not document["finished"]:
            raise WsiFlError(f"{location}: its training has not finished; {command} goes on with it")
        return folder, document

    def build_provenance(self, folder: GeneratorFolder, document: Document) -> Document:
        """Return the provenance of samples of the shareable network, drawn as in its check."""
        digest = folder.compute_digest(select_shared_phase(document))
        state, reasons = check_state(folder, digest)
        return {
            "site": document["site"],
            "sha256": digest,
            "check": state,
            "reasons": reasons,
            "differential_privacy": False,
            **self.describe_sampling(document, folder.read_check() if state != "not run" else None),
        }


def load_kind(name: str) -> GeneratorType:
    """Return a kind by name and import only its libraries, a matter of seconds.

    Raises:
        UsageError: for an unknown kind.
    """
    if name not in KINDS:
        raise UsageError(f"--generator {name!r}: use {' or '.join(KINDS)}")
    kind: GeneratorType = import_module(f"{__package__}.{name}").KIND
    return kind


def select_shared_phase(document: Document) -> Phase:
    """Return the phase of the shareable network: of a GAN the one with the privacy loss, if trained."""
    phases: tuple[Phase, ...] = ("after", "before")
    return next((phase for phase in phases if phase in document["phases"]), "denoiser")


def check_state(folder: GeneratorFolder, digest: str) -> tuple[str, list[str]]:
    """Return ("passed", "failed" or "not run", reasons) of the check of exactly this generator."""
    check = folder.read_check()
    if check is None:
        return "not run", ["`synthesize check` was not run"]
    if check["generator"]["sha256"] != digest:
        return "not run", ["the check belongs to another generator; run `synthesize check` again"]
    if check["criteria"] != CRITERIA:
        return "not run", ["the check was by other criteria; run `synthesize check` again"]
    return ("passed" if check["passed"] else "failed"), list(check["reasons"])


def describe_outcome(provenance: Document) -> str:
    """Return state and reasons of a check without a pass as text."""
    state = "not passed" if provenance["check"] == "failed" else provenance["check"]
    return f"{state}: {'; '.join(provenance['reasons'])}"


def build_shape(section: Gan | Ddpm, shape_class: Callable[..., _Shape], store: PatchStore, **others: Any) -> _Shape:
    """Build the shape of networks from a store, a section's settings of the same names, and others."""
    names = signature(shape_class).parameters.keys() & type(section).model_fields.keys()
    values = {name: getattr(section, name) for name in names}
    return shape_class(**values | {"channels": store.n_channels, "n_classes": len(store.meta.classes)} | others)


def load_images(store: PatchStore, resolution: int, *splits: str) -> RealImages:
    """Return the patches of these splits, reduced to the resolution, in memory."""
    parts = [load_patches(store, split, resolution) for split in splits]
    shape = (0, resolution, resolution, store.n_channels)
    pixels = [np.empty(shape, np.uint8), *(part.read(np.arange(len(part))) for part in parts if len(part))]
    images = np.ascontiguousarray(np.concatenate(pixels).transpose(0, 3, 1, 2))
    labels = np.concatenate([part.label for part in parts])
    patient = np.concatenate([part.patient for part in parts])
    return RealImages(torch.from_numpy(images), torch.from_numpy(labels), patient)


def load_site_lpips(study: Study, pipeline: Pipeline, site: str) -> Lpips:
    """Return LPIPS with the pipeline's weights.

    Raises:
        UsageError: for a real site and an untrained network.
    """
    weights = pipeline.find_section(LpipsKeys).weights
    if weights is not None and weights.startswith(RANDOM) and study.load_site(site).real:
        raise UsageError(
            f"lpips.weights = {weights!r}: an untrained network measures nothing; site {site} is real, give it weights"
        )
    if weights is not None and not weights.startswith(RANDOM):
        weights = str(study.resolve(weights))
    lpips: Lpips = load_lpips(weights).to(select_device())
    return lpips
