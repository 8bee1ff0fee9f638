"""A kind of generator: what training, check and sampling need to know of GANs and diffusion models alike."""

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

from wsi_fl.stages.site.data import load_patches
from wsi_fl.stages.work.console import Watcher
from wsi_fl.stages.work.job import select_device
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.evidence import CRITERIA, Comparison
from wsi_fl.synthesis.folder import KINDS, GeneratorFolder, Phase
from wsi_fl.synthesis.keys import Ddpm, Gan, LpipsKeys
from wsi_fl.synthesis.lpips import RANDOM, Lpips, find_nearest_lpips, load_lpips
from wsi_fl.synthesis.state import TrainingState
from wsi_fl.types import UsageError, WsiFlError

HELD_OUT = ("test", "val")
"""Splits that no generator is trained on."""
_LEAST_IMAGES = 2

Document = dict[str, Any]
_Shape = TypeVar("_Shape")
Pair = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Distances of training images, and of held-out ones."""
Losses = dict[str, float | None]
"""What one step told; None for what it did not compute."""


@dataclass(frozen=True)
class Pictures:
    """Real images at the generator's resolution: uint8[n, c, h, h], their labels int64[n] and patients str[n]."""

    images: Tensor
    labels: Tensor
    patient: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: NDArray[np.intp]) -> Pictures:
        """Return those of the given rows."""
        return Pictures(self.images[rows], self.labels[rows], self.patient[rows])

    def some(self, n: int, seed: int) -> Pictures:
        """Return at most n of them, drawn at random, in order."""
        return self.at(picked(len(self), n, seed))


def picked(n_all: int, n: int, seed: int) -> NDArray[np.intp]:
    """Draw at most n of so many rows; return them in order."""
    return np.sort(np.random.default_rng(seed).permutation(n_all)[:n])


class Course(ABC):
    """A training in progress.

    Attributes:
        settings: all that decides the training, as the folder's document keeps it; a resumed one must agree.
        phases: the last iteration of each network that the training leaves behind, in order.
        pictures: what is learned from, on the CPU; `images` and `labels` are the same on the `device`.
    """

    settings: Document
    state: TrainingState
    phases: dict[Phase, int]

    def __init__(self, store: PatchStore, section: Gan | Ddpm) -> None:
        """Read the training patches of a store.

        Raises:
            UsageError: when the stored patches are smaller than what is to be generated.
            WsiFlError: when there are none.
        """
        site, size_px = store.meta.site, store.meta.spec.size_px
        if size_px < section.resolution:
            name = type(section).__name__.lower()
            raise UsageError(
                f"{name}.resolution = {section.resolution}: site {site} stores patches of {size_px} px; "
                "generate no larger ones"
            )
        self.pictures = pictures_of(store, section.resolution, "train")
        if len(self.pictures) < _LEAST_IMAGES:
            raise WsiFlError(f"site {site}: its store has no training patches to learn from")
        self.device, self.checkpoint_every = select_device(), section.checkpoint_every
        self.images = self.pictures.images.to(self.device)
        self.labels = self.pictures.labels.to(self.device)

    @abstractmethod
    def step(self) -> Losses:
        """Take one step."""

    @abstractmethod
    def line(self, phase: Phase, told: Sequence[Losses]) -> Document:
        """Return what is logged of the steps since the last line."""

    @abstractmethod
    def kept(self, document: Document, phase: Phase, digest: str) -> Document:
        """Return what changes in the document when a network is kept."""

    @abstractmethod
    def show(self, labels: NDArray[np.int64]) -> Tensor:
        """Return an image uint8[c, h, h] for each label, by the moving average; the same at every checkpoint."""


@dataclass(frozen=True)
class Case:
    """What is asked of a check: does this generator copy its training images?"""

    study: Study
    pipeline: Pipeline
    site: str
    folder: GeneratorFolder
    document: Document
    training: Pictures
    held_out: Pictures
    watcher: Watcher

    @property
    def memory_bytes(self) -> int:
        """The most memory for what is held while two sets of images are compared."""
        return self.pipeline.find_section(LpipsKeys).memory_mb << 20

    def lpips(self) -> Lpips:
        """Return LPIPS as the pipeline says."""
        return lpips_of(self.study, self.pipeline, self.site)

    def usual_lpips(self, lpips: Lpips, some: Pictures, held_out: Pictures, every: Pictures) -> Pair:
        """Return how far training and held-out images are from the nearest training image of another patient."""
        patients, memory = (some.patient, every.patient), self.memory_bytes
        return (
            find_nearest_lpips(lpips, some.images, every.images, patients, memory_bytes=memory),
            find_nearest_lpips(lpips, held_out.images, every.images, memory_bytes=memory),
        )


