"""The table of federated methods; `loop.py` runs them all.

A method lists everything that leaves a site as its disclosures. The ledger's content, the kinds that `allow` must name,
the graphs of a round, plans, dossiers, tables and texts follow from them. This file imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from wsi_fl.federation.payload import ModelPayload
from wsi_fl.plugins import PluginTable

if TYPE_CHECKING:
    from wsi_fl.data.privacy_units import LearnsFrom
    from wsi_fl.federation.topology import Topology
    from wsi_fl.learning.local_training import Batch, Learners
    from wsi_fl.privacy.cipher import CipherStream

DisclosureKind = Literal["model", "sums", "buffer", "generator"]
FILES, HUB = "files", "hub"
"""Routes other than a graph of rounds: files that people copy; everything to the first site."""
DEFAULT_METHOD, LOCAL_METHOD, POOLED_METHOD = "proxyfl", "regular", "joint"
"""The default method of `train`, and the two baselines of comparisons."""


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
    has_teacher: bool = False


@dataclass(frozen=True)
class Disclosure:
    """A kind of data that leaves a site.

    Attributes:
        kind: parameters of a model, class statistics, a buffer of synthetic samples, or a generator.
        route: its graph: a name of `topology.TOPOLOGIES`, a topology, or FILES or HUB.
        role: the role of the model: private, proxy or shared.
        protection: "dp": by differential privacy or, if switched off, by the site's permission; "leave": by that
            permission alone, given by name in the site's file.
        timing: all rounds, once (in the first round), or before the first or after the last round.
    """

    kind: DisclosureKind
    route: str | Topology
    role: Literal["private", "proxy", "shared"] = "private"
    protection: Literal["dp", "leave"] = "dp"
    timing: Literal["rounds", "once", "before", "after"] = "rounds"

    @property
    def content(self) -> Literal["model", "buffer", "generator"]:
        """Return its kind in ledgers and in `allow` of site files; class statistics count as a model."""
        return "model" if self.kind == "sums" else self.kind

    @property
    def is_in_rounds(self) -> bool:
        """Return whether it is sent along a graph in rounds."""
        return self.timing in ("rounds", "once") and self.route != FILES

    def is_unprotected(self, has_dp: bool) -> bool:
        """Return whether it leaves without differential privacy, given whether the settings enable it."""
        return self.protection == "leave" or not has_dp

    def build_graph(self, seed: int) -> Topology:
        """Return its graph; the seed is for graphs that are drawn at random."""
        from wsi_fl.federation.topology import find_topology

        return find_topology(self.route, seed) if isinstance(self.route, str) else self.route


@dataclass(frozen=True)
class Method:
    """A federated method.

    Attributes:
        name: as its paper writes it.
        summary: a summary in a few words.
        learners: the models of a site by role: "private", and "proxy" or "shared" where there is one.
        step: one local step on a batch; returns the loss of each role.
        disclosures: everything that leaves a site.
        payload: what travels in rounds; by default a trained model.
        learns_from: the source of a round's training examples, see `learning.units`; "everybody" is pooled training.
        variants: (key, value) of a pipeline → the method in place of this one for that value.
        load_hooks: imports and returns its `StudyHooks`; None for none.
        load_baselines: imports and returns the function that trains the method and its paper's baselines, and the one
            that renders their table; None for none.
        sections: the sections that other packages add to pipelines and that have an effect on it, as "replay.".
        inert_settings: keys in these sections without effect on it.
    """

    name: str
    summary: str
    learners: Mapping[str, Role]
    step: Callable[[Learners, Batch, Weights, CipherStream], dict[str, float]]
    disclosures: tuple[Disclosure, ...] = ()
    learns_from: LearnsFrom = "own"
    payload: ModelPayload = field(default_factory=ModelPayload)
    variants: Mapping[tuple[str, Any], Method] = field(default_factory=dict)
    load_hooks: Callable[[], object] | None = None
    load_baselines: Callable[[], tuple[Callable[..., Any], Callable[[Any], Any]]] | None = None
    sections: tuple[str, ...] = ()
    inert_settings: tuple[str, ...] = ()

    def find_disclosure(self, *kinds: DisclosureKind) -> Disclosure | None:
        """Return the first disclosure of these kinds, or None."""
        return next((disclosure for disclosure in self.disclosures if disclosure.kind in kinds), None)

    @property
    def round_disclosure(self) -> Disclosure | None:
        """Return the disclosure that is mixed in rounds, or None."""
        return next(
            (
                disclosure
                for disclosure in self.disclosures
                if disclosure.is_in_rounds and disclosure.kind in ("model", "sums")
            ),
            None,
        )

    @property
    def mixing_role(self) -> str | None:
        """Return the role of the mixed parameters, or None."""
        return self.round_disclosure.role if self.round_disclosure is not None else None

    @property
    def bare_disclosures(self) -> tuple[Disclosure, ...]:
        """Return the disclosures without differential privacy by design."""
        return tuple(disclosure for disclosure in self.disclosures if disclosure.protection == "leave")

    @property
    def uses_files(self) -> bool:
        """Return whether sites take part by files that they released before."""
        return any(disclosure.route == FILES for disclosure in self.disclosures)

    @property
    def needs_initial_weights(self) -> bool:
        """Return whether a trained model is exchanged, which needs initial weights."""
        return self.mixing_role is not None and not self.payload.is_single_release

    @property
    def has_exchange(self) -> bool:
        """Return whether sites exchange anything in rounds."""
        return any(disclosure.is_in_rounds for disclosure in self.disclosures)

    @property
    def has_local_baseline(self) -> bool:
        """Return whether a site trains a local baseline beside the models of the method.

        For payloads of a single release the private model is the local baseline.
        """
        return self.has_exchange and not self.payload.is_single_release

    @property
    def has_bare_teacher(self) -> bool:
        """Return whether a DP model has a teacher without DP, so that its ε is nominal unless β = 0."""
        return any(role.dp and role.has_teacher for role in self.learners.values())

    @property
    def inert_keys(self) -> tuple[str, ...]:
        """Return the keys and sections of a pipeline without effect on this method."""
        sections = (f"{name}." for name in PluginTable("wsi_fl.settings", {}, type))
        keys = (*(section for section in sections if section not in self.sections), *self.inert_settings)
        keys += self.payload.inert_keys
        if self.mixing_role is None:
            keys += ("topology.", "train.optimizer_after_exchange")
        if not self.payload.is_single_release:
            keys += ("train.from_released",)
        if not self.needs_initial_weights:
            keys += ("train.init_from",)
        if not self.has_local_baseline:
            keys += ("train.local_baseline",)
        if not self.has_exchange:
            keys += _PREDICTION_KEYS
        return keys if self.has_bare_teacher else keys + _PROXY_KEYS

    def build_graph(self, seed: int) -> Topology:
        """Return the graph of mixing; one without edges where nothing is mixed."""
        return (self.round_disclosure or Disclosure("model", "none")).build_graph(seed)


_PROXY_KEYS = ("train.alpha", "train.beta", "model.proxy")
_PREDICTION_KEYS = ("train.val_fraction", "predict.model")
PRIVATE, COMMON = {"private": Role(dp=False)}, {"private": Role(dp=False, common=True)}
PRIVATE_WITH_DP, COMMON_WITH_DP = {"private": Role(dp=True)}, {"private": Role(dp=True, common=True)}
_TAUGHT_PAIR = {"private": Role(dp=False, has_teacher=True), "proxy": Role(dp=True, common=True, has_teacher=True)}
"""A private model and a proxy with differential privacy that teach each other."""


def step_private(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    """Train the private model on a batch; return its loss."""
    from wsi_fl.learning.local_training import take_supervised_step

    del weights
    return {"private": take_supervised_step(learners["private"], batch, noise)}


def _step_mutual(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    """Step the proxy, then the private model, taught by the updated proxy (Algorithm 1, lines 3–4).

    One forward pass of the private model serves both steps (Zhang et al., 2018).
    """
    from wsi_fl.learning.local_training import take_mutual_step

    private, proxy = learners["private"], learners["proxy"]
    x = batch[0]
    private_logits = private.forward(x) if len(x) else None
    teacher_logits = private_logits.detach() if private_logits is not None and weights.beta else None
    losses = {"proxy": take_mutual_step(proxy, teacher_logits, weights.beta, batch, noise)}
    proxy_logits = proxy.predict_logits(x) if len(x) and weights.alpha else None
    losses["private"] = take_mutual_step(private, proxy_logits, weights.alpha, batch, noise, logits=private_logits)
    return losses


_BUILT_IN = {
    LOCAL_METHOD: Method("Regular", "local training only", PRIVATE_WITH_DP, step_private),
    POOLED_METHOD: Method("Joint", "all data pooled", PRIVATE_WITH_DP, step_private, learns_from="everybody"),
    "fedavg": Method(
        "FedAvg", "one averaged model, central", COMMON_WITH_DP, step_private, (Disclosure("model", "star"),)
    ),
    "avgpush": Method(
        "AvgPush",
        "one model per site, passed on in a graph",
        COMMON_WITH_DP,
        step_private,
        (Disclosure("model", "exponential"),),
    ),
    "cwt": Method("CWT", "one model, passed round", COMMON_WITH_DP, step_private, (Disclosure("model", "ring"),)),
    "fml": Method(
        "FML", "proxies averaged, central", _TAUGHT_PAIR, _step_mutual, (Disclosure("model", "star", "proxy"),)
    ),
    DEFAULT_METHOD: Method(
        "ProxyFL",
        "proxies travel, no centre",
        _TAUGHT_PAIR,
        _step_mutual,
        (Disclosure("model", "exponential", "proxy"),),
    ),
}

METHODS = PluginTable("wsi_fl.methods", _BUILT_IN, Method)
"""Methods by the name of `--method`; other packages add theirs as entry points of `wsi_fl.methods`."""


def list_names(has_property: Callable[[Method], bool] = lambda _: True) -> str:
    """Return the names of methods with a property, for messages."""
    return ", ".join(name for name, row in METHODS.items() if has_property(row))
