"""The projection of features for class statistics, common to all sites, from public reference slides.

An example's layer-normalised features, minus the mean of public examples, are projected on the first principal
components of public examples, each divided by the fourth root of its variance, and clipped to the median norm of public
examples. Noise is the same along every component, so few components of high variance lose less than many random ones.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wsi_fl.system.tensors import load_tensors, save_tensors
from wsi_fl.types import UsageError, WsiFlError

N_PUBLIC = 32
"""Default number of principal components of public reference slides; at ε = 1 the noise of 64 exceeds their gain."""
N_RANDOM = 128
"""Default number of random components without public reference slides; fewer lose too much of the features."""
_MIN_COMPONENTS, _MAX_COMPONENTS = 16, 96
_VARIANCE_FLOOR = 0.1  # of the mean variance, added to each, to avoid divisions by almost 0
_SEED = 1_618_033
_WITHIN_CLASS_SHARE = 0.25
"""Assumed share of the variance within classes in the squared norm of an example on random components."""


class ProjectionSource(BaseModel):
    """A file or store of public reference slides: its name, number of rows and SHA-256."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str
    rows: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ProjectionOrigin(BaseModel):
    """Origin of a projection: the encoder of the features, and the public reference slides."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    encoder: str
    sources: list[ProjectionSource] = Field(min_length=1)


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear projection of features for class statistics."""

    mean: NDArray[np.float32]  # float32[n_features], subtracted first
    # float32[n_features, d], scaled such that most public examples have a norm of at most 1
    components: NDArray[np.float32]
    covariance: NDArray[np.float64]  # float64[d, d], of projected public examples
    origin: ProjectionOrigin | None = None  # None for random components and where unknown

    @property
    def n_components(self) -> int:
        """Return the number of components."""
        return int(self.components.shape[1])

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the numbers, by which sites check that they have the same projection."""
        digest = hashlib.sha256()
        for kind, values in (("<f4", self.mean), ("<f4", self.components), ("<f8", self.covariance)):
            digest.update(np.ascontiguousarray(values, kind).tobytes())
        return digest.hexdigest()


def random_projection(n_features: int, n: int = N_RANDOM) -> Projection:
    """Return the random projection, the same at all sites; |LayerNorm(x)|² = n_features, so norms are about 1."""
    import torch

    d = min(n, n_features)
    if not d:  # counts alone
        return Projection(np.zeros(n_features, np.float32), np.zeros((n_features, 0), np.float32), np.zeros((0, 0)))
    stream = torch.Generator().manual_seed(_SEED)
    components = torch.randn(n_features, d, dtype=torch.float64, generator=stream).numpy() / sqrt(d * n_features)
    return Projection(
        np.zeros(n_features, np.float32), components.astype(np.float32), np.eye(d) * (_WITHIN_CLASS_SHARE / d)
    )


def fit_projection(x: NDArray[np.float32], origin: ProjectionOrigin | None = None, n: int = N_PUBLIC) -> Projection:
    """Fit a projection of n components to features x float32[m, n_features] of public patches, m > n.

    Raises:
        UsageError: for too few rows, or equal ones.
    """
    if len(x) <= n or not np.isfinite(x).all():
        raise UsageError(
            f"{len(x)} public rows give no {n} components; take {10 * n} patches or more of several slides"
        )
    rows = normalize_rows(x)
    mean = rows.mean(0)
    _, lengths, axes = np.linalg.svd(rows - mean, full_matrices=False)
    variance = lengths[:n] ** 2 / len(x)
    if variance[-1] <= variance[0] * 1e-9:
        raise UsageError(f"public rows vary in fewer than {n} components; take patches of other slides as well")
    components = axes[:n].T * (variance + _VARIANCE_FLOOR * variance.mean()) ** -0.25
    length = np.median(np.linalg.norm((rows - mean) @ components, axis=1))
    components = (components / length).astype(np.float32)
    z = (rows - mean) @ components
    z /= np.linalg.norm(z, axis=1, keepdims=True).clip(min=1)
    return Projection(mean.astype(np.float32), components, np.cov(z.T), origin)


def choose_n_components(x: NDArray[np.float32], rows: int, variance: float) -> int:
    """Return the number of components, from 16 to 96, for the class statistics of several hospitals.

    It is 9 times the cube root of the effective sample size of a class mean under noise, v N² / s², with the mean
    variance v of public examples and half of all examples N. The rule is the best of those tried in studies/LETTERS.md.
    Its inputs are known before anything is released.

    Args:
        x: float32[m, n_features], features of public patches.
        rows: approximate number of examples of all hospitals.
        variance: s², of the noise in each number of the summed statistics, where those of one example have norm 1.
    """
    v = fit_projection(x).covariance.trace() / N_PUBLIC
    effective_rows = v * (rows / 2) ** 2 / variance
    return int(
        np.clip(9 * np.cbrt(effective_rows), _MIN_COMPONENTS, max(_MIN_COMPONENTS, min(_MAX_COMPONENTS, len(x) // 2)))
    )


def normalize_rows(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return layer-normalised features float64[m, n_features], each row with mean 0 and variance 1."""
    rows = x.astype(np.float64)
    rows -= rows.mean(1, keepdims=True)
    normalized: NDArray[np.float64] = rows / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
    return normalized


def write_projection(path: Path, projection: Projection) -> None:
    """Write a projection to a file, atomically."""
    import torch

    assert projection.origin is not None
    tensors = {name: torch.from_numpy(getattr(projection, name)) for name in _TENSOR_NAMES}
    save_tensors(path, tensors, projection.origin.model_dump())


def read_projection(path: Path, label: str) -> Projection:
    """Read a projection from a file, called `label` in errors.

    Raises:
        WsiFlError: for a damaged or another file.
    """
    tensors, document = load_tensors(path, "directions")
    try:
        origin = ProjectionOrigin.model_validate(document)
        mean, components, covariance = (tensors[name].numpy() for name in _TENSOR_NAMES)
        n_features, n = components.shape
        is_valid = (
            mean.shape == (n_features,)
            and covariance.shape == (n, n)
            and mean.dtype == components.dtype == np.float32
            and covariance.dtype == np.float64
            and all(bool(np.isfinite(values).all()) for values in (mean, components, covariance))
        )
    except (ValidationError, KeyError, ValueError):
        is_valid = False
    if not is_valid:
        raise WsiFlError(f"{label}: not a projection file; make one with `wsi-fl projection`, or copy it again")
    return Projection(mean, components, covariance, origin)


_TENSOR_NAMES = ("mean", "components", "covariance")
