"""A head for multiple-instance learning, as STAMP trains one on the features of a slide's tiles."""

import torch
from torch import nn

WIDTH = 20_000  # tensors so large that FLARE may stream them


class AttentionHead(nn.Module):
    """Gated attention over a bag float32[t, 32] of t tiles, and logits of two classes for the bag."""

    def __init__(self):
        super().__init__()
        self.values, self.gates = nn.Linear(32, WIDTH), nn.Linear(32, WIDTH)
        self.attention, self.classes = nn.Linear(WIDTH, 1), nn.Linear(32, 2)

    def forward(self, bag):
        scores = self.attention(torch.tanh(self.values(bag)) * torch.sigmoid(self.gates(bag)))
        return self.classes((torch.softmax(scores, 0) * bag).sum(0))
