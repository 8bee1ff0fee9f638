"""The encoder of a pipeline's features."""

from __future__ import annotations

from wsi_fl.models.encoder import Encoder
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.preparing import Mosaic


def encoder_of(study: Study, settings: Mosaic, threads: int, section: str = "mosaic") -> Encoder:
    """The encoder of these settings on this rank's device and share of cores.

    Args:
        section: of the configuration that they are from.
    """
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), threads))
    weights = study.resolve(settings.weights) if settings.weights else None
    how = {"input_px": settings.input_px, "batch_size": settings.batch_size, "section": section}
    return Encoder(settings.encoder, weights, **how, device=device_of_rank())  # type: ignore[arg-type]
