"""The models of a site: fresh ones, and what they start from: settings of their own, or what was released before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from wsi_fl.federation.methods import MakeLearner
from wsi_fl.federation.site import Site
from wsi_fl.learning.examples import Examples, batches, epoch_rows, subset
from wsi_fl.learning.local import (
    DPSettings,
    Learner,
    probabilities,
    supervised_step,
    undecided_where_broken,
)
from wsi_fl.learning.metrics import Probabilities
from wsi_fl.learning.tuning import FittedHead, HyperParameters, fitted_head, tuned
from wsi_fl.learning.validation import LONE
from wsi_fl.models import HUB, Start, build
from wsi_fl.models.mil import MeanOfBag
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.models.weights import NoWeightsError
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import check_per_example_gradients
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.privacy.sums import impossible
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.site.sums import ReleasedSums, directions_of, of_patients, refuse_others, wanted_of
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline, Train
from wsi_fl.study.site import SiteFile
from wsi_fl.types import Bags, Images, Vectors, WsiFlError

_PRIVATE_SEED_STEP = 1000
"""Keeps the private models' initialisation apart from the proxies', which all sites share."""


def build_model(
    site: SiteFile,
    pipeline: Pipeline,
    data: Data,
    role: str,
    index: int,
    *,
    common: bool = False,
    state: Mapping[str, torch.Tensor] | None = None,
) -> torch.nn.Module:
    """Return a model: everybody's kind and seed for "proxy" or if `common`, else the site's own.

    Args:
        state: all of its tensors by name; None for a fresh model.
    """
    private = role != "proxy" and not common
    try:
        model = build(
            architecture(site, pipeline, role, common=common),
            n_classes=len(data.classes),
            shape=data.shape,
            seed=pipeline.train.seed + (_PRIVATE_SEED_STEP * (index + 1) if private else 0),
            start=start_of(pipeline, data.study if state is None else None),
        )
    except NoWeightsError as error:
        raise NoWeightsError(f"{error}: model.weights = 'FILE.safetensors'") from None
    if state is not None:
        model.load_state_dict(state)
    if isinstance(model, SharedHead):
        model.look_along(directions_of(data), patients=of_patients(pipeline))
    return model


def start_of(pipeline: Pipeline, study: Study | None = None) -> Start | None:
    """Return what networks start from; None where that is chance.

    Args:
        study: where their weights lie; None where weights will be loaded afterwards.
    """
    said = pipeline.model
    if not said.weights:
        return None
    if study is None or said.weights == HUB:
        return Start(said.train, HUB if study else None)
    return Start(said.train, study.resolve(said.weights), study.root / "weights")


def architecture(site: SiteFile, pipeline: Pipeline, role: str, *, common: bool = False) -> str:
    """The name of the model that a role has at a site."""
    if role == "proxy":
        return pipeline.model.proxy
    return pipeline.model.private if common else (site.private_model or pipeline.model.private)


def learners_of(
    party: RunContext,
    index: int,
    data: Data,
    device: torch.device,
    plan: PrivacyPlan | None,
    train: Examples,
) -> MakeLearner:
    """Return what builds the learners a method asks for, with noise where they are under differential privacy.

    Args:
        plan: of the noise; None where there is none.
        train: what they will learn from.
    """
    site, pipeline, keys = party.sites[index], party.pipeline, party.pipeline.train
    half = _in_bfloat16(pipeline)

    def make(role: str, *, dp: bool, common: bool = False) -> Learner:
        model, seen = build_model(site, pipeline, data, role, index, common=common), data.shape
        n_classes = len(data.classes)
        settings = None
        if dp and plan is not None:
            settings = DPSettings(plan.sigma, plan.clip, plan.batch_size, plan.unit)
            somebodys = architecture(site, pipeline, role, common=common).startswith("timm:")
            if somebodys and isinstance(seen, Images):
                shape = (seen.channels, seen.size_px, seen.size_px)
                settings = replace(settings, engine=check_per_example_gradients(model, shape, n_classes))
        usual = HyperParameters(keys.lr, keys.weight_decay, keys.balance)
        return _learner_of(model, usual, train, n_classes, device, settings, bfloat16=half)

    return make


def _in_bfloat16(pipeline: Pipeline) -> bool:
    """Return whether matrix products of training are in bfloat16."""
    return pipeline.gpu.train == "bfloat16"


def _learner_of(
    model: nn.Module,
    way: HyperParameters,
    train: Examples,
    n_classes: int,
    device: torch.device,
    dp: DPSettings | None = None,
    *,
    bfloat16: bool = False,
) -> Learner:
    """Return a learner with these settings for some training examples; under privacy all classes count as they come."""
    return Learner(
        model,
        lr=way.lr,
        weight_decay=way.weight_decay,
        device=device,
        dp=dp,
        class_weights=class_weights(train.label, n_classes) if way.balance and dp is None else None,
        task=train.task,
        bfloat16=bfloat16,
    )


def class_weights(labels: np.ndarray[Any, np.dtype[np.int64]], n_classes: int) -> list[float]:
    """Return how much a row of each class counts so that all classes count alike; 1 where all are as frequent.

    Example:
        >>> class_weights(np.array([0, 0, 0, 1]), 2)
        [0.6666666666666666, 2.0]
    """
    counts = np.bincount(labels, minlength=n_classes)
    present = counts > 0
    weights = np.where(present, len(labels) / present.sum() / np.maximum(counts, 1), 1.0)
    return [float(one) for one in weights]


def tune(party: RunContext, site: Site) -> None:
    """Let a site choose by cross-validation how its own models learn, where `train.tune` asks for it.

    A model that travels, or is under differential privacy, is not tuned. A linear head that it would have alone is
    fitted in any case. Both models of its own are fresh and alike, so what suits one suits the other.
    """
    keys, train, half = party.pipeline.train, site.train, _in_bfloat16(party.pipeline)
    own = {
        role: learner
        for role in (LONE, "private")
        if (learner := site.learners.get(role)) and not (learner.with_dp or role == party.method.travels)
    }
    if not keys.tune:
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
    elif keys.tune:
        folds = 1 if isinstance(party.data(site.name).shape, Images) else 5
        way, site.held_out = _tuned(keys, model, train, site.n_classes, site.device, folds, half=half)
        anew = {
            role: _learner_of(one.model, way, train, site.n_classes, site.device, bfloat16=half)
            for role, one in own.items()
        }
        site.learners = {**site.learners, **anew}
        site.tuned = {"by": "cross-validation", **way.facts}


def _is_linear(model: nn.Module) -> bool:
    """Return whether a model is one linear layer on what is fixed."""
    *below, last = model.children() if isinstance(model, nn.Sequential) else [model]
    return isinstance(last, nn.Linear) and all(isinstance(one, nn.LayerNorm | MeanOfBag) for one in below)


def _layers(model: nn.Module) -> nn.Sequential:
    assert isinstance(model, nn.Sequential)
    return model


@torch.no_grad()
def _set_layer(model: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Overwrite the last layer of a linear head, with weight [classes, d] and bias [classes]."""
    linear = _layers(model)[-1]
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def _fitted(model: nn.Module, train: Examples, n_classes: int, device: torch.device) -> FittedHead:
    """Return the linear layer that serves held-out patients best on what the fixed layers below it see."""
    below = _layers(model)[:-1].to(device)
    size = train.at_once or 256
    every = [np.arange(len(train))[k : k + size] for k in range(0, len(train), size)]
    with torch.no_grad():
        x = torch.cat([below(x) for x, _ in batches(train, iter(every), augment=None, device=device)])
    return fitted_head(x.cpu().numpy(), train.label, train.patient, n_classes, train.task)


