"""LeNet-5 (LeCun et al., 1998) with ReLU and max pooling, as used in the federated benchmarks."""

from __future__ import annotations

from torch import nn

from wsi_fl.types import UsageError


def lenet5(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(5×5, 6), pool, conv(5×5, 16), pool, fc(120), fc(84), fc(n_classes); images of at least 16 px."""
    side = ((size_px - 4) // 2 - 4) // 2
    if side < 1:
        raise UsageError(f"lenet5 needs images of at least 16 px, not {size_px}")
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side**2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, n_classes),
    )
