"""Who connects to whom between hospitals, as a firewall's owner asks."""

from __future__ import annotations

from typing_extensions import TypedDict

from wsi_fl.stages.hospitals.kits.kit import Kit

_LETTERS = "letters, sealed for one receiver (HPKE) and signed by the sender (RSA)"


class Connection(TypedDict):
    """One kind of connection; `direction` is as the hospital's firewall sees it."""

    opens: str
    to: str
    direction: str
    port: str
    protocol: str
    carries: str


def connections(kit: Kit | None) -> list[Connection]:
    """Return every kind of connection of a federation; of a server's where no kit says how hospitals are joined."""
    if kit is not None and kit.folder is not None:
        return _of_folder(kit.folder)
    return _of_server(_address(kit))


def _of_folder(folder: str) -> list[Connection]:
    return [
        {
            "opens": "hospital",
            "to": f"the folder that all can reach ({folder})",
            "direction": "outgoing",
            "port": "that of the share",
            "protocol": "that of the share: a mounted file system, or as its address begins (for example https)",
            "carries": f"{_LETTERS}, one file each",
        }
    ]


def _of_server(address: tuple[str, str]) -> list[Connection]:
    host, port = address
    secure = "WebSocket over TLS 1.3, both sides show a certificate"
    return [
        {
            "opens": "hospital",
            "to": host,
            "direction": "outgoing",
            "port": port,
            "protocol": secure,
            "carries": f"{_LETTERS}; the state of the job; one connection, and one more for each running job",
        },
        {
            "opens": "hospitals and administration",
            "to": "server, at the coordinator",
            "direction": "incoming at the server alone",
            "port": port,
            "protocol": secure,
            "carries": "letters that the server passes on and cannot read",
        },
        {
            "opens": "coordinator's administration",
            "to": host,
            "direction": "none at the hospital",
            "port": port,
            "protocol": secure,
            "carries": "begin, state and end of a job, its summary and its scores; no code",
        },
        {
            "opens": "hospital's job process",
            "to": "hospital's client process",
            "direction": "inside the machine",
            "port": "a free one of 127.0.0.1",
            "protocol": "TCP on the loopback interface",
            "carries": "the same letters, on their way",
        },
        {
            "opens": "anybody else",
            "to": "hospital",
            "direction": "incoming: none",
            "port": "none",
            "protocol": "none; nothing listens at a hospital beyond 127.0.0.1",
            "carries": "nothing",
        },
    ]


def _address(kit: Kit | None) -> tuple[str, str]:
    """(host, port) of the server, in words where the kit does not say."""
    said = kit.document.get("server") if kit else None
    if isinstance(said, dict):
        return f"server {said.get('host', '')}".strip(), f"TCP {said.get('port', 'of the server')}"
    if isinstance(said, str) and said:
        host, _, port = said.rpartition(":")
        return f"server {host or said}", f"TCP {port}" if host else "the server's one TCP port"
    return "the coordinator's server", "the server's one TCP port"
