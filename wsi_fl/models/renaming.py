"""Weights of vision transformers under the names of the transformers library, given timm's."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

State = Mapping[str, torch.Tensor]

_CLASS_TOKEN = "embeddings.cls_token"
_LEFT_OUT = ("embeddings.mask_token", "pooler.")
_OUTSIDE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
    "layernorm.": "norm.",
}
_IN_BLOCK = {
    "layernorm_before.": "norm1.",
    "layernorm_after.": "norm2.",
    "attention.output.dense.": "attn.proj.",
    "attention.o_proj.": "attn.proj.",
    "intermediate.dense.": "mlp.fc1.",
    "output.dense.": "mlp.fc2.",
    "mlp.weights_in.": "mlp.fc1.",
    "mlp.weights_out.": "mlp.fc2.",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
}
_BLOCK = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)")
_QUERY = re.compile(r"((?:encoder\.)?layers?\.(\d+)\.attention\.)(attention\.query|q_proj)\.(weight|bias)")
_THREE = {
    "attention.query": ("attention.query", "attention.key", "attention.value"),
    "q_proj": ("q_proj", "k_proj", "v_proj"),
}
"""Query, key and value by the first of them: of transformers 4, and of transformers 5."""


def timm_named(state: State, model: nn.Module) -> State:
    """Return the weights under timm's names where they have those of ViT or DINOv2 in transformers; else as they are.

    Names are those of transformers 4 and 5. Query, key and value become one matrix. Where timm's model has registers,
    what the class token's place adds is added to the token itself, as timm adds no place to it. Places are interpolated
    to the grid of the model as `Dinov2Embeddings.interpolate_pos_encoding` does it.
    """
    prefix = next((name.removesuffix(_CLASS_TOKEN) for name in state if name.endswith(_CLASS_TOKEN)), None)
    if prefix is None:
        return state
    bare = {name.removeprefix(prefix): one for name, one in state.items()}
    bare = {name: one for name, one in bare.items() if not name.startswith(_LEFT_OUT)}
    named: dict[str, torch.Tensor] = {}
    for query in [name for name in bare if _QUERY.fullmatch(name)]:
        found = _QUERY.fullmatch(query)
        assert found is not None
        stem, block, first, kind = found.groups()
        three = [f"{stem}{part}.{kind}" for part in _THREE[first]]
        if all(name in bare for name in three):
            named[f"blocks.{block}.attn.qkv.{kind}"] = torch.cat([bare.pop(name) for name in three])
    named |= {_renamed(name): one for name, one in bare.items()}
    return _placed(named, model)


def _renamed(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _with_start(name, _OUTSIDE)
    return f"blocks.{block[1]}.{_with_start(block[2], _IN_BLOCK)}"


def _with_start(name: str, table: Mapping[str, str]) -> str:
    old = next((old for old in table if name.startswith(old)), None)
    return name if old is None else table[old] + name.removeprefix(old)


def _placed(state: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Fit the embeddings of places, [1, 1 + side², d], to those of the model."""
    places = state.get("pos_embed")
    wanted = model.state_dict().get("pos_embed")
    if places is None or wanted is None or places.ndim != wanted.ndim:
        return state
    first, grid = places[:, :1], places[:, 1:]
    without_class = bool(getattr(model, "no_embed_class", False))
    side, new_side = round(grid.shape[1] ** 0.5), round((wanted.shape[1] - (not without_class)) ** 0.5)
    if side != new_side and side * side == grid.shape[1]:
        square = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        square = functional.interpolate(square, (new_side, new_side), mode="bicubic", align_corners=False)
        grid = square.permute(0, 2, 3, 1).reshape(1, new_side * new_side, -1)
    if not without_class:
        return state | {"pos_embed": torch.cat([first, grid], 1)}
    return state | {"pos_embed": grid, "cls_token": state["cls_token"] + first}
