"""Common parts of training generators: a state to resume from, bit for bit, and conversion of stored pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wsi_fl.models.checkpoint import copy_slots, load_slots, strip_prefix


class TrainingState:
    """Networks, optimizers and the random generator of one training.

    Attributes:
        networks, optimizers: by their names in checkpoints; "average" is the network for drawing.
        random: the random generator of all steps.
        iteration: number of finished steps.
    """

    networks: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.random = torch.Generator(device).manual_seed(seed)
        self.iteration = 0

    def draw_rows(self, n: int, size: int) -> Tensor:
        """Draw row numbers int64[size] below n, with replacement."""
        return torch.randint(n, (size,), generator=self.random, device=self.device)

    def copy_tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors by name, for a checkpoint."""
        tensors = {"random": self.random.get_state()}
        for name, network in self.networks.items():
            tensors |= {f"{name}/{key}": value.detach() for key, value in network.state_dict().items()}
        for name, optimizer in self.optimizers.items():
            tensors |= copy_slots(optimizer, name)
        return {key: value.cpu().clone() for key, value in tensors.items()}

    def build_document(self) -> dict[str, object]:
        """Return the other state, as JSON."""
        return {"iteration": self.iteration}

    def load(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Restore the state from its tensors and its JSON."""
        self.random.set_state(tensors["random"])
        for name, network in self.networks.items():
            network.load_state_dict(strip_prefix(tensors, f"{name}/"))
        for name, optimizer in self.optimizers.items():
            load_slots(optimizer, tensors, name)
        self.iteration = int(document["iteration"])


@torch.no_grad()
def move_average(network: nn.Module, source: nn.Module, decay: float) -> None:
    """Update an average: `network` becomes decay · network + (1 − decay) · other; buffers are copied."""
    for average, parameter in zip(network.parameters(), source.parameters(), strict=True):
        average.lerp_(parameter, 1 - decay)
    for average_buffer, buffer in zip(network.buffers(), source.buffers(), strict=True):
        average_buffer.copy_(buffer)


def normalize_pixels(pixels: Tensor) -> Tensor:
    """Return uint8 pixels as float32 in [−1, 1]."""
    return pixels.float() / 127.5 - 1


def quantize_images(images: Tensor) -> Tensor:
    """Return images in [−1, 1] as uint8, rounded; values outside are clipped."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def balance_labels(n_classes: int, n_per_class: int) -> NDArray[np.int64]:
    """Return labels int64[n_classes · n_per_class], n_per_class of each class, in turn."""
    return np.tile(np.arange(n_classes, dtype=np.int64), n_per_class)
