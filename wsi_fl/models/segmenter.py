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
from wsi_fl.system.files import ordinary
from wsi_fl.types import WsiFlError, one_line

_PX_AT_ONCE = 1 << 20  # pixels per forward pass


class _Facts(BaseModel):
    """Metadata of a segmenter file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    architecture: str
    classes: Annotated[tuple[str, ...], Field(min_length=2, max_length=256)]
    mpp: float = Field(ge=0.05, le=100)
    mean: Annotated[tuple[float, ...], Field(min_length=3, max_length=3)] = (0.485, 0.456, 0.406)
    std: Annotated[tuple[PositiveFloat, ...], Field(min_length=3, max_length=3)] = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Segmenter:
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
        mean, std = (torch.tensor(of)[:, None, None] for of in (self.mean, self.std))
        step = max(1, _PX_AT_ONCE // (height * width))
        out = np.zeros((n, len(self.classes)), np.float32)
        for first in range(0, n, step):
            some = torch.from_numpy(patches[first : first + step]).permute(0, 3, 1, 2).float() / 255
            found = self.model((some - mean) / std)["out"].argmax(1).flatten(1)
            counts = [(found == k).float().mean(1).numpy() for k in range(len(self.classes))]
            out[first : first + step] = np.stack(counts, 1)
        return out


def load_segmenter(path: Path) -> Segmenter:
    """Load a segmenter from a safetensors file.

    Raises:
        WsiFlError: when the file is missing or damaged, lacks its metadata, or its weights do not fit these.
    """
    facts, state = _facts(path), read_weights(path)
    from torchvision.models import get_model, list_models, segmentation

    known = list_models(segmentation)
    if facts.architecture not in known:
        raise WsiFlError(f"{path}: architecture {facts.architecture!r} is none of {', '.join(known)}")
    plain: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": len(facts.classes)}
    if not facts.architecture.startswith("lraspp"):
        plain["aux_loss"] = any(name.startswith("aux_classifier.") for name in state)
    model = get_model(facts.architecture, **plain)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise WsiFlError(
            f"{path}: its weights are not those of {facts.architecture} with {len(facts.classes)} classes "
            f"({one_line(error)[:160]})"
        ) from None
    return Segmenter(facts.classes, facts.mpp, facts.mean, facts.std, model.eval())


def _facts(path: Path) -> _Facts:
    try:
        with safe_open(ordinary(path), "np") as file:
            said = (file.metadata() or {}).get("segmenter")
    except (SafetensorError, OSError) as error:
        raise WsiFlError(f"{path}: not a readable safetensors file ({one_line(error)})") from None
    if said is None:
        raise WsiFlError(
            f"{path}: its header has no entry `segmenter`; docs/quality.md shows how to write it"
        )
    try:
        return _Facts.model_validate_json(said)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "document"
        raise WsiFlError(f"{path}: entry `segmenter` of its header: {where}: {first['msg']}") from None
