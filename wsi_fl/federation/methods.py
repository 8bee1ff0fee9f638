"""Every federated method as a row of one table; `loop.py` runs them all.

What leaves a site is said once, by the shares of its method. The ledger's content, what `allow` must name, the graphs
of a round, plans, dossiers, tables and words follow from them. This file imports next to nothing.
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
"""The model that is made of all sites' sums, as `models.build` knows it; none that is trained."""
FILES, HUB = "files", "hub"
"""Ways that are no graph of rounds: people carry files; everything goes to the first site alone."""
DEFAULT, ALONE, POOLED = "proxyfl", "regular", "joint"
"""What `train` runs where nothing is said, and the two that others are measured against."""


class MakeLearner(Protocol):
    """Build the learner of a role: "private", "proxy" or "shared"."""

    def __call__(self, role: str, *, dp: bool, common: bool = False) -> Learner:
        """Return the learner. A private model has the site's own architecture and start unless `common`."""
        ...


@dataclass(frozen=True)
class Weights:
    """α of the private model and β of the proxy (eqs. 4 and 5)."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Role:
    """How a model of a site is learned.

    Attributes:
        dp: under differential privacy, where the settings have it.
        common: with the architecture and start that all sites share, as every proxy is.
        taught: with the site's other model as its teacher. Where that has no ε, this one's is nominal, unless β = 0.
    """

    dp: bool
    common: bool = False
    taught: bool = False


@dataclass(frozen=True)
class Share:
    """One kind of thing that a site lets go.

    Attributes:
        what: parameters of a model, sums of features, a buffer of synthetic samples, or a model that generates some.
        by: the graph along which it goes: a name of `topology.TOPOLOGIES`, a topology, or one of FILES and HUB.
        of: whose parameters or features: the private model's, the proxy's or the shared head's.
        protected: "dp": by differential privacy or, where the settings have none, by the site's leave; "leave": by
            that alone, for the site's file must allow it by name.
        times: in all rounds, once (in the first round), or once before the first or after the last round.
        made_by: the module of the stage that makes or carries what the loop does not: `agreed_buffer` of a buffer,
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
        """Return its kind, as ledgers and the `allow` of site files name it; sums count as a model."""
        return "model" if self.what == "sums" else self.what

    @property
    def in_rounds(self) -> bool:
        """Return whether the loop sends it along a graph."""
        return self.times in ("rounds", "once") and self.by != FILES

    def is_bare(self, with_dp: bool) -> bool:
        """Return whether it leaves without differential privacy, given whether the settings have any."""
        return self.protected == "leave" or not with_dp

    def stage(self) -> Any:
        """Return the module that makes or carries it."""
        return import_module(self.made_by)

    def graph(self, seed: int) -> Topology:
        """Return its graph; a seed orders the sites where the graph draws."""
        from wsi_fl.federation.topology import named

        return named(self.by, seed) if isinstance(self.by, str) else self.by


@dataclass(frozen=True)
class Method:
    """What distinguishes one method from another.

    Attributes:
        name: as its paper writes it.
        does: what it does, in a few words.
        learners: the models of a site by role: "private", and "proxy" or "shared" where there is one.
        step: one local step on a batch; returns the loss of each role.
        shares: what a site lets go.
        learns_from: what a round is learned from, as `learning.units` knows it; "everybody" is what nobody may
            do, and what all are measured against.
        variants: (key, value) of a pipeline → the row that takes this one's place where a pipeline has that value.
        baselines: the module whose `baselines` trains it and what its paper measures it against, in one table, and
            whose `baselines_lines` shows that; "" where there is none.
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
        """Return the first thing of these kinds that leaves a site; None where none does."""
        return next((share for share in self.shares if share.what in kinds), None)

    def shares_at(self, times: str) -> list[Share]:
        """Return what leaves a site at some time, as `Share.times` says it."""
        return [share for share in self.shares if share.times == times]

    @property
    def mixed(self) -> Share | None:
        """Return what sites send each other in a round and mix; None where nothing is mixed."""
        return next(
            (share for share in self.shares if share.in_rounds and share.what in ("model", "sums")), None
        )

    @property
    def travels(self) -> str | None:
        """Return the role whose parameters are mixed; None where none are."""
        return self.mixed.of if self.mixed is not None else None

    @property
    def without_dp(self) -> tuple[Share, ...]:
        """Return what leaves without differential privacy by design."""
        return tuple(share for share in self.shares if share.protected == "leave")

    @property
    def once(self) -> bool:
        """Return whether each site releases sums of all its rows once, instead of a trained model."""
        return self.share("sums") is not None

    @property
    def starts(self) -> bool:
        """Return whether a trained model travels, so that it needs initial weights."""
        return self.travels is not None and not self.once

    @property
    def talks(self) -> bool:
        """Return whether sites send each other anything in rounds."""
        return any(share.in_rounds for share in self.shares)

    @property
    def keeps_lone(self) -> bool:
        """Return whether a site learns the model that it would have alone beside those of the method.

        Where sums are released the private model is that one already.
        """
        return self.talks and not self.once

    @property
    def taught(self) -> bool:
        """Return whether a model under privacy has a teacher without it, so that its ε is nominal unless β = 0."""
        return any(role.dp and role.taught for role in self.learners.values())

    @property
    def ignores(self) -> tuple[str, ...]:
        """Return the keys and sections of a pipeline that have no effect on training by this method."""
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
        """Return the graph of what is mixed: nobody sends anything where nothing is."""
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
"""A private model and a proxy under differential privacy that learn from each other."""
_WITH_HEAD = {"private": Role(dp=False), "shared": Role(dp=True, common=True)}


def supervised(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    """Let the private model learn from a batch; return its loss."""
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
    """Compute the sums of all rows; the private model was fitted to all rows before."""
    from wsi_fl.learning.local import sum_up

    del weights
    sum_up(learners["shared"], batch, noise)
    return {}


def _oneshot() -> Method:
    """Return the method whose heads are computed from sums of features, which each site releases once.

    Where the sums lie in files by now, none are taken, and nothing travels.
    """
    sums = Share("sums", "star", "shared", times="once")
    row = Method("One-shot", "sums of features, released once", _WITH_HEAD, _take_sums, (sums,))
    by_files = replace(row, shares=(replace(sums, by=FILES),), learns_from="nothing")
    return replace(row, variants={("train.from_released", True): by_files})


_OWN = {
    ALONE: Method("Regular", "each site alone", PRIVATE_WITH_DP, supervised),
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
"""By the name that `--method` takes; another package adds its own as entry points of `wsi_fl.methods`."""


def names_of(asks: Callable[[Method], bool] = lambda _: True) -> str:
    """Return the names of all methods with a property, for messages."""
    return ", ".join(name for name, row in METHODS.items() if asks(row))
