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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wsi_fl.oneshot.column_sums import COUNT_WEIGHT, StatisticsLayout
from wsi_fl.oneshot.discrete_noise import (
    NOISE_MARGIN,
    STEPS_PER_UNIT,
    discrete_gaussian,
    quantization_sensitivity,
    quantize,
)
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.privacy_plan import PrivacyPlan
from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from wsi_fl.oneshot.released_statistics import ReleasedStatistics


@dataclass(frozen=True)
class NoisyStatistics:
    """The Gaussian mechanism for class statistics."""

    sigma: float  # noise multiplier; the noise's standard deviation is sigma * clip
    clip: float  # clipping norm, bound on the L2 norm of one unit's statistics, in units of the longest row
    batch_size: int  # number of units, all of which take part
    unit: str = "row"  # privacy unit, "row" or "patient"

    @classmethod
    def from_plan(cls, plan: PrivacyPlan) -> NoisyStatistics:
        """Return the mechanism of a plan for statistics of all its units."""
        return cls(plan.sigma, plan.clip, plan.batch_size, plan.unit)

    @torch.no_grad()
    def fill(self, head: SharedHead, x: Tensor, y: Tensor, stream: CipherStream, patient: Tensor | None = None) -> None:
        """Set the class statistics of these rows in a head, with noise as they may leave the site.

        Args:
            x, y: all rows of the site, float32[n, d] or bags float32[n, m, d + 1], and the columns in which they count.
            patient: int64[n], the patient of each row, where the unit is a patient.
        """
        z = head.embed_rows(x)
        exact = self.clip_statistics(head, z, y, patient)
        noisy = self.add_noise(exact, stream) if self.sigma else exact
        head.set_noisy_statistics(exact, *head.weight_by_precision(noisy, (self.sigma * self.clip) ** 2))

    def clip_statistics(self, head: SharedHead, z: Tensor, y: Tensor, patient: Tensor | None = None) -> Tensor:
        """Return the class statistics float64[k] of n rows, each unit clipped to `clip`.

        A patient counts with the mean of its rows of each class, or of all where they share columns, jointly clipped.

        Args:
            z, y: the embedded rows, float64[n, d], and their columns, as the head packs them.
            patient: int64[n], the patient of each row, where the unit is a patient.

        Raises:
            WsiFlError: where the unit is a patient and patients are missing.
        """
        bound = min(1.0, self.clip)
        if self.unit == "row":
            return head.pack_statistics(z, y) * bound
        if patient is None:
            raise WsiFlError("class statistics with patients as privacy units need the patient of each row")
        total = head.pack_statistics(z[:0], y[:0])
        for patient_id in sorted(set(patient.tolist())):
            rows = patient == patient_id
            part = head.pack_patient_means(z[rows], y[rows])
            total += part * float((bound * (1 - _CLIP_ROUND_OFF) / part.norm()).clamp(max=1.0))
        return total

    def add_noise(self, statistics: Tensor, stream: CipherStream) -> Tensor:
        """Return float64[k] with discrete Gaussian noise of the stream, in steps of 1 / `STEPS_PER_UNIT`."""
        values = quantize(statistics.cpu().numpy())
        steps = self.sigma * quantization_sensitivity(self.clip, len(values)) * (1 + NOISE_MARGIN)
        noise = discrete_gaussian(steps, len(values), stream)
        return torch.from_numpy((values + noise) / STEPS_PER_UNIT).to(statistics.device)


_CLIP_ROUND_OFF = 1e-9  # of the bound: more than the error of sums in float64
_FALSE_ALARM_RATE = 1e-6
"""The largest probability that honest statistics are refused."""
_STATISTICS_ROUND_OFF = 1e-4  # of float32 and of clipping, relative to the length of the statistics


