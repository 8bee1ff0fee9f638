"""Provisioning of a federation, and the enrolment of sites: request, approval, certificate.

Every key is made where it is used. Two small files are sent, a request and a certificate, and neither is secret. Both
sides verify them by reading a fingerprint out by telephone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from wsi_fl.hospitals.flare.flare_files import COORDINATOR, SERVER, write_flare_files
from wsi_fl.hospitals.trust.certificates import (
    Identity,
    NotTrusted,
    Role,
    build_request,
    build_root_certificate,
    generate_key,
    issue_certificate,
    key_fingerprint,
    parse_revocation_list,
    read_request_names,
    verify_certificate,
)
from wsi_fl.hospitals.trust.kit import (
    DEFAULT_PORT,
    FILE_STEMS,
    ROOT_FILE,
    Kit,
    KitDocument,
    bracket_ipv6,
    parse_address,
)
from wsi_fl.hospitals.trust.root_ca import RevocationResult, RootCA, distribute_revocations, revocation_lines
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.system.files import read_json, read_object, write_json, write_text
from wsi_fl.types import UsageError

_REQUEST_FORMAT, _CERTIFICATE_FORMAT = "wsi-fl federation request", "wsi-fl federation certificate"
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_RENEWAL_PURPOSE = b"wsi-fl renewal of a certificate, version 1\n"


class _ProvisionedFederation(TypedDict):
    """A new federation: the folder of its root CA, its fingerprint, the kits by holder, and how sites are connected."""

    federation: str
    root: str
    fingerprint: str
    kits: dict[str, str]
    server: NotRequired[str]
    folder: NotRequired[str]


def provision_federation(
    folder: Path,
    *,
    federation: str,
    server: str | None = None,
    shared_folder: str | None = None,
    sites: Sequence[str] = (),
) -> _ProvisionedFederation:
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
        raise UsageError("how do the hospitals reach each other? give either --server HOST or --folder ADDRESS")
    for name in (federation, *sites):
        _check_name(name)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: it holds something already; provision a federation in a new folder")
    host, port = _parse_server_address(server) if server else ("", 0)
    root_key = generate_key()
    root = build_root_certificate(root_key, federation)
    _write_secret(folder / "root" / "root.key", root_key)
    write_text(folder / "root" / "rootCA.pem", root)
    address = f"{bracket_ipv6(host)}:{port}" if server else str(shared_folder)
    address_key: Literal["server", "folder"] = "server" if server else "folder"
    write_json(folder / "root" / "federation.json", {"federation": federation, address_key: address})
    members: list[tuple[str, Role]] = [(COORDINATOR, "coordinator"), *[(site, "hospital") for site in sites]]
    if server:
        members.insert(0, (SERVER, "server"))
    for name, role in members:
        request = create_request(folder / name, name=name, organization=federation, role=role)
        certificate = approve_request(Path(request["file"]), folder, request["fingerprint"])
        install_certificate(Path(certificate["file"]), folder / name, certificate["root_fingerprint"])
    document: _ProvisionedFederation = {
        "federation": federation,
        "root": str(folder / "root"),
        "fingerprint": key_fingerprint(root),
        "kits": {name: str(folder / name) for name, _ in members},
    }
    document[address_key] = address
    return document


class _CertificateRequest(TypedDict):
    """A written request: its holder, its file, and the fingerprint to read out."""

    name: str
    file: str
    fingerprint: str


def create_request(kit: Path, *, name: str, organization: str, role: Role = "hospital") -> _CertificateRequest:
    """Make a key in a new kit, and the request to the coordinator; UsageError if a key exists."""
    _check_name(name)
    key_file = _key_file(kit, role)
    if key_file.exists():
        key_print = key_fingerprint(build_request(key_file.read_text(), name, organization))
        raise UsageError(
            f"{key_file}: there is a key already, whose fingerprint is {key_print}; take another --kit, or go on with "
            "`wsi-fl federation join`"
        )
    _write_secret(key_file, generate_key())
    return _write_request(kit, build_request(key_file.read_text(), name, organization), name, role)


def create_renewal_request(kit: Path, *, rotate: bool = False) -> _CertificateRequest:
    """Write a request for a further certificate of a kit.

    Args:
        rotate: whether for a new key, endorsed by the present one and used as soon as its certificate arrives.
    """
    current_kit, endorsement = Kit.open(kit), None
    name, key = current_kit.name, _key_file(kit, current_kit.role)
    if rotate and not (key := _next_key_file(key)).exists():
        _write_secret(key, generate_key())
    text = build_request(key.read_text(), name, str(current_kit.document["organization"]))
    if rotate:
        identity = current_kit.load_identity()
        signature = identity.sign(_RENEWAL_PURPOSE + text.encode()).hex()
        endorsement = {"certificate": identity.certificate, "signature": signature}
    return _write_request(kit, text, name, current_kit.role, endorsement)


def _write_request(
    kit: Path, text: str, name: str, role: Role, renews: dict[str, str] | None = None
) -> _CertificateRequest:
    file = kit / f"request-{name}.json"
    write_json(file, {"format": _REQUEST_FORMAT, "version": 1, "role": role, "request": text, "renews": renews})
    return {"name": name, "file": str(file), "fingerprint": key_fingerprint(text)}


def _key_file(kit: Path, role: Role) -> Path:
    return kit / "startup" / f"{FILE_STEMS[role]}.key"


def _next_key_file(key: Path) -> Path:
    """Return the path of a key that replaces another one once its certificate has arrived."""
    return key.with_suffix(".next.key")


class _ApprovedRequest(TypedDict):
    """An issued certificate.

    Attributes:
        fingerprint, root_fingerprint: of the holder's key and of the root CA's.
        file: to send back.
        renewed: whether the name had a certificate before.
        until: the last day.
        withdrew: the revocation of the name's previous key, if any.
    """

    name: str
    role: Role
    organization: str
    fingerprint: str
    file: str
    root_fingerprint: str
    renewed: bool
    until: str
    withdrew: RevocationResult | None


def approve_request(
    file: Path, folder: Path, expected: str | None = None, *, unchecked: bool = False
) -> _ApprovedRequest:
    """Sign a request with the root CA in a provisioned folder, and write the certificate beside it.

    If a name gets another key, its previous one is revoked.

    Args:
        expected: the fingerprint that the hospital read out; None if it was not compared.
        unchecked: whether a new name gets its certificate without a fingerprint.

    Raises:
        UsageError: when it is no request, the fingerprint differs or is missing for a new name, the key was revoked, or
            the name belongs to another key that has not signed the request.
    """
    document, role = _load_document(file, _REQUEST_FORMAT)
    text = str(document["request"])
    name, organization = read_request_names(text)
    _check_name(name)
    request_fingerprint, root = key_fingerprint(text), RootCA.open(folder)
    previous_key, revoked_keys = root.load_keys().get(name), parse_revocation_list(root.trust_pem).keys
    is_vouched = previous_key is not None or unchecked
    if _is_other_fingerprint(
        expected, request_fingerprint, f"{file}: have {name} read its fingerprint out", is_vouched=is_vouched
    ):
        raise UsageError(
            f"{file}: its fingerprint is {request_fingerprint}, not the one that was read out; ask {name} again"
        )
    federation = read_object(root.path / "federation.json", "put its backup back")
    if {SERVER: "server", COORDINATOR: "coordinator"}.get(name, "hospital") != role:
        raise UsageError(f"{name!r} cannot be the name of a {role} in a federation")
    _refuse_taken_name(root, document, name, compared=bool(expected))
    hosts = (_parse_server_address(federation["server"])[0], name) if role == "server" else ()
    certificate = issue_certificate(text, root.key, root.trust_pem, role=role, hosts=hosts)
    line: dict[str, str] = {"name": name, "role": role, "organization": organization}
    has_revoked = root.record_certificate(certificate, line)
    until = verify_certificate(certificate, root.trust_pem).until
    target, revocations_pem = file.parent / f"certificate-{name}.json", parse_revocation_list(root.trust_pem).text
    payload = {"format": _CERTIFICATE_FORMAT, "version": 1, "certificate": certificate, "root": root.certificate}
    write_json(target, payload | line | {"withdrawn": revocations_pem} | federation)
    return {
        "name": name,
        "role": role,
        "organization": organization,
        "fingerprint": request_fingerprint,
        "file": str(target),
        "root_fingerprint": key_fingerprint(root.certificate),
        "renewed": previous_key is not None and previous_key not in revoked_keys,
        "until": until.date().isoformat(),
        "withdrew": distribute_revocations(folder) if has_revoked else None,
    }


class _CompletedKit(KitDocument):
    """The content of a complete kit, its folder, and the root CA's fingerprint."""

    kit: str
    fingerprint: str
    until: str


