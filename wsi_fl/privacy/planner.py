"""How to spend a privacy budget: batch size, noise and number of steps for a target ε."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from wsi_fl.privacy.accounting import WHOLE_ORDERS, Mechanism, sigma_for
from wsi_fl.types import UsageError

_STEPS_PER_EPOCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_GIVEN_UP = 0.05
"""Share of the best signal to noise that is given up for more steps."""


@dataclass(frozen=True)
class Proposal:
    """One way to spend a budget.

    Attributes:
        batch_size: expected number of rows in a batch; the sample rate is 1 / ceil(n / batch_size).
        mechanism: what training applies.
        signal_to_noise: √T · B / σ: after T steps the sum of the noisy mean gradients holds a gradient of norm C so
            many times as long as the noise of one coordinate.
    """

    batch_size: int
    mechanism: Mechanism
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

    A step's mean gradient carries noise of standard deviation σC / B per coordinate, and T steps add up to √T times
    as much noise but T times as much gradient.

    Args:
        n: training rows, or patients.
        epochs: passes over them in all.
        spent: what was applied to the same rows before; it counts towards the target.

    Raises:
        UsageError: when no noise is enough.
    """
    if n < 1:
        raise UsageError(f"a site needs at least one training row, not {n}")
    found: dict[int, Proposal] = {}
    for per_epoch in _STEPS_PER_EPOCH:
        batch_size = ceil(n / per_epoch)
        steps = round(epochs * ceil(n / batch_size))
        if batch_size in found or steps < 1:
            continue
        rate = 1 / ceil(n / batch_size)
        sigma = sigma_for(target_epsilon, rate, steps, delta, spent=spent, orders=WHOLE_ORDERS)
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
    """Return, of the proposals with nearly the best signal-to-noise ratio, that with the most steps and the least σ.

    Signal to noise alone favours full batches, whose few steps an optimizer cannot use; beyond some number of
    steps noise no longer falls as fast as batches shrink. Arguments and errors are those of `proposals`.

    Example:
        >>> from wsi_fl.privacy.accounting import epsilon
        >>> way = planned(600, 40, 3.0, 1e-5)
        >>> way.mechanism.steps >= 40, 2.9 < epsilon([way.mechanism], 1e-5) <= 3.0
        (True, True)
    """
    ways = proposals(n, epochs, target_epsilon, delta, clip=clip, spent=spent)
    best = max(way.signal_to_noise for way in ways)
    good = [way for way in ways if way.signal_to_noise >= (1 - _GIVEN_UP) * best]
    way = max(good, key=lambda way: way.mechanism.steps)
    plain = way.mechanism
    rate, steps = plain.sample_rate, plain.steps
    sigma = sigma_for(target_epsilon, rate, steps, delta, spent=spent, near=plain.sigma)
    return replace(way, mechanism=replace(plain, sigma=sigma))
