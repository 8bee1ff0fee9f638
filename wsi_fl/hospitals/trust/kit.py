"""A kit: what somebody needs to take part in a federation, in one folder; its key was made there and stays there.

`startup/` and `local/` are what NVIDIA FLARE reads. `federation.json` says who the kit is of and how the others are
reached: by a server, or by a folder that all can reach. Whether it gets through to its server is looked at step by
step, each with what to do when it fails.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wsi_fl.hospitals.trust.certificates import (
    Identity,
    Role,
    Withdrawn,
    issued_by,
    names_in,
    verified,
    withdrawn,
)
from wsi_fl.hospitals.trust.way import address_of, connected, proxy_to
from wsi_fl.system.files import alone, ordinary, read_json, write_text
from wsi_fl.types import UsageError, WsiFlError, one_line

STEM = {"server": "server", "coordinator": "client", "hospital": "client"}
"""How FLARE calls the files of a role."""
ROOT, LIST = "rootCA.pem", "withdrawn.pem"
"""The root's certificate, and the certificates that it has withdrawn."""
SOON_DAYS = 30


def trusted_in(folder: Path) -> str:
    """Return what is trusted by the files of a folder, PEM; OSError when the root's certificate cannot be read."""
    root, file = ordinary(folder / ROOT).read_text(), folder / LIST
    return f"{root}\n{ordinary(file).read_text(errors='replace')}" if file.exists() else root


@dataclass(frozen=True)
class Kit:
    """A folder with a key, its certificate and the federation's root.

    Attributes:
        document: what `federation.json` says.
    """

    path: Path
    document: dict[str, Any]

    @staticmethod
    def open(path: Path) -> Kit:
        """Read a kit.

        Raises:
            UsageError: when the folder is none.
        """
        file = path / "federation.json"
        if not file.is_file():
            raise UsageError(
                f"{path}: this is no kit (a folder with federation.json); `wsi-fl federation join` makes one"
            )
        return Kit(path.resolve(), dict(read_json(file)))

    @property
    def name(self) -> str:
        """Whose it is."""
        return str(self.document["name"])

    @property
    def role(self) -> Role:
        role: Role = self.document["role"]
        return role

    @property
    def folder(self) -> str | None:
        """The address of the folder that all can reach; None where a server joins them."""
        found = self.document.get("folder")
        return str(found) if found else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the kit for this process: two of one name would take each other's letters.

        Raises:
            WsiFlError: when another process has it.
        """
        busy = f"{self.name} runs already: another process has {self.path}; end it first"
        with alone(self.path / ".lock", busy):
            yield

    def identity(self) -> Identity:
        """Return the key and its certificate.

        Raises:
            UsageError: when files are missing or do not belong together, or the certificate does not hold now.
        """
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
        """Return the kit's list of withdrawn certificates; NotTrusted when it is not the root's."""
        return withdrawn(trusted_in(self.path / "startup"))

    def take(self, text: str) -> bool:
        """Keep a list (PEM, wherever it comes from, and nothing else of it) if it is newer; return whether it is.

        Raises:
            NotTrusted: when it is not the root's.
        """
        startup = self.path / "startup"
        found = withdrawn(f"{ordinary(startup / ROOT).read_text()}\n{text}")
        if newer := found.number > self.withdrawn().number:
            write_text(startup / LIST, found.text)
        return newer

    def reminder(self) -> str:
        """Return how to renew a certificate that ends soon, "" where it does not; UsageError as of `identity`."""
        identity = self.identity()
        left = (verified(identity.certificate, identity.root).until - datetime.now(UTC)).days
        how = (
            f"the certificate of {self.name} ends in {left} days: `wsi-fl federation renew --kit {self.path}`"
        )
        return how if left < SOON_DAYS else ""


def refuse_withdrawn(context: ssl.SSLContext, root: Path) -> ssl.SSLContext:
    """Let TLS refuse the certificates that the list beside a root's certificate names; return the context."""
    if (file := root.with_name(LIST)).exists():
        context.load_verify_locations(file)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    return context


@dataclass(frozen=True)
class Step:
    """One thing that was looked at.

    Attributes:
        what: in a few words.
        said: what was found, or what to do.
    """

    what: str
    ok: bool
    said: str


def look(kit: Kit) -> Iterator[Step]:
    """Look at certificate, name or proxy, port and handshake, and stop at the first that fails."""
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
            yield Step(what, True, f"{host} is {_looked_up(host, port)}")
            what = "port"
        connection = connected(host, port)
    except WsiFlError as error:
        yield Step(what, False, str(error))
        return
    through = f" of {host} through the proxy {proxy} (HTTPS_PROXY)" if proxy else ""
    yield Step(what, True, f"TCP to port {port}{through}")
    with connection:
        yield _handshake(kit, connection, host, port)


def _looked_up(host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        unknown = f"the name {host} is not known here ({one_line(error)}); ask your network's people"
        raise WsiFlError(unknown) from None


def likely_reason(kit: Kit) -> str:
    """Return the first thing that fails in words; "" when nothing does."""
    return next((step.said for step in look(kit) if not step.ok), "")


def require_server(kit: Kit) -> None:
    """Refuse to wait for a server that nothing listens for.

    Raises:
        UsageError: when the kit knows no server.
        WsiFlError: when there is no way through to its port.
    """
    connected(*server_of(kit)).close()


def server_of(kit: Kit) -> tuple[str, int]:
    """Return (host, port) of the kit's server.

    Raises:
        UsageError: when the kit knows none.
    """
    if not (server := kit.document.get("server")):
        raise UsageError(
            f"{kit.path}: this federation uses a folder and has no server; each hospital runs `wsi-fl federation start`"
        )
    return address_of(str(server))


def _handshake(kit: Kit, connection: socket.socket, host: str, port: int) -> Step:
    """Mutual TLS with the kit's certificate, and a byte more: in TLS 1.3 a server says no after the handshake."""
    startup, stem = kit.path / "startup", STEM[kit.role]
    context = refuse_withdrawn(ssl.create_default_context(cafile=startup / ROOT), startup / ROOT)
    context.load_cert_chain(startup / f"{stem}.crt", startup / f"{stem}.key")
    what = "mutual TLS"
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
        return Step(
            what,
            False,
            f"the server refused this kit's certificate ({one_line(error)}): is it of the same federation and not "
            "withdrawn, and the server's clock right?",
        )


def _stranger(kit: Kit, host: str, port: int) -> str:
    """Whose certificate is shown in the server's place; "" where it is one of the federation."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is looked at, and nothing is sent
    with suppress(OSError, WsiFlError), connected(host, port) as plain, context.wrap_socket(plain) as secured:
        shown = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")
        root = (kit.path / "startup" / "rootCA.pem").read_text()
        if not issued_by(shown, root):
            subject, issuer = names_in(shown)
            return (
                f"{host} port {port} shows a certificate for {subject}, issued by {issuer} and not by this "
                "federation's root: a device on the way opens TLS, for which your network's people make an exception, "
                "or this is another server"
            )
    return ""
