"""What takes the place of BatchNorm, whose batch statistics tie the examples of a batch together."""

from __future__ import annotations

from math import gcd

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with 32 groups (Wu and He, 2018), or the most that divide `channels` among the divisors of 32.

    Example:
        >>> group_norm(64).num_groups, group_norm(48).num_groups, group_norm(6).num_groups
        (32, 16, 2)
    """
    return nn.GroupNorm(gcd(32, channels), channels)


class FrozenNorm(nn.Module):
    """A trained BatchNorm in evaluation mode, whatever the mode of the model: y = (x − m)/√(v + ε) · γ + β.

    Mean m and variance v are constants of the weights that a network starts from, so no example sees another. Gain γ
    and bias β may be trained.

    Args:
        norm: what it takes the place of; parameters and buffers are its own.
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
        """Return x[b, channels, …], normalised, times the gain and plus the bias of its channel."""
        return self._of(x, self.weight, self.bias)

    def normalised(self, x: Tensor) -> Tensor:
        """Return (x − m)/√(v + ε), which the gain is multiplied with."""
        return self._of(x, None, None)

    def _of(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        # cuDNN and CPU kernels alike compute BatchNorm's own evaluation mode, bit for bit
        return functional.batch_norm(x, self.running_mean, self.running_var, gain, bias, False, 0.0, self.eps)
