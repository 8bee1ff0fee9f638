"""From configuration and stores to what the synthesis room needs: shapes, terms, images, generators, verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl import __version__
from wsi_fl.models.lpips import RANDOM, Lpips, load_lpips
from wsi_fl.stages.site.data import examples_of, open_store
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.generating import Gan as GanSection
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.evidence import CRITERIA
from wsi_fl.synthesis.folder import GeneratorFolder, Phase
from wsi_fl.synthesis.gan import GanTerms
from wsi_fl.synthesis.stylegan2 import GanShape, Generator
from wsi_fl.types import UsageError, WsiFlError

HELD_OUT = ("test", "val")
"""Splits that no generator is trained on."""


@dataclass(frozen=True)
class Pictures:
    """Real images at the generator's resolution: uint8[n, c, h, h], their labels int64[n] and patients str[n]."""

    images: Tensor
    labels: Tensor
    patient: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, n: int, seed: int) -> Pictures:
        """At most n of them, drawn at random, in order."""
        rows = np.sort(np.random.default_rng(seed).permutation(len(self))[:n])
        return Pictures(self.images[rows], self.labels[rows], self.patient[rows])

    def to(self, device: torch.device | str) -> Pictures:
        return Pictures(self.images.to(device), self.labels.to(device), self.patient)


def gan_shape(settings: GanSection, store: PatchStore) -> GanShape:
    """The networks' shape for the patches of a store.

    Raises:
        UsageError: when the stored patches are smaller than what is to be generated.
    """
    if store.meta.spec.size_px < settings.resolution:
        raise UsageError(
            f"gan.resolution = {settings.resolution}: site {store.meta.site} stores patches of "
            f"{store.meta.spec.size_px} px; generate no larger ones"
        )
    return GanShape(
        resolution=settings.resolution,
        channels=store.channels,
        n_classes=len(store.meta.classes),
        z_dim=settings.z_dim,
        w_dim=settings.w_dim,
        mapping_layers=settings.mapping_layers,
        channel_base=settings.channel_base,
        channel_max=settings.channel_max,
    )


def gan_terms(settings: GanSection) -> GanTerms:
    return GanTerms(
        batch_size=settings.batch_size,
        lr=settings.lr,
        r1_gamma=settings.r1_gamma,
        path_weight=settings.path_weight,
        mixing=settings.mixing,
        ema_images=settings.ema_images,
        ada_target=settings.ada_target if settings.ada_target < 1 else None,
        ada_images=settings.ada_images,
        privacy_weight=settings.privacy_weight,
    )


def pictures_of(store: PatchStore, resolution: int, *splits: str) -> Pictures:
    """The patches of these splits, reduced to the resolution, in memory."""
    parts = [examples_of(store, split, resolution) for split in splits]
    pixels = [part.read(np.arange(len(part))) for part in parts if len(part)]
    if not pixels:
        shape = (0, store.channels, resolution, resolution)
        nobody = np.empty(0, np.str_)
        return Pictures(torch.empty(shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64), nobody)
    images = np.ascontiguousarray(np.concatenate(pixels).transpose(0, 3, 1, 2))
    labels = np.concatenate([part.label for part in parts])
    patient = np.concatenate([part.patient for part in parts])
    return Pictures(torch.from_numpy(images), torch.from_numpy(labels), patient)


def open_site(study: Study, site: str) -> PatchStore:
    """The patch store of a named site."""
    return open_store(study, study.site(site).name)


def lpips_of(study: Study, pipeline: Pipeline, site: str, device: torch.device) -> Lpips:
    """LPIPS as the pipeline says; a real site gets no untrained substitute."""
    weights = pipeline.lpips.weights
    if weights is not None and weights.startswith(RANDOM) and study.site(site).real:
        raise UsageError(
            f"lpips.weights = {weights!r}: an untrained network measures nothing; site {site} is real, give it weights"
        )
    if weights is not None and not weights.startswith(RANDOM):
        weights = str(study.resolve(weights))
    lpips: Lpips = load_lpips(weights).to(device)
    return lpips


def folder_of(study: Study, site: str) -> GeneratorFolder:
    return GeneratorFolder(study.generator(study.site(site).name))


def trained_folder(study: Study, site: str) -> tuple[GeneratorFolder, dict[str, Any]]:
    """The folder of a generator whose training has finished, and its gan.json."""
    folder = folder_of(study, site)
    document = folder.document()
    where = study.relative(folder.path)
    if document is None:
        raise WsiFlError(f"{where}: no generator yet; run `wsi-fl synthesize train --site {site}`")
    if not document["finished"]:
        raise WsiFlError(
            f"{where}: its training has not finished; the same `wsi-fl synthesize train --site {site}` goes on with it"
        )
    return folder, document


