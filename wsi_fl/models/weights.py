"""Weights of timm models: from a safetensors file or the model hub, whatever their keys are called; their digest."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from wsi_fl.system.tensors import load_document, save_tensors
from wsi_fl.types import DiskFull, UsageError, WsiFlError, one_line

State = Mapping[str, torch.Tensor]


class NoWeightsError(WsiFlError):
    """Published weights that cannot be had here; a file of them can be given."""


_CLASSIFIERS = ("classifier", "fc", "fc_4", "head", "head.fc", "head_dist")
"""Where architectures keep what makes classes of features; `fc_4` is KimiaNet's."""
_KIMIANET = "model.0."
"""The convolutions of KimiaNet, and of any torchvision DenseNet in an `nn.Sequential` with its pooling."""
_WRAPPERS = ("module.", "model.", "backbone.", "encoder.", "state_dict.")
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.")


def read_weights(
    path: Path, cache: Path | None = None, tell: Callable[[str], None] = lambda _: None
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, half precision made single; those of a pickle by way of such a file.

    Args:
        cache: where the tensors of a pickle are kept when its own folder cannot be written.
        tell: is told when they are.

    Raises:
        WsiFlError: when it is missing, damaged, or a pickle with more than tensors, which can run any program.
    """
    if not path.is_file():
        raise WsiFlError(f"{path}: no such file; weights are a safetensors, .bin, .pt or .pth file")
    if path.suffix.lower() in _PICKLES:
        path = _as_safetensors(path, cache, tell)
    try:
        state = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise WsiFlError(f"{path}: not a readable safetensors file ({reason})") from None
    return {name: one.float() if one.is_floating_point() else one for name, one in state.items()}


def cached_weights(hub_id: str, files: Sequence[str] = ("model.safetensors",)) -> Path | None:
    """The first of these files that was downloaded before; None where none was."""
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(hub_id, file) for file in files)
    return next((Path(one) for one in found if isinstance(one, str)), None)


def published_weights(name: str, hub_id: str | None, files: Sequence[str] = ("model.safetensors",)) -> Path:
    """The file that an encoder's authors publish, downloaded with the user's own token unless it is here already.

    Args:
        files: what it may be called, in the order in which they are wanted.

    Raises:
        NoWeightsError: when there is none or it cannot be had.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError

    if not hub_id:
        raise NoWeightsError(f"{name}: timm publishes no weights of it by name; give them in a file")
    if found := cached_weights(hub_id, files):
        return found
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
        reason = one_line(error)[:120]
        raise NoWeightsError(
            f"{name}: its published weights ({hub_id} at {host}) cannot be downloaded ({reason}); download them "
            "elsewhere and give them in a file"
        ) from None


def fit(model: nn.Module, state: State, source: str, *, assign: bool = False) -> bool:
    """Loads weights into a model without classifier; the keys may be timm's, torchvision's or KimiaNet's.

    Args:
        assign: puts the tensors themselves into the model, as one without memory needs it.

    Returns:
        Whether they are KimiaNet's, whose features are pooled without the last ReLU.

    Raises:
        WsiFlError: when a key is missing, too many or of another shape; it names one of each kind, with shapes.
    """
    wanted = {name: one for name, one in model.state_dict().items() if not _bookkeeping(name)}
    named, kimianet = _renamed(state, wanted)
    kept = {name: one for name, one in named.items() if not _bookkeeping(name)}
    missing = sorted(wanted.keys() - kept.keys())
    extra = sorted(name for name in kept.keys() - wanted.keys() if not _classifies(name, model))
    unlike = [name for name, one in wanted.items() if name in kept and kept[name].shape != one.shape]
    wrong = []
    if missing:
        wrong.append(f"{missing[0]!r} is missing (shape {_shape(wanted[missing[0]])}){_others(missing)}")
    if extra:
        found = f"{extra[0]!r} (shape {_shape(kept[extra[0]])})"
        wrong.append(f"it has {found}, which the encoder has not{_others(extra)}")
    if unlike:
        shapes = f"{_shape(kept[unlike[0]])} instead of {_shape(wanted[unlike[0]])}"
        wrong.append(f"{unlike[0]!r} has shape {shapes}{_others(unlike)}")
    if wrong:
        raise WsiFlError(f"{source} does not fit the encoder {_name_of(model)}: {'; '.join(wrong)}")
    for name in wanted:
        if kept[name].is_floating_point() and not torch.isfinite(kept[name]).all():
            raise WsiFlError(f"{source}: {name!r} holds values that are no numbers")
    model.load_state_dict({name: kept[name] for name in wanted}, strict=False, assign=assign)
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


def _shape(one: torch.Tensor) -> list[int]:
    return list(one.shape)


def _others(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def refuse_file_name(name: str) -> None:
    """An encoder is a name; a path belongs into `weights`."""
    path = "/" in name and not name.startswith("hf-hub:")
    if path or name.endswith((".safetensors", *_PICKLES)):
        raise UsageError(f"encoder = {name!r} is a preset's or a timm model's name; a file goes into weights")


_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".tar", ".torch")
_INNER = ("state_dict", "model", "teacher")
"""Under which key training programs put the weights."""


def _as_safetensors(path: Path, cache: Path | None, tell: Callable[[str], None]) -> Path:
    """Return a safetensors file with the tensors of a pickle, made once beside it, or else in the cache.

    Only tensors and plain containers are unpickled (`torch.load(weights_only=True)`).

    Args:
        tell: is told what is written.

    Raises:
        WsiFlError: when the pickle is damaged or holds anything else, which might run any program.
    """
    state = path.stat()
    made_of = {"bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
    beside = path.with_name(f"{path.name}.safetensors")
    places = [beside] if os.access(path.parent, os.W_OK) or beside.exists() else []
    if cache is not None:
        known = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
        places.append(cache / f"{path.stem}-{known}.safetensors")
    current = next((place for place in places if place.exists() and _is_of(place, made_of)), None)
    if current is not None:
        return current
    tensors = _tensors(path)
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(place, tensors, made_of)
        except DiskFull:
            raise
        except OSError:
            continue
        tell(f"{path.name}: tensors alone were read and kept as {place}")
        return place
    raise WsiFlError(f"{path}: its folder cannot be written; {_advice('out.safetensors')}")


def _is_of(place: Path, made_of: Mapping[str, int]) -> bool:
    try:
        return load_document(place, "weights") == made_of
    except WsiFlError:
        return False


def _advice(out: str) -> str:
    return (
        "convert it once where you trust it: "
        f"safetensors.torch.save_file(torch.load('in.pth', weights_only=True), '{out}')"
    )


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a pickle by name; those that share memory get their own."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and PyTorch have many ways to refuse
        reason = one_line(error).split(". ")[0][:120]
        raise WsiFlError(
            f"{path}: damaged, or a pickle of more than tensors; it could run any program, so it is never opened "
            f"({reason}); {_advice('out.safetensors')}"
        ) from None
    for key in _INNER:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    tensors = {}
    if isinstance(found, Mapping):
        tensors = {str(name): one.clone() for name, one in found.items() if isinstance(one, torch.Tensor)}
    if not tensors:
        raise WsiFlError(f"{path}: holds no tensors by name; give the encoder's state_dict")
    return tensors
