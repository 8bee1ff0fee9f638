"""From configuration and stores to what the rooms need: examples, learners, terms."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, replace
from functools import partial

import torch

from wsi_fl.federation.methods import MakeLearner
from wsi_fl.federation.preflight import Brought, Inputs, Setting
from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.examples import Augment, joined
from wsi_fl.learning.local import DPSettings, Learner
from wsi_fl.learning.transforms import augmentation
from wsi_fl.models import Images, build, schema
from wsi_fl.privacy.book import run_id
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.runs import RunFolder
from wsi_fl.stages.site.account import (
    affordable_rounds,
    agreed_plan,
    guarantee_of,
    open_ledger,
    require_budget,
    spends,
    terms_of,
    weights_of,
)
from wsi_fl.stages.site.data import (
    Store,
    example_word,
    held_out,
    is_synthetic,
    may_merge,
    of_images,
    open_data,
    require_current,
    shape_of,
)
from wsi_fl.stages.site.stains import RUN, check_own, stain_ledger, stains_of
from wsi_fl.stages.training.agreed import graph_of, method_for, versions
from wsi_fl.stages.training.buffers import agreed_buffer
from wsi_fl.stages.training.material import agreed_canaries, learned_from, units_of
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.stores.features import FeatureStore
from wsi_fl.stores.patch_features import PatchFeatures
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, SiteFile
from wsi_fl.types import WsiFlError

_PRIVATE_SEED_STEP = 1000
"""Keeps the private models' initialisation apart from the proxies', which all sites share."""


def schedule_of(study: Study, pipeline: Pipeline) -> Schedule:
    train = pipeline.train
    return Schedule(
        rounds=train.rounds,
        epochs_per_round=train.epochs_per_round,
        batch_size=train.batch_size,
        eval_every=train.eval_every,
        seed=train.seed,
        weights=weights_of(pipeline),
        self_weight=pipeline.topology.self_weight,
        make_augment=partial(augmentation, train.augment) if of_images(pipeline) else _not_augmented,
        graph=graph_of(study, pipeline),
        answer=pipeline.predict.with_,
        by_competence=train.listen == "competence",
        reset_optimizer=train.optimizer_after_exchange == "reset",
        train_after_leaving=train.after_budget == "train",
        insecure_seed=pipeline.privacy.insecure_seed,
    )


def _not_augmented(seed: int) -> Augment | None:
    """Features have no symmetries of their own."""
    del seed
    return None


def build_model(
    site: SiteFile, pipeline: Pipeline, store: Store, role: str, index: int, *, common: bool = False
) -> torch.nn.Module:
    """A fresh model: the site's own architecture and seed for "private", everybody's for "proxy" or if `common`."""
    private = role == "private" and not common
    return build(
        architecture(site, pipeline, role, common=common),
        n_classes=len(store.meta.classes),
        shape=shape_of(pipeline, store),
        seed=pipeline.train.seed + (_PRIVATE_SEED_STEP * (index + 1) if private else 0),
    )


def architecture(site: SiteFile, pipeline: Pipeline, role: str, *, common: bool = False) -> str:
    """The name of the model that a role has at a site."""
    if role != "private":
        return pipeline.model.proxy
    return pipeline.model.private if common else (site.private_model or pipeline.model.private)


def make_learners(
    site: SiteFile,
    pipeline: Pipeline,
    store: Store,
    index: int,
    device: torch.device,
    planned: PrivacyPlan | None,
) -> MakeLearner:
    """Builds the learners a method asks for, with the site's noise where they are under differential privacy."""
    grad_mode = pipeline.privacy.grad_mode

    def make(role: str, *, dp: bool, common: bool = False) -> Learner:
        model = build_model(site, pipeline, store, role, index, common=common)
        seen = shape_of(pipeline, store)
        somebodys = architecture(site, pipeline, role, common=common).startswith("timm:")
        settings = None
        if dp and planned is not None:
            settings = DPSettings(
                planned.sigma, planned.clip, planned.batch_size, grad_mode, unit=planned.unit
            )
            if somebodys and isinstance(seen, Images):
                shape = (seen.channels, seen.size_px, seen.size_px)
                modes = check_per_example_gradients(model, shape, len(store.meta.classes), grad_mode)
                settings = replace(settings, modes=modes)
        return Learner(
            model,
            lr=pipeline.train.lr,
            weight_decay=pipeline.train.weight_decay,
            device=device,
            dp=settings,
        )

    return make


