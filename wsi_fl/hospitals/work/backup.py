"""Backup of a site in one file: its key and certificates, what it has signed and released, its ledger, and the secret
of its held-out draw.

The file is a plain tar that its owner alone may read: it holds the key. Existing files are never overwritten, and no
ledger replaces a newer one.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TypedDict

from wsi_fl.hospitals.trust.kit import FILE_STEMS, Kit
from wsi_fl.privacy.guarantee import entries_epsilon, lifetime_entries
from wsi_fl.privacy.ledger_file import LedgerFile
from wsi_fl.stages.runtime.console import Lines, TextLine
from wsi_fl.stages.site.holdout_secret import secret_path
from wsi_fl.stages.site.privacy_account import list_heads
from wsi_fl.study.folder import Study
from wsi_fl.system.files import atomic_path, file_lock, read_lines, require_regular_file, write_bytes
from wsi_fl.types import UsageError, WsiFlError

_DOCUMENT, _LEDGER = PurePosixPath("kit/federation.json"), PurePosixPath("ledger.jsonl")
_HOLDOUT = PurePosixPath("ledger.lots")
_KIT_PATTERNS = ("*.json", "jobs.jsonl", "startup/*")
_STUDY_PATTERNS = (
    "federation/*.json",
    "sites/{}.toml",
    "statistics/{}.safetensors",
    "stores/{}/statistics.safetensors",
)
_Files = dict[PurePosixPath, bytes]


def write_backup(kit: Kit, study: Study | None, out: Path) -> dict[str, object]:
    """Copy the files that a kit's holder must not lose into one file with mode 0600; a client may run meanwhile.

    Returns:
        {"file", "name", "files": number, "lines": of the ledger, None without one}.
    """
    files, lines = _collect_files("kit", kit.path, _KIT_PATTERNS), None
    if study is not None:
        files |= _collect_files("study", study.root, [pattern.format(kit.name) for pattern in _STUDY_PATTERNS])
        if (holdout_file := secret_path(study, kit.name)).exists():
            files[_HOLDOUT] = holdout_file.read_bytes()
        ledger = _open_ledger(study, kit.name)
        if lines := len(ledger.entries):
            with ledger.hold_lock():
                files[_LEDGER], lines = ledger.path.read_bytes(), len(ledger.entries)
    with atomic_path(out) as temporary, tarfile.open(temporary, "w") as tar:
        temporary.chmod(0o600)
        for name, data in files.items():
            entry = tarfile.TarInfo(str(name))
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            tar.addfile(entry, io.BytesIO(data))
    return {"file": str(out), "name": kit.name, "files": len(files), "lines": lines}


class _LedgerSummary(TypedDict):
    """The content of a site's ledger: runs, the time of its last line, and ε, None if none holds."""

    runs: int
    last: str | None
    epsilon: float | None
    delta: float


class _Restored(TypedDict):
    """The files that were missing, the number of present ones, and the ledger's content; None without one."""

    kit: str
    name: str
    restored: list[str]
    kept: int
    ledger: _LedgerSummary | None


def restore_backup(file: Path, kit: Path, study: Study | None) -> _Restored:
    """Restore missing files of a kit and a study; existing ones stay as they are.

    Args:
        file: of `write_backup`.
        kit: its folder, a new one or that of the same key.

    Raises:
        UsageError: when the file is no backup, or the kit holds another key.
        WsiFlError: when the ledger is older than its anchors on this machine, or the kit is in use.
    """
    files = _read_backup(file)
    name, roots = _holder_name(file, files), {"kit": kit}
    if study is not None:
        roots["study"] = study.root
    ledger, holdout = files.pop(_LEDGER, None), files.pop(_HOLDOUT, None)
    if unknown_roots := {member.parts[0] for member in files} - roots.keys():
        raise UsageError(f"{file}: it holds {min(unknown_roots)}/ too; give --study DIR")
    if study is not None and ledger is not None:
        _require_site_file(file, files, study, name)
    targets = {roots[member.parts[0]].joinpath(*member.parts[1:]): data for member, data in files.items()}
    keys = [path for path in targets if path.suffix == ".key" and path.exists()]
    if any(path.read_bytes() != targets[path] for path in keys):
        raise UsageError(f"{kit}: another key is here than in {file}; restore into a new folder")
    with file_lock(kit / ".lock", f"{name} runs now: another process has {kit}; end it first"):
        restored = []
        if study is not None and ledger is not None:
            site = study.site_path(name)  # the site file holds the ledger's path
            restored = [
                *(_write_missing(site, targets[site]) if site in targets else []),
                *_put_ledger(study, name, ledger),
            ]
        if study is not None and holdout is not None:
            site = study.site_path(name)
            restored += _write_missing(site, targets[site]) if site in targets else []
            targets[secret_path(study, name)] = holdout
        restored += [written_path for path, data in targets.items() for written_path in _write_missing(path, data)]
        Kit.open(kit).load_identity()
    n_kept = len(targets) + (ledger is not None) - len(restored)
    ledger_summary = None if study is None or ledger is None else _summarize_ledger(study, name)
    return {"kit": str(kit), "name": name, "restored": restored, "kept": n_kept, "ledger": ledger_summary}


