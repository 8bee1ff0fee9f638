"""LeNet-5 (LeCun et al., 1998) with ReLU and max pooling, as used in the federated benchmarks."""

from __future__ import annotations

from torch import nn

from wsi_fl.models.cnn import two_rounds


def lenet5(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(5×5, 6), pool, conv(5×5, 16), pool, fc(120), fc(84), fc(n_classes); images of at least 16 px."""
    return two_rounds("lenet5", 5, (6, 16), [120, 84], (n_classes, in_channels, size_px))
