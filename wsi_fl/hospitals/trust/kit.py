"""The startup kit of a participant: one folder with the key, which was made there and stays there.

`startup/` and `local/` are read by NVIDIA FLARE. `federation.json` names the holder and how the others are reached: by
a server, or by a shared folder. A server is reached directly, or through the HTTP proxy that the environment names
(CONNECT, RFC 9110, 9.3.6); the connection is checked step by step, each step with a remedy for its failure.
"""

from __future__ import annotations

import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NotRequired, TypedDict, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from wsi_fl.hospitals.trust.certificates import Identity, Role, Withdrawn, stranger, verified, withdrawn
from wsi_fl.system.files import alone, ordinary, read_object, write_text
from wsi_fl.types import UsageError, WsiFlError, one_line

STEM = {"server": "server", "coordinator": "client", "hospital": "client"}
"""The stem of a role's file names in FLARE."""
ROOT, LIST = "rootCA.pem", "withdrawn.pem"
"""The root CA's certificate, and the list of certificates that it revoked."""
SOON_DAYS = 30
DEFAULT_PORT = 443
"""The port that nearly every hospital's firewall and proxy let out."""
_SECONDS = 5.0
_ANSWER = re.compile(r"Tunnel connection failed: (\d{3})\b")
"""The proxy's status code in an error message of the standard library."""
_WRITE = "write it as HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"


def trusted_in(folder: Path) -> str:
    """Return the trusted PEM text of a folder's files; OSError if the root CA's certificate cannot be read."""
    root, file = ordinary(folder / ROOT).read_text(), folder / LIST
    return f"{root}\n{ordinary(file).read_text(errors='replace')}" if file.exists() else root


class KitDocument(TypedDict):
    """The content of `federation.json`; the federation is connected by a server or by a folder."""

    name: str
    role: Role
    organization: str
    federation: str
    server: NotRequired[str]
    folder: NotRequired[str]


@dataclass(frozen=True)
class Kit:
    """A folder with a key, its certificate and the federation's root CA, and the content of its `federation.json`."""

    path: Path
    document: KitDocument

    @staticmethod
    def open(path: Path) -> Kit:
        """Read a kit; UsageError if the folder is none."""
        file = path / "federation.json"
        if not file.is_file():
            inner = path / "coordinator"
            founded = (inner / "federation.json").is_file()
            what = f"the coordinator's is {inner}" if founded else "`wsi-fl federation join` makes one"
            raise UsageError(f"{path}: this is no kit (a folder with federation.json); {what}")
        return Kit(
            path.resolve(), cast(KitDocument, read_object(file, "put its backup back", ["name", "role"]))
        )

    @property
    def name(self) -> str:
        """The name of the holder."""
        return str(self.document["name"])

    @property
    def role(self) -> Role:
        return self.document["role"]

    @property
    def folder(self) -> str | None:
        """The address of the shared folder; None if a server connects the federation."""
        found = self.document.get("folder")
        return str(found) if found else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the kit, or fail if another process has it: two of one name would take each other's messages."""
        busy = f"{self.name} runs already: another process has {self.path}; end it first"
        with alone(self.path / ".lock", busy):
            yield

    def identity(self) -> Identity:
        """Return key and certificate; UsageError if they are incomplete, do not fit or are not valid now."""
        stem, startup = STEM[self.role], self.path / "startup"
        try:
            key, certificate = [ordinary(startup / f"{stem}.{end}").read_text() for end in ("key", "crt")]
            trusted = trusted_in(startup)
        except OSError as error:
            raise UsageError(
                f"{self.path}: this kit is incomplete: {error.filename} cannot be read"
            ) from None
        identity = Identity.load(key, certificate, trusted)
        if identity.name != self.name:
            raise UsageError(
                f"{self.path}: this kit says {self.name}, but its certificate belongs to {identity.name}"
            )
        return identity

    def withdrawn(self) -> Withdrawn:
        """Return the kit's revocation list; NotTrusted if the root CA did not sign it."""
        return withdrawn(trusted_in(self.path / "startup"))

    def take(self, text: str) -> bool:
        """Store a revocation list (the PEM list alone is taken from the text) if it is newer; return whether it is.

        NotTrusted if the root CA did not sign it.
        """
        startup = self.path / "startup"
        found = withdrawn(f"{ordinary(startup / ROOT).read_text()}\n{text}")
        if newer := found.number > self.withdrawn().number:
            write_text(startup / LIST, found.text)
        return newer

    def reminder(self) -> str:
        """Return how to renew a certificate that ends soon, "" if it does not; UsageError if the kit is unusable."""
        identity = self.identity()
        left = (verified(identity.certificate, identity.root).until - datetime.now(UTC)).days
        if left >= SOON_DAYS:
            return ""
        return (
            f"the certificate of {self.name} ends in {left} days: `wsi-fl federation renew --kit {self.path}`"
        )


def refuse_withdrawn(context: ssl.SSLContext, root: Path) -> ssl.SSLContext:
    """Let TLS refuse the certificates on the revocation list beside a root CA's certificate; return the context."""
    if (file := root.with_name(LIST)).exists():
        context.load_verify_locations(file)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    return context


@dataclass(frozen=True)
class Step:
    """One step of a check, and its result or remedy."""

    what: str
    ok: bool
    said: str


