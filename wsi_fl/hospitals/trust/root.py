"""The root of a federation, in `root/` of the founded folder: its key gives certificates, and withdraws them.

The list of withdrawn ones is written by the root, taken by kits, and carried by a shared folder. Everybody keeps the
list with the higher number, so nobody can put an older one in its place.
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
    """The folder of a root, its certificate (PEM), and what its key was used for."""

    path: Path
    certificate: str

    @staticmethod
    def open(folder: Path) -> Root:
        """Read the root in a founded folder; UsageError where none is there."""
        path = folder / "root"
        try:
            return Root(path, (path / ROOT).read_text())
        except OSError:
            raise UsageError(
                f"{folder}: no federation's root/ is in it; give --kit the folder that `provision` made"
            ) from None

    @property
    def key(self) -> str:
        """The key, PEM; UsageError where it is kept elsewhere."""
        try:
            return (self.path / "root.key").read_text()
        except OSError:
            raise UsageError(
                f"{self.path / 'root.key'} cannot be read; put the root's key back for this"
            ) from None

    @property
    def trusted(self) -> str:
        """The root's certificate, and its list where there is one, PEM."""
        return trusted_in(self.path)

    def issued(self) -> list[dict[str, str]]:
        """Return a line for every certificate that was given, oldest first."""
        return read_lines(self.path / "issued.jsonl", _ISSUED)

    def keys(self) -> dict[str, str]:
        """Return the fingerprint of everybody's newest key, by name."""
        return {one["name"]: one["fingerprint"] for one in self.issued()}

    def note(self, certificate: str, line: dict[str, str]) -> bool:
        """Note a certificate (PEM) that was given; return whether another key of its name was withdrawn by that."""
        key, now = fingerprint(certificate), datetime.now(UTC).isoformat(timespec="seconds")
        holder = verified(certificate, self.certificate)
        number, until = f"{holder.number:x}", holder.until.isoformat()
        line = line | {"fingerprint": key, "serial": number, "until": until, "time": now}
        append_line(self.path / "issued.jsonl", line)
        return self.withdraw(line["name"], but=key)

    def withdraw(self, name: str, *, but: str = "") -> bool:
        """Put all certificates of a name on the list, but those of one key; return whether any were not there yet."""
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
    """What became of a list: who is on it now, which kit has it, and where it lies."""

    site: NotRequired[str]
    kit: NotRequired[str]
    number: NotRequired[int]
    newer: NotRequired[bool]
    said: str
    file: NotRequired[str]


def revoke(site: str, folder: Path) -> Listed:
    """Withdraw all certificates of a name, by the root in a founded folder; UsageError where there are none."""
    if not Root.open(folder).withdraw(site):
        raise UsageError(
            f"{site} has no certificate that could be withdrawn; root/issued.jsonl has all names"
        )
    return {"site": site, **handed_on(folder)}


def handed_on(folder: Path) -> Listed:
    """Give the root's list to the coordinator's kit in the founded folder; return where the list lies."""
    file, kit = folder / "root" / LIST, folder / COORDINATOR
    taken: Listed = take_list(file, kit) if kit.is_dir() else {"said": ""}
    return taken | {"file": str(file)}


def take_list(file: Path, kit: Path) -> Listed:
    """Put a list into a kit, and into the folder that it shares; UsageError where the root has not signed it."""
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
    """Take a newer list of withdrawn certificates from a shared folder, or lay the kit's own there; say which."""
    share = Share(address)
    try:
        laid = share.read(_MOST_BYTES, LIST).decode(errors="replace") if LIST in share.entries() else ""
        with suppress(NotTrusted):  # whoever can write to the folder may have laid anything
            if kit.take(laid):
                return "a newer list of withdrawn certificates was taken from the folder"
        if (mine := kit.withdrawn().text) in ("", laid):
            return ""
        if laid:
            share.remove(LIST)
        share.write(mine.encode(), LIST)
        return "the list of withdrawn certificates was laid into the folder"
    except Exception as error:  # each kind of share fails in its own way
        return f"the folder was not asked for withdrawn certificates: {one_line(error)}"


def list_lines(document: Listed) -> Lines:
    """Say who has a list, and whom to send it to."""
    yield Line(document["said"])
    if "file" in document:
        yield Line(
            f"send {document['file']} to all, a server first, which is to be started anew: `wsi-fl federation join "
            f"{LIST} --kit KIT`"
        )
