"""A linear model of a number, or of the hazards of an event, from sums of features by column: one Newton step.

The model that knows no features says the mean number, or one hazard for each interval. A row's *residual* r is what its
answer differs by from that: u − ū of a number u in [0, 1], or the martingale residual of a patient (Therneau, Grambsch
and Fleming, Biometrika 1990). All rows of a column have the same one, so Σ r z follows from the sums of z by column. It
is the gradient of the likelihood where no feature counts. A Newton step from there is linear regression for a number,
and for survival discrete-time proportional hazards to first order, as Cox's score test has it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_TINY = 1e-30
_PRIOR = 4.0
"""Rows with the mean hazard that every interval has beside its own, so that none has a hazard of 0 or 1."""
_EXPLAINED = torch.logspace(-2, 0.5, 11, dtype=torch.float64)
"""Variance of what z explains, in parts of that of residuals."""


class Featureless(NamedTuple):
    """The model that knows no features.

    Attributes:
        residuals: float64[columns], r of a row of each column.
        information: float64[columns], what a row of each column adds to the information about the slope, in parts of
            the covariance of z.
        offsets: float64[outputs], what it says: ū, or the logit of each interval's hazard.
    """

    residuals: Tensor
    information: Tensor
    offsets: Tensor


def of_numbers(counts: Tensor) -> Featureless:
    """Return the model of numbers in [0, 1], whose weights 1 − u and u add up to counts float64[2].

    Example:
        >>> of_numbers(torch.tensor([3.0, 1.0])).residuals.tolist()
        [-0.25, 0.75]
    """
    mean = (counts[1] + _TINY / 2) / (counts.sum() + _TINY)
    return Featureless(torch.stack([-mean, 1 - mean]), torch.ones_like(counts), mean[None])


def of_times(counts: Tensor) -> Featureless:
    """Return the model of hazards in k intervals.

    Args:
        counts: float64[2k + 1], of how many the event came in each interval, and how many were last seen without it
            after passing 0, 1, …, k.
    """
    k = len(counts) // 2
    events, passed = counts[:k], counts[k + 1 :]
    at_risk = (events + passed).flip(0).cumsum(0).flip(0)
    usual = (events.sum() + _TINY / 2) / (at_risk.sum() + _TINY)
    hazard = ((events + _PRIOR * usual) / (at_risk + _PRIOR)).clamp(1e-4, 1 - 1e-4)
    before = torch.nn.functional.pad(torch.stack([hazard, hazard * (1 - hazard)]).cumsum(1), (1, 0))
    (so_far, spread), event = before, torch.ones_like(events)
    return Featureless(
        torch.cat([event - so_far[1:], -so_far]), torch.cat([spread[1:], spread]), torch.logit(hazard)
    )


def slope_of(
    gradient: Tensor,
    information: Tensor,
    within: Tensor,
    varied: Tensor | float,
    sampled: Tensor,
    noise: Tensor,
) -> Tensor:
    """Return the slope float64[d] that a gradient says, drawn to 0 as far as chance may have made it.

    The gradient Σ r z has the mean V C β, with the information V and the covariance C of z. All directions of β are as
    likely beforehand. What z explains is from 1 % to three times what the residuals vary by, and each of these counts
    as far as the gradient bears it out.

    Args:
        gradient: float64[d].
        information: V.
        within: float64[d, d], C.
        varied: variance of the residuals, in parts of what V takes it for.
        sampled, noise: the gradient's variance is sampled · C + noise · I.

    Reference:
        MacKay, "Bayesian interpolation", Neural Computation 1992.
    """
    spread, axes = torch.linalg.eigh(within)
    spread, found = spread.clamp(min=_TINY), axes.mT @ gradient / information
    chance = (sampled * spread + noise) / information**2
    size = varied * _EXPLAINED.to(spread)[:, None] / spread.sum()
    wide = size * spread**2 + chance
    borne_out = -(wide.log() + found**2 / wide).sum(1) / 2
    likely = borne_out.softmax(0)[:, None] * size * spread * found / wide
    slope: Tensor = axes @ likely.sum(0)
    return slope
