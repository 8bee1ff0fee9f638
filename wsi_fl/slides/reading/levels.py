"""Which level of a pyramid answers a question, and where in it."""

from __future__ import annotations

from dataclasses import dataclass

_TOLERANCE = 0.01
_MAX_DRIFT_PX = 0.5
"""A patch whose far edge drifts by less than this is taken as it is instead of being resampled."""
_WHOLE = 1e-6


@dataclass(frozen=True)
class Levels:
    """Level-0 pixels per pixel of each level, finest first; a scale is level-0 pixels per output pixel."""

    downsamples: tuple[float, ...]

    def coarsest_for(self, scale: float) -> int:
        """The coarsest level that does not lose resolution at `scale`.

        Example:
            >>> [Levels((1.0, 4.0, 16.0)).coarsest_for(scale) for scale in (0.5, 3.9, 3.97, 20)]
            [0, 0, 1, 2]
        """
        fine_enough = [k for k, d in enumerate(self.downsamples) if d <= scale * (1 + _TOLERANCE)]
        return fine_enough[-1] if fine_enough else 0

    def unchanged(self, level: int, scale: float, size_px: int) -> bool:
        """Whether so long a side takes the level's own pixels instead of resampled ones."""
        return abs(scale / self.downsamples[level] - 1) * size_px < _MAX_DRIFT_PX

    def reduction(self, level: int, scale: float, size_px: int) -> float:
        """Pixels of the level per output pixel; the whole number where a side that long drifts too little to tell."""
        reduction = scale / self.downsamples[level]
        drift_px = abs(round(reduction) - reduction) * size_px
        return float(round(reduction)) if drift_px < _MAX_DRIFT_PX and reduction > 1 else reduction

    def nearest_corner(self, level: int, xy_l0: tuple[float, float]) -> tuple[int, int]:
        """The corner in level-0 pixels nearest to one of the level's pixels: between them OpenSlide would blend."""
        downsample = self.downsamples[level]
        x, y = (round(round(v / downsample) * downsample) for v in xy_l0)
        return x, y

    def position(self, level: int, corner: tuple[int, int]) -> tuple[int, int] | None:
        """A level-0 corner in pixels of the level; None where it falls between them."""
        x, y = (v / self.downsamples[level] for v in corner)
        column, row = round(x), round(y)
        return (column, row) if max(abs(x - column), abs(y - row)) < _WHOLE else None
