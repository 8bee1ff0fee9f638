"""Checkpoints: named tensors and a JSON document in one safetensors file; what an optimizer remembers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wsi_fl.system.files import atomic
from wsi_fl.types import WsiFlError


def save_tensors(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write one safetensors file, whole or not at all, with a JSON document in its header."""
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with atomic(path) as temporary:
        save_file(contiguous, temporary, metadata={"document": json.dumps(document)})


def load_tensors(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the document that `save_tensors` wrote.

    Raises:
        WsiFlError: when the file is damaged; the error says what it was.
    """
    try:
        with safe_open(path, "pt") as file:
            document = json.loads((file.metadata() or {})["document"])
            return {key: file.get_tensor(key) for key in file.keys()}, document  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise WsiFlError(f"{path}: damaged {what} ({error})") from None
    except RecursionError:
        raise WsiFlError(f"{path}: damaged {what} (its document is nested too deeply)") from None


def slots_of(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """Return what an optimizer remembers of each parameter, as copies on the CPU named `prefix/index/slot`."""
    return {
        f"{prefix}/{index}/{name}": torch.as_tensor(value).detach().cpu().clone()
        for index, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
    }


def load_slots(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Restore what `slots_of` returned; tensors of other names are left alone."""
    groups = optimizer.state_dict()["param_groups"]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in under(tensors, f"{prefix}/").items():
        index, name = key.split("/", 1)
        slots.setdefault(int(index), {})[name] = laid_out_like(parameters[int(index)], value)
    optimizer.load_state_dict({"state": slots, "param_groups": groups})


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, named without it."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def laid_out_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values with the strides of a parameter: fused optimizers pair numbers by their place in memory."""
    if values.stride() == parameter.stride() or values.shape != parameter.shape:
        return values
    return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(values)
