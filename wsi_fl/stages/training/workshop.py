"""From configuration and stores to what the rooms need: a site with its examples, canaries, account and models."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, replace
from functools import partial
from sys import maxsize

import numpy as np

from wsi_fl.federation.methods import Method
from wsi_fl.federation.preflight import Brought, Setting
from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.examples import Augment, Examples, augmentation, joined, with_drawn_patches
from wsi_fl.learning.units import Canaries, canaries, tossed
from wsi_fl.learning.validation import LONE, require_names, with_validation
from wsi_fl.models import schema, started_from
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger_file import run_id
from wsi_fl.runs.site import SiteFolder
from wsi_fl.stages.site.account import affordable_rounds, weights_of
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.ledgers import open_account
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import directions_of
from wsi_fl.stages.training.checks import graph_of, versions
from wsi_fl.stages.training.learners import bring_released, learners_of, tune
from wsi_fl.stages.work.job import device_of_rank
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.toml import Section, value_of
from wsi_fl.system.files import ordinary
from wsi_fl.types import UNLABELLED, Bags, UsageError, WsiFlError


def schedule_of(party: RunContext) -> Schedule:
    """Return what the loop needs to know of a pipeline."""
    pipeline, train = party.pipeline, party.pipeline.train
    return Schedule(
        rounds=train.rounds,
        epochs_per_round=train.epochs_per_round,
        batch_size=maxsize if party.method.once else train.batch_size,
        eval_every=train.eval_every,
        seed=train.seed,
        weights=weights_of(pipeline),
        self_weight=pipeline.topology.self_weight,
        make_augment=partial(augmentation, train.augment) if party.kind.of_images else _not_augmented,
        graph=graph_of(party),
        answer=pipeline.predict.with_,
        reset_optimizer=train.optimizer_after_exchange == "reset",
        insecure_seed=pipeline.privacy.insecure_seed,
        colluding=(
            pipeline.privacy.colluding
            if pipeline.privacy.noise == "shared" and party.method.travels is not None
            else None
        ),
        dropouts=pipeline.privacy.dropouts,
    )


def _not_augmented(views: CipherStream) -> Augment | None:
    """Features have no symmetries of their own."""
    del views
    return None


def build_site(party: RunContext, index: int) -> Site:
    """Return a site with its examples, its account and fresh models; see `start_models` for what comes next.

    It opens its own store, and others' test patches only where all allow it. A receiver has what travels alone.
    """
    name, pipeline = party.names[index], party.pipeline
    data, folder, device = party.data(name), party.run.site(name), device_of_rank()
    if folder.store_digest() is None:  # a run that began with them goes on with them
        data.require_current()
    if data.without_answer:
        folder.log(data.without_answer)
    train, validation = learned_from(party, name)
    if not len(train) and not data.receives:
        raise WsiFlError(f"site {name}: its store has no training {party.examples}")
    tests = {} if data.receives else {"own": data.held_out}
    if tests and len(party.members) > 1 and party.may_merge:
        tests["merged"] = party.merged()
    canaries = agreed_canaries(folder, pipeline, data)
    account = open_account(party, index, data, train, canaries.included if canaries else None)
    make = learners_of(party, index, data, device, account.plan, train)
    roles = {role: one for role, one in party.method.learners.items() if role == "proxy" or not data.receives}
    learners = {role: make(role, dp=one.dp, common=one.common) for role, one in roles.items()}
    if party.method.keeps_lone and pipeline.train.alone:
        learners[LONE] = make(LONE, dp=False)
    return Site(
        index=index,
        name=name,
        learners=learners,
        train=train,
        tests={part: examples for part, examples in tests.items() if len(examples)},
        ledger=account.ledger,
        folder=folder,
        device=device,
        plan=account.plan,
        units=account.units,
        n_classes=len(data.classes),
        validation=validation,
        canaries=canaries,
        returning=name in party.run.returning(),
    )


def start_models(party: RunContext, site: Site) -> None:
    """Give a site what its models start from: settings of its own, sums that were released, synthetic samples."""
    tune(party, site)
    if party.method.once:
        from wsi_fl.learning.local import know_rows  # and with it Opacus

        know_rows(site.learners["proxy"], site.train)
    if party.releases:
        bring_released(party, site)
    if buffer := party.method.share("buffer"):
        site.buffer = buffer.stage().agreed_buffer(party, site.index)


def brought(site: Site, party: RunContext) -> Brought:
    """Return what a site brings, for the preflight: nothing but plans and shapes."""
    data, pipeline, travels = party.data(site.name), party.pipeline, party.method.travels
    meta = data.store.meta
    return {
        "site": site.name,
        "run": run_id(site.ledger.run),
        "method": party.name,
        "settings": _settings(pipeline),
        "classes": list(data.classes),
        "size_px": meta.spec.size_px,
        "mpp": meta.spec.mpp,
        **data.inputs(),
        "weights": started_from(site.learners[travels].model)[:16] if travels else "",
        "schema": schema(site.learners[travels].model) if travels else "",
        "sites": party.names,
        "receivers": party.receivers,
        "graph": _graph_digest(party),
        "directions": directions_of(data).digest[:16] if party.method.once else None,
        "buffer": [value_of(pipeline, "replay.variant"), *astuple(site.buffer.shape)]
        if site.buffer
        else None,
        "noise": site.plan.sigma if site.plan and pipeline.privacy.noise == "shared" else None,
        "releases": {name: released.digest[:8] for name, released in party.releases.items()},
        "versions": versions(),
        "affordable": affordable_rounds(site, pipeline.train.rounds),
        "units": site.units.n,
        "sigma": site.plan.sigma if site.plan else 0.0,
    }


_COMPARED = ("privacy", "train", "target", "audit", "topology")
"""The sections whose settings all sites must share, of those that every pipeline has."""
_OWN = ("topology.graph", "train.input_px")
"""Settings that may differ between sites, or whose effect rather than spelling is compared."""


def _settings(pipeline: Pipeline) -> dict[str, Setting]:
    """ "section.key" → value, of all settings that must be the same at every site."""
    values = pipeline.model_dump(by_alias=True)
    joined = [name for name, one in pipeline if isinstance(one, Section) and one.compared]
    found = {f"{name}.{key}": value for name in (*_COMPARED, *joined) for key, value in values[name].items()}
    return {key: value for key, value in found.items() if key not in _OWN}


def _graph_digest(party: RunContext) -> str | None:
    """The name of the graph, or what its file says."""
    graph = party.pipeline.topology.graph
    if graph is None or not graph.endswith(".json"):
        return graph
    return hashlib.sha256(ordinary(party.study.resolve(graph)).read_bytes()).hexdigest()


def learned_from(party: RunContext, name: str) -> tuple[Examples, Examples | None]:
    """Return (the examples that a site's models learn from, those it holds out for validation)."""
    pooled, most = party.method.learns_from == "everybody", party.pipeline.train.max_patches
    stores = [party.data(one) for one in (party.names if pooled else [name])]
    rows = [_training(data, most) for data in stores]
    if not pooled:
        return _validated(party, stores[0], rows[0])
    return joined([_of_site(some, data.site) for some, data in zip(rows, stores, strict=True)]), None


def _of_site(examples: Examples, site: str) -> Examples:
    """Patients of different sites stay apart where their names agree."""
    named = [f"{site}/{name}" if name else "" for name in examples.patient.tolist()]
    return replace(examples, patient=np.array(named, np.str_))


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


def remember_buffer(site: Site) -> None:
    """Note in the run what buffer was drawn, before anything is trained: every round sends the same bytes."""
    if site.buffer is not None and site.folder.buffer() is None:
        site.folder.remember_buffer(site.buffer.values, site.buffer.provenance)


_THINGS = {"model": "its model", "buffer": "a buffer of synthetic samples", "generator": "its generator"}


def leaving_words(site: Site, method: Method) -> str:
    """What leaves a site without differential privacy; empty where nothing does by design."""
    if not method.without_dp:
        return ""
    things = " and ".join(_THINGS[share.content] for share in method.without_dp)
    said = f"{site.name} lets go {things}, without differential privacy"
    if site.buffer is not None and site.buffer.provenance["check"] != "passed":
        said += f"; the check of its generator: {'; '.join(site.buffer.provenance['reasons'])}"
    return said


def _training(data: Data, most: int | None) -> Examples:
    """A site's training examples; with `train.max_patches` bags are shown in many choices of their patches."""
    if not data.receives and data.classes == UNLABELLED:
        raise UsageError(
            f"site {data.site}: its store was made without labels; make it again with them, or write role = 'receiver' "
            f"in sites/{data.site}.toml"
        )
    train = data.examples("train")
    if most is not None and isinstance(data.shape, Bags):
        return with_drawn_patches(train, most)
    return train


def _validated(party: RunContext, data: Data, train: Examples) -> tuple[Examples, Examples | None]:
    """(for training, for validation): the store's own split, else a share of the training patients.

    Where nothing is sent there is nothing to choose, and every row that is for training is learned from.

    Raises:
        UsageError: for a share that would leave nothing to learn from, for rows without a patient where a share is
            drawn and noise is added, and for rows that are missing where they are asked for.
    """
    pipeline = party.pipeline
    if "proxy" not in party.method.learners and not party.method.keeps_lone:
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
    known = pipeline.train.alone or (pipeline.train.tune and pipeline.privacy.noisy) or party.method.once
    if pipeline.predict.with_ == "stack" and not known and not len(validation):
        raise UsageError(
            "predict.with = 'stack' needs a model that is the site's alone, or rows that no model was trained on; set "
            "train.alone=true, or train.val_fraction=0.15, or tile with a validation split"
        )
    return train, validation if len(validation) else None
