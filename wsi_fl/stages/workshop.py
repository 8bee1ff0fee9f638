"""From configuration and stores to what the rooms need: examples, learners, terms."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wsi_fl import config
from wsi_fl.config import Pipeline
from wsi_fl.federation.graph import from_file
from wsi_fl.federation.methods import METHODS, MakeLearner, Method, Weights
from wsi_fl.federation.site import Schedule, Site
from wsi_fl.federation.topology import TOPOLOGIES, Topology, named
from wsi_fl.files import read_json
from wsi_fl.learning.examples import IN_MEMORY_BYTES, Examples, in_memory, joined, resized
from wsi_fl.learning.local import DPSettings, Learner
from wsi_fl.learning.transforms import augmentation
from wsi_fl.models import build
from wsi_fl.privacy.accounting import Mechanism, epsilon, plan
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.privacy.ledger import Guarantee, PrivacyLedger, Terms
from wsi_fl.runs import RunFolder
from wsi_fl.stages.devices import device_of_rank
from wsi_fl.stages.slide_pixels import SlidePixels
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study import Study
from wsi_fl.types import UsageError, WsiFlError

_PRIVATE_SEED_STEP = 1000
"""Keeps the private models' initialisation apart from the proxies', which all sites share."""


def method_named(name: str) -> Method:
    """A row of METHODS."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]


def open_store(study: Study, site: str) -> PatchStore:
    """The patch store of a site; says which command makes a missing one."""
    path = study.store(site)
    if not path.exists():
        raise WsiFlError(
            f"{study.relative(path)}: no store of site {site} yet; run `wsi-fl tile --site {site}`"
        )
    return PatchStore(path, SlidePixels(study, site))


def store_digest(store: PatchStore) -> str:
    """SHA-256 over the columns of a store: which patches, labels and splits a run used. It stays with the site."""
    table = store.table
    digest = hashlib.sha256()
    for column in (table.xy_l0, table.label, table.slide, table.patient, table.split):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def examples_of(
    store: PatchStore, split: str, input_px: int | None, in_memory_bytes: int = IN_MEMORY_BYTES
) -> Examples:
    """The patches of one split, reduced to input_px, in memory where they fit."""
    rows = np.flatnonzero(store.table.split == split)
    table = store.table.take(rows)
    found = Examples(lambda chosen: store.read(rows[chosen]), table.label, table.slide, table.patient)
    return in_memory(resized(found, input_px) if input_px else found, in_memory_bytes)


def held_out(study: Study, site: str, size_px: int) -> Examples:
    """The test patches of a site, read once by a process that trains many sites."""
    path = study.store(site)
    open_store(study, site).close()
    return _held_out(study.root, site, path.stat().st_mtime_ns, size_px)


@lru_cache(maxsize=512)
def _held_out(root: Path, site: str, written_ns: int, size_px: int) -> Examples:
    del written_ns  # a store made anew is another one
    return examples_of(open_store(Study(root), site), "test", size_px)


def may_merge(sites: Sequence[config.Site]) -> bool:
    """Whether one place may read all sites' test patches."""
    return all(site.allows("patches") for site in sites)


def weights_of(pipeline: Pipeline) -> Weights:
    """α and β; strict mode trains the proxy on cross-entropy alone."""
    beta = 0.0 if pipeline.privacy.enabled and pipeline.privacy.mode == "strict" else pipeline.train.beta
    return Weights(pipeline.train.alpha, beta)


def guarantee_of(method: Method, pipeline: Pipeline) -> Guarantee:
    """What ε is worth: see `Guarantee`."""
    privacy = pipeline.privacy
    if not privacy.enabled or privacy.sigma == 0 or privacy.insecure_seed is not None:
        return "none"
    return "nominal" if method.learns_from_private and weights_of(pipeline).beta > 0 else "guaranteed"


