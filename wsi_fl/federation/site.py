"""One site in a run: its models, its PushSum state, its buffer, what it releases, and its checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.federation.methods import Method, Weights
from wsi_fl.federation.mixing import PushSum
from wsi_fl.federation.topology import Topology
from wsi_fl.learning.examples import Augment, Examples, joined
from wsi_fl.learning.local import Learner, Learners
from wsi_fl.learning.metrics import Probabilities
from wsi_fl.learning.units import Canaries, TrainingSources, Units
from wsi_fl.models import schema
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Release, Values, digest
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.runs.site import SiteFolder
from wsi_fl.types import WsiFlError

Flat = NDArray[np.uint8]
_LABEL = np.dtype("<u2")
_BUFFER = "buffer"  # what a buffer is called in ledgers and checkpoints


@dataclass(frozen=True)
class BufferShape:
    """What all sites agreed on: buffers of n labelled images [size_px, size_px, channels] of n_classes classes."""

    n: int
    size_px: int
    channels: int
    n_classes: int

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all labels and all pixels together."""
        return self.n * (_LABEL.itemsize + self.size_px**2 * self.channels)

    @property
    def schema(self) -> str:
        """Return the SHA-256 that identifies the shape."""
        return hashlib.sha256(json.dumps(["buffer", asdict(self)], sort_keys=True).encode()).hexdigest()

    @staticmethod
    def packed(pixels: NDArray[np.uint8], label: NDArray[np.int64]) -> Flat:
        """Return uint8[n, h, w, c] and labels int64[n] as uint8[d]: labels as little-endian uint16, then pixels."""
        return np.concatenate([label.astype(_LABEL).view(np.uint8), pixels.reshape(-1)])

    def unpacked(self, values: Flat) -> Examples:
        """Return the samples of a buffer without a problem; every slide and patient is called "synthetic"."""
        head = self.n * _LABEL.itemsize
        pixels = values[head:].reshape(self.n, self.size_px, self.size_px, self.channels)
        name = np.full(self.n, "synthetic")
        return Examples(lambda rows: pixels[rows], self._labels(values), name, name)

    def problem_of(self, values: Flat) -> str:
        """Return why these bytes are no buffer of this shape, or "" where they are one."""
        if len(values) != self.n_bytes:
            return f"it has {len(values)} bytes, agreed on {self.n_bytes}"
        if (beyond := int(self._labels(values).max())) >= self.n_classes:
            return f"it holds a label {beyond}, and there are {self.n_classes} classes"
        return ""

    def _labels(self, values: Flat) -> NDArray[np.int64]:
        return values[: self.n * _LABEL.itemsize].copy().view(_LABEL).astype(np.int64)


@dataclass(frozen=True)
class Buffer:
    """Labelled synthetic images, drawn once from a site's generator: what it shares, uint8[shape.n_bytes].

    Where they come from, the generator, its check and the seed, stays with the site.
    """

    shape: BufferShape
    values: Flat
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Schedule:
    """What all sites agree on."""

    rounds: int
    epochs_per_round: int
    batch_size: int  # units (rows or patients) of a batch, where a site has no privacy plan
    eval_every: int
    seed: int
    weights: Weights
    self_weight: float  # P[i, i] where the graph leaves it open
    make_augment: Callable[[CipherStream], Augment | None]  # what it draws on → augmentation of one image
    graph: Topology | None = None  # instead of the method's own
    # what a site predicts with: "private", "proxy", "shared", "mean", "local", "ensemble" for the mixture that suits
    # its own rows, or "auto" for what the site finds best
    answer: str = "private"
    reset_optimizer: bool = False  # whether the optimizer of what travels starts afresh after every exchange
    insecure_seed: int | None = None  # fixed noise, for tests alone
    # how many sites may put together what they know, where noise is added once in all; None where each site adds
    # its own
    colluding: int | None = None
    dropouts: int = 0  # how many sites may go away while such a sum is made, which then is that of the others


