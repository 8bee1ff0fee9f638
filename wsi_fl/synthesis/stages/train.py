"""`synthesize train`: one generator on the training split of a site's patch store, resumable at any moment."""

from __future__ import annotations

import time
from math import isfinite
from pathlib import Path
from shutil import rmtree

from wsi_fl import __version__
from wsi_fl.report.pictures import render_grid
from wsi_fl.stages.site.data import open_store, pixels_digest, store_digest
from wsi_fl.stages.work.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.folder import GeneratorFolder, Phase
from wsi_fl.synthesis.stages.kinds import Course, Document, GeneratorType, Losses
from wsi_fl.synthesis.stages.sample import as_pixels
from wsi_fl.synthesis.state import balance_labels
from wsi_fl.system.files import site_lock, write_bytes
from wsi_fl.types import UsageError, WsiFlError

_LOG_EVERY = 20
_SHOWN_PER_CLASS = 8
_SHOWN_CLASSES = 10
_NOTES: dict[Phase, str] = {"before": "", "after": "with privacy loss", "denoiser": "denoiser"}


def train_generator(
    study: Study,
    pipeline: Pipeline,
    kind: GeneratorType,
    site: str,
    *,
    again: bool = False,
    watcher: Watcher | None = None,
) -> Document:
    """Train a site's generator of a kind, or go on with it; return the `--json` document.

    Args:
        again: throws away what there is.

    Raises:
        UsageError: when a generator of other settings, or of another store, is there already.
    """
    began = time.perf_counter()
    folder = kind.folder(study, site)
    with site_lock(folder.path, site):
        if again:
            _forget(folder.path)
        with open_store(study, site) as store:
            if store.meta.generator is not None:
                raise UsageError(f"site {site}: its patches are synthetic already; a generator learns from real ones")
            course = kind.course(study, pipeline, site, store)
            facts = {
                "sha256": store_digest(store),
                **pixels_digest(store),
                "n": len(course.pictures),
                "classes": list(store.meta.classes),
                "size_px": store.meta.spec.size_px,
                "mpp": store.meta.spec.mpp,
            }
        document = _begin(study, site, folder, course.settings, facts)
        if not document["finished"]:
            told = watcher or SilentProgress()
            if lost := folder.find_lost_checkpoint():
                told.print_message(lost)
            if folder.load_state(course.state):
                folder.forget_after(course.state.iteration)
            document = _train(kind, course, folder, document, told)
    return {
        "site": site,
        "generator": study.relative_path(folder.path),
        "resolution": document["settings"]["shape"]["resolution"],
        "classes": document["store"]["classes"],
        "images": document["store"]["n"],
        **kind.told(document),
        "seconds": time.perf_counter() - began,
    }


def _train(
    kind: GeneratorType, course: Course, folder: GeneratorFolder, document: Document, watcher: Watcher
) -> Document:
    """From wherever the state is; each checkpoint is whole, and what follows from it is written again."""
    state, site, ends = course.state, document["site"], course.phases
    last, total = list(ends.items())[-1]
    told: list[Losses] = []
    began = time.monotonic()
    while state.iteration < total:
        told.append(course.step())
        done = state.iteration
        if not all(isfinite(value) for value in told[-1].values() if value is not None):
            raise WsiFlError(f"site {site}: training diverged at iteration {done}; {kind.remedy}, and train --again")
        phase = next(name for name, end in ends.items() if done <= end)
        if done % _LOG_EVERY == 0 or done == total:
            seconds = time.monotonic() - began
            folder.log_metrics({"iteration": done, **course.line(phase, told), "seconds": seconds})
            told = []
        watcher.update(site, done, total, _NOTES[phase])
        if done == ends[phase] and phase != last:
            document = _keep(course, folder, document, phase)
        if done % course.checkpoint_every == 0 or done == ends[phase]:
            write_bytes(folder.sample_path(done), _picture(course))
            folder.save_state(state)
    document = _keep(course, folder, document, last) | {"finished": True}
    folder.write_document(document)
    return document


def _keep(course: Course, folder: GeneratorFolder, document: Document, phase: Phase) -> Document:
    digest = folder.save_generator(phase, course.state.networks["average"])
    document = document | course.kept(document, phase, digest)
    folder.write_document(document)
    return document


def _picture(course: Course) -> bytes:
    """A row per class."""
    shown = min(course.settings["shape"]["n_classes"], _SHOWN_CLASSES)
    labels = balance_labels(shown, _SHOWN_PER_CLASS)
    (images,) = as_pixels([course.show(labels)])
    return render_grid([images[labels == k] for k in range(shown)])


def _forget(folder: Path) -> None:
    """Remove all that a generator's folder holds, but for its lock."""
    for path in folder.iterdir():
        if path.is_dir():
            rmtree(path)
        elif path.name != ".lock":
            path.unlink()


def _begin(study: Study, site: str, folder: GeneratorFolder, settings: Document, store: Document) -> Document:
    """Begin the document of a generator, or make sure that it is about the same training; return it.

    What the second phase alone depends on may change until that has begun.
    """
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
    where = study.relative_path(folder.path)
    if any(document["store"].get(key, value) != value for key, value in store.items()):
        raise UsageError(f"{where}: was trained on another store of site {site}; --again trains anew")
    (first, second), (known_first, known_second) = _by_phase(settings), _by_phase(document["settings"])
    if other := [key for key, value in first.items() if known_first.get(key) != value]:
        raise UsageError(f"{where}: a generator with other settings is there ({', '.join(other)}); --again trains anew")
    if second != known_second:
        if document["finished"] or max(folder.list_iterations(), default=0) > settings["iterations"]:
            raise UsageError(
                f"{where}: a generator with other settings of the privacy loss is there; --again trains anew"
            )
        document = document | {"settings": settings}  # nothing has depended on them yet
        folder.write_document(document)
    return document


def _by_phase(settings: Document) -> tuple[Document, Document]:
    """What decides the first phase of a training, and what the second alone, where there is one."""
    terms, first = dict(settings["terms"]), dict(settings)
    later = {key: first.pop(key, None) for key in ("privacy", "privacy_iterations")}
    later["weight"] = terms.pop("privacy_weight", None)
    return first | {"terms": terms}, later


def trained_lines(document: Document) -> Lines:
    """Say what there is now, and what to do next."""
    later = document.get("privacy_iterations")
    more = f", then {later} with the privacy loss" if later is not None else ""
    epochs = f" ({document['epochs']:.0f} epochs)" if "epochs" in document else ""
    yield TextLine(
        f"generator of site {document['site']}: {document['resolution']} px, {document['iterations']} iterations"
        f"{more}{epochs}; {document['generator']}"
    )
    if (document.get("lpips") or "").startswith("UNTRAINED"):
        yield TextLine(f"  {document['lpips']}", "yellow")
    yield TextLine(f"next: wsi-fl synthesize check --generator {document.get('kind', 'gan')} --site {document['site']}")
