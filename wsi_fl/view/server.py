"""The viewer's server: read-only, on this machine alone, behind a random token in the address.

Whoever is logged in on the same machine can reach 127.0.0.1, and a page of another origin can make a browser ask it
(DNS rebinding). So every request must carry the token and name this address as its Host, no answer may be read by
another origin, and the page may ask for nothing but this server. Paths are compared with a short list of forms; slides
are numbers, and no path from a request ever reaches the file system.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socket import SHUT_RDWR, socket
from socketserver import TCPServer
from typing import Any

from wsi_fl.system import jpeg
from wsi_fl.types import UsageError, WsiFlError, one_line
from wsi_fl.view.gallery import Gallery
from wsi_fl.view.pyramid import read_tile

ADDRESS = "127.0.0.1"
USUAL_PORT = 8642
_QUALITY = 85
_IDLE_S = 120
"""Seconds after which a connection without a request ends."""
_TOKEN_BYTES = 32
_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
    "viewer.css": ("viewer.css", "text/css; charset=utf-8"),
    "viewer.js": ("viewer.js", "text/javascript; charset=utf-8"),
    "drawing.js": ("drawing.js", "text/javascript; charset=utf-8"),
    "openseadragon.js": ("openseadragon.min.js", "text/javascript; charset=utf-8"),
}
_EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""SHA-256 of nothing: the page holds an empty style element, in whose place OpenSeadragon would put one of its own."""
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'self'; style-src 'self' {_EMPTY}; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",  # patients' pictures stay out of the browser's folder
}
_JSON = "application/json; charset=utf-8"
_NUMBER = "(0|[1-9][0-9]{0,6})"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type and content."""


class Refused(Exception):
    """A request that gets no answer but its status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class ViewServer(ThreadingHTTPServer):
    """Serves a gallery on 127.0.0.1 until it is closed; a context manager, as its base class is.

    Args:
        port: where it listens; None takes the usual port, or a free one where that is taken.
        token: what every address must hold; by default a new random one.

    Attributes:
        url: the address of the page.

    Raises:
        UsageError: when the port that was asked for is taken or not allowed.
    """

    timeout = 0.2  # seconds after which `handle_request` returns without one
    daemon_threads = False  # Python may hang where it ends under a thread that is at work

    def __init__(self, gallery: Gallery, port: int | None = None, token: str | None = None) -> None:
        self.gallery = gallery
        self._connections: set[socket] = set()
        self.token = token or secrets.token_urlsafe(_TOKEN_BYTES)
        try:
            super().__init__((ADDRESS, USUAL_PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None:
                raise UsageError(
                    f"port {port} cannot be used ({one_line(error)}); choose another with --port, or leave it out"
                ) from None
            super().__init__((ADDRESS, 0), _Handler)
        self.port: int = self.server_address[1]
        self.url = f"http://{ADDRESS}:{self.port}/{self.token}/"
        self.hosts = {f"{name}:{self.port}" for name in (ADDRESS, "localhost")}

    def server_bind(self) -> None:
        """Bind without asking the name service who this machine is."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that goes away in the middle of a tile is no error."""

    def get_request(self) -> tuple[socket, Any]:
        """Accept a connection, and remember it: browsers keep theirs open."""
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening, hang up, wait for what is at work, and close the slides."""
        for connection in tuple(self._connections):
            with suppress(OSError):  # it may have ended by itself
                connection.shutdown(SHUT_RDWR)
        super().server_close()
        self.gallery.close()


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "wsi-fl", ""
    timeout = _IDLE_S
    wbufsize, disable_nagle_algorithm = -1, True  # head and content go together: apart, each tile waits 40 ms

    def do_GET(self) -> None:
        """Answer with a content."""
        try:
            status, kind, content = self._answer()
        except Refused as refused:
            status, kind, content = (
                refused.status,
                "text/plain; charset=utf-8",
                refused.status.phrase.encode(),
            )
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
            self.close_connection = True  # what it wanted to send is not read
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = do_GET

    def _answer(self) -> Answer:
        if self.command not in ("GET", "HEAD"):
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED)
        if self.headers.get("Host", "") not in self.server.hosts:
            raise Refused(HTTPStatus.FORBIDDEN)
        before, _, path = self.path.partition("/")
        given, slash, path = path.partition("/")
        if before or not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise Refused(HTTPStatus.FORBIDDEN)
        if not slash:  # relative addresses of the page need it
            raise Refused(HTTPStatus.NOT_FOUND)
        try:
            return answer(self.server.gallery, path)
        except Refused:
            raise
        except Exception as error:  # what a library chokes on must not end the other slides
            said = "" if isinstance(error, WsiFlError) else f"{type(error).__name__}: "
            return _document({"error": said + one_line(error)}, HTTPStatus.INTERNAL_SERVER_ERROR)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep no log: addresses hold the token."""


def answer(gallery: Gallery, path: str) -> Answer:
    """Return what a path behind the token asks for.

    Raises:
        Refused: when it has none of the known forms, or there is no such slide, layer or tile.
        WsiFlError: when a slide or a layer cannot be read.
    """
    if path in _FILES:
        name, kind = _FILES[path]
        return HTTPStatus.OK, kind, _content(name)
    for pattern, route in _ROUTES:
        if (found := pattern.fullmatch(path)) is not None:
            return route(gallery, *map(int, found.groups()))
    raise Refused(HTTPStatus.NOT_FOUND)


def _catalogue(gallery: Gallery) -> Answer:
    return _document(gallery.catalogue())


def _slide(gallery: Gallery, number: int) -> Answer:
    return _document(gallery.describe(number))


def _layer(gallery: Gallery, number: int, which: int) -> Answer:
    return _document(gallery.layer(number, which))


def _tile(gallery: Gallery, number: int, level: int, column: int, row: int) -> Answer:
    if not gallery.shows(number):
        raise Refused(HTTPStatus.NOT_FOUND)
    with gallery.lent(number) as slide:
        pixels = read_tile(slide, level, column, row)
    if pixels is None:
        raise Refused(HTTPStatus.NOT_FOUND)
    return HTTPStatus.OK, "image/jpeg", jpeg.encode(pixels, _QUALITY)


_ROUTES: tuple[tuple[re.Pattern[str], Callable[..., Answer]], ...] = (
    (re.compile(r"slides\.json"), _catalogue),
    (re.compile(rf"slides/{_NUMBER}\.json"), _slide),
    (re.compile(rf"slides/{_NUMBER}/layers/{_NUMBER}\.json"), _layer),
    (re.compile(rf"slides/{_NUMBER}/tiles/{_NUMBER}/{_NUMBER}_{_NUMBER}\.jpg"), _tile),
)


def _document(document: Mapping[str, Any] | None, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    """A JSON answer, if there is something to answer."""
    if document is None:
        raise Refused(HTTPStatus.NOT_FOUND)
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return status, _JSON, text.encode()


@cache
def _content(name: str) -> bytes:
    """A file of the page, by a name of this module and never of a request."""
    return (files("wsi_fl.view") / "page" / name).read_bytes()
