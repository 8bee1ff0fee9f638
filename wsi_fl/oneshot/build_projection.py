"""`wsi-fl projection`: write a projection for class statistics, computed from public reference slides."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.encoder import Encoder, encode_batches
from wsi_fl.oneshot.projection import (
    N_PUBLIC,
    ProjectionOrigin,
    ProjectionSource,
    choose_n_components,
    fit_projection,
    write_projection,
)
from wsi_fl.privacy.accounting import find_sigma
from wsi_fl.slides.patching.slide_plan import plan_slide
from wsi_fl.slides.reading.formats import is_slide_folder
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.stages.prepare.tile_plans import build_grid_spec, build_plan_params
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.stages.runtime.hints import next_command
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stages.site.public_sources import require_public
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.file_names import drop_companions
from wsi_fl.system.files import file_sha256
from wsi_fl.system.machine import n_cores
from wsi_fl.types import SlideRecord, UsageError, WsiFlError, encoder_differences

_MAX_PATCHES = 500
"""Patches of one source."""


@dataclass(frozen=True)
class ExpectedStatistics:
    """The planned class statistics of all sites.

    Attributes:
        n_examples: approximate number of privacy units (patches, slides or patients) of all sites together.
        n_sites: number of sites.
        epsilon, delta: of each site.
        has_shared_noise: whether the noise is distributed over the sites (secure aggregation).
    """

    n_examples: int
    n_sites: int
    epsilon: float
    has_shared_noise: bool = False
    delta: float = 1e-5

    def noise_variance(self) -> float:
        """Return the noise variance of each entry of all sites' sum; of distributed noise one share may be known."""
        site_variance: float = find_sigma(self.epsilon, 1.0, 1, self.delta) ** 2
        return site_variance * self.n_sites / max(1, self.n_sites - 1 if self.has_shared_noise else 1)


def build_projection(
    study: Study,
    sources: Sequence[Path],
    *,
    out: Path,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    n_dimensions: int | None = None,
    statistics: ExpectedStatistics | None = None,
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
    files = _list_files(sources)
    if not public:
        _require_public(study, files)
    pipeline = study.load_pipeline(study.pipeline_name(pipeline_name), overrides)
    encoder = load_encoder(study, pipeline, "features", n_cores())
    progress, rows, origins, skipped = watcher or SilentProgress(), [], [], []
    for path in files:
        progress.update(path.name, 0, 1)
    for path in files:
        try:
            if path.suffix == ".h5":
                features = _load_store_features(path, encoder.label)
            else:
                features = _extract_features(path, study, pipeline, encoder, mpp)
        except WsiFlError as error:
            if path in sources or isinstance(error, UsageError):
                raise
            skipped.append(path.name)
            continue
        rows.append(features)
        origins.append(ProjectionSource(name=path.name, rows=len(features), sha256=_hash_source(path)))
        progress.update(path.name, 1, 1)
    if not rows:
        raise WsiFlError(f"--from: no slide, picture or feature store{_name_examples(skipped)}")
    x = np.concatenate(rows)
    if n_dimensions is None and statistics is not None:
        n_dimensions = choose_n_components(x, statistics.n_examples, statistics.noise_variance())
    projection = fit_projection(x, ProjectionOrigin(encoder=encoder.label, sources=origins), n_dimensions or N_PUBLIC)
    write_projection(out, projection)
    file = study.relative_path(out.resolve())
    command = next_command("train --method oneshot", pipeline_name, overrides, [f"model.projection={file}"])
    return {
        "file": file,
        "digest": projection.digest,
        "dimensions": projection.n_components,
        "encoder": encoder.label,
        "sources": [source.model_dump() for source in origins],
        "excluded": skipped,
        "next": [command],
    }


def _list_files(sources: Sequence[Path]) -> list[Path]:
    """Return the named files and slide folders, and those directly in named folders."""
    file_lists = (
        drop_companions(path.iterdir()) if path.is_dir() and not is_slide_folder(path) else [path] for path in sources
    )
    return [
        file for files in file_lists for file in files if file.is_file() or file in sources or is_slide_folder(file)
    ]


def _hash_source(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and digests of the files of a slide folder."""
    if not path.is_dir():
        return file_sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = [f"{file_sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _require_public(study: Study, files: Sequence[Path]) -> None:
    for path in files:
        try:
            require_public(study, path)
        except UsageError:
            raise
        except WsiFlError:  # an unreadable store is reported or skipped when its features are loaded
            continue


def _load_store_features(path: Path, encoder: str) -> NDArray[np.float32]:
    """Return features float32[m, d] of some patches of a store, equally many of every slide."""
    with BagStore(path) as store:
        if any(encoder_differences([store.meta.encoder, encoder])):
            raise UsageError(
                f"{path}: features of {store.meta.encoder}, but the pipeline names {encoder}; set features.encoder and "
                "features.weights"
            )
        n_slides = len(store.table.slide)
        n_per_slide = max(1, _MAX_PATCHES // n_slides)
        bags = (store.read_bag(k).features for k in range(min(n_slides, _MAX_PATCHES)))
        return np.concatenate([bag[_sample_indices(len(bag), n_per_slide)] for bag in bags])


def _extract_features(
    path: Path, study: Study, pipeline: Pipeline, encoder: Encoder, mpp: float | None
) -> NDArray[np.float32]:
    """Return features float32[m, d] of some patches of a slide or picture."""
    record = SlideRecord(path, path.stem, path.stem, "public", "negative", False, mpp_override=mpp)
    reader, spec = pipeline.slides.reader, build_grid_spec(pipeline)
    check_opens_safely(path, mpp, reader)
    plan = plan_slide(record, spec, build_plan_params(study, pipeline), reader=reader)
    corners = plan.xy_l0[_sample_indices(len(plan.xy_l0), _MAX_PATCHES)]
    read = read_patches(plan.record, corners, spec, threads=n_cores(), reader=reader)
    features: NDArray[np.float32] = encode_batches((pixels for _, pixels in read), encoder)
    return features


def _sample_indices(n: int, n_max: int) -> NDArray[np.int64]:
    """Return a sorted, bounded sample of n indices, the same every time."""
    return np.sort(np.random.default_rng(0).permutation(n)[:n_max])


def _name_examples(files: Sequence[str]) -> str:
    return f": {', '.join(files[:3])}{', …' if len(files) > 3 else ''}" if files else ""


def render_projection_lines(document: Mapping[str, Any]) -> Lines:
    """Yield the sources of the file, and the next command."""
    rows = sum(source["rows"] for source in document["sources"])
    yield TextLine(
        f"  {document['file']}: a projection onto {document['dimensions']} dimensions of {document['encoder']}, from "
        f"{rows} patches of {len(document['sources'])} sources; SHA-256 {document['digest'][:16]}"
    )
    if skipped := document["excluded"]:
        yield TextLine(f"  {len(skipped)} other files were skipped{_name_examples(skipped)}", "yellow")
    yield TextLine(f"give the file to all sites; next: {document['next'][0]}")
