"""Small convolutional networks: CNN1 and CNN2 of ProxyFL's appendix A.1, and a GroupNorm CNN for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from wsi_fl.types import UsageError


def two_rounds(
    name: str, kernel: int, widths: tuple[int, int], hidden: Sequence[int], sizes: tuple[int, int, int]
) -> nn.Module:
    """Two rounds of convolution without padding, ReLU and 2×2 pooling; then linear layers with ReLU between them.

    Args:
        widths: channels of the two convolutions.
        hidden: units of the linear layers but for the last.
        sizes: classes, channels of the images, and their side in pixels.
    """
    n_classes, channels, size_px = sizes
    side = ((size_px - kernel + 1) // 2 - kernel + 1) // 2
    if side < 1:
        raise UsageError(f"{name} needs images of at least {3 * kernel + 1} px, not {size_px}")
    layers: list[nn.Module] = []
    for before, after in pairwise((channels, *widths)):
        layers += [nn.Conv2d(before, after, kernel), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for before, after in pairwise((widths[1] * side**2, *hidden, n_classes)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn1(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(3×3, 6), ReLU, pool, conv(3×3, 16), ReLU, pool, fc(64), ReLU, fc(n_classes)."""
    return two_rounds("cnn1", 3, (6, 16), [64], (n_classes, in_channels, size_px))


def cnn2(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(3×3, 128), ReLU, pool, conv(3×3, 128), ReLU, pool, fc(n_classes)."""
    return two_rounds("cnn2", 3, (128, 128), [], (n_classes, in_channels, size_px))


def gn_cnn(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """Four GroupNorm convolutions of 16, 32, 32 and 64 channels, then the mean: for small patches and CPUs."""
    return _gn_cnn("gn_cnn", (16, 32, 32, 64), n_classes, in_channels, size_px)


def gn_cnn_small(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """The same with 8, 8, 16 and 16 channels: a proxy of 5 000 parameters, which DP noise drowns less."""
    return _gn_cnn("gn_cnn_small", (8, 8, 16, 16), n_classes, in_channels, size_px)


def _gn_cnn(name: str, widths: Sequence[int], n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(3×3), GroupNorm(1 group), ReLU and, but for the last, pooling; mean; fc(n_classes)."""
    if size_px < 16:
        raise UsageError(f"{name} needs images of at least 16 px, not {size_px}")
    layers: list[nn.Module] = []
    for channels_in, channels_out in pairwise((in_channels, *widths)):
        layers += [
            nn.Conv2d(channels_in, channels_out, 3, padding=1),
            nn.GroupNorm(1, channels_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    layers.pop()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], n_classes))