def graph_of(study: Study, pipeline: Pipeline) -> Topology | None:
    """The graph a pipeline names or points to; None for the method's own."""
    graph = pipeline.topology.graph
    if graph is None:
        return None
    if not graph.endswith(".json"):
        if graph not in TOPOLOGIES:
            raise UsageError(f"unknown graph {graph!r}; known: {', '.join(TOPOLOGIES)}, FILE.json")
        return named(graph, pipeline.train.seed)
    names = [site.name for site in study.sites(pipeline)]
    return from_file(study.resolve(graph), names, pipeline.topology.self_weight)


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
        make_augment=partial(augmentation, train.augment),
        graph=graph_of(study, pipeline),
        reset_optimizer=train.optimizer_after_exchange == "reset",
        train_after_leaving=train.after_budget == "train",
        insecure_seed=pipeline.privacy.insecure_seed,
    )


def round_mechanism(pipeline: Pipeline, n: int) -> Mechanism | None:
    """What one round costs a site with n training rows."""
    if not pipeline.privacy.enabled:
        return None
    return plan(
        n,
        pipeline.train.batch_size,
        pipeline.train.epochs_per_round,
        pipeline.privacy.sigma,
        pipeline.privacy.clip,
    )


def input_px(pipeline: Pipeline, store: PatchStore) -> int:
    return pipeline.train.input_px or store.meta.spec.size_px


def build_model(
    site: config.Site, pipeline: Pipeline, store: PatchStore, role: str, index: int, *, common: bool = False
) -> torch.nn.Module:
    """A fresh model: the site's own architecture and seed for "private", everybody's for "proxy" or if `common`."""
    private = role == "private" and not common
    return build(
        architecture(site, pipeline, role, common=common),
        n_classes=len(store.meta.classes),
        in_channels=store.channels,
        size_px=input_px(pipeline, store),
        seed=pipeline.train.seed + (_PRIVATE_SEED_STEP * (index + 1) if private else 0),
    )


def architecture(site: config.Site, pipeline: Pipeline, role: str, *, common: bool = False) -> str:
    """The name of the model that a role has at a site."""
    if role != "private":
        return pipeline.model.proxy
    return pipeline.model.private if common else (site.private_model or pipeline.model.private)


def make_learners(
    site: config.Site, pipeline: Pipeline, store: PatchStore, index: int, device: torch.device
) -> MakeLearner:
    """Builds the learners a method asks for."""
    privacy = pipeline.privacy

    def make(role: str, *, dp: bool, common: bool = False) -> Learner:
        settings = DPSettings(privacy.sigma, privacy.clip, pipeline.train.batch_size, privacy.grad_mode)
        model = build_model(site, pipeline, store, role, index, common=common)
        size = input_px(pipeline, store)
        if dp and privacy.enabled and architecture(site, pipeline, role, common=common).startswith("timm:"):
            shape, n_classes = (store.channels, size, size), len(store.meta.classes)
            modes = check_per_example_gradients(model, shape, n_classes, privacy.grad_mode)
            settings = replace(settings, modes=modes)
        return Learner(
            model,
            lr=pipeline.train.lr,
            weight_decay=pipeline.train.weight_decay,
            device=device,
            dp=settings if dp and privacy.enabled else None,
        )

    return make


