"""Units of privacy, rows or patients: how they are drawn, and the training rows of a batch of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wsi_fl.learning.examples import Examples, epoch_rows
from wsi_fl.types import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wsi_fl.learning.local import Batch
    from wsi_fl.privacy.cipher import CipherStream


@dataclass(frozen=True)
class Units:
    """The units of a site and their training rows.

    Attributes:
        kind: "row" or "patient".
        n: how many there are; public, and fixed before anything is known of their rows. A unit may have none.
        of_row: int64[rows], in [0, n): whose each training row is.
        max_rows: the most rows that one unit has in one batch, a public constant; None for all.
    """

    kind: str
    n: int
    of_row: NDArray[np.int64]
    max_rows: int | None = None

    @cached_property
    def _rows_of(self) -> list[NDArray[np.int64]]:
        order = np.argsort(self.of_row, kind="stable")
        return np.split(order, np.searchsorted(self.of_row[order], np.arange(1, self.n)))

    @cached_property
    def _each_a_row(self) -> bool:
        return np.array_equal(self.of_row, np.arange(self.n))

    def rows(self, chosen: NDArray[np.int64], sampler: CipherStream) -> NDArray[np.int64]:
        """Return int64[b], the rows of the chosen units; of one with more than `max_rows`, so many drawn at random."""
        if self._each_a_row:
            return chosen
        found = [self._some(self._rows_of[k], sampler) for k in chosen]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _some(self, rows: NDArray[np.int64], sampler: CipherStream) -> NDArray[np.int64]:
        if self.max_rows is None or len(rows) <= self.max_rows:
            return rows
        return rows[sampler.permutation(len(rows))[: self.max_rows]]

    def epoch(self, batch_size: int, epochs: int, *, sampler: CipherStream) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of the batches of `epochs` shuffled passes over the units."""
        for chosen in epoch_rows(self.n, batch_size, epochs, sampler=sampler):
            yield self.rows(chosen, sampler)

    def labelled(
        self, drawn: Iterator[tuple[Tensor, Tensor]], rows: list[NDArray[np.int64]], device: torch.device
    ) -> Iterator[Batch]:
        """Yield the batches of these rows; where units are patients, with the patient of each row."""
        if self.kind == "row":
            yield from drawn
            return
        import torch

        for (x, y), chosen in zip(drawn, rows, strict=True):
            yield x, y, torch.from_numpy(self.of_row[chosen]).to(device)

    def with_canaries(self, included: NDArray[np.bool_]) -> Units:
        """Return the units with canaries added, each a unit of its own; those that are not included have no row.

        The number of units, and so the sample rate and the number of steps, does not depend on the coins.

        Args:
            included: bool[m]; the rows of those come behind all others.
        """
        own = self.n + np.flatnonzero(included)
        return replace(self, n=self.n + len(included), of_row=np.concatenate([self.of_row, own]))


def rows_alone(n: int) -> Units:
    """Return n rows, each a unit."""
    return Units("row", n, np.arange(n))


def whole_patients(examples: Examples, max_rows: int | None, site: str) -> Units:
    """Return the patients of rows, each a unit; every row must have one."""
    _require_patients(examples.patient, site)
    names, which = np.unique(examples.patient, return_inverse=True)
    return Units("patient", len(names), which.astype(np.int64), max_rows)


def _require_patients(patient: NDArray[np.str_], site: str) -> None:
    """Refuse rows without a patient where the patient is the unit of privacy.

    Taken for a patient of its own such a row would be promised what may not hold: whom it comes from may have others.
    """
    if n := int((patient == "").sum()):
        raise UsageError(
            f"site {site}: {n} training rows have no patient, so privacy.unit = 'patient' cannot protect whom they "
            "come from; name the patients in the site's table of slides, or use privacy.unit = 'row'"
        )
