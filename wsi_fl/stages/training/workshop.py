"""From configuration and stores to what the rooms need: examples, learners, terms."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, replace
from functools import partial
from sys import maxsize

import torch

from wsi_fl.federation.methods import MakeLearner
from wsi_fl.federation.preflight import Brought, Setting
from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.examples import Augment, Examples
from wsi_fl.learning.local import DPSettings, Learner
from wsi_fl.learning.transforms import augmentation
from wsi_fl.learning.tuning import Way
from wsi_fl.models import build, schema
from wsi_fl.privacy.book import run_id
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import (
    affordable_rounds,
    agreed_plan,
    guarantee_of,
    require_budget,
    spends,
    terms_of,
    weights_of,
)
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.ledgers import open_ledger
from wsi_fl.stages.site.once import check_own, once_ledger
from wsi_fl.stages.site.party import Party
from wsi_fl.stages.site.sums import RUN as SUMS
from wsi_fl.stages.training.buffers import agreed_buffer
from wsi_fl.stages.training.checks import graph_of, versions
from wsi_fl.stages.training.material import agreed_canaries, learned_from, units_of
from wsi_fl.stages.training.released import bring_released
from wsi_fl.stages.training.tuning import Tuned, learner_of, tuned_for
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.system.files import ordinary
from wsi_fl.types import Images, WsiFlError

_PRIVATE_SEED_STEP = 1000
"""Keeps the private models' initialisation apart from the proxies', which all sites share."""


def schedule_of(party: Party) -> Schedule:
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
        train_after_leaving=train.after_budget == "train",
        insecure_seed=pipeline.privacy.insecure_seed,
        colluding=(
            pipeline.privacy.colluding
            if pipeline.privacy.noise == "shared" and party.method.travels is not None
            else None
        ),
    )


def _not_augmented(views: CipherStream) -> Augment | None:
    """Features have no symmetries of their own."""
    del views
    return None


def build_model(
    site: SiteFile, pipeline: Pipeline, data: Data, role: str, index: int, *, common: bool = False
) -> torch.nn.Module:
    """Return a fresh model: the site's own kind and seed for "private", everybody's for "proxy" or if `common`."""
    private = role == "private" and not common
    return build(
        architecture(site, pipeline, role, common=common),
        n_classes=len(data.classes),
        shape=data.shape,
        seed=pipeline.train.seed + (_PRIVATE_SEED_STEP * (index + 1) if private else 0),
    )


def architecture(site: SiteFile, pipeline: Pipeline, role: str, *, common: bool = False) -> str:
    """The name of the model that a role has at a site."""
    if role != "private":
        return pipeline.model.proxy
    return pipeline.model.private if common else (site.private_model or pipeline.model.private)


def make_learners(
    party: Party, index: int, device: torch.device, planned: PrivacyPlan | None, train: Examples
) -> tuple[MakeLearner, list[Tuned]]:
    """Build the learners a method asks for, with the site's noise where they are under differential privacy.

    Args:
        train: what they will learn from.

    Returns:
        What builds a learner, and a list to which it adds the settings that it chose for one.
    """
    found: list[Tuned] = []
    site, pipeline = party.sites[index], party.pipeline
    data = party.data(site.name)

    def make(role: str, *, dp: bool, common: bool = False) -> Learner:
        model, seen = build_model(site, pipeline, data, role, index, common=common), data.shape
        somebodys = architecture(site, pipeline, role, common=common).startswith("timm:")
        settings = None
        if dp and planned is not None:
            settings = DPSettings(planned.sigma, planned.clip, planned.batch_size, planned.unit)
            if somebodys and isinstance(seen, Images):
                shape = (seen.channels, seen.size_px, seen.size_px)
                engine = check_per_example_gradients(model, shape, len(data.classes))
                settings = replace(settings, engine=engine)
        train_keys, n_classes = pipeline.train, len(data.classes)
        if settings is not None:
            return Learner(
                model,
                lr=train_keys.lr,
                weight_decay=train_keys.weight_decay,
                device=device,
                dp=settings,
                task=data.task,
            )
        way = Way(train_keys.lr, train_keys.weight_decay, train_keys.balance)
        if role == "private" and train_keys.tune and party.method.travels != "private":
            name = architecture(site, pipeline, role, common=common)
            found.append(tuned_for(party, model, name, train, n_classes, device))
            way = found[-1].way or way
        learner = learner_of(model, way, train, n_classes, device)
        if found and role == "private":
            found[-1].give(learner)
        return learner

    return make, found


def assemble(party: Party, index: int) -> Site:
    """Return one site ready for the loop; opens its own store, and others' test patches only where all allow it."""
    site, pipeline, study = party.sites[index], party.pipeline, party.study
    data, folder, device = party.data(site.name), party.run.site(site.name), device_of_rank()
    if folder.store_digest() is None:  # a run that began with them goes on with them
        data.require_current()
    if data.without_answer:
        folder.log(data.without_answer)
    train, validation = learned_from(party, site.name)
    if not len(train):
        raise WsiFlError(f"site {site.name}: its store has no training {data.word}")
    tests = {"own": data.held_out}
    if len(party.sites) > 1 and party.may_merge:
        tests["merged"] = party.merged()
    # every synthetic patch rests on all real ones: what protects one of them protects nobody
    worth = "none" if data.is_synthetic() else guarantee_of(party.method, pipeline)
    terms = terms_of(site, pipeline, worth)
    if spends(pipeline):
        require_budget(site)
    counted = included(party, site)
    ledger = open_ledger(
        study,
        site,
        _identity(party.run),
        terms,
        counted,
        {
            "promise": study.promise(site.name),
            "agreement": party.run.agreement,
            "approved": party.run.approved,
        },
    )
    canaries = agreed_canaries(folder, pipeline, data)
    units = units_of(pipeline, train, site.name)
    if canaries is not None:
        units = units.with_canaries(canaries.included)
    planned = (
        None
        if party.by_files  # released before
        else agreed_plan(folder, site, pipeline, units.n, ledger, once=party.method.once)
    )
    make, tuned = make_learners(party, index, device, planned, train)
    learners = party.method.prepare(make)
    if party.releases:
        bring_released(party, site.name, learners)
    made = Site(
        index=index,
        name=site.name,
        learners=learners,
        train=train,
        tests={name: examples for name, examples in tests.items() if len(examples)},
        ledger=ledger,
        folder=folder,
        device=device,
        plan=planned,
        units=units,
        n_classes=len(data.classes),
        validation=validation,
        canaries=canaries,
        buffer=agreed_buffer(party, index),
        returning=site.name in party.run.returning(),
    )
    if tuned:
        made.held_out, made.tuned = tuned[-1].held_out, tuned[-1].facts
    return made


