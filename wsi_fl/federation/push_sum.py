"""PushSum (Kempe et al., 2003) with training between rounds.

Each site holds the biased numerator x and the weight w, and trains and evaluates z = x / w. Training moves z by Δz,
which is added to x unscaled: the site sends P·(x + Δz) and P·w. Dividing x by w in each round, as printed in Algorithm
1, averages wrongly unless P is a permutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class PushSum:
    """The state of a site: numerator float32[d] and weight."""

    x: Vector
    w: float

    @property
    def z(self) -> Vector:
        """Return the de-biased parameters z = x / w."""
        return self.x if self.w == 1 else (self.x / np.float32(self.w))

    def add_training(self, z: Vector) -> PushSum:
        """Return the state after training to parameters `z`: x + Δz, with the same w."""
        if self.w == 1:
            return PushSum(z, 1.0)
        return PushSum(self.x + (z - self.z), self.w)

    @staticmethod
    def weigh_model(z: Vector, weight: float) -> PushSum:
        """Return the state of a model that counts with this weight in the next mean, whatever it had before."""
        return PushSum(z if weight == 1 else z * np.float32(weight), weight)


def mix_states(local_state: PushSum, local_share: float, messages: Sequence[PushSum]) -> PushSum:
    """Return the sum of a site's own share and the received messages, numerators and weights.

    Args:
        local_share: P[i, i].
        messages: messages, scaled by their senders' shares.
    """
    if local_share == 0 and len(messages) == 1:
        return messages[0]
    x = local_state.x * np.float32(local_share)
    w = local_state.w * local_share
    for part in messages:
        x = x + part.x
        w += part.w
    return PushSum(x, w)
