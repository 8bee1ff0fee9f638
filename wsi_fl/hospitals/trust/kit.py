"""The startup kit of a participant: one folder with the key, which was made there and stays there.

`startup/` and `local/` are read by NVIDIA FLARE. `federation.json` names the holder and how the others are reached: by
a server, or by a shared folder. A server is reached directly, or through the HTTP proxy that the environment names
(CONNECT, RFC 9110, 9.3.6); the connection is checked step by step, each step with a remedy for its failure.
"""

from __future__ import annotations

import re
import shlex
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

from wsi_fl.hospitals.faults import FaultCode, find_fault, mark_fault
from wsi_fl.hospitals.trust.certificates import (
    Identity,
    RevocationList,
    Role,
    describe_foreign_certificate,
    parse_revocation_list,
    verify_certificate,
)
from wsi_fl.system.files import file_lock, read_object, require_regular_file, write_text
from wsi_fl.types import UsageError, WsiFlError, single_line

FILE_STEMS = {"server": "server", "coordinator": "client", "hospital": "client"}
"""The stem of a role's file names in FLARE."""
ROOT_FILE, REVOCATIONS_FILE = "rootCA.pem", "withdrawn.pem"
"""The root CA's certificate, and the list of certificates that it revoked."""
RENEWAL_DAYS = 30
DEFAULT_PORT = 443
"""The port that nearly every hospital's firewall and proxy let out."""
_CONNECT_S = 5.0
_PROXY_ANSWER = re.compile(r"Tunnel connection failed: (\d{3})\b")
"""The proxy's status code in an error message of the standard library."""
_PROXY_HINT = "write it as HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"


def load_trusted_pem(folder: Path) -> str:
    """Return the trusted PEM text of a folder's files; OSError if the root CA's certificate cannot be read."""
    root, file = require_regular_file(folder / ROOT_FILE).read_text(), folder / REVOCATIONS_FILE
    return f"{root}\n{require_regular_file(file).read_text(errors='replace')}" if file.exists() else root


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
            is_provisioned = (inner / "federation.json").is_file()
            hint = f"the coordinator's is {inner}" if is_provisioned else "`wsi-fl federation join` makes one"
            raise UsageError(f"{path}: this is no kit (a folder with federation.json); {hint}")
        return Kit(path.resolve(), cast(KitDocument, read_object(file, "put its backup back", ["name", "role"])))

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
        address = self.document.get("folder")
        return str(address) if address else None

    @contextmanager
    def lock_kit(self) -> Iterator[None]:
        """Lock the kit, or fail if another process has it: two of one name would take each other's messages."""
        with file_lock(self.path / ".lock", f"{self.name} runs already: another process has {self.path}; end it first"):
            yield

    def load_identity(self) -> Identity:
        """Return key and certificate; UsageError if they are incomplete, do not fit or are not valid now."""
        stem, startup = FILE_STEMS[self.role], self.path / "startup"
        try:
            key, certificate = [require_regular_file(startup / f"{stem}.{end}").read_text() for end in ("key", "crt")]
            trusted = load_trusted_pem(startup)
        except OSError as error:
            text = f"{self.path}: this kit is incomplete: {error.filename} cannot be read"
            raise mark_fault(UsageError(text), "kit") from None
        identity = Identity.load(key, certificate, trusted)
        if identity.name != self.name:
            text = f"{self.path}: this kit says {self.name}, but its certificate belongs to {identity.name}"
            raise mark_fault(UsageError(text), "kit")
        return identity

    def load_revocation_list(self) -> RevocationList:
        """Return the kit's revocation list; NotTrusted if the root CA did not sign it."""
        return parse_revocation_list(load_trusted_pem(self.path / "startup"))

    def update_revocation_list(self, text: str) -> bool:
        """Store a revocation list (the PEM list alone is taken from the text) if it is newer; return whether it is.

        NotTrusted if the root CA did not sign it.
        """
        startup = self.path / "startup"
        received = parse_revocation_list(f"{require_regular_file(startup / ROOT_FILE).read_text()}\n{text}")
        if is_newer := received.number > self.load_revocation_list().number:
            write_text(startup / REVOCATIONS_FILE, received.text)
        return is_newer

    def renewal_reminder(self) -> str:
        """Return how to renew a certificate that ends soon, "" if it does not; UsageError if the kit is unusable."""
        identity = self.load_identity()
        days_left = (verify_certificate(identity.certificate, identity.root).until - datetime.now(UTC)).days
        if days_left >= RENEWAL_DAYS:
            return ""
        command = f"wsi-fl federation renew --kit {shlex.quote(str(self.path))}"
        return f"the certificate of {self.name} ends in {days_left} days: `{command}`"


