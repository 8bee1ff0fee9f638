"""What a site learns from in a round: its own rows, synthetic ones, and those that are replayed beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.units import Units, rows_alone
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from wsi_fl.privacy.cipher import CipherStream


@dataclass(frozen=True)
class TrainingSources:
    """What a site has to learn from.

    Attributes:
        real: its training rows, and the canaries that are in.
        units: what privacy counts among them.
        own: its own synthetic samples, those it shares; None where it has none.
        received: the synthetic samples of each site that it holds a buffer of.
    """

    real: Examples
    units: Units
    own: Examples | None = None
    received: Sequence[Examples] = ()


@dataclass(frozen=True)
class TrainingSet:
    """What one round is learned from.

    Attributes:
        learned: what its epochs go through, in batches of `units`.
        replayed: as many rows of it as a batch has stand beside each batch; None for nothing.
    """

    learned: Examples
    units: Units
    replayed: Examples | None = None

    def examples(self) -> Examples:
        """Return both parts joined, `learned` first."""
        return self.learned if self.replayed is None else joined([self.learned, self.replayed])

    def rows_of(self, plan: PrivacyPlan, sampler: CipherStream) -> list[NDArray[np.int64]]:
        """Return the rows of `examples` for every batch of a round under differential privacy.

        Raises:
            WsiFlError: when something is replayed beside them, of which the plan says nothing.
        """
        if self.replayed is not None:
            raise WsiFlError("a privacy plan covers a site's own rows alone, and nothing that is replayed")
        return [self.units.rows(chosen, sampler) for chosen in plan.batches(sampler)]

    def rows(self, batch_size: int, epochs: int, *, sampler: CipherStream) -> list[NDArray[np.int64]]:
        """Return the rows of every batch without privacy: those of an epoch, then as many replayed ones.

        Both halves of a batch are of one size, so the mean loss over it is half of eq. 4 of Pennisi et al.,
        L(own) + L(buffer), whose constant factor Adam ignores.
        """
        own = list(self.units.epoch(batch_size, epochs, sampler=sampler))
        if self.replayed is None:
            return own
        again = replayed_rows([len(rows) for rows in own], len(self.replayed), sampler)
        n = len(self.learned)
        return [np.concatenate([mine, n + theirs]) for mine, theirs in zip(own, again, strict=True)]


def replayed_rows(sizes: Sequence[int], n: int, sampler: CipherStream) -> list[NDArray[np.int64]]:
    """For batches of these sizes, rows of n samples in shuffled passes: each has its turn before any comes again.

    Example:
        >>> from wsi_fl.privacy.cipher import CipherStream
        >>> drawn = replayed_rows([2, 3], 5, CipherStream.fresh())
        >>> [len(rows) for rows in drawn], sorted(np.concatenate(drawn).tolist())
        ([2, 3], [0, 1, 2, 3, 4])
    """
    passes = -(-sum(sizes) // n)
    order = [sampler.permutation(n) for _ in range(passes)]
    drawn = np.concatenate([*order, np.zeros(0, np.int64)])[: sum(sizes)]
    return np.split(drawn, np.cumsum(sizes)[:-1])


LearnsFrom = Literal[
    "own", "everybody", "own+received", "synthetic+received", "all synthetic", "generated", "nothing"
]
"""What a round is learned from. Who makes a site's rows pools those of everybody, or puts generated ones there."""


def _real(material: TrainingSources) -> TrainingSet | None:
    """Return the site's rows."""
    return TrainingSet(material.real, material.units)


def _real_and_received(material: TrainingSources) -> TrainingSet | None:
    """Return the site's rows, and what it received to be replayed beside them (Pennisi et al., eq. 4)."""
    return TrainingSet(material.real, material.units, _pooled(material.received))


def _synthetic_and_received(material: TrainingSources) -> TrainingSet | None:
    """Return the site's own synthetic samples in place of its rows (Fig. 5b)."""
    assert material.own is not None
    return TrainingSet(material.own, rows_alone(len(material.own)), _pooled(material.received))


def _synthetic_of_all(material: TrainingSources) -> TrainingSet | None:
    """Return the synthetic samples of all sites, as for a centre without patches; None before they arrive."""
    if not material.received:
        return None
    assert material.own is not None
    everything = joined([material.own, *material.received])
    return TrainingSet(everything, rows_alone(len(everything)))


def _pooled(parts: Sequence[Examples]) -> Examples | None:
    return joined(list(parts)) if parts else None


LESSONS: dict[LearnsFrom, Callable[[TrainingSources], TrainingSet | None]] = {
    "own": _real,
    "everybody": _real,
    "own+received": _real_and_received,
    "synthetic+received": _synthetic_and_received,
    "all synthetic": _synthetic_of_all,
    "generated": _real,
    "nothing": lambda _: None,
}
"""What of its material a site learns from in a round; None where the round is over before a batch is drawn."""
