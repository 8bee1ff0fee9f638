"""Which tiles give what to which patches, and when: the plan of a sweep, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.reading.native import pieces
from wsi_fl.slides.reading.tiff import TiledImage

Rows = NDArray[np.int64]


class Cuts(NamedTuple):
    """What is decoded and copied, strip after strip.

    Attributes:
        jobs: [j, 4] strip, tile, first part, end of parts; by strip and tile.
        parts: [p, 7] patch; first and end row, first and end column in the tile; row and column in the patch.
    """

    jobs: Rows
    parts: Rows

    def of(self, strip: int) -> Cuts:
        """Those of one strip, whose first part has number 0."""
        begin, end = np.searchsorted(self.jobs[:, 0], (strip, strip + 1))
        jobs = self.jobs[begin:end].copy()
        first, last = (int(jobs[0, 2]), int(jobs[-1, 3])) if len(jobs) else (0, 0)
        jobs[:, 2:] -= first
        return Cuts(jobs, self.parts[first:last])


def cut(image: TiledImage, at: Rows, patch: Rows, size_px: int, *, step: int, reach: int) -> Cuts:
    """The plan for patches that are taken in strips.

    A tile is decoded by the first strip that wants it and gives to all strips up to `reach` further on; of those
    beyond, again the first decodes it.

    Args:
        image: where the tiles lie.
        at: (x, y) [n, 2] of patches in the image's pixels; they may reach over its edges.
        patch: [n] their numbers, ascending; number // step is the strip.
        size_px: their side.
        step: patches in a strip.
        reach: strips.

    Example:
        >>> tiles = np.arange(4)
        >>> image = TiledImage((8, 8), (4, 4), tiles, tiles, b"", rgb=False)
        >>> cut(image, np.array([[0, 0], [2, 4]]), np.arange(2), 4, step=1, reach=1).jobs.tolist()
        [[0, 0, 0, 1], [1, 2, 1, 2], [1, 3, 2, 3]]
    """
    across, first_across, n_across = _along(at[:, 0], size_px, image.tile_px[0], image.size_px[0])
    down, first_down, n_down = _along(at[:, 1], size_px, image.tile_px[1], image.size_px[1])
    n = n_across * n_down
    of = np.repeat(np.arange(len(at)), n)
    k = np.arange(len(of)) - np.repeat(np.cumsum(n) - n, n)
    column = across[first_across[of] + k % n_across[of]]
    row = down[first_down[of] + k // n_across[of]]
    tile = row[:, 0] * image.n_columns + column[:, 0]
    strip = patch[of] // step

    order = np.argsort(tile, kind="stable")
    tile, strip = tile[order], strip[order]
    begins = _changes(tile)
    begins = _changes(tile, (strip - strip[_last_true(begins)]) // (reach + 1))
    owner = strip[_last_true(begins)]

    again = np.lexsort((tile, owner))
    order, owner, tile = order[again], owner[again], tile[again]
    first = np.flatnonzero(begins[again])
    end = np.append(first, len(order))[1:]
    parts = np.stack(
        [patch[of], row[:, 1], row[:, 2], column[:, 1], column[:, 2], row[:, 3], column[:, 3]], axis=1
    )[order]
    return Cuts(np.stack([owner[first], tile[first], first, end], axis=1), parts)


def _along(start: Rows, size_px: int, tile_px: int, extent_px: int) -> tuple[Rows, Rows, Rows]:
    """Along one axis: (pieces [m, 4] as tile, its first and end pixel, pixel of the patch; for patches that start there
    [n] the first of its pieces, and how many it has)."""
    known, of = np.unique(start, return_inverse=True)
    found = [
        [(piece.number, piece.of.start, piece.of.stop, piece.to.start) for piece in some]
        for some in (pieces(at, size_px, tile_px, extent_px) for at in known.tolist())
    ]
    table = np.array([piece for some in found for piece in some], np.int64).reshape(-1, 4)
    bounds = np.cumsum([0, *map(len, found)])
    return table, bounds[of], np.diff(bounds)[of]


def _changes(*columns: Rows) -> NDArray[np.bool_]:
    """Where a row differs from the one before; the first does."""
    changes = np.ones(len(columns[0]), bool)
    changes[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return changes


def _last_true(begins: NDArray[np.bool_]) -> Rows:
    """Of each place, the last one at or before it that is true."""
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
