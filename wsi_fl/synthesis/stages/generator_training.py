"""`synthesize train`: one generator on the training split of a site's patch store, resumable at any moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from shutil import rmtree

from wsi_fl import __version__
from wsi_fl.report.inline_pictures import render_grid
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.stages.runtime.hints import next_command
from wsi_fl.stages.site.site_data import open_store, pixels_digest, store_digest
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.folder import Document, GeneratorFolder, Phase
from wsi_fl.synthesis.keys import LpipsKeys
from wsi_fl.synthesis.stages.generator_types import GeneratorTrainer, GeneratorType, Losses
from wsi_fl.synthesis.stages.synthetic_stores import transpose_images
from wsi_fl.synthesis.training_state import balance_labels
from wsi_fl.system.files import write_bytes
from wsi_fl.system.join_work import WORK_NAMES, site_lock
from wsi_fl.system.shared_work import SharedWork
from wsi_fl.types import UsageError, WsiFlError

_LOG_EVERY = 20
_IMAGES_PER_CLASS = 8
_MAX_CLASSES = 10
_PHASE_NOTES: dict[Phase, str] = {"before": "", "after": "with privacy loss", "denoiser": "denoiser"}


def train_generator(
    study: Study,
    pipeline: Pipeline,
    kind: GeneratorType,
    site: str,
    *,
    restart: bool = False,
    watcher: Watcher | None = None,
) -> Document:
    """Train or resume a site's generator of a kind; return the `--json` document.

    Args:
        restart: delete an existing generator first.

    Raises:
        UsageError: for an existing generator of other settings or of another store.
    """
    start_time = time.perf_counter()
    folder = kind.find_folder(study, site)
    with site_lock(folder.path, site) as work:
        if restart:
            _clear_folder(folder.path)
        with open_store(study, site) as store:
            if store.meta.generator is not None:
                raise UsageError(f"site {site}: its patches are synthetic already; a generator learns from real ones")
            trainer = kind.build_trainer(study, pipeline, site, store)
            store_facts = {
                "sha256": store_digest(store),
                **pixels_digest(store),
                "n": len(trainer.real_images),
                "classes": list(store.meta.classes),
                "size_px": store.meta.spec.size_px,
                "mpp": store.meta.spec.mpp,
            }
        document = _open_document(study, site, folder, trainer.settings, store_facts)
        if not document["finished"]:
            progress = watcher or SilentProgress()
            if warning := folder.find_lost_checkpoint():
                progress.print_message(warning)
            if folder.load_state(trainer.state):
                folder.forget_after(trainer.state.iteration)
            document = _run_training(kind, trainer, folder, document, progress, work)
    return {
        "site": site,
        "generator": study.relative_path(folder.path),
        "resolution": document["settings"]["shape"]["resolution"],
        "classes": document["store"]["classes"],
        "images": document["store"]["n"],
        **kind.summarize_training(document),
        "seconds": time.perf_counter() - start_time,
    }


def _run_training(
    kind: GeneratorType,
    trainer: GeneratorTrainer,
    folder: GeneratorFolder,
    document: Document,
    watcher: Watcher,
    work: SharedWork,
) -> Document:
    """Train from the state's iteration on; each checkpoint is complete, and later files are written again."""
    state, site, phase_ends = trainer.state, document["site"], trainer.phases
    last_phase, total = list(phase_ends.items())[-1]
    losses: list[Losses] = []
    start_time = time.monotonic()
    while state.iteration < total:
        losses.append(trainer.step())
        iteration = state.iteration
        if not all(isfinite(value) for value in losses[-1].values() if value is not None):
            raise WsiFlError(
                f"site {site}: training diverged at iteration {iteration}; {kind.remedy}, and train --again"
            )
        phase = next(name for name, end in phase_ends.items() if iteration <= end)
        is_checkpoint = iteration % trainer.checkpoint_every == 0 or iteration == phase_ends[phase]
        if iteration % _LOG_EVERY == 0 or is_checkpoint:
            work.require_presence()
        if iteration % _LOG_EVERY == 0 or iteration == total:
            seconds = time.monotonic() - start_time
            folder.log_metrics({"iteration": iteration, **trainer.summarize_losses(phase, losses), "seconds": seconds})
            losses = []
        watcher.update(site, iteration, total, _PHASE_NOTES[phase])
        if iteration == phase_ends[phase] and phase != last_phase:
            document = _save_network(trainer, folder, document, phase)
        if is_checkpoint:
            write_bytes(folder.sample_path(iteration), _render_preview(trainer))
            folder.save_state(state)
    document = _save_network(trainer, folder, document, last_phase) | {"finished": True}
    folder.write_document(document)
    return document


