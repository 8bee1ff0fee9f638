"""What a site's models learn from: its training rows as units of privacy, what is held out, and canaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.methods import Method
from wsi_fl.federation.site import Site
from wsi_fl.learning.canaries import Canaries, canaries, tossed
from wsi_fl.learning.examples import IN_MEMORY_BYTES, Examples, Restain, in_stains, joined
from wsi_fl.learning.units import Units, rows_alone, whole_patients
from wsi_fl.learning.validation import require_names, with_validation
from wsi_fl.runs import SiteFolder
from wsi_fl.stages.site.data import Store, open_data, shape_of, split_of
from wsi_fl.stages.site.stains import stains_of
from wsi_fl.stores.features import FeatureStore
from wsi_fl.stores.patch_features import PatchFeatures
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import UsageError

if TYPE_CHECKING:
    from wsi_fl.slides.stains.methods import AnyStain


def learned_from(
    study: Study, pipeline: Pipeline, method: Method, name: str
) -> tuple[Examples, Examples | None]:
    """(the examples that a site's models learn from, those it holds out for validation)."""
    if not method.pooled:
        store = open_data(study, name, pipeline)
        return _validated(method, pipeline, store, _training(study, pipeline, name))
    pool = [site.name for site in study.sites(pipeline)]
    return joined([_of_site(_training(study, pipeline, one), one) for one in pool]), None


def _of_site(examples: Examples, site: str) -> Examples:
    """Patients of different sites stay apart where their names agree."""
    named = [f"{site}/{name}" if name else "" for name in examples.patient.tolist()]
    return replace(examples, patient=np.array(named, np.str_))


def units_of(pipeline: Pipeline, train: Examples, site: str) -> Units:
    """What privacy counts at a site; without it batches are of rows."""
    privacy = pipeline.privacy
    if not privacy.enabled or privacy.unit == "row":
        return rows_alone(len(train))
    return whole_patients(train, privacy.max_rows, site)


def agreed_canaries(
    folder: SiteFolder, pipeline: Pipeline, store: Store, n_stains: int = 1
) -> Canaries | None:
    """The canaries that the run remembers, or freshly tossed ones; None where none are planted."""
    if not pipeline.audit.canaries:
        return None
    known = folder.canaries()
    seed, included = (
        (int(known["seed"]), np.array([coin == "1" for coin in known["coins"]]))
        if known
        else tossed(pipeline.audit.canaries)
    )
    return canaries(seed, included, shape_of(pipeline, store), len(store.meta.classes), n_stains)


def remember_canaries(site: Site) -> None:
    """Notes in the run what `agreed_canaries` tossed, before anything is trained."""
    found = site.canaries
    if found is None or site.folder.canaries():
        return
    coins = "".join("1" if coin else "0" for coin in found.included)
    site.folder.remember_canaries({"n": len(coins), "seed": str(found.seed), "coins": coins})


def _training(study: Study, pipeline: Pipeline, name: str) -> Examples:
    """A site's training examples, with `stain.exchange` in all stains."""
    store = open_data(study, name, pipeline)
    train = split_of(pipeline, store, "train")
    if not pipeline.stain.exchange or isinstance(store, FeatureStore):
        return train
    return exchanged(study, pipeline, store, train)


def _validated(
    method: Method, pipeline: Pipeline, store: Store, train: Examples
) -> tuple[Examples, Examples | None]:
    """(for training, for validation): the store's own split, else a share of the training patients.

    A method without a proxy has nothing to choose, and learns from every row that is for training.

    Raises:
        UsageError: for a share that would leave nothing to learn from, for rows without a patient where a share is
            drawn and noise is added, and for rows that are missing where they are asked for.
    """
    if method.travels != "proxy":
        return train, None
    validation = split_of(pipeline, store, "val")
    if not len(validation) and pipeline.train.val_fraction:
        fraction = pipeline.train.val_fraction
        if pipeline.privacy.noisy:
            require_names(train.patient, store.meta.site)
        learned, validation = with_validation(train, fraction, pipeline.train.seed)
        if len(train) and not len(learned):
            raise UsageError(
                f"train.val_fraction = {fraction:g} holds out all of a site's training patients; lower it"
            )
        train = learned
    asked = {"train.listen": pipeline.train.listen, "predict.with": pipeline.predict.with_}
    judging = next((key for key, value in asked.items() if value == "competence"), None)
    if judging and not pipeline.privacy.noisy and not len(validation):
        raise UsageError(
            f"{judging} = 'competence' without noise needs rows that no proxy has learned from; set "
            "train.val_fraction=0.15, or tile with a validation split"
        )
    return train, validation if len(validation) else None


def exchanged(
    study: Study, pipeline: Pipeline, store: PatchStore | PatchFeatures, train: Examples
) -> Examples:
    """The training examples of a site, each of which can be shown in the stain of every site of the pipeline.

    Maps go from the site's own released stain to another's, so that what an example becomes depends on it and on
    releases alone.

    Raises:
        UsageError, WsiFlError: when stains are missing, the images have none, or features were made for other stains.
    """
    stains, own = stains_of(study, pipeline), store.meta.site
    others = [name for name in stains if name != own]
    if isinstance(store, PatchFeatures):
        if any(store.stains.get(name) != released.digest for name, released in stains.items()) and others:
            raise UsageError(
                f"site {own}: its features are not in the stains that stains/ holds; run "
                f"`wsi-fl features --site {own} --set stain.exchange=true`"
            )
        return in_stains(train, _variants(store, others, len(train)))
    if store.channels != 3:
        raise UsageError(f"site {own}: its store holds grey images; leave out stain.exchange")
    mine = stains[own].stain
    return in_stains(train, [partial(_moved, mine, stains[name].stain) for name in others])


def _variants(store: PatchFeatures, others: Sequence[str], n_train: int) -> list[Restain]:
    """Training rows in each other stain, from memory where all of them fit."""
    reads: list[Callable[[NDArray[np.int64]], Any]] = [partial(store.variant, name) for name in others]
    if n_train * store.n_features * 4 * len(others) <= IN_MEMORY_BYTES:
        everything = np.arange(n_train)
        reads = [read(everything).__getitem__ for read in reads]
    return [partial(_variant, read) for read in reads]


def _variant(read: Callable[[NDArray[np.int64]], Any], rows: NDArray[np.int64], features: Any) -> Any:
    del features
    return read(rows)


def _moved(own: AnyStain, other: AnyStain, rows: NDArray[np.int64], pixels: Any) -> Any:
    from wsi_fl.slides.stains.methods import restained

    del rows
    return restained(pixels, own, other)
