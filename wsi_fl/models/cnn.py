"""Networks for images: those of ProxyFL's appendix A.1, LeNet-5, ResNet-18, VGG-11, and a GroupNorm CNN for CPUs.

Examples are independent, as differential privacy requires, and no layer works in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import gcd

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from wsi_fl.types import UsageError


def group_norm(channels: int) -> nn.GroupNorm:
    """Return GroupNorm with 32 groups (Wu and He, 2018), or the largest divisor of 32 that divides `channels`.

    Example:
        >>> group_norm(64).num_groups, group_norm(48).num_groups, group_norm(6).num_groups
        (32, 16, 2)
    """
    return nn.GroupNorm(gcd(32, channels), channels)


class FrozenNorm(nn.Module):
    """A trained BatchNorm, always in evaluation mode: y = (x − m)/√(v + ε) · γ + β.

    Mean m and variance v are constants of the initial weights, so examples are independent. Gain γ and bias β may be
    trained. Parameters and buffers are those of `norm`.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight, self.bias = norm.weight, norm.bias
        assert norm.running_mean is not None and norm.running_var is not None
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_norm(x, self.weight, self.bias)

    def normalize_input(self, x: Tensor) -> Tensor:
        """Return (x − m)/√(v + ε), the input before gain and bias."""
        return self._apply_norm(x, None, None)

    def _apply_norm(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        # cuDNN and CPU kernels alike compute BatchNorm's own evaluation mode, bit for bit
        return functional.batch_norm(x, self.running_mean, self.running_var, gain, bias, False, 0.0, self.eps)


def replace_batch_norm(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    """Replace every 2-d BatchNorm by GroupNorm in place, or with `frozen` every BatchNorm by its frozen form.

    Dropout and activation, which timm fuses with a norm, come after it. No layer works in place afterwards.
    """
    for name, child in list(model.named_children()):
        if isinstance(child, _BatchNorm if frozen else nn.BatchNorm2d):
            norm = FrozenNorm(child) if frozen else group_norm(child.num_features)
            extras = [getattr(child, part) for part in ("drop", "act") if hasattr(child, part)]
            setattr(model, name, nn.Sequential(norm, *extras) if extras else norm)
        else:
            replace_batch_norm(child, frozen=frozen)
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    return model


def build_perceptron(*widths: int) -> list[nn.Module]:
    """Return linear layers from each width to the next, with ReLU between them."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return layers[:-1]


def _build_convolutions(
    in_channels: int, blocks: Sequence[Sequence[int]], norm: Callable[[int], nn.Module]
) -> list[nn.Module]:
    """Return conv(3×3), normalisation and ReLU for each width of each block, with 2×2 pooling before its last ReLU.

    Pooling and ReLU give the same in either order, and ReLU is cheaper on a quarter of the numbers.
    """
    layers: list[nn.Module] = []
    for block in blocks:
        for width in block:
            layers += [nn.Conv2d(in_channels, width, 3, padding=1), norm(width), nn.ReLU()]
            in_channels = width
        layers.insert(-1, nn.MaxPool2d(2))
    return layers


def _build_two_rounds(
    n_classes: int,
    in_channels: int,
    size_px: int,
    *,
    name: str,
    kernel: int,
    widths: Sequence[int],
    hidden: Sequence[int],
) -> nn.Module:
    """Build two stages of convolution without padding, 2×2 pooling and ReLU; then linear layers with ReLU between."""
    side = ((size_px - kernel + 1) // 2 - kernel + 1) // 2
    if side < 1:
        raise UsageError(f"{name} needs images of at least {3 * kernel + 1} px, not {size_px}")
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise((in_channels, *widths)):
        layers += [nn.Conv2d(width_in, width_out, kernel), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *build_perceptron(widths[1] * side**2, *hidden, n_classes))


def _build_gn_cnn(n_classes: int, in_channels: int, size_px: int, *, name: str, widths: Sequence[int]) -> nn.Module:
    """Build conv(3×3), GroupNorm(1 group), pooling except after the last, and ReLU; mean; fc(n_classes)."""
    if size_px < 16:
        raise UsageError(f"{name} needs images of at least 16 px, not {size_px}")
    layers = _build_convolutions(in_channels, [(width,) for width in widths], partial(nn.GroupNorm, 1))
    del layers[-2]  # the last pooling
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], n_classes))


def _build_mlp(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """Build flatten, fc(200), ReLU, fc(200), ReLU, fc(n_classes): the perceptron of ProxyFL's appendix A.1."""
    return nn.Sequential(nn.Flatten(), *build_perceptron(in_channels * size_px**2, 200, 200, n_classes))


def _build_resnet18(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """Build ResNet-18 (He et al., 2016) with GroupNorm; any image size from 32 px.

    Names, shapes and parameter count are torchvision's, so its checkpoints of GroupNorm variants load.
    """
    from wsi_fl.models.resnet import build_resnet18  # and with it torchvision

    del size_px  # pooled globally
    return build_resnet18(n_classes, in_channels, group_norm)


_VGG_BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Channels of the convolutions before each pooling (configuration A of the VGG paper)."""


def _build_vgg11(n_classes: int, in_channels: int, size_px: int) -> nn.Module:
    """Build eight conv(3×3), GroupNorm, ReLU with five poolings; fc(n_classes); images of at least 32 px.

    ProxyFL (section 4.3) names "the VGG model from Yang et al. [2021] with minor adjustments for the resized images" of
    100 × 80 px and gives no table of layers. The code that Yang et al. published with FLOP has the eight convolutions
    and five poolings of VGG-11 (Simonyan and Zisserman, 2015) with BatchNorm and one linear layer on the flattened last
    map: so here. Our own choices are GroupNorm, square images, and that "minor adjustments" means the width of the
    linear layer.
    """
    side = size_px // 2 ** len(_VGG_BLOCKS)
    if side < 1:
        raise UsageError(f"vgg11 needs images of at least 32 px, not {size_px}")
    layers = _build_convolutions(in_channels, _VGG_BLOCKS, group_norm)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(_VGG_BLOCKS[-1][-1] * side**2, n_classes))


IMAGE_BUILDERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "resnet18": _build_resnet18,
    "gn_cnn": partial(_build_gn_cnn, name="gn_cnn", widths=(16, 32, 32, 64)),
    "gn_cnn_small": partial(_build_gn_cnn, name="gn_cnn_small", widths=(8, 8, 16, 16)),
    "lenet5": partial(_build_two_rounds, name="lenet5", kernel=5, widths=(6, 16), hidden=(120, 84)),
    "mlp": _build_mlp,
    "cnn1": partial(_build_two_rounds, name="cnn1", kernel=3, widths=(6, 16), hidden=(64,)),
    "cnn2": partial(_build_two_rounds, name="cnn2", kernel=3, widths=(128, 128), hidden=()),
    "vgg11": _build_vgg11,
}
"""(n_classes, in_channels, size_px) → a model of images.

`lenet5` is that of LeCun et al. (1998). `gn_cnn` is for small patches and CPUs; `gn_cnn_small` is a proxy of 5 000
parameters, which lose less accuracy to noise.
"""
