"""What a site must not lose, in one file: its key and certificates, what it has signed and released, its ledger, and
the secret by which it draws whom it holds out.

The file is a plain tar that its owner alone may read: it holds the key. What is there already is never overwritten, and
no ledger takes the place of a newer one.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TypedDict

from wsi_fl.hospitals.trust.kit import STEM, Kit
from wsi_fl.privacy.guarantee import epsilon_of, of_hospital
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.stages.site.account import heads_of
from wsi_fl.stages.site.lots import lots_path
from wsi_fl.stages.work.console import Line, Lines
from wsi_fl.study.folder import Study
from wsi_fl.system.files import alone, atomic, ordinary, read_lines, write_bytes
from wsi_fl.types import UsageError, WsiFlError

_DOCUMENT, _LEDGER = PurePosixPath("kit/federation.json"), PurePosixPath("ledger.jsonl")
_LOTS = PurePosixPath("ledger.lots")
_KIT = ("*.json", "jobs.jsonl", "startup/*")
_STUDY = (
    "federation/*.json",
    "sites/{}.toml",
    "statistics/{}.safetensors",
    "stores/{}/statistics.safetensors",
)
_Files = dict[PurePosixPath, bytes]


def backup(kit: Kit, study: Study | None, out: Path) -> dict[str, object]:
    """Copy what a kit's holder must not lose into one file with mode 0600; a client may run meanwhile.

    Returns:
        {"file", "name", "files": how many, "lines": of the ledger, None without one}.
    """
    found, lines = _files("kit", kit.path, _KIT), None
    if study is not None:
        found |= _files("study", study.root, [one.format(kit.name) for one in _STUDY])
        if (lots := lots_path(study, kit.name)).exists():
            found[_LOTS] = lots.read_bytes()
        ledger = _opened(study, kit.name)
        if lines := len(ledger.entries):
            with ledger.locked():
                found[_LEDGER], lines = ledger.path.read_bytes(), len(ledger.entries)
    with atomic(out) as temporary, tarfile.open(temporary, "w") as tar:
        temporary.chmod(0o600)
        for name, data in found.items():
            entry = tarfile.TarInfo(str(name))
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            tar.addfile(entry, io.BytesIO(data))
    return {"file": str(out), "name": kit.name, "files": len(found), "lines": lines}


class _Known(TypedDict):
    """What a site's ledger knows: runs, the time of its last line, and ε, None where none holds."""

    runs: int
    last: str | None
    epsilon: float | None
    delta: float


class _Restored(TypedDict):
    """The files that were missing, how many were there, and what the ledger knows; None without one."""

    kit: str
    name: str
    restored: list[str]
    kept: int
    ledger: _Known | None


def restore(file: Path, kit: Path, study: Study | None) -> _Restored:
    """Put back what is missing of a kit and a study; what is there stays as it is.

    Args:
        file: that `backup` made.
        kit: its folder, a new one or that of the same key.

    Raises:
        UsageError: when the file is no backup, or the kit holds another key.
        WsiFlError: when the ledger is older than this machine knows, or the kit is in use.
    """
    found = _read(file)
    name, roots = _holder(file, found), {"kit": kit}
    if study is not None:
        roots["study"] = study.root
    ledger, lots = found.pop(_LEDGER, None), found.pop(_LOTS, None)
    if strange := {one.parts[0] for one in found} - roots.keys():
        raise UsageError(f"{file}: it holds {min(strange)}/ too; give --study DIR")
    if study is not None and ledger is not None:
        _require_site(file, found, study, name)
    targets = {roots[one.parts[0]].joinpath(*one.parts[1:]): data for one, data in found.items()}
    keys = [path for path in targets if path.suffix == ".key" and path.exists()]
    if any(path.read_bytes() != targets[path] for path in keys):
        raise UsageError(f"{kit}: another key is here than in {file}; restore into a new folder")
    with alone(kit / ".lock", f"{name} runs now: another process has {kit}; end it first"):
        restored = []
        if study is not None and ledger is not None:
            site = study.site_path(name)  # it says where the ledger lies
            restored = [
                *(_put(site, targets[site]) if site in targets else []),
                *_put_ledger(study, name, ledger),
            ]
        if study is not None and lots is not None:
            site = study.site_path(name)
            restored += _put(site, targets[site]) if site in targets else []
            targets[lots_path(study, name)] = lots
        restored += [one for path, data in targets.items() for one in _put(path, data)]
        Kit.open(kit).identity()
    kept = len(targets) + (ledger is not None) - len(restored)
    known = None if study is None or ledger is None else _known(study, name)
    return {"kit": str(kit), "name": name, "restored": restored, "kept": kept, "ledger": known}


