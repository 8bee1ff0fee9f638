"""The way to a server: straight, or through the HTTP proxy that the environment names (CONNECT, RFC 9110, 9.3.6)."""

from __future__ import annotations

import re
import socket
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from wsi_fl.types import WsiFlError, one_line

DEFAULT_PORT = 443
"""What nearly every hospital's firewall and proxy let out."""
_SECONDS = 5.0
_ANSWER = re.compile(r"Tunnel connection failed: (\d{3})\b")
"""How the standard library says what a proxy answered."""
_PORTS = range(1, 65536)
_WRITE = "write it as HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"


def address_of(text: str) -> tuple[str, int]:
    """Return (host, port) of `host`, `host:port`, `[IPv6]` or `[IPv6]:port`; the host has no brackets.

    Raises:
        ValueError: when it is none of them.

    Example:
        >>> address_of("fl.example.org"), address_of("[2001:db8::1]:8443")
        (('fl.example.org', 443), ('2001:db8::1', 8443))
    """
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", text)
    if parts is None:
        raise ValueError(text)
    if parts[1]:
        ip_address(parts[1])
    port = int(parts[3] or DEFAULT_PORT)
    if port not in _PORTS:
        raise ValueError(text)
    return parts[1] or parts[2], port


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy.

    Attributes:
        url: with its user and password; never to be shown.
    """

    url: str = field(repr=False)

    def __str__(self) -> str:
        """Return where it is, without its user and password."""
        host, port = self._place()
        return f"{bracketed(host)}:{port}"

    def _place(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        with suppress(ValueError):  # of a port that is no number
            if parts.scheme == "http" and parts.hostname:
                return parts.hostname, parts.port or 80
        raise WsiFlError(f"HTTPS_PROXY names no proxy that can be used; {_WRITE}")

    @property
    def headers(self) -> dict[str, str]:
        """What tells the proxy who asks, where its address has a user."""
        parts = urlsplit(self.url)
        if parts.username is None:
            return {}
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"}

    def connected(self, host: str, port: int) -> socket.socket:
        """Return a connection to a host through this proxy.

        Raises:
            WsiFlError: in one line that says what stands in the way.
        """
        known = f"the proxy {self} (HTTPS_PROXY)"
        way = HTTPConnection(*self._place(), timeout=_SECONDS)
        way.set_tunnel(bracketed(host), port, {"Host": f"{bracketed(host)}:{port}", **self.headers})
        try:
            way.connect()
        except (OSError, HTTPException) as error:
            answer = _ANSWER.match(str(error))
            if answer is None and way.sock is None:
                problem = f"cannot be reached ({one_line(error)}): is it up, and is this its address?"
            else:
                problem = _refused(answer[1] if answer else "", host, port, error)
            raise WsiFlError(f"{known} {problem}") from None
        return way.sock


def _refused(code: str, host: str, port: int, error: Exception) -> str:
    """What the answer of a proxy means that let no connection through."""
    if code == "407":
        return f"asks for a user and a password, or does not take those given (407): {_WRITE}"
    if code == "403":
        return f"forbids {host} port {port} (403): ask your network's people to allow it"
    return f"does not get through to {host} port {port} ({one_line(error)}): is the server up?"


def proxy_to(host: str) -> Proxy | None:
    """Return the proxy of `HTTPS_PROXY` to a host; None where there is none, or `NO_PROXY` leaves the host out."""
    url = getproxies_environment().get("https", "")
    if not url or proxy_bypass(host):
        return None
    return Proxy(url if "://" in url else f"http://{url}")


def connected(host: str, port: int) -> socket.socket:
    """Return a connection to a host, the way that `federation start` takes too.

    Raises:
        WsiFlError: in one line that says what stands in the way.
    """
    if proxy := proxy_to(host):
        return proxy.connected(host, port)
    try:
        return socket.create_connection((host, port), _SECONDS)
    except OSError as error:
        raise WsiFlError(
            f"no way through to {host} port {port} ({one_line(error)}): is the server up, and does the firewall let "
            "TCP out to this port?"
        ) from None
