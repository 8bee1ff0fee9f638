"""From configuration and stores to what the rooms need: a site with its examples, canaries, account and models.

Models are fresh, or start from settings of their own or from what was released before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, replace
from functools import partial
from sys import maxsize
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from wsi_fl.federation.methods import MakeLearner, Method
from wsi_fl.federation.preflight import Brought, Setting
from wsi_fl.federation.site import Schedule, Site
from wsi_fl.learning.examples import (
    Examples,
    augmentation,
    batches,
    epoch_rows,
    joined,
    subset,
    with_drawn_patches,
)
from wsi_fl.learning.local import DPSettings, Learner, probabilities, supervised_step, undecided_where_broken
from wsi_fl.learning.metrics import Probabilities
from wsi_fl.learning.tuning import FittedHead, HyperParameters, fitted_head, tuned
from wsi_fl.learning.units import Canaries, Units, canaries, tossed
from wsi_fl.learning.validation import COMMON, LONE, STACK, held_out, require_names
from wsi_fl.models import HUB, Start, build, parameters_digest, schema, started_from
from wsi_fl.models.mil import MeanOfBag
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.models.weights import NoWeightsError
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.privacy.ledger_file import run_id
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.privacy.sums import impossible
from wsi_fl.slides.patching.copies import describe_copies
from wsi_fl.stages.site.account import affordable_rounds, open_account, units_of, weights_of
from wsi_fl.stages.site.data import Data, scans_in
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import directions_of, of_patients, refuse_others, wanted_of
from wsi_fl.stages.training.checks import graph_of, versions
from wsi_fl.stages.work.job import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, Train
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import Section, value_of
from wsi_fl.system.files import sha256_of
from wsi_fl.types import UNLABELLED, Bags, Images, NoCommonPlan, UsageError, Vectors, WsiFlError

_PRIVATE_SEED_STEP = 1000
"""Keeps the private models' initialisation apart from the proxies', which all sites share."""


def schedule_of(party: RunContext) -> Schedule:
    """Return what the loop needs to know of a pipeline."""
    pipeline, train = party.pipeline, party.pipeline.train
    shared = pipeline.privacy.noise == "shared" and party.method.travels is not None
    return Schedule(
        rounds=train.rounds,
        epochs_per_round=train.epochs_per_round,
        batch_size=maxsize if party.method.once else train.batch_size,
        eval_every=train.eval_every,
        seed=train.seed,
        weights=weights_of(pipeline),
        self_weight=pipeline.topology.self_weight,
        make_augment=partial(augmentation, train.augment) if party.kind.of_images else lambda _: None,
        graph=graph_of(party),
        answer=pipeline.predict.model,
        reset_optimizer=train.optimizer_after_exchange == "reset",
        insecure_seed=pipeline.privacy.insecure_seed,
        colluding=pipeline.privacy.colluding if shared else None,
        dropouts=pipeline.privacy.dropouts,
    )


def build_site(party: RunContext, index: int) -> Site:
    """Return a site with its examples, its account and its models.

    It opens its own store, and others' test patches only where all allow it. A receiver has what travels alone. Models
    start from settings of the site's own, sums that were released, or synthetic samples.
    """
    name, pipeline = party.names[index], party.pipeline
    data, folder, device = party.data(name), party.run.site(name), device_of_rank()
    if folder.store_digest() is None:  # a run that began with them goes on with them
        data.require_current()
    for line in filter(None, (data.remark, *describe_copies(scans_in(data.store)))):
        folder.log(line)
    train, validation, units = learned_from(party, name)
    if not len(train) and not data.receives:
        raise WsiFlError(f"site {name}: its store has no training {party.examples}")
    tests = {} if data.receives else {"own": data.held_out}
    if tests and len(party.members) > 1 and party.may_merge:
        tests["merged"] = party.merged()
    canaries = agreed_canaries(party, name)
    account = open_account(party, index, units, canaries.included if canaries else None)
    make = _learners_of(party, index, device, account.plan, train)
    roles = {role: one for role, one in party.method.learners.items() if role in COMMON or not data.receives}
    learners = {role: make(role, dp=one.dp, common=one.common) for role, one in roles.items()}
    if party.method.keeps_lone and pipeline.train.local_baseline:
        learners[LONE] = make(LONE, dp=False)
    site = Site(
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
        receives=data.receives,
        returning=name in party.run.returning(),
    )
    _tune(party, site)
    if party.method.once:
        from wsi_fl.learning.local import know_rows  # and with it Opacus

        know_rows(site.learners["shared"], site.train)
    if party.releases:
        _bring_released(party, site)
    if buffer := party.method.share("buffer"):
        site.buffer = buffer.stage().agreed_buffer(party, index)
    return site


def brought(site: Site, party: RunContext) -> Brought:
    """Return what a site brings, for the preflight: nothing but plans and shapes."""
    data, pipeline, travels = party.data(site.name), party.pipeline, party.method.travels
    meta, buffer = data.store.meta, site.buffer
    return {
        "site": site.name,
        "run": run_id(site.ledger.run),
        "method": party.name,
        "settings": _settings(pipeline),
        "classes": list(data.classes),
        "size_px": meta.spec.size_px,
        "mpp": meta.spec.mpp,
        **data.inputs(),
        "weights": started_from(site.learners[travels].model) if travels else "",
        "schema": schema(site.learners[travels].model) if travels else "",
        "sites": party.names,
        "inference_sites": party.receivers,
        "graph": _graph_digest(party),
        "projection": directions_of(data).digest if party.method.once else None,
        "buffer": [value_of(pipeline, "replay.variant"), *astuple(buffer.shape)] if buffer else None,
        "noise": site.plan.sigma if site.plan and pipeline.privacy.noise == "shared" else None,
        "statistics": {name: released.digest for name, released in party.releases.items()},
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


def require_signed_model(site: Site, party: RunContext) -> None:
    """Refuse to train where the model that travels is not the one that hospitals signed, by its `parameters_digest`."""
    signed, travels = party.run.parameters, party.method.travels
    if signed and travels and parameters_digest(site.learners[travels].model) != signed:
        raise NoCommonPlan(
            f"site {site.name} makes another model than the plan's (names and shapes of its parameters differ); "
            "nothing was trained, so compare the versions of timm and torchvision, or agree on a new plan"
        )


def _graph_digest(party: RunContext) -> str | None:
    """The name of the graph, or what its file says."""
    graph = party.pipeline.topology.graph
    if graph is None or not graph.endswith(".json"):
        return graph
    return sha256_of(party.study.resolve(graph))


class TrainingPart(NamedTuple):
    """What a site trains on.

    Attributes:
        train: the examples that its models learn from.
        validation: those that are held out to say what answers best; None for none.
        units: what privacy counts, of `Data.eligible`; the rows are those of `train`.
    """

    train: Examples
    validation: Examples | None
    units: Units


def learned_from(party: RunContext, name: str) -> TrainingPart:
    """Return what a site trains on."""
    if party.method.learns_from != "everybody":
        return _validated(party, party.data(name))
    parts: list[Examples] = []
    patients: list[NDArray[np.str_]] = []
    places: list[NDArray[np.int64]] = []
    for site in party.names:  # whose patients stay apart where their names agree
        data, n = party.data(site), sum(map(len, patients))
        part, eligible = _training(data), data.eligible()
        parts.append(replace(part, patient=_named(site, part.patient)))
        patients.append(_named(site, eligible.patient))
        places.append(n + eligible.training)
    units = units_of(party.pipeline, np.concatenate(patients), name)
    return TrainingPart(joined(parts), None, units.only(np.concatenate(places)))


def _named(site: str, patient: NDArray[np.str_]) -> NDArray[np.str_]:
    return np.array([f"{site}/{name}" if name else "" for name in patient.tolist()], np.str_)


def agreed_canaries(party: RunContext, name: str) -> Canaries | None:
    """Return the canaries that the run remembers, or freshly tossed ones; None where none are planted."""
    n, data = party.pipeline.audit.canaries, party.data(name)
    if not n:
        return None
    if known := party.run.site(name).kept("canaries"):
        seed, included = int(known["seed"]), np.array([coin == "1" for coin in known["coins"]])
    else:
        seed, included = tossed(n)
    return canaries(seed, included, data.shape, len(data.classes))


def remember(site: Site) -> None:
    """Note in the run, before anything is trained, what a site decided for it: a restart finds the same again.

    These are the plan (the account changes while the run goes on), the canaries that were tossed, the settings that
    were tuned, and the buffer that was drawn: every round sends the same bytes.
    """
    folder, found = site.folder, site.canaries
    if site.plan is not None and folder.kept("plan") is None:
        folder.keep("plan", asdict(site.plan))
    if found is not None and not folder.kept("canaries"):
        coins = "".join("1" if coin else "0" for coin in found.included)
        folder.keep("canaries", {"n": len(coins), "seed": str(found.seed), "coins": coins})
    if site.tuned is not None:
        folder.keep("tuning", site.tuned)
    if site.buffer is not None and folder.buffer() is None:
        folder.remember_buffer(site.buffer.values, site.buffer.provenance)


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


def _training(data: Data) -> Examples:
    """A site's training examples; with `train.max_patches` bags are shown in many choices of their patches."""
    if not data.receives and data.classes == UNLABELLED:
        raise UsageError(
            f"site {data.site}: its store was made without labels; make it again with them, or write role = 'receiver' "
            f"in sites/{data.site}.toml"
        )
    train, most = data.examples("train"), data.pipeline.train.max_patches
    if most is not None and isinstance(data.shape, Bags):
        return with_drawn_patches(train, most)
    return train


