"""What one site keeps of a run: its metrics, models and checkpoints, written atomically and without pickle."""

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
    alone,
    append_line,
    read_lines,
    read_object,
    read_sealed,
    read_where_sealed,
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
_ACCOUNT = ("epsilon", "delta", "guarantee", "unit")
"""Keys of `ledger.json` that answers rest on."""
PIXELS = "pixels_sha256"
"""The fact of a store that tells its pixels."""
SITE_FILE = "site.toml"
"""The site file as it was when the run began."""
_ADVICE = "put its backup back, or start a new run"
_KEPT_CHECKPOINTS = 2
"""The last round, and the one before for peers that had not finished theirs."""
_ROUND = {
    "round": int,
    "seconds": int | float,
    "takes_part": bool,
    "messages": int,
    "bytes": int,
    "communication_seconds": int | float,
}
_TRANSFER = {"what": str, "from": str, "to": str, "bytes": int, "seconds": int | float}
"""What the lines of a run's files have."""


_Kept = Literal["plan", "canaries", "package", "prediction_model", "tuning", "counts", "scores"]
"""What a site writes once, for itself, and reads again after a restart: the privacy plan of its rounds, the canaries
planted among its rows, the images that it learns from, what answers best: {"model": "private", "proxy", "shared",
"mean", "local" or "ensemble", "by": …}, the settings that it chose for its own model, the counts of its test part that
it lets go, and what all hospitals told of theirs."""


class SiteFolder:
    """What one site keeps of a run: `sites/<name>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def remember_store(self, digest: str, facts: Mapping[str, Any]) -> None:
        """Note which examples the site works on, and the facts that must be known once the store is gone.

        UsageError where they are others than those the run began with.
        """
        kept = self._store()
        if kept is None:
            write_sealed(self.path / "store.json", {**facts, "sha256": digest})
        elif kept["sha256"] != digest or kept.get(PIXELS) != facts.get(PIXELS):
            raise UsageError(
                f"site {self.path.name}: its store was made anew since this run began, or the secret of its lots was "
                "(beside its ledger); put its backup back, or start a new run"
            )

    def write_account(self, account: Mapping[str, Any]) -> None:
        """Write what the site's ledger says at the end of the run."""
        write_sealed(self.account_path, account)

    def store_digest(self) -> str | None:
        """What `remember_store` noted."""
        kept = self._store()
        return str(kept["sha256"]) if kept else None

    def store_facts(self) -> dict[str, Any]:
        """Return the facts that `remember_store` noted; WsiFlError where it noted nothing."""
        kept = read_sealed(self.path / "store.json", ("sha256",), _ADVICE)
        return {k: v for k, v in kept.items() if k != "sha256"}

    def _store(self) -> dict[str, Any] | None:
        return _optional(self.path / "store.json", "sha256")

    def released(self) -> dict[str, Any] | None:
        """Return the digests of the released sums that the site began with; None before it has."""
        path = self.path / "statistics.json"
        return read_object(path, _ADVICE) if path.exists() else None

    def remember_released(self, digests: Mapping[str, str]) -> None:
        """Note whose released sums the site begins with; UsageError for others than the run began with."""
        if (began := self.released()) is None:
            write_json(self.path / "statistics.json", dict(digests))  # a site may be called `digest`
        elif changed := sorted(name for name in {*began, *digests} if began.get(name) != digests.get(name)):
            raise UsageError(
                f"site {self.path.name}: the release of {changed[0]} was made anew since this run began; start a "
                "new run, or put the earlier file back into statistics/"
            )

    def choice(self) -> str | None:
        """Return what answers best at this site, as the run found; None where nothing was to be chosen."""
        noted = self.kept("prediction_model")
        return str(noted["model"]) if noted else None

    def remember_site(self, text: str) -> None:
        """Keep the site file as it is when the run begins; it never changes."""
        if not (self.path / SITE_FILE).exists():
            write_text(self.path / SITE_FILE, text)

    def keep(self, what: _Kept, document: Mapping[str, Any]) -> None:
        """Write one of the site's own documents of the run; see `_Kept`."""
        write_sealed(self.path / f"{what}.json", document)

    def kept(self, what: _Kept) -> dict[str, Any] | None:
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

    @property
    def account_path(self) -> Path:
        """Return the file in which the site's account stands, as it was when the run ended."""
        return self.path / "ledger.json"

    def account(self) -> dict[str, Any]:
        """Return the site's account when the run ended; WsiFlError where it is missing or damaged."""
        run = self.path.parents[1].name
        advice = (
            "put its backup back; or delete the run's summary.json and run "
            f"`wsi-fl train --resume {run}`, which writes it again"
        )
        return read_where_sealed(self.account_path, _ACCOUNT, advice)

    def save_model(self, role: str, tensors: Mapping[str, Tensor]) -> Path:
        """Writes `<role>.safetensors`."""
        path = self.path / f"{role}.safetensors"
        save_tensors(path, tensors, {})
        return path

    def has_model(self, role: str) -> bool:
        """Return whether the site has a model of this role, when the run has finished."""
        return (self.path / f"{role}.safetensors").exists()

    def load_model(self, role: str) -> dict[str, Tensor]:
        """The tensors of `<role>.safetensors`."""
        path, run = self.path / f"{role}.safetensors", self.path.parents[1].name
        if not path.exists():
            raise WsiFlError(
                f"{path}: no such model; the run has not finished, continue it with `wsi-fl train --resume {run}`"
            )
        return load_weights(
            path,
            "put its backup back; or delete the run's summary.json and run "
            f"`wsi-fl train --resume {run}`, which writes it again",
        )

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


def note(path: Path, text: str) -> None:
    """Append dated text to a log for people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        handle.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")


@contextmanager
def hold_alone(folder: Path) -> Iterator[None]:
    """Hold a site's part of a run, and remove what a killed process left in it; WsiFlError when another has it."""
    busy = f"{folder}: another job still works on this run; wait for it, or end it"
    with alone(folder / ".lock", busy, patience_s=2):
        remove_leftovers(folder)
        yield


def _optional(path: Path, *keys: str) -> dict[str, Any] | None:
    return read_sealed(path, keys, _ADVICE) if path.exists() else None
