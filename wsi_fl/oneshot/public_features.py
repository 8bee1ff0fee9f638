"""Features of public reference slides for a projection, without labels: from stores, tables and other tools' files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wsi_fl.models.golden import GOLDEN_SLIDE
from wsi_fl.oneshot.projection import ProjectionSource
from wsi_fl.stages.prepare.feature_columns import TABLE_SUFFIXES, names_slides, read_columns
from wsi_fl.stages.prepare.import_export import FeatureFile, ImportFacts, find_feature_files, resolve_encoder
from wsi_fl.stages.site.public_sources import SourceCheck, sample_indices
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.foreign_slides import FileFacts
from wsi_fl.system.file_names import is_missing
from wsi_fl.system.files import file_sha256
from wsi_fl.types import WsiFlError

MAX_PATCHES = 500
"""Patches of one source: a slide, a picture, a store, a table, or a folder of another tool."""


@dataclass(frozen=True)
class PublicFeatures:
    """Features float32[m, d] of some patches of a source, and the label of their encoder.

    Attributes:
        excluded: the files of a folder that could not be read.
        n_slides: slides, or pictures, of the patches; 0 for a table.
    """

    source: ProjectionSource
    features: NDArray[np.float32]
    encoder: str
    excluded: Sequence[str] = ()
    n_slides: int = 1


def read_public_features(
    path: Path, form: str | None, facts: ImportFacts, check: SourceCheck | None = None
) -> PublicFeatures:
    """Read features of some patches of a source, equally many of every slide.

    Args:
        path: a table (`.npz`, `.csv`), a feature store, or a file or folder in another tool's layout.
        form: a key of LAYOUTS, for such a file or folder.
        facts: the encoder, where files lack it.
        check: that sources are public; None where nothing leaves.

    Raises:
        UsageError: for invalid features, an unknown encoder, or features of a hospital's patients.
        WsiFlError: when nothing can be read.
    """
    if path.suffix in TABLE_SUFFIXES:
        return _read_table(path, facts, check)
    return _read_store(path) if form is None else _read_layout(path, form, facts, check)


def _read_table(path: Path, facts: ImportFacts, check: SourceCheck | None) -> PublicFeatures:
    x, _, patient = read_columns(path, needs_labels=False)
    features = x.astype(np.float32)
    if check is not None:
        names_patients = names_slides(path) or not all(is_missing(str(name)) for name in patient.tolist())
        check.require_public_features(path, features, names_patients=names_patients)
    encoder = resolve_encoder([FeatureFile(path, features.shape[1], FileFacts())], facts)
    source = ProjectionSource(name=path.name, rows=min(len(features), MAX_PATCHES), sha256=file_sha256(path))
    return PublicFeatures(source, features[sample_indices(len(features), MAX_PATCHES)], encoder, n_slides=0)


def _read_store(path: Path) -> PublicFeatures:
    with BagStore(path) as store:
        slides = range(min(len(store), MAX_PATCHES))
        n_per_slide = max(1, MAX_PATCHES // len(store))
        bags = (store.read_bag(k).features for k in slides)
        features = np.concatenate([bag[sample_indices(len(bag), n_per_slide)] for bag in bags])
        source = ProjectionSource(name=path.name, rows=len(features), sha256=file_sha256(path))
        return PublicFeatures(source, features, store.meta.encoder, n_slides=len(slides))


def _read_layout(path: Path, form: str, facts: ImportFacts, check: SourceCheck | None) -> PublicFeatures:
    layout, slide_files = find_feature_files(form, path, facts)
    all_paths = [file for slide, file in slide_files.items() if slide != GOLDEN_SLIDE]
    paths = [all_paths[place] for place in sample_indices(len(all_paths), MAX_PATCHES)]
    files, parts, excluded = [], [], []
    for file in paths:
        try:
            foreign = layout.read(file)
        except WsiFlError as error:
            excluded.append(str(error))
            continue
        n_patches, n_features = foreign.features.shape
        if check is not None:
            check.require_public_features(file, foreign.features, names_patients=foreign.facts.names_patients)
        files.append(FeatureFile(file, n_features, foreign.facts))
        parts.append(foreign.features[sample_indices(n_patches, max(1, MAX_PATCHES // len(paths)))])
    if not files:
        raise WsiFlError(f"{path}: none of its files can be read: {excluded[0]}")
    encoder, features = resolve_encoder(files, facts), np.concatenate(parts)
    digest = combine_digests({file.path.name: file_sha256(file.path) for file in files})
    source = ProjectionSource(name=path.name, rows=len(features), sha256=digest)
    return PublicFeatures(source, features, encoder, excluded, len(files))


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of names and digests of files, in the order of the names."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
