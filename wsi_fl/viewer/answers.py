"""What the viewer's server answers to a path behind its token: files of the page, documents and tiles.

Paths are compared with a short list of forms; slides are numbers, and no path from a request ever reaches the file
system.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from wsi_fl.system import jpeg
from wsi_fl.viewer.gallery import Gallery
from wsi_fl.viewer.layers import encoded

_QUALITY = 85
_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
    "viewer.css": ("viewer.css", "text/css; charset=utf-8"),
    "viewer.js": ("viewer.js", "text/javascript; charset=utf-8"),
    "panels.js": ("panels.js", "text/javascript; charset=utf-8"),
    "drawing.js": ("drawing.js", "text/javascript; charset=utf-8"),
    "openseadragon.js": ("openseadragon.min.js", "text/javascript; charset=utf-8"),
}
_JSON = "application/json; charset=utf-8"
_NUMBER = "(0|[1-9][0-9]{0,6})"

HttpResponse = tuple[HTTPStatus, str, bytes]
"""Status, content type and content."""

Awaited = Callable[[], bool]
"""Whether somebody still waits for the answer."""


class Refused(Exception):
    """A request that gets no answer but its status, and in one line why."""

    def __init__(self, status: HTTPStatus, why: str = "") -> None:
        super().__init__(why or status.phrase)
        self.status = status


def answer(gallery: Gallery, path: str, awaited: Awaited) -> HttpResponse:
    """Return what a path behind the token asks for.

    Raises:
        Refused: when it has none of the known forms, or there is no such slide, layer or tile.
        NotAwaited: when nobody waits for a tile any more.
        WsiFlError: when a slide or a layer cannot be read.
    """
    if path in _FILES:
        name, kind = _FILES[path]
        return HTTPStatus.OK, kind, _content(name)
    for pattern, route in _ROUTES:
        if (found := pattern.fullmatch(path)) is not None:
            return route(gallery, awaited, *map(int, found.groups()))
    raise Refused(HTTPStatus.NOT_FOUND)


def document(said: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    """Return a JSON answer."""
    return status, _JSON, encoded(said)


def _catalogue(gallery: Gallery, awaited: Awaited) -> HttpResponse:
    return document(gallery.catalogue())


def _slide(gallery: Gallery, awaited: Awaited, number: int) -> HttpResponse:
    if (said := gallery.describe(number)) is None:
        raise Refused(HTTPStatus.NOT_FOUND)
    return document(said)


def _layer(gallery: Gallery, awaited: Awaited, number: int, which: int) -> HttpResponse:
    if (text := gallery.layer(number, which)) is None:
        raise Refused(HTTPStatus.NOT_FOUND)
    return HTTPStatus.OK, _JSON, text


def _tile(gallery: Gallery, awaited: Awaited, number: int, level: int, column: int, row: int) -> HttpResponse:
    if (pixels := gallery.tile(number, (level, column, row), awaited)) is None:
        raise Refused(HTTPStatus.NOT_FOUND)
    return HTTPStatus.OK, "image/jpeg", jpeg.encode(pixels, _QUALITY)


_ROUTES: tuple[tuple[re.Pattern[str], Callable[..., HttpResponse]], ...] = (
    (re.compile(r"slides\.json"), _catalogue),
    (re.compile(rf"slides/{_NUMBER}\.json"), _slide),
    (re.compile(rf"slides/{_NUMBER}/layers/{_NUMBER}\.json"), _layer),
    (re.compile(rf"slides/{_NUMBER}/tiles/{_NUMBER}/{_NUMBER}_{_NUMBER}\.jpg"), _tile),
)


@cache
def _content(name: str) -> bytes:
    """A file of the page, by a name of this module and never of a request."""
    return (files("wsi_fl.viewer") / "page" / name).read_bytes()
