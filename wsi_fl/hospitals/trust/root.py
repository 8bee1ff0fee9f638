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

from wsi_fl.hospitals.flare.files import COORDINATOR
from wsi_fl.hospitals.lines.share import Share
from wsi_fl.hospitals.trust.certificates import NotTrusted, fingerprint, longer_list, verified, withdrawn
from wsi_fl.hospitals.trust.kit import LIST, ROOT, Kit, trusted_in
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.system.files import append_line, ordinary, read_lines, write_text
from wsi_fl.types import UsageError, one_line

_ISSUED = {"name": str, "role": str, "fingerprint": str}
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Root:
    """The folder of a root CA, its certificate (PEM), and the record of issued certificates."""

    path: Path
    certificate: str

    @staticmethod
    def open(folder: Path) -> Root:
        """Read the root CA in a provisioned folder; UsageError if there is none."""
        path = folder / "root"
        try:
            return Root(path, (path / ROOT).read_text())
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
            raise UsageError(
                f"{self.path / 'root.key'} cannot be read; put the root's key back for this"
            ) from None

    @property
    def trusted(self) -> str:
        """The root CA's certificate, and its revocation list if there is one, PEM."""
        return trusted_in(self.path)

    def issued(self) -> list[dict[str, str]]:
        """Return a line for every certificate that was issued, oldest first."""
        return read_lines(self.path / "issued.jsonl", _ISSUED)

    def keys(self) -> dict[str, str]:
        """Return the fingerprint of each holder's newest key, by name."""
        return {one["name"]: one["fingerprint"] for one in self.issued()}

    def note(self, certificate: str, line: dict[str, str]) -> bool:
        """Record an issued certificate (PEM); return whether another key of its name was revoked thereby."""
        key, now = fingerprint(certificate), datetime.now(UTC).isoformat(timespec="seconds")
        holder = verified(certificate, self.certificate)
        number, until = f"{holder.number:x}", holder.until.isoformat()
        line = line | {"fingerprint": key, "serial": number, "until": until, "time": now}
        append_line(self.path / "issued.jsonl", line)
        return self.withdraw(line["name"], but=key)

    def withdraw(self, name: str, *, but: str = "") -> bool:
        """Revoke all certificates of a name except those of one key; return whether any was not revoked before."""
        gone = {but, *withdrawn(self.trusted).keys}
        numbers: dict[int, str] = {}
        for one in self.issued():
            if one["name"] == name and (key := one["fingerprint"]) not in gone:
                number = (
                    one.get("serial") or key.replace(":", "")[:38]
                )  # without one its key alone is refused
                numbers[int(number, 16)] = key
        if numbers:
            write_text(self.path / LIST, longer_list(self.trusted, self.key, numbers))
        return bool(numbers)


class Listed(TypedDict):
    """The result for a revocation list: the latest site, the kit with the list, and the list's file."""

    site: NotRequired[str]
    kit: NotRequired[str]
    number: NotRequired[int]
    newer: NotRequired[bool]
    said: str
    file: NotRequired[str]


def revoke(site: str, folder: Path) -> Listed:
    """Revoke all certificates of a name, by the root CA in a provisioned folder; UsageError if there are none."""
    if not Root.open(folder).withdraw(site):
        raise UsageError(
            f"{site} has no certificate that could be withdrawn; root/issued.jsonl has all names"
        )
    return {"site": site, **handed_on(folder)}


def handed_on(folder: Path) -> Listed:
    """Install the root CA's list in the coordinator's kit of the provisioned folder; return where the list is."""
    file, kit = folder / "root" / LIST, folder / COORDINATOR
    taken: Listed = take_list(file, kit) if kit.is_dir() else {"said": ""}
    return taken | {"file": str(file)}


def take_list(file: Path, kit: Path) -> Listed:
    """Install a list in a kit and in its shared folder; UsageError if the root CA has not signed it."""
    opened = Kit.open(kit)
    try:
        newer = opened.take(ordinary(file).read_text(errors="replace"))
    except (OSError, NotTrusted) as error:
        raise UsageError(f"{file}: {one_line(error)}; {kit} was left as it is") from None
    number = opened.withdrawn().number
    said = f"{kit} has list {number} of withdrawn certificates{'' if newer else ', which is not older'}"
    laid = exchange_list(opened, opened.folder) if opened.folder else ""
    return {"kit": str(kit), "number": number, "newer": newer, "said": f"{said}{laid and f'; {laid}'}"}


def exchange_list(kit: Kit, address: str) -> str:
    """Take a newer revocation list from a shared folder, or write the kit's own there; return a line on it."""
    share = Share(address)
    try:
        laid = share.read(_MOST_BYTES, LIST).decode(errors="replace") if LIST in share.entries() else ""
        with suppress(NotTrusted):  # anybody with write access may have written the file
            if kit.take(laid):
                return "a newer list of withdrawn certificates was taken from the folder"
        if (mine := kit.withdrawn().text) in ("", laid):
            return ""
        if laid:
            share.remove(LIST)
        share.write(mine.encode(), LIST)
        return "the list of withdrawn certificates was written into the folder"
    except Exception as error:  # each kind of share fails in its own way
        return f"the folder was not asked for withdrawn certificates: {one_line(error)}"


def list_lines(document: Listed) -> Lines:
    """Report which kit has a list, and whom to send it to."""
    yield Line(document["said"])
    if "file" in document:
        yield Line(
            f"send {document['file']} to all, a server first, which is to be started anew: `wsi-fl federation join "
            f"{LIST} --kit KIT`"
        )
