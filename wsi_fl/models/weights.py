"""Weights of timm models: from a safetensors file or the model hub, whatever their keys are called; their digest."""

from __future__ import annotations

import hashlib
import re
import socket
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from wsi_fl.types import UsageError, WsiFlError, one_line

State = Mapping[str, torch.Tensor]

_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".tar")
_CLASSIFIERS = ("classifier", "fc", "fc_4", "head", "head.fc", "head_dist")
"""Where architectures keep what makes classes of features; `fc_4` is KimiaNet's."""
_KIMIANET = "model.0."
"""The convolutions of KimiaNet, and of any torchvision DenseNet in an `nn.Sequential` with its pooling."""
_WRAPPERS = ("module.", "model.", "backbone.", "encoder.", "state_dict.")
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.")


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, half precision made single.

    Raises:
        WsiFlError: when it is missing, damaged, or a pickle, which can run any program when it is opened.
    """
    if not path.is_file():
        raise WsiFlError(f"{path}: no such file; mosaic.weights wants a safetensors file")
    if path.suffix.lower() in _PICKLES:
        raise WsiFlError(
            f"{path}: a pickle, which may run any program and is never opened; convert it once where you trust it: "
            "safetensors.torch.save_file(torch.load('in.pth', weights_only=True), 'out.safetensors')"
        )
    try:
        state = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise WsiFlError(f"{path}: not a readable safetensors file ({reason})") from None
    return {name: one.float() if one.is_floating_point() else one for name, one in state.items()}


def published_weights(name: str, hub_id: str | None) -> Path:
    """The safetensors file that timm's authors publish, downloaded unless it is here already.

    Raises:
        WsiFlError: when there is none or it cannot be had.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    advice = "download its safetensors file elsewhere and give it with mosaic.weights = 'FILE.safetensors'"
    if not hub_id:
        raise WsiFlError(f"{name}: timm publishes no weights of it by name; give mosaic.weights")
    file = "model.safetensors"
    found = try_to_load_from_cache(hub_id, file)
    if isinstance(found, str):
        return Path(found)
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        if not urllib.request.getproxies():
            socket.getaddrinfo(host, 443)  # else the hub's client tries again for most of a minute
        return Path(hf_hub_download(hub_id, file))
    except Exception as error:  # the hub's client has many ways to fail
        reason = one_line(error)[:120]
        raise WsiFlError(
            f"{name}: its published weights ({hub_id} at {host}) cannot be downloaded ({reason}); {advice}"
        ) from None


def fit(model: nn.Module, state: State, source: str) -> bool:
    """Loads weights into a model without classifier; the keys may be timm's, torchvision's or KimiaNet's.

    Returns:
        Whether they are KimiaNet's, whose features are pooled without the last ReLU.

    Raises:
        WsiFlError: when a key is missing, too many or of another shape; it names one.
    """
    wanted = {name: one for name, one in model.state_dict().items() if not _bookkeeping(name)}
    named, kimianet = _renamed(state, wanted)
    kept = {name: one for name, one in named.items() if not _bookkeeping(name)}
    what = f"{source} does not fit the encoder {_name_of(model)}"
    if missing := sorted(wanted.keys() - kept.keys()):
        raise WsiFlError(f"{what}: {missing[0]!r} is missing{_others(missing)}")
    extra = sorted(name for name in kept.keys() - wanted.keys() if not _classifies(name, model))
    if extra:
        raise WsiFlError(f"{what}: it has {extra[0]!r}, which the encoder has not{_others(extra)}")
    for name, one in wanted.items():
        if kept[name].shape != one.shape:
            shapes = f"{list(kept[name].shape)} instead of {list(one.shape)}"
            raise WsiFlError(f"{what}: {name!r} has shape {shapes}")
        if kept[name].is_floating_point() and not torch.isfinite(kept[name]).all():
            raise WsiFlError(f"{source}: {name!r} holds values that are no numbers")
    model.load_state_dict({name: kept[name] for name in wanted}, strict=False)
    return kimianet


def digest_of(model: nn.Module) -> str:
    """SHA-256 of all tensors by name: the same weights have it wherever they came from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not _bookkeeping(name):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _renamed(state: State, wanted: Iterable[str]) -> tuple[dict[str, torch.Tensor], bool]:
    """The weights under the names of the model that fit best, and whether they were KimiaNet's."""
    expected = set(wanted)
    best, best_kimianet = dict(state), False
    names = {name: name for name in state}
    for _ in range(3):  # wrappers are nested
        modern = {old: _OLD_DENSENET.sub(r"\1\2.", name) for old, name in names.items()}
        unpacked = {
            old: "features." + name.removeprefix(_KIMIANET) if name.startswith(_KIMIANET) else name
            for old, name in modern.items()
        }
        for trial, kimianet in ((modern, False), (unpacked, unpacked != modern)):
            if len(expected & set(trial.values())) > len(expected & best.keys()):
                best, best_kimianet = {trial[old]: one for old, one in state.items()}, kimianet
        wrapper = next((w for w in _WRAPPERS if any(n.startswith(w) for n in names.values())), None)
        if wrapper is None:
            break
        names = {old: name.removeprefix(wrapper) for old, name in names.items()}
    return best, best_kimianet


def _bookkeeping(name: str) -> bool:
    """A counter of training steps, which older files lack."""
    return name.endswith("num_batches_tracked")


def _classifies(name: str, model: nn.Module) -> bool:
    own = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    known = (*_CLASSIFIERS, *((own,) if isinstance(own, str) else own))
    return any(name.startswith(f"{one}.") for one in known)


def _name_of(model: nn.Module) -> str:
    return str(getattr(model, "pretrained_cfg", {}).get("architecture") or type(model).__name__)


def _others(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def refuse_file_name(name: str) -> None:
    """An encoder is a name; a path belongs into `mosaic.weights`."""
    path = "/" in name and not name.startswith("hf-hub:")
    if path or name.endswith((".safetensors", *_PICKLES)):
        raise UsageError(f"mosaic.encoder = {name!r} is a timm model's name; a file goes into mosaic.weights")
