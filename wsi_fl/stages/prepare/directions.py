"""`wsi-fl projection`: write a projection for class statistics, computed from public reference slides."""

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
    """The planned class statistics of all sites.

    Attributes:
        n_examples: approximate number of privacy units (patches, slides or patients) of all sites together.
        n_sites: number of sites.
        epsilon, delta: of each site.
        has_shared_noise: whether the noise is distributed over the sites (secure aggregation).
    """

    rows: int
    hospitals: int
    epsilon: float
    shared: bool = False
    delta: float = 1e-5

    def variance(self) -> float:
        """Return the noise variance of each entry of all sites' sum; of distributed noise one share may be known."""
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
    """Compute a projection from public reference slides; return the `--json` document.

    Args:
        sources: slides or pictures, cut by the settings of `[tile]`, or feature stores, or folders of these; other
            files in folders are skipped.
        out: the file to write.
        n_dimensions: number of dimensions; None for 32, or the number that suits the planned statistics.
        statistics: the planned statistics, if known.
        mpp: µm per pixel of sources without a resolution.
        public: whether the user declares all sources public; see `require_public`.

    Raises:
        UsageError: when a source belongs to a site or has another encoder, or all have too few patches.
        WsiFlError: when a named source cannot be read, or there is none.
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
    """Return the named files and slide folders, and those directly in named folders."""
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
    """Return the SHA-256 of a file, or of the names and digests of the files of a slide folder."""
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
        except WsiFlError:  # an unreadable store is reported or skipped when its features are loaded
            continue


def _stored(path: Path, encoder: str) -> NDArray[np.float32]:
    """Return features float32[m, d] of some patches of a store, equally many of every slide."""
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
    """Return a sorted, bounded sample of n indices, the same every time."""
    return np.sort(np.random.default_rng(0).permutation(n)[:most])


def _named(files: Sequence[str]) -> str:
    return f": {', '.join(files[:3])}{', …' if len(files) > 3 else ''}" if files else ""


def directions_lines(document: dict[str, Any]) -> Lines:
    """Yield the sources of the file, and the next command."""
    rows = sum(source["rows"] for source in document["sources"])
    yield Line(
        f"  {document['file']}: a projection onto {document['dimensions']} dimensions of {document['encoder']}, from "
        f"{rows} patches of {len(document['sources'])} sources; SHA-256 {document['digest'][:16]}"
    )
    if aside := document["excluded"]:
        yield Line(f"  {len(aside)} other files were skipped{_named(aside)}", "yellow")
    yield Line(
        f"give the file to all sites; next: wsi-fl train --method oneshot --set model.projection={document['file']}"
    )
