"""What a site's letter can be at all, and what it changes in the head that all letters make.

A letter is a sum over n units that are each clipped to length 1, with normal noise of a known variance. So it moves the
sum of all letters by at most n, and a letter that is longer than n and any noise is none. Each class's sum is no longer
than its count says. Both are tested at a false alarm rate that follows from χ² quantiles and holds for every honest
letter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from wsi_fl.models.shared_head import COUNT, SharedHead

FALSE_ALARMS = 1e-6
"""The chance that an honest letter is refused, at most."""
_ROUND_OFF = 1e-4
"""Of float32, and of what was clipped, in parts of a letter's length."""
_COUNTED = COUNT / (1 + COUNT**2) ** 0.5
"""What a row adds to the count of its class."""


@torch.no_grad()
def impossible(
    head: SharedHead,
    letter: Tensor,
    n: int | None = None,
    sigma: float | None = None,
    *,
    rows: bool = True,
    rate: float = FALSE_ALARMS,
) -> str:
    """Return why a letter cannot be one of n units, or "" where it can.

    An honest letter is refused with a chance of `rate` at most: a tenth each by the first two tests, which hardly ever
    use it, and eight tenths by the third, which is exact. Without noise nothing is left to chance.

    Args:
        head: one that sums along the same directions.
        letter: float[k + classes], sums with noise, and the variances of it by class.
        n, sigma: how many units the site has announced, and which noise; None where it has not.
        rows: whether units are rows, each of one class; patients may be of several.
        rate: false alarm rate.
    """
    return next(_problems(head, letter.double(), n, sigma, rows, rate / 10), "")


def _problems(
    head: SharedHead, letter: Tensor, n: int | None, sigma: float | None, rows: bool, each: float
) -> Iterator[str]:
    from scipy.stats import chi2, norm

    classes, wide = head.shape
    variances = letter[-classes:]
    noise = float(variances.max().clamp(min=0)) ** 0.5
    if sigma is not None and abs(noise - sigma) > _ROUND_OFF * sigma:
        yield f"it says that its noise has a deviation of {noise:.3g}, where {sigma:.3g} was announced"
    weights = (variances / noise**2).sqrt() if noise else torch.ones_like(variances)
    if not bool((weights > 0).all()):
        yield "it says that some of its numbers have no noise, and others have"
    sums = letter[:-classes].view(classes, wide) / weights[:, None]
    length, counts = float(sums.norm()), sums[:, -1]
    off = _ROUND_OFF * length
    # 1. no class's sum is longer than its count: how far it lies outside that cone is at most how long its noise is
    along = sums[:, :-1].norm(dim=1)
    outside = (along - counts / COUNT).clamp(min=0) / (1 + COUNT**-2) ** 0.5
    beyond = torch.where(counts < -COUNT * along, sums.norm(dim=1), outside)
    if float(beyond.max()) > noise * chi2.isf(each / classes, wide) ** 0.5 + off:
        yield "the sum of a class is longer than its count and noise allow"
    if n is None:
        return
    # 2. no letter is longer than n units and its noise
    most = n + noise * chi2.isf(each, sums.numel()) ** 0.5 + off
    if length > most:
        yield f"it is {length:.3g} long, where {n} units and their noise make at most {most:.3g}"
    # 3. the counts add up to n rows, and noise
    told, apart = float(counts.sum()) / _COUNTED, noise * classes**0.5 * norm.isf(4 * each) / _COUNTED
    if rows and abs(told - n) > apart + off / _COUNTED:
        yield f"it counts {told:.3g} rows, where {n} were announced and noise makes at most {apart:.3g}"


@torch.no_grad()
def without(head: SharedHead, letter: Tensor) -> SharedHead:
    """Return the head that all other letters make, as everybody may see it.

    Args:
        head: one that holds the mean of two letters or more.
        letter: float64[k + classes], one of them.
    """
    left, n = copy.deepcopy(head), int(head.n_sites)
    left.forget()
    left.sums.copy_((head.sums.double() * n - letter.to(head.sums.device)) / (n - 1))
    left.n_sites.fill_(n - 1)
    return left
