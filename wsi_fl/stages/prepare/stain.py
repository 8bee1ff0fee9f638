"""`stain`: the colour of a site's training tissue, measured, given noise and released once.

`stains/<site>.json` is what may leave; `stages/site/once.py` says in which order it comes about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.units import require_patients
from wsi_fl.privacy.book import Guarantee
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.means import noisy_mean
from wsi_fl.privacy.plan import plan_of_round
from wsi_fl.privacy.release import Release
from wsi_fl.slides.pictures.stain import draw_stains
from wsi_fl.slides.stains.methods import STAIN_METHODS
from wsi_fl.stages.prepare.sources import asked_for
from wsi_fl.stages.site.account import require_budget
from wsi_fl.stages.site.data import open_store
from wsi_fl.stages.site.once import Once, once_ledger, release_once
from wsi_fl.stages.site.stains import RUN, read_stain
from wsi_fl.stages.work.console import Watcher, say
from wsi_fl.stages.work.job import Job
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import read_json, write_bytes, write_json
from wsi_fl.system.locks import locked
from wsi_fl.types import UsageError, WsiFlError

_READ = 32
_CANDIDATES, _SHOWN = 60, 5
_MUCH_NOISE = 0.05
"""Standard deviation of the noise in each scaled moment beyond which colours are visibly off."""


def stain(
    study: Study,
    *,
    site: str | None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    again: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Release the stain of one site, or with `site` None of every site of the pipeline; return the `--json` document.

    A site that has released one keeps it and spends nothing more. Started under mpiexec or srun, the ranks share the
    sites, and all but the first return {}.

    Args:
        again: measure and release once more, which costs as much as the first time.
    """
    job = Job()
    told = job.watched(watcher)

    def prepare() -> list[_Site]:
        pipeline, sites = asked_for(study, site, pipeline_name, overrides)
        chosen = [_Site(study, one, pipeline) for one in sites]
        for one in job.mine(chosen):
            one.open().close()
        return chosen

    chosen = job.each(prepare)
    rows = job.share(chosen, lambda mine: (_release_of(one, again, told) for one in mine))
    job.each(lambda: _draw(job.mine(chosen)))
    return {"sites": rows} if job.first else {}


@dataclass(frozen=True)
class _Site:
    study: Study
    site: SiteFile
    pipeline: Pipeline

    def open(self) -> PatchStore:
        """Its patches, which must be in colour."""
        store = open_store(self.study, self.site.name)
        if store.slides and store.channels != 3:
            store.close()
            raise UsageError(f"site {self.site.name}: its store holds grey images, which have no stain")
        return store


def _release_of(one: _Site, again: bool, watcher: Watcher) -> dict[str, Any]:
    """Release a site's stain, unless it has released one; return its part of the document."""
    study, name = one.study, one.site.name
    home = study.store(name).parent
    once = Once[dict[str, Any]](
        study,
        copy=home / "stain.json",
        file=study.stain(name),
        schema="stain",
        read=lambda path: _document(study, path),
        write=write_json,
        vector=lambda document: np.array(document["moments"], np.float32),
    )

    def agrees(document: dict[str, Any]) -> None:
        if document["method"] != one.pipeline.stain.method:
            raise UsageError(
                f"site {name} has released its stain by {document['method']}; --again releases one by "
                f"{one.pipeline.stain.method} too, which costs as much once more"
            )

    require_budget(one.site)
    with locked(home, name):
        with one.open() as store:
            worth: Guarantee = "none" if store.meta.generator is not None else "guaranteed"
        ledger = once_ledger(study, one.site, one.pipeline, RUN, worth)
        make = partial(_measured, one, ledger, watcher)
        document, spent = release_once(once, ledger, make, agrees, again=again)
    return document | {"spent": spent, "file": study.relative(once.file)}


def _document(study: Study, path: Path) -> dict[str, Any]:
    """Return the content of a stain's file, whole."""
    document: dict[str, Any] = read_json(path)
    read_stain(document, study.relative(path))
    return document


