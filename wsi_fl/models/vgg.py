"""VGG-11 (Simonyan and Zisserman, 2015) with a single linear layer, the network of the Kvasir study.

ProxyFL (section 4.3) takes "the VGG model from Yang et al. [2021] with minor adjustments for the resized images"
of 100 × 80 px and gives no table of layers. The code that Yang et al. published with FLOP has, for Kvasir, the
eight convolutions and five poolings of VGG-11 with BatchNorm and one linear layer on the flattened last map, for
images of 224 px: so here. Our own choices are GroupNorm instead of BatchNorm, which differential privacy
forbids, square images, and that "minor adjustments" means the width of the linear layer.
"""

from __future__ import annotations

from torch import nn

from wsi_fl.models.norm import group_norm
from wsi_fl.types import UsageError

_BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions before each pooling (configuration A of the VGG paper)."""


def vgg11(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(3×3), GroupNorm, ReLU eight times, five times pooled; fc(n_classes); images of at least 32 px.

    Example:
        >>> sum(p.numel() for p in vgg11(8, 3, 96).parameters())
        9262856
    """
    side = size_px // 2 ** len(_BLOCKS)
    if side < 1:
        raise UsageError(f"vgg11 needs images of at least 32 px, not {size_px}")
    layers: list[nn.Module] = []
    channels = in_channels
    for block in _BLOCKS:
        for width in block:
            layers += [nn.Conv2d(channels, width, 3, padding=1), group_norm(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side**2, n_classes))
