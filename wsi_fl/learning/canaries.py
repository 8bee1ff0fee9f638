"""Canaries: meaningless examples, each planted among the training rows or not by a fair coin.

Whether a trained model tells those that were in from those that were out bounds the privacy of its training from
below (`privacy/audit.py`). They are noise with a random label: nothing else in the data can teach a model their labels,
so whatever it knows of one it has from that one.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, Inputs, subset
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import Bags, Images, Shape

_INSTANCES = 8
"""Patches of a bag."""


@dataclass(frozen=True)
class Canaries:
    """The canaries of a site in a run.

    Attributes:
        seed: what their pixels or features and their labels are made from.
        included: bool[m], which ones are planted: m fair coins.
        examples: all m.
    """

    seed: int
    included: NDArray[np.bool_]
    examples: Examples

    def planted(self) -> Examples:
        """Return the canaries that are planted, in order."""
        return subset(self.examples, np.flatnonzero(self.included))


def tossed(m: int) -> tuple[int, NDArray[np.bool_]]:
    """Return (seed, m fair coins), from the operating system's entropy and never from a seed of the study."""
    coins = np.frombuffer(secrets.token_bytes(m), np.uint8) < 128
    return secrets.randbits(256), coins


def canaries(seed: int, included: NDArray[np.bool_], shape: Shape, n_classes: int) -> Canaries:
    """Return the canaries of a seed, always the same ones, for models that see `shape`."""
    m = len(included)
    stream = CipherStream.seeded(seed, "canaries")
    labels = np.array([stream.below(n_classes) for _ in range(m)], np.int64)
    inputs = _noise(stream, m, shape)
    names = np.array([f"canary {k}" for k in range(m)])
    allowed = np.ones((m, n_classes), bool) if isinstance(shape, Bags) else None
    made = Examples(
        lambda rows: inputs[rows],
        labels,
        names,
        names,
        allowed,
        show=lambda rows, draws: inputs[rows],
    )
    return Canaries(seed, included, made)


def _noise(stream: CipherStream, m: int, shape: Shape) -> Inputs:
    """Return m images of uniform pixels, vectors of normal features, or bags of such."""
    if isinstance(shape, Images):
        size = (m, shape.size_px, shape.size_px, shape.channels)
        return (stream.uniform(math.prod(size)) * 256).astype(np.uint8).reshape(size)
    if isinstance(shape, Bags):
        bags = stream.normal(m * _INSTANCES * (shape.n_features + 1)).astype(np.float32)
        bags = bags.reshape(m, _INSTANCES, shape.n_features + 1)
        bags[:, :, -1] = 1  # every patch is there
        return bags
    return stream.normal(m * shape.n_features).astype(np.float32).reshape(m, shape.n_features)
