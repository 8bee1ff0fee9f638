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

from wsi_fl.data.batches import draw_epoch_rows
from wsi_fl.data.cohort import Cohort, Inputs, concatenate_examples
from wsi_fl.types import Bags, Images, Shape, UsageError, WsiFlError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wsi_fl.privacy.cipher import CipherStream
    from wsi_fl.privacy.privacy_plan import PrivacyPlan

_CANARY_PATCHES = 8
"""Patches of a canary bag."""


# ---- units


@dataclass(frozen=True)
class PrivacyUnits:
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
    def _rows_by_unit(self) -> list[NDArray[np.int64]]:
        order = np.argsort(self.of_row, kind="stable")
        return np.split(order, np.searchsorted(self.of_row[order], np.arange(1, self.n)))

    @cached_property
    def _has_single_rows(self) -> bool:
        return bool((np.diff(self.of_row) > 0).all())

    @cached_property
    def nonempty_units(self) -> NDArray[np.int64]:
        """The units that have a row, in ascending order."""
        if self._has_single_rows:
            return self.of_row
        return np.flatnonzero(np.bincount(self.of_row, minlength=self.n))

    def draw_rows(self, chosen: NDArray[np.int64], sampler: CipherStream) -> NDArray[np.int64]:
        """Return the rows int64[b] of the chosen units, at random at most `max_rows` of each."""
        if self._has_single_rows and len(self.of_row):
            positions = np.searchsorted(self.of_row, chosen).clip(max=len(self.of_row) - 1)
            rows: NDArray[np.int64] = positions[self.of_row[positions] == chosen]
            return rows
        parts = [np.zeros(0, np.int64)]
        for rows in (self._rows_by_unit[k] for k in chosen):
            is_small = self.max_rows is None or len(rows) <= self.max_rows
            parts.append(rows if is_small else rows[sampler.permutation(len(rows))[: self.max_rows]])
        return np.concatenate(parts)

    def epoch_batches(self, batch_size: int, epochs: int, *, sampler: CipherStream) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of the batches of `epochs` shuffled passes over the units with rows, without privacy."""
        for chosen in draw_epoch_rows(len(self.nonempty_units), batch_size, epochs, sampler=sampler):
            yield self.draw_rows(self.nonempty_units[chosen], sampler)

    def attach_units(
        self, batches: Iterator[tuple[Tensor, Tensor]], rows: list[NDArray[np.int64]], device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]]:
        """Yield the batches of these rows, where units are patients with the patient of each row."""
        if self.kind == "row":
            yield from batches
            return
        import torch

        for (x, y), chosen in zip(batches, rows, strict=True):
            yield x, y, torch.from_numpy(self.of_row[chosen]).to(device)

    def select_rows(self, rows: NDArray[np.int64]) -> PrivacyUnits:
        """Return the same units with the rows at positions int64[rows]; n stays."""
        return replace(self, of_row=self.of_row[rows])

    def drop_empty(self) -> PrivacyUnits:
        """Return only the units with rows, for attacks on each unit."""
        units, of_row = np.unique(self.of_row, return_inverse=True)
        return replace(self, n=len(units), of_row=of_row.astype(np.int64))

    def add_canaries(self, included: NDArray[np.bool_]) -> PrivacyUnits:
        """Return the units and one for each canary bool[m], whose rows come after all others.

        Canaries that are not included have no row. So the number of units, the sample rate and the number of steps do
        not depend on the coins.
        """
        canary_units = self.n + np.flatnonzero(included)
        return replace(self, n=self.n + len(included), of_row=np.concatenate([self.of_row, canary_units]))


def row_units(n: int) -> PrivacyUnits:
    """Return the units of n rows, one each."""
    return PrivacyUnits("row", n, np.arange(n))


def patient_units(patient: NDArray[np.str_], max_rows: int | None, site: str) -> PrivacyUnits:
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
    names, patient_index = np.unique(patient, return_inverse=True)
    return PrivacyUnits("patient", len(names), patient_index.astype(np.int64), max_rows)


# ---- training sets

LearnsFrom = Literal["own", "everybody", "own+received", "synthetic+received", "all synthetic", "generated", "nothing"]
"""Sources of a round's training set. For "everybody" and "generated" the site's rows are pooled or generated before."""


@dataclass(frozen=True)
class TrainingSet:
    """The training set of one round.

    Attributes:
        epoch_examples: the examples of its epochs, in batches of `units`.
        replayed: examples that double each batch; None without any.
    """

    epoch_examples: Cohort
    units: PrivacyUnits
    replayed: Cohort | None = None

    def join_examples(self) -> Cohort:
        """Return both parts concatenated, the examples of epochs first."""
        return (
            self.epoch_examples if self.replayed is None else concatenate_examples([self.epoch_examples, self.replayed])
        )

    def private_batches(self, plan: PrivacyPlan, sampler: CipherStream) -> list[NDArray[np.int64]]:
        """Return the rows of `join_examples` for every batch of a round under differential privacy.

        Raises:
            WsiFlError: for replayed examples, which the plan does not cover.
        """
        if self.replayed is not None:
            raise WsiFlError("a privacy plan covers this site's rows only, without replayed examples")
        return [self.units.draw_rows(chosen, sampler) for chosen in plan.draw_batches(sampler)]

    def epoch_batches(self, batch_size: int, epochs: int, *, sampler: CipherStream) -> list[NDArray[np.int64]]:
        """Return the rows of every batch without privacy: those of an epoch, then as many replayed ones.

        Both halves of a batch are of one size, so the mean loss over it is half of eq. 4 of Pennisi et al.,
        L(own) + L(buffer), whose constant factor Adam ignores.
        """
        epoch_rows = list(self.units.epoch_batches(batch_size, epochs, sampler=sampler))
        if self.replayed is None:
            return epoch_rows
        replayed_rows = _draw_replayed([len(rows) for rows in epoch_rows], len(self.replayed), sampler)
        n = len(self.epoch_examples)
        return [
            np.concatenate([local_part, n + replayed_part])
            for local_part, replayed_part in zip(epoch_rows, replayed_rows, strict=True)
        ]


def build_training_set(
    learns_from: LearnsFrom, real: TrainingSet, synthetic: Cohort | None, received: Sequence[Cohort]
) -> TrainingSet | None:
    """Return the training set of a round; None for a round without batches.

    Args:
        real: the site's training rows and planted canaries.
        synthetic: the site's shared synthetic samples; None without any.
        received: buffers of other sites' synthetic samples.
    """
    if learns_from in ("own", "everybody", "generated"):
        return real
    if learns_from == "nothing" or (learns_from == "all synthetic" and not received):  # these have not arrived yet
        return None
    replayed = concatenate_examples([*received]) if received else None
    if learns_from == "own+received":  # Pennisi et al., eq. 4
        return replace(real, replayed=replayed)
    assert synthetic is not None
    if learns_from == "synthetic+received":  # their Fig. 5b
        return TrainingSet(synthetic, row_units(len(synthetic)), replayed)
    all_synthetic = concatenate_examples([synthetic, *received])
    return TrainingSet(all_synthetic, row_units(len(all_synthetic)))


def _draw_replayed(sizes: Sequence[int], n: int, sampler: CipherStream) -> list[NDArray[np.int64]]:
    """Return rows of n samples in shuffled passes, for batches of these sizes."""
    passes = -(-sum(sizes) // n)
    order = [sampler.permutation(n) for _ in range(passes)]
    rows = np.concatenate([*order, np.zeros(0, np.int64)])[: sum(sizes)]
    return np.split(rows, np.cumsum(sizes)[:-1])


# ---- canaries


@dataclass(frozen=True)
class Canaries:
    """Meaningless examples, each planted among the training rows of a site by a fair coin.

    The success of distinguishing planted ones from the others by a trained model bounds its ε from below
    (`evidence/attacks.py`). They are noise with a random label: a model has information on one only from itself.

    Attributes:
        seed: of their pixels or features and their labels.
        included: bool[m], whether each is planted: m fair coins.
        examples: all m.
    """

    seed: int
    included: NDArray[np.bool_]
    examples: Cohort

    def select_planted(self) -> Cohort:
        """Return the planted canaries, in order."""
        return self.examples[self.included]


def toss_coins(m: int) -> tuple[int, NDArray[np.bool_]]:
    """Return (seed, m fair coins), from the operating system's entropy and never from a seed of the study."""
    coins = np.frombuffer(secrets.token_bytes(m), np.uint8) < 128
    return secrets.randbits(256), coins


