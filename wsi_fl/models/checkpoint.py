"""The optimizer, and its state as named tensors of a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch import Tensor


class Adam(torch.optim.Adam):
    """PyTorch's Adam without the wrappers for `torch.compile`, whose import takes 2 s."""

    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Adam.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Adam.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


def copy_slots(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """Return the optimizer's state of each parameter, as copies on the CPU named `prefix/index/slot`."""
    return {
        f"{prefix}/{index}/{name}": torch.as_tensor(value).detach().cpu().clone()
        for index, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
    }


def load_slots(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Restore the optimizer's state from named tensors; tensors of other prefixes are ignored."""
    groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in strip_prefix(tensors, f"{prefix}/").items():
        index, name = key.split("/", 1)
        slots.setdefault(int(index), {})[name] = match_strides(parameters[int(index)], value)
    optimizer.load_state_dict({"state": slots, "param_groups": groups})


def strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors with a prefix, named without it."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def match_strides(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values with the strides of a parameter: fused optimizers pair numbers by their place in memory."""
    if values.stride() == parameter.stride() or values.shape != parameter.shape:
        return values
    return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(values)
