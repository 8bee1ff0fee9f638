"""A site's files of a run: metrics, models and checkpoints, written atomically and without pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from wsi_fl.system.files import (
    append_line,
    file_lock,
    read_lines,
    read_maybe_sealed,
    read_object,
    read_sealed,
    remove_leftovers,
    write_json,
    write_sealed,
    write_text,
)
from wsi_fl.system.tensors import load_tensors, load_weights, save_tensors
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from torch import Tensor

_BUFFER = "buffer.safetensors"
_ACCOUNT_KEYS = ("epsilon", "delta", "guarantee", "unit")
"""Required keys of `ledger.json`."""
PIXELS_KEY = "pixels_sha256"
"""The fact of a store that identifies its pixels."""
SITE_FILE = "site.toml"
"""The site file as it was when the run began."""
_ADVICE = "put its backup back, or start a new run"
_KEPT_CHECKPOINTS = 2
"""The last round, and the round before for peers that had not finished the last."""
_ROUND_FIELDS = {
    "round": int,
    "seconds": int | float,
    "takes_part": bool,
    "messages": int,
    "bytes": int,
    "communication_seconds": int | float,
}
_TRANSFER_FIELDS = {"what": str, "from": str, "to": str, "bytes": int, "seconds": int | float}
"""Fields of the lines of a run's files."""


_SiteDocument = Literal[
    "plan", "canaries", "package", "prediction_model", "tuning", "counts", "scores", "ledger", "store"
]
"""Documents that a site writes once and reads again after a restart: the privacy plan of its rounds, the canaries
among its rows, its training images, the selected prediction model, the tuned settings of its local model, the
released counts of its test part, the scores reported by all hospitals, its account at the end, and facts of its
store."""