def assemble(study: Study, pipeline: Pipeline, method_name: str, run: RunFolder, index: int) -> Site:
    """One site ready for the loop; opens its own store, and others' test patches only where all allow it."""
    sites = study.sites(pipeline)
    site, method = sites[index], method_for(method_name, pipeline)
    store = open_data(study, site.name, pipeline)
    folder = run.site(site.name)
    if folder.store_digest() is None:  # a run that began with them goes on with them
        require_current(study, site.name, store)
    device = device_of_rank()
    train, validation = learned_from(study, pipeline, method, site.name)
    if not len(train):
        raise WsiFlError(f"site {site.name}: its store has no training {example_word(pipeline)}")
    tests = {"own": held_out(study, site.name, pipeline)}
    if len(sites) > 1 and may_merge(sites):
        tests["merged"] = joined([held_out(study, other.name, pipeline) for other in sites])
    # every synthetic patch rests on all real ones: what protects one of them protects nobody
    worth = "none" if is_synthetic(study, site.name, store) else guarantee_of(method, pipeline)
    terms = terms_of(site, pipeline, worth)
    if spends(pipeline):
        require_budget(site)
    included = _included(study, site, pipeline)
    ledger = open_ledger(study, site, _identity(run), terms, included, promise=study.promise(site.name))
    canaries = agreed_canaries(folder, pipeline, store, train.n_stains)
    units = units_of(pipeline, train, site.name)
    if canaries is not None:
        units = units.with_canaries(canaries.included)
    planned = agreed_plan(folder, site, pipeline, units.n, ledger)
    make = make_learners(site, pipeline, store, index, device, planned)
    buffer = None
    if isinstance(store, PatchStore):
        buffer = agreed_buffer(study, pipeline, method, store, folder, index=index)
    return Site(
        index=index,
        name=site.name,
        learners=method.prepare(make),
        train=train,
        tests={name: examples for name, examples in tests.items() if len(examples)},
        ledger=ledger,
        folder=folder,
        device=device,
        plan=planned,
        units=units,
        validation=validation,
        canaries=canaries,
        buffer=buffer,
        returning=site.name in run.returning(),
    )


def _included(study: Study, site: SiteFile, pipeline: Pipeline) -> tuple[str, ...]:
    """What else the site's ε of a run counts: with `stain.exchange` the release of its stain."""
    if not pipeline.stain.exchange:
        return ()
    path = study.relative(study.stain(site.name))
    released = stains_of(study, pipeline)[site.name]
    check_own(stain_ledger(study, site, pipeline), released, path)
    return (RUN,) if pipeline.privacy.enabled else ()


def _identity(run: RunFolder) -> str:
    """Its name, for people, and its id: names come again and folders are renamed, but what was spent stays spent."""
    return f"{run.name} {run.id}" if run.id else run.name


def brought(site: Site, study: Study, pipeline: Pipeline, method_name: str) -> Brought:
    """What a site brings, for the preflight: nothing but plans and shapes."""
    store = open_data(study, site.name, pipeline)
    travels = method_for(method_name, pipeline).travels
    return {
        "site": site.name,
        "run": run_id(site.ledger.run),
        "method": method_name,
        "settings": _settings(pipeline),
        "classes": list(store.meta.classes),
        "size_px": store.meta.spec.size_px,
        "mpp": store.meta.spec.mpp,
        **_inputs(store, pipeline),
        "schema": schema(site.learners[travels].model) if travels else "",
        "sites": [one.name for one in study.sites(pipeline)],
        "graph": _graph_digest(study, pipeline),
        "buffer": [pipeline.replay.variant, *astuple(site.buffer.shape)] if site.buffer else None,
        "stains": _stain_digests(study, pipeline),
        "versions": versions(),
        "affordable": affordable_rounds(site, pipeline.train.rounds),
    }


_COMPARED = ("privacy", "train", "audit", "stain", "topology", "replay")
"""The sections of a pipeline whose settings all sites must share."""
_OWN = ("privacy.grad_mode", "topology.graph", "train.input_px")
"""Those of their settings that sites may have otherwise, or that are compared by what they come to."""


def _settings(pipeline: Pipeline) -> dict[str, Setting]:
    """ "section.key" → value, of all settings that must be the same at every site."""
    values = pipeline.model_dump(by_alias=True)
    found = {f"{section}.{key}": value for section in _COMPARED for key, value in values[section].items()}
    return {key: value for key, value in found.items() if key not in _OWN}


def _stain_digests(study: Study, pipeline: Pipeline) -> dict[str, str]:
    """The beginning of each stain in use."""
    if not pipeline.stain.exchange:
        return {}
    return {name: released.digest[:8] for name, released in stains_of(study, pipeline).items()}


def _inputs(store: Store, pipeline: Pipeline) -> Inputs:
    """What only patches have, only their features, or only mosaics."""
    if isinstance(store, PatchFeatures):
        return {"n_features": store.n_features, "encoder": store.encoder}
    if isinstance(store, FeatureStore):
        kinds = {kind: list(classes) for kind, classes in store.meta.tumor_types.items()}
        return {"n_features": store.n_features, "encoder": store.meta.encoder, "tumor_types": kinds}
    return {"channels": store.channels, "input_px": pipeline.train.input_px or store.meta.spec.size_px}


def _graph_digest(study: Study, pipeline: Pipeline) -> str | None:
    """The name of the graph, or what its file says."""
    graph = pipeline.topology.graph
    if graph is None or not graph.endswith(".json"):
        return graph
    return hashlib.sha256(study.resolve(graph).read_bytes()).hexdigest()
