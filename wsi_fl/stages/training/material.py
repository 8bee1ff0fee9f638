"""What a site's models learn from: its training rows as units of privacy, what is held out, and canaries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wsi_fl.federation.site import Site
from wsi_fl.learning.bags import with_drawn_patches
from wsi_fl.learning.canaries import Canaries, canaries, tossed
from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.units import Units, rows_alone, whole_patients
from wsi_fl.learning.validation import require_names, with_validation
from wsi_fl.runs.site import SiteFolder
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.party import Party
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import Bags, UsageError


def learned_from(party: Party, name: str) -> tuple[Examples, Examples | None]:
    """Return (the examples that a site's models learn from, those it holds out for validation)."""
    if party.method.learns_from != "everybody":
        return _validated(party, party.data(name), _training(party, name))
    return joined([_of_site(_training(party, one), one) for one in party.names]), None


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


def agreed_canaries(folder: SiteFolder, pipeline: Pipeline, data: Data) -> Canaries | None:
    """Return the canaries that the run remembers, or freshly tossed ones; None where none are planted."""
    if not pipeline.audit.canaries:
        return None
    if known := folder.kept("canaries"):
        seed, included = int(known["seed"]), np.array([coin == "1" for coin in known["coins"]])
    else:
        seed, included = tossed(pipeline.audit.canaries)
    return canaries(seed, included, data.shape, len(data.classes))


def remember_canaries(site: Site) -> None:
    """Notes in the run what `agreed_canaries` tossed, before anything is trained."""
    found = site.canaries
    if found is None or site.folder.kept("canaries"):
        return
    coins = "".join("1" if coin else "0" for coin in found.included)
    site.folder.keep("canaries", {"n": len(coins), "seed": str(found.seed), "coins": coins})


def _training(party: Party, name: str) -> Examples:
    """A site's training examples; with `train.max_patches` bags are shown in many choices of their patches."""
    data, most = party.data(name), party.pipeline.train.max_patches
    train = data.examples("train")
    if most is not None and isinstance(data.shape, Bags):
        return with_drawn_patches(train, most)
    return train


def _validated(party: Party, data: Data, train: Examples) -> tuple[Examples, Examples | None]:
    """(for training, for validation): the store's own split, else a share of the training patients.

    A method without a proxy has nothing to choose, and learns from every row that is for training.

    Raises:
        UsageError: for a share that would leave nothing to learn from, for rows without a patient where a share is
            drawn and noise is added, and for rows that are missing where they are asked for.
    """
    pipeline = party.pipeline
    if "proxy" not in party.method.learners:
        return train, None
    validation = data.examples("val")
    if not len(validation) and pipeline.train.val_fraction:
        fraction = pipeline.train.val_fraction
        if pipeline.privacy.noisy:
            require_names(train.patient, data.site)
        learned, validation = with_validation(train, fraction, pipeline.train.seed)
        if len(train) and not len(learned):
            raise UsageError(
                f"train.val_fraction = {fraction:g} holds out all of a site's training patients; lower it"
            )
        train = learned
    known = pipeline.train.tune and (pipeline.privacy.noisy or party.method.once)
    if pipeline.predict.with_ == "stack" and not known and not len(validation):
        raise UsageError(
            "predict.with = 'stack' needs rows that no model has learned by heart; set train.tune=true where proxies "
            "are under privacy, or train.val_fraction=0.15, or tile with a validation split"
        )
    return train, validation if len(validation) else None
