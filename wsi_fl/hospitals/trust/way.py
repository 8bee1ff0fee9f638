"""The way to a server: straight, or through the HTTP proxy that the environment names (CONNECT, RFC 9110, 9.3.6)."""

from __future__ import annotations

import re
import socket
from base64 import b64encode
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from wsi_fl.types import WsiFlError, one_line

DEFAULT_PORT = 443
"""What nearly every hospital's firewall and proxy let out."""
_SECONDS = 5.0
_ANSWER = re.compile(r"Tunnel connection failed: (\d{3})\b")
"""How the standard library says what a proxy answered."""
_WRITE = "write it as HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"


def address_of(text: str) -> tuple[str, int]:
    """Return (host, port) of `host`, `host:port`, `[IPv6]` or `[IPv6]:port`; the host has no brackets.

    Raises:
        ValueError: when it is none of them.

    Example:
        >>> address_of("fl.example.org"), address_of("[2001:db8::1]:8443")
        (('fl.example.org', 443), ('2001:db8::1', 8443))
    """
    parts = urlsplit(f"//{text}")
    if parts.netloc != text or not parts.hostname or "@" in text or parts.port == 0:
        raise ValueError(text)
    return parts.hostname, parts.port or DEFAULT_PORT


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy, which is shown without what `headers` tell it: the user and the password."""

    host: str
    port: int
    headers: dict[str, str] = field(repr=False)

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    def connected(self, host: str, port: int) -> socket.socket:
        """Return a connection to a host through this proxy.

        Raises:
            WsiFlError: in one line that says what stands in the way.
        """
        way = HTTPConnection(self.host, self.port, timeout=_SECONDS)
        way.set_tunnel(bracketed(host), port, {"Host": f"{bracketed(host)}:{port}", **self.headers})
        try:
            way.connect()
            return way.sock
        except (OSError, HTTPException) as error:
            answer = _ANSWER.match(str(error))
            code = answer[1] if answer else "" if way.sock else "none"
            why = {
                "none": f"cannot be reached ({one_line(error)}): is it up, and is this its address?",
                "403": f"forbids {host} port {port} (403): ask your network's people to allow it",
                "407": f"asks for a user and a password, or does not take those given (407): {_WRITE}",
            }.get(code, f"does not get through to {host} port {port} ({one_line(error)}): is the server up?")
            raise WsiFlError(f"the proxy {self} (HTTPS_PROXY) {why}") from None


def proxy_to(host: str) -> Proxy | None:
    """Return the proxy of `HTTPS_PROXY` to a host; None where there is none, or `NO_PROXY` leaves the host out.

    Raises:
        WsiFlError: when it is no HTTP proxy.
    """
    url, headers = getproxies_environment().get("https", ""), {}
    if not url or proxy_bypass(host):
        return None
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http":
            raise ValueError
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers = {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"}
        return Proxy(*address_of(parts.netloc.rpartition("@")[2]), headers)
    except ValueError:
        raise WsiFlError(f"HTTPS_PROXY names no proxy that can be used; {_WRITE}") from None


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
