"""StyleGAN2 with class conditioning: mapping network, synthesis with skips to the image, residual discriminator.

References: Karras et al., CVPR 2020 (networks); Karras et al., NeurIPS 2020 (StyleGAN2-ADA: conditioning of both
networks); Miyato and Koyama, ICLR 2018 (projection discriminator).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import log2, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_fl.synthesis.layers import (
    EqualConv,
    EqualLinear,
    StyledConv,
    ToImage,
    full_precision,
    upsampled,
    with_minibatch_std,
)
from wsi_fl.types import UsageError

_MAPPING_RATE = 0.01
_GROUP = 4
_RESOLUTIONS = (16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class GanShape:
    """What decides the networks' shapes.

    Attributes:
        channel_base: feature maps at resolution r are channel_base / r, at most channel_max.
    """

    resolution: int
    channels: int
    n_classes: int
    z_dim: int = 512
    w_dim: int = 512
    mapping_layers: int = 8
    channel_base: int = 16384
    channel_max: int = 512

    def __post_init__(self) -> None:
        if self.resolution not in _RESOLUTIONS:
            raise UsageError(
                f"gan.resolution = {self.resolution}: use one of {', '.join(map(str, _RESOLUTIONS))}"
            )

    @property
    def blocks(self) -> list[int]:
        """Resolutions from 4 up."""
        return [2**k for k in range(2, int(log2(self.resolution)) + 1)]

    @property
    def n_styles(self) -> int:
        """One per convolution, and one for the last image layer, which the others share with the next convolution."""
        return 2 * len(self.blocks)

    def width(self, resolution: int) -> int:
        return max(1, min(self.channel_base // resolution, self.channel_max))


def normalised(x: Tensor) -> Tensor:
    """Rows of root mean square 1."""
    return x * (x.square().mean(dim=1, keepdim=True) + 1e-8).rsqrt()


class Mapping(nn.Module):
    """(z, class) → w; without z it maps classes alone, for the discriminator's projection.

    Attributes:
        w_mean: moving mean of w over classes and z.
    """

    w_mean: Tensor

    def __init__(self, z_dim: int, n_classes: int, w_dim: int, n_layers: int) -> None:
        super().__init__()
        self.z_dim, self.n_classes = z_dim, n_classes
        self.embed = EqualLinear(n_classes, w_dim)
        widths = [z_dim + w_dim] + [w_dim] * n_layers
        self.layers = nn.Sequential(
            *(EqualLinear(i, o, multiplier=_MAPPING_RATE, active=True) for i, o in itertools.pairwise(widths))
        )
        self.register_buffer("w_mean", torch.zeros(w_dim))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """w [b, w_dim] of z [b, z_dim] (z_dim may be 0) and labels int64[b]."""
        classes = functional.one_hot(labels, self.n_classes).to(self.embed.weight.dtype)
        x = normalised(self.embed(classes))
        if self.z_dim:
            x = torch.cat([normalised(z), x], dim=1)
        out: Tensor = self.layers(x)
        return out


class Synthesis(nn.Module):
    """Styles [b, n_styles, w_dim] → images [b, channels, px, px]; every resolution adds to the image."""

    def __init__(self, shape: GanShape) -> None:
        super().__init__()
        self.shape = shape
        self.constant = nn.Parameter(torch.randn(shape.width(4), 4, 4))
        self.first, self.second, self.images = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for px in shape.blocks:
            out, w_dim = shape.width(px), shape.w_dim
            if px > 4:
                self.first.append(StyledConv(shape.width(px // 2), out, w_dim, px, up=True))
            self.second.append(StyledConv(out, out, w_dim, px))
            self.images.append(ToImage(out, shape.channels, w_dim))

    def forward(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images of roughly [−1, 1]; noise is drawn from the generator, or the fixed one without it."""
        x = self.constant.expand(len(w), -1, -1, -1)
        image: Tensor | None = None
        style = 0
        for k in range(len(self.second)):
            if k:
                x = self.first[k - 1](x, w[:, style], generator)
                style += 1
            x = self.second[k](x, w[:, style], generator)
            style += 1
            added = full_precision(self.images[k](x, w[:, style]))
            image = added if image is None else upsampled(image) + added
        assert image is not None
        return image


class Generator(nn.Module):
    """Mapping and synthesis.

    Example:
        >>> g = Generator(GanShape(32, 3, 2, z_dim=8, w_dim=8, mapping_layers=2, channel_base=256))
        >>> tuple(g(torch.randn(2, 8), torch.tensor([0, 1])).shape)
        (2, 3, 32, 32)
    """

    def __init__(self, shape: GanShape) -> None:
        super().__init__()
        self.shape = shape
        self.mapping = Mapping(shape.z_dim, shape.n_classes, shape.w_dim, shape.mapping_layers)
        self.synthesis = Synthesis(shape)

    def styles(self, z: Tensor, labels: Tensor, truncation: float = 1.0) -> Tensor:
        """w [b, n_styles, w_dim], drawn towards the mean w by 1 − truncation."""
        w = self.mapping(z, labels)
        if truncation != 1.0:
            w = self.mapping.w_mean.lerp(w, truncation)
        return self.spread(w)

    def spread(self, w: Tensor) -> Tensor:
        """[b, w_dim] → [b, n_styles, w_dim], the same everywhere."""
        return w[:, None, :].expand(-1, self.shape.n_styles, -1)

    def forward(
        self,
        z: Tensor,
        labels: Tensor,
        *,
        truncation: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        out: Tensor = self.synthesis(self.styles(z, labels, truncation), generator)
        return out


class _Residual(nn.Module):
    """Two convolutions to half the resolution beside a 1×1 one, each path scaled by 1/√2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = EqualConv(inputs, inputs, 3)
        self.second = EqualConv(inputs, outputs, 3, down=True, gain=sqrt(0.5))
        self.skip = EqualConv(inputs, outputs, 1, down=True, bias=False, active=False, gain=sqrt(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.skip(x) + self.second(self.first(x))
        return out


class Discriminator(nn.Module):
    """Images and labels → logits [b], positive for real; conditioned by projection on a mapped class embedding."""

    def __init__(self, shape: GanShape) -> None:
        super().__init__()
        sizes = shape.blocks[::-1]
        widths = [shape.width(px) for px in sizes]
        self.from_image = EqualConv(shape.channels, widths[0], 1)
        self.blocks = nn.Sequential(*(_Residual(i, o) for i, o in itertools.pairwise(widths)))
        last = widths[-1]
        self.conv = EqualConv(last + 1, last, 3)
        self.dense = EqualLinear(last * 16, last, active=True)
        self.classes = Mapping(0, shape.n_classes, shape.w_dim, shape.mapping_layers)
        self.out = EqualLinear(last, shape.w_dim)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.from_image(images))
        x = self.conv(with_minibatch_std(x, _GROUP))
        x = full_precision(self.out(self.dense(x.flatten(1))))
        classes = normalised(full_precision(self.classes(x[:, :0], labels)))
        out: Tensor = (x * classes).sum(dim=1) / sqrt(x.shape[1])
        return out
