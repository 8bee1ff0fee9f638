"""Provisioning of a federation, and the enrolment of sites: request, approval, certificate.

Every key is made where it is used. Two small files are sent, a request and a certificate, and neither is secret. Both
sides verify them by reading a fingerprint out by telephone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict, cast

from wsi_fl.hospitals.flare.files import COORDINATOR, SERVER, write_flare_files
from wsi_fl.hospitals.trust.certificates import (
    Identity,
    NotTrusted,
    Role,
    approved,
    fingerprint,
    new_key,
    new_request,
    new_root,
    request_names,
    verified,
    withdrawn,
)
from wsi_fl.hospitals.trust.kit import DEFAULT_PORT, ROOT, STEM, Kit, KitDocument, address_of, bracketed
from wsi_fl.hospitals.trust.root import Root, handed_on, list_lines
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.system.files import read_json, read_object, write_json, write_text
from wsi_fl.types import UsageError

_REQUEST, _CERTIFICATE = "wsi-fl federation request", "wsi-fl federation certificate"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_RENEWAL = b"wsi-fl renewal of a certificate, version 1\n"


def provision(
    folder: Path,
    *,
    federation: str,
    server: str | None = None,
    shared_folder: str | None = None,
    sites: Sequence[str] = (),
) -> dict[str, Any]:
    """Provision a federation: its root CA, the kit of the server (if there is one) and that of the coordinator.

    Args:
        folder: a new one; keep its `root/`, which holds the root CA's key, offline.
        server: "host", "host:port" or "[IPv6]:port" under which hospitals reach the server.
        shared_folder: address of a folder that all can reach, if there is no server.
        sites: hospitals of a test bed, whose kits are made here too, keys included.

    Raises:
        UsageError: when the folder is not empty, or neither or both of server and shared_folder are given.
    """
    if (server is None) == (shared_folder is None):
        raise UsageError(
            "how do the hospitals reach each other? give either --server HOST or --folder ADDRESS"
        )
    for name in (federation, *sites):
        _check_name(name)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: it holds something already; provision a federation in a new folder")
    host, port = _address(server) if server else ("", 0)
    root_key = new_key()
    root = new_root(root_key, federation)
    _write_secret(folder / "root" / "root.key", root_key)
    write_text(folder / "root" / "rootCA.pem", root)
    reached = {"server": f"{bracketed(host)}:{port}"} if server else {"folder": shared_folder}
    write_json(folder / "root" / "federation.json", {"federation": federation, **reached})
    members: list[tuple[str, Role]] = [(COORDINATOR, "coordinator"), *[(site, "hospital") for site in sites]]
    if server:
        members.insert(0, (SERVER, "server"))
    for name, role in members:
        asked = request(folder / name, name=name, organization=federation, role=role)
        certificate = approve_request(Path(asked["file"]), folder, asked["fingerprint"])
        join(Path(certificate["file"]), folder / name, certificate["root_fingerprint"])
    return {
        "federation": federation,
        "root": str(folder / "root"),
        "fingerprint": fingerprint(root),
        "kits": {name: str(folder / name) for name, _ in members},
        **reached,
    }


class _Asked(TypedDict):
    """A written request: its holder, its file, and the fingerprint to read out."""

    name: str
    file: str
    fingerprint: str


def request(kit: Path, *, name: str, organization: str, role: Role = "hospital") -> _Asked:
    """Make a key in a new kit, and the request to the coordinator; UsageError if a key exists."""
    _check_name(name)
    key_file = _key_file(kit, role)
    if key_file.exists():
        found = fingerprint(new_request(key_file.read_text(), name, organization))
        raise UsageError(
            f"{key_file}: there is a key already, whose fingerprint is {found}; take another --kit, or go on with "
            "`wsi-fl federation join`"
        )
    _write_secret(key_file, new_key())
    return _asked(kit, new_request(key_file.read_text(), name, organization), name, role)


def renew(kit: Path, *, rotate: bool = False) -> _Asked:
    """Write a request for a further certificate of a kit.

    Args:
        rotate: whether for a new key, endorsed by the present one and used as soon as its certificate arrives.
    """
    opened, vouched = Kit.open(kit), None
    name, organization, key = opened.name, str(opened.document["organization"]), _key_file(kit, opened.role)
    if rotate and not (key := _fresh(key)).exists():
        _write_secret(key, new_key())
    text = new_request(key.read_text(), name, organization)
    if rotate:
        identity = opened.identity()
        signature = identity.sign(_RENEWAL + text.encode()).hex()
        vouched = {"certificate": identity.certificate, "signature": signature}
    return _asked(kit, text, name, opened.role, vouched)


def _asked(kit: Path, text: str, name: str, role: Role, renews: dict[str, str] | None = None) -> _Asked:
    file = kit / f"request-{name}.json"
    write_json(file, {"format": _REQUEST, "version": 1, "role": role, "request": text, "renews": renews})
    return {"name": name, "file": str(file), "fingerprint": fingerprint(text)}


def _key_file(kit: Path, role: Role) -> Path:
    return kit / "startup" / f"{STEM[role]}.key"


def _fresh(key: Path) -> Path:
    """Return the path of a key that replaces another one once its certificate has arrived."""
    return key.with_suffix(".next.key")


def approve_request(
    file: Path, folder: Path, expected: str | None = None, *, unchecked: bool = False
) -> dict[str, Any]:
    """Sign a request with the root CA in a provisioned folder, and write the certificate beside it.

    If a name gets another key, its previous one is revoked.

    Args:
        expected: the fingerprint that the hospital read out; None if it was not compared.
        unchecked: whether a new name gets its certificate without a fingerprint.

    Raises:
        UsageError: when it is no request, the fingerprint differs or is missing for a new name, the key was revoked, or
            the name belongs to another key that has not signed the request.
    """
    document, role = _document(file, _REQUEST)
    text = str(document["request"])
    name, organization = request_names(text)
    _check_name(name)
    found, root = fingerprint(text), Root.open(folder)
    before, gone = root.keys().get(name), withdrawn(root.trusted).keys
    vouched = before is not None or unchecked
    if _is_another(expected, found, f"{file}: have {name} read its fingerprint out", vouched=vouched):
        raise UsageError(
            f"{file}: its fingerprint is {found}, not the one that was read out; ask {name} again"
        )
    federation = read_object(root.path / "federation.json", "put its backup back")
    if {SERVER: "server", COORDINATOR: "coordinator"}.get(name, "hospital") != role:
        raise UsageError(f"{name!r} cannot be the name of a {role} in a federation")
    _refuse_taken(root, document, name, compared=bool(expected))
    hosts = (_address(federation["server"])[0], name) if role == "server" else ()
    certificate = approved(text, root.key, root.trusted, role=role, hosts=hosts)
    line = {"name": name, "role": role, "organization": organization}
    withdrew, until = root.note(certificate, line), verified(certificate, root.trusted).until
    target, listed = file.parent / f"certificate-{name}.json", withdrawn(root.trusted).text
    said = {"format": _CERTIFICATE, "version": 1, "certificate": certificate, "root": root.certificate}
    write_json(target, said | line | {"withdrawn": listed} | federation)
    known = {"fingerprint": found, "file": str(target), "root_fingerprint": fingerprint(root.certificate)}
    term = {"renewed": before is not None and before not in gone, "until": until.date().isoformat()}
    return line | known | term | {"withdrew": handed_on(folder) if withdrew else None}


class _Joined(KitDocument):
    """The content of a complete kit, its folder, and the root CA's fingerprint."""

    kit: str
    fingerprint: str
    until: str


