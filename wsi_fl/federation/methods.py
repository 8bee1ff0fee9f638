"""The table of federated methods; `loop.py` runs them all.

A method lists everything that leaves a site as its disclosures. The ledger's content, the kinds that `allow` must name,
the graphs of a round, plans, dossiers, tables and texts follow from them. This file imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from wsi_fl.plugins import Table

if TYPE_CHECKING:
    from wsi_fl.federation.topology import Topology
    from wsi_fl.learning.local import Batch, Learner, Learners
    from wsi_fl.learning.units import LearnsFrom
    from wsi_fl.privacy.cipher import CipherStream

What = Literal["model", "sums", "buffer", "generator"]
SHARED = "shared_head"
"""The one-shot global head in `models.build`: computed from all sites' class statistics, not trained."""
FILES, HUB = "files", "hub"
"""Routes other than a graph of rounds: files that people copy; everything to the first site."""
DEFAULT, ALONE, POOLED = "proxyfl", "regular", "joint"
"""The default method of `train`, and the two baselines of comparisons."""


class MakeLearner(Protocol):
    """A factory of the learner of a role: "private", "proxy" or "shared"."""

    def __call__(self, role: str, *, dp: bool, common: bool = False) -> Learner:
        """Return the learner. A private model has the site's architecture and start unless `common`."""
        ...


@dataclass(frozen=True)
class Weights:
    """Weights α of the private model and β of the proxy (eqs. 4 and 5)."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Role:
    """Settings of a model's training at a site.

    Attributes:
        dp: with differential privacy, where the settings enable it.
        common: with the architecture and start common to all sites, as all proxies.
        has_teacher: with the site's other model as teacher. If that has no ε, this ε is nominal, unless β = 0.
    """

    dp: bool
    common: bool = False
    taught: bool = False


@dataclass(frozen=True)
class Share:
    """A kind of data that leaves a site.

    Attributes:
        kind: parameters of a model, class statistics, a buffer of synthetic samples, or a generator.
        route: its graph: a name of `topology.TOPOLOGIES`, a topology, or FILES or HUB.
        role: the role of the model: private, proxy or shared.
        protection: "dp": by differential privacy or, if switched off, by the site's permission; "leave": by that
            permission alone, given by name in the site's file.
        timing: all rounds, once (in the first round), or before the first or after the last round.
        stage_module: the module of the stage that makes or sends it outside the loop: `agreed_buffer` of a buffer,
            `bring_generated` and `hand_over_models` before and after the rounds, and `n_bytes`.
    """

    what: What
    by: str | Topology
    of: Literal["private", "proxy", "shared"] = "private"
    protected: Literal["dp", "leave"] = "dp"
    times: Literal["rounds", "once", "before", "after"] = "rounds"
    made_by: str = ""

    @property
    def content(self) -> Literal["model", "buffer", "generator"]:
        """Return its kind in ledgers and in `allow` of site files; class statistics count as a model."""
        return "model" if self.what == "sums" else self.what

    @property
    def in_rounds(self) -> bool:
        """Return whether it is sent along a graph in rounds."""
        return self.times in ("rounds", "once") and self.by != FILES

    def is_bare(self, with_dp: bool) -> bool:
        """Return whether it leaves without differential privacy, given whether the settings enable it."""
        return self.protected == "leave" or not with_dp

    def stage(self) -> Any:
        """Return the module that makes or sends it."""
        return import_module(self.made_by)

    def graph(self, seed: int) -> Topology:
        """Return its graph; the seed is for graphs that are drawn at random."""
        from wsi_fl.federation.topology import named

        return named(self.by, seed) if isinstance(self.by, str) else self.by


@dataclass(frozen=True)
class Method:
    """A federated method.

    Attributes:
        name: as its paper writes it.
        summary: a summary in a few words.
        learners: the models of a site by role: "private", and "proxy" or "shared" where there is one.
        step: one local step on a batch; returns the loss of each role.
        disclosures: everything that leaves a site.
        learns_from: the source of a round's training examples, see `learning.units`; "everybody" is pooled training.
        variants: (key, value) of a pipeline → the method in place of this one for that value.
        baselines: the module with `baselines`, which trains it and its paper's baselines, and `baselines_lines`, which
            prints their table; "" for none.
    """

    name: str
    does: str
    learners: Mapping[str, Role]
    step: Callable[[Learners, Batch, Weights, CipherStream], dict[str, float]]
    shares: tuple[Share, ...] = ()
    learns_from: LearnsFrom = "own"
    variants: Mapping[tuple[str, Any], Method] = field(default_factory=dict)
    baselines: str = ""

    def share(self, *kinds: What) -> Share | None:
        """Return the first disclosure of these kinds, or None."""
        return next((share for share in self.shares if share.what in kinds), None)

    def shares_at(self, times: str) -> list[Share]:
        """Return the disclosures of a timing."""
        return [share for share in self.shares if share.times == times]

    @property
    def mixed(self) -> Share | None:
        """Return the disclosure that is mixed in rounds, or None."""
        return next(
            (share for share in self.shares if share.in_rounds and share.what in ("model", "sums")), None
        )

    @property
    def travels(self) -> str | None:
        """Return the role of the mixed parameters, or None."""
        return self.mixed.of if self.mixed is not None else None

    @property
    def without_dp(self) -> tuple[Share, ...]:
        """Return the disclosures without differential privacy by design."""
        return tuple(share for share in self.shares if share.protected == "leave")

    @property
    def once(self) -> bool:
        """Return whether each site releases class statistics once, instead of a trained model."""
        return self.share("sums") is not None

    @property
    def starts(self) -> bool:
        """Return whether a trained model is exchanged, which needs initial weights."""
        return self.travels is not None and not self.once

    @property
    def talks(self) -> bool:
        """Return whether sites exchange anything in rounds."""
        return any(share.in_rounds for share in self.shares)

    @property
    def keeps_lone(self) -> bool:
        """Return whether a site trains a local baseline beside the models of the method.

        For one-shot methods the private model is the local baseline.
        """
        return self.talks and not self.once

    @property
    def taught(self) -> bool:
        """Return whether a DP model has a teacher without DP, so that its ε is nominal unless β = 0."""
        return any(role.dp and role.taught for role in self.learners.values())

    @property
    def ignores(self) -> tuple[str, ...]:
        """Return the keys and sections of a pipeline without effect on this method."""
        found: tuple[str, ...] = () if self.share("generator") else ("ddpm.", "mpcpa.")
        if not any(share.in_rounds for share in self.without_dp):
            found += ("replay.",)
        elif self.share("buffer") is None:
            found += ("replay.buffer", "replay.unchecked")
        if self.travels is None:
            found += ("topology.", "train.optimizer_after_exchange")
        found += _OF_ROUNDS if self.once else ("train.from_released",)
        if not self.starts:
            found += ("train.init_from",)
        if not self.keeps_lone:
            found += ("train.local_baseline",)
        if not self.talks:
            found += _OF_ANSWERS
        return found if self.taught else found + _OF_PROXIES

    def graph(self, seed: int) -> Topology:
        """Return the graph of mixing; one without edges where nothing is mixed."""
        return (self.mixed or Share("model", "none")).graph(seed)


_OF_PROXIES = ("train.alpha", "train.beta", "model.proxy")
_OF_ANSWERS = ("train.val_fraction", "predict.model")
_OF_ROUNDS = (
    *("train.rounds", "train.epochs_per_round", "train.batch_size", "train.lr", "train.private_lr"),
    *("train.weight_decay", "train.tune", "train.balance", "model.", "privacy.clip", "topology."),
)
PRIVATE, COMMON = {"private": Role(dp=False)}, {"private": Role(dp=False, common=True)}
PRIVATE_WITH_DP, COMMON_WITH_DP = {"private": Role(dp=True)}, {"private": Role(dp=True, common=True)}
_TAUGHT_PAIR = {"private": Role(dp=False, taught=True), "proxy": Role(dp=True, common=True, taught=True)}
"""A private model and a proxy with differential privacy that teach each other."""
_WITH_HEAD = {"private": Role(dp=False), "shared": Role(dp=True, common=True)}


def supervised(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    """Train the private model on a batch; return its loss."""
    from wsi_fl.learning.local import supervised_step

    del weights
    return {"private": supervised_step(learners["private"], batch, noise)}


def _mutual(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    """Step the proxy, then the private model, taught by the updated proxy (Algorithm 1, lines 3–4).

    One forward pass of the private model serves both steps (Zhang et al., 2018).
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
    """Compute the class statistics of all rows; the private model was fitted before."""
    from wsi_fl.learning.local import sum_up

    del weights
    sum_up(learners["shared"], batch, noise)
    return {}


