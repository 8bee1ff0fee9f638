"""Every federated method as a row of one table; `loop.py` runs them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from wsi_fl.federation import topology
from wsi_fl.federation.topology import Topology
from wsi_fl.learning.lessons import (
    Lesson,
    Material,
    nothing,
    real_alone,
    real_and_received,
    synthetic_and_received,
    synthetic_of_all,
)
from wsi_fl.plugins import Table

if TYPE_CHECKING:
    from wsi_fl.learning.local import Batch, Learner, Learners
    from wsi_fl.privacy.cipher import CipherStream


SHARED = "shared_head"
"""The model that `oneshot` makes of all sites' sums, as `models.build` knows it; none that is trained."""


class MakeLearner(Protocol):
    """Builds the learner of a role, "private" or "proxy".

    A private model has the site's own architecture and start unless it is `common`; proxies always are.
    """

    def __call__(self, role: str, *, dp: bool, common: bool = False) -> Learner: ...


@dataclass(frozen=True)
class Weights:
    """α of the private model and β of the proxy (eqs. 4 and 5)."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Method:
    """What distinguishes one method from another.

    Attributes:
        name: as its paper writes it.
        does: what it does, in a few words.
        prepare: builds the site's learners, once.
        step: one local step on a batch; returns the loss of each role.
        exchange: the graph of a round.
        travels: role whose parameters are exchanged, or None.
        federated: whether sites learn with one another: neither alone nor from one pool.
        pooled: whether every model trains on all sites' data: what nobody may do, and what all are measured against.
        generated: whose generated images a site learns from too: the others', all sites' and nothing else, or nobody's.
        learns: what a round is learned from; None for nothing.
        carries: the graph along which each site's buffer of synthetic samples travels, or None.
        bare: whether what leaves a site is without differential privacy by design.
        once: whether each site releases a single time, sums of all its rows instead of a trained model.
    """

    name: str
    does: str
    prepare: Callable[[MakeLearner], Learners]
    step: Callable[[Learners, Batch, Weights, CipherStream], dict[str, float]]
    exchange: Topology = topology.none
    travels: str | None = None
    federated: bool = True
    pooled: bool = False
    generated: Literal["", "others", "all"] = ""
    learns: Callable[[Material], Lesson | None] = real_alone
    carries: Topology | None = None
    bare: bool = False
    once: bool = False

    @property
    def learns_from_private(self) -> bool:
        """Whether the model under privacy has a teacher trained without it, so that its ε is nominal unless β = 0."""
        return self.step is _mutual

    @property
    def has_proxy(self) -> bool:
        """Whether a site has a proxy beside its private model."""
        return self.prepare is _private_and_dp_proxy

    @property
    def starts(self) -> bool:
        """Whether what travels is a model that is trained, and so starts from somewhere."""
        return self.travels is not None and not self.once

    @property
    def leaves(self) -> tuple[str, ...]:
        """The kinds of content that leave a site, as its file's `allow` names them where they have no privacy."""
        model = ("model",) if self.travels is not None else ()
        return (*model, "buffer") if self.carries is not None else model

    @property
    def ignores(self) -> tuple[str, ...]:
        """The keys and sections of a pipeline that change nothing about what its models learn."""
        found: tuple[str, ...] = () if self.generated else ("ddpm.", "mpcpa.")
        if not self.bare:
            found += ("replay.",)
        elif self.carries is None:
            found += ("replay.buffer", "replay.unchecked")
        if self.travels is None:
            found += ("topology.", "train.optimizer_after_exchange")
        if self.once:
            found += _OF_ROUNDS
        else:
            found += ("train.releases",)
        if not self.starts:
            found += ("train.start",)
        return found if self.learns_from_private else found + _OF_PROXIES

    @property
    def talks(self) -> bool:
        """Whether sites send each other anything."""
        return self.travels is not None or self.carries is not None


_OF_PROXIES = ("train.alpha", "train.beta", "train.val_fraction", "model.proxy", "predict.with")
_OF_ROUNDS = (
    *("train.rounds", "train.epochs_per_round", "train.batch_size", "train.lr", "train.weight_decay"),
    *("train.tune", "train.balance", "model.", "privacy.clip", "topology."),
)


def _private_with_dp(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=True)}


def _common_with_dp(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=True, common=True)}


