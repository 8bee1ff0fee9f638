"""`wsi-fl projection`: write a projection for class statistics, computed from public reference slides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

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
from wsi_fl.oneshot.public_features import MAX_PATCHES, PublicFeatures, combine_digests, read_public_features
from wsi_fl.privacy.accounting import find_sigma
from wsi_fl.slides.patching.slide_plan import plan_slide
from wsi_fl.slides.reading.formats import is_slide_folder
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.stages.prepare.feature_columns import TABLE_SUFFIXES
from wsi_fl.stages.prepare.import_export import ImportFacts
from wsi_fl.stages.prepare.tile_plans import build_grid_spec, build_plan_params
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.stages.runtime.hints import join_commands, next_command
from wsi_fl.stages.site.encoders import list_study_encoders, load_same_encoder
from wsi_fl.stages.site.public_sources import SourceCheck, sample_indices
from wsi_fl.stores.foreign_formats import LAYOUTS
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.file_names import drop_companions
from wsi_fl.system.files import file_sha256
from wsi_fl.system.machine import n_cores
from wsi_fl.types import SlideRecord, UsageError, WsiFlError, encoder_differences, has_weights_digest

_T = TypeVar("_T")
_TOOLS_HINT = f"; for features of another tool name it, --format {' or '.join(LAYOUTS)}"


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
    form: str | None = None,
    facts: ImportFacts | None = None,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    n_dimensions: int | None = None,
    statistics: ExpectedStatistics | None = None,
    mpp: float | None = None,
    public: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Compute a projection from public reference slides; return the `--json` document.

    The encoder is that of the features. It is loaded for slides and pictures alone.

    Args:
        sources: slides or pictures, cut by the settings of `[tile]`, or feature stores, or folders of these; other
            files in folders are skipped. Or tables of features, or another tool's files or folders.
        out: the file to write.
        form: the other tool, a key of LAYOUTS.
        facts: the encoder of features, where their files lack it.
        n_dimensions: number of dimensions; None for 32, or the number that suits the planned statistics.
        statistics: the planned statistics, if known.
        mpp: µm per pixel of sources without a resolution.
        public: whether the user declares all sources public; see `SourceCheck`.

    Raises:
        UsageError: when a source belongs to a site, encoders differ, or all sources have too few patches.
        WsiFlError: when a named source cannot be read, or there is none.
    """
    pipeline = study.load_pipeline(study.pipeline_name(pipeline_name), overrides)
    check = SourceCheck(study, public)
    reader = _SourceReader(study, pipeline, sources, form, facts or ImportFacts(), mpp, check)
    parts, skipped = read_sources(sources, form, check, reader.read_source, watcher or SilentProgress())
    if not parts:
        raise WsiFlError(f"--from: no slide, picture or feature store{name_examples(skipped)}{_TOOLS_HINT}")
    skipped += [name for part in parts for name in part.excluded]
    encoder = _require_one_encoder(parts, list_study_encoders(study, pipeline))
    x = np.concatenate([part.features for part in parts])
    if n_dimensions is None and statistics is not None:
        n_dimensions = choose_n_components(x, statistics.n_examples, statistics.noise_variance())
    origin = ProjectionOrigin(encoder=encoder, sources=[part.source for part in parts])
    projection = fit_projection(x, origin, n_dimensions or N_PUBLIC)
    write_projection(out, projection)
    file = study.relative_path(out.resolve())
    real_sites = [name for name in study.site_names() if _is_real(study, name)]
    step = f"statistics --site {real_sites[0]}" if len(real_sites) == 1 else "train --method oneshot"
    command = next_command(step, pipeline_name, overrides, [f"model.projection={file}"])
    return {
        "file": file,
        "digest": projection.digest,
        "dimensions": projection.n_components,
        "encoder": encoder,
        "sources": [source.model_dump() for source in origin.sources],
        "slides": sum(part.n_slides for part in parts),
        "excluded": skipped,
        "next": [command],
    }


def read_sources(
    sources: Sequence[Path], form: str | None, check: SourceCheck, read: Callable[[Path], _T], progress: Watcher
) -> tuple[list[_T], list[str]]:
    """Return what a function reads of each source, and the names of unreadable files in named folders.

    No source is read before all are found public; another tool's files, of a `form`, are checked by the function.
    """
    results, unreadable, files = list[_T](), list[str](), _list_files(sources, form)
    for path in files if form is None else ():
        try:
            check.require_public(path)
        except WsiFlError as error:
            if isinstance(error, UsageError):  # an unreadable store is named or skipped below
                raise
        progress.update(path.name, 0, 1)
    for path in files:
        try:
            results.append(read(path))
        except WsiFlError as error:
            if path in sources or isinstance(error, UsageError):
                raise
            unreadable.append(path.name)
        progress.update(path.name, 1, 1)
    return results, unreadable


