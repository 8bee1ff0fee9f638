"""Class means in the statistics of a site, with the noise that they have."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.oneshot.class_statistics import explain_invalid_statistics
from wsi_fl.oneshot.column_sums import SCALE
from wsi_fl.oneshot.projection import Projection
from wsi_fl.oneshot.released_statistics import ReleasedStatistics
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.types import UsageError, WsiFlError

_N_DRAWS = 3
_Z = 1.96
_Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ClassMean:
    """A class mean float64[d] in a site's statistics.

    Attributes:
        length: length of the mean without noise, estimated; 0 where noise is all.
        noise_sd: standard deviation of the noise in each component; 0 without noise, infinite for no units.
        count, count_sd: number of units of the class, with noise, and its standard deviation.
    """

    name: str
    mean: _Floats
    length: float
    noise_sd: float
    count: float
    count_sd: float

    @property
    def is_hidden(self) -> bool:
        """Whether noise alone could make the count."""
        return self.count <= _Z * self.count_sd

    @property
    def noise_ratio(self) -> float:
        """Return the expected length of the noise over that of the mean; infinite where noise is all."""
        return sqrt(len(self.mean)) * self.noise_sd / self.length if self.length else inf

    def describe_noise(self) -> str:
        """Return what the noise means for the patches nearest to the mean, in a sentence."""
        ratio = self.noise_ratio
        if not self.noise_sd:
            return "It has no noise."
        if ratio > 1:
            return "The noise is larger than all that it says: these patches may be of any tissue, and tell nothing."
        size = f"The noise moves it by about {ratio:.2f} of its distance from average public tissue"
        if ratio > 1 / 3:  # an angle of 18°
            return f"{size}, which is noticeable: some of these patches may be here by chance."
        return f"{size}, which is little."

    def redraw_noise(self, rng: np.random.Generator) -> _Floats:
        """Return some means with as much noise once more, float64[n, d]; none without noise."""
        n = _N_DRAWS if self.noise_sd else 0
        return self.mean + rng.normal(scale=self.noise_sd, size=(n, len(self.mean)))


def unpack_class_means(
    statistics: ReleasedStatistics, projection: Projection, label: str, *, is_exact: bool = False
) -> list[ClassMean]:
    """Return the class means in statistics, with the noise that they have, or would get where they are exact.

    Raises:
        UsageError: for another projection, or statistics of numbers, survival or counts alone.
        WsiFlError: for statistics that no honest site would release.
    """
    header, vector = statistics.header, torch.from_numpy(statistics.vector).double()
    if header.projection != projection.digest:
        raise UsageError(
            f"{label}: made with another projection than model.projection; take the file that its hospital had"
        )
    if header.columns != len(header.classes) or not header.dimensions:
        raise UsageError(f"{label}: no statistics of classes with features, of which there are no class means to show")
    is_mean = header.unit == "patient" and header.example == "patch"
    head = SharedHead(len(header.classes), header.n_features, projection=projection, patients=is_mean)
    is_row = header.unit == "row"
    if problem := explain_invalid_statistics(head.layout, vector, header.n, header.sigma, rows=is_row):
        raise WsiFlError(f"{label}: no statistics of {header.n} {header.unit}s: {problem}; ask its site for the file")
    # a class with weight w has sums, counts and noise of w times their size
    weights = (vector[-header.columns :] / header.sigma**2).sqrt() if header.sigma else torch.ones(header.columns)
    sums, counts = head.unpack_statistics(vector)
    noise_sd = header.sigma / SCALE * float(head.clip_scale)
    means = []
    for name, total, count, weight in zip(header.classes, sums, counts.tolist(), weights.tolist(), strict=True):
        mean = (total / count if count > 0 else torch.zeros_like(total)).numpy()
        noise = noise_sd * weight / count if count > 0 else inf
        length = sqrt(max(0.0, float(mean @ mean) - (0.0 if is_exact else len(mean) * noise**2)))
        means.append(ClassMean(name, mean, length, noise, count / weight, header.sigma / head.layout.count_scale))
    return means
