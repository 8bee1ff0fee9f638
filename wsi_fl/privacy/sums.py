"""Class statistics of a site, released once: the Gaussian mechanism on class-conditional sufficient statistics.

Adding or removing a unit, a row or a patient, changes the statistics by at most `clip` in L2. So the statistics plus
noise of standard deviation σ·clip on each number are one application of the Gaussian mechanism without sampling, with
an exact ε (Balle and Wang, ICML 2018). The noise is discrete, so that floating point leaks nothing (Canonne, Kamath and
Steinke, 2020).
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
    """The Gaussian mechanism for class statistics."""

    sigma: float  # noise multiplier; the noise's standard deviation is sigma * clip
    clip: float  # clipping norm, bound on the L2 norm of one unit's statistics, in units of the longest row
    batch_size: int  # number of units, all of which take part
    unit: str = "row"  # privacy unit, "row" or "patient"

    @classmethod
    def of(cls, plan: PrivacyPlan) -> NoisySums:
        """Return the mechanism of a plan for statistics of all its units."""
        return cls(plan.sigma, plan.clip, plan.batch_size, plan.unit)

    @torch.no_grad()
    def fill(
        self, head: SharedHead, x: Tensor, y: Tensor, stream: CipherStream, patient: Tensor | None = None
    ) -> None:
        """Set the class statistics of these rows in a head, with noise as they may leave the site.

        Args:
            x, y: all rows of the site, float32[n, d] or bags float32[n, m, d + 1], and the columns in which they count.
            patient: int64[n], the patient of each row, where the unit is a patient.
        """
        z = head.embedded(x)
        exact = self.clipped(head, z, y, patient)
        noisy = self.noisy(exact, stream) if self.sigma else exact
        head.hold(exact, *head.weighed(noisy, (self.sigma * self.clip) ** 2))

    def clipped(self, head: SharedHead, z: Tensor, y: Tensor, patient: Tensor | None = None) -> Tensor:
        """Return the class statistics float64[k] of n rows, each unit clipped to `clip`.

        A patient counts with the mean of its rows of each class, or of all where they share columns, jointly clipped.

        Args:
            z, y: the embedded rows, float64[n, d], and their columns, as the head packs them.
            patient: int64[n], the patient of each row, where the unit is a patient.

        Raises:
            WsiFlError: where the unit is a patient and patients are missing.
        """
        most = min(1.0, self.clip)
        if self.unit == "row":
            return head.packed(z, y) * most
        if patient is None:
            raise WsiFlError("class statistics with patients as privacy units need the patient of each row")
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


_ROUND_OFF = 1e-9  # of the bound: more than the error of sums in float64


FALSE_ALARMS = 1e-6
"""The largest probability that honest statistics are refused."""
_LETTER_ROUND_OFF = 1e-4  # of float32 and of clipping, relative to the length of the statistics
_COUNTED = COUNT / (1 + COUNT**2) ** 0.5  # a row's addition to the count of its class


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
    """Return the reason why noisy class statistics cannot be of n units; "" for none.

    Honest statistics are refused with a probability of at most `rate`: a tenth each by the first two tests, which are
    conservative, and eight tenths by the third, which is exact. Without noise no honest statistics are refused.

    Args:
        head: a head with the same projection.
        statistics: float[k + classes], statistics with noise, and the noise variances by class.
        n, sigma: number of units and noise multiplier announced by the site; None where not announced.
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
        yield f"its stated noise has a deviation of {noise:.3g}, where {sigma:.3g} was announced"
    weights = (variances / noise**2).sqrt() if noise else torch.ones_like(variances)
    if not bool((weights > 0).all()):
        yield "some of its numbers are stated to have no noise, and others have"
    sums = letter[:-classes].view(classes, wide) / weights[:, None]
    length, counts = float(sums.norm()), sums[:, -1]
    off = _LETTER_ROUND_OFF * length
    # 1. no class's sum is longer than its count: its distance from that cone is at most the length of the noise
    along = sums[:, :-1].norm(dim=1)
    outside = (along - counts / COUNT).clamp(min=0) / (1 + COUNT**-2) ** 0.5
    beyond = torch.where(counts < -COUNT * along, sums.norm(dim=1), outside)
    if float(beyond.max()) > noise * chi2.isf(each / classes, wide) ** 0.5 + off:
        yield "the sum of a class is longer than its count and noise allow"
    if n is None:
        return
    # 2. the statistics are not longer than n units and their noise
    most = n + noise * chi2.isf(each, sums.numel()) ** 0.5 + off
    if length > most:
        yield f"it is {length:.3g} long, where {n} units and their noise make at most {most:.3g}"
    # 3. the counts add up to n rows at most, and noise; fewer where validation rows or a fold are held out of n
    told, apart = float(counts.sum()) / _COUNTED, noise * classes**0.5 * norm.isf(8 * each) / _COUNTED
    if rows and told - n > apart + off / _COUNTED:
        yield f"it counts {told:.3g} rows, where {n} were announced and noise makes at most {apart:.3g}"


@torch.no_grad()
def without(head: SharedHead, letter: Tensor) -> SharedHead:
    """Return the head from the statistics of all other sites, which is public to the federation.

    Args:
        head: a head with the mean of the statistics of two sites or more.
        statistics: float64[k + classes], the statistics of one site.
    """
    left, n = copy.deepcopy(head), int(head.n_sites)
    left.forget()
    left.sums.copy_((head.sums.double() * n - letter.to(head.sums.device)) / (n - 1))
    left.n_sites.fill_(n - 1)
    return left
