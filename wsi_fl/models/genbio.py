"""GenBio-PathFM: DINOv3's architecture on one colour channel at a time, as in genbio-ai/genbio-pathfm on GitHub."""

from __future__ import annotations

from pathlib import Path

from timm.models.eva import checkpoint_filter_fn
from torch import Tensor, nn

from wsi_fl.models.encoder import build_preset_model
from wsi_fl.models.presets import PRESETS
from wsi_fl.models.weights import download_weights, load_weights, read_weights

_NAME = "genbio-pathfm"
_NORM_EPS = 1e-6  # timm's architecture has 1e-5


class _ChannelEncoder(nn.Module):
    """Map images float32[b, 3, px, px] to the class tokens of red, green and blue side by side, float32[b, 3 d]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.network(images.reshape(-1, 1, *images.shape[-2:]))
        return tokens.reshape(len(images), -1)


def build_genbio(weights: Path | None) -> nn.Module:
    """Build the encoder from its file of weights, by default the published one, with the names of DINOv3."""
    preset = PRESETS[_NAME]
    path = weights or download_weights(_NAME, preset.hub_id, preset.hub_files)
    network = build_preset_model(preset)
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = _NORM_EPS
    load_weights(network, checkpoint_filter_fn(read_weights(path), network), str(path), assign=True)
    network.rope.to_empty(device="cpu").reset_parameters()  # type: ignore[union-attr, operator]
    return _ChannelEncoder(network)
