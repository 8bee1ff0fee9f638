"""The slides of a viewer by number, with a cache of open ones."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from wsi_fl.slides.reading.probe import check_opens_safely
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.system import jpeg
from wsi_fl.types import WsiFlError
from wsi_fl.viewer.tiles import TILE_PX, Pyramid, RecentValues, TileReader

_OPEN_SLIDES = 8
_LAYERS_BYTES = 64 << 20
_JPEG_QUALITY = 85

Layer = Mapping[str, Any]
"""The document of a layer without its name and kind. All coordinates are integer level-0 pixels, [x, y, x, y, …] in one
list."""


def encode_json(document: Mapping[str, Any]) -> bytes:
    """Return a document as JSON."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def finite_or_none(number: float | None) -> float | None:
    """Return a finite number or None, as JSON needs."""
    return number if number is not None and isfinite(number) else None


@dataclass(frozen=True)
class Overlay:
    """A layer over a slide."""

    name: str
    """Its title on the page, the same for all slides."""
    kind: Literal["outlines", "patches", "values"]
    """Lines, squares coloured by group, or squares coloured by value."""
    draw: Callable[[Slide], Layer]
    """The open slide → the document, at the first request."""


@dataclass(frozen=True)
class Exhibit:
    """One slide of the list."""

    name: str
    path: Path | None
    """None for a slide that is not shown."""
    note: str = ""
    """Text beside its name, or the reason why it is not shown."""
    score: float | None = None
    """Sort key of the list."""
    mpp_override: float | None = None
    overlays: Sequence[Overlay] = ()
    """Its layers, in drawing order."""


@dataclass
class _OpenSlide:
    """A slide while it is opened, or open; `opening` locks only this slide."""

    opening: Lock = field(default_factory=Lock)
    slide: Slide | None = None
    readers: int = 0


class Gallery:
    """The slides of a viewer; `patients_of` are the real sites of their patients. All methods are thread-safe."""

    def __init__(self, title: str, exhibits: Sequence[Exhibit], patients_of: Sequence[str] = ()) -> None:
        self.title, self.exhibits, self.patients_of = title, tuple(exhibits), tuple(patients_of)
        self._open_slides: OrderedDict[int, _OpenSlide] = OrderedDict()
        self._lock = Lock()
        self._tiles = TileReader()
        self._layers: RecentValues[bytes] = RecentValues(_LAYERS_BYTES)

    def list_slides(self) -> bytes:
        """Return the list of slides as JSON."""
        slides = [
            {
                "name": exhibit.name,
                "note": exhibit.note,
                "score": finite_or_none(exhibit.score),
                "shown": exhibit.path is not None,
            }
            for exhibit in self.exhibits
        ]
        return encode_json({"title": self.title, "patients_of": self.patients_of, "slides": slides})

    def describe_slide(self, number: int) -> bytes | None:
        """Return size, resolution and layers of a slide as JSON; None where there is no such slide."""
        if (exhibit := self._find_exhibit(number)) is None:
            return None
        with self.borrow_slide(number) as slide:
            pyramid = Pyramid(slide.size_l0)
            mpp: float | None = None
            with suppress(WsiFlError):
                mpp = slide.mpp
            return encode_json(
                {
                    "name": exhibit.name,
                    "size": slide.size_l0,
                    "mpp": mpp,
                    "tile": TILE_PX,
                    "first": pyramid.first_level,
                    "last": pyramid.last_level,
                    "layers": [{"name": overlay.name, "kind": overlay.kind} for overlay in exhibit.overlays],
                }
            )

    def render_layer(self, number: int, layer_index: int) -> bytes | None:
        """Return a layer of a slide as JSON, drawn once; None where there is no such slide or layer."""
        exhibit = self._find_exhibit(number)
        if exhibit is None or not 0 <= layer_index < len(exhibit.overlays):
            return None
        draw = exhibit.overlays[layer_index].draw

        def render_json() -> bytes:
            with self.borrow_slide(number) as slide:
                return encode_json(draw(slide))

        return self._layers.get_or_make((number, layer_index), render_json)

    def render_tile(self, number: int, level: int, column: int, row: int, awaited: Callable[[], bool]) -> bytes | None:
        """Return a tile as JPEG; None where there is no such slide or tile.

        Raises:
            NotAwaited: when the client has hung up.
            WsiFlError: when the slide cannot be decoded there.
        """
        if self._find_exhibit(number) is None:
            return None
        with self.borrow_slide(number) as slide:
            pixels = self._tiles.read(slide, level, column, row, awaited)
        return None if pixels is None else jpeg.encode(pixels, _JPEG_QUALITY)

    def open_first(self) -> None:
        """Open the first slide of the page in advance; its errors are reported on request."""
        scores = [
            (finite_or_none(exhibit.score), -k) for k, exhibit in enumerate(self.exhibits) if exhibit.path is not None
        ]
        if scores:
            _, number = max((-inf if score is None else score, k) for score, k in scores)
            with suppress(Exception), self.borrow_slide(-number):
                pass

    def _find_exhibit(self, number: int) -> Exhibit | None:
        exhibit = self.exhibits[number] if 0 <= number < len(self.exhibits) else None
        return None if exhibit is None or exhibit.path is None else exhibit

    @contextmanager
    def borrow_slide(self, number: int) -> Iterator[Slide]:
        """Lend an open slide of the list, and close the least recently used idle ones."""
        with self._lock:
            open_slide = self._open_slides.setdefault(number, _OpenSlide())
            self._open_slides.move_to_end(number)
            open_slide.readers += 1
        try:
            with open_slide.opening:
                if open_slide.slide is None:
                    exhibit = self.exhibits[number]
                    assert exhibit.path is not None
                    # OpenSlide opens fast and caches few tiles; native tiles pay off where all patches are read.
                    check_opens_safely(exhibit.path, exhibit.mpp_override, "openslide")
                    open_slide.slide = Slide(exhibit.path, exhibit.mpp_override, "openslide")
            yield open_slide.slide
        finally:
            with self._lock:
                open_slide.readers -= 1
                self._close_idle(_OPEN_SLIDES)

    def close(self) -> None:
        """Close all idle slides."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, max_open: int) -> None:
        idle = [number for number, open_slide in self._open_slides.items() if not open_slide.readers]
        for number in idle[: max(0, len(self._open_slides) - max_open)]:
            if (slide := self._open_slides.pop(number).slide) is not None:
                slide.close()
