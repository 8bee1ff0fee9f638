"""How the list of withdrawn certificates gets about: the root writes it, kits take it, a shared folder carries it.

Everybody keeps the list with the higher number, so nobody can put an older one in its place.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from wsi_fl.hospitals.flare.files import COORDINATOR
from wsi_fl.hospitals.lines.share import Share
from wsi_fl.hospitals.trust.certificates import NotTrusted
from wsi_fl.hospitals.trust.kit import LIST, Kit
from wsi_fl.hospitals.trust.root import Root
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.system.files import ordinary
from wsi_fl.types import UsageError, one_line

_MOST_BYTES = 1 << 20


def revoke(site: str, folder: Path) -> dict[str, Any]:
    """Withdraw all certificates of a name, by the root in a founded folder.

    Raises:
        UsageError: when the name has none that could be withdrawn.
    """
    if not Root.open(folder).withdraw(site):
        raise UsageError(
            f"{site} has no certificate that could be withdrawn; root/issued.jsonl has all names"
        )
    return {"site": site} | handed_on(folder)


def handed_on(folder: Path) -> dict[str, Any]:
    """Give the root's list to the coordinator's kit in the founded folder; return where the list lies."""
    file, kit = folder / "root" / LIST, folder / COORDINATOR
    return (take_list(file, kit) if kit.is_dir() else {"said": ""}) | {"file": str(file)}


def take_list(file: Path, kit: Path) -> dict[str, Any]:
    """Put a list of withdrawn certificates into a kit, and into the folder that it shares.

    Raises:
        UsageError: when the root has not signed it.
    """
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


def list_lines(document: dict[str, Any]) -> Lines:
    """Say who has a list, and whom to send it to."""
    yield Line(document["said"])
    if "file" in document:
        yield Line(
            f"send {document['file']} to all: `wsi-fl federation join {LIST} --kit KIT`; start a server anew"
        )
