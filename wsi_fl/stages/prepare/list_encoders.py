"""`wsi-fl encoders`: list the published encoders with their properties and local weights."""

from __future__ import annotations

import os
from typing import TypedDict

from wsi_fl.models.presets import PRESETS
from wsi_fl.stages.runtime.console import Lines, TextLine, TextTable
from wsi_fl.stages.runtime.rank_job import select_device
from wsi_fl.stages.site.encoders import find_local_weights
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import UsageError


class _EncoderRow(TypedDict):
    """An encoder, where its weights are on this machine (None for nowhere), and whether it fits into its memory."""

    name: str
    n_features: int
    px: int | None
    mpp: list[float]
    parameters: int
    licence: str
    hub: str
    pooling: str
    mean: list[float]
    sd: list[float]
    interpolation: str
    weights: str | None
    needed_bytes: int
    fits: bool


class _EncodersDocument(TypedDict):
    """The document of `encoders`."""

    encoders: list[_EncoderRow]
    memory_bytes: int


def list_encoders(study: Study | None, pipeline_name: str | None = None) -> _EncodersDocument:
    """List the presets; return the `--json` document.

    Args:
        study: its pipeline may name files of weights; None without a study.
    """
    pipeline = _load_pipeline(study, pipeline_name) if study else None
    memory = _total_memory()
    rows: list[_EncoderRow] = []
    for name, preset in PRESETS.items():
        weights = find_local_weights(name, study, pipeline)
        rows.append(
            {
                "name": name,
                "n_features": preset.n_features,
                "px": preset.transform.px,
                "mpp": list(preset.mpp),
                "parameters": preset.n_parameters,
                "licence": preset.licence,
                "hub": preset.hub_id,
                "pooling": preset.pooling,
                "mean": list(preset.transform.mean),
                "sd": list(preset.transform.sd),
                "interpolation": preset.transform.interpolation,
                "weights": str(weights) if weights else None,
                "needed_bytes": preset.memory_bytes,
                "fits": preset.memory_bytes <= memory,
            }
        )
    return {"encoders": rows, "memory_bytes": memory}


def _load_pipeline(study: Study, name: str | None) -> Pipeline | None:
    try:
        return study.load_pipeline(study.pipeline_name(name))
    except UsageError:
        if name:
            raise
        return None


def _total_memory() -> int:
    """Return the total memory of this machine, or of its GPU if smaller, in bytes."""
    import torch

    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = select_device()
    return host if device.type == "cpu" else min(host, int(torch.cuda.mem_get_info(device)[1]))


def render_encoder_lines(document: _EncodersDocument) -> Lines:
    """Yield a table with a row per preset."""
    rows: list[list[object] | None] = [
        [
            row["name"],
            row["n_features"],
            row["px"],
            ", ".join(f"{mpp:g}" for mpp in row["mpp"]) or "not stated",
            f"{row['parameters'] / 1e6:.0f} M",
            row["licence"],
            ("here" if row["weights"] else "") + ("" if row["fits"] else " too large for this machine"),
        ]
        for row in document["encoders"]
    ]
    yield TextTable("encoders", ["name", "d", "px", "µm/px", "parameters", "licence", "weights"], rows)
    yield TextLine(
        "any other model of timm works by its name; use one with --set features.encoder=NAME, or mosaic.encoder"
    )
    yield TextLine("weights are fetched from the hub with your own token, or features.weights names a file")