def _validated(party: RunContext, data: Data) -> TrainingPart:
    """Return what a site trains on, with its store's own validation split, or a share of its training patients.

    Where nothing is sent there is nothing to choose, and every row that is for training is learned from.
    """
    pipeline, train = party.pipeline, _training(data)
    eligible = data.eligible()
    units = units_of(pipeline, eligible.patient, data.site).only(eligible.training)
    if not {*COMMON} & party.method.learners.keys() and not party.method.keeps_lone:
        return TrainingPart(train, None, units)
    validation = data.examples("val")
    if not len(validation) and pipeline.train.val_fraction:
        fraction = pipeline.train.val_fraction
        if pipeline.privacy.noisy:
            require_names(train.patient, data.site)
        held = held_out(train.patient, fraction, pipeline.train.seed, data.lots)
        if len(train) and held.all():
            raise UsageError(
                f"train.val_fraction = {fraction:g} holds out all of a site's training patients; lower it"
            )
        validation = subset(train, np.flatnonzero(held))
        train, units = subset(train, np.flatnonzero(~held)), units.only(np.flatnonzero(~held))
    if party.method.once and pipeline.predict.model == "proxy":
        raise UsageError("oneshot: the head that all sites share is called so: predict.model = 'shared'")
    known = (
        pipeline.train.local_baseline or (pipeline.train.tune and pipeline.privacy.noisy) or party.method.once
    )
    if pipeline.predict.model == STACK and not known and not len(validation):
        raise UsageError(
            "predict.model = 'ensemble' needs a model that is the site's alone, or rows that no model was trained on; "
            "set train.local_baseline=true, or train.val_fraction=0.15, or tile with a validation split"
        )
    return TrainingPart(train, validation if len(validation) else None, units)


