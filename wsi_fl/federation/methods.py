"""Every federated method as a row of one table; `loop.py` runs them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wsi_fl.federation import topology
from wsi_fl.federation.topology import Matrix
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
        exchange: (n_sites, round, self_weight) → the hops of a round, column-stochastic matrices.
        predict: logits for evaluation.
        travels: role whose parameters are exchanged, or None.
        release: what the exchanged parameters are called in the ledger, and what a site must allow by
            name where it leaves without differential privacy.
        learns_from_private: whether the model under differential privacy has a teacher trained without it, so
            that its ε is nominal unless β = 0.
        pooled: whether every model trains on all sites' data: what nobody may do, and what all are measured against.
    """

    prepare: Callable[[MakeLearner], Learners]
    step: Callable[[Learners, Batch, Weights, torch.Generator], dict[str, float]]
    exchange: Callable[[int, int, float], list[Matrix]]
    predict: Callable[[Learners, Tensor], Tensor]
    travels: str | None
    release: str = ""
    learns_from_private: bool = False
    pooled: bool = False


def _private_with_dp(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=True)}


def _common_with_dp(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=True, common=True)}


def _private_and_dp_proxy(make: MakeLearner) -> Learners:
    return {"private": make("private", dp=False), "proxy": make("proxy", dp=True)}


def _supervised(
    learners: Learners, batch: Batch, weights: Weights, noise: torch.Generator
) -> dict[str, float]:
    del weights
    return {"private": supervised_step(learners["private"], batch, noise)}


def _mutual(learners: Learners, batch: Batch, weights: Weights, noise: torch.Generator) -> dict[str, float]:
    """Algorithm 1, lines 3–4: the proxy steps first, then the private model learns from the moved proxy."""
    private, proxy = learners["private"], learners["proxy"]
    return {
        "proxy": mutual_step(proxy, private, weights.beta, batch, noise),
        "private": mutual_step(private, proxy, weights.alpha, batch, noise),
    }


def _nobody(n_sites: int, round_: int, self_weight: float) -> list[Matrix]:
    del self_weight
    return topology.none(n_sites, round_)


def _star(n_sites: int, round_: int, self_weight: float) -> list[Matrix]:
    del self_weight
    return topology.star(n_sites, round_)


def _ring(n_sites: int, round_: int, self_weight: float) -> list[Matrix]:
    del self_weight
    return topology.ring(n_sites, round_)


def _private_logits(learners: Learners, x: Tensor) -> Tensor:
    return learners["private"].logits(x)


METHODS: dict[str, Method] = {
    "regular": Method(
        prepare=_private_with_dp,
        step=_supervised,
        exchange=_nobody,
        predict=_private_logits,
        travels=None,
    ),
    "joint": Method(
        prepare=_private_with_dp,
        step=_supervised,
        exchange=_nobody,
        predict=_private_logits,
        travels=None,
        pooled=True,
    ),
    "fedavg": Method(
        prepare=_common_with_dp,
        step=_supervised,
        exchange=_star,
        predict=_private_logits,
        travels="private",
        release="model",
    ),
    "avgpush": Method(
        prepare=_common_with_dp,
        step=_supervised,
        exchange=topology.exponential,
        predict=_private_logits,
        travels="private",
        release="model",
    ),
    "cwt": Method(
        prepare=_common_with_dp,
        step=_supervised,
        exchange=_ring,
        predict=_private_logits,
        travels="private",
        release="model",
    ),
    "fml": Method(
        prepare=_private_and_dp_proxy,
        step=_mutual,
        exchange=_star,
        predict=_private_logits,
        travels="proxy",
        release="model",
        learns_from_private=True,
    ),
    "proxyfl": Method(
        prepare=_private_and_dp_proxy,
        step=_mutual,
        exchange=topology.exponential,
        predict=_private_logits,
        travels="proxy",
        release="model",
        learns_from_private=True,
    ),
}
