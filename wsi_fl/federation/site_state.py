"""A site in a run: models, PushSum state, buffer, releases and checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from wsi_fl.data.cohort import Cohort, concatenate_examples
from wsi_fl.data.metrics import Probabilities
from wsi_fl.data.privacy_units import Canaries, LearnsFrom, PrivacyUnits, TrainingSet, build_training_set
from wsi_fl.federation.methods import Method
from wsi_fl.federation.push_sum import PushSum
from wsi_fl.learning.local_training import Learner, Learners
from wsi_fl.models import schema_digest
from wsi_fl.privacy.ledger import PrivacyLedger
from wsi_fl.privacy.ledger_file import Release, ReleaseValues, digest_values
from wsi_fl.privacy.privacy_plan import PrivacyPlan
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.types import WsiFlError

Flat = NDArray[np.uint8]
_LABEL_TYPE = np.dtype("<u2")
_BUFFER = "buffer"  # name in ledgers and checkpoints


@dataclass(frozen=True)
class BufferShape:
    """The agreed shape of buffers: n labelled images [size_px, size_px, channels] of n_classes classes."""

    n: int
    size_px: int
    channels: int
    n_classes: int

    @property
    def n_bytes(self) -> int:
        """Return the number of bytes of all labels and pixels."""
        return self.n * (_LABEL_TYPE.itemsize + self.size_px**2 * self.channels)

    @property
    def schema(self) -> str:
        """Return the SHA-256 that identifies the shape."""
        return hashlib.sha256(json.dumps(["buffer", asdict(self)], sort_keys=True).encode()).hexdigest()

    @staticmethod
    def pack_samples(pixels: NDArray[np.uint8], label: NDArray[np.int64]) -> Flat:
        """Return uint8[n, h, w, c] and labels int64[n] as uint8[d]: labels as little-endian uint16, then pixels."""
        return np.concatenate([label.astype(_LABEL_TYPE).view(np.uint8), pixels.reshape(-1)])

    def unpack_samples(self, values: Flat) -> Cohort:
        """Return the samples of a valid buffer; each slide and patient is named "synthetic"."""
        head = self.n * _LABEL_TYPE.itemsize
        pixels = values[head:].reshape(self.n, self.size_px, self.size_px, self.channels)
        name = np.full(self.n, "synthetic")
        return Cohort.from_columns(pixels.__getitem__, self._read_labels(values), name, name)

    def find_problem(self, values: Flat) -> str:
        """Return why bytes are no buffer of this shape, or ""."""
        if len(values) != self.n_bytes:
            return f"it has {len(values)} bytes, agreed on {self.n_bytes}"
        if (largest := int(self._read_labels(values).max())) >= self.n_classes:
            return f"it holds a label {largest}, and there are {self.n_classes} classes"
        return ""

    def _read_labels(self, values: Flat) -> NDArray[np.int64]:
        return values[: self.n * _LABEL_TYPE.itemsize].copy().view(_LABEL_TYPE).astype(np.int64)


@dataclass(frozen=True)
class Buffer:
    """Labelled synthetic images, drawn once from a site's generator; its release is uint8[shape.n_bytes].

    Their provenance (generator, its check, seed) stays at the site.
    """

    shape: BufferShape
    values: Flat
    provenance: Mapping[str, Any]


class MakeModel(Protocol):
    """A factory of a site's models by role."""

    def __call__(self, role: str, *, common: bool) -> nn.Module:
        """Return a fresh model; a private model has the site's architecture and start unless `common`."""
        ...


class ChooseEngine(Protocol):
    """A choice of how the per-example gradients of a model are summed."""

    def __call__(self, role: str, model: nn.Module, *, common: bool) -> str | None:
        """Return an engine of DP-SGD; None for the model's default."""
        ...


@dataclass(kw_only=True)
class Participant:
    """What a site brings to a run, read once.

    Attributes:
        train, validation, tests: its examples; validation None for none, tests by "own" (local) and "merged" (pooled).
        units: privacy units, rows or patients, canaries included.
        ledger: the account of its spending and releases, opened under its terms.
        plan: noise and cost of a round; None without differential privacy.
        canaries: among its training examples, for an audit; None for none.
        buffer: synthetic samples, which it releases; None for none.
        receives: whether it has no labels: it trains and sends nothing, and receives.
        returning: whether it returns after a dropout, and waits for a share of the others' mass.
        batch_size: examples of its batches without a privacy plan; None for the recipe's.
    """

    name: str
    train: Cohort
    n_classes: int
    units: PrivacyUnits
    ledger: PrivacyLedger
    plan: PrivacyPlan | None
    folder: SiteFolder
    make_model: MakeModel
    choose_engine: ChooseEngine
    validation: Cohort | None = None
    tests: Mapping[str, Cohort] = field(default_factory=dict)
    canaries: Canaries | None = None
    buffer: Buffer | None = None
    receives: bool = False
    returning: bool = False
    batch_size: int | None = None