def join(file: Path, kit: Path, expected: str | None = None, *, unchecked: bool = False) -> _Joined:
    """Put the certificate from the coordinator beside its key, which completes the kit.

    Args:
        expected: the root CA's fingerprint, as the coordinator read it out; a complete kit has the root CA already.
        unchecked: whether a new kit is completed without it.

    Raises:
        UsageError: when the certificate is for another key, the root CA differs, or a new kit lacks a fingerprint.
    """
    document, role = _document(file, _CERTIFICATE)
    name, root = str(document["name"]), str(document["root"])
    _check_name(name)
    startup, found = kit / "startup", fingerprint(root)
    vouched = (own := startup / ROOT).exists() or unchecked
    ask = f"{file}: have the coordinator read the root's fingerprint out"
    if _is_another(expected, found, ask, vouched=vouched):
        raise UsageError(
            f"{file}: the root CA's fingerprint is {found}, not the one that was read out; do not join"
        )
    certificate, key = str(document["certificate"]), _key_file(kit, role)
    if not key.exists():
        raise UsageError(
            f"{kit}: no key is here; make one with `wsi-fl federation request`, and send the request"
        )
    if own.exists() and own.read_text() != root:
        raise UsageError(f"{file} is of another federation than {kit}, which was left as it is")
    fresh, gone = _fresh(key), str(document.get("withdrawn", ""))
    asked = new_request(fresh.read_text(), name, name) if fresh.exists() else root
    used = fresh if fingerprint(asked) == fingerprint(certificate) else key
    try:  # before anything of the kit is overwritten
        holder = Identity.load(used.read_text(), certificate, f"{root}\n{gone}").name
    except UsageError as error:
        raise UsageError(f"{file} does not fit {kit}, which was left as it is: {error}") from None
    if holder != name:
        raise UsageError(
            f"{file} says {name}, but its certificate belongs to {holder}; {kit} was left as it is"
        )
    write_text(startup / f"{STEM[role]}.crt", certificate)
    used.replace(key)
    write_text(own, root)
    kept = ("name", "role", "organization", "federation", "server", "folder")
    said = cast(KitDocument, {key: document[key] for key in kept if key in document})
    write_json(kit / "federation.json", said)
    joined = Kit.open(kit)
    joined.take(gone)
    identity = joined.identity()
    if "server" in said:
        host, port = _address(str(said["server"]))
        federation = str(said["federation"])
        write_flare_files(kit.resolve(), name=name, role=role, federation=federation, host=host, port=port)
    until = verified(identity.certificate, identity.root).until
    return {**said, "kit": str(kit), "fingerprint": found, "until": until.date().isoformat()}


