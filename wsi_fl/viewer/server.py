"""The viewer's server: read-only, on 127.0.0.1, behind a random token in the address. The only importer of Starlette.

All users of the same machine can reach 127.0.0.1, and a page of another origin can make a browser send requests to it
(DNS rebinding). So every request must have the token and this address as its Host, responses are not readable by
another origin, and the page may load only from this server. Slides are numbers, and no path from a request reaches the
file system.
"""

from __future__ import annotations

import getpass
import hmac
import platform
import secrets
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from threading import Thread
from typing import TypedDict

import h11
from anyio import from_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from wsi_fl.stages.runtime.console import Lines
from wsi_fl.types import UsageError, WsiFlError, single_line
from wsi_fl.viewer.gallery import Gallery, encode_json
from wsi_fl.viewer.tiles import NotAwaited

_PAGE_FILES = {
    "index.html": "text/html",
    "icon.svg": "image/svg+xml",
    "viewer.css": "text/css",
    **dict.fromkeys(("viewer.js", "panels.js", "drawing.js", "openseadragon.min.js"), "text/javascript"),
}
ADDRESS = "127.0.0.1"
_DEFAULT_PORT = 8642
_IDLE_S = 120
"""Seconds after which a connection without another request ends."""
_HEAD_S = 10
"""Timeout of a request's head in seconds."""
_HEAD_BYTES = 16384
_SHUTDOWN_S = 1
"""Time for requests in progress at the end, in seconds."""
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


def _build_app(gallery: Gallery, token: str) -> Router:
    """Return the application; Starlette calls its functions in threads."""

    def send_page(name: str, _: Request) -> Response:
        return Response((files("wsi_fl.viewer") / "page" / name).read_bytes(), media_type=_PAGE_FILES[name])

    def send_json(render: Callable[..., bytes | None], request: Request) -> Response:
        return _send_response(partial(render, **request.path_params), "application/json")

    def send_tile(request: Request) -> Response:
        def is_awaited() -> bool:
            return not from_thread.run(request.is_disconnected)

        return _send_response(partial(gallery.render_tile, **request.path_params, awaited=is_awaited), "image/jpeg")

    number = "/slides/{number:int}"
    routes = [
        Route("/", partial(send_page, "index.html")),
        *(Route(f"/{name}", partial(send_page, name)) for name in _PAGE_FILES if name != "index.html"),
        Route("/slides.json", partial(send_json, gallery.list_slides)),
        Route(f"{number}.json", partial(send_json, gallery.describe_slide)),
        Route(f"{number}/layers/{{layer_index:int}}.json", partial(send_json, gallery.render_layer)),
        Route(f"{number}/tiles/{{level:int}}/{{column:int}}_{{row:int}}.jpg", send_tile),
    ]
    pages = Mount(f"/{token}", Router(routes, redirect_slashes=False))
    return Router([pages], redirect_slashes=False)


def _send_response(render: Callable[[], bytes | None], media_type: str) -> Response:
    """Return the response with rendered content; an error of a library must not affect other slides."""
    try:
        content = render()
    except NotAwaited:
        return Response()  # the client has hung up
    except Exception as error:
        message = "" if isinstance(error, WsiFlError) else f"{type(error).__name__}: "
        return Response(encode_json({"error": message + single_line(error)}), 500, media_type="application/json")
    return PlainTextResponse("Not Found", 404) if content is None else Response(content, media_type=media_type)


@dataclass(frozen=True)
class _Guard:
    """The application behind the checks that every request has to pass."""

    app: ASGIApp
    token: str
    port: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        await (self._refuse_request(scope) or self.app)(scope, receive, send)

    def _refuse_request(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), scope["raw_path"].decode("ascii")
        hosts = [f"{name}:{self.port}" for name in (ADDRESS, "localhost")]
        if headers.get("host") not in hosts:
            message = f"open this page as {' or '.join(hosts)}; a tunnel needs that port on both sides"
            return PlainTextResponse(message, 403)
        leading, _, path = path.partition("/")
        if leading or not hmac.compare_digest(path.partition("/")[0], self.token):
            return PlainTextResponse("Forbidden", 403)
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return PlainTextResponse("Bad Request", 400, {"Connection": "close"})
        if "%" in path or scope["query_string"]:  # no address here needs them
            return PlainTextResponse("Not Found", 404)
        return None