def build_canaries(seed: int, included: NDArray[np.bool_], shape: Shape, n_classes: int) -> Canaries:
    """Return the canaries of a seed, deterministically, for models with inputs of `shape`."""
    from wsi_fl.privacy.cipher import CipherStream

    m = len(included)
    stream = CipherStream.from_seed(seed, "canaries")
    labels = np.array([stream.randbelow(n_classes) for _ in range(m)], np.int64)
    inputs = _draw_noise(stream, m, shape)
    names = np.array([f"canary {k}" for k in range(m)])
    allowed = np.ones((m, n_classes), bool) if isinstance(shape, Bags) else None
    examples = Cohort.from_columns(inputs.__getitem__, labels, names, names, allowed)
    return Canaries(seed, included, replace(examples, show=lambda rows, _: inputs[rows]))


def _draw_noise(stream: CipherStream, m: int, shape: Shape) -> Inputs:
    """Return m images of uniform pixels, vectors of normal features, or bags of such."""
    if isinstance(shape, Images):
        size = (m, shape.size_px, shape.size_px, shape.channels)
        return (stream.uniform(math.prod(size)) * 256).astype(np.uint8).reshape(size)
    if isinstance(shape, Bags):
        bags = stream.normal(m * _CANARY_PATCHES * (shape.n_features + 1)).astype(np.float32)
        bags = bags.reshape(m, _CANARY_PATCHES, shape.n_features + 1)
        bags[:, :, -1] = 1  # no padding
        return bags
    return stream.normal(m * shape.n_features).astype(np.float32).reshape(m, shape.n_features)
