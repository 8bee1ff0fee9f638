"""Run directories: manifest, metrics, models and checkpoints, all written atomically and without pickle."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.system.files import (
    append_line,
    read_json,
    read_lines,
    read_sealed,
    remove_leftovers,
    write_json,
    write_sealed,
    write_text,
)
from wsi_fl.system.locks import alone
from wsi_fl.system.tensors import load_tensors, load_weights, save_tensors
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from torch import Tensor

_BUFFER = "buffer.safetensors"
SITE_FILE = "site.toml"
"""The site file as it was when the run began."""
_NAME = re.compile(r"[a-z]+-[^/\\\x00-\x1f\x7f]{1,120}")
_KEPT_CHECKPOINTS = 2
_ROSTER = {"site": str, "event": str}
_ROUND = {
    "round": int,
    "seconds": int | float,
    "takes_part": bool,
    "messages": int,
    "bytes": int,
    "communication_seconds": int | float,
}
_SUMMARY = ("run", "method", "seconds", "sites", "lost", "communication")
_EVALUATION = ("run", "sites", "merged")
_TRANSFER = {"what": str, "from": str, "to": str, "bytes": int, "seconds": int | float}
"""What the lines of a run's files have."""
"""The last round, and the one before for peers that had not finished theirs."""


class RunFolder:
    """`runs/00007-proxyfl-camelyon17`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @staticmethod
    def create(runs: Path, method: str, pipeline: str) -> RunFolder:
        """The next free number, claimed under a lock: two runs started at once get two numbers."""
        with alone(runs / ".lock"):
            path = runs / f"{RunFolder.next_number(runs):05d}-{method}-{pipeline_stem(pipeline)}"
            path.mkdir()
        return RunFolder(path)

    @staticmethod
    def next_number(runs: Path) -> int:
        """Return the number after the highest of `runs`."""
        found = [re.match(r"(\d{5,})-", p.name) for p in runs.iterdir()] if runs.is_dir() else []
        return max((int(m[1]) for m in found if m), default=0) + 1

    @staticmethod
    def claim(
        runs: Path, number: int, name: str, identity: str, describe: Callable[[RunFolder], None]
    ) -> RunFolder | None:
        """Make the folder of a run that several hospitals agreed on, or find it made by another rank of the same job.

        Args:
            number: agreed by all.
            name: method and pipeline, "proxyfl-camelyon17".
            identity: the run's id, which `describe` writes into its manifest.

        Returns:
            The folder, or None where another run has the number.

        Raises:
            WsiFlError: for a name that is no single folder's.
        """
        if not _NAME.fullmatch(name):
            raise WsiFlError(f"{name!r} is no name of a run, which is a method and a pipeline")
        path = runs / f"{number:05d}-{name}"
        with alone(runs / ".lock"):
            if next(runs.glob(f"{number:05d}-*"), None) is None:
                path.mkdir()
                describe(RunFolder(path))
            found = RunFolder(path)
            return found if path.is_dir() and found.id == identity else None

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the document that describes the run.

        Raises:
            WsiFlError: when it is missing or damaged.
        """
        return read_sealed(self.path / "manifest.json", (), "put its backup back, or start a new run")

    def write_manifest(self, document: Mapping[str, Any]) -> None:
        """Write the document that describes the run."""
        write_sealed(self.path / "manifest.json", document)

    @property
    def id(self) -> str:
        """Return what identifies the run, whatever its folder is called; "" for a plan that is not run."""
        return str(self.manifest.get("id", "")) if (self.path / "manifest.json").exists() else ""

    @property
    def agreement(self) -> str:
        """Return the SHA-256 of the plan that the hospitals signed; "" where none was asked for."""
        return str(self.manifest.get("agreement") or "") if self.id else ""

    def refuse_changed_settings(self) -> None:
        """Refuse to go on with settings that were edited since the run began.

        Raises:
            UsageError: when config.toml is no longer what the manifest remembers.
        """
        text = (self.path / "config.toml").read_bytes()
        known = self.manifest.get("config_sha256")
        if known and hashlib.sha256(text).hexdigest() != known:
            raise UsageError(
                f"{self.path / 'config.toml'}: changed since the run began, and a run keeps its settings; "
                "put it back as it was, or start a new run"
            )

    def summary(self) -> dict[str, Any] | None:
        """Return the document of a finished run; None where it has not finished.

        Raises:
            WsiFlError: when it is damaged.
        """
        advice = f"delete it and run `wsi-fl train --resume {self.path.name}`, which writes it again"
        return _sealed(self.path / "summary.json", _SUMMARY, advice)

    def write_summary(self, document: Mapping[str, Any]) -> None:
        """Write the document that says that the run has finished."""
        write_sealed(self.path / "summary.json", document)

    def evaluation(self) -> dict[str, Any] | None:
        """Return the document of `evaluate`; None where the run was not evaluated.

        Raises:
            WsiFlError: when it is damaged.
        """
        advice = f"run `wsi-fl evaluate {self.path.name}` again"
        return _sealed(self.path / "evaluation.json", _EVALUATION, advice)

    def write_evaluation(self, document: Mapping[str, Any]) -> None:
        """Write the document of `evaluate`."""
        write_sealed(self.path / "evaluation.json", document)

    @property
    def roster_path(self) -> Path:
        return self.path / "roster.jsonl"

    def losses(self) -> list[dict[str, Any]]:
        """The sites that were lost and have not come back: {"site", "round", "reason", …}, in order."""
        latest = {line["site"]: line for line in read_lines(self.roster_path, _ROSTER)}
        return [line for line in latest.values() if line["event"] == "lost"]

    def returning(self) -> set[str]:
        """The sites that were lost, come back, and have not finished anything since."""
        latest = {line["site"]: line for line in read_lines(self.roster_path, _ROSTER)}
        return {
            site
            for site, line in latest.items()
            if line["event"] == "returned" and self._newest(site) <= line.get("newest", 0)
        }

    def _newest(self, site: str) -> int:
        return max(self.site(site).checkpoints(), default=0)

    def note_loss(self, site: str, reason: str) -> dict[str, Any]:
        """Writes down that a site was lost, in the round after its last one; returns the line."""
        done = [line["round"] for line in self.site(site).metrics()]
        round_ = max(done, default=0) + 1
        line = {"site": site, "event": "lost", "round": round_, "reason": reason, "time": _now()}
        append_line(self.roster_path, line)
        return line

    def note_return(self, site: str) -> None:
        """Writes down that a lost site comes back."""
        line = {"site": site, "event": "returned", "newest": self._newest(site), "time": _now()}
        append_line(self.roster_path, line)

    def refuse_if_busy(self) -> None:
        """One job at a time: a second one would tell the first one's sites that they were lost or came back."""
        for lock in self.path.glob("sites/*/.lock"):
            with hold_alone(lock.parent):
                pass

    def discard_if_unstarted(self) -> None:
        """Removes the directory of a run that failed before any site had finished anything."""
        if not any(self.path.glob("sites/*/state/*")):
            shutil.rmtree(self.path)

    def site(self, name: str) -> SiteFolder:
        return SiteFolder(self.path / "sites" / name)


