"""Mettle (slideflow-labs/Mettle): the backbone of H-optimus-0, tuned for scanners and stains, and a head on its class
token.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from wsi_fl.models.weights import download_weights, load_weights, read_weights

if TYPE_CHECKING:
    from wsi_fl.models.presets import Preset

_N_ATOMS, _RANK, _WIDTH = 16, 8, 256


class _Head(nn.Module):
    """Parameters of the head on the class token."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.P = nn.Parameter(torch.zeros(_N_ATOMS, d, _RANK))
        self.Q = nn.Parameter(torch.zeros(_N_ATOMS, d, _RANK))
        self.mix = nn.Sequential(nn.Linear(d, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _N_ATOMS))
        self.shift = nn.Sequential(nn.Linear(d, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, d))

    def refine_tokens(self, e: torch.Tensor) -> torch.Tensor:
        """Return e + Σₖ mₖ(e) Qₖ Pₖᵀ e + s(e) of class tokens e [b, d]; m and s are networks of two layers."""
        atoms = torch.einsum("bd,kdr,kcr->bkc", e, self.P, self.Q)
        shifted: torch.Tensor = e + torch.einsum("bk,bkc->bc", self.mix(e), atoms) + self.shift(e)
        return shifted


class _Mettle(nn.Module):
    """Map images float32[b, 3, px, px] to the head's class token and the mean of patches, float32[b, 2 d]."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, _Head(int(backbone.num_features))  # type: ignore[arg-type]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.backbone.forward_features(images)  # type: ignore[operator]
        with torch.autocast(images.device.type, enabled=False):
            patches = tokens[:, self.backbone.num_prefix_tokens :].float()
            return torch.cat([self.head.refine_tokens(tokens[:, 0].float()), patches.mean(1)], 1)


def build_mettle(preset: Preset, weights: Path | None) -> nn.Module:
    """Build Mettle from its file of weights, by default the published one.

    Raises:
        WsiFlError: when the weights are not available or do not fit.
    """
    from wsi_fl.models.encoder import build_preset_model

    path = weights or download_weights("mettle", preset.hub_id, preset.hub_files)
    with torch.device("meta"):
        model = _Mettle(build_preset_model(preset))
    load_weights(model, read_weights(path), str(path), assign=True)
    return model
