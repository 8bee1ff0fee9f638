"""Which device this process computes on."""

from __future__ import annotations

import os

import torch


def device_of_rank() -> torch.device:
    """cuda:(local rank) where there are GPUs, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    local = next((int(os.environ[name]) for name in names if name in os.environ), 0)
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)  # for every call that names no device, other threads' too
    torch.backends.cudnn.deterministic = True  # a run that goes on reaches what it would have
    return device
