"""The files of a site's generator, written atomically and without pickle: `generators/<site>/` or `denoisers/<site>/`.

gan.json, ddpm.json         settings, classes, digests of the generators, whether training has finished
before.safetensors          the moving average of a GAN's generator at the end of the first phase
after.safetensors           the same at the end of the second, with the privacy loss
denoiser.safetensors        the moving average of a diffusion model's denoiser at the end
state/                      the last two checkpoints of the training, and known.json with the SHA-256 of each
metrics.jsonl  samples/     losses and pictures during the training
check.json  check/          the verdict and its pictures
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from wsi_fl.system.files import append_line, ordinary, read_lines, read_sealed, write_sealed, write_text
from wsi_fl.system.tensors import load_tensors, save_tensors
from wsi_fl.types import WsiFlError, one_line

if TYPE_CHECKING:  # `check` does not need PyTorch
    import torch
    from torch import Tensor, nn

    from wsi_fl.study.folder import Study
    from wsi_fl.synthesis.state import TrainingState

Phase = Literal["before", "after", "denoiser"]
"""The network of a training: a GAN's without, or with, the privacy loss, or that of a diffusion model."""
_Network = TypeVar("_Network", bound="nn.Module")

KINDS = ("gan", "ddpm")
"""The kinds of generators."""
_KEPT = 2
_VERDICT = ("passed", "reasons", "generator", "criteria")
_KEYS = ("site", "settings", "store", "phases", "finished")


