"""Sums of a site's rows that may leave it once: the Gaussian mechanism on sufficient statistics.

Adding or removing a unit, a row or a patient, changes the sums by at most `clip` in L2. So the sums plus noise of
standard deviation σ·clip on each number are one application of the Gaussian mechanism without sampling, whose ε is
exact (Balle and Wang, ICML 2018). The noise is discrete, so that nothing is lost to floating point (Canonne, Kamath
and Steinke, 2020).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wsi_fl.models.shared_head import COUNT, SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.discrete import (
    A_LITTLE,
    SCALE,
    discrete_gaussian,
    quantised,
    sensitivity_of,
)
from wsi_fl.privacy.plan import PrivacyPlan
from wsi_fl.types import WsiFlError


@dataclass(frozen=True)
class NoisySums:
    """The Gaussian mechanism for sums."""

    sigma: float  # noise multiplier; the noise's standard deviation is sigma * clip
    clip: float  # bound on the L2 norm of one unit's sums, in units of the longest row
    batch_size: int  # number of units, all of which take part
    unit: str = "row"  # whose sums are clipped, a "row"'s or a "patient"'s

    @classmethod
    def of(cls, plan: PrivacyPlan) -> NoisySums:
        """Return the mechanism by which a plan adds noise to sums of all its units."""
        return cls(plan.sigma, plan.clip, plan.batch_size, plan.unit)

    @torch.no_grad()
    def fill(
        self, head: SharedHead, x: Tensor, y: Tensor, stream: CipherStream, patient: Tensor | None = None
    ) -> None:
        """Give a head the letter of these rows, as it may leave the site, with noise.

        Args:
            x, y: all rows of the site, float32[n, d] or bags float32[n, m, d + 1], and the columns in which they count.
            patient: int64[n], whose each row is, where the unit is a patient.
        """
        z = head.embedded(x)
        exact = self.clipped(head, z, y, patient)
        noisy = self.noisy(exact, stream) if self.sigma else exact
        head.hold(exact, *head.weighed(noisy, (self.sigma * self.clip) ** 2))

    def clipped(self, head: SharedHead, z: Tensor, y: Tensor, patient: Tensor | None = None) -> Tensor:
        """Return the letter float64[k] of n rows in which no unit counts for more than `clip`.

        A patient counts with the mean of its rows of each class, or of all where they share columns, jointly clipped.

        Args:
            z, y: the rows as the head sees them, float64[n, d], and their columns, as `SharedHead.packed` has them.
            patient: int64[n], whose each row is, where the unit is a patient.

        Raises:
            WsiFlError: where the unit is a patient and nobody says whose a row is.
        """
        most = min(1.0, self.clip)
        if self.unit == "row":
            return head.packed(z, y) * most
        if patient is None:
            raise WsiFlError("sums with patients as units must know whose each row is")
        found = head.packed(z[:0], y[:0])
        for one in sorted(set(patient.tolist())):
            mine = patient == one
            part = head.packed_means(z[mine], y[mine])
            found += part * float((most * (1 - _ROUND_OFF) / part.norm()).clamp(max=1.0))
        return found

    def noisy(self, sums: Tensor, stream: CipherStream) -> Tensor:
        """Return float64[k] with discrete Gaussian noise of the stream, in steps of 1 / `SCALE`."""
        values = quantised(sums.cpu().numpy(), SCALE)
        steps = self.sigma * sensitivity_of(self.clip, SCALE, len(values)) * (1 + A_LITTLE)
        drawn = discrete_gaussian(steps, len(values), stream)
        return torch.from_numpy((values + drawn) / SCALE).to(sums.device)


_ROUND_OFF = 1e-9  # of the bound: more than sums in float64 are wrong by


FALSE_ALARMS = 1e-6
"""The chance that an honest letter is refused, at most."""
_LETTER_ROUND_OFF = 1e-4  # of float32, and of what was clipped, in parts of a letter's length
_COUNTED = COUNT / (1 + COUNT**2) ** 0.5  # what a row adds to the count of its class


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
    if sigma is not None and abs(noise - sigma) > _LETTER_ROUND_OFF * sigma:
        yield f"it says that its noise has a deviation of {noise:.3g}, where {sigma:.3g} was announced"
    weights = (variances / noise**2).sqrt() if noise else torch.ones_like(variances)
    if not bool((weights > 0).all()):
        yield "it says that some of its numbers have no noise, and others have"
    sums = letter[:-classes].view(classes, wide) / weights[:, None]
    length, counts = float(sums.norm()), sums[:, -1]
    off = _LETTER_ROUND_OFF * length
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
    # 3. the counts add up to n rows at most, and noise; fewer where validation rows or a fold are held out of n
    told, apart = float(counts.sum()) / _COUNTED, noise * classes**0.5 * norm.isf(8 * each) / _COUNTED
    if rows and told - n > apart + off / _COUNTED:
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
