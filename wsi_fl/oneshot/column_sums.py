"""Examples as projected vectors of norm at most 1, and their sums by column."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from wsi_fl.types import UsageError

HeadKind = Literal["classes", "number", "survival"]
ROUND_OFF = 1e-6
"""Margin of norms for errors of floating point."""
TINY = 1e-30
"""Smallest divisor."""
COUNT_WEIGHT = 0.3
"""Weight of an example in the count of its class, for z of norm 1: counts need less precision than sums."""
SCALE = 1 / sqrt(1 + COUNT_WEIGHT**2)
"""Factor that limits the norm of the statistics of one example to 1."""


@dataclass(frozen=True)
class StatisticsLayout:
    """The layout of packed sums and counts of some columns, each of d numbers and a count."""

    n_columns: int
    n_components: int

    @property
    def table_shape(self) -> tuple[int, int]:
        """Return (columns, d + 1)."""
        return self.n_columns, self.n_components + 1

    @property
    def sum_scale(self) -> float:
        """Return the factor of packed sums."""
        return SCALE if self.n_components else 1.0

    @property
    def count_scale(self) -> float:
        """Return the addition of one example to the packed count of its column; 1 where counts are alone."""
        return COUNT_WEIGHT * SCALE if self.n_components else 1.0

    def unpack_sums(self, sums: Tensor) -> Tensor:
        """Return sums and counts float64[columns, d + 1] of packed statistics."""
        table = sums[: self.n_columns * (self.n_components + 1)].double().view(self.table_shape)
        return torch.cat([table[:, :-1] / self.sum_scale, table[:, -1:] / self.count_scale], dim=1)

    def remove_weights(self, statistics: Tensor) -> Tensor:
        """Return released statistics float64[k + columns] as they were before columns were weighted by precision.

        The weights follow from the variances of the noise at the end; without noise all are 1.
        """
        sums, variances = statistics[: -self.n_columns].double(), statistics[-self.n_columns :].double()
        weights = (variances / variances.max().clamp(min=0)).sqrt()
        weights = torch.where(weights > 0, weights, 1.0)
        return torch.cat([(sums.view(self.table_shape) / weights[:, None]).flatten(), variances / weights**2])


def embed_rows(x: Tensor, mean: Tensor, components: Tensor) -> Tensor:
    rows = nn.functional.layer_norm(x, x.shape[-1:]).double() - mean.double()
    z = rows @ components.double()
    z = z / z.norm(dim=1, keepdim=True).clamp(min=1) * (1 - ROUND_OFF)
    return torch.where(z.isfinite().all(1, keepdim=True), z, 0.0)


def sum_by_column(z: Tensor, y: Tensor, n_columns: int, *, weights: bool) -> Tensor:
    """Return the sums and counts float64[columns, d + 1] of the rows z[b, d] by column.

    Args:
        weights: whether y are weights of the second of two columns.

    Raises:
        UsageError: for a column out of range, or a weight outside 0 to 1, which would exceed the clipping norm.
    """
    if y.shape != z.shape[:1] or y.is_floating_point() != weights:
        kind = "weights float64" if weights else "columns int64"
        raise UsageError(f"{len(z)} rows need as many {kind}, not {list(y.shape)} of {y.dtype}")
    maximum = 1 if weights else n_columns - 1
    is_valid = (y >= 0) & (y <= maximum)
    if not bool(is_valid.all()):
        row = int(is_valid.int().argmin())
        raise UsageError(f"row {row} has the label {y[row].item():g}; labels are 0 to {maximum}")
    with_count = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
    if not y.is_floating_point():
        return sum_groups(with_count, y, n_columns)
    share, first = y[:, None], torch.zeros(len(y), dtype=torch.int64)
    return sum_groups(with_count * (1 - share), first, n_columns) + sum_groups(with_count * share, first + 1, n_columns)


def sum_groups(rows: Tensor, group: Tensor, n: int) -> Tensor:
    """Return the sums [n, d] of rows [b, d] by group int64[b], on the CPU, since GPUs add in random order."""
    sums = torch.zeros(n, rows.shape[1], dtype=rows.dtype)
    return sums.index_add_(0, group.cpu(), rows.cpu()).to(rows.device)


def count_columns(n_outputs: int, kind: HeadKind = "classes") -> int:
    """Return the number of columns of class statistics: one per class, two for a number, 2k + 1 for k intervals."""
    return {"classes": n_outputs, "number": 2, "survival": 2 * n_outputs + 1}[kind]


def count_sums(n_columns: int, n_directions: int) -> int:
    """Return the length of packed statistics: each column's sum and count, and the variance of their noise."""
    return n_columns * (n_directions + 2)
