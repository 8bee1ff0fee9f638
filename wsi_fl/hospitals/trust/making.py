"""Founding a federation, and the way into it: request, approval, join. Every key is made where it is used.

What is sent about are two small files, a request and a certificate, and neither is secret. That they are the right
ones is made sure of by telephone: both sides read out a fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wsi_fl.hospitals.flare.files import COORDINATOR, SERVER, write_flare_files
from wsi_fl.hospitals.trust.certificates import (
    Identity,
    Role,
    approved,
    fingerprint,
    new_key,
    new_request,
    new_root,
    request_names,
    verified,
)
from wsi_fl.hospitals.trust.kit import STEM, Kit
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.system.files import append_line, read_json, read_lines, write_json, write_text
from wsi_fl.types import UsageError

REQUEST, CERTIFICATE = "wsi-fl federation request", "wsi-fl federation certificate"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_PORT = 8602
_ISSUED = {"name": str, "role": str, "fingerprint": str}


def provision(
    folder: Path,
    *,
    federation: str,
    server: str | None = None,
    shared_folder: str | None = None,
    sites: Sequence[str] = (),
) -> dict[str, Any]:
    """Found a federation: its root, the kit of the server (where there is one) and that of the coordinator.

    Args:
        folder: a new one, which holds the root's key in `root/`; keep that part offline.
        server: "host:port" under which hospitals reach the server.
        shared_folder: address of a folder that all can reach, where no server joins them.
        sites: hospitals of a test bed, whose kits are made here too, keys and all.

    Raises:
        UsageError: when the folder holds something, or neither or both of server and shared_folder are given.
    """
    if (server is None) == (shared_folder is None):
        raise UsageError(
            "how do the hospitals reach each other? give either --server HOST:PORT or --folder ADDRESS"
        )
    for name in (federation, *sites):
        _check_name(name)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: it holds something already; found a federation in a new folder")
    host, port = _address(server) if server else ("", 0)
    root_key = new_key()
    root = new_root(root_key, federation)
    _write_secret(folder / "root" / "root.key", root_key)
    write_text(folder / "root" / "rootCA.pem", root)
    reached = {"server": f"{host}:{port}"} if server else {"folder": shared_folder}
    write_json(folder / "root" / "federation.json", {"federation": federation, **reached})
    members: list[tuple[str, Role]] = [(COORDINATOR, "coordinator"), *[(site, "hospital") for site in sites]]
    if server:
        members.insert(0, (SERVER, "server"))
    for name, role in members:
        request(folder / name, name=name, organization=federation, role=role)
        certificate = approve_request(folder / name / f"request-{name}.json", folder)
        join(Path(certificate["file"]), folder / name)
    return {
        "federation": federation,
        "root": str(folder / "root"),
        "fingerprint": fingerprint(root),
        "kits": {name: str(folder / name) for name, _ in members},
        **reached,
    }


def request(kit: Path, *, name: str, organization: str, role: Role = "hospital") -> dict[str, Any]:
    """Make a key in a new kit, and beside it the request that is sent to the coordinator.

    Raises:
        UsageError: when the kit has a key already.
    """
    _check_name(name)
    key_file = kit / "startup" / f"{STEM[role]}.key"
    if key_file.exists():
        raise UsageError(
            f"{key_file}: there is a key already; take another --kit, or go on with `federation join`"
        )
    key = new_key()
    _write_secret(key_file, key)
    text = new_request(key, name, organization)
    file = kit / f"request-{name}.json"
    write_json(file, {"format": REQUEST, "version": 1, "role": role, "request": text})
    return {"name": name, "file": str(file), "fingerprint": fingerprint(text)}


def approve_request(file: Path, folder: Path, expected: str | None = None) -> dict[str, Any]:
    """Sign a request with the federation's root, and write the certificate beside it.

    Args:
        folder: that `provision` made.
        expected: the fingerprint that the hospital read out; "" or None where it was not compared.

    Raises:
        UsageError: when it is no request, the fingerprint is another one, or the name is taken by another key.
    """
    document = _document(file, REQUEST)
    text, role = str(document["request"]), _role(document)
    name, organization = request_names(text)
    _check_name(name)
    found = fingerprint(text)
    if expected and _bare(expected) != _bare(found):
        raise UsageError(
            f"{file}: its fingerprint is {found}, not the one that was read out; ask {name} again"
        )
    root_folder = folder / "root"
    try:
        key, root = (root_folder / "root.key").read_text(), (root_folder / "rootCA.pem").read_text()
    except OSError:
        raise UsageError(
            f"{folder}: no federation's root/ is in it; give --kit the folder that `provision` made"
        ) from None
    federation = dict(read_json(root_folder / "federation.json"))
    issued = root_folder / "issued.jsonl"
    _refuse_taken(read_lines(issued, _ISSUED), name, role, found)
    hosts = (_address(federation["server"])[0], name) if role == "server" else ()
    certificate = approved(text, key, root, role=role, hosts=hosts)
    target = file.parent / f"certificate-{name}.json"
    write_json(
        target,
        {
            "format": CERTIFICATE,
            "version": 1,
            "name": name,
            "role": role,
            "organization": organization,
            "certificate": certificate,
            "root": root,
            **federation,
        },
    )
    line = {"name": name, "role": role, "organization": organization, "fingerprint": found}
    line["until"] = verified(certificate, root).until.isoformat()
    append_line(issued, line | {"time": datetime.now(UTC).isoformat(timespec="seconds")})
    return line | {"file": str(target), "root_fingerprint": fingerprint(root)}


def join(file: Path, kit: Path, expected: str | None = None) -> dict[str, Any]:
    """Put a certificate beside the key that it is for; the kit is complete then.

    Args:
        file: what the coordinator sent back.
        expected: the root's fingerprint, as the coordinator read it out.

    Raises:
        UsageError: when the certificate is for another key, or the root is another one.
    """
    document = _document(file, CERTIFICATE)
    name, role, root = str(document["name"]), _role(document), str(document["root"])
    _check_name(name)
    found = fingerprint(root)
    if expected and _bare(expected) != _bare(found):
        raise UsageError(
            f"{file}: the root's fingerprint is {found}, not the one that was read out; do not join"
        )
    startup, stem = kit / "startup", STEM[role]
    key = startup / f"{stem}.key"
    if not key.exists():
        raise UsageError(
            f"{kit}: no key is here; make one with `wsi-fl federation request`, and send the request"
        )
    _refuse_of_another(file, kit, name, key.read_text(), str(document["certificate"]), root)
    write_text(startup / f"{stem}.crt", str(document["certificate"]))
    write_text(startup / "rootCA.pem", root)
    said = {
        "name": name,
        "role": role,
        "organization": document["organization"],
        "federation": document["federation"],
    }
    reached = {key: document[key] for key in ("server", "folder") if key in document}
    write_json(kit / "federation.json", said | reached)
    identity = Kit.open(kit).identity()
    if "server" in reached:
        host, port = _address(str(reached["server"]))
        federation = str(document["federation"])
        write_flare_files(kit.resolve(), name=name, role=role, federation=federation, host=host, port=port)
    until = verified(identity.certificate, identity.root).until
    return said | reached | {"kit": str(kit), "fingerprint": found, "until": until.date().isoformat()}


def fingerprint_line(whose: str, found: str) -> Line:
    """Say the fingerprint of a key, all 32 bytes of it, for people to compare: of a few bytes forgeries are found."""
    return Line(f"  fingerprint of {whose}: {found}")


def provisioned_lines(document: dict[str, Any]) -> Lines:
    """Say what was founded, and what comes next."""
    yield Line(f"federation {document['federation']} founded; to be read out to hospitals:")
    yield fingerprint_line("the root", document["fingerprint"])
    for name, kit in document["kits"].items():
        yield Line(f"  kit of {name}: {kit}")
    yield Line(f"keep {document['root']} offline: whoever has its key can name anybody", "yellow")


def requested_lines(document: dict[str, Any]) -> Lines:
    """Say what to send, and what to read out."""
    yield Line(f"send {document['file']} to the coordinator, and read out by telephone:")
    yield fingerprint_line("the request", document["fingerprint"])


def approved_lines(document: dict[str, Any]) -> Lines:
    """Say what to send back."""
    yield Line(f"{document['name']} ({document['organization']}) is {document['role']} of the federation now")
    yield fingerprint_line(document["name"], document["fingerprint"])
    yield Line(f"send {document['file']} back, and read out:")
    yield fingerprint_line("the root", document["root_fingerprint"])


def joined_lines(document: dict[str, Any]) -> Lines:
    """Say what the kit is, and what comes next."""
    by = document.get("server") or document.get("folder")
    yield Line(
        f"{document['kit']} is the kit of {document['name']} in {document['federation']} until {document['until']}"
    )
    yield Line(f"  reached by {by}")
    yield fingerprint_line("the root", document["fingerprint"])
    yield Line(f"next: wsi-fl federation check {document['kit']}")


def _document(file: Path, wanted: str) -> dict[str, Any]:
    try:
        document = dict(read_json(file))
    except (OSError, ValueError, TypeError):
        document = {}
    if document.get("format") != wanted:
        raise UsageError(f"{file}: this is no {wanted.removeprefix('wsi-fl federation ')} of a federation")
    return document


def _refuse_of_another(file: Path, kit: Path, name: str, key: str, certificate: str, root: str) -> None:
    """Refuse a certificate that is not for the key of a kit, before anything of the kit is overwritten."""
    try:
        found = Identity.load(key, certificate, root).name
    except UsageError as error:
        raise UsageError(f"{file} does not fit {kit}, which was left as it is: {error}") from None
    if found != name:
        raise UsageError(
            f"{file} says {name}, but its certificate belongs to {found}; {kit} was left as it is"
        )


def _refuse_taken(issued: Sequence[dict[str, Any]], name: str, role: Role, found: str) -> None:
    """Refuse a name that is another's, and a second server or coordinator; the same key may ask again."""
    reserved = {SERVER: "server", COORDINATOR: "coordinator"}
    if reserved.get(name, "hospital") != role:
        raise UsageError(f"{name!r} cannot be the name of a {role} in a federation")
    if any(line["name"] == name and line["fingerprint"] != found for line in issued):
        raise UsageError(
            f"{name} has a certificate for another key already; to give it a new key, delete its line from "
            "root/issued.jsonl"
        )


