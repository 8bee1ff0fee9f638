"""Deep Sets (Zaheer et al., NeurIPS 2017): a label for a bag of features, whatever their order."""

from __future__ import annotations

from torch import Tensor, nn


class DeepSet(nn.Module):
    """ρ of the mean over the bag of φ of each instance."""

    def __init__(self, n_classes: int, n_features: int, hidden: int) -> None:
        super().__init__()
        self.phi = nn.Sequential(
            nn.Linear(n_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.rho = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, n_classes))

    def forward(self, bags: Tensor) -> Tensor:
        logits: Tensor = self.rho(self.phi(bags).mean(1))
        return logits


def deepset(n_classes: int, n_features: int, hidden: int = 256) -> nn.Module:
    """Maps bags float32[b, n, n_features] to logits [b, n_classes].

    Example:
        >>> import torch
        >>> deepset(2, 1024)(torch.zeros(3, 50, 1024)).shape
        torch.Size([3, 2])
    """
    return DeepSet(n_classes, n_features, hidden)