def refuse_revoked(context: ssl.SSLContext, root: Path) -> ssl.SSLContext:
    """Let TLS refuse the certificates on the revocation list beside a root CA's certificate; return the context."""
    if (file := root.with_name(REVOCATIONS_FILE)).exists():
        context.load_verify_locations(file)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    return context


@dataclass(frozen=True)
class CheckStep:
    """One step of a check, and its result or remedy."""

    what: str
    ok: bool
    said: str
    fault: FaultCode = ""


def check_connection(kit: Kit) -> Iterator[CheckStep]:
    """Check certificate, name or proxy, port and handshake, and stop at the first that fails."""
    try:
        identity = kit.load_identity()
    except WsiFlError as error:
        yield CheckStep("certificate", False, str(error), find_fault(error).code)
        return
    until = verify_certificate(identity.certificate, identity.root).until
    note = kit.renewal_reminder()
    yield CheckStep("certificate", True, f"{kit.name}, until {until.date().isoformat()}{note and f'; {note}'}")
    if kit.folder is not None:
        return
    host, port = server_address(kit)
    subject = "proxy"
    try:
        if (proxy := find_proxy(host)) is None:  # a proxy looks up the name itself
            subject = "name"
            try:
                address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
            except OSError as error:
                unknown = f"the name {host} is not known here ({single_line(error)}); ask your network's people"
                raise mark_fault(WsiFlError(unknown), "name") from None
            yield CheckStep(subject, True, f"{host} is {address}")
            subject = "port"
        connection = _open_connection(host, port)
    except WsiFlError as error:
        yield CheckStep(subject, False, str(error), find_fault(error).code)
        return
    route = f" of {host} through the proxy {proxy} (HTTPS_PROXY)" if proxy else ""
    yield CheckStep(subject, True, f"TCP to port {port}{route}")
    with connection:
        yield _check_handshake(kit, connection, host, port)


def find_failed_step(kit: Kit) -> CheckStep | None:
    """Return the first step of the check that fails."""
    return next((step for step in check_connection(kit) if not step.ok), None)


def require_server(kit: Kit) -> None:
    """Fail if the kit has no server, or its port cannot be reached."""
    _open_connection(*server_address(kit)).close()


def server_address(kit: Kit) -> tuple[str, int]:
    """Return (host, port) of the kit's server; UsageError if it has none."""
    if not (server := kit.document.get("server")):
        raise UsageError(
            f"{kit.path}: this federation uses a folder and has no server; each hospital runs `wsi-fl federation start`"
        )
    return parse_address(str(server))


def _check_handshake(kit: Kit, connection: socket.socket, host: str, port: int) -> CheckStep:
    """Check mutual TLS with the kit's certificate, and read a byte: in TLS 1.3 a server refuses after the handshake."""
    startup, stem, subject = kit.path / "startup", FILE_STEMS[kit.role], "mutual TLS"
    context = refuse_revoked(ssl.create_default_context(cafile=startup / ROOT_FILE), startup / ROOT_FILE)
    context.load_cert_chain(startup / f"{stem}.crt", startup / f"{stem}.key")
    try:
        with context.wrap_socket(connection, server_hostname=host) as secured:
            secured.settimeout(1.0)
            secured.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(TimeoutError):
                if not secured.recv(1):
                    raise ConnectionResetError("it closed the connection")
            return CheckStep(subject, True, f"{secured.version()}, the server's certificate is of this federation")
    except ssl.SSLCertVerificationError as error:
        if interceptor := _describe_interceptor(kit, host, port):
            return CheckStep(subject, False, interceptor)
        question = "is this the right server, and the right time on this clock?"
        text = f"the server's certificate was refused ({error.verify_message}): {question}"
        return CheckStep(subject, False, text, "server_certificate")
    except (OSError, ssl.SSLError) as error:
        question = "is it of the same federation and not withdrawn, and the server's clock right?"
        text = f"the server refused this kit's certificate ({single_line(error)}): {question}"
        return CheckStep(subject, False, text, "certificate_refused")