class GeneratorFolder:
    """The folder of one site's generator of a kind, "gan" or "ddpm"; its document has that name."""

    def __init__(self, path: Path, kind: str = "gan") -> None:
        self.path, self.kind = path, kind

    @staticmethod
    def of(study: Study, site: str, kind: str) -> GeneratorFolder:
        """Return the folder of a site's generator of a kind, even before it exists."""
        return GeneratorFolder({"gan": study.generator, "ddpm": study.denoiser}[kind](site), kind)

    @property
    def _document_path(self) -> Path:
        return self.path / f"{self.kind}.json"

    @property
    def check_path(self) -> Path:
        return self.path / "check.json"

    def document(self) -> dict[str, Any] | None:
        """Return the document of the training; None before it has begun.

        Raises:
            WsiFlError: when it is damaged.
        """
        path = self._document_path
        return read_sealed(path, _KEYS, self._advice) if path.exists() else None

    def write_document(self, document: Mapping[str, Any]) -> None:
        """Write the document of the training, and a digest of it."""
        write_sealed(self._document_path, document)

    @property
    def _advice(self) -> str:
        return f"put its backup back, or make it anew with {self._command('train')} --again`"

    def _command(self, what: str) -> str:
        return f"`wsi-fl synthesize {what} --site {self.path.name} --generator {self.kind}"

    def check(self) -> dict[str, Any] | None:
        """Return the verdict; None before the first check.

        Raises:
            WsiFlError: when it is damaged.
        """
        if not self.check_path.exists():
            return None
        advice = f"put its backup back, or run {self._command('check')}` again"
        return read_sealed(self.check_path, _VERDICT, advice)

    def everything(self) -> list[tuple[str, Callable[[], object]]]:
        """Return the name of each file, and a function that reads all of it."""
        documents = {
            self._known_path: self._whole_state,
            self._document_path: self.document,
            self.check_path: self.check,
        }
        tensors = [(path, "generator", self._advice) for path in sorted(self.path.glob("*.safetensors"))]
        tensors += [(self._state_path(k), "checkpoint", self._advice_of(k)) for k in self.iterations()]
        return [
            *((path.name, read) for path, read in documents.items() if path.exists()),
            *((path.name, partial(load_tensors, path, what, advice)) for path, what, advice in tensors),
        ]

    def sample_path(self, iteration: int) -> Path:
        return self.path / "samples" / f"iteration_{iteration:07d}.png"

    def generator_path(self, phase: Phase) -> Path:
        """Return the file of a network."""
        return self.path / f"{phase}.safetensors"

    def save_generator(self, phase: Phase, generator: nn.Module) -> str:
        """Write a generator; return the digest of its file."""
        save_tensors(self.generator_path(phase), generator.state_dict(), {})
        return self.digest(phase)

    def digest(self, phase: Phase) -> str:
        """Return the SHA-256 of a generator's file, to which a verdict refers."""
        return _sha256(self.generator_path(phase))

    def load_generator(
        self, phase: Phase, build: Callable[[Mapping[str, Any]], _Network], device: torch.device
    ) -> _Network:
        """Return a generator, ready to make images.

        Args:
            build: makes a network from the shape in the document.

        Raises:
            WsiFlError: when it is missing, damaged, or of another shape than in the document.
        """
        path, document = self.generator_path(phase), self.document()
        if document is None or not path.exists():
            raise WsiFlError(f"{path}: no such generator; train it with `wsi-fl synthesize train`")
        try:
            generator = build(document["settings"]["shape"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = one_line(error)
            raise WsiFlError(f"{self._document_path}: damaged shape ({reason}); {self._advice}") from None
        what = f"generator, or not of the shape in {self._document_path.name}"
        _restore(path, what, self._advice, lambda tensors, _: generator.load_state_dict(tensors))
        return generator.to(device).requires_grad_(False).eval()

    def save_state(self, state: TrainingState) -> None:
        """Write a checkpoint and its digest, then delete all but the last two."""
        save_tensors(self._state_path(state.iteration), state.tensors(), state.document())
        kept = self.iterations()[-_KEPT:]
        known = self._known() | {state.iteration: _sha256(self._state_path(state.iteration))}
        write_sealed(self._known_path, {"sha256": {str(k): known[k] for k in kept if k in known}})
        for old in self.iterations()[:-_KEPT]:
            self._state_path(old).unlink()

    def load_state(self, state: TrainingState) -> bool:
        """Restore the newest checkpoint; return whether there is one.

        Raises:
            WsiFlError: when it is damaged, of another training, or replaced.
        """
        if not (found := self.iterations()):
            return False
        self._check_known(newest := found[-1])
        _restore(self._state_path(newest), "checkpoint", self._advice_of(newest), state.load)
        return True

    def lost(self) -> str:
        """Return a line about a missing newest checkpoint; "" if it exists.

        Raises:
            WsiFlError: when the digests of the checkpoints are damaged.
        """
        newest, last = max(self._known(), default=0), max(self.iterations(), default=0)
        if last >= newest:
            return ""
        then = f"iteration {last}, the newest that is left" if last else "the beginning, as no other is left"
        return f"{self._state_path(newest)}: this checkpoint is gone; training goes on from {then}"

    def _check_known(self, iteration: int) -> None:
        """Refuse a replaced checkpoint; one later than all digests was written just before a kill."""
        known, path = self._known(), self._state_path(iteration)
        if known and iteration <= max(known) and known.get(iteration) != _sha256(path):
            raise WsiFlError(f"{path}: not the checkpoint that was written; {self._advice_of(iteration)}")

    def _whole_state(self) -> bool:
        """Refuse replaced checkpoints, and a missing one of an unfinished training; return True."""
        for iteration in self.iterations():
            self._check_known(iteration)
        document = self.document()
        if (lost := self.lost()) and not (document and document["finished"]):
            raise WsiFlError(lost)
        return True

    @property
    def _known_path(self) -> Path:
        return self.path / "state" / "known.json"

    def _known(self) -> dict[int, str]:
        """Return iteration → SHA-256 of the checkpoints' files."""
        if not self._known_path.exists():
            return {}
        found = read_sealed(self._known_path, ["sha256"], "put its backup back, or delete it")["sha256"]
        return {int(iteration): str(digest) for iteration, digest in found.items()}

    def _advice_of(self, iteration: int) -> str:
        """Return the advice for a damaged checkpoint."""
        if [one for one in self.iterations() if one != iteration]:
            return "delete it, and training goes on from the other one"
        return self._advice

    def iterations(self) -> list[int]:
        """Return the iterations of all checkpoints, oldest first."""
        return sorted(
            int(path.stem.split("_")[1]) for path in (self.path / "state").glob("iteration_*.safetensors")
        )

    def _state_path(self, iteration: int) -> Path:
        return self.path / "state" / f"iteration_{iteration:07d}.safetensors"

    def log(self, line: Mapping[str, Any]) -> None:
        append_line(self.path / "metrics.jsonl", line)

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "metrics.jsonl", {"iteration": int})

    def forget_after(self, iteration: int) -> None:
        """Drop the lines of steps that will be repeated."""
        kept = [line for line in self.metrics() if line["iteration"] <= iteration]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
        write_text(self.path / "metrics.jsonl", text)


def everything_of(study: Study, site: str) -> Iterator[list[tuple[str, Callable[[], object]]]]:
    """Yield the files of each generator of a site for `check`, as its entry point `wsi_fl.checks`."""
    for kind in KINDS:
        folder = GeneratorFolder.of(study, site, kind)
        if folder.path.exists():
            yield folder.everything()


def _sha256(path: Path) -> str:
    with ordinary(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _restore(
    path: Path, what: str, advice: str, load: Callable[[dict[str, Tensor], dict[str, Any]], object]
) -> None:
    tensors, document = load_tensors(path, what, advice)
    try:
        load(tensors, document)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise WsiFlError(f"{path}: damaged {what} ({reason}); {advice}") from None
