"""Training sets of a round, their privacy units, and canaries."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, Inputs, epoch_rows, joined, subset
from wsi_fl.types import Bags, Images, Shape, UsageError, WsiFlError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wsi_fl.learning.local import Batch
    from wsi_fl.privacy.cipher import CipherStream
    from wsi_fl.privacy.plan import PrivacyPlan

_INSTANCES = 8
"""Patches of a canary bag."""


# ---- units


@dataclass(frozen=True)
class Units:
    """The privacy units of a site and their training rows.

    Attributes:
        kind: "row" or "patient".
        n: number of units; public, and counted before a fold or validation patients are held out, since others see n
            and choose those settings. A unit may have no row.
        of_row: int64[rows], in [0, n): the unit of each training row.
        max_rows: maximum number of rows of a unit in a batch, a public constant; None for all.
    """

    kind: str
    n: int
    of_row: NDArray[np.int64]
    max_rows: int | None = None

    @cached_property
    def _rows_of(self) -> list[NDArray[np.int64]]:
        order = np.argsort(self.of_row, kind="stable")
        return np.split(order, np.searchsorted(self.of_row[order], np.arange(1, self.n)))

    @cached_property
    def _one_row_each(self) -> bool:
        return bool((np.diff(self.of_row) > 0).all())

    def rows(self, chosen: NDArray[np.int64], sampler: CipherStream) -> NDArray[np.int64]:
        """Return the rows int64[b] of the chosen units, at random at most `max_rows` of each."""
        if self._one_row_each and len(self.of_row):
            place = np.searchsorted(self.of_row, chosen).clip(max=len(self.of_row) - 1)
            rows: NDArray[np.int64] = place[self.of_row[place] == chosen]
            return rows
        found = [np.zeros(0, np.int64)]
        for rows in (self._rows_of[k] for k in chosen):
            few = self.max_rows is None or len(rows) <= self.max_rows
            found.append(rows if few else rows[sampler.permutation(len(rows))[: self.max_rows]])
        return np.concatenate(found)

    def epoch(self, batch_size: int, epochs: int, *, sampler: CipherStream) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of the batches of `epochs` shuffled passes over the units with rows, without privacy."""
        units = np.unique(self.of_row)
        for chosen in epoch_rows(len(units), batch_size, epochs, sampler=sampler):
            yield self.rows(units[chosen], sampler)

    def labelled(
        self, drawn: Iterator[tuple[Tensor, Tensor]], rows: list[NDArray[np.int64]], device: torch.device
    ) -> Iterator[Batch]:
        """Yield the batches of these rows, where units are patients with the patient of each row."""
        if self.kind == "row":
            yield from drawn
            return
        import torch

        for (x, y), chosen in zip(drawn, rows, strict=True):
            yield x, y, torch.from_numpy(self.of_row[chosen]).to(device)

    def only(self, rows: NDArray[np.int64]) -> Units:
        """Return the same units with the rows at positions int64[rows]; n stays."""
        return replace(self, of_row=self.of_row[rows])

    def with_rows(self) -> Units:
        """Return only the units with rows, for attacks on each unit."""
        units, of_row = np.unique(self.of_row, return_inverse=True)
        return replace(self, n=len(units), of_row=of_row.astype(np.int64))

    def with_canaries(self, included: NDArray[np.bool_]) -> Units:
        """Return the units and one for each canary bool[m], whose rows come after all others.

        Canaries that are not included have no row. So the number of units, the sample rate and the number of steps do
        not depend on the coins.
        """
        own = self.n + np.flatnonzero(included)
        return replace(self, n=self.n + len(included), of_row=np.concatenate([self.of_row, own]))


def rows_alone(n: int) -> Units:
    """Return the units of n rows, one each."""
    return Units("row", n, np.arange(n))


def whole_patients(patient: NDArray[np.str_], max_rows: int | None, site: str) -> Units:
    """Return the units of patients str[rows], one each.

    Raises:
        UsageError: where rows have no patient. As a unit, such a row could lack its guarantee: its patient may have
            other rows.
    """
    if n := int((patient == "").sum()):
        raise UsageError(
            f"site {site}: {n} training rows have no patient, so privacy.unit = 'patient' cannot protect their "
            "patients; name them in the site's table of slides, or use privacy.unit = 'row'"
        )
    names, which = np.unique(patient, return_inverse=True)
    return Units("patient", len(names), which.astype(np.int64), max_rows)


# ---- training sets

LearnsFrom = Literal[
    "own", "everybody", "own+received", "synthetic+received", "all synthetic", "generated", "nothing"
]
"""Sources of a round's training set. For "everybody" and "generated" the site's rows are pooled or generated before."""


