"""Which of the levels that a reader lists are a slide's own: the whole of the same picture, only smaller."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from PIL import Image

from wsi_fl.slides.reading.formats.source import Source

_ROUNDING_PX, _APART = 1.0, 0.02
"""A level's sides may be rounded by a pixel, and its two ratios differ by 2 %, as where tiles are filled up."""
_OF_LEVEL = re.compile(r"openslide\.level\[(\d+)\](.*)")


def own_levels(sizes_px: Sequence[tuple[int, int]], foreign: Collection[int] = ()) -> list[int]:
    """Return the numbers of the levels that show the whole of the largest, finest first, of each size the first.

    A level whose width and height are reduced by different ratios shows something else.

    Args:
        sizes_px: (width, height) of each level.
        foreign: numbers of levels that are known to be something else, such as masks.

    Example:
        >>> own_levels([(4096, 3072), (2048, 2048), (1024, 768), (1024, 768), (341, 256)])
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


class OwnLevels:
    """A source with some of the levels of another, by their numbers there; the first is the slide.

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