class SiteFolder:
    """A site's folder in a run, `sites/<name>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def record_store(self, digest: str, facts: Mapping[str, Any]) -> None:
        """Record the digest of the site's examples, and the facts that are needed without the store.

        UsageError where they differ from the beginning of the run.
        """
        if self.read_document("store") is None:
            self.write_document("store", {**facts, "sha256": digest})
        elif not self.has_store(digest, facts):
            raise UsageError(
                f"site {self.path.name}: its store was made anew since this run began, or the secret of its held-out "
                "draw was (beside its ledger); put its backup back, or start a new run (`wsi-fl train --new`)"
            )

    def has_store(self, digest: str, facts: Mapping[str, Any]) -> bool:
        """Return whether the recorded store has this digest and these pixels."""
        record = self.read_document("store") or {}
        return record.get("sha256") == digest and record.get(PIXELS_KEY) == facts.get(PIXELS_KEY)

    def store_digest(self) -> str | None:
        """Return the recorded digest of the store; None without one."""
        record = self.read_document("store")
        return str(record["sha256"]) if record else None

    def store_facts(self) -> Mapping[str, Any]:
        """Return the recorded facts of the store; WsiFlError without them."""
        record = read_sealed(self.path / "store.json", ("sha256",), _ADVICE)
        return {k: v for k, v in record.items() if k != "sha256"}

    def read_statistics_digests(self) -> dict[str, str] | None:
        """Return the recorded digests of the class statistics at the beginning; None without them."""
        path = self.path / "statistics.json"
        return read_object(path, _ADVICE) if path.exists() else None

    def record_statistics_digests(self, digests: Mapping[str, str]) -> None:
        """Record the class statistics at the beginning; UsageError where they differ from those recorded."""
        if (recorded := self.read_statistics_digests()) is None:
            write_json(self.path / "statistics.json", dict(digests))  # a site may be called `digest`
        elif changed := sorted(name for name in {*recorded, *digests} if recorded.get(name) != digests.get(name)):
            raise UsageError(
                f"site {self.path.name}: the class statistics of {changed[0]} were made anew since this run began; "
                "start a new run, or put the earlier file back into statistics/"
            )

    def record_site_file(self, text: str) -> None:
        """Store the site file as it is when the run begins; it never changes."""
        if not (self.path / SITE_FILE).exists():
            write_text(self.path / SITE_FILE, text)

    def write_document(self, name: _SiteDocument, document: Mapping[str, Any]) -> None:
        """Write one of the site's documents of the run."""
        write_sealed(self.path / f"{name}.json", document)

    def read_document(self, name: _SiteDocument) -> dict[str, Any] | None:
        """Return one of the site's documents of the run; None without it."""
        path, keys = self.path / f"{name}.json", ("sha256",) if name == "store" else ()
        return read_sealed(path, keys, _ADVICE) if path.exists() else None

    def record_transfer(self, transfer: Mapping[str, Any]) -> None:
        """Record a message of the site, or of the server beside it: {"what", "from", "to", "bytes", "seconds"}.

        A message sent again after a restart is one transfer.
        """
        same = ("what", "from", "to")
        if not any(all(line[k] == transfer[k] for k in same) for line in self.list_transfers()):
            append_line(self.path / "transfers.jsonl", transfer)

    def list_transfers(self) -> list[dict[str, Any]]:
        """Return the recorded transfers."""
        return read_lines(self.path / "transfers.jsonl", _TRANSFER_FIELDS)

    def record_buffer(self, values: NDArray[np.uint8], provenance: Mapping[str, Any]) -> None:
        """Store the synthetic samples shared by the site, before its first round; they never change."""
        import torch

        save_tensors(self.path / _BUFFER, {"values": torch.from_numpy(np.array(values))}, provenance)

    def read_buffer(self) -> tuple[NDArray[np.uint8], dict[str, Any]] | None:
        """Return the stored synthetic samples and their provenance; None without them."""
        path = self.path / _BUFFER
        if not path.exists():
            return None
        tensors, provenance = load_tensors(path, "buffer")
        return tensors["values"].numpy(), provenance

    def log_round(self, document: Mapping[str, Any]) -> None:
        """Append the line of one round."""
        append_line(self.metrics_path, document)

    def log(self, text: str) -> None:
        """Append a dated line to log.txt, for people."""
        append_note(self.log_path, text)

    @property
    def log_path(self) -> Path:
        """The path of the log."""
        return self.path / "log.txt"

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of all finished rounds."""
        return read_lines(self.metrics_path, _ROUND_FIELDS)

    def drop_rounds_from(self, round_: int) -> None:
        """Drop the lines of rounds that will be run again."""
        earlier = [line for line in self.read_metrics() if line["round"] < round_]
        write_text(self.metrics_path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in earlier))

    @property
    def account_path(self) -> Path:
        """The path of the site's account at the end of the run."""
        return self.path / "ledger.json"

    def read_account(self) -> dict[str, Any]:
        """Return the site's account at the end of the run; WsiFlError where it is missing or damaged."""
        return read_maybe_sealed(self.account_path, _ACCOUNT_KEYS, self._advise_rewriting())

    def _advise_rewriting(self) -> str:
        """Return the advice for a damaged file that is written at the end of the run."""
        resume = f"`wsi-fl train --resume {self.path.parents[1].name}`"
        return f"put its backup back; or delete the run's summary.json and run {resume}, which writes it again"

    def save_model(self, role: str, tensors: Mapping[str, Tensor]) -> Path:
        """Write `<role>.safetensors`."""
        path = self.path / f"{role}.safetensors"
        save_tensors(path, tensors, {})
        return path

    def has_model(self, role: str) -> bool:
        """Return whether the site of a finished run has a model of this role."""
        return (self.path / f"{role}.safetensors").exists()

    def load_model(self, role: str) -> dict[str, Tensor]:
        """Return the tensors of `<role>.safetensors`."""
        path, run = self.path / f"{role}.safetensors", self.path.parents[1].name
        if not path.exists():
            raise WsiFlError(
                f"{path}: no such model; the run has not finished, continue it with `wsi-fl train --resume {run}`"
            )
        return load_weights(path, self._advise_rewriting())

    def checkpoint_path(self, round_: int) -> Path:
        return self.path / "state" / f"round_{round_:05d}.safetensors"

    def has_checkpoint(self, round_: int) -> bool:
        """Return whether the round has a checkpoint."""
        return self.checkpoint_path(round_).exists()

    def save_checkpoint(self, round_: int, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Write the state after local training of a round, then delete all but the last two."""
        save_tensors(self.checkpoint_path(round_), tensors, document)
        earlier = [number for number in self.list_checkpoints() if number < round_]
        for old in earlier[: 1 - _KEPT_CHECKPOINTS]:
            self.checkpoint_path(old).unlink()

    def load_checkpoint(self, round_: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, document) of a round's checkpoint; WsiFlError, with advice, where it is damaged."""
        return load_tensors(self.checkpoint_path(round_), "checkpoint", self._checkpoint_advice(round_))

    def _checkpoint_advice(self, round_: int) -> str:
        """Return the advice for a damaged checkpoint: a sent message is never made again with other noise."""
        earlier = [number for number in self.list_checkpoints() if number < round_]
        if not earlier:
            return "put its backup back, or start a new run"
        return (
            f"put its backup back; or delete it, and `wsi-fl train --resume {self.path.parents[1].name}` goes on from "
            f"round {earlier[-1]}, if round {round_} was not sent yet; else start a new run"
        )

    def list_checkpoints(self) -> list[int]:
        """Return the rounds with a checkpoint, oldest first."""
        return sorted(int(p.stem.split("_")[1]) for p in (self.path / "state").glob("round_*.safetensors"))


def append_note(path: Path, text: str) -> None:
    """Append dated text to a log for people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        handle.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")


@contextmanager
def hold_site_lock(folder: Path) -> Iterator[None]:
    """Hold the lock on a site's folder of a run, and remove leftovers in it; WsiFlError when another job has it."""
    busy = f"{folder}: another job still works on this run; wait for it, or end it"
    with file_lock(folder / ".lock", busy, patience_s=2):
        remove_leftovers(folder)
        yield