def fingerprint_line(whose: str, found: str) -> Line:
    """Render the fingerprint of a key, all 32 bytes, for people to compare: a few bytes can be forged."""
    return Line(f"  fingerprint of {whose}: {found}")


def provisioned_lines(document: dict[str, Any]) -> Lines:
    """Report a provisioned federation, and the next step."""
    yield Line(f"federation {document['federation']} provisioned; to be read out to hospitals:")
    yield fingerprint_line("the root CA", document["fingerprint"])
    for name, kit in document["kits"].items():
        yield Line(f"  kit of {name}: {kit}")
    yield Line(f"keep {document['root']} offline: whoever has its key can name anybody", "yellow")


def requested_lines(document: _Asked) -> Lines:
    """Report what to send, and what to read out."""
    file = document["file"]
    yield Line(f"send {file} to the coordinator, and read out by telephone, unless it renews one:")
    yield fingerprint_line("the request", document["fingerprint"])


def approved_lines(document: dict[str, Any]) -> Lines:
    """Report an approval, and what to send back."""
    now = (
        f"renewed until {document['until']}"
        if document["renewed"]
        else f"{document['role']} of the federation now"
    )
    yield Line(f"{document['name']} ({document['organization']}) is {now}")
    yield fingerprint_line(document["name"], document["fingerprint"])
    yield Line(f"send {document['file']} back, and read out:")
    yield fingerprint_line("the root CA", document["root_fingerprint"])
    if document["withdrew"]:
        yield Line("its previous key is withdrawn; plans that name it need new ones", "yellow")
        yield from list_lines(document["withdrew"])


def joined_lines(document: _Joined) -> Lines:
    """Report a complete kit, and the next step."""
    whose = f"of {document['name']} in {document['federation']} until {document['until']}"
    yield Line(f"{document['kit']} is the kit {whose}")
    yield Line(f"  reached by {document.get('server') or document.get('folder')}")
    yield fingerprint_line("the root CA", document["fingerprint"])
    yield Line(f"next: wsi-fl federation check {document['kit']}")


def _document(file: Path, wanted: str) -> tuple[dict[str, Any], Role]:
    """Return the content of a file of this format, and the role it is about."""
    try:
        document = read_json(file)
    except OSError:
        document = None
    if not isinstance(document, dict) or document.get("format") != wanted:
        raise UsageError(f"{file}: this is no {wanted.removeprefix('wsi-fl federation ')} of a federation")
    if (role := document.get("role")) not in STEM:
        raise UsageError(f"{role!r} is no role in a federation")
    return document, role


def _refuse_taken(root: Root, document: dict[str, Any], name: str, *, compared: bool) -> None:
    """Refuse a name that belongs to another key, unless that key signed the request; the same key may ask again.

    A name whose keys were all revoked needs a compared fingerprint.
    """
    current = root.keys().get(name)
    if current in withdrawn(root.trusted).keys:
        if not compared:
            raise UsageError(
                f"the key of {name} was withdrawn; give --fingerprint of the new one, as {name} reads it to you"
            )
    elif current not in (None, fingerprint(str(document["request"])), _vouching(root, document, name)):
        raise UsageError(
            f"{name} has a certificate for another key already, which did not sign this request: `wsi-fl federation "
            f"renew --new-key` does; if that key is lost or stolen, say `wsi-fl federation revoke {name}` first"
        )


def _vouching(root: Root, document: dict[str, Any], name: str) -> str:
    """Return the fingerprint of the key that endorsed a request in the name of its holder; "" if none did."""
    signed, text = document.get("renews") or {}, str(document["request"])
    try:
        holder = verified(str(signed["certificate"]), root.trusted)
        holder.check(bytes.fromhex(str(signed["signature"])), _RENEWAL + text.encode())
    except (KeyError, TypeError, ValueError, NotTrusted):
        return ""
    return fingerprint(str(signed["certificate"])) if holder.name == name else ""


def _address(text: str) -> tuple[str, int]:
    with suppress(ValueError):
        host, port = address_of(text)
        if ":" in host or _HOST.fullmatch(host):
            return host, port
    raise UsageError(
        f"{text!r} is no address; write it as host:port, for example fl.example.org:{DEFAULT_PORT}"
    )


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a site; letters, digits, '.', '_' and '-' make one")


def _is_another(expected: str | None, found: str, ask: str, *, vouched: bool) -> bool:
    """Return whether a fingerprint that was read out differs, in whatever notation.

    A missing one raises UsageError unless something else vouches for the key, an empty one always.
    """
    said, there = (re.sub(r"[^0-9A-F]", "", text.upper()) for text in (expected or "", found))
    if not said and (expected is not None or not vouched):
        raise UsageError(f"{ask} by telephone, and give it as --fingerprint; on a trial, say --unchecked")
    return said not in ("", there)


def _write_secret(path: Path, text: str) -> None:
    """Write a file that its owner alone may read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(path, text)
    path.chmod(0o600)
