"""User-supplied segmenters of artifacts: torchvision segmentation models with weights in safetensors.

The header of the file describes the model in one entry `segmenter` of JSON:

    {"architecture": "lraspp_mobilenet_v3_large", "classes": ["tissue", "pen", "fold"], "mpp": 2.0,
     "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}

Classes stand in the order of the model's channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError
from safetensors import SafetensorError, safe_open
from torch import nn

from wsi_fl.models.weights import read_weights
from wsi_fl.system.files import require_regular_file
from wsi_fl.types import WsiFlError, single_line

_BATCH_PX = 1 << 20  # pixels per forward pass


class _SegmenterMetadata(BaseModel):
    """Metadata of a segmenter file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    architecture: str
    classes: Annotated[tuple[str, ...], Field(min_length=2, max_length=256)]
    mpp: float = Field(ge=0.05, le=100)
    mean: Annotated[tuple[float, ...], Field(min_length=3, max_length=3)] = (0.485, 0.456, 0.406)
    std: Annotated[tuple[PositiveFloat, ...], Field(min_length=3, max_length=3)] = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class TorchvisionSegmenter:
    """A model of the class of each pixel of a patch at `mpp` µm per pixel; `classes` are its channels in order."""

    classes: tuple[str, ...]
    mpp: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    model: nn.Module

    @torch.inference_mode()
    def shares(self, patches: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the share float32[b, n_classes] of each class in the patches uint8[b, h, w, 3]."""
        n, height, width, _ = patches.shape
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        step = max(1, _BATCH_PX // (height * width))
        out = np.zeros((n, len(self.classes)), np.float32)
        for first in range(0, n, step):
            chunk = torch.from_numpy(patches[first : first + step]).permute(0, 3, 1, 2).float() / 255
            predictions = self.model((chunk - mean) / std)["out"].argmax(1).flatten(1)
            counts = [(predictions == k).float().mean(1).numpy() for k in range(len(self.classes))]
            out[first : first + step] = np.stack(counts, 1)
        return out


def load_segmenter(path: Path) -> TorchvisionSegmenter:
    """Load a segmenter from a safetensors file.

    Raises:
        WsiFlError: when the file is missing or damaged, lacks its metadata, or its weights do not fit these.
    """
    metadata, state = _read_metadata(path), read_weights(path)
    from torchvision.models import get_model, list_models, segmentation

    architectures = list_models(segmentation)
    if metadata.architecture not in architectures:
        raise WsiFlError(f"{path}: architecture {metadata.architecture!r} is none of {', '.join(architectures)}")
    options: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": len(metadata.classes)}
    if not metadata.architecture.startswith("lraspp"):
        options["aux_loss"] = any(name.startswith("aux_classifier.") for name in state)
    model = get_model(metadata.architecture, **options)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise WsiFlError(
            f"{path}: its weights are not those of {metadata.architecture} with {len(metadata.classes)} classes "
            f"({single_line(error)[:160]})"
        ) from None
    return TorchvisionSegmenter(metadata.classes, metadata.mpp, metadata.mean, metadata.std, model.eval())


def _read_metadata(path: Path) -> _SegmenterMetadata:
    try:
        with safe_open(require_regular_file(path), "np") as file:
            text = (file.metadata() or {}).get("segmenter")
    except (SafetensorError, OSError) as error:
        raise WsiFlError(f"{path}: not a readable safetensors file ({single_line(error)})") from None
    if text is None:
        raise WsiFlError(f"{path}: its header has no entry `segmenter`; see docs/how-to/prepare-data.md")
    try:
        return _SegmenterMetadata.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "document"
        raise WsiFlError(f"{path}: entry `segmenter` of its header: {place}: {first['msg']}") from None
