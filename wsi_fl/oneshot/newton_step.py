"""The baseline of a number or of hazards without features, and the shrunk slope of one Newton step from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wsi_fl.oneshot.column_sums import TINY

_PRIOR_ROWS = 4.0
"""Prior examples of each interval, with the mean hazard, against hazards of 0 or 1."""
_EXPLAINED_VARIANCES = torch.logspace(-2, 0.5, 11, dtype=torch.float64)
"""Grid of the variance explained by z, in parts of that of residuals."""


class BaselineModel(NamedTuple):
    """The baseline model without features."""

    residuals: Tensor  # float64[columns], r of an example of each column
    # float64[columns], information of an example of each column about the slope, in parts of the covariance of z
    information: Tensor
    offsets: Tensor  # float64[outputs], its outputs: ū, or the logit of each interval's hazard


def number_baseline(counts: Tensor) -> BaselineModel:
    """Return the baseline of numbers u in [0, 1] from counts float64[2], the sums of 1 − u and of u."""
    mean = (counts[1] + TINY / 2) / (counts.sum() + TINY)
    return BaselineModel(torch.stack([-mean, 1 - mean]), torch.ones_like(counts), mean[None])


def hazard_baseline(counts: Tensor) -> BaselineModel:
    """Return the baseline of hazards in k intervals from counts float64[2k + 1].

    The first k count events by interval, the others censored patients after 0, 1, …, k passed intervals.
    """
    k = len(counts) // 2
    events, passed = counts[:k], counts[k + 1 :]
    at_risk = (events + passed).flip(0).cumsum(0).flip(0)
    mean_hazard = (events.sum() + TINY / 2) / (at_risk.sum() + TINY)
    hazard = ((events + _PRIOR_ROWS * mean_hazard) / (at_risk + _PRIOR_ROWS)).clamp(1e-4, 1 - 1e-4)
    cumulative = torch.nn.functional.pad(torch.stack([hazard, hazard * (1 - hazard)]).cumsum(1), (1, 0))
    (so_far, spread), event = cumulative, torch.ones_like(events)
    return BaselineModel(torch.cat([event - so_far[1:], -so_far]), torch.cat([spread[1:], spread]), torch.logit(hazard))


def shrink_slope(
    gradient: Tensor,
    information: Tensor,
    within: Tensor,
    residual_variance: Tensor | float,
    sampled: Tensor,
    noise: Tensor,
) -> Tensor:
    """Return the posterior mean of the slope float64[d] given the gradient float64[d].

    The gradient Σ r z has the mean V C β, with the information V and the covariance C of z, here `within`, and the
    variance sampled · C + noise · I. The prior of β is isotropic; its scale is such that z explains from 1 % to three
    times the variance of residuals (`residual_variance`, in parts of the value in V), averaged by evidence (MacKay,
    "Bayesian interpolation", Neural Computation 1992).
    """
    spread, axes = torch.linalg.eigh(within)
    spread, coefficients = spread.clamp(min=TINY), axes.mT @ gradient / information
    chance = (sampled * spread + noise) / information**2
    size = residual_variance * _EXPLAINED_VARIANCES.to(spread)[:, None] / spread.sum()
    total_variance = size * spread**2 + chance
    log_evidence = -(total_variance.log() + coefficients**2 / total_variance).sum(1) / 2
    posterior = log_evidence.softmax(0)[:, None] * size * spread * coefficients / total_variance
    slope: Tensor = axes @ posterior.sum(0)
    return slope