def included(party: Party, site: SiteFile) -> tuple[str, ...]:
    """Return what else the site's ε of a run counts: the release of its sums, where it is used."""
    study, name = party.study, site.name
    if name not in party.releases:
        return ()
    ledger = once_ledger(study, site, party.pipeline, SUMS)
    check_own(ledger, party.releases[name].digest, study.relative(study.release(name)))
    return (SUMS,) if party.pipeline.privacy.enabled else ()


def _identity(run: RunFolder) -> str:
    """Its name, for people, and its id: names come again and folders are renamed, but what was spent stays spent."""
    return f"{run.name} {run.id}" if run.id else run.name


def brought(site: Site, party: Party) -> Brought:
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
        "schema": schema(site.learners[travels].model) if travels else "",
        "sites": party.names,
        "graph": _graph_digest(party),
        "buffer": [pipeline.replay.variant, *astuple(site.buffer.shape)] if site.buffer else None,
        "noise": site.plan.sigma if site.plan and pipeline.privacy.noise == "shared" else None,
        "releases": {name: released.digest[:8] for name, released in party.releases.items()},
        "versions": versions(),
        "affordable": affordable_rounds(site, pipeline.train.rounds),
    }


_COMPARED = ("privacy", "train", "target", "audit", "topology", "replay")
"""The sections of a pipeline whose settings all sites must share."""
_OWN = ("topology.graph", "train.input_px")
"""Settings that may differ between sites, or whose effect rather than spelling is compared."""


def _settings(pipeline: Pipeline) -> dict[str, Setting]:
    """ "section.key" → value, of all settings that must be the same at every site."""
    values = pipeline.model_dump(by_alias=True)
    found = {f"{section}.{key}": value for section in _COMPARED for key, value in values[section].items()}
    return {key: value for key, value in found.items() if key not in _OWN}


def _graph_digest(party: Party) -> str | None:
    """The name of the graph, or what its file says."""
    graph = party.pipeline.topology.graph
    if graph is None or not graph.endswith(".json"):
        return graph
    return hashlib.sha256(ordinary(party.study.resolve(graph)).read_bytes()).hexdigest()