def _put_ledger(study: Study, site: str, data: bytes) -> list[str]:
    """Put a ledger back, unless the one that is here goes on from it, and let its heads know."""
    path = study.ledger(site)
    if made := _put(path, data):
        try:
            with (ledger := _opened(study, site)).locked():
                if not ledger.entries:
                    raise WsiFlError(f"{path}: the ledger of the backup is empty; take another backup")
                ledger.remember()
        except BaseException:
            path.unlink()
            raise
    elif not path.read_bytes().startswith(data):
        raise WsiFlError(f"{path}: is another ledger than that of the backup, or older; move it away first")
    return made


def _known(study: Study, site: str) -> _Known:
    ledger = _opened(study, site)
    entries = [one for one in ledger.entries if one.site == site]
    lines = [line for line in read_lines(ledger.path, {"site": str}) if line["site"] == site]
    unit = next((one.unit for one in reversed(entries) if one.unit), "row")
    delta = study.site(site).delta or next((one.delta for one in reversed(entries) if one.delta), 1e-5)
    return {
        "runs": len({one.run_id for one in entries}),
        "last": lines[-1].get("time") if lines else None,
        "epsilon": epsilon_of(of_hospital(entries, unit), delta),
        "delta": delta,
    }


def _opened(study: Study, site: str) -> LedgerFile:
    return LedgerFile(study.ledger(site), heads_of(study, site) if study.site(site).real else [])


def _files(part: str, root: Path, patterns: Sequence[str]) -> _Files:
    paths = [path for pattern in patterns for path in root.glob(pattern) if path.is_file()]
    return {PurePosixPath(part, path.relative_to(root).as_posix()): path.read_bytes() for path in paths}


def _read(file: Path) -> _Files:
    """The files of a backup by name; none of them leads out of its folder."""
    try:
        with tarfile.open(ordinary(file), "r:") as tar:
            files = [(PurePosixPath(one.name), tar.extractfile(one)) for one in tar]
            found = {name: data.read() for name, data in files if data is not None}
    except (OSError, KeyError, ValueError, tarfile.TarError):
        found = {}
    folders = {parent for name in found for parent in name.parents}
    if _DOCUMENT not in found or folders & found.keys() or not all(_stays_inside(name) for name in found):
        raise UsageError(f"{file}: this is no backup; `wsi-fl federation backup` makes one")
    return found


def _stays_inside(name: PurePosixPath) -> bool:
    """Return whether a name is that of the ledger, of its lots, or of a file in a folder of the kit or the study."""
    plain = not name.is_absolute() and ".." not in name.parts and "\0" not in str(name)
    return plain and (name in {_LEDGER, _LOTS} or len(name.parts) > 1)


def _holder(file: Path, found: _Files) -> str:
    """Return whose kit a backup holds; UsageError where its document does not say."""
    try:
        document = json.loads(found[_DOCUMENT])
        name = document["name"]
        whole = (
            isinstance(name, str) and document["role"] in STEM and PurePosixPath(name).name == name != ".."
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        whole = False
    if not whole:
        raise UsageError(f"{file}: damaged: its {_DOCUMENT} names no holder of a kit; take another backup")
    return str(name)


def _require_site(file: Path, found: _Files, study: Study, name: str) -> None:
    """Refuse a ledger whose site has no file, in the backup or here: that file says where the ledger lies."""
    kept = PurePosixPath("study", "sites", f"{name}.toml")
    if kept not in found and not study.site_path(name).is_file():
        raise UsageError(
            f"{file}: it holds a ledger without sites/{name}.toml; put that file into the study first"
        )


def _put(path: Path, data: bytes) -> list[str]:
    """Write a file for its owner alone where there is none, and return it then."""
    if path.exists():
        return []
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_bytes(path, data)
    path.chmod(0o600)
    return [str(path)]


def restored_lines(document: _Restored) -> Lines:
    """Say what was put back, and what comes next."""
    yield Line(
        f"{len(document['restored'])} files of {document['name']} are back; {document['kept']} were there"
    )
    if ledger := document["ledger"]:
        spent = (
            "no ε" if ledger["epsilon"] is None else f"ε = {ledger['epsilon']:.2f} at δ = {ledger['delta']:g}"
        )
        last = f", the last of {ledger['last'][:10]}" if ledger["last"] else ""
        yield Line(f"  runs in its ledger: {ledger['runs']}{last}; {spent}; it knows of none since")
    yield Line(f"next: wsi-fl federation check {document['kit']}")