Kept = Literal["plan", "spending", "canaries", "package", "choice", "tuned", "counts", "scores"]
"""What a site writes once, for itself, and reads again after a restart: the privacy plan of its rounds (or, from early
versions, its batch size and σ), the canaries planted among its rows, the images that it learns from, what answers
best: {"with": "private", "proxy", "mean" or "stack", "by": …}, the settings that it chose for its own model, the counts
of its test part that it lets go, and what all hospitals told of theirs."""


class SiteFolder:
    """What one site keeps of a run: `sites/<name>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def remember_store(self, digest: str, facts: Mapping[str, Any]) -> None:
        """Notes which examples the site works on, for itself alone; a run never changes them half-way.

        Args:
            facts: what else must be known of them once the store is gone.

        Raises:
            UsageError: when they are others than those the run began with.
        """
        kept = _optional(self.path / "store.json") or {}
        known = {"sha256": digest} | kept
        if known["sha256"] != digest:
            raise UsageError(
                f"site {self.path.name}: its store was made anew since this run began; start a new run"
            )
        if (
            not kept or not facts.keys() <= kept.keys()
        ):  # a new run, or one of an earlier version, which noted less
            write_json(self.path / "store.json", {**facts, **known})

    def store_digest(self) -> str | None:
        """What `remember_store` noted."""
        kept = _optional(self.path / "store.json")
        return str(kept["sha256"]) if kept else None

    def store_facts(self) -> dict[str, Any]:
        """The facts that `remember_store` noted."""
        return {k: v for k, v in read_json(self.path / "store.json").items() if k != "sha256"}

    def remember_released(self, what: Literal["stain", "release"], digests: Mapping[str, str]) -> None:
        """Note which stains the site's examples are shown in, or whose sums it begins with: {site: digest}.

        Raises:
            UsageError: when they are others than those the run began with.
        """
        path = self.path / f"{what}s.json"
        began = _optional(path)
        if began is None:
            write_json(path, dict(digests))
        elif changed := sorted(name for name in {*began, *digests} if began.get(name) != digests.get(name)):
            raise UsageError(
                f"site {self.path.name}: the {what} of {changed[0]} was released anew since this run began; start a "
                f"new run, or put the earlier file back into {what}s/"
            )

    def choice(self) -> str | None:
        """Return what answers best at this site, as the run found; None where nothing was to be chosen."""
        noted = self.kept("choice")
        return str(noted["with"]) if noted else None

    def remember_site(self, text: str) -> None:
        """Keep the site file as it is when the run begins; it never changes."""
        if not (self.path / SITE_FILE).exists():
            write_text(self.path / SITE_FILE, text)

    def keep(self, what: Kept, document: Mapping[str, Any]) -> None:
        """Write one of the site's own documents of the run; see `Kept`."""
        write_json(self.path / f"{what}.json", document)

    def kept(self, what: Kept) -> dict[str, Any] | None:
        """Return what `keep` wrote; None where nothing was."""
        return _optional(self.path / f"{what}.json")

    def note_transfer(self, transfer: Mapping[str, Any]) -> None:
        """Writes down what the site, or the server beside it, sent: {"what", "from", "to", "bytes", "seconds"}.

        What is sent once more after a restart is one transfer.
        """
        same = ("what", "from", "to")
        if not any(all(line[k] == transfer[k] for k in same) for line in self.transfers()):
            append_line(self.path / "transfers.jsonl", transfer)

    def transfers(self) -> list[dict[str, Any]]:
        """What `note_transfer` wrote down."""
        return read_lines(self.path / "transfers.jsonl", _TRANSFER)

    def remember_buffer(self, values: NDArray[np.uint8], provenance: Mapping[str, Any]) -> None:
        """Notes the synthetic samples that the site shares, before its first round; they never change."""
        import torch

        save_tensors(self.path / _BUFFER, {"values": torch.from_numpy(np.array(values))}, provenance)

    def buffer(self) -> tuple[NDArray[np.uint8], dict[str, Any]] | None:
        """What `remember_buffer` noted."""
        path = self.path / _BUFFER
        if not path.exists():
            return None
        tensors, provenance = load_tensors(path, "buffer")
        return tensors["values"].numpy(), provenance

    def log_round(self, document: Mapping[str, Any]) -> None:
        """Appends the line of one round."""
        append_line(self.metrics_path, document)

    def log(self, text: str) -> None:
        """Appends a dated line to log.txt, for people."""
        note(self.log_path, text)

    @property
    def log_path(self) -> Path:
        """Return the file that `log` writes to."""
        return self.path / "log.txt"

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of all finished rounds."""
        return read_lines(self.metrics_path, _ROUND)

    def forget_rounds_from(self, round_: int) -> None:
        """Drops the lines of rounds that will be run again."""
        kept = [line for line in self.metrics() if line["round"] < round_]
        write_text(self.metrics_path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))

    def save_model(self, role: str, tensors: Mapping[str, Tensor]) -> Path:
        """Writes `<role>.safetensors`."""
        path = self.path / f"{role}.safetensors"
        save_tensors(path, tensors, {})
        return path

    def load_model(self, role: str) -> dict[str, Tensor]:
        """The tensors of `<role>.safetensors`."""
        path = self.path / f"{role}.safetensors"
        if not path.exists():
            run = self.path.parent.parent.name
            raise WsiFlError(
                f"{path}: no such model; the run has not finished, continue it with `wsi-fl train --resume {run}`"
            )
        return load_weights(path)

    def checkpoint_path(self, round_: int) -> Path:
        return self.path / "state" / f"round_{round_:05d}.safetensors"

    def save_checkpoint(
        self, round_: int, tensors: Mapping[str, Tensor], document: Mapping[str, Any]
    ) -> None:
        """Writes the state after local training of a round, then forgets all but the last two."""
        save_tensors(self.checkpoint_path(round_), tensors, document)
        earlier = [kept for kept in self.checkpoints() if kept < round_]
        for old in earlier[: 1 - _KEPT_CHECKPOINTS]:
            self.checkpoint_path(old).unlink()

    def load_checkpoint(self, round_: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, document) of a round's checkpoint; WsiFlError where it is damaged, with what to do then."""
        return load_tensors(self.checkpoint_path(round_), "checkpoint", self._without(round_))

    def _without(self, round_: int) -> str:
        """How to go on where a checkpoint is damaged; what was sent is never made again with other noise."""
        earlier = [kept for kept in self.checkpoints() if kept < round_]
        if not earlier:
            return "put its backup back, or start a new run"
        return (
            f"put its backup back; or delete it, and `wsi-fl train --resume {self.path.parents[1].name}` goes on from "
            f"round {earlier[-1]}, if round {round_} was not sent yet; else start a new run"
        )

    def checkpoints(self) -> list[int]:
        """Rounds with a checkpoint, oldest first."""
        return sorted(int(p.stem.split("_")[1]) for p in (self.path / "state").glob("round_*.safetensors"))


def pipeline_stem(pipeline: str) -> str:
    """Return what a run's folder calls a pipeline that was given by name or path."""
    return Path(pipeline).name.removesuffix(".toml")


def note(path: Path, text: str) -> None:
    """Append dated text to a log for people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        handle.write(f"{_now()} {text}\n")


@contextmanager
def hold_alone(folder: Path) -> Iterator[None]:
    """Hold a site's part of a run for this process, and remove what a killed one left in it.

    Raises:
        WsiFlError: when another process has it.
    """
    busy = f"{folder}: another job still works on this run; wait for it, or end it"
    with alone(folder / ".lock", busy, patience_s=2):
        remove_leftovers(folder)
        yield


def _optional(path: Path) -> dict[str, Any] | None:
    return dict(read_json(path)) if path.exists() else None


def _sealed(path: Path, keys: Iterable[str], advice: str) -> dict[str, Any] | None:
    return read_sealed(path, keys, advice) if path.exists() else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
