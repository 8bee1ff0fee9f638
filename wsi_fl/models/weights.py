"""Models of timm and their weights, from a file or the model hub, with keys of several libraries; their digest."""

from __future__ import annotations

import hashlib
import re
import socket
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from wsi_fl.types import PLAIN_NAME_MESSAGE, UsageError, WsiFlError, is_plain_name, single_line

State = Mapping[str, torch.Tensor]


class NoWeightsError(WsiFlError):
    """Published weights are not available here; the user can give a file."""


_CLASSIFIERS = ("classifier", "fc", "fc_4", "head", "head.fc", "head_dist", "AuxLogits")
"""Names of classifiers; `fc_4` is KimiaNet's, `AuxLogits` the auxiliary one of Inception."""
_KIMIANET_PREFIX = "model.0."
"""Prefix of the convolutions of KimiaNet, and of any torchvision DenseNet in an `nn.Sequential` with its pooling."""
_WRAPPERS = ("module.", "model.", "backbone.", "encoder.", "state_dict.")
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.")


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file or of a pickle, half precision cast to single.

    Only tensors and plain containers are unpickled (`torch.load(weights_only=True)`).

    Raises:
        WsiFlError: for a missing or damaged file, or a pickle with more than tensors, which can run any program.
    """
    if not path.is_file():
        raise WsiFlError(f"{path}: no such file; weights are a safetensors, .bin, .pt or .pth file")
    if path.suffix.lower() in _PICKLES:
        state = _read_pickle(path)
    else:
        try:
            state = load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise WsiFlError(f"{path}: not a readable safetensors file ({single_line(error)})") from None
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def find_cached_weights(hub_id: str, files: Sequence[str] = ("model.safetensors",)) -> Path | None:
    """Return the first of these files in the cache of downloads; None without any."""
    from huggingface_hub import try_to_load_from_cache

    paths = (try_to_load_from_cache(hub_id, file) for file in files)
    return next((Path(path) for path in paths if isinstance(path, str)), None)


def download_weights(name: str, hub_id: str | None, files: Sequence[str] = ("model.safetensors",)) -> Path:
    """Return the published file of an encoder, downloaded with the user's token unless cached.

    Args:
        files: possible names, in order of preference.

    Raises:
        NoWeightsError: when there is none or it is not available.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

    if not hub_id:
        raise NoWeightsError(f"{name}: timm publishes no weights of this name; give them in a file")
    if path := find_cached_weights(hub_id, files):
        return path
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        if not urllib.request.getproxies():
            socket.getaddrinfo(host, 443)  # else the hub's client tries again for most of a minute
        for file in files[:-1]:
            with suppress(EntryNotFoundError):
                return Path(hf_hub_download(hub_id, file))
        return Path(hf_hub_download(hub_id, files[-1]))
    except GatedRepoError:
        raise NoWeightsError(
            f"{name}: its authors give access to its weights on request; ask at https://{host}/{hub_id}, then run "
            "`hf auth login` with your token, or give them in a file"
        ) from None
    except Exception as error:  # the hub's client has many ways to fail
        reason = single_line(error)[:120]
        raise NoWeightsError(
            f"{name}: its published weights ({hub_id} at {host}) cannot be downloaded ({reason}); download them "
            "elsewhere and give them in a file"
        ) from None


