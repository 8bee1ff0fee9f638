"""Selection of the levels of a slide among those that a reader lists: reduced copies of the whole picture."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import isclose

from PIL import Image

from wsi_fl.slides.reading.formats.source import PixelSource

_ROUNDING_PX, _MAX_RATIO_DIFFERENCE = 1.0, 0.02
"""Tolerances: a level's sides may be rounded by a pixel, and its two ratios differ by 2 %, as in padded tiles."""
_MAX_RATIO = 1 << 10
"""Largest reduction of a level with padded tiles; beyond, a level is one tile."""
_OF_LEVEL = re.compile(r"openslide\.level\[(\d+)\](.*)")


def select_levels(sizes_px: Sequence[tuple[int, int]], foreign: Collection[int] = ()) -> list[int]:
    """Return the numbers of the levels that show the same as the largest, finest first, of each size the first.

    A level with different reductions of width and height shows something else.

    Args:
        sizes_px: (width, height) of each level.
        foreign: numbers of levels of something else, such as masks.

    Example:
        >>> select_levels([(4096, 3072), (2048, 2048), (1024, 768), (1024, 768), (341, 256)])
        [0, 2, 4]
    """
    numbers = [k for k in range(len(sizes_px)) if k not in foreign]
    numbers.sort(key=lambda k: -sizes_px[k][0] * sizes_px[k][1])
    sizes = [sizes_px[k] for k in numbers]
    return [
        k
        for position, k in enumerate(numbers)
        if sizes_px[k] not in sizes[:position] and _fits_ratio(sizes[0], sizes_px[k])
    ]


def _fits_ratio(slide_size: tuple[int, int], level_size: tuple[int, int]) -> bool:
    """Return whether one ratio explains both sides of a level."""
    if min(level_size) < 1:
        return False
    ratios = [side / level_side for side, level_side in zip(slide_size, level_size, strict=True)]
    if abs(ratios[0] - ratios[1]) <= _MAX_RATIO_DIFFERENCE * max(ratios):
        return True
    min_ratios = [side / (level_side + _ROUNDING_PX) for side, level_side in zip(slide_size, level_size, strict=True)]
    max_ratios = [
        side / max(level_side - _ROUNDING_PX, _ROUNDING_PX / 2)
        for side, level_side in zip(slide_size, level_size, strict=True)
    ]
    return max(min_ratios) <= min(max_ratios)


def find_padded_levels(source: PixelSource) -> set[int]:
    """Return the numbers of the levels of a source that are padded to whole tiles.

    The reduction of a level is the ratio of its size to that of the slide. Where the size includes tiles beyond the
    picture, that ratio is wrong, and tissue found on the level would lie elsewhere. If one level is padded, so are all
    whose size fits both. Levels whose reduction OpenSlide knows otherwise, as with some scanners, are none of these.
    """
    sizes, downsamples = source.level_dimensions, source.level_downsamples
    tiles = getattr(source, "tiles_px", ()) or _read_tile_sizes(source.properties, len(sizes))
    candidates = []
    if len(tiles) == len(sizes):
        size_ratios = [_mean_ratio(sizes[0], size) for size in sizes]
        candidates = [k for k in range(len(sizes)) if tiles[k] == tiles[0] and isclose(size_ratios[k], downsamples[k])]
    if not any(is_padded(sizes[0], sizes[k], tiles[k]) for k in candidates):
        return set()
    return {k for k in candidates if padding_ratios(sizes[0], sizes[k], tiles[k]) - _picture_ratios(sizes[0], sizes[k])}


def is_padded(slide_size: tuple[int, int], level_size: tuple[int, int], tile_size: tuple[int, int]) -> bool:
    """Return whether the size of a level fits its tiles but no picture, all as (width, height).

    Example:
        >>> is_padded((2304, 2304), (1280, 1280), (256, 256)), is_padded((2304, 2304), (576, 576), (64, 64))
        (True, False)
    """
    return bool(padding_ratios(slide_size, level_size, tile_size)) and not _picture_ratios(slide_size, level_size)


def _picture_ratios(slide_size: tuple[int, int], level_size: tuple[int, int]) -> set[int]:
    """Return the possible whole-number reductions of a level whose size is that of its picture."""
    axes = list(zip(slide_size, level_size, strict=True))
    ratios = {max(1, round(side / max(1, level_side))) for side, level_side in axes}
    return {n for n in ratios if all(abs(side / n - level_side) <= _ROUNDING_PX for side, level_side in axes)}


