"""Directions of features that all sites know, and along which they sum: where tissue that is nobody's secret varies.

A row's layer-normalised features, minus the mean of public rows, are projected on the first principal components of
public rows, each divided by the fourth root of its variance, and clipped to the median length of public rows. Noise is
the same along every direction, so that few directions in which tissue varies lose less than many random ones.
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
"""Directions of public tissue. With 64 there is more noise than they tell, at ε = 1."""
N_RANDOM = 128
"""Random directions, where there is no public tissue: with fewer too much of the features is lost."""
_FEWEST, _MOST = 16, 96
_LEAST = 0.1  # of the mean variance, added to each, so that none is divided by nearly nothing
_SEED = 1_618_033
_WITHIN = 0.25
"""Of the square of a row's length in random directions, what rows of one class differ by; nobody knows it there."""


class Source(BaseModel):
    """A file or store of public tissue: its name, how many rows came of it, and its SHA-256."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: str
    rows: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Origin(BaseModel):
    """Where public directions come from: the encoder of the features, and the tissue."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Literal[1] = 1
    encoder: str
    sources: list[Source] = Field(min_length=1)


@dataclass(frozen=True, eq=False)
class Directions:
    """A map of features to numbers that are summed."""

    mean: NDArray[np.float32]  # float32[n_features], taken off first
    # float32[n_features, d], such that most rows of public tissue come to be at most 1 long
    components: NDArray[np.float32]
    covariance: NDArray[np.float64]  # float64[d, d], of public rows along the directions
    origin: Origin | None = None  # where public ones are from; None where nobody said, and for random ones

    @property
    def n(self) -> int:
        """Return how many directions there are."""
        return int(self.components.shape[1])

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the numbers, by which sites know that they have the same ones."""
        found = hashlib.sha256()
        for kind, values in (("<f4", self.mean), ("<f4", self.components), ("<f8", self.covariance)):
            found.update(np.ascontiguousarray(values, kind).tobytes())
        return found.hexdigest()


def random_directions(n_features: int, n: int = N_RANDOM) -> Directions:
    """Return random directions, the same everywhere: |LayerNorm(x)|² is n_features, so that a row is about 1 long."""
    import torch

    d = min(n, n_features)
    stream = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn(n_features, d, dtype=torch.float64, generator=stream).numpy() / sqrt(d * n_features)
    return Directions(np.zeros(n_features, np.float32), drawn.astype(np.float32), np.eye(d) * (_WITHIN / d))


def public_directions(x: NDArray[np.float32], origin: Origin | None = None, n: int = N_PUBLIC) -> Directions:
    """Return at most n directions of public tissue, given features x float32[m, n_features] of patches, m > n.

    Raises:
        UsageError: when there are too few rows, or they are all the same.
    """
    if len(x) <= n or not np.isfinite(x).all():
        raise UsageError(
            f"{len(x)} public rows give no {n} directions; take {10 * n} patches or more of several slides"
        )
    rows = normalised(x)
    mean = rows.mean(0)
    _, lengths, axes = np.linalg.svd(rows - mean, full_matrices=False)
    variance = lengths[:n] ** 2 / len(x)
    if variance[-1] <= variance[0] * 1e-9:
        raise UsageError(
            f"public rows vary in fewer than {n} directions; take patches of other slides as well"
        )
    components = axes[:n].T * (variance + _LEAST * variance.mean()) ** -0.25
    length = np.median(np.linalg.norm((rows - mean) @ components, axis=1))
    components = (components / length).astype(np.float32)
    z = (rows - mean) @ components
    z /= np.linalg.norm(z, axis=1, keepdims=True).clip(min=1)
    return Directions(mean.astype(np.float32), components, np.cov(z.T), origin)


def enough_directions(x: NDArray[np.float32], rows: int, variance: float) -> int:
    """Return how many directions suit the letters of some hospitals, from 16 to 96: more where noise is little.

    As many as 9 times the cube root of the rows that noise leaves a class's mean worth. These are v N² / s², with the
    mean variance v of public rows and N half of all rows. The rule is the best of those tried in studies/LETTERS.md.
    All that it asks is known before anything is sent.

    Args:
        x: float32[m, n_features], features of public patches.
        rows: of all hospitals together, about.
        variance: s², of the noise in each number of the sum of all letters, where a row's letter is 1 long.
    """
    v = public_directions(x).covariance.trace() / N_PUBLIC
    worth = v * (rows / 2) ** 2 / variance
    return int(np.clip(9 * np.cbrt(worth), _FEWEST, max(_FEWEST, min(_MOST, len(x) // 2))))


def normalised(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return features float64[m, n_features] as a head sees them, each row with mean 0 and variance 1."""
    rows = x.astype(np.float64)
    rows -= rows.mean(1, keepdims=True)
    found: NDArray[np.float64] = rows / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
    return found


def write_directions(path: Path, directions: Directions) -> None:
    """Write public directions, whole or not at all."""
    import torch

    assert directions.origin is not None
    tensors = {name: torch.from_numpy(getattr(directions, name)) for name in _TENSORS}
    save_tensors(path, tensors, directions.origin.model_dump())


def read_directions(path: Path, label: str) -> Directions:
    """Return what `write_directions` wrote; errors call the file by its label.

    Raises:
        WsiFlError: when it is damaged, or no file of directions.
    """
    tensors, document = load_tensors(path, "directions")
    try:
        origin = Origin.model_validate(document)
        mean, components, covariance = (tensors[name].numpy() for name in _TENSORS)
        n_features, n = components.shape
        whole = (
            mean.shape == (n_features,)
            and covariance.shape == (n, n)
            and mean.dtype == components.dtype == np.float32
            and covariance.dtype == np.float64
            and all(bool(np.isfinite(one).all()) for one in (mean, components, covariance))
        )
    except (ValidationError, KeyError, ValueError):
        whole = False
    if not whole:
        raise WsiFlError(
            f"{label}: not a file of directions; make one with `wsi-fl projection`, or copy it again"
        )
    return Directions(mean, components, covariance, origin)


_TENSORS = ("mean", "components", "covariance")