def shared_phase(document: dict[str, Any]) -> Phase:
    """Which generator is sampled and shared: the one with the privacy loss, where there was a second phase."""
    return "after" if "after" in document["phases"] else "before"


def load_generator(
    study: Study, site: str, device: torch.device, phase: Phase | None = None
) -> tuple[Generator, dict[str, Any]]:
    """A site's trained generator, by default the one that may be shared, and gan.json."""
    folder, document = trained_folder(study, site)
    return folder.load_generator(phase or shared_phase(document), device), document


def check_state(folder: GeneratorFolder, digest: str) -> tuple[str, list[str]]:
    """("passed", "failed" or "not run", reasons) of the check of exactly this generator."""
    check = folder.check()
    if check is None:
        return "not run", ["`synthesize check` was not run"]
    if check["generator"]["sha256"] != digest:
        return "not run", ["the check belongs to another generator; run `synthesize check` again"]
    if check.get("criteria") != CRITERIA:
        return "not run", [
            "the check is of an earlier version, by other criteria; run `synthesize check` again"
        ]
    return ("passed" if check["passed"] else "failed"), list(check["reasons"])


def provenance(folder: GeneratorFolder, document: dict[str, Any]) -> dict[str, Any]:
    """What samples say of the generator that may be shared; they are drawn as it was checked."""
    phase = shared_phase(document)
    digest = folder.digest(phase)
    state, reasons = check_state(folder, digest)
    check = folder.check() if state != "not run" else None
    return {
        "site": document["site"],
        "sha256": digest,
        "phase": phase,
        "iterations": document["phases"][phase]["iterations"],
        "truncation": check["truncation"] if check else 1.0,
        "lpips": (document["settings"]["privacy"] or {}).get("lpips"),
        "check": state,
        "reasons": reasons,
        "differential_privacy": False,
    }


def outcome(provenance: dict[str, Any]) -> str:
    """Of a check that was not passed, with the reasons."""
    word = "not passed" if provenance["check"] == "failed" else provenance["check"]
    return f"{word}: {'; '.join(provenance['reasons'])}"


def settings_document(
    pipeline: Pipeline, shape: GanShape, terms: GanTerms, lpips_label: str | None
) -> dict[str, Any]:
    """All that decides a training, as gan.json keeps it; a resumed one must agree."""
    gan = pipeline.gan
    privacy = {
        "weight": gan.privacy_weight,
        "quantile": gan.privacy_quantile,
        "images": gan.privacy_images,
        "lpips": lpips_label,
    }
    return {
        "shape": asdict(shape),
        "terms": asdict(terms),
        "iterations": gan.iterations,
        "privacy_iterations": gan.privacy_iterations,
        "privacy": privacy if gan.privacy_iterations else None,
        "seed": gan.seed,
    }


def forget(folder: Path) -> None:
    """Removes all that a generator's folder holds, but for its lock."""
    for path in folder.iterdir():
        if path.is_dir():
            rmtree(path)
        elif path.name != ".lock":
            path.unlink()


ByPhase = Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]
"""Settings → those that decide the first phase of training, and those of the second alone."""


def begin_document(
    study: Study,
    site: str,
    folder: GeneratorFolder,
    settings: dict[str, Any],
    store: dict[str, Any],
    by_phase: ByPhase = lambda settings: (settings, {}),
) -> None:
    """Begins the document of a generator, or makes sure that it is about the same training.

    What the second phase alone depends on may change until that has begun.
    """
    known = folder.document()
    if known is None:
        folder.write_document(
            {
                "site": site,
                "tool_version": __version__,
                "settings": settings,
                "store": store,
                "phases": {},
                "finished": False,
            }
        )
        return
    where = study.relative(folder.path)
    if known["store"] != store:
        raise UsageError(f"{where}: was trained on another store of site {site}; --again trains anew")
    (first, second), (known_first, known_second) = by_phase(settings), by_phase(known["settings"])
    if other := [key for key, value in first.items() if known_first.get(key) != value]:
        raise UsageError(
            f"{where}: a generator with other settings is there ({', '.join(other)}); --again trains anew"
        )
    if second != known_second:
        if known["finished"] or max(folder.iterations(), default=0) > settings["iterations"]:
            raise UsageError(
                f"{where}: a generator with other settings of the privacy loss is there; --again trains anew"
            )
        folder.write_document(known | {"settings": settings})  # nothing has depended on them yet