def _tuned(
    settings: Train,
    model: nn.Module,
    train: Examples,
    n_classes: int,
    device: torch.device,
    folds: int,
    *,
    half: bool,
) -> tuple[HyperParameters, Probabilities | None]:
    """Return the settings that serve held-out patients best, and what models trained with them say of these.

    Args:
        model: a fresh one, as which all begin.
        folds: how often patients are held out at most.
    """
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def trained(way: HyperParameters, seen: np.ndarray[Any, np.dtype[np.bool_]]) -> Probabilities:
        model.load_state_dict(start)
        some, others = (subset(train, np.flatnonzero(rows)) for rows in (seen, ~seen))
        learner = _learner_of(model, way, some, n_classes, device, bfloat16=half)
        stream = CipherStream.seeded(settings.seed, "tuning")
        drawn = stream if settings.max_patches else None  # which patches are seen
        epochs = settings.rounds * settings.epochs_per_round
        rows = epoch_rows(len(some), settings.batch_size, epochs, sampler=stream)
        for batch in batches(some, rows, augment=None, device=device, draws=drawn):
            supervised_step(learner, batch, stream)
        said = probabilities(learner.logits, others, device)
        return undecided_where_broken(said, others)

    usual = HyperParameters(settings.lr, settings.weight_decay, settings.balance)
    way, held_out = tuned(train.label, train.patient, usual, trained, folds=folds, task=train.task)
    model.load_state_dict(start)
    return way, held_out


def bring_released(party: RunContext, site: Site) -> None:
    """Give a site's learners what all released files tell: a shared head its sums, or what travels its start.

    Raises:
        UsageError: when a file is of another plan, projection or encoder than the site's own store.
        WsiFlError: when a file holds what no honest site would have released.
    """
    study, data, name, learners = party.study, party.data(site.name), site.name, site.learners
    wanted = wanted_of(data, party.pipeline)
    if party.by_files:
        head = learners["proxy"].model
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
    mean, n = _mean(party.releases.values()), len(party.releases)
    if party.by_files:
        if own := party.releases.get(name):
            letter = torch.from_numpy(own.vector).double()
            k = len(letter) - own.facts.columns
            head.hold(letter[:k], letter[:k], letter[k:])
        learners["proxy"].load_vector(mean, n_sites=n)
        return
    assert party.method.travels is not None
    learner = learners[party.method.travels]
    with torch.no_grad():
        head.sums.copy_(torch.from_numpy(mean))
    head.n_sites.fill_(n)
    _set_layer(learner.model, *head.linear())


def _mean(releases: Iterable[ReleasedSums]) -> NDArray[np.float32]:
    """Return float32[k + 1], the mean of what sites have released."""
    mean = np.mean([sums.vector.astype(np.float64) for sums in releases], axis=0)
    return np.asarray(mean, np.float32)