def _put_ledger(study: Study, site: str, data: bytes) -> list[str]:
    """Restore a ledger, unless the present one continues it, and update its anchors."""
    path = study.ledger_path(site)
    if restored := _write_missing(path, data):
        try:
            with (ledger := _open_ledger(study, site)).hold_lock():
                if not ledger.entries:
                    raise WsiFlError(f"{path}: the ledger of the backup is empty; take another backup")
                ledger.write_heads()
        except BaseException:
            path.unlink()
            raise
    elif not path.read_bytes().startswith(data):
        raise WsiFlError(f"{path}: is another ledger than that of the backup, or older; move it away first")
    return restored


def _summarize_ledger(study: Study, site: str) -> _LedgerSummary:
    ledger = _open_ledger(study, site)
    entries = [entry for entry in ledger.entries if entry.site == site]
    lines = [line for line in read_lines(ledger.path, {"site": str}) if line["site"] == site]
    unit = next((entry.unit for entry in reversed(entries) if entry.unit), "row")
    delta = study.load_site(site).delta or next((entry.delta for entry in reversed(entries) if entry.delta), 1e-5)
    return {
        "runs": len({entry.run_id for entry in entries}),
        "last": lines[-1].get("time") if lines else None,
        "epsilon": entries_epsilon(lifetime_entries(entries, unit), delta),
        "delta": delta,
    }


def _open_ledger(study: Study, site: str) -> LedgerFile:
    return LedgerFile(study.ledger_path(site), list_heads(study, site) if study.load_site(site).real else [])


def _collect_files(part: str, root: Path, patterns: Sequence[str]) -> _Files:
    paths = [path for pattern in patterns for path in root.glob(pattern) if path.is_file()]
    return {PurePosixPath(part, path.relative_to(root).as_posix()): path.read_bytes() for path in paths}


def _read_backup(file: Path) -> _Files:
    """Return the files of a backup by name; none of them leads out of its folder."""
    try:
        with tarfile.open(require_regular_file(file), "r:") as tar:
            members = [(PurePosixPath(member.name), tar.extractfile(member)) for member in tar]
            contents = {name: data.read() for name, data in members if data is not None}
    except (OSError, KeyError, ValueError, tarfile.TarError):
        contents = {}
    folders = {parent for name in contents for parent in name.parents}
    if _DOCUMENT not in contents or folders & contents.keys() or not all(_is_inside(name) for name in contents):
        raise UsageError(f"{file}: this is no backup; `wsi-fl federation backup` makes one")
    return contents


def _is_inside(name: PurePosixPath) -> bool:
    """Return whether a name is that of the ledger, of the holdout secret, or of a file of the kit or the study."""
    plain = not name.is_absolute() and ".." not in name.parts and "\0" not in str(name)
    return plain and (name in {_LEDGER, _HOLDOUT} or len(name.parts) > 1)


def _holder_name(file: Path, files: _Files) -> str:
    """Return the holder of a backup's kit; UsageError if its document names none."""
    try:
        document = json.loads(files[_DOCUMENT])
        name = document["name"]
        is_valid = isinstance(name, str) and document["role"] in FILE_STEMS and PurePosixPath(name).name == name != ".."
    except (ValueError, TypeError, LookupError, RecursionError):
        is_valid = False
    if not is_valid:
        raise UsageError(f"{file}: damaged: its {_DOCUMENT} names no holder of a kit; take another backup")
    return str(name)


def _require_site_file(file: Path, files: _Files, study: Study, name: str) -> None:
    """Refuse a ledger whose site has no file, in the backup or here: that file holds the ledger's path."""
    site_file = PurePosixPath("study", "sites", f"{name}.toml")
    if site_file not in files and not study.site_path(name).is_file():
        raise UsageError(f"{file}: it holds a ledger without sites/{name}.toml; put that file into the study first")


def _write_missing(path: Path, data: bytes) -> list[str]:
    """Write a file for its owner alone if it is missing, and return its path then."""
    if path.exists():
        return []
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_bytes(path, data)
    path.chmod(0o600)
    return [str(path)]


def restore_lines(document: _Restored) -> Lines:
    """Report the restored files, and the next step."""
    yield TextLine(f"{len(document['restored'])} files of {document['name']} are back; {document['kept']} were there")
    if ledger := document["ledger"]:
        spent = "no ε" if ledger["epsilon"] is None else f"ε = {ledger['epsilon']:.2f} at δ = {ledger['delta']:g}"
        last = f", the last of {ledger['last'][:10]}" if ledger["last"] else ""
        yield TextLine(f"  runs in its ledger: {ledger['runs']}{last}; {spent}; it knows of none since")
    yield TextLine(f"next: wsi-fl federation check {document['kit']}")