@torch.no_grad()
def explain_invalid_statistics(
    layout: StatisticsLayout,
    statistics: Tensor,
    n: int | None = None,
    sigma: float | None = None,
    *,
    rows: bool = True,
    rate: float = _FALSE_ALARM_RATE,
) -> str:
    """Return the reason why noisy class statistics cannot be of n units; "" for none.

    Honest statistics are refused with a probability of at most `rate`: a tenth each by the first two tests, which are
    conservative, and eight tenths by the third, which is exact. Without noise no honest statistics are refused.

    Args:
        layout: of statistics with the same projection.
        statistics: float[k + classes], statistics with noise, and the noise variances by class.
        n, sigma: number of units and noise multiplier announced by the site; None where not announced.
        rows: whether units are rows, each of one class; patients may be of several.
        rate: false alarm rate.
    """
    return next(_find_problems(layout, statistics.double(), n, sigma, rows, rate / 10), "")


def refuse_invalid_statistics(layout: StatisticsLayout, released: ReleasedStatistics, label: str) -> None:
    """Refuse released statistics that no honest site would release; WsiFlError calls them `label`."""
    header, vector = released.header, torch.from_numpy(released.vector)
    if problem := explain_invalid_statistics(layout, vector, header.n, header.sigma, rows=header.unit == "row"):
        raise WsiFlError(f"{label}: no statistics of {header.n} {header.unit}s: {problem}; ask its site for the file")


def _find_problems(
    layout: StatisticsLayout, statistics: Tensor, n: int | None, sigma: float | None, rows: bool, test_rate: float
) -> Iterator[str]:
    from scipy.stats import chi2, norm

    classes, wide = layout.table_shape
    variances = statistics[-classes:]
    noise = float(variances.max().clamp(min=0)) ** 0.5
    if sigma is not None and abs(noise - sigma) > _STATISTICS_ROUND_OFF * sigma:
        yield f"its stated noise has a deviation of {noise:.3g}, where {sigma:.3g} was announced"
    if noise and not bool((variances > 0).all()):
        yield "some of its numbers are stated to have no noise, and others have"
    sums = layout.remove_weights(statistics)[:-classes].view(classes, wide)
    length, counts = float(sums.norm()), sums[:, -1]
    round_off = _STATISTICS_ROUND_OFF * length
    # 1. no class's sum is longer than its count: its distance from that cone is at most the length of the noise
    along = sums[:, :-1].norm(dim=1)
    distance = (along - counts / COUNT_WEIGHT).clamp(min=0) / (1 + COUNT_WEIGHT**-2) ** 0.5
    excess = torch.where(counts < -COUNT_WEIGHT * along, sums.norm(dim=1), distance)
    if float(excess.max()) > noise * chi2.isf(test_rate / classes, wide) ** 0.5 + round_off:
        yield "the sum of a class is longer than its count and noise allow"
    if n is None:
        return
    # 2. the statistics are not longer than n units and their noise
    max_length = n + noise * chi2.isf(test_rate, sums.numel()) ** 0.5 + round_off
    if length > max_length:
        yield f"it is {length:.3g} long, where {n} units and their noise make at most {max_length:.3g}"
    # 3. the counts add up to n rows at most, and noise; fewer where validation rows or a fold are held out of n
    n_counted = float(counts.sum()) / layout.count_scale
    tolerance = noise * classes**0.5 * norm.isf(8 * test_rate) / layout.count_scale
    if rows and n_counted - n > tolerance + round_off / layout.count_scale:
        yield f"it counts {n_counted:.3g} rows, where {n} were announced and noise makes at most {tolerance:.3g}"


@torch.no_grad()
def head_excluding_site(head: SharedHead, statistics: Tensor) -> SharedHead:
    """Return the head from the statistics of all other sites, which is public to the federation.

    Args:
        head: a head with the mean of the statistics of two sites or more.
        statistics: float64[k + classes], the statistics of one site.
    """
    remaining_head, n = copy.deepcopy(head), int(head.n_sites)
    remaining_head.clear_local_statistics()
    remaining_head.sums.copy_((head.sums.double() * n - statistics.to(head.sums.device)) / (n - 1))
    remaining_head.n_sites.fill_(n - 1)
    return remaining_head
