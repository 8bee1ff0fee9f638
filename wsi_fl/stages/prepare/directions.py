"""`projection`: along which sites sum their features, from tissue that is nobody's secret; a small file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.directions import (
    N_PUBLIC,
    Origin,
    Source,
    enough_directions,
    public_directions,
    write_directions,
)
from wsi_fl.models.encoder import Encoder, encode
from wsi_fl.privacy.accounting import sigma_for
from wsi_fl.slides.patching.patches import plan_slide
from wsi_fl.slides.reading.formats import is_slide_folder
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.sweep import read_patches
from wsi_fl.stages.prepare.tile_plans import params_of, spec_of
from wsi_fl.stages.site.encoders import encoder_of
from wsi_fl.stages.site.public import require_public
from wsi_fl.stages.work.console import Line, Lines, Silent, Watcher
from wsi_fl.stores.bags import BagStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import sha256_of
from wsi_fl.system.machine import n_cores
from wsi_fl.system.names import drop_companions
from wsi_fl.types import SlideRecord, UsageError, WsiFlError, encoder_differences

_MOST = 500
"""Patches of one source."""


@dataclass(frozen=True)
class Letters:
    """What is known of the letters that hospitals are going to write.

    Attributes:
        rows: of all hospitals together, about: patches, slides or patients, whatever counts once.
        hospitals: how many write.
        epsilon, delta: of each.
        shared: whether they add the noise together.
    """

    rows: int
    hospitals: int
    epsilon: float
    shared: bool = False
    delta: float = 1e-5

    def variance(self) -> float:
        """Return that of the noise in each number of the sum of all letters; of shared noise one share may be known."""
        one: float = sigma_for(self.epsilon, 1.0, 1, self.delta) ** 2
        return one * self.hospitals / max(1, self.hospitals - 1 if self.shared else 1)


def directions(
    study: Study,
    sources: Sequence[Path],
    *,
    out: Path,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    n: int | None = None,
    letters: Letters | None = None,
    mpp: float | None = None,
    public: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Make public directions; return the `--json` document.

    Args:
        sources: slides or pictures of public tissue, cut as `[tile]` says, or stores of their features, or folders of
            such, in which files that are neither are left aside.
        out: the file to write.
        n: number of directions; None takes 32, or as many as `letters` ask for.
        letters: what the directions are for, as far as it is known.
        mpp: µm per pixel of sources that do not say.
        public: whether somebody says that all sources are nobody's secret; see `require_public`.

    Raises:
        UsageError: when a source is a hospital's own or has another encoder, or all have too few patches.
        WsiFlError: when one that is named cannot be read, or there is none.
    """
    files = _files_of(sources)
    if not public:
        _require_public(study, files)
    pipeline = study.pipeline(study.pipeline_name(pipeline_name), overrides)
    encoder = encoder_of(study, pipeline, "features", n_cores())
    told = watcher or Silent()
    rows, known, aside = [], [], []
    for path in files:
        told.update(path.name, 0, 1)
    for path in files:
        stored = path.suffix == ".h5"
        try:
            found = _stored(path, encoder.label) if stored else _seen(path, study, pipeline, encoder, mpp)
        except WsiFlError as error:
            if path in sources or isinstance(error, UsageError):
                raise
            aside.append(path.name)
            continue
        rows.append(found)
        known.append(Source(name=path.name, rows=len(found), sha256=_digest(path)))
        told.update(path.name, 1, 1)
    if not rows:
        raise WsiFlError(f"--from: no slide, picture or feature store{_named(aside)}")
    x = np.concatenate(rows)
    if n is None:
        n = N_PUBLIC if letters is None else enough_directions(x, letters.rows, letters.variance())
    made = public_directions(x, Origin(encoder=encoder.label, sources=known), n)
    write_directions(out, made)
    return {
        "file": study.relative(out.resolve()),
        "digest": made.digest,
        "dimensions": made.n,
        "encoder": encoder.label,
        "sources": [one.model_dump() for one in known],
        "excluded": aside,
    }


def _files_of(sources: Sequence[Path]) -> list[Path]:
    """Return the files and slide folders that are named, and those in folders that are named."""
    inside = (
        drop_companions(path.iterdir()) if path.is_dir() and not is_slide_folder(path) else [path]
        for path in sources
    )
    return [
        file
        for files in inside
        for file in files
        if file.is_file() or file in sources or is_slide_folder(file)
    ]


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and digests of the files of a slide that is a folder."""
    if not path.is_dir():
        return sha256_of(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = [f"{sha256_of(file)}  {file.relative_to(path).as_posix()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _require_public(study: Study, files: Sequence[Path]) -> None:
    for path in files:
        try:
            require_public(study, path)
        except UsageError:
            raise
        except (
            WsiFlError
        ):  # a store that cannot be read is told, or left aside, when its features are asked for
            continue


def _stored(path: Path, encoder: str) -> NDArray[np.float32]:
    """Return features float32[m, d] of some patches of a store, of every slide as many."""
    with BagStore(path) as store:
        if any(encoder_differences([store.meta.encoder, encoder])):
            raise UsageError(
                f"{path}: features of {store.meta.encoder}, but the pipeline names {encoder}; set features.encoder and "
                "features.weights"
            )
        n_slides = len(store.table.slide)
        each = max(1, _MOST // n_slides)
        bags = (store.bag(k).features for k in range(min(n_slides, _MOST)))
        return np.concatenate([bag[_some(len(bag), each)] for bag in bags])


def _seen(
    path: Path, study: Study, pipeline: Pipeline, encoder: Encoder, mpp: float | None
) -> NDArray[np.float32]:
    """Return features float32[m, d] of some patches of a slide or picture."""
    record = SlideRecord(path, path.stem, path.stem, "public", "negative", False, mpp_override=mpp)
    reader, spec = pipeline.slides.reader, spec_of(pipeline)
    check_opens_safely(path, mpp, reader)
    plan = plan_slide(record, spec, params_of(study, pipeline), reader=reader)
    chosen = plan.xy_l0[_some(len(plan.xy_l0), _MOST)]
    read = read_patches(plan.record, chosen, spec, threads=n_cores(), reader=reader)
    found: NDArray[np.float32] = encode((pixels for _, pixels in read), encoder)
    return found


def _some(n: int, most: int) -> NDArray[np.int64]:
    """Return up to so many of n indices, in order, the same every time."""
    return np.sort(np.random.default_rng(0).permutation(n)[:most])


def _named(files: Sequence[str]) -> str:
    return f": {', '.join(files[:3])}{', …' if len(files) > 3 else ''}" if files else ""


def directions_lines(document: dict[str, Any]) -> Lines:
    """Yield what the file rests on, and what to do with it."""
    rows = sum(source["rows"] for source in document["sources"])
    yield Line(
        f"  {document['file']}: {document['dimensions']} directions of {document['encoder']}, from {rows} patches of "
        f"{len(document['sources'])} sources; SHA-256 {document['digest'][:16]}"
    )
    if aside := document["excluded"]:
        yield Line(f"  {len(aside)} other files were left aside{_named(aside)}", "yellow")
    yield Line(
        f"give the file to all sites; next: wsi-fl train --method oneshot --set model.projection={document['file']}"
    )
