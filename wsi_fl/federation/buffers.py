"""A site's buffer: labelled synthetic images as flat bytes, of the same number and size at every site."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples

Flat = NDArray[np.uint8]

_LABEL = np.dtype("<u2")


@dataclass(frozen=True)
class BufferShape:
    """What all sites agreed on: n images [size_px, size_px, channels] of n_classes classes."""

    n: int
    size_px: int
    channels: int
    n_classes: int

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all labels and all pixels together."""
        return self.n * (_LABEL.itemsize + self.size_px**2 * self.channels)

    @property
    def schema(self) -> str:
        """Return the SHA-256 that identifies the shape."""
        return hashlib.sha256(json.dumps(["buffer", asdict(self)], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Buffer:
    """What a site shares of its generator, drawn once.

    Attributes:
        values: uint8[shape.n_bytes], what travels.
        provenance: the generator, its check and the seed, as plain JSON values; it stays with the site.
    """

    shape: BufferShape
    values: Flat
    provenance: dict[str, Any]

    def samples(self) -> Examples:
        """Return the images with their labels; every slide and patient is called "synthetic"."""
        return unpacked(self.values, self.shape)


def packed(pixels: NDArray[np.uint8], label: NDArray[np.int64]) -> Flat:
    """Return images uint8[n, h, w, c] and labels int64[n] as uint8[d]: labels as little-endian uint16, then pixels."""
    return np.concatenate([label.astype(_LABEL).view(np.uint8), pixels.reshape(-1)])


def unpacked(values: Flat, shape: BufferShape) -> Examples:
    """Return the samples of a buffer that `problem_of` accepts."""
    head = shape.n * _LABEL.itemsize
    pixels = values[head:].reshape(shape.n, shape.size_px, shape.size_px, shape.channels)
    name = np.full(shape.n, "synthetic")
    return Examples(lambda rows: pixels[rows], _labels(values, shape), name, name)


def problem_of(values: Flat, shape: BufferShape) -> str:
    """Return why these bytes are no buffer of this shape, or "" where they are one."""
    if len(values) != shape.n_bytes:
        return f"it has {len(values)} bytes, agreed on {shape.n_bytes}"
    if (beyond := int(_labels(values, shape).max())) >= shape.n_classes:
        return f"it holds a label {beyond}, and there are {shape.n_classes} classes"
    return ""


def _labels(values: Flat, shape: BufferShape) -> NDArray[np.int64]:
    return values[: shape.n * _LABEL.itemsize].copy().view(_LABEL).astype(np.int64)
