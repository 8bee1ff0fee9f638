"""The privacy plan of a site: one frozen object that sampling, training, accounting and reports are made from.

The sampler, the trainer, the ledger's entry, the dry run and the report all read the same plan, so they cannot
disagree. What a round is about to do is compared with its plan before the first step (`require_planned`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, isfinite, log, sqrt
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.accounting import (
    ACCOUNTANT,
    WHOLE_ORDERS,
    Mechanism,
    epsilon,
    renyi_epsilon,
    sigma_for,
    steps_per_epoch,
)
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from wsi_fl.privacy.dpsgd import DPTrainer
    from wsi_fl.privacy.sums import NoisySums

Unit = Literal["row", "patient"]
"""Whose record is protected."""
Mode = Literal["strict", "paper"]
"""Whether the proxy learns from labels alone, or from the private model too, whose ε is nominal."""


@dataclass(frozen=True)
class PrivacyPlan(Mechanism):
    """State what one round of training applies to the records of a site, and to how many records.

    Attributes:
        sigma: noise multiplier; the noise's standard deviation is sigma * clip.
        clip: bound C on the L2 norm of one unit's gradient.
        sample_rate: probability q = 1 / ceil(n / batch_size) with which each unit enters a batch.
        steps: number of noisy steps, a multiple of ceil(n / batch_size).
        unit: whose record is protected, "row" or "patient".
        n: number of units, which is public and fixed.
        batch_size: expected number of units in a batch, and the divisor of the noisy sum.
        delta: δ of the promise; of a real hospital below 1 / n.
        mode: "strict" or "paper".
        accountant: how ε is computed.

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
        """Refuse a δ of 1 / n or more, at which a whole record may be given away; a real hospital must.

        Raises:
            UsageError: when δ is not below 1 / n.
        """
        if self.sigma > 0 and self.delta * self.n >= 1:
            raise UsageError(
                f"delta = {self.delta:g} would allow publishing one of {self.n} {self.unit}s; "
                f"set delta below {1 / self.n:.2g}"
            )

    def batches(self, sampler: CipherStream) -> Iterator[NDArray[np.int64]]:
        """Draw the units int64[b] of every step: each enters with probability `sample_rate`; b may be 0."""
        for _ in range(self.steps):
            yield poisson_rows(self.n, self.sample_rate, sampler)


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
    """Return int64[b], each of n rows independently with probability `sample_rate`; b may be 0."""
    return np.flatnonzero(sampler.uniform(n) < sample_rate)


def require_planned(
    plan: PrivacyPlan, trainer: DPTrainer | NoisySums, *, n: int, steps: int, delta: float, mode: Mode
) -> None:
    """Refuse a round whose training would differ from its plan, of which the ledger will be told.

    Args:
        n: number of units that batches are drawn from.
        steps: number of batches that were drawn.
        delta: δ at which the site's account is priced.
        mode: "paper" where the private model teaches the proxy (β > 0), else "strict".

    Raises:
        WsiFlError: naming everything that differs.
    """
    about_to = {
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
    differ = [
        f"{key} {value} instead of {getattr(plan, key)}"
        for key, value in about_to.items()
        if value != getattr(plan, key)
    ]
    if differ:
        raise WsiFlError(f"this round would not keep to its privacy plan: {', '.join(differ)}")


def differences(planned: PrivacyPlan, today: PrivacyPlan) -> list[str]:
    """Name each field in which two plans differ, as "sigma was 1.4 and is 0.7"."""
    pairs = [(f.name, getattr(planned, f.name), getattr(today, f.name)) for f in fields(PrivacyPlan)]
    return [f"{name} was {was} and is {now}" for name, was, now in pairs if was != now]


_STEPS_PER_EPOCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_NEAR_FLOOR = 0.6  # of a target, beyond which divergences cannot say how little is spent
_GIVEN_UP = 0.05  # share of the best signal to noise that is given up for more steps


@dataclass(frozen=True)
class Proposal:
    """One way to spend a budget."""

    batch_size: int  # expected number of rows in a batch; the sample rate is 1 / ceil(n / batch_size)
    mechanism: Mechanism
    # √T · B / σ: after T steps the sum of the noisy mean gradients holds a gradient of norm C so many times as long
    # as the noise of one coordinate
    signal_to_noise: float


def proposals(
    n: int,
    epochs: float,
    target_epsilon: float,
    delta: float,
    *,
    clip: float = 1.0,
    spent: Sequence[Mechanism] = (),
) -> list[Proposal]:
    """Return ways to divide an epoch over n rows into 1 to 64 batches that meet the target, fewest steps first.

    A step's mean gradient carries noise of standard deviation σC / B per coordinate, and T steps add up to √T times as
    much noise but T times as much gradient. What was `spent` on the same rows before counts towards the target.

    All are priced by Rényi divergences, so that they can be compared. The ε of full batches alone is known exactly and
    lower, so that they need some 8 % less noise than is said here. A target so small that divergences of the orders
    that are looked at hardly reach it is priced as accounts are, which is as if nothing was sampled.

    Raises:
        UsageError: when no noise is enough.
    """
    if n < 1:
        raise UsageError(f"a site needs at least one training row, not {n}")
    found: dict[int, Proposal] = {}
    floor = -log(delta) / max(WHOLE_ORDERS)
    price = renyi_epsilon if floor <= _NEAR_FLOOR * target_epsilon else epsilon
    for per_epoch in _STEPS_PER_EPOCH:
        batch_size = ceil(n / per_epoch)
        steps = round(epochs * ceil(n / batch_size))
        if batch_size in found or steps < 1:
            continue
        rate = 1 / ceil(n / batch_size)
        sigma = sigma_for(target_epsilon, rate, steps, delta, spent=spent, orders=WHOLE_ORDERS, price=price)
        mechanism = Mechanism(sigma, clip, rate, steps)
        found[batch_size] = Proposal(batch_size, mechanism, sqrt(steps) * batch_size / sigma)
    if not found:
        raise UsageError(f"{epochs:g} epochs make less than one step; ask for more rounds")
    return list(found.values())


def planned(
    n: int,
    epochs: float,
    target_epsilon: float,
    delta: float,
    *,
    clip: float = 1.0,
    spent: Sequence[Mechanism] = (),
) -> Proposal:
    """Return, of the `proposals` with nearly the best signal-to-noise ratio, that with the most steps and the least σ.

    Signal to noise alone favours full batches, whose few steps an optimizer cannot use; beyond some number of steps
    noise no longer falls as fast as batches shrink.
    """
    ways = proposals(n, epochs, target_epsilon, delta, clip=clip, spent=spent)
    best = max(way.signal_to_noise for way in ways)
    good = [way for way in ways if way.signal_to_noise >= (1 - _GIVEN_UP) * best]
    way = max(good, key=lambda way: way.mechanism.steps)
    plain = way.mechanism
    rate, steps = plain.sample_rate, plain.steps
    sigma = sigma_for(target_epsilon, rate, steps, delta, spent=spent, near=plain.sigma)
    return replace(way, mechanism=replace(plain, sigma=sigma))
