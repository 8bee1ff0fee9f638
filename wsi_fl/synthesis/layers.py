"""The layers of StyleGAN2 in plain torch operations, every one twice differentiable.

Reference: Karras et al., "Analyzing and improving the image quality of StyleGAN", CVPR 2020; equalised learning
rate and minibatch standard deviation from Karras et al., "Progressive growing of GANs", ICLR 2018.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

_FIR_TAPS = (1.0, 3.0, 3.0, 1.0)
"""The binomial filter for changes of resolution."""
_SLOPE = 0.2
_DEMODULATION_EPSILON = 1e-8


def _activated(x: Tensor) -> Tensor:
    """Leaky ReLU of slope 0.2 with gain √2, which keeps the variance."""
    return functional.leaky_relu(x, _SLOPE) * sqrt(2)


def single_precision(device: torch.device) -> torch.autocast:
    """Inside, autocast lowers nothing: styles and coordinates need more digits than features do."""
    return torch.autocast(device.type, enabled=False)


def full_precision(x: Tensor) -> Tensor:
    """Half precision made single; what is finer stays."""
    return x.float() if x.dtype in {torch.bfloat16, torch.float16} else x


def _fir_filtered(x: Tensor, padding: tuple[int, int], gain: float = 1.0) -> Tensor:
    """x [b, c, h, w] padded by (before, after) on both axes, under the binomial filter, whose taps sum to `gain`."""
    taps = torch.tensor(_FIR_TAPS, dtype=x.dtype, device=x.device)
    taps = taps / taps.sum()
    kernel = (taps[:, None] * taps[None, :] * gain).expand(x.shape[1], 1, -1, -1)
    before, after = padding
    return functional.conv2d(functional.pad(x, (before, after) * 2), kernel, groups=x.shape[1])


def upsampled(x: Tensor) -> Tensor:
    """[b, c, h, w] → [b, c, 2h, 2w]: zeros between the samples, then the filter with gain 4."""
    b, c, h, w = x.shape
    spread = functional.pad(x.reshape(b, c, h, 1, w, 1), (0, 1, 0, 0, 0, 1)).reshape(b, c, 2 * h, 2 * w)
    return _fir_filtered(spread, (2, 1), 4.0)


def downsampled(x: Tensor) -> Tensor:
    """[b, c, 2h, 2w] → [b, c, h, w]: the filter, then every other sample."""
    return _fir_filtered(x, (1, 1))[:, :, ::2, ::2]


class EqualLinear(nn.Module):
    """A linear layer with equalised learning rate: weights ~ N(0, 1) are scaled by 1/√fan-in when they are used.

    Args:
        multiplier: of the learning rate of weights and bias (0.01 in the mapping network).
        active: whether the activation follows.
    """

    def __init__(
        self, inputs: int, outputs: int, *, multiplier: float = 1.0, bias: float = 0.0, active: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / multiplier)
        self.bias = nn.Parameter(torch.full((outputs,), bias / multiplier))
        self.gain, self.multiplier, self.active = multiplier / sqrt(inputs), multiplier, active

    def forward(self, x: Tensor) -> Tensor:
        with single_precision(x.device):
            y = functional.linear(full_precision(x), self.weight * self.gain, self.bias * self.multiplier)
        return _activated(y) if self.active else y


class EqualConv(nn.Module):
    """A convolution with equalised learning rate, optionally to half the resolution (filtered before).

    Args:
        gain: of what comes out, 1/√2 for each of the two paths of a residual block.
    """

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
            y = functional.conv2d(downsampled(x), weight, self.bias)
        elif self.down:
            y = functional.conv2d(_fir_filtered(x, (2, 2)), weight, self.bias, stride=2)
        else:
            y = functional.conv2d(x, weight, self.bias, padding=size // 2)
        y = _activated(y) if self.active else y
        return y * self.gain if self.gain != 1.0 else y


def demodulation(weight: Tensor, style: Tensor) -> Tensor:
    """float[b, o]: what brings each filter weight[o] · style[b] of shape [i, k, k] to unit norm (eq. 3)."""
    with single_precision(style.device):
        squares = weight.square().sum(dim=(2, 3))
        return (style.square() @ squares.T + _DEMODULATION_EPSILON).rsqrt()


def modulated_conv(
    x: Tensor, weight: Tensor, style: Tensor, *, demodulate: bool = True, up: bool = False
) -> Tensor:
    """Each image of x [b, i, h, w] under filters weight [o, i, k, k] scaled by its own style [b, i] (eqs. 1 to 3).

    Inputs are scaled by the style and outputs by the demodulation, which gives what a convolution with b sets of
    filters gives and costs one with a single set.

    Returns:
        [b, o, h, w], or [b, o, 2h, 2w] with `up`: a transposed convolution, then the binomial filter.
    """
    scaled = x * style[:, :, None, None].to(x.dtype)
    kernel = weight.to(x.dtype)
    if up:
        spread = functional.conv_transpose2d(scaled, kernel.transpose(0, 1), stride=2)
        y = _fir_filtered(spread, (1, 1), 4.0)
    else:
        y = functional.conv2d(scaled, kernel, padding=weight.shape[-1] // 2)
    if demodulate:
        y = y * demodulation(weight, style)[:, :, None, None].to(y.dtype)
    return y


class StyledConv(nn.Module):
    """A modulated 3×3 convolution, noise of learned strength, bias and activation.

    Attributes:
        noise: the fixed noise [1, 1, size, size] for images that shall be the same every time.
    """

    noise: Tensor

    def __init__(self, inputs: int, outputs: int, w_dim: int, size_px: int, *, up: bool = False) -> None:
        super().__init__()
        self.style = EqualLinear(w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.strength = nn.Parameter(torch.zeros(()))
        self.register_buffer("noise", torch.randn(1, 1, size_px, size_px))
        self.scale, self.up = 1 / sqrt(inputs * 9), up

    def forward(self, x: Tensor, w: Tensor, generator: torch.Generator | None) -> Tensor:
        """x [b, i, h, w] and styles w [b, w_dim]; noise from the generator, or the fixed one."""
        y = modulated_conv(x, self.weight * self.scale, self.style(w), up=self.up)
        noise = self.noise
        if generator is not None:
            noise = torch.randn((len(y), 1, *y.shape[2:]), generator=generator, device=y.device)
        y = y + noise.to(y.dtype) * self.strength + self.bias[:, None, None]
        return _activated(y)


class ToImage(nn.Module):
    """A modulated 1×1 convolution to the channels of an image, without demodulation."""

    def __init__(self, inputs: int, channels: int, w_dim: int) -> None:
        super().__init__()
        self.style = EqualLinear(w_dim, inputs, bias=1.0)
        self.weight = nn.Parameter(torch.randn(channels, inputs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.scale = 1 / sqrt(inputs)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        y = modulated_conv(x, self.weight, self.style(w) * self.scale, demodulate=False)
        return y + self.bias[:, None, None]


def with_minibatch_std(x: Tensor, group: int) -> Tensor:
    """[b, c, h, w] → [b, c + 1, h, w]: the mean standard deviation within groups of images, as one more map.

    Groups have `group` images, or as many as divide b evenly.
    """
    b, _, h, w = x.shape
    size = next(n for n in range(min(group, b), 0, -1) if b % n == 0)
    grouped = full_precision(x).reshape(size, b // size, *x.shape[1:])
    spread = (grouped.var(dim=0, unbiased=False) + 1e-8).sqrt().mean(dim=(1, 2, 3))
    return torch.cat([x, spread.repeat(size)[:, None, None, None].expand(b, 1, h, w).to(x.dtype)], dim=1)
