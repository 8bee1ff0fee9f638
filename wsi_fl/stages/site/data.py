"""What a site's store holds for a run, as `train.data` says: patches, their features, or mosaics of whole slides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wsi_fl.learning.bags import allowed_classes, bag_examples
from wsi_fl.learning.examples import IN_MEMORY_BYTES, Examples, in_memory, resized
from wsi_fl.runs import SiteFolder
from wsi_fl.stages.site.slide_pixels import SlidePixels
from wsi_fl.stores.features import FeatureMeta, FeatureStore
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patch_features import PatchFeatures
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, SiteFile
from wsi_fl.types import BagTable, GridSpec, PatchTable, UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.models import Bags, Shape

_HASHED = 4096
"""Rows of features hashed at a time."""

Store = PatchStore | FeatureStore | PatchFeatures
Table = PatchTable | BagTable


def of_slides(pipeline: Pipeline) -> bool:
    """Whether an example is a whole slide."""
    return pipeline.train.data == "mosaics"


def of_images(pipeline: Pipeline) -> bool:
    """Whether models see pixels."""
    return pipeline.train.data == "patches"


def example_word(pipeline: Pipeline) -> str:
    """What examples are called."""
    return "slides" if of_slides(pipeline) else "patches"


def store_path(study: Study, site: str, pipeline: Pipeline) -> Path:
    places = {"patches": study.store, "features": study.features, "mosaics": study.mosaic}
    return places[pipeline.train.data](site)


def open_data(study: Study, site: str, pipeline: Pipeline) -> Store:
    """The store that a pipeline trains on; says which command makes a missing one."""
    doors: dict[str, Callable[[Study, str], Store]] = {
        "patches": open_store,
        "features": open_features,
        "mosaics": open_mosaic,
    }
    return doors[pipeline.train.data](study, site)


def open_store(study: Study, site: str) -> PatchStore:
    """The patch store of a site."""
    return PatchStore(_there(study, site, study.store(site), "tile"), SlidePixels(study, site))


def open_mosaic(study: Study, site: str) -> FeatureStore:
    """The feature store of a site's mosaics."""
    return FeatureStore(_there(study, site, study.mosaic(site), "mosaic"))


def open_features(study: Study, site: str) -> PatchFeatures:
    """The features of a site's patches."""
    return PatchFeatures(_there(study, site, study.features(site), "features"))


def require_current(study: Study, site: str, store: Store) -> None:
    """Refuses features of other patches than the site's patch store holds, where that is still there.

    Raises:
        UsageError: when slides, positions, labels or splits differ.
    """
    if not isinstance(store, PatchFeatures) or not study.store(site).exists():
        return
    with open_store(study, site) as patches:
        meta, table = patches.meta, patches.table
    same_grid = (meta.spec, meta.classes) == (store.meta.spec, store.meta.classes)
    columns = ("slide", "xy_l0", "label", "patient", "split")
    if not same_grid or any(
        not np.array_equal(getattr(table, name), getattr(store.table, name)) for name in columns
    ):
        variants = " --set stain.exchange=true" if store.stains else ""
        raise UsageError(
            f"{study.relative(store.path)}: features of patches as they were before the site was tiled again; run "
            f"`wsi-fl features --site {site}{variants}`"
        )


def is_synthetic(study: Study, site: str, store: Store) -> bool:
    """Return whether what a store holds was drawn by a generator, or computed from patches that were.

    Features of early versions do not say so; then the site's patch store is asked, where it is still there.
    """
    if isinstance(store, FeatureStore):  # mosaics are of slides
        return False
    if store.meta.generator is None and isinstance(store, PatchFeatures) and study.store(site).exists():
        with open_store(study, site) as patches:
            return patches.meta.generator is not None
    return store.meta.generator is not None


def _there(study: Study, site: str, path: Path, command: str) -> Path:
    if not path.exists():
        raise WsiFlError(
            f"{study.relative(path)}: no store of site {site} yet; run `wsi-fl {command} --site {site}`"
        )
    return path


def store_digest(store: Store) -> str:
    """SHA-256 over what a run used: patches or features, labels and splits. It stays with the site."""
    table = store.table
    known = table.tumor_type if isinstance(table, BagTable) else table.xy_l0
    digest = hashlib.sha256()
    for column in (known, table.label, table.slide, table.patient, table.split):
        digest.update(np.ascontiguousarray(column).tobytes())
    if isinstance(store, FeatureStore):
        for k in range(len(store)):
            bag = store.bag(k)
            digest.update(bag.features.tobytes() + bag.xy_l0.tobytes())
    if isinstance(store, PatchFeatures):
        digest.update(store.encoder.encode())
        for first in range(0, len(store), _HASHED):
            digest.update(store.read(np.arange(first, min(first + _HASHED, len(store)))).tobytes())
    return digest.hexdigest()


def remember(folder: SiteFolder, store: Store) -> None:
    """Notes in a run which store a site works on, and what its models must know without it.

    Raises:
        UsageError: when it is not the store the run began with.
    """
    folder.remember_store(store_digest(store), _facts(store))