def load_weights(model: nn.Module, state: State, source: str, *, assign: bool = False) -> bool:
    """Load weights into a model without classifier; the keys may be timm's, torchvision's, transformers' or KimiaNet's.

    Args:
        assign: whether the tensors themselves become the parameters, as a model on the meta device needs.

    Returns:
        Whether they are KimiaNet's, whose features are pooled without the last ReLU.

    Raises:
        WsiFlError: for missing or unexpected keys or another shape, with the first of each kind and shapes.
    """
    expected = {name: tensor for name, tensor in model.state_dict().items() if not _is_counter(name)}
    tensors, kimianet = _rename_keys(_convert_names(state, model), expected)
    available = {name: tensor for name, tensor in tensors.items() if not _is_counter(name)}
    missing = sorted(expected.keys() - available.keys())
    extra = sorted(name for name in available.keys() - expected.keys() if not _is_classifier(name, model))
    mismatched = [
        name for name, tensor in expected.items() if name in available and available[name].shape != tensor.shape
    ]
    problems = []
    if missing:
        name, shape = missing[0], list(expected[missing[0]].shape)
        problems.append(f"{name!r} is missing (shape {shape}){_count_others(missing)}")
    if extra:
        name, shape = extra[0], list(available[extra[0]].shape)
        problems.append(f"it has {name!r} (shape {shape}), which the encoder has not{_count_others(extra)}")
    if mismatched:
        name, shape, expected_shape = (
            mismatched[0],
            list(available[mismatched[0]].shape),
            list(expected[mismatched[0]].shape),
        )
        problems.append(f"{name!r} has shape {shape} instead of {expected_shape}{_count_others(mismatched)}")
    if problems:
        encoder = getattr(model, "pretrained_cfg", {}).get("architecture") or type(model).__name__
        raise WsiFlError(f"{source} does not fit the encoder {encoder}: {'; '.join(problems)}")
    for name in expected:
        if available[name].is_floating_point() and not torch.isfinite(available[name]).all():
            raise WsiFlError(f"{source}: {name!r} holds values that are no numbers")
    model.load_state_dict({name: available[name] for name in expected}, strict=False, assign=assign)
    return kimianet


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of all tensors by name, the same for weights of any source."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not _is_counter(name):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _rename_keys(state: State, names_wanted: Iterable[str]) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the weights under the best matching names of the model, and whether they are KimiaNet's."""
    expected = set(names_wanted)
    best, best_kimianet = dict(state), False
    names = {name: name for name in state}
    for _ in range(3):  # wrappers are nested
        modern = {old: _OLD_DENSENET.sub(r"\1\2.", name) for old, name in names.items()}
        unpacked = {
            old: "features." + name.removeprefix(_KIMIANET_PREFIX) if name.startswith(_KIMIANET_PREFIX) else name
            for old, name in modern.items()
        }
        for trial, kimianet in ((modern, False), (unpacked, unpacked != modern)):
            if len(expected & set(trial.values())) > len(expected & best.keys()):
                best, best_kimianet = {trial[old]: tensor for old, tensor in state.items()}, kimianet
        wrapper = next((w for w in _WRAPPERS if any(n.startswith(w) for n in names.values())), None)
        if wrapper is None:
            break
        names = {old: name.removeprefix(wrapper) for old, name in names.items()}
    return best, best_kimianet


def _is_counter(name: str) -> bool:
    """Return whether a tensor is a counter of training steps, absent from older files."""
    return name.endswith("num_batches_tracked")


def _is_classifier(name: str, model: nn.Module) -> bool:
    classifier = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    prefixes = (*_CLASSIFIERS, *((classifier,) if isinstance(classifier, str) else classifier))
    return any(name.startswith(f"{prefix}.") for prefix in prefixes)


def _count_others(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def refuse_file_name(name: str) -> None:
    """Refuse a path as the name of an encoder; paths belong in `weights`."""
    if ("/" in name and ":" not in name) or name.endswith((".safetensors", *_PICKLES)):
        raise UsageError(f"encoder = {name!r} is a preset's or a timm model's name; a file goes into weights")


_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".tar", ".torch")
_NESTED_KEYS = ("state_dict", "model", "teacher")  # keys of weights in files of training programs
_SHELL_SAFE = re.compile(r"[\w./ -]+")


def _conversion_command(path: Path) -> str:
    """Return the command to convert a trusted pickle to a safetensors file, with the usual nesting of weights."""
    source = str(path) if _SHELL_SAFE.fullmatch(str(path)) else "in.pth"  # else a shell might misread it
    nested = "d"
    for key in reversed(_NESTED_KEYS):
        nested = f"d.get('{key}', {nested})"
    return (
        'python -c "import torch, safetensors.torch; safetensors.torch.save_file({k: v.contiguous().clone() for k, v '
        f"in (lambda d: {nested})(torch.load('{source}', 'cpu', weights_only=False)).items() if "
        "torch.is_tensor(v)}, 'out.safetensors')\""
    )


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and PyTorch have many ways to refuse
        reason = single_line(error).split(". ")[0][:120]
        raise WsiFlError(
            f"{path}: damaged, or a pickle of more than tensors; it could run any program, so it is never opened "
            f"({reason}); where you trust it, convert it once: {_conversion_command(path)}"
        ) from None
    for key in _NESTED_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = {}
    if isinstance(content, Mapping):
        tensors = {str(name): tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}
    if not tensors:
        raise WsiFlError(f"{path}: holds no tensors by name; give the encoder's state_dict")
    return tensors


def create_timm_model(name: str, description: str, **arguments: Any) -> Any:
    """Create a timm model with random weights; `description` describes it in errors.

    UsageError for a name that timm would look up on a hub or in a file: a name common to sites could become another
    model, and its author could make this process open connections or files.
    """
    import timm

    if not is_plain_name(name):
        raise UsageError(f"{name!r} {PLAIN_NAME_MESSAGE}")
    try:
        return timm.create_model(name, pretrained=False, **arguments)
    except Exception as error:  # each architecture has its own way to refuse
        if timm.is_model(name):
            raise UsageError(f"timm makes no {name} of {description}: {single_line(error)}") from None
        near = timm.list_models(f"*{name.split('.', maxsplit=1)[0]}*")[:3]
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UsageError(f"timm knows no model {name!r} ({single_line(error)}){hint}") from None