def build_model(
    party: RunContext,
    index: int,
    role: str,
    *,
    common: bool = False,
    state: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Return a model of a site: everybody's kind and seed for a role in COMMON or if `common`, else the site's own."""
    site, pipeline, private = party.sites[index], party.pipeline, role not in COMMON and not common
    data = party.data(site.name)
    kind = architecture(site, pipeline, role, common=common)
    try:
        model = build(
            kind,
            n_classes=len(data.classes),
            shape=data.shape,
            seed=pipeline.train.seed + (_PRIVATE_SEED_STEP * (index + 1) if private else 0),
            start=start_of(pipeline, data.study if state is None else None),
        )
    except NoWeightsError as error:
        raise NoWeightsError(f"{error}: model.weights = 'FILE.safetensors'") from None
    if state is not None:
        try:
            model.load_state_dict(state)
        except RuntimeError:
            raise WsiFlError(
                f"{party.run.name}: the {role} model of {site.name} is another than this run's; put its backup back"
            ) from None
    if isinstance(model, SharedHead):
        model.look_along(directions_of(data), patients=of_patients(pipeline))
    return model


def start_of(pipeline: Pipeline, study: Study | None = None) -> Start | None:
    """Return what networks start from; None for chance. Without a study their weights are loaded afterwards."""
    said = pipeline.model
    if not said.weights:
        return None
    if study is None or said.weights == HUB:
        return Start(said.train, HUB if study else None)
    return Start(said.train, study.resolve(said.weights), study.root / "weights")


def architecture(site: SiteFile, pipeline: Pipeline, role: str, *, common: bool = False) -> str:
    """The name of the model that a role has at a site."""
    if role in COMMON:
        return pipeline.model.proxy
    return pipeline.model.private if common else (site.private_model or pipeline.model.private)


def _learners_of(
    party: RunContext, index: int, device: torch.device, plan: PrivacyPlan | None, train: Examples
) -> MakeLearner:
    """Return what builds the learners a method asks for, with the noise of the plan where they are under DP."""
    site, pipeline, keys = party.sites[index], party.pipeline, party.pipeline.train
    data = party.data(site.name)
    n_classes, seen = len(data.classes), data.shape

    def make(role: str, *, dp: bool, common: bool = False) -> Learner:
        model, settings = build_model(party, index, role, common=common), None
        if dp and plan is not None:
            settings = DPSettings(plan.sigma, plan.clip, plan.batch_size, plan.unit)
            somebodys = architecture(site, pipeline, role, common=common).startswith("timm:")
            if somebodys and isinstance(seen, Images):
                shape = (seen.channels, seen.size_px, seen.size_px)
                settings = replace(settings, engine=check_per_example_gradients(model, shape, n_classes))
        stays = settings is None and role != party.method.travels
        way = _usual(keys) if stays else HyperParameters(keys.lr, keys.weight_decay, keys.balance)
        return _learner(model, way, train, n_classes, device, pipeline, dp=settings)

    return make


def _usual(keys: Train) -> HyperParameters:
    """Return how models learn that stay at their site and have no noise, unless they choose for themselves."""
    return HyperParameters(keys.private_lr or keys.lr, keys.weight_decay, keys.balance)


def _learner(
    model: nn.Module,
    way: HyperParameters,
    train: Examples,
    n_classes: int,
    device: torch.device,
    pipeline: Pipeline,
    *,
    dp: DPSettings | None = None,
) -> Learner:
    """Return a learner with these settings for some training examples; under privacy all classes count as they come."""
    return Learner(
        model,
        lr=way.lr,
        weight_decay=way.weight_decay,
        device=device,
        dp=dp,
        class_weights=_class_weights(train.label, n_classes) if way.balance and dp is None else None,
        task=train.task,
        bfloat16=pipeline.gpu.train == "bfloat16",
    )


def _class_weights(labels: NDArray[np.int64], n_classes: int) -> list[float]:
    """Return how much a row of each class counts so that all classes count alike; 1 where all are as frequent."""
    counts = np.bincount(labels, minlength=n_classes)
    present = counts > 0
    weights = np.where(present, len(labels) / present.sum() / np.maximum(counts, 1), 1.0)
    return [float(one) for one in weights]


def _tune(party: RunContext, site: Site) -> None:
    """Let a site choose by cross-validation how its own models learn, where `train.tune` asks for it.

    A model that travels, or is under differential privacy, is not tuned. A linear head that it would have alone is
    fitted in any case. Both models of its own are fresh and alike, so what suits one suits the other.
    """
    pipeline, train = party.pipeline, site.train
    own = {
        role: learner
        for role in (LONE, "private")
        if (learner := site.learners.get(role)) and not (learner.with_dp or role == party.method.travels)
    }
    if not pipeline.train.tune:
        own = {role: one for role, one in own.items() if role == LONE and _is_linear(one.model)}
    if not own:
        return
    model = next(iter(own.values())).model
    if _is_linear(model):
        head = _fitted(model, train, site.n_classes, site.device)
        for learner in own.values():
            _set_layer(learner.model, torch.from_numpy(head.weight), torch.from_numpy(head.bias))
            learner.fitted = True
        site.held_out, site.tuned = head.held_out, head.facts
        return
    of_images = isinstance(party.data(site.name).shape, Images)
    way, site.held_out = _tuned(pipeline, model, site, of_images=of_images)
    anew = {
        role: _learner(one.model, way, train, site.n_classes, site.device, pipeline)
        for role, one in own.items()
    }
    site.learners = {**site.learners, **anew}
    site.tuned = {"by": "cross-validation", **asdict(way)}


def _is_linear(model: nn.Module) -> bool:
    """Return whether a model is one linear layer on what is fixed."""
    *below, last = model.children() if isinstance(model, nn.Sequential) else [model]
    return isinstance(last, nn.Linear) and all(isinstance(one, nn.LayerNorm | MeanOfBag) for one in below)


@torch.no_grad()
def _set_layer(model: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Overwrite the last layer of a linear head, with weight [classes, d] and bias [classes]."""
    assert isinstance(model, nn.Sequential)
    linear = model[-1]
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def _fitted(model: nn.Module, train: Examples, n_classes: int, device: torch.device) -> FittedHead:
    """Return the linear layer that serves held-out patients best on what the fixed layers below it see."""
    assert isinstance(model, nn.Sequential)
    below = model[:-1].to(device)
    size = train.at_once or 256
    every = [np.arange(len(train))[k : k + size] for k in range(0, len(train), size)]
    with torch.no_grad():
        x = torch.cat([below(x) for x, _ in batches(train, iter(every), augment=None, device=device)])
    return fitted_head(x.cpu().numpy(), train.label, train.patient, n_classes, train.task)


def _tuned(
    pipeline: Pipeline, model: nn.Module, site: Site, *, of_images: bool
) -> tuple[HyperParameters, Probabilities | None]:
    """Return the settings that serve held-out patients best, and what models trained with them say of all patients.

    Models of images, which take longest, choose by one fold.
    """
    start = {key: value.clone() for key, value in model.state_dict().items()}
    keys, train = pipeline.train, site.train

    def trained(way: HyperParameters, seen: NDArray[np.bool_]) -> Probabilities:
        model.load_state_dict(start)
        some, others = (subset(train, np.flatnonzero(rows)) for rows in (seen, ~seen))
        learner = _learner(model, way, some, site.n_classes, site.device, pipeline)
        stream = CipherStream.seeded(keys.seed, "tuning")
        drawn = stream if keys.max_patches else None  # which patches are seen
        augment = augmentation(keys.augment, stream) if of_images else None
        rows = epoch_rows(len(some), keys.batch_size, keys.rounds * keys.epochs_per_round, sampler=stream)
        for batch in batches(some, rows, augment=augment, device=site.device, draws=drawn):
            supervised_step(learner, batch, stream)
        return undecided_where_broken(probabilities(learner.logits, others, site.device), others)

    folds = 1 if of_images else 5
    way, held_out = tuned(train.label, train.patient, _usual(keys), trained, folds=folds, task=train.task)
    model.load_state_dict(start)
    return way, held_out


def _bring_released(party: RunContext, site: Site) -> None:
    """Give a site's learners what all released files tell: a shared head its sums, or what travels its start.

    WsiFlError where a file holds what no honest site would have released.
    """
    study, data, name, learners = party.study, party.data(site.name), site.name, site.learners
    wanted = wanted_of(data)
    if party.by_files:
        head = learners["shared"].model
    else:
        assert isinstance(data.shape, Bags | Vectors)
        patients, directions = of_patients(party.pipeline), directions_of(data)
        head = SharedHead(len(data.classes), data.shape.n_features, directions=directions, patients=patients)
    assert isinstance(head, SharedHead)
    for other, sums in party.releases.items():
        refuse_others(sums.facts, wanted, label := study.relative(study.release(other)))
        letter, facts = torch.from_numpy(sums.vector), sums.facts
        if problem := impossible(head, letter, facts.n, facts.sigma, rows=facts.unit == "row"):
            raise WsiFlError(
                f"{label}: no sums of {facts.n} {facts.unit}s: {problem}; ask its site for the file"
            )
    exact = np.mean([sums.vector.astype(np.float64) for sums in party.releases.values()], axis=0)
    mean, n = np.asarray(exact, np.float32), len(party.releases)
    if party.by_files:
        if own := party.releases.get(name):
            letter = torch.from_numpy(own.vector).double()
            k = len(letter) - own.facts.columns
            head.hold(letter[:k], letter[:k], letter[k:])
        learners["shared"].load_vector(mean, n_sites=n)
        return
    assert party.method.travels is not None
    learner = learners[party.method.travels]
    with torch.no_grad():
        head.sums.copy_(torch.from_numpy(mean))
    head.n_sites.fill_(n)
    _set_layer(learner.model, *head.linear())
