"""Heads on the features of a frozen encoder: small enough that differential privacy leaves them something to learn."""

from __future__ import annotations

from torch import nn

HIDDEN = 64


def linear_head(n_classes: int, n_features: int) -> nn.Module:
    """LayerNorm, since encoders differ in scale, and fc(n_classes).

    Example:
        >>> import torch
        >>> linear_head(2, 1280)(torch.zeros(3, 1280)).shape
        torch.Size([3, 2])
    """
    return nn.Sequential(nn.LayerNorm(n_features), nn.Linear(n_features, n_classes))


def mlp_head(n_classes: int, n_features: int, hidden: int = HIDDEN) -> nn.Module:
    """LayerNorm, fc(64), ReLU, fc(n_classes)."""
    return nn.Sequential(
        nn.LayerNorm(n_features), nn.Linear(n_features, hidden), nn.ReLU(), nn.Linear(hidden, n_classes)
    )
