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

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from wsi_fl.system.files import append_line, file_sha256, read_lines, read_sealed, write_sealed, write_text
from wsi_fl.system.tensors import load_tensors, save_tensors
from wsi_fl.types import WsiFlError, single_line

if TYPE_CHECKING:  # `check` does not need PyTorch
    import torch
    from torch import Tensor, nn

    from wsi_fl.study.folder import Study
    from wsi_fl.synthesis.training_state import TrainingState

Phase = Literal["before", "after", "denoiser"]
"""The network of a training: a GAN's without, or with, the privacy loss, or that of a diffusion model."""
Document = dict[str, Any]
"""A document of a generator: of its training or its check."""
_Network = TypeVar("_Network", bound="nn.Module")

KINDS = ("gan", "ddpm")
"""The kinds of generators."""
_N_CHECKPOINTS = 2
_VERDICT_KEYS = ("passed", "reasons", "generator", "criteria")
_DOCUMENT_KEYS = ("site", "settings", "store", "phases", "finished")


class GeneratorFolder:
    """The folder of one site's generator of a kind, "gan" or "ddpm"; its document has that name."""

    def __init__(self, path: Path, kind: str = "gan") -> None:
        self.path, self.kind = path, kind

    @staticmethod
    def find_folder(study: Study, site: str, kind: str) -> GeneratorFolder:
        """Return the folder of a site's generator of a kind, even before it exists."""
        return GeneratorFolder({"gan": study.generator_path, "ddpm": study.denoiser_path}[kind](site), kind)

    @property
    def _document_path(self) -> Path:
        return self.path / f"{self.kind}.json"

    @property
    def check_path(self) -> Path:
        return self.path / "check.json"

    def read_document(self) -> Document | None:
        """Return the document of the training; None before it has begun.

        Raises:
            WsiFlError: when it is damaged.
        """
        path = self._document_path
        return read_sealed(path, _DOCUMENT_KEYS, self._repair_advice) if path.exists() else None

    def write_document(self, document: Mapping[str, Any]) -> None:
        """Write the document of the training, and a digest of it."""
        write_sealed(self._document_path, document)

    @property
    def _repair_advice(self) -> str:
        return f"put its backup back, or make it anew with {self._command_text('train')} --again`"

    def _command_text(self, verb: str) -> str:
        return f"`wsi-fl synthesize {verb} --site {self.path.name} --generator {self.kind}"

    def read_check(self) -> Document | None:
        """Return the verdict; None before the first check.

        Raises:
            WsiFlError: when it is damaged.
        """
        if not self.check_path.exists():
            return None
        advice = f"put its backup back, or run {self._command_text('check')}` again"
        return read_sealed(self.check_path, _VERDICT_KEYS, advice)

    def list_files(self) -> list[tuple[str, Callable[[], object]]]:
        """Return the name of each file, and a function that reads all of it."""
        documents = {
            self._digests_path: self._check_state,
            self._document_path: self.read_document,
            self.check_path: self.read_check,
        }
        tensors = [(path, "generator", self._repair_advice) for path in sorted(self.path.glob("*.safetensors"))]
        tensors += [(self._state_path(k), "checkpoint", self._checkpoint_advice(k)) for k in self.list_iterations()]
        return [
            *((path.name, read) for path, read in documents.items() if path.exists()),
            *((path.name, partial(load_tensors, path, subject, advice)) for path, subject, advice in tensors),
        ]

    def sample_path(self, iteration: int) -> Path:
        return self.path / "samples" / f"iteration_{iteration:07d}.png"

    def generator_path(self, phase: Phase) -> Path:
        """Return the file of a network."""
        return self.path / f"{phase}.safetensors"

    def save_generator(self, phase: Phase, generator: nn.Module) -> str:
        """Write a generator; return the digest of its file."""
        save_tensors(self.generator_path(phase), generator.state_dict(), {})
        return self.compute_digest(phase)

    def compute_digest(self, phase: Phase) -> str:
        """Return the SHA-256 of a generator's file, to which a verdict refers."""
        return file_sha256(self.generator_path(phase))

    def load_generator(
        self, phase: Phase, build: Callable[[Mapping[str, Any]], _Network], device: torch.device
    ) -> _Network:
        """Return a generator, ready to make images.

        Args:
            build: makes a network from the shape in the document.

        Raises:
            WsiFlError: when it is missing, damaged, or of another shape than in the document.
        """
        path, document = self.generator_path(phase), self.read_document()
        if document is None or not path.exists():
            raise WsiFlError(f"{path}: no such generator; train it with `wsi-fl synthesize train`")
        try:
            generator = build(document["settings"]["shape"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = single_line(error)
            raise WsiFlError(f"{self._document_path}: damaged shape ({reason}); {self._repair_advice}") from None
        subject = f"generator, or not of the shape in {self._document_path.name}"
        _restore_tensors(path, subject, self._repair_advice, lambda tensors, _: generator.load_state_dict(tensors))
        return generator.to(device).requires_grad_(False).eval()

    def save_state(self, state: TrainingState) -> None:
        """Write a checkpoint and its digest, then delete all but the last two."""
        save_tensors(self._state_path(state.iteration), state.copy_tensors(), state.build_document())
        iterations = self.list_iterations()[-_N_CHECKPOINTS:]
        digests = self._read_digests() | {state.iteration: file_sha256(self._state_path(state.iteration))}
        write_sealed(self._digests_path, {"sha256": {str(k): digests[k] for k in iterations if k in digests}})
        for iteration in self.list_iterations()[:-_N_CHECKPOINTS]:
            self._state_path(iteration).unlink()

    def load_state(self, state: TrainingState) -> bool:
        """Restore the newest checkpoint; return whether there is one.

        Raises:
            WsiFlError: when it is damaged, of another training, or replaced.
        """
        if not (iterations := self.list_iterations()):
            return False
        self._check_known(newest := iterations[-1])
        _restore_tensors(self._state_path(newest), "checkpoint", self._checkpoint_advice(newest), state.load)
        return True

    def find_lost_checkpoint(self) -> str:
        """Return a line about a missing newest checkpoint; "" if it exists.

        Raises:
            WsiFlError: when the digests of the checkpoints are damaged.
        """
        newest, last = max(self._read_digests(), default=0), max(self.list_iterations(), default=0)
        if last >= newest:
            return ""
        resume_point = f"iteration {last}, the newest that is left" if last else "the beginning, as no other is left"
        return f"{self._state_path(newest)}: this checkpoint is gone; training goes on from {resume_point}"

    def _check_known(self, iteration: int) -> None:
        """Refuse a replaced checkpoint; one later than all digests was written just before a kill."""
        digests, path = self._read_digests(), self._state_path(iteration)
        if digests and iteration <= max(digests) and digests.get(iteration) != file_sha256(path):
            raise WsiFlError(f"{path}: not the checkpoint that was written; {self._checkpoint_advice(iteration)}")

    def _check_state(self) -> bool:
        """Refuse replaced checkpoints, and a missing one of an unfinished training; return True."""
        for iteration in self.list_iterations():
            self._check_known(iteration)
        document = self.read_document()
        if (problem := self.find_lost_checkpoint()) and not (document and document["finished"]):
            raise WsiFlError(problem)
        return True

    @property
    def _digests_path(self) -> Path:
        return self.path / "state" / "known.json"

    def _read_digests(self) -> dict[int, str]:
        """Return iteration → SHA-256 of the checkpoints' files."""
        if not self._digests_path.exists():
            return {}
        digests = read_sealed(self._digests_path, ["sha256"], "put its backup back, or delete it")["sha256"]
        return {int(iteration): str(digest) for iteration, digest in digests.items()}

    def _checkpoint_advice(self, iteration: int) -> str:
        """Return the advice for a damaged checkpoint."""
        if [other for other in self.list_iterations() if other != iteration]:
            return "delete it, and training goes on from the other one"
        return self._repair_advice

    def list_iterations(self) -> list[int]:
        """Return the iterations of all checkpoints, oldest first."""
        return sorted(int(path.stem.split("_")[1]) for path in (self.path / "state").glob("iteration_*.safetensors"))

    def _state_path(self, iteration: int) -> Path:
        return self.path / "state" / f"iteration_{iteration:07d}.safetensors"

    def log_metrics(self, line: Mapping[str, Any]) -> None:
        append_line(self.path / "metrics.jsonl", line)

    def read_metrics(self) -> list[Document]:
        return read_lines(self.path / "metrics.jsonl", {"iteration": int})

    def forget_after(self, iteration: int) -> None:
        """Drop the lines of steps that will be repeated."""
        lines = [line for line in self.read_metrics() if line["iteration"] <= iteration]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_text(self.path / "metrics.jsonl", text)


def list_generator_files(study: Study, site: str) -> Iterator[list[tuple[str, Callable[[], object]]]]:
    """Yield the files of each generator of a site for `check`, as its entry point `wsi_fl.checks`."""
    for kind in KINDS:
        folder = GeneratorFolder.find_folder(study, site, kind)
        if folder.path.exists():
            yield folder.list_files()


def _restore_tensors(
    path: Path, subject: str, advice: str, load: Callable[[dict[str, Tensor], Document], object]
) -> None:
    tensors, document = load_tensors(path, subject, advice)
    try:
        load(tensors, document)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise WsiFlError(f"{path}: damaged {subject} ({reason}); {advice}") from None