@dataclass(frozen=True)
class Evidence:
    """What a check found.

    Attributes:
        training, held_out: the real images that were looked at.
        samples: the generated images uint8[n, c, h, h] of each network.
        comparisons: of training with held-out images, for each network where they can be told apart.
        n_fresh: held-out images that are in no training set.
        lpips: None where distances are Euclidean alone.
        document, notes: what the verdict says of this kind alone, and its cautions.
        distances, axis: for the histogram.
        rows, picture: images uint8[n, c, h, h] to be seen side by side; key and name of the file of these.
        reasons: for a failed check, beside those of the comparisons.
    """

    training: Pictures
    held_out: Pictures
    samples: Mapping[str, Tensor]
    comparisons: Mapping[str, Mapping[str, Comparison]]
    n_fresh: int
    lpips: Lpips | None
    document: Document
    notes: Sequence[str]
    distances: Mapping[str, NDArray[np.float64]]
    axis: str
    rows: Sequence[tuple[str, Tensor]]
    picture: tuple[str, str]
    reasons: Sequence[str] = ()


class GeneratorType(ABC):
    """What is particular to a kind of generator.

    Attributes:
        name: of its settings and of its document, as `synthesis.generator` says it.
        remedy: for a training that diverges.
    """

    name: ClassVar[str]
    remedy: ClassVar[str]

    @abstractmethod
    def course(self, study: Study, pipeline: Pipeline, site: str, store: PatchStore) -> Course:
        """Return a training that has not begun, on the patches of a site's open store."""

    @abstractmethod
    def told(self, document: Document) -> Document:
        """Return what `synthesize train --json` says of this kind alone."""

    @abstractmethod
    def drawn_as(self, document: Document, check: Document | None) -> Document:
        """Return how samples of a checked generator are drawn, as a store's provenance says it."""

    @abstractmethod
    def draw(self, folder: GeneratorFolder, provenance: Document, labels: NDArray[np.int64]) -> Iterator[Tensor]:
        """Yield batches uint8[b, c, h, h] on the CPU, an image for each label int64[n]."""

    @abstractmethod
    def evidence(self, case: Case) -> Evidence:
        """Return what a check finds."""

    def folder(self, study: Study, site: str) -> GeneratorFolder:
        """Return the folder of a site's generator, whether or not there is one."""
        return GeneratorFolder.find_folder(study, study.load_site(site).name, self.name)

    def trained(self, study: Study, site: str) -> tuple[GeneratorFolder, Document]:
        """Return the folder of a generator whose training has finished, and its document.

        Raises:
            WsiFlError: when there is none, or its training has not finished.
        """
        folder = self.folder(study, site)
        document = folder.read_document()
        where = study.relative_path(folder.path)
        command = f"`wsi-fl synthesize train --site {site} --generator {self.name}`"
        if document is None:
            raise WsiFlError(f"{where}: no generator yet; run {command}")
        if not document["finished"]:
            raise WsiFlError(f"{where}: its training has not finished; {command} goes on with it")
        return folder, document

    def provenance(self, folder: GeneratorFolder, document: Document) -> Document:
        """Return what samples say of the generator that may be shared; they are drawn as it was checked."""
        digest = folder.compute_digest(shared_phase(document))
        state, reasons = check_state(folder, digest)
        return {
            "site": document["site"],
            "sha256": digest,
            "check": state,
            "reasons": reasons,
            "differential_privacy": False,
            **self.drawn_as(document, folder.read_check() if state != "not run" else None),
        }


def kind_of(name: str) -> GeneratorType:
    """Return the kind of that name; its libraries take seconds to import, so only what is asked for is.

    Raises:
        UsageError: when there is no such kind.
    """
    if name not in KINDS:
        raise UsageError(f"--generator {name!r}: use {' or '.join(KINDS)}")
    kind: GeneratorType = import_module(f"{__package__}.{name}").KIND
    return kind


def shared_phase(document: Document) -> Phase:
    """Return which network is sampled and shared: a GAN's with the privacy loss, where there was a second phase."""
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


def outcome(provenance: Document) -> str:
    """Return in words how a check ended that was not passed, with the reasons."""
    word = "not passed" if provenance["check"] == "failed" else provenance["check"]
    return f"{word}: {'; '.join(provenance['reasons'])}"


def shape_of(section: Gan | Ddpm, made: Callable[..., _Shape], store: PatchStore, **others: Any) -> _Shape:
    """Make the shape of networks for a store, of the settings that it shares with a section, and of others."""
    names = signature(made).parameters.keys() & type(section).model_fields.keys()
    known = {name: getattr(section, name) for name in names}
    return made(**known | {"channels": store.n_channels, "n_classes": len(store.meta.classes)} | others)


def pictures_of(store: PatchStore, resolution: int, *splits: str) -> Pictures:
    """Return the patches of these splits, reduced to the resolution, in memory."""
    parts = [load_patches(store, split, resolution) for split in splits]
    shape = (0, resolution, resolution, store.n_channels)
    pixels = [np.empty(shape, np.uint8), *(part.read(np.arange(len(part))) for part in parts if len(part))]
    images = np.ascontiguousarray(np.concatenate(pixels).transpose(0, 3, 1, 2))
    labels = np.concatenate([part.label for part in parts])
    patient = np.concatenate([part.patient for part in parts])
    return Pictures(torch.from_numpy(images), torch.from_numpy(labels), patient)


def lpips_of(study: Study, pipeline: Pipeline, site: str) -> Lpips:
    """Return LPIPS as the pipeline says.

    Raises:
        UsageError: when a real site is to be measured by an untrained network.
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