@dataclass
class Site:
    """One site that lives in this process."""

    index: int
    name: str
    learners: Learners
    train: Examples
    tests: Mapping[str, Examples]  # what its model is evaluated on: "own", and "merged" where that is allowed
    ledger: PrivacyLedger
    folder: SiteFolder
    device: torch.device
    plan: PrivacyPlan | None  # what one round applies and costs, or None without differential privacy
    units: Units  # what privacy counts, and how it is drawn: rows or patients, canaries among them
    n_classes: int  # how many classes there are
    # float64[n, classes], what models like the one it would have alone say of its training rows without having seen
    # their patients; None where that is not known
    held_out: Probabilities | None = None
    # the settings that it chose for models of its own, as its run keeps them; None where it chose none
    tuned: Mapping[str, Any] | None = None
    # what it holds out to choose what predicts, and learns nothing from; None for nothing
    validation: Examples | None = None
    canaries: Canaries | None = (
        None  # those that are planted among what it learns from, for an audit; None for none
    )
    receives: bool = (
        False  # whether it has no labels: it learns nothing, sends nothing and takes what others send
    )
    returning: bool = (
        False  # whether it was lost and comes back; it waits to be given a share of the others' mass
    )
    active: bool = (
        True  # whether it takes part in the graph and its models under differential privacy still learn
    )
    # PushSum state of the travelling parameters; None when nothing travels, or before and after its part
    push: PushSum | None = None
    buffer: Buffer | None = (
        None  # its own synthetic samples, which it shares; None where the method carries none
    )
    leaving: Release | None = None  # that buffer as it was released in the round that is on
    # SHA-256 of what it made in the newest round: the release that is part of what `push` holds, or a model that
    # stays; "" before the first
    own: str = ""
    received: dict[int, Flat] = field(
        default_factory=dict
    )  # the buffers it holds of other sites, by their index
    # how many units every site has, by its index, and its noise multiplier, as it told before the run
    announced: dict[int, tuple[int, float]] = field(default_factory=dict)
    # how far the models that arrived lay from its own (L2), the last ones
    heard: list[float] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)  # what it did not accept in this round, and why
    # roles of models that were no longer finite and stay as they were before; nobody else is told
    diverged: list[str] = field(default_factory=list)
    losses: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def n_canaries(self) -> int:
        """Return how many canaries were tossed for, whether they are in or out."""
        return len(self.canaries.included) if self.canaries else 0

    def learned(self) -> Examples:
        """Return what batches are drawn from: the training rows, and the canaries that are in."""
        return self.train if self.canaries is None else joined([self.train, self.canaries.planted()])

    def material(self) -> TrainingSources:
        """Return the data that the site learns from."""
        if self.buffer is None:
            return TrainingSources(self.learned(), self.units)
        unpacked = self.buffer.shape.unpacked
        received = [unpacked(values) for _, values in sorted(self.received.items())]
        return TrainingSources(self.learned(), self.units, unpacked(self.buffer.values), received)

    def traveller(self, method: Method) -> Learner:
        """Return the learner whose parameters are exchanged."""
        assert method.travels is not None
        return self.learners[method.travels]

    def shared_head(self, method: Method) -> SharedHead:
        """Return the head of sums that is exchanged."""
        head = self.traveller(method).model
        assert isinstance(head, SharedHead)
        return head

    def settle(self, active: bool) -> None:
        """Let the site take part, or leave; after it has left, no model under privacy is trained any more."""
        self.active = active
        if not active:
            self.push = None
        for role, learner in self.learners.items():
            learner.frozen = role in self.diverged or (learner.with_dp and not active)

    def freeze(self, role: str) -> None:
        """Let a model that diverged learn no more."""
        self.diverged.append(role)
        self.learners[role].frozen = True


def release(site: Site, method: Method, round_: int) -> Release | None:
    """Return what leaves the site, recorded in its ledger first (Algorithm 1, line 7); None where nothing does."""
    if not site.active or site.receives:
        return None
    if method.mixed is None:
        if site.plan is not None:
            site.own = _kept(site)
            site.ledger.record(round_, site.plan, f"kept {site.own}")
        return None
    learner = site.traveller(method)
    assert site.push is not None
    site.push = site.push.trained(learner.vector())
    made = site.ledger.release(
        round_,
        site.push.x,
        schema=schema(learner.model),
        weight=site.push.w,
        mechanism=site.plan,
        content=method.mixed.content,
    )
    site.own = made.digest
    return made


