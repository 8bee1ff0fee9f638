"""ResNet-18 (He et al., 2016) in torchvision's layout, with GroupNorm and without in-place operations.

In-place ReLU and `out += identity` overwrite tensors that Opacus's full backward hooks still need; names,
shapes and parameter count are torchvision's, so its checkpoints of GroupNorm variants load.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from wsi_fl.models.norm import group_norm


class OutOfPlaceBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's basic block, out of place."""

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
    """ResNet-18 with GroupNorm; any image size from 32 px."""
    del size_px  # pooled globally
    net = ResNet(OutOfPlaceBlock, [2, 2, 2, 2], num_classes=n_classes, norm_layer=group_norm)
    net.relu = nn.ReLU()
    if in_channels != 3:
        net.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    model: nn.Module = net
    return model
