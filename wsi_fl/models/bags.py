"""What all models of bags share: how a bag is opened, and that a model may weigh its patches.

A batch of bags is one tensor float32[b, m, d + 1] whose last column is 1 for a patch and 0 for padding. What
stands in the other columns of padding is never looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BagModel(nn.Module):
    """A model of bags, which may say what its answer rests on."""

    def attention(self, bags: Tensor) -> Tensor | None:
        """Return weights float32[b, m] of the patches, 0 at padding; None for a model that weighs none."""
        del bags
        return None


def opened(bags: Tensor) -> tuple[Tensor, Tensor]:
    """Return (features float32[b, m, d], 0 at padding, and bool[b, m], where there is a patch).

    Example:
        >>> features, present = opened(torch.tensor([[[5.0, 1.0], [torch.nan, 0.0]]]))
        >>> features.tolist(), present.tolist()
        ([[[5.0], [0.0]]], [[True, False]])
    """
    present = bags[..., -1] > 0.5
    return torch.where(present.unsqueeze(2), bags[..., :-1], 0.0), present
