"""What may leave a site: only a `PrivacyLedger` makes one, after writing down what it costs."""

from __future__ import annotations

import hashlib
from dataclasses import InitVar, dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32] | NDArray[np.uint8]
"""Parameters of a model, or the bytes of a buffer of images."""

SEAL = object()
"""Held by the ledger alone."""


@dataclass(frozen=True, eq=False)
class Release:
    """What a site lets go: flat numbers with their PushSum weight, or flat bytes, recorded in a ledger.

    Attributes:
        site, round: whose it is, and in which round it was made.
        schema: of the model whose parameters they are.
        vector: float32[d], or uint8[d] of a buffer; read-only.
        weight: PushSum weight that travels along.
        digest: SHA-256 of the bytes that travel, as the ledger has it.
    """

    site: str
    round: int
    schema: str
    vector: Values
    weight: float
    digest: str
    seal: InitVar[object]

    def __post_init__(self, seal: object) -> None:
        if seal is not SEAL:
            raise TypeError("only PrivacyLedger.release makes a Release")
        frozen = np.array(self.vector, _kind_of(self.vector))
        frozen.flags.writeable = False
        object.__setattr__(self, "vector", frozen)


def _kind_of(vector: Values) -> type[np.uint8] | type[np.float32]:
    return np.uint8 if vector.dtype == np.uint8 else np.float32


def digest(vector: Values) -> str:
    """SHA-256 of the bytes that travel."""
    kind = "u1" if vector.dtype == np.uint8 else "<f4"
    return hashlib.sha256(np.ascontiguousarray(vector, kind).tobytes()).hexdigest()