def install_certificate(
    file: Path, kit: Path, expected: str | None = None, *, unchecked: bool = False
) -> _CompletedKit:
    """Put the certificate from the coordinator beside its key, which completes the kit.

    Args:
        expected: the root CA's fingerprint, as the coordinator read it out; a complete kit has the root CA already.
        unchecked: whether a new kit is completed without it.

    Raises:
        UsageError: when the certificate is for another key, the root CA differs, or a new kit lacks a fingerprint.
    """
    document, role = _load_document(file, _CERTIFICATE_FORMAT)
    name, root = str(document["name"]), str(document["root"])
    _check_name(name)
    startup, root_fingerprint = kit / "startup", key_fingerprint(root)
    is_vouched = (root_file := startup / ROOT_FILE).exists() or unchecked
    hint = f"{file}: have the coordinator read the root's fingerprint out"
    if _is_other_fingerprint(expected, root_fingerprint, hint, is_vouched=is_vouched):
        raise UsageError(
            f"{file}: the root CA's fingerprint is {root_fingerprint}, not the one that was read out; do not join"
        )
    certificate, key = str(document["certificate"]), _key_file(kit, role)
    if not key.exists():
        raise UsageError(f"{kit}: no key is here; make one with `wsi-fl federation request`, and send the request")
    if root_file.exists() and root_file.read_text() != root:
        raise UsageError(f"{file} is of another federation than {kit}, which was left as it is")
    next_key, revocations_pem = _next_key_file(key), str(document.get("withdrawn", ""))
    request_pem = build_request(next_key.read_text(), name, name) if next_key.exists() else root
    used_key = next_key if key_fingerprint(request_pem) == key_fingerprint(certificate) else key
    try:  # before anything of the kit is overwritten
        holder = Identity.load(used_key.read_text(), certificate, f"{root}\n{revocations_pem}").name
    except UsageError as error:
        raise UsageError(f"{file} does not fit {kit}, which was left as it is: {error}") from None
    if holder != name:
        raise UsageError(f"{file} says {name}, but its certificate belongs to {holder}; {kit} was left as it is")
    write_text(startup / f"{FILE_STEMS[role]}.crt", certificate)
    used_key.replace(key)
    write_text(root_file, root)
    kit_keys = ("name", "role", "organization", "federation", "server", "folder")
    kit_document = cast(KitDocument, {key: document[key] for key in kit_keys if key in document})
    write_json(kit / "federation.json", kit_document)
    completed_kit = Kit.open(kit)
    completed_kit.update_revocation_list(revocations_pem)
    identity = completed_kit.load_identity()
    if "server" in kit_document:
        host, port = _parse_server_address(str(kit_document["server"]))
        federation = str(kit_document["federation"])
        write_flare_files(kit.resolve(), name=name, role=role, federation=federation, host=host, port=port)
    until = verify_certificate(identity.certificate, identity.root).until
    return {**kit_document, "kit": str(kit), "fingerprint": root_fingerprint, "until": until.date().isoformat()}