_BATCH_IMAGES = 64


def random_weights(name: str, images: NDArray[np.uint8]) -> dict[str, torch.Tensor]:
    """Return random weights with timm's names, deterministic for the same images.

    Random filters distinguish textures. Normalisation layers have statistics of the images, without which features
    would hardly differ.

    Args:
        name: of a timm architecture with BatchNorm.
        images: uint8[n, h, w, 3] for the statistics of its normalisation layers.
    """
    import timm
    from timm.data import resolve_model_data_config

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(name, num_classes=2)
    expected = resolve_model_data_config(model)
    mean, std = (torch.tensor(expected[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    normalized = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over batches
    model.train()
    with torch.no_grad():
        for start in range(0, len(normalized), _BATCH_IMAGES):
            model(normalized[start : start + _BATCH_IMAGES])
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


_CLASS_TOKEN = "embeddings.cls_token"
_IGNORED_KEYS = ("embeddings.mask_token", "pooler.")
_GLOBAL_KEYS = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "reg_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
    "layernorm.": "norm.",
}
_BLOCK_KEYS = {
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
_QKV_NAMES = {
    "attention.query": ("attention.query", "attention.key", "attention.value"),
    "q_proj": ("q_proj", "k_proj", "v_proj"),
}
"""Query, key and value by the first of them: of transformers 4, and of transformers 5."""


def _convert_names(state: State, model: nn.Module) -> State:
    """Convert names of ViT or DINOv2 in transformers, and of DINOv2 itself, to timm's; other weights stay unchanged.

    Names are those of transformers 4 and 5. Query, key and value become one matrix. Where timm's model has registers,
    the positional embedding of the class token is added to the token, as timm has none for it. Positional embeddings
    are interpolated to the grid of the model as in `Dinov2Embeddings.interpolate_pos_encoding`.
    """
    prefix = next((name.removesuffix(_CLASS_TOKEN) for name in state if name.endswith(_CLASS_TOKEN)), None)
    if prefix is None:
        return _convert_dinov2(state, model)
    bare = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    bare = {name: tensor for name, tensor in bare.items() if not name.startswith(_IGNORED_KEYS)}
    named: dict[str, torch.Tensor] = {}
    for match in [query for name in bare if (query := _QUERY.fullmatch(name))]:
        stem, block, first, kind = match.groups()
        qkv_names = [f"{stem}{part}.{kind}" for part in _QKV_NAMES[first]]
        if all(name in bare for name in qkv_names):
            named[f"blocks.{block}.attn.qkv.{kind}"] = torch.cat([bare.pop(name) for name in qkv_names])
    named |= {_timm_name(name): tensor for name, tensor in bare.items()}
    return _resize_positions(named, model)


def _convert_dinov2(state: State, model: nn.Module) -> State:
    """Convert DINOv2's own names of registers and of gated layers; without registers timm's are the same."""
    if "register_tokens" not in state:
        return state
    named = {name: tensor for name, tensor in state.items() if name != "mask_token"}
    for old, new in (("register_tokens", "reg_token"), (".w12.", ".fc1."), (".w3.", ".fc2.")):
        named = {name.replace(old, new): tensor for name, tensor in named.items()}
    return _resize_positions(named, model)


def _timm_name(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    table, suffix = (_BLOCK_KEYS, block[2]) if block else (_GLOBAL_KEYS, name)
    old = next((old for old in table if suffix.startswith(old)), "")
    return (f"blocks.{block[1]}." if block else "") + table.get(old, "") + suffix.removeprefix(old)


def _resize_positions(state: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Interpolate positional embeddings [1, 1 + side², d] to those of the model."""
    places = state.get("pos_embed")
    target = model.state_dict().get("pos_embed")
    if places is None or target is None or places.ndim != target.ndim:
        return state
    first, grid = places[:, :1], places[:, 1:]
    without_class = bool(getattr(model, "no_embed_class", False))
    side, new_side = round(grid.shape[1] ** 0.5), round((target.shape[1] - (not without_class)) ** 0.5)
    if side != new_side and side * side == grid.shape[1]:
        square = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        square = functional.interpolate(square, (new_side, new_side), mode="bicubic", align_corners=False)
        grid = square.permute(0, 2, 3, 1).reshape(1, new_side * new_side, -1)
    if not without_class:
        return state | {"pos_embed": torch.cat([first, grid], 1)}
    return state | {"pos_embed": grid, "cls_token": state["cls_token"] + first}
