"""Every federated method as a row of one table; `loop.py` runs them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from wsi_fl.federation import topology
from wsi_fl.federation.topology import Topology
from wsi_fl.learning.local import Batch, Learner, Learners, mutual_step, supervised_step


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
        prepare: builds the site's learners, once.
        step: one local step on a batch; returns the loss of each role.
        exchange: the graph of a round.
        predict: logits of its private model, for evaluation.
        travels: role whose parameters are exchanged, or None.
        learns_from_private: whether the model under differential privacy has a teacher trained without it, so
            that its ε is nominal unless β = 0.
        pooled: whether every model trains on all sites' data: what nobody may do, and what all are measured against.
        generated: whose generated images a site learns from too: the others', all sites' and nothing else, or nobody's.
    """

    prepare: Callable[[MakeLearner], Learners]
    step: Callable[[Learners, Batch, Weights, torch.Generator], dict[str, float]]
    exchange: Topology
    predict: Callable[[Learners, Tensor], Tensor]
    travels: str | None
    learns_from_private: bool = False
    pooled: bool = False
    generated: Literal["", "others", "all"] = ""


def _private_with_dp(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=True)}


def _common_with_dp(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=True, common=True)}


def _private_without_dp(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=False)}


def _private_and_dp_proxy(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=False), "proxy": make("proxy", dp=True)}


def _supervised(
    learners: Learners, batch: Batch, weights: Weights, noise: torch.Generator
) -> dict[str, float]:
    del weights
    return {"private": supervised_step(learners["private"], batch, noise)}


def _mutual(learners: Learners, batch: Batch, weights: Weights, noise: torch.Generator) -> dict[str, float]:
    """Algorithm 1, lines 3–4: the proxy steps first, then the private model learns from the moved proxy.

    One forward pass of the private model teaches the proxy and serves its own step (Zhang et al., 2018).
    """
    private, proxy = learners["private"], learners["proxy"]
    x = batch[0]
    said = private.forward(x) if len(x) else None
    taught = said.detach() if said is not None and weights.beta else None
    losses = {"proxy": mutual_step(proxy, taught, weights.beta, batch, noise)}
    answers = proxy.logits(x) if len(x) and weights.alpha else None
    losses["private"] = mutual_step(private, answers, weights.alpha, batch, noise, logits=said)
    return losses


def _private_logits(learners: Learners, x: Tensor) -> Tensor:
    return learners["private"].logits(x)


METHODS: dict[str, Method] = {
    "regular": Method(
        prepare=_private_with_dp,
        step=_supervised,
        exchange=topology.none,
        predict=_private_logits,
        travels=None,
    ),
    "joint": Method(
        prepare=_private_with_dp,
        step=_supervised,
        exchange=topology.none,
        predict=_private_logits,
        travels=None,
        pooled=True,
    ),
    "fedavg": Method(
        prepare=_common_with_dp,
        step=_supervised,
        exchange=topology.star,
        predict=_private_logits,
        travels="private",
    ),
    "avgpush": Method(
        prepare=_common_with_dp,
        step=_supervised,
        exchange=topology.exponential,
        predict=_private_logits,
        travels="private",
    ),
    "cwt": Method(
        prepare=_common_with_dp,
        step=_supervised,
        exchange=topology.ring,
        predict=_private_logits,
        travels="private",
    ),
    "fml": Method(
        prepare=_private_and_dp_proxy,
        step=_mutual,
        exchange=topology.star,
        predict=_private_logits,
        travels="proxy",
        learns_from_private=True,
    ),
    "proxyfl": Method(
        prepare=_private_and_dp_proxy,
        step=_mutual,
        exchange=topology.exponential,
        predict=_private_logits,
        travels="proxy",
        learns_from_private=True,
    ),
    "generated": Method(
        prepare=_private_without_dp,
        step=_supervised,
        exchange=topology.none,
        predict=_private_logits,
        travels=None,
        generated="all",
    ),
    "mpcpa": Method(
        prepare=_private_without_dp,
        step=_supervised,
        exchange=topology.none,
        predict=_private_logits,
        travels=None,
        generated="others",
    ),
}
