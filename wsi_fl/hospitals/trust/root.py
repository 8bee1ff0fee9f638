"""The root of a federation, in `root/` of the founded folder: its key gives certificates, and withdraws them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wsi_fl.hospitals.trust.certificates import fingerprint, longer_list, serial_number, verified, withdrawn
from wsi_fl.hospitals.trust.kit import LIST, ROOT, trusted_in
from wsi_fl.system.files import append_line, read_lines, write_text
from wsi_fl.types import UsageError

_ISSUED = {"name": str, "role": str, "fingerprint": str}


@dataclass(frozen=True)
class Root:
    """The certificate of a root (PEM), the folder that it lies in, and what its key was used for."""

    path: Path
    certificate: str

    @staticmethod
    def open(folder: Path) -> Root:
        """Read the root in a founded folder.

        Raises:
            UsageError: when none is there.
        """
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

    def issued(self) -> list[dict[str, Any]]:
        """Return a line for every certificate that was given, oldest first."""
        return read_lines(self.path / "issued.jsonl", _ISSUED)

    def keys(self) -> dict[str, str]:
        """Return the fingerprint of everybody's newest key, by name."""
        return {one["name"]: one["fingerprint"] for one in self.issued()}

    def note(self, certificate: str, line: dict[str, Any]) -> bool:
        """Note a certificate (PEM) that was given; return whether another key of its name was withdrawn by that."""
        key, now = fingerprint(certificate), datetime.now(UTC).isoformat(timespec="seconds")
        until = verified(certificate, self.certificate).until.isoformat()
        number = f"{serial_number(certificate):x}"
        line = line | {"fingerprint": key, "serial": number, "until": until, "time": now}
        append_line(self.path / "issued.jsonl", line)
        return self.withdraw(line["name"], but=key)

    def withdraw(self, name: str, *, but: str = "") -> bool:
        """Put all certificates of a name on the list, but those of one key; return whether any were not there yet."""
        gone = {but, *withdrawn(self.trusted).keys}
        more = [one for one in self.issued() if one["name"] == name and one["fingerprint"] not in gone]
        if more:
            numbers = {_serial(one): one["fingerprint"] for one in more}
            write_text(self.path / LIST, longer_list(self.trusted, self.key, numbers))
        return bool(more)


def _serial(line: dict[str, Any]) -> int:
    """The number of a certificate; one without a number is refused by its key alone."""
    return int(line.get("serial") or line["fingerprint"].replace(":", "")[:38], 16)