@dataclass(kw_only=True)
class Site(Participant):
    """A site of this process in a run: what it brought, and what changes.

    Attributes:
        learners: its models by role.
        held_out: float64[n, classes], cross-validated predictions of local models on its training rows; None where
            unknown.
        tuned_settings: the tuned settings of its local models, as its run stores them; None for none.
        active: whether it participates in the graph, and its DP models are trained.
        push: PushSum state of the exchanged parameters; None without exchange, and before and after participation.
        buffer_release: release of its buffer in the current round.
        release_digest: SHA-256 of its newest release, which is part of `push`, or of its newest local DP model; ""
            before the first round.
        received_buffers: buffers of other sites, by index.
        announced_units: number of units and noise multiplier of each site, by index, as announced before the run.
        distances: L2 distances of the last received models from the local one.
        rejected: messages rejected in this round, with reasons.
        diverged: roles of models that diverged and are frozen; not disclosed.
        losses, seconds: mean loss by role, and time, of the current round.
    """

    index: int
    learners: Learners
    device: torch.device
    held_out: Probabilities | None = None
    tuned_settings: Mapping[str, Any] | None = None
    active: bool = True
    push: PushSum | None = None
    buffer_release: Release | None = None
    release_digest: str = ""
    received_buffers: dict[int, Flat] = field(default_factory=dict)
    announced_units: dict[int, tuple[int, float]] = field(default_factory=dict)
    distances: list[float] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    losses: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def n_canaries(self) -> int:
        """Return the number of canaries, included or not."""
        return len(self.canaries.included) if self.canaries else 0

    def training_examples(self) -> Cohort:
        """Return the examples for batches: training rows and included canaries."""
        return (
            self.train if self.canaries is None else concatenate_examples([self.train, self.canaries.select_planted()])
        )

    def training_set(self, learns_from: LearnsFrom) -> TrainingSet | None:
        """Return the training set of a round; None for a round without batches."""
        real, synthetic, received = TrainingSet(self.training_examples(), self.units), None, []
        if self.buffer is not None:
            unpack = self.buffer.shape.unpack_samples
            synthetic = unpack(self.buffer.values)
            received = [unpack(values) for _, values in sorted(self.received_buffers.items())]
        return build_training_set(learns_from, real, synthetic, received)

    def mixing_learner(self, method: Method) -> Learner:
        """Return the learner with the exchanged parameters."""
        assert method.mixing_role is not None
        return self.learners[method.mixing_role]

    def set_active(self, active: bool) -> None:
        """Let the site participate, or leave; after that no DP model is trained any more."""
        self.active = active
        if not active:
            self.push = None
        for role, learner in self.learners.items():
            learner.frozen = role in self.diverged or (learner.is_private and not active)

    def freeze_role(self, role: str) -> None:
        """Stop the training of a diverged model."""
        self.diverged.append(role)
        self.learners[role].frozen = True


def release_model(site: Site, method: Method, round_: int, *, weight: float | None = None) -> Release | None:
    """Return the release of a round, recorded in the ledger first (Algorithm 1, line 7); None for none.

    Args:
        weight: of the model in the mean of this round; by default its PushSum weight.
    """
    if not site.active or site.receives:
        return None
    if method.round_disclosure is None:
        if site.plan is not None:
            site.release_digest = _hash_local_models(site)
            site.ledger.record(round_, site.plan, f"kept {site.release_digest}")
        return None
    learner = site.mixing_learner(method)
    assert site.push is not None
    vector = learner.parameter_vector()
    site.push = site.push.add_training(vector) if weight is None else PushSum.weigh_model(vector, weight)
    released = site.ledger.release(
        round_,
        site.push.x,
        schema=schema_digest(learner.model),
        weight=site.push.w,
        mechanism=site.plan,
        content=method.round_disclosure.content,
    )
    site.release_digest = released.digest
    return released