@dataclass(frozen=True)
class TrainingSources:
    """Real and synthetic training data of a site.

    Attributes:
        real: its training rows and planted canaries.
        units: their privacy units.
        synthetic: the site's shared synthetic samples; None without any.
        received: buffers of other sites' synthetic samples.
    """

    real: Examples
    units: Units
    own: Examples | None = None
    received: Sequence[Examples] = ()

    def lesson(self, learns_from: LearnsFrom) -> TrainingSet | None:
        """Return the training set of a round; None for a round without batches."""
        if learns_from in ("own", "everybody", "generated"):
            return TrainingSet(self.real, self.units)
        received = joined(list(self.received)) if self.received else None
        if learns_from == "own+received":  # Pennisi et al., eq. 4
            return TrainingSet(self.real, self.units, received)
        if learns_from == "synthetic+received":  # their Fig. 5b
            assert self.own is not None
            return TrainingSet(self.own, rows_alone(len(self.own)), received)
        if learns_from == "nothing" or received is None:  # synthetic samples have not arrived yet
            return None
        assert self.own is not None
        everything = joined([self.own, *self.received])
        return TrainingSet(everything, rows_alone(len(everything)))


@dataclass(frozen=True)
class TrainingSet:
    """The training set of one round.

    Attributes:
        epoch_examples: the examples of its epochs, in batches of `units`.
        replayed: examples that double each batch; None without any.
    """

    learned: Examples
    units: Units
    replayed: Examples | None = None

    def examples(self) -> Examples:
        """Return both parts concatenated, the examples of epochs first."""
        return self.learned if self.replayed is None else joined([self.learned, self.replayed])

    def rows_of(self, plan: PrivacyPlan, sampler: CipherStream) -> list[NDArray[np.int64]]:
        """Return the rows of `join_examples` for every batch of a round under differential privacy.

        Raises:
            WsiFlError: for replayed examples, which the plan does not cover.
        """
        if self.replayed is not None:
            raise WsiFlError("a privacy plan covers this site's rows only, without replayed examples")
        return [self.units.rows(chosen, sampler) for chosen in plan.batches(sampler)]

    def rows(self, batch_size: int, epochs: int, *, sampler: CipherStream) -> list[NDArray[np.int64]]:
        """Return the rows of every batch without privacy: those of an epoch, then as many replayed ones.

        Both halves of a batch are of one size, so the mean loss over it is half of eq. 4 of Pennisi et al.,
        L(own) + L(buffer), whose constant factor Adam ignores.
        """
        own = list(self.units.epoch(batch_size, epochs, sampler=sampler))
        if self.replayed is None:
            return own
        again = _replayed_rows([len(rows) for rows in own], len(self.replayed), sampler)
        n = len(self.learned)
        return [np.concatenate([mine, n + theirs]) for mine, theirs in zip(own, again, strict=True)]


def _replayed_rows(sizes: Sequence[int], n: int, sampler: CipherStream) -> list[NDArray[np.int64]]:
    """Return rows of n samples in shuffled passes, for batches of these sizes."""
    passes = -(-sum(sizes) // n)
    order = [sampler.permutation(n) for _ in range(passes)]
    drawn = np.concatenate([*order, np.zeros(0, np.int64)])[: sum(sizes)]
    return np.split(drawn, np.cumsum(sizes)[:-1])


# ---- canaries


@dataclass(frozen=True)
class Canaries:
    """Meaningless examples, each planted among the training rows of a site by a fair coin.

    The success of distinguishing planted ones from the others by a trained model bounds its ε from below
    (`privacy/audit.py`). They are noise with a random label: a model has information on one only from itself.

    Attributes:
        seed: of their pixels or features and their labels.
        included: bool[m], whether each is planted: m fair coins.
        examples: all m.
    """

    seed: int
    included: NDArray[np.bool_]
    examples: Examples

    def planted(self) -> Examples:
        """Return the planted canaries, in order."""
        return subset(self.examples, np.flatnonzero(self.included))


def tossed(m: int) -> tuple[int, NDArray[np.bool_]]:
    """Return (seed, m fair coins), from the operating system's entropy and never from a seed of the study."""
    coins = np.frombuffer(secrets.token_bytes(m), np.uint8) < 128
    return secrets.randbits(256), coins


def canaries(seed: int, included: NDArray[np.bool_], shape: Shape, n_classes: int) -> Canaries:
    """Return the canaries of a seed, deterministically, for models with inputs of `shape`."""
    from wsi_fl.privacy.cipher import CipherStream

    m = len(included)
    stream = CipherStream.seeded(seed, "canaries")
    labels = np.array([stream.below(n_classes) for _ in range(m)], np.int64)
    inputs = _noise(stream, m, shape)
    names = np.array([f"canary {k}" for k in range(m)])
    allowed = np.ones((m, n_classes), bool) if isinstance(shape, Bags) else None
    read = inputs.__getitem__
    made = Examples(read, labels, names, names, allowed, show=lambda rows, _: read(rows))
    return Canaries(seed, included, made)


def _noise(stream: CipherStream, m: int, shape: Shape) -> Inputs:
    """Return m images of uniform pixels, vectors of normal features, or bags of such."""
    if isinstance(shape, Images):
        size = (m, shape.size_px, shape.size_px, shape.channels)
        return (stream.uniform(math.prod(size)) * 256).astype(np.uint8).reshape(size)
    if isinstance(shape, Bags):
        bags = stream.normal(m * _INSTANCES * (shape.n_features + 1)).astype(np.float32)
        bags = bags.reshape(m, _INSTANCES, shape.n_features + 1)
        bags[:, :, -1] = 1  # no padding
        return bags
    return stream.normal(m * shape.n_features).astype(np.float32).reshape(m, shape.n_features)
