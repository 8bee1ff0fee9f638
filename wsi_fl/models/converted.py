"""Weights that were published as pickles, read as tensors alone and kept as safetensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from wsi_fl.system.tensors import load_document, save_tensors
from wsi_fl.types import DiskFull, WsiFlError, one_line

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".tar", ".torch")
_INNER = ("state_dict", "model", "teacher")
"""Under which key training programs put the weights."""


def as_safetensors(path: Path, cache: Path | None, tell: Callable[[str], None]) -> Path:
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
