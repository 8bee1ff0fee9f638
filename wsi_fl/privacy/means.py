"""A mean that may leave a site: the Gaussian mechanism (Dwork & Roth, 2014, appendix A)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wsi_fl.privacy.accounting import Mechanism
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import WsiFlError


def noisy_mean(
    values: NDArray[np.float64],
    *,
    clip: float,
    sigma: float,
    noise: CipherStream,
    units: NDArray[np.str_] | None = None,
) -> tuple[NDArray[np.float64], Mechanism, int]:
    """The mean float64[k] of rows clipped to norm `clip` with noise of σ·clip on their sum; its cost; how many units.

    Adding or removing a unit changes the sum of clipped rows by at most `clip` in L2, and the number that divides it is
    public, so the sum plus N(0, (σ·clip)²) is one application of the Gaussian mechanism without sampling.

    Args:
        values: float64[n, k], a row of each depending on one record alone.
        units: str[n], whose record each row is (patients); their rows are averaged first. None: each row counts.

    Raises:
        WsiFlError: when there is no row.
    """
    if units is not None:
        names, which = np.unique(units, return_inverse=True)
        sums = np.zeros((len(names), values.shape[1]))
        np.add.at(sums, which, values)
        values = sums / np.bincount(which)[:, None]
    n = len(values)
    if n == 0:
        raise WsiFlError("a mean needs at least one record")
    values = np.where(
        np.isfinite(values).all(1, keepdims=True), values, 0.0
    )  # else one row would undo the bound
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    total = (values * np.minimum(1.0, clip / np.maximum(norms, 1e-12))).sum(0)
    added = noise.normal(values.shape[1]) * sigma * clip
    return (total + added) / n, Mechanism(sigma, clip, 1.0, 1), n
