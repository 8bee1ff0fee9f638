"""The slides of a viewer by number, with a cache of open ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
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


class Gallery:
    """The slides of a viewer; `patients_of` are the real sites of their patients. All methods are thread-safe."""

    def __init__(self, title: str, exhibits: Sequence[Exhibit], patients_of: Sequence[str] = ()) -> None:
        self.title, self.exhibits, self.patients_of = title, tuple(exhibits), tuple(patients_of)
        self._open_slides: RecentValues[Slide] = RecentValues(_OPEN_SLIDES)
        self._layers: RecentValues[bytes] = RecentValues(_LAYERS_BYTES, len)
        self._tiles = TileReader()

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
        if (slide := self.open_slide(number)) is None:
            return None
        exhibit, pyramid = self.exhibits[number], Pyramid(slide.size_l0)
        mpp: float | None = None
        with suppress(WsiFlError):
            mpp = slide.mpp
        document = {
            "name": exhibit.name,
            "size": slide.size_l0,
            "mpp": mpp,
            "tile": TILE_PX,
            "first": pyramid.first_level,
            "last": pyramid.last_level,
            "layers": [{"name": overlay.name, "kind": overlay.kind} for overlay in exhibit.overlays],
        }
        return encode_json(document)

    def render_layer(self, number: int, layer_index: int) -> bytes | None:
        """Return a layer of a slide as JSON, drawn once; None where there is no such slide or layer."""
        if (slide := self.open_slide(number)) is None or layer_index >= len(self.exhibits[number].overlays):
            return None
        overlay = self.exhibits[number].overlays[layer_index]
        return self._layers.get_or_make((number, layer_index), lambda: encode_json(overlay.draw(slide)))

    def render_tile(self, number: int, level: int, column: int, row: int, awaited: Callable[[], bool]) -> bytes | None:
        """Return a tile as JPEG; None where there is no such slide or tile.

        Raises:
            NotAwaited: when the client has hung up.
            WsiFlError: when the slide cannot be decoded there.
        """
        if (slide := self.open_slide(number)) is None:
            return None
        pixels = self._tiles.read(slide, level, column, row, awaited)
        return None if pixels is None else jpeg.encode(pixels, _JPEG_QUALITY)

    def open_first(self) -> None:
        """Open the first slide of the page in advance; its errors are reported on request."""
        scores = [
            (finite_or_none(exhibit.score), -k) for k, exhibit in enumerate(self.exhibits) if exhibit.path is not None
        ]
        if scores:
            _, number = max((-inf if score is None else score, k) for score, k in scores)
            with suppress(Exception):
                self.open_slide(-number)

    def open_slide(self, number: int) -> Slide | None:
        """Return an open slide of the list; None where there is no such slide.

        The most recent ones stay open. Another one closes when it is collected, that is after its last reader.
        """
        exhibit = self.exhibits[number] if number < len(self.exhibits) else None
        if exhibit is None or (path := exhibit.path) is None:
            return None

        def open_safely() -> Slide:
            # OpenSlide opens fast and caches few tiles; native tiles pay off where all patches are read.
            check_opens_safely(path, exhibit.mpp_override, "openslide")
            return Slide(path, exhibit.mpp_override, "openslide")

        return self._open_slides.get_or_make(number, open_safely)
