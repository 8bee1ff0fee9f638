"""The viewer's server: read-only, on 127.0.0.1, behind a random token in the address.

All users of the same machine can reach 127.0.0.1, and a page of another origin can make a browser send requests to it
(DNS rebinding). So every request must have the token and this address as its Host, responses are not readable by
another origin, and the page may load only from this server. Paths are matched with a few patterns; slides are numbers,
and no path from a request reaches the file system.
"""

from __future__ import annotations

import getpass
import hmac
import platform
import re
import secrets
import signal
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from select import select
from socket import MSG_PEEK, SHUT_RD, SHUT_RDWR, socket
from socketserver import TCPServer
from threading import Thread, Timer
from typing import Any

from wsi_fl.stages.runtime.console import Lines
from wsi_fl.types import UsageError, WsiFlError, single_line
from wsi_fl.viewer.gallery import Gallery, encode_json
from wsi_fl.viewer.tiles import NotAwaited

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

_HttpResponse = tuple[HTTPStatus, str, bytes]
"""Status, content type and content."""


class _RefusedRequest(Exception):
    """A refused request with its status and a reason of one line."""

    def __init__(self, status: HTTPStatus, why: str = "") -> None:
        super().__init__(why or status.phrase)
        self.status = status


def _find_content(gallery: Gallery, path: str, awaited: Callable[[], bool]) -> _HttpResponse:
    """Return the response for a path after the token; refused without such a slide, layer or tile."""
    if path in _FILES:
        name, kind = _FILES[path]
        return HTTPStatus.OK, kind, (files("wsi_fl.viewer") / "page" / name).read_bytes()
    for pattern, kind, route in _ROUTES:
        if (match := pattern.fullmatch(path)) is not None:
            content = route(gallery, awaited, *map(int, match.groups()))
            if content is not None:
                return HTTPStatus.OK, kind, content
    raise _RefusedRequest(HTTPStatus.NOT_FOUND)


_ROUTES: tuple[tuple[re.Pattern[str], str, Callable[..., bytes | None]], ...] = (
    (re.compile(r"slides\.json"), _JSON, lambda gallery, _: gallery.list_slides()),
    (re.compile(rf"slides/{_NUMBER}\.json"), _JSON, lambda gallery, _, number: gallery.describe_slide(number)),
    (
        re.compile(rf"slides/{_NUMBER}/layers/{_NUMBER}\.json"),
        _JSON,
        lambda gallery, _, number, layer_index: gallery.render_layer(number, layer_index),
    ),
    (
        re.compile(rf"slides/{_NUMBER}/tiles/{_NUMBER}/{_NUMBER}_{_NUMBER}\.jpg"),
        "image/jpeg",
        lambda gallery, awaited, *place: gallery.render_tile(*place, awaited),
    ),
)


ADDRESS = "127.0.0.1"
_DEFAULT_PORT = 8642
_IDLE_S = 120
"""Seconds after which a connection without a request ends."""
_HEAD_S = 10
"""Timeout of a request's head in seconds."""
_MAX_CONNECTIONS = 64
"""A browser opens six."""
_TOKEN_BYTES = 32
_EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""SHA-256 of the page's empty style element, which OpenSeadragon would otherwise add."""
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'self'; style-src 'self' {_EMPTY}; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",  # patients' pictures stay out of the browser's folder
}
_TEXT = "text/plain; charset=utf-8"


