"""What every process of NVIDIA FLARE is given: the way to the right server, whom to refuse, and its own end.

FLARE 2.9 looks at no name in certificates and at no list of withdrawn ones, knows no proxy and reads no IPv6 address,
and nobody would be there to end what goes on after its parent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from ssl import SSLContext
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from nvflare.fuel.f3.drivers import aio_http_driver, net_utils
from nvflare.fuel.f3.drivers.driver_params import DriverParams

from wsi_fl.hospitals.trust.kit import address_of, bracketed, proxy_to, refuse_withdrawn

_LOOK_S = 0.25
_made, _connect = net_utils.get_ssl_context, aio_http_driver.AioHttpDriver.connect


def find_the_way() -> None:
    """Let this process connect to servers as `federation check` does.

    It goes through the proxy that the environment names, also to an IPv6 address. Every connection fails whose
    certificate is withdrawn, or not for the host that is called.
    """
    net_utils.get_ssl_context = _checking
    aio_http_driver.AioHttpDriver.connect = _connecting


def _connecting(driver: Any, connector: Any) -> None:
    """Connect a driver to the server of its URL."""
    host, port = address_of(urlsplit(connector.params["url"]).netloc)
    connector.params |= {"host": bracketed(host), "port": port}
    proxy = proxy_to(host)
    way = {"proxy": f"http://{proxy}", "proxy_headers": proxy.headers} if proxy else {}
    aio_http_driver.aiohttp = SimpleNamespace(**vars(aiohttp) | {"ClientSession": partial(_session, way)})
    _connect(driver, connector)


@asynccontextmanager
async def _session(way: Mapping[str, Any]) -> AsyncIterator[SimpleNamespace]:
    """What the driver takes of aiohttp's session; with the password in a header, no error and no log can tell it."""
    async with aiohttp.ClientSession() as session:
        yield SimpleNamespace(ws_connect=partial(session.ws_connect, **way))


def _checking(params: dict[str, Any], ssl_server: bool) -> SSLContext | None:
    context: SSLContext | None = _made(params, ssl_server)
    if context is None:
        return None
    context.check_hostname = not ssl_server
    return refuse_withdrawn(context, Path(params[DriverParams.CA_CERT.value]))


def end_with(parent: int) -> None:
    """Let this process end at once when its parent has ended, in whatever way that did.

    Args:
        parent: its process id, from before this process began.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)  # at once: threads of libraries would wait for each other

    threading.Thread(target=watch, daemon=True, name="end with parent").start()