def fingerprint_line(owner: str, fingerprint_text: str) -> TextLine:
    """Render the fingerprint of a key, all 32 bytes, for people to compare: a few bytes can be forged."""
    return TextLine(f"  fingerprint of {owner}: {fingerprint_text}")


def provision_lines(document: _ProvisionedFederation) -> Lines:
    """Report a provisioned federation, and the next step."""
    yield TextLine(f"federation {document['federation']} provisioned; to be read out to hospitals:")
    yield fingerprint_line("the root CA", document["fingerprint"])
    for name, kit in document["kits"].items():
        yield TextLine(f"  kit of {name}: {kit}")
    yield TextLine(f"keep {document['root']} offline: whoever has its key can name anybody", "yellow")


def request_lines(document: _CertificateRequest) -> Lines:
    """Report what to send, and what to read out."""
    file = document["file"]
    yield TextLine(f"send {file} to the coordinator, and read out by telephone, unless it renews one:")
    yield fingerprint_line("the request", document["fingerprint"])


def approval_lines(document: _ApprovedRequest) -> Lines:
    """Report an approval, and what to send back."""
    status = (
        f"renewed until {document['until']}" if document["renewed"] else f"{document['role']} of the federation now"
    )
    yield TextLine(f"{document['name']} ({document['organization']}) is {status}")
    yield fingerprint_line(document["name"], document["fingerprint"])
    yield TextLine(f"send {document['file']} back, and read out:")
    yield fingerprint_line("the root CA", document["root_fingerprint"])
    if document["withdrew"]:
        yield TextLine("its previous key is withdrawn; plans that name it need new ones", "yellow")
        yield from revocation_lines(document["withdrew"])


