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

from wsi_fl.hospitals.trust.certificates import Identity, Role, verified
from wsi_fl.system.files import ordinary, read_json
from wsi_fl.system.locks import alone
from wsi_fl.types import UsageError, WsiFlError, one_line

STEM = {"server": "server", "coordinator": "client", "hospital": "client"}
"""How FLARE calls the files of a role."""
_SECONDS = 5.0
SOON_DAYS = 30


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
            texts = [
                ordinary(startup / name).read_text() for name in (f"{stem}.key", f"{stem}.crt", "rootCA.pem")
            ]
        except OSError as error:
            raise UsageError(
                f"{self.path}: this kit is incomplete: {error.filename} cannot be read"
            ) from None
        identity = Identity.load(*texts)
        if identity.name != self.name:
            raise UsageError(
                f"{self.path}: this kit says {self.name}, but its certificate belongs to {identity.name}"
            )
        return identity


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
    """Look at certificate, name, port and handshake, and stop at the first that fails."""
    try:
        identity = kit.identity()
    except WsiFlError as error:
        yield Step("certificate", False, str(error))
        return
    until = verified(identity.certificate, identity.root).until
    left = (until - datetime.now(UTC)).days
    note = f"; request a new one soon, {left} days are left" if left < SOON_DAYS else ""
    yield Step("certificate", True, f"{kit.name}, until {until.date().isoformat()}{note}")
    if kit.folder is not None:
        return
    host, port = server_of(kit)
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        yield Step(
            "name", False, f"the name {host} is not known here ({one_line(error)}); ask your network's people"
        )
        return
    yield Step("name", True, f"{host} is {address}")
    try:
        connection = socket.create_connection((host, port), _SECONDS)
    except OSError as error:
        yield Step("port", False, _no_way(host, port, error))
        return
    yield Step("port", True, f"TCP to port {port}")
    with connection:
        yield _handshake(kit, connection, host)


def likely_reason(kit: Kit) -> str:
    """Return the first thing that fails in words; "" when nothing does."""
    return next((step.said for step in look(kit) if not step.ok), "")


def require_server(kit: Kit) -> None:
    """Refuse to wait for a server that nothing listens for.

    Raises:
        UsageError: when the kit knows no server.
        WsiFlError: when there is no way through to its port.
    """
    host, port = server_of(kit)
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except OSError as error:
        raise WsiFlError(_no_way(host, port, error)) from None


def _no_way(host: str, port: int, error: OSError) -> str:
    return (
        f"no way through to {host} port {port} ({one_line(error)}): is the server up, and does the firewall let TCP "
        "out to this port?"
    )


def server_of(kit: Kit) -> tuple[str, int]:
    """Return (host, port) of the kit's server.

    Raises:
        UsageError: when the kit knows none.
    """
    host, _, port = str(kit.document.get("server", "")).rpartition(":")
    if not host:
        raise UsageError(
            f"{kit.path}: this federation uses a folder and has no server; each hospital runs `wsi-fl federation start`"
        )
    return host, int(port)


def _handshake(kit: Kit, connection: socket.socket, host: str) -> Step:
    """Mutual TLS with the kit's certificate, and a byte more: in TLS 1.3 a server says no after the handshake."""
    startup, stem = kit.path / "startup", STEM[kit.role]
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(startup / f"{stem}.crt", startup / f"{stem}.key")
    what = "mutual TLS"
    try:
        with context.wrap_socket(connection, server_hostname=host) as secured:
            secured.settimeout(1.0)
            secured.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(TimeoutError):
                secured.recv(1)
            return Step(what, True, f"{secured.version()}, the server's certificate is of this federation")
    except ssl.SSLCertVerificationError as error:
        why = f"the server's certificate was refused ({error.verify_message})"
        return Step(what, False, f"{why}: is this the right server, and the right time on this clock?")
    except (OSError, ssl.SSLError) as error:
        return Step(
            what,
            False,
            f"the server refused this kit's certificate ({one_line(error)}): is it of the same federation, and the "
            "server's clock right?",
        )
