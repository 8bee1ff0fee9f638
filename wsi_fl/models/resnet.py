"""torchvision's ResNet-18 without in-place operations, in a module of its own, since torchvision imports slowly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet


class _OutOfPlaceBlock(BasicBlock):  # type: ignore[misc]
    """torchvision's basic block without in-place operations.

    In-place ReLU and `out += identity` would overwrite tensors needed by Opacus's full backward hooks.
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


def build_resnet18(n_classes: int, in_channels: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """Build a network with random weights; `norm` builds the normalisation layer of a number of channels."""
    net = ResNet(_OutOfPlaceBlock, [2, 2, 2, 2], num_classes=n_classes, norm_layer=norm)
    net.relu = nn.ReLU()
    if in_channels != 3:
        net.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    model: nn.Module = net
    return model