def padding_ratios(slide_size: tuple[int, int], level_size: tuple[int, int], tile_size: tuple[int, int]) -> set[int]:
    """Return the possible whole-number reductions of a level whose size is that of all its tiles.

    Example:
        >>> padding_ratios((2304, 2304), (1280, 1280), (256, 256)), padding_ratios((900, 900), (850, 850), (256, 256))
        ({2}, set())
    """
    axes = list(zip(slide_size, level_size, tile_size, strict=True))
    if min(*level_size, *tile_size) < 1:
        return set()
    max_ratio = min(_MAX_RATIO, *(-(-side // max(1, level_side - step)) for side, level_side, step in axes))
    return {
        n
        for n in range(2, max_ratio + 1)
        if all(step * -(-side // (n * step)) == level_side for side, level_side, step in axes)
    }


def _read_tile_sizes(properties: Mapping[str, str], n_levels: int) -> list[tuple[int, int]]:
    """Return (width, height) of the tiles of n levels by OpenSlide's properties; [] if one is missing."""
    sides = [
        [properties.get(f"openslide.level[{k}].tile-{side}") for side in ("width", "height")] for k in range(n_levels)
    ]
    return [(int(w), int(h)) for w, h in sides if w and h]


def correct_downsample(slide_size: tuple[int, int], level_size: tuple[int, int], downsample: float) -> float:
    """Return the reduction of a level, which readers take to be the mean of both axes' ratios.

    Halving drops what is left over, and that is much of a narrow slide's short side: the mean is then several pixels
    off at the end of the long one, where the whole number that explains both sides within a pixel is right.

    Args:
        slide_size, level_size: (width, height) in pixels.
        downsample: the reader's.

    Example:
        >>> correct_downsample((40000, 1900), (625, 29), 64.76), correct_downsample((4096, 3071), (1024, 767), 4.002)
        (64.0, 4.002)
    """
    ratios, mean = _picture_ratios(slide_size, level_size), _mean_ratio(slide_size, level_size)
    if len(ratios) != 1 or not isclose(mean, downsample, rel_tol=1e-3):  # else a scanner states it
        return downsample
    drift_px = abs(downsample / min(ratios) - 1) * max(level_size)
    return float(min(ratios)) if drift_px > _ROUNDING_PX else downsample


def _mean_ratio(slide_size: tuple[int, int], level_size: tuple[int, int]) -> float:
    return sum(side / max(1, level_side) for side, level_side in zip(slide_size, level_size, strict=True)) / 2


class SelectedLevels:
    """A source with selected levels of another, by their numbers there; the first is the slide.

    Attributes:
        source, numbers: as given.
    """

    def __init__(self, source: PixelSource, numbers: Sequence[int]) -> None:
        self.source, self.numbers = source, tuple(numbers)
        self.level_dimensions = tuple(source.level_dimensions[k] for k in numbers)
        self.dimensions = self.level_dimensions[0]
        self._source_downsamples = tuple(source.level_downsamples[k] for k in numbers)
        self.level_downsamples = tuple(
            correct_downsample(self.dimensions, size, downsample)
            for size, downsample in zip(self.level_dimensions, self._source_downsamples, strict=True)
        )
        self.properties: Mapping[str, str] = dict(self._renumber_properties(source.properties))
        self.fill: tuple[int, int, int] | None = getattr(source, "fill", None)

    def _renumber_properties(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Name the properties of levels by their new numbers."""
        numbered = {}
        for key, value in properties.items():
            match = _OF_LEVEL.fullmatch(key)
            if match is None:
                numbered[key] = value
            elif int(match[1]) in self.numbers:
                numbered[f"openslide.level[{self.numbers.index(int(match[1]))}]{match[2]}"] = value
        return numbered

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """See `Source`."""
        downsample, source_downsample = self.level_downsamples[level], self._source_downsamples[level]
        if downsample != source_downsample:
            x, y = (round(round(v / downsample) * source_downsample) for v in location)
            location = (x, y)
        return self.source.read_region(location, self.numbers[level], size)

    def close(self) -> None:
        self.source.close()
