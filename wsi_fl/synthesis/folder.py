"""What a site keeps of its generator: `generators/<site>/`, atomically and without pickle.

gan.json                    settings, classes, digests of the generators, whether training has finished
before.safetensors          the moving average of the generator at the end of the first phase
after.safetensors           the same at the end of the second, with the privacy loss
state/                      the last two checkpoints of the training
metrics.jsonl  samples/     losses and pictures on the way
check.json  check/          the verdict and its pictures
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from wsi_fl.synthesis.stylegan2 import GanShape, Generator
from wsi_fl.system.files import append_line, atomic, read_json, read_lines, write_json, write_text
from wsi_fl.types import WsiFlError

Phase = Literal["before", "after"]
"""The end of the training without, and with, the privacy loss."""

_KEPT = 2


class State(Protocol):
    """All that a training goes on from: tensors by name, and a JSON document."""

    iteration: int

    def tensors(self) -> dict[str, Tensor]: ...

    def document(self) -> dict[str, Any]: ...

    def load(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None: ...


class GeneratorFolder:
    """`generators/<site>`."""

    name: ClassVar[str] = "gan.json"

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def check_path(self) -> Path:
        return self.path / "check.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def document(self) -> dict[str, Any] | None:
        """gan.json, once training has begun."""
        path = self.path / self.name
        return dict(read_json(path)) if path.exists() else None

    def write_document(self, document: Mapping[str, Any]) -> None:
        write_json(self.path / self.name, document)

    def check(self) -> dict[str, Any] | None:
        """The verdict, where `check` was run."""
        return dict(read_json(self.check_path)) if self.check_path.exists() else None

    def sample_path(self, iteration: int) -> Path:
        return self.path / "samples" / f"iteration_{iteration:07d}.png"

    def generator_path(self, phase: Phase) -> Path:
        return self.path / f"{phase}.safetensors"

    def save_generator(self, phase: Phase, generator: Generator) -> str:
        """Writes the generator; returns the digest of its file."""
        save_tensors(self.generator_path(phase), generator.state_dict(), {})
        return self.digest(phase)

    def digest(self, phase: Phase) -> str:
        """SHA-256 of the generator's file: what a verdict is about."""
        return hashlib.sha256(self.generator_path(phase).read_bytes()).hexdigest()

    def load_generator(self, phase: Phase, device: torch.device) -> Generator:
        """The generator, ready to make images.

        Raises:
            WsiFlError: when it is missing, damaged, or of another shape than gan.json says.
        """
        path, document = self.generator_path(phase), self.document()
        if document is None or not path.exists():
            raise WsiFlError(f"{path}: no such generator; train it with `wsi-fl synthesize train`")
        generator = Generator(GanShape(**document["settings"]["shape"]))
        try:
            generator.load_state_dict(load_file(path))
        except (SafetensorError, RuntimeError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise WsiFlError(f"{path}: damaged or not of the shape that gan.json says ({reason})") from None
        return generator.to(device).requires_grad_(False).eval()

    def save_state(self, state: State) -> None:
        """Writes a checkpoint, then forgets all but the last two."""
        save_tensors(self._state_path(state.iteration), state.tensors(), state.document())
        for old in self.iterations()[:-_KEPT]:
            self._state_path(old).unlink()

    def load_state(self, state: State) -> bool:
        """Restores the newest checkpoint; whether there is one."""
        if not (known := self.iterations()):
            return False
        path = self._state_path(known[-1])
        try:
            with safe_open(path, "pt") as file:
                document = json.loads((file.metadata() or {})["document"])
                state.load({key: file.get_tensor(key) for key in file.keys()}, document)  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise WsiFlError(
                f"{path}: damaged checkpoint ({reason}); delete it to go on from the one before"
            ) from None
        return True

    def iterations(self) -> list[int]:
        """Of the checkpoints, oldest first."""
        return sorted(
            int(path.stem.split("_")[1]) for path in (self.path / "state").glob("iteration_*.safetensors")
        )

    def _state_path(self, iteration: int) -> Path:
        return self.path / "state" / f"iteration_{iteration:07d}.safetensors"

    def log(self, line: Mapping[str, Any]) -> None:
        append_line(self.metrics_path, line)

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.metrics_path)

    def forget_after(self, iteration: int) -> None:
        """Drops the lines of steps that will be made again."""
        kept = [line for line in self.metrics() if line["iteration"] <= iteration]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
        write_text(self.metrics_path, text)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """One safetensors file, whole or absent, with a JSON document in its header."""
    contiguous = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with atomic(path) as temporary:
        save_file(contiguous, temporary, metadata={"document": json.dumps(document)})