def _kept(site: Site) -> str:
    """Return the SHA-256 of the parameters that were learned under differential privacy and stay at the site."""
    return digest(np.concatenate([k.vector() for k in site.learners.values() if k.with_dp]))


def relay(site: Site, method: Method, round_: int) -> Release:
    """Return the mixture that a site holds now, to be passed on; recorded, and computed from releases alone."""
    assert site.push is not None
    agreed = schema(site.traveller(method).model)
    return site.ledger.relay(round_, site.push.x, own=site.own, schema=agreed, weight=site.push.w)


def reissue(site: Site, method: Method, round_: int) -> Release | None:
    """Return the release of a round that was trained before a restart, byte for byte, on record once more."""
    if method.travels is None and site.plan is not None and site.active:
        site.ledger.settle(round_, _kept(site))
    if method.travels is None or site.push is None:
        return None
    agreed = schema(site.traveller(method).model)
    return site.ledger.reissue(round_, site.push.x, schema=agreed, weight=site.push.w)


def release_once(ledger: PrivacyLedger, round_: int, values: Values, agreed: str, content: str) -> Release:
    """Return what leaves once in a run, without differential privacy; after a restart the same bytes once more.

    Args:
        values: float32[d] or uint8[d], of the agreed schema.
        content: its kind, which the site must allow by name.

    Raises:
        WsiFlError: when other bytes of this kind have left in this run, or the site does not allow it.
    """
    try:
        return ledger.reissue(round_, values, schema=agreed)
    except WsiFlError:
        if any(said.split()[0] == content for said in ledger.released()):
            raise WsiFlError(
                f"site {ledger.site}: a different {content} has left it in this run before; start a new run"
            ) from None
        released = ledger.release(round_, values, schema=agreed, mechanism=None, content=content)
        ledger.sending(round_, released.digest)
        return released


def release_buffer(site: Site, round_: int) -> None:
    """Put on record that the site's buffer leaves it in a round, without differential privacy."""
    assert site.buffer is not None
    shape, values = site.buffer.shape, site.buffer.values
    site.leaving = site.ledger.release(round_, values, schema=shape.schema, mechanism=None, content=_BUFFER)


def reissue_buffer(site: Site, round_: int) -> Release:
    """Return what `release_buffer` put on record, to be sent, also after a restart."""
    assert site.buffer is not None
    if site.leaving is not None and site.leaving.round == round_:
        return site.leaving
    return site.ledger.reissue(round_, site.buffer.values, schema=site.buffer.shape.schema)


def checkpoint(site: Site, round_: int) -> None:
    """Write all that is needed to send the same bytes again and go on."""
    tensors = {
        f"{role}/{name}": value
        for role, learner in site.learners.items()
        for name, value in learner.state().items()
    }
    if site.push is not None:
        tensors["push/x"] = torch.from_numpy(np.array(site.push.x))
    for sender, values in site.received.items():
        tensors[f"{_BUFFER}/{sender}"] = torch.from_numpy(np.array(values))
    document = {
        "round": round_,
        "active": site.active,
        "returning": site.returning,
        "weight": site.push.w if site.push else None,
        "losses": site.losses,
        "heard": site.heard,
        "diverged": site.diverged,
    }
    site.folder.save_checkpoint(round_, tensors, document)


def restore(site: Site, round_: int) -> None:
    """Bring back the state that `checkpoint` kept of a round, after its training and before its exchange."""
    tensors, document = site.folder.load_checkpoint(round_)
    for role, learner in site.learners.items():
        prefix = f"{role}/"
        learner.load_state({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    prefix = f"{_BUFFER}/"
    site.received = {
        int(k.removeprefix(prefix)): v.numpy() for k, v in tensors.items() if k.startswith(prefix)
    }
    site.losses, site.heard = document["losses"], document["heard"]
    site.diverged = document["diverged"]
    site.returning = document["returning"]
    site.settle(document["active"])
    if "push/x" in tensors:
        site.push = PushSum(tensors["push/x"].numpy(), float(document["weight"]))
        site.own = digest(site.push.x)
