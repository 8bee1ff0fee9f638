"""Which tiles give what to which patches, and when: the plan of a sweep, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl.slides.native import pieces
from wsi_fl.slides.tiff import TiledImage

Rows = NDArray[np.int64]


class Cuts(NamedTuple):
    """What is decoded and copied, strip after strip.

    Attributes:
        jobs: [j, 5] strip, first tile, tiles side by side, first part, end of parts; by strip and tile.
        parts: [p, 7] patch; first and end row, first and end column in the tile; row and column in the patch. Several
            tiles give all their columns.
    """

    jobs: Rows
    parts: Rows

    def of(self, strip: int) -> tuple[list[list[int]], list[list[int]]]:
        """(jobs, parts) of one strip, whose first part has number 0."""
        begin, end = np.searchsorted(self.jobs[:, 0], (strip, strip + 1))
        jobs = self.jobs[begin:end].copy()
        if not len(jobs):
            return [], []
        first, last = int(jobs[0, 3]), int(jobs[-1, 4])
        jobs[:, 3:] -= first
        return jobs.tolist(), self.parts[first:last].tolist()


def cut(
    image: TiledImage, at: Rows, patch: Rows, size_px: int, *, step: int, reach: int, together: int = 1
) -> Cuts:
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
        together: whole tiles side by side that are taken at once, which is faster to copy; for patches that do not
            overlap, as others would have to agree on which.

    Example:
        >>> tiles = np.arange(4)
        >>> image = TiledImage((8, 8), (4, 4), tiles, tiles, b"", rgb=False)
        >>> cut(image, np.array([[0, 0], [2, 4]]), np.arange(2), 4, step=1, reach=1).jobs.tolist()
        [[0, 0, 1, 0, 1], [1, 2, 1, 1, 2], [1, 3, 1, 2, 3]]
    """
    across, first_across, n_across = _along(at[:, 0], size_px, image.tile_px[0], image.size_px[0], together)
    down, first_down, n_down = _along(at[:, 1], size_px, image.tile_px[1], image.size_px[1], 1)
    n = n_across * n_down
    of = np.repeat(np.arange(len(at)), n)
    k = np.arange(len(of)) - np.repeat(np.cumsum(n) - n, n)
    column = across[first_across[of] + k % n_across[of]]
    row = down[first_down[of] + k // n_across[of]]
    tile, tiles = row[:, 0] * image.n_columns + column[:, 0], column[:, 1]
    strip = patch[of] // step

    order = np.argsort(tile * (together + 1) + tiles, kind="stable")
    tile, tiles, strip = tile[order], tiles[order], strip[order]
    begins = _changes(tile, tiles)
    begins = _changes(tile, tiles, (strip - strip[_last_true(begins)]) // (reach + 1))
    owner = strip[_last_true(begins)]

    again = np.lexsort((np.cumsum(begins), tile, owner))
    order, owner, tile, tiles = order[again], owner[again], tile[again], tiles[again]
    first = np.flatnonzero(begins[again])
    end = np.append(first, len(order))[1:]
    parts = np.stack(
        [patch[of], row[:, 2], row[:, 3], column[:, 2], column[:, 3], row[:, 4], column[:, 4]], axis=1
    )[order]
    return Cuts(np.stack([owner[first], tile[first], tiles[first], first, end], axis=1), parts)


def _along(start: Rows, size_px: int, tile_px: int, extent_px: int, together: int) -> tuple[Rows, Rows, Rows]:
    """Along one axis: (pieces [m, 5] as first tile, tiles, their first and end pixel, pixel of the patch; for patches
    that start there [n] the first of its pieces, and how many it has)."""
    known, of = np.unique(start, return_inverse=True)
    found: list[list[int]] = []
    ends = [0]
    for at in known.tolist():
        for number, taken, to, _ in pieces(at, size_px, tile_px, extent_px):
            whole = taken == slice(0, tile_px)
            if whole and len(found) > ends[-1] and found[-1][2:4] == [0, tile_px] and found[-1][1] < together:
                found[-1][1] += 1
            else:
                found.append([number, 1, taken.start, taken.stop, to.start])
        ends.append(len(found))
    table = np.array(found, np.int64).reshape(-1, 5)
    bounds = np.array(ends, np.int64)
    return table, bounds[of], np.diff(bounds)[of]


def _changes(*columns: Rows) -> NDArray[np.bool_]:
    """Where a row differs from the one before; the first does."""
    changes = np.ones(len(columns[0]), bool)
    changes[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return changes


def _last_true(begins: NDArray[np.bool_]) -> Rows:
    """Of each place, the last one at or before it that is true."""
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