def _list_files(sources: Sequence[Path], form: str | None) -> list[Path]:
    """Return the named files and slide folders, and those directly in named folders; folders of other tools as such."""
    file_lists = (
        drop_companions(path.iterdir()) if path.is_dir() and not form and not is_slide_folder(path) else [path]
        for path in sources
    )
    return [
        file for files in file_lists for file in files if file.is_file() or file in sources or is_slide_folder(file)
    ]


@dataclass(frozen=True)
class _SourceReader:
    """What the sources of a projection have in common."""

    study: Study
    pipeline: Pipeline
    sources: Sequence[Path]
    form: str | None
    facts: ImportFacts
    mpp: float | None
    check: SourceCheck

    def read_source(self, path: Path) -> PublicFeatures:
        """Return features of some patches of a source; those of slides and pictures are computed."""
        is_named = path in self.sources
        if self.form is not None or (
            is_named and path.suffix in TABLE_SUFFIXES
        ):  # in a folder a table may be of labels
            return read_public_features(path, self.form, self.facts, self.check)
        if path.suffix == ".h5":
            try:
                return read_public_features(path, None, self.facts)
            except WsiFlError as error:
                raise WsiFlError(f"{error}{_TOOLS_HINT}") if is_named else error from None
        _, batches = read_slide_patches(self.study, self.pipeline, path, self.mpp)
        features = encode_batches(batches, self._patch_encoder)
        digest = file_sha256(path) if path.is_file() else _hash_folder(path)
        source = ProjectionSource(name=path.name, rows=len(features), sha256=digest)
        return PublicFeatures(source, features, self._patch_encoder.label)

    @cached_property
    def _patch_encoder(self) -> Encoder:
        try:
            return load_same_encoder(self.study, self.pipeline, list_study_encoders(self.study, self.pipeline))
        except WsiFlError as error:  # no fault of a slide, which would be skipped
            raise UsageError(str(error)) from None


def read_slide_patches(
    study: Study, pipeline: Pipeline, path: Path, mpp: float | None
) -> tuple[NDArray[np.int64], Iterator[NDArray[np.uint8]]]:
    """Return the corners int64[m, 2] of some patches of a public slide or picture, and batches of their pixels.

    Args:
        mpp: µm per pixel of a picture without a resolution.
    """
    record = SlideRecord(path, path.stem, path.stem, "public", "negative", False, mpp_override=mpp)
    reader, spec = pipeline.slides.reader, build_grid_spec(pipeline)
    check_opens_safely(path, mpp, reader)
    plan = plan_slide(record, spec, build_plan_params(study, pipeline), reader=reader)
    corners = plan.xy_l0[sample_indices(len(plan.xy_l0), MAX_PATCHES)]
    read = read_patches(plan.record, corners, spec, threads=n_cores(), reader=reader)
    return corners, (pixels for _, pixels in read)


def _hash_folder(path: Path) -> str:
    """Return a digest of the names and contents of the files of a slide folder."""
    files = (file for file in path.rglob("*") if file.is_file())
    return combine_digests({file.relative_to(path).as_posix(): file_sha256(file) for file in files})


def _require_one_encoder(parts: Sequence[PublicFeatures], study_encoders: Mapping[str, str]) -> str:
    """Return the label of the encoder of all sources; UsageError where sources or the study have another."""
    labels = [(part.source.name, part.encoder) for part in parts]
    name, encoder = max(labels, key=lambda item: has_weights_digest(item[1]))
    for other, label in [*labels, *study_encoders.items()]:
        if any(encoder_differences([encoder, label])):
            raise UsageError(f"{name}: features of {encoder}, but those of {other} are of {label}; take one encoder")
    return encoder


def _is_real(study: Study, site: str) -> bool:
    with suppress(WsiFlError):  # the next command names an unreadable site file
        return study.load_site(site).real
    return False


def name_examples(files: Sequence[str]) -> str:
    """Return the first names after a colon, or nothing."""
    return f": {', '.join(files[:3])}{', …' if len(files) > 3 else ''}" if files else ""


def render_projection_lines(document: Mapping[str, Any]) -> Lines:
    """Yield the sources of the file, and the next command."""
    rows, n_sources = sum(source["rows"] for source in document["sources"]), len(document["sources"])
    origin = f"{rows} patches of {document['slides']} slides in {n_sources} source{'' if n_sources == 1 else 's'}"
    yield TextLine(
        f"  {document['file']}: a projection onto {document['dimensions']} dimensions of {document['encoder']}, from "
        f"{origin} (at most {MAX_PATCHES} of each: a slide, a store, or a folder of one tool); SHA-256 "
        f"{document['digest'][:16]}"
    )
    if skipped := document["excluded"]:
        yield TextLine(f"  {len(skipped)} other files were skipped{name_examples(skipped)}", "yellow")
    yield TextLine(f"give the file to all sites; next: {join_commands(document['next'])}")
