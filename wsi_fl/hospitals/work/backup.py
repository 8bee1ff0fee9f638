"""What a site must not lose, in one file: its key and certificates, what it has signed, and its ledger with its heads.

The file is a plain tar that its owner alone may read: it holds the key. What is there already is never overwritten, and
no ledger takes the place of a newer one.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import time
from pathlib import Path, PurePosixPath
from typing import Any

from wsi_fl.hospitals.trust.kit import STEM, Kit
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.stages.site.ledgers import heads_of
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.folder import Study
from wsi_fl.system.files import atomic, ordinary, write_bytes
from wsi_fl.system.locks import alone
from wsi_fl.types import UsageError, WsiFlError

_KIT, _STUDY = _PARTS = ("kit", "study")
_LEDGER, _HEAD = "ledger.jsonl", "ledger.head.{}.json"
_OF_KIT, _OF_STUDY = ("*.json", "jobs.jsonl", "startup/*"), ("federation/*.json",)


def backup(kit: Kit, study: Study | None, out: Path) -> dict[str, Any]:
    """Copy what a kit's holder must not lose into one file with mode 0600; a client may run meanwhile.

    Args:
        study: of the hospital; None for the kit of a server or a coordinator.

    Returns:
        {"file", "name", "files": how many, "lines": of the ledger, None without one}.

    Raises:
        WsiFlError: when the ledger is damaged, or older than its heads know.
    """
    found, lines = _files(_KIT, kit.path, _OF_KIT), None
    if study is not None:
        ledger = LedgerFile(study.ledger(kit.name), heads := _heads(study, kit.name))
        with ledger.locked():
            lines = len(ledger.entries)
            found |= _files(_STUDY, study.root, (*_OF_STUDY, f"sites/{kit.name}.toml"))
            known = [(_LEDGER, ledger.path), *((_HEAD.format(k), head) for k, head in enumerate(heads))]
            found |= {name: path.read_bytes() for name, path in known if path.is_file()}
    with atomic(out) as temporary, tarfile.open(temporary, "w") as tar:
        temporary.chmod(0o600)
        for name, data in found.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            tar.addfile(entry, io.BytesIO(data))
    return {"file": str(out), "name": kit.name, "files": len(found), "lines": lines}


def restore(file: Path, kit: Path, study: Study | None) -> dict[str, Any]:
    """Put back what is missing of a kit and a study; what is there stays as it is.

    Args:
        file: that `backup` made.
        kit: its folder, a new one or that of the same key.

    Returns:
        {"kit", "name", "restored": the files that were missing, "kept": those that were there}.

    Raises:
        UsageError: when the file is no backup, or the kit holds another key.
        WsiFlError: when the ledger is older than this machine knows, or the kit is in use.
    """
    found = _read(file)
    name, stem = _whose(file, found)
    key = kit / "startup" / f"{stem}.key"
    if key.exists() and key.read_bytes() != found.get(f"{_KIT}/startup/{key.name}"):
        raise UsageError(f"{kit}: another key is here than in {file}; restore into a new folder")
    if study is None and any(one.startswith(f"{_STUDY}/") for one in found):
        raise UsageError(f"{file}: this is of a hospital; give --study DIR too")
    places = {_KIT: kit, _STUDY: study.root if study else kit}
    inside = {PurePosixPath(one): data for one, data in found.items() if "/" in one}
    targets = {places[one.parts[0]].joinpath(*one.parts[1:]): data for one, data in inside.items()}
    restored: list[str] = []
    with alone(kit / ".lock", f"{name} runs now: another process has {kit}; end it first"):
        if study is not None and _LEDGER in found:
            site = study.root / "sites" / f"{name}.toml"  # it says where the ledger lies
            restored += _put({path: data for path, data in targets.items() if path == site})
            targets |= _ledger(file, found, study, name)
        restored += _put(targets)
        Kit.open(kit).identity()
    kept = [str(path) for path in targets if str(path) not in restored]
    return {"kit": str(kit), "name": name, "restored": restored, "kept": kept}


def _ledger(file: Path, found: dict[str, bytes], study: Study, site: str) -> dict[Path, bytes]:
    """Where the ledger and its heads go, once no newer one is known here."""
    path, heads = study.ledger(site), _heads(study, site)
    with tempfile.TemporaryDirectory() as place:
        told = Path(place) / _LEDGER
        told.write_bytes(found[_LEDGER])
        here = path.read_bytes() if path.exists() else b""
        if not here.startswith(found[_LEDGER]):  # a newer one here stays
            try:
                LedgerFile(told, heads)
            except WsiFlError as error:
                raise WsiFlError(
                    f"nothing was restored: {str(error).replace(str(told), str(file))}"
                ) from None
            if here:
                raise WsiFlError(
                    f"{path}: is another ledger than that of {file}, or older; move it away first"
                )
    kept = {head: found[one] for k, head in enumerate(heads) if (one := _HEAD.format(k)) in found}
    return {path: found[_LEDGER], **kept}


def _heads(study: Study, site: str) -> list[Path]:
    return heads_of(study, site) if study.site(site).real else []


def _files(part: str, root: Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    paths = (path for pattern in patterns for path in root.glob(pattern) if path.is_file())
    return {f"{part}/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}


def _read(file: Path) -> dict[str, bytes]:
    """The files of a backup by name; none of them leads out of its folder."""
    try:
        with tarfile.open(ordinary(file), "r:") as tar:
            found = {one.name: tar.extractfile(one).read() for one in tar if one.isreg()}  # type: ignore[union-attr]
    except (OSError, tarfile.TarError):
        found = {}
    parts = [PurePosixPath(name).parts for name in found if "/" in name]
    if f"{_KIT}/federation.json" not in found or any(one[0] not in _PARTS or ".." in one for one in parts):
        raise UsageError(f"{file}: this is no backup; `wsi-fl federation backup` makes one")
    return found


def _whose(file: Path, found: dict[str, bytes]) -> tuple[str, str]:
    """Whose backup it is, and how the files of its key are called."""
    try:
        said = json.loads(found[f"{_KIT}/federation.json"])
        return str(said["name"]), STEM[said["role"]]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{file}: this backup is damaged; take another one") from None


def _put(targets: dict[Path, bytes]) -> list[str]:
    """Write the files that are missing, for their owner alone; return them."""
    missing = [path for path in targets if not path.exists()]
    for path in missing:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(path, targets[path])
        path.chmod(0o600)
    return [str(path) for path in missing]


def backup_lines(document: dict[str, Any]) -> Lines:
    """Say what was kept, and how to keep it."""
    ledger = "" if document["lines"] is None else f", its ledger of {document['lines']} lines among them"
    yield Line(f"{document['file']}: {document['files']} files of {document['name']}{ledger}")
    yield Line("it holds the key: keep it as you keep the kit", "yellow")


def restore_lines(document: dict[str, Any]) -> Lines:
    """Say what was put back, and what comes next."""
    for path in document["restored"]:
        yield Line(f"  {path}")
    kept = f"; {len(document['kept'])} were there and stay" if document["kept"] else ""
    yield Line(f"{len(document['restored'])} files of {document['name']} are back{kept}")
    yield Line(f"next: wsi-fl federation check {document['kit']}")