class _Connection(H11Protocol):
    """One of a limited number of connections, with a time limit for the head of each request."""

    _deadline: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """Begin a connection, or end it where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.close()
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._watch_head()

    def _watch_head(self) -> None:
        is_incomplete = self.conn.their_state is h11.IDLE
        if self._deadline is not None and not is_incomplete:
            self._deadline.cancel()
            self._deadline = None
        elif self._deadline is None and is_incomplete:
            self._deadline = self.loop.call_later(_HEAD_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request with the same headers as all others."""
        headers = [*self.server_state.default_headers, (b"Content-Type", b"text/plain"), (b"Connection", b"close")]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=b"Bad Request"), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _listen_locally(port: int | None) -> socket.socket:
    """Return a socket at a port; by default at 8642, or a free one if it is taken."""
    try:
        return socket.create_server((ADDRESS, _DEFAULT_PORT if port is None else port), backlog=_MAX_CONNECTIONS)
    except OSError as error:
        if port is None:
            return socket.create_server((ADDRESS, 0), backlog=_MAX_CONNECTIONS)
        message = f"port {port} cannot be used ({single_line(error)}); choose another with --port, or leave it out"
        raise UsageError(message) from None


class ViewServer:
    """A server of a gallery on 127.0.0.1, at `url` with a new random token; a context manager.

    A thread opens the first slide of the page in advance.

    Raises:
        UsageError: when the given port is taken or not allowed.
    """

    def __init__(self, gallery: Gallery, port: int | None = None) -> None:
        self.gallery, self.token = gallery, secrets.token_urlsafe(_TOKEN_BYTES)
        self.socket = _listen_locally(port)
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://{ADDRESS}:{self.port}/{self.token}/"
        config = Config(
            _Guard(_build_app(gallery, self.token), self.token, self.port),
            http=_Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,  # addresses contain the token
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=list(_HEADERS.items()),
            h11_max_incomplete_event_size=_HEAD_BYTES,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        self._server = Server(config)
        self.first_opening = Thread(target=gallery.open_first)
        self.first_opening.start()

    def __enter__(self) -> ViewServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.first_opening.join()

    def serve(self) -> None:
        """Answer requests until Ctrl-C or `stop`."""
        with suppress(KeyboardInterrupt):
            self._server.run([self.socket])

    def stop(self) -> None:
        """End `serve`."""
        self._server.should_exit = True


class _ServerDocument(TypedDict):
    """The `--json` document of `view`."""

    url: str
    port: int
    tunnel: str
    """A command for another machine."""
    title: str
    slides: int
    not_shown: list[dict[str, str]]


def describe_server(server: ViewServer) -> _ServerDocument:
    """Return the page's address, the command of a tunnel, and what is shown."""
    port, slides = server.port, server.gallery.exhibits
    return {
        "url": server.url,
        "port": port,
        "tunnel": f"ssh -N -L {port}:{ADDRESS}:{port} {getpass.getuser()}@{platform.node()}",
        "title": server.gallery.title,
        "slides": sum(exhibit.path is not None for exhibit in slides),
        "not_shown": [{"slide": exhibit.name, "reason": exhibit.note} for exhibit in slides if exhibit.path is None],
    }


def address_lines(document: _ServerDocument) -> Lines:
    """Yield the page's address and the command of a tunnel."""
    n = document["slides"]
    yield f"{document['title']}: {n} slide{'' if n == 1 else 's'}"
    for slide in document["not_shown"]:
        yield f"  not shown: {slide['slide']}: {slide['reason']}"
    yield f"\n  {document['url']}\n"
    yield f"From another machine, run there first:\n  {document['tunnel']}\n\nCtrl-C ends it."
