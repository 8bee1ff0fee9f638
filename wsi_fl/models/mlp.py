"""The multilayer perceptron of ProxyFL's benchmarks (appendix A.1): two hidden layers of 200 units."""

from __future__ import annotations

from torch import nn


def mlp(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """flatten, fc(200), ReLU, fc(200), ReLU, fc(n_classes)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * size_px**2, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, n_classes),
    )
