"""Heads on the features of a frozen encoder: small enough that differential privacy leaves them something to learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN = 64


def linear_head(n_classes: int, n_features: int) -> nn.Module:
    """LayerNorm, since encoders differ in scale, and fc(n_classes).

    Example:
        >>> linear_head(2, 1280)(torch.zeros(3, 1280)).shape
        torch.Size([3, 2])
    """
    return nn.Sequential(nn.LayerNorm(n_features), nn.Linear(n_features, n_classes))


def mlp_head(n_classes: int, n_features: int, hidden: int = HIDDEN) -> nn.Module:
    """LayerNorm, fc(64), ReLU, fc(n_classes)."""
    return nn.Sequential(
        nn.LayerNorm(n_features), nn.Linear(n_features, hidden), nn.ReLU(), nn.Linear(hidden, n_classes)
    )


class MeanOfBag(nn.Module):
    """Maps bags float32[b, m, d + 1] (see `bags`) to the mean of their features float32[b, d]."""

    def forward(self, bags: Tensor) -> Tensor:
        present = (bags[..., -1:] > 0.5).to(bags.dtype)
        features = torch.where(present > 0, bags[..., :-1], 0.0)
        return features.sum(1) / present.sum(1).clamp(min=1)


def mean_head(n_classes: int, n_features: int) -> nn.Module:
    """Return a linear head on the mean of a bag's features.

    Example:
        >>> mean_head(2, 1280)(torch.zeros(3, 50, 1281)).shape
        torch.Size([3, 2])
    """
    return nn.Sequential(MeanOfBag(), *linear_head(n_classes, n_features))  # type: ignore[misc]
