"""Mettle (slideflow-labs/Mettle): the backbone of H-optimus-0, tuned for scanners and stains, and a head on its class
token. Its weights are under CC BY-NC-ND 4.0 and not gated.

After `pip install` of this folder, `features.encoder = "mettle"` works as any preset does. The resolution is that of
H-optimus-0; its card states none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from wsi_fl.models.encoder import build_preset_model
from wsi_fl.models.presets import PRESETS
from wsi_fl.models.weights import download_weights, load_weights, read_weights

_N_ATOMS, _RANK, _WIDTH = 16, 8, 256


class _Head(nn.Module):
    """The head on the class token; its attributes have the names of the published tensors."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.P = nn.Parameter(torch.zeros(_N_ATOMS, d, _RANK))
        self.Q = nn.Parameter(torch.zeros(_N_ATOMS, d, _RANK))
        self.mix = nn.Sequential(nn.Linear(d, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _N_ATOMS))
        self.shift = nn.Sequential(nn.Linear(d, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, d))

    def forward(self, e: torch.Tensor) -> torch.Tensor:
        """Return e + Σₖ mₖ(e) Qₖ Pₖᵀ e + s(e) of class tokens e [b, d]; m and s are networks of two layers."""
        atoms = torch.einsum("bd,kdr,kcr->bkc", e, self.P, self.Q)
        refined: torch.Tensor = e + torch.einsum("bk,bkc->bc", self.mix(e), atoms) + self.shift(e)
        return refined


class _Mettle(nn.Module):
    """Map images float32[b, 3, px, px] to the head's class token and the mean of patches, float32[b, 2 d]."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, _Head(int(backbone.num_features))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.backbone.forward_features(images)
        with torch.autocast(images.device.type, enabled=False):  # the head was trained in single precision
            patches = tokens[:, self.backbone.num_prefix_tokens :].float()
            return torch.cat([self.head(tokens[:, 0].float()), patches.mean(1)], 1)


def build_mettle(weights: Path | None) -> nn.Module:
    """Build Mettle from its file of weights, by default the published one, `model.safetensors`."""
    path = weights or download_weights("mettle", mettle.hub_id)
    with torch.device("meta"):
        model = _Mettle(build_preset_model(mettle))
    load_weights(model, read_weights(path), str(path), assign=True)
    return model


mettle = replace(
    PRESETS["h-optimus-0"],
    n_features=3072,
    n_parameters=1136353296,
    hub_id="slideflow-labs/Mettle",
    licence="CC BY-NC-ND 4.0",
    pooling="the model's own pooling",
    build=build_mettle,
)
