"""GroupNorm in place of BatchNorm (Wu and He, 2018)."""

from __future__ import annotations

from math import gcd

from torch import nn


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with 32 groups, or the most that divide `channels` among the divisors of 32.

    Example:
        >>> group_norm(64).num_groups, group_norm(48).num_groups, group_norm(6).num_groups
        (32, 16, 2)
    """
    return nn.GroupNorm(gcd(32, channels), channels)