def _measured(one: _Site, ledger: PrivacyLedger, watcher: Watcher) -> tuple[Release, dict[str, Any]]:
    """The file of a new release, which is on the ledger by now; one that was never sent is taken back by it."""
    settings, unit = one.pipeline.stain, one.pipeline.privacy.unit
    method = STAIN_METHODS[settings.method]
    with one.open() as store:
        rows = np.flatnonzero(store.table.split == "train")
        if not len(rows):
            raise WsiFlError(f"site {one.site.name}: its store has no training patches to take a stain from")
        parts = []
        for first, pixels in _batches(store, rows):
            parts.append(method.measured(pixels))
            watcher.update(one.site.name, first + len(pixels), len(rows), "measuring")
        units = _units(unit, store.table.patient[rows], one.site.name)
    _warn_of_noise(one, units if units is not None else rows, watcher)
    mean, mechanism, n = noisy_mean(
        np.concatenate(parts),
        clip=settings.clip,
        sigma=settings.sigma,
        noise=CipherStream.fresh(),
        units=units,
    )
    vector = mean.astype(np.float32)
    once = plan_of_round(
        n=n,
        batch_size=n,
        epochs=1,
        sigma=mechanism.sigma,
        clip=mechanism.clip,
        delta=ledger.terms.delta,
        unit=unit,
    )
    release = ledger.release(None, vector, schema="stain", mechanism=once, content="stain")
    return release, {
        "site": one.site.name,
        "method": settings.method,
        "space": method.space,
        **{key: list(numbers) for key, numbers in asdict(method.stain_of(vector.astype(np.float64))).items()},
        "moments": [float(value) for value in vector],
        "sigma": settings.sigma,
        "clip": settings.clip,
        "n": n,
        "unit": unit,
        "epsilon": ledger.epsilon(),
        "delta": ledger.terms.delta,
        "digest": release.digest,
    }


def _warn_of_noise(one: _Site, units: NDArray[Any], watcher: Watcher) -> None:
    """Says when a site is so small that noise will be most of what it releases."""
    settings, n = one.pipeline.stain, len(np.unique(units))
    if settings.sigma * settings.clip / n > _MUCH_NOISE:
        enough = max(1.0, _MUCH_NOISE * n / settings.clip)
        watcher.say(
            f"  {one.site.name}: {n} {one.pipeline.privacy.unit}s are few for stain.sigma = {settings.sigma:g}; its "
            f"stain will be coarse (--again --set stain.sigma={enough:.1f} would spend more for a truer one)"
        )


def _units(unit: str, patient: NDArray[np.str_], site: str) -> NDArray[np.str_] | None:
    """Whose record each row is; None where each is one of its own."""
    if unit == "row":
        return None
    require_patients(patient, site)
    return patient


def _batches(store: PatchStore, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    for first in range(0, len(rows), _READ):
        yield first, store.read(rows[first : first + _READ])


def _draw(sites: Sequence[_Site]) -> None:
    """stores/<site>/stain.png: patches as every laboratory whose stain is here would show them. It stays here."""
    for one in sites:
        write_bytes(one.study.store(one.site.name).parent / "stain.png", _picture(one))


def _picture(one: _Site) -> bytes:
    study, name = one.study, one.site.name
    here = {
        other: read_stain(read_json(path), study.relative(path))
        for other in dict.fromkeys([name, *(site.name for site in study.sites(one.pipeline))])
        if (path := study.stain(other)).exists()
    }
    mine = here.pop(name)
    own = mine.stain
    others = {other: found.stain for other, found in here.items() if found.method == mine.method}
    with one.open() as store:
        rows = np.flatnonzero(store.table.split == "train")
        spread = np.unique(np.linspace(0, len(rows) - 1, _CANDIDATES).round().astype(np.int64))
        patches = [
            pixels[k]
            for _, pixels in _batches(store, rows[spread])
            for k in np.flatnonzero(STAIN_METHODS[one.pipeline.stain.method].measured(pixels).any(1))
        ]
    step = max(1, len(patches) // _SHOWN)
    return draw_stains(name, patches[::step][:_SHOWN], own, others)


def print_stains(document: dict[str, Any]) -> None:
    """A line per site."""
    for row in document["sites"]:
        seen = _seen(row)
        cost = "released" if row["spent"] else "released before, nothing spent"
        worth = (
            "no privacy" if row["epsilon"] is None else f"ε = {row['epsilon']:.2f} at δ = {row['delta']:g}"
        )
        say(f"  {row['site']}: {seen} over {row['n']} {row['unit']}s; {cost}: {worth} ({row['file']})")
    say("stains may be copied to the other sites' stains/; next: wsi-fl train --set stain.exchange=true")


def _seen(row: dict[str, Any]) -> str:
    """The numbers of a stain in a line."""
    if row["method"] == "reinhard":
        pairs = zip(row["mean"], row["sd"], strict=True)
        return "L*, a*, b* = " + ", ".join(f"{mean:.1f} ± {sd:.1f}" for mean, sd in pairs)
    dyes = zip(("haematoxylin", "eosin"), row["strength"], strict=True)
    return "; ".join(
        f"{dye} ({', '.join(f'{v:.2f}' for v in row[dye])}) up to {strength:.1f}" for dye, strength in dyes
    )