def _describe_interceptor(kit: Kit, host: str, port: int) -> str:
    """Return the holder of the certificate shown instead of the server's; "" if it is one of the federation."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the certificate is only inspected, and nothing is sent
    with suppress(OSError, WsiFlError), _open_connection(host, port) as plain, context.wrap_socket(plain) as secured:
        presented_pem = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
        if names := describe_foreign_certificate(presented_pem, (kit.path / "startup" / ROOT_FILE).read_text()):
            return (
                f"{host} port {port} shows a certificate for {names[0]}, issued by {names[1]} and not by this "
                "federation's root: a device on the way opens TLS, for which your network's people make an exception, "
                "or this is another server"
            )
    return ""


def parse_address(text: str) -> tuple[str, int]:
    """Return (host, port) of `host`, `host:port`, `[IPv6]` or `[IPv6]:port`, without brackets; ValueError otherwise.

    Example:
        >>> parse_address("fl.example.org"), parse_address("[2001:db8::1]:8443")
        (('fl.example.org', 443), ('2001:db8::1', 8443))
    """
    parts = urlsplit(f"//{text}")
    if parts.netloc != text or not parts.hostname or "@" in text or parts.port == 0:
        raise ValueError(text)
    return parts.hostname, parts.port or DEFAULT_PORT


def bracket_ipv6(host: str) -> str:
    """Return a host in the form used before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class _HttpProxy:
    """An HTTP proxy, whose representation leaves out its headers with user and password."""

    host: str
    port: int
    headers: dict[str, str] = field(repr=False)

    def __str__(self) -> str:
        return f"{bracket_ipv6(self.host)}:{self.port}"


def find_proxy(host: str) -> _HttpProxy | None:
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
        return _HttpProxy(*parse_address(parts.netloc.rpartition("@")[2]), headers)
    except ValueError:
        raise WsiFlError(f"HTTPS_PROXY names no proxy that can be used; {_PROXY_HINT}") from None


def _open_connection(host: str, port: int) -> socket.socket:
    """Return a connection to a host by the same route as `federation start`; WsiFlError with the obstacle."""
    if proxy := find_proxy(host):
        return _connect_through_proxy(proxy, host, port)
    try:
        return socket.create_connection((host, port), _CONNECT_S)
    except OSError as error:
        question = "is the server up, and does the firewall let TCP out to this port?"
        text = f"no way through to {host} port {port} ({single_line(error)}): {question}"
        raise mark_fault(WsiFlError(text), "no_route") from None


def _connect_through_proxy(proxy: _HttpProxy, host: str, port: int) -> socket.socket:
    tunnel = HTTPConnection(proxy.host, proxy.port, timeout=_CONNECT_S)
    tunnel.set_tunnel(bracket_ipv6(host), port, {"Host": f"{bracket_ipv6(host)}:{port}", **proxy.headers})
    try:
        tunnel.connect()
        return tunnel.sock
    except (OSError, HTTPException) as error:
        answer = _PROXY_ANSWER.match(str(error))
        code = answer[1] if answer else "" if tunnel.sock else "none"
        reason = {
            "none": f"cannot be reached ({single_line(error)}): is it up, and is this its address?",
            "403": f"forbids {host} port {port} (403): ask your network's people to allow it",
            "407": f"asks for a user and a password, or does not take those given (407): {_PROXY_HINT}",
        }.get(code, f"does not get through to {host} port {port} ({single_line(error)}): is the server up?")
        raise WsiFlError(f"the proxy {proxy} (HTTPS_PROXY) {reason}") from None