def _private(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=False)}


def _common(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=False, common=True)}


def _private_and_dp_proxy(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=False), "proxy": make("proxy", dp=True)}


def _supervised(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    from wsi_fl.learning.local import supervised_step

    del weights
    return {"private": supervised_step(learners["private"], batch, noise)}


def _mutual(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    """Algorithm 1, lines 3–4: the proxy steps first, then the private model learns from the moved proxy.

    One forward pass of the private model teaches the proxy and serves its own step (Zhang et al., 2018).
    """
    from wsi_fl.learning.local import mutual_step

    private, proxy = learners["private"], learners["proxy"]
    x = batch[0]
    said = private.forward(x) if len(x) else None
    taught = said.detach() if said is not None and weights.beta else None
    losses = {"proxy": mutual_step(proxy, taught, weights.beta, batch, noise)}
    answers = proxy.logits(x) if len(x) and weights.alpha else None
    losses["private"] = mutual_step(private, answers, weights.alpha, batch, noise, logits=said)
    return losses


def _take_sums(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    """Take the sums of all rows; the private model was fitted to them before."""
    from wsi_fl.learning.local import sum_up

    del weights
    sum_up(learners["proxy"], batch, noise)
    return {}


def replay(variant: str = "replay", seed: int = 0) -> Method:
    """Experience replay with synthetic samples (Pennisi et al., section III-C), or one of its variants.

    Args:
        variant: "replay"; "no_buffer": models alone travel (Table III); "buffer_only": buffers alone do (Fig. 5a);
            "synthetic_only": owners too learn from synthetic samples (Fig. 5b); "central": one model of all sites'
            synthetic samples (Table I), which every site computes for itself.
        seed: of the order of the sites, drawn anew in every round.

    Raises:
        KeyError: for an unknown variant.
    """
    order = topology.random_permutation(seed)
    standard = Method(
        "Replay",
        "models and synthetic patches go round",
        _common,
        _supervised,
        order,
        "private",
        learns=real_and_received,
        carries=order,
        bare=True,
    )
    models_stay = replace(standard, prepare=_private, exchange=topology.none, travels=None)
    return {
        "replay": standard,
        "no_buffer": replace(standard, learns=real_alone, carries=None),
        "buffer_only": models_stay,
        "synthetic_only": replace(standard, learns=synthetic_and_received),
        "central": replace(models_stay, learns=synthetic_of_all, carries=topology.complete_once),
    }[variant]


def oneshot(*, released: bool = False) -> Method:
    """Return the method of heads that are made of sums of features, which each site releases once.

    Args:
        released: whether the sums lie in files by now. Then none are taken, and nothing travels.
    """
    standard = Method(
        "One-shot",
        "sums of features, released once",
        _private_and_dp_proxy,
        _take_sums,
        topology.star,
        "proxy",
        once=True,
    )
    if not released:
        return standard
    return replace(standard, exchange=topology.none, travels=None, learns=nothing)


_OWN = {
    "regular": Method("Regular", "each site alone", _private_with_dp, _supervised, federated=False),
    "joint": Method("Joint", "all data pooled", _private_with_dp, _supervised, federated=False, pooled=True),
    "fedavg": Method(
        "FedAvg", "one averaged model, central", _common_with_dp, _supervised, topology.star, "private"
    ),
    "avgpush": Method(
        "AvgPush",
        "one averaged model, no centre",
        _common_with_dp,
        _supervised,
        topology.exponential,
        "private",
    ),
    "cwt": Method("CWT", "one model, passed round", _common_with_dp, _supervised, topology.ring, "private"),
    "fml": Method("FML", "proxies averaged, central", _private_and_dp_proxy, _mutual, topology.star, "proxy"),
    "proxyfl": Method(
        "ProxyFL", "proxies travel, no centre", _private_and_dp_proxy, _mutual, topology.exponential, "proxy"
    ),
    "oneshot": oneshot(),
    "generated": Method(
        "Generated", "all sites' generated data alone", _private, _supervised, generated="all"
    ),
    "mpcpa": Method("MPCPA", "own and others' generated data", _private, _supervised, generated="others"),
    "replay": replay(),
}

METHODS = Table("wsi_fl.methods", _OWN, Method)
"""By the name that `--method` takes; another package adds its own as entry points of `wsi_fl.methods`."""