def _facts(store: Store) -> dict[str, Any]:
    meta = store.meta
    facts: dict[str, Any] = {"classes": list(meta.classes), "spec": asdict(meta.spec)}
    if isinstance(meta, StoreMeta):
        facts["min_tissue"] = meta.min_tissue
    if isinstance(store, PatchStore):
        return facts | {"channels": store.channels}
    if isinstance(store, PatchFeatures):
        return facts | {"encoder": store.encoder, "n_features": store.n_features}
    types = {kind: list(classes) for kind, classes in store.meta.tumor_types.items()}
    features = {"encoder": store.meta.encoder, "n_features": store.n_features}
    return facts | features | {"tumor_types": types, "recipe": dict(store.meta.recipe)}


def remembered_patches(study: Study, folder: SiteFolder) -> dict[str, Any]:
    """What the patches were like that a site's models learned from: `classes`, `spec` and, where known, more.

    Empty where an early version began the run, which noted nothing, and the site's store is no longer as it was.
    """
    site, digest = folder.path.name, folder.store_digest()
    facts = folder.store_facts() if digest else {}
    if "spec" in facts or not study.store(site).exists():
        return facts
    with open_store(study, site) as store:
        return _facts(store) if digest in (None, store_digest(store)) else facts


def remembered_mosaics(folder: SiteFolder) -> tuple[FeatureMeta, Bags]:
    """What the mosaics were like that a site's models learned from, and what these see."""
    from wsi_fl.models import Bags

    facts = folder.store_facts()
    types = {kind: tuple(classes) for kind, classes in facts["tumor_types"].items()}
    spec = GridSpec(**facts["spec"])
    recipe = facts.get("recipe", {})
    meta = FeatureMeta(folder.path.name, tuple(facts["classes"]), types, facts["encoder"], spec, recipe)
    return meta, Bags(facts["n_features"])


def input_px(pipeline: Pipeline, store: PatchStore) -> int:
    return pipeline.train.input_px or store.meta.spec.size_px


def shape_of(pipeline: Pipeline, store: Store) -> Shape:
    """What models see of this store."""
    from wsi_fl.models import Bags, Images, Vectors  # and with them torch

    if isinstance(store, FeatureStore):
        return Bags(store.n_features)
    if isinstance(store, PatchFeatures):
        return Vectors(store.n_features)
    return Images(store.channels, input_px(pipeline, store))


def examples_of(
    store: PatchStore, split: str, input_px: int | None, in_memory_bytes: int = IN_MEMORY_BYTES
) -> Examples:
    """The patches of one split, reduced to input_px, in memory where they fit."""
    rows = np.flatnonzero(store.table.split == split)
    table = store.table.take(rows)
    found = Examples(lambda chosen: store.read(rows[chosen]), table.label, table.slide, table.patient)
    return in_memory(resized(found, input_px) if input_px else found, in_memory_bytes)


def bags_of(store: FeatureStore, split: str) -> Examples:
    """The slides of one split, each with the classes that its tumour type may have.

    Raises:
        WsiFlError: when a slide's label is not among them.
    """
    rows = np.flatnonzero(store.table.split == split)
    table = store.table.take(rows)
    meta = store.meta
    allowed = allowed_classes(table.tumor_type, meta.classes, meta.tumor_types)
    for row in np.flatnonzero(~allowed[np.arange(len(table)), table.label])[:1]:
        label, kind = meta.classes[table.label[row]], table.tumor_type[row]
        raise WsiFlError(
            f"{store.path}: slide {table.slide[row]} is labelled {label}, which {kind} does not have in [subtypes]; "
            "correct one of them and run `wsi-fl mosaic` again"
        )
    n_bytes = int(store.sizes[rows].sum()) * store.n_features * np.float32().nbytes
    return bag_examples(
        lambda k: store.bag(int(rows[k])).features,
        table,
        allowed,
        n_features=store.n_features,
        in_memory=n_bytes <= IN_MEMORY_BYTES,
    )


def vectors_of(store: PatchFeatures, split: str, in_memory_bytes: int = IN_MEMORY_BYTES) -> Examples:
    """The features of the patches of one split, in memory where they fit."""
    rows = np.flatnonzero(store.table.split == split)
    table = store.table.take(rows)
    found = Examples(lambda chosen: store.read(rows[chosen]), table.label, table.slide, table.patient)
    return in_memory(found, in_memory_bytes, chunk=_HASHED)


def split_of(pipeline: Pipeline, store: Store, split: str) -> Examples:
    """The examples of one split as the models see them."""
    if isinstance(store, FeatureStore):
        return bags_of(store, split)
    if isinstance(store, PatchFeatures):
        return vectors_of(store, split)
    return examples_of(store, split, input_px(pipeline, store))


def held_out(study: Study, site: str, pipeline: Pipeline) -> Examples:
    """The test examples of a site, read once by a process that trains many sites."""
    path = store_path(study, site, pipeline)
    open_data(study, site, pipeline).close()
    return _held_out(study.root, site, path.stat().st_mtime_ns, pipeline.train.data, pipeline.train.input_px)


@lru_cache(maxsize=512)
def _held_out(root: Path, site: str, written_ns: int, data: str, input_px: int | None) -> Examples:
    del written_ns  # a store made anew is another one
    if data == "mosaics":
        return bags_of(open_mosaic(Study(root), site), "test")
    if data == "features":
        return vectors_of(open_features(Study(root), site), "test")
    store = open_store(Study(root), site)
    return examples_of(store, "test", input_px or store.meta.spec.size_px)


def may_merge(sites: Sequence[SiteFile]) -> bool:
    """Whether one place may read what all sites hold for testing."""
    return all(site.allows("patches") for site in sites)
