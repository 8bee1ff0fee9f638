"""StyleGAN2 with class conditioning: mapping network, synthesis with skips to the image, residual discriminator.

Plain torch operations, every one twice differentiable. References: Karras et al., CVPR 2020 (networks); Karras et al.,
NeurIPS 2020 (StyleGAN2-ADA: conditioning of both networks); Miyato and Koyama, ICLR 2018 (projection discriminator);
Karras et al., ICLR 2018 (equalised learning rate and minibatch standard deviation).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import log2, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

_MAPPING_RATE = 0.01
_GROUP = 4
_FIR_TAPS = (1.0, 3.0, 3.0, 1.0)
"""The binomial filter for changes of resolution."""
_SLOPE = 0.2
_DEMODULATION_EPSILON = 1e-8


def _apply_activation(x: Tensor) -> Tensor:
    """Apply a leaky ReLU of slope 0.2 with gain √2, which keeps the variance."""
    return functional.leaky_relu(x, _SLOPE) * sqrt(2)


def single_precision(device: torch.device) -> torch.autocast:
    """Return a context without autocast: styles and coordinates need more digits than features."""
    return torch.autocast(device.type, enabled=False)


def _full_precision(x: Tensor) -> Tensor:
    """Return half precision as single, and other precisions unchanged."""
    return x.float() if x.dtype in {torch.bfloat16, torch.float16} else x


def _filter_fir(x: Tensor, padding: tuple[int, int], gain: float = 1.0) -> Tensor:
    """Pad x [b, c, h, w] by (before, after) on both axes and apply the binomial filter, with a sum of `gain`."""
    taps = torch.tensor(_FIR_TAPS, dtype=x.dtype, device=x.device)
    taps = taps / taps.sum()
    kernel = (taps[:, None] * taps[None, :] * gain).expand(x.shape[1], 1, -1, -1)
    pad_before, pad_after = padding
    return functional.conv2d(functional.pad(x, (pad_before, pad_after) * 2), kernel, groups=x.shape[1])


def upsample_maps(x: Tensor) -> Tensor:
    """Double the resolution of [b, c, h, w]: zeros between the samples, then the filter with gain 4."""
    b, c, h, w = x.shape
    spread = functional.pad(x.reshape(b, c, h, 1, w, 1), (0, 1, 0, 0, 0, 1)).reshape(b, c, 2 * h, 2 * w)
    return _filter_fir(spread, (2, 1), 4.0)


def downsample_maps(x: Tensor) -> Tensor:
    """Halve the resolution of [b, c, 2h, 2w]: the filter, then every other sample."""
    return _filter_fir(x, (1, 1))[:, :, ::2, ::2]


class _EqualLinear(nn.Module):
    """A linear layer with equalised learning rate: weights ~ N(0, 1) are scaled by multiplier/√fan-in at use."""

    def __init__(
        self, inputs: int, outputs: int, *, multiplier: float = 1.0, bias: float = 0.0, active: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / multiplier)
        self.bias = nn.Parameter(torch.full((outputs,), bias / multiplier))
        self.gain, self.multiplier, self.active = multiplier / sqrt(inputs), multiplier, active

    def forward(self, x: Tensor) -> Tensor:
        with single_precision(x.device):
            y = functional.linear(_full_precision(x), self.weight * self.gain, self.bias * self.multiplier)
        return _apply_activation(y) if self.active else y


class _EqualConv(nn.Module):
    """A convolution with equalised learning rate; `down` halves the resolution, `gain` scales the output."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        down: bool = False,
        bias: bool = True,
        active: bool = True,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, size, size))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.scale, self.down, self.active, self.gain = 1 / sqrt(inputs * size**2), down, active, gain

    def forward(self, x: Tensor) -> Tensor:
        weight, size = self.weight * self.scale, self.weight.shape[-1]
        if self.down and size == 1:
            y = functional.conv2d(downsample_maps(x), weight, self.bias)
        elif self.down:
            y = functional.conv2d(_filter_fir(x, (2, 2)), weight, self.bias, stride=2)
        else:
            y = functional.conv2d(x, weight, self.bias, padding=size // 2)
        y = _apply_activation(y) if self.active else y
        return y * self.gain if self.gain != 1.0 else y


def _demodulation_factors(weight: Tensor, style: Tensor) -> Tensor:
    """Return the factors float[b, o] that bring filters weight[o] · style[b] [i, k, k] to unit norm (eq. 3)."""
    with single_precision(style.device):
        squares = weight.square().sum(dim=(2, 3))
        return (style.square() @ squares.T + _DEMODULATION_EPSILON).rsqrt()


def _convolve_modulated(
    x: Tensor, weight: Tensor, style: Tensor, *, demodulate: bool = True, up: bool = False
) -> Tensor:
    """Convolve each image of x [b, i, h, w] with filters weight [o, i, k, k] scaled by its style [b, i] (eqs. 1 to 3).

    Inputs are scaled by the style and outputs by the demodulation, which costs one convolution with a single set of
    filters.
    """
    scaled = x * style[:, :, None, None].to(x.dtype)
    kernel = weight.to(x.dtype)
    if up:
        spread = functional.conv_transpose2d(scaled, kernel.transpose(0, 1), stride=2)
        y = _filter_fir(spread, (1, 1), 4.0)
    else:
        y = functional.conv2d(scaled, kernel, padding=weight.shape[-1] // 2)
    if demodulate:
        y = y * _demodulation_factors(weight, style)[:, :, None, None].to(y.dtype)
    return y


class _StyledConv(nn.Module):
    """A modulated 3×3 convolution, noise of learned strength (the fixed one for the same images), bias, activation."""

    def __init__(self, inputs: int, outputs: int, w_dim: int, size_px: int, *, up: bool = False) -> None:
        super().__init__()
        self.style = _EqualLinear(w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.strength = nn.Parameter(torch.zeros(()))
        self.noise = nn.Buffer(torch.randn(1, 1, size_px, size_px))
        self.scale, self.up = 1 / sqrt(inputs * 9), up

    def forward(self, x: Tensor, w: Tensor, generator: torch.Generator | None) -> Tensor:
        """Apply the layer to x [b, i, h, w] with styles w [b, w_dim] and noise from the generator, or the fixed one."""
        y = _convolve_modulated(x, self.weight * self.scale, self.style(w), up=self.up)
        noise: Tensor = self.noise
        if generator is not None:
            noise = torch.randn((len(y), 1, *y.shape[2:]), generator=generator, device=y.device)
        y = y + noise.to(y.dtype) * self.strength + self.bias[:, None, None]
        return _apply_activation(y)


class _ToImage(nn.Module):
    """A modulated 1×1 convolution to the channels of an image, without demodulation."""

    def __init__(self, inputs: int, channels: int, w_dim: int) -> None:
        super().__init__()
        self.style = _EqualLinear(w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(channels, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.scale = 1 / sqrt(inputs)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        y = _convolve_modulated(x, self.weight, self.style(w) * self.scale, demodulate=False)
        return y + self.bias[:, None, None]


def _append_minibatch_std(x: Tensor, group: int) -> Tensor:
    """Append a map to [b, c, h, w]: the mean standard deviation within groups of `group` images, or a divisor of b."""
    b, _, h, w = x.shape
    size = next(n for n in range(min(group, b), 0, -1) if b % n == 0)
    grouped = _full_precision(x).reshape(size, b // size, *x.shape[1:])
    spread = (grouped.var(dim=0, unbiased=False) + 1e-8).sqrt().mean(dim=(1, 2, 3))
    return torch.cat([x, spread.repeat(size)[:, None, None, None].expand(b, 1, h, w).to(x.dtype)], dim=1)


# ---- networks


@dataclass(frozen=True)
class GanShape:
    """The shape of the networks; feature maps at resolution r are channel_base / r, at most channel_max."""

    resolution: int
    channels: int
    n_classes: int
    z_dim: int = 512
    w_dim: int = 512
    mapping_layers: int = 8
    channel_base: int = 16384
    channel_max: int = 512

    @property
    def blocks(self) -> list[int]:
        """Resolutions from 4 up."""
        return [2**k for k in range(2, int(log2(self.resolution)) + 1)]

    @property
    def n_styles(self) -> int:
        """One per convolution, and one for the last image layer; others share that of the next convolution."""
        return 2 * len(self.blocks)

    def width(self, resolution: int) -> int:
        return max(1, min(self.channel_base // resolution, self.channel_max))


def _normalize_rows(x: Tensor) -> Tensor:
    """Return rows scaled to a root mean square of 1."""
    return x * (x.square().mean(dim=1, keepdim=True) + 1e-8).rsqrt()


class _MappingNetwork(nn.Module):
    """The mapping (z, class) → w with a moving mean `w_mean`; without z, of classes, for the discriminator."""

    def __init__(self, z_dim: int, n_classes: int, w_dim: int, n_layers: int) -> None:
        super().__init__()
        self.z_dim, self.n_classes = z_dim, n_classes
        self.embed = _EqualLinear(n_classes, w_dim)
        widths = [z_dim + w_dim] + [w_dim] * n_layers
        self.layers = nn.Sequential(
            *(_EqualLinear(i, o, multiplier=_MAPPING_RATE, active=True) for i, o in itertools.pairwise(widths))
        )
        self.w_mean = nn.Buffer(torch.zeros(w_dim))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """Return w [b, w_dim] of z [b, z_dim] (z_dim may be 0) and labels int64[b]."""
        classes = functional.one_hot(labels, self.n_classes).to(self.embed.weight.dtype)
        x = _normalize_rows(self.embed(classes))
        if self.z_dim:
            x = torch.cat([_normalize_rows(z), x], dim=1)
        out: Tensor = self.layers(x)
        return out


class _SynthesisNetwork(nn.Module):
    """Styles [b, n_styles, w_dim] → images [b, channels, px, px]; every resolution adds to the image."""

    def __init__(self, shape: GanShape) -> None:
        super().__init__()
        self.shape = shape
        self.constant = nn.Parameter(torch.randn(shape.width(4), 4, 4))
        self.first, self.second, self.images = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for px in shape.blocks:
            out, w_dim = shape.width(px), shape.w_dim
            if px > 4:
                self.first.append(_StyledConv(shape.width(px // 2), out, w_dim, px, up=True))
            self.second.append(_StyledConv(out, out, w_dim, px))
            self.images.append(_ToImage(out, shape.channels, w_dim))

    def forward(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return images of roughly [−1, 1], with noise from the generator, or the fixed one without it."""
        x = self.constant.expand(len(w), -1, -1, -1)
        image: Tensor | None = None
        for k, (second, to_image) in enumerate(zip(self.second, self.images, strict=True)):
            if k:
                x = self.first[k - 1](x, w[:, 2 * k - 1], generator)
            x = second(x, w[:, 2 * k], generator)
            added = _full_precision(to_image(x, w[:, 2 * k + 1]))
            image = added if image is None else upsample_maps(image) + added
        assert image is not None
        return image


class Generator(nn.Module):
    """Mapping and synthesis."""

    def __init__(self, shape: GanShape) -> None:
        super().__init__()
        self.shape = shape
        self.mapping = _MappingNetwork(shape.z_dim, shape.n_classes, shape.w_dim, shape.mapping_layers)
        self.synthesis = _SynthesisNetwork(shape)

    def repeat_styles(self, w: Tensor) -> Tensor:
        """Repeat w [b, w_dim] for all styles [b, n_styles, w_dim]."""
        return w[:, None, :].expand(-1, self.shape.n_styles, -1)

    def forward(self, z: Tensor, labels: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        out: Tensor = self.synthesis(self.repeat_styles(self.mapping(z, labels)), generator)
        return out


class _Residual(nn.Module):
    """Two convolutions to half the resolution beside a 1×1 one, each path scaled by 1/√2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _EqualConv(inputs, inputs, 3)
        self.second = _EqualConv(inputs, outputs, 3, down=True, gain=sqrt(0.5))
        self.skip = _EqualConv(inputs, outputs, 1, down=True, bias=False, active=False, gain=sqrt(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.skip(x) + self.second(self.first(x))
        return out


class Discriminator(nn.Module):
    """Images and labels → logits [b], positive for real; conditioned by projection on a mapped class embedding."""

    def __init__(self, shape: GanShape) -> None:
        super().__init__()
        sizes = shape.blocks[::-1]
        widths = [shape.width(px) for px in sizes]
        self.from_image = _EqualConv(shape.channels, widths[0], 1)
        self.blocks = nn.Sequential(*(_Residual(i, o) for i, o in itertools.pairwise(widths)))
        last = widths[-1]
        self.conv = _EqualConv(last + 1, last, 3)
        self.dense = _EqualLinear(last * 16, last, active=True)
        self.classes = _MappingNetwork(0, shape.n_classes, shape.w_dim, shape.mapping_layers)
        self.out = _EqualLinear(last, shape.w_dim)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.from_image(images))
        x = self.conv(_append_minibatch_std(x, _GROUP))
        x = _full_precision(self.out(self.dense(x.flatten(1))))
        classes = _normalize_rows(_full_precision(self.classes(x[:, :0], labels)))
        out: Tensor = (x * classes).sum(dim=1) / sqrt(x.shape[1])
        return out
