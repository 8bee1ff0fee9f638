"""Numbers between 0 and the smallest normal one, with which CPUs compute a hundred times slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Compute with 0 in the place of denormal numbers, in this thread and in those that it starts.

    A gradient of 0, as behind a ReLU that no example passes, lets Adam's moments shrink until they are denormal, and
    rounding keeps them there. Without noise ever more weights have such gradients, and a step takes eight times as
    long.
    """
    import torch

    for kind in (np.float32, np.float64):
        np.finfo(kind)  # kept by NumPy, which before 2.4 warns where it looks this up later
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
