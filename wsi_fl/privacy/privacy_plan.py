"""The privacy plan of a site, one frozen object for sampling, training, accounting and reports.

The sampler, the trainer, the ledger's entry, the dry run and the report all read the same plan, so they cannot
disagree. A round is compared with its plan before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, isfinite, log, sqrt
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.accounting import (
    ACCOUNTANT,
    WHOLE_ORDERS,
    Mechanism,
    epsilon,
    find_sigma,
    renyi_epsilon,
    steps_per_epoch,
)
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import UsageError, WsiFlError

Unit = Literal["row", "patient"]
"""The privacy unit."""
Mode = Literal["strict", "paper"]
"""Training of the proxy from labels alone, or from the private model too, with a nominal ε."""


class PrivateTrainer(Protocol):
    """The mechanism that a learner uses, as far as a plan fixes it; see `PrivacyPlan`."""

    @property
    def sigma(self) -> float: ...  # noqa: D102
    @property
    def clip(self) -> float: ...  # noqa: D102
    @property
    def batch_size(self) -> int: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class PrivacyPlan(Mechanism):
    """The mechanism of one round of training on the records of a site, and their number.

    Attributes:
        sigma: noise multiplier; the noise's standard deviation is sigma * clip.
        clip: clipping norm C, bound on the L2 norm of one unit's gradient.
        sample_rate: probability q = 1 / ceil(n / batch_size) of each unit to enter a batch.
        steps: number of noisy steps, a multiple of ceil(n / batch_size).
        unit: privacy unit, "row" or "patient".
        n: number of units, public and fixed.
        batch_size: expected number of units in a batch, and the divisor of the noisy sum.
        delta: δ of the guarantee; of a real hospital below 1 / n.
        mode: "strict" or "paper".
        accountant: method by which ε is computed.

    Raises:
        UsageError: when the numbers are out of range or do not fit each other.

    Reference:
        Kalra et al., Nature Communications 2023, Algorithm 1 and eq. 7; the shape is that of jax_privacy's execution
        plans.
    """

    unit: Unit
    n: int
    batch_size: int
    delta: float
    mode: Mode
    accountant: str = ACCOUNTANT

    def __post_init__(self) -> None:
        per_epoch = steps_per_epoch(self.n, self.batch_size)
        if self.sample_rate != 1 / per_epoch or self.steps % per_epoch or self.steps < 0:
            raise UsageError(
                f"a privacy plan of {self.n} {self.unit}s in batches of {self.batch_size} has the sample rate "
                f"1/{per_epoch} and a multiple of {per_epoch} steps, not {self.sample_rate:g} and {self.steps}"
            )
        if not (self.sigma >= 0 and isfinite(self.sigma) and self.clip > 0):
            raise UsageError(
                f"a privacy plan needs sigma from 0 on and clip above 0, not {self.sigma:g} and {self.clip:g}"
            )
        if self.unit not in ("row", "patient") or self.mode not in ("strict", "paper"):
            raise UsageError(f"a privacy plan has no unit {self.unit!r} in mode {self.mode!r}")
        if self.accountant != ACCOUNTANT:
            raise UsageError(f"a privacy plan is priced by {ACCOUNTANT}, not by {self.accountant}")
        if not 0 < self.delta < 1:
            raise UsageError(f"delta must lie between 0 and 1, not {self.delta:g}")

    def refuse_large_delta(self) -> None:
        """Refuse a δ of 1 / n or more, which permits publishing a whole record; required of a real hospital.

        Raises:
            UsageError: when δ is not below 1 / n.
        """
        if self.sigma > 0 and (problem := explain_large_delta(self.delta, self.n, self.unit)):
            raise UsageError(problem)

    def draw_batches(self, sampler: CipherStream) -> Iterator[NDArray[np.int64]]:
        """Yield the units int64[b] of every step, each drawn with probability `sample_rate`; b may be 0."""
        for _ in range(self.steps):
            yield poisson_rows(self.n, self.sample_rate, sampler)


def explain_large_delta(delta: float, n: int, unit: str) -> str:
    """Return what a δ of 1 / n or more allows, and what to set; "" for a smaller one."""
    if delta * n < 1:
        return ""
    return f"delta = {delta:g} would allow publishing one of {n} {unit}s; set delta below {1 / n:.2g}"


def plan_of_round(
    *,
    n: int,
    batch_size: int,
    epochs: int,
    sigma: float,
    clip: float,
    delta: float,
    unit: Unit = "row",
    mode: Mode = "strict",
) -> PrivacyPlan:
    """Return the plan of a round of `epochs` epochs over n units in batches of `batch_size` on average."""
    per_epoch = steps_per_epoch(n, batch_size)
    return PrivacyPlan(
        sigma=sigma,
        clip=clip,
        sample_rate=1 / per_epoch,
        steps=epochs * per_epoch,
        unit=unit,
        n=n,
        batch_size=batch_size,
        delta=delta,
        mode=mode,
    )


def poisson_rows(n: int, sample_rate: float, sampler: CipherStream) -> NDArray[np.int64]:
    """Return int64[b], a Poisson sample of n rows with probability `sample_rate` each; b may be 0."""
    return np.flatnonzero(sampler.uniform(n) < sample_rate)


def require_plan(plan: PrivacyPlan, trainer: PrivateTrainer, *, n: int, steps: int, delta: float, mode: Mode) -> None:
    """Refuse a round of training that differs from the plan to be recorded.

    Args:
        n: number of units to draw batches from.
        steps: number of batches drawn.
        delta: δ of the site's account.
        mode: "paper" where the private model teaches the proxy (β > 0), else "strict".

    Raises:
        WsiFlError: naming all differences.
    """
    actual = {
        "sigma": trainer.sigma,
        "clip": trainer.clip,
        "batch_size": trainer.batch_size,
        "unit": trainer.unit,
        "n": n,
        "steps": steps,
        "delta": delta,
        "sample_rate": 1 / steps_per_epoch(n, trainer.batch_size),
        "mode": mode,
    }
    mismatches = [
        f"{key} {value} instead of {getattr(plan, key)}" for key, value in actual.items() if value != getattr(plan, key)
    ]
    if mismatches:
        raise WsiFlError(f"this round differs from its privacy plan: {', '.join(mismatches)}")


def list_differences(planned: PrivacyPlan, today: PrivacyPlan) -> list[str]:
    """Return the differences of two plans, as "sigma was 1.4 and is 0.7"."""
    pairs = [(f.name, getattr(planned, f.name), getattr(today, f.name)) for f in fields(PrivacyPlan)]
    return [
        f"{name} was {old_value} and is {new_value}" for name, old_value, new_value in pairs if old_value != new_value
    ]


_STEPS_PER_EPOCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MAX_FLOOR_SHARE = 0.6  # of a target, beyond which Rényi divergences cannot show a smaller ε
_SIGNAL_TOLERANCE = 0.05  # share of the best signal to noise traded for more steps


@dataclass(frozen=True)
class BudgetProposal:
    """One way to spend a budget."""

    batch_size: int  # expected number of rows in a batch; the sample rate is 1 / ceil(n / batch_size)
    mechanism: Mechanism
    # √T · B / σ: length of the sum of T mean gradients of norm C relative to its noise in one coordinate
    signal_to_noise: float


def list_proposals(
    n: int, epochs: float, target_epsilon: float, delta: float, *, clip: float = 1.0, spent: Sequence[Mechanism] = ()
) -> list[BudgetProposal]:
    """Return divisions of an epoch over n rows into 1 to 64 batches for a target ε, fewest steps first.

    A step's mean gradient carries noise of standard deviation σC / B per coordinate, and T steps add up to √T times as
    much noise but T times as much gradient. Mechanisms in `spent`, on the same rows, count towards the target.

    All are priced by Rényi divergences, so that they can be compared. The exact ε of full batches is lower: they need
    about 8 % less noise than stated here. A target hardly reached by divergences of the computed orders is priced like
    accounts, as if nothing was sampled.

    Raises:
        UsageError: when no noise is enough.
    """
    if n < 1:
        raise UsageError(f"a site needs at least one training row, not {n}")
    by_batch_size: dict[int, BudgetProposal] = {}
    floor = -log(delta) / max(WHOLE_ORDERS)
    price = renyi_epsilon if floor <= _MAX_FLOOR_SHARE * target_epsilon else epsilon
    for per_epoch in _STEPS_PER_EPOCH:
        batch_size = ceil(n / per_epoch)
        steps = round(epochs * ceil(n / batch_size))
        if batch_size in by_batch_size or steps < 1:
            continue
        rate = 1 / ceil(n / batch_size)
        sigma = find_sigma(target_epsilon, rate, steps, delta, spent=spent, orders=WHOLE_ORDERS, price=price)
        mechanism = Mechanism(sigma, clip, rate, steps)
        by_batch_size[batch_size] = BudgetProposal(batch_size, mechanism, sqrt(steps) * batch_size / sigma)
    if not by_batch_size:
        raise UsageError(f"{epochs:g} epochs make less than one step; ask for more rounds")
    return list(by_batch_size.values())


def propose_plan(
    n: int, epochs: float, target_epsilon: float, delta: float, *, clip: float = 1.0, spent: Sequence[Mechanism] = ()
) -> BudgetProposal:
    """Return the proposal with the most steps among those with nearly the best signal-to-noise ratio.

    Signal to noise alone favours full batches, with too few steps for an optimizer; beyond some number of steps noise
    no longer falls as fast as batches shrink.
    """
    candidates = list_proposals(n, epochs, target_epsilon, delta, clip=clip, spent=spent)
    best = max(proposal.signal_to_noise for proposal in candidates)
    good = [proposal for proposal in candidates if proposal.signal_to_noise >= (1 - _SIGNAL_TOLERANCE) * best]
    proposal = max(good, key=lambda proposal: proposal.mechanism.steps)
    mechanism = proposal.mechanism
    rate, steps = mechanism.sample_rate, mechanism.steps
    sigma = find_sigma(target_epsilon, rate, steps, delta, spent=spent, near=mechanism.sigma)
    return replace(proposal, mechanism=replace(mechanism, sigma=sigma))