def _oneshot() -> Method:
    """Return the one-shot method: heads computed from class statistics, which each site releases once.

    In its variant the statistics are read from files, and nothing is sent.
    """
    sums = Share("sums", "star", "shared", times="once")
    row = Method("One-shot", "class statistics, released once", _WITH_HEAD, _take_sums, (sums,))
    by_files = replace(row, shares=(replace(sums, by=FILES),), learns_from="nothing")
    return replace(row, variants={("train.from_released", True): by_files})


_OWN = {
    ALONE: Method("Regular", "local training only", PRIVATE_WITH_DP, supervised),
    POOLED: Method("Joint", "all data pooled", PRIVATE_WITH_DP, supervised, learns_from="everybody"),
    "fedavg": Method(
        "FedAvg", "one averaged model, central", COMMON_WITH_DP, supervised, (Share("model", "star"),)
    ),
    "avgpush": Method(
        "AvgPush",
        "one averaged model, no centre",
        COMMON_WITH_DP,
        supervised,
        (Share("model", "exponential"),),
    ),
    "cwt": Method("CWT", "one model, passed round", COMMON_WITH_DP, supervised, (Share("model", "ring"),)),
    "fml": Method(
        "FML", "proxies averaged, central", _TAUGHT_PAIR, _mutual, (Share("model", "star", "proxy"),)
    ),
    DEFAULT: Method(
        "ProxyFL",
        "proxies travel, no centre",
        _TAUGHT_PAIR,
        _mutual,
        (Share("model", "exponential", "proxy"),),
    ),
    "oneshot": _oneshot(),
}

METHODS = Table("wsi_fl.methods", _OWN, Method)
"""Methods by the name of `--method`; other packages add theirs as entry points of `wsi_fl.methods`."""


def names_of(asks: Callable[[Method], bool] = lambda _: True) -> str:
    """Return the names of methods with a property, for messages."""
    return ", ".join(name for name, row in METHODS.items() if asks(row))
