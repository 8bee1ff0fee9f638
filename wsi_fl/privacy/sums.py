"""Sums of a site's rows that may leave it once: the Gaussian mechanism on sufficient statistics.

Adding or removing a unit, a row or a patient, changes the sums by at most `clip` in L2. So the sums plus noise of
standard deviation σ·clip on each number are one application of the Gaussian mechanism without sampling, whose ε is
exact (Balle and Wang, ICML 2018). The noise is discrete, so that nothing is lost to floating point (Canonne, Kamath
and Steinke, 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wsi_fl.models.shared_head import SharedHead
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
    """The Gaussian mechanism for sums.

    Attributes:
        sigma: noise multiplier; the noise's standard deviation is sigma * clip.
        clip: bound on the L2 norm of one unit's sums, in units of the longest row.
        batch_size: number of units, all of which take part.
        unit: whose sums are clipped, a "row"'s or a "patient"'s.
    """

    sigma: float
    clip: float
    batch_size: int
    unit: str = "row"

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


_ROUND_OFF = 1e-9
"""Of the bound: more than sums in float64 are wrong by."""