def look(kit: Kit) -> Iterator[Step]:
    """Check certificate, name or proxy, port and handshake, and stop at the first that fails."""
    try:
        identity = kit.identity()
    except WsiFlError as error:
        yield Step("certificate", False, str(error))
        return
    until = verified(identity.certificate, identity.root).until
    note = kit.reminder()
    yield Step("certificate", True, f"{kit.name}, until {until.date().isoformat()}{note and f'; {note}'}")
    if kit.folder is not None:
        return
    host, port = server_of(kit)
    what = "proxy"
    try:
        if (proxy := proxy_to(host)) is None:  # a proxy looks up the name itself
            what = "name"
            try:
                found = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
            except OSError as error:
                unknown = f"the name {host} is not known here ({one_line(error)}); ask your network's people"
                raise WsiFlError(unknown) from None
            yield Step(what, True, f"{host} is {found}")
            what = "port"
        connection = _connected(host, port)
    except WsiFlError as error:
        yield Step(what, False, str(error))
        return
    through = f" of {host} through the proxy {proxy} (HTTPS_PROXY)" if proxy else ""
    yield Step(what, True, f"TCP to port {port}{through}")
    with connection:
        yield _handshake(kit, connection, host, port)


def likely_reason(kit: Kit) -> str:
    """Return the message of the first step that fails; "" if none does."""
    return next((step.said for step in look(kit) if not step.ok), "")


def require_server(kit: Kit) -> None:
    """Fail if the kit has no server, or its port cannot be reached."""
    _connected(*server_of(kit)).close()


def server_of(kit: Kit) -> tuple[str, int]:
    """Return (host, port) of the kit's server; UsageError if it has none."""
    if not (server := kit.document.get("server")):
        raise UsageError(
            f"{kit.path}: this federation uses a folder and has no server; each hospital runs `wsi-fl federation start`"
        )
    return address_of(str(server))


def _handshake(kit: Kit, connection: socket.socket, host: str, port: int) -> Step:
    """Check mutual TLS with the kit's certificate, and read a byte: in TLS 1.3 a server refuses after the handshake."""
    startup, stem, what = kit.path / "startup", STEM[kit.role], "mutual TLS"
    context = refuse_withdrawn(ssl.create_default_context(cafile=startup / ROOT), startup / ROOT)
    context.load_cert_chain(startup / f"{stem}.crt", startup / f"{stem}.key")
    try:
        with context.wrap_socket(connection, server_hostname=host) as secured:
            secured.settimeout(1.0)
            secured.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(TimeoutError):
                if not secured.recv(1):
                    raise ConnectionResetError("it closed the connection")
            return Step(what, True, f"{secured.version()}, the server's certificate is of this federation")
    except ssl.SSLCertVerificationError as error:
        why = f"the server's certificate was refused ({error.verify_message}): is this the right server, and the "
        return Step(what, False, _stranger(kit, host, port) or f"{why}right time on this clock?")
    except (OSError, ssl.SSLError) as error:
        why = f"the server refused this kit's certificate ({one_line(error)}): is it of the same federation and not "
        return Step(what, False, f"{why}withdrawn, and the server's clock right?")


def _stranger(kit: Kit, host: str, port: int) -> str:
    """Return the holder of the certificate shown instead of the server's; "" if it is one of the federation."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the certificate is only inspected, and nothing is sent
    with (
        suppress(OSError, WsiFlError),
        _connected(host, port) as plain,
        context.wrap_socket(plain) as secured,
    ):
        shown = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
        if names := stranger(shown, (kit.path / "startup" / ROOT).read_text()):
            return (
                f"{host} port {port} shows a certificate for {names[0]}, issued by {names[1]} and not by this "
                "federation's root: a device on the way opens TLS, for which your network's people make an exception, "
                "or this is another server"
            )
    return ""


def address_of(text: str) -> tuple[str, int]:
    """Return (host, port) of `host`, `host:port`, `[IPv6]` or `[IPv6]:port`, without brackets; ValueError otherwise.

    Example:
        >>> parse_address("fl.example.org"), parse_address("[2001:db8::1]:8443")
        (('fl.example.org', 443), ('2001:db8::1', 8443))
    """
    parts = urlsplit(f"//{text}")
    if parts.netloc != text or not parts.hostname or "@" in text or parts.port == 0:
        raise ValueError(text)
    return parts.hostname, parts.port or DEFAULT_PORT


def bracketed(host: str) -> str:
    """Return a host in the form used before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class _Proxy:
    """An HTTP proxy, whose representation leaves out its headers with user and password."""

    host: str
    port: int
    headers: dict[str, str] = field(repr=False)

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def proxy_to(host: str) -> _Proxy | None:
    """Return the proxy of `HTTPS_PROXY` for a host; None if there is none, or `NO_PROXY` excludes the host.

    WsiFlError if it is no HTTP proxy.
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
        return _Proxy(*address_of(parts.netloc.rpartition("@")[2]), headers)
    except ValueError:
        raise WsiFlError(f"HTTPS_PROXY names no proxy that can be used; {_WRITE}") from None


def _connected(host: str, port: int) -> socket.socket:
    """Return a connection to a host by the same route as `federation start`; WsiFlError with the obstacle."""
    if proxy := proxy_to(host):
        return _connected_by(proxy, host, port)
    try:
        return socket.create_connection((host, port), _SECONDS)
    except OSError as error:
        raise WsiFlError(
            f"no way through to {host} port {port} ({one_line(error)}): is the server up, and does the firewall let "
            "TCP out to this port?"
        ) from None


def _connected_by(proxy: _Proxy, host: str, port: int) -> socket.socket:
    way = HTTPConnection(proxy.host, proxy.port, timeout=_SECONDS)
    way.set_tunnel(bracketed(host), port, {"Host": f"{bracketed(host)}:{port}", **proxy.headers})
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
        raise WsiFlError(f"the proxy {proxy} (HTTPS_PROXY) {why}") from None
