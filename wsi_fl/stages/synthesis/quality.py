"""FID and KID of sets of images against held-out ones, by the encoder of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.models.encoder import encode
from wsi_fl.stages.site.encoders import encoder_of
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.synthesis.evidence import LEAST_HELD_OUT, frechet_distance, kernel_distance
from wsi_fl.types import WsiFlError

_ENCODED = 64


def quality_of(
    study: Study, pipeline: Pipeline, held_out: Tensor, sets: Mapping[str, Tensor]
) -> tuple[dict[str, Any], str | None]:
    """({"encoder", "n", name: {"fid", "kid"}}, None), or ({}, why they could not be computed).

    Args:
        held_out: uint8[n, c, h, h]; of each set, of the same kind, as many are taken at most.
    """
    if len(held_out) < LEAST_HELD_OUT:
        return {}, "FID and KID need held-out images"
    try:
        encoder = encoder_of(study, pipeline.encoding, torch.get_num_threads(), "features")
    except WsiFlError as error:
        return {}, f"FID and KID were not computed: {error}"

    def features(images: Tensor) -> NDArray[np.float32]:
        pixels = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
        return encode((pixels[k : k + _ENCODED] for k in range(0, len(pixels), _ENCODED)), encoder)

    target = features(held_out)
    rows: dict[str, Any] = {"encoder": encoder.label, "n": len(held_out)}
    for name, images in sets.items():
        mine = features(images[: len(held_out)])
        rows[name] = {"fid": frechet_distance(mine, target), "kid": kernel_distance(mine, target)}
    return rows, None
