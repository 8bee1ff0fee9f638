"""Which engine a model gets: those that suit it, and the fastest of them on the batch at hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from wsi_fl.privacy.ghost import obstacle
from wsi_fl.privacy.gradients import ENGINES, trained
from wsi_fl.types import UsageError, WsiFlError

AUTO = "auto"

MODES = tuple(ENGINES)
"""What `grad_mode` can be beside `auto`."""

_CLEARLY, _HOPELESS = 0.7, 3.0
"""Times the time of another mode: below it a mode is faster beyond doubt, above it not worth a second look."""

_SHARE = 1 / 32
"""Of the free memory, for all gradients side by side: Opacus needs a few times that, and so may other ranks."""


def require(mode: str, model: nn.Module) -> None:
    """Refuses a mode that is unknown or does not suit the model."""
    if mode not in ENGINES:
        raise UsageError(f"unknown privacy.grad_mode {mode!r}; known: {', '.join((AUTO, *MODES))}")
    reason = obstacle(model) if mode == "ghost" else None
    if reason is not None:
        raise UsageError(f"privacy.grad_mode = 'ghost' does not suit this model: {reason}")


def suitable(modes: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """Those of the modes that suit the model; UsageError where none does."""
    found = tuple(mode for mode in modes if mode != "ghost" or obstacle(model) is None)
    if not found:
        require(modes[0], model)
    return found


def fastest(modes: Sequence[str], model: nn.Module, x: Tensor, attempt: Callable[[str], object]) -> str:
    """The mode whose `attempt` takes the least time among those that fit in memory.

    The first one keeps its place unless another is faster beyond doubt, so that runs alike choose alike.

    Args:
        attempt: computes what a step on the batch x[b, …] needs; must change nothing but random generators.

    Raises:
        WsiFlError: what the first mode raised, when none works.
    """
    lean = [mode for mode in modes if mode == "ghost" or _fits(model, x)] or list(modes)
    if len(lean) == 1:
        return lean[0]
    seconds: dict[str, float] = {}
    failed: list[Exception] = []
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        for mode in lean:
            try:
                seconds[mode] = _seconds(partial(attempt, mode), x)
            except (torch.OutOfMemoryError, WsiFlError) as error:
                failed.append(error.with_traceback(None))  # whose frames hold tensors
        if not seconds:
            raise failed[0]
        first, least = next(iter(seconds)), min(seconds.values())
        rivals = [mode for mode in seconds if mode == first or seconds[mode] <= _HOPELESS * least]
        if len(rivals) == 1:
            return first
        # in turns, so that what else the machine does slows all of them down; the first runs were to warm up
        turns = [{mode: _seconds(partial(attempt, mode), x) for mode in rivals} for _ in range(2)]
    best = {mode: min(turn[mode] for turn in turns) for mode in rivals}
    winner = min(rivals, key=lambda mode: best[mode])
    return winner if best[winner] < _CLEARLY * best[first] else first


def _seconds(work: Callable[[], object], x: Tensor) -> float:
    began = time.perf_counter()
    work()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - began


def _fits(model: nn.Module, x: Tensor) -> bool:
    """Whether the gradients of every example fit in memory, side by side."""
    needed = len(x) * sum(p.numel() * p.element_size() for p in trained(model))
    return needed <= _SHARE * _free_bytes(x.device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # what the system would give up of its caches counts too
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
