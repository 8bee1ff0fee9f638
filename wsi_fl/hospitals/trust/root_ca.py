"""The root CA of a federation, in `root/` of the provisioned folder: its key issues certificates, and revokes them.

The revocation list is written by the root CA, stored by kits, and distributed by a shared folder. Of two lists the one
with the higher number holds, so an older list cannot replace it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NotRequired, TypedDict

from wsi_fl.hospitals.flare.flare_files import COORDINATOR
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.trust.certificates import (
    NotTrusted,
    extend_revocation_list,
    key_fingerprint,
    parse_revocation_list,
    verify_certificate,
)
from wsi_fl.hospitals.trust.kit import REVOCATIONS_FILE, ROOT_FILE, Kit, load_trusted_pem
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.system.files import append_line, read_lines, require_regular_file, write_text
from wsi_fl.types import UsageError, single_line

_ISSUED_FIELDS = {"name": str, "role": str, "fingerprint": str}
_MAX_LIST_BYTES = 1 << 20


@dataclass(frozen=True)
class RootCA:
    """The folder of a root CA, its certificate (PEM), and the record of issued certificates."""

    path: Path
    certificate: str

    @staticmethod
    def open(folder: Path) -> RootCA:
        """Read the root CA in a provisioned folder; UsageError if there is none."""
        path = folder / "root"
        try:
            return RootCA(path, (path / ROOT_FILE).read_text())
        except OSError:
            raise UsageError(
                f"{folder}: no federation's root/ is in it; give --kit the folder that `provision` made"
            ) from None

    @property
    def key(self) -> str:
        """The key, PEM; UsageError if it is kept elsewhere."""
        try:
            return (self.path / "root.key").read_text()
        except OSError:
            raise UsageError(f"{self.path / 'root.key'} cannot be read; put the root's key back for this") from None

    @property
    def trust_pem(self) -> str:
        """The root CA's certificate, and its revocation list if there is one, PEM."""
        return load_trusted_pem(self.path)

    def list_issued(self) -> list[dict[str, str]]:
        """Return a line for every certificate that was issued, oldest first."""
        return read_lines(self.path / "issued.jsonl", _ISSUED_FIELDS)

    def load_keys(self) -> dict[str, str]:
        """Return the fingerprint of each holder's newest key, by name."""
        return {entry["name"]: entry["fingerprint"] for entry in self.list_issued()}

    def record_certificate(self, certificate: str, line: dict[str, str]) -> bool:
        """Record an issued certificate (PEM); return whether another key of its name was revoked thereby."""
        key, timestamp = key_fingerprint(certificate), datetime.now(UTC).isoformat(timespec="seconds")
        holder = verify_certificate(certificate, self.certificate)
        serial, until = f"{holder.number:x}", holder.until.isoformat()
        line = line | {"fingerprint": key, "serial": serial, "until": until, "time": timestamp}
        append_line(self.path / "issued.jsonl", line)
        return self.revoke_certificates(line["name"], except_key=key)

    def revoke_certificates(self, name: str, *, except_key: str = "") -> bool:
        """Revoke all certificates of a name except those of one key; return whether any was not revoked before."""
        revoked_keys = {except_key, *parse_revocation_list(self.trust_pem).keys}
        serials: dict[int, str] = {}
        for entry in self.list_issued():
            if entry["name"] == name and (key := entry["fingerprint"]) not in revoked_keys:
                serial = entry.get("serial") or key.replace(":", "")[:38]  # without one its key alone is refused
                serials[int(serial, 16)] = key
        if serials:
            write_text(self.path / REVOCATIONS_FILE, extend_revocation_list(self.trust_pem, self.key, serials))
        return bool(serials)


class RevocationResult(TypedDict):
    """The result for a revocation list: the latest site, the kit with the list, and the list's file."""

    site: NotRequired[str]
    kit: NotRequired[str]
    number: NotRequired[int]
    newer: NotRequired[bool]
    said: str
    file: NotRequired[str]


def revoke_site(site: str, folder: Path) -> RevocationResult:
    """Revoke all certificates of a name, by the root CA in a provisioned folder; UsageError if there are none."""
    if not RootCA.open(folder).revoke_certificates(site):
        raise UsageError(f"{site} has no certificate that could be withdrawn; root/issued.jsonl has all names")
    return {"site": site, **distribute_revocations(folder)}


def distribute_revocations(folder: Path) -> RevocationResult:
    """Install the root CA's list in the coordinator's kit of the provisioned folder; return where the list is."""
    file, kit = folder / "root" / REVOCATIONS_FILE, folder / COORDINATOR
    result: RevocationResult = install_revocation_list(file, kit) if kit.is_dir() else {"said": ""}
    return result | {"file": str(file)}


def install_revocation_list(file: Path, kit: Path) -> RevocationResult:
    """Install a list in a kit and in its shared folder; UsageError if the root CA has not signed it."""
    target_kit = Kit.open(kit)
    try:
        is_newer = target_kit.update_revocation_list(require_regular_file(file).read_text(errors="replace"))
    except (OSError, NotTrusted) as error:
        raise UsageError(f"{file}: {single_line(error)}; {kit} was left as it is") from None
    number = target_kit.load_revocation_list().number
    message = f"{kit} has list {number} of withdrawn certificates{'' if is_newer else ', which is not older'}"
    if target_kit.folder and (note := sync_revocation_list(target_kit, target_kit.folder)):
        message += f"; {note}"
    return {"kit": str(kit), "number": number, "newer": is_newer, "said": message}


def sync_revocation_list(kit: Kit, address: str) -> str:
    """Take a newer revocation list from a shared folder, or write the kit's own there; return a line on it."""
    share = SharedFolder(address)
    try:
        is_there = REVOCATIONS_FILE in share.list_entries()
        shared_list = share.read(_MAX_LIST_BYTES, REVOCATIONS_FILE).decode(errors="replace") if is_there else ""
        with suppress(NotTrusted):  # anybody with write access may have written the file
            if kit.update_revocation_list(shared_list):
                return "a newer list of withdrawn certificates was taken from the folder"
        if (local_list := kit.load_revocation_list().text) in ("", shared_list):
            return ""
        if shared_list:
            share.remove_file(REVOCATIONS_FILE)
        share.write(local_list.encode(), REVOCATIONS_FILE)
        return "the list of withdrawn certificates was written into the folder"
    except Exception as error:  # each kind of share fails in its own way
        return f"the folder was not asked for withdrawn certificates: {single_line(error)}"


def revocation_lines(document: RevocationResult) -> Lines:
    """Report which kit has a list, and whom to send it to."""
    yield TextLine(document["said"])
    if "file" in document:
        yield TextLine(
            f"send {document['file']} to all, a server first, which is to be started anew: `wsi-fl federation join "
            f"{REVOCATIONS_FILE} --kit KIT`"
        )
