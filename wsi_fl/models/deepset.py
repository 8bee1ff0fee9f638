"""Deep Sets (Zaheer et al., NeurIPS 2017): a label for a bag of patch features, whatever their order and number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from wsi_fl.models.bags import BagModel, opened

HIDDEN, ATTENDING = 256, 128
"""Units of φ and ρ, and of the attention."""

Pool = Callable[[Tensor, Tensor], Tensor]
"""(φ float32[b, m, hidden] ≥ 0 and 0 at padding, mask bool[b, m]) → float32[b, hidden]."""


def _mean(phi: Tensor, present: Tensor) -> Tensor:
    return phi.sum(1) / present.sum(1, keepdim=True).clamp(min=1)


def _max(phi: Tensor, present: Tensor) -> Tensor:
    del present  # φ ends in a ReLU, so that the zeros of padding exceed nothing
    return phi.amax(1)


class Attention(nn.Module):
    """A mean of the patches, weighted by the softmax of their scores over the bag (Ilse et al., ICML 2018).

    Args:
        score: φ float32[b, m, hidden] → float32[b, m, 1].
    """

    def __init__(self, score: nn.Module) -> None:
        super().__init__()
        self.score = score

    def weights(self, phi: Tensor, present: Tensor) -> Tensor:
        """Return float32[b, m], 0 at padding; sums to 1 over each bag that has a patch."""
        scores = self.score(phi).squeeze(2).masked_fill(~present, torch.finfo(phi.dtype).min)
        return torch.softmax(scores, dim=1) * present

    def forward(self, phi: Tensor, present: Tensor) -> Tensor:
        return (self.weights(phi, present).unsqueeze(2) * phi).sum(1)


class PooledBag(BagModel):
    """ρ of the pooled φ of each patch; φ ends in a ReLU."""

    def __init__(self, phi: nn.Module, pool: Pool, rho: nn.Module) -> None:
        super().__init__()
        self.phi, self.pool, self.rho = phi, pool, rho

    def _embedded(self, bags: Tensor) -> tuple[Tensor, Tensor]:
        features, present = opened(bags)
        return self.phi(features) * present.unsqueeze(2), present

    def forward(self, bags: Tensor) -> Tensor:
        logits: Tensor = self.rho(self.pool(*self._embedded(bags)))
        return logits

    def attention(self, bags: Tensor) -> Tensor | None:
        return self.pool.weights(*self._embedded(bags)) if isinstance(self.pool, Attention) else None


def _deepset(n_classes: int, n_features: int, hidden: int, pool: Pool) -> nn.Module:
    """φ begins with a LayerNorm, since encoders differ in scale."""
    phi = nn.Sequential(
        nn.LayerNorm(n_features),
        nn.Linear(n_features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
    )
    return PooledBag(
        phi, pool, nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, n_classes))
    )


def deepset(n_classes: int, n_features: int, hidden: int = HIDDEN) -> nn.Module:
    """The mean over the bag.

    Example:
        >>> deepset(2, 1024)(torch.zeros(3, 50, 1025)).shape
        torch.Size([3, 2])
    """
    return _deepset(n_classes, n_features, hidden, _mean)


def deepset_max(n_classes: int, n_features: int, hidden: int = HIDDEN) -> nn.Module:
    """The largest value of each unit of φ over the bag."""
    return _deepset(n_classes, n_features, hidden, _max)


def deepset_attention(n_classes: int, n_features: int, hidden: int = HIDDEN) -> nn.Module:
    """A mean weighted by attention, which says what the answer rests on."""
    score = nn.Sequential(nn.Linear(hidden, ATTENDING), nn.Tanh(), nn.Linear(ATTENDING, 1))
    return _deepset(n_classes, n_features, hidden, Attention(score))