class ViewServer(ThreadingHTTPServer):
    """A server of a gallery on 127.0.0.1, at `url`, until closed; a context manager.

    A thread opens the first slide of the page in advance. The default port is 8642, or a free one if it is taken. Every
    server has a new random token in its address.

    Raises:
        UsageError: when the given port is taken or not allowed.
    """

    timeout = 0.2  # seconds after which `handle_request` returns without one
    daemon_threads = False  # Python may hang if it exits during a running thread
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, gallery: Gallery, port: int | None = None) -> None:
        self.gallery = gallery
        self._connections: set[socket] = set()
        self._first = Thread(target=gallery.open_first)
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        try:
            super().__init__((ADDRESS, _DEFAULT_PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None:
                raise UsageError(
                    f"port {port} cannot be used ({single_line(error)}); choose another with --port, or leave it out"
                ) from None
            super().__init__((ADDRESS, 0), _Handler)
        self.port: int = self.server_address[1]
        self.url = f"http://{ADDRESS}:{self.port}/{self.token}/"
        self.hosts = {f"{name}:{self.port}" for name in (ADDRESS, "localhost")}
        self._first.start()

    def server_bind(self) -> None:
        """Bind without a look-up of the machine's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: a browser may hang up in the middle of a tile."""

    def get_request(self) -> tuple[socket, Any]:
        """Accept and register a connection: browsers keep theirs open."""
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether the number of connections allows another; else it is closed."""
        return len(self._connections) <= _MAX_CONNECTIONS

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stop listening, close connections, wait for running threads, and close the slides."""
        for connection in tuple(self._connections):
            with suppress(OSError):  # it may have ended by itself
                connection.shutdown(SHUT_RDWR)
        super().server_close()
        if self._first.is_alive():
            self._first.join()
        self.gallery.close()


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "wsi-fl", ""
    timeout = _IDLE_S
    wbufsize, disable_nagle_algorithm = -1, True  # head and content in one packet: else each tile waits 40 ms

    def handle_one_request(self) -> None:
        """Wait for a request, and hang up if its head is not complete in time."""
        try:
            self.rfile.peek(1)  # type: ignore[attr-defined]  # it is a BufferedReader
        except OSError:
            self.close_connection = True
            return
        self._deadline = Timer(_HEAD_S, _hang_up, (self.connection,))
        self._deadline.start()
        try:
            super().handle_one_request()
        finally:
            self._deadline.cancel()

    def parse_request(self) -> bool:
        """Read the head of a request, and stop its timer."""
        try:
            return super().parse_request()
        finally:
            self._deadline.cancel()

    def do_GET(self) -> None:
        """Send the content of a path."""
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body is not read
        try:
            self._send_content(*self._handle_path())
        except _RefusedRequest as refused:
            self._send_content(refused.status, _TEXT, str(refused).encode())

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send errors of malformed requests with the same headers as all responses."""
        self.close_connection, self.request_version = True, self.protocol_version
        status = HTTPStatus(code)
        self._send_content(status, _TEXT, status.phrase.encode())

    def _send_content(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
            self.close_connection = True
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _handle_path(self) -> _HttpResponse:
        if self.command not in ("GET", "HEAD"):
            raise _RefusedRequest(HTTPStatus.METHOD_NOT_ALLOWED)
        if self.headers.get("Host", "") not in self.server.hosts:
            hosts = f"{ADDRESS}:{self.server.port} or localhost:{self.server.port}"
            message = f"open this page as {hosts}; a tunnel needs that port on both sides"
            raise _RefusedRequest(HTTPStatus.FORBIDDEN, message)
        leading, _, path = self.path.partition("/")
        token, slash, path = path.partition("/")
        if leading or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            raise _RefusedRequest(HTTPStatus.FORBIDDEN)
        if not slash:  # relative addresses of the page need it
            raise _RefusedRequest(HTTPStatus.NOT_FOUND)
        try:
            return _find_content(self.server.gallery, path, self._is_awaited)
        except (_RefusedRequest, NotAwaited):
            raise
        except Exception as error:  # an error of a library must not affect other slides
            message = "" if isinstance(error, WsiFlError) else f"{type(error).__name__}: "
            return (HTTPStatus.INTERNAL_SERVER_ERROR, _JSON, encode_json({"error": message + single_line(error)}))

    def _is_awaited(self) -> bool:
        """Return whether the client has not hung up, as a browser does on a change of slide."""
        try:
            readable = select([self.connection], [], [], 0)[0]
            return not readable or bool(self.connection.recv(1, MSG_PEEK))
        except OSError:
            return False

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: addresses contain the token."""


def _hang_up(connection: socket) -> None:
    with suppress(OSError):  # it may have ended by itself
        connection.shutdown(SHUT_RD)


def describe_server(server: ViewServer) -> dict[str, Any]:
    """Return the `--json` document: the page's address, and the command of a tunnel."""
    port, slides = server.port, server.gallery.exhibits
    return {
        "url": server.url,
        "port": port,
        "tunnel": f"ssh -N -L {port}:{ADDRESS}:{port} {getpass.getuser()}@{platform.node()}",
        "title": server.gallery.title,
        "slides": sum(exhibit.path is not None for exhibit in slides),
        "not_shown": [{"slide": exhibit.name, "reason": exhibit.note} for exhibit in slides if exhibit.path is None],
    }


def address_lines(document: dict[str, Any]) -> Lines:
    """Yield the page's address and the command of a tunnel."""
    n = document["slides"]
    yield f"{document['title']}: {n} slide{'' if n == 1 else 's'}"
    for slide in document["not_shown"]:
        yield f"  not shown: {slide['slide']}: {slide['reason']}"
    yield f"\n  {document['url']}\n"
    yield f"From another machine, run there first:\n  {document['tunnel']}\n\nCtrl-C ends it."


def serve_gallery(server: ViewServer, *, open_browser: bool) -> None:
    """Serve until Ctrl-C.

    The signal sets a flag: an exception during the start of a thread would make Python hang.
    """
    interrupts: list[int] = []
    previous_handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        if open_browser:
            webbrowser.open(server.url)
        while not interrupts:
            server.handle_request()
    finally:
        signal.signal(signal.SIGINT, previous_handler)