def _role(document: dict[str, Any]) -> Role:
    role = document.get("role")
    if role not in STEM:
        raise UsageError(f"{role!r} is no role in a federation")
    found: Role = role
    return found


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    if not _HOST.fullmatch(host) or (port and not port.isdigit()):
        raise UsageError(f"{text!r} is no address; write it as host:port, for example fl.example.org:{_PORT}")
    return host, int(port or _PORT)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a site; letters, digits, '.', '_' and '-' make one")


def _bare(text: str) -> str:
    return re.sub(r"[^0-9A-F]", "", text.upper())


def _write_secret(path: Path, text: str) -> None:
    """Write what nobody else may read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(path, text)
    path.chmod(0o600)


def issued_keys(folder: Path) -> dict[str, str]:
    """Return the fingerprint of the newest key of every hospital that a founded federation has given a certificate.

    Raises:
        UsageError: when no federation was founded in the folder.
    """
    if not (folder / "root" / "issued.jsonl").exists():
        raise UsageError(f"{folder}: no federation was founded here; give the folder that `provision` made")
    return {line["name"]: line["fingerprint"] for line in issued_lines(folder) if line["role"] == "hospital"}


def issued_lines(folder: Path) -> list[dict[str, Any]]:
    """Return a line for every certificate that a founded federation has given, oldest first; none where none lie."""
    return read_lines(folder / "root" / "issued.jsonl", _ISSUED)
