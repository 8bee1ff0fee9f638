"""Networks for images: those of ProxyFL's appendix A.1, LeNet-5, ResNet-18, VGG-11, and a GroupNorm CNN for CPUs.

None normalises over a batch, which differential privacy forbids, nor works in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from wsi_fl.models.norm import group_norm
from wsi_fl.types import UsageError


def _two_rounds(
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
    return _two_rounds("cnn1", 3, (6, 16), [64], (n_classes, in_channels, size_px))


def cnn2(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(3×3, 128), ReLU, pool, conv(3×3, 128), ReLU, pool, fc(n_classes)."""
    return _two_rounds("cnn2", 3, (128, 128), [], (n_classes, in_channels, size_px))


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


def lenet5(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(5×5, 6), pool, conv(5×5, 16), pool, fc(120), fc(84), fc(n_classes) (LeCun et al., 1998); at least 16 px."""
    return _two_rounds("lenet5", 5, (6, 16), [120, 84], (n_classes, in_channels, size_px))


def mlp(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """flatten, fc(200), ReLU, fc(200), ReLU, fc(n_classes): the perceptron of ProxyFL's appendix A.1."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * size_px**2, 200),
        nn.ReLU(),
        nn.Linear(200, 200),
        nn.ReLU(),
        nn.Linear(200, n_classes),
    )


class _OutOfPlaceBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's basic block, out of place.

    In-place ReLU and `out += identity` overwrite tensors that Opacus's full backward hooks still need.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.relu(out + identity)
        return result


def resnet18(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """ResNet-18 (He et al., 2016) with GroupNorm; any image size from 32 px.

    Names, shapes and parameter count are torchvision's, so its checkpoints of GroupNorm variants load.
    """
    del size_px  # pooled globally
    net = ResNet(_OutOfPlaceBlock, [2, 2, 2, 2], num_classes=n_classes, norm_layer=group_norm)
    net.relu = nn.ReLU()
    if in_channels != 3:
        net.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    model: nn.Module = net
    return model


_BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions before each pooling (configuration A of the VGG paper)."""


def vgg11(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """conv(3×3), GroupNorm, ReLU eight times, five times pooled; fc(n_classes); images of at least 32 px.

    ProxyFL (section 4.3) takes "the VGG model from Yang et al. [2021] with minor adjustments for the resized images" of
    100 × 80 px and gives no table of layers. The code that Yang et al. published with FLOP has, for Kvasir, the eight
    convolutions and five poolings of VGG-11 (Simonyan and Zisserman, 2015) with BatchNorm and one linear layer on the
    flattened last map, for images of 224 px: so here. Our own choices are GroupNorm, square images, and that "minor
    adjustments" means the width of the linear layer.

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