def _hash_local_models(site: Site) -> str:
    """Return the SHA-256 of the parameters of local models with differential privacy."""
    return digest_values(np.concatenate([k.parameter_vector() for k in site.learners.values() if k.is_private]))


def relay_mixture(site: Site, method: Method, round_: int) -> Release:
    """Return a site's mixture, computed from releases alone, to be passed on; recorded in the ledger."""
    assert site.push is not None
    agreed_schema = schema_digest(site.mixing_learner(method).model)
    return site.ledger.relay_mixture(
        round_, site.push.x, own_sha256=site.release_digest, schema=agreed_schema, weight=site.push.w
    )


def reissue_model(site: Site, method: Method, round_: int) -> Release | None:
    """Return the release of a round before a restart, byte for byte, recorded once more."""
    if method.mixing_role is None and site.plan is not None and site.active:
        site.ledger.settle_round(round_, _hash_local_models(site))
    if method.mixing_role is None or site.push is None:
        return None
    agreed_schema = schema_digest(site.mixing_learner(method).model)
    return site.ledger.release_again(round_, site.push.x, schema=agreed_schema, weight=site.push.w)


def release_once(
    ledger: PrivacyLedger, round_: int, values: ReleaseValues, agreed_schema: str, content: str
) -> Release:
    """Return a release without differential privacy, once in a run; after a restart the same bytes.

    Args:
        values: float32[d] or uint8[d], of the agreed schema.
        content: its kind, which the site's file must allow.

    Raises:
        WsiFlError: when other bytes of this kind have left in this run, or the site does not allow it.
    """
    try:
        return ledger.release_again(round_, values, schema=agreed_schema)
    except WsiFlError:
        if any(entry.split()[0] == content for entry in ledger.list_releases()):
            raise WsiFlError(
                f"site {ledger.site}: a different {content} has left it in this run before; start a new run"
            ) from None
        released = ledger.release(round_, values, schema=agreed_schema, mechanism=None, content=content)
        ledger.record_transmission(round_, released.digest)
        return released


def release_buffer(site: Site, round_: int) -> None:
    """Record the release of a site's buffer in a round, without differential privacy."""
    assert site.buffer is not None
    shape, values = site.buffer.shape, site.buffer.values
    site.buffer_release = site.ledger.release(round_, values, schema=shape.schema, mechanism=None, content=_BUFFER)


def reissue_buffer(site: Site, round_: int) -> Release:
    """Return the release recorded by `release_buffer`, also after a restart."""
    assert site.buffer is not None
    if site.buffer_release is not None and site.buffer_release.round == round_:
        return site.buffer_release
    return site.ledger.release_again(round_, site.buffer.values, schema=site.buffer.shape.schema)


def write_checkpoint(site: Site, round_: int) -> None:
    """Write a checkpoint, with everything to send the same bytes again and resume."""
    tensors = {
        f"{role}/{name}": value
        for role, learner in site.learners.items()
        for name, value in learner.state_tensors().items()
    }
    if site.push is not None:
        tensors["push/x"] = torch.from_numpy(np.array(site.push.x))
    for sender, values in site.received_buffers.items():
        tensors[f"{_BUFFER}/{sender}"] = torch.from_numpy(np.array(values))
    document = {
        "round": round_,
        "active": site.active,
        "returning": site.returning,
        "weight": site.push.w if site.push else None,
        "losses": site.losses,
        "heard": site.distances,
        "diverged": site.diverged,
    }
    site.folder.save_checkpoint(round_, tensors, document)


def restore_checkpoint(site: Site, round_: int) -> None:
    """Load the checkpoint of a round, a state after its training and before its exchange."""
    tensors, document = site.folder.load_checkpoint(round_)
    for role, learner in site.learners.items():
        prefix = f"{role}/"
        learner.load_state({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    prefix = f"{_BUFFER}/"
    site.received_buffers = {int(k.removeprefix(prefix)): v.numpy() for k, v in tensors.items() if k.startswith(prefix)}
    site.losses, site.distances = document["losses"], document["heard"]
    site.diverged = document["diverged"]
    site.returning = document["returning"]
    site.set_active(document["active"])
    if "push/x" in tensors:
        site.push = PushSum(tensors["push/x"].numpy(), float(document["weight"]))
        site.release_digest = digest_values(site.push.x)
