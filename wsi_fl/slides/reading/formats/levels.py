"""Selection of the levels of a slide among those that a reader lists: reduced copies of the whole picture."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import isclose

from PIL import Image

from wsi_fl.slides.reading.formats.source import Source

_ROUNDING_PX, _APART = 1.0, 0.02
"""Tolerances: a level's sides may be rounded by a pixel, and its two ratios differ by 2 %, as in padded tiles."""
_LARGEST_RATIO = 1 << 10
"""Largest reduction of a level with padded tiles; beyond, a level is one tile."""
_OF_LEVEL = re.compile(r"openslide\.level\[(\d+)\](.*)")


def own_levels(sizes_px: Sequence[tuple[int, int]], foreign: Collection[int] = ()) -> list[int]:
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
        k for at, k in enumerate(numbers) if sizes_px[k] not in sizes[:at] and _fits(sizes[0], sizes_px[k])
    ]


def _fits(whole: tuple[int, int], level: tuple[int, int]) -> bool:
    """Return whether one ratio explains both sides of a level."""
    if min(level) < 1:
        return False
    ratios = [side / small for side, small in zip(whole, level, strict=True)]
    if abs(ratios[0] - ratios[1]) <= _APART * max(ratios):
        return True
    least = [side / (small + _ROUNDING_PX) for side, small in zip(whole, level, strict=True)]
    most = [
        side / max(small - _ROUNDING_PX, _ROUNDING_PX / 2) for side, small in zip(whole, level, strict=True)
    ]
    return max(least) <= min(most)


def padded_levels(source: Source) -> set[int]:
    """Return the numbers of the levels of a source that are padded to whole tiles.

    The reduction of a level is the ratio of its size to that of the slide. Where the size includes tiles beyond the
    picture, that ratio is wrong, and tissue found on the level would lie elsewhere. If one level is padded, so are all
    whose size fits both. Levels whose reduction OpenSlide knows otherwise, as with some scanners, are none of these.
    """
    sizes, downsamples = source.level_dimensions, source.level_downsamples
    tiles = getattr(source, "tiles_px", ()) or _tiles_of_openslide(source.properties, len(sizes))
    (width, height), alike = sizes[0], []
    if len(tiles) == len(sizes):
        by_size = [(width / w + height / h) / 2 for w, h in sizes]
        alike = [k for k in range(len(sizes)) if tiles[k] == tiles[0] and isclose(by_size[k], downsamples[k])]
    if not any(is_padded(sizes[0], sizes[k], tiles[k]) for k in alike):
        return set()
    return {
        k for k in alike if padding_ratios(sizes[0], sizes[k], tiles[k]) - _picture_ratios(sizes[0], sizes[k])
    }


def is_padded(whole: tuple[int, int], level: tuple[int, int], tile: tuple[int, int]) -> bool:
    """Return whether the size of a level fits its tiles but no picture, all as (width, height).

    Example:
        >>> is_padded((2304, 2304), (1280, 1280), (256, 256)), is_padded((2304, 2304), (576, 576), (64, 64))
        (True, False)
    """
    return bool(padding_ratios(whole, level, tile)) and not _picture_ratios(whole, level)


def _picture_ratios(whole: tuple[int, int], level: tuple[int, int]) -> set[int]:
    """Return the possible whole-number reductions of a level whose size is that of its picture."""
    axes = list(zip(whole, level, strict=True))
    nearest = {max(1, round(side / max(1, small))) for side, small in axes}
    return {n for n in nearest if all(abs(side / n - small) <= _ROUNDING_PX for side, small in axes)}


def padding_ratios(whole: tuple[int, int], level: tuple[int, int], tile: tuple[int, int]) -> set[int]:
    """Return the possible whole-number reductions of a level whose size is that of all its tiles.

    Example:
        >>> padding_ratios((2304, 2304), (1280, 1280), (256, 256)), padding_ratios((900, 900), (850, 850), (256, 256))
        ({2}, set())
    """
    axes = list(zip(whole, level, tile, strict=True))
    if min(*level, *tile) < 1:
        return set()
    most = min(_LARGEST_RATIO, *(-(-side // max(1, small - step)) for side, small, step in axes))
    return {
        n
        for n in range(2, most + 1)
        if all(step * -(-side // (n * step)) == small for side, small, step in axes)
    }


def _tiles_of_openslide(properties: Mapping[str, str], n: int) -> list[tuple[int, int]]:
    """Return (width, height) of the tiles of n levels by OpenSlide's properties; [] if one is missing."""
    sides = [
        [properties.get(f"openslide.level[{k}].tile-{side}") for side in ("width", "height")]
        for k in range(n)
    ]
    return [(int(w), int(h)) for w, h in sides if w and h]


class OwnLevels:
    """A source with selected levels of another, by their numbers there; the first is the slide.

    Attributes:
        source, numbers: as given.
    """

    def __init__(self, source: Source, numbers: Sequence[int]) -> None:
        self.source, self.numbers = source, tuple(numbers)
        self.level_dimensions = tuple(source.level_dimensions[k] for k in numbers)
        self.level_downsamples = tuple(source.level_downsamples[k] for k in numbers)
        self.dimensions = self.level_dimensions[0]
        self.properties: Mapping[str, str] = dict(self._renumbered(source.properties))
        self.fill: tuple[int, int, int] | None = getattr(source, "fill", None)

    def _renumbered(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Name the properties of levels by their new numbers."""
        renamed = {}
        for key, value in properties.items():
            match = _OF_LEVEL.fullmatch(key)
            if match is None:
                renamed[key] = value
            elif int(match[1]) in self.numbers:
                renamed[f"openslide.level[{self.numbers.index(int(match[1]))}]{match[2]}"] = value
        return renamed

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """See `Source`."""
        return self.source.read_region(location, self.numbers[level], size)

    def close(self) -> None:
        self.source.close()