def kit_lines(document: _CompletedKit) -> Lines:
    """Report a complete kit, and the next step."""
    owner = f"of {document['name']} in {document['federation']} until {document['until']}"
    yield TextLine(f"{document['kit']} is the kit {owner}")
    yield TextLine(f"  reached by {document.get('server') or document.get('folder')}")
    yield fingerprint_line("the root CA", document["fingerprint"])
    yield TextLine(f"next: wsi-fl federation check {shlex.quote(document['kit'])}")


def _load_document(file: Path, expected_format: str) -> tuple[Mapping[str, Any], Role]:
    """Return the content of a file of this format, and the role it is about."""
    try:
        document = read_json(file)
    except OSError:
        document = None
    if not isinstance(document, dict) or document.get("format") != expected_format:
        raise UsageError(f"{file}: this is no {expected_format.removeprefix('wsi-fl federation ')} of a federation")
    if (role := document.get("role")) not in FILE_STEMS:
        raise UsageError(f"{role!r} is no role in a federation")
    return document, role


def _refuse_taken_name(root: RootCA, document: Mapping[str, Any], name: str, *, compared: bool) -> None:
    """Refuse a name of another key that did not sign the request, and a revoked one without a compared fingerprint."""
    current = root.load_keys().get(name)
    if current in parse_revocation_list(root.trust_pem).keys:
        if not compared:
            raise UsageError(
                f"the key of {name} was withdrawn; give --fingerprint of the new one, as {name} reads it to you"
            )
    elif current not in (None, key_fingerprint(str(document["request"])), _vouching_key(root, document, name)):
        raise UsageError(
            f"{name} has a certificate for another key already, which did not sign this request: `wsi-fl federation "
            f"renew --new-key` does; if that key is lost or stolen, say `wsi-fl federation revoke {name}` first"
        )


def _vouching_key(root: RootCA, document: Mapping[str, Any], name: str) -> str:
    """Return the fingerprint of the key that endorsed a request in the name of its holder; "" if none did."""
    endorsement, text = document.get("renews") or {}, str(document["request"])
    try:
        holder = verify_certificate(str(endorsement["certificate"]), root.trust_pem)
        holder.verify_signature(bytes.fromhex(str(endorsement["signature"])), _RENEWAL_PURPOSE + text.encode())
    except (KeyError, TypeError, ValueError, NotTrusted):
        return ""
    return key_fingerprint(str(endorsement["certificate"])) if holder.name == name else ""


def _parse_server_address(text: str) -> tuple[str, int]:
    with suppress(ValueError):
        host, port = parse_address(text)
        if ":" in host or _HOST_NAME.fullmatch(host):
            return host, port
    raise UsageError(f"{text!r} is no address; write it as host:port, for example fl.example.org:{DEFAULT_PORT}")


def _check_name(name: str) -> None:
    if not _SITE_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a site; letters, digits, '.', '_' and '-' make one")


def _is_other_fingerprint(expected: str | None, actual: str, hint: str, *, is_vouched: bool) -> bool:
    """Return whether a fingerprint that was read out differs; UsageError if it is missing and nothing else vouches."""
    expected_digits, actual_digits = (re.sub(r"[^0-9A-F]", "", text.upper()) for text in (expected or "", actual))
    if not expected_digits and (expected is not None or not is_vouched):
        raise UsageError(f"{hint} by telephone, and give it as --fingerprint; on a trial, say --unchecked")
    return expected_digits not in ("", actual_digits)


def _write_secret(path: Path, text: str) -> None:
    """Write a file that its owner alone may read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(path, text)
    path.chmod(0o600)
