"""The folder of a run shared by its sites: manifest, membership and results of later commands."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from wsi_fl.runs.site_folder import SiteFolder, hold_site_lock
from wsi_fl.system.files import (
    append_line,
    file_lock,
    read_lines,
    read_maybe_sealed,
    read_sealed,
    require_regular_file,
    write_sealed,
)
from wsi_fl.types import UsageError, WsiFlError

_NAME_PATTERN = re.compile(r"[a-z]+-[^/\\\x00-\x1f\x7f]{1,120}")
_MEMBERSHIP_FIELDS = {"site": str, "event": str}
"""Fields of the lines of `roster.jsonl`."""
_MANIFEST_KEYS = ("id", "config_sha256")
_PATIENCE_S = 2.0
"""Seconds after which the lock of a killed command is gone."""
_DocumentName = Literal["summary", "evaluation", "clinical", "audit"]
_DOCUMENTS: Mapping[_DocumentName, tuple[str, tuple[str, ...], str]] = {
    "summary": (
        "summary.json",
        ("run", "method", "seconds", "sites", "lost", "communication"),
        "delete it and run `wsi-fl train --resume {}`, which writes it again",
    ),
    "evaluation": ("evaluation.json", ("run", "sites", "merged"), "run `wsi-fl evaluate {}` again"),
    "clinical": ("clinical.json", ("run", "sites"), "run `wsi-fl clinical {}` again"),
    "audit": ("audit/audit.json", ("run", "sites"), "run `wsi-fl audit {}` again"),
}
"""Name → path, required keys, and what to do about a damaged one."""


class RunFolder:
    """A folder such as `runs/00007-proxyfl-camelyon17`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @staticmethod
    def create(runs: Path, method: str, pipeline: str) -> RunFolder:
        """Make the folder with the next free number, under a lock: two runs started at once get two numbers."""
        with RunFolder.hold_numbers(runs):
            return RunFolder.make_next(runs, method, pipeline)

    @staticmethod
    @contextmanager
    def hold_numbers(runs: Path) -> Iterator[None]:
        """Hold the lock on the numbers of runs: no other process begins a run meanwhile."""
        with file_lock(runs / ".lock"):
            yield

    @staticmethod
    def make_next(runs: Path, method: str, pipeline: str) -> RunFolder:
        """Make the folder with the next free number. The caller holds the lock on numbers."""
        path = runs / f"{RunFolder.next_number(runs):05d}-{method}-{pipeline_stem(pipeline)}"
        path.mkdir()
        return RunFolder(path)

    @staticmethod
    def next_number(runs: Path) -> int:
        """Return the number after the highest of `runs`."""
        matches = [re.match(r"(\d{5,})-", p.name) for p in runs.iterdir()] if runs.is_dir() else []
        return max((int(m[1]) for m in matches if m), default=0) + 1

    @staticmethod
    def claim_folder(
        runs: Path, number: int, name: str, identity: str, describe: Callable[[RunFolder], None]
    ) -> RunFolder | None:
        """Make the folder of a run agreed on by several hospitals, or find that of another rank of the same job.

        `describe` writes the manifest, and the identity into it. None where another run has the number.
        """
        if not _NAME_PATTERN.fullmatch(name):
            raise WsiFlError(f"{name!r} is no name of a run; write METHOD-PIPELINE, as in proxyfl-phantom")
        path = runs / f"{number:05d}-{name}"
        with RunFolder.hold_numbers(runs):
            if next(runs.glob(f"{number:05d}-*"), None) is None:
                path.mkdir()
                describe(RunFolder(path))
            folder = RunFolder(path)
            return folder if path.is_dir() and folder.id == identity else None

    @property
    def manifest(self) -> dict[str, Any]:
        """The document that describes the run; WsiFlError when it is missing or damaged."""
        return read_sealed(self.path / "manifest.json", _MANIFEST_KEYS, "put its backup back, or start a new run")

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        """Write the document that describes the run."""
        write_sealed(self.path / "manifest.json", document)

    @property
    def id(self) -> str:
        """The run's identity, independent of its folder's name; "" for a plan without a run."""
        return str(self.manifest["id"]) if (self.path / "manifest.json").exists() else ""

    @property
    def identity(self) -> str:
        """The run's name in ledgers: the folder's name, for people, and the id, since names are used again."""
        return f"{self.name} {self.id}" if self.id else self.name

    @property
    def agreement_digest(self) -> str:
        """The SHA-256 of the plan signed by the hospitals; "" without one."""
        return str(self.manifest.get("agreement") or "") if self.id else ""

    @property
    def approval_time(self) -> str:
        """The time of this hospital's current approval of the run; "" without one."""
        return str(self.manifest.get("approved") or "") if self.id else ""

    @property
    def parameters(self) -> str:
        """The SHA-256 of the parameters of the signed model; "" where no plan has it."""
        return str(self.manifest.get("parameters") or "") if self.id else ""

    def adopt_approval(self, approved: str) -> None:
        """Record that the run goes on under a hospital's newest approval, which then is valid for no other run."""
        if approved != self.approval_time:
            self.write_manifest({**self.manifest, "approved": approved})

    def refuse_changed_settings(self) -> None:
        """Refuse (UsageError) to resume with settings edited since the run began."""
        text = require_regular_file(self.path / "config.toml").read_bytes()
        if hashlib.sha256(text).hexdigest() != self.manifest["config_sha256"]:
            raise UsageError(
                f"{self.path / 'config.toml'}: changed since the run began, and a run keeps its settings; "
                "put it back as it was, or start a new run"
            )

    def require_summary(self) -> dict[str, Any]:
        """Return the document of a finished run; WsiFlError when the run has not finished or it is damaged."""
        if (summary := self.read("summary")) is None:
            command = f"`wsi-fl train --resume {self.name}`"
            raise WsiFlError(f"{self.path}: the run has not finished; continue it with {command}")
        return summary

    def store_digests(self) -> dict[str, str]:
        """Return the digest of the store of every site with a folder here."""
        folders = sorted((self.path / "sites").glob("*"))
        return {path.name: digest for path in folders if (digest := self.site_folder(path.name).store_digest())}

    def write(self, name: _DocumentName, document: Mapping[str, Any]) -> None:
        """Write the summary of a finished run, or the result of a later command."""
        write_sealed(self.path / _DOCUMENTS[name][0], document)

    def read(self, name: _DocumentName) -> dict[str, Any] | None:
        """Return such a document; None where it was not written; WsiFlError when it is damaged."""
        file, keys, advice = _DOCUMENTS[name]
        read_file = read_maybe_sealed if name == "audit" else read_sealed
        return read_file(path, keys, advice.format(self.name)) if (path := self.path / file).exists() else None

    def list_dropouts(self) -> list[dict[str, Any]]:
        """Return the sites that dropped out and have not returned: {"site", "round", "reason", …}, in order."""
        return [line for line in self._read_membership().values() if line["event"] == "lost"]

    def list_returning_sites(self) -> set[str]:
        """Return the sites that dropped out, returned, and have not finished a round since."""
        return {
            site
            for site, line in self._read_membership().items()
            if line["event"] == "returned" and self._last_checkpoint(site) <= line.get("newest", 0)
        }

    def _read_membership(self) -> dict[str, dict[str, Any]]:
        """Return the latest line of each site that ever dropped out."""
        return {line["site"]: line for line in read_lines(self.path / "roster.jsonl", _MEMBERSHIP_FIELDS)}

    def _last_checkpoint(self, site: str) -> int:
        return max(self.site_folder(site).list_checkpoints(), default=0)

    def record_dropout(self, site: str, reason: str) -> dict[str, Any]:
        """Record that a site dropped out, in the round after its last finished one; return the line.

        Where its rounds are not known here, as between hospitals, or it had returned to others that had gone on, it is
        the round after the last one finished by any site here.
        """
        local_folder = self.site_folder(site)
        came_back = self._read_membership().get(site, {}).get("event") == "returned"
        is_known = local_folder.path.is_dir() and not came_back
        folders = [local_folder] if is_known else [SiteFolder(path) for path in self.path.glob("sites/*/")]
        done = [line["round"] for folder in folders for line in folder.read_metrics()]
        round_ = max(done, default=0) + 1
        line = {"site": site, "event": "lost", "round": round_, "reason": reason, "time": _utc_now()}
        append_line(self.path / "roster.jsonl", line)
        return line

    def record_return(self, site: str) -> None:
        """Record that a site that dropped out returns."""
        line = {"site": site, "event": "returned", "newest": self._last_checkpoint(site), "time": _utc_now()}
        append_line(self.path / "roster.jsonl", line)

    @contextmanager
    def hold_lock(self, busy: str = "") -> Iterator[None]:
        """Hold the run for one command; WsiFlError, by default with advice, when another works on it."""
        text = busy or f"{self.path}: another job still works on this run; wait for it, or end it"
        with file_lock(self.path / ".lock", text, patience_s=_PATIENCE_S):
            yield

    def is_at_work(self) -> bool:
        """Return whether a command holds the run now."""
        try:
            with file_lock(self.path / ".lock", "at work"):
                return False
        except WsiFlError:
            return True
        except OSError:  # another user's, which may not be locked
            return False

    def refuse_if_busy(self) -> None:
        """Refuse a second job on the run, which would record dropouts and returns of the first one's sites."""
        for lock in self.path.glob("sites/*/.lock"):
            with hold_site_lock(lock.parent):
                pass

    def discard_if_unstarted(self) -> None:
        """Remove the directory of a run that failed before any site had finished a round."""
        if not any(self.path.glob("sites/*/state/*")):
            shutil.rmtree(self.path, ignore_errors=True)  # on NFS its lock may still be open

    def site_folder(self, name: str) -> SiteFolder:
        return SiteFolder(self.path / "sites" / name)


def pipeline_stem(pipeline: str) -> str:
    """Return the pipeline's name in a run's folder, from a name or path."""
    return Path(pipeline).name.removesuffix(".toml")


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