def assemble(study: Study, pipeline: Pipeline, method_name: str, run: RunFolder, index: int) -> Site:
    """One site ready for the loop; opens its own store, and others' test patches only where all allow it."""
    sites = study.sites(pipeline)
    site, method = sites[index], method_named(method_name)
    store = open_store(study, site.name)
    device = device_of_rank()
    size = input_px(pipeline, store)
    pool = [other.name for other in sites] if method.pooled else [site.name]
    train = joined([examples_of(open_store(study, name), "train", size) for name in pool])
    if not len(train):
        raise WsiFlError(f"site {site.name}: its store has no training patches; look at tile's table")
    tests = {"own": held_out(study, site.name, size)}
    if len(sites) > 1 and may_merge(sites):
        tests["merged"] = joined([held_out(study, other.name, size) for other in sites])
    if site.real and not study.ledger(site.name).exists() and _took_part(study, site.name):
        raise UsageError(
            f"ledgers/{site.name}.jsonl is missing, though runs of this site exist; restore it: it is the site's budget"
        )
    mechanism = round_mechanism(pipeline, len(train))
    guarantee = guarantee_of(method, pipeline)
    terms = Terms(
        delta=site.delta or pipeline.privacy.delta,
        max_epsilon=site.max_epsilon,
        lifetime=site.real,
        allow=site.allowed,
        guarantee=guarantee,
        unit=pipeline.privacy.unit,
        insecure=pipeline.privacy.insecure_seed is not None,
    )
    return Site(
        index=index,
        name=site.name,
        learners=method.prepare(make_learners(site, pipeline, store, index, device)),
        train=train,
        tests={name: examples for name, examples in tests.items() if len(examples)},
        ledger=PrivacyLedger(study.ledger(site.name), site=site.name, run=_identity(run), terms=terms),
        folder=run.site(site.name),
        device=device,
        mechanism=mechanism,
        returning=site.name in run.returning(),
    )


def _took_part(study: Study, site: str) -> bool:
    """Whether some run has trained this site."""
    return any(study.runs.glob(f"*/sites/{site}/state/*.safetensors"))


def _identity(run: RunFolder) -> str:
    """Its name and number of birth: once runs/ was emptied, names come again, but what was spent stays spent."""
    path = run.path / "manifest.json"
    return f"{run.name} {read_json(path)['id']}" if path.exists() else run.name


def planned(site: Site, rounds: int) -> Mechanism | None:
    """What all rounds cost a site together."""
    return replace(site.mechanism, steps=site.mechanism.steps * rounds) if site.mechanism else None


def versions() -> dict[str, str]:
    """What must be the same everywhere for numbers to agree."""
    from importlib.metadata import version

    import wsi_fl

    names = ("torch", "torchvision", "opacus", "monai", "numpy")
    return {"wsi_fl": wsi_fl.__version__} | {name: version(name) for name in names}


def brought(site: Site, study: Study, pipeline: Pipeline, method_name: str) -> dict[str, Any]:
    """What a site brings, for the preflight: nothing but plans and shapes."""
    from wsi_fl.models import schema

    store = open_store(study, site.name)
    meta, channels = store.meta, store.channels
    travels = METHODS[method_name].travels
    train = pipeline.train
    return {
        "site": site.name,
        "method": method_name,
        "classes": list(meta.classes),
        "size_px": meta.spec.size_px,
        "mpp": meta.spec.mpp,
        "channels": channels,
        "schema": schema(site.learners[travels].model) if travels else "",
        "sites": [one.name for one in study.sites(pipeline)],
        "input_px": input_px(pipeline, store),
        "schedule": [
            train.rounds,
            train.batch_size,
            train.epochs_per_round,
            train.seed,
            pipeline.topology.self_weight,
            _graph_digest(study, pipeline),
            train.optimizer_after_exchange,
            pipeline.privacy.mode if pipeline.privacy.enabled else "no privacy",
        ],
        "versions": versions(),
        "affordable": affordable_rounds(site, train.rounds),
    }


def _graph_digest(study: Study, pipeline: Pipeline) -> str | None:
    """The name of the graph, or what its file says."""
    graph = pipeline.topology.graph
    if graph is None or not graph.endswith(".json"):
        return graph
    return hashlib.sha256(study.resolve(graph).read_bytes()).hexdigest()


def affordable_rounds(site: Site, rounds: int) -> int:
    """How many of `rounds` rounds the site's budget allows, those of this run that are on its account included."""
    limit = site.ledger.terms.max_epsilon
    done = len(site.ledger.mechanisms())
    if limit is None or site.mechanism is None:
        return rounds
    past = site.ledger.mechanisms(lifetime=site.ledger.terms.lifetime)
    more = 0
    while done + more < rounds:
        if epsilon([*past, *[site.mechanism] * (more + 1)], site.ledger.terms.delta) > limit:
            break
        more += 1
    return done + more
