"""What a site keeps of its diffusion model: `denoisers/<site>/`, like a GAN's folder and as safely.

ddpm.json                   settings, classes, digest of the denoiser, whether training has finished
denoiser.safetensors        the moving average of the denoiser at the end
state/                      the last two checkpoints of the training
metrics.jsonl  samples/     losses and pictures on the way
check.json  check/          the verdict and its pictures
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from wsi_fl.synthesis.ddpm import DdpmShape, Denoiser, build_denoiser
from wsi_fl.synthesis.folder import GeneratorFolder, save_tensors
from wsi_fl.types import WsiFlError


class DenoiserFolder(GeneratorFolder):
    """`denoisers/<site>`."""

    name: ClassVar[str] = "ddpm.json"

    @property
    def denoiser_path(self) -> Path:
        return self.path / "denoiser.safetensors"

    def save_denoiser(self, denoiser: Denoiser) -> str:
        """Writes the denoiser; returns the digest of its file."""
        save_tensors(self.denoiser_path, denoiser.state_dict(), {})
        return self.denoiser_digest()

    def denoiser_digest(self) -> str:
        """SHA-256 of the denoiser's file: what a verdict is about."""
        return hashlib.sha256(self.denoiser_path.read_bytes()).hexdigest()

    def load_denoiser(self, device: torch.device) -> tuple[Denoiser, DdpmShape]:
        """The denoiser, ready to draw, and its shape.

        Raises:
            WsiFlError: when it is missing, damaged, or of another shape than ddpm.json says.
        """
        path, document = self.denoiser_path, self.document()
        if document is None or not path.exists():
            raise WsiFlError(
                f"{path}: no such denoiser; train it with `wsi-fl synthesize train --generator ddpm`"
            )
        shape = shape_from(document["settings"]["shape"])
        denoiser = build_denoiser(shape)
        try:
            denoiser.load_state_dict(load_file(path))
        except (SafetensorError, RuntimeError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise WsiFlError(f"{path}: damaged or not of the shape that ddpm.json says ({reason})") from None
        return denoiser.to(device).requires_grad_(False).eval(), shape


def shape_from(document: Mapping[str, Any]) -> DdpmShape:
    """The shape that JSON tells."""
    return DdpmShape(**{**document, "widths": tuple(document["widths"])})