def _save_network(trainer: GeneratorTrainer, folder: GeneratorFolder, document: Document, phase: Phase) -> Document:
    digest = folder.save_generator(phase, trainer.state.networks["average"])
    document = document | trainer.describe_network(document, phase, digest)
    folder.write_document(document)
    return document


def _render_preview(trainer: GeneratorTrainer) -> bytes:
    """Return a picture of drawn images, a row per class."""
    n_classes = min(trainer.settings["shape"]["n_classes"], _MAX_CLASSES)
    labels = balance_labels(n_classes, _IMAGES_PER_CLASS)
    (images,) = transpose_images([trainer.draw_preview(labels)])
    return render_grid([images[labels == k] for k in range(n_classes)])


def _clear_folder(folder: Path) -> None:
    """Remove everything from a generator's folder except what belongs to the work of this command."""
    for path in folder.iterdir():
        if path.name not in WORK_NAMES:
            rmtree(path) if path.is_dir() else path.unlink()


def _open_document(study: Study, site: str, folder: GeneratorFolder, settings: Document, store: Document) -> Document:
    """Return the document of this training, or a new one; settings of the second phase may change until it begins."""
    document = folder.read_document()
    if document is None:
        document = {
            "site": site,
            "tool_version": __version__,
            "settings": settings,
            "store": store,
            "phases": {},
            "finished": False,
        }
        folder.write_document(document)
        return document
    location = study.relative_path(folder.path)
    if any(document["store"].get(key, value) != value for key, value in store.items()):
        raise UsageError(f"{location}: was trained on another store of site {site}; --again trains anew")
    first_phase, second_phase = _split_settings(settings)
    document_first, document_second = _split_settings(document["settings"])
    if differing_keys := [key for key, value in first_phase.items() if document_first.get(key) != value]:
        raise UsageError(
            f"{location}: a generator with other settings is there ({', '.join(differing_keys)}); --again trains anew"
        )
    if second_phase != document_second:
        if document["finished"] or max(folder.list_iterations(), default=0) > settings["iterations"]:
            raise UsageError(
                f"{location}: a generator with other settings of the privacy loss is there; --again trains anew"
            )
        document = document | {"settings": settings}  # unused so far
        folder.write_document(document)
    return document


def _split_settings(settings: Document) -> tuple[Document, Document]:
    """Return the settings of a training's first phase, and those of the second alone."""
    terms, first = dict(settings["terms"]), dict(settings)
    second = {key: first.pop(key, None) for key in ("privacy", "privacy_iterations")}
    second["weight"] = terms.pop("privacy_weight", None)
    return first | {"terms": terms}, second


def build_check_hint(
    pipeline: Pipeline, kind: GeneratorType, site: str, pipeline_name: str | None, overrides: Sequence[str]
) -> str:
    """Return the command that checks a site's generator, and the weights that it needs."""
    command = next_command(f"synthesize check --generator {kind.name} --site {site}", pipeline_name, overrides)
    if kind.name != "gan" or pipeline.find_section(LpipsKeys).weights is not None:
        return command
    return f"{command} (it downloads VGG-16's weights; --set lpips.weights=FILE names a file of them)"


def render_training_lines(document: Document, check_hint: str) -> Lines:
    """Yield the trained generator and the command that checks it."""
    privacy_iterations = document.get("privacy_iterations")
    privacy_text = f", then {privacy_iterations} with the privacy loss" if privacy_iterations is not None else ""
    epochs_text = f" ({document['epochs']:.0f} epochs)" if "epochs" in document else ""
    yield TextLine(
        f"generator of site {document['site']}: {document['resolution']} px, {document['iterations']} iterations"
        f"{privacy_text}{epochs_text}; {document['generator']}"
    )
    if (document.get("lpips") or "").startswith("UNTRAINED"):
        yield TextLine(f"  {document['lpips']}", "yellow")
    yield TextLine(f"next: {check_hint}")
