"""Normal noise of float64 for little more time than float32 numbers take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Noise:
    """Adds normal noise to float32 tensors, drawn and summed in float64 in a room that is used again and again.

    What PyTorch draws in float32 lies on a grid, so that what it was added to shows in the last digits, and ends
    at 5.77 σ on a CPU; its float64 numbers cost five times as much there. So four float32 numbers make three: their
    orthonormal sums are independent and normal as they are. The fourth sum stays secret. With it 96 random bits
    stand behind three float32 results, and no direction ends before 8.1 σ (after Holohan and Braghin, 2021, who
    make one number of two or more).

    Args:
        tensors: examples of what noise will be added to, all on one device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device
        n = min(_AT_ONCE_CUDA if device.type == "cuda" else _AT_ONCE_CPU, max(t.numel() for t in tensors))
        self._at_once = 3 * -(-n // 3)
        self._drawn = torch.empty(self._at_once // 3 * 4, device=device)
        self._wide = torch.empty_like(self._drawn, dtype=torch.float64)
        self._sums = torch.empty(self._at_once, dtype=torch.float64, device=device)
        self._orthonormal = _ORTHONORMAL.to(device)
        self._views: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def add(self, totals: Sequence[Tensor], std: float, generator: torch.Generator) -> None:
        """Add a number from N(0, std²) to every number of contiguous tensors, in place."""
        for part in (part for total in totals for part in torch.split(total.view(-1), self._at_once)):
            n = part.numel()
            drawn, wide, sums = self._room(n)
            wide.copy_(drawn.normal_(generator=generator))
            self._sums[:n].copy_(part)
            sums.addmm_(self._orthonormal, wide, alpha=std)
            part.copy_(self._sums[:n])

    def _room(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws [4, k] in float32 and in float64, and their sums [3, k], k = ⌈n / 3⌉."""
        if n not in self._views:
            k = -(-n // 3)
            drawn, wide = (room[: 4 * k].view(4, k) for room in (self._drawn, self._wide))
            self._views[n] = drawn, wide, self._sums[: 3 * k].view(3, k)
        return self._views[n]


_AT_ONCE_CPU, _AT_ONCE_CUDA = 3 * 2**14, 3 * 2**20
"""Numbers of noise: as many as a cache holds, or a device likes."""

_ORTHONORMAL = torch.linalg.qr(
    torch.vander(torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64).sqrt(), increasing=True)
).Q[:, 1:].mT  # fmt: skip
"""[3, 4]: rows across (1, 1, 1, 1), so that all four numbers count alike; not of halves, which keep to the grid."""
